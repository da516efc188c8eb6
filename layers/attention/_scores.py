"""Ready-made score functions: `(score, b, h, q_idx, kv_idx) -> score`, on the scaled score."""

import abc
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Index = Int[Array, ""]
Score = Float[Array, ""]


class AbstractScore(eqx.Module):
    """A change of the scores. `first.then(second)` applies both; plain functions fit too.

    Float arrays in fields are leaves and train: the gradient has the array's own dtype and is
    summed in float32.
    """

    @abc.abstractmethod
    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        """The new score of query `q_idx` and key `kv_idx`."""

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        """Raise where arrays were made for other sizes. Reading an array past its end gives its
        last entry, without a word."""
        del batch, heads, q_len, kv_len

    def then(self, other: Callable) -> "ComposedScore":
        """This one, and `other` on what it gives."""
        return ComposedScore(self, other)


class ComposedScore(AbstractScore):
    """Score functions one after the other, the first given first."""

    parts: tuple[Callable, ...]

    def __init__(self, *parts: Callable):
        """**Arguments:**

        - `parts`: Score modules or plain functions, in the order in which they apply.
        """
        for part in parts:
            if not callable(part):
                raise TypeError(
                    f"ComposedScore: each part must be a function of (score, b, h, q_idx, kv_idx)"
                    f", not {type(part).__name__}. For an array of biases use AdditiveBias(bias)."
                )
        self.parts = parts

    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        for part in self.parts:
            score = part(score, b, h, q_idx, kv_idx)
        return score

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        for part in self.parts:
            if isinstance(part, AbstractScore):
                part.check_sizes(batch, heads, q_len, kv_len)


class SoftCap(AbstractScore):
    """`cap * tanh(score / cap)`: scores stay between `-cap` and `cap`."""

    cap: float = eqx.field(static=True)

    def __init__(self, cap: float):
        """**Arguments:**

        - `cap`: The bound, above 0.
        """
        if isinstance(cap, bool) or not isinstance(cap, int | float | np.number):
            raise TypeError(f"SoftCap: cap must be a number, not {type(cap).__name__}.")
        if not 0 < cap < math.inf:
            raise ValueError(f"SoftCap: cap must be above 0 and finite, but is {cap}.")
        self.cap = float(cap)

    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        return self.cap * jnp.tanh(score / self.cap)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " heads"]:
    """The slopes of ALiBi (Press, Smith and Lewis 2021, section 3), in float32.

    For `n` heads, a power of two, the geometric sequence `2^(-8/n), 2^(-16/n), ..., 2^-8`.
    Otherwise that of the next lower power of two, and then every other one, from the first on,
    of twice that power.

    **Arguments:**

    - `num_heads`: The number of query heads.

    **Returns:** A numpy array: constants, not weights.
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be at least 1, but is {num_heads}.")

    def powers(n: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]

    lower = 1 << (num_heads.bit_length() - 1)
    slopes = powers(lower) + powers(2 * lower)[::2]
    return np.asarray(slopes[:num_heads], np.float32)


class ALiBi(AbstractScore):
    """`score - slopes[h] * |q_idx + offset - kv_idx|`: a penalty on distance, per query head.

    `ALiBi(num_heads)` has the paper's fixed slopes, which are no leaves; `ALiBi(slopes=...)` has
    a leaf that trains.
    """

    slopes: Float[Array, " heads"] | None
    num_heads: int = eqx.field(static=True)
    offset: int | Int[Array, ""]

    def __init__(
        self,
        num_heads: int | None = None,
        *,
        slopes: Float[Array, " heads"] | None = None,
        offset: int | Int[Array, ""] = 0,
    ):
        """**Arguments:**

        - `num_heads`: The number of query heads, for the fixed slopes of `alibi_slopes`.
        - `slopes`: Slopes of your own, instead. (Keyword only argument.)
        - `offset`: Position of query 0 among the keys. (Keyword only argument.)
        """
        if slopes is not None and num_heads is None:
            self.slopes = _floats("ALiBi: slopes", slopes, (1,))
            self.num_heads = self.slopes.shape[0]
        elif num_heads is not None and slopes is None:
            self.slopes, self.num_heads = None, num_heads
        else:
            raise ValueError("ALiBi: give either num_heads or slopes.")
        self.offset = offset

    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        slopes = self.slopes
        if slopes is None:
            slopes = jnp.asarray(alibi_slopes(self.num_heads))
        distance = jnp.abs(q_idx + self.offset - kv_idx).astype(score.dtype)
        return score - slopes[h].astype(score.dtype) * distance

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_heads("ALiBi: slopes", self.num_heads, heads)


class RelativeBias(AbstractScore):
    """`score + table[h, clip(kv_idx - q_idx - offset, -max, max) + max]`: a learned bias per
    head and distance, distances clipped (Shaw, Uszkoreit and Vaswani 2018, section 3.2).

    Clipped distances, not the logarithmic buckets of T5: every distance up to `max` has a weight
    of its own, and the index is two comparisons.
    """

    table: Float[Array, "heads distances"]
    offset: int | Int[Array, ""]

    def __init__(self, table: Float[Array, "heads distances"], *, offset: int | Int[Array, ""] = 0):
        """**Arguments:**

        - `table`: One row per query head, `2 * max + 1` entries: distance `-max` first (a key
            before the query), then up to `max`.
        - `offset`: Position of query 0 among the keys. (Keyword only argument.)
        """
        self.table = _floats("RelativeBias: table", table, (2,))
        if self.table.shape[1] % 2 == 0:
            raise ValueError(
                "RelativeBias: table must have 2 * max + 1 entries a head, an odd number, but has "
                f"{self.table.shape[1]}."
            )
        self.offset = offset

    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        most = self.table.shape[1] // 2
        distance = jnp.clip(kv_idx - q_idx - self.offset, -most, most)
        return score + self.table[h, distance + most].astype(score.dtype)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        _check_heads("RelativeBias: table", self.table.shape[0], heads)


class AdditiveBias(AbstractScore):
    """`score + bias[b, h, q_idx, kv_idx]`, where leading axes may be missing or have size 1.

    This holds an array of up to batch x heads x q_len x kv_len: where the bias follows a formula,
    a score function is smaller and faster.
    """

    bias: Float[Array, "..."]

    def __init__(self, bias: Float[Array, "..."]):
        """**Arguments:**

        - `bias`: Shape `(q_len, kv_len)`, `(heads, q_len, kv_len)` or `(batch, heads, q_len,
            kv_len)`; each size may be 1. A bias per batch entry that is equal for all heads has
            shape `(batch, 1, q_len, kv_len)`.
        """
        self.bias = _floats("AdditiveBias: bias", bias, (2, 3, 4))

    def __call__(self, score: Score, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Score:
        indices = (b, h, q_idx, kv_idx)[4 - self.bias.ndim :]
        sizes = self.bias.shape
        entry = self.bias[tuple(0 if n == 1 else i for i, n in zip(indices, sizes, strict=True))]
        return score + entry.astype(score.dtype)

    def check_sizes(self, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        names = ("batch", "heads", "q_len", "kv_len")[4 - self.bias.ndim :]
        wanted = (batch, heads, q_len, kv_len)[4 - self.bias.ndim :]
        for name, size, want in zip(names, self.bias.shape, wanted, strict=True):
            if size not in (1, want):
                raise ValueError(
                    f"AdditiveBias: bias has shape {self.bias.shape}, where {name} is {size}; it "
                    f"must be {want} or 1 to fit q and k."
                )


def _floats(name: str, value: Any, ranks: tuple[int, ...]) -> Array:
    array = jnp.asarray(value)
    if array.dtype == jnp.bool_:
        raise TypeError(
            f"{name} must hold floats, but holds bools, which would be added as 0 and 1. A mask "
            "is a mask_fn: `lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]`."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must hold floats, not {array.dtype.name}.")
    if array.ndim not in ranks:
        wanted = " or ".join(str(r) for r in ranks)
        raise ValueError(f"{name} must have {wanted} dims, but has shape {array.shape}.")
    return array


def _check_heads(name: str, got: int, heads: int) -> None:
    if got != heads:
        raise ValueError(f"{name} is for {got} heads, but q has {heads}.")
