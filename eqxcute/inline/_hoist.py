"""Conversions to float that are made once a row and once a column, not for each pair.

A bias of the distance, `slope * (q_idx - kv_idx)`, subtracts integers and converts what comes out: on hardware, some pairs of
lanes a clock. The float of a difference is the difference of floats while those are exact, up to 2^24, and these depend on
one index each.
"""

import functools

import jax.numpy as jnp
import numpy as np

from . import _table
from ._code import Code, Equation, constant
from ._interval import Interval, everything, point

EXACT = 1 << 24  # up to which float32 has every integer


@functools.lru_cache(maxsize=128)
def ranges(code: Code) -> tuple[Interval, ...]:
    """What each value can be, whatever the arguments are."""
    arguments = {a.name: a.interval for a in code.arguments}
    found: list[Interval] = []
    for e in code.equations:
        if e.op == "const":
            found.append(point(constant(e)))
        elif e.op == "size":
            found.append(Interval(np.int32(1), np.int32(2**31 - 1), np.False_))
        elif e.op in _table.ROWS:
            with np.errstate(all="ignore"):
                rule = _table.ROWS[e.op].bound
                inputs = (found[n] for n in e.inputs)
                found.append(rule(np, jnp.dtype(e.dtype), *inputs, **dict(e.params)))
        else:
            found.append(arguments[e["name"]] if e.op == "argument" else everything(e.dtype))
    return tuple(found)


@functools.lru_cache(maxsize=128)
def hoisted(code: Code) -> Code:
    """The same numbers, where conversions of sums and differences are sums and differences of conversions: if those depend
    on less, and all are exact."""
    walk = _Walk(code)
    return walk.code if walk.moves else code


class _Walk:
    def __init__(self, code: Code):
        self.old, self.ranges = code, ranges(code)
        self.equations: list[Equation] = []
        self.number: dict[int, int] = {}  # of an old equation
        self.floats: dict[int, int] = {}  # of an old integer, as float32
        self.moves = False
        for n, e in enumerate(code.equations):
            found = self.split(e.inputs[0]) if _converts(e) else None
            self.moves = self.moves or found is not None
            inputs = tuple(self.number[m] for m in e.inputs)
            self.number[n] = self.append(e._replace(inputs=inputs)) if found is None else found
        results = tuple(self.number[n] for n in code.results)
        self.code = Code(code.arguments, code.operands, tuple(self.equations), results)

    def append(self, e: Equation) -> int:
        self.equations.append(e)
        return len(self.equations) - 1

    def split(self, n: int) -> int | None:
        """An integer as float32, by conversions of what it is made of; None where that is of no use."""
        e, depends = self.old.equations[n], self.old.dependences
        if e.dtype != "int32" or not all(map(self.is_exact, e.inputs)):
            return None
        if e.op == "abs":
            inner = self.split(e.inputs[0])
            return None if inner is None else self.append(Equation("abs", "float32", (inner,)))
        if e.op == "neg":
            return self.negated(e.inputs[0])
        if e.op in ("add", "sub") and all(depends[m] < depends[n] for m in e.inputs):
            return self.append(Equation(e.op, "float32", tuple(map(self.converted, e.inputs))))
        return None

    def negated(self, n: int) -> int | None:
        """0 is +0, as an integer's is."""
        e = self.old.equations[n]
        inner = self.split(n)
        if inner is None:
            return None
        if e.op == "sub":
            return self.append(Equation("sub", "float32", self.equations[inner].inputs[::-1]))
        zero = self.append(Equation("const", "float32", params=(("bits", 0),)))
        return self.append(Equation("sub", "float32", (zero, inner)))

    def is_exact(self, n: int) -> bool:
        return bool(-EXACT <= self.ranges[n].lo and self.ranges[n].hi <= EXACT)

    def converted(self, n: int) -> int:
        if n not in self.floats:
            params = (("new_dtype", "float32"),)
            convert = Equation("convert_element_type", "float32", (self.number[n],), params)
            self.floats[n] = self.append(convert)
        return self.floats[n]


def _converts(e: Equation) -> bool:
    return e.op == "convert_element_type" and e.dtype == "float32"
