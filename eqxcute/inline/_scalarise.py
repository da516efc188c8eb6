"""From a jaxpr to code: calls inlined, loops unrolled, small arrays taken apart into scalars.

Walking a jaxpr needs names that JAX does not promise to keep. They stand in this file, in `_arrays.py`, `_indexing.py`
and `_jaxpr.py`.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from . import _arrays, _indexing, _jaxpr, _random, _table
from ._code import DTYPES, Builder, Operand, TooLong
from ._values import (
    ELEMENTS,
    STEPS,
    Known,
    Outer,
    Region,
    Scalars,
    Step,
    Unsupported,
    Value,
    abstract,
    abstract_of,
    numbered,
)


class Scalariser:
    """Holds the code as it grows. `equation` is the one place where a primitive's name decides."""

    def __init__(self, build: Builder, where: Callable[[Any], str]):
        self.build = build
        self.where = where
        self.steps: list[Step] = []
        self.regions: list[Region] = []
        self.operands: list[int] = []  # numbers of Outer values that are read
        self.outers = 0
        self._inside = ""  # where the function of JAX that we are in is called
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
            _check_dtype(_jaxpr.word_dtype(value.value))
            aval = abstract(np.shape(value.value), value.value.dtype)
            array = _jaxpr.words(value.value)
            self._check_small(array.shape)
            numbers = [self.build.const(x, array.dtype) for x in array.reshape(-1)]
            return Scalars(numbered(numbers, array.shape), aval)
        if _jaxpr.is_key(value.aval):
            return self._key_words(value)
        self._check_small(value.aval.shape)
        indices = [
            [self.build.const(i, np.int32) for i in index] for index in np.ndindex(value.aval.shape)
        ]
        numbers = [_indexing.read(self, value, index) for index in indices]
        return Scalars(numbered(numbers, value.aval.shape), value.aval)

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

    def operand(self, number: int, aval: Any) -> int:
        """The operand of the code that a captured array is, or one made from some."""
        if number not in self.operands:
            shape = aval.shape
            _check_dtype(aval.dtype)
            if any(n > 2**31 - 1 for n in shape):
                raise Unsupported(
                    f"a captured array has shape {tuple(shape)}, and a kernel counts to 2**31 - 1 along a dim. "
                    "Give it two dims, `table[i // n, i % n]`"
                )
            self.operands.append(number)
            self.build.operands.append(Operand(jnp.dtype(aval.dtype).name, len(shape)))
        return self.operands.index(number)

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
            (outer,) = self.prepare(lambda: [const], [], [abstract_of(const)])
            self._constants[id(const)] = const, outer
        return self._constants[id(const)][1]

    def equation(self, eqn: Any, values: list[Value]) -> list[Value]:
        # What has an effect, such as `axis_index` in a shard_map, is known when it runs only.
        if not eqn.effects and all(isinstance(v, Known) for v in values):
            with jax.core.eval_context(), jax.default_device(_jaxpr.host()):
                known = [v.value for v in values if isinstance(v, Known)]
                return [Known(x) for x in _jaxpr.bind(eqn, known)]
        name = eqn.primitive.name
        if not any(isinstance(v, Scalars) for v in values):
            if name in _jaxpr.CALLS:
                return self.closed(_jaxpr.called(eqn), values)
            avals = [v.aval for v in eqn.outvars]
            moves = name in _arrays.MOVES or name in _MORE_MOVES
            whole = [v for v in values if not isinstance(v, Scalars)]
            outputs = self.prepare(functools.partial(_bind, eqn), whole, avals, moves)
            if moves and len(outputs) == 1:
                outputs = [outputs[0]._replace(view=_indexing.view(eqn, values))]
            return list(outputs)
        equations, regions = len(self.build.equations), len(self.regions)
        try:
            return self._of_scalars(eqn, values)
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
        """The user's line. What is inside one of JAX's own functions has that of the call."""
        return self._inside or self.where(eqn)

    @contextlib.contextmanager
    def _within(self, eqn: Any):
        before, self._inside = self._inside, self.place(eqn)
        try:
            yield
        finally:
            self._inside = before

    def _opaque(self, eqn: Any, values: list[Value], why: str) -> list[Value]:
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
            outputs.append(Scalars(numbered(numbers, shape), aval))
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
            return self._called(eqn, values)
        if name in _jaxpr.RULED:
            return self._ruled(eqn, values)
        special = _arrays.SPECIAL.get(name) or _SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, values)
        if name in _table.EXPANSIONS:
            return [self._expanded(eqn, values)]
        name = _table.SYNONYMS.get(name, name)
        if name in _table.ROWS:
            row = _table.ROWS[name]
            kept = {k: _jaxpr.plain(params[k]) for k in row.params}
            _check_row(eqn, kept)
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
        for v in (*eqn.invars, *eqn.outvars):
            _check_dtype(_jaxpr.word_dtype(v.aval))
        shape, parts = _jaxpr.word_shape(aval), []
        if not shape:
            number = combine(*(int(self.scalars(v).numbers) for v in values))
            return Scalars(np.array(number, np.int64), aval)
        words = len(shape) - len(aval.shape)
        for v, of in zip(values, eqn.invars, strict=True):
            p = self.scalars(v).numbers
            if words and not _jaxpr.is_key(of.aval):  # the choice between keys
                p = p[..., *[None] * words]
            parts.append(np.broadcast_to(p, shape).reshape(-1))
        return Scalars(
            numbered([combine(*map(int, one)) for one in zip(*parts, strict=True)], shape), aval
        )

    def _expanded(self, eqn: Any, values: list[Value]) -> Scalars:
        const = functools.partial(self.build.const, dtype=eqn.invars[0].aval.dtype)
        expand = functools.partial(_table.EXPANSIONS[eqn.primitive.name], self.build.op, const)
        return self._mapped(eqn, expand, values)

    def _power(self, eqn: Any, values: list[Value]) -> list[Value]:
        """An integer exponent is converted first, as JAX does."""
        kind = jnp.dtype(eqn.invars[0].aval.dtype).name

        def power(x, y):
            return self.build.op("pow", x, self.build.op("convert_element_type", y, new_dtype=kind))

        return [self._mapped(eqn, power, values)]

    def _ordered(self, eqn: Any, values: list[Value]) -> list[Value]:
        """JAX's total order, in which -0.0 is below 0.0, and NaN above or below all, as its sign says."""
        build, name = self.build, eqn.primitive.name
        dtype = jnp.dtype(eqn.invars[0].aval.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return [self._elementwise(eqn, name.removesuffix("_to"), values)]
        whole = jnp.dtype(f"int{8 * dtype.itemsize}")

        def key(x):  # integers of the same order
            bits = build.op("bitcast_convert_type", x, new_dtype=whole.name)
            flipped = build.op("xor", bits, build.const(jnp.iinfo(whole).max, whole))
            return build.op("select_n", build.op("lt", bits, build.const(0, whole)), bits, flipped)

        def below(x, y):
            nan = build.op("or", build.op("ne", x, x), build.op("ne", y, y))
            by_bits = build.op("lt", key(x), key(y))
            zeros = build.op("and", build.op("eq", x, y), by_bits)
            return build.op("select_n", nan, build.op("or", build.op("lt", x, y), zeros), by_bits)

        order = {
            "lt_to": below,
            "le_to": lambda x, y: build.op("not", below(y, x)),
            "eq_to": lambda x, y: build.op("eq", key(x), key(y)),
        }
        return [self._mapped(eqn, order[name], values)]

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
            outputs.append(Scalars(numbered(chosen, results[0][i].numbers.shape), var.aval))
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
            return Scalars(x.numbers[i], abstract(x.aval.shape[1:], x.aval.dtype))
        aval = abstract(x.aval.shape[1:], x.aval.dtype)
        (row,) = self.prepare(lambda a: [a[i]], [x], [aval], moves=True)
        return row._replace(view=_indexing.row(x, i))

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
            return self._called(eqn, values)
        # A captured number is a value like others: who differentiates sees what it is read from.
        values = [
            self.scalars(v) if isinstance(v, Outer) and v.aval.shape == () else v for v in values
        ]
        return self._region(eqn, values, lambda: self._called(eqn, values))

    def _region(
        self, eqn: Any, values: Sequence[Value], compute: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """What `compute` says for a kernel, and the equation as it is under JAX."""
        start, nested = len(self.build.equations), len(self.regions)
        self.build.enter()  # equations inside are skipped by who runs the rule: nobody else may use them
        try:
            inner = [self.scalars(v) for v in compute()]
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

    def _called(self, eqn: Any, values: list[Value]) -> list[Value]:
        closed = _jaxpr.called(eqn)
        if not _jaxpr.is_of_jax(eqn, closed):
            return self.closed(closed, values)
        with self._within(eqn):
            return self.closed(closed, values)

    def _own(self, numbers: np.ndarray, start: int, taken: set[int]) -> np.ndarray:
        """The outputs of a region from `start` on, under numbers that say no more than that.

        A float that is older, or an output already, has its own derivative here. An integer or boolean must hide what
        it is made of inside: the builder simplifies by looking at that.
        """
        result, equations = [], self.build.equations
        for n in map(int, numbers.reshape(-1)):
            is_float = jnp.issubdtype(equations[n].dtype, jnp.floating)
            hides = n >= start and equations[n].inputs
            if (n < start or n in taken) if is_float else hides:
                n = self.build.copy(n)
            taken.add(n)
            result.append(n)
        return numbered(result, numbers.shape)

    # Random bits: a key's words are values like any others

    def _random(self, eqn: Any, values: list[Value]) -> list[Value]:
        """JAX calls its own function: XLA takes minutes over the bits of many counters as equations."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        if name in ("random_wrap", "random_unwrap", "random_clone"):
            return [Scalars(self.scalars(values[0]).numbers, aval)]
        parts = [self.scalars(v) for v in values]
        function = _random.words_function(eqn)
        specs = [jax.ShapeDtypeStruct(p.numbers.shape, _jaxpr.word_dtype(p.aval)) for p in parts]
        closed = jax.make_jaxpr(function)(*specs)
        words = [
            Scalars(p.numbers, abstract(s.shape, s.dtype))
            for p, s in zip(parts, specs, strict=True)
        ]

        def bits() -> list[Value]:
            with self._within(eqn):
                (result,) = self.closed(closed, words)
            return [Scalars(self.scalars(result).numbers, aval)]

        return self._region(eqn, parts, bits)

    def _threefry(self, eqn: Any, values: list[Value]) -> list[Value]:
        shape = eqn.outvars[0].aval.shape
        parts = [self.scalars(v) for v in values]
        flat = [np.broadcast_to(p.numbers, shape).reshape(-1) for p in parts]

        def words() -> list[Value]:
            pairs = [
                _random.threefry2x32(self.build, *map(int, one)) for one in zip(*flat, strict=True)
            ]
            return [
                Scalars(numbered([pair[i] for pair in pairs], shape), eqn.outvars[i].aval)
                for i in (0, 1)
            ]

        return self._region(eqn, parts, words)

    def _same(self, eqn: Any, values: list[Value]) -> list[Value]:
        return [
            Scalars(self.scalars(v).numbers, o.aval)
            for v, o in zip(values, eqn.outvars, strict=True)
        ]


def _bind(eqn: Any, *values: Any) -> list:
    return _jaxpr.bind(eqn, values)


def _check_dtype(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in DTYPES:
        raise Unsupported(
            f"computes with {dtype}: kernels compute with bool, integers, float16, bfloat16 and float32"
        )


def _check_row(eqn: Any, params: dict) -> None:
    """What of a primitive its row does not compute."""
    if eqn.params.get("out_dtype") not in (None, eqn.invars[0].aval.dtype):
        raise Unsupported("multiplies into another dtype: convert the numbers first")
    if eqn.primitive.name == "bitcast_convert_type":
        sizes = [jnp.dtype(v.aval.dtype).itemsize for v in (eqn.invars[0], eqn.outvars[0])]
        if sizes[0] != sizes[1]:
            raise Unsupported("takes a number's bits apart: use shifts and `&`")
    if eqn.primitive.name == "reduce_precision":
        kept = (params["exponent_bits"], params["mantissa_bits"])
        if kept not in ((8, 7), (5, 10), (8, 23)):
            raise Unsupported(
                f"rounds to {kept[0]} and {kept[1]} bits: kernels have bfloat16's, float16's, float32's"
            )


# Moves besides those of small arrays.
_MORE_MOVES = frozenset({"copy", "copy_p", "dynamic_slice", "gather", "split", "unstack"})


_SPECIAL: dict[str, Callable[..., list[Value]]] = {
    "dynamic_slice": _indexing.dynamic_slice,
    "gather": _indexing.gather,
    "cond": Scalariser._cond,
    "scan": Scalariser._scan,
    "while": Scalariser._while,
    "pow": Scalariser._power,
    "threefry2x32": Scalariser._threefry,
    **dict.fromkeys(("lt_to", "le_to", "eq_to"), Scalariser._ordered),
    **dict.fromkeys(
        (
            *("random_bits", "random_fold_in", "random_split", "random_seed"),
            *("random_wrap", "random_unwrap", "random_clone"),
        ),
        Scalariser._random,
    ),
    # What says something about a value, and leaves it as it is.
    **dict.fromkeys(
        (
            "copy",
            "copy_p",
            "name",
            "optimization_barrier",
            "pvary",
            "reshard",
            "sharding_constraint",
        ),
        Scalariser._same,
    ),
}
