"""Kernels over several devices: each device runs the kernel on its shard.

A dim may be sharded if the kernel treats its entries independently: the dims of `...`, and names in `Kernel.parallel`. All
others are whole on every device. Outputs named in `Kernel.sums` are added up over the shards of dims that they lack.

Inside `jax.shard_map` there is nothing to do but to keep track of the axes over which values vary. Under an explicit mesh,
the call becomes a `shard_map` by its arguments' types, and what cannot be sharded is an error. Under an automatic mesh,
XLA's partitioner asks by `custom_partitioning`, which has the signature as its Shardy rule, and what cannot be sharded is
gathered.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from . import _kernel, _signature
from ._errors import SpecError

# Values that vary over manual axes.


def varying(operand) -> frozenset:
    """The manual mesh axes over which a value varies, inside `shard_map`."""
    return varying_of(jax.typeof(operand))


def varying_of(kind) -> frozenset:
    """As `varying`, of a type."""
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def varying_of_any(operands: Sequence) -> frozenset:
    """The axes over which one of them varies."""
    return frozenset().union(*map(varying, operands))


def alike(operands: Sequence) -> list:
    """Operands that all vary over the same manual axes, as a primitive needs them."""
    axes = varying_of_any(operands)
    return [over(operand, axes) for operand in operands]


def over(operand, axes: frozenset):
    """A value that varies over these manual axes too."""
    more = tuple(axes - varying(operand))
    return jax.lax.pcast(operand, more, to="varying") if more else operand


def whole(operand):
    """The same array, on every device of an explicit mesh over whose axes its type is sharded."""
    spec = jax.typeof(operand).sharding.spec
    if not any(spec):
        return operand
    return jax.sharding.reshard(operand, PartitionSpec(*[None] * operand.ndim))


def output_aval(like, shape, dtype, spec=None):
    """The type of an output: on the mesh of `like`, varying as that does."""
    if like is None:
        return jax.core.ShapedArray(shape, dtype)
    entries = spec if spec is not None else [None] * len(shape)
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*entries))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


# Sharded dims, by the signature.


def _entries(spec, rank: int) -> tuple:
    return (*spec, *[None] * (rank - len(spec)))


def _dims(spec: _signature.Spec, rank: int) -> list:
    """What each dim of an array is called: a name, a number for one of `...`, None for neither."""
    if spec.free:
        return [None] * rank
    lead = rank - len(spec.dims)
    return list(range(lead)) + [dim.name for dim in spec.dims]


def _may_shard(found) -> set:
    """The dims that may be sharded: every output has them, or is a sum over them."""
    kernel, outputs = found.kernel, _kernel.signature_of(found.kernel).outputs
    dims = [
        set(_dims(spec, len(out.shape)))
        for name, spec, out in zip(found.output_names, outputs, found.outputs, strict=True)
        if name not in kernel.sums
    ]
    candidates = {*range(len(found.binding.lead)), *kernel.parallel}
    return candidates.intersection(*dims)


class Split(NamedTuple):
    """How a call is sharded. `sums` has the mesh axes over which each output of a shard is only a part of a sum."""

    inputs: list[PartitionSpec]
    outputs: list[PartitionSpec]
    sums: list[tuple]

    def over_shards(self, function):
        """`function(*shards)`, its partial sums added up."""

        def summed(*shards):
            outputs = function(*shards)
            return [
                jax.lax.psum(out, axes) if axes else out
                for out, axes in zip(outputs, self.sums, strict=True)
            ]

        return summed


def split(found, specs: Sequence, *, strict: bool) -> Split:
    """How operands and outputs are sharded, given how the operands are now.

    **Raises:**

    `SpecError` if `strict` and an operand is sharded along a dim that must be whole.
    """
    may = _may_shard(found)
    chosen: dict = {}
    for leaf, spec in zip(found.operands, specs, strict=True):
        rank = len(leaf.shape)
        for i, (dim, entry) in enumerate(
            zip(_dims(leaf.spec, rank), _entries(spec, rank), strict=True)
        ):
            if entry is None:
                continue
            if dim not in may:
                if strict:
                    raise _not_shardable(found, leaf, i, entry)
                continue
            if chosen.setdefault(dim, entry) != entry and strict:
                raise SpecError(
                    f"`{found.name}`: dim {i} of `{leaf.name}` is sharded over {entry!r}, but the same dim of another argument "
                    f"over {chosen[dim]!r}. Reshard one of them: `jax.sharding.reshard(x, ...)`."
                )

    def spec_of(dims):
        return PartitionSpec(*[None if dim is None else chosen.get(dim) for dim in dims])

    outputs = [
        _dims(spec, len(out.shape))
        for spec, out in zip(_kernel.signature_of(found.kernel).outputs, found.outputs, strict=True)
    ]
    return Split(
        [spec_of(_dims(leaf.spec, len(leaf.shape))) for leaf in found.operands],
        [spec_of(dims) for dims in outputs],
        [_axes(entry for dim, entry in chosen.items() if dim not in dims) for dims in outputs],
    )


def _axes(entries) -> tuple:
    """Mesh axes: an entry of a partition spec is one of them or a tuple."""
    return tuple(
        axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))
    )


def _not_shardable(found, leaf, i: int, axis) -> SpecError:
    names = ", ".join(type(found.kernel).parallel) or "none"
    return SpecError(
        f"`{found.name}`: dim {i} of `{leaf.name}` is sharded over the mesh axis {axis!r}, but the kernel needs it whole: "
        f"dims of `...` and those in `parallel` ({names}) may be sharded, if every output has them or is in `sums`. Reshard "
        "the argument (`jax.sharding.reshard`), or call the kernel inside `jax.shard_map` and combine the shards there."
    )


# Explicit meshes.


def explicit_specs(operands: Sequence) -> list | None:
    """The operands' partition specs if any is sharded over an explicit mesh axis, else None."""
    specs = [jax.typeof(operand).sharding.spec for operand in operands]
    return specs if any(entry is not None for spec in specs for entry in spec) else None


def over_explicit_mesh(function, found, operands: Sequence, specs: Sequence):
    """`function(*operands)` as a `shard_map` by the operands' types."""
    how = split(found, specs, strict=True)
    mesh = next(
        jax.typeof(x).sharding.mesh
        for x, spec in zip(operands, specs, strict=True)
        if any(entry is not None for entry in spec)
    )
    operands = [
        x
        if tuple(_entries(spec, x.ndim)) == tuple(want)
        else jax.sharding.reshard(x, NamedSharding(mesh, want))
        for x, spec, want in zip(operands, specs, how.inputs, strict=True)
    ]
    mapped = jax.shard_map(
        how.over_shards(function),
        mesh=mesh,
        in_specs=tuple(how.inputs),
        out_specs=how.outputs,
        axis_names=set(mesh.explicit_axes),
    )
    return mapped(*operands)


# Automatic meshes.


def is_partitioned(ctx) -> bool:
    """True if XLA partitions the module that is being lowered. JAX keeps this on a private context, with no public reader."""
    context = ctx.module_context.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is not None:
        return any(size > 1 for axis, size in context.mesh.shape.items() if axis not in manual)
    return (getattr(context, "num_devices", 1) or 1) > 1


def shardy_rule(found) -> tuple[str, tuple[str, ...]]:
    """The signature with a letter a dim, as Shardy reads it, and the dims that must be whole."""
    may = _may_shard(found)
    names: dict = {}
    whole = []

    def factor(dim):
        if dim is None:
            dim = ("free", len(names))
        if dim not in names:
            names[dim] = f"d{len(names)}"
            if dim not in may:
                whole.append(names[dim])
        return names[dim]

    def term(spec, rank):
        return " ".join(factor(dim) for dim in _dims(spec, rank))

    outputs = _kernel.signature_of(found.kernel).outputs
    inputs = ", ".join(term(leaf.spec, len(leaf.shape)) for leaf in found.operands)
    results = ", ".join(
        term(spec, len(out.shape)) for spec, out in zip(outputs, found.outputs, strict=True)
    )
    return f"{inputs} -> {results}", tuple(whole)


def over_automatic_mesh(function, found, operands: Sequence) -> list:
    """`function(*operands)` for XLA's partitioner to split."""

    def how(arguments) -> Split:
        specs = [getattr(getattr(a, "sharding", None), "spec", PartitionSpec()) for a in arguments]
        return split(found, specs, strict=False)

    def on(mesh, specs):
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    def partition(mesh, arguments, _):
        chosen = how(arguments)
        shard = chosen.over_shards(function)
        return (
            mesh,
            lambda *shards: tuple(shard(*shards)),
            on(mesh, chosen.outputs),
            on(mesh, chosen.inputs),
        )

    def infer(mesh, arguments, _):
        return on(mesh, how(arguments).outputs)

    rule, whole = shardy_rule(found)
    call = custom_partitioning(lambda *some: tuple(function(*some)))
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        need_replication_factors=whole,
    )
    return list(call(*operands))
