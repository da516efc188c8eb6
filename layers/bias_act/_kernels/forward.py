"""Bias and ReLU: `out = max(x + bias, 0)`, NaN kept.

    grid      (strips * walkers): a CTA walks down one strip, see eqxcute's lines.py
    thread    V biases as float32 in registers, read once
    block     `lines` loads of 16 bytes in flight; then add, maximum, round, store
    end       elements past the last whole vector, one by one, by one thread

The sum is float32 and is rounded once, when it is stored. Reads x once, writes out once; the
biases come out of a cache. No shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, range_constexpr

from eqxcute.inline._kernels.lines import (
    Place,
    Plan,
    column_of_lines,
    find_place,
    first_element,
    load,
    make_plan,
    read_row,
    store,
    vector_of,
    wide_line,
)

from .._config import Config


class Forward:
    """x (rows, width), bias (width,), out like x; each bfloat16, float16 or float32."""

    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(self, stream, x: cute.Tensor, bias: cute.Tensor, out: cute.Tensor):
        if Int64(x.shape[0]) * x.shape[1] > 0:
            (rows, width), vector = x.shape, vector_of(x)
            line, walkers = wide_line(width, vector, self.config), Int32(0)
            if const_expr(self.config.ctas > 0):
                walkers = cutlass.max(
                    self.config.ctas // cute.ceil_div(line, self.config.threads), 1
                )
            plan = make_plan(rows, width, vector, self.config, line, walkers)
            self.kernel(x, bias, out, plan).launch(
                grid=[plan.strips.divisor * plan.walkers, 1, 1],
                block=[self.config.threads, 1, 1],
                stream=stream,
            )

    @cute.kernel
    def kernel(self, x: cute.Tensor, bias: cute.Tensor, out: cute.Tensor, plan: Plan):
        place = find_place(plan, self.config.threads)
        if place.at < plan.line:
            vector = vector_of(x)
            held = self.read_bias(bias, plan, place.at, vector)
            gX, gOut = [column_of_lines(t, vector, plan, place) for t in (x, out)]
            if const_expr(self.config.ctas == 0):
                self.block(gX, gOut, held, place, place.walker)
            else:
                for block in cutlass.range(place.walker, plan.blocks, plan.walkers, unroll=1):
                    self.block(gX, gOut, held, place, block)
            if (place.at == plan.rest) & (place.walker == 0):
                self.end(gX[None, plan.full], gOut[None, plan.full], held, plan)

    @cute.jit
    def read_bias(self, bias: cute.Tensor, plan: Plan, at: Int32, vector: Constexpr) -> cute.Tensor:
        """The biases under the vector at `at`, as float32."""
        _, column = first_element(plan, at, vector)
        wide = cute.make_rmem_tensor(vector, Float32)
        wide.store(read_row(bias, plan, column, vector).load().to(Float32))
        return wide

    @cute.jit
    def block(self, gX: cute.Tensor, gOut: cute.Tensor, bias: cute.Tensor, place: Place, i: Int32):
        lines, load_hint, store_hint = self.config.lines, self.config.load, self.config.store
        first = i * lines
        if first + lines <= place.lines:
            held = [load(gX[None, first + r], load_hint) for r in range(lines)]
            for r in range_constexpr(lines):
                store(self.one(held[r], bias), gOut[None, first + r], store_hint)
        else:
            for r in cutlass.range(first, place.lines, unroll=1):
                store(self.one(load(gX[None, r], load_hint), bias), gOut[None, r], store_hint)

    @cute.jit
    def one(self, x: cute.Tensor, bias: cute.Tensor) -> cute.Tensor:
        """One vector."""
        wide = cute.make_rmem_tensor_like(bias)
        wide.store(x.load().to(Float32) + bias.load())
        for j in range_constexpr(cute.size(wide)):
            wide[j] = cute.arch.fmax(wide[j], 0.0, nan=True)
        out = cute.make_rmem_tensor_like(x)
        out.store(wide.load().to(x.element_type))
        return out

    @cute.jit
    def end(self, gX: cute.Tensor, gOut: cute.Tensor, bias: cute.Tensor, plan: Plan):
        for j in range_constexpr(cute.size(bias) - 1):
            if j < plan.tail:
                z = cute.arch.fmax(gX[j].to(Float32) + bias[j], 0.0, nan=True)
                gOut[j] = z.to(gOut.element_type)
