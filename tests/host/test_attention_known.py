"""Attention on small inputs whose answer is known by hand, most of them from CASES.md.

With q = 0 all scores are equal, so that a row is the mean of the values it may see; with
v[j] = j those are small exact numbers.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers.attention import (
    CausalMask,
    DocumentMask,
    FlexAttention,
    PaddingMask,
    SlidingWindowMask,
    SoftCap,
    _config,
    flex_attention,
)

from eqxcute.testing import assert_as_accurate

both_tilings = pytest.mark.usefixtures("tiling")


def zeros_q(q_len, kv_len, dim=16, dtype="float32"):
    """q = 0, random keys, v[j] = j; one batch entry, one head."""
    k = np.random.default_rng(0).normal(size=(1, kv_len, 1, dim))
    v = np.broadcast_to(np.arange(kv_len)[None, :, None, None], k.shape)
    # By numpy, as JAX would compile for each shape.
    return [jnp.asarray(x.astype(jnp.dtype(dtype))) for x in (np.zeros((1, q_len, 1, dim)), k, v)]


def rows(out):
    """The first entry of each row of a single head, whose entries are all equal."""
    return np.asarray(out[0, :, 0, 0], np.float32)


def run(*args, **kwargs):
    """Jitted, with output and LSE."""
    arrays = args[:3]
    fn = jax.jit(lambda q, k, v: flex_attention(q, k, v, *args[3:], return_lse=True, **kwargs))
    return fn(*arrays)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def strict(b, h, q_idx, kv_idx):
    return kv_idx < q_idx


@both_tilings
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_sees_nothing(dtype):
    """M01, M02: 0, not NaN and not mean(v)."""
    q, k, v = zeros_q(4, 4, dtype=dtype)
    out, lse = run(q, k, v, strict)
    np.testing.assert_allclose(rows(out), [0, 0, 0.5, 1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [-np.inf, 0, np.log(2), np.log(3)], rtol=1e-6)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32


@both_tilings
def test_a_row_that_sees_nothing_has_no_gradient():
    """M01: row 0 gets none and gives none, whatever flows into it."""
    keys = jr.split(jr.key(1), 4)
    q, k, v, c = (jr.normal(key, (1, 4, 1, 16)) for key in keys)

    @jax.jit
    def grads(c):
        def loss(q, k, v):
            out, lse = flex_attention(q, k, v, strict, return_lse=True)
            return jnp.sum(out * c) + jnp.sum(
                jnp.where(lse > -jnp.inf, lse, 0) * jnp.swapaxes(c[..., 0], 1, 2)
            )

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    got, other = grads(c), grads(c.at[0, 0].set(1e6))
    assert all(bool(jnp.isfinite(g).all()) for g in got)
    assert not bool(got[0][0, 0].any())
    jax.tree.map(np.testing.assert_array_equal, got, other)
    assert bool(got[0][0, 2].any())


@both_tilings
def test_scores_of_minus_infinity_are_a_mask():
    """PyTorch users write masks as `where(allowed, score, -inf)`."""
    q, k, v = zeros_q(4, 4)

    def score(s, b, h, q_idx, kv_idx):
        return jnp.where(kv_idx < q_idx, s, -jnp.inf)

    out, lse = run(q, k, v, None, score)
    np.testing.assert_allclose(rows(out), [0, 0, 0.5, 1], atol=1e-6)
    assert lse[0, 0, 0] == -jnp.inf
    grad = jax.jit(jax.grad(lambda q: flex_attention(q, k, v, None, score).sum()))(q)
    assert bool(jnp.isfinite(grad).all())


@pytest.mark.parametrize("tile", [192, 80])
def test_softmax_is_shift_invariant(tile, monkeypatch, dense_attention):
    """M04: a padded last tile (80 does not divide 192), and rows whose LSE is far below 0."""
    monkeypatch.setattr(_config, "LIMITS", {"cpu": _config.TileLimits(1, tile, tile)})
    keys = jr.split(jr.key(2), 4)
    arrays = [jr.normal(key, (1, 192, 1, 64), jnp.bfloat16) for key in keys]

    def everything(attention, score_fn, q, k, v, c):
        def value(q, k, v):
            out, lse = attention(q, k, v, None, score_fn)
            return jnp.sum(out * c), (out, lse)

        (_, out), grads = jax.value_and_grad(value, (0, 1, 2), has_aux=True)(q, k, v)
        return *out, *grads

    def shift(s, b, h, q_idx, kv_idx):
        return s - 100

    ours = functools.partial(flex_attention, return_lse=True)
    dense = jax.jit(functools.partial(everything, dense_attention, None))
    out, lse, *grads = jax.jit(functools.partial(everything, ours, shift))(*arrays)
    plain_out, plain_lse, *plain_grads = dense(*arrays)
    with jax.enable_x64(True):
        exact_out, exact_lse, *exact_grads = dense(*(x.astype("float64") for x in arrays))
        exact_lse = exact_lse - 100
    assert_as_accurate(out, oracle=exact_out, peer=plain_out)
    assert_as_accurate(grads, oracle=exact_grads, peer=plain_grads)
    assert_as_accurate(lse, oracle=exact_lse, peer=plain_lse.astype("float32") - 100)


@both_tilings
@pytest.mark.parametrize("length", [1, 7, 8, 9, 31])
def test_causal_at_every_remainder(length):
    """M06: lengths around the tile's."""
    out, lse = run(*zeros_q(length, length), causal)
    np.testing.assert_allclose(rows(out), np.arange(length) / 2, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(np.arange(1, length + 1)), rtol=1e-6, atol=1e-6)


def test_one_query_and_many_keys():
    """M06."""
    out, lse = run(*zeros_q(1, 64))
    np.testing.assert_allclose(rows(out), [31.5], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [np.log(64)], rtol=1e-6)


def test_alignment_of_causal():
    """M07: top-left by default, bottom-right by offset, and the same function at other sizes."""
    q, k, v = zeros_q(4, 6)
    np.testing.assert_allclose(rows(run(q, k, v, CausalMask())[0]), [0, 0.5, 1, 1.5], atol=1e-6)
    bottom_right = [1, 1.5, 2, 2.5]
    for mask in (
        CausalMask.bottom_right(4, 6),
        CausalMask(offset=jnp.asarray(2)),
        lambda b, h, q_idx, kv_idx: q_idx + 2 >= kv_idx,
    ):
        np.testing.assert_allclose(rows(run(q, k, v, mask)[0]), bottom_right, atol=1e-6)

    layer = FlexAttention(CausalMask())
    for q_len, kv_len in ((4, 6), (2, 9)):
        q, k, v = zeros_q(q_len, kv_len)
        mask = CausalMask.bottom_right(q_len, kv_len)
        layer = eqx.tree_at(lambda x: x.mask_fn, layer, mask)
        want = (np.arange(q_len) + kv_len - q_len) / 2
        np.testing.assert_allclose(rows(eqx.filter_jit(layer)(q, k, v)), want, atol=1e-6)


def test_window_without_another_mask():
    """M09."""
    q, k, v = zeros_q(9, 9)
    np.testing.assert_allclose(rows(run(q, k, v, SlidingWindowMask(0))[0]), np.arange(9))
    want = [np.mean(np.arange(max(0, i - 5), min(9, i + 6))) for i in range(9)]
    np.testing.assert_allclose(rows(run(q, k, v, SlidingWindowMask(5, 5))[0]), want, rtol=1e-6)


def test_packed_documents():
    """M10."""
    q, k, v = zeros_q(5, 5)
    mask = CausalMask() & DocumentMask(jnp.asarray([0, 0, 1, 1, 1]))
    np.testing.assert_allclose(rows(run(q, k, v, mask)[0]), [0, 0.5, 2, 2.5, 3], atol=1e-6)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 4, 0), (2, 0, 4), (0, 4, 4), (0, 0, 0)])
def test_nothing_to_do(batch, q_len, kv_len):
    """M12: shapes, zeros, -inf, zero gradients."""
    q = jnp.ones((batch, q_len, 4, 64))
    k, v = jnp.ones((batch, kv_len, 2, 64)), jnp.ones((batch, kv_len, 2, 32))
    out, lse = run(q, k, v, causal, lambda s, b, h, q_idx, kv_idx: s + 1)
    assert out.shape == (batch, q_len, 4, 32)
    assert lse.shape == (batch, 4, q_len)
    assert not bool(out.any())
    assert bool((lse == -jnp.inf).all())
    grads = jax.grad(lambda *args: flex_attention(*args, causal).sum(), (0, 1, 2))(q, k, v)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert not any(bool(g.any()) for g in grads)


@both_tilings
def test_padding_per_batch_entry():
    """M13: as an explicit [batch, heads, q, kv] mask."""
    keys = jr.split(jr.key(3), 3)
    q, k, v = (jr.normal(key, (4, 32, 4, 16)) for key in keys)
    lengths = jnp.asarray([1, 17, 30, 31])
    table = jnp.broadcast_to(
        jnp.arange(32)[None, None, None, :] < lengths[:, None, None, None], (4, 4, 32, 32)
    )
    got = run(q, k, v, PaddingMask(lengths))
    want = run(q, k, v, lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    # Keys past the length change nothing.
    longer = run(q, k.at[0, 1:].set(7), v.at[0, 1:].set(7), PaddingMask(lengths))
    np.testing.assert_array_equal(longer[0][0], got[0][0])


def test_soft_cap():
    """S01: the scaled score is divided by the cap, and the tanh is multiplied by the cap."""
    q = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(10)
    k = jnp.zeros((1, 2, 1, 8)).at[0, 0, 0, 0].set(1)
    v = jnp.asarray([1.0, 0.0])[None, :, None, None]

    @jax.jit
    def value(q):
        return flex_attention(q, k, v, None, SoftCap(2.0), scale=1.0)[0, 0, 0, 0]

    out, dq = jax.value_and_grad(value)(q)
    p = 1 / (1 + np.exp(-2 * np.tanh(5)))
    np.testing.assert_allclose(out, 0.880778, atol=1e-6)
    np.testing.assert_allclose(out, p, rtol=1e-6)
    want = p * (1 - p) * (1 - np.tanh(5) ** 2)
    # In float32, 1 - tanh(5)^2 = 1.8e-4 is known to half an eps of 1: 3.3e-4 of itself.
    np.testing.assert_allclose(dq[0, 0, 0, 0], want, rtol=1e-3)


@both_tilings
def test_alibi_by_hand():
    """S19: sign and distance."""
    q, k, v = zeros_q(3, 3)

    def score(s, b, h, q_idx, kv_idx):
        return s - (q_idx - kv_idx)

    out, lse = run(q, k, v, causal, score)
    np.testing.assert_allclose(rows(out), [0, 0.731059, 1.575210], atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], [0, 0.313262, 0.407606], atol=1e-6)


def test_lse_is_the_natural_logarithm():
    """S12: ln 4, not 2."""
    _, lse = run(*zeros_q(1, 4))
    np.testing.assert_allclose(lse[0, 0], [1.386294], rtol=1e-6)


def test_sink():
    """S14: out * sigmoid(lse - sink); the LSE does not count the sink; both give gradients."""
    q, k, _ = zeros_q(1, 4)
    v = jnp.ones_like(k)

    @jax.jit
    def both(sink):
        out, lse = flex_attention(q, k, v, sink=sink, return_lse=True)
        return out[0, 0, 0, 0], lse[0, 0, 0]

    out, lse = both(jnp.zeros(1))
    np.testing.assert_allclose(out, 0.8, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)
    np.testing.assert_allclose(both(jnp.asarray(0.0))[0], 0.8, rtol=1e-6)
    # out = 4 / (4 + e^sink)
    grad = jax.grad(lambda s: both(s)[0] + 3 * both(s)[1])(jnp.zeros(1))
    np.testing.assert_allclose(grad, [-4 / 25], rtol=1e-5)
    # With the sink, the sum is that of five keys.
    np.testing.assert_allclose(jnp.logaddexp(lse, 0.0), np.log(5), rtol=1e-6)


def test_sink_of_a_row_that_sees_nothing():
    q, k, v = zeros_q(2, 2)

    def loss(sink, q):
        return flex_attention(q, k, v, strict, sink=sink).sum()

    # A sink of -inf is none.
    for sink in (jnp.ones(1), jnp.full(1, -jnp.inf)):
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(sink, q)
        assert bool(jnp.isfinite(value))
        assert all(bool(jnp.isfinite(g).all()) for g in grads)
        assert not bool(run(q, k, v, strict, sink=sink)[0][0, 0].any())


@both_tilings
def test_functions_get_the_query_head():
    """S15: head 5 is ordinary attention, every other is the mean of its kv head's values."""
    keys = jr.split(jr.key(4), 3)
    q = jr.normal(keys[0], (1, 6, 8, 16))
    k, v = (jr.normal(key, (1, 6, 2, 16)) for key in keys[1:])

    def score(s, b, h, q_idx, kv_idx):
        return jnp.where(h == 5, s, 0.0)

    out, _ = run(q, k, v, None, score)
    ordinary, _ = run(q, k, v)
    np.testing.assert_allclose(out[:, :, 5], ordinary[:, :, 5], rtol=1e-6)
    mean = jnp.repeat(v.mean(1), 4, axis=1)[:, None].repeat(6, 1)
    others = np.delete(np.arange(8), 5)
    np.testing.assert_allclose(out[:, :, others], mean[:, :, others], atol=1e-6)


def test_scores_beyond_float16():
    """H10: a raw score of 80 000 is above 65 504."""
    q = k = jnp.full((1, 8, 1, 64), 100, jnp.float16)
    v = jnp.broadcast_to(jnp.arange(8, dtype=jnp.float16)[None, :, None, None], k.shape)
    out, lse = run(q, k, v)
    np.testing.assert_allclose(rows(out), 3.5)
    np.testing.assert_allclose(lse, 80000 + np.log(8), rtol=1e-6)
    grads = jax.jit(jax.grad(lambda *a: flex_attention(*a).astype("float32").sum(), (0, 1, 2)))
    assert all(bool(jnp.isfinite(g).all()) for g in grads(q, k, v))


def test_sums_are_wider_than_bfloat16():
    """As G05: 1024 ones add up to 1024, where bfloat16 stops at 256."""
    q, k, _ = zeros_q(1, 1024, dtype="bfloat16")
    v = jnp.ones_like(k)
    out, lse = run(q, k, v)
    np.testing.assert_array_equal(rows(out), 1)
    np.testing.assert_allclose(lse, np.log(1024), rtol=1e-6)
    # The gradient of the LSE in a scale of all scores: the mean score of each of 1024 rows.
    q, k = jnp.ones((1, 1024, 1, 1), "bfloat16"), jnp.ones((1, 8, 1, 1), "bfloat16")

    def total(temperature):
        def score(s, b, h, q_idx, kv_idx):
            return s * temperature[0]

        return flex_attention(q, k, k, None, score, scale=1.0, return_lse=True)[1].sum()

    grad = jax.jit(jax.grad(total))(jnp.ones(1, "bfloat16"))
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [1024])


@both_tilings
def test_first_block_only():
    """B03: 64 blocks of keys, of which each query sees the first."""
    keys = jr.split(jr.key(5), 3)
    q, k, v = (jr.normal(key, (1, 64, 2, 16)) for key in keys)
    out, lse = run(q, k, v, lambda b, h, q_idx, kv_idx: kv_idx // 8 == 0)
    first, first_lse = run(q, k[:, :8], v[:, :8])
    np.testing.assert_allclose(out, first, atol=1e-6)
    np.testing.assert_allclose(lse, first_lse, atol=1e-6)


@both_tilings
def test_decoding_one_position():
    """B06: row 30 of the prefill, from one query and an offset."""
    keys = jr.split(jr.key(6), 3)
    q = jr.normal(keys[0], (4, 64, 4, 16))
    k, v = (jr.normal(key, (4, 64, 2, 16)) for key in keys[1:])
    full, _ = run(q, k, v, CausalMask() & SlidingWindowMask(11))
    at = jnp.asarray(30)

    @jax.jit
    def step(q, at):
        return flex_attention(q, k, v, CausalMask(at) & SlidingWindowMask(11, offset=at))

    one = step(jax.lax.dynamic_slice_in_dim(q, at, 1, axis=1), at)
    np.testing.assert_allclose(one[:, 0], full[:, 30], atol=1e-6)
    # Each batch entry at its own position.
    ats = jnp.asarray([30, 5, 63, 0])
    own = step(jnp.take_along_axis(q, ats[:, None, None, None], axis=1), ats)
    np.testing.assert_allclose(own[:, 0], full[jnp.arange(4), ats], atol=1e-6)


@both_tilings
def test_a_mask_from_a_table():
    """B12 and L04: a captured bool table; row i sees i + 1 keys, of which 8 have value 1."""
    length = 46
    table = jnp.tril(jnp.ones((1, length, length), bool))
    q, k, _ = zeros_q(length, length)
    v = jnp.broadcast_to((jnp.arange(length) < 8.0)[None, :, None, None], k.shape).astype(k.dtype)
    out, _ = run(q, k, v, lambda b, h, q_idx, kv_idx: table[b, q_idx, kv_idx])
    i = np.arange(length)
    np.testing.assert_allclose(rows(out), np.minimum(8, i + 1) / (i + 1), rtol=1e-6)


def test_the_last_keys_of_many():
    """L02 in spirit: every tile but the last is empty."""
    q, k, _ = zeros_q(3, 1000)
    v = jnp.broadcast_to((jnp.arange(1000) >= 1000 - 64)[None, :, None, None], k.shape)
    v = v.astype(k.dtype)
    out, lse = run(q, k, v, lambda b, h, q_idx, kv_idx: kv_idx >= 1000 - 64)
    np.testing.assert_allclose(rows(out), 1, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(64), rtol=1e-6)
