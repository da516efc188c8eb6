"""Attention, backward, on Hopper: the products of backward.py by `wgmma`, tiles by TMA.

    grid       a CTA makes 128 rows of dK and dV of one kv head, 64 a warpgroup, in registers
    heads      the query heads of its group one after the other
    tile       of `tile_q` queries. Scores are made transposed, keys by queries: so P^T and dS^T are operands `a` from
               registers as they stand. dS^T goes through shared memory too, since dQ sums over all of the CTA's keys

    product            of a warpgroup           a               b
    ----------------   ----------------------   -------------   -----------
    S^T  = K Q^T       64 keys x tile_q         k               q
    dP^T = V dO^T      64 keys x tile_q         v               dO
    dV  += P^T dO      64 keys x v_dim          registers       dO
    dK  += dS^T Q      64 keys x dim            registers       q
    dQ   = dS K        64 queries x dim, or     dS, the keys    k
                       x dim / 2 of 64          of all

    role          warps     does
    ----------    -------   ------------------------------------------------------------
    load          4         the first one: TMA of k and v once, then of q, dO and what is known of queries, tile by tile
                            the second one: adds dQ to the sums, by TMA
    compute       4 each    all else

    ring    stages     full                          empty
    -----   --------   ---------------------------   ---------------------------
    k, v    1          their bytes                   never: loaded once
    q       `stages`   q and lse2                    one arrival a computing warp
    dout    `stages`   dO and delta                  likewise

    barrier    threads                     says
    --------   -------------------------   -----------------------------------------------
    FREE       those that compute          nobody multiplies with the tile of dS any more
    WRITTEN    those that compute          dS is there
    FULL       a warpgroup, and one warp   its part of dQ is in shared memory
    EMPTY      likewise                    TMA has read it
    DONE       a warpgroup                 its part of dK and dV is in shared memory

Deterministic: no dQ here, and so no barrier of both warpgroups in the loop.
Captured arrays of the score: P, dP and slopes of a pair are needed at once, so exponentials wait for dP too.
before.py, queries.py and walk.py are those of backward.py; after.py knows this order of dQ.

Sources: Shah et al. 2024 (FlashAttention-3), appendix B.1.
"""

import dataclasses
import enum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from eqxcute.inline import Scaled

from .._config import BEFORE, Sm80Queries, Sm90Backward
from .after import After90, dq_columns
from .backward import targets_of
from .before import Before
from .bins import clear, fold
from .captured import Captured, start_captured
from .functions import (
    Scores,
    all_small,
    bind_head,
    bind_scores,
    derivatives,
    join_scores,
    masked,
    of_small,
    scored,
    select,
    small_limit,
    start_scores,
    step_of,
)
from .hopper import (
    ROWS,
    WARPGROUP,
    accumulator,
    accumulator_layout,
    add_to_global,
    allocate,
    by_keys,
    by_queries,
    by_rows,
    coordinates,
    loads,
    multiply,
    operand_a,
    operand_b,
    packed,
    parts,
    product,
    send,
    sent,
    store_held,
    stores,
    tile_layout,
    to_shared,
    transposed,
)
from .matrix import LOG2_E, width
from .queries import QueriesBackward
from .roles import Plan, Ring, Role, start_copies, start_rings
from .walk import Axis, MapLayout, find_walk, grid_size, place_at, walk_at

WARPGROUPS = 2  # that compute


class Barrier(enum.IntEnum):
    """Those with a warpgroup's number to be added have room for it."""

    FREE = 1
    WRITTEN = 2
    FULL = 3
    EMPTY = 5
    DONE = 7


class Backward90:
    """As `Backward`, with 16-bit q, k and v."""

    def __init__(
        self,
        config: Sm90Backward,
        mask,
        score,
        derived: Any,
        layout: MapLayout | None,
        deterministic: bool = False,
        queries: Sm80Queries | None = None,
    ):
        self.config, self.mask, self.score, self.layout = config, mask, score, layout
        self.derived, self.deterministic = derived, deterministic
        self.derivative = None if derived is None else derived.code
        self.small = None if score is None else small_limit(score, self.derivative)
        tile = layout.backward_tile if layout is not None else (config.tile_q, config.tile_kv)
        self.queries = Axis(config.tile_q, tile[0] // config.tile_q)
        self.keys = Axis(config.tile_kv, tile[1] // config.tile_kv)
        self.of_queries = None
        if deterministic:
            self.of_queries = QueriesBackward(queries, mask, score, self.derivative, layout)

    def plan(self, dtype, d: int, e: int) -> Plan:
        config, (load, compute) = self.config, self.config.registers
        size = dtype.width // 8
        return Plan(
            roles=(Role("load", 4, load), Role("compute", 4 * WARPGROUPS, compute)),
            rings=(
                Ring("k", 1, config.tile_kv * d * size),
                Ring("v", 1, config.tile_kv * e * size),
                Ring("q", config.stages, config.tile_q * (d * size + 4)),
                Ring("dout", config.stages, config.tile_q * (e * size + 4)),
            ),
        )

    def layouts(self, dtype, d: int, e: int) -> tuple:
        """Of k, v, q, dO and dS in shared memory."""
        config = self.config
        return (
            # A warpgroup's columns of it are whole pieces.
            tile_layout(config.tile_kv, d, dtype, atom=dq_columns(config, d)),
            tile_layout(config.tile_kv, e, dtype),
            tile_layout(config.tile_q, d, dtype, config.stages),
            tile_layout(config.tile_q, e, dtype, config.stages),
            tile_layout(config.tile_kv, config.tile_q, dtype, config.ds_stages),
        )

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
        forwards, backwards = (None, None) if const_expr(lists is None) else lists
        Before(BEFORE)(stream, out, dout, lse, dlse, lse2, delta, sums)
        for i in range_constexpr(len(targets)):
            if const_expr(targets[i] is not None):
                clear(stream, targets[i])
        self.keys_and_values(
            stream,
            (q, k, v, dout, dk, dv),
            (lse2, delta, sums),
            rows,
            heads,
            backwards,
            mask_arrays,
            score_arrays,
            targets,
            scale,
        )
        if const_expr(self.deterministic):
            for i in range_constexpr(len(targets)):
                if const_expr(targets[i] is not None):
                    fold(stream, targets[i])
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
            After90(self.config)(stream, sums, dq, scale)

    @cute.jit
    def keys_and_values(
        self,
        stream,
        arrays,
        numbers,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        targets,
        scale,
    ):
        """dK and dV, and sums of dQ unless `deterministic`."""
        q, k, v, dout, dk, dv = arrays
        config, dtype = self.config, q.element_type
        d, e = width(q.shape[4], dtype), width(v.shape[3], dtype)
        layouts = self.layouts(dtype, d, e)
        of_k, of_v = layouts[:2]
        copies = (
            loads(by_keys(k), of_k, (config.tile_kv, d)),
            loads(by_keys(v), of_v, (config.tile_kv, e)),
            loads(by_queries(q), layouts[2], (config.tile_q, d)),
            loads(by_queries(dout), layouts[3], (config.tile_q, e)),
            stores(by_keys(dk), tile_layout(ROWS, d, dtype, atom=dq_columns(config, d)), (ROWS, d)),
            stores(by_keys(dv), tile_layout(ROWS, e, dtype), (ROWS, e)),
        )
        plan = self.plan(dtype, d, e)
        grid = grid_size(self.keys, k.shape[1], heads.shape[0], rows)
        if grid > 0:  # an empty grid is a launch error
            self.kernel(
                q.shape[1],
                k.shape[1],
                copies,
                layouts,
                numbers,
                rows,
                heads,
                lists,
                mask_arrays,
                score_arrays,
                targets,
                scale,
                (dtype, d, e),
            ).launch(
                grid=[grid, 1, 1], block=[plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        q_len,
        kv_len,
        copies,
        layouts,
        numbers,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        targets,
        scale,
        facts: Constexpr,
    ):
        dtype, d, e = facts
        config, plan = self.config, self.plan(*facts)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        sK, sV, sQ, sO, sdS = [allocate(shared, layout, dtype) for layout in layouts]
        line = cute.make_layout((config.tile_q, config.stages))
        lse2, delta = [shared.allocate_tensor(Float32, line, 128) for _ in range(2)]
        sdQ = None
        if const_expr(not self.deterministic):
            part = cute.make_layout((ROWS * dq_columns(config, d), WARPGROUPS))
            sdQ = shared.allocate_tensor(Float32, part, 128)
        plan.count("k", sK)
        plan.count("v", sV)
        plan.count("q", sQ[None, None, 0], lse2[None, 0])
        plan.count("dout", sO[None, None, 0], delta[None, 0])
        rings = tuple(plan.make(ring.name) for ring in plan.rings)
        start_rings()

        x, _, _ = cute.arch.block_idx()
        place = place_at(x, self.keys, kv_len, heads, rows, lists, self.layout, False, even=True)
        where = place, rows, heads, lists, q_len, kv_len
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.role("load").registers)
            if warp == 0:
                self.load(copies, (sK, sV, sQ, sO, lse2, delta), rings, where, numbers, d, e)
            if const_expr(sdQ is not None):
                if warp == 1:
                    self.add_up(sdQ, where, numbers, d)
        else:
            cute.arch.setmaxregister_increase(plan.role("compute").registers)
            self.compute(
                Tiles(sK, sV, sQ, sO, sdS, lse2, delta, sdQ),
                rings,
                copies[4:],
                where,
                (mask_arrays, score_arrays),
                targets,
                scale,
                facts,
            )

    def walk(self, where, g) -> tuple:
        """Of a query head: its place, its number among all, and the tiles of its queries."""
        place, rows, heads, lists, q_len, _ = where
        place = place._replace(g=g, h=heads[place.n, g])
        line = (place.row * heads.shape[0] + place.n) * heads.shape[1] + g
        walk = find_walk(self.keys, self.queries, place, q_len, rows, lists, self.layout)
        return place, line, walk

    @cute.jit
    def load(self, copies, tiles, rings, where, numbers, d: Constexpr, e: Constexpr):
        config, (place, _, heads, _, _, _) = self.config, where
        sK, sV, sQ, sO, lse2, delta = tiles
        of_k, of_v, of_q, of_o = [ring.make_producer() for ring in rings]
        for i, (ring, tile, columns) in enumerate(((of_k, sK, d), (of_v, sV, e))):
            ones = cute.make_tensor(
                tile.iterator, cute.append(tile.layout, cute.make_layout(1), up_to_rank=3)
            )
            shared, array = parts(copies[i], ones, (config.tile_kv, columns), place.n, place.row)
            start_copies(ring.acquire_and_advance(), ((copies[i].atom, shared, array),), place.tile)
        for g in cutlass.range(heads.shape[1], unroll=1):
            _, line, walk = self.walk(where, g)
            head = place.n * heads.shape[1] + g
            qs, qg = parts(copies[2], sQ, (config.tile_q, d), head, place.row)
            os, og = parts(copies[3], sO, (config.tile_q, e), head, place.row)
            for i in cutlass.range(walk.count, unroll=1):
                j = walk_at(walk, self.queries, i)
                slot = of_q.acquire_and_advance()
                start_copies(slot, ((copies[2].atom, qs, qg),), j)
                self.copy_line(slot, numbers[0], lse2, line, j)
                slot = of_o.acquire_and_advance()
                start_copies(slot, ((copies[3].atom, os, og),), j)
                self.copy_line(slot, numbers[1], delta, line, j)

    @cute.jit
    def copy_line(self, slot, source, target, line, j):
        """Starts to copy what is known of a tile of queries. There is some for each query of the tile: before.py pads."""
        size = self.config.tile_q
        start = source.iterator + (Int64(line) * source.shape[1] + j * size)
        found = cute.make_tensor(start.align(16), cute.make_layout(size))
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            cute.copy(atom, found, target[None, slot.index], mbar_ptr=slot.barrier)

    def sums_at(self, numbers, line, j, d: int):
        """Where the sums of a tile of queries begin."""
        tiles = numbers[1].shape[1] // self.config.tile_q  # of a head: padded, as delta is
        return numbers[2].iterator + (Int64(line) * tiles + j) * (self.config.tile_q * d)

    @cute.jit
    def add_up(self, sdQ, where, numbers, d: Constexpr):
        """One warp adds each warpgroup's part of dQ to the sums."""
        size = cute.size(sdQ, mode=[0])
        for g in cutlass.range(where[2].shape[1], unroll=1):
            _, line, walk = self.walk(where, g)
            for i in cutlass.range(walk.count, unroll=1):
                start = self.sums_at(numbers, line, walk_at(walk, self.queries, i), d)
                for wg in range_constexpr(WARPGROUPS):
                    cute.arch.cp_async_bulk_wait_group(WARPGROUPS - 1 - wg, read=True)
                    both(Barrier.EMPTY + wg).arrive()
                for wg in range_constexpr(WARPGROUPS):
                    both(Barrier.FULL + wg).arrive_and_wait()
                    add_to_global(start + wg * size, sdQ[None, wg].iterator, 4 * size)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def compute(
        self,
        tiles,
        rings,
        outs: Constexpr,
        where,
        arrays,
        targets,
        scale,
        facts: Constexpr,
    ):
        dtype, d, e = facts
        config = self.config
        place, rows, heads, _, q_len, kv_len = where
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 - 1
        of_s = product(dtype, config.tile_q)
        of_k = product(dtype, d, b="MN", registers=True)
        of_v = product(dtype, e, b="MN", registers=True)
        mine_k = cute.local_tile(tiles.k, (ROWS, d), (wg, 0))
        mine_v = cute.local_tile(tiles.v, (ROWS, e), (wg, 0))
        acc_k, acc_v = accumulator(of_k, d), accumulator(of_v, e)
        acc_k.fill(0.0)
        acc_v.fill(0.0)
        work = Work(
            wg=wg,
            thread=thread,
            of_s=of_s,
            of_k=of_k,
            of_v=of_v,
            of_q=product(dtype, dq_columns(config, d), a="MN", b="MN"),
            k=operand_a(of_s, mine_k),
            v=operand_a(of_s, mine_v),
            q=operand_b(of_s, tiles.q),
            dout=operand_b(of_s, tiles.dout),
            q_rows=operand_b(of_k, transposed(tiles.q)),
            dout_rows=operand_b(of_v, transposed(tiles.dout)),
            tiles=tiles,
            acc_k=acc_k,
            acc_v=acc_v,
            dtype=dtype,
            d=d,
            scale=scale,
            # Scores are natural; without a score function the scale is part of the exponential's factor.
            factor=scale * LOG2_E if const_expr(self.score is None) else Float32(LOG2_E),
        )
        scores = start_scores(self.mask, self.score, *arrays, self.derivative)
        first = place.tile * config.tile_kv
        captured = self.start_captured(work, targets, first)
        rings[0].make_consumer().wait()
        rings[1].make_consumer().wait()
        readers = rings[2].make_consumer(), rings[3].make_consumer()
        for g in cutlass.range(heads.shape[1], unroll=1):
            at_head, _, walk = self.walk(where, g)
            head = self.head(work, bind_head(scores, at_head, rows), captured, first, q_len)
            # Where nothing is to be seen the list says tile 0, and no key is there.
            limit = kv_len if walk.list.count > 0 else Int32(0)
            end = walk.partial if first + config.tile_kv <= kv_len else walk.count
            for i in cutlass.range(end, unroll=1):
                at = walk_at(walk, self.queries, i) * config.tile_q
                readers = self.tile(work, head, readers, at, limit, True)
            for i in cutlass.range(end, walk.count, unroll=1):
                at = walk_at(walk, self.queries, i) * config.tile_q
                readers = self.tile(work, head, readers, at, limit, False)
            if const_expr(captured is not None):
                captured.finish_head(head.scores.derivative)
        if const_expr(captured is not None):
            captured.finish(bind_head(scores, place, rows).derivative)
        # Both are past their products with k.
        pipeline.NamedBarrier(Barrier.FREE, WARPGROUPS * WARPGROUP).arrive_and_wait()
        to_shared(of_k, thread, acc_k, mine_k, dtype, scale)
        to_shared(of_v, thread, acc_v, mine_v, dtype)
        pipeline.NamedBarrier(Barrier.DONE + wg, WARPGROUP).arrive_and_wait()
        if thread < 32:
            index = place.tile * WARPGROUPS + wg
            send(outs[0], mine_k, (ROWS, d), place.n, place.row, index)
            send(outs[1], mine_v, (ROWS, e), place.n, place.row, index)
            sent()

    def start_captured(self, work: "Work", targets, first) -> Captured | None:
        """None: the score reads nothing that has a gradient."""
        if self.derived is None or not self.derived.reads:
            return None
        return start_captured(
            *self.derived, targets, self.at(work), first + work.wg * ROWS, turned=True
        )

    def at(self, work: "Work"):
        """(key, query) of each element of a thread's scores, by rows."""
        return by_rows(coordinates(work.of_s, work.thread, self.config.tile_q))

    def head(self, work: "Work", scores: Scores, captured, first, q_len) -> "Head":
        """What is known of a head before its queries: the functions at the thread's keys."""
        at = self.at(work)
        keys = [first + work.wg * ROWS + at[r, 0][0] for r in range(2)]
        return Head(
            scores, [bind_scores(scores, kv_idx=key) for key in keys], keys, at, captured, q_len
        )

    @cute.jit
    def tile(
        self,
        work: Constexpr,
        head: Constexpr,
        readers,
        m0,
        limit,
        is_partial: Constexpr,
    ):
        """One tile of queries. Groups of products end in the order in which they begin."""
        config, (of_q, of_o) = self.config, readers
        acc_s, acc_d = [accumulator(work.of_s, config.tile_q) for _ in range(2)]
        shape = work.of_k.partition_shape_A((ROWS, config.tile_q))
        p, ds = [cute.make_rmem_tensor(shape, work.dtype) for _ in range(2)]

        slot = of_q.wait_and_advance()
        multiply(work.of_s, acc_s, work.k, work.q[None, None, None, slot.index], False)
        slot_o = of_o.wait_and_advance()
        multiply(work.of_s, acc_d, work.v, work.dout[None, None, None, slot_o.index], False)
        dout_rows = work.dout_rows[None, None, None, slot_o.index]
        stages = slot.index, slot_o.index
        if const_expr(head.captured is not None):
            warpgroup.wait_group(0)
            self.capture(work, head, acc_s, acc_d, p, ds, stages, m0, limit, is_partial)
        else:
            warpgroup.wait_group(1)
            self.exponentials(work, head, acc_s, p, stages[0], m0, limit, is_partial)
            if const_expr(config.hidden):
                finish_before_wait(p)
            warpgroup.wait_group(0)
            self.chain(work, acc_s, acc_d, ds, stages[1])
        stage = slot.index if const_expr(config.ds_stages > 1) else 0
        if const_expr(not self.deterministic):
            self.share(work, ds, stage)
        # Only now, though P has been known for long: it would take more registers.
        multiply(work.of_v, work.acc_v, p, dout_rows, True)
        q_rows = work.q_rows[None, None, None, slot.index]
        if const_expr(self.deterministic):
            multiply(work.of_k, work.acc_k, ds, q_rows, True)
        else:
            acc_q = accumulator(work.of_q, dq_columns(config, work.d))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_of(Barrier.WRITTEN).arrive_and_wait()
            multiply(work.of_q, acc_q, *self.dq_operands(work, stage), False)
            multiply(work.of_k, work.acc_k, ds, q_rows, True)
        warpgroup.wait_group(1)
        slot_o.release()
        if const_expr(not self.deterministic):
            self.add(work, acc_q)
        warpgroup.wait_group(0)
        slot.release()
        return of_q, of_o

    def all_of(self, barrier: Barrier):
        return pipeline.NamedBarrier(barrier, WARPGROUPS * WARPGROUP)

    @cute.jit
    def exponentials(
        self, work: Constexpr, head: Constexpr, acc, p, stage, m0, limit, is_partial: Constexpr
    ):
        """P from products: rounded in `p`; in `acc` as it is, or with a score times its slope. Without special functions in
        the score where all of a warp's are small."""
        if const_expr(self.small is None):
            self.exponentials_of(work, head, acc, p, stage, m0, limit, is_partial)
        elif all_small(acc, work.scale, self.small):
            small = dataclasses.replace(head, are_small=True)
            self.exponentials_of(work, small, acc, p, stage, m0, limit, is_partial)
        else:
            self.exponentials_of(work, head, acc, p, stage, m0, limit, is_partial)

    def exponentials_of(self, work, head, acc, p, stage, m0, limit, is_partial: bool):
        s, columns = by_rows(acc), self.config.tile_q // 4
        for c in range(0, columns, 2):
            lse2 = two_of(work.tiles.lse2, stage, head.at[0, c][1])
            for r in (0, 1):
                found = []
                for i in (0, 1):
                    value, slopes = self.value(
                        work, head, s[r, c + i], r, c + i, m0, limit, is_partial
                    )
                    x = cute.math.exp2(value * work.factor - lse2[i], fastmath=True)
                    found.append(x)
                    if slopes is not None:
                        # Where P is 0 it stays 0: a slope that a masked pair has may be NaN.
                        x = select(x != 0.0, x * slopes[0], Float32(0.0))
                    s[r, c + i] = x
                packed(p, c + r, *found)

    def value(self, work, head, x, r: int, c: int, m0, limit, is_partial: bool) -> tuple:
        """The score of a pair from its product, or -inf, and the score's slopes there; None without a score function."""
        if self.score is None and not is_partial:
            return x, None
        step, slopes = step_of(head.at, m0, c), None
        query = step.base + step.by
        pair = join_scores(head.keys[r], bind_scores(head.scores, q_idx=step))
        if self.score is not None:
            x = Scaled(x, work.scale)
            pair = of_small(pair) if head.are_small else pair
            slopes = derivatives(pair, x)
            x = scored(pair, x)
        if is_partial:
            inside = head.indices[r] < limit
            if self.score is not None:  # else P is 0 past the last query, whose lse is infinite
                inside = inside & (query < head.q_len)
            x = masked(pair, inside, x)
        return x, slopes

    def chain(self, work: Constexpr, acc_s, acc_d, ds, stage):
        """dS, rounded, from P, or P times the score's slope, and dP."""
        p, dp, columns = by_rows(acc_s), by_rows(acc_d), self.config.tile_q // 4
        for c in range(0, columns, 2):
            delta = two_of(work.tiles.delta, stage, 2 * (work.thread % 4) + 4 * c)
            for r in (0, 1):
                packed(ds, c + r, *[p[r, c + i] * (dp[r, c + i] - delta[i]) for i in (0, 1)])

    def capture(self, work, head, acc_s, acc_d, p, ds, stages, m0, limit, is_partial: bool):
        """P and dS, both rounded, in one go: what is captured needs all of a pair at once."""
        s, dp, columns = by_rows(acc_s), by_rows(acc_d), self.config.tile_q // 4
        for c in range(0, columns, 2):
            lse2 = two_of(work.tiles.lse2, stages[0], head.at[0, c][1])
            delta = two_of(work.tiles.delta, stages[1], head.at[0, c][1])
            for r in (0, 1):
                of_p, of_ds = [], []
                for i in (0, 1):
                    value, slopes = self.value(
                        work, head, s[r, c + i], r, c + i, m0, limit, is_partial
                    )
                    x = cute.math.exp2(value * work.factor - lse2[i], fastmath=True)
                    live, y = x != 0.0, x * (dp[r, c + i] - delta[i])
                    head.captured.add(r, c + i, live, y, slopes)
                    of_p.append(x)
                    of_ds.append(select(live, y * slopes[0], Float32(0.0)))
                packed(p, c + r, *of_p)
                packed(ds, c + r, *of_ds)
        head.captured.finish_tile(head.scores.derivative, m0)

    @cute.jit
    def share(self, work: Constexpr, ds, stage):
        """dS to shared memory, for both warpgroups."""
        config = self.config
        if const_expr(config.ds_stages == 1):
            self.all_of(Barrier.FREE).arrive_and_wait()
        tile = cute.local_tile(
            work.tiles.ds[None, None, stage], (ROWS, config.tile_q), (work.wg, 0)
        )
        held = cute.make_tensor(ds.iterator, accumulator_layout(work.of_s, config.tile_q))
        store_held(work.of_s, work.thread, held, tile, work.dtype)

    def dq_operands(self, work, stage) -> tuple:
        """dS and k of a warpgroup's part of dQ: its queries, or all of 64 and its columns."""
        config, columns = self.config, dq_columns(self.config, work.d)
        ds = transposed(work.tiles.ds[None, None, stage])
        k = transposed(work.tiles.k)
        if config.tile_q > ROWS:
            ds = cute.local_tile(ds, (ROWS, config.tile_kv), (work.wg, 0))
        else:
            k = cute.local_tile(k, (columns, config.tile_kv), (work.wg, 0))
        return operand_a(work.of_q, ds), operand_b(work.of_q, k)

    @cute.jit
    def add(self, work: Constexpr, acc):
        """Hands a warpgroup's part of dQ to the warp that adds it to the sums, in the order of its registers: four of a
        thread at a time."""
        size = cute.size(acc)
        both(Barrier.EMPTY + work.wg).arrive_and_wait()
        mine = work.tiles.dq[None, work.wg].iterator + 4 * work.thread
        layout = cute.make_layout((4, size // 4), stride=(1, 4 * WARPGROUP))
        fours = cute.make_tensor(acc.iterator, cute.make_layout((4, size // 4)))
        cute.autovec_copy(fours, cute.make_tensor(mine.align(16), layout))
        cute.arch.fence_proxy("async.shared", space="cta")
        both(Barrier.FULL + work.wg).arrive()


def both(barrier):
    """Of a warpgroup and the warp that adds dQ."""
    return pipeline.NamedBarrier(barrier, WARPGROUP + 32)


def two_of(numbers, stage, column):
    """Neighbours of what is known of queries."""
    start = numbers[None, stage].iterator + column
    return cute.make_tensor(start.align(8), cute.make_layout(2)).load()


class Tiles(NamedTuple):
    """In shared memory. Those of queries have a dim of stages, dQ one of warpgroups, or there is none."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    dout: cute.Tensor
    ds: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor | None


@dataclasses.dataclass(frozen=True)
class Work:
    """Of a warpgroup, for all heads: products, their operands in shared memory, accumulators."""

    wg: Int32
    thread: Int32
    of_s: Any
    of_k: Any
    of_v: Any
    of_q: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    q_rows: Any
    dout_rows: Any
    tiles: "Tiles"
    acc_k: Any
    acc_v: Any
    dtype: type
    d: int
    scale: Float32
    factor: Float32


@dataclasses.dataclass(frozen=True)
class Head:
    """Of a query head: the functions there, and at each of the thread's keys; those keys; the thread's (row, column)s in a
    tile; what is captured; how many queries there are; whether `small_limit` allows all scores of a tile."""

    scores: Scores
    keys: list[Scores]
    indices: list[Int32]
    at: Any
    captured: Captured | None
    q_len: Int32
    are_small: bool = False


@cute.jit
def finish_before_wait(p):
    """Keeps ptxas from moving the exponentials behind the wait that follows: a store of what they are, if all are NaN, is
    ordered before the wait."""
    words = cute.recast_tensor(p, Uint32)
    every = words[0]
    for i in range_constexpr(1, cute.size(words)):
        every = every & words[i]
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .u32 a; mov.u32 a, 0; setp.eq.u32 p, {$r0}, 0xffffffff; "
        "@p st.shared.u32 [a], {$r0}; }",
        read_only_args=[every],
    )
