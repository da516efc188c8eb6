"""Gradients of the arrays that a score function captures, from a backward kernel's accumulators.

A pair adds dS' (d score / d value) to the place that the score read the value from. How many pairs of a tile meet there
is known from the read's indices (`eqxcute.inline.index_kind`); they are added up before memory is asked to add:

    head       one place for all: in a register, for all tiles
    column     one for each key: in registers, for all tiles; then over the eight lanes that share a column
    row        one for each query: in registers, for one tile; then over the four lanes that share a row
    distance   one for each diagonal: in registers and by shuffles, below
    entry      one for each pair, but where indices are clamped: at once
    pair       any: at once, and for a whole warp where it has one place only

    captured = start_captured(...)                            # once a CTA
    for each query head:
        for each tile:
            for each pair:
                captured.add(r, c, live, ds, values)
            captured.finish_tile(head, first_row)
        captured.finish_head(head)
    captured.finish(whole)

Diagonals: a thread holds columns 2 t and 2 t + 1 of row g in each block of 8 x 8. Blocks on one diagonal are added in
registers. Then rows are added that differ in one bit of g, s apart, each lane taking from its partner what is s columns
away: first 4, then 2, then 1. A lane of row g then has at column p the sum of diagonal p - g, and all rows have all of
them: each keeps every eighth run of eight.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from eqxcute.inline import Code, Partial, Read, bind, index_kind, result

from .bins import Target, add_term, place_of
from .functions import select
from .matrix import Products, by_rows, coordinates


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """Frozen, with its sums in registers: CuTe carries no such object through a loop on the device.

    - `code`, `reads`: Of a score's derivative.
    - `targets`: Of the code's operands, in order; None where no read is.
    - `rows`, `columns`: How far each row and each column of a thread is from its first.
    - `at`: The thread's first (row, column); the row in the tile, the column for all tiles.
    - `sums`: Of each read, in registers.
    """

    code: Code
    reads: tuple[Read, ...]
    targets: Sequence[Target | None]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    at: tuple[Int32, Int32]
    sums: tuple

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
        return tuple(sorted({(c - r) // 8 for r in self.rows for c in self.columns}))

    def started(self) -> "Captured":
        """With sums of no pairs."""
        sizes = {"head": 2, "row": len(self.rows), "column": len(self.columns)}
        sizes["distance"] = 2 * len(self.blocks)
        return dataclasses.replace(
            self, sums=tuple(zeros(sizes.get(kind, 0)) for kind in self.kinds)
        )

    def add(self, r: int, c: int, live: Boolean, ds: Float32, values: Sequence[Any]) -> None:
        """What element (r, c) of a thread adds: `values` are the results of the derivative's code there. Nothing where
        it is not `live`, whatever they are."""
        for read, kind, total in zip(self.reads, self.kinds, self.sums, strict=True):
            x = select(live, ds * Float32(values[read.derivative]), Float32(0.0))
            if kind in ("entry", "pair"):
                target = self.targets[read.operand]
                place = place_of(target, [values[i] for i in read.indices])
                add = add_alike if kind == "pair" else add_one
                add(target, place, x)
                continue
            block = (self.columns[c] - self.rows[r]) // 8
            slot = 2 * self.blocks.index(block) + c % 2
            i = {"head": 0, "row": r, "column": c, "distance": slot}[kind]
            total[i] = total[i] + x

    def finish_tile(self, head: Partial, first_row: Int32) -> None:
        """After a tile. `head` is the derivative's code at the head."""
        lane, (row, column) = cute.arch.lane_idx(), self.at
        for read, kind, total in zip(self.reads, self.kinds, self.sums, strict=True):
            if (
                kind == "head"
            ):  # a tile's sum, and that of tiles: fewer roundings than one after the other
                total[1] = total[1] + total[0]
                total[0] = Float32(0.0)
            if kind == "row":
                for i, step in enumerate(self.rows):
                    x = cute.arch.warp_reduction_sum(total[i], threads_in_group=4)
                    place = self._place(read, head, q_idx=first_row + row + step)
                    add_if(lane % 4 == 0, *place, x)
            if kind == "distance":
                for d, x in self._diagonals(total):
                    d = d + (column - (first_row + row))
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
        lane = cute.arch.lane_idx()
        every = zip(self.reads, self.kinds, self.by_head, self.sums, strict=True)
        for read, kind, own, total in every:
            if kind not in ("head", "column") or own != by_head:
                continue
            if kind == "head":
                x = cute.arch.warp_reduction_sum(total[1])
                add_if(lane == 0, *self._place(read, head), x)
            else:
                for i, step in enumerate(self.columns):
                    x = total[i]
                    for lanes in (4, 8, 16):
                        x = x + cute.arch.shuffle_sync_bfly(x, lanes)
                    place = self._place(read, head, kv_idx=self.at[1] + step)
                    add_if(lane < 4, *place, x)
            total.fill(0.0)

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
    products: Products,
    tid: Int32,
    tile: tuple[int, int],
    first_column: Int32,
) -> Captured:
    """No pairs yet, of accumulators of `products` over tiles of (rows, columns)."""
    every = by_rows(coordinates(products, 0, *tile))
    rows = tuple(every[r, 0][0] for r in range(cute.size(every, mode=[0])))
    columns = tuple(every[0, c][1] for c in range(cute.size(every, mode=[1])))
    row, column = by_rows(coordinates(products, tid, *tile))[0, 0]
    at = row, first_column + column
    return Captured(code, tuple(reads), targets, rows, columns, at, ()).started()


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
