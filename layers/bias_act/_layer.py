"""`BiasReLU`, the layer."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import eqxcute
from eqxcute import _fallback

from ._entry import apply


class BiasReLU(eqx.Module):
    r"""Adds a learnt bias along the last axis, then applies ReLU, in one pass.

    $$y_j = \max(x_j + b_j,\ 0)$$

    `bias` is the only leaf. See `eqxcute.layers.bias_relu` for dtypes, gradients and cost.
    """

    bias: Float[Array, " size"]
    implementation: Literal["cute", "xla"] | None = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        *,
        dtype: Any = None,
        implementation: Literal["cute", "xla"] | None = None,
    ):
        """**Arguments:**

        - `size`: Length of the last axis. Any; it is not compiled in.
        - `dtype`: Of `bias`, which starts at zero. By default JAX's floating dtype, which is
            float32; that suits a bfloat16 `x` too. (Keyword only argument.)
        - `implementation`: `None` runs the kernel on an NVIDIA GPU and plain JAX elsewhere;
            `"cute"` insists on the kernel; `"xla"` is plain JAX. (Keyword only argument.)

        **Raises:**

        `eqxcute.DtypeError` for a `dtype` that is not floating, `ValueError` for an unknown
        `implementation`.
        """
        _fallback.check_name("BiasReLU", implementation)
        bias = jnp.zeros(size, dtype)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise eqxcute.DtypeError(
                f"`BiasReLU`: `dtype` must be a floating dtype, got {bias.dtype}."
            )
        self.bias = bias
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "*batch size"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch size"]:
        """**Arguments:**

        - `x`: One example, `(size,)`, or any leading dims. `jax.vmap` adds dims too: that is one
            launch, not a loop.
        - `key`: Ignored; every layer takes one. (Keyword only argument.)

        **Returns:**

        An array of the shape and dtype of `x`.

        **Raises:**

        As `eqxcute.layers.bias_relu` does.
        """
        del key
        return apply("BiasReLU", x, self.bias, self.implementation)
