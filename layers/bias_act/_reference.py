"""The meaning of the bias + ReLU kernels, in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def wide_dtype(*dtypes):
    """In which dtype sums are taken: float32, or wider if an input is."""
    wide = jnp.dtype(jnp.float32)
    for dtype in dtypes:
        wide = jnp.promote_types(wide, dtype)
    return wide


def spread(bias: Float[Array, " n"], like: Float[Array, "... n"]) -> Float[Array, "... n"]:
    """`bias` under every row: explicit, so that rank promotion may be forbidden."""
    return lax.broadcast_in_dim(bias, like.shape, (like.ndim - 1,))


def relu_forward(x: Float[Array, "... n"], bias: Float[Array, " n"]) -> Float[Array, "... n"]:
    """`relu(x + bias)` in x's dtype: summed wide, rounded once."""
    wide = wide_dtype(x.dtype, bias.dtype)
    return jax.nn.relu(x.astype(wide) + spread(bias, x).astype(wide)).astype(x.dtype)


def relu_tangent(
    y: Float[Array, "... n"], dx: Float[Array, "... n"], dbias: Float[Array, " n"]
) -> Float[Array, "... n"]:
    """The tangent of `y`, given those of x and bias. Zero where y is not above zero, as in
    `jax.nn.relu`.
    """
    wide = wide_dtype(dx.dtype, dbias.dtype)
    dz = (dx.astype(wide) + spread(dbias, dx).astype(wide)).astype(y.dtype)
    return jnp.where(y > 0, dz, jnp.zeros_like(dz))


def relu_backward(
    y: Float[Array, "... n"], dy: Float[Array, "... n"], bias_dtype
) -> tuple[Float[Array, "... n"], Float[Array, " n"]]:
    """The cotangents of x and bias. The sum over rows is taken wide and rounded once."""
    dx = jnp.where(y > 0, dy, jnp.zeros_like(dy))
    wide = wide_dtype(dy.dtype, bias_dtype)
    return dx, jnp.sum(dx.astype(wide), axis=tuple(range(dx.ndim - 1))).astype(bias_dtype)
