"""relu(x + bias) in one pass: what fusion is worth.

    uv run examples/bias_relu.py

prints the largest error against NumPy in float64, and on a GPU the time of one fused kernel beside
that of two passes, bias and then ReLU. The two do the same arithmetic; the second pass reads again
what the first has just written, so it takes twice as long. `eqxcute.layers.BiasReLU` has the
kernel for real use: any dtype, wider loads, and a backward pass.
"""

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np

import eqxcute
from eqxcute.testing import benchmark

ON_GPU = jax.default_backend() == "gpu"
# Rows and width. On a GPU 1 GiB: far more than any cache. Else odd, for the ragged ends.
SHAPE = (2**15, 2**13) if ON_GPU else (129, 1001)


class BiasReLU(eqxcute.Kernel):
    """out = max(x + bias, 0), in float32."""

    # `n!`: the width is compiled in, the rows (`...`) are not. So the loops over a row unroll, and
    # which steps need a bounds check is known. The price: a compile for each width.
    signature = "... n!, n! -> ... n!"
    dtypes = {"x": ("float32",), "bias": ("float32",)}
    threads: int = eqxcute.static(256)  # a block, which takes a row
    loads: int = eqxcute.static(8)  # in flight before the first is used: they hide the latency

    def reference(self, x, bias):
        return jax.nn.relu(x + jnp.broadcast_to(bias, x.shape))

    @cute.jit
    def launch(self, stream, x, bias, out):
        rows = x.shape[0]
        if rows > 0:
            self.kernel(x, bias, out).launch(
                grid=[rows, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, x, bias, out):
        thread, _, _ = cute.arch.thread_idx()
        # A compiled-in width has a 32-bit stride, and row * width may pass 2**31. A 64-bit row
        # makes the product 64 bits wide.
        row = cutlass.Int64(cute.arch.block_idx()[0])
        width = x.shape[1]  # a Python int
        for start in cutlass.range_constexpr(0, width, self.threads * self.loads):
            held = cute.make_rmem_tensor(self.loads, cutlass.Float32)
            # Neighbouring threads take neighbouring columns: a warp reads 128 bytes at once.
            for i in cutlass.range_constexpr(self.loads):
                column = start + i * self.threads + thread
                if column < width:
                    held[i] = x[row, column] + bias[column]
            for i in cutlass.range_constexpr(self.loads):
                column = start + i * self.threads + thread
                if column < width:
                    out[row, column] = cute.arch.fmax(held[i], 0.0, nan=True)


def main(shape=SHAPE):
    xkey, bkey = jax.random.split(jax.random.key(0))
    x, bias = jax.random.normal(xkey, shape), jax.random.normal(bkey, shape[1:])
    fused = BiasReLU()
    out = fused(x, bias)
    exact = np.maximum(np.asarray(x, np.float64) + np.asarray(bias, np.float64), 0.0)
    print(f"{shape}: largest error against float64 {np.abs(np.asarray(out) - exact).max():.1e}")
    if ON_GPU:
        add, relu = jax.jit(lambda x, bias: x + bias), jax.jit(jax.nn.relu)  # two jits: two kernels
        one = benchmark(jax.jit(fused), x, bias)
        two = benchmark(add, x, bias) + benchmark(relu, x)
        print(f"one pass   {1e6 * one:5.0f} us, {2 * out.nbytes / one / 1e9:.0f} GB/s")
        print(f"two passes {1e6 * two:5.0f} us, {two / one:.2f} times as long")


if __name__ == "__main__":
    main()
