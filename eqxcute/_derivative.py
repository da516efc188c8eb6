"""How a kernel is differentiated.

The JVP of a kernel that brings no derivative is that of its reference. A kernel that brings `jvp` or `vjp` gets a second,
linear primitive: `tangent_p(residuals, tangents)`. Evaluated, it is `jvp`, which gives forward mode; transposed, it is
`vjp`, which gives reverse mode. Both are plain JAX, and may call kernels again, so they nest, batch and compile like
anything else.
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from . import _kernel, _sharding
from ._errors import SpecError, sizes
from ._kernel import brings
from ._primitive import Call, kernel_p, kinds, map_sizes, mapped, reference, unpack, view_of


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _jvp(primals, tangents, *, call: Call):
    found = view_of(call, [jax.typeof(x) for x in primals])
    if brings(found.kernel, "jvp") or brings(found.kernel, "vjp"):
        return _own_jvp(found, primals, tangents, call)
    if not brings(found.kernel, "reference"):
        raise NotImplementedError(
            f"`{found.name}` cannot be differentiated: it has no `reference`, no `jvp` and no `vjp`. Define one."
        )
    outputs = kernel_p.bind(*primals, call=call)
    found_tangents = _jvp_of(lambda *some: reference(call, some), primals, tangents)
    return outputs, [
        _zero(out) if t.dtype == jax.dtypes.float0 else t
        for out, t in zip(outputs, found_tangents, strict=True)
    ]


def _jvp_of(function, primals, tangents) -> list:
    """The outputs' tangents, where some of `tangents` may be symbolic zeros or of integers."""
    moving = _moving(primals, tangents)

    def of_moving(*some):
        operands = list(primals)
        for i, x in zip(moving, some, strict=True):
            operands[i] = x
        return function(*operands)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _moving(primals, tangents) -> list[int]:
    return [i for i, (x, t) in enumerate(zip(primals, tangents, strict=True)) if _moves(x, t)]


def _moves(primal, tangent) -> bool:
    return type(tangent) is not ad.Zero and _is_float(primal)


def _zero(output) -> ad.Zero:
    return ad.Zero(jax.typeof(output).to_tangent_aval())


@dataclasses.dataclass(frozen=True)
class Linear:
    """A `tangent_p` without its arrays.

    `residuals` is the tree of (kernel, residuals), `arguments` that of the arguments, with None for those that are no
    float. `maps` has a tuple of flags for each axis that `vmap` added, innermost first: which residuals have it.
    Tangents and outputs always have it.
    """

    name: str
    residuals: Any
    rest: Any
    statics: tuple
    kinds: tuple  # as of `Call`
    arguments: Any
    tree: Any  # of the kernel's outputs
    outputs: tuple[bool, ...]  # which outputs of the kernel are floats
    shapes: tuple  # (shape, dtype) of those, without the added axes
    maps: tuple[tuple[bool, ...], ...] = ()

    @property
    def count(self) -> int:
        return self.residuals.num_leaves

    def restore(self, leaves: Sequence):
        arrays = jax.tree.unflatten(self.residuals, leaves)
        return eqx.combine(arrays, jax.tree.unflatten(self.rest, self.statics))

    def over_axes(self, function, linear: int):
        """`function(*residuals, *(linear others))` over the added axes."""
        return mapped(function, [(*flags, *[True] * linear) for flags in self.maps])


def _own_jvp(found, primals, tangents, call: Call):
    fields = found.fields
    for leaf, primal, tangent in zip(found.operands[:fields], primals, tangents, strict=False):
        if _moves(primal, tangent):
            raise NotImplementedError(
                f"`{found.name}` brings its own derivative, which covers its arguments, but `{leaf.name}` is a field that "
                "is being differentiated. Make it an argument of the kernel, or wrap it in `jax.lax.stop_gradient`."
            )
    outputs = kernel_p.bind(*primals, call=call)
    for i, name in enumerate(found.kernel.checkpoint_names):
        # What is kept and what is returned have one name: a policy that keeps it keeps one array.
        outputs[i] = checkpoint_name(outputs[i], name)
    base = dataclasses.replace(call, maps=())
    trees = {}

    def residuals_of(*operands):
        kernel, arguments = base.restore(operands[: len(primals)])
        given = kernel.residuals(
            arguments, jax.tree.unflatten(found.tree, operands[len(primals) :])
        )
        arrays, rest = eqx.partition((kernel, given), _kernel.is_array)
        leaves, trees["arrays"] = jax.tree.flatten(arrays)
        statics, trees["rest"] = jax.tree.flatten(rest)
        trees["statics"], trees["kinds"] = tuple(statics), kinds((kernel, given))
        return leaves

    flags = [(*flags, *[True] * len(outputs)) for flags in call.maps]
    residuals = mapped(residuals_of, flags)(*primals, *outputs)
    linear = [
        ad.instantiate_zeros(tangent)
        for primal, tangent in zip(primals[fields:], tangents[fields:], strict=True)
        if _is_float(primal)
    ]
    linear = _spread(
        linear, primals[fields:], [f[fields:] for f in call.maps], map_sizes(call, primals)
    )
    _, floats = base.restore([object() if _is_float(x) else None for x in primals])
    # The arguments' tree with a leaf for each float and None for all else.
    floats = jax.tree.structure(eqx.filter(floats, lambda leaf: type(leaf) is object))
    params = Linear(
        found.name,
        trees["arrays"],
        trees["rest"],
        trees["statics"],
        trees["kinds"],
        floats,
        found.tree,
        tuple(_is_float(out) for out in outputs),
        tuple((out.shape, np.dtype(out.dtype)) for out in found.outputs if _is_float(out)),
        tuple(tuple([True] * len(residuals)) for _ in call.maps),
    )
    moved = iter(_bind_tangent(params, residuals, linear))
    return outputs, [next(moved) if _is_float(out) else _zero(out) for out in outputs]


def _spread(tangents, primals, maps, added):
    """Gives every tangent all added axes: their transposes then sum over them."""
    floats = [i for i, x in enumerate(primals) if _is_float(x)]
    for depth, (flags, size) in enumerate(zip(reversed(maps), added, strict=True)):
        tangents = [
            t
            if flags[i]
            else jnp.broadcast_to(
                jnp.expand_dims(t, depth), (*t.shape[:depth], size, *t.shape[depth:])
            )
            for i, t in zip(floats, tangents, strict=True)
        ]
    return tangents


ad.primitive_jvps[kernel_p] = _jvp


# The linear primitive.


tangent_p = jax.extend.core.Primitive("eqxcute_tangent")
tangent_p.multiple_results = True


def _tangent(params: Linear, *operands) -> list:
    """The outputs' tangents: `jvp`, over the added axes."""

    def one(*leaves):
        kernel, residuals = params.restore(leaves[: params.count])
        tangents = jax.tree.unflatten(params.arguments, leaves[params.count :])
        if not brings(kernel, "jvp") and not brings(kernel, "reference"):
            raise NotImplementedError(
                f"`{params.name}` has `vjp`, which gives reverse mode only. Forward mode needs `jvp` or `reference`."
            )
        if brings(kernel, "residuals") and not brings(kernel, "jvp"):
            raise NotImplementedError(
                f"`{params.name}` brings `residuals` and no `jvp`, so it has reverse mode only: the reference's `jvp` needs "
                "all arguments. Define `jvp` on what `residuals` keeps."
            )
        given = unpack(params.tree, kernel.jvp(residuals, tangents), f"`{params.name}.jvp`")
        kept = [t for t, is_float in zip(given, params.outputs, strict=True) if is_float]
        return [
            _fits(params, "jvp", f"output {i}", t, *s)
            for i, (t, s) in enumerate(zip(kept, params.shapes, strict=True))
        ]

    return params.over_axes(one, len(operands) - params.count)(*operands)


def _fits(params: Linear, method: str, what: str, value, shape, dtype):
    value = jnp.asarray(value)
    if value.shape != tuple(shape) or value.dtype != dtype:
        raise SpecError(
            f"`{params.name}.{method}` returned {value.dtype}{sizes(value.shape)} for {what}, which is "
            f"{dtype}{sizes(shape)}."
        )
    return jax.lax.convert_element_type(value, dtype)


@functools.lru_cache(maxsize=256)
def _eager(params: Linear):
    return jax.jit(functools.partial(tangent_p.bind, params=params))


@tangent_p.def_impl
def _impl(*operands, params: Linear):
    with jax.disable_jit(False):
        return _eager(params)(*operands)


@tangent_p.def_abstract_eval
def _abstract_eval(*avals, params: Linear):
    added = ()
    if params.maps:
        added = avals[params.count].shape[: len(params.maps)]
    like = avals[-1] if avals else None
    lead = tuple(like.sharding.spec)[: len(params.maps)] if like is not None else ()
    lead += (None,) * (len(added) - len(lead))
    return [
        _sharding.output_aval(like, (*added, *shape), dtype, (*lead, *[None] * len(shape)))
        for shape, dtype in params.shapes
    ]


def _bind_tangent(params: Linear, residuals: Sequence, linear: Sequence) -> list:
    return tangent_p.bind(*_sharding.alike([*residuals, *linear]), params=params)


def _lower(ctx, *operands, params: Linear):
    return mlir.lower_fun(functools.partial(_tangent, params), multiple_results=True)(
        ctx, *operands
    )


mlir.register_lowering(tangent_p, _lower)


def _tangent_jvp(primals, tangents, *, params: Linear):
    outputs = tangent_p.bind(*primals, params=params)
    if all(i >= params.count for i in _moving(primals, tangents)):
        # Linear in these: it stays one call, to be transposed as one.
        moved = [ad.instantiate_zeros(t) for t in tangents[params.count :]]
        return outputs, _bind_tangent(params, primals[: params.count], moved)
    return outputs, _jvp_of(functools.partial(_tangent, params), primals, tangents)


ad.primitive_jvps[tangent_p] = _tangent_jvp


def _transpose(cotangents, *operands, params: Linear):
    residuals, linear = operands[: params.count], operands[params.count :]
    wanted = [ad.is_undefined_primal(x) for x in linear]
    if all(type(ct) is ad.Zero for ct in cotangents):
        return [None] * params.count + [
            ad.Zero(x.aval) if w else None for x, w in zip(linear, wanted, strict=True)
        ]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    avals = [x.aval if w else jax.typeof(x) for x, w in zip(linear, wanted, strict=True)]
    depth = len(params.maps)
    inner = [(aval.shape[depth:], aval.dtype) for aval in avals]

    def one(*leaves):
        kernel, kept = params.restore(leaves[: params.count])
        if not brings(kernel, "vjp"):
            return _transposed_jvp(params, leaves, inner)
        return _own_vjp(params, kernel, kept, leaves[params.count :], inner, wanted)

    given = params.over_axes(one, len(cotangents))(*residuals, *cotangents)
    return [None] * params.count + [ct if w else None for ct, w in zip(given, wanted, strict=True)]


def _transposed_jvp(params: Linear, leaves, inner):
    base = dataclasses.replace(params, maps=())
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inner]
    back = jax.linear_transpose(lambda *t: _tangent(base, *leaves[: params.count], *t), *shapes)
    return list(back(list(leaves[params.count :])))


def _own_vjp(params: Linear, kernel, residuals, cotangents, inner, wanted):
    floats = iter(cotangents)
    full = [next(floats) if is_float else None for is_float in params.outputs]
    more = {}
    if "needed" in inspect.signature(kernel.vjp).parameters:
        more["needed"] = tuple(jax.tree.unflatten(params.arguments, wanted))
    given = kernel.vjp(residuals, jax.tree.unflatten(params.tree, full), **more)
    places = jax.tree.unflatten(params.arguments, range(params.arguments.num_leaves))
    count = len(places)
    if not isinstance(given, (tuple, list)) or len(given) != count:
        got = f"{len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
        raise SpecError(
            f"`{params.name}.vjp` must return a tuple of {count} cotangents, one an argument (None for integers), got {got}."
        )
    found = [None] * len(inner)

    def put(place, value):
        if place is not None:
            found[place] = value

    try:
        jax.tree.map(put, places, tuple(given), is_leaf=lambda leaf: leaf is None)
    except ValueError as error:
        raise SpecError(
            f"`{params.name}.vjp`: a cotangent has another structure than its argument: {error}"
        ) from None
    names = jax.tree_util.tree_leaves_with_path(places)
    return [
        jnp.zeros(shape, dtype)
        if value is None
        else _fits(params, "vjp", f"argument {jax.tree_util.keystr(path)}", value, shape, dtype)
        for value, (shape, dtype), (path, _) in zip(found, inner, names, strict=True)
    ]


ad.primitive_transposes[tangent_p] = _transpose


def _batch(operands, dims, *, params: Linear):
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    flags = tuple(d is not None for d in dims[: params.count])
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
        for x, d in zip(moved[params.count :], dims[params.count :], strict=True)
    ]
    params = dataclasses.replace(params, maps=(*params.maps, flags))
    outputs = _bind_tangent(params, moved[: params.count], linear)
    return outputs, [0] * len(outputs)


batching.primitive_batchers[tangent_p] = _batch
