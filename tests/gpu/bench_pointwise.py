"""`eqxcute.pointwise` beside a device copy and XLA's fusion, in one run.

    python tests/gpu/bench_pointwise.py           every setting
    python tests/gpu/bench_pointwise.py quick     the setting that users get

needs a GPU. The function is a chain of two inputs and a bias, `gelu(x + bias) * y`, in bfloat16 and float32, on
standard normal inputs, and its gradient. The protocol is that of bench_bias_act.py, whose functions measure here too.

Bar: 0.95 of the copy's bandwidth, forward, at 16384 x 8192.

What an element may cost: at 4.12 TB/s, the copy's speed, the 132 x 4 schedulers of an H200 issue 132 * 4 * 32 * 1.755e9 =
2.97e13 instructions of a thread a second at 1,755 MHz. The chain in bfloat16 moves 6 bytes an element: 43 instructions are
issued in the time of one; in float32 12 bytes: 86. The kernel for sm_90a issues, by its SASS, about 170 for 8 elements in
bfloat16, 21 each, and 176 for 4 in float32, whose tanh is exact, 44 each.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr

import eqxcute
from eqxcute.inline import _pointwise
from eqxcute.inline._walk import POINTWISE, Config

sys.path.insert(0, str(Path(__file__).parent))
from bench_bias_act import QUICK, SETS, check, copies, main, named, table

SHAPES = [
    (16384, 8192, "bfloat16"),  # the bar
    (16384, 8192, "float32"),
    (131072, 1024, "bfloat16"),  # narrow
    (8192, 8191, "bfloat16"),  # odd
]


def configs():
    if QUICK:
        return [POINTWISE]
    found = [Config(threads=t, lines=l) for t in (128, 256, 512) for l in (1, 2, 4)]
    found += [Config(threads=128, lines=l, ctas=132 * k) for l in (1, 2, 4) for k in (8, 16)]
    found += [
        Config(threads=128, lines=1, store="streaming", load=h) for h in ("none", "streaming")
    ]
    return found


def gated(x, y, bias):
    return (jax.nn.gelu(x + bias) * y).astype(x.dtype)


def plain(x, y, bias):
    return gated(x, y, jnp.broadcast_to(bias, x.shape))


def with_config(function, config):
    """The function with its kernels walked in another way."""

    def run(*args):
        usual = _pointwise.PointwiseKernel.__call__

        def call(kernel, *operands):
            return usual(dataclasses.replace(kernel, config=config), *operands)

        _pointwise.PointwiseKernel.__call__ = call
        try:
            return function(*args)
        finally:
            _pointwise.PointwiseKernel.__call__ = usual

    return jax.jit(run)


def gradient(function):
    """Of x and y. That of the bias is a sum, which XLA takes for both contenders: left out."""
    return lambda x, y, bias, ct: jax.vjp(lambda x, y: function(x, y, bias), x, y)[1](ct)


def measure(rows, width, dtype):
    keys = jr.split(jr.key(0), 3 * SETS)
    arrays = [jr.normal(key, (rows, width), dtype) for key in keys]
    x, y, ct = arrays[:SETS], arrays[SETS : 2 * SETS], arrays[2 * SETS :]
    bias = jr.normal(jr.key(1), (width,))
    size, title = x[0].nbytes, f"{rows} x {width} {dtype}"
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5

    def contenders(make, arguments):
        fused = jax.jit(make(plain))
        want = fused(*arguments[0])
        yield "XLA, fused", fused, arguments
        for config in configs():
            kernel = with_config(make(eqxcute.pointwise(gated)), config)
            check(named(config), kernel(*arguments[0]), want, tolerance)
            yield f"eqxcute {named(config)}", kernel, arguments

    arguments = [(a, b, bias) for a, b in zip(x, y, strict=True)]
    found = [*copies(x), *contenders(lambda f: f, arguments)]
    yield from table(f"forward  {title}", found, 3 * size + bias.nbytes, 2 * size)
    arguments = [(a, b, bias, c) for a, b, c in zip(x, y, ct, strict=True)]
    found = [*copies(x), *contenders(gradient, arguments)]
    yield from table(f"gradient {title}", found, 5 * size + bias.nbytes, 2 * size)


if __name__ == "__main__":
    main(measure, SHAPES)
