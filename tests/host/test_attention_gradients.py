"""Values and derivatives of attention against dense attention, in float64 and at equal dtype."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    ComposedScore,
    DocumentMask,
    RelativeBias,
    SlidingWindowMask,
    SoftCap,
    _config,
    flex_attention,
)

from eqxcute.testing import assert_as_accurate


class Sizes(NamedTuple):
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int


class Case(NamedTuple):
    """`functions(captured)` gives mask_fn and score_fn."""

    why: str
    sizes: Sizes
    captured: tuple[tuple[str, tuple[int, ...]], ...]
    functions: Callable


def _plain(c):
    return None, None


def _causal_bias(c):
    return CausalMask(2), AdditiveBias(c["bias"])


def _table(c):
    mask = SlidingWindowMask(5, 3) & (lambda b, h, q_idx, kv_idx: (h != 1) | (kv_idx % 2 == 0))
    return mask, RelativeBias(c["table"]).then(SoftCap(3.0))


def _nonlinear(c):
    mask = ~DocumentMask(jnp.arange(11) // 4, jnp.arange(13) // 3)

    def score(s, b, h, q_idx, kv_idx):
        gate = jnp.exp(c["slopes"]).astype(s.dtype)[h]
        return jnp.tanh(s) * gate + (c["bias"][b, q_idx, kv_idx] * c["scalar"]).astype(s.dtype)

    return mask, score


CASES = (
    Case("no functions, one head, odd dims", Sizes(1, 11, 13, 1, 1, 5, 3), (), _plain),
    Case(
        "a bias per head, grouped",
        Sizes(2, 11, 13, 4, 2, 8, 8),
        (("bias", (4, 11, 13)),),
        _causal_bias,
    ),
    Case(
        "a clipped table, multi-query", Sizes(1, 11, 13, 3, 1, 4, 6), (("table", (3, 7)),), _table
    ),
    Case(
        "captured arrays that arithmetic mixes",
        Sizes(2, 11, 13, 2, 2, 4, 4),
        (("slopes", (2,)), ("bias", (2, 11, 13)), ("scalar", ())),
        _nonlinear,
    ),
)


def arrays(case, dtype):
    s = case.sizes
    shapes = {
        "q": (s.batch, s.q_len, s.heads, s.dim),
        "k": (s.batch, s.kv_len, s.kv_heads, s.dim),
        "v": (s.batch, s.kv_len, s.kv_heads, s.v_dim),
        **dict(case.captured),
    }
    inputs = {name: normal(shape, dtype) for name, shape in shapes.items()}
    weights = (
        normal((s.batch, s.q_len, s.heads, s.v_dim)),
        normal((s.batch, s.heads, s.q_len)),
    )
    return inputs, weights


def normal(shape, dtype="float32"):
    """By numpy, as JAX would compile for each shape."""
    values = np.random.default_rng(math.prod(shape)).normal(size=shape)
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


def loss(attention, case, inputs, weights):
    """A number that output and LSE both go into, and both of them."""
    mask_fn, score_fn = case.functions(inputs)
    out, lse = attention(inputs["q"], inputs["k"], inputs["v"], mask_fn, score_fn)
    seen = jnp.where(lse > -jnp.inf, lse, 0)
    total = sum(jnp.vdot(x.astype(w.dtype), w) for x, w in zip((out, seen), weights, strict=True))
    return total, (out, lse)


def derivatives(attention, case, inputs, weights):
    """Outputs, gradients of every input, and the output's tangents along cosines of the inputs."""

    @jax.jit
    def run(inputs, weights):
        fn = functools.partial(loss, attention, case, weights=weights)
        (_, outputs), grads = jax.value_and_grad(fn, has_aux=True)(inputs)
        _, tangents = jax.jvp(lambda x: fn(x)[1][0], (inputs,), (jax.tree.map(jnp.cos, inputs),))
        return outputs, grads, tangents

    return run(inputs, weights)


ours = functools.partial(flex_attention, return_lse=True)


@functools.cache
def expected(dense, case, dtype):
    """Dense attention in float64, and in `dtype`."""
    inputs, weights = arrays(case, dtype)
    peer = derivatives(dense, case, inputs, weights)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("float64"), (inputs, weights))
        return derivatives(dense, case, *wide), peer


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in CASES), (CASES[3], "bfloat16")],
    ids=lambda x: x.why.replace(" ", "-") if isinstance(x, Case) else x,
)
def test_as_accurate_as_dense(case, dtype, tiling, dense_attention):
    del tiling
    inputs, weights = arrays(case, dtype)
    got = derivatives(ours, case, inputs, weights)
    oracle, peer = expected(dense_attention, case, dtype)
    assert jax.tree.map(lambda g: g.dtype, got[1]) == jax.tree.map(lambda x: x.dtype, inputs)
    assert got[0][1].dtype == jnp.float32  # the LSE
    peer = jax.tree.map(lambda p, g: p.astype(g.dtype), peer, got)
    assert_as_accurate(got, oracle=oracle, peer=peer)


def test_second_derivatives_in_float64(tiling, dense_attention):
    """Reverse over forward over reverse: the rule for tangents is itself differentiable."""
    del tiling
    case = CASES[3]
    with jax.enable_x64(True):
        inputs, weights = arrays(case, "float64")
        weights = jax.tree.map(lambda w: w.astype("float64"), weights)

        def grad_of_hvp(attention):
            def hvp_norm(x):
                grad = jax.grad(lambda x: loss(attention, case, x, weights)[0])
                _, hvp = jax.jvp(grad, (x,), (jax.tree.map(jnp.cos, x),))
                return sum(jnp.vdot(h, h) for h in jax.tree.leaves(hvp))

            return jax.jit(jax.grad(hvp_norm))(inputs)

        got, want = jax.tree.map(np.asarray, (grad_of_hvp(ours), grad_of_hvp(dense_attention)))
    for name in inputs:
        assert got[name].dtype == jnp.float64
        largest = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], atol=1e-12 * largest, rtol=0)


def test_a_soft_cap_of_large_scores(dense_attention):
    """S02: scores of up to about 200 under a cap of 20, in bfloat16."""
    sizes = Sizes(1, 64, 64, 1, 1, 64, 64)
    case = Case("soft cap", sizes, (), lambda c: (None, ComposedScore(_loud, SoftCap(20.0))))
    got = derivatives(ours, case, *arrays(case, "bfloat16"))
    oracle, peer = expected(dense_attention, case, "bfloat16")
    peer = jax.tree.map(lambda p, g: p.astype(g.dtype), peer, got)
    assert_as_accurate(got, oracle=oracle, peer=peer)


def _loud(s, b, h, q_idx, kv_idx):
    return 50 * s


# Captured arrays


def qkv(length, heads=1, kv_heads=1, dim=8, batch=1):
    q = normal((batch, length, heads, dim))
    return q, normal((batch, length, kv_heads, dim)), normal((batch, length, kv_heads, dim))[::-1]


def test_masked_positions_read_nothing(tiling):
    """S03: a buffer one entry short, or with NaN just past its valid end, is as good as a clean
    one: in outputs, in gradients, and in its own gradient, whatever is computed from it."""
    del tiling
    q, k, v = qkv(20)
    clean = normal((20,)).at[19].set(0)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < 19) & (q_idx >= kv_idx)

    def attention(q, k, v, buffer):
        def score(s, b, h, q_idx, kv_idx):
            x = buffer[kv_idx]
            return s * x + jnp.exp(x) - jnp.log(jnp.abs(x))

        return flex_attention(q, k, v, mask, score)

    @jax.jit
    def run(*args):
        out, pull = jax.vjp(attention, *args)
        _, tangent = jax.jvp(lambda q: attention(q, *args[1:]), args[:1], (jnp.cos(q),))
        return out, pull(jnp.sin(out)), tangent

    want = run(q, k, v, clean)
    for buffer in (clean.at[19].set(jnp.nan), clean.at[19].set(jnp.inf)):
        jax.tree.map(np.testing.assert_array_equal, run(q, k, v, buffer), want)
    out, grads, _ = run(q, k, v, clean[:19])
    np.testing.assert_allclose(out, want[0], rtol=1e-6)
    np.testing.assert_allclose(grads[3], want[1][3][:19], rtol=1e-5, atol=1e-7)
    assert want[1][3][19] == 0
    assert bool((want[1][3][:19] != 0).all())


def test_a_score_that_is_not_a_number_where_masked(tiling):
    """No array is captured: the derivative in the score itself is NaN there."""
    del tiling
    q, k, v = qkv(12)

    def score(s, b, h, q_idx, kv_idx):
        return s * jnp.log((q_idx - kv_idx).astype(s.dtype))

    def loss(*args):
        return (flex_attention(*args, lambda b, h, q_idx, kv_idx: kv_idx < q_idx, score) ** 2).sum()

    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    assert bool(grads[0][0, 3:].any())


def test_padding_of_the_last_tile_is_silent(monkeypatch):
    """Scores of 200 overflow exp in the rows that pad the last tile, whose LSE is no LSE; those
    rows get no cotangent, and 0 times infinity must not reach the keys."""
    monkeypatch.setattr(_config, "LIMITS", {"cpu": _config.TileLimits(1, 8, 8)})
    q, k, v = qkv(11)
    fn = jax.grad(lambda *a: flex_attention(*a, None, lambda s, *_: s + 200).sum(), (0, 1, 2))
    assert all(bool(jnp.isfinite(g).all()) for g in jax.jit(fn)(q, k, v))


def test_an_index_that_leaves_the_table_where_masked(tiling):
    """S04: q_idx - kv_idx runs from -15 to 15, the table from 0 to 5; the mask keeps 0 to 5. JAX
    reads index -1 as the last entry, so its gradient would be wrong without the mask."""
    del tiling
    q, k, v = qkv(16, heads=2, kv_heads=2, batch=2)
    table = normal((2, 2, 16, 6))

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 6)

    def loss(table, pick):
        def score(s, b, h, q_idx, kv_idx):
            return s + table[b, h, q_idx, pick(q_idx - kv_idx)]

        return (flex_attention(q, k, v, mask, score) ** 2).sum()

    free = jax.jit(jax.grad(lambda t: loss(t, lambda i: i)))(table)
    clipped = jax.jit(jax.grad(lambda t: loss(t, lambda i: jnp.clip(i, 0, 5))))(table)
    np.testing.assert_array_equal(free, clipped)
    # Row i sees i + 1 distances.
    assert not bool(free[:, :, 0, 1:].any())
    assert bool((free[:, :, 5:, :] != 0).all())


@pytest.mark.parametrize("read", ["scalar", "per head", "whole array"])
def test_a_narrow_gradient_is_summed_wide(read, tiling):
    """S09: each of 2 x 300 rows shifts its LSE by 1, so the gradient is 600 for one number and
    300 a head; a bfloat16 sum of ones stops at 256."""
    del tiling
    q, k, v = qkv(300, heads=2)
    captured = jnp.ones(() if read == "scalar" else (2,), jnp.bfloat16)

    def total(c):
        def score(s, b, h, q_idx, kv_idx):
            if read == "scalar":
                return s + c
            return s + (c[h] if read == "per head" else (c * 1)[h])

        mask = SlidingWindowMask(3)
        return flex_attention(q, k, v, mask, score, return_lse=True)[1].sum()

    grad = jax.jit(jax.grad(total))(captured)
    assert grad.dtype == jnp.bfloat16
    want = jnp.full(captured.shape, 600 if read == "scalar" else 300, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.asarray(want, np.float32))


def test_captured_arrays_that_do_nothing():
    """S11: an unused array has gradient zero, integers none, and a float that only the mask
    reads zero too."""

    class Layer(eqx.Module):
        ids: jax.Array
        unused: jax.Array
        threshold: jax.Array

        def mask(self, b, h, q_idx, kv_idx):
            return (self.ids[q_idx] == self.ids[kv_idx]) & (kv_idx > self.threshold)

        def __call__(self, q, k, v):
            return flex_attention(q, k, v, self.mask, lambda s, b, h, i, j: s + self.ids[j])

    q, k, v = qkv(6)
    layer = Layer(jnp.asarray([0, 0, 1, 1, 2, 2]), jnp.ones(3), jnp.asarray(-1.0))

    @eqx.filter_jit
    def grads(layer, q):
        return eqx.filter_grad(lambda x: (x[0](x[1], k, v) ** 2).sum())((layer, q))

    got, dq = grads(layer, q)
    assert got.ids is None
    assert not bool(got.unused.any())
    assert got.threshold == 0
    assert bool(dq.any())
    # And asked for by hand, as JAX has it for integers.
    fn = jax.grad(
        lambda ids: Layer(ids, layer.unused, layer.threshold)(q, k, v).sum(), allow_int=True
    )
    assert jax.jit(fn)(layer.ids).dtype == jax.dtypes.float0


def test_frozen_arguments_cost_no_derivative():
    """Only what is asked for is differentiated: with q and k fixed, the backward pass is one
    product less for each."""
    q, k, v = qkv(8)

    def products(argnums):
        text = str(jax.make_jaxpr(jax.grad(lambda *a: flex_attention(*a).sum(), argnums))(q, k, v))
        return text.count("dot_general")

    assert products((0,)) < products((0, 1, 2))
    assert products((2,)) < products((0,))


@pytest.mark.parametrize("heads", [(12, 2), (28, 4), (96, 8), (7, 1)], ids=str)
def test_any_ratio_of_heads(heads):
    """H01: as with keys and values repeated; decoding, and a square."""
    q_heads, kv_heads = heads
    for q_len, kv_len in ((1, 4096), (100, 100)):
        q = normal((1, q_len, q_heads, 16))
        k, v = normal((1, kv_len, kv_heads, 16)), normal((1, kv_len, kv_heads, 16))[:, ::-1]
        got, repeated = jax.jit(
            lambda q, k, v: (
                flex_attention(q, k, v),
                jax.nn.dot_product_attention(
                    q, *(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
                ),
            )
        )(q, k, v)
        np.testing.assert_allclose(got, repeated, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 31, 512])
def test_any_head_dim(dim, dense_attention):
    """H05, H07: forward and backward."""
    case = Case("dim", Sizes(1, 5, 7, 2, 1, dim, max(1, dim // 2)), (), _plain)
    inputs, weights = arrays(case, "float32")
    got = derivatives(ours, case, inputs, weights)
    oracle, peer = expected(dense_attention, case, "float32")
    assert_as_accurate(got, oracle=oracle, peer=peer)


def test_keys_and_values_are_not_repeated():
    """Of a group of 48 heads, k is read by all from one copy: no array has heads x keys x dim."""
    q, k, v = jnp.ones((1, 4, 48, 16)), jnp.ones((1, 64, 1, 16)), jnp.ones((1, 64, 1, 16))
    jaxpr = jax.make_jaxpr(jax.grad(lambda *a: flex_attention(*a).sum(), (0, 1, 2)))(q, k, v)
    repeated = 48 * 64 * 16
    assert max(sizes_in(jaxpr.jaxpr)) < repeated


def sizes_in(jaxpr):
    """Entries of every array that a jaxpr makes, at any depth."""
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            yield v.aval.size
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)
