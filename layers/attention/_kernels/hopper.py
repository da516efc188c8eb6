"""Tiles in shared memory that TMA fills, and products of them by warpgroups (`wgmma`): Hopper's way, sm_90a.

a tile       (rows, columns) in shared memory, row-major, swizzled as TMA and `wgmma` both know it; columns are
             padded to `width(dim)` with zeros, by TMA
a view       an array as TMA walks it: (length, dim, heads, batch), by strides alone
a product    of 64 rows a warpgroup: acc += a b^T. `a` in shared memory or in registers, `b` in shared memory; one that
             lies in memory with its K dim as rows is `transposed`
an accumulator   ((2 columns, 2 rows), n / 8): thread t holds rows 16 warp + t % 32 // 4 and 8 more, columns 2 (t % 4)
             and the next of each 8. Rounded, it is the operand `a` of a next product as it stands
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Constexpr, Float32, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.experimental.primitives import cp_reduce_async_bulk_global_shared_cta
from cutlass.experimental.primitives.nvvm_wrapper import CpReduceOp, CpReduceType
from cutlass.tensor_utils import LayoutEnum

from .._config import ROWS as ROWS  # of a warpgroup's product
from .matrix import atom_columns, width

WARPGROUP = 128  # threads


# Tiles in shared memory


def tile_layout(rows: int, columns: int, dtype, stages: int | None = None, atom: int | None = None):
    """The layout of one tile, or of `stages` of them, whose rows are swizzled in pieces of `atom` columns."""
    kind = hopper.get_smem_layout_atom(
        LayoutEnum.ROW_MAJOR, dtype, atom or atom_columns(columns, dtype)
    )
    atom_layout = warpgroup.make_smem_layout_atom(kind, dtype)
    shape = (rows, width(columns, dtype))
    if stages is None:
        return cute.tile_to_shape(atom_layout, shape, (0, 1))
    return cute.tile_to_shape(atom_layout, (*shape, stages), (0, 1, 2))


def allocate(shared, layout, dtype):
    return shared.allocate_tensor(dtype, layout.outer, 1024, layout.inner)


def at_pointer(pointer, layout, dtype):
    """A tile of another layout in the memory of one."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def transposed(tile):
    """The same memory, rows and columns exchanged."""
    modes = [1, 0, 2] if cute.rank(tile) == 3 else [1, 0]
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=modes))


# Arrays as TMA walks them


class Copies(NamedTuple):
    """A copy by TMA, and the array's coordinates."""

    atom: Any
    array: Any


def by_queries(x: cute.Tensor, pack: int = 1):
    """(R, Q, N, G, D) as (queries, D, heads, R). With `pack`, that many query heads lie beside each other as rows:
    row r of a tile is query r // pack of head r % pack."""
    rows, length, heads, group, dim = x.shape
    s_row, s_length, _, s_group, s_dim = x.stride
    many, s_many = heads * group // pack, s_group * pack
    if pack == 1:
        shape, stride = (length, dim, many, rows), (s_length, s_dim, s_many, s_row)
    else:
        shape = ((pack, length), dim, many, rows)
        stride = ((s_group, s_length), s_dim, s_many, s_row)
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))


def by_keys(x: cute.Tensor):
    """(R, K, N, D) as (keys, D, heads, R)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


def loads(x, layout, tile: tuple[int, int]) -> Copies:
    """Copies of tiles of the view `x` to one stage of `layout`."""
    stage = cute.select(layout, mode=[0, 1])
    return Copies(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, stage, tile))


def stores(x, layout, tile: tuple[int, int]) -> Copies:
    """Copies of tiles of `layout` to the view `x`. What lies outside of it is dropped."""
    return Copies(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), x, layout, tile))


def parts(copies: Copies, shared, tile: tuple[int, int], head, row):
    """(in shared memory, in the array) of the tiles of one head, as `cute.copy` takes them: modes (piece, tile)."""
    array = cute.local_tile(copies.array[None, None, head, row], tile, (None, 0))
    return cpasync.tma_partition(
        copies.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(array, 0, 2),
    )


# Products


def product(dtype, n: int, *, a: str = "K", b: str = "K", registers: bool = False):
    """Of (64, K) and (n, K). "MN" is an operand that lies in memory with its K dim as rows."""
    major = {"K": OperandMajorMode.K, "MN": OperandMajorMode.MN}
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, major[a], major[b], Float32, (1, 1, 1), (ROWS, n), source
    )


def operand_a(mma, tile):
    """Of a product: a tile (64, K), or stages of it."""
    return mma.make_fragment_A(mma.get_slice(0).partition_A(tile))


def operand_b(mma, tile):
    """Of a product: a tile (n, K), or stages of it."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tile))


def accumulator(mma, n: int, rows: int = ROWS):
    """Of a product (rows, n), in registers. Not zeroed: the first product may be."""
    return cute.make_rmem_tensor(mma.partition_shape_C((rows, n)), Float32)


def coordinates(mma, thread, n: int):
    """(row, column) of each element of such an accumulator. `thread` is that of the warpgroup."""
    tile = cute.make_identity_tensor((ROWS, n))
    return mma.get_slice(thread).partition_C(tile)


def by_rows(acc):
    """An accumulator as (2 rows, columns)."""
    (columns, rows, blocks), *_ = acc.layout.shape
    (s_columns, s_rows, s_blocks), *_ = acc.layout.stride
    layout = cute.make_layout((rows, (columns, blocks)), stride=(s_rows, (s_columns, s_blocks)))
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def multiply(mma, acc, a, b, keep):
    """Starts `acc = a b^T`, plus acc if `keep`: one group, which the caller waits for."""
    warpgroup.fence()
    # `set` keeps an SSA value in the atom, which may not leave the body of a loop: so each call has its own.
    atom = cute.make_mma_atom(mma.op)
    for k in range_constexpr(cute.size(a.shape[2])):
        atom.set(warpgroup.Field.ACCUMULATE, keep if const_expr(k == 0) else True)
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()


@cute.jit
def rounded(target, acc):
    """Rounds an accumulator into `target`, which has its order: the operand `a` of a next product, in registers.

    By pairs: where n is no power of two, a conversion of the whole takes an instruction an element.
    """
    for i in range_constexpr(cute.size(target) // 2):
        packed(target, i, acc[2 * i], acc[2 * i + 1])


def packed(target, i: int, a: Float32, b: Float32) -> None:
    """Rounds two numbers into pair `i` of an operand in registers."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = a, b
    words = cute.recast_tensor(target, Uint32)
    words[i] = pair.load().to(target.element_type).bitcast(Uint32)[0]


@cute.jit
def to_shared(mma, thread, acc, tile, dtype: Constexpr, scale=None):
    """A warpgroup's accumulator, times `scale`, rounded, to a tile (64, n): `stmatrix`. TMA may read it after a barrier of
    the writers: each has made its part visible."""
    held = cute.make_rmem_tensor_like(acc, dtype)
    found = acc.load()
    held.store((found if const_expr(scale is None) else found * scale).to(dtype))
    store_held(mma, thread, held, tile, dtype)
    cute.arch.fence_proxy("async.shared", space="cta")


def store_held(mma, thread, held, tile, dtype) -> None:
    atom = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, dtype, Float32)
    copies = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(copies, copies.retile(held), copies.partition_D(tile))


def sent() -> None:
    """Waits, in the warp that sent, until the memory of what it sent may be written again or go."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def send(copies: Copies, tile, shape: Constexpr, head, row, index):
    """Starts to store a tile as number `index` of a head, by one warp."""
    array = cute.local_tile(copies.array[None, None, head, row], shape, (index, 0))
    source, target = cpasync.tma_partition(
        copies.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(array, 0, 2),
    )
    cute.copy(copies.atom, source, target)
    cute.arch.cp_async_bulk_commit_group()


def accumulator_layout(mma, n: int):
    """Of an accumulator (64, n)."""
    return cute.make_layout(mma.partition_shape_C((ROWS, n)))


@cute.jit
def add_to_global(target, source, size: Constexpr):
    """One warp lets TMA add so many bytes of float32, a multiple of 16, from shared memory. The caller waits."""
    with cute.arch.elect_one():
        cp_reduce_async_bulk_global_shared_cta(
            target, source, size, op=CpReduceOp.ADD, type=CpReduceType.F32
        )
    cute.arch.cp_async_bulk_commit_group()
