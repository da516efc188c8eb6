"""A matrix product through shared memory: the classic, for any M, N and K.

    uv run examples/tiled_gemm.py

prints the largest error against NumPy in float64, and on a GPU its time and that of cuBLAS, which
is several times faster: wide loads, copies that run ahead, tensor cores. This one is to be read.

A block computes a TILE x TILE tile of C. It walks along K in slabs:

            K               N             each thread of 16 x 16 has 4 x 4 entries of the tile,
         +--+---+        +--+---+         16 apart: rows y, y + 16, ..., columns x, x + 16, ...
       M |==|   |  x   K |--|---|         So each number in shared memory is read by 16 threads,
         +--+---+        +--+---+         and each read from global memory serves 64 products.
"""

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np
from cutlass import Float32, range_constexpr

import eqxcute
from eqxcute.testing import benchmark

ON_GPU = jax.default_backend() == "gpu"
SIZES = (4095, 4097, 4001) if ON_GPU else (129, 65, 33)  # odd: ragged tiles on every side
TILE, SLAB, SIDE = 64, 16, 16  # a tile of C, its slab of K, and the side of the thread block


class TiledGemm(eqxcute.Kernel):
    """C = A B, summed in float32."""

    signature = "m k, k n -> m n"
    dtypes = dict.fromkeys("ab", ("bfloat16", "float16", "float32"))

    def reference(self, a, b):
        product = jnp.matmul(a, b, preferred_element_type=jnp.float32, precision="highest")
        return product.astype(a.dtype)

    @cute.jit
    def launch(self, stream, a, b, c):
        grid = [cute.ceil_div(c.shape[1], TILE), cute.ceil_div(c.shape[0], TILE), 1]
        if grid[0] * grid[1] > 0:
            self.kernel(a, b, c).launch(grid=grid, block=[SIDE, SIDE, 1], stream=stream)

    @cute.kernel
    def kernel(self, a, b, c):
        x, y, _ = cute.arch.thread_idx()
        tile_n, tile_m, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        sA = smem.allocate_tensor(Float32, cute.make_layout((TILE, SLAB), stride=(SLAB, 1)), 16)
        sB = smem.allocate_tensor(Float32, cute.make_layout((SLAB, TILE), stride=(TILE, 1)), 16)
        sums = cute.make_rmem_tensor((TILE // SIDE, TILE // SIDE), Float32)
        sums.fill(0.0)
        for slab in cutlass.range(cute.ceil_div(a.shape[1], SLAB), unroll=1):
            self.fetch(a, sA, tile_m * TILE, slab * SLAB)
            self.fetch(b, sB, slab * SLAB, tile_n * TILE)
            cute.arch.sync_threads()  # the slab is complete
            for k in range_constexpr(SLAB):
                for i in range_constexpr(TILE // SIDE):
                    for j in range_constexpr(TILE // SIDE):
                        sums[i, j] += sA[y + i * SIDE, k] * sB[k, x + j * SIDE]
            cute.arch.sync_threads()  # nobody reads it any more
        for i in range_constexpr(TILE // SIDE):
            for j in range_constexpr(TILE // SIDE):
                row, column = tile_m * TILE + y + i * SIDE, tile_n * TILE + x + j * SIDE
                if cute.elem_less((row, column), c.shape):
                    c[row, column] = sums[i, j].to(c.element_type)

    @cute.jit
    def fetch(self, source, target, row0, column0):
        """Copies a tile to shared memory, as float32. Past the edges it is zero: adds nothing."""
        x, y, _ = cute.arch.thread_idx()
        for i in range_constexpr(0, target.shape[0], SIDE):
            for j in range_constexpr(0, target.shape[1], SIDE):
                row, column = row0 + y + i, column0 + x + j
                value = Float32(0.0)
                if cute.elem_less((row, column), source.shape):
                    value = source[row, column].to(Float32)
                target[y + i, x + j] = value


def main(sizes=SIZES):
    m, n, k = sizes
    akey, bkey = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(akey, (m, k)), jax.random.normal(bkey, (k, n))
    gemm = TiledGemm()
    out = gemm(a, b)
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    print(f"{m} x {n} x {k}: largest error against float64 {np.abs(out - exact).max():.1e}")
    if ON_GPU:
        ours, cublas = benchmark(jax.jit(gemm), a, b), benchmark(jax.jit(gemm.reference), a, b)
        print(f"this kernel {1e3 * ours:6.2f} ms, {2 * m * n * k / ours / 1e12:.1f} TFLOP/s")
        print(f"cuBLAS      {1e3 * cublas:6.2f} ms, {2 * m * n * k / cublas / 1e12:.1f} TFLOP/s")


if __name__ == "__main__":
    main()
