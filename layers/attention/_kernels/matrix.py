"""Tiles in shared memory, and products of them on tensor cores by `mma.sync`: every GPU from Ampere up has that.

    a tile       (rows, columns) in shared memory, row-major, columns padded to `width(dim)`; the 16-byte pieces of a
                 row are exchanged by the row's number (a swizzle), so that neither copies nor `ldmatrix` meet a bank twice
    a load       `cp.async`, 16 bytes a thread; rows past the end and columns past `dim` become zeros
    a product    acc (M, N) += A (M, K) B (N, K)^T: each of A and B in shared memory, as it lies or transposed, or A in
                 registers. An accumulator is the A of a next product as it stands

16-bit operands reach registers by `ldmatrix`. Those of float32 are rounded to tf32 (10 bits of mantissa) in registers,
and multiplied in one pass or in three: with a = hi + lo, both rounded, a b = hi hi + hi lo + lo hi up to 2^-21 |a b|,
summed outside of the tensor cores, which truncate (Ootomo and Yokota 2022, sections 3 and 4). Their K dim is taken in the
order 0 2 4 6 1 3 5 7: so that an accumulator is an operand, and reading a transposed tile meets no bank twice.
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, TFloat32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyUniversalOp, warp

from .. import _config

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


# Tiles in shared memory


def vector(dtype) -> int:
    """Elements in 16 bytes."""
    return 128 // dtype.width


def atom_columns(dim: int, dtype) -> int:
    """Columns of a swizzle atom."""
    return _config.atom_columns(dim, dtype.width)


def width(dim: int, dtype) -> int:
    """Columns of a tile in shared memory."""
    return _config.tile_columns(dim, dtype.width)


def tile_layout(rows: int, dim: int, dtype, stages: int | None = None):
    """The layout of one tile, or of `stages` of them."""
    columns = atom_columns(dim, dtype)
    base = vector(dtype).bit_length() - 1  # the swizzle moves 16 bytes as one
    bits = (columns // vector(dtype)).bit_length() - 1
    swizzle = cute.make_swizzle(bits, base, 3)
    atom = cute.make_composed_layout(
        swizzle, 0, cute.make_layout((8, columns), stride=(columns, 1))
    )
    shape = (rows, width(dim, dtype))
    if stages is None:
        return cute.tile_to_shape(atom, shape, (0, 1))
    return cute.tile_to_shape(atom, (*shape, stages), (0, 1, 2))


def transposed(tile):
    """The same memory as (columns, rows)."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))


@cute.jit
def load_tile(
    tid,
    threads: Constexpr,
    source: cute.Tensor,
    tile,
    offset,
    rows: Constexpr,
    dim: Constexpr,
    first,
):
    """Starts to copy rows `first`, ... of `source` (length, dim) to a tile of `rows` rows that begins `offset` elements
    after the pointer `tile`. Commit and wait as usual."""
    dtype = source.element_type
    atom, size = atom_columns(dim, dtype), vector(dtype)
    across = atom // size
    down = (
        threads // across
    )  # rows in one sweep, a multiple of 8: all of a thread's rows are swizzled alike
    row, piece = tid // across, tid % across
    swizzled = piece ^ (row % 8 if const_expr(across == 8) else row // 2 % 4)
    target = tile + (offset + row * atom + swizzled * size)
    start = source.iterator + (Int64(first + row) * source.stride[0] + piece * size)
    left = source.shape[0] - first - row  # rows that are there, from this one on
    for i in range_constexpr(cute.ceil_div(rows, down)):
        for j in range_constexpr(width(dim, dtype) // atom):
            inside = left > i * down
            if const_expr(dim < (j + 1) * atom):
                inside = inside & (piece * size + j * atom < dim)
            to = target + (i * down * atom + j * rows * atom)
            at = start + (i * down * source.stride[0] + j * atom)
            if const_expr(rows % down == 0):
                copy_or_zero(to, at, inside)
            else:
                if row + i * down < rows:
                    copy_or_zero(to, at, inside)


@cute.jit
def copy_or_zero(to, at, inside):
    """Starts to copy 16 bytes, or zeros."""
    count = Int32(16) if inside else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[to, at, count]
    )


@cute.jit
def store_tile(
    tid, threads: Constexpr, tile, target: cute.Tensor, rows: Constexpr, dim: Constexpr, first
):
    """Copies a tile to rows `first`, ... of `target` (length, dim), 16 bytes a thread."""
    dtype = target.element_type
    atom, size = atom_columns(dim, dtype), vector(dtype)
    by_rows = cute.make_ordered_layout((threads * size // atom, atom // size), order=(1, 0))
    copy = cute.make_copy_atom(CopyUniversalOp(), dtype, num_bits_per_copy=128)
    copies = cute.make_tiled_copy_tv(copy, by_rows, cute.make_layout((1, size)))
    thread = copies.get_slice(tid)
    shape = (rows, width(dim, dtype))
    there = cute.local_tile(cute.domain_offset((first, 0), target), shape, (0, 0))
    source, there = thread.partition_S(tile), thread.partition_D(there)
    at = thread.partition_S(cute.make_identity_tensor(shape))
    for i in range_constexpr(cute.size(there, mode=[1])):
        for j in range_constexpr(cute.size(there, mode=[2])):
            row, column = at[0, i, j]
            if (first + row < target.shape[0]) & (column < dim):
                cute.copy(copies, source[None, i, j], there[None, i, j])


# Products


@dataclasses.dataclass(frozen=True)
class Products:
    """How tiles of `dtype` are multiplied by `down` x `across` warps. `passes`: 3 for nearly float32 (see above)."""

    dtype: type
    down: int
    across: int = 1
    passes: int = 1

    @property
    def mma(self):
        shape = (16 * self.down, 16 * self.across)
        warps = (self.down, self.across, 1)
        if self.dtype.width == 16:
            op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
            return cute.make_tiled_mma(op, warps, (*shape, 16))
        op = warp.MmaTF32Op((16, 8, 8))
        order = cute.make_layout((4, 2), stride=(2, 1))
        return cute.make_tiled_mma(op, warps, (*shape, order))


def accumulator(products: Products, tid, rows: int, columns: int):
    """Of a product (rows, columns): zeros, in registers."""
    thread = products.mma.get_slice(tid)
    acc = cute.make_rmem_tensor(thread.partition_shape_C((rows, columns)), Float32)
    acc.fill(0.0)
    return acc


def coordinates(products: Products, tid, rows: int, columns: int):
    """(row, column) of each element of such an accumulator."""
    tile = cute.make_identity_tensor((rows, columns))
    return products.mma.get_slice(tid).partition_C(tile)


def by_rows(acc):
    """An accumulator ((2 columns, 2 rows), M, N) as (rows, columns)."""
    layout = acc.layout
    ((sc, sr), sm, sn), ((dc, dr), dm, dn) = layout.shape, layout.stride
    view = cute.make_layout(((sr, sm), (sc, sn)), stride=((dr, dm), (dc, dn)))
    return cute.make_tensor(acc.iterator, view)


@cute.jit
def cut(x, at, left, value: Constexpr):
    """Sets the columns of an accumulator from `left` on, which lie past the last key. Both by rows."""
    for c in range_constexpr(cute.size(x, mode=[1])):
        if at[0, c][1] >= left:
            x[None, c].fill(value)


def as_operand(products: Products, acc):
    """An accumulator, rounded to the products' dtype, as the operand A of a next product."""
    held = cute.make_rmem_tensor(acc.layout, products.dtype)
    held.store(acc.load().to(products.dtype))
    layout = held.layout
    if const_expr(products.dtype.width == 16):
        pairs = cute.logical_divide(layout, (None, None, 2))
        ((sc, sr), sm, (s2, sn)), ((dc, dr), dm, (d2, dn)) = pairs.shape, pairs.stride
        view = cute.make_layout(((sc, sr, s2), sm, sn), stride=((dc, dr, d2), dm, dn))
    else:
        ((sc, sr), sm, sn), ((dc, dr), dm, dn) = layout.shape, layout.stride
        view = cute.make_layout(((sr, sc), sm, sn), stride=((dr, dc), dm, dn))
    return cute.make_tensor(held.iterator, view)


def to_shared(products: Products, tid, acc, tile):
    """An accumulator, rounded to the products' dtype, to a tile."""
    held = cute.make_rmem_tensor(acc.layout, products.dtype)
    held.store(acc.load().to(products.dtype))
    atom = cute.make_copy_atom(CopyUniversalOp(), products.dtype)
    copies = cute.make_tiled_copy_C(atom, products.mma).get_slice(tid)
    cute.copy(copies, copies.retile(held), copies.partition_D(tile))


def multiply(
    products: Products,
    tid,
    acc,
    a,
    b,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    depth: int | None = None,
):
    """`acc += a b^T`.

    `a` is a tile (M, K), or an operand in registers; `b` is a tile (N, K). A `transposed` one lies in memory with its
    K dim as rows. `depth`: how much of K is not padding.
    """
    in_registers = a.memspace == cute.AddressSpace.rmem
    held_a = a if in_registers else loaded(products, tid, a, "A", a_transposed)
    held_b = loaded(products, tid, b, "B", b_transposed)
    steps = cute.size(held_b.held, mode=[2])
    if depth is not None:
        steps = min(steps, -(-depth // (16 if products.dtype.width == 16 else 8)))
    if products.passes == 3 and not in_registers:
        multiply_in_loop(products, acc, held_a, held_b, steps)
        return
    for k in range(steps):
        slices = a[None, None, k] if in_registers else take(held_a, k, k), take(held_b, k, k)
        step(products, acc, *slices)


@cute.jit
def multiply_in_loop(products: Constexpr, acc, a: Constexpr, b: Constexpr, steps: Constexpr):
    """As a loop on the device: three passes are so much code that compiling it would take a minute."""
    for k in cutlass.range(steps, unroll=1):
        step(products, acc, take(a, k, 0), take(b, k, 0))


class Loaded(NamedTuple):
    """An operand in shared memory, and where a thread has it in registers."""

    copies: Any
    source: cute.Tensor
    target: cute.Tensor
    held: cute.Tensor


def loaded(products: Products, tid, tile, which: str, is_transposed: bool) -> Loaded:
    """Nothing is loaded yet."""
    thread = products.mma.get_slice(tid)
    if which == "A":
        tiled, held = cute.make_tiled_copy_A, thread.make_fragment_A(thread.partition_A(tile))
    else:
        tiled, held = cute.make_tiled_copy_B, thread.make_fragment_B(thread.partition_B(tile))
    copies = smem_to_registers(products, tiled, is_transposed)
    mine = copies.get_slice(tid)
    return Loaded(copies, mine.partition_S(tile), mine.retile(held), held)


def take(x: Loaded, k, at: int):
    """Loads slice `k` of the K dim, to the place of slice `at`."""
    cute.copy(x.copies, x.source[None, None, k], x.target[None, None, at])
    return x.held[None, None, at]


def smem_to_registers(products: Products, tiled, is_transposed: bool):
    if products.dtype.width == 16:
        op = warp.LdMatrix8x8x16bOp(is_transposed, 4)
        return tiled(cute.make_copy_atom(op, products.dtype), products.mma)
    return tiled(cute.make_copy_atom(CopyUniversalOp(), products.dtype), products.mma)


def step(products: Products, acc, a, b) -> None:
    """One slice of the K dim."""
    mma = products.mma
    if products.dtype.width == 16:
        cute.gemm(mma, acc, a, b, acc)
        return
    high_a, high_b = rounded_to_tf32(a), rounded_to_tf32(b)
    if products.passes == 1:
        cute.gemm(mma, acc, high_a, high_b, acc)
        return
    low_a, low_b = remainder(a, high_a), remainder(b, high_b)
    # Tensor cores round their sums towards zero. So each slice is summed there by itself, and all of them are outside.
    for m in range(cute.size(acc, mode=[1])):
        for n in range(cute.size(acc, mode=[2])):
            total = one(acc[None, m, n], 2)
            part = cute.make_rmem_tensor(total.shape, Float32)
            part.fill(0.0)
            for x, y in ((low_a, high_b), (high_a, low_b), (high_a, high_b)):
                cute.gemm(mma, part, one(x[None, m], 1), one(y[None, n], 1), part)
            total.store(total.load() + part.load())


def one(fragment, modes: int):
    """What one instruction takes of an operand, with the modes that a tile of them would have."""
    layout = fragment.layout
    for _ in range(modes):
        layout = cute.append(layout, cute.make_layout(1), up_to_rank=cute.rank(layout) + 1)
    return cute.make_tensor(fragment.iterator, layout)


def rounded_to_tf32(x):
    x = cute.recast_tensor(x, Float32)
    found = cute.make_rmem_tensor(x.shape, TFloat32)  # an operand is read as it lies
    bits = cute.recast_tensor(found, Int32)
    for i in range(cute.size(x)):
        bits[i] = Int32(cute.arch.cvt_f32_tf32(x[i]))
    return found


def remainder(x, high):
    """What rounding left, rounded too."""
    x, high = cute.recast_tensor(x, Float32), cute.recast_tensor(high, Float32)
    rest = cute.make_rmem_tensor(x.shape, Float32)
    for i in range(cute.size(x)):
        rest[i] = x[i] - high[i]
    return rounded_to_tf32(rest)
