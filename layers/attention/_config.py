"""Tile sizes of the blockwise reference.

One tile of scores is held at a time, for all heads and batch entries together, so a tile's
memory is `batch * heads * tile_q * tile_kv` numbers. Fewer, larger tiles mean fewer loop
iterations; smaller ones stay in a CPU's cache.
"""

from typing import Final

# A tile has at most this many scores (16 MiB in float32) where the lower limit allows it.
TILE_SCORES: Final = 1 << 22
# Below this a loop iteration costs more than its arithmetic.
SMALLEST_TILE: Final = 128
LARGEST_TILE: Final = 1024


def tiles(rows: int, q_len: int, kv_len: int) -> tuple[int, int]:
    """Tile lengths along queries and keys. `rows` is batch times query heads.

    Lengths are cut into equal parts, so padding is less than one entry a part.
    """
    if rows * q_len * kv_len <= TILE_SCORES:
        return q_len, kv_len
    side = LARGEST_TILE
    while side > SMALLEST_TILE and rows * side * side > TILE_SCORES:
        side //= 2
    return _equal_part(q_len, side), _equal_part(kv_len, side)


def _equal_part(length: int, largest: int) -> int:
    parts = -(-length // largest)
    return -(-length // parts)
