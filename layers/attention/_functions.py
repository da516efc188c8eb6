"""A user's mask or score function as a program: traced once, its captured arrays lifted out.

Walking a jaxpr needs a few names that JAX does not promise to keep. They all stand in this file.
"""

import dataclasses
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep

INDEX: Final = jax.ShapeDtypeStruct((), jnp.int32)

# Primitives that only move entries of their first operand. A captured array keeps its wide
# copy through them, so that its gradient is scattered and summed in the wide dtype.
_MOVES: Final = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "gather",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)
_CALLS: Final = frozenset({"jit", "pjit", "closed_call"})


class Block(NamedTuple):
    """Indices of one tile: `b` is `(batch,)`, `h` is `(kv_heads, group)`, `q` and `k` 1-D."""

    b: jax.Array
    h: jax.Array
    q: jax.Array
    k: jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """A scalar function without its captured arrays.

    `depends` names the tile axes that the result may vary along: "b" batch, "n" kv head, "g"
    query head within the kv head, "q" query, "k" key. It may name too many, never too few.
    """

    jaxpr: Any  # jax.extend.core.Jaxpr; its constvars are the captured arrays
    depends: str


AXES: Final = "bngqk"
_INDEX_AXES: Final = ("b", "ng", "q", "k")


def describe(fn: Callable) -> str:
    """Name, file and line of a user's function, or of its class."""
    target = _definition(fn)
    name = getattr(target, "__qualname__", repr(fn))
    code = getattr(target, "__code__", None)
    if code is not None:
        return f'`{name}` (File "{code.co_filename}", line {code.co_firstlineno})'
    try:
        line = inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return f"`{name}`"
    return f'`{name}` (File "{_source_file(fn)}", line {line})'


def _definition(fn: Callable) -> Any:
    return inspect.unwrap(fn) if inspect.isroutine(fn) else type(fn)


def _source_file(fn: Callable) -> str | None:
    try:
        return inspect.getsourcefile(_definition(fn))
    except TypeError:
        return None


def trace_mask(fn: Callable) -> tuple[Program, list[Any]]:
    """The program of `mask_fn(b, h, q_idx, kv_idx)`, and the arrays it captures."""

    def call(b, h, q, k):
        result = fn(b, h, q, k)
        where = f"mask_fn {describe(fn)}"
        dtype = _scalar_dtype(where, result, "one bool")
        if dtype != jnp.bool_:
            raise TypeError(
                f"{where} must return a bool (True: may attend), but returned {dtype.name}. "
                "Compare instead, e.g. `q_idx >= kv_idx` or `x != 0`. A function that changes "
                "scores is a score_fn."
            )
        return result

    return _trace("mask_fn", fn, call, (INDEX,) * 4, _INDEX_AXES)


def trace_score(fn: Callable, dtype: Any) -> tuple[Program, list[Any]]:
    """The program of `score_fn(score, b, h, q_idx, kv_idx)`, and the arrays it captures."""

    def call(s, b, h, q, k):
        result = fn(s, b, h, q, k)
        where = f"score_fn {describe(fn)}"
        kind = _scalar_dtype(where, result, "one score")
        if kind == jnp.bool_:
            raise TypeError(
                f"{where} must return a score, but returned a bool. A function that says which "
                "positions may attend is a mask_fn."
            )
        if not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(f"{where} must return a floating-point score, not {kind.name}.")
        return jnp.asarray(result, dtype)

    score = jax.ShapeDtypeStruct((), dtype)
    return _trace("score_fn", fn, call, (score,) + (INDEX,) * 4, (AXES, *_INDEX_AXES))


def _scalar_dtype(where: str, result: Any, expected: str) -> np.dtype:
    if not isinstance(result, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise TypeError(f"{where} must return {expected}, but returned {type(result).__name__}.")
    if jnp.shape(result) != ():
        raise TypeError(
            f"{where} must return {expected} of shape (), but returned shape "
            f"{jnp.shape(result)}. It is called for one query and one key: read captured arrays "
            "at its indices."
        )
    return jnp.result_type(result)


def _trace(role, fn, call, specs, axes) -> tuple[Program, list[Any]]:
    try:
        closed = jax.make_jaxpr(call)(*specs)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as e:
        raise TypeError(_needs_concrete(role, fn, e)) from e
    depends = _dependences(closed.jaxpr, axes)
    return Program(closed.jaxpr, depends), list(closed.consts)


def _needs_concrete(role: str, fn: Callable, error: Exception) -> str:
    """What to write instead of `if q_idx > 3` and of `int(lengths[b])`."""
    return (
        f"{role} {_culprit(fn, error)} asks for the value of an index at trace time. Its arguments "
        "are traced int32 scalars: one call stands for all positions. Instead of `if`, `and`, "
        "`or` and `not` write jnp.where, `&`, `|` and `~`; instead of int(x) or bool(x) use x "
        "itself; instead of a list or a numpy array read at an index, capture jnp.asarray(...)."
    )


def _culprit(fn: Callable, error: Exception) -> str:
    """The user's function and line. In a combination of masks it is not `fn` that is at fault
    but one of its parts, which the traceback knows."""
    libraries = [os.path.dirname(m.__file__) + os.sep for m in (jax, eqx, np) if m.__file__]
    libraries.append(_HERE)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not any(f.filename.startswith(path) for path in libraries)
    ]
    if not frames:
        return describe(fn)
    last = frames[-1]
    line = f"line {last.lineno}" + (f", `{last.line}`" if last.line else "")
    if last.filename == _source_file(fn):
        return f"{describe(fn)}, {line},"
    return f'`{last.name}` (File "{last.filename}", {line})'


def _dependences(jaxpr, axes: Sequence[str]) -> str:
    """Which tile axes the result varies along: the union over every equation it goes through."""
    env = {v: set(a) for v, a in zip(jaxpr.invars, axes, strict=True)}
    for eqn in jaxpr.eqns:
        seen = set().union(*(env.get(v, ()) for v in eqn.invars if not isinstance(v, Literal)))
        env.update((v, seen) for v in eqn.outvars)
    (out,) = jaxpr.outvars
    found = set() if isinstance(out, Literal) else env.get(out, set())
    return "".join(a for a in AXES if a in found)


def mask_block(program: Program, consts: Sequence[Any], block: Block) -> jax.Array:
    """The mask over a tile: five axes in the order of `AXES`, of size 1 where it does not vary."""

    def one(b, h, q, k):
        (result,) = _plain(program.jaxpr, consts, (b, h, q, k))
        return result

    return _over_tile(one, program.depends, list(block), list(_INDEX_AXES))


def score_block(
    program: Program,
    consts: Sequence[Any],
    score: jax.Array,
    block: Block,
) -> jax.Array:
    """The score function over a tile of scores, whose axes are `AXES`."""

    def one(s, b, h, q, k):
        (result,) = _plain(program.jaxpr, consts, (s, b, h, q, k))
        return result

    return _over_tile(one, AXES, [score, *block], [AXES, *_INDEX_AXES])


def score_block_guarded(
    program: Program,
    consts: Sequence[Any],
    score: jax.Array,
    block: Block,
    allowed: jax.Array | None,
) -> jax.Array:
    """As `score_block`, for differentiation in the scores and in the captured arrays.

    Two things must hold that plain evaluation does not give. A captured value that only masked
    positions read (it may be NaN) must not reach a gradient: `0 * NaN` would. And a captured
    array below float32 must have its gradient summed in float32. So each captured value is
    taken, where it has become a scalar, through `where(allowed, value, 0)`: the gradient passes
    the same `where`, and every pair of positions has a contribution of its own until the wide
    array that `consts` holds is reached.
    """

    def one(s, ok, b, h, q, k):
        # Without a mask there is nothing to guard, but narrow values still need the broadcast.
        ok = (k >= 0) if ok is None else ok

        def settle(x: Any) -> Any:
            if not isinstance(x, _Captured):
                return x
            value = x.value
            if value.size == 1 and (allowed is not None or x.dtype != value.dtype):
                value = jnp.where(ok, value, jnp.zeros_like(value))
            return value.astype(x.dtype)

        s = jnp.where(ok, s, jnp.zeros_like(s))
        captured = [
            _Captured(c, v.aval.dtype) if _is_float(v.aval) else c
            for c, v in zip(consts, program.jaxpr.constvars, strict=True)
        ]
        (result,) = _guarded(program.jaxpr, captured, (s, b, h, q, k), settle)
        return settle(result)

    if allowed is None:
        args: list[Any] = [score, None, *block]
        axes = [AXES, "", *_INDEX_AXES]
    else:
        varies = "".join(a for a, n in zip(AXES, allowed.shape, strict=True) if n != 1)
        squeezed = allowed.reshape([n for n in allowed.shape if n != 1])
        args, axes = [score, squeezed, *block], [AXES, varies, *_INDEX_AXES]
    return _over_tile(one, AXES, args, axes)


class _Captured(NamedTuple):
    """A captured float value not yet read by arithmetic. `dtype` is what the program expects,
    `value` may be wider."""

    value: Any
    dtype: Any


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _plain(jaxpr, consts, args) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr, consts, *args)


def _guarded(jaxpr, consts, args, settle: Callable[[Any], Any]) -> list[Any]:
    env: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    )

    def read(v):
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        first = values[0] if values else None
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            results = _guarded(inner.jaxpr, inner.consts, values, settle)
        elif isinstance(first, _Captured) and _is_array(first) and eqn.primitive.name in _MOVES:
            moved = _bind(eqn, [first.value, *map(settle, values[1:])])
            results = [_Captured(r, first.dtype) for r in moved]
        else:
            loose = any(isinstance(x, _Captured) and _is_array(x) for x in values)
            results = _bind(eqn, [settle(x) for x in values])
            if loose:
                results = [
                    _Captured(r, r.dtype) if _is_float(v.aval) else r
                    for r, v in zip(results, eqn.outvars, strict=True)
                ]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_array(x: _Captured) -> bool:
    return x.value.size != 1


def _bind(eqn, values) -> list[Any]:
    # JAX 0.8 gives (functions, parameters) here, later versions the parameters alone.
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    result = eqn.primitive.bind(*functions, *values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _over_tile(fn: Callable, mapped: str, args: list[Any], axes: list[str]) -> jax.Array:
    """`fn`, for scalars, over the tile axes `mapped`. `axes` says which axes an argument has."""
    args = [
        a if set(has) <= set(mapped) else jnp.zeros((), a.dtype)
        for a, has in zip(args, axes, strict=True)
    ]
    for axis in reversed(mapped):
        fn = jax.vmap(fn, in_axes=[0 if axis in has else None for has in axes])
    result = fn(*args)
    return jnp.expand_dims(result, [i for i, a in enumerate(AXES) if a not in mapped])
