"""Any pointwise function: `outputs = code(inputs)`, element by element, in one pass.

    grid      (strips * walkers): a CTA walks down one strip, see lines.py
    thread    V elements of a line. What depends on scalars and rows alone is computed once, into registers
    block     `lines` lines in flight: V elements of each full array, in accesses of 16 bytes; then compute,
              round, store
    end       elements past the last whole vector: one a thread, by the first CTA

An input is, by its role,

    full      like the outputs: (rows, *dims), a vector of it is read once
    row       (*dims): the same for every row; V elements are kept by a thread, for all its lines
    column    (rows,): one element a row; read a line at a time, out of a cache
    scalar    one element

16-bit floats are float32 in between and rounded when they are stored. Without rows and columns the
width does not matter, and a line is as long as is convenient. No shared memory.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Constexpr,
    Float16,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint32,
    const_expr,
    range_constexpr,
)

from .. import _emit
from .._code import Code
from .._walk import STRIPS, Config
from .lines import (
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


class Pointwise:
    """`roles` has one of "full", "row", "column", "scalar" for each of the code's arguments."""

    def __init__(self, code: Code, roles: tuple[str, ...], fast: str | None, config: Config):
        self.code, self.fast, self.config = code, fast, config
        self.names = {
            role: [a.name for a, own in zip(code.arguments, roles, strict=True) if own == role]
            for role in ("full", "row", "column", "scalar")
        }
        self.roles = roles
        self.booleans = {a.name for a in code.arguments if a.dtype == "bool"}
        self.depends_on_place = bool(self.names["row"] or self.names["column"])

    @cute.jit
    def __call__(self, stream, tables: tuple, inputs: tuple, outputs: tuple):
        arrays = self.by_role(tables, inputs, outputs)
        rows = arrays.outputs[0].shape[0]
        width = size_of(arrays.outputs[0].shape[1:])
        if Int64(rows) * width > 0:
            vector = vector_of(*arrays.full, *arrays.outputs)
            line = Int32(STRIPS * self.config.threads)
            if const_expr(self.depends_on_place):
                line = wide_line(width, vector, self.config)
            walkers = Int32(0)
            if const_expr(self.config.ctas > 0):
                strips = cute.ceil_div(line, self.config.threads)
                walkers = cutlass.max(self.config.ctas // strips, 1)
            plan = make_plan(rows, width, vector, self.config, line, walkers)
            self.kernel(arrays, plan, rows).launch(
                grid=[plan.strips.divisor * plan.walkers, 1, 1],
                block=[self.config.threads, 1, 1],
                stream=stream,
            )

    def by_role(self, tables: tuple, inputs: tuple, outputs: tuple) -> "Arrays":
        found = {
            role: tuple(
                as_bytes(x) for x, own in zip(inputs, self.roles, strict=True) if own == role
            )
            for role in self.names
        }
        return Arrays(tables=tuple(tables), outputs=tuple(map(as_bytes, outputs)), **found)

    @cute.kernel
    def kernel(self, arrays: "Arrays", plan: Plan, rows: Int32):
        place = find_place(plan, self.config.threads)
        start = self.bind_scalars(arrays)
        if place.at < plan.line:
            self.walk(start, arrays, plan, place)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if (cta == 0) & (tid < plan.tail):
            self.end(start, arrays, plan, rows, tid)

    def bind_scalars(self, arrays: "Arrays") -> _emit.Partial:
        start = _emit.start(self.code, arrays.tables, fast=self.fast or False)
        return self.bind("scalar", start, arrays.scalar, 0)

    @cute.jit
    def walk(self, start: Constexpr, arrays: "Arrays", plan: Plan, place: Place):
        """What a thread does: its strip, from its first block on."""
        vector = vector_of(*arrays.full, *arrays.outputs)
        row, column = Int32(0), Int32(0)
        if const_expr(self.depends_on_place):
            row, column = first_element(plan, place.at, vector)
        held = [as_values(read_row(x, plan, column, vector)) for x in arrays.row]
        starts = [self.bind("row", start, held, j) for j in range(vector)]
        full = [column_of_lines(x, vector, plan, place) for x in arrays.full]
        outputs = [column_of_lines(x, vector, plan, place) for x in arrays.outputs]
        at = Element(row, column)
        if const_expr(self.config.ctas == 0):
            self.block(starts, full, arrays.column, outputs, plan, place, at, place.walker)
        else:
            for i in cutlass.range(place.walker, plan.blocks, plan.walkers, unroll=1):
                self.block(starts, full, arrays.column, outputs, plan, place, at, i)

    @cute.jit
    def block(
        self,
        starts: Constexpr,
        full: list,
        columns: tuple,
        outputs: list,
        plan: Plan,
        place: Place,
        at: "Element",
        i: Int32,
    ):
        lines, hint = self.config.lines, self.config.load
        first = i * lines
        if first + lines <= place.lines:
            held = [[load(x[None, first + r], hint) for x in full] for r in range(lines)]
            for r in range_constexpr(lines):
                self.line(starts, held[r], columns, outputs, plan, at, first + r)
        elif const_expr(lines > 1):
            for r in cutlass.range(first, place.lines, unroll=1):
                held = [load(x[None, r], hint) for x in full]
                self.line(starts, held, columns, outputs, plan, at, r)

    @cute.jit
    def line(
        self,
        starts: Constexpr,
        held: list,
        columns: tuple,
        outputs: list,
        plan: Plan,
        at: "Element",
        r: Int32,
    ):
        """V elements: from registers to memory."""
        vector = len(starts)
        full = [as_values(x) for x in held]
        columns = [as_values(read_column(x, plan, at, r, vector)) for x in columns]
        results = [cute.make_rmem_tensor(vector, held_type(x.element_type)) for x in outputs]
        for j in range_constexpr(vector):
            partial = self.bind("column", starts[j], columns, j)
            partial = self.bind("full", partial, full, j)
            put(results, j, partial)
        for k in range_constexpr(len(outputs)):
            store(
                rounded(results[k], outputs[k].element_type), outputs[k][None, r], self.config.store
            )

    def bind(self, role: str, partial: _emit.Partial, held, j: int) -> _emit.Partial:
        """Element `j` of each array of a role."""
        values = {name: x[j] for x, name in zip(held, self.names[role], strict=True)}
        for name in self.booleans.intersection(values):
            values[name] = values[name] != 0
        return _emit.bind(partial, **values)

    @cute.jit
    def end(self, start: Constexpr, arrays: "Arrays", plan: Plan, rows: Int32, tid: Int32):
        """One element of the tail, `back` elements before the last."""
        back = plan.tail - 1 - tid
        up = back // plan.width
        column, row = plan.width - 1 - (back - up * plan.width), rows - 1 - up
        vector = vector_of(*arrays.full, *arrays.outputs)
        at = (Int64(plan.full) * plan.line + plan.rest) * vector + tid
        places = {"row": column, "column": row, "full": at}
        partial = start
        for role in range_constexpr(3):
            role = ("row", "column", "full")[role]
            held = [moved(x, places[role]) for x in getattr(arrays, role)]
            partial = self.bind(role, partial, held, 0)
        put([moved(x, at) for x in arrays.outputs], 0, partial)


class Arrays(NamedTuple):
    tables: tuple
    full: tuple
    row: tuple
    column: tuple
    scalar: tuple
    outputs: tuple


class Element(NamedTuple):
    """Where element 0 of a thread's vector stands, in every line."""

    row: Int32
    column: Int32


def size_of(shape: tuple):
    return math.prod(shape, start=Int32(1))


def as_bytes(x: cute.Tensor) -> cute.Tensor:
    """Booleans as they lie in memory: 0 and 1."""
    return cute.recast_tensor(x, Uint8) if x.element_type is Boolean else x


def moved(x: cute.Tensor, at) -> cute.Tensor:
    """The element at `at` of an array seen as flat, and what follows."""
    return cute.make_tensor(x.iterator + at, cute.make_layout(1))


def held_type(dtype):
    """16-bit floats are held in float32."""
    return Float32 if dtype in (BFloat16, Float16) else dtype


def as_values(x: cute.Tensor) -> cute.Tensor:
    """A vector in registers as it is computed with."""
    if held_type(x.element_type) is x.element_type:
        return x
    wide = cute.make_rmem_tensor(cute.size(x), Float32)
    if x.element_type is BFloat16 and cute.size(x) % 2 == 0:
        # The upper half of a word is its float32 but for what lies below: one instruction a number, where a conversion of
        # it takes two.
        words = cute.recast_tensor(x, Uint32)
        bits = cute.recast_tensor(wide, Uint32)
        for i in range(cute.size(words)):
            bits[2 * i] = words[i] << Uint32(16)
            bits[2 * i + 1] = words[i] & Uint32(0xFFFF0000)
    else:
        wide.store(x.load().to(Float32))
    return wide


def rounded(x: cute.Tensor, dtype) -> cute.Tensor:
    """A vector as it is stored."""
    if x.element_type is dtype:
        return x
    narrow = cute.make_rmem_tensor(cute.size(x), dtype)
    narrow.store(x.load().to(dtype))
    return narrow


def put(targets, j: int, partial: _emit.Partial) -> None:
    """Writes the results into element `j` of each target. 16-bit floats come unrounded where it is float32."""
    for x, n in zip(targets, partial.code.results, strict=True):
        value, dtype = partial.values[n].ir, partial.code.equations[n].dtype
        if dtype in ("bfloat16", "float16"):
            x[j] = Float32(value).to(x.element_type)
        elif dtype == "bool":
            x[j] = Uint8(Boolean(value))
        else:
            x[j] = x.element_type(value)


@cute.jit
def read_column(
    x: cute.Tensor, plan: Plan, at: Element, r: Int32, vector: Constexpr
) -> cute.Tensor:
    """What a column has for V elements of line `r`."""
    held = cute.make_rmem_tensor(vector, x.element_type)
    row, column = r * plan.rows + at.row, at.column
    if plan.width % vector == 0:
        held.fill(x[row])
    else:
        for j in range_constexpr(vector):
            held[j] = x[row]
            ends = column + 1 == plan.width
            row = row + 1 if ends else row
            column = Int32(0) if ends else column + 1
    return held
