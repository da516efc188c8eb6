"""gelu(x + bias) * gate in one pass, from a plain JAX function: no kernel is written by hand.

    uv run examples/pointwise.py

prints the largest error against NumPy in float64, what the function became, and on a GPU the time
of the kernel beside that of XLA's own fusion. The gradient is a kernel too.
"""

import jax
import jax.numpy as jnp
import numpy as np

import eqxcute
from eqxcute import inline
from eqxcute.testing import benchmark

ON_GPU = jax.default_backend() == "gpu"
SHAPE = (16384, 8192) if ON_GPU else (129, 1001)  # the second is odd, for the ragged ends


def gated(x, gate, bias):
    """Scalars in, a scalar out: what happens to one element."""
    return (jax.nn.gelu(x + bias) * gate).astype(x.dtype)


def main(shape=SHAPE):
    keys = jax.random.split(jax.random.key(0), 3)
    x, gate = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    bias = jax.random.normal(keys[2], shape[-1:])  # float32, one number a column
    kernel = eqxcute.pointwise(gated)

    out = jax.jit(kernel)(x, gate, bias)
    z = np.asarray(x, np.float64) + np.asarray(bias)
    want = (
        0.5
        * z
        * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))
        * np.asarray(gate, np.float64)
    )
    print("largest error against float64", np.abs(np.asarray(out, np.float64) - want).max())

    # The same function as `eqxcute.inline` reads it: a list of scalar equations.
    program, _ = inline.trace(gated, {"x": x.dtype, "gate": gate.dtype, "bias": bias.dtype})
    print(program.code)

    gradient = jax.grad(lambda bias: kernel(x, gate, bias).astype(jnp.float32).sum())(bias)
    print("gradient of the bias:", gradient.shape, gradient.dtype)
    if ON_GPU:
        moved = 3 * x.nbytes
        for name, function in (("kernel", kernel), ("XLA", gated)):
            seconds = benchmark(jax.jit(function), x, gate, bias)
            print(f"{name:6} {seconds * 1e6:7.1f} us  {moved / seconds / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
