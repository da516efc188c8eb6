"""PTX types as NumPy dtypes, and how operands are read and results written.

A register holds an array with one entry a lane, in the unsigned integer of the register's
width (bool for predicates). Arrays in registers are never changed in place, so that two
registers may share one. A literal is an array of length 1: NumPy spreads it.
"""

import functools

import ml_dtypes
import numpy as np

from ._fault import Unsupported
from ._parse import SINK, Imm, Reg, Special, Sym, type_size

UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {
    "f16": np.dtype("f2"),
    "bf16": BF16,
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "tf32": np.dtype("f4"),
    "f16x2": np.dtype("f2"),
    "f32x2": np.dtype("f4"),
    "bf16x2": BF16,
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3x2": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2x2": np.dtype(ml_dtypes.float8_e5m2),
}


def is_float(name: str) -> bool:
    return name in _FLOATS


def is_signed(name: str) -> bool:
    return name[0] == "s"


def is_packed(name: str) -> bool:
    """Two numbers in one register: seen as an array of shape (lanes, 2)."""
    return name.endswith("x2")


@functools.cache
def width(name: str) -> int:
    """Bytes of the type in a register."""
    if name in ("e4m3x2", "e5m2x2"):
        return 2
    if name == "tf32":
        return 4
    return type_size(name)


def dtype(name: str) -> np.dtype:
    """The NumPy dtype of a PTX type; of one half for a packed type."""
    if name in _FLOATS:
        return _FLOATS[name]
    if name == "pred":
        return np.dtype(bool)
    name = name.removesuffix("x2")
    kind = "i" if is_signed(name) else "u"
    return np.dtype(f"{kind}{type_size(name)}")


def known(name: str) -> bool:
    if name in _FLOATS or name == "pred":
        return True
    if name in ("s16x2", "u16x2"):
        return True
    return name[:1] in ("b", "s", "u") and name[1:] in ("8", "16", "32", "64")


def from_bits(bits: np.ndarray, name: str) -> np.ndarray:
    """Unsigned integers of any width, read as `name`: high bits are dropped."""
    target = UNSIGNED[width(name)]
    if bits.dtype != target:
        bits = bits.astype(target)
    if is_packed(name):
        return np.ascontiguousarray(bits).view(dtype(name)).reshape(len(bits), 2)
    return bits.view(dtype(name))


def to_bits(values: np.ndarray, name: str, size: int) -> np.ndarray:
    """Values of `name` as unsigned integers of `size` bytes; signed ones are extended."""
    if is_packed(name):
        bits = np.ascontiguousarray(values).view(UNSIGNED[width(name)]).reshape(len(values))
    elif is_signed(name) and size > values.dtype.itemsize:
        bits = values.astype(f"i{size}").view(UNSIGNED[size])
    else:
        bits = values.view(UNSIGNED[width(name)])
    return bits if bits.dtype == UNSIGNED[size] else bits.astype(UNSIGNED[size])


def literal(imm: Imm, name: str) -> np.ndarray:
    """A literal as an array of length 1 of the type `name`."""
    if imm.kind != "int" and is_float(name):
        bits = np.array([imm.value], UNSIGNED[4 if imm.kind == "f32" else 8])
        value = bits.view("f4" if imm.kind == "f32" else "f8")
        if dtype(name) == value.dtype:
            return value
        return value.astype(dtype(name))
    size = width(name)
    bits = np.array([imm.value & ((1 << 8 * size) - 1)], UNSIGNED[size])
    return from_bits(bits, name)


def reader(arg, name: str):
    """A function of the machine that gives the operand as an array of type `name`."""
    if isinstance(arg, Reg):
        return _register_reader(arg, name)
    if isinstance(arg, Imm):
        if name == "pred":
            value = np.array([bool(arg.value)])
        else:
            value = literal(arg, name)
        return lambda m: value
    if isinstance(arg, Special):
        return lambda m: from_bits(m.special(arg.name), name)
    if isinstance(arg, Sym):
        return lambda m: from_bits(m.address_of(arg), name)
    raise Unsupported(f"the operand {arg}")


def _register_reader(arg: Reg, name: str):
    i = arg.index
    if name == "pred":
        if arg.negated:
            return lambda m: ~m.R[i]
        return lambda m: m.R[i]
    held, wanted = UNSIGNED[width(arg.type)], dtype(name)
    if arg.negated or is_packed(name) or held.itemsize != wanted.itemsize:
        return lambda m: from_bits(m.R[i], name)
    if held == wanted:
        return lambda m: m.R[i]
    return lambda m: m.R[i].view(wanted)


def _held(kind: str, name: str):
    """A function from an array of type `name` to what a register declared as `kind` holds."""
    if kind == "pred":
        return lambda value: value
    size = width(kind)
    target = UNSIGNED[size]
    if is_packed(name) or size != width(name):
        return lambda value: to_bits(value, name, size)
    if dtype(name) == target:
        return lambda value: value
    return lambda value: value.view(target)


def writer(arg, name: str):
    """A function of the machine and an array of type `name` that fills the register `arg`."""
    if arg == SINK:
        return lambda m, value: None
    if not isinstance(arg, Reg):
        raise Unsupported(f"the destination {arg}")
    i = arg.index
    convert = _held(arg.type, name)

    def write(m, value):
        bits = convert(value)
        if m.mask is not None:
            bits = np.where(m.mask, bits, m.R[i])
        elif len(bits) != m.lanes:
            bits = np.broadcast_to(bits, (m.lanes,)).copy()
        m.R[i] = bits

    return write
