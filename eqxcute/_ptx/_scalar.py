"""Instructions of one lane that are not plain functions of their operands: moves, address
conversions, comparisons with two results, carries, fences, and printing."""

import re

import numpy as np

from ._alu import integer_product, predicate
from ._fault import Misstep, Unsupported
from ._machine import generic_window
from ._memory import FIRST_ARRAY, LOCAL, REGION_BITS, SHARED
from ._parse import SINK, Pair, Reg, Special, Sym, Vec
from ._table import plain
from ._types import UNSIGNED, reader, to_bits, width, writer


@plain("mov")
def _mov(ins, kernel):
    name = ins.mods[-1]
    target, source = ins.args
    if name == "b128":
        raise Unsupported("128-bit registers")
    if isinstance(target, Vec):
        return _unpack(target.items, source, name)
    if isinstance(source, Vec):
        return _pack(target, source.items, name)
    if isinstance(source, Sym) and source.name in {p.name for p in kernel.params}:
        name = "b64"
    get, put = reader(source, name), writer(target, name)
    return lambda m: put(m, get(m))


def _pack(target, parts, name):
    """The first part goes to the lowest bits."""
    size = width(name) // len(parts)
    gets = [reader(p, f"b{8 * size}") for p in parts]
    put = writer(target, f"b{8 * width(name)}")
    wide = UNSIGNED[width(name)]

    def run(m):
        out = gets[0](m).astype(wide)
        for j, get in enumerate(gets[1:], 1):
            out = out | (get(m).astype(wide) << wide.type(8 * size * j))
        put(m, out)

    return run


def _unpack(targets, source, name):
    size = width(name) // len(targets)
    get = reader(source, f"b{8 * width(name)}")
    puts = [writer(t, f"b{8 * size}") for t in targets]
    wide, part = UNSIGNED[width(name)], UNSIGNED[size]

    def run(m):
        value = get(m)
        for j, put in enumerate(puts):
            put(m, (value >> wide.type(8 * size * j)).astype(part))

    return run


@plain("cvta")
def _cvta(ins, kernel):
    back = "to" in ins.mods
    space = next(
        (m for m in ins.mods if m in ("global", "const", "shared", "local", "param")), None
    )
    if space is None or ins.mods[-1] != "u64":
        raise Unsupported(f"cvta of {'.'.join(ins.mods[1:])}")
    window = np.uint64(generic_window(space))
    get, put = reader(ins.args[1], "b64"), writer(ins.args[0], "b64")
    if back:
        return lambda m: put(m, get(m) - window)
    return lambda m: put(m, get(m) + window)


@plain("isspacep")
def _isspacep(ins, kernel):
    space = ins.mods[1]
    get, put = reader(ins.args[1], "b64"), writer(ins.args[0], "pred")

    def run(m):
        region = get(m) >> np.uint64(REGION_BITS)
        if space == "global":
            put(m, region >= FIRST_ARRAY)
        else:
            put(m, region == {"shared": SHARED, "shared::cta": SHARED, "local": LOCAL}.get(space))

    return run


@plain("setp")
def _setp(ins, kernel):
    name, combine, run = predicate(ins)
    target = ins.args[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    sources = [name, name] + ([] if combine is None else ["pred"])
    if len(sources) != len(ins.args) - 1:
        raise Unsupported(f"{len(ins.args) - 1} operands")
    gets = [reader(a, n) for a, n in zip(ins.args[1:], sources, strict=True)]
    put = writer(first, "pred")
    if second is None:
        return lambda m: put(m, run(*(get(m) for get in gets)))
    other = writer(second, "pred")

    def both(m):
        values = [get(m) for get in gets]
        plain_result = run(*values[:2])
        if plain_result.ndim == 2:  # a packed type: one predicate a half
            put(m, plain_result[:, 0])
            other(m, plain_result[:, 1])
        elif combine is None:
            put(m, plain_result)
            other(m, ~plain_result)
        else:
            put(m, combine(plain_result, values[2]))
            other(m, combine(~plain_result, values[2]))

    return both


# ---------------------------------------------------------------- carries


@plain("addc", "subc", "add.cc", "sub.cc")
def _with_carry(ins, kernel):
    """Sums of more than a word: the carry, or the borrow, goes from one to the next."""
    size = width(ins.mods[-1])
    a, b = (reader(arg, f"b{8 * size}") for arg in ins.args[1:])
    put = writer(ins.args[0], f"b{8 * size}")
    adds, takes, gives = ins.mods[0][:3] == "add", ins.mods[0][3:] == "c", "cc" in ins.mods

    def run(m):
        x, y = m.spread(a(m)), m.spread(b(m))
        carry = m.carry.astype(x.dtype) if takes else np.zeros_like(x)
        if adds:
            out, over = _sum_with_carry(x, y, carry)
        else:
            first = x - y
            out = first - carry
            over = (x < y) | (first < carry)
        put(m, out)
        if gives:
            _give_carry(m, over)

    return run


def _sum_with_carry(x, y, carry):
    first = x + y
    out = first + carry
    return out, (first < x) | (out < first)


def _give_carry(m, over) -> None:
    m.carry = over if m.mask is None else np.where(m.mask, over, m.carry)


@plain("madc", "mad.cc")
def _mad_with_carry(ins, kernel):
    """Half of a product, plus a word, plus the carry: sums of products of more than a word."""
    which, name = ins.mods[1], ins.mods[-1]
    if which not in ("lo", "hi") or len(ins.args) != 4:
        raise Unsupported(f"the opcode {ins.op}")
    product, _ = integer_product(which, name)
    a, b = (reader(arg, name) for arg in ins.args[1:3])
    bits = f"b{8 * width(name)}"
    c, put = reader(ins.args[3], bits), writer(ins.args[0], bits)
    takes, gives = ins.mods[0] == "madc", "cc" in ins.mods

    def run(m):
        y = m.spread(c(m))
        x = m.spread(product(a(m), b(m)).view(y.dtype))
        carry = m.carry.astype(y.dtype) if takes else np.zeros_like(y)
        out, over = _sum_with_carry(x, y, carry)
        put(m, out)
        if gives:
            _give_carry(m, over)

    return run


# ---------------------------------------------------------------- order, hints


@plain("fence", "membar")
def _fence(ins, kernel):
    if "mbarrier_init" in ins.mods or ins.mods[1:3] == ("proxy", "async"):
        return lambda m: None if m.proxy is None else m.proxy.fence(m)
    if "proxy" in ins.mods:
        return lambda m: None
    return lambda m: m.clocks.fence(m.active)


@plain("nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent")
def _nothing(ins, kernel):
    """Has no effect on what is computed."""
    return lambda m: None


@plain("createpolicy")
def _createpolicy(ins, kernel):
    put = writer(ins.args[0], "b64")
    return lambda m: put(m, np.zeros(1, np.uint64))


@plain("trap")
def _trap(ins, kernel):
    def run(m):
        raise Misstep("trap: the kernel stopped itself", int(m.active[0]))

    return run


# ---------------------------------------------------------------- printf


@plain("call")
def _call(ins, kernel):
    (call,) = ins.args
    if call.name != "vprintf":
        raise Unsupported(f"a call of {call.name}")
    form, values = ((name, 0) for name in call.arguments)

    def run(m):
        for lane in m.active.tolist():
            text = _string(m, int(m.call_params[form][lane]))
            print(_formatted(m, lane, text, int(m.call_params[values][lane])), end="")
        for result in call.results:
            m.call_params[result, 0] = np.zeros(m.lanes, np.uint32)

    return run


def _string(m, address: int) -> str:
    array = m.glob.arrays[(address >> REGION_BITS) - FIRST_ARRAY]
    data = m.glob.bytes_of(array)[address - array.base :].tobytes()
    return data[: data.index(b"\0")].decode(errors="replace")


def _formatted(m, lane: int, text: str, address: int) -> str:
    """printf's format, the arguments being packed in local memory as C would."""
    at = (address & ((1 << REGION_BITS) - 1)) - m.local.base + lane * m.local.stride
    start, out, last = at, [], 0
    for match in re.finditer(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|z)?([diuxXcfeEgGaspo%])", text):
        out.append(text[last : match.start()])
        last = match.end()
        flags, length, kind = match.groups()
        if kind == "%":
            out.append("%")
            continue
        wide = kind in "feEgGasp" or length in ("l", "ll", "z")
        size = 8 if wide else 4
        at = start + -(-(at - start) // size) * size
        raw = m.local.store.data[at : at + size].tobytes()
        at += size
        if kind in "feEgGa":
            kind = "f" if kind == "a" else kind
            out.append(f"%{flags}{kind}" % np.frombuffer(raw, np.float64)[0])
        elif kind == "s":
            out.append(_string(m, int.from_bytes(raw, "little")))
        else:
            value = int.from_bytes(raw, "little", signed=kind in "di")
            kind = {"u": "d", "p": "x"}.get(kind, kind)
            out.append(f"%{flags}{kind}" % value)
    return "".join([*out, text[last:]])


__all__ = ["SINK", "Reg", "Special", "to_bits"]
