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
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.memory import SmemAllocator

from .._config import Sm80Forward
from . import softmax
from .functions import allowed, bind_scores, join_scores, scored, select, start_scores
from .matrix import (
    LOG2_E,
    Products,
    accumulator,
    as_operand,
    atom_columns,
    by_rows,
    coordinates,
    load_tile,
    multiply,
    store_tile,
    tile_layout,
    transposed,
    vector,
    width,
)
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
        found = find_list(
            self.queries, self.keys, place, k.shape[1], rows, lists, self.layout
        )
        first = place.tile * config.tile_q
        # The last tile of the map may have pieces past the end.
        count = found.count if first < q.shape[1] else Int32(0)
        partial = cutlass.min(found.partial, count)
        r, n, g = place.row, place.n, place.g
        gQ, gO = q[r, None, n, g, None], out[r, None, n, g, None]
        gK, gV = k[r, None, n, None], v[r, None, n, None]

        shared = SmemAllocator()
        # Of q, and at the end of out.
        columns = max(width(dim, dtype), width(v_dim, dtype))
        sQ = shared.allocate_tensor(dtype, cute.make_layout(config.tile_q * columns), 1024)
        sQ = cute.make_tensor(sQ.iterator, tile_layout(config.tile_q, dim, dtype))
        sK = shared.allocate_tensor(dtype, tile_layout(config.tile_kv, dim, dtype, 2), 1024)
        sV = shared.allocate_tensor(dtype, tile_layout(config.tile_kv, v_dim, dtype, 2), 1024)
        tiles = (gK, gV, sK, sV)

        acc_o = accumulator(products, tid, config.tile_q, width(v_dim, dtype))
        top, total = softmax.start(acc_o)
        head = self.start(place, rows, mask_arrays, score_arrays)
        at = by_rows(coordinates(products, tid, config.tile_q, config.tile_kv))
        each_row = [bind_scores(head, q_idx=first + at[i, 0][0]) for i in range(cute.size(top))]
        # Scores are natural; without a score function the scale is part of the exponential's factor.
        factor = scale * LOG2_E if const_expr(self.score is None) else Float32(LOG2_E)

        if count > 0:
            load_tile(tid, self.threads, gQ, sQ.iterator, 0, config.tile_q, dim, first)
            self.load(tid, tiles, tile_at(found, self.keys, Int32(0)), 0)
        cute.arch.cp_async_commit_group()
        state = (acc_o, top, total, factor, scale)
        for i in cutlass.range(partial, unroll=1):
            j = self.next_tile(tid, tiles, found, i, count)
            self.tile(tid, products, state, sQ, tiles, head, each_row, at, i % 2, j, True)
        for i in cutlass.range(partial, count, unroll=1):
            j = self.next_tile(tid, tiles, found, i, count)
            self.tile(tid, products, state, sQ, tiles, head, each_row, at, i % 2, j, False)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # before out takes the place of q

        sums = softmax.finish(acc_o, top, total, factor)
        self.store_lse(tid, at, sums, lse[r, n, g, None], first)
        self.store_out(tid, products, acc_o, sQ.iterator, gO, first, v_dim)

    def start(self, place, rows, mask_arrays, score_arrays):
        """The functions at this CTA's head."""
        mapped = {f"v{i}": rows[place.row, i] for i in range(1, rows.shape[1])}
        scores = start_scores(self.mask, self.score, mask_arrays, score_arrays)
        return bind_scores(scores, b=place.b, h=place.h, **mapped)

    @cute.jit
    def load(self, tid, tiles, j, stage):
        gK, gV, sK, sV = tiles
        for source, target in ((gK, sK), (gV, sV)):
            rows, columns = self.config.tile_kv, source.shape[1]
            offset = stage * rows * width(columns, source.element_type)
            load_tile(
                tid, self.threads, source, target.iterator, offset, rows, columns, j * rows
            )

    @cute.jit
    def next_tile(self, tid, tiles, found, i, count):
        """Waits for tile `i` of the list, starts to load the one after it, and returns the number of tile `i`."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all of it is here, and nobody reads tile i - 1 any more
        if i + 1 < count:
            self.load(tid, tiles, tile_at(found, self.keys, i + 1), (i + 1) % 2)
        cute.arch.cp_async_commit_group()
        return tile_at(found, self.keys, i)

    @cute.jit
    def tile(
        self,
        tid,
        products: Constexpr,
        state,
        sQ,
        tiles,
        head: Constexpr,
        each_row: Constexpr,
        at,
        stage,
        j,
        is_partial: Constexpr,
    ):
        """One tile of keys: the queries' softmax and output follow."""
        acc_o, top, total, factor, scale = state
        gK, gV, sK, sV = tiles
        n0 = j * self.config.tile_kv
        acc_s = accumulator(products, tid, self.config.tile_q, self.config.tile_kv)
        multiply(products, tid, acc_s, sQ, sK[None, None, stage], depth=gK.shape[1])
        s = by_rows(acc_s)
        if const_expr(is_partial or self.score is not None):
            self.apply(s, head, each_row, at, n0, gK.shape[0], scale, is_partial)
        if const_expr(not is_partial):
            if n0 + self.config.tile_kv > gK.shape[0]:
                self.cut(s, at, gK.shape[0] - n0)
        softmax.add_scores(acc_s, acc_o, top, total, factor)
        v = transposed(sV[None, None, stage])
        multiply(products, tid, acc_o, as_operand(products, acc_s), v, b_transposed=True)

    def apply(self, s, head, each_row, at, n0, length, scale, is_partial: bool):
        """The score function, and in a partial tile the mask."""
        for c in range(cute.size(s, mode=[1])):
            column = n0 + at[0, c][1]
            bound = bind_scores(head, kv_idx=column)
            for r, row in enumerate(each_row):
                pair = join_scores(row, bound)
                value = s[r, c]
                if self.score is not None:
                    value = scored(pair, value * scale)
                if is_partial:
                    seen = column < length
                    keep = allowed(pair)
                    seen = seen if keep is None else seen & keep
                    value = select(seen, value, -Float32.inf)
                s[r, c] = value

    @cute.jit
    def cut(self, s, at, left):
        """Masks the columns past the last key."""
        for c in range_constexpr(cute.size(s, mode=[1])):
            if at[0, c][1] >= left:
                s[None, c].fill(-Float32.inf)

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
        held = cute.make_rmem_tensor(acc_o.layout, dtype)
        held.store(acc_o.load().to(dtype))
        atom = cute.make_copy_atom(CopyUniversalOp(), dtype)
        to_shared = cute.make_tiled_copy_C(atom, products.mma).get_slice(tid)
        cute.copy(to_shared, to_shared.retile(held), to_shared.partition_D(sO))
        cute.arch.sync_threads()
        store_tile(tid, self.threads, sO, gO, rows, v_dim, first)
