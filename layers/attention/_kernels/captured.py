"""Gradients of the arrays that a score function captures, from a backward kernel's accumulators.

A pair adds dS' (d score / d value) to the place that the score read the value from. How many pairs of a tile meet there
is known from the read's indices (`eqxcute.inline.index_kind`); they are added up before memory is asked to add:

    head       one place for all: in a register, for all tiles
    column     one for each key: in registers, for all tiles; then over the lanes that share a key
    row        one for each query: in registers, for one tile; then over the lanes that share a query
    distance   one for each diagonal: in registers and by shuffles, below
    entry      one for each pair, but where indices are clamped: at once
    pair       any: at once, and for a whole warp where it has one place only

    captured = start_captured(...)                            # once a CTA
    for each query head:
        for each tile:
            for each pair:
                captured.add(r, c, live, ds, values)
            captured.finish_tile(head, first_query)
        captured.finish_head(head)
    captured.finish(whole)

An accumulator is (queries, keys), or (keys, queries) where it is `turned`. Lane 4 g + t holds columns 2 t and 2 t + 1 of
row g in each block of 8 x 8: four lanes share a row, eight a column. So what a sum takes is known of each side of an
accumulator, its rows and its columns, and queries and keys are one side each.

Diagonals, column minus row: a key's distance from a query, or its opposite where `turned`. Blocks on one diagonal are
added in registers. Then rows are added that differ in one bit of g, s apart, each lane taking from its partner what is s
columns away: first 4, then 2, then 1. A lane of row g then has at column p the sum of diagonal p - g, and all rows have
all of them: each keeps every eighth run of eight.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from eqxcute.inline import Code, Partial, Read, bind, index_kind, result

from .bins import Target, add_term, place_of
from .functions import select

# Bits of a lane's number in which those differ that share a row of an accumulator, or a column.
SHARE_ROW: Final = (2, 1)
SHARE_COLUMN: Final = (4, 8, 16)


class Side(NamedTuple):
    """A thread's rows in an accumulator, or its columns.

    - `first`: The first of them. A query is counted from the tile's first, a key from the first of all.
    - `steps`: How far each is from the first.
    - `lanes`: The bits of the lanes that share them.
    """

    first: Int32
    steps: tuple[int, ...]
    lanes: tuple[int, ...]

    def leads(self, lane: Int32) -> Boolean:
        """Whether a lane is the first of those."""
        return lane % (2 * max(self.lanes)) < min(self.lanes)


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """Frozen, with its sums in registers: CuTe carries no such object through a loop on the device.

    - `code`, `reads`: Of a score's derivative.
    - `targets`: Of the code's operands, in order; None where no read is.
    - `rows`, `columns`: Of the accumulators.
    - `turned`: Whether the rows are keys.
    - `sums`: Of each read, in registers.
    """

    code: Code
    reads: tuple[Read, ...]
    targets: Sequence[Target | None]
    rows: Side
    columns: Side
    turned: bool
    sums: tuple

    @property
    def queries(self) -> Side:
        return self.columns if self.turned else self.rows

    @property
    def keys(self) -> Side:
        return self.rows if self.turned else self.columns

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(index_kind(self.code, read.indices) for read in self.reads)

    @functools.cached_property
    def by_head(self) -> tuple[bool, ...]:
        """Of which reads the place depends on the query head."""
        results, names = self.code.results, self.code.dependences
        return tuple(any("h" in names[results[i]] for i in read.indices) for read in self.reads)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """The diagonals of blocks of 8 x 8 on which a thread has elements: column minus row."""
        rows, columns = self.rows.steps, self.columns.steps
        return tuple(sorted({(c - r) // 8 for r in rows for c in columns}))

    def started(self) -> "Captured":
        """With sums of no pairs."""
        sizes = {"head": 2, "row": len(self.queries.steps), "column": len(self.keys.steps)}
        sizes["distance"] = 2 * len(self.blocks)
        return dataclasses.replace(
            self, sums=tuple(zeros(sizes.get(kind, 0)) for kind in self.kinds)
        )

    def add(self, r: int, c: int, live: Boolean, ds: Float32, values: Sequence[Any]) -> None:
        """What a thread's element adds, in row r and column c of its accumulator: `values` are the results of the
        derivative's code there. Nothing where it is not `live`, whatever they are."""
        query, key = (c, r) if self.turned else (r, c)
        for read, kind, total in zip(self.reads, self.kinds, self.sums, strict=True):
            x = select(live, ds * Float32(values[read.derivative]), Float32(0.0))
            if kind in ("entry", "pair"):
                target = self.targets[read.operand]
                place = place_of(target, [values[i] for i in read.indices])
                add = add_alike if kind == "pair" else add_one
                add(target, place, x)
                continue
            block = (self.columns.steps[c] - self.rows.steps[r]) // 8
            slot = 2 * self.blocks.index(block) + c % 2
            i = {"head": 0, "row": query, "column": key, "distance": slot}[kind]
            total[i] = total[i] + x

    def finish_tile(self, head: Partial, first_query: Int32) -> None:
        """After a tile. `head` is the derivative's code at the head."""
        query, key = first_query + self.queries.first, self.keys.first
        for read, kind, total in zip(self.reads, self.kinds, self.sums, strict=True):
            if kind == "head":
                # A tile's sum, and that of tiles: fewer roundings than one after the other.
                total[1] = total[1] + total[0]
                total[0] = Float32(0.0)
            if kind == "row":
                self._add_side(read, head, "q_idx", query, self.queries, total)
            if kind == "distance":
                for d, x in self._diagonals(total):
                    d = (-d if self.turned else d) + (key - query)
                    # Any pair so far apart stands for all.
                    q, kv = cutlass.max(-d, 0), cutlass.max(d, 0)
                    add_alike(*self._place(read, head, q_idx=q, kv_idx=kv), x)
            if kind in ("row", "distance"):
                total.fill(0.0)

    def finish_head(self, head: Partial) -> None:
        """After the tiles of a query head."""
        self._finish(head, True)

    def finish(self, whole: Partial) -> None:
        """After all query heads. `whole` is the derivative's code where no head is known."""
        self._finish(whole, False)

    def _finish(self, head: Partial, by_head: bool) -> None:
        every = zip(self.reads, self.kinds, self.by_head, self.sums, strict=True)
        for read, kind, own, total in every:
            if kind not in ("head", "column") or own != by_head:
                continue
            if kind == "head":
                lane, x = cute.arch.lane_idx(), cute.arch.warp_reduction_sum(total[1])
                add_if(lane == 0, *self._place(read, head), x)
            else:
                self._add_side(read, head, "kv_idx", self.keys.first, self.keys, total)
            total.fill(0.0)

    def _add_side(self, read: Read, head: Partial, name: str, first: Int32, side: Side, total):
        """A sum for each of the queries or keys, whose first is `first`."""
        lane = cute.arch.lane_idx()
        for i, step in enumerate(side.steps):
            x = total[i]
            for lanes in side.lanes:
                x = x + cute.arch.shuffle_sync_bfly(x, lanes)
            place = self._place(read, head, **{name: first + step})
            add_if(side.leads(lane), *place, x)

    def _place(self, read: Read, head: Partial, **scalars) -> tuple[Target, Int64]:
        known, target = bind(head, **scalars), self.targets[read.operand]
        return target, place_of(target, [result(known, i) for i in read.indices])

    def _diagonals(self, total) -> list[tuple[Int32, Float32]]:
        """(d, sum) of the diagonals that this lane keeps: column minus row is d more there than at its first element."""
        nothing = Float32(0.0), Float32(0.0)
        own = {b: (total[2 * i], total[2 * i + 1]) for i, b in enumerate(self.blocks)}
        wide = sorted({b + i for b in self.blocks for i in (-1, 0, 1)})
        held = {b: own.get(b, nothing) for b in wide}
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        for step in (4, 2, 1):
            held = skewed(held, lane, step)
        found = []
        for start in range(wide[0], wide[-1], 8):
            for parity in (0, 1):
                # The run of eight diagonals `start + g` lies in this block.
                later = Int32(cutlass.select_(2 * t + parity < g, Int32(1), Int32(0)))
                block, x = start + g + later, Float32(0.0)
                for b in wide:
                    if start <= b <= start + 8:
                        x = select(block == b, held[b][parity], x)
                found.append((8 * block + parity, x))
        return found


def start_captured(
    code: Code,
    reads: Sequence[Read],
    targets: Sequence[Target | None],
    at: cute.Tensor,
    first_key: Int32,
    *,
    turned: bool = False,
) -> Captured:
    """No pairs yet. `at` has the (row, column)s of a thread's elements in an accumulator, by rows; the accumulator's first
    key is `first_key`. It is (queries, keys), or if `turned` (keys, queries)."""
    row, column = at[0, 0]
    row, column = (first_key + row, column) if turned else (row, first_key + column)
    # The coordinates' layout alone knows the steps as numbers.
    rows = tuple(at.layout((r, 0))[0] for r in range(cute.size(at, mode=[0])))
    columns = tuple(at.layout((0, c))[1] for c in range(cute.size(at, mode=[1])))
    sides = Side(row, rows, SHARE_ROW), Side(column, columns, SHARE_COLUMN)
    return Captured(code, tuple(reads), targets, *sides, turned, ()).started()


def skewed(held: dict, lane: Int32, step: int) -> dict:
    """Adds to each row the one that is `step` away: the higher one's columns lie `step` further right. By the numbers of
    blocks, what a lane has of their even and odd columns."""
    t, found = lane % 4, {b: [] for b in held}
    is_high, is_low = (lane & 4 * step) != 0, (lane & 4 * step) == 0
    for parity in (0, 1):
        source = (parity + step) % 2  # of the partner's column
        right, left = (parity + step) // 2, -((parity - step) // 2)  # lanes from here to it
        across = Int32(cutlass.select_(is_high, Int32(4 - left), Int32(right)))
        partner = (lane ^ (4 * step)) - t + (t + across) % 4
        for b in held:
            given = held[b][source]
            # Who gives to a lower row gives from the next block where that wraps around, to a higher one from the last.
            if right:
                after = held[b + 1][source] if b + 1 in held else Float32(0.0)
                given = select(is_high & (t < right), after, given)
            if left:
                before = held[b - 1][source] if b - 1 in held else Float32(0.0)
                given = select(is_low & (t + left >= 4), before, given)
            found[b].append(held[b][parity] + cute.arch.shuffle_sync(given, partner))
    return found


def zeros(size: int):
    """So many numbers in registers."""
    if size == 0:
        return None
    held = cute.make_rmem_tensor(size, Float32)
    held.fill(0.0)
    return held


@cute.jit
def add_one(target: Target, place, x):
    if x != 0.0:
        add_term(target, place, x)


def add_if(condition: Boolean, target: Target, place, x) -> None:
    add_one(target, place, select(condition, x, Float32(0.0)))


@cute.jit
def add_alike(target: Target, place, x):
    """Each lane's number to its place: as one where all that are not 0 have one place."""
    some = cute.arch.vote_ballot_sync(x != 0.0)
    if some != 0:
        leader = cute.arch.popc((some & -some) - 1)  # the first of them
        alike = (x == 0.0) | (place == cute.arch.shuffle_sync(place, leader))
        if cute.arch.vote_all_sync(alike):
            total = cute.arch.warp_reduction_sum(x)
            x = total if cute.arch.lane_idx() == leader else Float32(0.0)
        if x != 0.0:
            add_term(target, place, x)
