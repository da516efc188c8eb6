"""Which tiles of queries and keys a CTA works on.

    grid     one dim, since the others end at 65,535: tile + tiles * (head + heads * row)
    place    a CTA's tile along its own axis, longest first where a tile map says how long each is; its kv head and
             query head within that; its row of the batch
    list     the tiles along the other axis that it meets: all, or those of the tile map, partial ones first

A map's tile is whole tiles of the kernel's, both ways: `pieces` of them.
"""

import dataclasses
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from .._config import MapLayout


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
        """Tiles, counted as whole tiles of the map."""
        return cute.ceil_div(length, self.tile * self.pieces) * self.pieces


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
    tiles, groups = own.count(length), heads.shape[1] if const_expr(each_query_head) else Int32(1)
    rest, tile = x // tiles, x % tiles
    head, row = rest % (heads.shape[0] * groups), rest // (heads.shape[0] * groups)
    n, g = head // groups, head % groups
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
