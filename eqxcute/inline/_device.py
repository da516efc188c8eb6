"""What each row of the table is in a kernel. The only file of this package that imports CuTe.

Integers are computed with MLIR's own `arith` operations: CuTe's operators widen narrow integers to 32 bits, floor where
JAX truncates and take the remainder where JAX floors, so that none of them says what JAX means. `arith` computes at the
width of its operands and wraps around, as JAX does. Conversions that saturate, and functions without a CuTe name, come
from the dialects too.

A `Value` knows the interval it lies in. That drops code which cannot be taken: the test for a zero divisor, the test for
a shift that is too long, the clamp of an index. The compiler folds what constants decide.

16-bit floats are held in float32. They are rounded when they become a result, when their bits are taken, and where the
program converts to them.

Three things look like detours, and are not. They stand where a compiler below changes what a program means:

- ptxas (of CUDA 13.4 at least) takes `x >= c` of float32 as true where it knows that x, unless it is NaN, is so: of a
  square, an `ex2`, a sum of such, whatever lies above c. It leaves unordered comparisons alone, so that ordered ones are
  written as `not (x < c or unordered)`: one instruction all the same (`_fcmp`). LLVM makes such a comparison of a
  minimum with a constant, so that minima are NVVM's own instruction (`_extreme`).
- MLIR rounds once where an integer is converted to float32 and then to 16 bits, JAX twice (`_integer_to_float`).
- MLIR computes atan2(0, 0) as NaN, and turns powf into square roots, which -inf and -0 do not survive. CUDA's functions
  are called by their own names (`_LIBRARY`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, math as mlir_math, nvvm

from .._dtypes import CUTE_NAMES
from ._hoist import EXACT
from ._interval import Interval

_SIXTEEN = ("float16", "bfloat16")


class Value(NamedTuple):
    """An MLIR value with JAX's name of its dtype, and what it can be. A constant has no `ir` until it is used, and what is
    held times `factor`, and times the MLIR value `scale`, is not multiplied before. `step`: it is the sum of an MLIR value and
    a number."""

    dtype: str
    range: Interval
    held: Any = None
    constant: Any = None
    factor: float = 1.0
    scale: Any = None
    step: tuple[Any, int] | None = None

    @property
    def ir(self) -> Any:
        if self.constant is not None:
            return _constant(self.constant, self.dtype)
        by = _product(self.scale, self.factor)
        return self.held if by is None else arith.mulf(self.held, by)


def _product(scale: Any, factor: float) -> Any:
    """None for 1."""
    if np.float32(factor) == 1:
        return scale
    number = _number(factor, ir.F32Type.get())
    return number if scale is None else arith.mulf(scale, number)


class To(NamedTuple):
    """What an emitter makes: a value of `dtype`. `fast`: the coarsest dtype that results are rounded to, or None."""

    dtype: str
    fast: str | None = None


Emitter = Callable[..., Any]  # (To, *values, **parameters) -> MLIR value
EMIT: dict[str, Emitter] = {}


def _row(*names: str):
    def add(function):
        EMIT.update(dict.fromkeys(names, function))
        return function

    return add


# ---------------------------------------------------------------- dtypes and CuTe's scalars


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _is_signed(dtype: str) -> bool:
    return dtype.startswith("int")


def _bits(dtype: str) -> int:
    """Of a value as it is held."""
    if dtype == "bool":
        return 1
    if _is_float(dtype):
        return 64 if dtype == "float64" else 32
    return int(dtype.removeprefix("u").removeprefix("int"))


def _lowest(dtype: str) -> int:
    return -(1 << (_bits(dtype) - 1)) if _is_signed(dtype) else 0


def _highest(dtype: str) -> int:
    return (1 << (_bits(dtype) - _is_signed(dtype))) - 1


def _type(dtype: str) -> Any:
    """The MLIR type in which values of `dtype` are held. Integers have no sign: operations do."""
    if _is_float(dtype):
        return ir.F64Type.get() if dtype == "float64" else ir.F32Type.get()
    return ir.IntegerType.get_signless(_bits(dtype))


def _sixteen_type(dtype: str) -> Any:
    return ir.F16Type.get() if dtype == "float16" else ir.BF16Type.get()


def _number(value: int | float, type_: Any) -> Any:
    if isinstance(type_, ir.IntegerType):
        width = type_.width
        value = int(value) & ((1 << width) - 1)  # attributes take the signed number of these bits
        value -= (value >> (width - 1)) << width if width > 1 else 0
        return arith.ConstantOp(type_, ir.IntegerAttr.get(type_, value)).result
    return arith.ConstantOp(type_, ir.FloatAttr.get(type_, float(value))).result


def _constant(value: np.generic, dtype: str) -> Any:
    return _number(float(value) if _is_float(dtype) else int(value), _type(dtype))


def cute_type(dtype: str) -> Any:
    """CuTe's scalar type."""
    return getattr(cutlass, CUTE_NAMES[dtype])


def from_cute(x: Any, dtype: str) -> Any:
    """The MLIR value of a CuTe scalar or Python number that stands for `dtype`."""
    if dtype in _SIXTEEN:
        x = x.to(cutlass.Float32) if isinstance(x, cutlass.Numeric) else x
        return cutlass.Float32(x).ir_value()
    return cute_type(dtype)(x).ir_value()


def to_cute(value: Any, dtype: str) -> Any:
    """A CuTe scalar of `dtype`: here 16-bit floats are rounded."""
    if dtype in _SIXTEEN:
        return cutlass.Float32(value).to(cute_type(dtype))
    return cute_type(dtype)(value)


# ---------------------------------------------------------------- captured arrays


def size(tensor: Any, dim: int) -> Any:
    return cutlass.Int32(tensor.shape[dim]).ir_value()


def read(tensor: Any, indices: Sequence[Value], dtype: str) -> Any:
    """One element; every index is clamped to the tensor, where its interval does not say that it lies inside."""
    shape = tensor.shape if isinstance(tensor.shape, tuple) else (tensor.shape,)
    if not indices:  # arrays without dimensions arrive as arrays of one element
        return from_cute(tensor[0], dtype)
    wide = not _is_small(shape)
    at = tuple(_index(i, n, wide) for i, n in zip(indices, shape, strict=True))
    return from_cute(tensor[at if len(at) > 1 else at[0]], dtype)


def _is_small(shape: Sequence[Any]) -> bool:
    """True if offsets fit in 32 bits: along one axis they do, since indices do."""
    return len(shape) == 1 or (all(isinstance(n, int) for n in shape) and math.prod(shape) < 2**31)


def _index(index: Value, extent: Any, wide: bool) -> Any:
    i = index.ir
    if index.range.lo < 0:
        i = arith.maxsi(i, _like(i, 0))
    inside = isinstance(extent, int) and index.range.hi < extent
    if not inside:
        last = extent - 1 if isinstance(extent, int) else cutlass.Int32(extent) - 1
        i = arith.minsi(i, cutlass.Int32(last).ir_value())
    found = cutlass.Int32(i)
    return cutlass.Int64(found) if wide else found


# ---------------------------------------------------------------- small pieces


def _like(x: Any, value: int | float) -> Any:
    return _number(value, x.type)


def _icmp(name: str, a: Any, b: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, name), a, b)


_INVERSE = {"OLT": "geu", "OLE": "gtu", "OGT": "leu", "OGE": "ltu"}


def _fcmp(name: str, a: Any, b: Any) -> Any:
    """Ordered ones of float32 as the negation of their inverses: see the top of this file."""
    if name not in _INVERSE or a.type != ir.F32Type.get():
        return arith.cmpf(getattr(arith.CmpFPredicate, name), a, b)
    ptx = f"{{ .reg .pred p; setp.{_INVERSE[name]}.f32 p, $1, $2; not.pred $0, p; }}"
    return llvm.inline_asm(ir.IntegerType.get_signless(1), [a, b], ptx, "=b,f,f")


def _not(x: Any) -> Any:
    return arith.xori(x, _like(x, -1))


def _rounded(x: Any, dtype: str) -> Any:
    """A held 16-bit float as its dtype has it."""
    if dtype not in _SIXTEEN:
        return x
    return arith.extf(ir.F32Type.get(), arith.truncf(_sixteen_type(dtype), x))


def _keeping_nan(x: Value, found: Any) -> Any:
    """For the library's functions of float32 that lose the NaN `x` if ptxas takes one of their comparisons as true."""
    if not x.range.nan or x.dtype == "float64":
        return found
    return arith.select(_fcmp("UNO", x.ir, x.ir), x.ir, found)


def _contains(x: Value, value: int) -> bool:
    return bool(x.range.lo <= value <= x.range.hi)


def _is_power_of_two(x: Value) -> bool:
    value = int(x.range.lo)
    return x.range.lo == x.range.hi and value > 0 and value & (value - 1) == 0


# ---------------------------------------------------------------- arithmetic


@_row("add")
def _add(to, a, b):
    return arith.addf(a.ir, b.ir) if _is_float(to.dtype) else arith.addi(a.ir, b.ir)


@_row("sub")
def _sub(to, a, b):
    return arith.subf(a.ir, b.ir) if _is_float(to.dtype) else arith.subi(a.ir, b.ir)


@_row("mul")
def _mul(to, a, b):
    return _times(a.ir, b.ir)


def _times(a, b):
    return arith.muli(a, b) if isinstance(a.type, ir.IntegerType) else arith.mulf(a, b)


@_row("neg")
def _neg(to, a):
    return arith.negf(a.ir) if _is_float(to.dtype) else arith.subi(_like(a.ir, 0), a.ir)


@_row("square")
def _square(to, a):
    return _times(a.ir, a.ir)


@_row("integer_pow")
def _integer_pow(to, a, *, y):
    """Repeated squaring, in JAX's order."""
    square, left, result = a.ir, abs(y), None
    while left:
        if left & 1:
            result = square if result is None else _times(result, square)
        left >>= 1
        if left:
            square = _times(square, square)
    if result is None:
        return _like(a.ir, 1)
    return arith.divf(_like(result, 1.0), result) if y < 0 else result


class _Division(NamedTuple):
    """Quotient, remainder and divisor without what C leaves undefined: x / 0 is here x / 1, and so is INT_MIN / -1."""

    q: Any
    r: Any
    b: Any
    by_zero: Any  # None where that cannot be


def _divided(dtype: str, a: Value, b: Value) -> _Division:
    divisor, by_zero = b.ir, None
    if _contains(b, 0):
        by_zero = _icmp("eq", divisor, _like(divisor, 0))
        divisor = arith.select(by_zero, _like(divisor, 1), divisor)
    signed = _is_signed(dtype)
    if signed and _contains(b, -1) and _contains(a, _lowest(dtype)):
        lowest = _icmp("eq", a.ir, _like(a.ir, _lowest(dtype)))
        overflows = arith.andi(lowest, _icmp("eq", b.ir, _like(a.ir, -1)))
        divisor = arith.select(overflows, _like(divisor, 1), divisor)
    if signed and not (a.range.lo >= 0 and b.range.lo >= 0):
        return _Division(arith.divsi(a.ir, divisor), arith.remsi(a.ir, divisor), divisor, by_zero)
    return _Division(arith.divui(a.ir, divisor), arith.remui(a.ir, divisor), divisor, by_zero)


@_row("div")
def _div(to, a, b):
    """Fast: `div.full`, right to 2 units in the last place; by a constant, times its reciprocal, right to 1.5."""
    if _is_float(to.dtype):
        if _is_fast(to) and _has_reciprocal(b):
            return arith.mulf(a.ir, _like(a.ir, 1 / float(b.constant)))
        if to.fast and to.dtype != "float64":
            return llvm.call_intrinsic(a.ir.type, "llvm.nvvm.div.full", [a.ir, b.ir], [], [])
        return arith.divf(a.ir, b.ir)
    d = _divided(to.dtype, a, b)
    return d.q if d.by_zero is None else arith.select(d.by_zero, _like(d.q, -1), d.q)


def _has_reciprocal(b: Value) -> bool:
    """A constant whose reciprocal is a normal number."""
    return b.constant is not None and 2.0**-126 <= abs(float(b.constant)) <= 2.0**126


@_row("rem")
def _rem(to, a, b):
    if _is_float(to.dtype):
        return _keeping_nan(b, arith.remf(a.ir, b.ir))
    d = _divided(to.dtype, a, b)
    return d.r if d.by_zero is None else arith.select(d.by_zero, a.ir, d.r)


def _crosses(d: _Division) -> Any:
    """Truncation and floor differ: there is a remainder, and its sign is not the divisor's."""
    opposed = _icmp("slt", arith.xori(d.r, d.b), _like(d.r, 0))
    return arith.andi(_icmp("ne", d.r, _like(d.r, 0)), opposed)


@_row("floor_divide")
def _floor_divide(to, a, b):
    """jnp's: the floor, and by zero what its formula gives, -1 for 0 and -2 for all others; all ones if unsigned."""
    if _is_power_of_two(b):
        shift = _like(a.ir, int(b.range.lo).bit_length() - 1)
        return (arith.shrsi if _is_signed(to.dtype) else arith.shrui)(a.ir, shift)
    d = _divided(to.dtype, a, b)
    floor, undefined = d.q, _like(d.q, -1)
    if _is_signed(to.dtype):
        if not (a.range.lo >= 0 and b.range.lo >= 0):
            floor = arith.subi(floor, arith.extui(floor.type, _crosses(d)))
        nonzero = arith.extui(floor.type, _icmp("ne", a.ir, _like(a.ir, 0)))
        undefined = arith.subi(undefined, nonzero)
    return floor if d.by_zero is None else arith.select(d.by_zero, undefined, floor)


@_row("remainder")
def _remainder(to, a, b):
    """jnp's: the divisor's sign, and 0 for a divisor of 0, since x % 1 is."""
    if _is_power_of_two(b):
        return arith.andi(a.ir, _like(a.ir, int(b.range.lo) - 1))
    d = _divided(to.dtype, a, b)
    if not _is_signed(to.dtype) or (a.range.lo >= 0 and b.range.lo >= 0):
        return d.r
    return arith.select(_crosses(d), arith.addi(d.r, d.b), d.r)


@_row("sign")
def _sign(to, a):
    """NaN and both zeros stay as they are."""
    x = a.ir
    zero, one = _like(x, 0), _like(x, 1)
    if _is_float(to.dtype):
        below = arith.select(_fcmp("OLT", x, zero), _like(x, -1.0), x)
        return arith.select(_fcmp("OGT", x, zero), one, below)
    if not _is_signed(to.dtype):
        return arith.minui(x, one)
    return arith.minsi(arith.maxsi(x, _like(x, -1)), one)


@_row("abs")
def _abs(to, a):
    if _is_float(to.dtype):
        return mlir_math.absf(a.ir)
    if not _is_signed(to.dtype):
        return a.ir
    return arith.maxsi(a.ir, arith.subi(_like(a.ir, 0), a.ir))  # INT_MIN stays


def _extreme(which: str, dtype: str, a, b):
    """A NaN is kept, and -0 is below +0: `max.NaN`, in one instruction for float32."""
    if _is_float(dtype) and dtype != "float64":
        return (nvvm.fmax if which == "max" else nvvm.fmin)(a, b, nan=True)
    if _is_float(dtype):  # `max.f64` knows the order of zeros, LLVM's maximum of float64 does not
        found = llvm.call_intrinsic(a.type, f"llvm.nvvm.f{which}.d", [a, b], [], [])
        return arith.select(_fcmp("UNO", a, b), arith.addf(a, b), found)
    sign = "si" if _is_signed(dtype) else "ui"
    return getattr(arith, which + sign)(a, b)


@_row("max")
def _max(to, a, b):
    return _extreme("max", to.dtype, a.ir, b.ir)


@_row("min")
def _min(to, a, b):
    return _extreme("min", to.dtype, a.ir, b.ir)


@_row("clamp")
def _clamp(to, low, x, high):
    return _extreme("min", to.dtype, _extreme("max", to.dtype, x.ir, low.ir), high.ir)


# ---------------------------------------------------------------- comparisons, bits, choices


def _comparison(name: str):
    ordered = name if name in ("eq", "ne") else None

    def emit(to, a, b):
        if _is_float(a.dtype):
            return _fcmp(("U" if name == "ne" else "O") + name.upper(), a.ir, b.ir)
        sign = "s" if _is_signed(a.dtype) else "u"
        return _icmp(ordered or sign + name, a.ir, b.ir)

    return emit


EMIT.update({name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")})


@_row("and")
def _and(to, a, b):
    return arith.andi(a.ir, b.ir)


@_row("or")
def _or(to, a, b):
    return arith.ori(a.ir, b.ir)


@_row("xor")
def _xor(to, a, b):
    return arith.xori(a.ir, b.ir)


@_row("not")
def _invert(to, a):
    return _not(a.ir)


def _is_within(by: Value) -> bool:
    return bool(0 <= by.range.lo and by.range.hi < _bits(by.dtype))


def _shift(function, a: Value, by: Value):
    """Zero for an amount that is not 0 to the width less one. In MLIR that would be undefined.

    The compiler makes one instruction of it, whose amount has 32 bits: it forgets the upper half of longer amounts.
    """
    n, width, zero = by.ir, _bits(by.dtype), _like(a.ir, 0)
    if _is_within(by):
        return function(a.ir, n)
    if width == 64:
        n = arith.minui(n, _like(n, width))
    within = _icmp("ult", n, _like(n, width))
    return arith.select(within, function(a.ir, arith.select(within, n, zero)), zero)


@_row("shift_left")
def _shift_left(to, a, by):
    return _shift(arith.shli, a, by)


@_row("shift_right_logical")
def _shift_right_logical(to, a, by):
    return _shift(arith.shrui, a, by)


@_row("shift_right_arithmetic")
def _shift_right_arithmetic(to, a, by):
    """The top bit moves in, for unsigned numbers too."""
    n = by.ir if _is_within(by) else arith.minui(by.ir, _like(by.ir, _bits(by.dtype) - 1))
    return arith.shrsi(a.ir, n)


@_row("population_count")
def _population_count(to, a):
    return mlir_math.ctpop(a.ir)


@_row("clz")
def _clz(to, a):
    return mlir_math.ctlz(a.ir)


@_row("select_n")
def _select_n(to, which, *cases):
    chosen = cases[0].ir
    if which.dtype == "bool":
        return arith.select(which.ir, cases[1].ir, chosen) if len(cases) > 1 else chosen
    for k, case in enumerate(cases[1:], 1):
        chosen = arith.select(_icmp("sge", which.ir, _like(which.ir, k)), case.ir, chosen)
    return chosen


@_row("wrap")
def _wrap(to, x, size):
    if not _is_signed(to.dtype):
        return x.ir
    below = _icmp("slt", x.ir, _like(x.ir, 0))
    return arith.select(below, arith.addi(x.ir, size.ir), x.ir)


# ---------------------------------------------------------------- dtypes


@_row("convert_element_type")
def _convert(to, a, *, new_dtype):
    x, source, target = a.ir, a.dtype, _type(new_dtype)
    if source == new_dtype:
        return _rounded(x, new_dtype)
    if new_dtype == "bool":
        if _is_float(source):
            return _fcmp("UNE", x, _like(x, 0.0))  # NaN is true
        return _icmp("ne", x, _like(x, 0))
    if _is_float(new_dtype):
        if new_dtype == "float32" and a.step is not None and a.range.hi <= EXACT:
            base, by = a.step
            x = _integer_to_float(base, source, target)
            return arith.addf(x, _like(x, float(by)))
        if not _is_float(source):
            x = _integer_to_float(x, source, target)
        elif _bits(source) != _bits(new_dtype):
            x = (arith.extf if _bits(source) < 64 else arith.truncf)(target, x)
        return _rounded(x, new_dtype)
    if _is_float(source):
        return _float_to_integer(a, new_dtype)
    if _bits(new_dtype) <= _bits(source):
        return x if _bits(new_dtype) == _bits(source) else arith.trunci(target, x)
    return (arith.extsi if _is_signed(source) else arith.extui)(target, x)


def _integer_to_float(x, source: str, target: Any):
    """LLVM's operation: a rounding to 16 bits that follows stays one of its own."""
    return (llvm.sitofp if _is_signed(source) else llvm.uitofp)(target, x)


def _float_to_integer(a: Value, dtype: str):
    """Towards zero; out of range stops at the ends, NaN is 0: as XLA does, and the hardware for 32 bits and more."""
    wide = max(_bits(dtype), 32)
    which = "s" if _is_signed(dtype) else "u"
    x = _saturated(a.ir, which, wide)
    if wide == _bits(dtype):
        return x
    low, high = _like(x, _lowest(dtype)), _like(x, _highest(dtype))
    if which == "s":
        x = arith.minsi(arith.maxsi(x, low), high)
    else:
        x = arith.minui(x, high)
    return arith.trunci(_type(dtype), x)


def _saturated(x, which: str, bits: int):
    """To a signed (`s`) or unsigned (`u`) integer; `arith` leaves open what is out of range, and LLVM uses that."""
    if (
        bits == 32 and x.type == ir.F32Type.get()
    ):  # hardware's does it all; LLVM would compare as well
        target = ir.IntegerType.get_signless(32)
        return llvm.inline_asm(target, [x], f"cvt.rzi.{which}32.f32 $0, $1;", "=r,f")
    name = f"llvm.fpto{which}i.sat.i{bits}.f{64 if x.type == ir.F64Type.get() else 32}"
    return llvm.call_intrinsic(ir.IntegerType.get_signless(bits), name, [x], [], [])


@_row("bitcast_convert_type")
def _bitcast(to, a, *, new_dtype):
    return _from_memory(_to_memory(a.ir, a.dtype), new_dtype)


def _to_memory(x, dtype: str):
    """The bits of a value as an integer."""
    if dtype in _SIXTEEN:
        return arith.bitcast(ir.IntegerType.get_signless(16), arith.truncf(_sixteen_type(dtype), x))
    if _is_float(dtype):
        return arith.bitcast(ir.IntegerType.get_signless(_bits(dtype)), x)
    return x


def _from_memory(bits, dtype: str):
    if dtype in _SIXTEEN:
        return arith.extf(ir.F32Type.get(), arith.bitcast(_sixteen_type(dtype), bits))
    return arith.bitcast(_type(dtype), bits) if _is_float(dtype) else bits


@_row("stop_gradient", "copy")
def _same(to, a):
    return a.ir


# ---------------------------------------------------------------- floats


@_row("is_finite")
def _is_finite(to, a):
    return _fcmp("OLT", mlir_math.absf(a.ir), _like(a.ir, math.inf))


@_row("round")
def _round(to, a, *, rounding_method):
    return (mlir_math.roundeven if rounding_method == 1 else mlir_math.round)(a.ir)


@_row("reduce_precision")
def _reduce_precision(to, a, *, exponent_bits, mantissa_bits):
    """Ties to even; what is too large is infinite, and what a narrower exponent cannot hold normally is 0. NaN stays."""
    # Bits of the fraction and of the exponent, in what the value is held in.
    fraction, exponent = (52, 11) if to.dtype == "float64" else (23, 8)
    bits = _to_memory(a.ir, "float64" if to.dtype == "float64" else "float32")
    lost = fraction - mantissa_bits
    if lost > 0:
        odd = arith.andi(arith.shrui(bits, _like(bits, lost)), _like(bits, 1))
        bits = arith.addi(bits, arith.addi(odd, _like(bits, (1 << (lost - 1)) - 1)))
        bits = arith.andi(bits, _like(bits, -(1 << lost)))
    if exponent_bits < exponent:
        bias, narrow = (1 << (exponent - 1)) - 1, (1 << (exponent_bits - 1)) - 1
        infinite = _like(bits, ((1 << exponent) - 1) << fraction)
        sign = arith.andi(bits, _like(bits, 1 << (fraction + exponent)))
        size = arith.andi(bits, infinite)
        small = _icmp("ule", size, _like(bits, (bias - narrow) << fraction))
        large = _icmp("ugt", size, _like(bits, (bias + narrow) << fraction))
        bits = arith.select(large, arith.ori(sign, infinite), arith.select(small, sign, bits))
    found = arith.bitcast(a.ir.type, bits)
    return arith.select(_fcmp("UNO", a.ir, a.ir), a.ir, found)


def _library(row: str, name: str = "") -> None:
    """A function of CUDA's library of mathematics, through MLIR's name for it."""

    def emit(to, *inputs):
        return getattr(mlir_math, name or row)(*(a.ir for a in inputs))

    EMIT[row] = emit


# Within 2 units in the last place of float32, on hardware too.
for _name in (
    "floor",
    "ceil",
    "sqrt",
    "log",
    "log1p",
    "erf",
    "erfc",
    "cbrt",
    "sin",
    "cos",
):
    _library(_name)
for _name in ("asin", "acos", "atan", "asinh"):
    _library(_name)


def _of_cuda(name: str, arity: int) -> dict[str, Any]:
    """A function of CUDA's library by its own name, for float32 and float64."""
    return {
        dtype: cute.ffi(name=f"__nv_{name}{suffix}", params_types=[kind] * arity, return_type=kind)
        for dtype, suffix, kind in (
            ("float32", "f", cutlass.Float32),
            ("float64", "", cutlass.Float64),
        )
    }


_LIBRARY = {
    name: _of_cuda(name, arity) for name, arity in (("erfinv", 1), ("atan2", 2), ("pow", 2))
}


def _called(name: str, *inputs):
    dtype = "float64" if inputs[0].type == ir.F64Type.get() else "float32"
    kind = cute_type(dtype)
    return _LIBRARY[name][dtype](*map(kind, inputs)).ir_value()


@_row("atan2")
def _atan2(to, a, b):
    return _called("atan2", a.ir, b.ir)


@_row("pow")
def _pow(to, a, b):
    """CUDA's, but for squares and square roots."""
    x = a.ir
    power = None if b.constant is None else float(b.constant)
    if power == 2.0:
        return arith.mulf(x, x)
    if power == 0.5:  # of -0 it is +0, of -inf it is +inf
        root = mlir_math.sqrt(arith.addf(x, _like(x, 0.0)))
        return arith.select(_fcmp("OEQ", x, _like(x, -math.inf)), _like(x, math.inf), root)
    return _called("pow", x, b.ir)


# The bits of 2 / pi behind the point, and pi / 2 over 2^64 in two parts.
_TWO_OVER_PI = (
    *(0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0),
    *(0xDB629599, 0x3C439041, 0xFE5163AB),
)
_QUARTER = (1.57079637 * 2.0**-64, -4.37113900e-8 * 2.0**-64)
_TAN = (  # (tan(x) / x - 1) / x^2 in x^2
    *(0.333333343, 0.133332312, 0.0539944656, 0.0216211267),
    *(0.0099621471, 0.0011853216, 0.00384313986),
)


def _by_quarter_turns(x):
    """x > 0.5 as n quarter turns and an angle from -pi/4 to pi/4: n's lowest bits, the angle and what it lacks.

    x = m 2^e with an integer m of 24 bits. Of 2 / pi only those 96 bits count whose products with m and 2^e lie between
    2 and 2^-94: Payne and Hanek 1983, "Radian reduction for trigonometric functions".
    """
    i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
    bits = arith.bitcast(i32, x)
    m = arith.ori(arith.andi(bits, _like(bits, 0x7FFFFF)), _like(bits, 0x800000))
    first = arith.subi(arith.shrui(bits, _like(bits, 23)), _like(bits, 120))  # e + 30
    words = [_like(bits, w) for w in (0, *_TWO_OVER_PI)]  # so the first bit needed is number e + 30
    for shift, kept in ((4, 7), (2, 5), (1, 4)):  # by whole words
        chosen = arith.andi(first, _like(bits, 32 * shift))
        moves = _icmp("ne", chosen, _like(bits, 0))
        words = [
            arith.select(moves, words[k + shift], words[k]) if k + shift < len(words) else words[k]
            for k in range(kept)
        ]
    by = arith.andi(first, _like(bits, 31))
    shifted = [
        llvm.call_intrinsic(i32, "llvm.fshl.i32", [*pair, by], [], [])
        for pair in itertools.pairwise(words)
    ]
    high, middle, low = (arith.extui(i64, w) for w in shifted)
    factor, half = arith.extui(i64, m), _like(high, 32)
    middle = arith.addi(arith.muli(middle, factor), arith.shrui(arith.muli(low, factor), half))
    turns = arith.addi(arith.shli(arith.muli(high, factor), half), middle)  # times 2^-62
    n = arith.shrui(arith.addi(turns, _like(turns, 1 << 61)), _like(turns, 62))
    rest = arith.shli(turns, _like(turns, 2))  # signed, times 2^-64
    angle = arith.sitofp(x.type, rest)
    missing = arith.sitofp(x.type, arith.subi(rest, _saturated(angle, "s", 64)))
    # (angle + missing) (c + c_rest)
    c, c_rest = (_like(x, v) for v in _QUARTER)
    r = arith.mulf(angle, c)
    r_rest = mlir_math.fma(angle, c, arith.negf(r))
    r_rest = mlir_math.fma(angle, c_rest, mlir_math.fma(missing, c, r_rest))
    return arith.trunci(i32, n), r, r_rest


@_row("tan")
def _tan(to, a):
    """tan or -1 / tan of the angle that quarter turns leave. The library's is off by up to 2.6 units."""
    if to.dtype == "float64":
        return mlir_math.tan(a.ir)
    fma, neg, x = mlir_math.fma, arith.negf, mlir_math.absf(a.ir)
    n, r, r_rest = _by_quarter_turns(x)
    near = _fcmp("OLT", x, _like(x, 0.785))
    r, r_rest = (arith.select(near, v, w) for v, w in ((x, r), (_like(x, 0.0), r_rest)))
    # tan(r + r_rest) = r + rest, since tan' = 1 + tan^2.
    square = arith.mulf(r, r)
    cube = arith.mulf(arith.mulf(r, square), _horner(square, _TAN))
    tan = arith.addf(r, cube)
    rest = arith.addf(cube, arith.mulf(r_rest, fma(tan, tan, _like(x, 1.0))))
    tan = arith.addf(r, rest)
    rest = arith.addf(rest, arith.subf(r, tan))
    inverse = _rcp(tan)
    missing = fma(neg(inverse), rest, fma(neg(inverse), tan, _like(x, 1.0)))
    turned = neg(fma(inverse, missing, inverse))
    odd = _icmp("ne", arith.andi(n, _like(n, 1)), _like(n, 0))
    odd = arith.andi(odd, _not(near))
    found = arith.addf(
        arith.select(odd, turned, tan), arith.subf(x, x)
    )  # infinity - infinity is NaN
    sign = arith.andi(_to_memory(a.ir, "float32"), _like(n, 1 << 31))
    return arith.bitcast(x.type, arith.xori(_to_memory(found, "float32"), sign))


def _is_fast(to: To) -> bool:
    return to.fast is not None and to.dtype != "float64"


@_row("exp")
def _exp(to, a):
    """Fast: `ex2.approx` of x log2(e), right to 2^-22 + 2^-24 |x|."""
    if _is_fast(to):
        return _ex2(arith.mulf(a.ir, _like(a.ir, math.log2(math.e))))
    return mlir_math.exp(a.ir)


@_row("exp2")
def _exp2(to, a):
    """Fast: `ex2.approx`, right to 2^-22."""
    x = a.ir
    if _is_fast(to):
        return _ex2(x)
    if to.dtype == "float64":
        return mlir_math.exp2(x)
    # From these ends on it is 0 or infinite. The library's is off by nearly 2 units.
    x = _extreme("min", "float32", _extreme("max", "float32", x, _like(x, -151.0)), _like(x, 129.0))
    k = mlir_math.roundeven(x)
    r = arith.mulf(arith.subf(x, k), _like(x, math.log(2)))
    return _scaled(k, mlir_math.fma(r, _horner(r, _EXPM1), _like(x, 1.0)))[0]


def _ex2(x):
    return cute.math.exp2(cutlass.Float32(x), approx=True, ftz=True).ir_value()


@_row("tanh")
def _tanh(to, a):
    """Fast, where results are bfloat16: `tanh.approx`, right to 2^-11. Of scores: `_tanh_of_score`."""
    if _is_fast(to) and to.fast == "bfloat16":
        return cute.math.tanh(cutlass.Float32(a.ir), approx=True).ir_value()
    return _keeping_nan(a, mlir_math.tanh(a.ir))


@_row("expm1")
def _expm1(to, a):
    return _keeping_nan(a, mlir_math.expm1(a.ir))


@_row("logistic")
def _logistic(to, a):
    """Fast: `rcp.approx` of 1 + `ex2.approx`, right to 2^-21 + 2^-24 |x|."""
    x = a.ir
    one = _like(x, 1.0)
    if _is_fast(to):
        e = _ex2(arith.mulf(x, _like(x, -math.log2(math.e))))
        return cute.arch.rcp_approx(cutlass.Float32(arith.addf(one, e))).ir_value()
    # exp of what is not positive: it neither overflows nor is lost beside 1 where it is the answer.
    e = _exp_of_negative(to.dtype, arith.negf(mlir_math.absf(x)))
    # e / (1 + e) = e - e q, and 1 / (1 + e) = 1 - q, with q = e / (1 + e): the roundings of q hardly count.
    q = arith.divf(e, arith.addf(one, e))
    whole = arith.select(_fcmp("OLT", x, _like(x, 0.0)), e, one)
    return mlir_math.fma(arith.negf(whole), q, whole)


def _exp_of_negative(dtype: str, x):
    if dtype == "float64":
        return mlir_math.exp(x)
    e = _exp_parts(_extreme("max", dtype, x, _like(x, -105.0)))  # from there on it is 0
    return _scaled(e.k, e.p)[0]


class _Exp(NamedTuple):
    """exp = 2^k (p + rest), with p from 0.7 to 1.42: right to 2^-26, where `ex2.approx` may be off by 2^-22."""

    k: Any
    p: Any
    rest: Any


def _exp_parts(x) -> _Exp:
    fma, one = mlir_math.fma, _like(x, 1.0)
    k = mlir_math.roundeven(arith.mulf(x, _like(x, math.log2(math.e))))
    r = fma(k, _like(x, -0.693359375), x)  # log 2 in two parts; products with the first are exact
    r = fma(k, _like(x, 2.12194440e-4), r)
    g = _horner(r, _EXPM1)
    p = fma(r, g, one)
    return _Exp(k, p, fma(r, g, arith.subf(one, p)))


def _scaled(k, *values) -> list[Any]:
    """Times 2^k, in two steps: k reaches beyond the exponents."""
    whole = _saturated(k, "s", 32)
    half = arith.shrsi(whole, _like(whole, 1))
    for part in (half, arith.subi(whole, half)):
        bits = arith.shli(arith.addi(part, _like(part, 127)), _like(part, 23))
        values = [arith.mulf(v, arith.bitcast(v.type, bits)) for v in values]
    return values


def _grown(x):
    """exp(|x|) / 2 as a sum of two numbers, of which the second holds exp(-|x|) / 2 too, and exp(-|x|) / 2."""
    size = _extreme("min", "float32", mlir_math.absf(x), _like(x, 100.0))
    e = _exp_parts(size)
    half, rest = _scaled(arith.subf(e.k, _like(x, 1.0)), e.p, e.rest)
    return half, rest, arith.mulf(_rcp(half), _like(x, 0.25))


def _rcp(x):
    return cute.arch.rcp_approx(cutlass.Float32(x)).ir_value()


@_row("sinh")
def _sinh(to, a):
    """(exp(|x|) - exp(-|x|)) / 2 from 1 on, else a polynomial."""
    x = a.ir
    if to.dtype == "float64":
        return mlir_math.sinh(x)
    half, rest, other = _grown(x)
    large = mlir_math.copysign(arith.addf(half, arith.subf(rest, other)), x)
    square = arith.mulf(x, x)
    small = mlir_math.fma(arith.mulf(x, square), _horner(square, _SINH), x)
    return arith.select(_fcmp("OLT", mlir_math.absf(x), _like(x, 1.0)), small, large)


@_row("cosh")
def _cosh(to, a):
    """(exp(|x|) + exp(-|x|)) / 2."""
    if to.dtype == "float64":
        return mlir_math.cosh(a.ir)
    half, rest, other = _grown(a.ir)
    return arith.addf(half, arith.addf(rest, other))


@_row("acosh")
def _acosh(to, a):
    """log1p(t + sqrt(t^2 + 2t)), t = x - 1, with what is rounded away below the logarithm; log(2x) for large x."""
    x = a.ir
    if to.dtype == "float64":
        return mlir_math.acosh(x)
    one, fma = _like(x, 1.0), mlir_math.fma
    t = arith.subf(x, one)
    square = fma(t, t, arith.addf(t, t))
    root = mlir_math.sqrt(square)
    high = arith.addf(t, root)
    low = arith.subf(t, arith.subf(high, root))
    rest = arith.divf(fma(arith.negf(root), root, square), arith.addf(root, root))
    rest = arith.select(_fcmp("OGT", root, _like(x, 0.0)), rest, _like(x, 0.0))
    low = arith.divf(arith.addf(low, rest), arith.addf(high, one))
    near = arith.addf(mlir_math.log1p(high), low)
    far = arith.addf(mlir_math.log(x), _like(x, math.log(2)))
    found = arith.select(_fcmp("OLT", x, _like(x, 2.0**26)), near, far)
    return arith.select(_fcmp("OLT", x, one), _like(x, math.nan), found)


@_row("atanh")
def _atanh(to, a):
    """(log(1 + x) - log(1 - x)) / 2: a sum of two numbers of one sign."""
    x = a.ir
    rest = arith.subf(mlir_math.log1p(x), mlir_math.log1p(arith.negf(x)))
    return arith.mulf(rest, _like(x, 0.5))


def _horner(x, coefficients: Sequence[float]):
    """A polynomial, the constant term first, in fused multiply-adds."""
    return _horner_of(x, [_like(x, c) for c in coefficients])


def _horner_of(x, terms: Sequence[Any]):
    found = terms[-1]
    for term in terms[-2::-1]:
        found = mlir_math.fma(found, x, term)
    return found


# Interpolated at Chebyshev's nodes, each to 2^-27 or better.
_ERF = (
    1.12837923,
    -0.376126379,
    0.112837814,
    -0.0268640984,
    0.00520562986,
    -0.000779316469,
)  # erf(x) / x in x^2
_SINH = (
    0.166666672,
    0.00833333936,
    0.000198381022,
    2.80628024e-06,
)  # (sinh(x) / x - 1) / x^2 in x^2
_EXPM1 = (1.0, 0.5, 0.166665047, 0.0416663513, 0.00836917758, 0.00139411492)  # (exp(x) - 1) / x
_ERFCX = (  # erfc(x) exp(x^2) (1 + 2x) - 1, in (x - 2.5) / (x + 2.5)
    *(0.264838189, -0.122356765, -0.0990243703, 0.157630041, -0.102970548),
    *(0.0327577516, 0.000957733253, -0.00435581896, 0.00041257136, 0.000542641385),
)


@_row("erfc")
def _erfc(to, a):
    """1 - erf(x) near 0, else exp(-x^2) erfcx(x), where every rounding is made good but the last.

    The library's is off by up to 3.4 units, and jax.nn.gelu is made of it. erfcx(x) (1 + 2x) is nearly constant: Shepherd
    and Laframboise 1981, "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x".
    """
    return mlir_math.erfc(a.ir) if to.dtype == "float64" else _erfc_of(a.ir)


def _erfc_of(x):
    fma, neg = mlir_math.fma, arith.negf
    one, size = _like(x, 1.0), mlir_math.absf(x)
    near = fma(neg(x), _horner(arith.mulf(x, x), _ERF), one)
    far = _scaled_erfc(_extreme("min", "float32", size, _like(x, 10.5)))  # from there on it is 0
    far = arith.select(_fcmp("OLT", x, _like(x, 0.0)), arith.subf(_like(x, 2.0), far), far)
    return arith.select(_fcmp("OLE", size, _like(x, 0.46875)), near, far)


def _scaled_erfc(x):
    """erfc for x from 0.46875 to 10.5."""
    fma, neg, one = mlir_math.fma, arith.negf, _like(x, 1.0)
    # erfcx(x) = (1 + w) / (1 + 2x) = y + rest.
    centre = _like(x, 2.5)
    w = _horner(arith.mulf(arith.subf(x, centre), _rcp(arith.addf(x, centre))), _ERFCX)
    below = fma(x, _like(x, 2.0), one)
    below_rest = fma(x, _like(x, 2.0), neg(arith.subf(below, one)))
    inverse = _rcp(below)
    y = fma(inverse, w, inverse)
    missing = arith.addf(fma(neg(y), below_rest, fma(neg(y), below, one)), w)
    rest = arith.mulf(missing, inverse)
    # exp(-x^2) = 2^k (p + p_rest) (1 - square_rest).
    square = arith.mulf(x, x)
    square_rest = fma(x, x, neg(square))
    e = _exp_parts(neg(square))
    found = fma(e.p, y, fma(e.p, fma(neg(y), square_rest, rest), arith.mulf(e.rest, y)))
    return _scaled(e.k, found)[0]


@_row("erf_inv")
def _erf_inv(to, a):
    """The library's, and in the tails one of Newton's steps on erfc, to which 1 - |x| is exact."""
    x = a.ir
    y = _called("erfinv", x)
    if to.dtype == "float64":
        return y
    size, far = mlir_math.absf(x), mlir_math.absf(y)
    excess = arith.subf(_erfc_of(far), arith.subf(_like(x, 1.0), size))
    slope = mlir_math.exp(arith.mulf(far, far))
    step = arith.mulf(arith.mulf(excess, slope), _like(x, math.sqrt(math.pi) / 2))
    better = mlir_math.copysign(arith.addf(far, step), x)
    inside = arith.andi(_fcmp("OGT", size, _like(x, 0.75)), _fcmp("OLT", size, _like(x, 1.0)))
    return arith.select(inside, better, y)


@_row("rsqrt")
def _rsqrt(to, a):
    """Fast: `rsqrt.approx.ftz`, right to 2^-22."""
    if _is_fast(to):
        return cute.math.rsqrt(cutlass.Float32(a.ir), approx=True, ftz=True).ir_value()
    return mlir_math.rsqrt(a.ir)


@_row("nextafter")
def _nextafter(to, a, b):
    """The neighbour of `a` towards `b`, in the dtype's own bits."""
    x, y = _to_memory(a.ir, a.dtype), _to_memory(b.ir, b.dtype)
    held_a, held_b = _from_memory(x, a.dtype), _from_memory(y, b.dtype)
    width = x.type.width
    top = _like(x, 1 << (width - 1))
    least = arith.ori(arith.andi(y, top), _like(x, 1))  # the least number with the sign of b
    # Bits of floats of one sign are ordered: away from zero is up.
    away = _fcmp("OLT", mlir_math.absf(held_a), mlir_math.absf(held_b))
    opposed = _icmp("slt", arith.xori(x, y), _like(x, 0))
    up = arith.andi(away, _not(opposed))
    moved = arith.addi(x, arith.select(up, _like(x, 1), _like(x, -1)))
    is_zero = _fcmp("OEQ", held_a, _like(held_a, 0.0))
    moved = arith.select(is_zero, least, moved)
    moved = arith.select(_fcmp("OEQ", held_a, held_b), y, moved)
    nan = arith.addf(held_a, held_b)
    return arith.select(_fcmp("UNO", held_a, held_b), nan, _from_memory(moved, a.dtype))


# ---------------------------------------------------------------- scores


class Multiple(NamedTuple):
    """`held` times `factor`, and times `scale`."""

    held: Any
    factor: float
    scale: Any = None


def multiple(to: To, op: str, inputs: Sequence[Value]) -> Multiple | None:
    """What only scores allow, since their last places do not matter: factors that are constants wait, so that a chain of
    them becomes one, or none. None: to be emitted as anything else."""
    if to.fast not in ("scores", "small") or to.dtype != "float32":
        return None
    found = _multiple(to, op, *inputs)
    # Not where a factor alone leaves float32.
    return found if found is not None and 2.0**-60 < abs(found.factor) < 2.0**60 else None


def _multiple(to: To, op: str, a: Value, b: Value | None = None, *_) -> Multiple | None:
    if a.constant is not None and op == "mul":
        a, b = b, a
    if a.constant is not None:
        return None
    if op == "tanh":
        return _tanh_of_score(to, a)
    if op == "neg":
        return Multiple(a.held, -a.factor, a.scale)
    if op == "mul" and b.constant is not None:
        return Multiple(a.held, a.factor * float(b.constant), a.scale)
    if op == "div" and b.constant is not None and _has_reciprocal(b):
        return Multiple(a.held, a.factor / float(b.constant), a.scale)
    if a.scale is not None or b is None or b.scale is not None:
        return None
    if op == "mul":
        return Multiple(arith.mulf(a.held, b.held), a.factor * b.factor)
    if op in ("add", "sub") and b.constant is None and a.factor == b.factor:
        return Multiple((arith.addf if op == "add" else arith.subf)(a.held, b.held), a.factor)
    return None


# (tanh(x) / x - 1) / x^2 in x^2, up to `_small.SMALL`. Of all such polynomials the one with which the largest relative error
# of tanh is least, 2^-20.6: by Remez's exchange in float64, then rounded. In float32 tanh is right to 2^-20.4.
_TANH = (-0.333281593, 0.132053597, -0.0447506447)


def _tanh_of_score(to: To, a: Value) -> Multiple:
    """1 - 2 / (1 + exp(2x)), right to 2^-21; where x is small a polynomial, right to 2^-20.4 of tanh."""
    if to.fast == "small":
        return _small_tanh(a)
    x, two = a.held, 2 * math.log2(math.e)
    by = _product(a.scale, a.factor * two)  # None: by 1
    e = _ex2(x if by is None else arith.mulf(x, by))
    one = _like(x, 1.0)
    return Multiple(mlir_math.fma(_like(x, -2.0), _rcp(arith.addf(one, e)), one), 1.0)


def _small_tanh(a: Value) -> Multiple:
    """What is held is not multiplied by its scale: the terms are."""
    x, factor, scale = a.held, a.factor, a.scale
    if not 2.0**-8 < abs(factor) < 2.0**8:
        x, factor, scale = a.ir, 1.0, None
    terms = [_like(x, c * factor ** (2 * k)) for k, c in enumerate((1.0, *_TANH))]
    if scale is not None:
        power, square = scale, arith.mulf(scale, scale)
        for k, term in enumerate(terms):
            terms[k] = arith.mulf(power, term)
            power = arith.mulf(power, square)
    return Multiple(arith.mulf(x, _horner_of(arith.mulf(x, x), terms)), factor)


def words(value: Value, dtype: str) -> list[Any]:
    """The bits of a held value, lowest first, in CuTe's 32-bit integers. For tests."""
    x = _to_memory(value.ir, "float32" if dtype in _SIXTEEN else dtype)
    if x.type.width < 32:
        return [cutlass.Uint32(arith.extui(ir.IntegerType.get_signless(32), x))]
    if x.type.width == 32:
        return [cutlass.Uint32(x)]
    halves = [x, arith.shrui(x, _like(x, 32))]
    return [cutlass.Uint32(arith.trunci(ir.IntegerType.get_signless(32), half)) for half in halves]
