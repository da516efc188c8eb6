"""What a program can return over tiles of its arguments, all tiles at once.

Arithmetic is that of `_interval.py`. This file adds what a captured array can hold under a tile: a tile of indices that
is aligned is one block of the array, and a shifted or scaled one is a window, whose least and largest element come from
windows of a power of two. So an array is passed over once, whatever the number of tiles.

With `xp=np` everything is NumPy, at trace time. With `xp=jnp` what is large or traced becomes XLA operations; what is
known and small stays NumPy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _table
from ._code import Code, Equation, constant
from ._interval import Interval, convert_element_type, ends_dtype, everything, flushed, point

_SMALL = 1 << 15  # elements that are better computed while tracing than compiled


class Span(NamedTuple):
    """What an argument is in each tile: from `lo` to `hi`, both included.

    Both have one axis for each axis of tiles, of size 1 where the argument does not depend on it. `tile` says that the
    argument's one long axis counts tiles of so many positions, from 0 on, and `length` how many positions there are:
    the last tile may have fewer. Arguments that are one number in each tile may have `tile=1`.
    """

    lo: Any
    hi: Any
    length: int | None = None
    tile: int | None = None


def bound(
    code: Code, ranges: Mapping[str, Span], operands: Sequence[Any], xp: Any = np
) -> list[Interval]:
    """Intervals in which the results lie, for each tile.

    **Arguments:**

    - `code`: Of a program.
    - `ranges`: A `Span` for each argument. One without may be anything its dtype allows.
    - `operands`: The arrays that the code reads, as `Program.prepare` gives them; None for one of unknown content.
    - `xp`: `numpy`, or `jax.numpy` if operands or spans are traced.

    **Returns:**

    An interval for each result, whose ends have an axis for each axis of tiles, or none. Loose in places, never wrong.
    """
    walk = _Walk(code, ranges, operands, xp)
    with np.errstate(all="ignore"):
        return [walk.interval(n) for n in code.results]


class _Ends(NamedTuple):
    """Least and largest element under each index, and whether one is NaN. The same object twice: nothing reduced yet."""

    small: Any
    large: Any
    nan: Any  # None, where no element can be

    def each(self, f: Callable[[Any, str], Any]) -> "_Ends":
        small = f(self.small, "minimum")
        large = small if self.small is self.large else f(self.large, "maximum")
        return _Ends(small, large, None if self.nan is None else f(self.nan, "maximum"))

    def reduced(self, f: Callable[[Any, str], Any]) -> "_Ends":
        nan = None if self.nan is None else f(self.nan, "maximum")
        return _Ends(f(self.small, "minimum"), f(self.large, "maximum"), nan)


class _Axis(NamedTuple):
    """The index that is the number of the tile itself, along this axis."""

    axis: int | None
    count: int


class _Walk:
    def __init__(self, code: Code, ranges: Mapping[str, Span], operands: Sequence[Any], xp: Any):
        self.code, self.ranges, self.xp = code, ranges, xp
        self.operands = [np.asarray(a) if xp is np and a is not None else a for a in operands]
        self.found: dict[int, Interval] = {}
        self.rank = max((np.ndim(s.lo) for s in ranges.values()), default=0)

    def interval(self, result: int) -> Interval:
        needed, order = [result], set()
        while needed:
            n = needed.pop()
            if n not in self.found and n not in order:
                order.add(n)
                needed.extend(self.code.equations[n].inputs)
        for n in sorted(order):
            self.found[n] = self._equation(n, self.code.equations[n])
        return self.found[result]

    def _equation(self, n: int, e: Equation) -> Interval:
        if e.op == "argument":
            return self._argument(e)
        if e.op == "const":
            return point(constant(e))
        if e.op == "size":
            array = self.operands[e["operand"]]
            if array is None:
                return Interval(np.int32(1), np.int32(2**31 - 1), np.False_)
            return point(np.int32(array.shape[e["dim"]]))
        if e.op == "read":
            return self._read(e, self.operands[e["operand"]])
        if e.op == "opaque":
            return everything(e.dtype)
        inputs = [self.found[i] for i in e.inputs]
        xp = self._where(*(x for i in inputs for x in (i.lo, i.hi)))
        if xp is jnp:
            inputs = [Interval(jnp.asarray(i.lo), jnp.asarray(i.hi), i.nan) for i in inputs]
        result = _table.ROWS[e.op].bound(xp, jnp.dtype(e.dtype), *inputs, **dict(e.params))
        if e.op in ("eq", "ne"):
            apart = self._apart(*(self.code.equations[i] for i in e.inputs))
            if apart is not None and e.op == "eq":
                return result._replace(hi=result.hi & ~apart)
            if apart is not None:
                return result._replace(lo=result.lo | apart)
        return result

    def _where(self, *arrays: Any) -> Any:
        """NumPy, if all are, and the result is small enough for a program to hold as a constant."""
        if self.xp is np:
            return np
        if not _known(*arrays):
            return jnp
        size = np.prod(np.broadcast_shapes(*(x.shape for x in arrays)), dtype=np.int64)
        return np if size <= _SMALL else jnp

    def _argument(self, e: Equation) -> Interval:
        span = self.ranges.get(e["name"])
        if span is None:
            (argument,) = (a for a in self.code.arguments if a.name == e["name"])
            return argument.interval
        lo, hi = (self._as(x, ends_dtype(e.dtype)) for x in (span.lo, span.hi))
        interval = Interval(lo, lo if span.lo is span.hi else hi, np.False_)
        return flushed(self._where(lo, hi), e.dtype, interval)

    def _as(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype) if isinstance(x, jax.Array) else np.asarray(x, dtype)

    # Captured arrays

    def _read(self, e: Equation, array: Any) -> Interval:
        if array is None or 0 in array.shape:
            return everything(e.dtype)
        xp = np if isinstance(array, np.ndarray) else jnp
        dtype = jnp.dtype(e.dtype)
        floating = jnp.issubdtype(dtype, jnp.floating)
        if floating:
            nan = xp.isnan(array)
            kind = ends_dtype(array.dtype)
            top = kind.type(np.inf)
            values = array.astype(kind)
            if xp is np and not nan.any():
                ends = _Ends(values, values, None)
            else:
                low, high = xp.where(nan, top, values), xp.where(nan, -top, values)
                ends = _Ends(low, high, nan.astype(np.uint8))
        else:
            values = array.astype(np.uint8 if dtype == np.bool_ else dtype)
            if xp is jnp and dtype in (np.int16, np.uint16):
                # XLA's compiler for CPUs aborts on some fusions that broadcast these (JAX 0.8.2 to 0.12).
                values = values.astype(np.int32)
            ends = _Ends(values, values, None)
        small, large, nan = self._look_up(ends, e.inputs)
        if not floating:
            if dtype == np.bool_:
                small, large = small != 0, (small if small is large else large) != 0
            elif small.dtype != dtype:
                small, large = small.astype(dtype), large.astype(dtype)
            return Interval(small, large, np.False_)
        if nan is None:
            interval = Interval(small, large, np.False_)
        else:  # nothing but NaN: some number, so that the interval is not empty
            empty, zero = small > large, small.dtype.type(0)
            interval = Interval(
                xp.where(empty, zero, small), xp.where(empty, zero, large), nan != 0
            )
        if jnp.dtype(array.dtype) != dtype:  # narrowed when read
            interval = convert_element_type(xp, dtype, interval, new_dtype=dtype.name)
        return flushed(xp, dtype, interval)

    def _look_up(self, ends: _Ends, inputs: Sequence[int]) -> _Ends:
        """Least and largest elements for each tile."""
        indices: list[Any] = []
        wide: tuple[int, int] | None = None  # the one dim of which windows are kept: input, dim
        for dim, n in enumerate(inputs):
            exact = self._exact(n, ends.small.shape[dim])
            tiles = self._tiles(n)
            if exact is not None:
                indices.append(exact)
            elif tiles is not None:
                axis, tile, length = tiles
                ends, count = _blocks(ends, dim, tile, min(length, tile * axis.count))
                whole = count == axis.count
                indices.append(axis if whole else np.minimum(self._spread(axis), count))
            elif wide is None and self._window_is_worth_it(n, ends.small.shape[dim]):
                wide = (n, dim)
                indices.append(None)
            else:
                ends = ends.reduced(lambda x, op, d=dim: _reduce(x, op, d))
                indices.append(np.int32(0))
        if wide is None:
            return ends.each(lambda x, _: self._gather(x, indices))
        return self._window(ends, indices, *wide)

    def _exact(self, n: int, size: int) -> Any:
        """The index, clamped, if it is one number in each tile."""
        i = self.found[n]
        known = _known(i.lo, i.hi)
        if i.lo is not i.hi and not (known and np.array_equal(i.lo, i.hi)):
            return None
        return (np if known else jnp).clip(i.lo, 0, size - 1)

    def _tiles(self, n: int) -> tuple[_Axis, int, int] | None:
        """Axis, tile and length, if the index is an argument with aligned tiles."""
        e = self.code.equations[n]
        if e.op == "wrap":
            lo = self.found[e.inputs[0]].lo
            return self._tiles(e.inputs[0]) if _known(lo) and np.all(lo >= 0) else None
        span = self.ranges.get(e["name"]) if e.op == "argument" else None
        if span is None or span.tile is None or span.length is None:
            return None
        axes = _axes_of(span.lo)
        if len(axes) > 1:
            return None
        axis = axes[0] if axes else None
        return _Axis(axis, np.size(span.lo)), span.tile, span.length

    def _gather(self, x: Any, indices: Sequence[Any]) -> Any:
        """`x` at indices that are in range, as an array with an axis for each axis of tiles."""
        axes = [_axes_of(i) for i in indices]
        used = [a for some in axes for a in some]
        if all(len(some) <= 1 for some in axes) and len(set(used)) == len(used):
            for d, i in enumerate(indices):
                if isinstance(i, _Axis):
                    continue
                flat = i.reshape(-1)
                if isinstance(x, np.ndarray) and isinstance(flat, np.ndarray):
                    x = np.take(x, flat, axis=d)
                else:
                    x = jnp.take(jnp.asarray(x), flat, axis=d, mode="clip")
            shape = [1] * self.rank
            for d, some in enumerate(axes):
                if some:
                    shape[some[0]] = x.shape[d]
            order = sorted(range(len(axes)), key=lambda d: axes[d] or [-1])
            return x.transpose(order).reshape(shape)
        full = [self._spread(i) for i in indices]
        if self._where(x, *full) is np and isinstance(x, np.ndarray):
            return x[tuple(full)]
        return jnp.asarray(x).at[tuple(full)].get(mode="promise_in_bounds")

    def _spread(self, index: Any) -> Any:
        if not isinstance(index, _Axis):
            return index
        shape = [1] * self.rank
        if index.axis is not None:
            shape[index.axis] = index.count
        return np.arange(index.count, dtype=np.int32).reshape(shape)

    # Windows

    def _window_is_worth_it(self, n: int, size: int) -> bool:
        if size == 1:
            return False
        i = self.found[n]
        if _known(i.lo, i.hi):
            return not np.all((i.lo <= 0) & (i.hi >= size - 1))
        width = self._width(n)
        return width is not None and width[1] < size

    def _window(self, ends: _Ends, indices: list, n: int, dim: int) -> _Ends:
        i = self.found[n]
        if _known(i.lo, i.hi):
            return self._known_window(ends, indices, i, dim)
        width = self._width(n)
        assert width is not None  # or the window is not worth it
        return self._traced_window(ends, indices, i, dim, *width)

    def _known_window(self, ends: _Ends, indices: list, i: Interval, dim: int) -> _Ends:
        """Exact: the windows of the power of two that fits twice into the interval, for each interval."""
        size = ends.small.shape[dim]
        lo, hi = np.clip(i.lo, 0, size - 1), np.clip(i.hi, 0, size - 1)
        level = _log2(np.arange(1, size + 1))[hi - lo]
        levels = np.unique(level)
        ends = ends.reduced(lambda x, op: _windows(x, op, dim, levels.tolist()))
        row = np.searchsorted(levels, level).astype(np.int32)
        return self._two(ends, indices, dim, row, lo, hi - (np.int32(1) << level) + 1)

    def _traced_window(
        self, ends: _Ends, indices: list, i: Interval, dim: int, least: int, most: int
    ) -> _Ends:
        """One size of windows for all intervals, of which `hi - lo` lies between `least` and `most`."""
        size = ends.small.shape[dim]
        level = (least + 1).bit_length() - 1
        if 2 << level < most + 1:  # two would not cover the longest
            level = (most + 1).bit_length() - 1
        room = max(most + 1, 1 << level)
        lo = jnp.clip(i.lo, -room, size)
        hi = lo + jnp.clip(i.hi - i.lo, (1 << level) - 1, most)
        padded = ends.each(lambda x, _: _edges(x, dim, room, 2 * room))
        padded = padded.reduced(lambda x, op: _windows(x, op, dim, [level]))
        last = hi + room - (1 << level) + 1
        found = self._two(padded, indices, dim, np.int32(0), lo + room, last)
        # Arithmetic that wrapped around makes it longer: then anything that the array holds.
        inside = (i.hi - i.lo).astype(np.uint32) <= np.uint32(most)
        whole = ends.reduced(lambda x, op: _reduce(x, op, tuple(range(x.ndim))).reshape(()))
        small, large, nan = (
            None if x is None else jnp.where(inside, x, y)
            for x, y in zip(found, whole, strict=True)
        )
        return _Ends(small, large, nan)

    def _two(self, ends: _Ends, indices: list, dim: int, row: Any, lo: Any, hi: Any) -> _Ends:
        """Two windows cover the interval."""
        both = [[*indices[:dim], row, at, *indices[dim + 1 :]] for at in (lo, hi)]

        def covered(x, op):
            one, other = (self._gather(x, full) for full in both)
            return getattr(np if isinstance(one, np.ndarray) else jnp, op)(one, other)

        return ends.reduced(covered)

    def _width(self, n: int) -> tuple[int, int] | None:
        """`hi - lo` lies between these, if no arithmetic wraps around."""
        e = self.code.equations[n]
        if e.op == "const" or e.op == "size":
            return 0, 0
        i = self.found[n]
        if _known(i.lo, i.hi):
            width = i.hi.astype(np.int64) - i.lo.astype(np.int64)
            return int(width.min()), int(width.max())
        if i.lo is i.hi:
            return 0, 0
        widths = []
        for m in e.inputs:
            width = self._width(m)
            if width is None:
                return None
            widths.append(width)
        if e.op in ("add", "sub"):
            return sum(w[0] for w in widths), sum(w[1] for w in widths)
        if e.op == "wrap":
            return widths[0]
        if e.op in ("max", "min", "clamp"):
            return 0, sum(w[1] for w in widths)
        return None

    # Equality of ids

    def _apart(self, a: Equation, b: Equation) -> Any:
        """Where two reads of integers have no number in common, as far as intervals do not tell.

        Documents may have ids in any order, and an interval of ids then says little. So ids are renamed by where each
        is met first; the intervals of names of contiguous documents are disjoint where the documents are. Names that
        are shared by several ids loosen this, and cannot make it wrong.
        """
        if a.op != "read" or b.op != "read" or a.dtype != b.dtype:
            return None
        arrays = [self.operands[e["operand"]] for e in (a, b)]
        if any(x is None or x.ndim == 0 or x.size < 2 for x in arrays) or a.dtype == "bool":
            return None
        if not jnp.issubdtype(a.dtype, jnp.integer):
            return None
        shared = 0  # leading dims in which both reads have one index: ids are named in each row by itself
        while (
            shared < min(len(a.inputs), len(b.inputs)) - 1
            and a.inputs[shared] == b.inputs[shared]
            and arrays[0].shape[shared] == arrays[1].shape[shared]
        ):
            shared += 1
        first = arrays[0].astype(a.dtype)
        second = first if arrays[1] is arrays[0] else arrays[1].astype(a.dtype)
        names = _names([first, second], shared)
        one, other = (
            self._look_up(_Ends(x, x, None), e.inputs) for x, e in zip(names, (a, b), strict=True)
        )
        if self._where(*one[:2], *other[:2]) is jnp:
            one, other = (
                _Ends(jnp.asarray(x.small), jnp.asarray(x.large), None) for x in (one, other)
            )
        return (one.small > other.large) | (other.small > one.large)


def _known(*arrays: Any) -> bool:
    """Whether all are NumPy's: the others may be traced."""
    return all(isinstance(x, np.ndarray | np.generic) for x in arrays)


def _axes_of(index: Any) -> list[int]:
    """On which axes of tiles an index depends."""
    if isinstance(index, _Axis):
        return [] if index.axis is None else [index.axis]
    return [d for d, n in enumerate(np.shape(index)) if n > 1]


def _reduce(x: Any, op: str, axes: Any) -> Any:
    if isinstance(x, np.ndarray):
        return getattr(np, op).reduce(x, axis=axes, keepdims=True)
    return {"minimum": jnp.min, "maximum": jnp.max}[op](x, axis=axes, keepdims=True)


def _edges(x: Any, dim: int, before: int, after: int) -> Any:
    """The array with its first and last element repeated: what clamped indices read."""
    if before == after == 0:
        return x
    widths = [(before, after) if d == dim else (0, 0) for d in range(x.ndim)]
    return (np if isinstance(x, np.ndarray) else jnp).pad(x, widths, mode="edge")


def _blocks(ends: _Ends, dim: int, tile: int, length: int) -> tuple[_Ends, int]:
    """The least and largest element of each aligned block along `dim`, and how many blocks there are of `length` indices.

    If blocks of indices lie past the array's end, one more block has its last element, which is what they read.
    """
    size = ends.small.shape[dim]
    held = min(size, length)
    count = -(-held // tile)
    cut = tuple(slice(None) for _ in range(dim))

    def blocks(x, op):
        last = x[(*cut, slice(size - 1, size))]
        x = x[(*cut, slice(held))]
        if tile > 1:
            x = _edges(x, dim, 0, count * tile - held)
            x = x.reshape(*x.shape[:dim], count, tile, *x.shape[dim + 1 :])
            x = _reduce(x, op, dim + 1)
            x = x.reshape(*x.shape[: dim + 1], *x.shape[dim + 2 :])
        if -(-length // tile) == count:
            return x
        return (np if isinstance(x, np.ndarray) else jnp).concatenate([x, last], dim)

    return (ends.each if tile == 1 else ends.reduced)(blocks), count


def _log2(x: np.ndarray) -> np.ndarray:
    """Rounded down, of integers from 1 on."""
    return (np.frexp(np.asarray(x, np.float64))[1] - 1).astype(np.int32)


def _windows(x: Any, op: str, dim: int, levels: Sequence[int]) -> Any:
    """Least or largest of windows of `2**level` from each position on, along a new dim before `dim`."""
    xp = np if isinstance(x, np.ndarray) else jnp
    size = x.shape[dim]
    cut = tuple(slice(None) for _ in range(dim))
    kept = []
    for level in range(int(max(levels)) + 1):
        if level:
            step = 1 << (level - 1)
            ahead = x[(*cut, slice(step, None))]
            # Windows that end past the array are never asked for.
            x = xp.concatenate(
                [
                    getattr(xp, op)(x[(*cut, slice(size - step))], ahead),
                    x[(*cut, slice(size - step, None))],
                ],
                dim,
            )
        if level in levels:
            kept.append(x)
    return xp.stack(kept, dim)


# Names of ids


def _names(arrays: Sequence[Any], shared: int) -> list[Any]:
    """Both arrays with each number replaced by one that grows with the place where it is first met.

    The first `shared` dims are rows, named by themselves.
    """
    same = arrays[0] is arrays[1]
    parts = [x.reshape(int(np.prod(x.shape[:shared], dtype=np.int64)), -1) for x in arrays]
    longest = sorted(parts[: 1 if same else 2], key=lambda x: -x.shape[1])
    known = all(isinstance(x, np.ndarray) for x in arrays)
    if known:
        joined = np.concatenate(longest, 1)
        named = np.stack([_named(row) for row in joined])
    else:
        named = _hashed(jnp.concatenate(longest, 1))
    results = [named[:, : longest[0].shape[1]], named[:, longest[0].shape[1] :]]
    if same:
        results[1] = results[0]
    elif longest[0] is not parts[0]:
        results.reverse()
    return [r.reshape(x.shape) for r, x in zip(results, arrays, strict=True)]


def _named(ids: np.ndarray) -> np.ndarray:
    """0 for the first number, 1 for the next new one, and so on."""
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    _, first, inverse = np.unique(ids[starts], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return np.repeat(rank[inverse.reshape(-1)], np.diff(np.append(starts, len(ids))))


def _hashed(ids: Any) -> Any:
    """The place where each number, or one of the same hash, is first met in its row. Numbers below the table's size have
    a hash of their own."""
    rows, length = ids.shape
    bits = min((2 * length - 1).bit_length(), 30)
    word = ids.astype(np.uint32)
    word = word ^ ((word >> np.uint32(bits)) * np.uint32(0x9E3779B1))
    key = (word & np.uint32((1 << bits) - 1)).astype(np.int32)
    row = jnp.arange(rows, dtype=np.int32)[:, None]
    begins = jnp.concatenate([jnp.ones((rows, 1), bool), key[:, 1:] != key[:, :-1]], 1)
    # Only where a run begins: else a long document's positions would all wait for one place of the table.
    at = jnp.where(begins, key, np.int32(1 << bits))
    place = jnp.broadcast_to(jnp.arange(length, dtype=np.int32), ids.shape)
    table = jnp.full((rows, 1 << bits), length, np.int32)
    table = table.at[row, at].min(place, mode="drop")
    return table.at[row, key].get(mode="promise_in_bounds")
