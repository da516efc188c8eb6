"""BiasReLU beside a device copy and XLA, forward and backward, in one run.

    python tests/gpu/bench_bias_act.py            every variant
    python tests/gpu/bench_bias_act.py quick      the settings that users get
    python tests/gpu/bench_bias_act.py bar        the two shapes of the bar only

needs a GPU. Every contender is checked against plain JAX first. Inputs are standard normal, bias
float32. Contenders take turns, in random order, `ROUNDS` times; a turn is `CALLS` calls, queued
without waiting, over as many sets of buffers as exceed the L2 cache. Reported: the median time of a
call, the 10th and 90th percentile, and GB/s of the formula's bytes: each input read once, each
output written once.
"""

import functools
import random
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from eqxcute.layers.bias_act._config import BACKWARD, FORWARD, Config
from eqxcute.layers.bias_act._entry import BiasReLUBackward, BiasReLUKernel

QUICK = "quick" in sys.argv[1:]
ROUNDS, CALLS = 11, 24
SETS = 3  # of buffers, used in turn; each is several times the 60 MB of an H200's L2
SHAPES = [
    (16384, 8192, "bfloat16"),  # the bar
    (16384, 8192, "float32"),
    (131072, 1024, "bfloat16"),  # narrow
    (4096, 12288, "bfloat16"),  # an MLP's
    (8192, 8191, "bfloat16"),  # odd: no row but every eighth is aligned
    (8192, 8191, "float32"),
]
if "bar" in sys.argv[1:]:
    SHAPES = SHAPES[:2]


def named(config):
    parts = [f"t{config.threads} l{config.lines}", f"c{config.ctas}"]
    parts += [f"ld.{config.load}"] * (config.load != "none") + [f"st.{config.store}"] * (
        config.store != "none"
    )
    return " ".join(parts)


def forward_configs():
    if QUICK:
        return [FORWARD]
    found = [Config(threads=t, lines=l) for t in (128, 256) for l in (1, 2, 3, 4)]
    found += [Config(lines=4, ctas=132 * k) for k in (16, 64)]
    found += [
        Config(lines=l, load=load, store="streaming")
        for l in (1, 2, 4)
        for load in ("none", "no_allocate", "streaming")
    ]
    return found


def backward_configs():
    if QUICK:
        return [BACKWARD]
    found = [
        Config(threads=t, lines=l, ctas=132 * k)
        for t, l, ks in (
            (128, 1, (4, 6, 8)),
            (128, 2, (4, 6)),
            (256, 1, (2, 3, 4, 5, 6, 8)),
            (256, 2, (2, 3, 4)),
            (256, 4, (2, 3, 8)),
            (512, 1, (1, 2, 3)),
            (512, 2, (1, 2)),
            (1024, 1, (1, 2)),
        )
        for k in ks
    ]
    found += [
        Config(lines=1, ctas=528, load=load, store=store)
        for load, store in (("none", "streaming"), ("streaming", "streaming"))
    ]
    return found


def plain_forward(x, bias):
    return jax.nn.relu(x.astype(jnp.float32) + bias[None]).astype(x.dtype)


def plain_backward(y, dy):
    dx = jnp.where(y > 0, dy, jnp.zeros_like(dy))
    return dx, jnp.sum(dx.astype(jnp.float32), axis=0)


def copies(x):
    """How fast a copy is: XLA's, and cudaMemcpy through CuPy where it is installed. (name, function, arguments)"""
    # A sum with 0 read at run time: XLA may drop a copy, but not this.
    zero = jnp.zeros((), x[0].dtype)
    yield "copy, XLA (x + 0)", jax.jit(lambda x, zero: x + zero), [(one, zero) for one in x]
    try:
        import cupy
    except ImportError:
        print("CuPy is not installed: no cudaMemcpy row")
        return
    source = [cupy.empty(one.nbytes, cupy.uint8) for one in x]
    target = [cupy.empty(one.nbytes, cupy.uint8) for one in x]

    def memcpy(a, b):
        cupy.cuda.runtime.memcpyAsync(
            b.data.ptr, a.data.ptr, a.nbytes, 3, cupy.cuda.Stream.null.ptr
        )
        return cupy.cuda.Stream.null

    yield "copy, cudaMemcpy", memcpy, list(zip(source, target, strict=True))


def wait(result):
    if hasattr(result, "synchronize"):
        result.synchronize()
    else:
        jax.block_until_ready(result)


def seconds(contenders):
    """Name -> seconds a call, one number a turn."""
    times = {name: [] for name, _, _ in contenders}
    for _, function, arguments in contenders:
        for some in arguments:
            wait(function(*some))
    for _ in range(ROUNDS):
        for name, function, arguments in random.sample(contenders, len(contenders)):
            wait(function(*arguments[0]))
            start = time.perf_counter()
            for i in range(CALLS):
                result = function(*arguments[i % len(arguments)])
            wait(result)
            times[name].append((time.perf_counter() - start) / CALLS)
    return times


def check(name, got, want, tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(other.astype(jnp.float32))))
        off = float(jnp.max(jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32))))
        if not off <= tolerance * scale:
            raise AssertionError(f"{name}: off by {off}, of {scale}")


def table(title, contenders, bytes_, copied):
    """Rows of text: the copies first, then by time."""
    times = seconds(contenders)
    medians = {name: statistics.median(found) for name, found in times.items()}
    # A copy of one array moves `copied` bytes, another number than the formula.
    rate = {n: (copied if n.startswith("copy") else bytes_) / t / 1e9 for n, t in medians.items()}
    best = max(r for n, r in rate.items() if n.startswith("copy"))
    yield f"\n{title}: {bytes_ / 1e6:.0f} MB"
    for name in sorted(times, key=lambda n: (not n.startswith("copy"), medians[n])):
        low, high = np.percentile(times[name], (10, 90)) * 1e6
        yield (
            f"  {name:44} {medians[name] * 1e6:8.1f} us ({low:.1f} to {high:.1f}) "
            f"{rate[name]:6.0f} GB/s  {rate[name] / best:5.3f} of a copy"
        )


def measure(rows, width, dtype):
    keys = jr.split(jr.key(0), 2 * SETS)
    x = [jr.normal(key, (rows, width), dtype) for key in keys[:SETS]]
    dy = [jr.normal(key, (rows, width), dtype) for key in keys[SETS:]]
    bias = jr.normal(jr.key(1), (width,))
    size, copied = x[0].nbytes, 2 * x[0].nbytes
    title = f"{rows} x {width} {dtype}"

    plain = jax.jit(plain_forward)
    y = [plain(one, bias) for one in x]
    arguments = [(one, bias) for one in x]
    contenders = [*copies(x), ("XLA, fused", plain, arguments)]
    for config in forward_configs():
        kernel = jax.jit(BiasReLUKernel(config))
        check(named(config), kernel(x[0], bias), y[0], 0)
        contenders.append((f"eqxcute {named(config)}", kernel, arguments))
    yield from table(f"forward  {title}", contenders, 2 * size + bias.nbytes, copied)

    plain = jax.jit(plain_backward)
    want = plain(y[0], dy[0])
    arguments = list(zip(y, dy, strict=True))
    contenders = [*copies(x), ("XLA", plain, arguments)]
    for config in backward_configs():
        kernel = jax.jit(functools.partial(BiasReLUBackward("float32", config)))
        got = kernel(y[0], dy[0])
        check(named(config), got[0], want[0], 0)
        check(named(config), got[1], want[1], 1e-4)
        contenders.append((f"eqxcute {named(config)}", kernel, arguments))
    yield from table(f"backward {title}", contenders, 3 * size + bias.nbytes, copied)


def main(measure=measure, shapes=SHAPES):
    """Tables of `measure(rows, width, dtype)`, printed last, and what they were measured on."""
    lines = []
    for shape in shapes[: 2 if QUICK else None]:
        for line in measure(*shape):
            lines.append(line)
            print(".", end="", flush=True)
        print(f" {shape} done", flush=True)
    query = "name,driver_version,clocks.sm,clocks.mem"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(asked.stdout.strip() or jax.devices()[0].device_kind, "| JAX", jax.__version__)
    print(
        f"{SETS} sets of buffers, {ROUNDS} turns of {CALLS} calls; t threads, l lines in flight, c CTAs (0: all)"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
