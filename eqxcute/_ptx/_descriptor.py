"""Descriptors: what 128 bytes say of an array (for bulk tensor copies), and 64 bits of a matrix
in shared memory (for wgmma); and the swizzles that both know.

NVIDIA documents the matrix descriptor, and not the tensor map. Its fields are read here where
the host code that CuTe DSL 4.8.1 generates writes them, found by varying one thing at a time;
`tests/compile/test_ptx_hopper.py` holds them. Sizes count elements, and are stored less one;
strides are stored in units of 16 bytes.
"""

import dataclasses
import functools

import numpy as np

from ._fault import Misstep, Unsupported

_TYPES = {
    0: "u8",
    1: "u16",
    2: "u32",
    3: "s32",
    4: "u64",
    5: "s64",
    6: "f16",
    7: "f32",
    8: "f64",
    9: "f32",  # denormals to zero
    10: "bf16",
}
# Code of a tensor map's swizzle, and of a matrix descriptor's -> bytes of a row that it mixes.
MAP_SPANS = (16, 32, 64, 128)
MATRIX_SPANS = (16, 128, 64, 32)


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """Where a byte at `address` stands: its 16-byte column is mixed with its 128-byte row's
    number. The pattern hangs on the address, not on where a tile begins."""
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)


@dataclasses.dataclass(frozen=True)
class Box:
    """The part of an array that one bulk tensor copy moves, and where it stands in the tile."""

    address: np.ndarray  # of pieces in global memory, those that lie inside
    offset: np.ndarray  # of the same pieces in the tile, in bytes, before the swizzle
    unit: int  # bytes of a piece: a power of two, at most 16
    bytes: int  # of the whole tile


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """An array, and the box that is copied at once; the innermost dimension comes first."""

    address: int
    sizes: tuple  # elements
    strides: tuple  # bytes
    box: tuple  # elements
    type: str
    span: int  # of the swizzle, in bytes; 16 is none

    @property
    def item(self) -> int:
        return int(self.type.lstrip("bsuf")) // 8

    def at(self, place) -> Box:
        """`place`: the element where the box begins, which may lie outside."""
        return _box(self, tuple(int(x) for x in place))


@functools.lru_cache(maxsize=256)
def tensor_map(data: bytes) -> TensorMap:
    """Reads the 64 bytes of a descriptor that mean something."""
    words = np.frombuffer(data[:64], np.uint32).tolist()
    flags = words[2]
    rank, kind = (flags >> 4 & 7) + 1, flags >> 7 & 15
    if flags & 15 != 2 or rank > 5 or kind not in _TYPES:
        raise Misstep("no tensor map: a bulk tensor copy is given a descriptor of another kind")
    if flags >> 11 & 3 or words[13] & 0xFFFFFF or words[7]:
        raise Unsupported("tensor maps that interleave, skip elements or span 2**36 bytes")
    item = int(_TYPES[kind].lstrip("bsuf")) // 8
    found = TensorMap(
        address=words[0] | words[1] << 32,
        sizes=tuple(x + 1 for x in words[8:13])[:rank],
        strides=(item, *(16 * x for x in words[3:7]))[:rank],
        box=tuple(x + 1 for x in data[55:60])[:rank],
        type=_TYPES[kind],
        span=MAP_SPANS[flags >> 13 & 3],
    )
    row = found.box[0] * item
    if row % 16 or (found.span > 16 and row != found.span):
        raise Unsupported(f"a box whose rows have {row} bytes, and a swizzle of {found.span}")
    return found


@functools.lru_cache(maxsize=512)
def _box(tensor: TensorMap, place: tuple) -> Box:
    item, row = tensor.item, tensor.box[0] * tensor.item
    first = max(0, -place[0]) * item
    last = min(tensor.box[0], tensor.sizes[0] - place[0]) * item
    address = np.zeros(1, np.int64)
    inside = np.ones(1, bool)
    for axis in range(len(tensor.box) - 1, 0, -1):
        index = place[axis] + np.arange(tensor.box[axis], dtype=np.int64)
        here = (index >= 0) & (index < tensor.sizes[axis])
        address = (address[:, None] + index * tensor.strides[axis]).reshape(-1)
        inside = (inside[:, None] & here).reshape(-1)
    rows = np.flatnonzero(inside if first < last else np.zeros_like(inside))
    start = tensor.address + address[rows] + place[0] * item + first
    together = np.bitwise_or.reduce(start, initial=first | last | 16)
    unit = int(together & -together)
    along = np.arange(0, max(last - first, 0), unit, dtype=np.int64)
    return Box(
        (start[:, None] + along).reshape(-1),
        (rows[:, None] * row + first + along).reshape(-1),
        unit,
        row * len(inside),
    )


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A wgmma operand in shared memory: where, how far its blocks lie apart, its swizzle."""

    start: int
    leading: int
    stride: int
    span: int


def matrix(bits: int) -> Matrix:
    """Reads a matrix descriptor."""
    if bits >> 49 & 7:
        raise Unsupported("matrix descriptors with a base offset")
    return Matrix(
        start=(bits & 0x3FFF) << 4,
        leading=(bits >> 16 & 0x3FFF) << 4,
        stride=(bits >> 32 & 0x3FFF) << 4,
        span=MATRIX_SPANS[bits >> 62 & 3],
    )


@functools.lru_cache(maxsize=1024)
def matrix_chunks(operand: Matrix, rows: int, transposed: bool) -> np.ndarray:
    """Addresses of 16 bytes each of a matrix of `rows` by 16 elements of 2 bytes.

    **Returns:** (rows, 2): the halves of each row. With `transposed`, when memory holds the
    transpose, (16, rows / 8): of each of the 16, 8 neighbours at a time.
    """
    span, lead, stride = operand.span, operand.leading, operand.stride
    if not transposed:
        r, c = np.arange(rows)[:, None], np.arange(2)
        step = lead if span == 16 else 16
        offset = r % 8 * span + r // 8 * stride + c * step
    else:
        k, j = np.arange(16)[:, None], np.arange(rows // 8)
        if span == 16:
            offset = j * stride + k % 8 * 16 + k // 8 * lead
        else:
            wide = span // 16
            offset = j % wide * 16 + j // wide * lead + k % 8 * span + k // 8 * stride
    return swizzled(operand.start + offset.astype(np.int64), span)
