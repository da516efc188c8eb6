"""`MultiheadAttention` beside `equinox.nn.MultiheadAttention`, and what it has more."""

import functools
import inspect
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers import MultiheadAttention
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    SlidingWindowMask,
)

import eqxcute
from eqxcute import _fallback
from eqxcute.testing import assert_as_accurate

close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
)
Q, K = 6, 9
KEY = functools.partial(jr.key, impl="unsafe_rbg")  # which compiles fastest


@pytest.fixture
def said(monkeypatch):
    """The warning about dropout has been given already."""
    monkeypatch.setattr(_fallback, "_WARNED", {"MultiheadAttention dropout"})


def both(*args, seed=0, **kwargs):
    """Ours and Equinox's."""
    key = KEY(seed)
    ours = MultiheadAttention(*args, **kwargs, key=key)
    return ours, eqx.nn.MultiheadAttention(*args, **kwargs, key=key)


def inputs(layer, q_len=Q, kv_len=K, dtype="float32"):
    sizes = (q_len, layer.query_size), (kv_len, layer.key_size), (kv_len, layer.value_size)
    rng = np.random.default_rng(1)
    return [rng.normal(size=size).astype(jnp.dtype(dtype)) for size in sizes]


def mask_of(*shape):
    """Random, but each query sees key 0."""
    mask = np.random.default_rng(2).random(shape) < 0.5
    mask[..., 0] = True
    return mask


def rotary(q, k, v):
    turn = jax.vmap(eqx.nn.RotaryPositionalEmbedding(q.shape[-1]), in_axes=1, out_axes=1)
    return turn(q), turn(k), v


def with_mask_fn(layer, mask_fn):
    return eqx.tree_at(lambda m: m.mask_fn, layer, mask_fn, is_leaf=lambda x: x is None)


@eqx.filter_jit
def each(layers, *args, **kwargs):
    """What each layer gives. In one program, as compiling is what takes time here."""
    return [layer(*args, **kwargs) for layer in layers]


@eqx.filter_jit
def with_gradients(layers, xs, *args, **kwargs):
    """For each layer the output, and the gradients of its weights and of the inputs."""

    def loss(moving):
        layer, xs = moving
        out = layer(*xs, *args, **kwargs)
        # Weights that tell all entries apart.
        return (out * np.cos(np.arange(out.size)).reshape(out.shape)).sum(), out

    xs = [jnp.asarray(x) for x in xs]
    both = [eqx.filter_grad(loss, has_aux=True)((layer, xs)) for layer in layers]
    return [[out, *jax.tree.leaves(grads)] for grads, out in both]


# As Equinox


def test_signatures_are_equinox_s():
    """Everything of Equinox's, in its order and with its defaults; what is more is keyword only."""
    for name in ("__init__", "__call__"):
        ours, theirs = (
            inspect.signature(getattr(layer, name)).parameters
            for layer in (MultiheadAttention, eqx.nn.MultiheadAttention)
        )
        extra = [p for n, p in ours.items() if n not in theirs]
        assert [n for n in ours if n in theirs] == list(theirs)
        assert all(
            (ours[n].default, ours[n].kind) == (p.default, p.kind) for n, p in theirs.items()
        )
        assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in extra)


BIASED = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
CASES = {
    "sizes": ((2, 8, 5, 3, 7, 6, 5), BIASED, {"mask": (2, Q, K), "process_heads": rotary}),
    "sizes left over": (
        (3, 10, 8, None, 8, None, 2, True),
        {"use_output_bias": True, "dropout_p": 0.5, "inference": True},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_as_equinox(case):
    """The same weights for the same key, the same outputs, the same gradients."""
    args, kwargs, call = CASES[case]
    ours, theirs = both(*args, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs))
    static = [n for n, x in vars(theirs).items() if isinstance(x, int)]
    assert len(static) == 11
    assert [getattr(ours, n) for n in static] == [getattr(theirs, n) for n in static]
    if "mask" in call:
        call = {**call, "mask": mask_of(*call["mask"])}
    close(*with_gradients((ours, theirs), inputs(ours), **call))


@pytest.mark.usefixtures("said")
def test_dropout_as_equinox():
    """The same weights are dropped for the same key."""
    layers = both(2, 8, dropout_p=0.4, use_output_bias=True)
    xs, mask = inputs(layers[0]), mask_of(2, Q, K)
    (ours, theirs), (others, _) = (
        with_gradients(layers, xs, mask, key=KEY(i), process_heads=rotary) for i in (3, 4)
    )
    close(ours, theirs)
    assert not np.allclose(ours[0], others[0], atol=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("said")
def test_dropout_with_usual_keys():
    """Threefry, whose bits differ for each head. Not jitted: the two layers then share what compiles."""
    layers = both(2, 8, dropout_p=0.4)
    key = jr.wrap_key_data(np.arange(2, dtype=np.uint32), impl="threefry2x32")
    close(*(layer(*inputs(layer), key=key) for layer in layers))


@pytest.mark.usefixtures("said")
def test_dropout_under_vmap_as_equinox():
    """A batch, a key and a mask each."""
    layers = both(2, 8, dropout_p=0.4)
    xs = [np.stack([x, -x, 2 * x]) for x in inputs(layers[0])]
    keys = jr.wrap_key_data(np.arange(12, dtype=np.uint32).reshape(3, 4), impl="unsafe_rbg")
    run = jax.jit(jax.vmap(lambda xs, mask, key: each(layers, *xs, mask, key=key)))
    close(*run(xs, mask_of(3, 2, Q, K), keys))


@pytest.mark.parametrize(("dtype", "p"), [("bfloat16", 0.0), ("float16", 0.4)])
@pytest.mark.usefixtures("said")
def test_half_precision(dtype, p):
    """No further from float32 than Equinox in the same dtype."""
    layers = both(2, 8, dropout_p=p)
    xs, mask, key = inputs(layers[0], dtype=dtype), mask_of(Q, K), KEY(6)

    def cast(tree, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, tree)

    @jax.jit
    def run():
        narrow = cast(layers, dtype)
        wide = cast(narrow[1], "float32")
        outs = each(narrow, *xs, mask, key=key)
        return *outs, wide(*(x.astype("float32") for x in xs), mask, key=key)

    got, peer, oracle = run()
    assert got.dtype == peer.dtype == dtype
    assert_as_accurate(got, oracle=oracle, peer=peer)


def test_dtypes_promote_as_in_equinox():
    """Heads of two dtypes; and inputs narrower than the weights."""

    def widened(q, k, v):
        return q.astype("float32"), k.astype("float32"), v

    layers = both(2, 8)
    xs = inputs(layers[0], dtype="bfloat16")

    @jax.jit
    def run():
        narrow = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, layers)
        return each(layers, *xs), each(narrow, *xs, process_heads=widened)

    for got, want in run():
        assert got.dtype == want.dtype == "float32"
        close(got, want)


def test_files_move_between_the_layers(tmp_path):
    """Both ways; mask functions have no leaves in files, and modules with leaves come last."""
    ours, theirs = both(2, 8, use_key_bias=True, dropout_p=0.25)
    other, _ = both(2, 8, use_key_bias=True, seed=1)
    masked = with_mask_fn(other, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    eqx.tree_serialise_leaves(tmp_path / "theirs", theirs)
    for like in (other, masked):
        loaded = eqx.tree_deserialise_leaves(tmp_path / "theirs", like)
        assert eqx.tree_equal(loaded.key_proj, theirs.key_proj)
        assert eqx.tree_equal(loaded.output_proj, theirs.output_proj)
        assert loaded.dropout.p == 0.25
        assert loaded.mask_fn is like.mask_fn
    eqx.tree_serialise_leaves(tmp_path / "ours", ours)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "ours", theirs), theirs)
    masked = with_mask_fn(ours, CausalMask())
    assert jax.tree.leaves(masked) == [*jax.tree.leaves(ours), 0]


def test_projections_move_by_tree_at():
    ours, theirs = both(2, 8)
    other, _ = both(2, 8, seed=1)

    def parts(m):
        return m.query_proj, m.key_proj, m.value_proj, m.output_proj

    moved = eqx.tree_at(parts, other, parts(theirs))
    assert eqx.tree_equal(moved, ours)


# Dropout


def test_when_dropout_is_active():
    """As `eqx.nn.Dropout` decides: a key only where it is needed, an error where it is missing."""
    layer = MultiheadAttention(2, 8, dropout_p=0.4, key=KEY(0))
    xs = inputs(layer)
    with pytest.raises(RuntimeError, match=r"MultiheadAttention.*key=.*inference=True"):
        layer(*xs)
    with pytest.raises(RuntimeError, match=r"MultiheadAttention.*key="):
        eqx.nn.inference_mode(layer)(*xs, inference=False)
    with pytest.warns(UserWarning, match="deterministic") as caught:
        outs = jax.jit(
            lambda: [
                MultiheadAttention(2, 8, key=KEY(0))(*xs),
                eqx.nn.inference_mode(layer)(*xs),
                layer(*xs, inference=True, key=KEY(0)),
                layer(*xs, deterministic=True),
                eqx.tree_at(lambda m: m.dropout.p, layer, 0.0)(*xs, inference=False),
                eqx.tree_at(lambda m: m.dropout, layer, None)(*xs),
            ]
        )()
    assert caught[0].filename == __file__
    for out in outs[1:]:
        close(out, outs[0])


def test_dropout_says_once_what_it_holds(monkeypatch):
    """And nothing where plain JAX was asked for."""
    monkeypatch.setattr(_fallback, "_WARNED", set())
    meant = MultiheadAttention(2, 8, dropout_p=0.4, implementation="xla", key=KEY(0))
    layer = MultiheadAttention(2, 8, dropout_p=0.4, key=KEY(0))
    xs = inputs(layer)
    jax.eval_shape(lambda: meant(*xs, key=KEY(1)))
    jax.eval_shape(lambda: layer(*xs, inference=True))
    with pytest.warns(eqxcute.SlowPathWarning, match=f"Multihead.* 2 x {Q} x {K} ") as caught:
        jax.eval_shape(lambda: layer(*xs, key=KEY(1)))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda: layer(*xs, key=KEY(1)))


class DropNothing(eqx.Module):
    def __call__(self, x, *, key, inference):
        return x


@pytest.mark.usefixtures("said")
def test_the_path_of_dropout_is_the_same_attention():
    """Masks, scores with leaves, grouped heads, a scale, rows that see nothing, masked NaN: with a
    layer in place of dropout that drops nothing."""
    bias = np.random.default_rng(3).normal(size=(4, Q, K)).astype(np.float32)
    bias[:, 1, 0] = -np.inf  # the last key that row 1 sees
    factors = jnp.ones((Q, K)).at[0].set(jnp.nan)  # where the mask forbids

    def stretch(score, b, h, q_idx, kv_idx):
        return score * (h + 1) * factors[q_idx, kv_idx]

    fused = MultiheadAttention(
        4,
        8,
        mask_fn=lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) & (h + b != 3),
        score_fn=AdditiveBias(jnp.asarray(bias)).then(stretch),
        num_kv_heads=2,
        scale=0.7,
        use_output_bias=True,
        key=KEY(0),
    )
    explicit = eqx.tree_at(lambda m: m.dropout, fused, DropNothing())
    outs = with_gradients((fused, explicit), inputs(fused), mask_of(4, Q, K))
    close(*outs)
    close(outs[1][0][:2], np.stack([fused.output_proj.bias] * 2))


# What is more


def test_grouped_heads_are_repeated_heads():
    """Query head h reads kv head h // (heads // kv_heads)."""
    grouped = MultiheadAttention(4, 8, num_kv_heads=2, use_value_bias=True, key=KEY(0))
    full = MultiheadAttention(4, 8, use_value_bias=True, key=KEY(0))

    def repeat(x):
        heads = x.reshape(2, -1, *x.shape[1:])
        return np.repeat(heads, 2, axis=0).reshape(-1, *x.shape[1:])

    def weights(m):
        return m.key_proj.weight, m.value_proj.weight, m.value_proj.bias

    full = eqx.tree_at(weights, full, [repeat(np.asarray(x)) for x in weights(grouped)])
    assert grouped.key_proj.weight.shape == (4, 8)
    close(*each((grouped, full), *inputs(grouped), mask_of(4, Q, K)))


def by_hand(layer, xs, mask, scale=0.5, bias=0):
    """Two heads of four channels. Rows that see nothing give 0."""
    q, k, v = (
        (x @ proj.weight.T).reshape(len(x), 2, 4)
        for proj, x in zip((layer.query_proj, layer.key_proj, layer.value_proj), xs, strict=True)
    )
    e = jnp.where(mask, jnp.exp(scale * jnp.einsum("qhd,khd->hqk", q, k) + bias), 0)
    total = e.sum(-1, keepdims=True)
    p = e / jnp.where(total == 0, 1, total)
    return jnp.einsum("hqk,khd->qhd", p, v).reshape(-1, 8) @ layer.output_proj.weight.T


def test_masks_combine():
    """`mask`, array or function, and `mask_fn`: both must allow. `h` is the query head."""
    table = mask_of(2, Q, K)
    window = SlidingWindowMask(3, 1)

    def second_head_sees_all(b, h, q_idx, kv_idx):
        return (h == 1) | (kv_idx <= q_idx)

    i, j = np.arange(Q)[:, None], np.arange(K)
    banded = (j - i >= -3) & (j - i <= 1)
    by_head = np.stack([j <= i, np.ones((Q, K), bool)])
    ours = MultiheadAttention(2, 8, key=KEY(0))
    xs = inputs(ours)
    cases = [
        (window, None, banded),
        (window, table, banded & table),
        (window, second_head_sees_all, banded & by_head),
        (second_head_sees_all, table[0], by_head & table[0]),
    ]
    got = jax.jit(lambda: [with_mask_fn(ours, fn)(*xs, mask) for fn, mask, _ in cases])()
    close(got, jax.jit(lambda: [by_hand(ours, xs, want) for *_, want in cases])())


def test_a_batch_with_a_mask_each():
    """vmap over inputs, and over the arrays of a mask that is given to the call."""
    layer = MultiheadAttention(2, 8, mask_fn=CausalMask(), num_kv_heads=1, key=KEY(0))
    x = np.random.default_rng(4).normal(size=(3, Q, 8)).astype(np.float32)
    ids = np.asarray([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 1]])

    def one(x, ids):
        return layer(x, x, x, DocumentMask(ids))

    alone = jax.jit(one)
    want = [alone(*example) for example in zip(x, ids, strict=True)]
    close(list(jax.jit(jax.vmap(one))(x, ids)), want)
    tables = ids[:, :, None] == ids[:, None, :]
    close(list(jax.jit(jax.vmap(lambda x, mask: layer(x, x, x, mask)))(x, tables)), want)


def test_scores_scale_and_their_gradients():
    """`score_fn` is a part of the layer, and its arrays train."""
    bias = jnp.asarray(np.random.default_rng(5).normal(size=(2, Q, K)).astype(np.float32))
    layer = MultiheadAttention(2, 8, score_fn=AdditiveBias(bias), scale=0.3, key=KEY(0))
    xs = inputs(layer)

    def by_parts(bias):
        out = by_hand(layer, xs, True, 0.3, bias)
        return out.sum(), out

    def ours(bias):
        out = eqx.tree_at(lambda m: m.score_fn.bias, layer, bias)(*xs)
        return out.sum(), out

    close(*jax.jit(lambda: [jax.grad(f, has_aux=True)(bias) for f in (ours, by_parts)])())


def test_a_query_that_sees_nothing_gives_the_output_bias():
    """Not Equinox's mean over what the mask forbids."""
    layers = both(2, 8, use_output_bias=True)
    mask = mask_of(Q, K)
    mask[2] = False
    ours, theirs = with_gradients(layers, inputs(layers[0]), mask)
    close(ours[0][2], layers[0].output_proj.bias)
    others = np.delete(np.arange(Q), 2)
    close(ours[0][others], theirs[0][others])
    assert all(np.isfinite(x).all() for x in ours)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_queries_and_no_keys(p):
    layer = MultiheadAttention(2, 8, dropout_p=p, use_output_bias=True, key=KEY(0))
    no_queries, no_keys = inputs(layer, q_len=0), inputs(layer, kv_len=0)
    outs = jax.jit(lambda: [layer(*xs, key=KEY(1)) for xs in (no_queries, no_keys)])()
    assert outs[0].shape == (0, 8)
    close(outs[1], np.stack([layer.output_proj.bias] * Q))


# Errors


def make(*args, **kwargs):
    return lambda: MultiheadAttention(*args, **kwargs, key=KEY(0))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (make(4, 8, num_kv_heads=3), ValueError, ["num_heads", "4", "num_kv_heads", "3"]),
        (make(4, 8, num_kv_heads=0), ValueError, ["num_kv_heads", "at least 1", "0"]),
        (make(0, 8), ValueError, ["num_heads", "at least 1"]),
        (make(2.0, 8), TypeError, ["num_heads", "int", "float"]),
        (make(9, 8), ValueError, ["qk_size", "at least 1"]),
        (make(2, 8, vo_size=0), ValueError, ["vo_size", "at least 1"]),
        (make(2, 8, mask_fn=CausalMask), TypeError, ["mask_fn", "CausalMask"]),
        (make(2, 8, mask_fn=np.ones((2, 2), bool)), TypeError, ["mask_fn", "function"]),
        (make(2, 8, score_fn=1.0), TypeError, ["score_fn", "float"]),
        (make(2, 8, scale="big"), TypeError, ["scale", "str"]),
        (make(2, 8, implementation="cuda"), ValueError, ["implementation", "'cuda'"]),
        (make(2, 8, implementation="cute"), NotImplementedError, ["cute"]),
    ],
)
def test_constructor_errors(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def changed(place, new):
    """The layer's inputs, but for one."""
    return lambda xs: [new if i == place else x for i, x in enumerate(xs)]


@pytest.mark.parametrize(
    ("change", "call", "error", "words"),
    [
        (changed(0, np.ones((Q, 7))), {}, ValueError, ["query", "(length, 8)", "(6, 7)"]),
        (changed(1, np.ones(5)), {}, ValueError, ["key_", "(length, 5)", "(5,)"]),
        (changed(2, np.ones((2, K, 3))), {}, ValueError, ["value", "(2, 9, 3)", "jax.vmap"]),
        (changed(2, np.ones((4, 3))), {}, ValueError, ["key_", "value", "9", "4"]),
        (list, {"mask": mask_of(K, Q)}, ValueError, ["mask", "(6, 9)", "(2, 6, 9)", "(9, 6)"]),
        (list, {"mask": mask_of(1, Q, K)}, ValueError, ["mask", "(2, 6, 9)", "(1, 6, 9)"]),
        (
            list,
            {"mask": np.ones((Q, K), np.float32)},
            TypeError,
            ["mask", "bools", "float32", "score_fn"],
        ),
        (list, {"mask": DocumentMask(jnp.zeros(K, jnp.int32))}, ValueError, ["q_ids", "9", "6"]),
        (list, {"mask": CausalMask}, TypeError, ["mask", "CausalMask(...)"]),
        (list, {"mask": lambda b, h, i, j: j * 1.0}, TypeError, ["mask_fn", "bool", "float32"]),
        (
            list,
            {"process_heads": lambda q, k, v: (q, k[:, :, :2], v)},
            ValueError,
            ["process_heads", "key", "(9, 2, 2)", "(9, 2, 4)"],
        ),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.5], ids=["flex", "dropout"])
@pytest.mark.usefixtures("said")
def test_call_errors(change, call, error, words, p):
    layer = MultiheadAttention(2, 8, 5, 3, dropout_p=p, key=KEY(0))
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda xs: layer(*xs, key=KEY(1), **call), change(inputs(layer)))
    assert all(word in str(caught.value) for word in words), caught.value


def test_cute_cannot_drop():
    layer = MultiheadAttention(2, 8, dropout_p=0.5, key=KEY(0))
    object.__setattr__(layer, "implementation", "cute")  # which a CPU refuses to make
    with pytest.raises(NotImplementedError, match=r"MultiheadAttention.*cute.*inference=True"):
        layer(*inputs(layer), key=KEY(1))
