"""Small arrays of scalars: moving, reducing, multiplying and writing into them, element by element.

Each function takes the `Scalariser`, the jaxpr's equation and the values of its inputs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._values import ELEMENTS, Scalars, Unsupported, Value, numbered

# Moves: which element of the inputs each element of the result is


def _slice(params, x):
    strides = params["strides"] or [1] * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*b) for b in bounds)]


def _broadcast_in_dim(params, x, *_):
    shape = [1] * len(params["shape"])
    for d, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _reshape(params, x):
    order = params.get("dimensions")
    return (x if order is None else np.transpose(x, order)).reshape(params["new_sizes"])


MOVES: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "expand_dims": lambda p, x: np.expand_dims(x, p["dimensions"]),
    "reshape": _reshape,
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": _slice,
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "tile": lambda p, x: np.tile(x, p["reps"]),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
}


def moved(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    parts, aval = [walk.scalars(v).numbers for v in values], eqn.outvars[0].aval
    move = functools.partial(MOVES[eqn.primitive.name], eqn.params)
    if not _jaxpr.is_key(aval):
        return [Scalars(move(*parts), aval)]
    words = range(parts[0].shape[-1])
    return [Scalars(np.stack([move(*(p[..., w] for p in parts)) for w in words], -1), aval)]


def split(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, axis = walk.scalars(values[0]).numbers, eqn.params["axis"]
    ends = np.cumsum([int(n) for n in eqn.params["sizes"]])[:-1]
    parts = np.split(numbers, ends, axis)
    return [Scalars(p, v.aval) for p, v in zip(parts, eqn.outvars, strict=True)]


def unstack(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers = np.moveaxis(walk.scalars(values[0]).numbers, eqn.params["axis"], 0)
    return [Scalars(p, v.aval) for p, v in zip(numbers, eqn.outvars, strict=True)]


def pad(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, fill = (walk.scalars(v).numbers for v in values)
    aval = eqn.outvars[0].aval
    result = np.full(aval.shape, int(fill), np.int64)
    for index in np.ndindex(numbers.shape):
        at = tuple(
            low + i * (inner + 1)
            for i, (low, _, inner) in zip(index, eqn.params["padding_config"], strict=True)
        )
        if all(0 <= i < n for i, n in zip(at, aval.shape, strict=True)):
            result[at] = numbers[index]
    return [Scalars(result, aval)]


# Reductions


def _lowest(dtype):
    if dtype == np.bool_:
        return False
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    if dtype == np.bool_:
        return True
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _all_bits(dtype):
    return np.invert(np.zeros((), dtype))


# The row that combines two elements, and the result of none.
REDUCTIONS: dict[str, tuple[str, Callable]] = {
    "reduce_sum": ("add", lambda _: 0),
    "reduce_prod": ("mul", lambda _: 1),
    "reduce_max": ("max", _lowest),
    "reduce_min": ("min", _highest),
    "reduce_and": ("and", _all_bits),
    "reduce_or": ("or", lambda _: 0),
    "reduce_xor": ("xor", lambda _: 0),
}


def reduced(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, aval = walk.scalars(values[0]).numbers, eqn.outvars[0].aval
    axes = tuple(int(a) for a in eqn.params["axes"])
    name, start = REDUCTIONS[eqn.primitive.name]
    kept = [d for d in range(numbers.ndim) if d not in axes]
    size = math.prod(numbers.shape[d] for d in axes)
    rows = np.transpose(numbers, [*kept, *axes]).reshape(math.prod(aval.shape), size)
    if not size:
        empty = walk.build.const(start(aval.dtype), aval.dtype)
        return [Scalars(np.full(aval.shape, empty, np.int64), aval)]
    combine = functools.partial(walk.build.op, name)
    return [
        Scalars(numbered([functools.reduce(combine, map(int, r)) for r in rows], aval.shape), aval)
    ]


def arg_extreme(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    """The first of the largest, or smallest; NaN counts as both, as in JAX."""
    numbers, (axis,) = walk.scalars(values[0]).numbers, eqn.params["axes"]
    aval, build = eqn.outvars[0].aval, walk.build
    better = "gt" if eqn.primitive.name == "argmax" else "lt"

    def first(row):
        best, at = int(row[0]), build.const(0, aval.dtype)
        for i, n in enumerate(map(int, row[1:]), 1):
            wins = build.op(better, n, best)
            if jnp.issubdtype(jnp.dtype(build.equations[n].dtype), jnp.floating):
                is_nan, was_nan = build.op("ne", n, n), build.op("ne", best, best)
                wins = build.op("or", wins, build.op("and", is_nan, build.op("not", was_nan)))
            at = build.op("select_n", wins, at, build.const(i, aval.dtype))
            best = build.op("select_n", wins, best, n)
        return at

    rows = np.moveaxis(numbers, axis, -1).reshape(-1, numbers.shape[axis])
    return [Scalars(numbered([first(row) for row in rows], aval.shape), aval)]


def cumulative(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, axis = walk.scalars(values[0]).numbers, eqn.params["axis"]
    name = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}[eqn.primitive.name]
    rows = np.moveaxis(numbers, axis, 0).copy()
    order = range(len(rows))
    order = list(reversed(order) if eqn.params["reverse"] else order)
    for before, i in itertools.pairwise(order):
        pairs = zip(rows[before].reshape(-1), rows[i].reshape(-1), strict=True)
        rows[i] = numbered([walk.build.op(name, int(a), int(b)) for a, b in pairs], rows[i].shape)
    return [Scalars(np.moveaxis(rows, 0, axis), eqn.outvars[0].aval)]


def dot_general(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    aval, build = eqn.outvars[0].aval, walk.build
    total = math.prod(aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in lc)
    if total > ELEMENTS:
        raise Unsupported(
            f"multiplies matrices with {total} products for each pair of indices. To pick a row of a table, "
            "index it, `table[h, i]`"
        )
    left, right = (walk.scalars(v).numbers for v in values)
    wide, zero = jnp.dtype(aval.dtype).name, build.const(0, aval.dtype)
    times, plus = ("and", "or") if wide == "bool" else ("mul", "add")

    def arranged(x, batch, contracted):
        free = [d for d in range(x.ndim) if d not in batch and d not in contracted]
        sizes = [math.prod(x.shape[d] for d in dims) for dims in (batch, free, contracted)]
        return np.transpose(x, [*batch, *free, *contracted]).reshape(sizes)

    def product(x, y):
        x, y = (build.op("convert_element_type", int(n), new_dtype=wide) for n in (x, y))
        return build.op(times, x, y)

    def dot(x, y):
        parts = [product(m, n) for m, n in zip(x, y, strict=True)]
        return functools.reduce(functools.partial(build.op, plus), parts) if parts else zero

    pairs = zip(arranged(left, lb, lc), arranged(right, rb, rc), strict=True)
    results = [dot(x, y) for one, other in pairs for x in one for y in other]
    return [Scalars(numbered(results, aval.shape), aval)]


# Writing

_WRITES = {
    "scatter": None,
    "scatter-add": "add",
    "scatter-sub": "sub",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}


def _written(walk: Any, numbers: np.ndarray, writes: Sequence, name: str | None) -> np.ndarray:
    """Where writes go is not known: each element takes what is written to it.

    `writes` has, for each number, itself, and for each dim a start, an offset from it, and the window's size. A start
    outside of where the window fits matches no element.
    """
    build, result = walk.build, numbers.copy()
    if len(writes) * numbers.size > ELEMENTS:
        raise Unsupported(
            f"writes {len(writes)} numbers into an array of {numbers.size} at an index that is not known when it is "
            "traced. Make the array with `jnp.where`"
        )
    for n, places in writes:
        for at in np.ndindex(numbers.shape):
            starts = [i - offset for i, (_, offset, _) in zip(at, places, strict=True)]
            sizes = zip(starts, numbers.shape, places, strict=True)
            if any(not 0 <= s <= size - window for s, size, (_, _, window) in sizes):
                continue
            here = build.const(True, np.bool_)
            for s, (start, _, _) in zip(starts, places, strict=True):
                kind = build.equations[start].dtype
                same = (
                    build.op("eq", start, build.const(s, kind))
                    if _holds(kind, s)
                    else build.const(False, np.bool_)
                )
                here = build.op("and", here, same)
            old = int(result[at])
            new = n if name is None else build.op(name, old, n)
            result[at] = build.op("select_n", here, old, new)
    return result


def _holds(dtype: Any, value: int) -> bool:
    return value <= jnp.iinfo(dtype).max


def _clamped(build: Any, start: int, last: int) -> int:
    kind = build.equations[start].dtype
    start = build.op("max", start, build.const(0, kind))
    return build.op("min", start, build.const(last, kind)) if _holds(kind, last) else start


def dynamic_update_slice(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, update = (walk.scalars(v).numbers for v in values[:2])
    starts = [int(walk.scalars(v).numbers) for v in values[2:]]
    pairs = zip(starts, numbers.shape, update.shape, strict=True)
    starts = [_clamped(walk.build, s, n - m) for s, n, m in pairs]
    writes = [
        (int(update[at]), list(zip(starts, at, update.shape, strict=True)))
        for at in np.ndindex(update.shape)
    ]
    return [Scalars(_written(walk, numbers, writes, None), eqn.outvars[0].aval)]


def scatter(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    numbers, indices, updates = (walk.scalars(v).numbers for v in values)
    dims, build = eqn.params["dimension_numbers"], walk.build
    batch_axes = [d for d in range(updates.ndim) if d not in dims.update_window_dims]
    outside = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    windowed = [d for d in range(numbers.ndim) if d not in outside]
    along = dict(zip(windowed, dims.update_window_dims, strict=True))
    clips = "CLIP" in str(eqn.params["mode"])

    def places(at):
        batch = tuple(at[d] for d in batch_axes)
        starts = [build.const(0, np.int32)] * numbers.ndim
        for d, s in zip(
            dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True
        ):
            starts[d] = build.const(batch[s], np.int32)
        for j, d in enumerate(dims.scatter_dims_to_operand_dims):
            starts[d] = int(indices[(*batch, j)])
        for d, start in enumerate(starts):
            window = updates.shape[along[d]] if d in along else 1
            start = _clamped(build, start, numbers.shape[d] - window) if clips else start
            yield start, at[along[d]] if d in along else 0, window

    writes = [(int(updates[at]), list(places(at))) for at in np.ndindex(updates.shape)]
    name = _WRITES[eqn.primitive.name]
    return [Scalars(_written(walk, numbers, writes, name), eqn.outvars[0].aval)]


SPECIAL: dict[str, Callable[..., list[Value]]] = {
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys(REDUCTIONS, reduced),
    **dict.fromkeys(_WRITES, scatter),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), cumulative),
    **dict.fromkeys(("argmax", "argmin"), arg_extreme),
    "split": split,
    "unstack": unstack,
    "pad": pad,
    "dot_general": dot_general,
    "dynamic_update_slice": dynamic_update_slice,
}
