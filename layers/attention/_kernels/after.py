"""From the backward kernel's sums to the gradient of the queries.

    sums      blocks of float32, one for each tile of queries: tiles of a head, heads, rows of the batch. In a block
              are the registers of the accumulator of the kernel's product dQ (matrix.py), `vector` of each thread at
              a time: element e of thread t at (e - e % vector) * threads + t * vector + e % vector
    grid      a CTA a block: its threads hold what they would have held there
    end       times the scale, rounded, and out through shared memory in 16-byte stores

Reads and writes every number once, in whole lines.
"""

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from .._config import Sm80Backward
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
        self.scaled(found, acc, scale)

        layout = tile_layout(config.tile_q, dim, dtype)
        tile_out = SmemAllocator().allocate_tensor(dtype, layout, 1024)
        to_shared(products, tid, acc, tile_out)
        cute.arch.sync_threads()
        first = tile * config.tile_q
        store_tile(tid, self.threads, tile_out, dq[r, None, n, g, None], config.tile_q, dim, first)

    def scaled(self, found, acc, scale) -> None:
        # Plain Python: up to 128 steps, and CuTe warns of `range_constexpr` from 64 on.
        vector = self.config.vector
        for i in range(cute.size(acc) // vector):
            part = found[None, i].load()
            for j in range(vector):
                acc[i * vector + j] = part[j] * scale
