"""Real CuTe kernels, compiled and then run on this CPU: host code, launch and PTX."""

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint8  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from eqxcute._ptx import KernelFault, execute  # noqa: E402

BF16 = ml_dtypes.bfloat16
THIS = Path(__file__).name


def fake(dtype, *shape, align=16):
    """Row-major; None is a size known only at run time, an int k < 0 one divisible by -k."""
    sizes = []
    for size in shape:
        if size is None:
            size = cute.sym_int32()
        elif size < 0:
            size = cute.sym_int32(divisibility=-size)
        sizes.append(size)
    order = tuple(range(len(sizes)))[::-1]
    return make_fake_compact_tensor(dtype, tuple(sizes), stride_order=order, assumed_align=align)


class Built:
    """A compiled launcher that runs on arrays."""

    def __init__(self, launch, *args, arch="sm_80", name="eqxcute_test"):
        with tempfile.TemporaryDirectory() as folder:
            options = (
                f"--enable-tvm-ffi --gpu-arch {arch} --generate-line-info --keep-ptx "
                f"--dump-dir {folder}"
            )
            stream = make_fake_stream(use_tvm_ffi_env_stream=True)
            compiled = cute.compile(launch, stream, *args, options=options)
            self.ptx, self.name = compiled.artifacts.PTX, name
            path = Path(folder) / "kernel.o"
            compiled.export_to_c(str(path), function_name=name, export_only_tvm_ffi_symbols=True)
            self.object = path.read_bytes()

    def __call__(self, *arrays, **options):
        execute(self.object, self.name, self.ptx, arrays, **options)

    def fault(self, *arrays, **options) -> str:
        with pytest.raises(KernelFault) as caught:
            self(*arrays, **options)
        return str(caught.value)


def line_of(text: str) -> int:
    """The first line of this file that has the text."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def one_cta(kernel, threads=128, blocks=1):
    @cute.jit
    def launch(stream, *tensors):
        kernel(*tensors).launch(grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream)

    return launch


ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])


# ---------------------------------------------------------------- elementwise


@cute.kernel
def saxpy_kernel(x, y, out, alpha):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 128 + tid
    if i < out.shape[0]:
        out[i] = alpha * x[i] + y[i]


@cute.jit
def saxpy(stream, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, alpha: Float32):
    n = out.shape[0]
    if n > 0:
        saxpy_kernel(x, y, out, alpha).launch(
            grid=[cute.ceil_div(n, 128), 1, 1], block=[128, 1, 1], stream=stream
        )


@ARCHITECTURES
def test_elementwise_with_a_ragged_end(arch):
    vector = fake(Float32, None)
    built = Built(saxpy, vector, vector, vector, 1.0, arch=arch)
    rng = np.random.default_rng(0)
    for n in (0, 1, 127, 128, 1000, 5000):
        x, y = rng.standard_normal((2, n)).astype("f4")
        out = np.zeros(n, "f4")
        built(x, y, out, np.float32(0.3), written=[2])
        # The product is fused into the sum: rounded once.
        want = np.float64(np.float32(0.3)) * x + y
        assert (out == want.astype("f4")).all()


def test_the_host_code_checks_arguments():
    vector = fake(Float32, None)
    built = Built(saxpy, vector, vector, vector, 1.0)
    x = np.zeros(8, "f4")
    with pytest.raises(ValueError, match=r"Mismatched y\.shape\[0\]"):
        built(x, x[:4].copy(), x, 1.0)
    with pytest.raises(ValueError, match="expected dtype=float32"):
        built(x.astype("f8"), x, x, 1.0)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        built(x, x, x)
    with pytest.raises(ValueError, match="`argument 1` is not C-contiguous"):
        built(x, np.zeros(16, "f4")[::2], x, 1.0)


@cute.kernel
def relu_kernel(x, y):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i, n = cta * 64 + tid, x.shape[0]
    whole = n // 8
    vectors = cute.make_layout((8, whole), stride=(1, 8))
    vx, vy = cute.make_tensor(x.iterator, vectors), cute.make_tensor(y.iterator, vectors)
    if i < whole:
        part = cute.make_rmem_tensor(8, Float32)
        part.store(vx[None, i].load().to(Float32))
        for k in cutlass.range_constexpr(8):
            part[k] = cute.arch.fmax(part[k], 0.0, nan=True)
        vy[None, i].store(part.load().to(BFloat16))
    else:
        j = whole * 8 + i - whole
        if j < n:
            y[j] = cute.arch.fmax(x[j].to(Float32), 0.0, nan=True).to(BFloat16)


@cute.jit
def relu(stream, x: cute.Tensor, y: cute.Tensor):
    work = x.shape[0] // 8 + x.shape[0] % 8
    relu_kernel(x, y).launch(grid=[cute.ceil_div(work, 64), 1, 1], block=[64, 1, 1], stream=stream)


@ARCHITECTURES
def test_vectors_of_sixteen_bytes_and_nan(arch):
    built = Built(relu, fake(BFloat16, None), fake(BFloat16, None), arch=arch)
    assert "ld.global.v4.b32" in built.ptx
    for n in (1, 7, 8, 1003):
        x = np.random.default_rng(n).standard_normal(n).astype(BF16)
        x[n // 2] = np.nan
        y = np.zeros_like(x)
        built(x, y, written=[1])
        np.testing.assert_array_equal(y.astype("f4"), np.maximum(x.astype("f4"), 0))


@cute.kernel
def functions_kernel(x, out):
    i, _, _ = cute.arch.thread_idx()
    v = x[i]
    out[0, i] = cute.math.exp(v)
    out[1, i] = cute.math.tanh(v)
    out[2, i] = cute.math.sin(v)
    out[3, i] = cute.math.erf(v)
    out[4, i] = cute.math.log(v * v)
    out[5, i] = cute.math.exp2(v, fastmath=True)
    out[6, i] = 1.0 / v
    out[7, i] = cute.math.rsqrt(v * v)
    out[8, i] = cute.math.sqrt(v * v)
    out[9, i] = cute.math.cos(v * 10000.0)  # far from zero: a table of 2 / pi in local memory


@ARCHITECTURES
def test_mathematical_functions(arch):
    built = Built(
        one_cta(functions_kernel), fake(Float32, None), fake(Float32, 10, None), arch=arch
    )
    x = (np.random.default_rng(0).standard_normal(128) * 3).astype("f4")
    out = np.zeros((10, 128), "f4")
    built(x, out, written=[1])
    from math import erf

    v = x.astype("f8")
    square = np.float64(x * x)
    want = [np.exp(v), np.tanh(v), np.sin(v), np.vectorize(erf)(v), np.log(square), np.exp2(v), 1 / v,
            1 / np.sqrt(square), np.sqrt(square), np.cos(np.float64(x * np.float32(10000)))]  # fmt: skip
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-7)


@cute.kernel
def integers_kernel(a, b, out):
    i, _, _ = cute.arch.thread_idx()
    out[0, i] = a[i] // b[i]
    out[1, i] = a[i] % b[i]
    out[2, i] = (a[i] << 3) ^ (b[i] >> 1)
    out[3, i] = cutlass.max(a[i], b[i]) - cutlass.min(a[i], b[i]) * a[i]


@ARCHITECTURES
def test_integers(arch):
    built = Built(
        one_cta(integers_kernel), *[fake(Int32, None)] * 2, fake(Int32, 4, None), arch=arch
    )
    rng = np.random.default_rng(0)
    a, b = rng.integers(-1000, 1000, (2, 128)).astype("i4")
    b[b == 0] = 7
    out = np.zeros((4, 128), "i4")
    built(a, b, out, written=[2])
    want = [a // b, np.fmod(a, b), (a << 3) ^ (b >> 1), np.maximum(a, b) - np.minimum(a, b) * a]
    assert (out == np.array(want)).all()


@cute.kernel
def float8_kernel(x, y, z):
    i, _, _ = cute.arch.thread_idx()
    part = cute.local_tile(x, (8,), (i,)).load()
    cute.local_tile(y, (8,), (i,)).store(part.to(Float8E4M3FN))
    cute.local_tile(z, (8,), (i,)).store(cute.local_tile(y, (8,), (i,)).load().to(Float32))


def test_eight_bit_floats():
    n = 128 * 8
    built = Built(one_cta(float8_kernel), fake(Float32, n), fake(Float8E4M3FN, n), fake(Float32, n),
                  arch="sm_90a")  # fmt: skip
    x = np.random.default_rng(0).standard_normal(n).astype("f4") * 200
    y, z = np.zeros(n, ml_dtypes.float8_e4m3fn), np.zeros(n, "f4")
    built(x, y, z, written=[1, 2])
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (y == want).all()
    assert (z == want.astype("f4")).all()


# ---------------------------------------------------------------- cooperation


@cute.kernel
def total_kernel(x, out):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    parts = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(4), 16)
    i = cta * 128 + tid
    value = Float32(0.0)
    if i < x.shape[0]:
        value = x[i]
    warp_sum = cute.arch.warp_reduction_sum(value)
    if tid % 32 == 0:
        parts[tid // 32] = warp_sum
    cute.arch.sync_threads()
    if tid == 0:
        total = parts[0] + parts[1] + parts[2] + parts[3]
        cute.arch.red(out.iterator, total, op="add", dtype="f32", sem="relaxed", scope="gpu")


@cute.kernel
def scale_kernel(x, out):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 128 + tid
    if i < x.shape[0]:
        x[i] = x[i] / out[0]


@cute.jit
def normalise(stream, x: cute.Tensor, out: cute.Tensor):
    grid = [cute.ceil_div(x.shape[0], 128), 1, 1]
    total_kernel(x, out).launch(grid=grid, block=[128, 1, 1], stream=stream)
    scale_kernel(x, out).launch(grid=grid, block=[128, 1, 1], stream=stream)


@ARCHITECTURES
def test_two_kernels_in_one_call(arch):
    """The first sums by shuffles, shared memory and atomics; the second uses the sum, in place."""
    built = Built(normalise, fake(Float32, None), fake(Float32, 1), arch=arch)
    assert built.ptx.count(".visible .entry") == 2
    x = np.random.default_rng(0).random(1000).astype("f4")
    want, total = x / x.sum(dtype="f8"), np.zeros(1, "f4")
    built(x, total)
    np.testing.assert_allclose(x, want, rtol=1e-6)


@cute.kernel
def histogram_kernel(x, counts):
    tid, _, _ = cute.arch.thread_idx()
    bins = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(16), 16)
    if tid < 16:
        bins[tid] = 0
    cute.arch.sync_threads()
    i = tid
    while i < x.shape[0]:
        cute.arch.atomic_add(bins.iterator + x[i].to(Int32), Int32(1))
        i += 128
    cute.arch.sync_threads()
    if tid < 16:
        cute.arch.atomic_add(counts.iterator + tid, bins[tid])


@ARCHITECTURES
def test_atomics(arch):
    built = Built(one_cta(histogram_kernel), fake(Uint8, None), fake(Int32, 16), arch=arch)
    x = np.random.default_rng(0).integers(0, 16, 999).astype("u1")
    counts = np.full(16, 100, "i4")
    built(x, counts)
    assert (counts == 100 + np.bincount(x, minlength=16)).all()


TILE = 16


@cute.kernel
def matmul_kernel(a, b, c):
    """c = a b in tiles of 16 by 16, through shared memory; a thread makes one number."""
    tx, ty, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((TILE, TILE), stride=(TILE, 1))
    sa = smem.allocate_tensor(Float32, layout, 16)
    sb = smem.allocate_tensor(Float32, layout, 16)
    row, col = by * TILE + ty, bx * TILE + tx
    total = Float32(0.0)
    for tile in cutlass.range(cute.ceil_div(a.shape[1], TILE)):
        k = tile * TILE
        sa[ty, tx] = a[row, k + tx] if (row < a.shape[0]) & (k + tx < a.shape[1]) else Float32(0.0)
        sb[ty, tx] = b[k + ty, col] if (k + ty < b.shape[0]) & (col < b.shape[1]) else Float32(0.0)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(TILE):
            total += sa[ty, i] * sb[i, tx]
        cute.arch.sync_threads()
    if (row < c.shape[0]) & (col < c.shape[1]):
        c[row, col] = total


@cute.jit
def matmul(stream, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    grid = [cute.ceil_div(c.shape[1], TILE), cute.ceil_div(c.shape[0], TILE), 1]
    matmul_kernel(a, b, c).launch(grid=grid, block=[TILE, TILE, 1], stream=stream)


@ARCHITECTURES
def test_tiled_matmul(arch):
    matrix = lambda: fake(Float32, None, None)  # noqa: E731
    built = Built(matmul, matrix(), matrix(), matrix(), arch=arch)
    rng = np.random.default_rng(0)
    for m, n, k in ((16, 16, 16), (33, 17, 50), (1, 1, 1), (5, 40, 3)):
        a, b = rng.standard_normal((m, k)).astype("f4"), rng.standard_normal((k, n)).astype("f4")
        c = np.zeros((m, n), "f4")
        built(a, b, c, written=[2])
        np.testing.assert_allclose(c, a.astype("f8") @ b, rtol=1e-5, atol=1e-5)


@cute.kernel
def handoff_kernel(x, out):
    """Warp 0 fills shared memory, warps 1 to 3 wait for it at a named barrier."""
    tid, _, _ = cute.arch.thread_idx()
    held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(32), 16)
    if tid < 32:
        held[tid] = x[tid] * 2.0
        cute.arch.barrier_arrive(barrier_id=1, number_of_threads=128)
    else:
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        out[tid - 32] = held[tid % 32]


@ARCHITECTURES
def test_named_barriers(arch):
    built = Built(one_cta(handoff_kernel), fake(Float32, None), fake(Float32, None), arch=arch)
    x, out = np.arange(32, dtype="f4"), np.zeros(96, "f4")
    built(x, out, written=[1])
    assert (out == np.tile(2 * x, 3)).all()


@cute.kernel
def local_kernel(x, out):
    """A register array indexed by a run-time number lives in local memory."""
    tid, _, _ = cute.arch.thread_idx()
    held = cute.make_rmem_tensor(8, Float32)
    for i in cutlass.range(8, unroll=1):
        held[i] = x[tid] * Float32(i)
    out[tid] = held[tid % 8]


@ARCHITECTURES
def test_local_memory(arch):
    built = Built(one_cta(local_kernel), fake(Float32, None), fake(Float32, None), arch=arch)
    assert "__local_depot" in built.ptx
    x, out = np.arange(128, dtype="f4"), np.zeros(128, "f4")
    built(x, out, written=[1])
    assert (out == x * (np.arange(128) % 8)).all()


@cute.kernel
def print_kernel(x):
    tid, _, _ = cute.arch.thread_idx()
    if tid < 2:
        cute.printf("thread %d has %f", tid, x[tid])  # the DSL adds the newline


def test_printf(capsys):
    built = Built(one_cta(print_kernel), fake(Float32, None))
    built(np.array([1.5, -2.0], "f4"))
    assert capsys.readouterr().out == "thread 0 has 1.500000\nthread 1 has -2.000000\n"


# ---------------------------------------------------------------- planted faults


@cute.kernel
def past_the_end(x, out):
    tid, _, _ = cute.arch.thread_idx()
    if tid <= x.shape[0]:
        out[tid] = x[tid]  # planted: out of bounds


@ARCHITECTURES
def test_out_of_bounds_by_one(arch):
    built = Built(one_cta(past_the_end), fake(Float32, None), fake(Float32, None), arch=arch)
    x, out = np.zeros(100, "f4"), np.zeros(128, "f4")
    text = built.fault(x, out, names=["x", "out"])
    assert "out of bounds: reads bytes 400 to 403 of `x`, which has 400 bytes" in text
    assert f"{THIS}:{line_of('planted: out of bounds')}\n" in text
    assert "in the instruction `ld.global.b32" in text
    assert "CTA (0, 0, 0), thread (100, 0, 0)" in text


@cute.kernel
def no_barrier(x, out):
    tid, _, _ = cute.arch.thread_idx()
    held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(128), 16)
    held[tid] = x[tid]  # planted: the write
    out[tid] = held[127 - tid]  # planted: the read


@ARCHITECTURES
def test_missing_barrier(arch):
    built = Built(one_cta(no_barrier), fake(Float32, None), fake(Float32, None), arch=arch)
    text = built.fault(np.zeros(128, "f4"), np.zeros(128, "f4"))
    assert "race on bytes 508 to 511 of shared memory: thread (127, 0, 0) wrote them" in text
    assert f"{THIS}:{line_of('planted: the write')} (st.shared" in text
    assert "thread (0, 0, 0) reads them, no barrier lies between" in text
    assert f"{THIS}:{line_of('planted: the read')}\n" in text


@cute.kernel
def tile_overwritten(x, out):
    tid, _, _ = cute.arch.thread_idx()
    held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(128), 16)
    total = Float32(0.0)
    for i in cutlass.range(x.shape[0] // 128):
        held[tid] = x[i * 128 + tid]  # planted: the next tile
        cute.arch.sync_threads()
        total += held[127 - tid]
    out[tid] = total


def test_missing_second_barrier():
    built = Built(one_cta(tile_overwritten), fake(Float32, None), fake(Float32, None))
    built(np.ones(128, "f4"), np.zeros(128, "f4"), written=[1])  # one tile: no fault
    text = built.fault(np.ones(256, "f4"), np.zeros(128, "f4"))
    assert "read them, thread" in text
    assert f"{THIS}:{line_of('planted: the next tile')}\n" in text


@cute.kernel
def promised_alignment(x, shift, out):
    tid, _, _ = cute.arch.thread_idx()
    moved = cute.domain_offset((cute.assume(shift[0], divby=4),), x)
    cute.autovec_copy(
        cute.local_tile(moved, (4,), (tid,)),  # planted: misaligned
        cute.local_tile(out, (4,), (tid,)),
    )


def test_misaligned_vector_load():
    built = Built(
        one_cta(promised_alignment), fake(Float32, None), fake(Int32, 1), fake(Float32, None)
    )
    x, out = np.zeros(600, "f4"), np.zeros(512, "f4")
    built(x, np.array([4], "i4"), out, written=[2])
    text = built.fault(x, np.array([3], "i4"), out, names=["x", "shift", "out"])
    assert "misaligned: reads 16 bytes at byte 12 of `x`" in text
    assert f"{THIS}:" in text
    assert "ld.global.v4.b32" in text


@cute.kernel
def skips_one(x, out):
    tid, _, _ = cute.arch.thread_idx()
    if tid != 77:
        out[tid] = x[tid]


def test_unwritten_output():
    built = Built(one_cta(skips_one), fake(Float32, None), fake(Float32, None))
    text = built.fault(np.zeros(128, "f4"), np.zeros(128, "f4"), names=["x", "out"], written=[1])
    assert "unwritten: no kernel wrote `out` at index (77,)" in text


@cute.kernel
def divergent_barrier(x, out):
    tid, _, _ = cute.arch.thread_idx()
    if tid < 40:
        cute.arch.sync_threads()  # planted: divergent
    out[tid] = x[tid]


@ARCHITECTURES
def test_barrier_in_divergent_code(arch):
    built = Built(one_cta(divergent_barrier), fake(Float32, None), fake(Float32, None), arch=arch)
    text = built.fault(np.zeros(128, "f4"), np.zeros(128, "f4"))
    assert "deadlock: not all threads arrive at a barrier" in text
    assert f"{THIS}:{line_of('planted: divergent')}" in text
    assert "40 of 128 threads of a CTA wait for others" in text
    assert "88 threads of this CTA have left the kernel, the first is (40, 0, 0)" in text


@cute.kernel
def uninitialised(x, out):
    tid, _, _ = cute.arch.thread_idx()
    held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(128), 16)
    if tid < 127:
        held[tid] = x[tid]
    cute.arch.sync_threads()
    out[tid] = held[tid]  # planted: uninitialised


def test_uninitialised_shared_memory():
    built = Built(one_cta(uninitialised), fake(Float32, None), fake(Float32, None))
    text = built.fault(np.zeros(128, "f4"), np.zeros(128, "f4"))
    assert "uninitialised: reads bytes 508 to 511 of shared memory" in text
    assert f"{THIS}:{line_of('planted: uninitialised')}\n" in text


@cute.kernel
def neighbours(x):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * 32 + tid
    value = x[i]
    if i + 1 < x.shape[0]:
        value += x[i + 1]
    cute.arch.sync_threads()
    x[i] = value  # planted: CTAs race


def test_ctas_race_on_global_memory():
    built = Built(one_cta(neighbours, threads=32, blocks=4), fake(Float32, None))
    text = built.fault(np.zeros(128, "f4"), names=["x"])
    assert "race on bytes" in text
    assert "of `x`: thread" in text
    assert "of CTA" in text
    assert f"{THIS}:{line_of('planted: CTAs race')}\n" in text


@cute.kernel
def endless(x):
    i = Int32(0)
    while x[i] > 0.0:
        x[2] = 5.0  # a loop without effects would be compiled away
        i = i ^ 1


def test_endless_loop():
    built = Built(one_cta(endless), fake(Float32, None))
    text = built.fault(np.ones(3, "f4"), budget=20_000)
    assert "20000 instructions have run: an endless loop" in text
    assert f"{THIS}:" in text


@cute.kernel
def too_much_shared(x):
    tid, _, _ = cute.arch.thread_idx()
    held = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(50_000), 16)
    held[tid] = x[tid]
    cute.arch.sync_threads()
    x[tid] = held[127 - tid]


def test_more_shared_memory_than_the_gpu_has(capfd):
    x = np.arange(128, dtype="f4")
    built = Built(one_cta(too_much_shared), fake(Float32, None), arch="sm_80")
    assert "200000 bytes of dynamic shared memory, but the limit is 166912 on sm_80" in built.fault(
        x
    )
    capfd.readouterr()  # the host code itself prints a complaint
    Built(one_cta(too_much_shared), fake(Float32, None), arch="sm_90a")(x)
    assert (x == 127 - np.arange(128)).all()


@cute.kernel
def cluster_kernel(x):
    tid, _, _ = cute.arch.thread_idx()
    x[tid] = 0.0


@cute.jit
def cluster(stream, x: cute.Tensor):
    cluster_kernel(x).launch(grid=[2, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)


def test_clusters_are_refused_by_name():
    built = Built(cluster, fake(Float32, None), arch="sm_90a")
    with pytest.raises(NotImplementedError, match="clusters"):
        built(np.zeros(64, "f4"))
