"""Attention, forward, on Hopper: TMA fills shared memory, `wgmma` multiplies.

    grid       a CTA makes `tile_q` rows of one head, or of `pack` query heads of a kv head: 64 rows a warpgroup

    role          warps     does
    ----------    -------   ------------------------------------------------------------
    load          4         the first one: TMA of q once, then of k and v, tile by tile
    compute       4 each    scores of 64 rows, mask, softmax, output

    ring   stages     full                     empty
    ----   --------   ----------------------   ---------------------------
    q      1          its bytes                one arrival a computing warp
    k, v   `stages`   their bytes              one arrival a computing warp

    `persistent`: there are as many CTAs as multiprocessors, each of which takes one tile after the other. Which one is
    next is counted in memory, asked for by the loading warp, and posted to the others; so the loads of the next tile
    begin while this one ends

    compute               S_0 | softmax_0 |  S_1, O += P_0 V_0  | softmax_1 | S_2, O += P_1 V_1 ...
                                                 \\ softmax_1 begins when S_1 is there, while P_0 V_0 still runs

    `split`: the tiles of keys that a tile of queries meets are shared out to several CTAs. Their results are float32, and
    combine.py makes one of them: for so few queries that they would leave multiprocessors idle

    end        out by TMA, through the memory of q, whose rows nobody else reads, or its own if `persistent`;
               of a part, from registers

Registers hold S (64 x `tile_kv`), P, rounded, and O: `tile_kv` / 2 + `tile_kv` / 4 + v_dim / 2 a thread.

Sources: Shah et al. 2024 (FlashAttention-3), section 3, for roles and overlap; Milakov and Gimelshein 2018 for the
softmax.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Constexpr, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from eqxcute.inline import Scaled

from .._config import COMBINE, SMS, Sm90Forward
from . import softmax
from .combine import Combine
from .functions import (
    all_small,
    bind_head,
    bind_scores,
    masked,
    of_small,
    pairs,
    scored,
    small_limit,
    start_scores,
)
from .hopper import (
    ROWS,
    WARPGROUP,
    accumulator,
    allocate,
    at_pointer,
    by_keys,
    by_queries,
    by_rows,
    coordinates,
    loads,
    multiply,
    operand_a,
    operand_b,
    parts,
    product,
    rounded,
    send,
    sent,
    stores,
    tile_layout,
    to_shared,
    transposed,
)
from .matrix import LOG2_E, width
from .roles import MAILS, Plan, Ring, Role, start_copies, start_rings
from .walk import Axis, MapLayout, find_walk, grid_size, part_of, place_at, walk_at

DONE = 4  # the first of those by which a warpgroup ends
READ = 7  # all have read q


class Forward90:
    """q (R, Q, N, G, D), k (R, K, N, D), v (R, K, N, E), out (R, Q, N, G, E), lse (R, N, G, Q) float32.

    `mask` and `score` are codes, or None; `layout` says what the lists of the tile map are, None without one.
    """

    def __init__(self, config: Sm90Forward, mask, score, layout: MapLayout | None):
        self.config, self.mask, self.score, self.layout = config, mask, score, layout
        self.small = None if score is None else small_limit(score)
        queries = config.tile_q // config.pack
        tile = layout.tile if layout is not None else (queries, config.tile_kv)
        self.queries = Axis(queries, tile[0] // queries)
        self.keys = Axis(config.tile_kv, tile[1] // config.tile_kv)

    def plan(self, dtype, dim: int, v_dim: int) -> Plan:
        config, (load, compute) = self.config, self.config.registers
        d, e = width(dim, dtype), width(v_dim, dtype)
        size = dtype.width // 8
        return Plan(
            roles=(Role("load", 4, load), Role("compute", 4 * config.warpgroups, compute)),
            rings=(
                Ring("q", 1, config.tile_q * d * size),
                Ring("k", config.stages, config.tile_kv * d * size),
                Ring("v", config.stages, config.tile_kv * e * size),
            ),
        )

    @cute.jit
    def __call__(
        self,
        stream,
        q,
        k,
        v,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        out,
        lse,
        scratch,
        scale,
    ):
        config, dtype = self.config, q.element_type
        dim, v_dim = q.shape[4], v.shape[3]
        d, e = width(dim, dtype), width(v_dim, dtype)
        layouts = (
            tile_layout(config.tile_q, dim, dtype, 1),
            tile_layout(config.tile_kv, dim, dtype, config.stages),
            tile_layout(config.tile_kv, v_dim, dtype, config.stages),
            tile_layout(config.tile_q, v_dim, dtype),
        )
        copies = (
            loads(by_queries(q, config.pack), layouts[0], (config.tile_q, d)),
            loads(by_keys(k), layouts[1], (config.tile_kv, d)),
            loads(by_keys(v), layouts[2], (config.tile_kv, e)),
            stores(by_queries(out, config.pack), tile_layout(ROWS, v_dim, dtype), (ROWS, e)),
        )
        plan = self.plan(dtype, dim, v_dim)
        works = grid_size(
            self.queries, q.shape[1], heads.shape[0] * (heads.shape[1] // config.pack), rows
        )
        counter, *results = scratch
        part_out, part_lse = results if const_expr(config.split) else (None, lse)
        if const_expr(config.split):
            works = works * part_lse.shape[0]
        grid = works
        if const_expr(config.persistent):
            grid = cutlass.min(works, SMS)
            if works > grid:
                self.reset(counter).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)
        if grid > 0:  # an empty grid is a launch error
            self.kernel(
                works,
                counter,
                q.shape[1],
                k.shape[1],
                copies,
                layouts,
                rows,
                heads,
                lists,
                mask_arrays,
                score_arrays,
                part_lse,
                part_out,
                scale,
                (dtype, d, e),
            ).launch(
                grid=[grid, 1, 1],
                block=[plan.threads, 1, 1],
                min_blocks_per_mp=1,
                stream=stream,
            )
        if const_expr(config.split):
            Combine(COMBINE)(stream, part_out, part_lse, out, lse)

    @cute.kernel
    def reset(self, counter):
        counter[0] = Int32(0)

    @cute.kernel
    def kernel(
        self,
        works,
        counter,
        q_len,
        kv_len,
        copies,
        layouts,
        rows,
        heads,
        lists,
        mask_arrays,
        score_arrays,
        lse,
        part_out,
        scale,
        facts: Constexpr,
    ):
        dtype, d, e = facts
        config, plan = self.config, self.plan(*facts)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        # Where a CTA makes one tile, the memory of q is that of out at the end.
        columns = d if const_expr(config.persistent) else max(d, e)
        room = shared.allocate_tensor(dtype, cute.make_layout(config.tile_q * columns), 1024)
        sQ = at_pointer(room.iterator, layouts[0], dtype)
        if const_expr(config.persistent):
            sO = allocate(shared, layouts[3], dtype)
        else:
            sO = at_pointer(room.iterator, layouts[3], dtype)
        sK, sV = allocate(shared, layouts[1], dtype), allocate(shared, layouts[2], dtype)
        plan.count("q", sQ[None, None, 0])
        plan.count("k", sK[None, None, 0])
        plan.count("v", sV[None, None, 0])
        rings = tuple(plan.make(name) for name in ("q", "k", "v"))
        mail = numbers = None
        if const_expr(config.persistent):
            mail = plan.make_mailbox("compute")
            numbers = shared.allocate_tensor(Int32, cute.make_layout(MAILS), 16)
        start_rings()

        x, _, _ = cute.arch.block_idx()
        parts_count = lse.shape[0] if const_expr(config.split) else None
        where = (q_len, kv_len, rows, heads, lists, parts_count)
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.role("load").registers)
            if warp == 0:
                loaded = [ring.make_producer() for ring in rings]
                if const_expr(config.persistent):
                    posts = mail.make_producer()
                    while x < works:
                        following = self.next_work(counter, works)
                        post = posts.acquire_and_advance()
                        if cute.arch.lane_idx() == 0:
                            numbers[post.index] = following
                        cute.arch.sync_warp()
                        post.commit()
                        loaded = self.load(x, copies, (sQ, sK, sV), loaded, where, facts)
                        x = following
                else:
                    self.load(x, copies, (sQ, sK, sV), loaded, where, facts)
        else:
            cute.arch.setmaxregister_increase(plan.role("compute").registers)
            read = [ring.make_consumer() for ring in rings]
            tiles = (sQ, sK, sV, sO)
            rest = (copies[3], mask_arrays, score_arrays, lse, part_out, scale)
            if const_expr(config.persistent):
                posts = mail.make_consumer()
                while x < works:
                    read = self.compute(x, tiles, read, where, rest, facts)
                    post = posts.wait_and_advance()
                    x = numbers[post.index]
                    post.release()
            else:
                self.compute(x, tiles, read, where, rest, facts)
            if warp % 4 == 0:
                sent()

    @cute.jit
    def next_work(self, counter, works):
        """Which tile this CTA takes after the one it has: the grid has the first ones. Nobody has reset the counter where
        those are all."""
        found, first = works, cute.arch.grid_dim()[0]
        if works > first:
            number = Int32(0)
            if cute.arch.lane_idx() == 0:
                one = Int32(1)
                number = cute.arch.atomic_add(counter.iterator, one, sem="relaxed", scope="gpu")
            found = cute.arch.shuffle_sync(number, 0) + first
        return found

    @cute.jit
    def find(self, x, where):
        """The place and the walk of a tile; its head in views of queries: kv heads, and in each as many parts of its query
        heads as are packed; how many keys there are; the part."""
        q_len, kv_len, rows, heads, lists, count = where
        pack, part = self.config.pack, Int32(0)
        if const_expr(self.config.split):
            x, part = x // count, x % count
        what = self.queries, q_len, heads, rows, lists, self.layout, True, pack, True
        place = place_at(x, *what)
        walk = find_walk(self.queries, self.keys, place, kv_len, rows, lists, self.layout)
        if const_expr(self.config.split):
            walk, is_some = part_of(walk, part, count)
            kv_len = kv_len if is_some else Int32(0)
        return place, walk, (place.n * heads.shape[1] + place.g) // pack, kv_len, part

    @cute.jit
    def load(self, x, copies, tiles, rings, where, facts: Constexpr):
        _, d, e = facts
        config = self.config
        place, walk, head, _, _ = self.find(x, where)
        sQ, sK, sV = tiles
        qs, qg = parts(copies[0], sQ, (config.tile_q, d), head, place.row)
        ks, kg = parts(copies[1], sK, (config.tile_kv, d), place.n, place.row)
        vs, vg = parts(copies[2], sV, (config.tile_kv, e), place.n, place.row)
        of_q, of_k, of_v = rings
        slot = of_q.acquire_and_advance()
        start_copies(slot, ((copies[0].atom, qs, qg),), place.tile)
        for i in cutlass.range(walk.count, unroll=1):
            j = walk_at(walk, self.keys, i)
            slot = of_k.acquire_and_advance()
            start_copies(slot, ((copies[1].atom, ks, kg),), j)
            slot = of_v.acquire_and_advance()
            start_copies(slot, ((copies[2].atom, vs, vg),), j)
        return [of_q, of_k, of_v]

    @cute.jit
    def compute(self, x, tiles, rings, where, rest: Constexpr, facts: Constexpr):
        """One tile of queries, from its scores to its output."""
        dtype, d, e = facts
        config = self.config
        sQ, sK, sV, sO = tiles
        _, _, rows, heads, _, _ = where
        out, mask_arrays, score_arrays, lse, part_out, scale = rest
        place, walk, of_heads, kv_len, part = self.find(x, where)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp // 4 - 1
        of_s = product(dtype, config.tile_kv)
        of_o = product(dtype, e, b="MN", registers=True)
        operands = (
            operand_a(of_s, cute.local_tile(sQ, (ROWS, d), (wg, 0, 0))),
            operand_b(of_s, sK),
            operand_b(of_o, transposed(sV)),
        )
        acc_o = accumulator(of_o, e)
        held = cute.make_rmem_tensor(of_o.partition_shape_A((ROWS, config.tile_kv)), dtype)
        top, total = softmax.start(2)
        # Scores are natural; without a score function the scale is part of the exponential's factor.
        factor = scale * LOG2_E if const_expr(self.score is None) else Float32(LOG2_E)

        at = by_rows(coordinates(of_s, thread, config.tile_kv))
        own = wg * ROWS
        first = place.tile * self.queries.tile
        scores = start_scores(self.mask, self.score, mask_arrays, score_arrays)
        head = self.bind_head(scores, place, rows)
        each_row = [self.bind_row(head, place, heads, first, own + at[i, 0][0]) for i in range(2)]
        context = (head, each_row, at, kv_len, scale, factor)
        products = (of_s, of_o)
        state = (acc_o, held, top, total)

        of_q, of_k, of_v = rings
        slot_q = of_q.wait_and_advance()
        acc_s = accumulator(of_s, config.tile_kv)
        slot = of_k.wait_and_advance()
        multiply(of_s, acc_s, operands[0], operands[1][None, None, None, slot.index], False)
        warpgroup.wait_group(0)
        slot.release()
        self.softmax(acc_s, state, context, walk_at(walk, self.keys, 0), True)
        rounded(held, acc_s)
        acc_o.fill(0.0)
        for i in cutlass.range(1, walk.partial, unroll=1):
            j = walk_at(walk, self.keys, i)
            of_k, of_v = self.tile(of_k, of_v, products, operands, state, context, j, True)
        for i in cutlass.range(walk.partial, walk.count, unroll=1):
            j = walk_at(walk, self.keys, i)
            of_k, of_v = self.tile(of_k, of_v, products, operands, state, context, j, False)
        slot_q.release()
        slot = of_v.wait_and_advance()
        multiply(of_o, acc_o, held, operands[2][None, None, None, slot.index], True)
        warpgroup.wait_group(0)
        slot.release()

        sums = softmax.finish(by_rows(acc_o), top, total, factor)
        if const_expr(config.split):
            lse = lse[part, None, None, None, None]
        self.store_lse(thread, at, sums, lse, place, first, own)
        if const_expr(config.split):
            self.store_part(
                by_rows(coordinates(of_o, thread, e)), acc_o, part_out, part, place, first, own
            )
        else:
            self.store_out(of_o, warp, thread, acc_o, sO, out, place, of_heads, facts)
        return [of_q, of_k, of_v]

    @cute.jit
    def store_out(
        self,
        of_o: Constexpr,
        warp,
        thread,
        acc_o,
        sO,
        out: Constexpr,
        place,
        of_heads,
        facts: Constexpr,
    ):
        """A warpgroup's rows of out, through shared memory, by TMA."""
        dtype, d, e = facts
        config, wg = self.config, warp // 4 - 1
        done = pipeline.NamedBarrier(barrier_id=DONE + wg, num_threads=WARPGROUP)
        if const_expr(
            config.persistent
        ):  # the memory of out may still be read, for the tile before
            if warp % 4 == 0:
                sent()
            done.arrive_and_wait()
        elif const_expr(d != e):  # rows of out lie where others have rows of q
            threads = WARPGROUP * config.warpgroups
            pipeline.NamedBarrier(barrier_id=READ, num_threads=threads).arrive_and_wait()
        mine = cute.local_tile(sO, (ROWS, e), (wg, 0))
        to_shared(of_o, thread, acc_o, mine, dtype)
        done.arrive_and_wait()
        if warp % 4 == 0:
            index = place.tile * config.warpgroups + wg
            send(out, mine, (ROWS, e), of_heads, place.row, index)

    @cute.jit
    def store_part(self, at, acc, out, part, place, first, own):
        """A part's rows of out, in float32."""
        o, v_dim = by_rows(acc), out.shape[5]
        for r in range_constexpr(2):
            g, query = self.head_and_query(place, first, own + at[r, 0][0])
            if query < out.shape[2]:
                target = out[part, place.row, query, place.n, g, None]
                for c in range_constexpr(0, cute.size(o, mode=[1]), 2):  # pairs of columns
                    if at[r, c][1] < v_dim:
                        place_of = (target.iterator + at[r, c][1]).align(8)
                        pair = cute.make_tensor(place_of, cute.make_layout(2))
                        pair[0], pair[1] = o[r, c], o[r, c + 1]

    def bind_head(self, scores, place, rows):
        """What does not depend on a row: with packed heads, neither does the head."""
        if self.config.pack == 1:
            return bind_head(scores, place, rows)
        mapped = {f"v{i}": rows[place.row, i] for i in range(1, rows.shape[1])}
        return bind_scores(scores, b=place.b, **mapped)

    def bind_row(self, head, place, heads, first, row):
        g, query = self.head_and_query(place, first, row)
        if self.config.pack == 1:
            return bind_scores(head, q_idx=query)
        return bind_scores(head, h=heads[place.n, g], q_idx=query)

    def head_and_query(self, place, first, row) -> tuple:
        """Of a row of the tile: its query head within the kv head, and its query."""
        pack = self.config.pack
        if pack == 1:
            return place.g, first + row
        return place.g + row % pack, first + row // pack

    @cute.jit
    def tile(
        self,
        of_k,
        of_v,
        products: Constexpr,
        operands,
        state,
        context: Constexpr,
        j,
        is_partial: Constexpr,
    ):
        """The scores of one tile of keys, and the output of the tile before it."""
        config = self.config
        (of_s, of_o), (a_q, b_k, b_v), (acc_o, held, _, _) = products, operands, state
        acc_s = accumulator(of_s, config.tile_kv)
        slot_k = of_k.wait_and_advance()
        multiply(of_s, acc_s, a_q, b_k[None, None, None, slot_k.index], False)
        slot_v = of_v.wait_and_advance()
        multiply(of_o, acc_o, held, b_v[None, None, None, slot_v.index], True)
        warpgroup.wait_group(1)
        slot_k.release()
        shrink = self.softmax(acc_s, state, context, j, is_partial)
        finish_before_wait(state[3], config.hidden)
        warpgroup.wait_group(0)
        slot_v.release()
        rounded(held, acc_s)
        scale_rows(by_rows(acc_o), shrink)
        return of_k, of_v

    @cute.jit
    def softmax(self, acc_s, state, context: Constexpr, j, is_partial: Constexpr):
        """Scores become exponentials; returns what the output is to be multiplied by."""
        head, each_row, at, kv_len, scale, factor = context
        _, _, top, total = state
        s = by_rows(acc_s)
        n0 = j * self.config.tile_kv
        if const_expr(self.small is not None):
            self.score_by_size(s, head, each_row, at, n0, scale)
        elif const_expr(self.score is not None):
            self.score_all(s, head, each_row, at, n0, scale, False)
        if const_expr(is_partial):
            self.hide(s, head, each_row, at, n0, kv_len)
        return softmax.add_scores_lazily(s, top, total, factor)

    @cute.jit
    def score_by_size(self, s, head: Constexpr, each_row: Constexpr, at, n0, scale):
        """The score function, without special functions where all of a warp's scores are small."""
        if all_small(s, scale, self.small):
            self.score_all(s, head, each_row, at, n0, scale, True)
        else:
            self.score_all(s, head, each_row, at, n0, scale, False)

    def score_all(self, s, head, each_row, at, n0, scale, are_small: bool):
        for r, c, _, pair in pairs(head, each_row, at, n0):
            s[r, c] = scored(of_small(pair) if are_small else pair, Scaled(s[r, c], scale))

    def hide(self, s, head, each_row, at, n0, length):
        """The mask, of a partial tile."""
        for r, c, key, pair in pairs(head, each_row, at, n0):
            s[r, c] = masked(pair, key < length, s[r, c])

    @cute.jit
    def store_lse(self, thread, at, sums, lse, place, first, own):
        if thread % 4 == 0:  # of the four lanes that share a row
            for i in range_constexpr(2):
                g, query = self.head_and_query(place, first, own + at[i, 0][0])
                if query < lse.shape[3]:
                    lse[place.row, place.n, g, query] = sums[i]


@cute.jit
def scale_rows(o, factors):
    for r in range_constexpr(2):
        o[r, None].store(o[r, None].load() * factors[r])


@cute.jit
def finish_before_wait(total, rows: Constexpr):
    """Keeps ptxas from moving the exponentials of so many rows behind the wait that follows, where no product of this
    warpgroup hides them: a store of their sum, if it is negative, is ordered before the wait."""
    for r in range_constexpr(rows):
        cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .u32 a; mov.u32 a, 0; setp.lt.f32 p, {$r0}, 0f00000000; "
            "@p st.shared.f32 [a], {$r0}; }",
            read_only_args=[total[r]],
        )
