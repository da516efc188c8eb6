"""`cvt`: between integers and floats of every width.

Types stand in the opcode as `cvt.<how>.<to>.<from>`. Packed results (`f16x2`, `e4m3x2`) come
from two operands, the first for the upper half; NumPy's order is lower half first.
"""

import numpy as np

from . import _float
from ._alu import operation
from ._fault import Unsupported
from ._types import BF16, dtype, is_float, is_packed, is_signed, width

_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_KNOWN = ("rn", "rz", "rm", "rp", "rna", "ftz", "sat", "satfinite", "relu", *_TO_INTEGER)
_LARGEST = {"e4m3x2": 448.0, "e5m2x2": 57344.0, "f16": 65504.0, "f16x2": 65504.0}


@operation("cvt")
def _cvt(ins):
    to, source = ins.mods[-2], ins.mods[-1]
    how = ins.mods[1:-2]
    for mod in how:
        if mod not in _KNOWN:
            raise Unsupported(f"the modifier .{mod}")
    count = len(ins.args) - 1
    if is_packed(to) and count == 2:
        single = _to_float(how, to, source)

        def pack(high, low):
            both = np.broadcast_arrays(single(low), single(high))
            return np.stack(both, axis=1)

        return pack, to, (source, source)
    if count != 1:
        raise Unsupported(f"the opcode {ins.op} with {count} operands")
    if is_float(to):
        return _to_float(how, to, source), to, (source,)
    if is_float(source):
        return _float_to_integer(how, to, source), to, (source,)
    return _integer_to_integer(how, to), to, (source,)


def _integer_to_integer(how, to: str):
    target = dtype(to)
    if "sat" not in how:
        return lambda x: x.astype(target)
    info = np.iinfo(target)

    def run(x):
        # Compare in the source's type, with the ends that fit it.
        low = max(int(info.min), int(np.iinfo(x.dtype).min))
        high = min(int(info.max), int(np.iinfo(x.dtype).max))
        return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(target)

    return run


def _float_to_integer(how, to: str, source: str):
    """Out of range stops at the ends. NaN is 0, or for float64 the top bit alone."""
    mode = next((m for m in how if m in _TO_INTEGER), None)
    if mode is None:
        raise Unsupported(f"cvt to {to} without a rounding to an integer")
    target, info = dtype(to), np.iinfo(dtype(to))
    nan = 0
    if source == "f64":
        nan = int(info.min) if is_signed(to) else 1 << (8 * width(to) - 1)

    def run(x):
        if "ftz" in how and source == "f32":
            x = _float.flush(x)
        wide = _TO_INTEGER[mode](x.astype(np.float64))
        # float(info.max) may round up to 2**63: such numbers are too large as well.
        above, below = wide >= float(info.max), wide <= float(info.min)
        inside = np.where(above | below | (wide != wide), 0.0, wide)
        out = inside.astype(target)
        out = np.where(above, target.type(info.max), out)
        out = np.where(below, target.type(info.min), out)
        return np.where(wide != wide, np.array(nan).astype(target), out)

    return run


def _to_float(how, to: str, source: str):
    """From an integer or a float to one (half of a) float of type `to`."""
    if to in ("tf32",):
        return _to_tf32(how)
    integral = next((m for m in how if m in _TO_INTEGER), None)
    mode = next((m for m in how if m in ("rn", "rz", "rm", "rp")), "rn")
    target = dtype(to)
    ftz = "ftz" in how

    def run(x):
        if ftz and x.dtype == np.float32:
            x = _float.flush(x)
        out = _round_to(x, to, target, mode, integral)
        if "relu" in how:
            out = np.where(out > 0, out, np.where(out == out, target.type(0), out))
        if "satfinite" in how:
            out = _satisfy(out, x, to)
        if "sat" in how:
            out = _float.saturate(out)
        if ftz and out.dtype == np.float32:
            out = _float.flush(out)
        return _float.canonical_nan(out) if target.itemsize > 1 else out

    return run


def _round_to(x: np.ndarray, to, target, mode, integral) -> np.ndarray:
    if integral is not None:  # to a whole number, kept as a float
        return _TO_INTEGER[integral](x.astype(np.float64)).astype(target)
    if x.dtype.kind in "iu":
        return _integer_to_float(x, to, target, mode)
    if mode == "rn":
        if target == BF16 and x.dtype == np.float64:
            return _float.narrow(x, "bf16")
        if target.itemsize == 1 and x.dtype != np.float32:
            x = x.astype(np.float32)  # from 16 bits: exact
        return x.astype(target)
    return _float.narrow(x.astype(np.float64), to.removesuffix("x2"), mode)


def _integer_to_float(x, to, target, mode):
    if x.dtype.itemsize < 8:
        return _float.narrow(x.astype(np.float64), to.removesuffix("x2"), mode)
    if mode == "rn" and target.itemsize >= 4:
        return x.astype(target)
    if target.itemsize == 8:
        raise Unsupported(f"64-bit integers to {to} with the rounding .{mode}")
    high = (x >> x.dtype.type(32)).astype(np.float64) * 4294967296.0
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return _float.narrow(_float.odd_sum(high, low), to.removesuffix("x2"), mode)


def _satisfy(out, x, to):
    """`.satfinite`: what is too large becomes the largest finite number."""
    if to not in _LARGEST:
        top = float(np.finfo(np.float32).max) if to == "f32" else None
        if top is None:
            return out
    else:
        top = _LARGEST[to]
    wide = x.astype(np.float64)
    limit = np.array(top).astype(out.dtype)
    out = np.where(wide >= top, limit, out)
    return np.where(wide <= -top, -limit, out)


def _to_tf32(how):
    """The ten upper bits of the fraction: ties away from zero (`.rna`), or to even (`.rn`)."""

    def run(x):
        bits = x.view(np.uint32)
        if "rna" in how:
            moved = bits + np.uint32(0x1000)
        elif "rz" in how:
            moved = bits
        else:
            moved = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        moved &= np.uint32(0xFFFFE000)
        return np.where(np.isfinite(x), moved, bits).view(np.float32)

    return run
