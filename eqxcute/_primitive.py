"""The one JAX primitive behind every kernel, and what it becomes on each platform.

A kernel and its arguments are flattened into operands (arrays) and a `Call` (all the rest, hashable). `kernel_p` binds
them. Tracing only checks shapes; the compiler is called by the CUDA lowering rule and by nothing else.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir

from . import _dtypes, _kernel, _sharding, _signature
from ._errors import BackendError, DtypeError, SlowPathWarning, SpecError, sizes
from ._kernel import Kernel, brings, name_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A call without its arrays: a kernel, the structure of its arguments, and the axes that `vmap` added.

    `maps` has a tuple of flags for each axis added from outside the kernel, innermost first: which operands have it,
    always as their first axis. It is empty unless the kernel could not take the axis in itself.
    """

    arrays: Any  # the tree of (kernel, arguments), its arrays being leaves
    rest: Any  # the same tree, its leaves being all the others
    statics: tuple
    kinds: tuple  # 1, 1.0 and True are equal, and 0.0 and -0.0, but not the same kernel
    maps: tuple[tuple[bool, ...], ...] = ()

    def restore(self, operands: Sequence) -> tuple[Kernel, tuple]:
        """The kernel and its arguments, from arrays or from anything that stands for them."""
        arrays = jax.tree.unflatten(self.arrays, operands)
        return eqx.combine(arrays, jax.tree.unflatten(self.rest, self.statics))

    @property
    def inner(self) -> "Call":
        """The call inside the outermost added axis."""
        return dataclasses.replace(self, maps=self.maps[:-1])


def flatten(kernel: Kernel, arguments: tuple) -> tuple[list, Call]:
    arrays, rest = eqx.partition((kernel, arguments), _kernel.is_array)
    operands, array_tree = jax.tree.flatten(arrays)
    statics, rest_tree = jax.tree.flatten(rest)
    return operands, Call(array_tree, rest_tree, tuple(statics), kinds((kernel, arguments)))


def kinds(tree) -> tuple:
    """The types, and the signs of floats, of all that is static in a tree: what `==` does not tell apart."""
    if isinstance(tree, dict):
        return ("dict", *((kinds(key), kinds(value)) for key, value in tree.items()))
    if isinstance(tree, (tuple, list)):
        return (type(tree), *map(kinds, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return (type(tree), *(kinds(getattr(tree, f.name, None)) for f in dataclasses.fields(tree)))
    if isinstance(tree, float):
        return type(tree), math.copysign(1.0, tree)
    return (type(tree),) if not _kernel.is_array(tree) else ()


@dataclasses.dataclass(frozen=True)
class View:
    """What a call's shapes and dtypes say: checked arguments and known outputs. Without the added axes."""

    kernel: Kernel  # with `ShapeDtypeStruct`s for arrays
    arguments: tuple
    operands: tuple[_signature.Leaf, ...]  # the kernel's own arrays, then the arguments'
    fields: int  # how many of them are the kernel's own
    binding: _signature.Binding
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    output_names: tuple[str, ...]
    tree: Any  # of what a call returns
    workspace: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def name(self) -> str:
        return name_of(self.kernel)


@functools.lru_cache(maxsize=256)
def view(call: Call, shapes: tuple[tuple[int, ...], ...], dtypes: tuple, x64: bool) -> View:
    """Checks a call. Raises `SpecError` or `DtypeError`, naming the argument. `x64` is JAX's setting, which dtypes obey."""
    del x64
    structs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    kernel, arguments = call.restore(structs)
    name, signature = name_of(kernel), _kernel.signature_of(kernel)
    names = _kernel.argument_names(kernel)
    own = [
        _signature.Leaf(
            _signature.describe_path("self", path), _signature.Spec((), free=True), leaf.shape
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(kernel, is_struct))
    ]
    binding = _signature.bind(name, signature, names, arguments, _kernel.static_sizes(kernel))
    operands = (*own, *binding.leaves)
    for leaf, dtype in zip(operands, dtypes, strict=True):
        root = leaf.name.split(".")[0].split("[")[0]
        _dtypes.check(name, leaf.name, dtype, type(kernel).dtypes.get(root))
    outputs = tuple(
        jax.ShapeDtypeStruct(binding.output_shape(spec), dtype)
        for spec, dtype in zip(
            signature.outputs, _output_dtypes(kernel, arguments, signature), strict=True
        )
    )
    tree = jax.tree.structure(kernel.out_tree(*arguments))
    if tree.num_leaves != len(outputs):
        raise SpecError(
            f"`{name}.out_tree` returned {tree}, with {tree.num_leaves} leaves, but the signature {signature.text!r} has "
            f"{len(outputs)} outputs."
        )
    output_names = _kernel.output_names(kernel, tree)
    for output, out in zip(output_names, outputs, strict=True):
        _dtypes.check(name, output, out.dtype)
    workspace = _workspace(kernel, arguments)
    _check_option(kernel, "dtypes", names)
    _check_option(kernel, "layouts", [leaf.name for leaf in operands] + [*output_names])
    _check_option(kernel, "sums", output_names)
    return View(
        kernel, arguments, operands, len(own), binding, outputs, output_names, tree, workspace
    )


def is_struct(leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _check_option(kernel: Kernel, option: str, names: Sequence[str]) -> None:
    for name in getattr(kernel, option):
        if name not in names:
            raise SpecError(
                f"`{name_of(kernel)}.{option}`: {name!r} names no array of this call; there are {', '.join(map(repr, names))}."
            )


def _workspace(kernel: Kernel, arguments: tuple) -> tuple[jax.ShapeDtypeStruct, ...]:
    given = kernel.workspace(*arguments)
    given = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for i, scratch in enumerate(given):
        if not is_struct(scratch):
            raise SpecError(
                f"`{name_of(kernel)}.workspace` must return `jax.ShapeDtypeStruct`s, got {type(scratch).__name__}."
            )
        _dtypes.check(name_of(kernel), f"workspace {i}", scratch.dtype)
    return given


def _output_dtypes(kernel: Kernel, arguments: tuple, signature: _signature.Signature) -> tuple:
    dtypes = kernel.out_dtypes(*arguments)
    if not isinstance(dtypes, (tuple, list)):
        dtypes = [dtypes] * len(signature.outputs)
    if len(dtypes) != len(signature.outputs):
        raise SpecError(
            f"`{name_of(kernel)}.out_dtypes` returned {len(dtypes)} dtypes, but the signature {signature.text!r} has "
            f"{len(signature.outputs)} outputs."
        )
    try:
        return tuple(jax.dtypes.canonicalize_dtype(dtype) for dtype in dtypes)
    except TypeError as error:
        raise SpecError(f"`{name_of(kernel)}.out_dtypes` returned {dtypes}: {error}") from None


def view_of(call: Call, avals: Sequence) -> View:
    """The view of the kernel inside all added axes."""
    shapes = [tuple(a.shape) for a in avals]
    for flags in reversed(call.maps):
        shapes = [s[1:] if flag else s for s, flag in zip(shapes, flags, strict=True)]
    base, dtypes = dataclasses.replace(call, maps=()), tuple(a.dtype for a in avals)
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # JAX adds it when it runs
    return view(base, tuple(shapes), dtypes, x64)


def map_sizes(call: Call, avals: Sequence) -> tuple[int, ...]:
    """The sizes of the added axes, outermost first."""
    found, shapes = [], [tuple(a.shape) for a in avals]
    for flags in reversed(call.maps):
        found.append(next(s[0] for s, flag in zip(shapes, flags, strict=True) if flag))
        shapes = [s[1:] if flag else s for s, flag in zip(shapes, flags, strict=True)]
    return tuple(found)


def mapped(function, maps: Sequence[tuple[bool, ...]]):
    """`function(*operands)` over the added axes: `vmap` of it, once an axis."""
    for flags in maps:
        function = jax.vmap(function, in_axes=tuple(0 if flag else None for flag in flags))
    return function


def call(kernel: Kernel, arguments: tuple):
    """`kernel(*arguments)`."""
    arguments = tuple(
        jax.tree_util.tree_map_with_path(functools.partial(_as_array, kernel, i), argument)
        for i, argument in enumerate(arguments)
    )
    operands, bound = flatten(kernel, arguments)
    return jax.tree.unflatten(view_of(bound, operands).tree, bind(bound, operands))


def bind(call: Call, operands: Sequence) -> list:
    """The outputs: one call of the primitive, on every device if the operands are sharded."""
    operands = _sharding.alike(operands)

    def one(*shards):
        return kernel_p.bind(*shards, call=call)

    specs = None if call.maps else _sharding.explicit_specs(operands)
    if specs is None:
        return one(*operands)
    return _sharding.over_explicit_mesh(one, view_of(call, operands), operands, specs)


def unpack(tree, given, what: str) -> list:
    """What stands at the leaves of `tree` in `given`, which may be None. Raises `SpecError` if they differ."""
    try:
        return tree.flatten_up_to(tuple(given) if isinstance(given, list) else given)
    except ValueError as error:
        raise SpecError(
            f"{what} returned something of another structure than the outputs, {tree}: {error}"
        ) from None


def _as_array(kernel: Kernel, i: int, path, leaf):
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        return jnp.asarray(leaf)
    names = _kernel.argument_names(kernel)
    name = names[i] if i < len(names) else f"argument {i}"
    raise DtypeError(
        f"`{name_of(kernel)}`: `{_signature.describe_path(name, path)}` must be an array, got {type(leaf).__name__}. What is "
        "no array belongs into the kernel's fields."
    )


# The reference: every platform but CUDA, and the derivatives.


def reference(call: Call, operands: Sequence) -> list:
    """The outputs as the reference gives them, checked against the signature."""
    return mapped(functools.partial(_reference, dataclasses.replace(call, maps=())), call.maps)(
        *operands
    )


def _reference(call: Call, *operands) -> list:
    kernel, arguments = call.restore(operands)
    name = name_of(kernel)
    if not brings(kernel, "reference"):
        raise BackendError(
            f"`{name}` has no `reference`, so it runs on CUDA only; the default backend here is "
            f"{jax.default_backend()!r}. Define `reference`, or run on a machine with a GPU."
        )
    wanted = view_of(call, [jax.typeof(operand) for operand in operands])
    outputs = unpack(wanted.tree, kernel.reference(*arguments), f"`{name}.reference`")
    checked = []
    for output, out, want in zip(outputs, wanted.output_names, wanted.outputs, strict=True):
        output = jnp.asarray(output) if output is not None else None
        if output is None:
            raise SpecError(f"`{name}.reference` returned None for `{out}`.")
        if output.shape != want.shape or output.dtype != want.dtype:
            raise SpecError(
                f"`{name}.reference` gives `{out}` as {output.dtype}{sizes(output.shape)}, but by the signature "
                f"{_kernel.signature_of(kernel).text!r} and `out_dtypes` it is {want.dtype}{sizes(want.shape)}. Mend "
                "whichever is wrong: the kernel writes what the signature says."
            )
        checked.append(lax.convert_element_type(output, want.dtype))  # no weak type
    return checked


# The primitive.


kernel_p = jax.extend.core.Primitive("eqxcute_kernel")
kernel_p.multiple_results = True


@functools.lru_cache(maxsize=256)
def _eager(call: Call):
    return jax.jit(functools.partial(kernel_p.bind, call=call))


@kernel_p.def_impl
def _impl(*operands, call: Call):
    with jax.disable_jit(False):  # which would end up here again
        return _eager(call)(*operands)


@functools.lru_cache(maxsize=1)
def _effects():
    """The effect of an FFI call that must be kept. JAX has no public name for it."""
    kept = jax.ffi.ffi_call(
        "eqxcute.none", jax.ShapeDtypeStruct((), np.float32), has_side_effect=True
    )
    return jax.make_jaxpr(kept)().effects


@kernel_p.def_effectful_abstract_eval
def _abstract_eval(*avals, call: Call):
    found = view_of(call, avals)
    added = map_sizes(call, avals)
    like = avals[0] if avals else None
    outputs = [
        _sharding.output_aval(like, (*added, *out.shape), out.dtype) for out in found.outputs
    ]
    return outputs, _effects() if type(found.kernel).side_effect else set()


# The architecture whose PTX stands for references, on platforms but CUDA: `eqxcute.testing.interpreted`.
interpreting = jax.make_user_context(None)


def _lower_reference(ctx, *operands, call: Call):
    function = functools.partial(_lowered_reference, call)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lowered_reference(call: Call, *operands):
    if interpreting.value is None:
        return reference(call, operands)
    from .testing import run_interpreted  # here, since it leads to the interpreter

    run = functools.partial(run_interpreted, dataclasses.replace(call, maps=()), interpreting.value)
    return mapped(run, call.maps)(*operands)


def _lower_cuda(ctx, *operands, call: Call):
    function = functools.partial(launch, call)
    if _sharding.is_partitioned(ctx) and not call.maps:
        function = functools.partial(launch_partitioned, call)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


mlir.register_lowering(kernel_p, _lower_reference)
mlir.register_lowering(kernel_p, _lower_cuda, platform="cuda")


# CUDA.


def launch_partitioned(call: Call, *operands) -> list:
    """`launch`, split over devices by XLA's partitioner."""
    found = view_of(call, [jax.typeof(operand) for operand in operands])
    return _sharding.over_automatic_mesh(functools.partial(launch, call), found, operands)


def launch(call: Call, *operands) -> list:
    """The custom call, in JAX terms: fold `...`, call the target, unfold. Compiles the kernel if need be."""
    if call.maps:
        return _launch_each(call, operands)
    avals = [jax.typeof(operand) for operand in operands]
    found = view_of(call, avals)
    if not brings(found.kernel, "launch"):
        raise BackendError(
            f"`{found.name}` has no `launch`, so it does not run on CUDA. Define it."
        )
    if not type(found.kernel).side_effect and all(out.size == 0 for out in found.outputs):
        return [jnp.zeros(out.shape, out.dtype) for out in found.outputs]
    from . import _registry  # here, since it leads to jax-tvm-ffi, which other platforms do without

    plan = plan_of(found)
    target = _registry.target(found, plan)
    inputs = [
        jnp.transpose(jnp.reshape(operand, array.shape), array.order)
        for operand, array in zip(operands, plan.inputs, strict=True)
    ]
    inputs = _in_own_buffers(inputs)
    inputs += [
        jnp.full(plan.outputs[i].memory_shape, value, plan.outputs[i].dtype)
        for i, value in plan.initial
    ]
    results = [
        jax.ShapeDtypeStruct(array.memory_shape, array.dtype)
        for array in (*plan.outputs, *plan.workspace)
    ]
    outputs = jax.ffi.ffi_call(
        target,
        results,
        has_side_effect=type(found.kernel).side_effect,
        input_output_aliases=dict(plan.aliases),
    )(*inputs, **_kernel.attributes_of(found.kernel))
    outputs = _in_own_buffers(outputs[: len(plan.outputs)])
    return [
        jnp.reshape(jnp.transpose(output, np.argsort(array.order).tolist()), want.shape)
        for output, array, want in zip(outputs, plan.outputs, found.outputs, strict=True)
    ]


def _in_own_buffers(arrays: Sequence) -> list:
    """Keeps XLA from giving a kernel a pointer into the middle of an array, as a slice of it or a place to update.

    It does so where the size is a multiple of 128 bytes, whatever the offset (`DynamicSliceFusionRewriterV2`, on by default
    from jax 0.11 on), and a vector access at such a pointer is misaligned. Costs nothing but for slices and updates, which
    are copied, as they are in older versions.
    """
    sliced = [
        i for i, x in enumerate(arrays) if x.size > 0 and x.size * x.dtype.itemsize % 128 == 0
    ]
    arrays = list(arrays)
    if sliced:
        for i, x in zip(sliced, lax.optimization_barrier([arrays[i] for i in sliced]), strict=True):
            arrays[i] = x
    return arrays


def _launch_each(call: Call, operands: Sequence) -> list:
    flags = call.maps[-1]
    found = view_of(call, [jax.typeof(operand) for operand in operands])
    batched = [leaf.name for leaf, flag in zip(found.operands, flags, strict=True) if flag]
    count = next(operand.shape[0] for operand, flag in zip(operands, flags, strict=True) if flag)
    warnings.warn(
        f"`{found.name}` under `jax.vmap`: the batch axis of {', '.join(batched)} does not fit the signature "
        f"{_kernel.signature_of(found.kernel).text!r}, so the kernel is launched {count} times. It takes an axis in one "
        "launch if every argument that has the axis, and every output, starts with `...`, or by `Kernel.batch`.",
        SlowPathWarning,
        stacklevel=2,
    )

    def one(rows):
        taken = iter(rows)
        return launch(
            call.inner,
            *(next(taken) if flag else x for x, flag in zip(operands, flags, strict=True)),
        )

    return lax.map(one, [x for x, flag in zip(operands, flags, strict=True) if flag])


@dataclasses.dataclass(frozen=True)
class Size:
    """A dim as it is compiled: a number, or a symbol. Equal symbols are equal sizes."""

    number: int | None
    symbol: int = -1
    multiple: int = 1


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as the kernel sees it. `order` is the memory order, slowest dim first."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    dims: tuple[Size, ...]
    order: tuple[int, ...]

    @property
    def memory_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[i] for i in self.order)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What crosses from XLA into the kernel. Its dims and dtypes are in the compile key; its sizes are not."""

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    workspace: tuple[Array, ...]
    aliases: tuple[tuple[int, int], ...]  # input (the initial values follow the inputs) -> output
    initial: tuple[tuple[int, float], ...]  # output -> value


class _Symbols:
    """Numbers the sizes of one call in the order in which they are met."""

    def __init__(self, found: View):
        signature = _kernel.signature_of(found.kernel)
        self.fields = _kernel.static_sizes(found.kernel)
        self.static: set[str] = set()
        self.multiples: dict[str, int] = {}
        specs = [leaf.spec for leaf in found.binding.leaves] + list(signature.outputs)
        for dim in (dim for spec in specs for dim in spec.dims):
            if dim.name is None:
                continue
            self.multiples[dim.name] = math.lcm(self.multiples.get(dim.name, 1), dim.multiple)
            if dim.static or dim.name in self.fields:
                self.static.add(dim.name)
        self.numbers: dict[str, int] = {}
        self.count = 0

    def fresh(self) -> Size:
        self.count += 1
        return Size(None, self.count - 1)

    def named(self, name: str, multiple: int = 1) -> Size:
        if name not in self.numbers:
            self.numbers[name] = self.fresh().symbol
        return Size(None, self.numbers[name], multiple)

    def of(self, spec: _signature.Spec, shape: tuple[int, ...]) -> tuple[Size, ...]:
        """The dims of a folded array."""
        if spec.free:
            return tuple(self.fresh() for _ in shape)
        lead = (self.named("..."),) if spec.lead else ()
        rest = shape[len(lead) :]
        return lead + tuple(
            Size(size)
            if (dim.name is None or dim.name in self.static)
            and size > 0  # CuTe has no static dim of 0
            else self.named(dim.name or "0", self.multiples.get(dim.name or "", 1))
            for dim, size in zip(spec.dims, rest, strict=True)
        )


LARGEST = 2**31 - 1


def plan_of(found: View) -> Plan:
    symbols, signature = _Symbols(found), _kernel.signature_of(found.kernel)

    def array(name, spec, shape, dtype):
        shape = _signature.folded(spec, shape)
        for size in shape:
            if not isinstance(size, int):
                raise SpecError(
                    f"`{found.name}`: `{name}` has the symbolic size {size}. For CUDA a kernel is exported with numbers for "
                    "sizes; export it once a size."
                )
            if size > LARGEST:
                raise SpecError(
                    f"`{found.name}`: `{name}` has a dim of {size} as the kernel sees it, {sizes(shape)}; a dim is at most "
                    f"2**31 - 1 = {LARGEST}. Split the array, or give it more dims."
                )
        return Array(
            name, np.dtype(dtype), shape, symbols.of(spec, shape), _order(found, name, len(shape))
        )

    structs = jax.tree.leaves(eqx.filter((found.kernel, found.arguments), is_struct))
    inputs = tuple(
        array(leaf.name, leaf.spec, leaf.shape, struct.dtype)
        for leaf, struct in zip(found.operands, structs, strict=True)
    )
    outputs = tuple(
        array(name, spec, out.shape, out.dtype)
        for name, spec, out in zip(
            found.output_names, signature.outputs, found.outputs, strict=True
        )
    )
    free = _signature.Spec((), free=True)
    workspace = tuple(
        array(f"workspace {i}", free, scratch.shape, scratch.dtype)
        for i, scratch in enumerate(found.workspace)
    )
    initial = tuple(
        _initial(found, _find(found, key, outputs, "initial"), outputs, value)
        for key, value in type(found.kernel).initial.items()
    )
    absent = _absent(found)
    aliases = {
        _find(found, i, inputs, "aliases"): _find(found, o, outputs, "aliases")
        for i, o in type(found.kernel).aliases.items()
        if i not in absent
    }
    for i, o in aliases.items():
        _check_alias(found, inputs[i], outputs[o])
    aliases |= {len(inputs) + i: output for i, (output, _) in enumerate(initial)}
    if len(set(aliases.values())) != len(aliases):
        raise SpecError(
            f"`{found.name}`: two entries of `aliases` and `initial` name the same output."
        )
    return Plan(inputs, outputs, workspace, tuple(aliases.items()), initial)


def _initial(found: View, i: int, outputs: Sequence[Array], value) -> tuple[int, float]:
    dtype = outputs[i].dtype
    if not (
        dtype.kind == "f"
        or jnp.issubdtype(dtype, jnp.floating)
        or np.array(value).astype(dtype) == value
    ):
        raise SpecError(
            f"`{found.name}.initial`: `{outputs[i].name}` is {dtype}, which does not hold {value}."
        )
    return i, value


def _absent(found: View) -> set[str]:
    """Paths of the arguments' leaves that are None in this call."""
    names = _kernel.argument_names(found.kernel)
    return {
        _signature.describe_path(name, path)
        for name, argument in zip(names, found.arguments, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            argument, is_leaf=lambda leaf: leaf is None
        )
        if leaf is None
    }


def _order(found: View, name: str, rank: int) -> tuple[int, ...]:
    order = tuple(type(found.kernel).layouts.get(name, range(rank)))
    if sorted(order) != list(range(rank)):
        raise SpecError(
            f"`{found.name}`: layouts[{name!r}] = {order} must order the dims 0 to {rank - 1} of the array as the kernel sees "
            "it, slowest first."
        )
    return order


def _find(found: View, key: int | str, arrays: Sequence[Array], option: str) -> int:
    """The array that a number or a path names."""
    if isinstance(key, int) and 0 <= key < len(arrays):
        return key
    for i, array in enumerate(arrays):
        if array.name == key:
            return i
    raise SpecError(
        f"`{found.name}.{option}`: {key!r} names no array of this call; there are "
        f"{', '.join(f'{i} or {a.name!r}' for i, a in enumerate(arrays))}."
    )


def _check_alias(found: View, before: Array, after: Array) -> None:
    if (before.shape, before.dtype, before.order) != (after.shape, after.dtype, after.order):
        raise SpecError(
            f"`{found.name}.aliases`: `{after.name}` cannot take over the buffer of `{before.name}`: one is "
            f"{after.dtype}{sizes(after.shape)}, the other {before.dtype}{sizes(before.shape)}."
        )


# vmap.


def _batch(operands, dims, *, call: Call):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)
    ]
    flags = tuple(d is not None for d in dims)
    outputs = _batch_inside(call, operands, flags, size)
    if outputs is None:
        outputs = bind(dataclasses.replace(call, maps=(*call.maps, flags)), operands)
    return outputs, [0] * len(outputs)


def _batch_inside(call: Call, operands, flags: tuple[bool, ...], size: int):
    """The batched call as one launch: by the kernel's own rule or by growing `...`. None if neither applies."""
    if call.maps:
        return None
    avals = [
        jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype)
        for x, flag in zip(operands, flags, strict=True)
    ]
    found = view_of(call, avals)
    if brings(found.kernel, "batch") and not any(flags[: found.fields]):
        kernel, arguments = call.restore(operands)
        _, batched = call.restore(flags)
        outputs = kernel.batch(size, batched, *arguments)
        if outputs is not NotImplemented:
            return unpack(found.tree, outputs, f"`{found.name}.batch`")
    outputs = _kernel.signature_of(found.kernel).outputs
    grows = [leaf.spec.lead for leaf in found.operands]
    if not all(spec.lead for spec in outputs) or any(
        f and not g for f, g in zip(flags, grows, strict=True)
    ):
        return None
    grown = [
        jnp.broadcast_to(x, (size, *x.shape)) if grow and not flag else x
        for x, grow, flag in zip(operands, grows, flags, strict=True)
    ]
    return bind(call, grown)


batching.primitive_batchers[kernel_p] = _batch
