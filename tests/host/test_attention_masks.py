"""Each mask and score module against its formula, position by position."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers.attention import (
    AdditiveBias,
    ALiBi,
    CausalMask,
    ChunkedMask,
    ComposedScore,
    DilatedMask,
    DocumentMask,
    FlexAttention,
    FullMask,
    PaddingMask,
    PrefixLMMask,
    RelativeBias,
    SlidingWindowMask,
    SoftCap,
    _functions,
    alibi_slopes,
    flex_attention,
)

BATCH, HEADS, Q, K = 2, 3, 7, 9
IDS = np.asarray([[0, 0, 1, 1, 1, 3, 3], [5, 2, 2, 5, 5, 2, 0]])
KV_IDS = np.asarray([[0, 0, 0, 1, 1, 1, 3, 4, 3], [5, 2, 2, 5, 5, 2, 0, 0, 5]])

MASKS = {
    "full": (FullMask(), lambda b, h, i, j: True),
    "causal": (CausalMask(), lambda b, h, i, j: j <= i),
    "causal, bottom-right": (CausalMask.bottom_right(Q, K), lambda b, h, i, j: j <= i + K - Q),
    "causal, offset per entry": (
        CausalMask(jnp.asarray([0, 3])),
        lambda b, h, i, j: j <= i + (0, 3)[b],
    ),
    "window": (SlidingWindowMask(2), lambda b, h, i, j: 0 <= i - j <= 2),
    "window, both sides": (SlidingWindowMask(2, 1), lambda b, h, i, j: -1 <= i - j <= 2),
    "window, open left": (SlidingWindowMask(None, 1), lambda b, h, i, j: j - i <= 1),
    "window, open right": (SlidingWindowMask(1, None), lambda b, h, i, j: i - j <= 1),
    "window, offset": (SlidingWindowMask(2, offset=2), lambda b, h, i, j: 0 <= i + 2 - j <= 2),
    "documents": (
        DocumentMask(jnp.asarray(IDS), jnp.asarray(KV_IDS)),
        lambda b, h, i, j: IDS[b, i] == KV_IDS[b, j],
    ),
    "documents, one row": (
        DocumentMask(jnp.asarray(IDS[1]), jnp.asarray(KV_IDS[1])),
        lambda b, h, i, j: IDS[1, i] == KV_IDS[1, j],
    ),
    "prefix": (PrefixLMMask(3), lambda b, h, i, j: j < 3 or j <= i),
    "prefix per entry": (
        PrefixLMMask(jnp.asarray([1, 4])),
        lambda b, h, i, j: j < (1, 4)[b] or j <= i,
    ),
    "chunks": (ChunkedMask(3), lambda b, h, i, j: i // 3 == j // 3),
    "dilated": (DilatedMask(3), lambda b, h, i, j: (i - j) % 3 == 0),
    "padding": (PaddingMask(jnp.asarray([4, 9])), lambda b, h, i, j: j < (4, 9)[b]),
    "padding, queries too": (
        PaddingMask(jnp.asarray([4, 9]), jnp.asarray([5, 2])),
        lambda b, h, i, j: j < (4, 9)[b] and i < (5, 2)[b],
    ),
    "and": (
        CausalMask() & DilatedMask(2) & PaddingMask(5),
        lambda b, h, i, j: j <= i and (i - j) % 2 == 0 and j < 5,
    ),
    "or, not": (
        CausalMask() | ~ChunkedMask(4),
        lambda b, h, i, j: j <= i or i // 4 != j // 4,
    ),
    "with functions on both sides": (
        (lambda b, h, i, j: h > 0) & (CausalMask() | (lambda b, h, i, j: j == 8)),
        lambda b, h, i, j: h > 0 and (j <= i or j == 8),
    ),
    "function first, or": (
        (lambda b, h, i, j: j == 8) | CausalMask(),
        lambda b, h, i, j: j <= i or j == 8,
    ),
}


def whole(mask):
    """The mask over all positions, as attention evaluates it, before sizes of 1 are spread."""
    program, captured = _functions.trace_mask(mask)
    block = _functions.Block(
        jnp.arange(BATCH), jnp.arange(HEADS).reshape(HEADS, 1), jnp.arange(Q), jnp.arange(K)
    )
    return _functions.mask_block(program, program.environment(captured), block)


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    mask, formula = MASKS[name]
    got = np.broadcast_to(whole(mask), (BATCH, HEADS, 1, Q, K))[:, :, 0]
    for b, h, i, j in np.ndindex(BATCH, HEADS, Q, K):
        assert got[b, h, i, j] == formula(b, h, i, j), (b, h, i, j)


def test_a_mask_is_held_once_for_all_that_it_ignores():
    """B11: one copy for all heads, and for all batch entries."""
    assert whole(CausalMask()).shape == (1, 1, 1, Q, K)
    assert whole(PaddingMask(jnp.asarray([4, 9]))).shape == (BATCH, 1, 1, 1, K)
    assert whole(FullMask()).shape == (1, 1, 1, 1, 1)
    per_head = whole(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 2 * h)
    assert per_head.shape == (1, HEADS, 1, Q, K)


SLOPES = np.asarray([0.5, 0.25, 0.125], np.float32)
TABLE = np.arange(15, dtype=np.float32).reshape(HEADS, 5) / 7
BIAS = np.arange(BATCH * HEADS * Q * K, dtype=np.float32).reshape(BATCH, HEADS, Q, K) / 50

SCORES = {
    "soft cap": (SoftCap(1.5), lambda s, b, h, i, j: 1.5 * np.tanh(s / 1.5)),
    "alibi": (ALiBi(slopes=jnp.asarray(SLOPES)), lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j)),
    "alibi, fixed slopes": (
        ALiBi(HEADS, offset=2),
        lambda s, b, h, i, j: s - 2.0 ** (-4, -8, -2)[h] * abs(i + 2 - j),
    ),
    "relative": (
        RelativeBias(jnp.asarray(TABLE)),
        lambda s, b, h, i, j: s + TABLE[h, min(max(j - i, -2), 2) + 2],
    ),
    "bias, rank 4": (AdditiveBias(jnp.asarray(BIAS)), lambda s, b, h, i, j: s + BIAS[b, h, i, j]),
    "bias, rank 3": (
        AdditiveBias(jnp.asarray(BIAS[1])),
        lambda s, b, h, i, j: s + BIAS[1, h, i, j],
    ),
    "bias, rank 2": (
        AdditiveBias(jnp.asarray(BIAS[1, 2])),
        lambda s, b, h, i, j: s + BIAS[1, 2, i, j],
    ),
    "bias, sizes of 1": (
        AdditiveBias(jnp.asarray(BIAS[:, :1, :1])),
        lambda s, b, h, i, j: s + BIAS[b, 0, 0, j],
    ),
    "composed": (
        ALiBi(slopes=jnp.asarray(SLOPES)).then(lambda s, b, h, q_idx, kv_idx: 2 * s),
        lambda s, b, h, i, j: 2 * (s - SLOPES[h] * abs(i - j)),
    ),
    "composed with a function first": (
        ComposedScore(lambda s, b, h, q_idx, kv_idx: 2 * s, ALiBi(slopes=jnp.asarray(SLOPES))),
        lambda s, b, h, i, j: 2 * s - SLOPES[h] * abs(i - j),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_score(name):
    fn, formula = SCORES[name]
    scores = np.random.default_rng(0).normal(size=(BATCH, HEADS, 1, Q, K)).astype(np.float32)
    program, captured = _functions.trace_score(fn, jnp.float32)
    block = _functions.Block(
        jnp.arange(BATCH), jnp.arange(HEADS).reshape(HEADS, 1), jnp.arange(Q), jnp.arange(K)
    )
    outside = program.environment(captured)
    got = _functions.score_block(program, outside, jnp.asarray(scores), block)[:, :, 0]
    for b, h, i, j in np.ndindex(BATCH, HEADS, Q, K):
        want = formula(scores[b, h, 0, i, j], b, h, i, j)
        np.testing.assert_allclose(got[b, h, i, j], want, rtol=1e-5, atol=1e-6)


def test_alibi_slopes_of_the_paper():
    """Press et al.: for 8 heads 1/2, 1/4, ..., 1/256. Between powers of two, odd steps follow."""
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9), rtol=1e-7)
    sixteen = 0.5 ** (np.arange(1, 17) / 2)
    np.testing.assert_allclose(alibi_slopes(16), sixteen, rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(12)[8:], sixteen[[0, 2, 4, 6]], rtol=1e-6)
    assert alibi_slopes(1).shape == (1,)


def test_arrays_are_leaves_and_sizes_are_not():
    """Ids, tables and lengths may change without a new trace; windows and caps make a new one."""

    def arrays(module):
        return [x.shape for x in jax.tree.leaves(eqx.filter(module, eqx.is_array))]

    assert arrays(DocumentMask(jnp.asarray(IDS)) & SlidingWindowMask(3)) == [IDS.shape]
    assert arrays(RelativeBias(jnp.asarray(TABLE)).then(SoftCap(3.0))) == [TABLE.shape]
    assert arrays(ALiBi(8)) == []
    assert arrays(ALiBi(slopes=jnp.asarray(SLOPES))) == [SLOPES.shape]
    assert arrays(CausalMask()) == []
    assert jax.tree.leaves(SlidingWindowMask(3) & ChunkedMask(2)) == [0]  # the offset


def test_training_reaches_arrays_in_the_layer():
    """Gradients of tables, biases and sinks through `eqx.filter_grad` of the layer."""
    layer = FlexAttention(
        CausalMask() & DocumentMask(jnp.asarray([0, 0, 0, 1, 1])),
        RelativeBias(jnp.zeros((2, 5))).then(AdditiveBias(jnp.zeros((2, 5, 5), jnp.bfloat16))),
        sink=jnp.zeros(2),
    )
    q = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32))
    grads = eqx.filter_jit(eqx.filter_grad(lambda layer: (layer(q, q, q) ** 2).sum()))(layer)
    table, bias = (part for part in grads.score_fn.parts)
    assert bool((table.table[:, :3] != 0).all())
    assert not bool(table.table[:, 3:].any())  # keys after the query are masked
    assert bias.bias.dtype == jnp.bfloat16
    assert bool((grads.sink != 0).all())
    assert grads.mask_fn.second.q_ids is None


@pytest.mark.parametrize("name", ["documents", "with functions on both sides"])
def test_strict_promotion(name):
    """Neither dtypes nor ranks are promoted behind the user's back."""
    q = jnp.ones((BATCH, Q, HEADS, 4), jnp.bfloat16)
    k = jnp.ones((BATCH, K, HEADS, 4), jnp.bfloat16)
    scores = [fn for fn, _ in SCORES.values()]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for score in [ComposedScore(*scores), AdditiveBias(jnp.asarray(BIAS, jnp.bfloat16))]:

            def loss(q, k, score=score):
                out = flex_attention(
                    q, k, k, MASKS[name][0], score, sink=jnp.zeros(HEADS), return_lse=True
                )
                return out[0].astype(jnp.float32).sum()

            jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, k)
