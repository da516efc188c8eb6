"""A mask and a score as static fields of kernels: what the compile key sees of them, and what device code reads."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcute._sharding import whole
from eqxcute.inline import Argument, Code, Derivative, Equation, Program, Read, differentiate
from eqxcute.inline._values import Outer

Columns = tuple[int, ...]  # of `rows`: one for each leading dim that an array has from `jax.vmap`


class Derived(NamedTuple):
    """The derivative of a score: `code` has the operands of the score's.

    Its first result is d score / d argument; each of `reads` names its others. `indices` are as many as the
    array has dims, those that `jax.vmap` added first.
    """

    code: Code
    reads: tuple[Read, ...]


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Function:
    """A program of prepared arrays. The compile key sees its fields, and so its code alone.

    Two are equal only if they are differentiated alike too: with derivative rules of its own, a function is equal
    to itself.

    - `program`: For JAX. Its captured arrays are the kernel's operands: first those that the code reads, then those
        that derivative rules get whole.
    - `maps`: Of each array, along which columns of `rows` `jax.vmap` has mapped it.
    """

    digest: str
    derived_digest: str

    def __init__(
        self, program: Program, maps: tuple[Columns, ...], derivative: Derivative | None = None
    ):
        self.program, self.maps, self.derivative = program, maps, derivative
        self.digest = self.code.digest
        self.derived_digest = "" if derivative is None else self.derived().code.digest

    def __repr__(self):
        return f"Function({self.digest})"

    def _key(self):
        rules = tuple(map(id, self.program.regions))
        return self.digest, self.derived_digest, self.program.code.digest, self.maps, rules

    def __eq__(self, other):
        return isinstance(other, Function) and (self is other or self._key() == other._key())

    def __hash__(self):
        return hash((self.digest, self.maps))

    @functools.cached_property
    def code(self) -> Code:
        """What kernels are made of. What reads mapped arrays has arguments `v1`, `v2`, ...: the columns of `rows`."""
        return _with_columns(self.program.code, self.maps)

    def derived(self, wanted: Sequence[bool] | None = None) -> Derived:
        """The derivative, and of its reads those of the `wanted` arrays. By default all.

        **Raises:**

        `eqxcute.InlineError` where there is none.
        """
        found = self.derivative or differentiate(self.program)
        code = _with_columns(found.program.code, self.maps)
        shift = len(code.equations) - len(found.program.code.equations)
        columns = {c: n for n, c in enumerate(_columns(self.maps))}
        results, reads = [code.results[0]], []
        for read in found.reads:
            if wanted is not None and not wanted[read.operand]:
                continue
            first = len(results)
            own = [columns[c] for c in self.maps[read.operand]]
            own += [found.program.code.results[i] + shift for i in read.indices]
            results += [code.results[read.derivative], *own]
            reads.append(Read(read.operand, first, tuple(range(first + 1, first + 1 + len(own)))))
        return Derived(dataclasses.replace(code, results=tuple(results)), tuple(reads))

    def differentiated(self, beside: Sequence[Any] = ()) -> "Function":
        """The same, its derivative in the compile key. `beside`: as for `trace`."""
        found = self.derivative or differentiate(self.program, beside=beside)
        return Function(self.program, self.maps, found)

    def over_axis(self, column: int, flags: Sequence[bool]) -> "Function":
        """With one more mapped axis in front of the arrays that have a True."""
        maps = tuple((column, *m) if f else m for m, f in zip(self.maps, flags, strict=True))
        return Function(self.program, maps, self.derivative)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the arrays that the kernel takes."""
        code = self.program.code
        inside = {
            v.number: len(v.aval.shape)
            for r in self.program.regions
            for v in r.inputs
            if isinstance(v, Outer)
        }
        known = inside | {i: o.rank for i, o in enumerate(code.operands)}
        return tuple(known[i] + len(m) for i, m in enumerate(self.maps))

    @property
    def by_row(self) -> tuple[bool, ...]:
        """Of which arrays `for_rows` has one a row."""
        return tuple(map(bool, self.maps))

    def for_rows(self, arrays: Sequence[Any], rows: jax.Array) -> tuple[Any, ...]:
        """The arrays, mapped ones taken apart: what belongs to a row of the batch, along the first axis."""
        return tuple(
            x if not m or x is None else x.at[tuple(rows[:, c] for c in m)].get(mode="clip")
            for x, m in zip(arrays, self.maps, strict=True)
        )


def _columns(maps: Sequence[Columns]) -> list[int]:
    return sorted({c for m in maps for c in m})


def _with_columns(code: Code, maps: Sequence[Columns]) -> Code:
    columns = _columns(maps)
    if not columns:
        return code
    added = [Argument(f"v{c}", "int32", low=0) for c in columns]
    number = {c: n for n, c in enumerate(columns)}

    def moved(e: Equation) -> Equation:
        inputs = tuple(n + len(added) for n in e.inputs)
        params = dict(e.params)
        if e.op == "read":
            inputs = (*(number[c] for c in maps[e["operand"]]), *inputs)
        if e.op == "size":
            params["dim"] += len(maps[e["operand"]])
        return e._replace(inputs=inputs, params=tuple(params.items()))

    first = [Equation("argument", a.dtype, params=(("name", a.name),)) for a in added]
    operands = [o._replace(rank=o.rank + len(m)) for o, m in zip(code.operands, maps, strict=False)]
    return Code(
        (*code.arguments, *added),
        tuple(operands),
        (*first, *map(moved, code.equations)),
        tuple(n + len(added) for n in code.results),
    )


def compiled(program: Program, captured: Sequence[Any]) -> tuple[Function, tuple[jax.Array, ...]]:
    """The function of a traced program, and the arrays that its kernel takes."""
    numbers = (*program.operands, *sorted(_whole_arrays(program).difference(program.operands)))
    place = {n: i for i, n in enumerate(numbers)}

    def moved(v):
        return v._replace(number=place[v.number]) if isinstance(v, Outer) else v

    prepared = dataclasses.replace(
        program,
        # What is computed before the kernel may hold arrays.
        steps=(),
        operands=tuple(range(len(program.operands))),
        regions=tuple(r._replace(inputs=tuple(map(moved, r.inputs))) for r in program.regions),
    )
    outside = program.environment(captured)
    arrays = tuple(whole(jnp.asarray(outside[n])) for n in numbers)
    return Function(prepared, ((),) * len(arrays)), arrays


def _whole_arrays(program: Program) -> set[int]:
    """Numbers of the arrays that derivative rules of the program's own get whole."""
    return {v.number for r in program.regions for v in r.inputs if isinstance(v, Outer)}


# Of floats, what is an instruction or two.
ARITHMETIC = frozenset(
    "abs add clamp convert_element_type div max min mul neg select_n sign square sub".split()
) | {"argument", "const"}


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a kernel does to scores. None: nothing."""

    mask: Function | None
    score: Function | None

    @property
    def mask_code(self) -> Code | None:
        return None if self.mask is None else self.mask.code

    @property
    def score_code(self) -> Code | None:
        return None if self.score is None else self.score.code

    @property
    def costly_score(self) -> bool:
        """Whether the score takes more than arithmetic for each pair: a special function, or a read of memory."""
        code = self.score_code
        if code is None:
            return False
        for e, names in zip(code.equations, code.dependences, strict=True):
            of_pair = "score" in names or {"q_idx", "kv_idx"} <= names
            if of_pair and (e.op == "read" or ("float" in e.dtype and e.op not in ARITHMETIC)):
                return True
        return False

    def derived(self, wanted: Sequence[bool]) -> Derived | None:
        """The score's derivative in itself and in the `wanted` ones of its arrays."""
        return None if self.score is None else self.score.derived(wanted)

    def mask_operands(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Of the arrays that the kernel was given, those that the mask's code reads."""
        return tuple(arrays[: len(self.mask_code.operands)]) if self.mask_code else ()

    def score_operands(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Of the arrays that the kernel was given, those that the score's code reads."""
        return tuple(arrays[: len(self.score_code.operands)]) if self.score_code else ()

    def differentiated(self, beside: Sequence[Any] = ()) -> "Functions":
        """The same, the score's derivative in the compile key. `beside`: as for `trace`."""
        score = None if self.score is None else self.score.differentiated(beside)
        return Functions(self.mask, score)
