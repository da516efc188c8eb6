"""What CuTe emits for Hopper, interpreted: its tensor maps, its matrix descriptors, its swizzles."""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
import cutlass.pipeline as pipeline  # noqa: E402
import cutlass.utils.hopper_helpers as hopper  # noqa: E402
from cutlass import BFloat16, Float16, Float32, Int32  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402
from cutlass.memory import SmemAllocator  # noqa: E402

from eqxcute._ptx import execute  # noqa: E402

DTYPES = {BFloat16: ml_dtypes.bfloat16, Float16: np.float16, Float32: np.float32, Int32: np.int32}
ROWS = 32


def fake(dtype, *shape):
    """Row-major; None is a size known only at run time."""
    sizes = tuple(cute.sym_int32() if size is None else size for size in shape)
    order = tuple(range(len(sizes)))[::-1]
    return make_fake_compact_tensor(dtype, sizes, stride_order=order, assumed_align=16)


def built(launch, *tensors):
    """A function that runs the launcher on arrays."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled = cute.compile(launch, stream, *tensors, options=options)
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name="test", export_only_tvm_ffi_symbols=True)
        binary = path.read_bytes()
    return lambda *arrays, **more: execute(binary, "test", compiled.artifacts.PTX, arrays, **more)


def tile_layout(kind: str, dtype, tile, order=(0, 1)):
    atom = warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, kind), dtype)
    return cute.tile_to_shape(atom, tile, order=order)


def allocate(dtype, layout):
    return SmemAllocator().allocate_tensor(dtype, layout.outer, 1024, layout.inner)


def through_shared(dtype, rank: int, kind: str, columns: int, shift: int):
    """Tiles of the first matrix of `x` by TMA to shared memory, by threads to `seen`, and by TMA
    to the first matrix of `out`, `shift` rows further down."""
    tile = (ROWS, columns)

    def first(x):
        return x[(None, None) + (0,) * (rank - 2)]

    @cute.kernel
    def kernel(load, source, store, target, seen, layout):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = allocate(dtype, layout)

        def group(n):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)

        ring = pipeline.PipelineTmaAsync.create(
            num_stages=1,
            producer_group=group(1),
            consumer_group=group(4),
            tx_count=ROWS * columns * dtype.width // 8,
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        one, whole = cute.make_layout(1), cute.group_modes(shared, 0, 2)
        if warp == 0:
            part = cute.group_modes(cute.local_tile(first(source), tile, (block, 0)), 0, 2)
            to, place = cpasync.tma_partition(load, 0, one, whole, part)
            slot = ring.make_producer().acquire_and_advance()
            cute.copy(load, place, to, tma_bar_ptr=slot.barrier)
        ring.make_consumer().wait()
        for i in cutlass.range(thread, ROWS * columns, 128):
            seen[block, i // columns, i % columns] = shared[i // columns, i % columns]
        if warp == 0:
            moved = cute.domain_offset((shift, 0), first(target))
            part = cute.group_modes(cute.local_tile(moved, tile, (block, 0)), 0, 2)
            place, to = cpasync.tma_partition(store, 0, one, whole, part)
            cute.copy(store, place, to)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def launch(stream, x: cute.Tensor, out: cute.Tensor, seen: cute.Tensor):
        order = [rank - 2, rank - 1, *range(rank - 3, -1, -1)]
        x, out = [cute.make_tensor(y.iterator, cute.select(y.layout, mode=order)) for y in (x, out)]
        layout = tile_layout(kind, dtype, tile)
        into, outof = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load, source = cpasync.make_tiled_tma_atom(into, x, layout, tile)
        store, target = cpasync.make_tiled_tma_atom(outof, out, layout, tile)
        kernel(load, source, store, target, seen, layout).launch(
            grid=[cute.size(seen, mode=[0]), 1, 1], block=[128, 1, 1], stream=stream
        )

    return launch


@pytest.mark.parametrize(
    ("dtype", "rank", "kind", "columns"),
    [
        (BFloat16, 4, "K_SW128", 128),  # two boxes a tile
        (Float16, 5, "K_SW64", 32),
        (Float32, 3, "K_SW32", 8),
        (Int32, 2, "K_INTER", 4),
    ],
)
def test_tensor_maps(dtype, rank, kind, columns):
    """45 rows and some columns too few: what lies outside is read as 0 and not written."""
    sizes = [None] * (rank - 1)
    shape, kept = (2, 3, 2, 45, columns), columns - (columns > 4) * 16 // (dtype.width // 8)
    shape = (*shape[5 - rank : 4], kept)
    run = built(
        through_shared(dtype, rank, kind, columns, -5),
        fake(dtype, *sizes, kept),
        fake(dtype, *sizes, kept),
        fake(dtype, None, ROWS, columns),
    )
    numbers = DTYPES[dtype]
    x = np.random.default_rng(0).integers(-99, 99, shape).astype(numbers)
    out, seen = np.zeros_like(x), np.zeros((2, ROWS, columns), numbers)
    run(x, out, seen, written=[2])
    first = (0,) * (rank - 2)
    padded = np.zeros((64, columns), numbers)
    padded[:45, :kept] = x[first]
    assert (seen.reshape(64, columns) == padded).all()
    moved = np.zeros_like(x)
    moved[first][:45] = padded[5:50, :kept]
    assert (out == moved).all()


def tile_product(dtype, a_kind: str, b_kind: str, n: int, k: int):
    def major(kind):
        return OperandMajorMode.K if kind[0] == "K" else OperandMajorMode.MN

    def order(kind):
        return (0, 1) if kind[0] == "K" else (1, 0)

    @cute.kernel
    def kernel(a, b, c, layouts):
        thread, _, _ = cute.arch.thread_idx()
        allocator = SmemAllocator()
        tiles = [
            allocator.allocate_tensor(dtype, layout.outer, 1024, layout.inner) for layout in layouts
        ]
        for i in cutlass.range(thread, 64 * k, 128):
            tiles[0][i // k, i % k] = a[i // k, i % k]
        for i in cutlass.range(thread, n * k, 128):
            tiles[1][i // k, i % k] = b[i // k, i % k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, major(a_kind), major(b_kind), Float32, (1, 1, 1), (64, n)
        )
        part = mma.get_slice(0)
        left = mma.make_fragment_A(part.partition_A(tiles[0]))
        right = mma.make_fragment_B(part.partition_B(tiles[1]))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, n)), Float32)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        for block in cutlass.range_constexpr(k // 16):
            atom.set(warpgroup.Field.ACCUMULATE, block != 0)
            cute.gemm(atom, acc, left[None, None, block], right[None, None, block], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        warp, lane = thread // 32, thread % 32
        for i in cutlass.range_constexpr(n // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            c[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = acc[i]

    @cute.jit
    def launch(stream, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        layouts = [
            tile_layout(kind, dtype, (rows, k), order(kind))
            for kind, rows in ((a_kind, 64), (b_kind, n))
        ]
        kernel(a, b, c, layouts).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    return launch


@pytest.mark.parametrize(
    ("dtype", "a_kind", "b_kind", "n", "k"),
    [
        (BFloat16, "K_SW128", "MN_SW128", 64, 64),
        (Float16, "MN_SW64", "K_SW64", 24, 64),
        (BFloat16, "MN_SW32", "MN_SW32", 48, 32),
        (BFloat16, "K_INTER", "MN_INTER", 24, 32),
        (BFloat16, "MN_INTER", "K_SW32", 8, 32),
    ],
)
def test_matrix_descriptors(dtype, a_kind, b_kind, n, k):
    """Both majors, all swizzles: small integers, so that sums are exact."""
    run = built(
        tile_product(dtype, a_kind, b_kind, n, k),
        *(fake(dtype, 64, k), fake(dtype, n, k), fake(Float32, 64, n)),
    )
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (rows, k)).astype(DTYPES[dtype]) for rows in (64, n))
    c = np.zeros((64, n), "f4")
    run(a, b, c, written=[2])
    assert (c == a.astype("f4") @ b.astype("f4").T).all()
