"""Attention, forward, by `mma.sync`: output and log-sum-exp.

    grid       a CTA makes `tile_q` rows of one head (walk.py); each warp holds whole rows
    tile       scores = q k^T of `tile_q` x `tile_kv` in registers, then the score function, then the mask where
               the tile is partial, then the online softmax, then out += p v
    memory     q once; k and v in two stages: tile i + 1 arrives (`cp.async`) while tile i is computed
    end        out through shared memory, in 16-byte stores

After FlashAttention-2 (Dao 2023).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .._config import Sm80Forward
from . import softmax
from .functions import bind_head, bind_scores, masked, pairs, scored, start_scores
from .matrix import (
    LOG2_E,
    Products,
    accumulator,
    as_operand,
    by_rows,
    coordinates,
    cut,
    load_tile,
    multiply,
    store_tile,
    tile_layout,
    to_shared,
    transposed,
    width,
)
from .stages import load_stage, make_stages, next_tile
from .walk import Axis, MapLayout, find_list, find_place, grid_size, tile_at


class Forward:
    """q (R, Q, N, G, D), k (R, K, N, D), v (R, K, N, E), out (R, Q, N, G, E), lse (R, N, G, Q) float32.

    `mask` and `score` are codes, or None; `layout` says what the lists of the tile map are, None without one.
    """

    def __init__(self, config: Sm80Forward, mask, score, layout: MapLayout | None, passes: int = 1):
        self.config, self.mask, self.score, self.layout = config, mask, score, layout
        self.passes = passes
        tile = layout.tile if layout is not None else (config.tile_q, config.tile_kv)
        self.queries = Axis(config.tile_q, tile[0] // config.tile_q)
        self.keys = Axis(config.tile_kv, tile[1] // config.tile_kv)
        self.threads = 32 * config.warps

    @cute.jit
    def __call__(
        self, stream, q, k, v, rows, heads, lists, mask_arrays, score_arrays, out, lse, scale
    ):
        grid = grid_size(self.queries, q.shape[1], heads.shape[0] * heads.shape[1], rows)
        if grid > 0:  # an empty grid is a launch error
            self.kernel(
                q, k, v, rows, heads, lists, mask_arrays, score_arrays, out, lse, scale
            ).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, q, k, v, rows, heads, lists, mask_arrays, score_arrays, out, lse, scale):
        tid, _, _ = cute.arch.thread_idx()
        config, dtype = self.config, q.element_type
        products = Products(dtype, config.warps, passes=self.passes)
        dim, v_dim = q.shape[4], v.shape[3]

        place = find_place(self.queries, q.shape[1], heads, rows, lists, self.layout, True)
        found = find_list(self.queries, self.keys, place, k.shape[1], rows, lists, self.layout)
        first = place.tile * config.tile_q
        # The last tile of the map may have pieces past the end.
        count = found.count if first < q.shape[1] else Int32(0)
        partial = cutlass.min(found.partial, count)
        r, n, g = place.row, place.n, place.g
        gQ, gO = q[r, None, n, g, None], out[r, None, n, g, None]

        shared = SmemAllocator()
        # Of q, and at the end of out.
        columns = max(width(dim, dtype), width(v_dim, dtype))
        sQ = shared.allocate_tensor(dtype, cute.make_layout(config.tile_q * columns), 1024)
        sQ = cute.make_tensor(sQ.iterator, tile_layout(config.tile_q, dim, dtype))
        stages = make_stages(shared, k[r, None, n, None], v[r, None, n, None], config.tile_kv)

        acc_o = accumulator(products, tid, config.tile_q, width(v_dim, dtype))
        top, total = softmax.start(cute.size(by_rows(acc_o), mode=[0]))
        exact = self.passes == 3
        scores = start_scores(self.mask, self.score, mask_arrays, score_arrays, exact=exact)
        head = bind_head(scores, place, rows)
        at = by_rows(coordinates(products, tid, config.tile_q, config.tile_kv))
        each_row = [bind_scores(head, q_idx=first + at[i, 0][0]) for i in range(cute.size(top))]
        # Scores are natural; without a score function the scale is part of the exponential's factor.
        factor = scale * LOG2_E if const_expr(self.score is None) else Float32(LOG2_E)

        if count > 0:
            load_tile(tid, self.threads, gQ, sQ.iterator, 0, config.tile_q, dim, first)
            j = tile_at(found, self.keys, Int32(0))
            load_stage(tid, self.threads, stages, config.tile_kv, j, 0)
        cute.arch.cp_async_commit_group()
        state = (acc_o, top, total, factor, scale)
        for i in cutlass.range(partial, unroll=1):
            j = next_tile(tid, self.threads, stages, found, self.keys, i, count)
            self.tile(tid, products, state, sQ, stages, head, each_row, at, i % 2, j, True)
        for i in cutlass.range(partial, count, unroll=1):
            j = next_tile(tid, self.threads, stages, found, self.keys, i, count)
            self.tile(tid, products, state, sQ, stages, head, each_row, at, i % 2, j, False)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # before out takes the place of q

        sums = softmax.finish(by_rows(acc_o), top, total, factor)
        self.store_lse(tid, at, sums, lse[r, n, g, None], first)
        self.store_out(tid, products, acc_o, sQ.iterator, gO, first, v_dim)

    @cute.jit
    def tile(
        self,
        tid,
        products: Constexpr,
        state,
        sQ,
        stages,
        head: Constexpr,
        each_row: Constexpr,
        at,
        stage,
        j,
        is_partial: Constexpr,
    ):
        """One tile of keys: the queries' softmax and output follow."""
        acc_o, top, total, factor, scale = state
        sK, sV = stages.tiles
        length, dim = stages.sources[0].shape
        n0 = j * self.config.tile_kv
        acc_s = accumulator(products, tid, self.config.tile_q, self.config.tile_kv)
        multiply(products, tid, acc_s, sQ, sK[None, None, stage], depth=dim)
        s = by_rows(acc_s)
        if const_expr(is_partial or self.score is not None):
            self.apply(s, head, each_row, at, n0, length, scale, is_partial)
        if const_expr(not is_partial):
            if n0 + self.config.tile_kv > length:
                cut(s, at, length - n0, -Float32.inf)
        softmax.add_scores(s, by_rows(acc_o), top, total, factor)
        v = transposed(sV[None, None, stage])
        multiply(products, tid, acc_o, as_operand(products, acc_s), v, b_transposed=True)

    def apply(self, s, head, each_row, at, n0, length, scale, is_partial: bool):
        """The score function, and in a partial tile the mask."""
        for r, c, key, pair in pairs(head, each_row, at, n0):
            value = s[r, c]
            if self.score is not None:
                value = scored(pair, value * scale)
            s[r, c] = masked(pair, key < length, value) if is_partial else value

    @cute.jit
    def store_lse(self, tid, at, sums, lse, first):
        if tid % 4 == 0:  # of the four lanes that share a row
            for i in range_constexpr(cute.size(sums)):
                row = first + at[i, 0][0]
                if row < lse.shape[0]:
                    lse[row] = sums[i]

    @cute.jit
    def store_out(self, tid, products: Constexpr, acc_o, pointer, gO, first, v_dim: Constexpr):
        dtype, rows = products.dtype, self.config.tile_q
        sO = cute.make_tensor(pointer, tile_layout(rows, v_dim, dtype))
        to_shared(products, tid, acc_o, sO)
        cute.arch.sync_threads()
        store_tile(tid, self.threads, sO, gO, rows, v_dim, first)
