"""Gradients of the arrays that a score function captures, from a backward kernel's accumulators.

A pair adds dS' (d score / d value) to the place that the score read the value from. How many pairs of a tile meet there
is known from the read's indices (`eqxcute.inline.index_kind`); they are added up before memory is asked to add:

    head       one place for all: in a register, for all tiles
    column     one for each key: in registers, for all tiles; then over the eight lanes that share a column
    row        one for each query: in registers, for one tile; then over the four lanes that share a row
    distance   one for each diagonal: in registers and by shuffles, below
    pair       any: at once, and for a whole warp where it has one place only

    sums = captured.start()                                   # once a CTA
    for each query head:
        for each tile:
            for each pair:
                captured.add(sums, targets, r, c, live, ds, values)
            captured.finish_tile(sums, targets, head, first_row, first_column, at)
        captured.finish_head(sums, targets, head, first_column, at)
    captured.finish(sums, targets, head, first_column, at)

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
from cutlass import Boolean, Float32, Int32

from eqxcute.inline import Code, Partial, Read, bind, index_kind, result

from .bins import Target, add_term, place_of
from .functions import select
from .matrix import Products, by_rows, coordinates


@dataclasses.dataclass(frozen=True)
class Captured:
    """`reads` of a score's derivative `code`; accumulators of `products` over tiles of `rows` x `columns`.

    Targets are those of the code's operands, in order; None where no read is.
    """

    code: Code
    reads: tuple[Read, ...]
    products: Products
    rows: int
    columns: int

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(index_kind(self.code, read.indices) for read in self.reads)

    @functools.cached_property
    def by_head(self) -> tuple[bool, ...]:
        """Of which reads the place depends on the query head."""
        results, names = self.code.results, self.code.dependences
        return tuple(any("h" in names[results[i]] for i in read.indices) for read in self.reads)

    @functools.cached_property
    def steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How far each row and each column of a thread is from its first: 8 or 16 ..., and for odd columns one more."""
        at = by_rows(coordinates(self.products, 0, self.rows, self.columns))
        rows, columns = (range(cute.size(at, mode=[i])) for i in (0, 1))
        return tuple(at[r, 0][0] for r in rows), tuple(at[0, c][1] for c in columns)

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """The diagonals of blocks of 8 x 8 on which a thread has elements: column minus row."""
        rows, columns = self.steps
        return tuple(sorted({(c - r) // 8 for r in rows for c in columns}))

    def start(self) -> tuple:
        """Sums of no pairs."""
        rows, columns = self.steps
        sizes = {"head": 2, "row": len(rows), "column": len(columns), "pair": 0}
        sizes["distance"] = 2 * len(self.blocks)
        return tuple(zeros(sizes[kind]) for kind in self.kinds)

    def add(
        self,
        sums: tuple,
        targets: Sequence[Target | None],
        r: int,
        c: int,
        live: Boolean,
        ds: Float32,
        values: Sequence[Any],
    ) -> None:
        """What element (r, c) of a thread adds: `values` are the results of the derivative's code there. Nothing where
        it is not `live`, whatever they are."""
        for read, kind, total in zip(self.reads, self.kinds, sums, strict=True):
            x = select(live, ds * Float32(values[read.derivative]), Float32(0.0))
            if kind == "pair":
                target = targets[read.operand]
                add_alike(target, place_of(target, [values[i] for i in read.indices]), x)
            else:
                i = {"head": 0, "row": r, "column": c, "distance": self._slot(r, c)}[kind]
                total[i] = total[i] + x

    def _slot(self, r: int, c: int) -> int:
        rows, columns = self.steps
        return 2 * self.blocks.index((columns[c] - rows[r]) // 8) + c % 2

    def finish_tile(self, sums, targets, head: Partial, first_row, first_column, at) -> None:
        """After a tile. `head` is the derivative's code at the head, `at` the thread's (row, column)s in the tile, whose
        first ones are given."""
        for read, kind, total in zip(self.reads, self.kinds, sums, strict=True):
            target = targets[read.operand]
            if kind == "head":  # a tile's sum, and that of tiles: fewer roundings than one after the other
                total[1] = total[1] + total[0]
                total[0] = Float32(0.0)
            if kind == "row":
                for r in range(cute.size(total)):
                    x = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
                    place = place_at(read, target, head, q_idx=first_row + at[r, 0][0])
                    add_if(cute.arch.lane_idx() % 4 == 0, target, place, x)
            if kind == "distance":
                start = first_column + at[0, 0][1] - (first_row + at[0, 0][0])
                for d, x in self._diagonals(total):
                    # Any pair so far apart stands for all.
                    q, kv = cutlass.max(-(start + d), 0), cutlass.max(start + d, 0)
                    add_alike(target, place_at(read, target, head, q_idx=q, kv_idx=kv), x)
            if kind in ("row", "distance"):
                total.fill(0.0)

    def finish_head(self, sums, targets, head: Partial, first_column, at) -> None:
        """After the tiles of a query head."""
        self._finish(sums, targets, head, first_column, at, True)

    def finish(self, sums, targets, head: Partial, first_column, at) -> None:
        """After all query heads. `head` need not have been told which."""
        self._finish(sums, targets, head, first_column, at, False)

    def _finish(self, sums, targets, head, first_column, at, by_head: bool) -> None:
        lane = cute.arch.lane_idx()
        every = zip(self.reads, self.kinds, self.by_head, sums, strict=True)
        for read, kind, own, total in every:
            if kind not in ("head", "column") or own != by_head:
                continue
            target = targets[read.operand]
            if kind == "head":
                x = cute.arch.warp_reduction_sum(total[1])
                add_if(lane == 0, target, place_at(read, target, head), x)
            else:
                for c in range(cute.size(total)):
                    x = total[c]
                    for step in (4, 8, 16):
                        x = x + cute.arch.shuffle_sync_bfly(x, step)
                    place = place_at(read, target, head, kv_idx=first_column + at[0, c][1])
                    add_if(lane < 4, target, place, x)
            total.fill(0.0)

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
        for start in range(wide[0] - 1, wide[-1] + 1, 8):
            for parity in (0, 1):
                # The run of eight diagonals `start + g` lies in this block.
                later = Int32(cutlass.select_(2 * t + parity < g, Int32(1), Int32(0)))
                block, x = start + g + later, Float32(0.0)
                for b in wide:
                    if start <= b <= start + 8:
                        x = select(block == b, held[b][parity], x)
                found.append((8 * block + parity, x))
        return found


def place_at(read: Read, target: Target, head: Partial, **scalars):
    known = bind(head, **scalars)
    return place_of(target, [result(known, i) for i in read.indices])


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
def add_if(condition, target: Target, place, x):
    if condition & (x != 0.0):
        add_term(target, place, x)


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
