"""Verdicts of tiles to lists: each row's partial tiles first, then the full ones, then the empty.

    grid        (rows / warps); a warp owns a row
    first pass  a lane counts in every 32nd verdict; the warp adds up
    second pass a ballot a kind says how many came before in the row, so each tile knows its place
    loads       of `loads` verdicts a lane, independent of each other, in flight together

Reads the verdicts twice, the second time out of the L1 cache, and writes every entry of the lists
once. There is no shared memory and no barrier: warps know nothing of each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr

from .._config import FULL, PARTIAL, Compaction

OUTSIDE = 3  # no tile: past the end of the row


class Compact:
    """verdicts (rows, n) int8; tiles (rows, n), partial (rows,) and full (rows,) int32."""

    def __init__(self, config: Compaction):
        self.config = config

    @cute.jit
    def __call__(
        self,
        stream,
        verdicts: cute.Tensor,
        tiles: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
    ):
        rows = verdicts.shape[0]
        if rows > 0:  # an empty grid is a launch error
            self.kernel(verdicts, tiles, partial, full).launch(
                grid=[cute.ceil_div(rows, self.config.warps), 1, 1],
                block=[32 * self.config.warps, 1, 1],
                stream=stream,
            )

    @cute.kernel
    def kernel(
        self, verdicts: cute.Tensor, tiles: cute.Tensor, partial: cute.Tensor, full: cute.Tensor
    ):
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        row = cta * self.config.warps + cute.arch.warp_idx()
        if row < verdicts.shape[0]:
            partials, fulls = self.count(verdicts[row, None], lane)
            if lane == 0:
                partial[row] = partials
                full[row] = fulls
            self.place(verdicts[row, None], tiles[row, None], lane, partials, fulls)

    @cute.jit
    def count(self, verdicts: cute.Tensor, lane: Int32):
        """How many are partial, and how many full."""
        step = 32 * self.config.loads
        partials, fulls = Int32(0), Int32(0)
        for first in cutlass.range(0, verdicts.shape[0], step, unroll=1):
            kinds = self.load(verdicts, first + lane)
            for j in range_constexpr(self.config.loads):
                partials += Int32(kinds[j] == PARTIAL)
                fulls += Int32(kinds[j] == FULL)
        return cute.arch.warp_reduction_sum(partials), cute.arch.warp_reduction_sum(fulls)

    @cute.jit
    def load(self, verdicts: cute.Tensor, at: Int32):
        """Those at `at`, `at + 32`, ...: loaded without a branch, so that none waits for another."""
        last = verdicts.shape[0] - 1
        held = cute.make_rmem_tensor(self.config.loads, verdicts.element_type)
        for j in range_constexpr(self.config.loads):
            held[j] = verdicts[cutlass.min(at + 32 * j, last)]
        kinds = cute.make_rmem_tensor(self.config.loads, Int32)
        for j in range_constexpr(self.config.loads):
            kinds[j] = Int32(held[j]) if at + 32 * j <= last else Int32(OUTSIDE)
        return kinds

    @cute.jit
    def place(
        self, verdicts: cute.Tensor, tiles: cute.Tensor, lane: Int32, partials: Int32, fulls: Int32
    ):
        step = 32 * self.config.loads
        before = cute.arch.lanemask_lt()
        partial_seen, full_seen = Int32(0), Int32(0)  # in the row, before this group of 32
        for first in cutlass.range(0, verdicts.shape[0], step, unroll=1):
            kinds = self.load(verdicts, first + lane)
            for j in range_constexpr(self.config.loads):
                tile = first + 32 * j + lane
                partial_here = Uint32(cute.arch.vote_ballot_sync(kinds[j] == PARTIAL))
                full_here = Uint32(cute.arch.vote_ballot_sync(kinds[j] == FULL))
                p = partial_seen + Int32(cute.arch.popc(partial_here & before))
                f = full_seen + Int32(cute.arch.popc(full_here & before))
                at = partials + fulls + tile - p - f
                at = p if kinds[j] == PARTIAL else at
                at = partials + f if kinds[j] == FULL else at
                if kinds[j] != OUTSIDE:
                    tiles[at] = tile
                partial_seen += Int32(cute.arch.popc(partial_here))
                full_seen += Int32(cute.arch.popc(full_here))
