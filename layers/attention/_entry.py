"""`flex_attention`: checks its arguments, picks an implementation, runs it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eqxcute import ArchitectureError, _arch
from eqxcute._fallback import choose
from eqxcute.inline import Program

from . import _attend, _config, _reference
from ._compiled import Functions, compiled
from ._config import LARGEST_DIM, MAP_TILE, MapLayout
from ._functions import trace_mask, trace_score
from ._masks import AbstractMask
from ._scores import AbstractScore
from ._tiles import LARGEST, Sizes, TileLists, TileMap, depends_on, lists_of

MaskFn = Callable[
    [Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]], Bool[Array, ""] | bool
]
ScoreFn = Callable[
    [Float[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""], Int[Array, ""]],
    Float[Array, ""],
]

Precision = Literal["tf32", "3xtf32"]

NAME: Final = "FlexAttention"
DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
KERNEL_TILE: Final = 64  # a map's tile is whole tiles of the kernel's, whichever those are
MARGIN: Final = 1 << 16  # indices of a tile may pass the length


def flex_attention(
    q: Float[Array, "*batch q_len heads dim"],
    k: Float[Array, "*batch kv_len kv_heads dim"],
    v: Float[Array, "*batch kv_len kv_heads v_dim"],
    mask_fn: MaskFn | None = None,
    score_fn: ScoreFn | None = None,
    *,
    scale: float | None = None,
    sink: Float[Array, " heads"] | Float[Array, ""] | None = None,
    return_lse: bool = False,
    tiles: TileMap | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    implementation: str | None = None,
) -> (
    Float[Array, "*batch q_len heads v_dim"]
    | tuple[Float[Array, "*batch q_len heads v_dim"], Float[Array, "*batch heads q_len"]]
):
    r"""Scaled dot-product attention, with any mask and any change of the scores.

    $$s_{ij} = \mathrm{score}(\mathrm{scale} \cdot q_i^\top k_j, b, h, i, j), \quad
    o_i = \sum_{j:\,\mathrm{mask}(b, h, i, j)} e^{s_{ij} - \mathrm{lse}_i} v_j, \quad
    \mathrm{lse}_i = \log \sum_{j:\,\mathrm{mask}(b, h, i, j)} e^{s_{ij}}$$

    A query that may see no key gives 0, an LSE of -inf and zero gradients.

    **Arguments:**

    - `q`, `k`, `v`: Queries, keys and values of one dtype: float16, bfloat16, float32 or float64.
        `heads` is a multiple of `kv_heads`; query head `h` reads kv head
        `h // (heads // kv_heads)`. Lengths may differ and may be 0.
    - `mask_fn`: `mask_fn(b, h, q_idx, kv_idx) -> bool`, True where the query may see the key.
        Called with int32 scalars, once for all positions (it is traced). `b` counts the leading
        dims of `q` in row-major order; `h` is the query head. Under `jax.vmap` each example has
        its own `b`, counted over the leading dims that it has itself: 0 if it has none. It may
        capture arrays, or be a module with arrays.
    - `score_fn`: `score_fn(score, b, h, q_idx, kv_idx) -> score`, applied to the scaled score.
        `score` is float32 (float64 for float64 inputs). What it gives at masked positions does
        not matter. Gradients flow into the float arrays it captures, in their own dtype; they
        are summed in float32.
    - `scale`: Factor on `q . k`. Default `1 / sqrt(dim)`. (Keyword only argument.)
    - `sink`: A logit per query head, or one for all, that takes part in the softmax without a
        value: the output is multiplied by `sigmoid(lse - sink)`. (Keyword only argument.)
    - `return_lse`: Also return the LSE. (Keyword only argument.)
    - `tiles`: What [`tile_map`][] made of `mask_fn`, for layers or steps that share a mask. It is
        checked against the sizes and the mask's code; its arrays must come from the same values
        as the mask's. The kernel needs tiles of multiples of 64; without `tiles` it makes a map of
        its own. Plain JAX does nothing but check it. (Keyword only argument.)
    - `deterministic`: Equal inputs give gradients of equal bits, at the price of a slower backward
        pass. The forward pass always is so. That is of the kernels: of plain JAX, see XLA's
        `--xla_gpu_deterministic_ops`. (Keyword only argument.)
    - `precision`: Of products of float32 inputs on tensor cores: `"tf32"` rounds them to 11
        bits, `"3xtf32"`, the default, makes up for it with three products for one, and is about as
        exact as float32. In plain JAX they are `jax.lax.Precision.DEFAULT` and `HIGHEST`. Other
        dtypes have one precision. (Keyword only argument.)
    - `implementation`: `None` picks, `"cute"` insists on the GPU kernel, `"xla"` is plain JAX.
        (Keyword only argument.)

    **Returns:**

    The output, `*batch q_len heads v_dim` in `v`'s dtype. With `return_lse`, also the LSE:
    natural logarithm, float32 (float64 for float64 inputs), shape `*batch heads q_len`, so that
    the rows of one head lie together, as kernels write them. It does not count `sink`; with
    the sink it is `logaddexp(lse, sink)`.

    **Raises:**

    `ValueError` for shapes that do not fit and unknown names, `TypeError` for dtypes and functions
    that do not fit, `NotImplementedError` where `implementation="cute"` cannot be had.

    !!! info "Memory"

        Scores are computed in tiles, forward and backward, so memory grows with the length and
        not with its square. Reverse mode keeps `q`, `k`, `v`, the output and the LSE. For policies
        of `jax.checkpoint` the last two are named `flex_attention_out` and `flex_attention_lse`
        where the kernel runs: with `save_only_these_names` of both it runs once.

    !!! info "Kernel"

        On an NVIDIA GPU, float16, bfloat16 and float32 with `dim` and `v_dim` up to 256 run as one
        kernel forward and a few backward, under `jax.vmap` too; dims that are no multiples of 8
        are padded with zeros. Forward mode and second derivatives are plain JAX. One kernel is
        compiled a mask, score, dtype and pair of dims; lengths, heads and batch do not matter, but
        on Hopper there is one for few queries, for few keys and for all others.

    !!! faq

        `mask_fn` and `score_fn` have the arguments of PyTorch's FlexAttention, so its masks port
        word for word, except that Python's `and`, `or`, `not` and `if` become `&`, `|`, `~` and
        `jnp.where`. There is no dropout. Nothing isolates packed sequences but the mask. Values
        in `v` at masked positions are multiplied by 0, so they must be finite.
    """
    check_function("mask_fn", mask_fn)
    check_function("score_fn", score_fn)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    *batch, q_len, heads, dim, kv_len, kv_heads, v_dim = _sizes(q, k, v)
    _check_dtypes(q, k, v)
    scale = check_scale(scale)
    rows = math.prod(batch)
    for fn in (mask_fn, score_fn):
        if isinstance(fn, AbstractMask | AbstractScore):
            fn.check_sizes(rows, heads, q_len, kv_len)
    precision = check_precision(precision)
    mask, mask_captured = (None, []) if mask_fn is None else trace_mask(mask_fn, (q, k, v))
    if tiles is not None:
        _check_tiles(tiles, mask, batch=rows, heads=heads, q_len=q_len, kv_len=kv_len)
    wide = _reference.wide(q.dtype)
    score, score_captured = None, []
    if score_fn is not None:
        longest = _longest(q, k, _tile_of(mask, tiles))
        score, score_captured = trace_score(score_fn, wide, (q, k, v), longest)
    why = _missing(q, k, v, (mask, score))
    if why is None:
        why = _too_large(q, k, _tile_of(mask, tiles))
    chosen = choose(NAME, implementation, missing=why)
    grouped = q.reshape(*batch, q_len, kv_heads, heads // kv_heads, dim)
    settings = {
        "scale": 1 / math.sqrt(dim) if scale is None else scale,
        "precision": (precision or "3xtf32") if q.dtype == jnp.float32 else None,
    }
    if 0 in (rows, q_len, kv_len):
        out = jnp.zeros((*batch, q_len, heads, v_dim), v.dtype)
        lse = jnp.full((*batch, heads, q_len), -jnp.inf, wide)
    elif chosen == "cute":
        settings["deterministic"] = deterministic
        out, lse = _by_kernel(
            grouped, k, v, (mask, mask_captured), (score, score_captured), tiles, settings
        )
    else:
        captured = tuple(mask_captured), tuple(score_captured)
        out, lse = _by_reference(grouped, k, v, (mask, score), captured, settings)
    out = out.reshape(*batch, q_len, heads, v_dim)
    lse = lse.reshape(*batch, heads, q_len)
    if sink is not None:
        out = _with_sink(out, lse, sink)
    return (out, lse) if return_lse else out


def _by_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, programs, captured, settings
) -> tuple[jax.Array, jax.Array]:
    """Plain JAX: q is `... q n g d`, and so is the output; the LSE is `... n g q`."""
    *batch, q_len, kv_heads, group, _ = q.shape
    rows = math.prod(batch)
    mask, score = programs
    plan = _reference.Plan(
        mask=mask,
        score=score,
        scale=settings["scale"],
        wide=_reference.wide(q.dtype),
        batch=rows,
        kv_heads=kv_heads,
        group=group,
        q_len=q_len,
        kv_len=k.shape[-3],
        precision=_reference.PRECISIONS[settings["precision"]],
    )
    operands = _reference.Operands(
        jnp.moveaxis(q.reshape(rows, *q.shape[-4:]), 1, 3),
        jnp.swapaxes(k.reshape(rows, *k.shape[-3:]), 1, 2),
        jnp.swapaxes(v.reshape(rows, *v.shape[-3:]), 1, 2),
        *captured,
    )
    out, lse = _reference.attend(plan, operands)
    return jnp.moveaxis(out, 3, 1), lse


def _by_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, mask, score, tiles: TileMap | None, settings
) -> tuple[jax.Array, jax.Array]:
    """As `_by_reference`. The functions are pairs of a program and what it captures."""
    *batch, q_len, kv_heads, group, _ = q.shape
    lists = layout = None
    (mask_program, mask_captured), (score_program, score_captured) = mask, score
    mask_function, score_function, mask_arrays, score_arrays = None, None, (), ()
    met, alike = _tiles_met(k.shape[-3], None), True
    if mask_program is not None:
        # A mask has no derivative. Known values stay known, so that their tile map is a constant.
        mask_captured = [
            jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x for x in mask_captured
        ]
        mask_function, mask_arrays = compiled(mask_program, mask_captured)
        backward = None
        if tiles is None:
            depends = depends_on(mask_program.code)
            few = _sizing(q, k, math.inf, "h" not in depends).few
            # Tiles of few queries are whole ones of any.
            tile = MAP_TILE if few else _map_tile(q, v, score_program is not None)
            sizes = Sizes(q_len, k.shape[-3], math.prod(batch), kv_heads * group, tile)
            sizes = sizes._replace(depends=depends)
            made = mask_program, mask_captured
            pair = lists_of(*made, sizes, kernel=True, both=False)
            if tile != MAP_TILE:  # the backward kernels have others
                backward = MAP_TILE
                _, other = lists_of(*made, sizes._replace(tile=backward), kernel=True)
                pair = pair[0], other
        else:
            _check_tiles_of_kernel(tiles)
            sizes, pair = tiles, (tiles.forward, tiles.backward)
        layout = MapLayout((), "b" in sizes.depends, "h" in sizes.depends, sizes.tile, backward)
        met, alike = _tiles_met(k.shape[-3], pair[0], sizes.tile[1]), not layout.has_h
        lists = tuple(None if x is None else _arrays_of(x) for x in pair)
    if score_program is not None:
        score_function, score_arrays = compiled(score_program, score_captured)
    functions, arrays = Functions(mask_function, score_function), (mask_arrays, score_arrays)
    settings["sizing"] = _sizing(q, k, met, alike)
    return _attend.attend(q, k, v, functions, arrays, lists, layout, **settings)


def _sizing(q: jax.Array, k: jax.Array, met: float, alike: bool) -> _config.Sizing:
    """See `_config.sizing`. One for all sizes where they are symbolic, in an export, and where Hopper's kernels are not
    used: others do not look at it, and it is in their compile key."""
    *batch, q_len, kv_heads, group, _ = q.shape
    sizes = math.prod(batch) * kv_heads * group, q_len, k.shape[-3], group
    try:
        elsewhere = _arch.current() != _config.HOPPER
    except ArchitectureError:
        elsewhere = False  # it is only known when the call is lowered
    if elsewhere or q.dtype.itemsize != 2 or not all(isinstance(n, int) for n in sizes):
        return _config.Sizing()
    return _config.sizing(*sizes, met=met, alike=alike)


def _tiles_met(kv_len: Any, lists: TileLists | None, tile: int = MAP_TILE[1]) -> float:
    """How many tiles of `MAP_TILE` keys a tile of queries meets, on average. Where a map of tiles of so many keys is not
    made here, of a known mask, half of all are guessed: its values are on a device."""
    met = kv_len / MAP_TILE[1] if isinstance(kv_len, int) else math.inf
    if lists is None:
        return met
    if not isinstance(lists.full, np.ndarray):
        return met / 2
    found = lists.partial + lists.full
    return float(np.mean(found)) * tile / MAP_TILE[1] if found.size else 0.0


def _map_tile(q: jax.Array, v: jax.Array, scored: bool) -> tuple[int, int]:
    """Of a map that is made for one call."""
    try:
        architecture = _arch.current()
    except ArchitectureError:
        return MAP_TILE  # it is only known when the call is lowered, and any kernel takes these
    dim, v_dim = _attend.padded_dims(q, v)
    return _config.map_tile(architecture, dim, v_dim, q.dtype.name, scored=scored) or MAP_TILE


def _arrays_of(lists: TileLists) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x) for x in (lists.tiles, lists.partial, lists.full, lists.order))


def _missing(
    q: jax.Array, k: jax.Array, v: jax.Array, programs: Sequence[Program | None]
) -> str | None:
    """Why no kernel can serve a call, as a clause."""
    if q.dtype.name not in _attend.FLOATS:
        return f"its inputs are {q.dtype}, and the kernel takes {', '.join(_attend.FLOATS)}"
    for name, size in (("dim", q.shape[-1]), ("v_dim", v.shape[-1])):
        if size > LARGEST_DIM:
            return f"{name} is {size}, and the kernel takes up to {LARGEST_DIM}"
    for program in programs:
        why = None if program is None else program.missing(program.name)
        if why is not None:
            return why
    return None


def _tile_of(mask: Program | None, tiles: TileMap | None) -> tuple[int, int]:
    """Lengths are worked on in multiples of it: in whole tiles of a map, where there is one."""
    if mask is None:
        return _config.SMALLEST_TILE, _config.SMALLEST_TILE
    return MAP_TILE if tiles is None else tiles.tile


def _longest(q: jax.Array, k: jax.Array, tile: tuple[int, int]) -> int | None:
    """What no index in a kernel passes; None where lengths are symbolic, in an export."""
    lengths = q.shape[-3], k.shape[-3]
    if not all(isinstance(n, int) for n in lengths):
        return None
    return _config.grid_tiles(1, lengths, tile)[0] + MARGIN


def _too_large(q: jax.Array, k: jax.Array, tile: tuple[int, int]) -> str | None:
    *batch, q_len, heads, _ = q.shape
    sizes = [*batch, q_len, k.shape[-3], heads]
    if not all(isinstance(n, int) for n in sizes):
        return None  # symbolic, in an export
    longest, tiles = _config.grid_tiles(math.prod(batch) * heads, (q_len, k.shape[-3]), tile)
    if longest > LARGEST - MARGIN:
        return f"a length is {longest} in whole tiles, and the kernel counts to 2**31"
    if tiles > LARGEST:
        return (
            f"batch, heads and lengths make {tiles} tiles of {_config.SMALLEST_TILE}, and a GPU takes at most 2**31 - 1. "
            "Split the batch"
        )
    return None


def _with_sink(out: jax.Array, lse: jax.Array, sink: Any) -> jax.Array:
    """`out` is `... q_len heads v_dim`, `lse` is `... heads q_len`. An empty row has lse -inf, so its factor is 0."""
    sink = jnp.asarray(sink)
    heads = out.shape[-2]
    if not jnp.issubdtype(sink.dtype, jnp.floating):
        raise TypeError(f"{NAME}: sink must hold floats (logits), not {sink.dtype.name}.")
    if sink.shape not in ((), (heads,)):
        raise ValueError(
            f"{NAME}: sink must have shape () or (heads,) = ({heads},), but has {sink.shape}."
        )
    logits = sink.astype(lse.dtype)
    if sink.ndim:
        logits = logits[:, None]
        logits = logits.reshape((1,) * (lse.ndim - 2) + logits.shape)
    # Not -inf + inf where the sink, too, is -inf, which is no sink.
    gap = jnp.where(lse == -jnp.inf, -jnp.inf, lse - logits)
    factor = jnp.swapaxes(jax.nn.sigmoid(gap), -1, -2)
    return (out.astype(lse.dtype) * factor[..., None]).astype(out.dtype)


def check_precision(precision: Any) -> Precision | None:
    if precision is None or precision in get_args(Precision):
        return precision
    raise ValueError(
        f'{NAME}: precision={precision!r} is not known. Use "tf32", or "3xtf32" or None for about that of float32.'
    )


def check_function(name: str, fn: Any) -> None:
    if fn is None or (callable(fn) and not isinstance(fn, type)):
        return
    if isinstance(fn, type):
        raise TypeError(f"{NAME}: {name} is the class {fn.__name__}; make one: {fn.__name__}(...).")
    signature = "(b, h, q_idx, kv_idx)" if name == "mask_fn" else "(score, b, h, q_idx, kv_idx)"
    instead = (
        "For an array of booleans capture it: `lambda b, h, q_idx, kv_idx: mask[b, q_idx, kv_idx]`."
        if name == "mask_fn"
        else "For an array of biases use AdditiveBias(bias)."
    )
    raise TypeError(
        f"{NAME}: {name} must be a function of {signature} or None, not "
        f"{type(fn).__name__}. {instead}"
    )


def _check_tiles(tiles: Any, mask: Program | None, **sizes: int) -> None:
    if not isinstance(tiles, TileMap):
        raise TypeError(
            f"{NAME}: tiles must be a TileMap, as tile_map makes it, not {type(tiles).__name__}."
        )
    if mask is None:
        raise ValueError(f"{NAME}: tiles was given without mask_fn, which it says nothing without.")
    tiles.check(NAME, digest=mask.code.digest, **sizes)


def _check_tiles_of_kernel(tiles: TileMap) -> None:
    if any(n % KERNEL_TILE for n in tiles.tile):
        up = tuple(-(-n // KERNEL_TILE) * KERNEL_TILE for n in tiles.tile)
        raise ValueError(
            f"{NAME}: tiles has tiles of {tiles.tile}, and the kernel needs multiples of {KERNEL_TILE} queries and keys. Make "
            f'it with tile_map(..., tile={up}), or run plain JAX with implementation="xla".'
        )
    if tiles.forward.tiles.ndim != 4:
        raise ValueError(
            f"{NAME}: tiles has lists of shape {tiles.forward.tiles.shape}, made under jax.vmap, but this call is not "
            "mapped. Map it too, with the map as an argument."
        )


def check_scale(scale: Any) -> float | None:
    if scale is None:
        return None
    try:
        known = float(scale)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{NAME}: scale must be a number that is known at trace time, not "
            f"{type(scale).__name__}. Multiply a learned scale into q instead."
        ) from e
    if not math.isfinite(known):
        raise ValueError(f"{NAME}: scale must be finite, but is {known}.")
    return known


def _sizes(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[int, ...]:
    """The leading dims, then q_len, heads, dim, kv_len, kv_heads and v_dim."""
    wanted = {
        "q": (q, "*batch q_len heads dim"),
        "k": (k, "*batch kv_len kv_heads dim"),
        "v": (v, "*batch kv_len kv_heads v_dim"),
    }
    for name, (x, dims) in wanted.items():
        if x.ndim < 3:
            raise ValueError(
                f"{NAME}: {name} must have shape ({dims}), so at least 3 dims, but has {x.shape}."
            )
    for name, x in (("k", k), ("v", v)):
        if x.ndim != q.ndim:
            raise ValueError(
                f"{NAME}: q and {name} must have the same number of leading dims, but q has "
                f"{q.ndim - 3} (shape {q.shape}) and {name} has {x.ndim - 3} (shape {x.shape}). "
                "Use jax.vmap to share an argument over a batch."
            )
        for i, (a, b) in enumerate(zip(q.shape[:-3], x.shape[:-3], strict=True)):
            _tie(f"batch dim {i}", "q", a, name, b)
    _tie("dim", "q", q.shape[-1], "k", k.shape[-1])
    _tie("kv_len", "k", k.shape[-3], "v", v.shape[-3])
    _tie("kv_heads", "k", k.shape[-2], "v", v.shape[-2])
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if q.shape[-1] == 0 or heads == 0 or kv_heads == 0:
        raise ValueError(
            f"{NAME}: dim, heads and kv_heads must be at least 1, but q has shape {q.shape} and k "
            f"has shape {k.shape}."
        )
    if heads % kv_heads:
        raise ValueError(
            f"{NAME}: the number of query heads must be a multiple of the number of kv heads, but "
            f"q has {heads} heads and k and v have {kv_heads}."
        )
    return *q.shape, *k.shape[-3:-1], v.shape[-1]


def _tie(dim: str, a: str, size_a: int, b: str, size_b: int) -> None:
    if size_a != size_b:
        raise ValueError(
            f"{NAME}: {a} and {b} must agree in {dim}, but {a} has {size_a} and {b} has {size_b}."
        )


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    names = [x.dtype.name for x in (q, k, v)]
    if len(set(names)) > 1:
        raise TypeError(
            f"{NAME}: q, k and v must have one dtype, but q is {names[0]}, k is {names[1]} and v "
            f"is {names[2]}. Cast them: a silent promotion would run in the slowest of the three."
        )
    if names[0] not in DTYPES:
        raise TypeError(
            f"{NAME}: q, k and v must be one of {', '.join(DTYPES)}, but are {names[0]}."
        )
