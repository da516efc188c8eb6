r"""Attention in plain JAX: the definition of the layer, and what runs where no kernel does.

    s_ij = score(scale * q_i . k_j),   -inf where the mask is False
    lse_i = log sum_j exp(s_ij),       out_i = sum_j exp(s_ij - lse_i) v_j

Computed tile by tile with a running maximum (Milakov and Gimelshein 2018; Rabe and Staats 2021),
so that memory grows with the length, not with its square.

The derivative is a rule for tangents, linear in them, that recomputes each tile's probabilities
p from `lse`:

    t_lse_i = sum_j p_ij t_s_ij
    t_out_i = sum_j p_ij (t_s_ij v_j + t_v_j) - out_i t_lse_i

JAX transposes it for reverse mode, and each tile stands under `jax.checkpoint`, so that what
reverse mode keeps is q, k, v, out and lse (and what the functions capture). The transpose of the
formula above is the backward pass of FlashAttention (Dao et al. 2022). As the rule is itself
plain JAX, forward mode, reverse mode and any nesting of them work.

Inside, axes are: b batch, n kv head, g query head within the kv head, q query, k key, d and e the
head dims of k and of v. Softmax statistics are float32 or wider, products of narrow inputs are
summed in float32, and probabilities are cast to v's dtype before they meet v, as in the kernels.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from eqxcute.inline import Program

from . import _config
from ._functions import Block, mask_block, score_block, score_block_guarded

# Of products of float32 numbers, by the names that users give; on a GPU these are what the names say.
PRECISIONS: Final[Mapping[str | None, Any]] = {
    None: None,
    "tf32": lax.Precision.DEFAULT,
    "3xtf32": lax.Precision.HIGHEST,
}


class Operands(NamedTuple):
    """Everything that is differentiated or batched."""

    q: Any  # b n g q d
    k: Any  # b n k d
    v: Any  # b n k e
    mask: tuple[Any, ...]  # what the mask captures; once prepared, what it reads
    score: tuple[Any, ...]  # likewise of the score
    rows: Any = None  # b: the functions' batch index; None for 0, 1, 2, ...
    heads: Any = None  # n g: their query head; None for 0, 1, 2, ...


class Outputs(NamedTuple):
    out: Any  # b n g q e
    lse: Any  # b n g q


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known at trace time."""

    mask: Program | None
    score: Program | None
    scale: float
    wide: Any  # dtype of scores and statistics
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    precision: Any = None  # of products, as JAX takes it
    # Of what the functions capture: which arrays there is one of for each batch entry, in front.
    mask_by_row: tuple[bool, ...] = ()
    score_by_row: tuple[bool, ...] = ()

    @property
    def tiles(self) -> tuple[int, int]:
        rows = self.batch * self.kv_heads * self.group
        return _config.tiles(rows, self.q_len, self.kv_len)


def wide(dtype: Any) -> Any:
    """float32, or `dtype` where that is wider."""
    return jnp.dtype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)


def attend(plan: Plan, operands: Operands) -> Outputs:
    """Output and log-sum-exp. All sizes are at least 1."""

    @jax.custom_jvp
    def run(operands: Operands) -> Outputs:
        return forward(plan, operands)

    def rule(primals, moves):
        (operands,), (dots,) = primals, moves
        outputs = run(operands)
        live = jax.tree.map(
            lambda t: None if isinstance(t, SymbolicZero) else t,
            dots,
            is_leaf=lambda t: isinstance(t, SymbolicZero),
        )
        return outputs, tangents(plan, operands, outputs, live)

    run.defjvp(rule, symbolic_zeros=True)
    return run(operands)


# Forward


class _Softmax(NamedTuple):
    """Softmax over the keys seen so far: maximum, sum and weighted values, not yet divided."""

    top: Any  # b n g q
    total: Any  # b n g q
    values: Any  # b n g q e


def forward(plan: Plan, operands: Operands) -> Outputs:
    """As `attend`, without its derivative."""
    tile_q, tile_k = plan.tiles
    operands = _prepared(plan, operands)
    k, v, k0 = _split(operands.k, tile_k), _split(operands.v, tile_k), _starts(plan.kv_len, tile_k)

    def queries(xs):
        q, q0 = xs

        def keys(ys):
            k, v, k0 = ys
            return _tile_softmax(plan, operands, q, k, v, q0, k0)

        state = _fold(_merge, _nothing, keys, (k, v, k0))
        return _finish(state, operands.v.dtype)

    tiles = _map(queries, (_split(operands.q, tile_q), _starts(plan.q_len, tile_q)))
    return Outputs(_join(tiles.out, plan.q_len, -2), _join(tiles.lse, plan.q_len, -1))


def _tile_softmax(plan, operands, q, k, v, q0, k0) -> _Softmax:
    block = _block(plan, operands, q.shape[-2], k.shape[-2], q0, k0)
    allowed = _allowed(plan, operands.mask, block)

    def compute(q, k, v):
        s = _dot(plan, q, k) * jnp.asarray(plan.scale, plan.wide)
        if plan.score is not None:
            s = score_block(plan.score, operands.score, s, block, plan.score_by_row)
        if allowed is not None:
            s = jnp.where(allowed, s, -jnp.inf)
        top = jnp.max(s, axis=-1)
        e = jnp.exp(s - _finite(top)[..., None])
        return _Softmax(top, jnp.sum(e, axis=-1), _weigh(plan, e.astype(v.dtype), v))

    return _unless_empty(plan, allowed, _nothing, compute, q, k, v)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    top = jnp.maximum(a.top, b.top)
    x, y = jnp.exp(a.top - _finite(top)), jnp.exp(b.top - _finite(top))
    values = a.values * x[..., None] + b.values * y[..., None]
    return _Softmax(top, a.total * x + b.total * y, values)


def _nothing(shapes: _Softmax) -> _Softmax:
    zero = _zeros(shapes)
    return zero._replace(top=jnp.full_like(zero.top, -jnp.inf))


def _finish(state: _Softmax, dtype: Any) -> Outputs:
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    out = (state.values / total[..., None]).astype(dtype)
    lse = jnp.where(empty, -jnp.inf, _finite(state.top) + jnp.log(total))
    return Outputs(out, lse)


def _finite(x: jax.Array) -> jax.Array:
    """-inf, the maximum of a row that sees nothing, becomes 0: -inf - -inf would be NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


# Derivative


class _Sums(NamedTuple):
    """Sums over keys of p and of p v, where p = exp(s - lse) for a fixed lse."""

    p: Any  # b n g q
    pv: Any  # b n g q e


def tangents(plan: Plan, operands: Operands, outputs: Outputs, dots: Operands) -> Outputs:
    """Tangents of the outputs. Leaves of `dots` are None where the tangent is known to be 0."""
    # The checkpoint keeps the padded and re-tiled copies made inside from being saved.
    push = jax.checkpoint(lambda *args: _tangents(plan, *args))
    return push(operands, outputs, dots)


def cotangents(
    plan: Plan, operands: Operands, outputs: Outputs, cts: Outputs, moving: Operands
) -> Operands:
    """Cotangents of the operands, from those of the outputs: the transpose of `tangents`.

    `moving` has an array wherever one is wanted, whose dtype it gets, and None elsewhere.
    """
    (found,) = jax.linear_transpose(lambda dots: tangents(plan, operands, outputs, dots), moving)(
        cts
    )
    return found


def _tangents(plan: Plan, operands: Operands, outputs: Outputs, dots: Operands) -> Outputs:
    # Wide from here on: the transposed program sums gradients over tiles in these arrays.
    operands = operands._replace(
        q=operands.q.astype(plan.wide),
        k=operands.k.astype(plan.wide),
        v=operands.v.astype(plan.wide),
    )
    dots = dots._replace(**{n: jax.tree.map(_widen, getattr(dots, n)) for n in ("q", "k", "v")})
    moving = jax.tree.map(
        lambda t, x: None if t is None else x, dots, operands, is_leaf=lambda t: t is None
    )

    def sums(moving):
        mixed = jax.tree.map(
            lambda m, x: x if m is None else m, moving, operands, is_leaf=lambda m: m is None
        )
        return _sums(plan, mixed, outputs.lse)

    # The rule is written as the tangent of a function and not by hand, since JAX 0.8 transposes
    # a scan only if its own rules have marked the scan's tangents.
    _, t = jax.jvp(sums, (moving,), (dots,))
    out = t.pv - outputs.out.astype(plan.wide) * t.p[..., None]
    return Outputs(out.astype(outputs.out.dtype), t.p)


def _sums(plan: Plan, operands: Operands, lse: jax.Array) -> _Sums:
    tile_q, tile_k = plan.tiles
    operands = _prepared(plan, operands, wide=True)
    kv = _split(operands.k, tile_k), _split(operands.v, tile_k), _starts(plan.kv_len, tile_k)

    # The outer checkpoint is for second derivatives, which would keep something of every tile.
    @jax.checkpoint
    def queries(xs):
        q, lse, q0 = xs

        @jax.checkpoint
        def keys(ys):
            k, v, k0 = ys
            return _tile_sums(plan, operands, q, k, v, lse, q0, k0)

        return _fold(_add, _zeros, keys, kv)

    xs = (
        _split(operands.q, tile_q),
        _split(lse[..., None], tile_q)[..., 0],
        _starts(plan.q_len, tile_q),
    )
    tiles = _map(queries, xs)
    return _Sums(_join(tiles.p, plan.q_len, -1), _join(tiles.pv, plan.q_len, -2))


def _tile_sums(plan, operands, q, k, v, lse, q0, k0) -> _Sums:
    block = _block(plan, operands, q.shape[-2], k.shape[-2], q0, k0)
    allowed = _allowed(plan, operands.mask, block)

    def compute(q, k, v, lse, captured):
        s = _dot(plan, q, k) * jnp.asarray(plan.scale, plan.wide)
        if plan.score is not None:
            s = score_block_guarded(plan.score, captured, s, block, allowed, plan.score_by_row)
        if allowed is not None:
            s = jnp.where(allowed, s, -jnp.inf)
        p = jnp.exp(s - _finite(lse)[..., None])
        return _Sums(jnp.sum(p, axis=-1), _weigh(plan, p, v))

    return _unless_empty(plan, allowed, _zeros, compute, q, k, v, lse, operands.score)


def _add(a: _Sums, b: _Sums) -> _Sums:
    return jax.tree.map(jnp.add, a, b)


def _zeros(shapes: Any) -> Any:
    def zeros(x):
        zero = jnp.zeros(x.shape, x.dtype)
        # Under an explicit mesh the type says how it is sharded; both ends of a loop have one type.
        spec = getattr(x.sharding, "spec", ()) if x.sharding is not None else ()
        return jax.sharding.reshard(zero, x.sharding) if any(spec) else zero

    return jax.tree.map(zeros, shapes)


def _widen(x: Any) -> Any:
    return x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


# Tiles


def _prepared(plan: Plan, operands: Operands, *, wide: bool = False) -> Operands:
    """What the functions compute from their captured arrays alone, once for all tiles.

    `wide`: gradients of what the score captures are summed in float32, whatever its dtype.
    """
    mask, score = operands.mask, operands.score
    if plan.mask is not None:
        mask = plan.mask.environment(mask)
    if plan.score is not None:
        score = plan.score.environment(score, wide=wide)
    return operands._replace(mask=mask, score=score)


def _block(plan: Plan, operands: Operands, tile_q: int, tile_k: int, q0, k0) -> Block:
    """Indices of a tile. Those of padding lie past the end; `_allowed` masks them."""
    rows, heads = operands.rows, operands.heads
    if rows is None:
        rows = jnp.arange(plan.batch, dtype=jnp.int32)
    if heads is None:
        heads = jnp.arange(plan.kv_heads * plan.group, dtype=jnp.int32)
        heads = heads.reshape(plan.kv_heads, plan.group)
    return Block(
        rows,
        heads,
        q0 + jnp.arange(tile_q, dtype=jnp.int32),
        k0 + jnp.arange(tile_k, dtype=jnp.int32),
    )


def _allowed(plan: Plan, captured: Sequence[Any], block: Block) -> jax.Array | None:
    """Which pairs count, axes b n g q k (size 1 where it does not vary); None for all.

    Padded queries count for nothing either: their scores may be anything, and in the backward
    pass 0 times infinity would reach the keys.
    """
    parts = []
    if plan.mask is not None:
        parts.append(mask_block(plan.mask, captured, block, plan.mask_by_row))
    if plan.q_len % block.q.shape[0]:
        parts.append((block.q < plan.q_len).reshape(1, 1, 1, -1, 1))
    if plan.kv_len % block.k.shape[0]:
        parts.append((block.k < plan.kv_len).reshape(1, 1, 1, 1, -1))
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _unless_empty(plan: Plan, allowed: Any, empty: Callable, compute: Callable, *args: Any) -> Any:
    """`compute(*args)`, which a tile that the mask empties goes without."""
    if plan.mask is None or plan.tiles == (plan.q_len, plan.kv_len):
        return compute(*args)
    shapes = jax.eval_shape(compute, *args)
    return lax.cond(jnp.any(allowed), compute, lambda *_: empty(shapes), *args)


def _dot(plan: Plan, q, k):
    """b n g q d, b n k d -> b n g q k. The group is folded into the rows: k is never repeated."""
    b, n, g, rows, d = q.shape
    s = jnp.einsum(
        "bnqd,bnkd->bnqk",
        q.reshape(b, n, g * rows, d),
        k,
        precision=plan.precision,
        preferred_element_type=plan.wide,
    )
    return s.reshape(b, n, g, rows, k.shape[-2])


def _weigh(plan: Plan, p, v):
    """b n g q k, b n k e -> b n g q e."""
    b, n, g, rows, keys = p.shape
    o = jnp.einsum(
        "bnqk,bnke->bnqe",
        p.reshape(b, n, g * rows, keys),
        v,
        precision=plan.precision,
        preferred_element_type=plan.wide,
    )
    return o.reshape(b, n, g, rows, v.shape[-1])


def _starts(length: int, tile: int) -> jax.Array:
    return jnp.arange(0, length, tile, dtype=jnp.int32)


def _split(x: Any, tile: int) -> Any:
    """Cut the second-to-last axis into tiles, zero-padded, tiles in front."""
    if x is None:
        return None
    *lead, length, dim = x.shape
    parts = -(-length // tile)
    if length % tile:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, parts * tile - length), (0, 0)])
    return jnp.moveaxis(x.reshape(*lead, parts, tile, dim), -3, 0)


def _join(tiles: jax.Array, length: int, axis: int) -> jax.Array:
    """Undo `_split`: `axis` is where the lengths go, counted from the end."""
    x = jnp.moveaxis(tiles, 0, axis - 1)
    at = x.ndim + axis
    x = x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])
    return lax.slice_in_dim(x, 0, length, axis=at - 1)


def _map(fn: Callable, xs: Any) -> Any:
    """`lax.map`, without the loop for one element."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return jax.tree.map(lambda y: y[None], fn(jax.tree.map(lambda x: x[0], xs)))
    return lax.map(fn, xs)


def _fold(combine: Callable, empty: Callable, fn: Callable, xs: Any) -> Any:
    """`fn` of every element, combined one by one: one element's result is held at a time.
    `empty` makes the neutral element from the shapes of a result."""
    first = jax.tree.map(lambda x: x[0], xs)
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return fn(first)
    start = empty(jax.eval_shape(fn, first))
    total, _ = lax.scan(lambda c, x: (combine(c, fn(x)), None), start, xs)
    return total
