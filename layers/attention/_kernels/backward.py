"""Attention, backward, by `mma.sync`: gradients of queries, keys and values, and of what the score function captures.

With S the scores, P = exp(S - lse), dP = dO V^T, and delta = rowsum(dO O) - dlse:

    dV = P^T dO,   dS = P (dP - delta) dscore/ds,   dK = scale dS^T Q,   dQ = scale dS K

    grid       a CTA makes `tile_kv` rows of dK and dV of one kv head (walk.py), in registers
    heads      the query heads of its group one after the other, so that their gradients are summed in registers
    tile       of `tile_q` queries: S and dP in registers; P and dS go through shared memory, to be operands of the other
               three products; dQ is added to float32 sums in memory by atomics, in the order of the accumulator's registers
    memory     k and v once; q, dO, lse and delta in stages: tile i + 1 arrives while tile i is computed
    captured   what each pair adds to arrays of the score function is summed by captured.py, after dS is known
    before     before.py makes delta and lse in base 2, and zeroes the sums
    after      after.py rounds the sums to dQ. Where results must not depend on the order of atomics, queries.py makes dQ

After FlashAttention-2 (Dao 2023).
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from .._config import BEFORE, Sm80Backward, Sm80Queries
from .after import After
from .before import Before
from .bins import Target, clear, fold
from .captured import Captured, start_captured
from .functions import (
    Scores,
    bind_head,
    bind_scores,
    derivatives,
    join_scores,
    masked,
    scored,
    select,
    start_scores,
)
from .matrix import (
    LOG2_E,
    Products,
    accumulator,
    by_rows,
    coordinates,
    copy_or_zero,
    load_tile,
    multiply,
    store_tile,
    tile_layout,
    to_shared,
    transposed,
    width,
)
from .queries import QueriesBackward
from .walk import Axis, MapLayout, find_list, find_place, grid_size, tile_at


class Backward:
    """q, out, dout (R, Q, N, G, D|E), k (R, K, N, D), v (R, K, N, E), lse and dlse (R, N, G, Q) float32.

    `mask` and `score` are codes, or None; `derived` is the score's derivative, with what it reads; `layout` says what the
    lists of the tile map are, None without one. `captured` are the float32 gradients of the score's arrays, None where
    nobody wants one. Scratch, float32: lse and delta (R * N * G, Qpad), and sums (R * N * G, Qpad, .), or if
    `deterministic` for each wanted gradient the words of its sums (bins.py).
    """

    def __init__(
        self,
        config: Sm80Backward,
        mask,
        score,
        derived: Any,
        layout: MapLayout | None,
        passes: int = 1,
        deterministic: bool = False,
        queries: Sm80Queries | None = None,
    ):
        self.config, self.mask, self.score, self.layout = config, mask, score, layout
        self.derived, self.passes, self.deterministic = derived, passes, deterministic
        self.derivative = None if derived is None else derived.code
        tile = layout.backward_tile if layout is not None else (config.tile_q, config.tile_kv)
        self.queries = Axis(config.tile_q, tile[0] // config.tile_q)
        self.keys = Axis(config.tile_kv, tile[1] // config.tile_kv)
        self.threads = 32 * config.warps
        self.of_queries = None
        if deterministic:
            self.of_queries = QueriesBackward(queries, mask, score, self.derivative, layout, passes)

    @cute.jit
    def __call__(
        self,
        stream,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        dq,
        dk,
        dv,
        captured,
        scratch,
        scale,
    ):
        lse2, delta, *rest = scratch
        sums = None if const_expr(self.deterministic) else rest[0]
        targets = targets_of(captured, rest if self.deterministic else ())
        backwards = None if const_expr(lists is None) else lists[1]
        Before(BEFORE)(stream, out, dout, lse, dlse, lse2, delta, sums)
        for i in range_constexpr(len(targets)):
            if const_expr(targets[i] is not None):
                clear(stream, targets[i])
        grid = grid_size(self.keys, k.shape[1], heads.shape[0], rows)
        if grid > 0:  # an empty grid is a launch error
            self.kernel(
                q,
                k,
                v,
                dout,
                lse2,
                delta,
                rows,
                heads,
                backwards,
                mask_arrays,
                score_arrays,
                sums,
                dk,
                dv,
                targets,
                scale,
            ).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream)
        if const_expr(self.deterministic):
            for i in range_constexpr(len(targets)):
                if const_expr(targets[i] is not None):
                    fold(stream, targets[i])
            forwards = None if const_expr(lists is None) else lists[0]
            self.of_queries(
                stream,
                q,
                k,
                v,
                dout,
                lse2,
                delta,
                rows,
                heads,
                forwards,
                mask_arrays,
                score_arrays,
                dq,
                scale,
            )
        else:
            After(self.config)(stream, sums, dq, scale)

    @cute.kernel
    def kernel(
        self,
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
        sums,
        dk,
        dv,
        targets,
        scale,
    ):
        tid, _, _ = cute.arch.thread_idx()
        config, dtype = self.config, q.element_type
        dim, v_dim = q.shape[4], v.shape[3]
        of_kv = self.products(dtype, config.down_kv)

        place = find_place(self.keys, k.shape[1], heads, rows, lists, self.layout, False)
        first = place.tile * config.tile_kv
        r, n = place.row, place.n
        gK, gV = k[r, None, n, None], v[r, None, n, None]

        tiles = self.allocate(dtype, dim, v_dim)
        acc_k = accumulator(of_kv, tid, config.tile_kv, width(dim, dtype))
        acc_v = accumulator(of_kv, tid, config.tile_kv, width(v_dim, dtype))
        load_tile(tid, self.threads, gK, tiles.k.iterator, 0, config.tile_kv, dim, first)
        load_tile(tid, self.threads, gV, tiles.v.iterator, 0, config.tile_kv, v_dim, first)
        cute.arch.cp_async_commit_group()
        arrays, exact = (mask_arrays, score_arrays), self.passes == 3
        scores = start_scores(self.mask, self.score, *arrays, self.derivative, exact=exact)
        captured = self.start_captured(tid, dtype, targets, first)
        for g in cutlass.range(heads.shape[1], unroll=1):
            self.head(
                place._replace(g=g, h=heads[n, g]),
                (q, dout, lse2, delta, sums),
                gK.shape[0],
                rows,
                lists,
                tiles,
                (acc_k, acc_v),
                scores,
                captured,
                first,
                scale,
            )
        if const_expr(captured is not None):
            captured.finish(bind_head(scores, place, rows).derivative)
        acc_k.store(acc_k.load() * scale)
        self.store(tid, of_kv, acc_k, tiles.k, dk[r, None, n, None], first)
        self.store(tid, of_kv, acc_v, tiles.v, dv[r, None, n, None], first)

    def products(self, dtype, down: int) -> Products:
        return Products(dtype, down, self.config.warps // down, self.passes)

    def start_captured(self, tid, dtype, targets, first) -> Captured | None:
        """None: the score reads nothing that has a gradient."""
        if self.derived is None or not self.derived.reads:
            return None
        of_s = self.products(dtype, self.config.down_s)
        at = by_rows(coordinates(of_s, tid, self.config.tile_q, self.config.tile_kv))
        return start_captured(*self.derived, targets, at, first)

    def allocate(self, dtype, dim: int, v_dim: int) -> "Tiles":
        config, shared = self.config, SmemAllocator()

        def tile(rows, columns, stages=None):
            return shared.allocate_tensor(dtype, tile_layout(rows, columns, dtype, stages), 1024)

        def numbers():
            layout = cute.make_layout((config.tile_q, config.stages))
            return shared.allocate_tensor(Float32, layout, 128)

        return Tiles(
            q=tile(config.tile_q, dim, config.stages),
            dout=tile(config.tile_q, v_dim, config.stages),
            k=tile(config.tile_kv, dim),
            v=tile(config.tile_kv, v_dim),
            p=tile(config.tile_q, config.tile_kv),
            ds=tile(config.tile_q, config.tile_kv),
            lse2=numbers(),
            delta=numbers(),
        )

    @cute.jit
    def head(
        self,
        place,
        arrays,
        kv_len,
        rows,
        lists,
        tiles,
        accs,
        scores: Constexpr,
        captured: Constexpr,
        first,
        scale,
    ):
        """One query head: all tiles of its queries that meet this tile of keys."""
        q, dout, lse2, delta, sums = arrays
        r, n, g = place.row, place.n, place.g
        tid, _, _ = cute.arch.thread_idx()
        found = find_list(self.keys, self.queries, place, q.shape[1], rows, lists, self.layout)
        at_head = (r * q.shape[2] + n) * q.shape[3] + g
        sources = (
            q[r, None, n, g, None],
            dout[r, None, n, g, None],
            lse2[at_head, None],
            delta[at_head, None],
        )
        context = self.context(tid, q.element_type, bind_head(scores, place, rows), captured, first)
        # Queries of one head after the other: the first tile of a head takes the place of an earlier head's last one.
        cute.arch.sync_threads()
        if const_expr(self.config.stages > 1):
            if found.count > 0:
                self.load(tid, sources, tiles, tile_at(found, self.queries, Int32(0)), 0)
            cute.arch.cp_async_commit_group()
        for i in cutlass.range(found.partial, unroll=1):
            j = self.next_tile(tid, sources, tiles, found, i)
            self.tile(tid, context, sources, tiles, accs, sums, at_head, j, i, kv_len, scale, True)
        for i in cutlass.range(found.partial, found.count, unroll=1):
            j = self.next_tile(tid, sources, tiles, found, i)
            self.tile(tid, context, sources, tiles, accs, sums, at_head, j, i, kv_len, scale, False)
        cute.arch.cp_async_wait_group(0)
        if const_expr(captured is not None):
            captured.finish_head(context.head.derivative)

    def context(self, tid, dtype, head: Scores, captured, first) -> "Context":
        """What is known of a head before its queries: the functions at the thread's keys."""
        config = self.config
        of_s = self.products(dtype, config.down_s)
        at = by_rows(coordinates(of_s, tid, config.tile_q, config.tile_kv))
        keys = [first + at[0, c][1] for c in range(cute.size(at, mode=[1]))]
        columns = [bind_scores(head, kv_idx=key) for key in keys]
        return Context(head, columns, captured, at, first)

    @cute.jit
    def load(self, tid, sources, tiles, j, stage):
        gQ, gO, lse2, delta = sources
        rows, first = self.config.tile_q, j * self.config.tile_q
        for source, target in ((gQ, tiles.q), (gO, tiles.dout)):
            offset = stage * rows * width(source.shape[1], source.element_type)
            columns = source.shape[1]
            load_tile(tid, self.threads, source, target.iterator, offset, rows, columns, first)
        for source, target in ((lse2, tiles.lse2), (delta, tiles.delta)):
            at = tid * 4
            if at < rows:
                inside = first + at < source.shape[0]
                to = target.iterator + (stage * rows + at)
                copy_or_zero(to, source.iterator + (first + at), inside)

    @cute.jit
    def next_tile(self, tid, sources, tiles, found, i):
        """Waits for tile `i` of the list, starts to load the one after it, and returns the number of tile `i`."""
        j = tile_at(found, self.queries, i)
        if const_expr(self.config.stages == 1):
            cute.arch.sync_threads()
            self.load(tid, sources, tiles, j, 0)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all of it is here, and nobody reads tile i - 1, its P or its dS any more
        if const_expr(self.config.stages > 1):
            if i + 1 < found.count:
                self.load(tid, sources, tiles, tile_at(found, self.queries, i + 1), (i + 1) % 2)
            cute.arch.cp_async_commit_group()
        return j

    @cute.jit
    def tile(
        self,
        tid,
        context: Constexpr,
        sources,
        tiles,
        accs,
        sums,
        at_head,
        j,
        i,
        kv_len,
        scale,
        is_partial: Constexpr,
    ):
        """One tile of queries: gradients of keys and values follow, and its own are added to the sums."""
        config, dtype = self.config, sources[0].element_type
        of_s = self.products(dtype, config.down_s)
        of_kv, of_q = self.products(dtype, config.down_kv), self.products(dtype, config.down_q)
        stage = i % config.stages if const_expr(config.stages > 1) else 0
        sQ, sO = tiles.q[None, None, stage], tiles.dout[None, None, stage]
        acc_k, acc_v = accs
        m0, at = j * config.tile_q, context.at
        left = sources[0].shape[0] - m0, kv_len - context.first
        dim, v_dim = sources[0].shape[1], sources[1].shape[1]
        factor = scale * LOG2_E if const_expr(self.score is None) else Float32(LOG2_E)

        acc_s = accumulator(of_s, tid, config.tile_q, config.tile_kv)
        multiply(of_s, tid, acc_s, sQ, tiles.k, depth=dim)
        s = by_rows(acc_s)
        slopes = self.apply(s, context, m0, left, scale, is_partial)
        if const_expr(not is_partial):
            if (left[0] < config.tile_q) | (left[1] < config.tile_kv):
                self.cut(s, at, left)
        for r in range_constexpr(cute.size(s, mode=[0])):
            exponent = s[r, None].load() * factor - tiles.lse2[at[r, 0][0], stage]
            s[r, None].store(cute.math.exp2(exponent, fastmath=True))
        to_shared(of_s, tid, acc_s, tiles.p)

        acc_d = accumulator(of_s, tid, config.tile_q, config.tile_kv)
        multiply(of_s, tid, acc_d, sO, tiles.v, depth=v_dim)
        ds = by_rows(acc_d)
        for r in range_constexpr(cute.size(s, mode=[0])):
            delta = tiles.delta[at[r, 0][0], stage]
            ds[r, None].store(s[r, None].load() * (ds[r, None].load() - delta))
        self.chain(s, ds, slopes, context.captured)
        if const_expr(context.captured is not None):
            context.captured.finish_tile(context.head.derivative, m0)
        to_shared(of_s, tid, acc_d, tiles.ds)
        cute.arch.sync_threads()

        multiply(
            of_kv,
            tid,
            acc_v,
            transposed(tiles.p),
            transposed(sO),
            a_transposed=True,
            b_transposed=True,
        )
        if const_expr(not self.deterministic):
            acc_q = accumulator(of_q, tid, config.tile_q, width(dim, dtype))
            multiply(of_q, tid, acc_q, tiles.ds, transposed(tiles.k), b_transposed=True)
            if left[0] > 0:
                queries = cute.ceil_div(sources[0].shape[0], config.tile_q)
                self.add(tid, acc_q, sums, Int64(at_head) * queries + j)
        multiply(
            of_kv,
            tid,
            acc_k,
            transposed(tiles.ds),
            transposed(sQ),
            a_transposed=True,
            b_transposed=True,
        )

    def apply(self, s, context: "Context", m0, left, scale, is_partial: bool):
        """The score function, and in a partial tile the mask. Returns the score's derivatives at each pair, by rows and
        columns; None without a score function."""
        if not is_partial and self.score is None:
            return None
        slopes = []
        for r in range(cute.size(s, mode=[0])):
            row = context.at[r, 0][0]
            bound = bind_scores(context.head, q_idx=m0 + row)
            slopes.append([])
            for c, column in enumerate(context.columns):
                pair, value = join_scores(bound, column), s[r, c]
                if self.score is not None:
                    product = value * scale
                    value = scored(pair, product)
                    slopes[r].append(derivatives(pair, product))
                if is_partial:
                    inside = (row < left[0]) & (context.at[0, c][1] < left[1])
                    value = masked(pair, inside, value)
                s[r, c] = value
        return slopes if self.score is not None else None

    def chain(self, p, ds, slopes, captured: Captured | None) -> None:
        """`ds` times the slopes, and times those of what the score reads. Where p is 0 it stays 0: a slope that a masked
        pair has may be NaN."""
        for r, row in enumerate(slopes or ()):
            for c, values in enumerate(row):
                live = p[r, c] != 0.0
                if captured is not None:
                    captured.add(r, c, live, ds[r, c], values)
                ds[r, c] = select(live, ds[r, c] * values[0], Float32(0.0))

    @cute.jit
    def cut(self, s, at, left):
        """Masks what lies past the last query or the last key."""
        for r in range_constexpr(cute.size(s, mode=[0])):
            for c in range_constexpr(cute.size(s, mode=[1])):
                if (at[r, 0][0] >= left[0]) | (at[0, c][1] >= left[1]):
                    s[r, c] = -Float32.inf

    def add(self, tid, acc, sums, block) -> None:
        """Adds an accumulator to its block of the sums, in the order of its registers."""
        vector, size = self.config.vector, cute.size(acc)
        start = sums.iterator + (block * (size * self.threads) + tid * vector)
        for e in range(0, size, vector):
            to = start + e * self.threads
            if vector == 4:
                cute.arch.inline_ptx(
                    "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[to, *[acc[e + i] for i in range(4)]],
                )
            else:
                cute.arch.red(to, acc[e], op="add", dtype="f32", sem="relaxed", scope="gpu")

    @cute.jit
    def store(self, tid, products: Constexpr, acc, tile, target, first):
        """dK or dV, through the tile that k or v was in."""
        cute.arch.sync_threads()
        to_shared(products, tid, acc, tile)
        cute.arch.sync_threads()
        rows = self.config.tile_kv
        store_tile(tid, self.threads, tile, target, rows, target.shape[1], first)


def targets_of(captured, words) -> tuple[Target | None, ...]:
    """Where gradients of the score's arrays are summed."""
    words = iter(words)
    return tuple(None if x is None else Target(x, next(words, None)) for x in captured)


class Tiles(NamedTuple):
    """In shared memory. Those of queries have a dim of stages."""

    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Context:
    """Of one head, for all tiles of its queries: the functions at the head, and at each of the thread's columns; what is
    captured; the thread's (row, column)s within a tile; the first key."""

    head: Scores
    columns: list[Scores]
    captured: Captured | None
    at: Any
    first: Int32
