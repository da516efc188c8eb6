"""ReLU of an array of any shape, one element a thread: flat indices and a bounds check.

    uv run examples/relu.py

prints the largest error against NumPy in float64, what becomes of NaN, and on a GPU the time and
the bandwidth. vector_add.py has the faster way, with 16 bytes a thread.
"""

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np

import eqxcute
from eqxcute.testing import benchmark

ON_GPU = jax.default_backend() == "gpu"
# Odd sizes, so that the last block has threads without an element. On a GPU about 1 GiB.
SHAPE = (16385, 127, 129) if ON_GPU else (33, 127, 129)


class ReLU(eqxcute.Kernel):
    """out = max(x, 0)."""

    # Any shape: the kernel sees it as one dim. `jax.vmap` adds a dim and still is one launch.
    signature = "... -> ..."
    dtypes = {"x": ("bfloat16", "float16", "float32")}
    threads: int = eqxcute.static(256)  # a block

    def reference(self, x):
        return jax.nn.relu(x)

    @cute.jit
    def launch(self, stream, x, out):
        blocks = cute.ceil_div(x.shape[0], self.threads)
        if blocks > 0:
            self.kernel(x, out).launch(
                grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, x, out):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # In 64 bits: the last block's index may pass 2**31 although n does not.
        i = cutlass.Int64(block) * self.threads + thread
        # The grid is rounded up to whole blocks. Without this check the last threads read and
        # write past the end. (`i < n and x[i] > 0` would not do: both sides are evaluated.)
        if i < x.shape[0]:
            # The GPU's plain maximum returns the other operand for NaN. `nan=True` keeps it.
            value = cute.arch.fmax(x[i].to(cutlass.Float32), 0.0, nan=True)
            out[i] = value.to(out.element_type)


def main(shape=SHAPE):
    x = jax.random.normal(jax.random.key(0), shape)
    relu = ReLU()
    out = relu(x)
    exact = np.maximum(np.asarray(x, np.float64), 0.0)
    print(f"{shape}: largest error against float64 {np.abs(np.asarray(out) - exact).max():.1e}")
    special = jnp.array([jnp.nan, -1.0, 0.0, jnp.inf, -jnp.inf])
    print(f"relu({special}) = {relu(special)}")
    if ON_GPU:
        seconds = benchmark(jax.jit(relu), x)
        print(f"{1e6 * seconds:.0f} us, {2 * out.nbytes / seconds / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
