"""`Kernel`: an Equinox module whose methods hold CuTe code, and what its fields may be."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import numpy as np

from . import _signature
from ._errors import SpecError

_ATTRIBUTE = "eqxcute_attribute"
_MISSING = dataclasses.MISSING


def static(default: Any = _MISSING, **kwargs) -> Any:
    """A field that is compiled in: another value is another kernel.

    **Arguments:**

    - `default`: The field's default. Without one the field must be given.

    The value must be hashable and hold no arrays: it is part of the compile key.
    """
    return eqx.field(static=True, default=default, **kwargs)


def attribute(default: Any = _MISSING, *, dtype: str | None = None) -> Any:
    """A number that travels in the HLO: another value compiles no kernel anew, but does trace `jit` again.

    In `launch`, the field is a run-time CuTe scalar; hand it to the device method as an argument. In `reference`
    it is the Python number.

    **Arguments:**

    - `default`: The field's default. Without one the field must be given.
    - `dtype`: `"float32"`, `"float64"`, `"int32"`, `"int64"` or `"bool"`. By default that of the value: float is
        float32, int is int32. (Keyword only argument.)

    A value that changes every step, or that is computed on the device, is better a 0-d array argument (`()` in the
    signature): that one traces nothing anew.
    """
    if dtype not in (None, "float32", "float64", "int32", "int64", "bool"):
        raise SpecError(
            f"attribute(dtype={dtype!r}): must be float32, float64, int32, int64 or bool."
        )
    return eqx.field(static=True, default=default, metadata={_ATTRIBUTE: dtype or "by value"})


def is_array(value: Any) -> bool:
    """What counts as an operand: JAX's arrays (tracers too) and NumPy's, but not NumPy's scalars."""
    return isinstance(value, (jax.Array, np.ndarray))


class Kernel(eqx.Module):
    """A GPU kernel with its meaning: CuTe code in methods, the same in JAX as `reference`.

    ```python
    class Saxpy(eqxcute.Kernel):
        signature = "n, n -> n"
        alpha: float = eqxcute.static()

        def reference(self, x, y):
            return self.alpha * x + y

        @cute.jit
        def launch(self, stream, x, y, out):
            self.kernel(x, y, out).launch(grid=..., block=..., stream=stream)

        @cute.kernel
        def kernel(self, x, y, out):
            ...
    ```

    `Saxpy(alpha=2.0)(x, y)` binds one JAX primitive. Lowered for CUDA, it compiles `launch`; lowered for anything
    else, it is `reference`. Tracing compiles nothing.

    The *compile key* is: the class and the code it reaches, static fields, dtypes, dims that the signature marks
    `!`, the architecture, `compile_options`, and the compiler's version. Arrays in the kernel's own fields are
    operands: in `launch` they are tensors on `self`; pass them to the device method, where `self` is static.

    Class options:

    - `signature`: See `eqxcute._signature`. A property may make it from the kernel's static fields.
    - `dtypes`: Which dtypes an argument may have, by its name: `{"x": ("float32", "bfloat16")}`.
    - `aliases`: Inputs whose buffer an output takes over, `{input: output}`. Each is the number of an array, or its
        path (`"x"`, `"state.m"`, `"state['m']"`; outputs `"out"`). Values are safe: XLA copies an input that is
        still needed.
    - `initial`: Outputs that hold a value when the kernel starts, `{output: number}`.
    - `layouts`: Memory order of an array, slowest dim first, `{"x": (1, 0)}`; by default row-major. In `launch` the
        tensor has its usual shape, with the strides of that order.
    - `cuda_graph`: False forbids XLA to record the launch in a CUDA graph.
    - `side_effect`: True keeps a call whose outputs are unused.
    - `compile_options`: More options for `cute.compile`, such as `"--opt-level 2"`.
    - `parallel`: Names of dims along which shards are independent; `...` always is.
    - `sums`: Names of outputs that are sums over the dims of `...` and `parallel` that they lack, as a bias's gradient
        is: those of several devices are added up. A property may make them from the kernel's static fields.
    - `checkpoint_names`: What policies of `jax.checkpoint` call the outputs, in order: where one keeps them all, the kernel
        does not run again. Only for kernels with a derivative of their own.
    """

    signature: ClassVar[str]
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    aliases: ClassVar[Mapping[int | str, int | str]] = {}
    initial: ClassVar[Mapping[int | str, float]] = {}
    layouts: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    cuda_graph: ClassVar[bool] = True
    side_effect: ClassVar[bool] = False
    compile_options: ClassVar[str] = ""
    parallel: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[tuple[str, ...]] = ()
    checkpoint_names: ClassVar[tuple[str, ...]] = ()

    def __check_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if _ATTRIBUTE in field.metadata:
                _check_attribute(self, field.name, value)
            elif field.metadata.get("static", False):
                _check_static(self, field.name, value)

    def __call__(self, *arguments, **named):
        """Calls the kernel: arrays in, arrays out, as the signature says. One output is an array, more are a tuple.

        **Raises:**

        `eqxcute.SpecError` or `eqxcute.DtypeError`, naming the argument, if they do not fit the signature.
        """
        from ._primitive import call  # here, since that module needs this class

        return call(self, _positional(self, arguments, named))

    def __repr__(self):
        # CuTe names device code after `self`. Printing one of its tensors would emit code, so those are left out.
        known = (bool, int, float, complex, str, jax.ShapeDtypeStruct)
        shown = jax.tree.map(
            lambda leaf: (
                leaf if is_array(leaf) or isinstance(leaf, known) or callable(leaf) else None
            ),
            self,
        )
        return eqx.tree_pformat(shown)

    # What a kernel brings. `launch` is needed on a GPU, `reference` everywhere else.

    def reference(self, *arguments):
        """What the kernel computes, in JAX. It runs on every platform but CUDA, and gives the derivatives."""
        raise NotImplementedError

    def launch(self, stream, *tensors):
        """The CuTe launcher: `(stream, *arguments, *outputs, *workspace)`."""
        raise NotImplementedError

    def out_dtypes(self, *arguments):
        """The dtype of the outputs: one for all, or a tuple. Gets `jax.ShapeDtypeStruct`s.

        By default that of the first array among the arguments.
        """
        leaves = jax.tree.leaves(arguments)
        if not leaves:
            raise SpecError(f"`{name_of(self)}` has no array arguments: define `out_dtypes`.")
        return leaves[0].dtype

    def out_tree(self, *arguments):
        """The structure of what a call returns: a pytree with a leaf, of any kind, for each output in order.

        By default one array, or a tuple. None in it stays None. With a structure of its own, `launch` gets the outputs
        as one such pytree.
        """
        count = len(signature_of(self).outputs)
        return 0 if count == 1 else tuple(range(count))

    def workspace(self, *arguments):
        """Scratch arrays, a tuple of `jax.ShapeDtypeStruct`, uninitialised; `launch` gets them after the outputs."""
        return ()

    def residuals(self, primals, outputs):
        """What `jvp` and `vjp` need of a call: any pytree. By default everything, `(primals, outputs)`."""
        return primals, outputs

    def jvp(self, residuals, tangents):
        """The outputs' tangents, linear in `tangents`: one a argument, None for integers.

        By default that of `reference`.
        """
        primals, _ = residuals
        return reference_jvp(self, primals, tangents)

    def vjp(self, residuals, cotangents):
        """A tuple of the arguments' cotangents, None for integers. By default the transpose of `jvp`.

        If it takes a keyword `needed`, it gets a tuple like that with True where a cotangent is wanted: the others may be
        None, and are not worth computing.
        """
        raise NotImplementedError

    def batch(self, axis_size, batched, *arguments):
        """`jax.vmap` of the kernel. Arguments with a True in `batched` (same structure) have the new axis first.

        Returns outputs that have it first, or NotImplemented, for the default: the axis becomes one of `...`, where
        every argument that has it, and every output, has a `...`; else one launch an example.
        """
        return NotImplemented


def name_of(kernel: Kernel | type) -> str:
    return (kernel if isinstance(kernel, type) else type(kernel)).__name__


def brings(kernel: Kernel, method: str) -> bool:
    """True if the kernel's class defines `method` itself."""
    return getattr(type(kernel), method) is not getattr(Kernel, method)


def attributes_of(kernel: Kernel) -> dict[str, np.generic]:
    """The attributes' values, typed as they travel in the HLO."""
    found = {}
    for field in dataclasses.fields(kernel):
        if _ATTRIBUTE in field.metadata:
            value, dtype = getattr(kernel, field.name), field.metadata[_ATTRIBUTE]
            found[field.name] = _typed(value, dtype)
    return found


def replace_fields(kernel: Kernel, values: Mapping[str, Any]) -> Kernel:
    """A copy with other values, unchecked: also for CuTe's scalars, which no checked field may hold."""
    copy = object.__new__(type(kernel))
    for field in dataclasses.fields(kernel):
        value = values.get(field.name, getattr(kernel, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def static_sizes(kernel: Kernel) -> dict[str, int]:
    """Static integer fields, which may stand in a signature as dims."""
    found = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        is_size = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if is_size and field.metadata.get("static", False) and _ATTRIBUTE not in field.metadata:
            found[field.name] = int(value)
    return found


@functools.lru_cache(maxsize=1024)
def parameter_names(cls: type, count: int) -> tuple[str, ...]:
    """What the arguments and outputs are called: by `launch`, else by `reference`, else by number."""
    for method in ("launch", "reference"):
        parameters = list(inspect.signature(getattr(cls, method)).parameters.values())
        names = [
            p.name
            for p in parameters[2 if method == "launch" else 1 :]
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        if len(names) >= count or (method == "reference" and names):
            break
    return tuple(names[:count]) + tuple(f"argument {i}" for i in range(len(names), count))


def signature_of(kernel: Kernel) -> _signature.Signature:
    text = getattr(kernel, "signature", None)
    if not isinstance(text, str):
        raise SpecError(
            f'`{name_of(kernel)}` has no signature. Write one in the class: `signature = "n, n -> n"`.'
        )
    return _signature.parse(text)


def argument_names(kernel: Kernel) -> tuple[str, ...]:
    return parameter_names(type(kernel), len(signature_of(kernel).inputs))


def output_names(kernel: Kernel, tree) -> tuple[str, ...]:
    """What the outputs are called; `tree` is the structure of `out_tree`."""
    first = len(signature_of(kernel).inputs)
    whole = brings(kernel, "out_tree")
    roots = parameter_names(type(kernel), first + (1 if whole else tree.num_leaves))[first:]
    roots = tuple(r.replace("argument", "output") for r in roots)
    if not whole:
        return roots
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return tuple(_signature.describe_path(roots[0], path) for path, _ in leaves)


def reference_jvp(kernel: Kernel, primals, tangents):
    """The JVP of `reference`. `tangents` has None where an argument is no float."""
    if not brings(kernel, "reference"):
        raise NotImplementedError(
            f"`{name_of(kernel)}` has no `reference` and no `jvp`, so it has no forward-mode derivative. Define one "
            "of them; `vjp` alone gives reverse mode only."
        )

    def zero(primal, tangent):
        if tangent is not None or primal is None:
            return tangent
        return np.zeros(np.shape(primal), jax.dtypes.float0)

    tangents = jax.tree.map(zero, primals, tangents, is_leaf=lambda leaf: leaf is None)
    return jax.jvp(kernel.reference, tuple(primals), tuple(tangents))[1]


def _positional(kernel: Kernel, arguments: tuple, named: dict[str, Any]) -> tuple:
    if not named:
        return arguments
    names = argument_names(kernel)
    rest = names[len(arguments) :]
    for name in named:
        if name not in rest:
            raise SpecError(
                f"`{name_of(kernel)}` has no argument `{name}` left; its arguments are {', '.join(names)}, and "
                f"{len(arguments)} came by position."
            )
    return arguments + tuple(named[name] for name in rest if name in named)


def _check_static(kernel: Kernel, name: str, value: Any) -> None:
    for leaf in jax.tree.leaves(value):
        if is_array(leaf):
            raise SpecError(
                f"`{name_of(kernel)}`: the static field `{name}` holds an array of shape {leaf.shape}. A static field is "
                f"part of the compile key. Make `{name}` an ordinary field (`{name}: Array`), which is passed to the "
                "kernel, or a tuple of numbers, which is compiled in."
            )
    for leaf in jax.tree.leaves(value):
        _check_closure(kernel, name, leaf)
    try:
        hash(value)
    except TypeError as error:
        raise SpecError(
            f"`{name_of(kernel)}`: the static field `{name}` holds a {type(value).__name__}, which is not hashable "
            f"({error}). A static field is part of the compile key: give a tuple for a list, a tuple of pairs or a "
            "frozen dataclass for a dict."
        ) from None


def _check_closure(kernel: Kernel, name: str, value: Any) -> None:
    cells = getattr(value, "__closure__", None) or ()
    if any(isinstance(c.cell_contents, jax.core.Tracer) for c in cells if _is_filled(c)):
        raise SpecError(
            f"`{name_of(kernel)}`: the function in the static field `{name}` closes over a value that JAX is tracing. Make the "
            "function an Equinox module with that value as a field, in an ordinary field of the kernel."
        )


def _is_filled(cell) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_ATTRIBUTE_TYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}


def _typed(value: Any, dtype: str) -> np.generic:
    if dtype == "by value":
        if isinstance(value, np.generic):
            return value
        dtype = (
            "bool" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32"
        )
    with np.errstate(over="ignore"):
        return _ATTRIBUTE_TYPES[dtype](value)


def _check_attribute(kernel: Kernel, name: str, value: Any) -> None:
    if not isinstance(value, (bool, int, float, *_ATTRIBUTE_TYPES.values())):
        raise SpecError(
            f"`{name_of(kernel)}`: the attribute `{name}` must be a Python number, got {type(value).__name__}. A value "
            "that is computed by JAX is an argument of the kernel, with the term `()` in its signature."
        )
    dtype = next(f.metadata[_ATTRIBUTE] for f in dataclasses.fields(kernel) if f.name == name)
    try:
        typed = _typed(value, dtype)
    except (OverflowError, ValueError):
        typed = None
    if isinstance(typed, np.floating):
        fits = bool(np.isfinite(typed)) or not np.isfinite(value)
    else:
        fits = typed is not None and typed == value
    if not fits:
        raise SpecError(
            f"`{name_of(kernel)}`: the attribute `{name}` is {value!r}, which does not fit "
            f'{"32 bits" if dtype == "by value" else dtype}. Declare it `eqxcute.attribute(dtype="int64")` or `"float64"`.'
        )
