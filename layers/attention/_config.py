"""Tile sizes of the blockwise reference, and what may be tuned in tile maps.

One tile of scores is held at a time, for all heads and batch entries together, so a tile's
memory is `batch * heads * tile_q * tile_kv` numbers. Fewer, larger tiles mean fewer loop
iterations; smaller ones stay in a CPU's cache, and more of them are empty under a mask.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from eqxcute._arch import ARCHITECTURES, Facts
from eqxcute._fallback import platform

from ._tuned import Key, load


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
class Sm90Forward:
    """Of the forward kernel by `wgmma`. Frozen: it is in the compile key."""

    tile_kv: int
    warpgroups: int  # that compute: 64 rows each
    stages: int  # of keys, and of values
    hidden: int = 0  # of a thread's two rows, whose exponentials run beside the output's product
    persistent: bool = False  # a CTA takes tile after tile, and out has memory of its own
    pack: int = 1  # query heads of a kv head that lie in one tile, as rows
    split: bool = (
        False  # the keys of a tile are shared out to several CTAs, whose results are combined
    )

    @property
    def tile_q(self) -> int:
        """Rows: queries, times query heads if those are packed."""
        return ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that loads, and of one that computes."""
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.warpgroups]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sm90Backward:
    """Of the backward kernel by `wgmma`: two warpgroups compute, each for 64 keys. Frozen: it is in the compile key."""

    tile_q: int  # 64 or 128
    stages: int = 2  # of queries, and of dO
    ds_stages: int = 1  # of dS: 1, or as many as `stages`, which saves one of two barriers a tile
    hidden: bool = False  # exponentials run beside the product that makes dP

    @property
    def tile_kv(self) -> int:
        return 128

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that loads, and of one that computes."""
        return 24, 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sm80Queries:
    """Of the kernel by `mma.sync` that makes the queries' gradient in a fixed order. Frozen: it is in the compile key."""

    tile_q: int
    tile_kv: int
    warps: int  # each has whole rows, in steps of 16


LARGEST_DIM: Final = 256  # of heads
SMALLEST_TILE: Final = 16  # of any configuration
MAP_TILE: Final = (128, 128)  # queries and keys, of maps that are made for one call


@dataclasses.dataclass(frozen=True)
class MapLayout:
    """Which dims the lists of a tile map have before those of tiles: first those that `jax.vmap` added, indexed by these
    `columns` of the kernel's `rows`, outermost first; then batch and heads, of size 1 unless `has_b` and `has_h`.
    """

    columns: tuple[int, ...]
    has_b: bool
    has_h: bool
    tile: tuple[int, int]  # of the map: queries, keys
    backward: tuple[int, int] | None = (
        None  # of the lists of keys' tiles, where they are of another map
    )

    @property
    def backward_tile(self) -> tuple[int, int]:
        return self.backward or self.tile


def backward_workspace(
    rows: int, heads: int, q_len: int, dim: int, deterministic: bool
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the backward kernel's scratch arrays, all float32: lse and delta of each query, and the sums of dQ, unless
    those need none. `rows` are of the batch, `heads` query heads."""
    padded = -(-q_len // BEFORE.rows) * BEFORE.rows
    line = (rows * heads, padded)
    # Wide enough for every dtype and tile.
    return (line, line) if deterministic else (line, line, (*line, -(-dim // 32) * 32))


# Words of 64 bits that hold the exact sum of float32 numbers: see `_kernels/bins.py`.
WORDS: Final = 12


def words_workspace(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, in int32, of the words that sum a gradient of `shape` where the order of terms must not matter."""
    return (WORDS, *shape, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeforeBackward:
    """Of what runs before the backward kernels. Frozen: it is in the compile key."""

    rows: int = 128  # queries of a CTA: what is known of queries is padded to whole ones
    threads: int = 256
    sweeps: int = 4  # over queries, in flight


# Not measured.
BEFORE: Final = BeforeBackward()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """Of what combines the parts of split keys. Frozen: it is in the compile key."""

    warps: int = 4  # a CTA; each takes a query of a head


# Not measured.
COMBINE: Final = Combination()


# Which tiles a kernel takes. Shared memory decides, and then what was fastest on an H200: see CONTRIBUTING.md.


def atom_columns(dim: int, bits: int) -> int:
    """Columns of a swizzle atom in shared memory: 128 bytes, or for 16 bits 64 where those pad `dim` less."""
    return 64 if bits == 16 and -(-dim // 32) % 2 == 0 else 32


def tile_columns(dim: int, bits: int) -> int:
    """Columns of a tile in shared memory."""
    atom = atom_columns(dim, bits)
    return -(-dim // atom) * atom


BITS: Final[Mapping[str, int]] = {"float16": 16, "bfloat16": 16, "float32": 32}


def forward_bytes(config: Sm80Forward, dim: int, v_dim: int, bits: int) -> int:
    """Shared memory of the forward kernel: q, whose place out takes at the end, and two stages of k and v."""
    d, e = tile_columns(dim, bits), tile_columns(v_dim, bits)
    return (config.tile_q * max(d, e) + 2 * config.tile_kv * (d + e)) * bits // 8


def queries_bytes(config: Sm80Queries, dim: int, v_dim: int, bits: int) -> int:
    """Shared memory of the kernel of dQ alone: q and dO, and two stages of k and v."""
    d, e = tile_columns(dim, bits), tile_columns(v_dim, bits)
    return (config.tile_q * (d + e) + 2 * config.tile_kv * (d + e)) * bits // 8


def backward_bytes(config: Sm80Backward, dim: int, v_dim: int, bits: int) -> int:
    """Shared memory of the backward kernel: k and v; stages of q, dO, lse and delta; P and dS."""
    d, e = tile_columns(dim, bits), tile_columns(v_dim, bits)
    tiles = (config.tile_kv + config.stages * config.tile_q) * (d + e)
    scores = 2 * config.tile_q * tile_columns(config.tile_kv, bits)
    return (tiles + scores) * bits // 8 + 2 * config.stages * config.tile_q * 4


Tile = tuple[int, int]


def _wide_enough(table, columns: tuple[int, int]) -> list[Any]:
    """The lines of a table that are for so many columns of q and v."""
    return [c for (d, e), c in table if columns[0] <= d and columns[1] <= e]


def _first_that_fits(
    table, columns: tuple[int, int], tile: Tile, fits: Callable[[Any], bool]
) -> Any:
    for config in _wide_enough(table, columns):
        divided = tile[0] % config.tile_q == 0 and tile[1] % config.tile_kv == 0
        if divided and fits(config):
            return config
    return None


def _forward(
    widest: int, tile_q: int, tile_kv: int, warps: int, *, widest_v: int = LARGEST_DIM
) -> tuple[tuple[int, int], Sm80Forward]:
    return (widest, min(widest, widest_v)), Sm80Forward(tile_q=tile_q, tile_kv=tile_kv, warps=warps)


# The largest numbers of columns of q and v that a line is for, and the tiles. The first that fits is taken. A warp has
# 32 rows where registers hold its output, up to 128 columns: shared memory is read half as often as with 16.
FORWARD: Final = {
    16: (
        _forward(128, 128, 64, 4),
        _forward(256, 128, 32, 4, widest_v=128),
        _forward(256, 128, 64, 8),
        _forward(256, 64, 64, 4),
        _forward(256, 64, 32, 4),
    ),
    32: (
        _forward(64, 64, 64, 4),
        _forward(128, 64, 32, 4),
        _forward(256, 64, 16, 4),
        _forward(256, 32, 16, 2),
    ),
}


def _backward(
    widest: int, tile_q: int, tile_kv: int, warps: int, down: tuple[int, int, int], stages: int
) -> tuple[tuple[int, int], Sm80Backward]:
    s, kv, q = down
    return (widest, widest), Sm80Backward(
        tile_q=tile_q, tile_kv=tile_kv, warps=warps, down_s=s, down_kv=kv, down_q=q, stages=stages
    )


BACKWARD: Final = {
    16: (
        _backward(64, 64, 64, 4, (2, 2, 2), 2),
        _backward(128, 64, 128, 8, (2, 4, 2), 2),
        _backward(128, 64, 128, 8, (2, 4, 4), 2),
        _backward(128, 64, 64, 4, (2, 2, 2), 1),
        _backward(256, 64, 64, 8, (4, 2, 2), 2),
        _backward(256, 64, 64, 8, (4, 4, 4), 2),
        _backward(256, 64, 64, 8, (4, 2, 2), 1),
        _backward(256, 64, 64, 8, (4, 4, 4), 1),
        _backward(192, 64, 32, 4, (2, 2, 2), 1),
        _backward(256, 32, 32, 4, (2, 2, 2), 1),
    ),
    32: (
        _backward(64, 64, 64, 4, (2, 2, 2), 1),
        _backward(128, 32, 64, 4, (2, 2, 2), 1),
        _backward(256, 32, 32, 4, (2, 2, 2), 1),
    ),
}


def _queries(
    widest: int, tile_q: int, tile_kv: int, warps: int
) -> tuple[tuple[int, int], Sm80Queries]:
    return (widest, widest), Sm80Queries(tile_q=tile_q, tile_kv=tile_kv, warps=warps)


QUERIES: Final = {
    16: (
        _queries(128, 64, 64, 4),
        _queries(256, 64, 32, 4),
        _queries(256, 32, 32, 2),
    ),
    32: (
        _queries(64, 64, 32, 4),
        _queries(128, 32, 32, 2),
        _queries(256, 32, 16, 2),
    ),
}


# With a costly score: fewer registers a thread, so that none are spilled.
COSTLY: Final = _forward(128, 64, 64, 4)


def forward(
    facts: Facts,
    dim: int,
    v_dim: int,
    dtype: str,
    tile: Tile = MAP_TILE,
    *,
    costly: bool = False,
) -> Sm80Forward | None:
    """Tiles of the forward kernel, whole ones of which are a map's `tile`. None where none fits. `costly`: the score is."""
    bits = BITS[dtype]
    columns = tile_columns(dim, bits), tile_columns(v_dim, bits)

    def fits(config):
        return forward_bytes(config, dim, v_dim, bits) <= facts.smem_bytes

    table = (COSTLY, *FORWARD[bits]) if costly and bits == 16 else FORWARD[bits]
    return _first_that_fits(table, columns, tile, fits)


def backward(
    facts: Facts, dim: int, v_dim: int, dtype: str, tile: Tile = MAP_TILE
) -> Sm80Backward | None:
    """Tiles of the backward kernel, likewise."""
    bits = BITS[dtype]
    columns = tile_columns(dim, bits), tile_columns(v_dim, bits)

    def fits(config):
        # Warps beside each other have 16 columns each.
        across = [config.warps // down for down in (config.down_kv, config.down_q)]
        divided = all(n % (16 * m) == 0 for n in columns for m in across)
        return divided and backward_bytes(config, dim, v_dim, bits) <= facts.smem_bytes

    found = _first_that_fits(BACKWARD[bits], columns, tile, fits)
    if found is None:
        return None
    return dataclasses.replace(found, vector=4 if facts.capability >= (9, 0) else 1)


def queries(
    facts: Facts, dim: int, v_dim: int, dtype: str, tile: Tile = MAP_TILE
) -> Sm80Queries | None:
    """Tiles of the kernel of dQ alone, likewise."""
    bits = BITS[dtype]
    columns = tile_columns(dim, bits), tile_columns(v_dim, bits)

    def fits(config):
        return queries_bytes(config, dim, v_dim, bits) <= facts.smem_bytes

    return _first_that_fits(QUERIES[bits], columns, tile, fits)


# Of Hopper's kernels, for 16-bit dtypes. As above: the first that fits is taken.


def hopper_forward_bytes(config: Sm90Forward, dim: int, v_dim: int, bits: int) -> int:
    """Shared memory of Hopper's forward kernel: q and out, which may share a place, and stages of k and v; not the barriers."""
    d, e = tile_columns(dim, bits), tile_columns(v_dim, bits)
    columns = d + e if config.persistent else max(d, e)
    rows = config.tile_q * columns + config.stages * config.tile_kv * (d + e)
    return rows * bits // 8


FEW: Final = (
    1024  # CTAs, of some eight waves: then the order of tiles is that of all heads together
)
SMS: Final = 132  # multiprocessors of an H100 or H200: CTAs of persistent kernels
BARRIER_BYTES: Final = (
    2048  # more than any kernel's barriers take, with what they leave before the first tile
)
HOPPER: Final = "sm_90a"  # only it has `wgmma`


def _hopper(widest: int, widest_v: int, tile_kv: int, warpgroups: int, stages: int, **more: Any):
    config = Sm90Forward(tile_kv=tile_kv, warpgroups=warpgroups, stages=stages, **more)
    return (widest, widest_v), config


# Dim 64 is bound by exponentials: three warpgroups, whose softmax runs beside their products. From 96 on two warpgroups
# hide each other's: see CONTRIBUTING.md.
HOPPER_FORWARD: Final = (
    _hopper(64, 64, 128, 3, 2, hidden=2),
    _hopper(64, 64, 128, 2, 2, hidden=2),
    _hopper(128, 128, 128, 2, 2),
    _hopper(192, 128, 128, 2, 2),
    _hopper(256, 256, 64, 2, 2),
)


# What was measured, by `python -m eqxcute.layers.bench tune attention`. It goes before the tables here, which serve what it
# has not. Its entries are globals of what chooses: a kernel's compile key knows them.
TUNED_FILE: Final = Path(__file__).with_name("tuned_h200.json")
KINDS: Final[Mapping[str, type]] = {"forward": Sm90Forward, "backward": Sm90Backward}
TUNED: Final[Mapping[Key, Any]] = load(TUNED_FILE, KINDS)


def _key(direction: str, dim: int, v_dim: int, sparse: bool, scored: bool) -> Key:
    mask = "sparse" if sparse else "full"
    return Key(direction, tile_columns(dim, 16), tile_columns(v_dim, 16), mask, scored)


def hopper_forward_fits(
    config: Sm90Forward, facts: Facts, dim: int, v_dim: int, tile: Tile | None = None
) -> bool:
    """Whether shared memory holds it, and a map's `tile` is whole ones of its."""
    queries = config.tile_q // config.pack
    if tile is not None and (tile[0] % queries or tile[1] % config.tile_kv):
        return False
    used = hopper_forward_bytes(config, dim, v_dim, 16)
    return used + BARRIER_BYTES <= facts.smem_bytes


def hopper_forward_table(
    facts: Facts, dim: int, v_dim: int, tile: Tile | None = None
) -> Sm90Forward | None:
    """`hopper_forward` without what was measured."""
    columns = tile_columns(dim, 16), tile_columns(v_dim, 16)
    lines = _wide_enough(HOPPER_FORWARD, columns)
    return next((c for c in lines if hopper_forward_fits(c, facts, dim, v_dim, tile)), None)


def hopper_forward(
    facts: Facts,
    dim: int,
    v_dim: int,
    dtype: str,
    tile: Tile | None = None,
    *,
    scored: bool = False,
    sparse: bool | None = None,
) -> Sm90Forward | None:
    """Tiles of Hopper's forward kernel; None where there are none. Without a map `tile` is None, and any will do. `scored`:
    with a score function. `sparse`: with a map, though its tile is not chosen yet."""
    if BITS[dtype] != 16:
        return None
    sparse = tile is not None if sparse is None else sparse
    found = TUNED.get(_key("forward", dim, v_dim, sparse, scored))
    if found is not None and hopper_forward_fits(found, facts, dim, v_dim, tile):
        return found
    return hopper_forward_table(facts, dim, v_dim, tile)


# Tiles of 128 keys that a tile of queries meets, on average: with no more a persistent grid pays, since loads of the next
# tile begin while this one ends. With more its longer loop costs more. See CONTRIBUTING.md.
SHORT: Final = 16
ROWS: Final = 64  # of a warpgroup
BEGIN_AND_END: Final = 2  # of a CTA, and of combining: how many tiles of 128 keys take as long
COMBINING: Final = 4


@dataclasses.dataclass(frozen=True)
class Sizing:
    """What is decided from the sizes of a call. Frozen: it is in the compile key, which has the sizes not. Any of them is
    right for any sizes, and fast for those that it was made from."""

    short: bool = False  # a tile of queries meets few tiles of keys
    few: bool = False  # all query heads that lie in one tile have no more rows than a warpgroup
    pack: int = 1  # how many those are
    split: bool = False  # keys are shared out


def sizing(lines: int, q_len: int, kv_len: int, group: int, *, met: float, alike: bool) -> Sizing:
    """For `lines` of batch and query heads, of which `group` share a kv head. `met`: tiles of keys that a tile of queries
    meets. `alike`: a map's lists are the same for all heads."""
    pack = min(group & -group, ROWS) if alike and q_len < ROWS else 1
    few = q_len * pack <= ROWS
    found = Sizing(short=met <= SHORT, few=few, pack=pack)
    seen = int(min(kv_len, met * MAP_TILE[1]))
    return dataclasses.replace(found, split=parts_of(found, lines, q_len, seen) > 1)


def parts_of(sizing: Sizing, lines: int, q_len: int, kv_len: int) -> int:
    """To how many CTAs the keys of a tile are shared out: so many that their waves take the least time."""
    if not all(isinstance(n, int) for n in (lines, q_len, kv_len)):
        return 1  # symbolic: an axis that `jax.vmap` added, in an export
    rows = ROWS if sizing.few else 2 * ROWS
    works = lines // sizing.pack * -(-q_len * sizing.pack // rows)
    tiles = -(-kv_len // MAP_TILE[1])
    if works > 4 * SMS:
        return 1

    def time(parts):
        waves = -(-works * parts // SMS)
        return waves * (-(-tiles // parts) + BEGIN_AND_END) + (COMBINING if parts > 1 else 0)

    return min(range(1, min(max(tiles, 1), SMS) + 1), key=time)


# Of few rows: one warpgroup, and as many keys and values on their way as shared memory holds.
HOPPER_FEW: Final = (
    _hopper(64, 64, 128, 1, 6),
    _hopper(128, 128, 128, 1, 3),
    _hopper(192, 128, 128, 1, 2),
    _hopper(256, 256, 64, 1, 3),
)


def sized(
    config: Sm90Forward, sizing: Sizing, facts: Facts, dim: int, v_dim: int, tile: Tile | None
) -> Sm90Forward:
    """The configuration as the sizes of a call want it, as far as that fits."""
    columns = tile_columns(dim, 16), tile_columns(v_dim, 16)
    wanted = _wide_enough(HOPPER_FEW, columns) if sizing.few else []
    for base in (*wanted, config):
        pack = sizing.pack if base.tile_q % sizing.pack == 0 else 1
        found = dataclasses.replace(base, pack=pack, split=sizing.split)
        if hopper_forward_fits(found, facts, dim, v_dim, tile):
            break
    else:
        return config
    if not sizing.short or sizing.split:
        return found
    always = dataclasses.replace(found, persistent=True)
    return always if hopper_forward_fits(always, facts, dim, v_dim, tile) else found


def hopper_backward_bytes(config: Sm90Backward, dim: int, v_dim: int, bits: int) -> int:
    """Shared memory of Hopper's backward kernel: k and v; stages of q, dO, lse and delta; dS; dQ; not the barriers."""
    d, e = tile_columns(dim, bits), tile_columns(v_dim, bits)
    tiles = (config.tile_kv + config.stages * config.tile_q) * (d + e)
    scores = config.ds_stages * config.tile_q * config.tile_kv
    floats = 2 * config.stages * config.tile_q + config.tile_q * d
    return (tiles + scores) * bits // 8 + 4 * floats


HOPPER_BACKWARD: Final = (
    ((64, 64), Sm90Backward(tile_q=128, ds_stages=2)),
    ((128, 128), Sm90Backward(tile_q=64)),
)


# With a score function: its registers come on top.
HOPPER_SCORED: Final = (((128, 128), Sm90Backward(tile_q=64)),)


def hopper_backward_fits(
    config: Sm90Backward, facts: Facts, dim: int, v_dim: int, tile: Tile | None = None
) -> bool:
    """Likewise. What is known of queries is padded to `BEFORE.rows`: a map's tile may not reach further."""
    if tile is not None and (tile[0] % config.tile_q or tile[1] % config.tile_kv):
        return False
    if (tile is not None and BEFORE.rows % tile[0]) or config.ds_stages not in (1, config.stages):
        return False
    used = hopper_backward_bytes(config, dim, v_dim, 16)
    return used + BARRIER_BYTES <= facts.smem_bytes


def hopper_backward_table(
    facts: Facts, dim: int, v_dim: int, tile: Tile | None = None, *, scored: bool = False
) -> Sm90Backward | None:
    """`hopper_backward` without what was measured."""
    columns = tile_columns(dim, 16), tile_columns(v_dim, 16)
    lines = _wide_enough(HOPPER_SCORED if scored else HOPPER_BACKWARD, columns)
    return next((c for c in lines if hopper_backward_fits(c, facts, dim, v_dim, tile)), None)


def hopper_backward(
    facts: Facts,
    dim: int,
    v_dim: int,
    dtype: str,
    tile: Tile | None = None,
    *,
    scored: bool = False,
) -> Sm90Backward | None:
    """Tiles of Hopper's backward kernel, likewise."""
    if BITS[dtype] != 16:
        return None
    found = TUNED.get(_key("backward", dim, v_dim, tile is not None, scored))
    if found is not None and hopper_backward_fits(found, facts, dim, v_dim, tile):
        return found
    return hopper_backward_table(facts, dim, v_dim, tile, scored=scored)


def map_tile(
    architecture: str, dim: int, v_dim: int, dtype: str, *, scored: bool = False
) -> Tile | None:
    """Queries and keys in a tile of the map that is made for a forward kernel, if that is not `MAP_TILE`."""
    if architecture != HOPPER or dtype not in BITS:
        return None
    facts = ARCHITECTURES[HOPPER]
    found = hopper_forward(facts, dim, v_dim, dtype, scored=scored, sparse=True)
    return None if found is None else map_tile_of(found)


def map_tile_of(config: Sm90Forward) -> Tile:
    """The least that is whole ones of its tiles and has those of `MAP_TILE`."""
    queries, keys = MAP_TILE
    return -(-queries // config.tile_q) * config.tile_q, -(-keys // config.tile_kv) * config.tile_kv


def grid_tiles(heads: int, lengths: tuple[int, int], tile: Tile) -> tuple[int, int]:
    """The longest of the lengths of queries and of keys, in whole ones of a map's `tile`; and how many CTAs any kernel has
    at the most, for so many heads of the whole batch."""
    longest = max(-(-n // each) * each for n, each in zip(lengths, tile, strict=True))
    return longest, heads * -(-longest // SMALLEST_TILE)
