"""Which tiles of queries and keys a CTA works on.

    grid     one dim, since the others end at 65,535: tile + tiles * (head + heads * row); on Hopper, where CTAs are few,
             head + heads * row + lines * tile
    place    a CTA's tile along its own axis, longest first where a tile map says how long each is; its kv head and
             query head within that; its row of the batch
    list     the tiles along the other axis that it meets: all, or those of the tile map, partial ones first

A map's tile is whole tiles of the kernel's, both ways: `pieces` of them.
"""

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from .._config import FEW, MapLayout


class Place(NamedTuple):
    """Of a CTA: its tile along its own axis, and whom it works for."""

    tile: Int32
    row: Int32  # of the batch
    n: Int32  # kv head
    g: Int32  # query head within it
    b: Int32  # the program's indices
    h: Int32


class List(NamedTuple):
    """The tiles that a CTA meets: `partial` ones first, then the others up to `count`."""

    tiles: cute.Tensor
    partial: Int32
    count: Int32


@dataclasses.dataclass(frozen=True)
class Axis:
    """Tiles of one axis: of the kernel's size `tile`, `pieces` of which are a tile of the map."""

    tile: int
    pieces: int = 1

    def count(self, length):
        """Tiles: whole ones of the map, but of the first only those that begin before the end."""
        found = cute.ceil_div(length, self.tile)
        if self.pieces == 1:
            return found
        whole = cute.ceil_div(length, self.tile * self.pieces) * self.pieces
        return cutlass.min(found, self.pieces) + cutlass.max(whole - self.pieces, 0)


def grid_size(own: Axis, length, heads, rows: cute.Tensor):
    """How many CTAs: one for each tile, head and row of the batch."""
    return own.count(length) * heads * rows.shape[0]


@cute.jit
def find_place(
    own: Constexpr,
    length,
    heads: cute.Tensor,
    rows: cute.Tensor,
    lists,
    layout: Constexpr,
    each_query_head: Constexpr,
):
    """The CTA's `Place`. Without `each_query_head` there is a CTA for each kv head, and `g` is 0."""
    x, _, _ = cute.arch.block_idx()
    return place_at(x, own, length, heads, rows, lists, layout, each_query_head)


@cute.jit
def place_at(
    x,
    own: Constexpr,
    length,
    heads: cute.Tensor,
    rows: cute.Tensor,
    lists,
    layout: Constexpr,
    each_query_head: Constexpr,
    pack: Constexpr = 1,
    even: Constexpr = False,
):
    """The `Place` of the `x`-th CTA. With `pack` there is one for so many query heads beside each other, and `g` is the
    first. `even`: where CTAs are few, the longest of all heads come first, not of one head
    after the other, whose last ones would be waited for."""
    tiles, groups = own.count(length), heads.shape[1] if const_expr(each_query_head) else Int32(1)
    if const_expr(pack > 1):
        groups = groups // pack
    rest, tile = x // tiles, x % tiles
    if const_expr(even):
        lines = heads.shape[0] * groups * rows.shape[0]
        if lines * tiles < FEW:
            rest, tile = x % lines, x // lines
    head, row = rest % (heads.shape[0] * groups), rest // (heads.shape[0] * groups)
    n, g = head // groups, head % groups
    if const_expr(pack > 1):
        g = g * pack
    b, h = rows[row, 0], heads[n, g]
    if const_expr(layout is not None):
        order = lists[3][(*list_index(layout, rows, row, b, h), None)]
        tile = order[tile // own.pieces] * own.pieces + tile % own.pieces
    return Place(tile, row, n, g, b, h)


def list_index(layout: MapLayout, rows, row, b, h) -> tuple:
    """Where the lists of this batch entry and head stand."""
    mapped = [rows[row, column] for column in layout.columns]
    return (*mapped, b if layout.has_b else 0, h if layout.has_h else 0)


@cute.jit
def find_list(
    own: Constexpr,
    across: Constexpr,
    place: Place,
    length,
    rows: cute.Tensor,
    lists,
    layout: Constexpr,
):
    """The CTA's `List`, of tiles of `across` along an axis of `length`."""
    if const_expr(layout is None):
        return List(None, Int32(0), cute.ceil_div(length, across.tile))
    at = (*list_index(layout, rows, place.row, place.b, place.h), place.tile // own.pieces)
    partial = lists[1][at] * across.pieces
    return List(lists[0][(*at, None)], partial, partial + lists[2][at] * across.pieces)


@cute.jit
def tile_at(found: List, across: Constexpr, i):
    """The number of the `i`-th tile of a list."""
    if const_expr(found.tiles is None):
        return i
    return found.tiles[i // across.pieces] * across.pieces + i % across.pieces


class Walk(NamedTuple):
    """A list as Hopper's kernels walk it: at least one tile, and `partial` is at least 1. What hangs over the end of the
    axis is partial: where that is the last of the full tiles, it comes first."""

    list: List
    shift: Int32  # 1 where the last tile comes first
    partial: Int32
    count: Int32
    first: Int32  # of a part of a walk: where it begins in the whole one


@cute.jit
def find_walk(
    own: Constexpr,
    across: Constexpr,
    place: Place,
    length,
    rows: cute.Tensor,
    lists,
    layout: Constexpr,
):
    """The CTA's `Walk`, of tiles of `across` along an axis of `length`."""
    found = find_list(own, across, place, length, rows, lists, layout)
    count, shift = found.count, Int32(0)
    if found.count > found.partial:
        end = (tile_at(found, across, found.count - 1) + 1) * across.tile
        if end > length:
            beyond = (end - length) // across.tile  # pieces with nothing in them
            count = count - beyond
            shift = Int32(1) if length % across.tile != 0 else Int32(0)
    partial = cutlass.max(found.partial + shift, 1)
    return Walk(found._replace(count=count), shift, partial, cutlass.max(count, 1), Int32(0))


@cute.jit
def walk_at(walk: Walk, across: Constexpr, i):
    """The number of the `i`-th tile of a walk; 0 where the list is empty."""
    j = Int32(0)
    if walk.list.count > 0:
        i = i + walk.first
        at = walk.list.count - 1 if i < walk.shift else i - walk.shift
        j = tile_at(walk.list, across, at)
    return j


@cute.jit
def part_of(walk: Walk, part, parts):
    """The walk of one of so many near-equal parts of a walk, and whether there is anything in it: if not, it is one tile
    that another part has."""
    each, more = walk.count // parts, walk.count % parts
    first = part * each + cutlass.min(part, more)
    end = first + each + (Int32(1) if part < more else Int32(0))
    count = cutlass.max(end - first, 1)
    partial = cutlass.min(cutlass.max(walk.partial - first, 1), count)
    return walk._replace(partial=partial, count=count, first=first), end > first
