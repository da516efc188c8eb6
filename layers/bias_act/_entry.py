"""Bias + ReLU as a function, and the two kernels behind it."""

import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import eqxcute
from eqxcute import _fallback

from . import _config, _reference

FLOATS = ("bfloat16", "float16", "float32")
LARGEST = 2**31 - 1  # of a dim, as the kernels count


class BiasReLUKernel(eqxcute.Kernel):
    """`y = relu(x + bias)`, summed in float32 and rounded once.

    All sizes are run-time numbers: one compiled kernel a pair of dtypes serves every width and any
    rows. A width of any kind is read 16 bytes at a time (`eqxcute/inline/_kernels/lines.py` says how), so nothing
    is gained by compiling it in.

    The derivative keeps `y` and nothing else: the gradient passes where `y > 0`.
    """

    signature = "... n, n -> ... n"
    parallel = ("n",)  # a shard may hold some of the columns
    dtypes: ClassVar = {"x": FLOATS, "bias": FLOATS}
    config: _config.Config = eqxcute.static(_config.FORWARD)

    def reference(self, x, bias):
        return _reference.relu_forward(x, bias)

    def launch(self, stream, x, bias, out):
        from ._kernels.forward import Forward

        Forward(self.config)(stream, x, bias, out)

    def residuals(self, primals, outputs):
        return outputs, primals[1].dtype

    def jvp(self, residuals, tangents):
        return _reference.relu_tangent(residuals[0], *tangents)

    def vjp(self, residuals, cotangents):
        y, dtype = residuals
        return BiasReLUBackward(bias_dtype=np.dtype(dtype).name)(y, cotangents)

    def batch(self, axis_size, batched, *arguments):
        """Mapped biases run as plain JAX. A mapped x alone is one launch, by the signature."""
        if not batched[1]:
            return NotImplemented
        _fallback.choose(
            "BiasReLU", None, missing="`jax.vmap` maps its bias, and the kernel takes one bias"
        )
        in_axes = tuple(0 if flag else None for flag in batched)
        return jax.vmap(_reference.relu_forward, in_axes)(*arguments)


class BiasReLUBackward(eqxcute.Kernel):
    """`dx = dy` where `y > 0`, else 0, and `dbias`, the sum of `dx` over the rows, in float32,
    rounded once.

    The order of the sums depends on nothing but the shapes: equal inputs give equal bits.
    """

    signature = "... n, ... n -> ... n, n"
    parallel = ("n",)
    sums = ("dbias",)  # over the rows: those of several devices are added up
    dtypes: ClassVar = {"y": FLOATS, "dy": FLOATS}
    bias_dtype: str = eqxcute.static()
    config: _config.Config = eqxcute.static(_config.BACKWARD)

    def out_dtypes(self, y, dy):
        return dy.dtype, self.bias_dtype

    def workspace(self, y, dy):
        rows, width = math.prod(y.shape[:-1]), y.shape[-1]
        parts = _config.parts_shape(rows, width, y.dtype.itemsize, self.config)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, parts[1:]))

    def reference(self, y, dy):
        return _reference.relu_backward(y, dy, self.bias_dtype)

    def launch(self, stream, y, dy, dx, dbias, parts, sums):
        from ._kernels.backward import Backward

        Backward(self.config)(stream, y, dy, dx, dbias, parts, sums)

    def batch(self, axis_size, batched, *arguments):
        """A gradient of the bias for each example: plain JAX."""
        _fallback.choose(
            "BiasReLU",
            None,
            missing="`jax.vmap` of its gradient asks for a bias gradient an example",
        )
        in_axes = tuple(0 if flag else None for flag in batched)
        return jax.vmap(self.reference, in_axes)(*arguments)


def bias_relu(
    x: Float[Array, "*batch size"],
    bias: Float[Array, " size"],
    *,
    implementation: Literal["cute", "xla"] | None = None,
) -> Float[Array, "*batch size"]:
    r"""Adds a bias along the last axis, then applies ReLU, in one pass.

    $$y_{ij} = \max(x_{ij} + b_j,\ 0)$$

    **Arguments:**

    - `x`: Any leading dims, or none.
    - `bias`: One number a column. It may have another floating dtype than `x`.
    - `implementation`: `None` runs the kernel on an NVIDIA GPU and plain JAX elsewhere; `"cute"`
        insists on the kernel; `"xla"` is plain JAX. (Keyword only argument.)

    **Returns:**

    An array of the shape and dtype of `x`. The sum is taken in float32 (in float64 if an argument
    is) and rounded once. As in `jax.nn.relu`, NaN stays NaN.

    Only the result is kept for the gradient, which passes where it is above zero: not at 0, -0 or
    NaN. (In float16 a sum below 3e-8 rounds to 0, and then has no gradient.)

    **Raises:**

    `eqxcute.DtypeError`, a `TypeError`, for arguments that are not floating; `eqxcute.SpecError`, a
    `ValueError`, for shapes that do not fit; `NotImplementedError` for `"cute"` where the kernel
    cannot run.

    !!! info "Cost"

        Reads `x` once, writes the result once. Backward: reads the result and its cotangent once,
        writes that of `x` once. One kernel is compiled a pair of dtypes; sizes do not matter.
    """
    return apply("bias_relu", x, bias, implementation)


def apply(name: str, x: Array, bias: Array, implementation: str | None) -> Array:
    """`bias_relu`, with the name that messages call it."""
    x, bias = _floating(name, "x", x), _floating(name, "bias", bias)
    _check_shapes(name, x, bias)
    missing = _missing(x, bias)
    if implementation is None and missing is None:
        # Which platform this will be lowered for is not known yet: the kernel's lowering picks.
        return BiasReLUKernel()(x, bias)
    if _fallback.choose(name, implementation, missing=missing) == "xla":
        return _reference.relu_forward(x, bias)
    return BiasReLUKernel()(x, bias)


def _floating(name: str, argument: str, value) -> Array:
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise eqxcute.DtypeError(
            f"`{name}`: `{argument}` must be an array, got {type(value).__name__}."
        )
    if value.dtype == bool:
        raise eqxcute.DtypeError(
            f"`{name}`: `{argument}` must be a floating-point array, got bool. A mask is not "
            "added: multiply by it, or use `jnp.where`."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise eqxcute.DtypeError(
            f"`{name}`: `{argument}` must be a floating-point array, got {value.dtype}. Convert it "
            "with `.astype(jnp.float32)`."
        )
    return jnp.asarray(value)


def _check_shapes(name: str, x: Array, bias: Array) -> None:
    if x.ndim == 0:
        raise eqxcute.SpecError(
            f"`{name}`: `x` must have rank at least 1, (..., size); got a scalar."
        )
    if bias.ndim != 1:
        raise eqxcute.SpecError(
            f"`{name}`: `bias` must have rank 1, (size,); got shape {bias.shape}. Biases that "
            "differ along a leading axis are mapped with `jax.vmap`."
        )
    if x.shape[-1] != bias.shape[0]:
        raise eqxcute.SpecError(
            f"`{name}`: the last axis of `x` must be as long as `bias`, but `x` has shape "
            f"{x.shape} and `bias` has shape {bias.shape}: {x.shape[-1]} is not {bias.shape[0]}."
        )


def _missing(x: Array, bias: Array) -> str | None:
    """Why the kernel cannot take these arrays."""
    for argument, array in (("x", x), ("bias", bias)):
        if array.dtype.name not in FLOATS:
            return f"its {argument} is {array.dtype}, and the kernel takes {', '.join(FLOATS)}"
    rows = math.prod(x.shape[:-1])
    if isinstance(rows, int) and max(rows, bias.shape[0]) > LARGEST:
        return f"x is {rows} by {bias.shape[0]}, and the kernel counts to 2**31 - 1"
    return None
