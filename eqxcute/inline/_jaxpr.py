"""What of JAX's own this package leans on beyond its public names, and why, all in one file.

Equations of jaxprs have parameters that JAX does not promise to keep: the inner jaxprs of calls, how many constants a
scan has, how a typed PRNG key computes. Versions differ; the differences end here.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .. import _sharding

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"})
# Functions with derivative rules of their own; the last, from JAX 0.12 on, are JAX's own ones (searchsorted, ldexp).
RULED = frozenset(
    {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "call_hi_primitive"}
)


def is_literal(v: Any) -> bool:
    return isinstance(v, Literal)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The equation's primitive on other values. Rules of derivatives go with it."""
    values = _varying_alike(eqn, values)
    if eqn.primitive.name == "pvary":  # done where it matters
        return values
    # JAX 0.8 gives (functions, parameters) here, later versions the parameters alone.
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    result = eqn.primitive.bind(*functions, *values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _varying_alike(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Inside `shard_map`, inputs of a primitive vary over the same axes of the mesh, and numbers that were computed while
    tracing, or arguments that were traced as scalars, need not. As traced, if any varied there."""
    if not any(map(_sharding.varying, values)):
        return list(values)
    traced = [_sharding.varying_of(v.aval) for v in eqn.invars]
    if not any(traced):
        return _sharding.alike(values)
    return [_sharding.over(x, axes) for x, axes in zip(values, traced, strict=True)]


@functools.cache
def host() -> Any:
    """Where known numbers are computed: the same bits on every machine, and no launches."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


class _Closed:
    """A jaxpr that has no constants, as if closed."""

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.consts = jaxpr, ()


def called(eqn: Any) -> Any:
    """The closed jaxpr of a call."""
    if "_prim" in eqn.params:
        return _expanded(eqn.params["_prim"])
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            inner = eqn.params[name]
            return inner if hasattr(inner, "consts") else _Closed(inner)
    raise KeyError(eqn.primitive.name)


def is_of_jax(eqn: Any, closed: Any) -> bool:
    """Whether JAX wrote the function that is called. JAX keeps such jaxprs: their lines are those of the first caller."""
    debug = getattr(closed.jaxpr, "debug_info", None)
    file = getattr(debug, "func_filename", None) or ""
    return "_prim" in eqn.params or file.startswith(os.path.dirname(str(jax.__file__)) + os.sep)


def _expanded(primitive: Any) -> Any:
    """What one of JAX's composed primitives does. `expand` takes and returns trees."""

    def run(*values):
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, values)))

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in primitive.in_avals_flat]
    return jax.make_jaxpr(run)(*specs)


def scan_parts(eqn: Any, values: Sequence[Any]) -> tuple[list, list, list]:
    """Constants, carry and what is scanned over."""
    params = eqn.params
    if "num_consts" in params:
        n, m = params["num_consts"], params["num_carry"]
    else:  # from JAX 0.12 on: three trees
        n, m, _ = (len(part) for part in params["ft_in"].unpack())
    return list(values[:n]), list(values[n : n + m]), list(values[n + m :])


@functools.lru_cache(maxsize=64)
def _text_of(name: str, dtypes: tuple[tuple[str, bool], ...]) -> str:
    function = {"floor_divide": jnp.floor_divide, "remainder": jnp.remainder}[name]
    specs = [jax.ShapeDtypeStruct((), dtype, weak_type=weak) for dtype, weak in dtypes]
    (eqn,) = jax.make_jaxpr(lambda a, b: function(a, b))(*specs).jaxpr.eqns
    return str(called(eqn).jaxpr) if eqn.primitive.name in CALLS else ""


def integer_division(eqn: Any) -> str | None:
    """The row `floor_divide` or `remainder`, if this call is jnp's function of that name on integers.

    jnp takes a dozen primitives for each, after which an interval would know next to nothing. The name is not trusted:
    the call must be the one that jnp makes.
    """
    name = eqn.params.get("name")
    if name not in ("floor_divide", "remainder"):
        return None
    dtypes = tuple((jnp.dtype(v.aval.dtype).name, v.aval.weak_type) for v in eqn.invars)
    scalars = all(v.aval.shape == () for v in eqn.invars)
    one = {dtype for dtype, _ in dtypes}
    if len(one) != 1 or not scalars or not jnp.issubdtype(dtypes[0][0], jnp.integer):
        return None
    return name if str(called(eqn).jaxpr) == _text_of(name, dtypes) else None


def plain(value: Any) -> Any:
    """A parameter as plain data."""
    if isinstance(value, (bool, int, str)):
        return int(value) if not isinstance(value, (bool, str)) else value
    if hasattr(value, "value"):  # an enumeration
        return int(value.value)
    return jnp.dtype(value).name


def key_implementation(dtype: Any) -> Any:
    """How a typed PRNG key computes: functions of its words. JAX has no public name for them."""
    return dtype._impl


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def word_shape(aval: Any) -> tuple[int, ...]:
    """The shape of a value's numbers: a key's words are further axes."""
    return (*aval.shape, *key_implementation(aval.dtype).key_shape) if is_key(aval) else aval.shape


def words(value: Any) -> np.ndarray:
    """A concrete value's numbers."""
    if is_key(value):
        with jax.core.eval_context():
            value = jax.random.key_data(value)
    return np.asarray(value)


def word_dtype(aval: Any) -> Any:
    return np.dtype(np.uint32) if is_key(aval) else aval.dtype


def has_ended(value: Any) -> bool:
    """Whether this is a tracer of a transformation that is over.

    JAX marks most traces when they end; of a `jit` it only empties the frame. Where that is not so any more, JAX's own
    error comes, later.
    """
    return isinstance(value, jax.core.Tracer) and _trace_has_ended(value._trace)


def _trace_has_ended(trace: Any) -> bool:
    if trace is None:
        return False
    constants = getattr(getattr(trace, "frame", None), "constid_to_tracer", None)
    if not getattr(trace, "is_valid", lambda: True)() or type(constants) is dict:
        return True
    return any(
        _trace_has_ended(getattr(trace, name, None)) for name in ("parent_trace", "tangent_trace")
    )
