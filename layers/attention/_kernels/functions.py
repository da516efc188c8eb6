"""A mask and a score function over a tile of scores, each part computed no more often than it varies:

    scores = bind_scores(start_scores(...), b=b, h=h)      # once for a CTA's head
    row = bind_scores(scores, q_idx=q)                      # once for each row of queries that a thread holds
    column = bind_scores(scores, kv_idx=kv)                 # once for each of its columns
    pair = join_scores(row, column)
    scored(pair, s), allowed(pair)

Plain functions and frozen records: CuTe carries neither through a loop on the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32

from eqxcute.inline import Code, bind, join, results, start


@dataclasses.dataclass(frozen=True)
class Scores:
    """The mask and the score, as far as they are computed. None: there is no such function."""

    mask: Any
    score: Any


def start_scores(
    mask: Code | None, score: Code | None, mask_arrays: Sequence, score_arrays: Sequence
) -> Scores:
    """What depends on no index. The arrays are those that the codes read, in order."""
    return Scores(
        None if mask is None else start(mask, mask_arrays),
        None if score is None else start(score, score_arrays),
    )


def bind_scores(scores: Scores, **scalars: Any) -> Scores:
    return Scores(*[None if p is None else bind(p, **scalars) for p in (scores.mask, scores.score)])


def join_scores(a: Scores, b: Scores) -> Scores:
    return Scores(
        *[None if p is None else join(p, r) for p, r in ((a.mask, b.mask), (a.score, b.score))]
    )


def scored(pair: Scores, score: Float32) -> Float32:
    """The score of a pair, from the scaled product."""
    return score if pair.score is None else results(bind(pair.score, score=score))[0]


def allowed(pair: Scores) -> Boolean | None:
    """Whether the query may see the key; None for always."""
    return None if pair.mask is None else results(pair.mask)[0]


def select(condition: Boolean, a: Float32, b: Float32) -> Float32:
    return Float32(cutlass.select_(condition, a, b))
