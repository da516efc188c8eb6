"""Tile sizes of the blockwise reference, and what may be tuned in tile maps.

One tile of scores is held at a time, for all heads and batch entries together, so a tile's
memory is `batch * heads * tile_q * tile_kv` numbers. Fewer, larger tiles mean fewer loop
iterations; smaller ones stay in a CPU's cache, and more of them are empty under a mask.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from eqxcute._fallback import platform


@dataclasses.dataclass(frozen=True)
class TileLimits:
    """`scores` holds for a whole tile, where `smallest` allows it; the others for a side."""

    scores: int
    largest: int
    # Below this a loop iteration costs more than its arithmetic.
    smallest: int = 128


# 4 MiB of float32 scores on a CPU. Training steps of 16 x 256 x 4 heads x 32 on 2 cores: 49 ms
# with limits of 2^18 to 2^21 scores, 76 ms with 2^22.
CPU: Final = TileLimits(scores=1 << 20, largest=512)
# A GPU starts kernels one by one for each tile: 64 MiB of scores keep it busy for longer than a
# start takes. Not measured.
OTHERS: Final = TileLimits(scores=1 << 24, largest=2048)
LIMITS: Final[Mapping[str, TileLimits]] = {"cpu": CPU}


def tiles(rows: int, q_len: int, kv_len: int) -> tuple[int, int]:
    """Tile lengths along queries and keys. `rows` is batch times query heads.

    Lengths are cut into equal parts, so padding is less than one entry a part.
    """
    limits = LIMITS.get(platform(), OTHERS)
    if rows * q_len * kv_len <= limits.scores:
        return q_len, kv_len
    side = limits.largest
    while side > limits.smallest and rows * side * side > limits.scores:
        side //= 2
    return _equal_part(q_len, side), _equal_part(kv_len, side)


def _equal_part(length: int, largest: int) -> int:
    parts = -(-length // largest)
    return -(-length // parts)


# What a mask says of a tile, as int8.
EMPTY, PARTIAL, FULL = 0, 1, 2

# A map of up to so many tiles is made in NumPy even inside `jit`, if the mask is known: its lists
# are constants of the program then, 512 KiB of them.
MOST_CONSTANT_TILES: Final = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compaction:
    """How the kernel walks rows of verdicts. Frozen: it is in the compile key."""

    warps: int = 1  # a CTA; each takes a row
    loads: int = 8  # in flight a lane, before the first is used


# The fastest of 12 settings on an H200, 2048 rows of 2048: see CONTRIBUTING.md.
COMPACTION: Final = Compaction()


# Tiles of the kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sm80Forward:
    """Of the forward kernel by `mma.sync`. Frozen: it is in the compile key."""

    tile_q: int
    tile_kv: int
    warps: int  # each has whole rows, in steps of 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sm80Backward:
    """Of the backward kernel by `mma.sync`. Frozen: it is in the compile key.

    Three kinds of products are cut among the warps in their own ways: `down` is how many warps share the rows of one,
    the others share its columns.
    """

    tile_q: int
    tile_kv: int
    warps: int
    down_s: int  # scores and their gradient: queries x keys
    down_kv: int  # gradients of keys and values: keys x dim
    down_q: int  # gradient of queries: queries x dim
    stages: int = 2  # tiles of queries in shared memory
    vector: int = 4  # floats in one atomic: 4 from Hopper on, 1 before


@dataclasses.dataclass(frozen=True)
class MapLayout:
    """Which dims the lists of a tile map have before those of tiles: first those that `jax.vmap` added, indexed by these
    `columns` of the kernel's `rows`, outermost first; then batch and heads, of size 1 unless `has_b` and `has_h`.
    """

    columns: tuple[int, ...]
    has_b: bool
    has_h: bool
    tile: tuple[int, int]  # of the map: queries, keys


def backward_workspace(
    rows: int, heads: int, q_len: int, dim: int, deterministic: bool
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the backward kernel's scratch arrays, all float32. `rows` are of the batch, `heads` query heads."""
    per_row = (rows * heads * q_len,)
    sums = (rows * heads * -(-q_len // 64) * 64 * (-(-dim // 16) * 16),)
    return (per_row, per_row) if deterministic else (per_row, per_row, sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeBackward:
    """Of what runs before the backward kernels. Frozen: it is in the compile key."""

    rows: int = 128  # queries of a CTA: what is known of queries is padded to whole ones
    threads: int = 256
    sweeps: int = 4  # over queries, in flight


# Not measured.
BEFORE: Final = BeforeBackward()
