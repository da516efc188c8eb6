"""Tiles of keys and values, in two stages: tile i + 1 of a list arrives (`cp.async`) while tile i is computed with."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr
from cutlass.memory import SmemAllocator

from .matrix import load_tile, tile_layout, width
from .walk import List, tile_at


class Stages(NamedTuple):
    """Keys and values of a head, (length, dim), and their tiles in shared memory, (rows, dim, 2)."""

    sources: tuple[cute.Tensor, cute.Tensor]
    tiles: tuple[cute.Tensor, cute.Tensor]


def make_stages(shared: SmemAllocator, k: cute.Tensor, v: cute.Tensor, rows: int) -> Stages:
    tiles = [
        shared.allocate_tensor(
            x.element_type, tile_layout(rows, x.shape[1], x.element_type, 2), 1024
        )
        for x in (k, v)
    ]
    return Stages((k, v), tuple(tiles))


@cute.jit
def load_stage(tid, threads: Constexpr, stages: Stages, rows: Constexpr, j, stage):
    """Starts to load tile `j`."""
    for source, tile in zip(stages.sources, stages.tiles, strict=True):
        dim = source.shape[1]
        offset = stage * rows * width(dim, source.element_type)
        load_tile(tid, threads, source, tile.iterator, offset, rows, dim, j * rows)


@cute.jit
def next_tile(tid, threads: Constexpr, stages: Stages, found: List, across: Constexpr, i, count):
    """Waits for tile `i` of the list, starts to load the one after it, and returns the number of tile `i`."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()  # all of it is here, and nobody reads tile i - 1 any more
    if i + 1 < count:
        load_stage(tid, threads, stages, across.tile, tile_at(found, across, i + 1), (i + 1) % 2)
    cute.arch.cp_async_commit_group()
    return tile_at(found, across, i)
