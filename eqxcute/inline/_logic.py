"""Comparisons and booleans in a normal form, so that parts of a mask that say the same are seen to.

Masks are combined by users: `CausalMask() & ~SlidingWindowMask(500)` is "not after" and "further back, or after". Intervals
know each part by itself, so a tile on the diagonal could be anything to them. Here the contradiction is taken out:

    x >= y            is  y <= x, and so on: two comparisons of integers are left, < and <=
    x - y <= 0        is  x <= y, where the difference cannot wrap around
    ~(x < y)          is  y <= x, for integers
    ~(p & q)          is  ~p | ~q
    p & (~p | q)      is  p & q;  p & (p | q) is p;  p & ~p is False;  and the same with & and | exchanged
"""

from typing import Any

import numpy as np

from ._interval import Interval

PARTS = 16  # of a conjunction; longer ones stay as they are

_SWAPPED = {"gt": "lt", "ge": "le"}
_COMPARISONS = ("lt", "le", "eq", "ne")
_NEGATED = {"eq": ("ne", False), "ne": ("eq", False), "lt": ("le", True), "le": ("lt", True)}
_DUAL = {"and": "or", "or": "and"}


def compared(build: Any, name: str, inputs: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A comparison of integers in its normal form."""
    if name in _SWAPPED:
        name, inputs = _SWAPPED[name], inputs[::-1]
    if name not in _COMPARISONS or not _is_integer(build, inputs[0]):
        return name, inputs
    a, b = inputs
    if _is_zero(build, b) and _is_difference(build, a):
        return name, build.equations[a].inputs
    if _is_zero(build, a) and _is_difference(build, b):
        x, y = build.equations[b].inputs
        return name, (y, x)
    return name, inputs


def combined(build: Any, name: str, inputs: tuple[int, ...]) -> int | None:
    """`not`, `and` or `or` of booleans, where that is something simpler."""
    if build.equations[inputs[0]].dtype != "bool":
        return None
    if name == "not":
        return _negation(build, inputs[0])
    if name not in _DUAL:
        return None
    parts = [p for i in inputs for p in _parts(build, name, i)]
    if len(parts) > PARTS:
        return None
    kept = _absorbed(build, name, list(dict.fromkeys(parts)))
    if kept is None:
        return build.const(name == "or", np.bool_)
    if kept == parts:
        return None
    result = kept[0]
    for part in kept[1:]:
        result = build.op(name, result, part)
    return result


def _absorbed(build: Any, name: str, parts: list[int]) -> list[int] | None:
    """The parts that say something. None: two contradict each other."""
    kept = []
    for part in parts:
        if _complement(build, part) in parts:
            return None
        clauses = _parts(build, _DUAL[name], part)
        if len(clauses) == 1:
            kept.append(part)
            continue
        if any(c in parts for c in clauses):
            continue
        left = [c for c in clauses if _complement(build, c) not in parts]
        if not left:
            return None
        if len(left) < len(clauses):
            part = left[0]
            for c in left[1:]:
                part = build.op(_DUAL[name], part, c)
        kept.append(part)
    return kept


def _parts(build: Any, name: str, n: int) -> list[int]:
    """What a chain of one operation is made of."""
    e = build.equations[n]
    if e.op != name or e.dtype != "bool":
        return [n]
    return [p for i in e.inputs for p in _parts(build, name, i)]


def _negation(build: Any, n: int) -> int | None:
    e = build.equations[n]
    if e.op == "not":
        return e.inputs[0]
    if e.op in _DUAL and e.dtype == "bool" and len(_parts(build, e.op, n)) <= PARTS:
        a, b = (build.op("not", i) for i in e.inputs)
        return build.op(_DUAL[e.op], a, b)
    if e.op in ("eq", "ne"):
        return build.op(_NEGATED[e.op][0], *e.inputs)
    if e.op in _NEGATED and _is_integer(build, e.inputs[0]):
        name, swapped = _NEGATED[e.op]
        return build.op(name, *(e.inputs[::-1] if swapped else e.inputs))
    return None


def _complement(build: Any, n: int) -> int | None:
    """The number of `not n`, if there is such an equation."""
    e = build.equations[n]
    if e.op == "not":
        return e.inputs[0]
    if e.op in _NEGATED:
        name, swapped = _NEGATED[e.op]
        if not swapped:
            return build.find(name, e.inputs)
        if _is_integer(build, e.inputs[0]):
            return build.find(name, e.inputs[::-1])
    return build.find("not", (n,))


def _is_integer(build: Any, n: int) -> bool:
    return not build.equations[n].dtype.startswith(("bool", "float", "bfloat"))


def _is_zero(build: Any, n: int) -> bool:
    interval = build.intervals[n]
    return bool((interval.lo == 0) & (interval.hi == 0))


def _is_difference(build: Any, n: int) -> bool:
    """A subtraction that cannot wrap around."""
    e = build.equations[n]
    if e.op != "sub":
        return False
    a, b = (build.intervals[i] for i in e.inputs)
    return _fits(a, b, e.dtype)


def _fits(a: Interval, b: Interval, dtype: str) -> bool:
    info = np.iinfo(dtype)
    return info.min <= int(a.lo) - int(b.hi) and int(a.hi) - int(b.lo) <= info.max
