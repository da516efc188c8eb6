"""A mask and a score function over a tile of scores, each part computed no more often than it varies:

    scores = bind_head(start_scores(...), place, rows)      # once for a CTA's head
    row = bind_scores(scores, q_idx=q)                      # once for each row of queries that a thread holds
    column = bind_scores(scores, kv_idx=kv)                 # once for each of its columns
    pair = join_scores(row, column)
    scored(pair, s), allowed(pair), derivatives(pair, s)

Plain functions and frozen records: CuTe carries neither through a loop on the device.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from eqxcute.inline import Code, Scaled, Step, bind, join, results, small, small_scores, start

from .walk import Place


@dataclasses.dataclass(frozen=True)
class Scores:
    """The mask, the score and its derivative, as far as they are computed. None: there is no such function."""

    mask: Any
    score: Any
    derivative: Any = None

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.mask, self.score, self.derivative


def start_scores(
    mask: Code | None,
    score: Code | None,
    mask_arrays: Sequence,
    score_arrays: Sequence,
    derivative: Code | None = None,
    *,
    exact: bool = False,
) -> Scores:
    """What depends on no index. The arrays are those that the codes read, in order; a derivative reads the score's.

    Masks are exact. Scores go into an exponential, and unless `exact` use the hardware's approximations that suit it.
    """
    fast = False if exact else "scores"
    return Scores(
        None if mask is None else start(mask, mask_arrays),
        None if score is None else start(score, score_arrays, fast=fast),
        None if derivative is None else start(derivative, score_arrays, fast=fast),
    )


def bind_scores(scores: Scores, **scalars: Any) -> Scores:
    return Scores(*[None if p is None else bind(p, **scalars) for p in scores.parts])


def bind_head(scores: Scores, place: Place, rows: cute.Tensor) -> Scores:
    """At a CTA's head. `v1`, `v2`, ... are what `jax.vmap` added to `rows`."""
    mapped = {f"v{i}": rows[place.row, i] for i in range(1, rows.shape[1])}
    return bind_scores(scores, b=place.b, h=place.h, **mapped)


def join_scores(a: Scores, b: Scores) -> Scores:
    return Scores(
        *[None if p is None else join(p, r) for p, r in zip(a.parts, b.parts, strict=True)]
    )


def pairs(
    head: Scores, each_row: Sequence[Scores], at: cute.Tensor, first: Int32
) -> Iterator[tuple[int, int, Int32, Scores]]:
    """Of each element of a thread's part of a tile: its row and column there, its key, and the functions at it.

    `at` has the coordinates in the tile, by rows; `each_row` the functions at each of the rows; `first` is the tile's
    first key.
    """
    for c in range(cute.size(at, mode=[1])):
        step = step_of(at, first, c)
        key = step.base + step.by
        column = bind_scores(head, kv_idx=step)
        for r, row in enumerate(each_row):
            yield r, c, key, join_scores(row, column)


def step_of(at: cute.Tensor, first: Int32, c: int) -> Step:
    """The index of a thread's column: `first` is the tile's."""
    return Step(first + at[0, 0][1], at.layout((0, c))[1])  # the layout alone knows it as a number


def small_limit(*codes: Code) -> float | None:
    """Up to which size of scores `of_small` holds for all of the codes: None where it cannot be said, or is of no use."""
    limits = [small_scores(code) for code in codes]
    return None if None in limits else min(limits)


def of_small(pair: Scores) -> Scores:
    """At scores that `small_limit` allows: tanh is a polynomial."""
    parts = pair.score, pair.derivative
    return Scores(pair.mask, *[None if p is None else small(p) for p in parts])


def all_small(s: cute.Tensor, scale: Float32, limit: float) -> Boolean:
    """Whether all products of a warp make small scores. A NaN is one, and stays one."""
    found = Float32(0.0)
    for i in range(cute.size(s)):
        found = cute.arch.fmax(found, cute.math.absf(s[i]))
    usual = (scale > 2.0**-8) & (scale < 2.0**8)
    return cute.arch.vote_all_sync(found <= select(usual, limit / scale, Float32(-1.0)))


def scored(pair: Scores, score: Float32 | Scaled) -> Float32:
    """The score of a pair, from the scaled product."""
    return score if pair.score is None else results(bind(pair.score, score=score))[0]


def allowed(pair: Scores) -> Boolean | None:
    """Whether the query may see the key; None for always."""
    return None if pair.mask is None else results(pair.mask)[0]


def masked(pair: Scores, inside: Boolean, value: Float32) -> Float32:
    """-inf where the query may not see the key, or the key is not `inside`."""
    keep = allowed(pair)
    return select(inside if keep is None else inside & keep, value, -Float32.inf)


def derivatives(pair: Scores, score: Float32 | Scaled) -> tuple:
    """The results of the derivative's code, from the scaled product: first d score / d product."""
    return results(bind(pair.derivative, score=score))


def select(condition: Boolean, a: Float32, b: Float32) -> Float32:
    return Float32(cutlass.select_(condition, a, b))
