"""Softmax over keys seen so far, a row of queries spread over four lanes (Milakov and Gimelshein 2018).

Scores and outputs are accumulators by rows. Scores are natural; exponentials are base 2, with log2(e) folded into the
factor that multiplies the scores.
"""

import cutlass.cute as cute
from cutlass import Constexpr, Float32, range_constexpr

from .matrix import LN_2


@cute.jit
def start(rows: Constexpr):
    """The maximum and the sum of no keys, for each row that a thread holds."""
    top, total = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
    top.fill(-Float32.inf)
    total.fill(0.0)
    return top, total


@cute.jit
def add_scores(s, o, top, total, factor):
    """Scores of a tile, times `factor`, become exp2(s - maximum); `o` and `total` follow the new maximum."""
    for r in range_constexpr(cute.size(top)):
        old = top[r]
        new = s[r, None].load().reduce(cute.ReductionOp.MAX, old, 0)
        new = cute.arch.warp_reduction_max(new, threads_in_group=4)
        base = Float32(0.0) if new == -Float32.inf else new * factor  # a row that has seen nothing
        p = cute.math.exp2(s[r, None].load() * factor - base, fastmath=True)
        shrink = cute.math.exp2(old * factor - base, fastmath=True)
        top[r] = new
        total[r] = p.reduce(cute.ReductionOp.ADD, total[r] * shrink, 0)  # this lane's columns only
        s[r, None].store(p)
        o[r, None].store(o[r, None].load() * shrink)


@cute.jit
def add_scores_lazily(s, top, total, factor):
    """As `add_scores`, but the output is left alone: returns what each row of it is to be multiplied by."""
    shrink = cute.make_rmem_tensor_like(top)
    for r in range_constexpr(cute.size(top)):
        old = top[r]
        new = s[r, None].load().reduce(cute.ReductionOp.MAX, old, 0)
        new = cute.arch.warp_reduction_max(new, threads_in_group=4)
        base = Float32(0.0) if new == -Float32.inf else new * factor  # a row that has seen nothing
        p = cute.math.exp2(s[r, None].load() * factor - base, fastmath=True)
        shrink[r] = cute.math.exp2(old * factor - base, fastmath=True)
        top[r] = new
        total[r] = p.reduce(
            cute.ReductionOp.ADD, total[r] * shrink[r], 0
        )  # this lane's columns only
        s[r, None].store(p)
    return shrink


@cute.jit
def finish(o, top, total, factor):
    """`o` becomes the output; returns the natural log-sum-exp of each row: -inf, and 0 in the output, where a row saw no
    key."""
    lse = cute.make_rmem_tensor_like(top)
    for r in range_constexpr(cute.size(top)):
        whole = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
        nothing = whole == 0.0
        o[r, None].store(o[r, None].load() * (Float32(0.0) if nothing else 1.0 / whole))
        log = (top[r] * factor + cute.math.log2(whole)) * LN_2
        lse[r] = -Float32.inf if nothing else log
    return lse
