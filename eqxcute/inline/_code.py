"""`Code`: a scalar function as a list of equations, free of arrays, addresses and names.

Two functions that compute the same in the same way have equal codes, whoever wrote them: code is what kernels are
compiled from, and its text is their compile key. Sizes of captured arrays are not in it, so that a longer array is no
other code.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import _logic, _table
from ._interval import Interval, everything, point

# What kernels compute with.
DTYPES = frozenset(
    {"bool", "float16", "bfloat16", "float32", "float64"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)


class Equation(NamedTuple):
    """One value: `op` of earlier values, which are known by their number in the list.

    Besides the rows of the table, `op` is one of

    - `argument`, with `name`;
    - `const`, with `bits`, the number's memory as an integer;
    - `read`, of captured array `operand` at the indices `inputs`, each clamped to the array, as JAX clamps;
    - `size`, int32, of `operand` along `dim`;
    - `opaque`, a value that this compiler cannot compute; `why` says what it met.
    """

    op: str
    dtype: str
    inputs: tuple[int, ...] = ()
    params: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, key):  # a parameter by its name
        return dict(self.params)[key] if isinstance(key, str) else tuple.__getitem__(self, key)


class Argument(NamedTuple):
    """A scalar that the function is called with. `low`: no value is below it (indices start at 0). `high`: none is above."""

    name: str
    dtype: str
    low: int | None = None
    high: int | None = None

    @property
    def interval(self) -> Interval:
        found = _anything(self.dtype)
        if self.low is not None:
            found = found._replace(lo=np.asarray(self.low, self.dtype)[()])
        if self.high is not None:
            found = found._replace(hi=np.asarray(self.high, self.dtype)[()])
        return found


class Operand(NamedTuple):
    """A captured array. Its sizes are known at run time only."""

    dtype: str
    rank: int


@dataclasses.dataclass(frozen=True)
class Code:
    """`results` are numbers of equations. All of it is plain data: it hashes and compares by value."""

    arguments: tuple[Argument, ...]
    operands: tuple[Operand, ...]
    equations: tuple[Equation, ...]
    results: tuple[int, ...]

    @functools.cached_property
    def text(self) -> str:
        """Readable, and the same for equal codes only."""
        head = ", ".join(
            f"{a.name}:{a.dtype}"
            + ("" if a.low is None else f">={a.low}")
            + ("" if a.high is None else f"<={a.high}")
            for a in self.arguments
        )
        operands = ", ".join(
            f"o{i}:{o.dtype}[{','.join(':' * o.rank)}]" for i, o in enumerate(self.operands)
        )
        lines = [f"({head}; {operands})"]
        for i, e in enumerate(self.equations):
            params = "".join(f" {k}={v}" for k, v in e.params)
            inputs = "".join(f" v{n}" for n in e.inputs)
            shown = f"  # {constant(e)}" if e.op == "const" else ""
            lines.append(f"v{i}:{e.dtype} = {e.op}{params}{inputs}{shown}")
        lines.append("return " + ", ".join(f"v{n}" for n in self.results))
        return "\n".join(lines)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the text, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @functools.cached_property
    def dependences(self) -> tuple[frozenset[str], ...]:
        """For each equation the names of the arguments that it depends on."""
        found: list[frozenset[str]] = []
        for e in self.equations:
            own = frozenset([e["name"]]) if e.op == "argument" else frozenset()
            found.append(own.union(*(found[n] for n in e.inputs)))
        return tuple(found)

    @property
    def depends(self) -> frozenset[str]:
        """The names of the arguments that any result depends on."""
        return frozenset().union(*(self.dependences[n] for n in self.results))

    @property
    def opaque(self) -> tuple[str, ...]:
        """Why this code cannot become device code: empty, if it can."""
        return tuple(dict.fromkeys(e["why"] for e in self.equations if e.op == "opaque"))

    def __str__(self):
        return self.text


def constant(equation: Equation) -> np.generic:
    """The number that a `const` equation holds."""
    dtype = jnp.dtype(equation.dtype)
    return np.frombuffer(equation["bits"].to_bytes(dtype.itemsize, "little"), dtype)[0]


def bits_of(value: Any, dtype: Any) -> int:
    return int.from_bytes(np.asarray(value, dtype).tobytes(), "little")


class Builder:
    """Makes code, one equation at a time: equal ones are shared, and what intervals decide is decided.

    Between `enter` and `leave` new equations are a region's own (see `Region`): what comes after does not share them.
    """

    def __init__(self, limit: int = 50_000):
        self.equations: list[Equation] = []
        self.intervals: list[Interval] = []
        self.operands: list[Operand] = []
        self.limit = limit
        self._known: list[dict[Equation, int]] = [{}]

    def enter(self) -> None:
        """From here to `leave`, new equations are not shared with what comes after."""
        self._known.append({})

    def leave(self) -> None:
        self._known.pop()

    def argument(self, argument: Argument) -> int:
        equation = Equation("argument", argument.dtype, params=(("name", argument.name),))
        return self._append(equation, argument.interval)

    def const(self, value: Any, dtype: Any) -> int:
        name = _name(dtype)
        equation = Equation("const", name, params=(("bits", bits_of(value, dtype)),))
        return self._append(equation, _point(equation))

    def size(self, operand: int, dim: int) -> int:
        equation = Equation("size", "int32", params=(("operand", operand), ("dim", dim)))
        return self._append(equation, Interval(np.int32(1), np.int32(2**31 - 1), np.False_))

    def read(self, operand: int, indices: Sequence[int]) -> int:
        dtype = self.operands[operand].dtype
        equation = Equation("read", dtype, tuple(indices), (("operand", operand),))
        return self._append(equation, everything(dtype))

    def opaque(self, dtype: Any, why: str, inputs: Sequence[int] = ()) -> int:
        """Never shared: `inputs` say what it depends on."""
        name = _name(dtype)
        equation = Equation("opaque", name, tuple(inputs), (("why", why),))
        return self._append(equation, _anything(name), share=False)

    def copy(self, n: int) -> int:
        """The same value under a number of its own."""
        equation = Equation("copy", self.equations[n].dtype, (n,))
        return self._append(equation, self.intervals[n], share=False)

    def back(self, count: int) -> None:
        """Forgets all but the first `count` equations."""
        for n in range(count, len(self.equations)):
            for scope in self._known:
                if scope.get(self.equations[n], -1) >= count:
                    del scope[self.equations[n]]
        del self.equations[count:], self.intervals[count:]

    def op(self, name: str, *inputs: int, **params: Any) -> int:
        """A row of the table. Returns an older value if that is what it must be."""
        name, inputs = _logic.compared(self, name, inputs)
        intervals = tuple(self.intervals[n] for n in inputs)
        same = _simpler(self, name, inputs, intervals, params)
        if same is None and name in ("not", "and", "or"):
            same = _logic.combined(self, name, inputs)
        if same is not None:
            return same
        dtypes = tuple(self.equations[n].dtype for n in inputs)
        given = tuple(sorted(params.items()))
        dtype, interval = _bounded(_table.ROWS[name], dtypes, intervals, given)
        if interval.lo == interval.hi and not _is_float(dtype):
            return self.const(interval.lo, dtype)
        return self._append(Equation(name, dtype, inputs, given), interval)

    def find(self, name: str, inputs: tuple[int, ...]) -> int | None:
        """The number of a boolean equation without parameters, if it is there."""
        equation = Equation(name, "bool", inputs)
        for scope in reversed(self._known):
            if equation in scope:
                return scope[equation]
        return None

    def is_const(self, n: int) -> bool:
        return self.equations[n].op == "const"

    def value(self, n: int) -> np.generic:
        return constant(self.equations[n])

    def _append(self, equation: Equation, interval: Interval, share: bool = True) -> int:
        if share:
            for scope in reversed(self._known):
                if equation in scope:
                    return scope[equation]
        if len(self.equations) >= self.limit:
            raise TooLong
        self.equations.append(equation)
        self.intervals.append(interval)
        if share:
            self._known[-1][equation] = len(self.equations) - 1
        return len(self.equations) - 1


@functools.cache
def _name(dtype: Any) -> str:
    return jnp.dtype(dtype).name


@functools.cache
def _is_float(dtype: str) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _anything(dtype: str) -> Interval:
    """Also of what kernels do not compute with: complex numbers, 4 and 8 bits."""
    return everything(dtype) if dtype in DTYPES else Interval(np.False_, np.True_, np.True_)


def _scalars(interval: Interval) -> Interval:
    """Hashable ones."""
    return Interval(*(np.asarray(x)[()] for x in interval))


@functools.lru_cache(1 << 12)
def _point(equation: Equation) -> Interval:
    return _scalars(point(constant(equation)))


@functools.lru_cache(1 << 14)
def _bounded(
    row: _table.Row, dtypes: tuple[str, ...], intervals: tuple[Interval, ...], params: tuple
) -> tuple[str, Interval]:
    """The result's dtype and what it can be. Loops and random bits ask the same a hundred times."""
    dtype = jnp.dtype(row.dtype(*dtypes, **dict(params)))
    with np.errstate(all="ignore"):
        return dtype.name, _scalars(row.bound(np, dtype, *intervals, **dict(params)))


class TooLong(Exception):
    """More equations than a kernel should be made of."""


def _simpler(
    build: Builder, name: str, inputs: Sequence[int], intervals: Sequence[Interval], params: Mapping
) -> int | None:
    """An older value that `name` of `inputs` always equals. Integers and booleans only, but for selections."""
    if name == "select_n" and intervals[0].lo == intervals[0].hi:
        return inputs[1 + int(intervals[0].lo)]
    if name == "select_n" and len(set(inputs[1:])) == 1:
        return inputs[1]
    kind = build.equations[inputs[0]].dtype
    if name == "copy" or (name == "convert_element_type" and params["new_dtype"] == kind):
        return inputs[0]
    if _is_float(kind):
        return None
    if name == "wrap" and intervals[0].lo >= 0:
        return inputs[0]
    if name in ("max", "min"):
        for i, other in ((0, 1), (1, 0)):
            a, b = intervals[i], intervals[other]
            if (a.lo >= b.hi) if name == "max" else (a.hi <= b.lo):
                return inputs[i]
    zero = [i for i in (0, 1) if len(inputs) == 2 and intervals[i].lo == intervals[i].hi == 0]
    if name == "add" and zero:
        return inputs[1 - zero[0]]
    if name in ("sub", "shift_left", "shift_right_logical", "shift_right_arithmetic") and zero == [
        1
    ]:
        return inputs[0]
    if name == "mul" and len(inputs) == 2:
        for i in (0, 1):
            if intervals[i].lo == intervals[i].hi == 1:
                return inputs[1 - i]
    # What a boolean leaves as it is: True & x, False | x, True == x, False != x.
    neutral = {"and": True, "or": False, "eq": True, "ne": False, "xor": False}
    if kind == "bool" and name in neutral:
        for i in (0, 1):
            if intervals[i].lo == intervals[i].hi == neutral[name]:
                return inputs[1 - i]
    if name == "ne" and zero == [1]:
        source = build.equations[inputs[0]]
        if (
            source.op == "convert_element_type"
            and build.equations[source.inputs[0]].dtype == "bool"
        ):
            return source.inputs[0]
    return None


def pruned(
    arguments: Sequence[Argument],
    operands: Sequence[Operand],
    equations: Sequence[Equation],
    results: Sequence[int],
    keep: Sequence[int] = (),
) -> tuple[Code, Mapping[int, int], list[int]]:
    """The code without what no result needs. `keep`: more numbers that must stay.

    Returns the code, the new number of each equation that is left, and the old numbers of the operands left.
    """
    needed = set(results) | set(keep)
    for n in reversed(range(len(equations))):
        if n in needed:
            needed.update(equations[n].inputs)
    order = sorted(needed)
    number = {old: new for new, old in enumerate(order)}
    used = sorted({equations[n]["operand"] for n in order if equations[n].op in ("read", "size")})
    operand = {old: new for new, old in enumerate(used)}

    def renumbered(e: Equation) -> Equation:
        params = tuple((k, operand[v] if k == "operand" else v) for k, v in e.params)
        return Equation(e.op, e.dtype, tuple(number[n] for n in e.inputs), params)

    code = Code(
        tuple(arguments),
        tuple(operands[k] for k in used),
        tuple(renumbered(equations[n]) for n in order),
        tuple(number[n] for n in results),
    )
    return code, number, used
