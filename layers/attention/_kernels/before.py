"""What the backward kernels need of each query before they start.

    delta = sum_e out dout - dlse        dS = P (dP - delta)
    lse2  = lse log2(e)                  P = exp2(S log2(e) - lse2)

A query that saw no key has an lse of -inf: its lse2 is +inf and its delta 0, so that its P and dS are 0.

    grid      a CTA takes `rows` queries of one head; heads are next to each other in memory, and so are their CTAs
    lanes     as many as a query has pieces of 16 bytes, rounded up to a power of two, at most a warp; the others of a
              warp have other queries
    sweep     the CTA's threads, once over as many queries as they are enough for; `sweeps` of them are in flight
    sums      of dQ, which the backward kernel adds to: every CTA zeroes its share, first, since nobody waits for stores

Reads out and dout once, 16 bytes a thread; writes whole lines.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .._config import BeforeBackward
from .functions import select
from .matrix import LOG2_E, vector


class Before:
    """out and dout (R, Q, N, G, E), lse and dlse (R, N, G, Q) float32, dlse may be None; lse2 and delta
    (R * N * G, Qpad) float32, Qpad a multiple of `rows`. `sums` is float32 of any shape, whole 16 bytes, or None.
    """

    def __init__(self, config: BeforeBackward):
        self.config = config

    @cute.jit
    def __call__(self, stream, out, dout, lse, dlse, lse2, delta, sums):
        lines, padded = delta.shape
        grid = lines * (padded // self.config.rows)
        if grid > 0:  # an empty grid is a launch error
            share = Int64(0)
            if const_expr(sums is not None):
                share = (vectors(sums) + grid - 1) // grid
            self.kernel(out, dout, lse, dlse, lse2, delta, sums, share).launch(
                grid=[grid, 1, 1], block=[self.config.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, out, dout, lse, dlse, lse2, delta, sums, share):
        tid, _, _ = cute.arch.thread_idx()
        x, _, _ = cute.arch.block_idx()
        if const_expr(sums is not None):
            self.zero(tid, x, sums, share)
        groups = out.shape[3]
        heads, tiles = out.shape[2] * groups, delta.shape[1] // self.config.rows
        head, rest = x % heads, x // heads
        first, r = rest % tiles * self.config.rows, rest // tiles
        n, g = head // groups, head % groups
        places = range(0, self.config.rows, self.config.threads)
        given = lse[r, n, g, None], None if const_expr(dlse is None) else dlse[r, n, g, None]
        known = [self.known(given, first + tid + i) for i in places]
        dots = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.config.rows), 16)
        self.dots(tid, out[r, None, n, g, None], dout[r, None, n, g, None], first, dots)
        cute.arch.sync_threads()
        line = r * heads + head
        for i, (base, rest) in zip(places, known, strict=True):
            if tid + i < self.config.rows:
                q, nothing = first + tid + i, base == -Float32.inf
                lse2[line, q] = select(nothing, Float32.inf, base * LOG2_E)
                delta[line, q] = select(nothing, Float32(0.0), dots[tid + i] - rest)

    @cute.jit
    def zero(self, tid, x, sums, share):
        """This CTA's share of the sums, in whole 16 bytes."""
        start = Int64(x) * share
        count = Int32(cutlass.min(share, vectors(sums) - start))
        mine = cute.make_tensor(
            (sums.iterator + start * 4).align(16), cute.make_layout((4, count), stride=(1, 4))
        )
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for i in cutlass.range(tid, count, self.config.threads, unroll=4):
            mine[None, i].store(nothing.load())

    @cute.jit
    def dots(self, tid, out, dout, first, dots):
        """The products of the CTA's queries, each to its place in `dots`."""
        rows = self.config.rows
        pieces = out.shape[1] // vector(out.element_type)
        lanes = min(32, 1 << (pieces - 1).bit_length())
        at_once = self.config.threads // lanes  # queries in a sweep
        sweeps = min(self.config.sweeps, -(-rows // at_once))
        lane, own = tid % lanes, tid // lanes
        end = cutlass.min(first + rows, out.shape[0])
        for start in cutlass.range(0, rows, at_once * sweeps, unroll=1):
            places = [start + i * at_once + own for i in range(sweeps)]
            # What is not there is read from where something is, without a branch: no load waits for another.
            queries = [cutlass.min(first + at, end - 1) for at in places]
            held = [
                [[piece_of(x, q, lane + j, pieces) for x in (out, dout)] for q in queries]
                for j in range(0, pieces, lanes)
            ]
            for i in range_constexpr(sweeps):
                total = Float32(0.0)
                for j, found in enumerate(held):
                    a, b = found[i]
                    dot = (a * b).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                    total += select(lane + j * lanes < pieces, dot, Float32(0.0))
                total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
                if (lane == 0) & (places[i] < rows):
                    dots[places[i]] = total

    @cute.jit
    def known(self, given, q):
        """lse and dlse of a query; of the padding, those of one that saw nothing."""
        lse, dlse = given
        base, rest = -Float32.inf, Float32(0.0)
        if q < lse.shape[0]:
            base = lse[q]
            if const_expr(dlse is not None):
                rest = dlse[q]
        return base, rest


def vectors(array: cute.Tensor):
    """How many times 16 bytes there are in an array of float32; its size may pass 2**31."""
    size = Int64(1)
    for length in array.shape:
        size = size * length
    return size // 4


def piece_of(array: cute.Tensor, row, piece, pieces: int):
    """16 bytes of a row of (length, dim), as float32."""
    vectors = cute.local_tile(
        array[row, None], (vector(array.element_type),), (cutlass.min(piece, pieces - 1),)
    )
    return vectors.load().to(Float32)
