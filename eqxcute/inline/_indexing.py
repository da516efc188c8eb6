"""Reading by index: JAX's rules, which clamp, on captured arrays and on small arrays of scalars.

Each function takes the `Scalariser`. No size of a captured array gets into the code where JAX's rules put one: it says
`size`, so that another length is no other code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._values import ELEMENTS, Known, Outer, Scalars, Unsupported, Value, View, abstract, numbered

# Indices


def int32(build: Any, i: int) -> int:
    """An index in int32; a wider one is clamped on the way."""
    dtype = jnp.dtype(build.equations[i].dtype)
    if dtype == np.int32:
        return i
    if dtype.itemsize >= 4:
        i = build.op("min", i, build.const(2**31 - 1, dtype))
        if jnp.issubdtype(dtype, jnp.signedinteger):
            i = build.op("max", i, build.const(-(2**31), dtype))
    return build.op("convert_element_type", i, new_dtype="int32")


def _index(build: Any, operand: int, dim: int, size: int, i: int) -> int:
    """As int32, with the array's `size` where JAX has the number itself."""
    from_end = _from_end(build, i, size)
    if from_end is not None:
        return build.op("wrap", int32(build, from_end), build.size(operand, dim))
    e = build.equations[i]
    modulo = e.op == "remainder" and e.dtype == "int32" and build.is_const(e.inputs[1])
    if modulo and build.value(e.inputs[1]) == size:  # jnp.take(mode="wrap")
        return build.op("remainder", e.inputs[0], build.size(operand, dim))
    return int32(build, i)


def _from_end(build: Any, i: int, size: int) -> int | None:
    """The index that counts from the end where it is negative, if `i` is what JAX makes of one.

    That is `select_n(lt(i, 0), i, add(i, size))`; and if `i` is negative for sure, the builder left `add(i, size)`.
    """
    e = build.equations[i]
    if (
        e.op == "add"
        and _is_number(build, e.inputs[1], size)
        and build.intervals[e.inputs[0]].hi < 0
    ):
        return e.inputs[0]
    if e.op != "select_n" or len(e.inputs) != 3:
        return None
    inner, test, moved = e.inputs[1], build.equations[e.inputs[0]], build.equations[e.inputs[2]]
    below = test.op == "lt" and test.inputs[0] == inner and _is_number(build, test.inputs[1], 0)
    source = build.equations[inner]  # the normal form of `a - b < 0` is `a < b`
    below = below or (test.op == "lt" and source.op == "sub" and test.inputs == source.inputs)
    added = (
        moved.op == "add" and moved.inputs[0] == inner and _is_number(build, moved.inputs[1], size)
    )
    return inner if below and added else None


def _is_number(build: Any, n: int, value: int) -> bool:
    return build.is_const(n) and build.value(n) == value


def _constant(build: Any, operand: int, dim: int, size: int, i: int) -> int:
    """An index that is known. The last one is the last of any other length too."""
    if i == size - 1 and size > 1:
        return build.op("sub", build.size(operand, dim), build.const(1, np.int32))
    return build.const(i, np.int32)


# Captured arrays


def _seen(array: Outer) -> View:
    """Where the elements of a captured array, or of one made from it, are read."""
    if array.view is not None:
        return array.view
    dims = range(len(array.aval.shape))
    return View(array.number, array.aval, (None,) * len(dims), tuple(dims))


def read(walk: Any, array: Outer, indices: Sequence[int]) -> int:
    """One element; each index is clamped."""
    build, view = walk.build, _seen(array)
    k = walk.operand(view.number, view.aval)
    places = []
    for d, size in enumerate(view.aval.shape):
        own = view.dims[d]
        if own is not None:
            places.append(_index(build, k, d, size, indices[own]))
        else:
            places.append(_constant(build, k, d, size, view.fixed[d] or 0))
    return build.read(k, places)


def _size(walk: Any, value: Value, dim: int, size: int) -> tuple[int, Callable[[int], int]]:
    """The size of a dim as an equation, and what makes an index of that dim int32."""
    build = walk.build
    if isinstance(value, Outer):
        view = _seen(value)
        if dim in view.dims:
            k, d = walk.operand(view.number, view.aval), view.dims.index(dim)
            return build.size(k, d), lambda i: _index(build, k, d, size, i)
    return build.const(size, np.int32), lambda i: int32(build, i)


def view(eqn: Any, values: Sequence[Any]) -> View | None:
    """Of what an equation makes from a captured array, if each element is one of it: then nothing has to be copied."""
    array, name, params = values[0], eqn.primitive.name, eqn.params
    if not isinstance(array, Outer) or _jaxpr.is_key(array.aval):
        return None
    old, new = array.aval.shape, eqn.outvars[0].aval.shape
    seen = _seen(array)
    if name in ("copy", "copy_p"):
        return seen
    if name == "transpose":
        return _redirected(seen, {o: n for n, o in enumerate(params["permutation"])})
    if name == "broadcast_in_dim":
        moves = enumerate(params["broadcast_dimensions"])
        return _redirected(seen, {o: n for o, n in moves if old[o] == new[n]})
    if name in ("reshape", "squeeze", "expand_dims"):
        kept = [[d for d, size in enumerate(shape) if size != 1] for shape in (old, new)]
        if [old[d] for d in kept[0]] != [new[d] for d in kept[1]] or (
            params.get("dimensions") and name == "reshape"
        ):
            return None
        return _redirected(seen, dict(zip(*kept, strict=True)))
    if name == "slice" and not any(s != 1 for s in params["strides"] or ()):
        return _windowed(seen, old, new, params["start_indices"])
    if name == "dynamic_slice" and all(isinstance(v, Known) for v in values[1:]):
        starts = [
            min(max(int(v.value), 0), n - m) for v, n, m in zip(values[1:], old, new, strict=True)
        ]
        return _windowed(seen, old, new, starts)
    return None


def _redirected(seen: View, moves: dict[int, int]) -> View:
    """With own dims under other numbers. One that is gone has size 1."""
    dims = tuple(None if d is None else moves.get(d) for d in seen.dims)
    fixed = tuple(
        0 if old is not None and new is None else at
        for at, old, new in zip(seen.fixed, seen.dims, dims, strict=True)
    )
    return seen._replace(fixed=fixed, dims=dims)


def _windowed(
    seen: View, old: Sequence[int], new: Sequence[int], starts: Sequence[int]
) -> View | None:
    """Each dim as it was, or one element of it: indices are clamped to the whole array, not to a part of it."""
    fixed, dims = list(seen.fixed), list(seen.dims)
    for own, (n, m, start) in enumerate(zip(old, new, starts, strict=True)):
        if n == m or own not in dims:
            continue
        if m != 1:
            return None
        d = dims.index(own)
        fixed[d], dims[d] = int(start), None
    return seen._replace(fixed=tuple(fixed), dims=tuple(dims))


def row(array: Outer, i: int) -> View | None:
    """Of `array[i]`."""
    if _jaxpr.is_key(array.aval):
        return None
    shape = array.aval.shape
    window = _windowed(_seen(array), shape, (1, *shape[1:]), (i, *[0] * len(shape[1:])))
    return None if window is None else _redirected(window, {d: d - 1 for d in range(1, len(shape))})


# Reading


def at(walk: Any, value: Value, indices: Sequence[int]) -> int:
    """One element, at indices that are in range or clamped here."""
    build = walk.build
    if isinstance(value, Known) and not all(map(build.is_const, indices)):
        value = walk.captured(value.value)
    if isinstance(value, Outer):
        return read(walk, value, indices)
    numbers = walk.scalars(value).numbers
    for i in indices:  # one axis after the other, the outermost first
        if build.is_const(i):
            numbers = numbers[min(max(int(build.value(i)), 0), len(numbers) - 1)]
        else:
            numbers = _chosen(build, numbers, int32(build, i))
    return int(numbers)


def _chosen(build: Any, numbers: np.ndarray, i: int) -> np.ndarray:
    rows = numbers.reshape(len(numbers), -1)
    chosen = rows[0]
    for j, other in enumerate(rows[1:], 1):
        here = build.op("ge", i, build.const(j, np.int32))
        pairs = zip(chosen, other, strict=True)
        chosen = np.array([build.op("select_n", here, int(a), int(b)) for a, b in pairs], np.int64)
    return chosen.reshape(numbers.shape[1:])


def _start(walk: Any, value: Value, dim: int, size: int, start: int, window: int) -> int:
    """Where a window of a slice begins: clamped, so that the window ends in the array."""
    build = walk.build
    if window == 1:
        return start  # the read itself clamps, and knows JAX's rule for negative indices
    if size == window:
        return build.const(0, np.int32)
    whole, as_index = _size(walk, value, dim, size)
    last = build.op("sub", whole, build.const(window, np.int32))
    return build.op("max", build.op("min", as_index(start), last), build.const(0, np.int32))


def _window(walk: Any, value: Value, aval: Any, places: Callable) -> np.ndarray:
    """`places(index)` of the result gives, for each dim of `value`, a start and an offset from it."""
    build, numbers = walk.build, []
    for index in np.ndindex(aval.shape):
        indices = [
            s if not i else build.op("add", int32(build, s), build.const(i, np.int32))
            for s, i in places(index)
        ]
        numbers.append(at(walk, value, indices))
    return numbered(numbers, aval.shape)


def _words(walk: Any, eqn: Any, value: Value) -> tuple[Value, tuple[int, ...]]:
    """What is read, and the shape of a key's words, which are further dims of it."""
    aval = eqn.invars[0].aval
    if not _jaxpr.is_key(aval):
        return value, ()
    shape = _jaxpr.word_shape(aval)
    if isinstance(value, Outer):
        data = abstract(shape, np.uint32)
        return walk.prepare(lambda k: [jax.random.key_data(k)], [value], [data])[0], shape[
            len(aval.shape) :
        ]
    words = walk.scalars(value).numbers
    return Scalars(words, abstract(shape, np.uint32)), shape[len(aval.shape) :]


def _check_small(shape: Sequence[int]) -> None:
    if math.prod(shape) > ELEMENTS:
        raise Unsupported(
            f"reads {math.prod(shape)} numbers for each pair of indices, an array of shape {tuple(shape)}; up to "
            f"{ELEMENTS} can be. Read single entries, `table[h, q_idx]`"
        )


def dynamic_slice(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    value, words = _words(walk, eqn, values[0])
    sizes = (*eqn.params["slice_sizes"], *words)
    aval, build = eqn.outvars[0].aval, walk.build
    whole = abstract((*aval.shape, *words), np.uint32)
    _check_small(whole.shape)
    shape = (*eqn.invars[0].aval.shape, *words)
    starts = [int(walk.scalars(v).numbers) for v in values[1:]]
    starts += [build.const(0, np.int32)] * len(words)
    starts = [_start(walk, value, d, shape[d], s, sizes[d]) for d, s in enumerate(starts)]
    numbers = _window(walk, value, whole, lambda index: list(zip(starts, index, strict=True)))
    return [Scalars(numbers, aval)]


def gather(walk: Any, eqn: Any, values: Sequence[Value]) -> list[Value]:
    value, words = _words(walk, eqn, values[0])
    aval, shape = eqn.outvars[0].aval, (*eqn.invars[0].aval.shape, *words)
    sizes = (*eqn.params["slice_sizes"], *words)
    whole = abstract((*aval.shape, *words), np.uint32)
    _check_small(whole.shape)
    places = _gather_places(walk, eqn, walk.scalars(values[1]).numbers, len(words))

    def clamped(index):
        return [
            (_start(walk, value, d, shape[d], start, sizes[d]), offset)
            for d, (start, offset) in enumerate(places(index))
        ]

    numbers = _window(walk, value, whole, clamped)
    if "FILL" in str(eqn.params["mode"]):
        filled = [
            _filled(walk, eqn, int(numbers[index]), value, shape, sizes, places(index))
            for index in np.ndindex(whole.shape)
        ]
        numbers = numbered(filled, whole.shape)
    return [Scalars(numbers, aval)]


def _gather_places(walk: Any, eqn: Any, indices: np.ndarray, words: int) -> Callable:
    """From an index of the result to a start and an offset from it for each dim of what is read."""
    dims, build = eqn.params["dimension_numbers"], walk.build
    rank, results = len(eqn.invars[0].aval.shape), len(eqn.outvars[0].aval.shape)
    batch_axes = [d for d in range(results) if d not in dims.offset_dims]
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    windowed = [d for d in range(rank) if d not in gone]
    along = dict(zip(windowed, dims.offset_dims, strict=True))
    along |= {rank + w: results + w for w in range(words)}

    def places(index):
        batch = tuple(index[d] for d in batch_axes)
        starts = [build.const(0, np.int32)] * (rank + words)
        for j, d in enumerate(dims.start_index_map):
            starts[d] = int(indices[(*batch, j)])
        for d, s in zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True):
            starts[d] = build.const(batch[s], np.int32)
        return [(s, index[along[d]] if d in along else 0) for d, s in enumerate(starts)]

    return places


def _filled(walk, eqn, number: int, value: Value, shape, sizes, places) -> int:
    """What was read, or the fill value where an index was out of range."""
    build, inside = walk.build, None
    for d, (start, _) in enumerate(places):
        if build.is_const(start) and 0 <= int(build.value(start)) <= shape[d] - sizes[d]:
            continue
        whole, as_index = _size(walk, value, d, shape[d])
        start = as_index(start)
        last = build.op("sub", whole, build.const(sizes[d], np.int32))
        low = build.op("ge", start, build.const(0, np.int32))
        here = build.op("and", low, build.op("le", start, last))
        inside = here if inside is None else build.op("and", inside, here)
    if inside is None:
        return number
    dtype = np.dtype(np.uint32) if _jaxpr.is_key(eqn.outvars[0].aval) else eqn.outvars[0].aval.dtype
    return build.op(
        "select_n", inside, build.const(_fill(eqn.params["fill_value"], dtype), dtype), number
    )


def _fill(value: Any, dtype: Any) -> Any:
    """What jnp's `mode="fill"` gives outside, if nobody said."""
    if value is not None:
        return value
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    if dtype == np.bool_:
        return True
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
