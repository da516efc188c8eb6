"""Derivatives of a program, as programs again.

Backward kernels need, at each pair of indices, what a score's change does: d result / d argument for the float
arguments, and d result / d value for every float that is read from a captured array, with the place it was read from.
JAX differentiates; this file only takes the reads out of the way and puts them back.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import InlineError
from ._code import Argument, Builder, Code, Equation, constant, pruned
from ._evaluate import evaluate
from ._scalarise import Outer
from ._trace import Program, trace


class Read(NamedTuple):
    """A float that the program reads. `operand` is the captured array, by its number in the code's operands.

    `derivative` and `indices` are numbers of results: d result / d value, and where it was read, an int32 for each dim,
    in range.
    """

    operand: int
    derivative: int
    indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """`program` has the operands and arguments of the one that was differentiated.

    Its results are first d result / d argument for each of `arguments`, then what `reads` names. A read whose
    derivative is 0 everywhere is not among them.
    """

    program: Program
    arguments: tuple[str, ...]
    reads: tuple[Read, ...]


def differentiate(program: Program, *, beside: Sequence[Any] = ()) -> Derivative:
    """The derivatives of a program with one float result.

    **Arguments:**

    - `program`: From `trace`.
    - `beside`: As for `trace`. (Keyword only argument.)

    **Returns:**

    A `Derivative`. Rules of `jax.custom_jvp` and `jax.custom_vjp` functions hold.

    **Raises:**

    `eqxcute.InlineError` for a program that a kernel cannot run, and for one that hands a captured array to a function
    with a derivative rule of its own: the rule may do anything with the array.
    """
    code = program.code
    _check(program)
    floats = tuple(a.name for a in code.arguments if _is_float(a.dtype))
    reads = [n for n, e in enumerate(code.equations) if e.op == "read" and _is_float(e.dtype)]
    names = {n: f"value {n}" for n, e in enumerate(code.equations) if e.op in ("read", "size")}
    lifted = _lifted(program, names)
    moving = (*floats, *(names[n] for n in reads))

    def derivatives(*scalars):
        values = dict(zip([a.name for a in lifted.code.arguments], scalars, strict=True))

        def result(some):
            return evaluate(lifted, values | some, [])

        gradient = jax.grad(result)({name: values[name] for name in moving})
        return [gradient[name] for name in moving]

    derived, constants = trace(
        derivatives,
        lifted.code.arguments,
        role=f"the derivative of {program.name}:",
        beside=beside,
    )
    build = Builder()
    build.operands = list(code.operands)
    arguments = {a.name: build.argument(a) for a in code.arguments}
    values = _copied(build, code, arguments, {})
    given = arguments | {name: values[n] for n, name in names.items()}
    if derived.code.opaque:
        raise InlineError(f"{derived.code.opaque[0]}.")
    # Numbers that a derivative rule made on the spot: 0-d arrays, and part of the program.
    made = [build.const(np.asarray(x), x.dtype) for x in derived.prepare(constants)]
    after = _copied(build, derived.code, given, dict(enumerate(made)))
    return _assembled(
        program, build, floats, reads, values, [after[n] for n in derived.code.results]
    )


def _check(program: Program) -> None:
    code = program.code
    if code.opaque:
        raise InlineError(f"{code.opaque[0]}.")
    if len(code.results) != 1 or not _is_float(code.equations[code.results[0]].dtype):
        raise InlineError(
            f"{program.name}: only a function with one float result has derivatives here."
        )
    for region in program.regions:
        for v in region.inputs:
            if isinstance(v, Outer):
                raise InlineError(
                    f"{program.name} hands a captured array of shape {tuple(v.aval.shape)} to a function with a "
                    "derivative rule of its own (jax.custom_jvp or custom_vjp). Read the array outside of it, and hand "
                    "the number in."
                )


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def _lifted(program: Program, names: Mapping[int, str]) -> Program:
    """The program with what it reads as further arguments, and nothing captured.

    A 16-bit float that is widened wherever it is used is an argument in its wide dtype: else each of the many
    contributions to its gradient would be rounded to 16 bits before they are summed.
    """
    code = program.code
    wide = _widened_reads(code)
    equations, more = list(code.equations), []
    for n, e in enumerate(code.equations):
        if e.op in ("read", "size"):
            dtype = wide.get(n, e.dtype)
            equations[n] = Equation("argument", dtype, params=(("name", names[n]),))
            more.append(Argument(names[n], dtype))
    # The conversions of wide arguments are there, and convert nothing.
    lifted = Code((*code.arguments, *more), (), tuple(equations), code.results)
    return dataclasses.replace(program, code=lifted, steps=(), operands=(), tree=_LEAF)


def _widened_reads(code: Code) -> dict[int, str]:
    """Of the 16-bit floats that are read: those of which every use is a conversion to one wider dtype."""
    uses: dict[int, set[str]] = {n: {""} for n in code.results}
    for e in code.equations:
        for n in e.inputs:
            converts = e.op == "convert_element_type"
            uses.setdefault(n, set()).add(e["new_dtype"] if converts else "")
    found = {}
    for n, e in enumerate(code.equations):
        narrow = e.op == "read" and _is_float(e.dtype) and jnp.dtype(e.dtype).itemsize == 2
        if narrow and len(uses.get(n, ())) == 1:
            (dtype,) = uses[n]
            if dtype and _is_float(dtype) and jnp.dtype(dtype).itemsize > 2:
                found[n] = dtype
    return found


_LEAF = jax.tree.structure(0)


def _copied(
    build: Builder, code: Code, arguments: Mapping[str, int], operands: Mapping[int, int]
) -> list[int]:
    """The code's equations, in `build`: the number of each."""
    numbers: list[int] = []
    for e in code.equations:
        inputs = [numbers[n] for n in e.inputs]
        if e.op == "argument":
            n = arguments[e["name"]]
            numbers.append(build.op("convert_element_type", n, new_dtype=e.dtype))
        elif e.op == "const":
            numbers.append(build.const(constant(e), e.dtype))
        elif e.op == "read":
            k = e["operand"]
            numbers.append(operands[k] if k in operands else build.read(k, inputs))
        elif e.op == "size":
            numbers.append(build.size(e["operand"], e["dim"]))
        else:
            numbers.append(build.op(e.op, *inputs, **dict(e.params)))
    return numbers


def _assembled(program, build, floats, reads, values, derivatives) -> Derivative:
    code = program.code
    results = list(derivatives[: len(floats)])
    found = []
    for n, d in zip(reads, derivatives[len(floats) :], strict=True):
        if build.is_const(d) and build.value(d) == 0:
            continue
        e = code.equations[n]
        first = len(results)
        clamped = [_clamped(build, e["operand"], dim, values[i]) for dim, i in enumerate(e.inputs)]
        results += [d, *clamped]
        places = tuple(range(first + 1, first + 1 + len(clamped)))
        found.append(Read(e["operand"], first, places))
    made, _, used = pruned(code.arguments, build.operands, build.equations, results)
    made = _with_all_operands(made, build.operands, used)
    tree = jax.tree.structure((0,) * len(results))
    derived = dataclasses.replace(
        program, code=made, name=f"the derivative of {program.name}", regions=(), tree=tree
    )
    return Derivative(derived, floats, tuple(found))


def _clamped(build: Builder, operand: int, dim: int, index: int) -> int:
    last = build.op("sub", build.size(operand, dim), build.const(1, "int32"))
    return build.op("max", build.op("min", index, last), build.const(0, "int32"))


def _with_all_operands(code: Code, operands: Sequence[Any], used: Sequence[int]) -> Code:
    """The same operands, with the same numbers, as the program that was differentiated."""

    def renumbered(e: Equation) -> Equation:
        params = tuple((k, used[v] if k == "operand" else v) for k, v in e.params)
        return Equation(e.op, e.dtype, e.inputs, params)

    equations = tuple(renumbered(e) for e in code.equations)
    return dataclasses.replace(code, operands=tuple(operands), equations=equations)
