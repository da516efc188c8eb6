"""What each arithmetic instruction computes, as tables of array functions.

An entry of `TABLE` is given the instruction and returns `(function, result type, operand
types)`. The function takes one array an operand, of the dtype of its type, and returns one
of the result's. It must not change its arguments. Rows where no lane runs are computed too,
and thrown away by the caller: so nothing here may raise on strange values.
"""

import numpy as np

from . import _float
from ._fault import Unsupported
from ._types import UNSIGNED, dtype, is_float, is_signed, known, width

TABLE = {}


def operation(*names):
    """Registers a builder for the opcodes `names`."""

    def add(build):
        TABLE.update(dict.fromkeys(names, build))
        return build

    return add


def last_type(ins) -> str:
    name = ins.mods[-1]
    if not known(name):
        raise Unsupported(f"the type .{name}")
    return name


def rounding(ins) -> str:
    return next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp")), "rn")


def allow(ins, *names) -> None:
    """Refuses a modifier that is not in `names`: it would change the meaning."""
    for mod in ins.mods[1:-1]:
        if mod not in names:
            raise Unsupported(f"the modifier .{mod}")


def polish(function, ins, name: str):
    """Adds what `.ftz` and `.sat` ask for round a function on floats."""
    ftz = "ftz" in ins.mods and name in ("f32", "f16", "f16x2", "f32x2")
    sat = "sat" in ins.mods
    if not ftz and not sat:
        return function

    def polished(*args):
        if ftz:
            args = [_float.flush(a) for a in args]
        out = function(*args)
        if sat:
            out = _float.saturate(out)
        return _float.flush(out) if ftz else out

    return polished


# ---------------------------------------------------------------- float add, mul, fma


def _narrow_float(function, name: str):
    """A function on float32 arrays for 16-bit floats: exact in float32, rounded once."""
    target = dtype(name)

    def run(*args):
        return function(*(a.astype(np.float32) for a in args)).astype(target)

    return run


def _float_linear(ins, name: str, numpy_function, odd):
    mode = rounding(ins)
    if mode == "rn":
        if dtype(name).itemsize >= 4:
            return numpy_function
        return _narrow_float(numpy_function, name)
    if name == "f64":
        raise Unsupported(f"float64 with the rounding .{mode}")
    return lambda a, b: _float.narrow(odd(a, b), name, mode)


def _odd_product(a, b):
    return a.astype(np.float64) * b  # exact: 24 + 24 bits fit in 53


def _saturating(function, name: str):
    """Integer add or sub that stops at the ends of s32 (`.sat`)."""
    low, high = np.iinfo(dtype(name)).min, np.iinfo(dtype(name)).max

    def run(a, b):
        return np.clip(function(a.astype(np.int64), b.astype(np.int64)), low, high).astype("i4")

    return run


@operation("add", "sub")
def _add(ins):
    name, function = last_type(ins), np.add if ins.mods[0] == "add" else np.subtract
    if is_float(name):
        allow(ins, "rn", "rz", "rm", "rp", "ftz", "sat")

        def odd(a, b):
            return _float.odd_sum(a, b if function is np.add else -b)

        run = _float_linear(ins, name, function, odd)
        return polish(run, ins, name), name, (name, name)
    allow(ins, "sat", "wrap")
    if "sat" in ins.mods:
        if name != "s32":
            raise Unsupported(f"the modifier .sat on {name}")
        return _saturating(function, name), name, (name, name)
    return function, name, (name, name)


@operation("mul", "mul24")
def _mul(ins):
    name = last_type(ins)
    if is_float(name):
        allow(ins, "rn", "rz", "rm", "rp", "ftz", "sat")
        run = _float_linear(ins, name, np.multiply, _odd_product)
        return polish(run, ins, name), name, (name, name)
    which = ins.mods[1]
    if ins.mods[0] == "mul24" or which not in ("lo", "hi", "wide"):
        raise Unsupported(f"the opcode {ins.op}")
    run, result = integer_product(which, name)
    return run, result, (name, name)


def integer_product(which: str, name: str):
    """`mul.lo`, `mul.hi` or `mul.wide`: function and result type."""
    bits = 8 * width(name)
    if which == "lo":
        return np.multiply, name
    wide = name[0] + str(2 * bits)
    if which == "wide":
        target = dtype(wide)
        return lambda a, b: a.astype(target) * b.astype(target), wide
    if bits < 64:
        target, shift = dtype(wide), dtype(wide).type(bits)
        return lambda a, b: ((a.astype(target) * b.astype(target)) >> shift).astype(a.dtype), name
    return _high64_signed if is_signed(name) else _high64, name


def _high64(a, b):
    """The upper 64 of 128 bits, from four 32-bit products."""
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> s, b & low, b >> s
    middle = a1 * b0 + ((a0 * b0) >> s)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> s) + (other >> s)


def _high64_signed(a, b):
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    high = _high64(ua, ub)
    zero = np.uint64(0)
    high = high - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
    return high.view(np.int64)


@operation("mad")
def _mad(ins):
    name = last_type(ins)
    if is_float(name):
        return _fma(ins)
    which = ins.mods[1]
    if which not in ("lo", "hi", "wide") or "sat" in ins.mods:
        raise Unsupported(f"the opcode {ins.op}")
    product, result = integer_product(which, name)
    return lambda a, b, c: product(a, b) + c, result, (name, name, result)


@operation("fma")
def _fma(ins):
    name, mode = last_type(ins), rounding(ins)
    allow(ins, "rn", "rz", "rm", "rp", "ftz", "sat", "relu")
    if name == "f64":
        if mode != "rn":
            raise Unsupported(f"float64 with the rounding .{mode}")
        run = _float.fma64
    elif name in ("f32", "f32x2") and mode == "rn":
        run = _float.fma32
    else:

        def run(a, b, c):
            return _float.narrow(_float.odd_fma(a, b, c), name, mode)

    if "relu" in ins.mods:
        run = _with_relu(run)
    return polish(run, ins, name), name, (name,) * 3


def _with_relu(run):
    top = _float.extreme("max", True)

    def relu(a, b, c):
        out = run(a, b, c)
        return top(out, np.zeros_like(out))

    return relu


# ---------------------------------------------------------------- division and functions


def _integer_division(ins, name: str):
    """C's truncation. The result of dividing by zero is not defined: all bits set."""
    target = dtype(name)
    ones = np.array(-1, np.int64).astype(target)

    def run(a, b):
        zero = b == 0
        safe = np.where(zero, target.type(1), b)
        if not is_signed(name):
            q, r = a // safe, a % safe
        else:
            # Through the unsigned magnitudes: -2**31 has none that fits a signed number.
            u = UNSIGNED[target.itemsize]
            ua, ub = np.abs(a).view(u), np.abs(safe).view(u)
            q, r = (ua // ub).view(target), (ua % ub).view(target)
            q = np.where((a < 0) != (safe < 0), -q, q)
            r = np.where(a < 0, -r, r)
        return np.where(zero, ones, q) if ins.mods[0] == "div" else np.where(zero, a, r)

    return run


@operation("div", "rem")
def _div(ins):
    name = last_type(ins)
    if not is_float(name):
        return _integer_division(ins, name), name, (name, name)
    allow(ins, "rn", "approx", "full", "ftz")
    return polish(np.divide, ins, name), name, (name, name)


def _by_float64(function):
    """Wider than the hardware's own: right to the last bit, or nearly."""

    def run(x):
        return function(x.astype(np.float64)).astype(x.dtype)

    return run


UNARY_FLOAT = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "rcp": lambda x: 1.0 / x,
}


@operation(*UNARY_FLOAT)
def _unary_float(ins):
    name = last_type(ins)
    allow(ins, "rn", "approx", "ftz")
    run = _by_float64(UNARY_FLOAT[ins.mods[0]])
    return polish(lambda x: _float.canonical_nan(run(x)), ins, name), name, (name,)


# ---------------------------------------------------------------- sign, extremes, compare


def _float_sign(name: str, which: str):
    """On the bits, so that NaN keeps its payload and -0 its sign."""
    unsigned = UNSIGNED[dtype(name).itemsize]
    top = np.array(1 << (8 * unsigned.itemsize - 1), unsigned)

    def run(x):
        bits = x.view(unsigned)
        return (bits ^ top if which == "neg" else bits & ~top).view(x.dtype)

    return run


@operation("neg", "abs")
def _sign(ins):
    name, which = last_type(ins), ins.mods[0]
    if is_float(name):
        allow(ins, "ftz")
        return polish(_float_sign(name, which), ins, name), name, (name,)
    return (np.negative if which == "neg" else np.abs), name, (name,)


@operation("copysign")
def _copysign(ins):
    name = last_type(ins)  # the first operand has the sign
    return lambda a, b: np.copysign(b, a), name, (name, name)


@operation("min", "max")
def _extreme(ins):
    name, which = last_type(ins), ins.mods[0]
    if not is_float(name):
        allow(ins, "relu")
        take = np.minimum if which == "min" else np.maximum
        if "relu" not in ins.mods:
            return take, name, (name, name)
        if name != "s32":
            raise Unsupported(f"the modifier .relu on {name}")
        return (lambda a, b: np.maximum(take(a, b), np.int32(0))), name, (name, name)
    allow(ins, "NaN", "ftz")
    pick = _float.extreme(which, "NaN" in ins.mods)

    def run(first, *more):  # sm_100 has a form with three
        for other in more:
            first = pick(first, other)
        return first

    return polish(run, ins, name), name, (name,) * (len(ins.args) - 1)


_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(which: str, name: str):
    """A function of two arrays of `name` that gives a bool array."""
    if which == "num":
        return lambda a, b: (a == a) & (b == b)
    if which == "nan":
        return lambda a, b: (a != a) | (b != b)
    if which in _UNORDERED:
        plain = _COMPARE[_UNORDERED[which]]
        return lambda a, b: plain(a, b) | (a != a) | (b != b)
    if which not in _COMPARE:
        raise Unsupported(f"the comparison .{which}")
    plain = _COMPARE[which]
    if which == "ne" and is_float(name):  # ordered: false if one is NaN
        return lambda a, b: (a < b) | (a > b)
    return plain


BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def predicate(ins):
    """For `setp` and `set`: the operand type and a function of (a, b[, c])."""
    name, which = last_type(ins), ins.mods[1]
    compare = comparison(which, name)
    combine = next((BOOLEAN[m] for m in ins.mods[2:] if m in BOOLEAN), None)
    ftz = "ftz" in ins.mods and name == "f32"

    def run(a, b, c=None):
        if ftz:
            a, b = _float.flush(a), _float.flush(b)
        out = compare(a, b)
        if c is None:
            return out
        if combine is None:
            raise RuntimeError(
                f"Internal error: {ins.op} has a third operand but no .and, .or or .xor."
            )
        return combine(out, c)

    return name, combine, run


@operation("set")
def _set(ins):
    name, combine, run = predicate(ins)
    result = next(m for m in ins.mods[2:] if known(m))
    ones = np.array(1, dtype(result)) if is_float(result) else np.array(-1).astype(dtype(result))
    zero = np.zeros((), dtype(result))

    def value(*args):
        return np.where(run(*args), ones, zero)

    sources = (name, name) if combine is None else (name, name, "pred")
    return value, result, sources


@operation("selp")
def _selp(ins):
    name = last_type(ins)
    return lambda a, b, p: np.where(p, a, b), name, (name, name, "pred")


@operation("slct")
def _slct(ins):
    name, chooser = ins.mods[-2], ins.mods[-1]
    return lambda a, b, c: np.where(c >= 0, a, b), name, (name, name, chooser)


@operation("testp")
def _testp(ins):
    name, which = last_type(ins), ins.mods[1]
    tiny = np.finfo(dtype(name)).tiny
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: x == x,
        "notanumber": lambda x: x != x,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    return tests[which], "pred", (name,)


# ---------------------------------------------------------------- bits


@operation("and", "or", "xor")
def _logic(ins):
    name = last_type(ins)
    bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return bitwise[ins.mods[0]], name, (name, name)


@operation("not")
def _not(ins):
    return np.invert, last_type(ins), (last_type(ins),)


@operation("cnot")
def _cnot(ins):
    name = last_type(ins)
    return lambda x: (x == 0).astype(x.dtype), name, (name,)


@operation("shl", "shr")
def _shift(ins):
    name, left = last_type(ins), ins.mods[0] == "shl"
    if left:
        name = "b" + name[1:]
    bits = 8 * width(name)
    target = dtype(name)
    function = np.left_shift if left else np.right_shift

    def run(a, n):
        if is_signed(name):  # a shift by more than the width gives the sign
            return function(a, np.minimum(n, bits - 1).astype(target))
        over = n >= bits
        out = function(a, np.where(over, 0, n).astype(target))
        return np.where(over, target.type(0), out) if over.any() else out

    return run, name, (name, "u32")


@operation("shf")
def _funnel(ins):
    direction, mode = ins.mods[1], ins.mods[2]

    def run(low, high, n):
        n = (np.minimum(n, 32) if mode == "clamp" else n & 31).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        if direction == "r":
            return (both >> n).astype(np.uint32)
        # Left by n is the upper half of (both << n): what is left of 64 - n bits.
        return ((both << n) >> np.uint64(32)).astype(np.uint32)

    return run, "b32", ("b32", "b32", "u32")


@operation("bfe")
def _bfe(ins):
    name = last_type(ins)
    bits = 8 * width(name)
    u = UNSIGNED[width(name)]

    def run(a, position, length):
        position = (position & 0xFF).astype(np.int64)
        length = (length & 0xFF).astype(np.int64)
        value = a.view(u)
        shifted = np.where(position < bits, value >> np.minimum(position, bits - 1).astype(u), 0)
        mask = _low_ones(length, bits, u)
        out = shifted.astype(u) & mask
        if is_signed(name):
            mask = _low_ones(np.clip(bits - position, 0, length), bits, u)
            at = np.minimum(position + length - 1, bits - 1)
            sign = (value >> np.maximum(at, 0).astype(u)) & u.type(1)
            out = np.where((sign == 1) & (length > 0), out | ~mask, out)
        return out.view(a.dtype)

    return run, name, (name, "u32", "u32")


def _low_ones(count, bits: int, u):
    """`count` ones from the bottom, in unsigned integers `u` of `bits` bits."""
    full = u.type((1 << bits) - 1)
    part = (u.type(1) << np.minimum(count, bits - 1).astype(u)) - u.type(1)
    return np.where(count >= bits, full, part)


@operation("bfi")
def _bfi(ins):
    name = last_type(ins)
    bits, u = 8 * width(name), UNSIGNED[width(name)]

    def run(a, b, position, length):
        position = (position & 0xFF).astype(np.int64)
        length = (length & 0xFF).astype(np.int64)
        shift = np.minimum(position, bits - 1).astype(u)
        mask = _low_ones(length, bits, u) << shift
        out = (b & ~mask) | ((a << shift) & mask)
        return np.where(position < bits, out, b)

    return run, name, (name, name, "u32", "u32")


@operation("bmsk")
def _bmsk(ins):
    u = np.dtype("u4")

    def run(position, length):
        if "wrap" in ins.mods:
            position, length = position & 31, length & 31
        shift = np.minimum(position, 31).astype(u)
        out = _low_ones(length.astype(np.int64), 32, u) << shift
        return np.where(position < 32, out, u.type(0))

    return run, "b32", ("u32", "u32")


@operation("brev")
def _brev(ins):
    name = last_type(ins)

    def run(a):
        octets = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), a.dtype.itemsize)
        flipped = np.packbits(np.unpackbits(octets, axis=1)[:, ::-1], axis=1)
        return np.ascontiguousarray(flipped).view(a.dtype).reshape(len(a))

    return run, name, (name,)


def _popcount(a):
    return np.bitwise_count(a).astype(np.uint32)


def _smear(a):
    """Sets every bit below the highest one."""
    u = a.dtype
    for step in (1, 2, 4, 8, 16, 32):
        if step < 8 * u.itemsize:
            a = a | (a >> u.type(step))
    return a


@operation("popc")
def _popc(ins):
    return _popcount, "u32", (last_type(ins),)


@operation("clz")
def _clz(ins):
    name = last_type(ins)
    bits = 8 * width(name)
    return lambda a: np.uint32(bits) - _popcount(_smear(a)), "u32", (name,)


@operation("bfind")
def _bfind(ins):
    name = last_type(ins)
    u, bits = UNSIGNED[width(name)], 8 * width(name)

    def run(a):
        value = a.view(u)
        if is_signed(name):
            value = np.where(a < 0, ~value, value)
        highest = _popcount(_smear(value)) - np.uint32(1)  # no bit: 0 - 1 is all ones
        if "shiftamt" in ins.mods:
            return np.where(value == 0, highest, np.uint32(bits - 1) - highest)
        return highest

    return run, "u32", (name,)


@operation("lop3")
def _lop3(ins):
    if "pred" in ins.mods or len(ins.args) != 5:
        raise Unsupported(f"the opcode {ins.op} with a predicate")
    table = ins.args[4].value

    def run(a, b, c, _):
        out = np.zeros_like(a | b | c)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    return run, "b32", ("b32", "b32", "b32", "b32")


_PERMUTES = {  # selector's two low bits -> the four bytes, lowest first
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


@operation("prmt")
def _prmt(ins):
    mode = ins.mods[2] if len(ins.mods) > 2 else None
    eight = np.uint64(8)

    def pick(both, index):
        return (both >> (index.astype(np.uint64) * eight)) & np.uint64(0xFF)

    def run(a, b, selector):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        out = np.uint64(0)
        for i in range(4):
            if mode is None:
                nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
                byte = pick(both, nibble & 7)
                sign = np.where(byte >> np.uint64(7) == 1, np.uint64(0xFF), np.uint64(0))
                byte = np.where(nibble & 8 != 0, sign, byte)
            else:
                rows = np.array([row[i] for row in _PERMUTES[mode]], np.uint64)
                byte = pick(both, rows[selector & 3])
            out = out | (byte << np.uint64(8 * i))
        return out.astype(np.uint32)

    return run, "b32", ("b32", "b32", "b32")


@operation("dp4a", "dp2a")
def _dot(ins):
    """Four 8-bit products, or two of 16 by 8 bits, and a sum."""
    kinds = ins.mods[-2:]
    four = ins.mods[0] == "dp4a"
    half = 0 if four or "lo" in ins.mods else 2

    def parts(x, kind, size):
        return (
            np.ascontiguousarray(x)
            .view(f"{'i' if kind[0] == 's' else 'u'}{size}")
            .reshape(len(x), 4 // size)
        )

    def run(a, b, c):
        x, y = parts(a, kinds[0], 1 if four else 2), parts(b, kinds[1], 1)
        y = y if four else y[:, half : half + 2]
        return (x.astype(np.int64) * y).sum(1).astype(np.uint32) + c

    return run, "b32", ("b32", "b32", "b32")


@operation("sad")
def _sad(ins):
    name = last_type(ins)
    return lambda a, b, c: np.where(a > b, a - b, b - a) + c, name, (name,) * 3
