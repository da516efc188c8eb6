"""From a user's function to a `Program`, and the messages when that cannot be."""

import dataclasses
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .. import _sharding
from .._errors import InlineError
from ._code import DTYPES, Argument, Builder, Code, Equation, TooLong, pruned
from ._jaxpr import has_ended
from ._scalarise import Known, Outer, Region, Scalariser, Scalars, Step, Unsupported
from ._values import abstract_of

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A scalar function, read once.

    - `code`: what kernels are made from: plain data, hashable.
    - `name`: the user's function, with file and line, for messages.

    `prepare` gives the operands of `code` from the captured arrays; `evaluate` runs it under JAX.
    """

    code: Code
    name: str
    steps: tuple[Step, ...]
    operands: tuple[int, ...]  # numbers in the environment of the steps
    regions: tuple[Region, ...]  # in the numbers of `code`, outermost only
    tree: Any  # the structure of what the function returns

    def environment(self, captured: Sequence[Any], *, wide: bool = False) -> tuple[Any, ...]:
        """What is computed once, before the function is called for each entry: arrays by number, None where nothing
        needs one.

        With `wide`, floats below float32 are held in float32, so that the contributions of all entries to a gradient
        are summed there; it is narrowed once, on its way to the captured array. Values are the same: a step that only
        moves numbers runs in float32, any other one in the dtypes that it was traced with.
        """
        hold = _widened if wide else (lambda x: x)
        env: dict[int, Any] = {i: hold(x) for i, x in enumerate(captured)}
        for step in self.steps:
            inputs = [v.value if isinstance(v, Known) else env[v.number] for v in step.inputs]
            if wide and step.moves:
                inputs = [_widened(x) for x in inputs]
            elif wide:
                inputs = [
                    x
                    if isinstance(v, Known) or not _is_narrow(v.aval.dtype)
                    else x.astype(v.aval.dtype)
                    for v, x in zip(step.inputs, inputs, strict=True)
                ]
            env.update(zip(step.outputs, map(hold, step.run(*inputs)), strict=True))
        needed = {*self.operands, *_outers_of(self.regions)}
        return tuple(env[i] if i in needed else None for i in range(max(needed, default=-1) + 1))

    def prepare(self, captured: Sequence[Any]) -> list[Any]:
        """The arrays that `code` reads. Plain JAX: gradients pass through to the captured arrays."""
        env = self.environment(captured)
        return [env[n] for n in self.operands]

    def missing(self, subject: str) -> str | None:
        """Why no kernel can run this, as a clause about the `subject`."""
        if self.code.opaque:
            return self.code.opaque[0]
        for e in self.code.equations:
            if e.dtype not in DTYPES:
                return f"{subject} computes in {e.dtype}, and the kernel takes {', '.join(sorted(DTYPES))}"
        for region in self.regions:
            for v in region.inputs:
                if isinstance(v, Outer) and jnp.issubdtype(v.aval.dtype, jax.dtypes.extended):
                    return f"{subject} hands a random key to a function with a derivative rule of its own"
        return None


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _widened(x: Any) -> Any:
    return jnp.asarray(x, jnp.float32) if _is_narrow(x.dtype) else x


def trace(
    fn: Callable,
    arguments: Mapping[str, Any] | Sequence[Argument],
    *,
    role: str = "the function",
    check: Callable[[Any], Any] | None = None,
    beside: Sequence[Any] = (),
) -> tuple[Program, list[Any]]:
    """Reads a scalar function.

    **Arguments:**

    - `fn`: A function of scalars, or an Equinox module that is one. Arrays that it closes over or has as fields are
        captured: lifted out, so that other values are no other program. Python numbers are part of the program.
    - `arguments`: The scalars it is called with: `{name: dtype}`, or a sequence of `Argument`.
    - `role`: What messages call it, such as `mask_fn`. (Keyword only argument.)
    - `check`: Gets what `fn` returns, and raises or returns it, converted perhaps. (Keyword only argument.)
    - `beside`: Arrays that the program will run beside. Inside `shard_map`, where they vary over a mesh, its scalars do
        too: derivative rules and loops are traced with the types that they are run with. (Keyword only argument.)

    **Returns:**

    The program, and the captured arrays in the order in which `Program.prepare` takes them.

    **Raises:**

    `eqxcute.InlineError`, a `TypeError`, that names the function, its file and line, and what to write instead. What
    JAX can do and a kernel cannot raises later, when a kernel is made of it: until then it runs under JAX.
    """
    if isinstance(arguments, Mapping):
        arguments = [Argument(name, jnp.dtype(dtype).name) for name, dtype in arguments.items()]
    arrays, rest = eqx.partition(fn, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)
    shapes: list[Any] = []
    axes = _sharding.varying_of_any([*beside, *leaves])

    def call(leaves, *scalars):
        whole = eqx.combine(jax.tree.unflatten(tree, leaves), rest)
        result = whole(*(_sharding.over(x, axes) for x in scalars))
        result = result if check is None else check(result)
        flat, structure = jax.tree.flatten(result)
        for x in flat:
            _check_scalar(role, fn, x)
        shapes.append(structure)
        return [jnp.asarray(x) for x in flat]

    specs = [jax.ShapeDtypeStruct((), a.dtype) for a in arguments]
    try:
        closed = jax.make_jaxpr(call)(leaves, *specs)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise InlineError(_needs_concrete(role, fn, error)) from error
    except jax.errors.UnexpectedTracerError as error:
        raise InlineError(_leaked(role, culprit(fn, error))) from error
    captured = [*closed.consts, *leaves]
    if not _sharding.varying_of_any(closed.consts) <= axes:  # closures: known only now
        return trace(fn, arguments, role=role, check=check, beside=[*beside, *closed.consts])
    _check_alive(role, fn, closed.jaxpr, captured)
    program = _program(fn, role, closed.jaxpr, captured, arguments, shapes[-1])
    return program, captured


def _check_alive(role: str, fn: Callable, jaxpr: Any, captured: Sequence[Any]) -> None:
    """JAX takes a value of an ended `jit` for a constant, and finds out where the outermost program runs."""
    held = [*jaxpr.constvars, *jaxpr.invars[: len(captured) - len(jaxpr.constvars)]]
    ended = {id(v) for v, x in zip(held, captured, strict=True) if has_ended(x)}
    if ended:
        reading = [e for e in jaxpr.eqns if any(id(v) in ended for v in e.invars)]
        raise InlineError(_leaked(role, _place(fn, reading[0]) if reading else describe(fn)))


def _leaked(role: str, where: str) -> str:
    return (
        f"{role} {where} uses a value that belongs to another trace of JAX, one that has ended: it was kept from "
        "inside a `jit`, `vmap` or `scan`. Make it an argument of what you call now: a field of an Equinox module "
        "that is passed in, or a value captured in the same trace."
    )


def _program(fn, role, jaxpr, captured, arguments, tree) -> Program:
    walk, held, scalars = _begun(fn, role, captured, arguments)
    split = len(jaxpr.constvars)
    try:
        _check_effects(jaxpr)
        values = walk.run(jaxpr, held[:split], [*held[split:], *scalars])
        results = [int(walk.scalars(v).numbers) for v in values]
    except Unsupported as error:
        why = str(error) if error.placed else f"{role} {describe(fn)}: {error}"
    except TooLong:
        why = (
            f"{role} {describe(fn)} is more than {walk.build.limit} operations for one pair of indices, its loops "
            "unrolled. Compute what does not depend on the indices on whole arrays, and read it by index"
        )
    else:
        return assemble(walk, results, arguments, describe(fn), tree)
    # JAX runs it as it is, no kernel can.
    walk, held, scalars = _begun(fn, role, captured, arguments)
    run = functools.partial(_run, jaxpr, split)
    outputs = walk.opaque(run, [*held, *scalars], [v.aval for v in jaxpr.outvars], why)
    results = [int(v.numbers) for v in outputs]
    return assemble(walk, results, arguments, describe(fn), tree)


def _check_effects(jaxpr: Any) -> None:
    # Naming a mesh's axis is no effect on anything.
    names = sorted({type(e).__name__ for e in jaxpr.effects} - {"NamedAxisEffect"})
    if names:
        raise Unsupported(
            f"it has side effects ({', '.join(names)}), such as those of `jax.debug.print`, and a kernel has none. "
            "Take them out"
        )


def _begun(fn, role, captured, arguments) -> tuple[Scalariser, list[Outer], list[Scalars]]:
    """Code with nothing but its arguments."""
    build = Builder()
    scalars = [
        Scalars(np.array(build.argument(a), np.int64), jax.ShapeDtypeStruct((), a.dtype))
        for a in arguments
    ]
    walk = Scalariser(build, lambda eqn: f"{role} {_place(fn, eqn)}")
    return walk, [walk.outer(abstract_of(x)) for x in captured], scalars


def _run(jaxpr: Any, split: int, *values: Any) -> list:
    return jax.core.eval_jaxpr(jaxpr, values[:split], *values[split:])


def assemble(walk: Scalariser, results, arguments, name: str, tree: Any) -> Program:
    """The program without what its results do not need."""
    build = walk.build
    regions = _needed(build.equations, results, walk.regions)
    keep = [n for r in regions for n in _numbers_of((*r.inputs, *r.outputs))]
    code, number, used = pruned(arguments, build.operands, build.equations, results, keep)
    order = sorted(number)
    regions = [_renumbered(r, number, order) for r in regions]
    operands = tuple(walk.operands[k] for k in used)
    steps = _needed_steps(walk.steps, {*operands, *_outers_of(regions)})
    return Program(code, name, steps, operands, tuple(regions), tree)


def _numbers_of(values: Sequence[Any]) -> list[int]:
    held = [v.numbers.reshape(-1) for v in values if isinstance(v, Scalars)]
    return [int(n) for numbers in held for n in numbers if n >= 0]


def _needed(equations: Sequence[Equation], results, regions: Sequence[Region]) -> list[Region]:
    """The regions of which an output is needed, with -1 for the outputs that are not.

    Nothing outside a region uses what is inside but for its outputs, so the last equation in it that is needed is one,
    and by then all users of the others have been seen.
    """
    needed, found = set(results), []
    remaining = sorted(regions, key=lambda r: r.start)
    for n in reversed(range(len(equations))):
        while remaining and n < remaining[-1].start:
            remaining.pop()
        if n not in needed:
            continue
        if remaining and n < remaining[-1].stop:
            region = remaining.pop()
            wanted = [m for m in needed if region.start <= m < region.stop]
            found.append(region._replace(outputs=tuple(_only(wanted, o) for o in region.outputs)))
            needed.update(_numbers_of(region.inputs))
        needed.update(equations[n].inputs)
    return found[::-1]


def _only(wanted: Sequence[int], output: Scalars) -> Scalars:
    return output._replace(numbers=np.where(np.isin(output.numbers, wanted), output.numbers, -1))


def _renumbered(region: Region, number: Mapping[int, int], order: Sequence[int]) -> Region:
    def moved(v):
        if not isinstance(v, Scalars):
            return v
        numbers = [number[int(n)] if n >= 0 else -1 for n in v.numbers.reshape(-1)]
        return Scalars(np.array(numbers, np.int64).reshape(v.numbers.shape), v.aval)

    inside = [number[n] for n in order if region.start <= n < region.stop]
    inputs, outputs = (tuple(map(moved, values)) for values in (region.inputs, region.outputs))
    return Region(min(inside), max(inside) + 1, region.run, inputs, outputs)


def _outers_of(regions: Sequence[Region]) -> set[int]:
    return {v.number for r in regions for v in r.inputs if isinstance(v, Outer)}


def _needed_steps(steps: Sequence[Step], needed: set[int]) -> tuple[Step, ...]:
    kept = []
    for step in reversed(steps):
        if needed.intersection(step.outputs):
            kept.append(step)
            needed.update(v.number for v in step.inputs if isinstance(v, Outer))
    return tuple(reversed(kept))


def _check_scalar(role: str, fn: Callable, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise InlineError(
            f"{role} {describe(fn)} must return a number, but returned {type(x).__name__}."
        )
    if np.shape(x) != ():
        raise InlineError(
            f"{role} {describe(fn)} must return a number, of shape (), but returned shape {np.shape(x)}. It is called "
            "for one entry at a time: read captured arrays at its indices."
        )


# Messages


def describe(fn: Callable) -> str:
    """Name, file and line of a user's function, or of its class."""
    target = _definition(fn)
    name = getattr(target, "__qualname__", repr(fn))
    code = getattr(target, "__code__", None)
    if code is not None:
        return f'`{name}` (File "{code.co_filename}", line {code.co_firstlineno})'
    line = _line_of(target)
    return f"`{name}`" if line is None else f'`{name}` (File "{_source_file(fn)}", line {line})'


@functools.lru_cache(maxsize=256)
def _line_of(target: Any) -> int | None:
    """Of a class, whose file has to be parsed: some milliseconds."""
    try:
        return inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return None


def _definition(fn: Callable) -> Any:
    """What the user wrote: of a bound method or a wrapper the function, of a module that is called its class."""
    while True:
        inner = getattr(fn, "func", None) if isinstance(fn, functools.partial) else None
        inner = inner or getattr(fn, "__wrapped__", None) or getattr(fn, "__func__", None)
        if inner is None:
            return fn if inspect.isroutine(fn) else type(fn)
        fn = inner


def _source_file(fn: Callable) -> str | None:
    try:
        return inspect.getsourcefile(_definition(fn))
    except TypeError:
        return None


def _needs_concrete(role: str, fn: Callable, error: Exception) -> str:
    """What to write instead of `if q_idx > 3` and of `int(lengths[b])`."""
    return (
        f"{role} {culprit(fn, error)} asks for the value of an index at trace time. Its arguments "
        "are traced scalars: one call stands for all positions. Instead of `if`, `and`, "
        "`or` and `not` write jnp.where, `&`, `|` and `~`; instead of int(x) or bool(x) use x "
        "itself; instead of a list or a numpy array read at an index, capture jnp.asarray(...)."
    )


def _is_ours(filename: str) -> bool:
    """Not the user's: of a library, or of this one. Its layers may lie in a folder of their own."""
    libraries = [os.path.dirname(m.__file__) + os.sep for m in (jax, eqx, np) if m.__file__]
    layers = getattr(sys.modules.get("eqxcute.layers"), "__path__", ())
    return filename.startswith((*libraries, _HERE, *(path + os.sep for path in layers)))


def culprit(fn: Callable, error: Exception) -> str:
    """The user's function and line. In a combination of masks it is not `fn` that is at fault
    but one of its parts, which the traceback knows."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    if not frames:
        return describe(fn)
    last = frames[-1]
    line = f"line {last.lineno}" + (f", `{last.line}`" if last.line else "")
    if last.filename == _source_file(fn):
        return f"{describe(fn)}, {line},"
    return f'`{last.name}` (File "{last.filename}", {line})'


def _place(fn: Callable, eqn: Any) -> str:
    """The user's line that an equation comes from."""
    found = getattr(eqn.source_info, "traceback", None)
    frames = [] if found is None else [f for f in found.frames if not _is_ours(f.file_name)]
    if not frames:
        return describe(fn)
    first = frames[0]
    return f'`{first.function_name}` (File "{first.file_name}", line {first.line_num})'
