"""`pointwise`: a JAX function of scalars, over arrays, as one kernel."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _fallback, _sharding
from .._errors import DtypeError, SlowPathWarning, SpecError, sizes
from .._kernel import Kernel, reference_jvp, static
from ._code import Argument, Code, Equation, constant, pruned
from ._evaluate import evaluate_prepared
from ._roles import Layout, layout, of_roles, over, term, too_large
from ._scalarise import Outer
from ._trace import Program, assemble, describe, trace
from ._walk import POINTWISE, Config


def pointwise(
    fn: Callable,
    *,
    exact: bool | None = None,
    implementation: Literal["cute", "xla"] | None = None,
) -> "Pointwise":
    r"""A function of scalars, written in `jax.numpy`, over whole arrays, in one pass over memory.

    $$y_{ij\ldots} = f(a_{ij\ldots},\ b_{ij\ldots},\ \ldots)$$

    ```python
    gated = eqxcute.pointwise(lambda x, gate, bias: jax.nn.gelu(x + bias) * gate)
    y = gated(x, gate, bias)  # (1024, 512), (1024, 512), (512,)
    ```

    **Arguments:**

    - `fn`: Takes scalars, returns a scalar or a pytree of them. It may be an Equinox module, whose arrays then are
        trained, and may close over arrays: of 0 dims, or read at indices that are integer arguments (`table[i]`).
        Python's `if` on an argument is `jnp.where` here.
    - `exact`: `None` takes the hardware's approximations of `exp`, `tanh` and the like where all floating results have 16
        bits, which hide the difference; `True` never takes them; `False` takes those that suit bfloat16 whatever the
        results are: `tanh` is then right to 5e-4. (Keyword only argument.)
    - `implementation`: `None` runs the kernel on an NVIDIA GPU and plain JAX elsewhere; `"cute"` insists on the kernel;
        `"xla"` is plain JAX. (Keyword only argument.)

    **Returns:**

    A `Pointwise`: call it with one array for each argument of `fn`.

    **Raises:**

    `TypeError` for what is no function, `ValueError` for an unknown `implementation` or `exact`.
    """
    if not callable(fn):
        raise TypeError(f"`pointwise`: `fn` must be a function, got {type(fn).__name__}.")
    if exact not in (None, False, True):
        raise ValueError(f"`pointwise`: `exact` must be None, True or False, got {exact!r}.")
    _fallback.check_name("pointwise", implementation)
    return Pointwise(fn, exact, implementation)


class Pointwise(eqx.Module):
    """What `eqxcute.pointwise` makes."""

    fn: Callable
    exact: bool | None = eqx.field(static=True)
    implementation: Literal["cute", "xla"] | None = eqx.field(static=True)

    def __call__(self, *arrays):
        """**Arguments:**

        - `arrays`: One for each argument of the function, of shapes that broadcast by NumPy's rules. Those that lack
            leading dims, such as a bias, are read once a thread, not once an element.

        **Returns:**

        What the function returns, with an array of the broadcast shape for each scalar. Dtypes are those that the function
        gives for scalars of the arrays' dtypes; weak types, as that of `jnp.asarray(2.0)`, count as others do. In the kernel
        16-bit floats are float32 in between, and rounded once.

        Derivatives are JAX's, with their own rules where the function has some. Reverse mode is one kernel again, and sums
        over what was broadcast, in float32. `jax.vmap` is one launch.

        **Raises:**

        `eqxcute.SpecError`, a `ValueError`, for shapes that do not broadcast; `eqxcute.DtypeError`, a `TypeError`, for what is
        no array; `eqxcute.InlineError`, a `TypeError`, for a function that is none of scalars; `NotImplementedError` for
        `"cute"` where the kernel cannot run.

        !!! info "Cost"

            Reads each array once and writes each result once. One kernel is compiled a function, dtypes and pattern of
            broadcasting; sizes do not matter. Arrays that broadcast in other ways than from the left or from the right,
            as `(m, 1, n)` in `(m, k, n)`, are spread in memory first, and a warning says so.
        """
        where = f"pointwise of {describe(self.fn)}"
        arrays = _checked(where, self.fn, arrays)
        names = [f"x{i}" for i in range(len(arrays))]
        arguments = {name: x.dtype for name, x in zip(names, arrays, strict=True)}
        program, captured = trace(self.fn, arguments, role="pointwise:", beside=arrays)
        shapes = layout([x.shape for x in arrays])
        missing = _missing(program, captured, shapes)
        if self.implementation is not None or missing is not None:
            chosen = _fallback.choose(where, self.implementation, missing=missing)
            if chosen == "xla":
                return _plain(program, captured, shapes, arrays)
        given = dict(zip(names, arrays, strict=True))
        outputs = run(program, captured, given, self.exact)
        outputs = [jnp.broadcast_to(x, shapes.shape) for x in outputs]
        return jax.tree.unflatten(program.tree, outputs)


def _checked(where: str, fn: Callable, arrays: Sequence[Any]) -> list[jax.Array]:
    if not arrays:
        raise SpecError(f"{where}: got no array. Give one for each argument of the function.")
    names = _names(fn, len(arrays))
    for name, x in zip(names, arrays, strict=True):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise DtypeError(
                f"{where}: `{name}` must be an array, got {type(x).__name__}. A number that stays the same stands in the "
                "function itself, `lambda x: fn(x, 2.0)`; one that changes is an array, `jnp.asarray(2.0, x.dtype)`."
            )
        if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
            raise DtypeError(
                f"{where}: `{name}` is {x.dtype}, and a pointwise function takes numbers."
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise DtypeError(
                f"{where}: `{name}` is {x.dtype}, and a pointwise function takes numbers. Keys are captured by the function."
            )
    try:
        jnp.broadcast_shapes(*[x.shape for x in arrays])
    except ValueError:
        shown = ", ".join(f"`{n}` {sizes(x.shape)}" for n, x in zip(names, arrays, strict=True))
        raise SpecError(
            f"{where}: shapes must broadcast by NumPy's rules, aligned at the last axis, but they are {shown}. Insert axes of "
            "size 1, as in `x[:, None]`."
        ) from None
    return [jnp.asarray(x) for x in arrays]


def _names(fn: Callable, count: int) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names[:count] + [f"argument {i}" for i in range(len(names), count)]


def _missing(program: Program, captured: Sequence[Any], shapes: Layout) -> str | None:
    """Why no kernel can compute it, as a clause."""
    return program.missing("it") or too_large(shapes)


def _plain(program: Program, captured: Sequence[Any], shapes: Layout, arrays: Sequence) -> Any:
    outside = program.environment(captured)
    names = [a.name for a in program.code.arguments]

    def one(*scalars):
        return evaluate_prepared(program, dict(zip(names, scalars, strict=True)), outside)

    present = [shapes.present(role) for role in shapes.roles]
    return over(one, present)(*shapes.arranged(arrays))


# A program and its arrays.


def run(
    program: Program, captured: Sequence[Any], arrays: Mapping[str, Any], exact: bool | None
) -> list[jax.Array]:
    """The results, each as wide as what it depends on: broadcast it to what is wanted.

    `arrays` may lack what no result depends on.
    """
    code = program.code
    outside = program.environment(captured)
    kinds = [code.equations[n].op for n in code.results]
    computed = list(
        dict.fromkeys(n for n, op in zip(code.results, kinds, strict=True) if op not in _GIVEN)
    )
    values = {}
    if computed:
        values = dict(
            zip(computed, _computed(program, computed, outside, arrays, exact), strict=True)
        )
    for n in code.results:
        e = code.equations[n]
        if e.op == "argument":
            values[n] = arrays[e["name"]]
        elif e.op == "const":
            values[n] = jnp.asarray(constant(e))
    return [values[n] for n in code.results]


_GIVEN = ("argument", "const")  # there is nothing to compute


def _computed(program: Program, results: list[int], outside: Sequence[Any], arrays, exact) -> list:
    """Results that are to be computed: one kernel."""
    program = _restricted(program, results)
    code, _, used = pruned(
        program.code.arguments, program.code.operands, program.code.equations, program.code.results
    )
    numbers = [program.operands[k] for k in used]
    code, scalars = _scalars_lifted(code, numbers)
    given = {name: x for name, x in arrays.items() if name in code.depends}
    given |= {name: jnp.asarray(outside[n]) for name, n in scalars.items()}
    read = [n for n in numbers if n not in scalars.values()]
    inside = {v.number for r in program.regions for v in r.inputs if isinstance(v, Outer)}
    more = sorted(inside.union(program.operands).difference(read, scalars.values()))
    places = (*read, *more)
    tables = [jnp.asarray(outside[n]) for n in places]
    arguments = tuple(Argument(name, x.dtype.name) for name, x in given.items())
    code = dataclasses.replace(code, arguments=arguments)
    varying = _sharding.varying_of_any([*tables, *given.values()])
    function = Function(code, program, places, tuple(scalars.items()), varying)
    if not given:  # an entry of a table, always the same
        return list(function(tables, {}))
    return launched(function, exact, tables, list(given.values()))


def _restricted(program: Program, results: Sequence[int]) -> Program:
    """The program without what these results do not need. It returns a tuple of them."""
    build = SimpleNamespace(equations=program.code.equations, operands=program.code.operands)
    walked: Any = SimpleNamespace(
        build=build, regions=program.regions, operands=program.operands, steps=program.steps
    )
    tree = jax.tree.structure((0,) * len(results))
    arguments = program.code.arguments
    return assemble(walked, results, arguments, program.name, tree)


def _scalars_lifted(code: Code, numbers: Sequence[int]) -> tuple[Code, dict[str, int]]:
    """The code with its operands of 0 dims as arguments: name -> number of the operand.

    As arguments, they may be mapped, and are differentiated together with the rest.
    """
    scalars = {k: f"s{n}" for k, n in enumerate(numbers) if code.operands[k].rank == 0}
    left = [k for k in range(len(numbers)) if k not in scalars]
    number = {old: new for new, old in enumerate(left)}

    def moved(e: Equation) -> Equation:
        k = dict(e.params).get("operand")
        if e.op not in ("read", "size") or k is None:
            return e
        if k in scalars:
            return Equation("argument", e.dtype, params=(("name", scalars[k]),))
        return e._replace(
            params=tuple((p, number[v] if p == "operand" else v) for p, v in e.params)
        )

    made = dataclasses.replace(
        code,
        operands=tuple(code.operands[k] for k in left),
        equations=tuple(map(moved, code.equations)),
    )
    return made, {name: numbers[k] for k, name in scalars.items()}


def launched(
    function: "Function", exact: bool | None, tables, arrays, config: Config = POINTWISE
) -> list[jax.Array]:
    """The kernel's results. `arrays`: one for each of the function's arguments, of shapes that broadcast."""
    found = layout([x.shape for x in arrays])
    if found.spread and _fallback.platform() == "cuda":
        _warn_of_spreading(function.program.name, found, arrays)
    rest = len(found.shape) - found.cut
    kernel = PointwiseKernel(function, found.roles, rest, exact, config)
    outputs = kernel(tuple(tables), *found.arranged(arrays))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _warn_of_spreading(name: str, found: Layout, arrays: Sequence) -> None:
    which = ", ".join(sizes(arrays[i].shape) for i in found.spread)
    _fallback.warn_once(
        f"spreading in {name}",
        f"pointwise of {name}: an array of shape {which} is spread to {sizes(found.shape)} in memory first. The kernel reads "
        "arrays as they are that lack leading axes or that lack trailing ones, cut at one place for all of them. (Said "
        "once a function.)",
        SlowPathWarning,
        stacklevel=6,
    )


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Function:
    """What a kernel computes. The compile key sees its one field, and so the code alone.

    Two are equal only if they are differentiated alike too: with derivative rules of its own, a function is equal to
    itself.

    - `code`: What is compiled.
    - `program`: The same for JAX. It may read more, for its derivative rules.
    - `tables`: Which values of the program's environment the kernel's tables are. Those that the code reads come first.
    - `scalars`: Arguments of the code that are values of it: (name, number).
    - `varying`: Inside `shard_map`, the axes of the mesh over which its inputs vary.
    """

    digest: str

    def __init__(
        self,
        code: Code,
        program: Program,
        tables: tuple[int, ...],
        scalars: tuple[tuple[str, int], ...],
        varying: frozenset,
    ):
        self.digest, self.code, self.tables, self.scalars = code.digest, code, tables, scalars
        self.varying = varying
        # What is computed before the kernel may hold arrays.
        self.program = dataclasses.replace(program, steps=())

    def __repr__(self):
        return f"Function({self.digest})"

    def _key(self):
        of = self.program
        rules = tuple(map(id, of.regions))
        here = self.tables, self.scalars, self.varying
        return self.digest, of.code.digest, of.operands, of.tree, rules, *here

    def __eq__(self, other):
        return isinstance(other, Function) and (self is other or self._key() == other._key())

    def __hash__(self):
        return hash((self.digest, self.tables))

    def __call__(self, tables: Sequence[Any], arguments: Mapping[str, Any]) -> tuple:
        """The results for scalar arguments. Floats in tables may be wider than they were."""
        outside: dict[int, Any] = dict(zip(self.tables, tables, strict=True))
        outside |= {n: arguments[name] for name, n in self.scalars}
        given = {a.name: arguments.get(a.name, 0) for a in self.program.code.arguments}
        numbers = range(max(outside, default=-1) + 1)
        return evaluate_prepared(self.program, given, [outside.get(n) for n in numbers])

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.code.arguments

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the results."""
        return tuple(self.code.equations[n].dtype for n in self.code.results)


class PointwiseKernel(Kernel):
    """`outputs = code(inputs)`, element by element. `tables` are what the code reads by index."""

    parallel = tuple(f"n{i}" for i in range(16))

    function: Function = static()
    roles: tuple[str, ...] = static()
    rest: int = static()  # dims after the cut
    exact: bool | None = static()
    config: Config = static(POINTWISE)

    @property
    def signature(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # an instance's own
        """Tables first, of which it says nothing."""
        inputs = ["{}", *(term(role, self.rest) for role in self.roles)]
        outputs = [term("full", self.rest)] * len(self.function.dtypes)
        return ", ".join(inputs) + " -> " + ", ".join(outputs)

    def out_dtypes(self, *arguments):
        del arguments
        return self.function.dtypes

    @property
    def fast(self) -> str | None:
        """The coarsest dtype that results are rounded to, if approximations may be taken."""
        if self.exact is not None:
            return None if self.exact else "bfloat16"
        floats = {dtype for dtype in self.function.dtypes if "float" in dtype}
        if not floats or not floats <= {"bfloat16", "float16"}:
            return None
        return "float16" if "float16" in floats else "bfloat16"

    def launch(self, stream, tables, *arrays):
        from ._kernels.pointwise import Pointwise

        code = self.function.code
        count, read = len(self.roles), len(code.operands)
        walk = Pointwise(code, self.roles, self.fast, self.config)
        walk(stream, tuple(tables[:read]), tuple(arrays[:count]), tuple(arrays[count:]))

    def reference(self, tables, *arrays):
        return _one_or_all(self._vectorised(tables, arrays))

    def _vectorised(self, tables, arrays) -> tuple[Any, ...]:
        names = [a.name for a in self.function.arguments]

        def one(*scalars):
            return self.function(tables, dict(zip(names, scalars, strict=True)))

        found = self._layout(arrays)
        return over(one, [found.present(role) for role in self.roles])(*arrays)

    def _layout(self, arrays: Sequence) -> Layout:
        return of_roles(self.roles, self.rest, [x.shape for x in arrays])

    # Derivatives. Reverse mode traces the pullback of the function of scalars, and runs it as a kernel.

    def residuals(self, primals, outputs):
        """Tables, and of the arrays those on which the derivative depends; of the others their shapes."""
        tables, *arrays = primals
        needed = frozenset(a.name for a in self.function.arguments)
        if not any(map(_is_float, tables)):
            moving = [a.name for a in self.function.arguments if _is_float(a)]
            needed = self._pullback(tables, moving)[0].code.depends
        return tables, tuple(
            x if a.name in needed else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x, a in zip(arrays, self.function.arguments, strict=True)
        )

    def jvp(self, residuals, tangents):
        tables, arrays = residuals
        # The derivative does not depend on what is not there.
        arrays = [
            jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
            for x in arrays
        ]
        return reference_jvp(self, (tables, *arrays), tangents)

    def vjp(self, residuals, cotangents, *, needed):
        tables, arrays = residuals
        of_tables, *of_arrays = needed
        cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
        cotangents = [ct for ct in cotangents if ct is not None]
        found = self._layout(arrays)
        given = {
            a.name: found.broadcastable(x, role)
            for a, x, role in zip(self.function.arguments, arrays, self.roles, strict=True)
            if not isinstance(x, jax.ShapeDtypeStruct)
        }
        given |= {self._cotangent(i): ct for i, ct in enumerate(cotangents)}
        names = [
            a.name for a, wanted in zip(self.function.arguments, of_arrays, strict=True) if wanted
        ]
        back = iter(run(*self._pullback(tables, names), given, self.exact) if names else ())
        moved = [
            found.summed(next(back), role) if wanted else None
            for wanted, role in zip(of_arrays, self.roles, strict=True)
        ]
        if not any(of_tables):
            return (None,) * len(tables), *moved
        return self._tables_vjp(tables, arrays, cotangents), *moved

    def _cotangent(self, i: int) -> str:
        """A name that no argument has: those of a derivative are cotangents themselves."""
        prefix = "ct"
        while any(a.name.startswith(prefix) for a in self.function.arguments):
            prefix += "'"
        return f"{prefix}{i}"

    def _pullback(self, tables, moving: Sequence[str]) -> tuple[Program, list]:
        """A program: the arguments and the floating results' cotangents -> the cotangents of those in `moving`."""
        names = [a.name for a in self.function.arguments]
        dtypes = self.function.dtypes
        floats = [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.floating)]

        def pullback(tables, *scalars):
            scalars = [_sharding.over(x, self.function.varying) for x in scalars]
            given = dict(zip(names, scalars, strict=False))

            def of_floats(*values):
                outputs = self.function(tables, given | dict(zip(moving, values, strict=True)))
                return [outputs[i] for i in floats]

            _, pull = jax.vjp(of_floats, *(given[name] for name in moving))
            return list(pull(list(scalars[len(names) :])))

        arguments = [Argument(a.name, a.dtype) for a in self.function.arguments]
        arguments += [Argument(self._cotangent(i), dtypes[n]) for i, n in enumerate(floats)]
        program, captured = trace(
            jax.tree_util.Partial(pullback, tuple(tables)),
            arguments,
            role=f"pointwise: the derivative of {self.function.program.name}:",
        )
        name = f"the derivative of {self.function.program.name}"
        return dataclasses.replace(program, name=name), captured

    def _tables_vjp(self, tables, arrays, cotangents) -> tuple:
        """Plain JAX: what is read by index is added to by index. In float32, rounded once."""
        moving = [i for i, x in enumerate(tables) if _is_float(x)]
        found: list[Any] = [None] * len(tables)
        if not moving:
            return tuple(found)

        def function(wide):
            full = list(tables)
            for i, x in zip(moving, wide, strict=True):
                full[i] = x
            return [y for y in self._vectorised(full, arrays) if _is_float(y)]

        wide = [tables[i].astype(jnp.promote_types(tables[i].dtype, jnp.float32)) for i in moving]
        for i, ct in zip(moving, jax.vjp(function, wide)[1](cotangents)[0], strict=True):
            found[i] = ct.astype(tables[i].dtype)
        return tuple(found)

    def batch(self, axis_size, batched, tables, *arrays):
        """The new axis is one more of the leading ones. Mapped tables: one launch an example."""
        of_tables, *flags = batched
        if any(of_tables):
            return NotImplemented
        found = of_roles(
            self.roles, self.rest, [x.shape[flag:] for x, flag in zip(arrays, flags, strict=True)]
        )
        wide = [
            found.broadcastable(x, role, flag)
            for x, role, flag in zip(arrays, self.roles, flags, strict=True)
        ]
        outputs = launched(self.function, self.exact, tables, wide, self.config)
        return _one_or_all([jnp.broadcast_to(x, (axis_size, *found.shape)) for x in outputs])


def _one_or_all(outputs: Sequence[Any]) -> Any:
    """As a kernel returns its outputs."""
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(x.dtype), jnp.floating)
