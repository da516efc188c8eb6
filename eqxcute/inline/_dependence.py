"""How an index depends on the row and the column of a pair: which pairs of a tile meet at one place of an array.

An abstract walk over the equations. An integer is, as far as it is known,

    _Sum(r, c)     r row + c column + something that depends on neither, modulo 2^bits;
    DISTANCE       a function of row - column and of what depends on neither;
    OTHER          anything

and what has inputs of the second kind only, or of the first with r + c = 0, is of the second.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import jax.numpy as jnp

from ._code import Code, Equation, constant

Kind = Literal["head", "row", "column", "distance", "entry", "pair"]


class _Sum(NamedTuple):
    row: int
    column: int
    exact: bool = False  # of whole numbers: nothing has wrapped around


FREE: Final = _Sum(0, 0, True)
DISTANCE: Final = "distance"
OTHER: Final = "other"


def index_kind(
    code: Code,
    numbers: Sequence[int],
    *,
    row: str = "q_idx",
    column: str = "kv_idx",
    inner: Sequence[str] = ("score",),
) -> Kind:
    """What the indices of one place in an array depend on.

    **Arguments:**

    - `code`: Some of whose results are indices.
    - `numbers`: Which ones, as in `Read.indices`.
    - `row`, `column`: The arguments that say where in a tile a pair is. (Keyword only arguments.)
    - `inner`: Arguments that differ from pair to pair. (Keyword only argument.)

    **Returns:**

    - `"head"`: on neither row nor column;
    - `"row"`, `"column"`: on one of them;
    - `"distance"`: on both, through `row - column` alone. That is proved, for all values that are not negative;
    - `"entry"`: on one of them in one dim, and on the other in another, evenly: pairs meet where indices are clamped only;
    - `"pair"`: otherwise.
    """
    places = [code.results[n] for n in numbers]
    names = frozenset().union(*(code.dependences[n] for n in places))
    if names.intersection(inner):
        return "pair"
    if not names.intersection((row, column)):
        return "head"
    if not {row, column} <= names:
        return "row" if row in names else "column"
    found = _walk(code, {row: _Sum(1, 0, True), column: _Sum(0, 1, True)}, inner)
    if all(_is_distance(found[n]) for n in places):
        return "distance"
    steps = [_step(code, found, n) for n in places]
    return "entry" if {(True, False), (False, True)} <= set(steps) else "pair"


def _step(code: Code, found: list, n: int) -> tuple[bool, bool]:
    """Whether an index grows evenly with the row, and with the column, but for clamps and for those below 0."""
    e = code.equations[n]
    if e.op in ("min", "max", "wrap"):
        inner = [i for i in e.inputs if found[i] != FREE]
        if len(inner) == 1:
            return _step(code, found, *inner)
    x = found[n]
    return (x.row != 0, x.column != 0) if isinstance(x, _Sum) else (False, False)


def _walk(code: Code, given: dict[str, _Sum], inner: Sequence[str]) -> list:
    known = {**given, **dict.fromkeys(inner, OTHER)}
    found: list = []
    for e in code.equations:
        inputs = [found[n] for n in e.inputs]
        if e.op == "argument":
            found.append(known.get(e["name"], FREE))
        elif e.op == "opaque":
            found.append(OTHER)
        elif all(x == FREE for x in inputs):
            found.append(FREE)
        else:
            found.append(_sum(code, e, inputs) or _rest(inputs))
    return found


def _rest(inputs: Sequence):
    """Of any function of the inputs."""
    return DISTANCE if all(map(_is_distance, inputs)) else OTHER


def _is_distance(x) -> bool:
    return x == DISTANCE or (isinstance(x, _Sum) and x.row + x.column == 0)


def _sum(code: Code, e: Equation, inputs: Sequence):
    """Where sums stay sums, or compare as one. None: nothing is known that `_rest` does not know."""
    kinds = {code.equations[n].dtype for n in e.inputs}
    if not all(isinstance(x, _Sum) for x in inputs) or not all(map(_is_integer, kinds)):
        return None
    if e.op == "neg":
        return _Sum(-inputs[0].row, -inputs[0].column)
    if e.op == "convert_element_type" and _is_integer(e.dtype):
        # A wider integer does not wrap around where the narrow one did.
        narrows = jnp.dtype(e.dtype).itemsize <= min(jnp.dtype(kind).itemsize for kind in kinds)
        found = inputs[0]
        return _Sum(found.row, found.column) if narrows or found.exact else None
    if len(inputs) != 2:
        return None
    a, b = inputs
    if e.op == "add":
        return _Sum(a.row + b.row, a.column + b.column)
    difference = _Sum(a.row - b.row, a.column - b.column)
    if e.op == "sub":
        return difference
    if e.op == "mul":
        factors = [code.equations[n] for n in e.inputs]
        for x, other in ((a, factors[1]), (b, factors[0])):
            if other.op == "const":
                return _Sum(x.row * int(constant(other)), x.column * int(constant(other)))
        return None
    compares = e.op in ("eq", "ne")
    if e.op in ("lt", "le", "gt", "ge"):
        compares = a.exact and b.exact
    return DISTANCE if compares and _is_distance(difference) else None


def _is_integer(dtype: str) -> bool:
    return dtype.removeprefix("u").startswith("int")
