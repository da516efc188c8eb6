"""A program as CuTe code, a part at a time: what depends on fewer scalars is emitted earlier, once.

Called from plain Python functions inside a kernel. A `Partial` is a frozen record and these are functions, not methods:
CuTe carries an object whose method is called inside a dynamic `if` or loop through it, and leaves this alone.

    rows = bind(start(code, operands), b=b, h=h, q=q)     # outside of the loop over columns
    for kv in ...:
        (keep,) = results(bind(rows, kv=kv))
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from .._errors import InlineError
from ._code import Code, constant
from ._hoist import hoisted, ranges
from ._interval import Interval


class Step(NamedTuple):
    """An integer argument's scalar as `base + by`, neither below 0. Of arguments with one base, one is converted to float."""

    base: Any
    by: int


class Scaled(NamedTuple):
    """A float argument's scalar as `value` times `scale`, which is the same for many: of scores, what comes of it may be known
    without the product. For `small`, `scale` must be between 2^-8 and 2^8."""

    value: Any
    scale: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Partial:
    """What is known of a code so far: the names that are bound, and each value emitted, by its number."""

    code: Code
    start: object  # one for all that come from one `start`
    operands: tuple[Any, ...]
    fast: str | None
    bound: frozenset[str]
    values: Mapping[int, Any]


def start(
    code: Code,
    operands: Sequence[Any],
    *,
    fast: bool | Literal["bfloat16", "float16", "scores"] = False,
) -> Partial:
    """Begins, and emits what depends on no scalar at all.

    **Arguments:**

    - `code`: Of a `Program`.
    - `operands`: The CuTe tensors of `Program.prepare`'s arrays, in order. An array without dimensions is a tensor of one
        element.
    - `fast`: Allows the hardware's approximations, for results that are rounded to bfloat16 (True means that), or float16,
        or for scores, which an exponential takes: right to some 2^-20 of the largest value on the way, not of each one.
        What becomes an integer is exact: an index that is one off reads another number.
        `_device.py` says how exact each form is. (Keyword only argument.)

    **Raises:**

    `eqxcute.InlineError` if the code holds what no kernel can compute.
    """
    if code.opaque:
        raise InlineError(
            "This function cannot become kernel code: " + "; ".join(code.opaque) + "."
        )
    if len(operands) != len(code.operands):
        raise ValueError(
            f"start(operands=): got {len(operands)}, the code reads {len(code.operands)}."
        )
    coarsest = "bfloat16" if fast is True else fast or None
    if coarsest == "scores":
        code = hoisted(code)
    return bind(
        Partial(code, object(), tuple(operands), coarsest, frozenset(), MappingProxyType({}))
    )


def bind(partial: Partial, **arguments: Any) -> Partial:
    """Gives arguments their scalars, and emits whatever results need that can be computed now.

    **Arguments:**

    - `partial`: From `start` or `bind`.
    - `arguments`: CuTe scalars, Python numbers, `Step`s or `Scaled`s, by the code's names. Names that it does not have are
        ignored: it does not depend on them.

    **Returns:**

    A new `Partial`. The old one stays as it is, to be bound to other scalars.
    """
    code = partial.code
    again = partial.bound.intersection(arguments)
    if again:
        raise ValueError(f"bind: `{min(again)}` is bound already.")
    bound = partial.bound.union(arguments)
    values = dict(partial.values)
    for n, needed in enumerate(_needed(code)):
        if needed and n not in values and code.dependences[n] <= bound:
            values[n] = _emitted(partial, n, values, arguments)
    return dataclasses.replace(partial, bound=bound, values=MappingProxyType(values))


def join(a: Partial, b: Partial) -> Partial:
    """Both in one: a partial of rows and one of columns. Where both bound a name, they must have bound it together."""
    if a.start is not b.start:
        raise ValueError("join: both must come from one `start`.")
    values = MappingProxyType({**a.values, **b.values})
    return bind(dataclasses.replace(a, bound=a.bound | b.bound, values=values))


def small(partial: Partial) -> Partial:
    """The same where scores are within `small_scores` of the code: from here on, tanh is a polynomial.

    **Arguments:**

    - `partial`: Of a `start` with `fast="scores"`. Any other is returned as it is.
    """
    return dataclasses.replace(partial, fast="small") if partial.fast == "scores" else partial


def results(partial: Partial) -> tuple[Any, ...]:
    """The results as CuTe scalars of their dtypes. 16-bit floats are rounded here.

    **Raises:**

    `ValueError` if an argument that they depend on is not bound.
    """
    from . import _device

    code = partial.code
    missing = code.depends - partial.bound
    if missing:
        raise ValueError(f"results: {', '.join(sorted(missing))} must be bound first.")
    return tuple(
        _device.to_cute(partial.values[n].ir, code.equations[n].dtype) for n in code.results
    )


def result(partial: Partial, number: int) -> Any:
    """One of the results, where others may depend on what is not bound yet.

    **Raises:**

    `ValueError` if an argument that it depends on is not bound.
    """
    code = partial.code
    return results(
        dataclasses.replace(
            partial, code=dataclasses.replace(code, results=(code.results[number],))
        )
    )[0]


@functools.lru_cache(maxsize=128)
def _needed(code: Code) -> tuple[bool, ...]:
    needed = [False] * len(code.equations)
    for n in code.results:
        needed[n] = True
    for n in reversed(range(len(needed))):
        for m in code.equations[n].inputs if needed[n] else ():
            needed[m] = True
    return tuple(needed)


@functools.lru_cache(maxsize=128)
def _exact(code: Code) -> tuple[bool, ...]:
    """Of which values an integer is made."""
    exact = [e.dtype.removeprefix("u").startswith("int") for e in code.equations]
    for n in reversed(range(len(exact))):
        for m in code.equations[n].inputs if exact[n] else ():
            exact[m] = True
    return tuple(exact)


def _emitted(
    partial: Partial, n: int, values: Mapping[int, Any], arguments: Mapping[str, Any]
) -> Any:
    from . import _device

    e, found = partial.code.equations[n], ranges(partial.code)[n]
    if e.op == "const":
        return _device.Value(e.dtype, found, constant=constant(e))
    inputs = [values[m] for m in e.inputs]
    if e.op == "argument":
        return _argument(e.dtype, found, arguments[e["name"]])
    if e.op == "size":
        held = _device.size(partial.operands[e["operand"]], e["dim"])
    elif e.op == "read":
        held = _device.read(partial.operands[e["operand"]], inputs, e.dtype)
    else:
        to = _device.To(e.dtype, None if _exact(partial.code)[n] else partial.fast)
        multiple = _device.multiple(to, e.op, inputs)
        if multiple is not None:
            held, factor, scale = multiple
            return _device.Value(e.dtype, found, held, factor=factor, scale=scale)
        held = _device.EMIT[e.op](to, *inputs, **dict(e.params))
    return _device.Value(e.dtype, found, held)


def _argument(dtype: str, range: Interval, given: Any) -> Any:
    from . import _device

    def held(x):
        return _device.from_cute(x, dtype)

    if isinstance(given, Step):
        step = held(given.base), given.by
        return _device.Value(dtype, range, held(given.base + given.by), step=step)
    if isinstance(given, Scaled):
        return _device.Value(dtype, range, held(given.value), scale=held(given.scale))
    return _device.Value(dtype, range, held(given))
