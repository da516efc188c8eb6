"""The ceiling of `mma.sync` on a card, bfloat16: what kernels of the sm80 family can reach there.

    python tests/gpu/bench_mma.py               every setting
    python tests/gpu/bench_mma.py quick         one setting of each
    python tests/gpu/bench_mma.py --compile     no GPU: compiles all for sm_80 and sm_90a, and counts their instructions
    python tests/gpu/bench_mma.py --interpret   no GPU: small products through the PTX interpreter, against NumPy

Two kernels. `Gemm` is C = A B^T, 8192 x 8192 x 8192, as such kernels are written: tiles that cp.async brings some
slabs ahead, ldmatrix, m16n8k16; beside it cuBLAS through `jnp.matmul`. `Issue` repeats m16n8k16 on registers, without
memory: 8 or 16 accumulators a warp, as a warp of attention has them, with 4, 8 and 16 warps a multiprocessor.

Inputs are standard normal. Contenders take turns, `ROUNDS` times; a turn is `CALLS` calls, queued without waiting;
reported are the median and the range.
"""

import dataclasses
import random
import statistics
import subprocess
import sys
import time

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from cutlass import BFloat16, Float32, range_constexpr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.memory import SmemAllocator

import eqxcute
from eqxcute.testing import compile_only, interpret

ROUNDS, CALLS = 9, 10
SIZE = 8192
BAND = 8  # rows of tiles that are walked together, so that the slabs of B stay in the L2


def product(warps_m, warps_n):
    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    # Sixteen columns a warp: one ldmatrix feeds two instructions.
    return cute.make_tiled_mma(op, (warps_m, warps_n, 1), (16 * warps_m, 16 * warps_n, 16))


class Gemm(eqxcute.Kernel):
    """C = A B^T. A block makes a tile of C; copies are `stages - 1` slabs ahead of the products."""

    tile_m: int = eqxcute.static(128)
    tile_n: int = eqxcute.static(128)
    slab: int = eqxcute.static(32)
    stages: int = eqxcute.static(4)
    warps_m: int = eqxcute.static(2)
    warps_n: int = eqxcute.static(2)
    dtypes = dict.fromkeys("ab", ("bfloat16",))

    @property
    def signature(self):
        return f"m%{self.tile_m} k%{self.slab}, n%{self.tile_n} k%{self.slab} -> m n"

    def reference(self, a, b):
        return jnp.matmul(a, b.T, preferred_element_type=jnp.float32).astype(a.dtype)

    @property
    def threads(self):
        return 32 * self.warps_m * self.warps_n

    @cute.jit
    def launch(self, stream, a, b, c):
        # 16-byte pieces of a row change places by the row's number, so that ldmatrix meets no bank twice.
        swizzle = cute.make_swizzle((self.slab // 8).bit_length() - 1, 3, 3)
        rows = cute.make_layout((8, self.slab), stride=(self.slab, 1))
        atom = cute.make_composed_layout(swizzle, 0, rows)
        a_layout = cute.tile_to_shape(atom, (self.tile_m, self.slab, self.stages), (0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (self.tile_n, self.slab, self.stages), (0, 1, 2))
        g2s = cute.make_copy_atom(
            cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), a.element_type, num_bits_per_copy=128
        )
        across = self.slab // 8
        by_rows = cute.make_ordered_layout((self.threads // across, across), order=(1, 0))
        g2s = cute.make_tiled_copy_tv(g2s, by_rows, cute.make_layout((1, 8)))
        mma = product(self.warps_m, self.warps_n)
        tiles = (c.shape[0] // self.tile_m) * (c.shape[1] // self.tile_n)
        if tiles > 0:
            self.kernel(a, b, c, a_layout, b_layout, g2s, mma).launch(
                grid=[tiles, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, a, b, c, a_layout, b_layout, g2s, mma):
        tid, _, _ = cute.arch.thread_idx()
        tile = self.tile()
        place = (c.shape[0] // self.tile_m, c.shape[1] // self.tile_n)
        row, column = self.where(*place)
        smem = SmemAllocator()
        sA = smem.allocate_tensor(a.element_type, a_layout, 1024)
        sB = smem.allocate_tensor(b.element_type, b_layout, 1024)
        gA = cute.local_tile(a, (self.tile_m, self.slab), (row, None))
        gB = cute.local_tile(b, (self.tile_n, self.slab), (column, None))
        thr, mine = mma.get_slice(tid), g2s.get_slice(tid)
        copies = (
            mine.partition_S(gA),
            mine.partition_D(sA),
            mine.partition_S(gB),
            mine.partition_D(sB),
        )
        slabs, ahead = cute.size(gA, mode=[2]), self.stages - 1
        for stage in range_constexpr(ahead):
            if stage < slabs:
                self.fetch(g2s, copies, stage, stage)
            cute.arch.cp_async_commit_group()

        rA = thr.make_fragment_A(thr.partition_A(sA[None, None, 0]))
        rB = thr.make_fragment_B(thr.partition_B(sB[None, None, 0]))
        acc = cute.make_rmem_tensor(thr.partition_shape_C(tile), Float32)
        acc.fill(0.0)
        ldmatrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), a.element_type)
        load_a, load_b = (
            cute.make_tiled_copy_A(ldmatrix, mma),
            cute.make_tiled_copy_B(ldmatrix, mma),
        )
        from_a, to_a = load_a.get_slice(tid).partition_S(sA), load_a.get_slice(tid).retile(rA)
        from_b, to_b = load_b.get_slice(tid).partition_S(sB), load_b.get_slice(tid).retile(rB)
        steps = cute.size(rA, mode=[2])
        cute.arch.cp_async_wait_group(ahead - 1)
        cute.arch.sync_threads()
        cute.copy(load_a, from_a[None, None, 0, 0], to_a[None, None, 0])
        cute.copy(load_b, from_b[None, None, 0, 0], to_b[None, None, 0])
        for j in cutlass.range(slabs, unroll=1):
            for step in range_constexpr(steps):
                # The operands of the next product come while this one runs.
                stage = j % self.stages
                if step == steps - 1:
                    cute.arch.cp_async_wait_group(ahead - 1)  # slab j + 1 is here, and ...
                    cute.arch.sync_threads()  # ... nobody reads slab j any more
                    stage = cutlass.min(j + 1, slabs - 1) % self.stages
                nxt = (step + 1) % steps
                cute.copy(load_a, from_a[None, None, nxt, stage], to_a[None, None, nxt])
                cute.copy(load_b, from_b[None, None, nxt, stage], to_b[None, None, nxt])
                if step == 0:
                    if j + ahead < slabs:
                        self.fetch(g2s, copies, j + ahead, (j + ahead) % self.stages)
                    cute.arch.cp_async_commit_group()
                cute.gemm(mma, acc, rA[None, None, step], rB[None, None, step], acc)
        out = cute.make_rmem_tensor(acc.layout, c.element_type)
        out.store(acc.load().to(c.element_type))
        cute.autovec_copy(out, thr.partition_C(cute.local_tile(c, tile, (row, column))))

    def tile(self):
        return self.tile_m, self.tile_n

    @cute.jit
    def where(self, rows, columns):
        """The block's tile of C: bands of `BAND` rows of tiles, down each band's columns first."""
        block, _, _ = cute.arch.block_idx()
        band, inside = block // (BAND * columns), block % (BAND * columns)
        height = cutlass.min(rows - band * BAND, BAND)
        return band * BAND + inside % height, inside // height

    @cute.jit
    def fetch(self, g2s, copies, slab, stage):
        from_a, to_a, from_b, to_b = copies
        cute.copy(g2s, from_a[None, None, None, slab], to_a[None, None, None, stage])
        cute.copy(g2s, from_b[None, None, None, slab], to_b[None, None, None, stage])


ATOMS_N = 8  # accumulators side by side: 64 columns


class Issue(eqxcute.Kernel):
    """`times` m16n8k16 into each accumulator, all of the same operands; then their sum, so that none is dropped."""

    warps: int = eqxcute.static(4)
    atoms_m: int = eqxcute.static(2)  # accumulators one below the other: 32 rows
    times: int = eqxcute.attribute(1000)
    dtypes = {"x": ("bfloat16",), "blocks": ("float32",)}

    @property
    def values(self):
        """Of A and of B in a thread."""
        return 8 * self.atoms_m + 4 * ATOMS_N

    @property
    def signature(self):
        return f"{self.values} {32 * self.warps}, g -> g {32 * self.warps}"

    def out_dtypes(self, x, blocks):
        return jnp.float32

    @cute.jit
    def launch(self, stream, x, blocks, out):
        self.kernel(x, out, self.times, product(self.warps, 1)).launch(
            grid=[blocks.shape[0], 1, 1], block=[32 * self.warps, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x, out, times, mma):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        thr = mma.get_slice(tid)
        m, n = 16 * self.warps * self.atoms_m, 8 * ATOMS_N
        rA = cute.make_rmem_tensor(thr.partition_shape_A((m, 16)), BFloat16)
        rB = cute.make_rmem_tensor(thr.partition_shape_B((n, 16)), BFloat16)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((m, n)), Float32)
        for i in range_constexpr(cute.size(rA)):
            rA[i] = x[i, tid]
        for i in range_constexpr(cute.size(rB)):
            rB[i] = x[cute.size(rA) + i, tid]
        acc.fill(0.0)
        for _ in cutlass.range(times, unroll=4):
            cute.gemm(mma, acc, rA[None, None, 0], rB[None, None, 0], acc)
        out[block, tid] = acc.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


GEMMS = [
    Gemm(),
    Gemm(stages=3),
    Gemm(slab=64, stages=3),
    Gemm(warps_m=2, warps_n=4),
    Gemm(tile_n=256, warps_n=4),
    Gemm(tile_n=256, warps_n=4, stages=3),
    Gemm(tile_n=256, slab=64, stages=3, warps_n=4),
    Gemm(tile_m=256, tile_n=128, warps_m=4, warps_n=2),
]
# Sixteen warps have 128 registers a thread: half the accumulators.
ISSUES = [Issue(warps=4), Issue(warps=8), Issue(warps=16, atoms_m=1)]


def named(kernel):
    if isinstance(kernel, Issue):
        return f"m16n8k16 alone, {kernel.warps} warps, {kernel.atoms_m * ATOMS_N} accumulators each"
    warps = kernel.warps_m * kernel.warps_n
    return f"mma.sync {kernel.tile_m} x {kernel.tile_n} x {kernel.slab}, {kernel.stages} stages, {warps} warps"


def issue_inputs(kernel, blocks):
    x = jr.normal(jr.key(2), (kernel.values, 32 * kernel.warps), jnp.bfloat16)
    return x, jnp.zeros(blocks, jnp.float32)


def seconds(contenders):
    """Name -> seconds a call, one number a round."""
    times = {name: [] for name in contenders}
    for call, arguments in contenders.values():
        jax.block_until_ready(call(*arguments))
    for _ in range(ROUNDS):
        for name in random.sample(list(contenders), len(contenders)):
            call, arguments = contenders[name]
            jax.block_until_ready(call(*arguments))
            start = time.perf_counter()
            for _ in range(CALLS):
                result = call(*arguments)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / CALLS)
    return times


def report(times, flops):
    for name in sorted(times, key=lambda name: statistics.median(times[name])):
        rates = [flops[name] / t / 1e12 for t in times[name]]
        middle = statistics.median(rates)
        print(
            f"  {name:52} {middle:6.1f} TFLOP/s ({min(rates):.1f} to {max(rates):.1f})", flush=True
        )


def clocks():
    query = "name,driver_version,clocks.sm,clocks.max.sm,temperature.gpu,power.draw"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(
        asked.stdout.strip() or jax.devices()[0].device_kind, "| JAX", jax.__version__, flush=True
    )


def measure(gemms, issues):
    clocks()
    a, b = (jr.normal(key, (SIZE, SIZE), jnp.bfloat16) for key in jr.split(jr.key(0)))
    cublas = jax.jit(lambda a, b: jnp.matmul(a, b.T))
    want = cublas(a, b).astype(jnp.float32)
    contenders = {"cuBLAS (jnp.matmul)": (cublas, (a, b))}
    for kernel in gemms:
        call = jax.jit(kernel)
        off = jnp.abs(call(a, b).astype(jnp.float32) - want).max() / jnp.abs(want).max()
        if not float(off) < 0.01:
            raise AssertionError(f"{named(kernel)}: off by {float(off)} of the largest")
        contenders[named(kernel)] = call, (a, b)
    print(f"{SIZE} x {SIZE} x {SIZE}, bfloat16")
    report(seconds(contenders), dict.fromkeys(contenders, 2 * SIZE**3))
    clocks()
    blocks = getattr(jax.devices()[0], "core_count", 132)
    contenders, flops = {}, {}
    for kernel in issues:
        times = 160_000 // (kernel.warps * kernel.atoms_m)
        kernel = dataclasses.replace(kernel, times=times)
        contenders[named(kernel)] = jax.jit(kernel), issue_inputs(kernel, blocks)
        # A product and a sum for each of 16 x 8 x 16.
        flops[named(kernel)] = (
            blocks * kernel.warps * times * kernel.atoms_m * ATOMS_N * 2 * 16 * 8 * 16
        )
    print(f"registers only, {blocks} multiprocessors")
    report(seconds(contenders), flops)
    clocks()


def compile_all(gemms, issues):
    a = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    for architecture in ("sm_80", "sm_90a"):
        for kernel in (*gemms, *issues):
            arguments = (a, a) if isinstance(kernel, Gemm) else issue_inputs(kernel, 1)
            start = time.perf_counter()
            ptx = compile_only(kernel, *arguments, architecture=architecture).ptx
            counts = {word: ptx.count(word) for word in ("mma.sync", "ldmatrix", "cp.async.cg")}
            print(
                f"{architecture} {named(kernel)}: {time.perf_counter() - start:.1f} s, {counts}",
                flush=True,
            )


def interpret_all(gemms):
    """Fewer and more slabs than stages, one tile and several."""
    for kernel in gemms:
        for tiles, slabs in ((1, 1), (2, kernel.stages + 2)):
            shape = (
                (tiles * kernel.tile_m, kernel.slab * slabs),
                (kernel.tile_n, kernel.slab * slabs),
            )
            a, b = (jr.normal(jr.key(i), s, jnp.bfloat16) for i, s in enumerate(shape))
            start = time.perf_counter()
            got = np.asarray(interpret(kernel, a, b), np.float64)
            want = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
            off = np.abs(got - want).max() / np.abs(want).max()
            print(
                f"{named(kernel)}, {shape}: off by {off:.1e} of the largest, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if not off < 0.01:
                raise AssertionError("wrong")


def main(arguments):
    quick = "quick" in arguments
    gemms, issues = (GEMMS[4:5], ISSUES[:1]) if quick else (GEMMS, ISSUES)
    if "--compile" in arguments:
        compile_all(gemms, issues)
    elif "--interpret" in arguments:
        interpret_all(gemms)
    elif jax.default_backend() != "gpu":
        print("bench_mma needs an NVIDIA GPU; --compile and --interpret do not.", file=sys.stderr)
        return 2
    else:
        measure(gemms, issues)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
