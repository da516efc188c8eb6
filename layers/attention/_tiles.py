"""What a mask says of each tile of queries and keys: the lists that kernels walk.

The mask is never evaluated entry by entry: intervals say of each tile whether it is empty, full or
neither (`eqxcute.inline`'s `bound`). So a map costs as much as it has tiles, plus one pass over the
arrays that the mask captures.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int8

import eqxcute
from eqxcute._fallback import choose
from eqxcute._sharding import whole
from eqxcute.inline import Code, Program, Span, bound

from ._config import COMPACTION, EMPTY, FULL, MOST_CONSTANT_TILES, PARTIAL, Compaction
from ._functions import trace_mask
from ._masks import AbstractMask

NAME = "tile_map"
LARGEST = 2**31 - 1
PICTURE = 64  # maps of more tiles than this along a side are not printed as a picture
SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


class TileLists(eqx.Module):
    """For each tile along one axis, which tiles along the other it meets.

    - `tiles`: Shape `(batch, heads, n, m)`. Each row holds all `m` numbers: those of partial
        tiles, ascending, then those of full ones, ascending, then those of empty ones.
    - `partial`, `full`: `(batch, heads, n)`, how many of each.
    - `order`: `(batch, heads, n)`, the numbers of each head's rows by how many tiles they meet:
        longest first, equal ones as they stand.

    Partial tiles come first, so that a kernel is two loops, with and without the mask, and neither
    asks which it is; and so that a causal row starts on the diagonal, where its largest scores
    often are. Entries past the counts are tiles too, so that fetching one ahead is harmless.

    Sizes of batch and heads are 1 where the mask does not depend on them.
    """

    tiles: Int[Array, "*map batch heads n m"]
    partial: Int[Array, "*map batch heads n"]
    full: Int[Array, "*map batch heads n"]
    order: Int[Array, "*map batch heads n"]


class TileMap(eqx.Module):
    """What a mask says of each tile. Made by [`tile_map`][], passed to [`flex_attention`][].

    - `forward`: for each tile of queries, the tiles of keys it meets: `n` counts query tiles.
    - `backward`: the same verdicts, transposed: for each tile of keys, the tiles of queries.

    A pytree of int32 arrays: it passes through `jit`, `vmap`, `scan` and shardings as other arrays
    do. Everything else is static.
    """

    forward: TileLists
    backward: TileLists
    q_len: int = eqx.field(static=True)
    kv_len: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    heads: int = eqx.field(static=True)
    tile: tuple[int, int] = eqx.field(static=True)
    depends: frozenset[str] = eqx.field(static=True)  # of "b" and "h", those that change the lists
    digest: str = eqx.field(static=True)  # of the mask's code

    def check(
        self, name: str, *, batch: int, heads: int, q_len: int, kv_len: int, digest: str
    ) -> None:
        """Raise where the map was made for other sizes, or from another mask."""
        made = {"q_len": self.q_len, "kv_len": self.kv_len}
        here = {"q_len": q_len, "kv_len": kv_len}
        for axis, size, made_size in (("b", batch, self.batch), ("h", heads, self.heads)):
            if axis in self.depends:
                dim = "batch" if axis == "b" else "heads"
                made[dim], here[dim] = made_size, size
        wrong = [dim for dim in made if made[dim] != here[dim]]
        again = (
            f"Make it anew: tile_map(mask_fn, {q_len}, {kv_len}, batch={batch}, heads={heads}, "
            f"tile={self.tile})."
        )
        if wrong:
            was = ", ".join(f"{dim}={made[dim]}" for dim in wrong)
            now = ", ".join(f"{dim}={here[dim]}" for dim in wrong)
            raise ValueError(f"{name}: tiles was made for {was}, but q and k have {now}. {again}")
        if digest != self.digest:
            raise ValueError(
                f"{name}: tiles was made from another mask than mask_fn. The arrays that a mask "
                f"captures may differ in their values, its code and its numbers may not. {again}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """How many tiles of queries and of keys."""
        return _tiles_in(self.q_len, self.tile[0]), _tiles_in(self.kv_len, self.tile[1])

    def verdicts(self) -> Int8[Array, "*map batch heads n m"]:
        """0 where a tile is empty, 1 where it is partial, 2 where it is full.

        **Returns:** An array whose batch and heads have size 1 where the mask ignores them.
        """
        known = self._known_lists()
        if all(x is not None for x in known):
            return jnp.asarray(_spread(np, *known))
        return _spread(jnp, self.forward.tiles, self.forward.partial, self.forward.full)

    def draw(self, ax: Any = None, *, b: int = 0, h: int = 0) -> Any:
        """Draws the map of one batch entry and head with Matplotlib, which must be installed.

        **Arguments:**

        - `ax`: Axes to draw into. Default: new ones.
        - `b`, `h`: Batch entry and head. (Keyword only arguments.)

        **Returns:** The axes.
        """
        from ._plot import draw_tiles

        return draw_tiles(self, ax, b, h)

    def counts(self) -> dict[str, int] | None:
        """How many tiles are empty, partial and full, all stored lists together.

        **Returns:** A dict, or None where the arrays are traced.
        """
        tiles, partial, full = self._known_lists()
        if tiles is None or partial is None or full is None:
            return None
        partial, full = int(partial.sum(dtype=np.int64)), int(full.sum(dtype=np.int64))
        return {"empty": tiles.size - partial - full, "partial": partial, "full": full}

    def _known_lists(self) -> list[np.ndarray | None]:
        lists = self.forward
        return [_known(x) for x in (lists.tiles, lists.partial, lists.full)]

    def __repr__(self) -> str:
        (n, m), (tile_q, tile_kv) = self.shape, self.tile
        sizes = (
            f"q_len={self.q_len}, kv_len={self.kv_len}, tile={tile_q}x{tile_kv}, tiles={n}x{m}, "
            f"batch={self.batch if 'b' in self.depends else 'shared'}, "
            f"heads={self.heads if 'h' in self.depends else 'shared'}"
        )
        counts = self.counts()
        if counts is None:
            return f"TileMap({sizes}, traced)"
        found = ", ".join(f"{kind}={count}" for kind, count in counts.items())
        work = counts["partial"] + counts["full"]
        share = work / max(work + counts["empty"], 1)
        return f"TileMap({sizes}, {found}, work={share:.1%})"

    def __str__(self) -> str:
        n, m = self.shape
        lines = [repr(self)]
        tiles = _known(self.forward.tiles)
        if tiles is not None and tiles.ndim == 4 and 0 < max(n, m) <= PICTURE:
            verdicts = np.asarray(self.verdicts())
            if verdicts.size:
                lines += ["".join(SIGNS[int(x)] for x in row) for row in verdicts[0, 0]]
                key = "  ".join(
                    f"{SIGNS[x]} {y}" for x, y in ((0, "empty"), (1, "partial"), (2, "full"))
                )
                first = verdicts.shape[:2] != (1, 1)
                lines.append(key + "  (batch entry 0, head 0)" * first)
        return "\n".join(lines)


def tile_map(
    mask_fn: Any,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    tile: tuple[int, int] = (128, 128),
    implementation: str | None = None,
) -> TileMap:
    """Which tiles of queries and keys a mask leaves empty, lets through whole, or cuts.

    A kernel skips empty tiles, and calls the mask in partial ones only. Make the map once where
    several layers or steps share a mask, and pass it to [`flex_attention`][] as `tiles`.

    **Arguments:**

    - `mask_fn`: `mask_fn(b, h, q_idx, kv_idx) -> bool`, as for `flex_attention`: a function or a
        mask module.
    - `q_len`, `kv_len`: Lengths of queries and keys.
    - `batch`, `heads`: How many batch entries and query heads. They matter to masks that depend on
        them; the lists of others are stored once, and serve any. (Keyword only arguments.)
    - `tile`: How many queries and how many keys a tile has. The last ones may be cut short.
        (Keyword only argument.)
    - `implementation`: How lists are made on a device: `None` picks, `"cute"` insists on the
        kernel, `"xla"` is plain JAX. (Keyword only argument.)

    **Returns:**

    A [`TileMap`][].

    A tile that is called empty or full is so, always. One that is called partial may be either,
    which is right and slow. That was not seen of the ready-made masks and their combinations, but
    where two parts contradict each other inside a tile: intervals know each part alone. Documents
    may have any ids, and are told apart best where each lies in one piece.

    **Raises:**

    `ValueError` for sizes that do not fit, `TypeError` for a function that is no mask.

    !!! info "Cost"

        Time and memory grow with the number of tiles: 10 bytes a tile and copy, of which 8
        stay. Nothing has the size of `q_len * kv_len`.

        Outside `jit`, with arrays whose values are known, the map is made in NumPy on the host.
        Inside `jit` it is a few fusions and one small kernel a direction, except that a small map
        of a mask without traced arrays becomes a constant. Changed document ids, lengths and other
        arrays compile nothing anew.
    """
    sizes = _sizes(q_len, kv_len, batch, heads, tile)
    if isinstance(mask_fn, type) or not callable(mask_fn):
        raise TypeError(
            f"{NAME}: mask_fn must be a function of (b, h, q_idx, kv_idx) or a mask such as "
            f"CausalMask(), not {mask_fn!r}."
        )
    if isinstance(mask_fn, AbstractMask):
        mask_fn.check_sizes(sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
    choose(NAME, implementation)
    program, captured = trace_mask(mask_fn)
    sizes = sizes._replace(depends=depends_on(program.code))
    # None: which platform this will be lowered for is not known yet, and the kernel's lowering picks.
    made = lists_of(program, captured, sizes, implementation != "xla")
    forward, backward = jax.tree.map(jnp.asarray, made)
    if backward is None:
        raise RuntimeError("Internal error: a map without lists of queries.")
    return TileMap(forward, backward, *sizes, digest=program.code.digest)


class Sizes(NamedTuple):
    q_len: int
    kv_len: int
    batch: int
    heads: int
    tile: tuple[int, int]
    depends: frozenset[str] = frozenset()

    @property
    def lists(self) -> tuple[int, int, int, int]:
        """The shape of the verdicts."""
        return (
            self.batch if "b" in self.depends else 1,
            self.heads if "h" in self.depends else 1,
            _tiles_in(self.q_len, self.tile[0]),
            _tiles_in(self.kv_len, self.tile[1]),
        )


def _sizes(q_len: Any, kv_len: Any, batch: Any, heads: Any, tile: Any) -> Sizes:
    found = {}
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        found[name] = _integer(name, value, 0, " It is static: the map's shape follows from it.")
    if not isinstance(tile, Sequence) or len(tile) != 2:
        raise ValueError(f"{NAME}: tile must be a pair (queries, keys), not {tile!r}.")
    return Sizes(**found, tile=(_integer("tile", tile[0], 1), _integer("tile", tile[1], 1)))


def _integer(name: str, value: Any, least: int, why: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{NAME}: {name} must be a Python int, not {type(value).__name__}.{why}")
    if not least <= value <= LARGEST:
        raise ValueError(f"{NAME}: {name} must be from {least} to 2**31 - 1, but is {value}.")
    return int(value)


def _tiles_in(length: int, tile: int) -> int:
    return -(-length // tile)


def depends_on(code: Code) -> frozenset[str]:
    """Of "b" and "h", those that the mask reads. Arguments are known by their place."""
    names = [argument.name for argument in code.arguments]
    return frozenset(axis for axis, name in zip("bh", names, strict=False) if name in code.depends)


def _on_host(sizes: Sizes, captured: Sequence[Any]) -> bool:
    """Whether the values are known here, and few enough to become constants of a program."""
    if any(isinstance(x, jax.core.Tracer) for x in captured):
        return False
    if not all(getattr(x, "is_fully_addressable", True) for x in captured):
        return False
    # Under `jit` every array made is traced, whatever it is made from.
    inside_jit = isinstance(jnp.zeros((), jnp.int32), jax.core.Tracer)
    return not inside_jit or np.prod(sizes.lists, dtype=object) <= MOST_CONSTANT_TILES


# Verdicts


def _verdicts(code: Code, sizes: Sizes, operands: Sequence[Any], xp: Any) -> Any:
    """One int8 a tile, in the shape `sizes.lists`."""
    if 0 in sizes.lists:
        return xp.zeros(sizes.lists, np.int8)
    batch, heads, n, m = sizes.lists
    tile_q, tile_kv = sizes.tile
    spans = (
        _span(batch, sizes.batch, 1, 0),
        _span(heads, sizes.heads, 1, 1),
        _span(n, sizes.q_len, tile_q, 2),
        _span(m, sizes.kv_len, tile_kv, 3),
    )
    names = [argument.name for argument in code.arguments]
    with np.errstate(all="ignore"):  # what overflows is thrown away
        (allowed,) = bound(code, dict(zip(names, spans, strict=True)), operands, xp)
        # `lo` says that all entries are seen, `hi` that some may be.
        verdicts = xp.asarray(allowed.lo, np.int8) + xp.asarray(allowed.hi, np.int8)
    return xp.broadcast_to(verdicts, sizes.lists)


def _span(parts: int, length: int, tile: int, axis: int) -> Span:
    """The tiles of one axis, none of whose indices is past the length."""
    shape = [1, 1, 1, 1]
    shape[axis] = parts
    first = (np.arange(parts, dtype=np.int64) * tile).reshape(shape)
    last = np.minimum(first + tile, max(length, 1)) - 1
    lo = first.astype(np.int32)
    # The same object: one index, and known to be.
    return Span(lo, lo if tile == 1 else last.astype(np.int32), length, tile)


# Lists


def _lists_in_numpy(verdicts: np.ndarray) -> tuple[TileLists, TileLists]:
    transposed = np.ascontiguousarray(np.swapaxes(verdicts, -1, -2))
    return _numpy_lists(np.ascontiguousarray(verdicts)), _numpy_lists(transposed)


def _numpy_lists(verdicts: np.ndarray) -> TileLists:
    # As unsigned bytes 0 partial, 1 full, 255 empty: NumPy sorts bytes in linear time.
    kinds = (verdicts - np.int8(1)).view(np.uint8)
    tiles = np.argsort(kinds, axis=-1, kind="stable").astype(np.int32)
    partial, full = (np.sum(verdicts == k, -1, dtype=np.int32) for k in (PARTIAL, FULL))
    order = np.argsort(-(partial + full), axis=-1, kind="stable").astype(np.int32)
    arrays: Any = tiles, partial, full, order
    return TileLists(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _lists_in_jax(code: Code, sizes: Sizes, kernel: bool, both: bool, operands: Sequence[Any]):
    verdicts = _verdicts(code, sizes, operands, jnp)
    forward = _jax_lists(verdicts, kernel)
    return forward, _jax_lists(jnp.swapaxes(verdicts, -1, -2), kernel) if both else None


def _jax_lists(verdicts: Array, kernel: bool) -> TileLists:
    compact = CompactKernel() if kernel and verdicts.size else CompactKernel().reference
    tiles, partial, full = compact(verdicts)
    order = jnp.argsort(-(partial + full), axis=-1, stable=True).astype(jnp.int32)
    arrays: Any = tiles, partial, full, order
    return TileLists(*arrays)


def lists_of(
    program: Program, captured: Sequence[Any], sizes: Sizes, kernel: bool, both: bool = True
) -> tuple[TileLists, TileLists | None]:
    """The forward and the backward lists of a mask. Unless `both`, the latter only where they cost nothing. In NumPy where
    the mask is known.

    `kernel`: whether the kernel may make them.
    """
    code = program.code
    if _on_host(sizes, captured):
        with jax.core.eval_context():  # not traced, inside `jit` and `shard_map` neither
            operands = [np.asarray(x) for x in program.prepare(captured)]
        return _lists_in_numpy(_verdicts(code, sizes, operands, np))
    # Nothing here has a derivative: without this, JAX would carry tangents to the verdicts.
    operands = program.prepare([lax.stop_gradient(x) for x in captured])
    return _lists_in_jax(code, sizes, kernel, both, [whole(x) for x in operands])


def transposed(lists: Sequence[Any]) -> tuple[Any, ...]:
    """The lists of the other direction, as `(tiles, partial, full, order)` like those given."""
    tiles, partial, full, _ = lists
    verdicts = _spread(jnp, tiles, partial, full)
    made = _jax_lists(jnp.swapaxes(verdicts, -1, -2), True)
    return made.tiles, made.partial, made.full, made.order


class CompactKernel(eqxcute.Kernel):
    """Each row's tiles sorted by verdict: partial, full, empty; and how many are partial and full."""

    signature = "... n -> ... n, ..., ..."
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {"verdicts": ("int8",)}
    config: Compaction = eqxcute.static(COMPACTION)

    def out_dtypes(self, verdicts):
        return jnp.int32

    def reference(self, verdicts):
        *lead, n = verdicts.shape
        flat = verdicts.reshape(math.prod(lead), n)
        is_partial, is_full = flat == PARTIAL, flat == FULL
        partial, full = (jnp.sum(x, -1, dtype=jnp.int32) for x in (is_partial, is_full))
        # How many came before: each tile's place follows, as in the kernel. Faster than a sort.
        p, f = (jnp.cumsum(x, -1, dtype=jnp.int32) - x for x in (is_partial, is_full))
        row, tile = (lax.broadcasted_iota(jnp.int32, flat.shape, i) for i in (0, 1))
        at = (partial + full)[:, None] + tile - p - f
        at = jnp.where(is_partial, p, jnp.where(is_full, partial[:, None] + f, at))
        tiles = jnp.zeros(flat.shape, jnp.int32)
        tiles = tiles.at[row, at].set(tile, unique_indices=True, mode="promise_in_bounds")
        return tiles.reshape(verdicts.shape), partial.reshape(lead), full.reshape(lead)

    def launch(self, stream, verdicts, tiles, partial, full):
        from ._kernels.compact import Compact

        Compact(self.config)(stream, verdicts, tiles, partial, full)


def _spread(xp: Any, tiles: Any, partial: Any, full: Any) -> Any:
    """Verdicts, from the lists of them."""
    rank = xp.arange(tiles.shape[-1], dtype=np.int32)
    partial, met = partial[..., None], (partial + full)[..., None]
    kinds = xp.where(rank < partial, PARTIAL, xp.where(rank < met, FULL, EMPTY)).astype(np.int8)
    if xp is jnp:
        return jnp.put_along_axis(jnp.zeros_like(kinds), tiles, kinds, -1, inplace=False)
    verdicts = np.zeros_like(kinds)
    np.put_along_axis(verdicts, tiles, kinds, -1)
    return verdicts


def _known(x: Any) -> np.ndarray | None:
    """The values, if these are known here."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array | np.ndarray):
        return None
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else None
