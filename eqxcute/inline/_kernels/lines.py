"""How the kernels cut a (rows, width) array: lines, strips and blocks.

The array is contiguous and starts at a 16-byte boundary, so it is a sequence of vectors of V
elements, whatever its width. V elements are 16 bytes of the narrowest array; of a wider one they
are several accesses of 16 bytes. A row need not start at a vector, but rows do so
again and again: after every `period` vectors, where

    period * V = width * (V / gcd(width, V)).

A *line* is a whole number of periods: one, or for narrow arrays as many as make it `STRIPS`
strips wide. In every line the same columns stand in the same places:

    width = 3, V = 4     line 0    | 0 1 2 0 | 1 2 0 1 | 2 0 1 2 |      a number: a column
    (period = 3)         line 1    | 0 1 2 0 | 1 2 0 1 | 2 0 1 2 |      | |: a vector
                         ...         place 0   place 1   place 2

So a thread that keeps its place and walks down the lines meets the same V columns in each:
it reads its biases once, into registers, and can sum their gradients in registers. All accesses
are 16 bytes wide, for widths that no power of two divides too.

    strip     `threads` places beside each other: one for each thread of a CTA
    block     `lines` lines: a thread loads all of them before it uses the first
    walker    the CTAs of one strip; walker w takes blocks w, w + walkers, ...
    the end   the last line may end early: after `rest` vectors and `tail` elements more

Every offset is `line * V * (places in a line) + V * place`, taken in 64 bits: an array may have
more than 2^31 elements.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import CacheEvictionPriority, LoadCacheMode, StoreCacheMode

from .._walk import STRIPS, VECTOR_BYTES


class Plan(NamedTuple):
    """The numbers of one launch."""

    width: Int32
    period: cute.FastDivmodDivisorV2  # places after which the columns repeat
    turns: Int32  # rows in a period
    line: Int32  # places in a line
    rows: Int32  # rows in a line
    strips: cute.FastDivmodDivisorV2
    full: Int32  # whole lines
    rest: Int32  # whole vectors in the line after them
    tail: Int32  # elements after those
    blocks: Int32
    walkers: Int32


class Place(NamedTuple):
    """Where a thread stands."""

    at: Int32  # its place in every line
    lines: Int32  # how many lines have a whole vector there
    walker: Int32


def vector_of(*arrays: cute.Tensor) -> int:
    """V: elements in 16 bytes, of the narrowest array."""
    return VECTOR_BYTES * 8 // min(x.element_type.width for x in arrays)


@cute.jit
def turns_of(width: Int32, vector: Constexpr) -> Int32:
    bits = width | vector
    return vector // (bits & -bits)  # the lowest bit of either is gcd(width, V)


@cute.jit
def period_of(width: Int32, vector: Constexpr) -> Int32:
    bits = width | vector
    return width // (bits & -bits)


@cute.jit
def make_plan(
    rows: Int32,
    width: Int32,
    vector: Constexpr,
    config: Constexpr,
    line: Int32,
    walkers: Int32,
) -> Plan:
    """On the host, before the launch. `walkers` 0: one for each block."""
    size = Int64(rows) * width
    vectors = size // vector
    full = Int32(vectors // line)
    rest = Int32(vectors - Int64(full) * line)
    tail = Int32(size - vectors * vector)
    lines = full + 1 if rest + tail > 0 else full
    blocks = cute.ceil_div(lines, config.lines)
    return Plan(
        width=width,
        period=cute.fast_divmod_create_divisor_v2(period_of(width, vector)),
        turns=turns_of(width, vector),
        line=line,
        rows=Int32(Int64(line) * vector // width),
        strips=cute.fast_divmod_create_divisor_v2(cute.ceil_div(line, config.threads)),
        full=full,
        rest=rest,
        tail=tail,
        blocks=blocks,
        walkers=walkers if walkers > 0 else blocks,
    )


@cute.jit
def wide_line(width: Int32, vector: Constexpr, config: Constexpr) -> Int32:
    """Places in a line: one period, or of a narrow array as many as `STRIPS` strips hold."""
    period = period_of(width, vector)
    return period * cutlass.max(STRIPS * config.threads // period, 1)


@cute.jit
def find_place(plan: Plan, threads: Constexpr) -> Place:
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    # CTAs that start together take strips beside each other, so that they read one stretch.
    walker, strip = divmod(cta, plan.strips)
    at = strip * threads + tid
    lines = plan.full + 1 if at < plan.rest else plan.full
    return Place(at=at, lines=lines, walker=walker)


@cute.jit
def column_of_lines(x: cute.Tensor, vector: Constexpr, plan: Plan, place: Place) -> cute.Tensor:
    """What lies at one place of every line: `x` seen as (V, lines)."""
    down = cute.assume(Int64(plan.line) * vector, divby=vector)
    layout = cute.make_layout((vector, plan.full + 1), stride=(1, down))
    start = cute.assume(Int64(place.at) * vector, divby=vector)
    return cute.make_tensor(x.iterator + start, layout)


@cute.jit
def first_element(plan: Plan, at: Int32, vector: Constexpr):
    """Row (in its line) and column of element 0 of the vector at `at`: V * at, divided by the width."""
    periods, at = divmod(at, plan.period)
    row, column, steps = periods * plan.turns, Int64(at) * vector, vector.bit_length() - 1
    if plan.turns > 1:
        # V * at is below V * width: a few subtractions do for a division.
        wide = Int64(plan.width)
        for step in range_constexpr(steps):
            share = vector >> (step + 1)
            above = column >= wide * share
            column = column - wide * share if above else column
            row = row + share if above else row
    return row, Int32(column)


@cute.jit
def read_row(row: cute.Tensor, plan: Plan, column: Int32, vector: Constexpr) -> cute.Tensor:
    """The V elements of a row from `column` on, and from its start again, in registers."""
    held = cute.make_rmem_tensor(vector, row.element_type)
    if plan.width % vector == 0:
        start = row.iterator + cute.assume(column, divby=vector)
        cute.autovec_copy(cute.make_tensor(start, held.layout), held)
    else:
        flat = cute.make_tensor(row.iterator, cute.make_layout(plan.width))
        for j in range_constexpr(vector):
            held[j] = flat[column]
            column = column + 1 if column + 1 < plan.width else 0
    return held


@cute.jit
def load(x: cute.Tensor, hint: Constexpr) -> cute.Tensor:
    """One vector from global memory into registers."""
    extra = {}
    if const_expr(hint == "no_allocate"):
        extra["l1c_evict_priority"] = CacheEvictionPriority.NO_ALLOCATE
    if const_expr(hint == "streaming"):
        extra["load_cache_mode"] = LoadCacheMode.STREAMING
    held = cute.make_rmem_tensor_like(x)
    move(cute.nvgpu.CopyG2ROp(), x, held, extra)
    return held


@cute.jit
def store(held: cute.Tensor, x: cute.Tensor, hint: Constexpr):
    """One vector from registers to global memory."""
    extra = {}
    if const_expr(hint == "no_allocate"):
        extra["l1c_evict_priority"] = CacheEvictionPriority.NO_ALLOCATE
    if const_expr(hint == "streaming"):
        extra["store_cache_mode"] = StoreCacheMode.STREAMING
    move(cute.nvgpu.CopyR2GOp(), held, x, extra)


def move(op, source: cute.Tensor, target: cute.Tensor, hints: dict) -> None:
    """In accesses of 16 bytes."""
    each = vector_of(source)
    atom = cute.make_copy_atom(op, source.element_type, num_bits_per_copy=8 * VECTOR_BYTES, **hints)
    source, target = cute.zipped_divide(source, (each,)), cute.zipped_divide(target, (each,))
    for i in range(cute.size(source, mode=[1])):
        cute.copy(atom, source[None, i], target[None, i])
