"""Attention, backward, the gradient of the queries alone, in an order that is always the same: no atomics.

    P = exp2(S log2(e) - lse2),   dP = dO V^T,   dS = P (dP - delta) dscore/ds,   dQ = scale dS K

    grid       a CTA makes `tile_q` rows of one head (walk.py); each warp holds whole rows
    tile       of `tile_kv` keys: S and dP in registers, then dS in the place of dP, rounded, is an operand as it stands
    memory     q and dO once; k and v in two stages (stages.py); lse2 and delta in registers
    end        dQ through shared memory, in the place of q

The forward kernel's walk and its lists (Dao 2023, algorithm 2, with its two loops exchanged).
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .._config import Sm80Queries
from .functions import (
    Scores,
    bind_head,
    bind_scores,
    derivatives,
    masked,
    pairs,
    scored,
    select,
    start_scores,
)
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


class QueriesBackward:
    """q, dq (R, Q, N, G, D), k (R, K, N, D), v (R, K, N, E), dout (R, Q, N, G, E); lse2 and delta from before.py.

    `mask`, `score` and `derivative` are codes, or None: the derivative's first result is that of the score in the
    scaled product. `layout` says what the lists of the tile map are, None without one.
    """

    def __init__(
        self,
        config: Sm80Queries,
        mask,
        score,
        derivative,
        layout: MapLayout | None,
        passes: int = 1,
    ):
        self.config, self.mask, self.score, self.layout = config, mask, score, layout
        self.passes = passes
        self.derivative = derivative
        if derivative is not None:
            # The others are for the gradients of captured arrays.
            self.derivative = dataclasses.replace(derivative, results=derivative.results[:1])
        tile = layout.tile if layout is not None else (config.tile_q, config.tile_kv)
        self.queries = Axis(config.tile_q, tile[0] // config.tile_q)
        self.keys = Axis(config.tile_kv, tile[1] // config.tile_kv)
        self.threads = 32 * config.warps

    @cute.jit
    def __call__(
        self,
        stream,
        q,
        k,
        v,
        dout,
        lse2,
        delta,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        dq,
        scale,
    ):
        grid = grid_size(self.queries, q.shape[1], heads.shape[0] * heads.shape[1], rows)
        if grid > 0:  # an empty grid is a launch error
            where, arrays = (rows, heads, lists), (mask_arrays, score_arrays)
            self.kernel(q, k, v, dout, lse2, delta, where, arrays, dq, scale).launch(
                grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, q, k, v, dout, lse2, delta, where, arrays, dq, scale):
        tid, _, _ = cute.arch.thread_idx()
        (rows, heads, lists), config, dtype = where, self.config, q.element_type
        products = Products(dtype, config.warps, passes=self.passes)
        dim, v_dim = q.shape[4], v.shape[3]

        place = find_place(self.queries, q.shape[1], heads, rows, lists, self.layout, True)
        found = find_list(self.queries, self.keys, place, k.shape[1], rows, lists, self.layout)
        first = place.tile * config.tile_q
        # The last tile of the map may have pieces past the end.
        count = found.count if first < q.shape[1] else Int32(0)
        partial = cutlass.min(found.partial, count)
        r, n, g = place.row, place.n, place.g

        shared = SmemAllocator()
        sQ = shared.allocate_tensor(dtype, tile_layout(config.tile_q, dim, dtype), 1024)
        sO = shared.allocate_tensor(dtype, tile_layout(config.tile_q, v_dim, dtype), 1024)
        stages = make_stages(shared, k[r, None, n, None], v[r, None, n, None], config.tile_kv)
        if count > 0:
            for x, tile in ((q, sQ), (dout, sO)):
                source = x[r, None, n, g, None]
                load_tile(
                    tid, self.threads, source, tile.iterator, 0, config.tile_q, x.shape[4], first
                )
            j = tile_at(found, self.keys, Int32(0))
            load_stage(tid, self.threads, stages, config.tile_kv, j, 0)
        cute.arch.cp_async_commit_group()

        acc_q = accumulator(products, tid, config.tile_q, width(dim, dtype))
        line = (r * heads.shape[0] + n) * heads.shape[1] + g
        known = lse2[line, None], delta[line, None]
        exact = self.passes == 3
        scores = start_scores(self.mask, self.score, *arrays, self.derivative, exact=exact)
        context = self.context(tid, products, bind_head(scores, place, rows), known, first)
        state = (acc_q, sQ, sO, scale)
        for i in cutlass.range(partial, unroll=1):
            j = next_tile(tid, self.threads, stages, found, self.keys, i, count)
            self.tile(tid, products, context, state, stages, i % 2, j, True)
        for i in cutlass.range(partial, count, unroll=1):
            j = next_tile(tid, self.threads, stages, found, self.keys, i, count)
            self.tile(tid, products, context, state, stages, i % 2, j, False)

        acc_q.store(acc_q.load() * scale)
        to_shared(products, tid, acc_q, sQ)  # a warp's rows, which no other has read
        cute.arch.sync_threads()
        store_tile(tid, self.threads, sQ, dq[r, None, n, g, None], config.tile_q, dim, first)

    def context(self, tid, products: Products, head: Scores, known, first) -> "Context":
        config = self.config
        at = by_rows(coordinates(products, tid, config.tile_q, config.tile_kv))
        places = [first + at[i, 0][0] for i in range(cute.size(at, mode=[0]))]
        # Pieces of a map's tile may begin past the padding, too.
        lse2, delta = [[x[cutlass.min(q, x.shape[0] - 1)] for q in places] for x in known]
        return Context(head, [bind_scores(head, q_idx=q) for q in places], at, lse2, delta)

    @cute.jit
    def tile(
        self,
        tid,
        products: Constexpr,
        context: Constexpr,
        state,
        stages,
        stage,
        j,
        is_partial: Constexpr,
    ):
        """One tile of keys: what it adds to the queries' gradient."""
        config, (acc_q, sQ, sO, scale) = self.config, state
        k, v = [tile[None, None, stage] for tile in stages.tiles]
        length, dim = stages.sources[0].shape
        acc_s = accumulator(products, tid, config.tile_q, config.tile_kv)
        acc_d = accumulator(products, tid, config.tile_q, config.tile_kv)
        multiply(products, tid, acc_s, sQ, k, depth=dim)
        multiply(products, tid, acc_d, sO, v, depth=stages.sources[1].shape[1])
        left = length - j * config.tile_kv
        self.differentiate(
            by_rows(acc_s), by_rows(acc_d), context, length - left, left, scale, is_partial
        )
        if const_expr(not is_partial):
            if left < config.tile_kv:
                cut(by_rows(acc_d), context.at, left, 0.0)
        multiply(
            products, tid, acc_q, as_operand(products, acc_d), transposed(k), b_transposed=True
        )

    def differentiate(self, s, d, context, first, left, scale, is_partial: bool) -> None:
        """dP becomes dS, in registers, from S and what is known of the rows."""
        factor = scale * LOG2_E if self.score is None else LOG2_E
        for r, c, key, pair in pairs(context.head, context.rows, context.at, first):
            value, slope = s[r, c], None
            if self.score is not None:
                product = value * scale
                value, slope = scored(pair, product), derivatives(pair, product)[0]
            value = value * factor
            if is_partial:
                value = masked(pair, key < first + left, value)
            p = cute.math.exp2(value - context.lse2[r], fastmath=True)
            found = p * (d[r, c] - context.delta[r])
            if slope is not None:
                found = found * slope
            if slope is not None or is_partial:
                # A slope may be NaN where the pair is masked, and dP where the query sees nothing.
                found = select(p == 0.0, Float32(0.0), found)
            d[r, c] = found


@dataclasses.dataclass(frozen=True)
class Context:
    """What a thread knows of its rows: the functions at the head and at each of them, the coordinates in a tile by
    rows, and their numbers."""

    head: Scores
    rows: list[Scores]
    at: Any
    lse2: list[Float32]
    delta: list[Float32]
