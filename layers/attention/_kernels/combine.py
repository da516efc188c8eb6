"""From the results of parts of the keys to those of all:

    lse = log sum_p exp(lse_p),   out = sum_p exp(lse_p - lse) out_p

    grid     a warp a query of a head: the lanes share its columns, `VECTOR` beside each other a lane
    parts    the lanes share them to find the maximum of lse_p and the sum, and then each goes through all

A part that saw no key has an lse of -inf and no weight. Where none saw any, out is 0 and lse is -inf.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, range_constexpr

from .._config import Combination
from .matrix import LN_2, LOG2_E

VECTOR = 4  # columns: 16 bytes of a part


class Combine:
    """parts (P, R, Q, N, G, E) and lses (P, R, N, G, Q) float32, out (R, Q, N, G, E), lse (R, N, G, Q) float32."""

    def __init__(self, config: Combination):
        self.config = config

    @cute.jit
    def __call__(self, stream, parts, lses, out, lse):
        rows, length, heads, group, _ = out.shape
        grid = cute.ceil_div(rows * length * heads * group, self.config.warps)
        if grid > 0:  # an empty grid is a launch error
            self.kernel(parts, lses, out, lse).launch(
                grid=[grid, 1, 1], block=[32 * self.config.warps, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(self, parts, lses, out, lse):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rows, length, heads, group, _ = out.shape
        line = block * self.config.warps + tid // 32
        if line < rows * length * heads * group:
            g, rest = line % group, line // group
            n, rest = rest % heads, rest // heads
            self.line(
                tid % 32,
                parts[None, rest // length, rest % length, n, g, None],
                lses[None, rest // length, n, g, rest % length],
                out[rest // length, rest % length, n, g, None],
                lse[rest // length, n, g, None],
                rest % length,
            )

    @cute.jit
    def line(self, lane, parts, lses, out, lse, query):
        count, columns = lses.shape[0], out.shape[0]
        top = -Float32.inf
        for p in cutlass.range(lane, count, 32, unroll=1):
            top = cute.arch.fmax(top, lses[p])
        top = cute.arch.warp_reduction_max(top)
        base = Float32(0.0) if top == -Float32.inf else top * LOG2_E
        total = Float32(0.0)
        for p in cutlass.range(lane, count, 32, unroll=1):
            total += cute.math.exp2(lses[p] * LOG2_E - base, fastmath=True)
        total = cute.arch.warp_reduction_sum(total)
        nothing = total == 0.0
        if lane == 0:
            lse[query] = -Float32.inf if nothing else (base + cute.math.log2(total)) * LN_2
        factor = Float32(0.0) if nothing else 1.0 / total
        steps = cute.ceil_div(columns, 32 * VECTOR)
        sums = cute.make_rmem_tensor((VECTOR, steps), Float32)
        sums.fill(0.0)
        for p in cutlass.range(count, unroll=8):
            weight = cute.math.exp2(lses[p] * LOG2_E - base, fastmath=True) * factor
            for i in range_constexpr(steps):
                column = VECTOR * (32 * i + lane)
                if column < columns:
                    found = vector_at(parts[p, None], column).load()
                    sums[None, i].store(sums[None, i].load() + found * weight)
        for i in range_constexpr(steps):
            column = VECTOR * (32 * i + lane)
            if column < columns:
                vector_at(out, column).store(sums[None, i].load().to(out.element_type))


def vector_at(line, column):
    """`VECTOR` elements beside each other."""
    size = VECTOR * line.element_type.width // 8
    return cute.make_tensor((line.iterator + column).align(size), cute.make_layout(VECTOR))
