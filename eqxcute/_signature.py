"""The signature string: what arrays a kernel takes and gives.

    "... n!, n! -> ... n!"

Terms are separated by commas, one a positional argument before the arrow, one an output after it. A term is dims,
separated by spaces:

    n          a size, known at run time; the same name is the same size wherever it stands
    n!         a size that is compiled in
    n%8        a size that is a multiple of 8; `n!%8` is both
    16         this size
    ...        any leading dims, or none, the same in every term; the kernel sees them folded into one. `jax.vmap` adds
               its axis here. Only as the first dim of a term; by itself it is an array of any shape, seen as 1-D
    ()         a 0-d array

and besides dims:

    [a b, c]   one argument that is a pytree, with these arrays in the order of `jax.tree.leaves`; a leaf may be None
    {}         one argument that is any pytree of arrays, nothing said of their shapes
    n?         the argument may be None

A name that is also a static integer field of the kernel is that field's value, compiled in.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from ._errors import SpecError, sizes, untied


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dim of a term. `name` is None for a plain number."""

    name: str | None
    size: int | None = None  # of a plain number
    static: bool = False
    multiple: int = 1

    def value(self, sizes: Mapping[str, int]) -> int:
        if self.name is not None:
            return sizes[self.name]
        if self.size is None:
            raise RuntimeError("Internal error: a dim of a signature with neither name nor size.")
        return self.size

    def __str__(self):
        if self.name is None:
            return str(self.size)
        promise = f"%{self.multiple}" if self.multiple > 1 else ""
        return self.name + "!" * self.static + promise


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the signature says of one array: `lead` for `...`, then the dims. `free` is an array of a `{}`."""

    dims: tuple[Dim, ...]
    lead: bool = False
    free: bool = False

    def __str__(self):
        if self.free:
            return "{}"
        return " ".join(["..."] * self.lead + [str(dim) for dim in self.dims]) or "()"


@dataclasses.dataclass(frozen=True)
class Term:
    """One argument. `specs` is None for `{}`; `tree` tells `[n]` from `n`."""

    specs: tuple[Spec, ...] | None
    tree: bool = False
    optional: bool = False

    def __str__(self):
        if self.specs is None:
            return "{}"
        text = ", ".join(map(str, self.specs))
        return (f"[{text}]" if self.tree else text) + "?" * self.optional


@dataclasses.dataclass(frozen=True)
class Signature:
    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Spec, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array that was given: where it stands, how to call it in a message, what the signature says of it."""

    name: str
    spec: Spec
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Binding:
    """A signature met by arguments. `sizes` has the value of every name, `lead` the dims that `...` stands for."""

    leaves: tuple[Leaf, ...]
    sizes: Mapping[str, int]
    lead: tuple[int, ...]

    def output_shape(self, spec: Spec) -> tuple[int, ...]:
        rest = tuple(dim.value(self.sizes) for dim in spec.dims)
        return (self.lead if spec.lead else ()) + rest


def folded(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the kernel sees: the dims of `...` are one."""
    if not spec.lead:
        return shape
    cut = len(shape) - len(spec.dims)
    return (math.prod(shape[:cut]), *shape[cut:])


_DIM = re.compile(r"(?:(?P<size>\d+)|(?P<name>[A-Za-z_]\w*)(?P<static>!?)(?:%(?P<multiple>\d+))?)")


def _parse_spec(text: str, whole: str) -> Spec:
    if text == "()":
        return Spec(())
    words = text.split()
    lead = bool(words) and words[0] == "..."
    dims = []
    for word in words[lead:]:
        match = _DIM.fullmatch(word)
        if match is None or match["multiple"] == "0":
            raise SpecError(
                f"Signature {whole!r}: {word!r} in {text!r} is no dim. A dim is a name (`n`, `n!`, `n%8`), a number, "
                "or `...` at the start of a term."
            )
        if match["size"] is not None:
            dims.append(Dim(None, int(match["size"]), static=True))
        else:
            dims.append(
                Dim(match["name"], None, bool(match["static"]), int(match["multiple"] or 1))
            )
    if not words:
        raise SpecError(
            f"Signature {whole!r} has an empty term. A 0-d array is `()`, any pytree is `{{}}`."
        )
    return Spec(tuple(dims), lead)


def _split(text: str, whole: str) -> list[str]:
    """At the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "[") - (char in "]")
        if depth < 0 or depth > 1:
            raise SpecError(f"Signature {whole!r}: brackets do not match, or are nested.")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise SpecError(f"Signature {whole!r}: a `[` is not closed.")
    return [part.strip() for part in [*parts, text[start:]]]


def _parse_term(text: str, whole: str) -> Term:
    optional = text.endswith("?")
    text = text[:-1].strip() if optional else text
    if text == "{}":
        return Term(None, tree=True)
    if text.startswith("[") and text.endswith("]"):
        return Term(
            tuple(_parse_spec(part, whole) for part in _split(text[1:-1], whole)), True, optional
        )
    return Term((_parse_spec(text, whole),), optional=optional)


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Signature:
    """Reads a signature string. Raises `SpecError` for one that means nothing."""
    halves = text.split("->")
    if len(halves) != 2:
        raise SpecError(
            f"Signature {text!r} must have one `->`: `inputs -> outputs`, as in 'n, n -> n'."
        )
    before, after = (half.strip() for half in halves)
    inputs = tuple(_parse_term(part, text) for part in _split(before, text)) if before else ()
    if not after:
        raise SpecError(f"Signature {text!r} has no output.")
    outputs = []
    for part in _split(after, text):
        if part.startswith(("[", "{")) or part.endswith("?"):
            raise SpecError(
                f"Signature {text!r}: an output is one array; list several with commas."
            )
        outputs.append(_parse_spec(part, text))
    return Signature(text, inputs, tuple(outputs))


def describe_path(root: str, path) -> str:
    """`x.m["k"]`: how a leaf of the argument `x` is reached."""
    return root + jax.tree_util.keystr(path)


def _leaves(kernel: str, term: Term, name: str, value: Any, whole: str) -> Iterator[Leaf]:
    """Pairs the arrays of one argument with what its term says of each."""
    if value is None and term.specs is not None and not term.optional:
        raise SpecError(
            f"`{kernel}`: `{name}` is None, but its term `{term}` in {whole!r} is not optional. Give an array, or write "
            f"`{term}?` if the kernel can do without."
        )
    if value is None:
        return
    if term.specs is None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            yield Leaf(describe_path(name, path), Spec((), free=True), tuple(leaf.shape))
        return
    if not term.tree:
        if not hasattr(value, "shape"):
            raise SpecError(
                f"`{kernel}`: `{name}` must be one array, as its term `{term}` in {whole!r} says; got "
                f"{type(value).__name__}. An argument that is a pytree has a term in brackets, or `{{}}`."
            )
        yield Leaf(name, term.specs[0], tuple(value.shape))
        return
    paths = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda leaf: leaf is None)
    if len(paths) != len(term.specs):
        raise SpecError(
            f"`{kernel}`: `{name}` has {len(paths)} leaves ({', '.join(describe_path(name, p) for p, _ in paths)}), but "
            f"its term `{term}` in {whole!r} has {len(term.specs)}. None counts as a leaf."
        )
    for (path, leaf), spec in zip(paths, term.specs, strict=True):
        if leaf is not None:
            yield Leaf(describe_path(name, path), spec, tuple(leaf.shape))


class _Sizes:
    """The value of every name so far, and who gave it."""

    def __init__(self, kernel: str, fields: Mapping[str, int]):
        self.kernel = kernel
        self.values = dict(fields)
        self.givers = {name: f"self.{name}" for name in fields}

    def meet(self, leaf: Leaf, dim: Dim, size: int) -> None:
        if dim.name is None:
            if size != dim.size:
                raise SpecError(
                    f"`{self.kernel}`: `{leaf.name}` has shape {sizes(leaf.shape)}, but the signature says `{leaf.spec}`: "
                    f"{dim.size} where it has {size}."
                )
            return
        known = self.values.setdefault(dim.name, size)
        giver = self.givers.setdefault(dim.name, leaf.name)
        if known != size:
            raise untied(self.kernel, dim.name, (giver, known), (leaf.name, size))
        if size % dim.multiple:
            up = -(-size // dim.multiple) * dim.multiple
            raise SpecError(
                f"`{self.kernel}`: `{leaf.name}` has `{dim.name}={size}`, which must be a multiple of {dim.multiple}: the "
                f"kernel reads {dim.multiple} elements at a time. Pad it to {up} with `jnp.pad`, and slice the result."
            )


def bind(
    kernel: str,
    signature: Signature,
    names: Sequence[str],
    arguments: Sequence[Any],
    fields: Mapping[str, int],
) -> Binding:
    """Checks arguments against a signature.

    **Arguments:**

    - `kernel`: Its name, for messages.
    - `names`: What the arguments are called.
    - `arguments`: Pytrees of things with a `shape`; None leaves allowed.
    - `fields`: The kernel's static integer fields.

    **Raises:**

    `SpecError`, naming the argument, for a wrong count, rank, size, tie or multiple.
    """
    if len(arguments) != len(signature.inputs):
        raise SpecError(
            f"`{kernel}` takes {len(signature.inputs)} arguments ({', '.join(names)}; signature {signature.text!r}), got "
            f"{len(arguments)}."
        )
    leaves = [
        leaf
        for term, name, value in zip(signature.inputs, names, arguments, strict=True)
        for leaf in _leaves(kernel, term, name, value, signature.text)
    ]
    known = _Sizes(kernel, fields)
    lead: tuple[str, tuple[int, ...]] | None = None
    for leaf in leaves:
        if leaf.spec.free:
            continue
        rank = len(leaf.spec.dims)
        if len(leaf.shape) < rank or (len(leaf.shape) > rank and not leaf.spec.lead):
            least = "at least " if leaf.spec.lead else ""
            raise SpecError(
                f"`{kernel}`: `{leaf.name}` has shape {sizes(leaf.shape)}, of rank {len(leaf.shape)}, but the signature "
                f"says `{leaf.spec}`: {least}rank {rank}. "
                + (
                    "Leading batch dims are added by `jax.vmap`."
                    if len(leaf.shape) > rank
                    else "Reshape it first."
                )
            )
        cut = len(leaf.shape) - rank
        if leaf.spec.lead:
            if lead is None:
                lead = leaf.name, leaf.shape[:cut]
            elif lead[1] != leaf.shape[:cut]:
                raise SpecError(
                    f"`{kernel}`: `{lead[0]}` and `{leaf.name}` must have the same leading dims `...`, but `{lead[0]}` has "
                    f"{sizes(lead[1])} and `{leaf.name}` has {sizes(leaf.shape[:cut])}. Broadcast one of them first."
                )
        for dim, size in zip(leaf.spec.dims, leaf.shape[cut:], strict=True):
            known.meet(leaf, dim, size)
    for spec in signature.outputs:
        for dim in spec.dims:
            if dim.name is not None and dim.name not in known.values:
                raise SpecError(
                    f"`{kernel}`: the output `{spec}` has `{dim.name}`, which no argument and no static integer field "
                    f"gives a size (signature {signature.text!r})."
                )
        if spec.lead and lead is None:
            raise SpecError(
                f"`{kernel}`: the output `{spec}` has `...`, but no argument has (signature {signature.text!r})."
            )
    return Binding(tuple(leaves), known.values, lead[1] if lead else ())
