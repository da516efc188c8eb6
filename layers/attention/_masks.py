"""Ready-made masks. A mask is a function `(b, h, q_idx, kv_idx) -> bool`, True: may attend."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eqxcute.inline import describe

Index = Int[Array, ""]
Verdict = Bool[Array, ""] | bool


class AbstractMask(eqx.Module):
    """A mask. Masks combine with `&`, `|` and `~`, also with plain functions on either side.

    Sizes that are fixed per model (windows, chunks) are static; what changes from batch to batch
    (document ids, lengths, offsets) is an array, and changing it compiles nothing anew.

    A mask of your own is a subclass with a `__call__`, or just a function. Arrays go into
    fields and are read at the indices: `self.ids[b, q_idx]`.
    """

    @abc.abstractmethod
    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        """True where query `q_idx` may see key `kv_idx`."""

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        """Raise where the mask was made for other sizes. Reading an array past its end gives its
        last entry, without a word."""
        del batch, heads, q_len, kv_len

    def __and__(self, other: Callable) -> "AndMask":
        return AndMask(self, other) if callable(other) else NotImplemented

    def __rand__(self, other: Callable) -> "AndMask":
        return AndMask(other, self) if callable(other) else NotImplemented

    def __or__(self, other: Callable) -> "OrMask":
        return OrMask(self, other) if callable(other) else NotImplemented

    def __ror__(self, other: Callable) -> "OrMask":
        return OrMask(other, self) if callable(other) else NotImplemented

    def __invert__(self) -> "NotMask":
        return NotMask(self)


class AndMask(AbstractMask):
    """`first & second`: what both allow."""

    first: Callable
    second: Callable

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        first, second = (_call(f, b, h, q_idx, kv_idx) for f in (self.first, self.second))
        return jnp.logical_and(first, second)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_each((self.first, self.second), batch, heads, q_len, kv_len)


class OrMask(AbstractMask):
    """`first | second`: what either allows."""

    first: Callable
    second: Callable

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        first, second = (_call(f, b, h, q_idx, kv_idx) for f in (self.first, self.second))
        return jnp.logical_or(first, second)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_each((self.first, self.second), batch, heads, q_len, kv_len)


class NotMask(AbstractMask):
    """`~mask`: what `mask` forbids."""

    mask: Callable

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return jnp.logical_not(_call(self.mask, b, h, q_idx, kv_idx))

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_each((self.mask,), batch, heads, q_len, kv_len)


class FullMask(AbstractMask):
    """Every query sees every key."""

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return jnp.asarray(True)


class CausalMask(AbstractMask):
    """`q_idx + offset >= kv_idx`: no query sees a later key.

    With `offset=0`, query 0 stands beside key 0 (top-left alignment). For queries that are the
    last of the keys, as in decoding with a cache, `offset = kv_len - q_len` (bottom-right
    alignment): `CausalMask.bottom_right(q_len, kv_len)`, or an array where the position is
    known only at run time.
    """

    offset: int | Int[Array, ""] | Int[Array, " batch"]

    def __init__(self, offset: int | Int[Array, ""] | Int[Array, " batch"] = 0):
        """**Arguments:**

        - `offset`: Position of query 0 among the keys: an int, a 0-d array, or one entry per
            batch entry.
        """
        self.offset = _integer("CausalMask: offset", offset)

    @staticmethod
    def bottom_right(q_len: int, kv_len: int) -> "CausalMask":
        """The mask under which the last query sees every key."""
        return CausalMask(kv_len - q_len)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return q_idx + _at(self.offset, b) >= kv_idx

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_batch("CausalMask: offset", self.offset, batch)


class SlidingWindowMask(AbstractMask):
    """`-left <= kv_idx - (q_idx + offset) <= right`: keys near the query.

    `SlidingWindowMask(left=1023)` lets each query see itself and the 1023 keys before it: a
    causal window of 1024. `left=0` with `right=0` is the query's own position alone.
    """

    left: int | None = eqx.field(static=True)
    right: int | None = eqx.field(static=True)
    offset: int | Int[Array, ""] | Int[Array, " batch"]

    def __init__(
        self,
        left: int | None,
        right: int | None = 0,
        *,
        offset: int | Int[Array, ""] | Int[Array, " batch"] = 0,
    ):
        """**Arguments:**

        - `left`: How many keys before the query it sees; `None` for all.
        - `right`: How many keys after the query it sees; `None` for all. Default none.
        - `offset`: Position of query 0 among the keys, as for `CausalMask`. (Keyword only
            argument.)
        """
        self.left = None if left is None else _size("SlidingWindowMask: left", left, 0)
        self.right = None if right is None else _size("SlidingWindowMask: right", right, 0)
        self.offset = _integer("SlidingWindowMask: offset", offset)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        distance = kv_idx - (q_idx + _at(self.offset, b))
        seen = jnp.asarray(True)
        if self.left is not None:
            seen = seen & (distance >= -self.left)
        if self.right is not None:
            seen = seen & (distance <= self.right)
        return seen

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_batch("SlidingWindowMask: offset", self.offset, batch)


class DocumentMask(AbstractMask):
    """`q_ids[q_idx] == kv_ids[kv_idx]`: packed sequences see only their own document.

    Ids need not be sorted. Combine with `CausalMask()` for causal documents.
    """

    q_ids: Int[Array, " q_len"] | Int[Array, "batch q_len"]
    kv_ids: Int[Array, " kv_len"] | Int[Array, "batch kv_len"] | None

    def __init__(
        self,
        q_ids: Int[Array, " q_len"] | Int[Array, "batch q_len"],
        kv_ids: Int[Array, " kv_len"] | Int[Array, "batch kv_len"] | None = None,
    ):
        """**Arguments:**

        - `q_ids`: The document of each query, one row for all or one per batch entry.
        - `kv_ids`: The document of each key. Default: as `q_ids`.
        """
        self.q_ids = _integers("DocumentMask: q_ids", q_ids, (1, 2))
        self.kv_ids = None if kv_ids is None else _integers("DocumentMask: kv_ids", kv_ids, (1, 2))

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        return _row(self.q_ids, b, q_idx) == _row(kv_ids, b, kv_idx)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_rows("DocumentMask: q_ids", self.q_ids, batch, "q_len", q_len)
        name = "DocumentMask: q_ids (used for the keys too)"
        ids = self.q_ids
        if self.kv_ids is not None:
            name, ids = "DocumentMask: kv_ids", self.kv_ids
        _check_rows(name, ids, batch, "kv_len", kv_len)


class PrefixLMMask(AbstractMask):
    """`(kv_idx < prefix) | (q_idx >= kv_idx)`: a prefix that all see, then causal."""

    prefix: int | Int[Array, ""] | Int[Array, " batch"]

    def __init__(self, prefix: int | Int[Array, ""] | Int[Array, " batch"]):
        """**Arguments:**

        - `prefix`: Length of the prefix: an int, a 0-d array, or one entry per batch entry.
        """
        self.prefix = _integer("PrefixLMMask: prefix", prefix)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return (kv_idx < _at(self.prefix, b)) | (q_idx >= kv_idx)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_batch("PrefixLMMask: prefix", self.prefix, batch)


class ChunkedMask(AbstractMask):
    """`q_idx // size == kv_idx // size`: each chunk sees itself alone.

    Combine with `CausalMask()` for chunked causal attention.
    """

    size: int = eqx.field(static=True)

    def __init__(self, size: int):
        """**Arguments:**

        - `size`: Length of a chunk.
        """
        self.size = _size("ChunkedMask: size", size, 1)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return q_idx // self.size == kv_idx // self.size


class DilatedMask(AbstractMask):
    """`(q_idx - kv_idx) % dilation == 0`: every `dilation`-th key, the query's own included.

    Combine with `SlidingWindowMask` for a dilated window.
    """

    dilation: int = eqx.field(static=True)

    def __init__(self, dilation: int):
        """**Arguments:**

        - `dilation`: Distance between the keys seen; 1 is every key.
        """
        self.dilation = _size("DilatedMask: dilation", dilation, 1)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        return (q_idx - kv_idx) % self.dilation == 0


class PaddingMask(AbstractMask):
    """`kv_idx < kv_lengths[b]`, and `q_idx < q_lengths[b]` where given: padding is not seen.

    Rows of padded queries give 0 where `q_lengths` is given; else they see the valid keys.
    """

    kv_lengths: Int[Array, ""] | Int[Array, " batch"]
    q_lengths: Int[Array, ""] | Int[Array, " batch"] | None

    def __init__(
        self,
        kv_lengths: int | Int[Array, ""] | Int[Array, " batch"],
        q_lengths: int | Int[Array, ""] | Int[Array, " batch"] | None = None,
    ):
        """**Arguments:**

        - `kv_lengths`: How many keys are real: one number, or one per batch entry.
        - `q_lengths`: How many queries are real. Default: all.
        """
        self.kv_lengths = _integers("PaddingMask: kv_lengths", kv_lengths, (0, 1))
        self.q_lengths = None
        if q_lengths is not None:
            self.q_lengths = _integers("PaddingMask: q_lengths", q_lengths, (0, 1))

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Verdict:
        real = kv_idx < _at(self.kv_lengths, b)
        return real if self.q_lengths is None else real & (q_idx < _at(self.q_lengths, b))

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_batch("PaddingMask: kv_lengths", self.kv_lengths, batch)
        _check_batch("PaddingMask: q_lengths", self.q_lengths, batch)


def _at(x: Any, b: Index) -> Any:
    """A number for all, or the batch entry's own."""
    return x[b] if jnp.ndim(x) else x


def _row(ids: Any, b: Index, i: Index) -> Any:
    return ids[i] if ids.ndim == 1 else ids[b, i]


def _call(mask: Callable, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
    """A part of a combination. `jnp.logical_and` would take a float for a bool."""
    result = mask(b, h, q_idx, kv_idx)
    if jnp.result_type(result) != jnp.bool_:
        raise TypeError(
            f"mask_fn {describe(mask)} must return a bool (True: may attend), but returned "
            f"{jnp.result_type(result).name}. Compare instead, e.g. `q_idx >= kv_idx`."
        )
    return result


def _size(name: str, value: Any, smallest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a Python int: it is static. Got {type(value).__name__}.")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, but is {value}.")
    return int(value)


def _integer(name: str, value: Any) -> Any:
    """An int stays one (static under `eqx.filter_jit`), an array stays an array."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _integers(name, value, (0, 1))


def _integers(name: str, value: Any, ranks: tuple[int, ...]) -> Any:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, not {array.dtype.name}.")
    if array.ndim not in ranks:
        wanted = " or ".join(str(r) for r in ranks)
        raise ValueError(f"{name} must have {wanted} dims, but has shape {array.shape}.")
    return array


def _check_each(masks, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    for mask in masks:
        if isinstance(mask, AbstractMask):
            mask.check_sizes(batch, heads, q_len, kv_len)


def _check_batch(name: str, value: Any, batch: int) -> None:
    if value is not None and jnp.ndim(value) == 1 and value.shape[0] != batch:
        raise ValueError(
            f"{name} has {value.shape[0]} entries, but q has {batch} batch entries (its leading "
            "dims together). Under jax.vmap map over the mask as well, or give one number."
        )


def _check_rows(name: str, ids: Any, batch: int, dim: str, length: int) -> None:
    if ids.ndim == 2:
        _check_batch_rows(name, ids, batch)
    if ids.shape[-1] != length:
        raise ValueError(
            f"{name} was made for {dim} {ids.shape[-1]}, but {dim} is {length}. Make the mask "
            "anew from ids of that length."
        )


def _check_batch_rows(name: str, ids: Any, batch: int) -> None:
    if ids.shape[0] != batch:
        raise ValueError(
            f"{name} has {ids.shape[0]} rows, but q has {batch} batch entries (its leading dims "
            "together). Under jax.vmap map over the mask as well, or give one row."
        )
