"""The gradient of bias and ReLU: `dx = dy where y > 0, else 0`, `dbias = dx summed over rows`.

    stream kernel   grid (strips * walkers), lines.py
        thread      V sums as float32 in registers, for its whole life
        block       2 * `lines` loads of 16 bytes in flight (y and dy); then select, store, add
        end         elements past the last whole vector; then the sums go to `parts`
    sum kernel      grid (columns / 32), 32 x 16 threads: sums the rows of a float32 array
        first       parts (walkers, repeats * width) -> sums (repeats * width)
        second      sums (repeats, width) -> dbias; a line holds each column `repeats` times
        With one repeat the first writes dbias.

The order of all sums is fixed by the shapes: equal inputs give equal bits. Nothing is added by
atomics. Reads y and dy once, writes dx once; parts is 8 MiB with the usual config and is read
out of the L2 cache.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.memory import SmemAllocator

from eqxcute.inline._kernels.lines import (
    Place,
    Plan,
    column_of_lines,
    find_place,
    load,
    make_plan,
    store,
    vector_of,
)

from .._config import COLUMNS, GROUPS, LOADS, Config


class Backward:
    """y, dy, dx (rows, width), dbias (width,); parts (walkers, repeats, width) and sums (repeats,
    width) are float32 scratch. `_config.parts_shape` picks walkers and repeats."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        stream,
        y: cute.Tensor,
        dy: cute.Tensor,
        dx: cute.Tensor,
        dbias: cute.Tensor,
        parts: cute.Tensor,
        sums: cute.Tensor,
    ):
        walkers, repeats, width = parts.shape
        places = Int64(repeats) * width
        if width > 0:
            rows, vector = y.shape[0], vector_of(y)
            line = Int32(places // vector)
            plan = make_plan(rows, width, vector, self.config, line, walkers)
            self.stream(y, dy, dx, parts, plan).launch(
                grid=[plan.strips.divisor * walkers, 1, 1],
                block=[self.config.threads, 1, 1],
                stream=stream,
            )
            if repeats == 1:
                self.sum_rows(stream, parts, dbias, walkers, width)
            else:
                self.sum_rows(stream, parts, sums, walkers, Int32(places))
                self.sum_rows(stream, sums, dbias, repeats, width)

    @cute.kernel
    def stream(
        self, y: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor, parts: cute.Tensor, plan: Plan
    ):
        place = find_place(plan, self.config.threads)
        if place.at < plan.line:
            vector = vector_of(y)
            gY, gDy, gDx = [column_of_lines(t, vector, plan, place) for t in (y, dy, dx)]
            total = cute.make_rmem_tensor(vector_of(y), Float32)
            total.fill(0.0)
            for block in cutlass.range(place.walker, plan.blocks, plan.walkers, unroll=1):
                self.block(gY, gDy, gDx, total, place, block)
            if (place.at == plan.rest) & (place.walker == 0):
                self.end(
                    gY[None, plan.full], gDy[None, plan.full], gDx[None, plan.full], total, plan
                )
            at = (Int64(place.walker) * plan.line + place.at) * vector_of(y)
            to = parts.iterator + cute.assume(at, divby=vector_of(y))
            cute.autovec_copy(total, cute.make_tensor(to, total.layout))

    @cute.jit
    def block(self, gY, gDy, gDx, total: cute.Tensor, place: Place, i: Int32):
        lines, hint = self.config.lines, self.config.load
        first = i * lines
        if first + lines <= place.lines:
            held = [
                (load(gY[None, first + r], hint), load(gDy[None, first + r], hint))
                for r in range(lines)
            ]
            for r in range_constexpr(lines):
                self.one(*held[r], gDx[None, first + r], total)
        else:
            for r in cutlass.range(first, place.lines, unroll=1):
                self.one(load(gY[None, r], hint), load(gDy[None, r], hint), gDx[None, r], total)

    @cute.jit
    def one(self, y: cute.Tensor, dy: cute.Tensor, gDx: cute.Tensor, total: cute.Tensor):
        """One vector. The comparison is false for NaN, as `jax.nn.relu` has it."""
        dx = cute.make_rmem_tensor_like(dy)
        dx.store(cute.where(y.load().to(Float32) > 0.0, dy.load(), cute.zeros_like(dy.load())))
        store(dx, gDx, self.config.store)
        total.store(total.load() + dx.load().to(Float32))

    @cute.jit
    def end(
        self, gY: cute.Tensor, gDy: cute.Tensor, gDx: cute.Tensor, total: cute.Tensor, plan: Plan
    ):
        for j in range_constexpr(cute.size(total) - 1):
            if j < plan.tail:
                dx = gDy[j] if gY[j].to(Float32) > 0.0 else gDy.element_type(0.0)
                gDx[j] = dx
                total[j] += dx.to(Float32)

    @cute.jit
    def sum_rows(self, stream, source: cute.Tensor, out: cute.Tensor, rows: Int32, columns: Int32):
        self.sum_kernel(source, out, rows, columns).launch(
            grid=[cute.ceil_div(columns, COLUMNS), 1, 1],
            block=[COLUMNS, GROUPS, 1],
            stream=stream,
        )

    @cute.kernel
    def sum_kernel(self, source: cute.Tensor, out: cute.Tensor, rows: Int32, columns: Int32):
        """out[c] = sum over r of source[r, c], r < rows. Group g takes rows g, g + GROUPS, ..."""
        lane, group, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sGroups = SmemAllocator().allocate_tensor(Float32, cute.make_layout((COLUMNS, GROUPS)), 16)
        column = cta * COLUMNS + lane
        total = Float32(0.0)
        if column < columns:
            gIn = cute.make_tensor(
                source.iterator + column, cute.make_layout(rows, stride=Int64(columns))
            )
            for first in cutlass.range(group, rows, GROUPS * LOADS, unroll=1):
                held = cute.make_rmem_tensor(LOADS, Float32)
                for i in range_constexpr(LOADS):
                    # Past the end the last row is read again, and not added: a load that need
                    # not ask first goes out together with the others.
                    held[i] = gIn[cutlass.min(first + i * GROUPS, rows - 1)]
                for i in range_constexpr(LOADS):
                    total += held[i] if first + i * GROUPS < rows else Float32(0.0)
        sGroups[lane, group] = total
        cute.arch.sync_threads()
        if (group == 0) & (column < columns):
            for g in range_constexpr(1, GROUPS):
                total += sGroups[lane, g]
            out_flat = cute.make_tensor(out.iterator, cute.make_layout(columns))
            out_flat[column] = total.to(out.element_type)
