"""From a jaxpr to code: calls inlined, loops unrolled, small arrays taken apart into scalars.

Three kinds of values meet here:

- `Known`: concrete, from literals alone. Computed on the spot, by JAX.
- `Outer`: an array that no argument of the function reaches. Computed before the kernel, by JAX, from the captured
  arrays (`Prepare`); what the function reads of it by index, or what is small, becomes `read` equations.
- `Scalars`: depends on an argument. An array of equations' numbers, one for each element.

Walking a jaxpr needs names that JAX does not promise to keep. They all stand in this file and in `_jaxpr.py`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _jaxpr, _random, _table
from ._code import Builder, Operand, TooLong

ELEMENTS = 1024  # of an array that is taken apart
STEPS = 4096  # of a loop that is unrolled


class Known(NamedTuple):
    value: Any


class Outer(NamedTuple):
    """`number` in the environment of `Prepare`."""

    number: int
    aval: Any


class Scalars(NamedTuple):
    """`numbers` has the array's shape; a PRNG key has its words as further axes."""

    numbers: np.ndarray
    aval: Any


Value = Known | Outer | Scalars


class Step(NamedTuple):
    """A part of what is computed before the kernel: `run(*inputs)` gives a list.

    `moves`: it only moves numbers, so it runs in any dtype.
    """

    run: Callable[..., list]
    inputs: tuple[Known | Outer, ...]
    outputs: tuple[int, ...]
    moves: bool = False


class Region(NamedTuple):
    """Equations `start` to `stop` compute what `run` computes under JAX, in another way.

    A function with a derivative rule of its own is inlined for a kernel, and called as it is under JAX, which knows its
    rule. What has no row of the table is a region of opaque equations.
    """

    start: int
    stop: int
    run: Callable[..., list]
    inputs: tuple[Value, ...]
    outputs: tuple[Scalars, ...]


class Unsupported(Exception):
    """Not a program for a kernel. The message says what it met and what to write instead.

    `placed`: it says where, too.
    """

    def __init__(self, message: str, placed: bool = False):
        super().__init__(message)
        self.placed = placed


class Refused(Unsupported):
    """Nor in parts: JAX has to run the whole function as it is."""


class Scalariser:
    """Holds the code as it grows. `equation` is the one place where a primitive's name decides."""

    def __init__(self, build: Builder, where: Callable[[Any], str]):
        self.build = build
        self.where = where
        self.steps: list[Step] = []
        self.regions: list[Region] = []
        self.operands: list[int] = []  # numbers of Outer values that are read
        self.outers = 0
        self._dims: list[tuple[int, ...]] = []
        self._inside = ""  # where what JAX expands while we trace comes from
        self._constants: dict[int, tuple[Any, Outer]] = {}  # by identity

    # Values

    def outer(self, aval: Any) -> Outer:
        self.outers += 1
        return Outer(self.outers - 1, aval)

    def prepare(
        self, run: Callable, inputs: Sequence[Known | Outer], avals: Sequence, moves: bool = False
    ) -> list[Outer]:
        outputs = [self.outer(aval) for aval in avals]
        self.steps.append(Step(run, tuple(inputs), tuple(o.number for o in outputs), moves))
        return outputs

    def scalars(self, value: Value) -> Scalars:
        """Any value, taken apart."""
        if isinstance(value, Scalars):
            return value
        if isinstance(value, Known):
            aval = _aval(np.shape(value.value), value.value.dtype)
            array = _jaxpr.words(value.value)
            self._check_small(array.shape)
            numbers = [self.build.const(x, array.dtype) for x in array.reshape(-1)]
            return Scalars(_numbers(numbers, array.shape), aval)
        if jax.dtypes.issubdtype(value.aval.dtype, jax.dtypes.prng_key):
            return self._key_words(value)
        self._check_small(value.aval.shape)
        indices = [
            [self.build.const(i, np.int32) for i in index] for index in np.ndindex(value.aval.shape)
        ]
        numbers = [self.read(value, index) for index in indices]
        return Scalars(_numbers(numbers, value.aval.shape), value.aval)

    def _key_words(self, key: Outer) -> Scalars:
        words = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct(key.aval.shape, key.aval.dtype)
        )
        (data,) = self.prepare(lambda k: [jax.random.key_data(k)], [key], [words])
        return Scalars(self.scalars(data).numbers, key.aval)

    def _check_small(self, shape: tuple[int, ...]) -> None:
        if math.prod(shape) > ELEMENTS:
            raise Unsupported(
                f"an array of shape {tuple(shape)} meets an index: a kernel works on single numbers, and takes "
                f"arrays apart up to {ELEMENTS} elements. Read single entries of it, `table[h, q_idx]`, or compute "
                "on the whole array without the indices, which is done once, before the kernel"
            )

    def operand(self, array: Outer) -> int:
        if array.number not in self.operands:
            shape = array.aval.shape
            if any(n > 2**31 - 1 for n in shape):
                raise Unsupported(
                    f"a captured array has shape {tuple(shape)}, and a kernel counts to 2**31 - 1 along a dim. "
                    "Give it two dims, `table[i // n, i % n]`"
                )
            self.operands.append(array.number)
            self._dims.append(tuple(shape))
            self.build.operands.append(Operand(jnp.dtype(array.aval.dtype).name, len(shape)))
        return self.operands.index(array.number)

    def read(self, array: Outer, indices: Sequence[int]) -> int:
        k = self.operand(array)
        dims = range(len(indices))
        return self.build.read(
            k, [self._index(k, d, i) for d, i in zip(dims, indices, strict=True)]
        )

    def _index(self, operand: int, dim: int, i: int) -> int:
        """As int32, with the array's size where jnp has the number itself: another length is no other code.

        JAX's rule for negative indices is `select_n(lt(i, 0), i, add(i, size))`, before it clamps.
        """
        build, size = self.build, self._dims[operand][dim]
        e = build.equations[i]
        if e.op == "select_n" and len(e.inputs) == 3:
            test, same, moved = (build.equations[n] for n in e.inputs)
            below = (
                test.op == "lt" and test.inputs[0] == e.inputs[1] and build.is_const(test.inputs[1])
            )
            added = (
                moved.op == "add"
                and moved.inputs[0] == e.inputs[1]
                and build.is_const(moved.inputs[1])
            )
            if (
                below
                and added
                and build.value(test.inputs[1]) == 0
                and build.value(moved.inputs[1]) == size
            ):
                inner = self._int32(e.inputs[1])
                return build.op("wrap", inner, build.size(operand, dim))
        return self._int32(i)

    def _int32(self, i: int) -> int:
        """An index in int32; a wider one is clamped on the way."""
        build, dtype = self.build, jnp.dtype(self.build.equations[i].dtype)
        if dtype == np.int32:
            return i
        if dtype.itemsize >= 4:
            i = build.op("min", i, build.const(2**31 - 1, dtype))
            if jnp.issubdtype(dtype, jnp.signedinteger):
                i = build.op("max", i, build.const(-(2**31), dtype))
        return build.op("convert_element_type", i, new_dtype="int32")

    # Walking

    def run(self, jaxpr: Any, consts: Sequence[Value], arguments: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True)
        )

        def value(v):
            # A Python number in a jaxpr has the dtype that JAX gave it.
            return Known(np.asarray(v.val, v.aval.dtype)) if _jaxpr.is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            values = [value(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, values), strict=True))
        return [value(v) for v in jaxpr.outvars]

    def closed(self, closed: Any, arguments: Sequence[Value]) -> list[Value]:
        return self.run(closed.jaxpr, [self.captured(c) for c in closed.consts], arguments)

    def captured(self, const: Any) -> Known | Outer:
        """A constant of an inner jaxpr: it is known when the kernel is prepared."""
        if id(const) not in self._constants:
            dtype = const.dtype if hasattr(const, "dtype") else np.asarray(const).dtype
            (outer,) = self.prepare(lambda: [const], [], [_aval(np.shape(const), dtype)])
            self._constants[id(const)] = const, outer
        return self._constants[id(const)][1]

    def equation(self, eqn: Any, values: list[Value]) -> list[Value]:
        if all(isinstance(v, Known) for v in values):
            with jax.ensure_compile_time_eval():
                return [Known(x) for x in _jaxpr.bind(eqn, [v.value for v in values])]
        name = eqn.primitive.name
        if not any(isinstance(v, Scalars) for v in values):
            if name in _jaxpr.CALLS:
                return self.closed(_jaxpr.called(eqn), values)
            avals = [v.aval for v in eqn.outvars]
            moves = name in _MOVES or name in _MORE_MOVES
            return list(self.prepare(functools.partial(_bind, eqn), values, avals, moves))
        equations, regions = len(self.build.equations), len(self.regions)
        try:
            return self._of_scalars(eqn, values)
        except Refused:
            raise
        except Unsupported as error:
            why = str(error) if error.placed else f"{self.place(eqn)} {error}"
        except TooLong:
            if equations > self.build.limit // 2:
                raise
            why = f"{self.place(eqn)} `{eqn.primitive.name}` unrolls to too many operations"
        self.build.back(equations)
        del self.regions[regions:]
        return self._opaque(eqn, values, why)

    def place(self, eqn: Any) -> str:
        """The user's line. What JAX expands while we trace has that of the call."""
        return self._inside or self.where(eqn)

    @contextlib.contextmanager
    def _within(self, eqn: Any):
        before, self._inside = self._inside, self.place(eqn)
        try:
            yield
        finally:
            self._inside = before

    def _opaque(self, eqn: Any, values: list[Value], why: str) -> list[Value]:
        if eqn.effects:
            raise Refused(
                f"{self.place(eqn)} prints, or calls back to Python: kernels cannot", True
            )
        return list(
            self.opaque(functools.partial(_bind, eqn), values, [v.aval for v in eqn.outvars], why)
        )

    def opaque(
        self, run: Callable, values: Sequence[Value], avals: Sequence, why: str
    ) -> list[Scalars]:
        """JAX computes it, no kernel can."""
        inputs = sorted(
            {int(n) for v in values if isinstance(v, Scalars) for n in v.numbers.reshape(-1)}
        )
        start = len(self.build.equations)
        outputs = []
        for aval in avals:
            shape = _jaxpr.word_shape(aval)
            if math.prod(shape) > ELEMENTS:
                raise Unsupported(f"{why}; its result has shape {tuple(shape)}", placed=True)
            numbers = [
                self.build.opaque(_jaxpr.word_dtype(aval), why, inputs)
                for _ in range(math.prod(shape))
            ]
            outputs.append(Scalars(_numbers(numbers, shape), aval))
        stop = len(self.build.equations)
        if stop > start:
            self.regions.append(Region(start, stop, run, tuple(values), tuple(outputs)))
        return outputs

    def _of_scalars(self, eqn: Any, values: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _jaxpr.CALLS:
            composite = _jaxpr.integer_division(eqn)
            if composite is not None:
                return [self._elementwise(eqn, composite, values)]
            return self.closed(_jaxpr.called(eqn), values)
        if name in _jaxpr.RULED:
            return self._ruled(eqn, values)
        if name in _MOVES:
            return [self._moved(eqn, values)]
        if name in _REDUCTIONS:
            return [self._reduced(eqn, values[0])]
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, values)
        if name in _table.EXPANSIONS:
            return [self._expanded(eqn, values)]
        name = _table.SYNONYMS.get(name, name)
        total_order = eqn.primitive.name.endswith("_to") and jnp.issubdtype(
            eqn.invars[0].aval.dtype, jnp.floating
        )
        if name in _table.ROWS and not total_order:
            row = _table.ROWS[name]
            kept = {k: _jaxpr.plain(params[k]) for k in row.params}
            return [self._elementwise(eqn, name, values, **kept)]
        raise Unsupported(
            f"uses `{eqn.primitive.name}`, for which kernels have no code. Compute it on whole captured arrays, "
            "outside the function, and read the result by index; or write it in the operations of "
            "`eqxcute.inline`'s table"
        )

    # Elementwise

    def _elementwise(self, eqn: Any, name: str, values: list[Value], **params: Any) -> Scalars:
        def combine(*one):
            return self.build.op(name, *one, **params)

        return self._mapped(eqn, combine, values)

    def _mapped(self, eqn: Any, combine: Callable[..., int], values: list[Value]) -> Scalars:
        """`combine` of each element of the inputs."""
        aval = eqn.outvars[0].aval
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise Unsupported(f"computes a {aval.dtype} number: kernels compute with real ones")
        shape, words = _jaxpr.word_shape(aval), len(_jaxpr.word_shape(aval)) - len(aval.shape)
        parts = []
        for v, of in zip(values, eqn.invars, strict=True):
            p = self.scalars(v).numbers
            if words and not _jaxpr.is_key(of.aval):  # the choice between keys
                p = p[..., *[None] * words]
            parts.append(np.broadcast_to(p, shape).reshape(-1))
        return Scalars(
            _numbers([combine(*map(int, one)) for one in zip(*parts, strict=True)], shape), aval
        )

    def _expanded(self, eqn: Any, values: list[Value]) -> Scalars:
        aval = eqn.outvars[0].aval
        parts = [np.broadcast_to(self.scalars(v).numbers, aval.shape).reshape(-1) for v in values]
        const = functools.partial(self.build.const, dtype=eqn.invars[0].aval.dtype)
        expand = functools.partial(_table.EXPANSIONS[eqn.primitive.name], self.build.op, const)
        numbers = [expand(*map(int, one)) for one in zip(*parts, strict=True)]
        return Scalars(_numbers(numbers, aval.shape), aval)

    # Moves: which element of the inputs each element of the result is

    def _moved(self, eqn: Any, values: list[Value]) -> Scalars:
        parts, aval = [self.scalars(v).numbers for v in values], eqn.outvars[0].aval
        move = functools.partial(_MOVES[eqn.primitive.name], eqn.params)
        if not _jaxpr.is_key(aval):
            return Scalars(move(*parts), aval)
        words = range(parts[0].shape[-1])
        return Scalars(np.stack([move(*(p[..., w] for p in parts)) for w in words], -1), aval)

    def _split(self, eqn: Any, values: list[Value]) -> list[Value]:
        numbers, axis = self.scalars(values[0]).numbers, eqn.params["axis"]
        ends = np.cumsum([int(n) for n in eqn.params["sizes"]])[:-1]
        parts = np.split(numbers, ends, axis)
        return [Scalars(p, v.aval) for p, v in zip(parts, eqn.outvars, strict=True)]

    def _unstack(self, eqn: Any, values: list[Value]) -> list[Value]:
        numbers = np.moveaxis(self.scalars(values[0]).numbers, eqn.params["axis"], 0)
        return [Scalars(p, v.aval) for p, v in zip(numbers, eqn.outvars, strict=True)]

    def _pad(self, eqn: Any, values: list[Value]) -> list[Value]:
        numbers, fill = (self.scalars(v).numbers for v in values)
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

    def _reduced(self, eqn: Any, value: Value) -> Scalars:
        numbers, axes = self.scalars(value).numbers, eqn.params["axes"]
        axes = tuple(int(a) for a in axes)
        name, start = _REDUCTIONS[eqn.primitive.name]
        aval = eqn.outvars[0].aval
        kept = [d for d in range(numbers.ndim) if d not in axes]
        rows = np.transpose(numbers, [*kept, *axes]).reshape(math.prod(aval.shape), -1)
        empty = self.build.const(start(aval.dtype), aval.dtype) if rows.shape[1] == 0 else -1
        results = [
            functools.reduce(functools.partial(self.build.op, name), map(int, row))
            if len(row)
            else empty
            for row in rows
        ]
        return Scalars(_numbers(results, aval.shape), aval)

    def _arg_extreme(self, eqn: Any, values: list[Value]) -> list[Value]:
        """The first of the largest, or smallest; NaN counts as both, as in JAX."""
        numbers, (axis,) = self.scalars(values[0]).numbers, eqn.params["axes"]
        aval, build = eqn.outvars[0].aval, self.build
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
        return [Scalars(_numbers([first(row) for row in rows], aval.shape), aval)]

    def _cumulative(self, eqn: Any, values: list[Value]) -> list[Value]:
        numbers, axis = self.scalars(values[0]).numbers, eqn.params["axis"]
        name = {"cumsum": "add", "cumprod": "mul", "cummax": "max", "cummin": "min"}[
            eqn.primitive.name
        ]
        rows = np.moveaxis(numbers, axis, 0).copy()
        order = range(len(rows))
        previous = None
        for i in reversed(order) if eqn.params["reverse"] else order:
            if previous is not None:
                flat = [
                    self.build.op(name, int(a), int(b))
                    for a, b in zip(rows[previous].reshape(-1), rows[i].reshape(-1), strict=True)
                ]
                rows[i] = _numbers(flat, rows[i].shape)
            previous = i
        return [Scalars(np.moveaxis(rows, 0, axis), eqn.outvars[0].aval)]

    def _dot_general(self, eqn: Any, values: list[Value]) -> list[Value]:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        aval, build = eqn.outvars[0].aval, self.build
        total = math.prod(aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in lc)
        if total > ELEMENTS:
            raise Unsupported(
                f"multiplies matrices with {total} products for each pair of indices. To pick a row of a table, "
                "index it, `table[h, i]`"
            )
        left, right = (self.scalars(v).numbers for v in values)
        wide = jnp.dtype(aval.dtype).name

        def arranged(x, batch, contracted):
            free = [d for d in range(x.ndim) if d not in batch and d not in contracted]
            y = np.transpose(x, [*batch, *free, *contracted])
            lead = [x.shape[d] for d in batch]
            return y.reshape(math.prod(lead), -1, math.prod(x.shape[d] for d in contracted))

        a, b = arranged(left, lb, lc), arranged(right, rb, rc)

        def product(x, y):
            x, y = (build.op("convert_element_type", int(n), new_dtype=wide) for n in (x, y))
            return build.op("mul", x, y)

        results = []
        for one, other in zip(a, b, strict=True):
            for x in one:
                for y in other:
                    parts = [product(m, n) for m, n in zip(x, y, strict=True)]
                    zero = build.const(0, aval.dtype)
                    results.append(
                        functools.reduce(functools.partial(build.op, "add"), parts)
                        if parts
                        else zero
                    )
        return [Scalars(_numbers(results, aval.shape), aval)]

    # Indexing

    def _at(self, value: Value, indices: Sequence[int]) -> int:
        """One element, at indices that are in range or clamped by `read`."""
        build = self.build
        if isinstance(value, Known) and not all(map(build.is_const, indices)):
            value = self.captured(value.value)
        if isinstance(value, Outer):
            return self.read(value, indices)
        numbers = self.scalars(value).numbers
        for i in indices:  # one axis after the other, the outermost first
            if build.is_const(i):
                numbers = numbers[min(max(int(build.value(i)), 0), len(numbers) - 1)]
                continue
            rows = [numbers[j].reshape(-1) for j in range(len(numbers))]
            chosen = rows[0]
            for j, row in enumerate(rows[1:], 1):
                here = build.op("ge", self._int32(i), build.const(j, np.int32))
                chosen = np.array(
                    [
                        build.op("select_n", here, int(a), int(b))
                        for a, b in zip(chosen, row, strict=True)
                    ],
                    np.int64,
                )
            numbers = chosen.reshape(numbers.shape[1:])
        return int(numbers)

    def _start(
        self, value: Value, dim: int, shape: tuple[int, ...], start: int, window: int
    ) -> int:
        """Where a window of a slice begins: clamped, so that the window ends in the array."""
        build = self.build
        if window == 1:
            return start  # the read itself clamps, and knows JAX's rule for negative indices
        if isinstance(value, Outer):
            k = self.operand(value)
            last = build.op("sub", build.size(k, dim), build.const(window, np.int32))
            if shape[dim] == window:
                return build.const(0, np.int32)
            start = self._index(k, dim, start)
        else:
            last = build.const(shape[dim] - window, np.int32)
            start = self._int32(start)
        return build.op("max", build.op("min", start, last), build.const(0, np.int32))

    def _dynamic_slice(self, eqn: Any, values: list[Value]) -> list[Value]:
        value, sizes, aval = values[0], eqn.params["slice_sizes"], eqn.outvars[0].aval
        self._check_small(aval.shape)
        shape = eqn.invars[0].aval.shape
        starts = [int(self.scalars(v).numbers) for v in values[1:]]
        starts = [self._start(value, d, shape, s, sizes[d]) for d, s in enumerate(starts)]
        return [
            self._window(value, aval, lambda at: [(s, i) for s, i in zip(starts, at, strict=True)])
        ]

    def _window(self, value: Value, aval: Any, places: Callable) -> Scalars:
        """`places(index)` of the result gives, for each dim of `value`, a start and an offset from it."""
        numbers = []
        for at in np.ndindex(aval.shape):
            indices = [
                s if not i else self.build.op("add", self._int32(s), self.build.const(i, np.int32))
                for s, i in places(at)
            ]
            numbers.append(self._at(value, indices))
        return Scalars(_numbers(numbers, aval.shape), aval)

    def _gather(self, eqn: Any, values: list[Value]) -> list[Value]:
        value, dims, sizes = values[0], eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        aval, shape, build = eqn.outvars[0].aval, eqn.invars[0].aval.shape, self.build
        self._check_small(aval.shape)
        indices = self.scalars(values[1]).numbers
        batch_axes = [d for d in range(len(aval.shape)) if d not in dims.offset_dims]
        windowed = [
            d
            for d in range(len(shape))
            if d not in dims.collapsed_slice_dims and d not in dims.operand_batching_dims
        ]
        fills = "FILL" in str(eqn.params["mode"])

        def places(at):
            batch = tuple(at[d] for d in batch_axes)
            starts: list[Any] = [None] * len(shape)
            for j, d in enumerate(dims.start_index_map):
                starts[d] = int(indices[(*batch, j)])
            for d, s in zip(
                dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
            ):
                starts[d] = build.const(batch[s], np.int32)
            offsets = dict(zip(windowed, (at[d] for d in dims.offset_dims), strict=True))
            return [
                (build.const(0, np.int32) if s is None else s, offsets.get(d, 0))
                for d, s in enumerate(starts)
            ]

        def clamped(at):
            return [
                (self._start(value, d, shape, s, sizes[d]), i)
                for d, (s, i) in enumerate(places(at))
            ]

        result = self._window(value, aval, clamped)
        if not fills:
            return [result]
        numbers = [
            self._filled(n, value, shape, sizes, places(at), eqn)
            for n, at in zip(result.numbers.reshape(-1), np.ndindex(aval.shape), strict=True)
        ]
        return [Scalars(_numbers(numbers, aval.shape), aval)]

    def _filled(self, read, value, shape, sizes, places, eqn) -> int:
        """What was read, or the fill value where an index was out of range."""
        build, inside = self.build, None
        for d, (start, _) in enumerate(places):
            if build.is_const(start) and 0 <= int(build.value(start)) <= shape[d] - sizes[d]:
                continue
            if isinstance(value, Outer):
                k = self.operand(value)
                start, size = self._index(k, d, start), build.size(k, d)
            else:
                start, size = self._int32(start), build.const(shape[d], np.int32)
            last = build.op("sub", size, build.const(sizes[d], np.int32))
            here = build.op(
                "and",
                build.op("ge", start, build.const(0, np.int32)),
                build.op("le", start, last),
            )
            inside = here if inside is None else build.op("and", inside, here)
        if inside is None:
            return int(read)
        fill = eqn.params["fill_value"]
        dtype = eqn.outvars[0].aval.dtype
        return build.op("select_n", inside, build.const(_fill(fill, dtype), dtype), int(read))

    def _dynamic_update_slice(self, eqn: Any, values: list[Value]) -> list[Value]:
        numbers, update = (self.scalars(v).numbers for v in values[:2])
        starts = [self._int32(int(self.scalars(v).numbers)) for v in values[2:]]
        if not all(map(self.build.is_const, starts)):
            raise Unsupported(
                "writes into an array at an index that is not known when it is traced"
            )
        at = [
            min(max(int(self.build.value(s)), 0), n - m)
            for s, n, m in zip(starts, numbers.shape, update.shape, strict=True)
        ]
        result = numbers.copy()
        result[tuple(slice(s, s + m) for s, m in zip(at, update.shape, strict=True))] = update
        return [Scalars(result, eqn.outvars[0].aval)]

    # Control flow

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        branches, (which, *arguments) = eqn.params["branches"], values
        n = int(self.scalars(which).numbers)
        if self.build.is_const(n):
            at = min(max(int(self.build.value(n)), 0), len(branches) - 1)
            return self.closed(branches[at], arguments)
        results = [[self.scalars(v) for v in self.closed(b, arguments)] for b in branches]
        build = self.build
        kind = build.equations[n].dtype
        n = build.op("max", n, build.const(0, kind))
        if len(branches) == 2:
            n = build.op("ne", n, build.const(0, kind))
        else:
            n = build.op("min", n, build.const(len(branches) - 1, kind))
        outputs = []
        for i, var in enumerate(eqn.outvars):
            cases = [r[i].numbers.reshape(-1) for r in results]
            chosen = [build.op("select_n", n, *map(int, c)) for c in zip(*cases, strict=True)]
            outputs.append(Scalars(_numbers(chosen, results[0][i].numbers.shape), var.aval))
        return outputs

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        consts, carry, xs = _jaxpr.scan_parts(eqn, values)
        body, length = eqn.params["jaxpr"], int(eqn.params["length"])
        if length > STEPS:
            raise Unsupported(f"has a loop of {length} steps; up to {STEPS} are unrolled")
        ys: list[list[Value]] = [[] for _ in range(len(eqn.outvars) - len(carry))]
        steps = range(length)
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            here = [self._row(x, i) for x in xs]
            results = self.closed(body, [*consts, *carry, *here])
            carry = results[: len(carry)]
            for y, r in zip(ys, results[len(carry) :], strict=True):
                y.append(r)
        if eqn.params["reverse"]:
            ys = [y[::-1] for y in ys]
        stacked = []
        for y, var in zip(ys, eqn.outvars[len(carry) :], strict=True):
            self._check_small(var.aval.shape)
            rows = [self.scalars(r).numbers for r in y]
            numbers = np.stack(rows) if rows else np.zeros(var.aval.shape, np.int64)
            stacked.append(Scalars(numbers, var.aval))
        return [*carry, *stacked]

    def _row(self, x: Value, i: int) -> Value:
        if isinstance(x, Known):
            return Known(np.asarray(x.value)[i])
        if isinstance(x, Scalars):
            return Scalars(x.numbers[i], _aval(x.aval.shape[1:], x.aval.dtype))
        aval = _aval(x.aval.shape[1:], x.aval.dtype)
        return self.prepare(lambda a: [a[i]], [x], [aval])[0]

    def _while(self, eqn: Any, values: list[Value]) -> list[Value]:
        """Unrolled as far as its condition is decided while tracing."""
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body, carry = values[:n], values[n : n + m], values[n + m :]
        for _ in range(STEPS):
            (test,) = self.closed(eqn.params["cond_jaxpr"], [*of_cond, *carry])
            number = int(self.scalars(test).numbers)
            if not self.build.is_const(number):
                raise Unsupported(
                    "has a loop whose length depends on an index or on data. Use `jax.lax.fori_loop` with a fixed "
                    "number of steps, and `jnp.where` inside"
                )
            if not self.build.value(number):
                return list(carry)
            carry = self.closed(eqn.params["body_jaxpr"], [*of_body, *carry])
        raise Unsupported(f"has a loop of more than {STEPS} steps")

    def _ruled(self, eqn: Any, values: list[Value]) -> list[Value]:
        """A function with a derivative rule of its own. Rules are about floats."""
        if not any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
            with self._within(eqn) if "_prim" in eqn.params else contextlib.nullcontext():
                return self.closed(_jaxpr.called(eqn), values)
        # A captured number is a value like others: who differentiates sees what it is read from.
        values = [
            self.scalars(v) if isinstance(v, Outer) and v.aval.shape == () else v for v in values
        ]
        start, nested = len(self.build.equations), len(self.regions)
        self.build.enter()  # equations inside are skipped by who runs the rule: nobody else may use them
        try:
            with self._within(eqn) if "_prim" in eqn.params else contextlib.nullcontext():
                inner = [self.scalars(v) for v in self.closed(_jaxpr.called(eqn), values)]
            taken: set[int] = set()
            outputs = [
                Scalars(self._own(o.numbers, start, taken), v.aval)
                for o, v in zip(inner, eqn.outvars, strict=True)
            ]
        finally:
            self.build.leave()
        del self.regions[nested:]
        run = functools.partial(_bind, eqn)
        stop = len(self.build.equations)
        if stop > start:
            self.regions.append(Region(start, stop, run, tuple(values), tuple(outputs)))
        return list(outputs)

    def _own(self, numbers: np.ndarray, start: int, taken: set[int]) -> np.ndarray:
        """With floats that are older than `start`, or an output already, under new numbers: each has its own
        derivative."""
        result = []
        for n in map(int, numbers.reshape(-1)):
            if jnp.issubdtype(self.build.equations[n].dtype, jnp.floating) and (
                n < start or n in taken
            ):
                n = self.build.copy(n)
            taken.add(n)
            result.append(n)
        return _numbers(result, numbers.shape)

    # Random bits: a key's words are values like any others

    def _random(self, eqn: Any, values: list[Value]) -> list[Value]:
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        parts = [self.scalars(v) for v in values]
        if name == "random_unwrap":
            return [Scalars(parts[0].numbers, aval)]
        if name == "random_wrap":
            return [Scalars(parts[0].numbers, aval)]
        function = _random.words_function(eqn)
        specs = [jax.ShapeDtypeStruct(p.numbers.shape, _jaxpr.word_dtype(p.aval)) for p in parts]
        closed = jax.make_jaxpr(function)(*specs)
        words = [
            Scalars(p.numbers, _aval(s.shape, s.dtype)) for p, s in zip(parts, specs, strict=True)
        ]
        with self._within(eqn):
            (result,) = self.closed(closed, words)
        return [Scalars(self.scalars(result).numbers, aval)]

    def _threefry(self, eqn: Any, values: list[Value]) -> list[Value]:
        shape = eqn.outvars[0].aval.shape
        parts = [np.broadcast_to(self.scalars(v).numbers, shape).reshape(-1) for v in values]
        pairs = [
            _random.threefry2x32(self.build, *map(int, one)) for one in zip(*parts, strict=True)
        ]
        return [
            Scalars(_numbers([pair[i] for pair in pairs], shape), eqn.outvars[i].aval)
            for i in (0, 1)
        ]

    def _same(self, eqn: Any, values: list[Value]) -> list[Value]:
        return [
            Scalars(self.scalars(v).numbers, o.aval)
            for v, o in zip(values, eqn.outvars, strict=True)
        ]


def _bind(eqn: Any, *values: Any) -> list:
    return _jaxpr.bind(eqn, values)


def _numbers(flat: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    return np.array(flat, np.int64).reshape(shape)


def _aval(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _fill(value: Any, dtype: Any) -> Any:
    """What jnp's `mode="fill"` gives outside, if nobody said."""
    if value is not None:
        return value
    if jnp.issubdtype(dtype, jnp.floating):
        return np.nan
    if dtype == bool:
        return True
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


def _slice(params, x):
    strides = params["strides"] or [1] * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*b) for b in bounds)]


def _broadcast_in_dim(params, x, *_):
    shape = [1] * len(params["shape"])
    for d, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    return np.broadcast_to(x.reshape(shape), params["shape"])


_MOVES: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "expand_dims": lambda p, x: np.expand_dims(x, p["dimensions"]),
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": _slice,
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
}

# More of them, that know captured arrays only.
_MORE_MOVES = frozenset({"copy", "copy_p", "dynamic_slice", "gather", "split", "unstack"})


def _lowest(dtype):
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


# The row that combines two elements, and the result of none.
_REDUCTIONS: dict[str, tuple[str, Callable]] = {
    "reduce_sum": ("add", lambda _: 0),
    "reduce_prod": ("mul", lambda _: 1),
    "reduce_max": ("max", _lowest),
    "reduce_min": ("min", _highest),
    "reduce_and": ("and", lambda d: True if d == bool else -1),
    "reduce_or": ("or", lambda _: 0),
    "reduce_xor": ("xor", lambda _: 0),
}

_SPECIAL: dict[str, Callable] = {
    "split": Scalariser._split,
    "unstack": Scalariser._unstack,
    "pad": Scalariser._pad,
    "argmax": Scalariser._arg_extreme,
    "argmin": Scalariser._arg_extreme,
    "cumsum": Scalariser._cumulative,
    "cumprod": Scalariser._cumulative,
    "cummax": Scalariser._cumulative,
    "cummin": Scalariser._cumulative,
    "dot_general": Scalariser._dot_general,
    "dynamic_slice": Scalariser._dynamic_slice,
    "dynamic_update_slice": Scalariser._dynamic_update_slice,
    "gather": Scalariser._gather,
    "cond": Scalariser._cond,
    "scan": Scalariser._scan,
    "while": Scalariser._while,
    "random_bits": Scalariser._random,
    "random_fold_in": Scalariser._random,
    "random_split": Scalariser._random,
    "random_seed": Scalariser._random,
    "random_wrap": Scalariser._random,
    "random_unwrap": Scalariser._random,
    "threefry2x32": Scalariser._threefry,
    "copy": Scalariser._same,
    "copy_p": Scalariser._same,
    "optimization_barrier": Scalariser._same,
    "pvary": Scalariser._same,
}
