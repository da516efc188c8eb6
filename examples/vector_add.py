"""Vector addition: the first kernel, the structured way.

    uv run examples/vector_add.py

prints the largest error against NumPy in float64, and on a GPU the time and the bandwidth.

A GPU is fast if each thread moves 16 bytes at once and neighbours move neighbours. So the kernel
does not compute indices. It looks at each array through a layout of

    shape    (values, threads, blocks) = (4, 256, n / 1024, rounded up)
    strides  (1,      4,       1024)

and a thread takes `view[None, thread, block]`: its four values, which are one 16-byte load.
"""

import cutlass
import cutlass.cute as cute
import jax
import numpy as np

import eqxcute
from eqxcute.testing import benchmark

ON_GPU = jax.default_backend() == "gpu"
# Odd, so that the last block has a ragged end. On a GPU 1 GiB an array: far more than any cache.
SIZE = 2**28 + 3 if ON_GPU else 2**20 + 3


class VectorAdd(eqxcute.Kernel):
    """out = x + y, in float32."""

    # One name: one size, which is checked. It is a run-time number, so one compiled kernel serves
    # every n.
    signature = "n, n -> n"
    dtypes = {"x": ("float32",), "y": ("float32",)}
    values: int = eqxcute.static(4)  # 4 x 4 bytes: the widest load there is
    threads: int = eqxcute.static(256)  # a block; several blocks fit a processor

    def reference(self, x, y):
        """The meaning. It runs on every platform but CUDA, and gives the derivatives."""
        return x + y

    @cute.jit
    def launch(self, stream, x, y, out):
        """On the host, once a call: sizes are known here, values are not."""
        blocks = cute.ceil_div(x.shape[0], self.values * self.threads)
        if blocks > 0:  # an empty grid is an error
            self.kernel(x, y, out, blocks).launch(
                grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, x, y, out, blocks):
        """On the GPU, once a thread."""
        thread, _, _ = cute.arch.thread_idx()
        block = cutlass.Int64(cute.arch.block_idx()[0])  # 64 bits: n may come close to 2**31
        left = x.shape[0] - (block * self.threads + thread) * self.values
        view = cute.make_layout(
            (self.values, self.threads, blocks), stride=(1, self.values, self.values * self.threads)
        )
        gX, gY, gOut = [
            cute.make_tensor(array.iterator, view)[None, thread, block] for array in (x, y, out)
        ]
        # `blocks` is rounded up, so the views reach past the end of the arrays. What lies there
        # is padding in name only: it must not be touched.
        if left >= self.values:
            gOut.store(gX.load() + gY.load())
        else:
            for v in cutlass.range_constexpr(self.values - 1):
                if v < left:
                    gOut[v] = gX[v] + gY[v]


def main(size=SIZE):
    xkey, ykey = jax.random.split(jax.random.key(0))
    x, y = jax.random.normal(xkey, size), jax.random.normal(ykey, size)
    add = VectorAdd()
    out = add(x, y)
    exact = np.asarray(x, np.float64) + np.asarray(y, np.float64)
    print(f"n = {size}: largest error against float64 {np.abs(np.asarray(out) - exact).max():.1e}")
    if ON_GPU:
        seconds = benchmark(jax.jit(add), x, y)
        print(f"{1e6 * seconds:.0f} us, {3 * out.nbytes / seconds / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
