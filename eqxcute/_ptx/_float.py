"""Floating-point arithmetic with PTX's roundings.

float32 sums, differences, products and quotients are NumPy's own, which round once. Where
another rounding is asked for, and for the fused multiply-add, the exact result is taken as
a float64 rounded to odd: a last bit of 1 says "not exact". Rounding that again to 24 bits
or fewer gives what rounding the exact value gives (Boldo and Melquiond, 2008).
"""

import numpy as np

from ._types import BF16, dtype

F32, F64 = np.dtype("f4"), np.dtype("f8")
_TIE = np.uint64(0x10000000)  # the 29 bits that float64 has more than float32: exactly half
_TAIL = np.uint64(0x1FFFFFFF)
_TINY = float(np.finfo(np.float32).tiny)


def two_sum(a, b):
    """`a + b` and its rounding error (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a, b):
    """`a * b` and its rounding error (Dekker), in float64, without overflow."""

    def split(x):
        c = x * 134217729.0
        high = c - (c - x)
        return high, x - high

    p = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def to_odd(s, error):
    """`s + error`, |error| at most half a last place of s, rounded to odd."""
    fix = np.isfinite(s) & np.isfinite(error) & (error != 0)
    bits = s.view(np.uint64)
    fix &= (bits & np.uint64(1)) == 0
    if not fix.any():
        return s
    away = (error > 0) == (s > 0)  # the exact value is farther from zero than s
    moved = np.where(away, bits + np.uint64(1), bits - np.uint64(1)).view(F64)
    moved = np.where(s == 0, error, moved)
    return np.where(fix, moved, s)


def odd_sum(a, b):
    """The exact `a + b` of float32 or narrower numbers, as float64 rounded to odd."""
    return to_odd(*two_sum(np.asarray(a, F64), np.asarray(b, F64)))


def odd_fma(a, b, c):
    """The exact `a * b + c` of float32 or narrower numbers, as float64 rounded to odd."""
    return to_odd(*two_sum(np.asarray(a, F64) * np.asarray(b, F64), np.asarray(c, F64)))


def fma32(a, b, c):
    """`a * b + c` in float32, rounded once, to nearest.

    The product is exact in float64, and rounding the sum twice harms only when the first
    result lies half-way between two float32 numbers, or below their normal range.
    """
    wide = a.astype(F64) * b
    wide = wide + c
    tie = (wide.view(np.uint64) & _TAIL) == _TIE
    tie |= np.abs(wide) < _TINY
    if tie.any():
        wide = odd_fma(a, b, c)
    return wide.astype(F32)


def fma64(a, b, c):
    """`a * b + c` in float64, rounded once (Boldo and Melquiond, 2008).

    Where an operand is so large or small that splitting it would overflow or lose bits, the
    plain formula, rounded twice, is used.
    """
    uh, ul = two_product(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    exact = vh + to_odd(*two_sum(tl, vl))
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(c))
    small = (np.abs(uh) < 1e-250) & (uh != 0)
    plain = (size > 1e150) | small | ~np.isfinite(exact) | (exact == 0)
    return np.where(plain, a * b + c, exact)


def narrow(wide, name: str, mode: str = "rn"):
    """float64 (exact, or rounded to odd) to a PTX float type by `rn`, `rz`, `rm` or `rp`."""
    target = dtype(name)
    if target == F64:
        return wide
    if target == BF16:
        # ml_dtypes rounds float64 to float32 first: round that step to odd.
        middle = wide.astype(F32)
        back = middle.astype(F64)
        middle = _odd32(middle, wide - back)
        out = middle.astype(BF16)
    else:
        out = wide.astype(target)
    if mode in ("rn", "rni"):
        return out
    back = out.astype(F64)
    if mode == "rz":
        wrong, toward = np.abs(back) > np.abs(wide), np.zeros_like(wide)
    elif mode == "rm":
        wrong, toward = back > wide, np.full_like(wide, -np.inf)
    else:
        wrong, toward = back < wide, np.full_like(wide, np.inf)
    if not wrong.any():
        return out
    return np.where(wrong, np.nextafter(out, toward.astype(target)), out)


def _odd32(middle, error):
    fix = np.isfinite(middle) & np.isfinite(error) & (error != 0)
    bits = middle.view(np.uint32)
    fix &= (bits & np.uint32(1)) == 0
    if not fix.any():
        return middle
    away = (error > 0) == (middle > 0)
    moved = np.where(away, bits + np.uint32(1), bits - np.uint32(1)).view(F32)
    moved = np.where(middle == 0, np.where(error > 0, 1e-45, -1e-45).astype(F32), moved)
    return np.where(fix, moved, middle)


def flush(x):
    """Subnormal float32 numbers become zeros of their sign (`.ftz`)."""
    tiny = np.abs(x) < np.finfo(x.dtype).tiny
    if not tiny.any():
        return x
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x)


def saturate(x):
    """Into [0, 1]; NaN becomes 0 (`.sat`)."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)).astype(x.dtype)


def canonical_nan(x):
    """The NaN that PTX arithmetic gives: 0x7fffffff, or 0x7fff in 16 bits."""
    bad = x != x
    if not bad.any():
        return x
    bits = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FFFFFFFFFFFFFFF)}
    nan = np.array(bits[x.dtype.itemsize]).view(x.dtype)
    return np.where(bad, nan, x)


def extreme(kind: str, keep_nan: bool):
    """PTX's `min` and `max`: -0 is below +0; NaN loses, or wins where `keep_nan`."""
    integer = np.bitwise_and if kind == "max" else np.bitwise_or

    def pick(a, b):
        better = a > b if kind == "max" else a < b
        out = np.where(better | (b != b), a, b)
        equal = a == b
        if equal.any():  # only the zeros differ: +0 is bits 0
            unsigned = np.dtype(f"u{a.dtype.itemsize}")
            zeros = integer(a.view(unsigned), b.view(unsigned)).view(a.dtype)
            out = np.where(equal, zeros, out)
        if keep_nan:
            out = np.where((a != a) | (b != b), a.dtype.type(np.nan), out)
        return canonical_nan(out)

    return pick
