"""Intervals: what a value can be, when its inputs can be anything in theirs.

A rule may be loose, never wrong. The same rules work on NumPy arrays, at trace time, and on JAX arrays, inside a
program: `xp` is the one or the other, and every end may be an array, of all tiles at once.

Integers wrap around, as JAX's do: where an operation may leave the dtype's range, the answer is the whole range. Floats
are rounded, by libraries that differ in the last places, contracted to fused multiply-adds, and subnormals may be
flushed: each inexact operation widens its interval by a few units in the last place, so that all of these stay inside.
16-bit floats are kept as float32 ends, for they may be held in float32 between operations.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Interval(NamedTuple):
    """Numbers from `lo` to `hi`, both included; NaN besides, where `nan`. Never empty. Booleans: False < True."""

    lo: Any
    hi: Any
    nan: Any


Rule = Callable[..., Interval]  # (xp, dtype of the result, *intervals, **parameters)

_LIBRARY_ULPS = 8  # how far exp, tanh and the like may be off, in any library; the hardware's fast forms are not meant


def ends_dtype(dtype: Any) -> np.dtype:
    """In which dtype the ends are held."""
    dtype = jnp.dtype(dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if narrow else dtype


def everything(dtype: Any) -> Interval:
    """No knowledge but the dtype."""
    dtype = jnp.dtype(dtype)
    if dtype == bool:
        return Interval(np.False_, np.True_, np.False_)
    if jnp.issubdtype(dtype, jnp.floating):
        kind = ends_dtype(dtype).type
        return Interval(kind(-np.inf), kind(np.inf), np.True_)
    info = np.iinfo(dtype)
    return Interval(dtype.type(info.min), dtype.type(info.max), np.False_)


def point(value: Any) -> Interval:
    """One number, which may be NaN."""
    value = np.asarray(value)
    held = value.astype(ends_dtype(value.dtype))
    return flushed(np, value.dtype, between(np, held, held))


def flushed(xp: Any, dtype: Any, x: Interval) -> Interval:
    """With 0 besides subnormals: some libraries take them for 0, JAX on CPU for one."""
    if not _is_float(x):
        return x
    tiny, zero = x.lo.dtype.type(jnp.finfo(dtype).smallest_normal), x.lo.dtype.type(0)
    lo = xp.where((x.lo > 0) & (x.lo < tiny), zero, x.lo)
    return Interval(lo, xp.where((x.hi < 0) & (x.hi > -tiny), zero, x.hi), x.nan)


def between(xp: Any, lo: Any, hi: Any, nan: Any = False) -> Interval:
    """From `lo` to `hi`, where a NaN among them means: anything."""
    lo, hi = xp.asarray(lo), xp.asarray(hi)
    if not jnp.issubdtype(lo.dtype, jnp.floating):
        return Interval(lo, hi, np.False_)
    lost = xp.isnan(lo) | xp.isnan(hi)
    top = lo.dtype.type(np.inf)
    return Interval(xp.where(lost, -top, lo), xp.where(lost, top, hi), lost | nan)


def _is_float(x: Interval) -> bool:
    return jnp.issubdtype(x.lo.dtype, jnp.floating)


def _nan(*intervals: Interval) -> Any:
    return functools.reduce(lambda a, b: a | b, (i.nan for i in intervals))


def _is_point(x: Interval) -> Any:
    return (x.lo == x.hi) & ~x.nan


def _contains(x: Interval, value: Any) -> Any:
    return (x.lo <= value) & (x.hi >= value)


def _else_everything(xp: Any, dtype: Any, good: Any, x: Interval) -> Interval:
    """`x` where it is `good`."""
    all_of = everything(dtype)
    return Interval(
        xp.where(good, x.lo, all_of.lo),
        xp.where(good, x.hi, all_of.hi),
        x.nan if all_of.nan is np.False_ else xp.where(good, x.nan, True),
    )


def _smallest(xp: Any, values: Any) -> Any:
    return functools.reduce(xp.minimum, values)


def _largest(xp: Any, values: Any) -> Any:
    return functools.reduce(xp.maximum, values)


def _widened(xp: Any, dtype: Any, lo: Any, hi: Any, nan: Any, ulps: float) -> Interval:
    """Room for `ulps` units of rounding in `dtype` and as much again, for flushed subnormals and early overflow."""
    info = jnp.finfo(dtype)
    kind = ends_dtype(dtype).type
    relative, tiny = kind(float(info.eps) * 2 * ulps), kind(float(info.smallest_normal) * 2)
    most = float(info.max)
    near = kind(most * (1 - float(info.eps) * 4 * (ulps + 1)))
    most = kind(most)
    lo, hi = xp.asarray(lo), xp.asarray(hi)
    x = between(xp, lo - xp.abs(lo) * relative, hi + xp.abs(hi) * relative, nan)
    # Infinite ends are exact but for the direction in which a last place decides.
    lo = xp.where(lo == -np.inf, lo, xp.where(lo == np.inf, near, x.lo))
    hi = xp.where(hi == np.inf, hi, xp.where(hi == -np.inf, -near, x.hi))
    lo, hi = xp.where(xp.isnan(lo), kind(-np.inf), lo), xp.where(xp.isnan(hi), kind(np.inf), hi)
    lo = xp.where((lo > 0) & (lo < tiny), kind(0), lo)
    hi = xp.where((hi < 0) & (hi > -tiny), kind(0), hi)
    lo = xp.where(lo < -near, kind(-np.inf), xp.minimum(lo, most))
    hi = xp.where(hi > near, kind(np.inf), xp.maximum(hi, -most))
    return Interval(lo, hi, x.nan)


# Rules of rows that are not in the table's general families.


def unknown(xp, dtype, *intervals, **_) -> Interval:
    return everything(dtype)


def _add_overflows(a, b, total):
    if jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        return total < a
    return ((a ^ total) & (b ^ total)) < 0


def _sub_overflows(a, b, rest):
    if jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        return a < b
    return ((a ^ b) & (a ^ rest)) < 0


def add(xp, dtype, a, b) -> Interval:
    lo, hi = a.lo + b.lo, a.hi + b.hi
    if not _is_float(a):
        lost = _add_overflows(a.lo, b.lo, lo) | _add_overflows(a.hi, b.hi, hi)
        return _else_everything(xp, dtype, ~lost, between(xp, lo, hi))
    opposed = ((a.lo == -np.inf) & (b.hi == np.inf)) | ((a.hi == np.inf) & (b.lo == -np.inf))
    return _widened(xp, dtype, _low_of(xp, lo), _high_of(xp, hi), _nan(a, b) | opposed, 1)


def sub(xp, dtype, a, b) -> Interval:
    if _is_float(a):
        return add(xp, dtype, a, Interval(-b.hi, -b.lo, b.nan))
    lo, hi = a.lo - b.hi, a.hi - b.lo
    lost = _sub_overflows(a.lo, b.hi, lo) | _sub_overflows(a.hi, b.lo, hi)
    return _else_everything(xp, dtype, ~lost, between(xp, lo, hi))


def _low_of(xp, value):
    return xp.where(xp.isnan(value), value.dtype.type(-np.inf), value)


def _high_of(xp, value):
    return xp.where(xp.isnan(value), value.dtype.type(np.inf), value)


def _corners(a: Interval, b: Interval, f: Callable) -> list:
    return [f(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]


def mul(xp, dtype, a, b) -> Interval:
    products = _corners(a, b, lambda x, y: x * y)
    if _is_float(a):
        # 0 * infinity: 0 bounds what stands beside it, and NaN is possible.
        def infinite(x):
            return (x.lo == -np.inf) | (x.hi == np.inf)

        nan = _nan(a, b) | (_contains(a, 0) & infinite(b)) | (_contains(b, 0) & infinite(a))
        products = [xp.where(xp.isnan(p), p.dtype.type(0), p) for p in products]
        return _widened(xp, dtype, _smallest(xp, products), _largest(xp, products), nan, 1)
    wide = np.float64 if xp is np else jnp.float32
    limit = float(np.iinfo(dtype).max) * (1 - 1e-6)
    sizes = _corners(a, b, lambda x, y: xp.abs(x.astype(wide)) * xp.abs(y.astype(wide)))
    fits = _largest(xp, sizes) < limit
    return _else_everything(
        xp, dtype, fits, between(xp, _smallest(xp, products), _largest(xp, products))
    )


def _floor_div(xp, a, b):
    """Floor division of integers, of which no divisor is 0 (where one is, the caller throws the result away)."""
    return a // xp.where(b == 0, b.dtype.type(1), b)


def _trunc_div(xp, a, b):
    b = xp.where(b == 0, b.dtype.type(1), b)
    quotient = a // b
    if jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        return quotient
    inexact = quotient * b != a
    return quotient + (inexact & ((a < 0) != (b < 0))).astype(a.dtype)


def _quotient_fits(dtype, a, b):
    """No division by zero, and not the one quotient that overflows."""
    fits = ~_contains(b, 0)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        fits = fits & ~((a.lo == np.iinfo(dtype).min) & _contains(b, -1))
    return fits


def div(xp, dtype, a, b) -> Interval:
    if not _is_float(a):
        quotients = _corners(a, b, lambda x, y: _trunc_div(xp, x, y))
        found = between(xp, _smallest(xp, quotients), _largest(xp, quotients))
        return _else_everything(xp, dtype, _quotient_fits(dtype, a, b), found)
    quotients = _corners(a, b, lambda x, y: x / xp.where(y == 0, y.dtype.type(1), y))
    quotients = [xp.where(xp.isnan(q), q.dtype.type(0), q) for q in quotients]

    def infinite(x):
        return (x.lo == -np.inf) | (x.hi == np.inf)

    tiny = float(jnp.finfo(ends_dtype(dtype)).smallest_normal) * 2  # may be flushed to 0
    near_zero = (b.lo <= tiny) & (b.hi >= -tiny)
    nan = _nan(a, b) | (infinite(a) & infinite(b))
    found = _widened(xp, dtype, _smallest(xp, quotients), _largest(xp, quotients), nan, 2)
    return _else_everything(xp, dtype, ~near_zero, found)


def floor_divide(xp, dtype, a, b) -> Interval:
    quotients = _corners(a, b, lambda x, y: _floor_div(xp, x, y))
    found = between(xp, _smallest(xp, quotients), _largest(xp, quotients))
    return _else_everything(xp, dtype, _quotient_fits(dtype, a, b), found)


def remainder(xp, dtype, a, b) -> Interval:
    """Sign of the divisor; 0 for a divisor of 0. Exact for one divisor, while `a` stays within one multiple of it."""
    one, zero = b.lo.dtype.type(1), b.lo.dtype.type(0)
    hi = xp.maximum(b.hi, one) - one
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        lo = xp.zeros_like(hi)
        hi = xp.minimum(hi, xp.maximum(a.hi, zero))
    else:
        lo = xp.minimum(b.lo, -one) + one
    divisor = xp.where(b.lo == 0, one, b.lo)
    same = (b.lo == b.hi) & (b.lo != 0) & (a.lo // divisor == a.hi // divisor)
    return between(
        xp,
        xp.where(same, a.lo % divisor, lo),
        xp.where(same, a.hi % divisor, hi),
    )


def rem(xp, dtype, a, b) -> Interval:
    """Sign of the dividend."""
    if _is_float(a):
        size = xp.maximum(xp.abs(b.lo), xp.abs(b.hi))
        top = size.dtype.type(0)
        infinite = (a.lo == -np.inf) | (a.hi == np.inf)
        tiny = float(jnp.finfo(ends_dtype(dtype)).smallest_normal) * 2
        nan = _nan(a, b) | infinite | ((b.lo <= tiny) & (b.hi >= -tiny))
        return _widened(xp, dtype, xp.where(a.lo < 0, -size, top), xp.where(a.hi > 0, size, top), nan, 1)
    zero, one = a.lo.dtype.type(0), a.lo.dtype.type(1)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        most = b.hi - xp.minimum(b.hi, one)
        lo, hi = xp.zeros_like(a.lo), xp.minimum(a.hi, most)
    else:
        # One below the divisor's size, without the overflow of abs.
        most = xp.maximum(xp.maximum(b.hi, -(b.lo + one)), one) - xp.where(b.hi >= -b.lo, one, zero)
        most = xp.maximum(most, zero)
        lo = xp.where(a.lo < 0, xp.maximum(a.lo, -most), zero)
        hi = xp.where(a.hi > 0, xp.minimum(a.hi, most), zero)
    found = between(xp, lo, hi)
    same = (b.lo == b.hi) & (_trunc_div(xp, a.lo, b.lo) == _trunc_div(xp, a.hi, b.hi))
    same = same & ((a.lo >= 0) | (a.hi <= 0))

    def left(x):
        return x - _trunc_div(xp, x, b.lo) * b.lo

    exact = between(xp, left(a.lo), left(a.hi))
    found = Interval(
        xp.where(same, exact.lo, found.lo), xp.where(same, exact.hi, found.hi), np.False_
    )
    return _else_everything(xp, dtype, _quotient_fits(dtype, a, b), found)


def neg(xp, dtype, a) -> Interval:
    if _is_float(a):
        return Interval(-a.hi, -a.lo, a.nan)
    zero = a.lo.dtype.type(0)
    return sub(xp, dtype, Interval(zero, zero, np.False_), a)


def sign(xp, dtype, a) -> Interval:
    return Interval(xp.sign(a.lo), xp.sign(a.hi), a.nan)


def abs_(xp, dtype, a) -> Interval:
    zero = a.lo.dtype.type(0)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return a
    lo = xp.maximum(xp.maximum(a.lo, -a.hi), zero)
    hi = xp.maximum(-a.lo, a.hi)
    found = Interval(lo, hi, a.nan)
    if _is_float(a):
        return found
    return _else_everything(xp, dtype, a.lo != np.iinfo(dtype).min, found)


def max_(xp, dtype, a, b) -> Interval:
    return Interval(xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi), _nan(a, b))


def min_(xp, dtype, a, b) -> Interval:
    return Interval(xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi), _nan(a, b))


def clamp(xp, dtype, low, x, high) -> Interval:
    return min_(xp, dtype, max_(xp, dtype, x, low), high)


def integer_pow(xp, dtype, a, *, y: int) -> Interval:
    if y == 0:
        one = a.lo.dtype.type(1)
        return Interval(one, one, np.False_)
    if y < 0:
        if not _is_float(a):
            return everything(dtype)
        one = a.lo.dtype.type(1)
        return div(xp, dtype, Interval(one, one, np.False_), integer_pow(xp, dtype, a, y=-y))
    result = a
    for _ in range(min(y, 64) - 1):
        result = mul(xp, dtype, result, a)
    if y > 64:
        return everything(dtype)
    if y % 2 == 0 and _is_float(a):
        size = abs_(xp, dtype, a)
        for_size = size
        for _ in range(y - 1):
            for_size = mul(xp, dtype, for_size, size)
        return for_size
    if y % 2 == 0:
        size = abs_(xp, dtype, a)
        power = size
        for _ in range(y - 1):
            power = mul(xp, dtype, power, size)
        return power
    return result


def square(xp, dtype, a) -> Interval:
    return integer_pow(xp, dtype, a, y=2)


def eq(xp, dtype, a, b) -> Interval:
    same = _is_point(a) & _is_point(b) & (a.lo == b.lo)
    return Interval(same, (a.lo <= b.hi) & (b.lo <= a.hi), np.False_)


def ne(xp, dtype, a, b) -> Interval:
    return not_(xp, dtype, eq(xp, dtype, a, b))


def lt(xp, dtype, a, b) -> Interval:
    return Interval((a.hi < b.lo) & ~_nan(a, b), a.lo < b.hi, np.False_)


def le(xp, dtype, a, b) -> Interval:
    return Interval((a.hi <= b.lo) & ~_nan(a, b), a.lo <= b.hi, np.False_)


def gt(xp, dtype, a, b) -> Interval:
    return lt(xp, dtype, b, a)


def ge(xp, dtype, a, b) -> Interval:
    return le(xp, dtype, b, a)


def not_(xp, dtype, a) -> Interval:
    return Interval(~a.hi, ~a.lo, np.False_)


def _filled(xp, value):
    """All bits up to the highest that is set."""
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < 8 * value.dtype.itemsize:
            value = value | (value >> value.dtype.type(shift))
    return value


def _bits(xp, dtype, a, b, f: Callable, lo, hi) -> Interval:
    exact = f(a.lo, b.lo)
    points = _is_point(a) & _is_point(b)
    nonnegative = (a.lo >= 0) & (b.lo >= 0)
    found = _else_everything(xp, dtype, nonnegative, between(xp, lo, hi))
    return Interval(
        xp.where(points, exact, found.lo), xp.where(points, exact, found.hi), np.False_
    )


def and_(xp, dtype, a, b) -> Interval:
    if dtype == bool:
        return Interval(a.lo & b.lo, a.hi & b.hi, np.False_)
    zero = xp.zeros_like(a.lo & b.lo)
    return _bits(xp, dtype, a, b, lambda x, y: x & y, zero, xp.minimum(a.hi, b.hi))


def or_(xp, dtype, a, b) -> Interval:
    if dtype == bool:
        return Interval(a.lo | b.lo, a.hi | b.hi, np.False_)
    top = _filled(xp, xp.maximum(a.hi, b.hi))
    return _bits(xp, dtype, a, b, lambda x, y: x | y, xp.maximum(a.lo, b.lo), top)


def xor(xp, dtype, a, b) -> Interval:
    if dtype == bool:
        return ne(xp, dtype, a, b)
    top = _filled(xp, xp.maximum(a.hi, b.hi))
    return _bits(xp, dtype, a, b, lambda x, y: x ^ y, xp.zeros_like(top), top)


def shift_left(xp, dtype, a, by) -> Interval:
    bits = 8 * jnp.dtype(dtype).itemsize
    inside = (by.lo >= 0) & (by.hi < bits - 1)
    safe = xp.clip(by.hi, 0, bits - 2).astype(a.lo.dtype)
    safe_lo = xp.clip(by.lo, 0, bits - 2).astype(a.lo.dtype)
    one = a.lo.dtype.type(1)
    powers = Interval(xp.left_shift(one, safe_lo), xp.left_shift(one, safe), np.False_)
    return _else_everything(xp, dtype, inside, mul(xp, dtype, a, powers))


def shift_right_arithmetic(xp, dtype, a, by) -> Interval:
    bits = 8 * jnp.dtype(dtype).itemsize
    inside = (by.lo >= 0) & (by.hi < bits)
    amounts = [xp.clip(n, 0, bits - 1).astype(a.lo.dtype) for n in (by.lo, by.hi)]
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        signed = (a.hi >> a.hi.dtype.type(bits - 1)) == 0  # else the top bit is copied
        inside = inside & signed
    shifted = [xp.right_shift(x, n) for x in (a.lo, a.hi) for n in amounts]
    found = between(xp, _smallest(xp, shifted), _largest(xp, shifted))
    return _else_everything(xp, dtype, inside, found)


def shift_right_logical(xp, dtype, a, by) -> Interval:
    bits = 8 * jnp.dtype(dtype).itemsize
    inside = (by.lo >= 0) & (by.hi < bits) & (a.lo >= 0)
    amounts = [xp.clip(n, 0, bits - 1).astype(a.lo.dtype) for n in (by.lo, by.hi)]
    shifted = [xp.right_shift(x, n) for x in (a.lo, a.hi) for n in amounts]
    found = between(xp, _smallest(xp, shifted), _largest(xp, shifted))
    return _else_everything(xp, dtype, inside, found)


def bit_count(xp, dtype, a) -> Interval:
    """Of population_count and clz."""
    kind = a.lo.dtype.type
    return Interval(kind(0), kind(8 * jnp.dtype(dtype).itemsize), np.False_)


def select_n(xp, dtype, which, *cases) -> Interval:
    if which.lo.dtype == bool:
        possible = [~which.lo, which.hi]
    else:
        possible = [(which.lo <= i) & (which.hi >= i) for i in range(len(cases))]
    all_of = everything(dtype)
    lo = [xp.where(p, c.lo, all_of.hi) for p, c in zip(possible, cases, strict=True)]
    hi = [xp.where(p, c.hi, all_of.lo) for p, c in zip(possible, cases, strict=True)]
    nan = functools.reduce(
        lambda a, b: a | b, (p & c.nan for p, c in zip(possible, cases, strict=True))
    )
    return Interval(_smallest(xp, lo), _largest(xp, hi), nan)


def wrap(xp, dtype, x, size) -> Interval:
    """`x + size` where x is below 0."""
    shifted = add(xp, dtype, x, size)
    zero, one = x.lo.dtype.type(0), x.lo.dtype.type(1)
    # Either sign is possible: from the lowest that wraps (or 0) to the highest that does not (or size - 1).
    lo = xp.where(x.hi < 0, shifted.lo, xp.minimum(shifted.lo, zero))
    hi = xp.where(x.hi < 0, shifted.hi, xp.maximum(size.hi - one, x.hi))
    return between(xp, xp.where(x.lo >= 0, x.lo, lo), xp.where(x.lo >= 0, x.hi, hi))


def convert_element_type(xp, dtype, a, *, new_dtype: str) -> Interval:
    kind = ends_dtype(dtype).type
    if a.lo.dtype == bool:
        return Interval(a.lo.astype(kind), a.hi.astype(kind), np.False_)
    if dtype == bool:
        zero = a.lo.dtype.type(0)
        never = (a.lo > zero) | (a.hi < zero)
        always = (a.lo == zero) & (a.hi == zero) & ~a.nan
        return Interval(never, ~always, np.False_)
    if jnp.issubdtype(dtype, jnp.floating):
        lo, hi = a.lo.astype(kind), a.hi.astype(kind)
        exact = ends_dtype(dtype) == dtype and (not _is_float(a) or a.lo.dtype.itemsize <= dtype.itemsize)
        if exact:
            return Interval(lo, hi, a.nan)
        return _widened(xp, dtype, lo, hi, a.nan, 1)
    info = np.iinfo(dtype)
    if _is_float(a):
        # 2^24 below the ends: those are no float32.
        low, high = float(info.min), float(info.max)
        room = 2.0**-20 * high
        fits = ~a.nan & (a.lo >= low + room * (low < 0)) & (a.hi <= high - room)
        lo, hi = (xp.where(fits, xp.trunc(v), v.dtype.type(0)).astype(kind) for v in (a.lo, a.hi))
        return _else_everything(xp, dtype, fits, between(xp, lo, hi))
    source = np.iinfo(a.lo.dtype)
    fits = np.True_
    if source.min < info.min:
        fits = fits & (a.lo >= a.lo.dtype.type(info.min))
    if source.max > info.max:
        fits = fits & (a.hi <= a.hi.dtype.type(info.max))
    return _else_everything(xp, dtype, fits, between(xp, a.lo.astype(kind), a.hi.astype(kind)))


def is_finite(xp, dtype, a) -> Interval:
    finite = ~a.nan & (a.lo > -np.inf) & (a.hi < np.inf)
    never = (a.lo == np.inf) | (a.hi == -np.inf)
    return Interval(finite, ~never, np.False_)


def keep(xp, dtype, a) -> Interval:
    return a


def integral(f: str) -> Rule:
    """floor, ceil and the roundings: monotone and exact."""

    def rule(xp, dtype, a, **_) -> Interval:
        return Interval(getattr(xp, f)(a.lo), getattr(xp, f)(a.hi), a.nan)

    return rule


def round_(xp, dtype, a, *, rounding_method: int) -> Interval:
    if rounding_method == 1:  # to even
        return Interval(xp.round(a.lo), xp.round(a.hi), a.nan)

    def away(x):
        return xp.where(xp.isinf(x), x, xp.trunc(x + xp.copysign(x.dtype.type(0.5), x)))

    # x + 0.5 rounds: one unit of room.
    lo, hi = away(a.lo), away(a.hi)
    one = lo.dtype.type(1)
    return Interval(xp.where(a.lo == lo, lo, lo - one), xp.where(a.hi == hi, hi, hi + one), a.nan)


def _function(xp, name: str) -> Callable:
    if name == "erf":
        return _np_erf if xp is np else lax.erf
    if name == "erfc":
        return (lambda x: _np_erf(x, math.erfc)) if xp is np else lax.erfc
    if name == "logistic":
        return lambda x: 1 / (1 + xp.exp(-x))
    if name == "rsqrt":
        return lambda x: 1 / xp.sqrt(x)
    return getattr(xp, name)


def _np_erf(x, f: Callable = math.erf):
    return np.vectorize(f, otypes=[np.float64])(x).astype(np.asarray(x).dtype)


def increasing(name: str, low: float = -math.inf, high: float = math.inf, falling: bool = False) -> Rule:
    """Of a monotone function on `low` to `high`, NaN outside."""

    def rule(xp, dtype, a, **_) -> Interval:
        f = _function(xp, name)
        kind = a.lo.dtype.type
        x, y = (xp.clip(v, kind(low), kind(high)) for v in (a.lo, a.hi))
        outside = (a.lo < low) | (a.hi > high)
        ends = (f(y), f(x)) if falling else (f(x), f(y))
        return _widened(xp, dtype, *ends, a.nan | outside, _LIBRARY_ULPS)

    return rule


def limited(low: float, high: float) -> Rule:
    """Of a function whose values lie between two numbers whatever its inputs."""

    def rule(xp, dtype, *intervals, **_) -> Interval:
        kind = ends_dtype(dtype).type
        infinite = functools.reduce(
            lambda p, q: p | q, ((i.lo == -np.inf) | (i.hi == np.inf) for i in intervals)
        )
        return _widened(xp, dtype, kind(low), kind(high), _nan(*intervals) | infinite, 2)

    return rule
