"""alpha * x + y: three ways to give a kernel a number, and what a new number costs.

    uv run examples/saxpy.py

prints for each way how often four values of alpha compile and trace (neither needs a GPU), the
largest error against NumPy in float64, and on a GPU the time and the bandwidth.

    static     compiled in. For what shapes the code: a tile size, an activation
    attribute  a constant of the program. For what differs between runs: a scale, an epsilon
    array      0-d, read on the GPU. For what changes as it runs: a learning rate, a step count
"""

import cutlass.cute as cute
import jax
import numpy as np
from cutlass import Int64, const_expr

import eqxcute
from eqxcute.testing import benchmark, compile_count

ON_GPU = jax.default_backend() == "gpu"
SIZE = 2**28 + 3 if ON_GPU else 2**20 + 3  # odd: a ragged end. On a GPU 1 GiB an array
ALPHAS, THREADS = (0.5, 1.5, 2.5, 3.5), 256  # THREADS: a block


class StaticSaxpy(eqxcute.Kernel):
    signature = "n, n -> n"
    alpha: float = eqxcute.static()

    def reference(self, x, y):
        return self.alpha * x + y

    @cute.jit
    def launch(self, stream, x, y, out):
        run(stream, x, y, out, self.alpha)  # a Python number: compiled in


class AttributeSaxpy(eqxcute.Kernel):
    signature = "n, n -> n"
    alpha: float = eqxcute.attribute()

    def reference(self, x, y):
        return self.alpha * x + y

    @cute.jit
    def launch(self, stream, x, y, out):
        run(stream, x, y, out, self.alpha)  # here a run-time number, an argument of the launcher


class ArraySaxpy(eqxcute.Kernel):
    signature = "n, n, () -> n"  # `()`: no dims

    def reference(self, x, y, alpha):
        return alpha * x + y

    @cute.jit
    def launch(self, stream, x, y, alpha, out):
        run(stream, x, y, out, alpha)  # an array in GPU memory: the host cannot read it


@cute.jit
def run(stream, x, y, out, alpha):
    if x.shape[0] > 0:
        grid = [cute.ceil_div(x.shape[0], THREADS), 1, 1]
        saxpy(x, y, out, alpha).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


@cute.kernel
def saxpy(x, y, out, alpha):
    i = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
    if i < x.shape[0]:
        scale = alpha[0] if const_expr(isinstance(alpha, cute.Tensor)) else alpha
        out[i] = scale * x[i] + y[i]


def main(size=SIZE):
    x, y = np.random.default_rng(0).standard_normal((2, size), np.float32)
    static, attribute = lambda a: (StaticSaxpy(a), x, y), lambda a: (AttributeSaxpy(a), x, y)
    ways = dict(static=static, attribute=attribute, array=lambda a: (ArraySaxpy(), x, y, a))
    traces = []  # a function's Python runs when JAX traces it, and only then
    call = jax.jit(lambda kernel, *a: traces.append(kernel) or kernel(*a), static_argnums=0)
    print(f"{len(ALPHAS)} values of alpha (a second run finds the kernels on disk):")
    for name, way in ways.items():
        traces.clear()
        before = compile_count()
        with eqxcute.architecture("sm_90a"):  # named, so that it works without a GPU
            [call.trace(*way(a)).lower(lowering_platforms=("cuda",)) for a in ALPHAS]
        compiles = compile_count() - before
        kernel, *arrays = way(2.5)
        out = jax.jit(kernel)(*arrays)
        error = np.abs(np.asarray(out) - (2.5 * x.astype(np.float64) + y)).max()
        print(f"{name:10}{compiles} compiled, {len(traces)} traced, error {error:.1e}")
        if ON_GPU:
            seconds = benchmark(jax.jit(kernel), *jax.device_put(arrays))
            print(f"{1e6 * seconds:14.0f} us, {3e-9 * out.nbytes / seconds:.0f} GB/s")


if __name__ == "__main__":
    main()
