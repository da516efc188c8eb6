"""A user's mask or score function as a program of `eqxcute.inline`, and that program over a tile."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eqxcute import InlineError
from eqxcute.inline import Argument, Program, describe, evaluate_prepared, trace

AXES: Final = "bngqk"  # of a tile: batch, kv head, query head within the kv head, query, key
INDICES: Final = ("b", "h", "q_idx", "kv_idx")
_AXES_OF: Final = {"score": AXES, "b": "b", "h": "ng", "q_idx": "q", "kv_idx": "k"}

_FLOATS: Final = 1 << 24  # up to which float32 has every integer


class Block(NamedTuple):
    """Indices of one tile: `b` is `(batch,)`, `h` is `(kv_heads, group)`, `q` and `k` 1-D."""

    b: jax.Array
    h: jax.Array
    q: jax.Array
    k: jax.Array


def trace_mask(fn: Callable, beside: Sequence[Any] = ()) -> tuple[Program, list[Any]]:
    """The program of `mask_fn(b, h, q_idx, kv_idx)`, and the arrays it captures. `beside`: as for `trace`."""

    def check(result: Any) -> Any:
        dtype = _scalar_dtype("mask_fn", fn, result, "one bool")
        if dtype != jnp.bool_:
            raise InlineError(
                f"mask_fn {describe(fn)} must return a bool (True: may attend), but returned {dtype.name}. "
                "Compare instead, e.g. `q_idx >= kv_idx` or `x != 0`. A function that changes "
                "scores is a score_fn."
            )
        return result

    return trace(fn, _index_arguments(), role="mask_fn", check=check, beside=beside)


def trace_score(
    fn: Callable, dtype: Any, beside: Sequence[Any] = (), longest: int | None = None
) -> tuple[Program, list[Any]]:
    """The program of `score_fn(score, b, h, q_idx, kv_idx)`, and the arrays it captures. `longest`: no position passes it.
    The program only knows whether that is so far that float32 has no such integers."""

    def check(result: Any) -> Any:
        kind = _scalar_dtype("score_fn", fn, result, "one score")
        if kind == jnp.bool_:
            raise InlineError(
                f"score_fn {describe(fn)} must return a score, but returned a bool. A function "
                "that says which positions may attend is a mask_fn."
            )
        if not jnp.issubdtype(kind, jnp.floating):
            raise InlineError(
                f"score_fn {describe(fn)} must return a floating-point score, not {kind.name}."
            )
        return jnp.asarray(result, dtype)

    high = _FLOATS if longest is not None and longest <= _FLOATS else None
    arguments = [Argument("score", jnp.dtype(dtype).name), *_index_arguments(high)]
    return trace(fn, arguments, role="score_fn", check=check, beside=beside)


def _index_arguments(high: int | None = None) -> list[Argument]:
    """`high`: of positions."""
    return [
        Argument(name, "int32", low=0, high=high if name in ("q_idx", "kv_idx") else None)
        for name in INDICES
    ]


def _scalar_dtype(role: str, fn: Callable, result: Any, expected: str) -> np.dtype:
    if not isinstance(result, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise InlineError(
            f"{role} {describe(fn)} must return {expected}, but returned {type(result).__name__}."
        )
    if jnp.shape(result) != ():
        raise InlineError(
            f"{role} {describe(fn)} must return {expected} of shape (), but returned shape "
            f"{jnp.shape(result)}. It is called for one query and one key: read captured arrays "
            "at its indices."
        )
    return jnp.result_type(result)


def varies(program: Program) -> str:
    """The tile axes that the result may vary along. It may name too many, never too few."""
    found = "".join(_AXES_OF[name] for name in program.code.depends)
    return "".join(a for a in AXES if a in found)


def mask_block(
    program: Program, outside: Sequence[Any], block: Block, by_row: Sequence[bool] = ()
) -> jax.Array:
    """The mask over a tile: five axes in the order of `AXES`, of size 1 where it does not vary.

    `outside` is what `program.environment` gave. `by_row` says of which arrays in it there is one
    for each batch entry, along their first axis.
    """
    shared, own = _by_row(outside, by_row)

    def one(scalars: Mapping[str, Any]) -> jax.Array:
        return evaluate_prepared(program, scalars, _whole(shared, scalars))

    axes = varies(program)
    if own and "b" not in axes:
        axes = "b" + axes
    return _over_tile(one, axes, {**_indices(block), **own})


def score_block(
    program: Program,
    outside: Sequence[Any],
    score: jax.Array,
    block: Block,
    by_row: Sequence[bool] = (),
) -> jax.Array:
    """The score function over a tile of scores, whose axes are `AXES`."""
    shared, own = _by_row(outside, by_row)

    def one(scalars: Mapping[str, Any]) -> jax.Array:
        return evaluate_prepared(program, scalars, _whole(shared, scalars))

    return _over_tile(one, AXES, {"score": (score, AXES), **_indices(block), **own})


def _by_row(
    outside: Sequence[Any], by_row: Sequence[bool]
) -> tuple[list[Any], dict[str, tuple[jax.Array, str]]]:
    """The arrays that all entries share, and the others by number, as arguments with their axis."""
    flags = [*by_row, *[False] * (len(outside) - len(by_row))]
    shared = [None if flag else x for x, flag in zip(outside, flags, strict=False)]
    own = {
        f"array {i}": (x, "b")
        for i, (x, flag) in enumerate(zip(outside, flags, strict=False))
        if flag and x is not None
    }
    return shared, own


def _whole(shared: Sequence[Any], scalars: Mapping[str, Any]) -> list[Any]:
    return [scalars.get(f"array {i}", x) for i, x in enumerate(shared)]


def score_block_guarded(
    program: Program,
    outside: Sequence[Any],
    score: jax.Array,
    block: Block,
    allowed: jax.Array | None,
    by_row: Sequence[bool] = (),
) -> jax.Array:
    """As `score_block`, for differentiation in the scores and in the captured arrays.

    Two things must hold that plain evaluation does not give. A captured value that only masked
    positions read (it may be NaN) must not reach a gradient: `0 * NaN` would. And what captures
    less than float32 must have its gradient summed in float32. So each value that is read passes
    `where(allowed, value, 0)` before it is narrowed: the gradient passes the same `where`, and
    every pair of positions has a contribution of its own until the wide array is reached that
    `program.environment(captured, wide=True)` holds.
    """
    shared, own = _by_row(outside, by_row)

    def one(scalars: Mapping[str, Any]) -> jax.Array:
        ok = scalars.get("allowed", True)
        # For narrow values every axis counts, whatever the mask varies along.
        everywhere = ok
        for name in INDICES:
            everywhere = everywhere & (scalars[name] >= 0)

        def settle(value: jax.Array, dtype: Any) -> jax.Array:
            narrows = value.dtype != dtype
            if (narrows or allowed is not None) and jnp.issubdtype(dtype, jnp.floating):
                value = jnp.where(everywhere if narrows else ok, value, jnp.zeros_like(value))
            return value.astype(dtype)

        s = scalars["score"]
        s = s if allowed is None else jnp.where(ok, s, jnp.zeros_like(s))
        given = {**scalars, "score": s}
        return evaluate_prepared(program, given, _whole(shared, scalars), settle=settle)

    arguments = {"score": (score, AXES), **_indices(block), **own}
    if allowed is not None:
        axes = "".join(a for a, n in zip(AXES, allowed.shape, strict=True) if n != 1)
        squeezed = allowed.reshape([n for n in allowed.shape if n != 1])
        arguments["allowed"] = (squeezed, axes)
    return _over_tile(one, AXES, arguments)


def _indices(block: Block) -> dict[str, tuple[jax.Array, str]]:
    return {name: (x, _AXES_OF[name]) for name, x in zip(INDICES, block, strict=True)}


def _over_tile(
    fn: Callable, mapped: str, arguments: Mapping[str, tuple[jax.Array, str]]
) -> jax.Array:
    """`fn`, of scalars by name (and of arrays), over the tile axes `mapped`. Each array comes with its axes."""
    axes = {name: has for name, (_, has) in arguments.items()}
    arrays = {
        name: x if set(has) <= set(mapped) else jnp.zeros((), x.dtype)
        for name, (x, has) in arguments.items()
    }
    for axis in reversed(mapped):
        fn = jax.vmap(
            fn, in_axes=({name: 0 if axis in has else None for name, has in axes.items()},)
        )
    return jnp.expand_dims(fn(arrays), [i for i, a in enumerate(AXES) if a not in mapped])
