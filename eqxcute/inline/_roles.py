"""How arrays that broadcast reach a pointwise kernel: which are read whole, which are the same for every row.

The shape of the result is cut in two, (*lead, *dims), and every array is one of

    full      (*lead, *dims)
    row       (*dims)
    column    (*lead,)
    scalar    ()

An array of another pattern is spread over what it lacks, as little as will do. One that has to be spread to the whole shape
is `spread`: memory and time that a kernel of its own would not need.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """`shape` is cut before dim `cut`. For each array its role; `spread` are those that are broadcast to all of `shape`."""

    shape: Shape
    cut: int
    roles: tuple[str, ...]
    spread: tuple[int, ...]

    def shape_of(self, role: str) -> Shape:
        lead, dims = self.shape[: self.cut], self.shape[self.cut :]
        return {"full": self.shape, "row": dims, "column": lead, "scalar": ()}[role]

    def arranged(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays in the shapes of their roles."""
        return [
            _spread(x, self._inside(role), self.shape_of(role))
            for x, role in zip(arrays, self.roles, strict=True)
        ]

    def _inside(self, role: str) -> Shape:
        """The shape of a role, with ones, in the rank of the whole."""
        rest = len(self.shape) - self.cut
        lead = self.shape[: self.cut] if role in ("full", "column") else (1,) * self.cut
        dims = self.shape[self.cut :] if role in ("full", "row") else (1,) * rest
        return lead + dims

    def broadcastable(self, x: jax.Array, role: str, batched: bool = False) -> jax.Array:
        """An array of a role as NumPy's rules want it: with ones for what it lacks. `batched`: after one axis more."""
        return jnp.reshape(x, x.shape[:batched] + self._inside(role))

    def summed(self, x: jax.Array, role: str) -> jax.Array:
        """The transpose of broadcasting an array of a role."""
        axes = tuple(d for d, own in enumerate(self.present(role)) if not own)
        x = jnp.broadcast_to(x, self.shape)
        return jnp.sum(x, axis=axes) if axes else x  # in float32 and rounded: jnp does so

    def present(self, role: str) -> tuple[bool, ...]:
        """Which dims of the shape an array of this role has."""
        lead, rest = self.cut, len(self.shape) - self.cut
        return (role in ("full", "column"),) * lead + (role in ("full", "row"),) * rest


def term(role: str, rest: int) -> str:
    """What the bridge's signature says of an array, with `rest` dims after the cut. Outputs are "full"."""
    dims = " ".join(f"n{i}" for i in range(rest))
    return {"full": f"... {dims}".strip(), "row": dims, "column": "...", "scalar": "()"}[role]


def of_roles(roles: Sequence[str], rest: int, shapes: Sequence[Shape]) -> Layout:
    """The layout of arrays that have the shapes of their roles already."""
    lead, dims = (), ()
    for role, shape in zip(roles, shapes, strict=True):
        if role in ("full", "column"):
            lead = shape[: len(shape) - rest] if role == "full" else shape
        if role in ("full", "row"):
            dims = shape[len(shape) - rest :]
    return Layout(lead + dims, len(lead), tuple(roles), ())


def _spread(x: jax.Array, inside: Shape, shape: Shape) -> jax.Array:
    if x.shape == shape:
        return x
    padded = (1,) * (len(inside) - x.ndim) + x.shape
    if padded != inside:
        x = jnp.broadcast_to(jnp.reshape(x, padded), inside)
    return jnp.reshape(x, shape)


def layout(shapes: Sequence[Shape]) -> Layout:
    """Roles of arrays of these shapes, which must broadcast."""
    shape = jnp.broadcast_shapes(*shapes)
    rank = len(shape)
    wide = [d for d in range(rank) if shape[d] != 1]
    has = [_has(s, rank) for s in shapes]
    kinds = [_kind([own[d] for d in wide]) for own in has]
    firsts = [
        min(d for d in wide if own[d])
        for own, kind in zip(has, kinds, strict=True)
        if kind == "row"
    ]
    lasts = [
        max(d for d in wide if own[d])
        for own, kind in zip(has, kinds, strict=True)
        if kind == "column"
    ]
    if firsts:
        cut = min(firsts)
    elif lasts:
        cut = max(lasts) + 1
    else:
        cut = max(rank - 1, 0)
    roles, spread = [], []
    for i, (own, kind) in enumerate(zip(has, kinds, strict=True)):
        # A column that goes on after the cut belongs to neither part.
        if kind == "other" or (kind == "column" and any(own[d] for d in wide if d >= cut)):
            kind = "full"
            spread.append(i)
        roles.append(kind)
    return Layout(shape, cut, tuple(roles), tuple(spread))


def _has(shape: Shape, rank: int) -> list[bool]:
    return [False] * (rank - len(shape)) + [n != 1 for n in shape]


def _kind(own: list[bool]) -> str:
    if all(own):
        return "full"
    if not any(own):
        return "scalar"
    if own == sorted(own):
        return "row"
    return "column" if own == sorted(own, reverse=True) else "other"


def over(function: Any, present: Sequence[Sequence[bool]]) -> Any:
    """A function of scalars, of arrays: `present` says for each array which dims of the whole shape it has."""
    for dims in reversed(list(zip(*present, strict=True))):
        function = jax.vmap(function, in_axes=tuple(0 if own else None for own in dims))
    return function


LARGEST = 2**31 - 1


def too_large(found: Layout) -> str | None:
    """Why a kernel cannot count to this shape."""
    lead, dims = math.prod(found.shape[: found.cut]), math.prod(found.shape[found.cut :])
    if max(lead, dims) > LARGEST:
        return f"seen as rows and columns its arrays are {lead} by {dims}, and a kernel counts to 2**31 - 1"
    return None
