"""What it costs to call a kernel: eqxcute beside `cutlass_call`, cutejax and XLA, in one run.

    python tests/gpu/bench_dispatch.py

needs a GPU; rivals that are not installed are left out. Every one runs the same CuTe code, `out = 2 x + y` on 1024
float32. Printed are the time of one kernel inside one jit of 100 (a chain, so that none can be dropped), the time of one
jit call of one kernel, and the length of the HLO of one call. Medians of 15 rounds, the rivals in turn in each.
"""

import statistics
import time

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
from cutlass import Float32

import eqxcute

THREADS = 128


@cute.kernel
def device(x, y, out):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * THREADS + tid
    if i < x.shape[0]:
        out[i] = x[i] * Float32(2.0) + y[i]


@cute.jit
def launcher(stream, x, y, out):
    grid = [cute.ceil_div(x.shape[0], THREADS), 1, 1]
    device(x, y, out).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)


class Axpy(eqxcute.Kernel):
    signature = "n, n -> n"

    def launch(self, stream, x, y, out):
        launcher(stream, x, y, out)


def contenders():
    """Name -> function of two arrays."""
    kernel = Axpy()
    # `optimization_barrier` keeps XLA from fusing the chain into one kernel.
    found = {"XLA": lambda x, y: jax.lax.optimization_barrier(2 * x + y), "eqxcute": kernel}
    try:
        from cutlass.jax import cutlass_call

        found["cutlass_call"] = lambda x, y: cutlass_call(
            launcher, output_shape_dtype=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )(x, y)
    except ImportError as error:
        print(f"cutlass_call left out: {error}")
    try:
        import cutejax

        found["cutejax"] = lambda x, y: cutejax.call(
            launcher, jax.ShapeDtypeStruct(x.shape, x.dtype), x, y
        )
    except ImportError as error:
        print(f"cutejax left out: {error}")
    return found


def seconds(function, x, y, calls: int) -> float:
    jax.block_until_ready(function(x, y))
    start = time.perf_counter()
    for _ in range(calls):
        result = function(x, y)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def main():
    x, y = jnp.arange(1024.0), jnp.ones(1024)
    single, chain, length = {}, {}, {}
    for name, function in contenders().items():

        def hundred(x, y, function=function):
            for _ in range(100):
                x = function(x, y)
            return x

        single[name] = jax.jit(lambda x, y, f=function: f(x, y))
        chain[name] = jax.jit(hundred)
        length[name] = len(single[name].lower(x, y).as_text())
        assert jnp.array_equal(single[name](x, y), 2 * x + y), name
    rounds = {(kind, name): [] for kind in ("kernel", "call") for name in single}
    for _ in range(15):
        for name in single:
            rounds["kernel", name].append(seconds(chain[name], x, y, 20) / 100)
            rounds["call", name].append(seconds(single[name], x, y, 300))
    device_name = jax.devices()[0].device_kind
    print(f"{device_name}, jax {jax.__version__}, cutlass {cutlass.__version__}")
    print(f"{'':14} {'kernel in a jit of 100':>24} {'one jit call':>20} {'HLO':>8}")
    for name in single:
        cells = []
        for kind in ("kernel", "call"):
            times = sorted(1e6 * t for t in rounds[kind, name])
            cells.append(f"{statistics.median(times):6.2f} us ({times[1]:.2f}-{times[-2]:.2f})")
        print(f"{name:14} {cells[0]:>24} {cells[1]:>20} {length[name]:>8}")


if __name__ == "__main__":
    main()
