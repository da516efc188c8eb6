"""A kernel that evaluates programs and writes the value of every equation, and the oracle for it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import cutlass.cute as cute
import inline_numpy
import jax.numpy as jnp
import numpy as np
from inline_programs import taken
from scipy import special

import eqxcute
from eqxcute import testing
from eqxcute.inline import Argument, Code, _device, _emit, _table
from eqxcute.inline._code import Builder, constant

THREADS = 64


def every(code: Code) -> Code:
    """The code, all of whose equations are results."""
    return dataclasses.replace(code, results=tuple(range(len(code.equations))))


def computed(code: Code) -> list[int]:
    """The equations that are no arguments."""
    return [n for n, e in enumerate(code.equations) if e.op != "argument"]


def held(dtype: str) -> np.dtype:
    """How values are held: 16-bit floats in float32."""
    return np.dtype(np.float32 if dtype in ("float16", "bfloat16") else jnp.dtype(dtype))


def words(code: Code) -> int:
    """How many 32-bit words its values take."""
    return sum(1 + (held(code.equations[n].dtype).itemsize == 8) for n in computed(code))


class Evaluate(eqxcute.Kernel):
    """Every value of each of `codes`, as bits. One thread an element.

    Call it as `kernel(index, arguments, operands)`: `arange(n)`, the vectors by name, and the captured arrays. All codes
    have the same arguments and operands.
    """

    signature = "n, {}, {} -> rows n"
    codes: tuple[Code, ...] = eqxcute.static()
    rows: int = eqxcute.static()
    fast: bool | str = eqxcute.static(False)

    def out_dtypes(self, index, arguments, operands):
        return jnp.uint32

    @cute.jit
    def launch(self, stream, index, arguments, operands, out):
        self.kernel(index, arguments, operands, out).launch(
            grid=[cute.ceil_div(index.shape[0], THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, index, arguments, operands, out):
        cta, tid = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        i = cta * THREADS + tid
        if i < index.shape[0]:
            _write_all(self.codes, self.fast, arguments, operands, i, out)


def _write_all(codes, fast, arguments, operands, i, out):
    row = 0
    for code in codes:
        scalars = {a.name: arguments[a.name][i] for a in code.arguments}
        partial = _emit.bind(_emit.start(every(code), operands, fast=fast), **scalars)
        for n in computed(code):
            for word in _device.words(partial.values[n], code.equations[n].dtype):
                out[row, i] = word
                row += 1


class Quickly(Evaluate):
    """The same, without the assembler's optimisations: for the interpreter, which reads the PTX."""

    compile_options = "--opt-level 0"


def kernel_of(codes: Sequence[Code], fast: bool | str = False, base: type = Evaluate) -> Evaluate:
    return base(tuple(codes), sum(map(words, codes)), fast)


def call(
    kernel: Evaluate,
    arguments: Mapping[str, np.ndarray],
    operands: Sequence[np.ndarray],
    run: Any,
) -> list[list[np.ndarray]]:
    """For each code the values of its equations, 16-bit floats as float32. `run(kernel, *arguments)` runs the kernel."""
    count = len(next(iter(arguments.values())))
    index = np.arange(count, dtype=np.int32)
    out = np.asarray(run(kernel, index, dict(arguments), tuple(operands)))
    found, row = [], 0
    for code in kernel.codes:
        values = [
            arguments[e["name"]].astype(held(e.dtype)) if e.op == "argument" else None
            for e in code.equations
        ]
        for i in computed(code):
            dtype = held(code.equations[i].dtype)
            n = 1 + (dtype.itemsize == 8)
            values[i] = _from_words(out[row : row + n], dtype)
            row += n
        found.append(values)
    return found


def interpreted(codes, arguments, operands=(), *, fast: bool | str = False, architecture="sm_80"):
    """`call` in the PTX interpreter."""
    run = functools.partial(testing.interpret, architecture=architecture)
    return call(kernel_of(codes, fast, Quickly), arguments, operands, run)


def _from_words(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return rows[0] != 0
    if len(rows) == 2:
        return (rows[0].astype(np.uint64) | (rows[1].astype(np.uint64) << np.uint64(32))).view(
            dtype
        )
    narrow = rows[0].astype(f"u{dtype.itemsize}")
    return narrow.view(dtype)


# ---------------------------------------------------------------- the oracle


def _half_away(x):
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)


_EXACT = {  # where float64 needs another function than `inline_numpy`
    "copy": lambda x: x,
    "erf": special.erf,
    "erfc": special.erfc,
    "erf_inv": lambda x: np.copysign(special.erfinv(x), x),
    "sign": lambda x: np.where(x == 0, x, np.sign(x)),
    "round": lambda x, rounding_method: np.rint(x) if rounding_method == 1 else _half_away(x),
}


def oracle(code: Code, n: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """What equation `n` makes of these held values: exact integers and booleans, floats in float64, not rounded."""
    e = code.equations[n]
    dtypes = [code.equations[m].dtype for m in e.inputs]
    if not any(map(_is_float, (e.dtype, *dtypes))):
        return inline_numpy.run(e, inputs, dtypes)
    if e.op == "convert_element_type":
        return _converted(inputs[0], e.dtype)
    if e.op == "bitcast_convert_type":
        found = inputs[0].astype(jnp.dtype(dtypes[0])).view(jnp.dtype(e.dtype))
        return found.astype(np.float64) if _is_float(e.dtype) else found
    if e.op == "nextafter":
        a, b = (x.astype(jnp.dtype(e.dtype)) for x in inputs)
        return np.where(a == b, b, np.nextafter(a, b))
    if e.op == "reduce_precision":
        return _reduced(inputs[0], **dict(e.params))
    if e.op == "integer_pow":  # JAX multiplies, in this dtype: so the products' roundings are right
        return _multiplied(inputs[0], e["y"])
    wide = [x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs]
    function = _EXACT.get(e.op) or inline_numpy.ROWS[e.op]
    return function(*wide, **dict(e.params))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _converted(x: np.ndarray, dtype: str):
    if dtype == "bool":
        return x != 0
    if dtype in ("float16", "bfloat16"):
        return x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
    if _is_float(dtype):
        return x.astype(np.float64)
    info = np.iinfo(dtype)
    whole = np.trunc(x.astype(np.float64))
    inside = np.where((whole > info.min) & (whole < info.max), whole, 0).astype(dtype)
    found = np.where(whole >= info.max, dtype_of(dtype)(info.max), inside)
    return np.where(whole <= info.min, dtype_of(dtype)(info.min), found)


def dtype_of(name: str):
    return np.dtype(name).type


def _reduced(x, exponent_bits: int, mantissa_bits: int):
    """To a float with so many bits, that has no subnormal numbers."""
    wide = x.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1], -125)  # subnormal numbers have the bits they have
    unit = np.ldexp(1.0, exponent - 1 - mantissa_bits)
    found = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent_bits < 8:
        found = np.where(np.abs(found) < 2.0 ** (1 - bias), np.copysign(0.0, wide), found)
        found = np.where(np.abs(found) >= 2.0 ** (bias + 1), np.copysign(np.inf, wide), found)
    return found


def _multiplied(x, y: int):
    square, left, found = x, abs(y), None
    while left:
        if left & 1:
            found = square if found is None else found * square
        left >>= 1
        square = square * square
    if found is None:
        return np.ones_like(x)
    return found.dtype.type(1) / found if y < 0 else found


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """How far `got` is off, in units in the last place of the right answer: float32's, or float64's for float64.

    Infinite for a NaN, an infinity or a sign of zero in the wrong place, and for integers that differ. Below the normal
    range a unit is that of the smallest normal number, and infinity counts as the power of two that comes next.
    """
    if got.dtype.kind != "f":
        return np.where(got == want, 0.0, np.inf)
    kind = got.dtype.type
    info = np.finfo(kind)
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(want), float(info.tiny))
        unit = np.exp2(np.floor(np.log2(np.minimum(size, float(info.max)))) - info.nmant)
        top = float(info.max) * (1 + float(info.eps) / 2)
        finite = np.clip(want, -top, top)
        error = np.abs(np.clip(got.astype(np.float64), -top, top) - finite) / unit
        zero = (got == 0) & (want == 0) & (np.signbit(got) != np.signbit(want))
    lost = np.isnan(got) != np.isnan(want)
    return np.where(lost | zero, np.inf, np.where(np.isnan(want), 0.0, error))


ALLOWED = 2.0  # units in the last place of float32 by which a row may be off


def complaints(
    codes: Sequence[Code],
    operands: Sequence[np.ndarray],
    results: Sequence[Sequence[np.ndarray]],
    worst: dict[str, float] | None = None,
    *,
    contracted: bool = False,
) -> list[str]:
    """What is wrong with the values of all equations, given the values of their inputs: a line each.

    Into `worst` go the errors by row. `contracted`: products may have gone into sums unrounded, as on a GPU, where the
    assembler makes fused multiply-adds.
    """
    found = []
    worst = {} if worst is None else worst
    for i, (code, got) in enumerate(zip(codes, results, strict=True)):
        for n, e in enumerate(code.equations):
            with np.errstate(all="ignore"):
                error = _errors_of(code, n, operands, got, contracted)
            j = int(error.argmax())
            worst[e.op] = max(worst.get(e.op, 0.0), float(error[j]))
            if error[j] > ALLOWED:
                inputs = ", ".join(f"{code.equations[m].dtype} {got[m][j]}" for m in e.inputs)
                found.append(
                    f"code {i}: v{n} = {e.op}{dict(e.params)}({inputs}) gave {e.dtype} {got[n][j]}, off by {error[j]:.3g}"
                )
    return found


def _errors_of(code: Code, n: int, operands, got, contracted: bool) -> np.ndarray:
    e = code.equations[n]
    inputs = [got[m] for m in e.inputs]
    if e.op == "argument":
        return np.zeros(1)
    if e.op == "const":
        want = np.broadcast_to(constant(e), got[n].shape)
    elif e.op == "size":
        want = np.full(got[n].shape, operands[e["operand"]].shape[e["dim"]])
    elif e.op == "read":
        array = operands[e["operand"]]
        at = tuple(np.clip(i, 0, s - 1) for i, s in zip(inputs, array.shape, strict=True))
        want = np.broadcast_to(array[at], got[n].shape)
    else:
        want = oracle(code, n, inputs)
    want = want.astype(np.float64) if _is_float(e.dtype) else want
    error = errors(got[n], want)
    if e.op == "bitcast_convert_type" and inputs[0].dtype.kind == "f":
        return np.where(np.isnan(inputs[0]), 0.0, error)  # which NaN it is, nobody says
    if contracted and e.op in ("add", "sub") and _is_float(e.dtype):
        largest = np.maximum(*(np.abs(x.astype(np.float64)) for x in inputs))
        return np.where(np.abs(got[n] - want) <= largest * 2.0**-24, 0.0, error)
    return error


# ---------------------------------------------------------------- codes of one row


def row_arguments(dtype: str) -> tuple[Argument, ...]:
    """What the code of every row takes: a boolean `p`, and `a`, `b` and `c` of one dtype."""
    return (Argument("p", "bool"), *(Argument(name, dtype) for name in "abc"))


def row_code(name: str, dtype: str, **params: Any) -> Code:
    """One operation, of the first of `a`, `b` and `c`; `select_n`'s is that of `p`."""
    row = _table.ROWS[name]
    arguments = row_arguments(dtype)
    build = Builder()
    p, *numbers = [build.argument(a) for a in arguments]
    inputs = [p, *numbers[:2]] if row.arity is None else numbers[: row.arity]
    result = build.op(name, *inputs, **params)
    return Code(arguments, (), tuple(build.equations), (result,))


def variants(name: str, dtype: str, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """The parameters that a row can have, for inputs of `dtype`."""
    if name == "convert_element_type":
        return [{"new_dtype": d} for d in dtypes]
    if name == "bitcast_convert_type":
        size = jnp.dtype(dtype).itemsize
        return [{"new_dtype": d} for d in dtypes if d != "bool" and jnp.dtype(d).itemsize == size]
    if name == "round":
        return [{"rounding_method": 0}, {"rounding_method": 1}]
    if name == "integer_pow":
        return [
            {"y": y} for y in ((-3, -1, 0, 1, 2, 3, 5) if _is_float(dtype) else (0, 1, 2, 3, 5))
        ]
    if name == "reduce_precision":
        sizes = ((8, 7), (5, 10), (8, 23), (4, 3))
        return [{"exponent_bits": e, "mantissa_bits": m} for e, m in sizes]
    return [{}]


def row_codes(dtype: str, dtypes: Sequence[str]) -> list[Code]:
    """The codes of every row that takes `dtype`, with all parameters."""
    return [
        row_code(name, dtype, **params)
        for name, row in _table.ROWS.items()
        if dtype in taken(row.takes, dtypes)
        for params in variants(name, dtype, dtypes)
    ]


def wide_floats(count: int, seed: int = 0) -> np.ndarray:
    """float32 numbers of every size: any bits, those round 1, those that exponentials can take, and an even grid."""
    rng = np.random.default_rng(seed)
    n = count // 5
    any_bits = np.frombuffer(rng.bytes(4 * n), np.float32)
    middle = rng.standard_normal(n) * np.exp(rng.uniform(-6, 5, n))
    parts = [middle, rng.uniform(-1.2, 1.2, n), rng.uniform(-120, 120, n), np.linspace(-10, 10, n)]
    return np.concatenate([any_bits, *(p.astype(np.float32) for p in parts)])


def float_functions(count: int) -> tuple[list[Code], dict[str, np.ndarray]]:
    """Every row of floats, and arguments of every size. Half of the powers are not negative, as they need to be."""
    names = [n for n, row in _table.ROWS.items() if row.takes == "float"]
    codes = [row_code(n, "float32", **p) for n in names for p in variants(n, "float32", [])]
    a = wide_floats(count)
    b = np.random.default_rng(1).permutation(a)
    half = len(a) // 2
    a = np.concatenate([a[:half], np.abs(a[half:])])
    return codes, {"p": a > 0, "a": a, "b": b, "c": b}


# The fast forms: the row, what results are rounded to, and bits that are right where |x| < 88, as `_device.py` says.
FAST = (
    ("tanh", "bfloat16", 10.9),
    ("exp", "float16", 17.4),
    ("exp2", "float16", 21.9),
    ("rsqrt", "float16", 21.9),
    ("logistic", "float16", 17.3),
    ("div", "float16", 22.0),
)


def fast_error(name: str, fast: str, count: int, run: Any) -> float:
    """The largest relative error of a fast form, where neither its argument nor its result is below the normal range."""
    code = row_code(name, "float32")
    a = wide_floats(count)
    arguments = {"p": a > 0, "a": a, "b": a[::-1].copy(), "c": a}
    (got,) = call(kernel_of([code], fast), arguments, (), run)
    with np.errstate(all="ignore"):
        want = oracle(code, len(code.equations) - 1, [got[n] for n in code.equations[-1].inputs])
        normal = (np.abs(want) > 1e-37) & (np.abs(want) < 1e37) & (np.abs(a) > 1e-37)
        return float((np.abs(got[-1] - want) / np.abs(want))[normal].max())
