"""From the backward kernel's sums to the gradient of the queries.

    sums      blocks of float32, one for each tile of queries: tiles of a head, heads, rows of the batch. In a block
              are the registers of the accumulator of the kernel's product dQ (matrix.py), `vector` of each thread at
              a time: element e of thread t at (e - e % vector) * threads + t * vector + e % vector
    grid      a CTA a block: its threads hold what they would have held there
    end       times the scale, rounded, and out through shared memory in 16-byte stores

Reads and writes every number once, in whole lines.
"""

import cutlass.cute as cute
from cutlass import Constexpr, Int64, const_expr
from cutlass.memory import SmemAllocator

from .._config import BEFORE, Sm80Backward, Sm90Backward
from . import hopper
from .matrix import Products, accumulator, store_tile, tile_layout, to_shared, width


class After:
    """sums, float32 of any shape; dq (R, Q, N, G, D)."""

    def __init__(self, config: Sm80Backward):
        self.config = config
        self.threads = 32 * config.warps

    @cute.jit
    def __call__(self, stream, sums, dq, scale):
        rows, length, heads, groups, _ = dq.shape
        grid = cute.ceil_div(length, self.config.tile_q) * heads * groups * rows
        if grid > 0:  # an empty grid is a launch error
            self.kernel(sums, dq, scale).launch(
                grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, sums, dq, scale):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        config, dtype = self.config, dq.element_type
        _, length, heads, groups, dim = dq.shape
        tiles = cute.ceil_div(length, config.tile_q)
        tile, head = block % tiles, block // tiles
        g, n, r = head % groups, head // groups % heads, head // (heads * groups)
        products = Products(dtype, config.down_q, config.warps // config.down_q)

        acc = accumulator(products, tid, config.tile_q, width(dim, dtype))
        size, vector = cute.size(acc), config.vector
        start = sums.iterator + (Int64(block) * (size * self.threads) + tid * vector)
        layout = cute.make_layout((vector, size // vector), stride=(1, vector * self.threads))
        found = cute.make_tensor(start.align(4 * vector), layout)
        load_scaled(found, acc, scale)

        layout = tile_layout(config.tile_q, dim, dtype)
        tile_out = SmemAllocator().allocate_tensor(dtype, layout, 1024)
        to_shared(products, tid, acc, tile_out)
        cute.arch.sync_threads()
        first = tile * config.tile_q
        store_tile(tid, self.threads, tile_out, dq[r, None, n, g, None], config.tile_q, dim, first)


def load_scaled(found, acc, scale) -> None:
    """An accumulator from its part of a block, (vector, pieces), times the scale."""
    # Plain Python: up to 128 steps, and CuTe warns of `range_constexpr` from 64 on.
    vector = cute.size(found, mode=[0])
    for i in range(cute.size(acc) // vector):
        part = found[None, i].load()
        for j in range(vector):
            acc[i * vector + j] = part[j] * scale


def dq_columns(config: Sm90Backward, d: int) -> int:
    """Of dQ, that a warpgroup of the backward kernel for Hopper makes: all for 64 of 128 queries, or half for 64."""
    return d if config.tile_q > hopper.ROWS else d // 2


class After90:
    """The same of Hopper's backward kernel. A head's tiles are padded to whole ones of before.py; a block has the part of
    each warpgroup that computes, each as above with `vector` 4."""

    def __init__(self, config: Sm90Backward):
        self.config = config

    @cute.jit
    def __call__(self, stream, sums, dq, scale):
        rows, length, heads, groups, dim = dq.shape
        config, dtype = self.config, dq.element_type
        d = width(dim, dtype)
        layout = hopper.tile_layout(config.tile_q, d, dtype, atom=dq_columns(config, d))
        out = hopper.stores(hopper.by_queries(dq), layout, (config.tile_q, d))
        tiles = cute.ceil_div(length, config.tile_q)
        padded = cute.ceil_div(length, BEFORE.rows) * (BEFORE.rows // config.tile_q)
        grid = tiles * heads * groups * rows
        if grid > 0:  # an empty grid is a launch error
            self.kernel(
                out, layout, sums, scale, (tiles, padded, heads * groups), (dtype, d)
            ).launch(grid=[grid, 1, 1], block=[2 * hopper.WARPGROUP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out, layout, sums, scale, counts, facts: Constexpr):
        config, (dtype, d), (tiles, padded, heads) = self.config, facts, counts
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, wg = cute.arch.thread_idx()[0] % hopper.WARPGROUP, warp // 4
        tile, line = block % tiles, block // tiles
        columns = dq_columns(config, d)
        of_q = hopper.product(dtype, columns, a="MN", b="MN")
        acc = hopper.accumulator(of_q, columns)
        size = cute.size(acc)
        at = Int64(line) * padded + tile
        start = sums.iterator + ((at * 2 + wg) * (size * hopper.WARPGROUP) + 4 * thread)
        order = cute.make_layout((4, size // 4), stride=(1, 4 * hopper.WARPGROUP))
        load_scaled(cute.make_tensor(start.align(16), order), acc, scale)

        whole = hopper.allocate(SmemAllocator(), layout, dtype)
        place = (wg, 0) if const_expr(columns == d) else (0, wg)
        part = cute.local_tile(whole, (hopper.ROWS, columns), place)
        hopper.to_shared(of_q, thread, acc, part, dtype)
        cute.arch.sync_threads()
        if warp == 0:
            hopper.send(out, whole, (config.tile_q, d), line % heads, line // heads, tile)
            hopper.sent()
