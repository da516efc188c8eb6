"""Intervals: what a value can be, when its inputs can be anything in theirs.

A rule may be loose, never wrong. The same rules work on NumPy arrays, at trace time, and on JAX arrays, inside a
program: `xp` is the one or the other, and every end may be an array, of all tiles at once.

Integers wrap around, as JAX's do: where an operation may leave the dtype's range, the answer is the whole range. Floats
are rounded, by libraries that differ in the last places, contracted to fused multiply-adds, and subnormals may be
flushed: each inexact operation widens its interval by a few units in the last place, so that all of these stay inside.
No end is subnormal, so that an interval with subnormals has 0 in it as well. The ends 0 stand for -0.0 too. 16-bit floats
are kept as float32 ends, for they may be held in float32 between operations.
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
    if dtype == np.bool_:
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
    """With no subnormal ends: some libraries take such numbers for 0, JAX on CPU for one."""
    if not _is_float(x):
        return x
    return x._replace(lo=_normal(xp, dtype, x.lo, -1), hi=_normal(xp, dtype, x.hi, 1))


def _tiny(dtype: Any) -> Any:
    """Above all subnormals."""
    return ends_dtype(dtype).type(float(jnp.finfo(dtype).smallest_normal) * 2)


def _normal(xp: Any, dtype: Any, end: Any, outward: int) -> Any:
    """A subnormal end, moved `outward` to 0 or to the next normal number."""
    kind, tiny = end.dtype.type, _tiny(dtype)
    end = xp.where((end * outward < 0) & (end * outward > -tiny), kind(0), end)
    return xp.where((end * outward > 0) & (end * outward < tiny), tiny * kind(outward), end)


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


def _widened(
    xp: Any,
    dtype: Any,
    lo: Any,
    hi: Any,
    nan: Any,
    ulps: float,
    *,
    below: Any = False,
    above: Any = False,
) -> Interval:
    """Room for `ulps` units of rounding in `dtype` and as much again, for flushed subnormals and early overflow.

    Where an end is 0, `below` and `above` say that it may be so by underflow only.
    """
    info = jnp.finfo(dtype)
    kind = ends_dtype(dtype).type
    room = float(info.eps) * 2 * ulps
    relative, tiny, most = kind(room), _tiny(dtype), kind(info.max)
    near = kind(
        float(info.max) / (1 + 2 * room + 8 * float(info.eps))
    )  # from here on it may overflow
    lo, hi = xp.asarray(lo), xp.asarray(hi)
    lost = xp.isnan(lo) | xp.isnan(hi)
    lo, hi = xp.where(xp.isnan(lo), kind(-np.inf), lo), xp.where(xp.isnan(hi), kind(np.inf), hi)
    lo = xp.where((lo == 0) & below, -tiny, _normal(xp, dtype, lo, -1))
    hi = xp.where((hi == 0) & above, tiny, _normal(xp, dtype, hi, 1))
    # An infinite end may be a finite one that overflowed.
    lo = xp.where(xp.isinf(lo), xp.where(lo > 0, near, lo), lo - xp.abs(lo) * relative)
    hi = xp.where(xp.isinf(hi), xp.where(hi < 0, -near, hi), hi + xp.abs(hi) * relative)
    lo, hi = _normal(xp, dtype, lo, -1), _normal(xp, dtype, hi, 1)
    lo = xp.where(lo < -near, kind(-np.inf), xp.minimum(lo, most))
    hi = xp.where(hi > near, kind(np.inf), xp.maximum(hi, -most))
    return Interval(lo, hi, nan | lost)


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


def _known_to_fit(xp, dtype, a, b, ends: Callable) -> bool:
    """Whether no tile overflows, told from the extremes of all tiles: much cheaper than tile by tile."""
    if xp is not np:
        return False
    corners = ends(*(int(end) for x in (a, b) for end in (np.min(x.lo), np.max(x.hi))))
    info = np.iinfo(dtype)
    return all(info.min <= x <= info.max for x in corners)


def _unless_wrapped(xp, dtype, a, found: Interval, lost_lo, lost_hi) -> Interval:
    """Both ends wrapped around in the same direction is as good as neither."""
    same = (lost_lo == lost_hi) & (~lost_lo | ((a.lo < 0) == (a.hi < 0)))
    return _else_everything(xp, dtype, same, found)


def add(xp, dtype, a, b) -> Interval:
    lo, hi = a.lo + b.lo, a.hi + b.hi
    if _is_float(a):
        opposed = ((a.lo == -np.inf) & (b.hi == np.inf)) | ((a.hi == np.inf) & (b.lo == -np.inf))
        nan, below, above = _nan(a, b) | opposed, a.lo < -b.lo, a.hi > -b.hi
        lo = xp.where(xp.isnan(lo), lo.dtype.type(-np.inf), lo)
        hi = xp.where(xp.isnan(hi), hi.dtype.type(np.inf), hi)
        return _widened(xp, dtype, lo, hi, nan, 1, below=below, above=above)
    found = between(xp, lo, hi)
    if _known_to_fit(xp, dtype, a, b, lambda al, ah, bl, bh: (al + bl, ah + bh)):
        return found
    lost = _add_overflows(a.lo, b.lo, lo), _add_overflows(a.hi, b.hi, hi)
    return _unless_wrapped(xp, dtype, a, found, *lost)


def sub(xp, dtype, a, b) -> Interval:
    if _is_float(a):
        return add(xp, dtype, a, neg(xp, dtype, b))
    lo, hi = a.lo - b.hi, a.hi - b.lo
    found = between(xp, lo, hi)
    if _known_to_fit(xp, dtype, a, b, lambda al, ah, bl, bh: (al - bh, ah - bl)):
        return found
    lost = _sub_overflows(a.lo, b.hi, lo), _sub_overflows(a.hi, b.lo, hi)
    return _unless_wrapped(xp, dtype, a, found, *lost)


def _corners(a: Interval, b: Interval, f: Callable) -> list:
    return [f(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]


def _signs(a: Interval, b: Interval) -> dict[str, Any]:
    """Whether a product or quotient may be below and above 0."""
    below = ((a.lo < 0) & (b.hi > 0)) | ((a.hi > 0) & (b.lo < 0))
    above = ((a.lo < 0) & (b.lo < 0)) | ((a.hi > 0) & (b.hi > 0))
    return {"below": below, "above": above}


def _infinite(x: Interval) -> Any:
    return (x.lo == -np.inf) | (x.hi == np.inf)


def mul(xp, dtype, a, b) -> Interval:
    products = _corners(a, b, lambda x, y: x * y)
    if _is_float(a):
        # 0 * infinity: 0 bounds what stands beside it, and NaN is possible.
        nan = _nan(a, b) | (_contains(a, 0) & _infinite(b)) | (_contains(b, 0) & _infinite(a))
        products = [xp.where(xp.isnan(p), p.dtype.type(0), p) for p in products]
        ends = _smallest(xp, products), _largest(xp, products)
        return _widened(xp, dtype, *ends, nan, 1, **_signs(a, b))
    found = between(xp, _smallest(xp, products), _largest(xp, products))
    if _known_to_fit(xp, dtype, a, b, lambda al, ah, bl, bh: (al * bl, al * bh, ah * bl, ah * bh)):
        return found
    info = np.iinfo(dtype)
    if info.bits <= 16 or (xp is np and info.bits <= 32):
        exact = _corners(a, b, lambda x, y: x.astype(_twice(dtype)) * y.astype(_twice(dtype)))
        fits = (_smallest(xp, exact) >= info.min) & (_largest(xp, exact) <= info.max)
    else:
        wide = np.float64 if xp is np else jnp.float32
        sizes = _corners(a, b, lambda x, y: xp.abs(x.astype(wide)) * xp.abs(y.astype(wide)))
        fits = _largest(xp, sizes) < float(info.max) * (1 - 1e-6)
    return _else_everything(xp, dtype, fits, found)


def _twice(dtype: Any) -> np.dtype:
    dtype = np.dtype(dtype)
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


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
    nan = _nan(a, b) | (_infinite(a) & _infinite(b))
    ends = _smallest(xp, quotients), _largest(xp, quotients)
    found = _widened(xp, dtype, *ends, nan, 2, **_signs(a, b))
    return _else_everything(xp, dtype, ~_contains(b, 0), found)


def floor_divide(xp, dtype, a, b) -> Interval:
    quotients = _corners(a, b, lambda x, y: _floor_div(xp, x, y))
    found = between(xp, _smallest(xp, quotients), _largest(xp, quotients))
    return _else_everything(xp, dtype, _quotient_fits(dtype, a, b), found)


def remainder(xp, dtype, a, b) -> Interval:
    """Sign of the divisor; 0 for a divisor of 0. Exact for one divisor, while `a` stays within one multiple of it."""
    one, zero = b.lo.dtype.type(1), b.lo.dtype.type(0)
    hi = xp.maximum(b.hi, one) - one
    lo = xp.zeros_like(hi)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        lo = xp.minimum(b.lo, -one) + one
    hi = xp.where((a.lo >= 0) & (b.lo >= 0), xp.minimum(hi, xp.maximum(a.hi, zero)), hi)
    divisor = xp.where(b.lo == 0, one, b.lo)
    same = (b.lo == b.hi) & (b.lo != 0) & (a.lo // divisor == a.hi // divisor)
    return between(
        xp,
        xp.where(same, a.lo % divisor, lo),
        xp.where(same, a.hi % divisor, hi),
    )


def rem(xp, dtype, a, b) -> Interval:
    """Sign of the dividend."""
    zero, one = a.lo.dtype.type(0), a.lo.dtype.type(1)
    if _is_float(a):
        size = xp.maximum(xp.abs(b.lo), xp.abs(b.hi))
        lo = xp.where(a.lo < 0, xp.maximum(a.lo, -size), zero)
        hi = xp.where(a.hi > 0, xp.minimum(a.hi, size), zero)
        return _widened(xp, dtype, lo, hi, _nan(a, b) | _infinite(a) | _contains(b, 0), 1)
    # One below the divisor's size, without the overflow of abs.
    most = xp.maximum(b.hi, one) - one
    if jnp.issubdtype(dtype, jnp.signedinteger):
        most = xp.maximum(most, -(xp.minimum(b.lo, -one) + one))
        lo = xp.where(a.lo < 0, xp.maximum(a.lo, -most), zero)
    else:
        lo = xp.zeros_like(most)
    hi = xp.where(a.hi > 0, xp.minimum(a.hi, most), zero)
    same = (b.lo == b.hi) & (_trunc_div(xp, a.lo, b.lo) == _trunc_div(xp, a.hi, b.hi))
    same = same & ((a.lo >= 0) | (a.hi <= 0))

    def left(x):
        return x - _trunc_div(xp, x, b.lo) * b.lo

    found = between(xp, xp.where(same, left(a.lo), lo), xp.where(same, left(a.hi), hi))
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
    lo, hi = xp.maximum(a.lo, b.lo), xp.maximum(a.hi, b.hi)
    if _is_float(a):  # of 0 and a subnormal, either
        lo = xp.where((lo == 0) & (xp.minimum(a.lo, b.lo) < 0), -_tiny(dtype), lo)
    return Interval(lo, hi, _nan(a, b))


def min_(xp, dtype, a, b) -> Interval:
    lo, hi = xp.minimum(a.lo, b.lo), xp.minimum(a.hi, b.hi)
    if _is_float(a):
        hi = xp.where((hi == 0) & (xp.maximum(a.hi, b.hi) > 0), _tiny(dtype), hi)
    return Interval(lo, hi, _nan(a, b))


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
    if y > 64:
        return everything(dtype)
    a = abs_(xp, dtype, a) if y % 2 == 0 else a
    result = a
    for _ in range(y - 1):
        result = mul(xp, dtype, result, a)
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
    """All bits up to the highest that is set. Of numbers from 0 on."""
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < 8 * value.dtype.itemsize:
            value = value | (value >> value.dtype.type(shift))
    return value


def _bits(xp, dtype, a, b, lo: Callable, hi: Callable) -> Interval:
    """From the bits that all numbers of an interval share: those above the highest in which its ends differ.

    `lo` and `hi` get, of both inputs, the shared bits that are set, and those that are not shared.
    """
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        signs = np.True_
    else:
        signs = ((a.lo ^ a.hi) >= 0) & ((b.lo ^ b.hi) >= 0)
    zero = a.lo.dtype.type(0)
    free = [_filled(xp, xp.maximum(x.lo ^ x.hi, zero)) for x in (a, b)]
    bits = (a.lo & ~free[0], b.lo & ~free[1], *free)
    return _else_everything(xp, dtype, signs, between(xp, lo(*bits), hi(*bits)))


def and_(xp, dtype, a, b) -> Interval:
    if dtype == np.bool_:
        return Interval(a.lo & b.lo, a.hi & b.hi, np.False_)
    lo, hi, _ = _bits(
        xp, dtype, a, b, lambda p, q, f, g: p & q, lambda p, q, f, g: (p | f) & (q | g)
    )
    zero = a.lo.dtype.type(0)
    for x, y in ((a, b), (b, a)):
        # Not below 0, and not above what is not below 0.
        lo = xp.where(y.lo >= 0, xp.maximum(lo, zero), lo)
        hi = xp.where(y.lo >= 0, xp.minimum(hi, y.hi), hi)
        # The lowest bits, of numbers that share all others: a remainder. All but the lowest bits: rounded down.
        one, mask = y.lo.dtype.type(1), y.lo
        low = (mask & (mask + one) == 0) & ((x.lo & ~mask) == (x.hi & ~mask))
        high = ~mask & (~mask + one) == 0
        exact = (y.lo == y.hi) & (low | high)
        lo, hi = xp.where(exact, x.lo & mask, lo), xp.where(exact, x.hi & mask, hi)
    return Interval(lo, hi, np.False_)


def or_(xp, dtype, a, b) -> Interval:
    if dtype == np.bool_:
        return Interval(a.lo | b.lo, a.hi | b.hi, np.False_)
    lo, hi, _ = _bits(xp, dtype, a, b, lambda p, q, f, g: p | q, lambda p, q, f, g: p | q | f | g)
    at_least = (a.lo >= 0) & (b.lo >= 0)
    lo = xp.where(at_least, xp.maximum(lo, xp.maximum(a.lo, b.lo)), lo)
    return Interval(lo, hi, np.False_)


def xor(xp, dtype, a, b) -> Interval:
    if dtype == np.bool_:
        return ne(xp, dtype, a, b)
    return _bits(
        xp, dtype, a, b, lambda p, q, f, g: (p ^ q) & ~(f | g), lambda p, q, f, g: (p ^ q) | f | g
    )


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
    if which.lo.dtype == np.bool_:
        possible = [~which.lo, which.hi]
    else:  # clamped
        last = len(cases) - 1
        possible = [
            ((which.lo <= i) | (i == last)) & ((which.hi >= i) | (i == 0)) for i in range(last + 1)
        ]
    all_of = everything(dtype)
    lo = [xp.where(p, c.lo, all_of.hi) for p, c in zip(possible, cases, strict=True)]
    hi = [xp.where(p, c.hi, all_of.lo) for p, c in zip(possible, cases, strict=True)]
    nan = functools.reduce(
        lambda a, b: a | b, (p & c.nan for p, c in zip(possible, cases, strict=True))
    )
    return Interval(_smallest(xp, lo), _largest(xp, hi), nan)


def wrap(xp, dtype, x, size) -> Interval:
    """`x + size` where x is below 0."""
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x
    zero, one = x.lo.dtype.type(0), x.lo.dtype.type(1)
    moved = add(xp, dtype, Interval(x.lo, xp.minimum(x.hi, -one), np.False_), size)
    lo = xp.where(x.hi < 0, moved.lo, xp.minimum(moved.lo, zero))
    hi = xp.where(x.hi < 0, moved.hi, xp.maximum(moved.hi, x.hi))
    return between(xp, xp.where(x.lo >= 0, x.lo, lo), xp.where(x.lo >= 0, x.hi, hi))


def convert_element_type(xp, dtype, a, *, new_dtype: str) -> Interval:
    kind = ends_dtype(dtype).type
    if a.lo.dtype == np.bool_:
        return Interval(a.lo.astype(kind), a.hi.astype(kind), np.False_)
    if dtype == np.bool_:
        zero = a.lo.dtype.type(0)
        never = (a.lo > zero) | (a.hi < zero)
        always = (a.lo == zero) & (a.hi == zero) & ~a.nan
        return Interval(never, ~always, np.False_)
    if jnp.issubdtype(dtype, jnp.floating):
        lo, hi = a.lo.astype(kind), a.hi.astype(kind)
        exact = ends_dtype(dtype) == dtype and (
            not _is_float(a) or a.lo.dtype.itemsize <= dtype.itemsize
        )
        if exact:
            return Interval(lo, hi, a.nan)
        return _widened(xp, dtype, lo, hi, a.nan, 1)
    info = np.iinfo(dtype)
    if _is_float(a):
        # Powers of two, which every float dtype has.
        fits = ~a.nan & (a.lo >= float(info.min)) & (a.hi < float(info.max + 1))
        lo, hi = (xp.where(fits, xp.trunc(v), v.dtype.type(0)).astype(kind) for v in (a.lo, a.hi))
        return _else_everything(xp, dtype, fits, between(xp, lo, hi))
    source = np.iinfo(a.lo.dtype)
    lo, hi = a.lo.astype(kind), a.hi.astype(kind)
    if info.min <= source.min and source.max <= info.max:
        return Interval(lo, hi, np.False_)
    fits = lo <= hi
    if source.bits > info.bits:
        width = (a.hi - a.lo).astype(np.dtype(f"u{source.bits // 8}"))
        fits = fits & (width < 2**info.bits)
    return _else_everything(xp, dtype, fits, Interval(lo, hi, np.False_))


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
        whole, one = xp.trunc(x), x.dtype.type(1)
        return whole + xp.where(xp.abs(x - whole) >= 0.5, xp.copysign(one, x), one * 0)

    return Interval(away(a.lo), away(a.hi), a.nan)


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


def increasing(
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    falling: bool = False,
    positive: bool = False,
    ulps: int = _LIBRARY_ULPS,
) -> Rule:
    """Of a monotone function on `low` to `high`, NaN outside. `positive`: no value is below 0."""

    def rule(xp, dtype, a, **_) -> Interval:
        f = _function(xp, name)
        kind = a.lo.dtype.type
        x, y = (xp.clip(v, kind(low), kind(high)) for v in (a.lo, a.hi))
        x, y = (y, x) if falling else (x, y)
        nan = a.nan | (a.lo < low) | (a.hi > high)
        # What is 0 by underflow: the sign is that of the input, where it is not positive anyhow.
        if positive:
            found = _widened(xp, dtype, f(x), f(y), nan, ulps, above=True)
            return found._replace(lo=xp.maximum(found.lo, kind(0)))
        return _widened(xp, dtype, f(x), f(y), nan, ulps, below=x < 0, above=y > 0)

    return rule


def rsqrt(xp, dtype, a) -> Interval:
    found = increasing("rsqrt", 0, falling=True)(xp, dtype, a)
    # Infinite at 0, and of the other sign at -0.0.
    zero, top = _contains(a, 0), found.lo.dtype.type(np.inf)
    return found._replace(lo=xp.where(zero, -top, found.lo), hi=xp.where(zero, top, found.hi))


def atan2(xp, dtype, y, x) -> Interval:
    found = limited(-math.pi, math.pi)(xp, dtype, y, x)
    # XLA divides, and takes subnormals for 0.
    return found._replace(nan=found.nan | (_contains(y, 0) & _contains(x, 0)))


def limited(low: float, high: float) -> Rule:
    """Of a function whose values lie between two numbers whatever its inputs."""

    def rule(xp, dtype, *intervals, **_) -> Interval:
        kind = ends_dtype(dtype).type
        infinite = functools.reduce(lambda p, q: p | q, map(_infinite, intervals))
        return _widened(xp, dtype, kind(low), kind(high), _nan(*intervals) | infinite, 2)

    return rule
