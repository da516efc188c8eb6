"""Attention under JAX's transformations: vmap, forward and reverse mode, remat, jit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    FlexAttention,
    SlidingWindowMask,
    SoftCap,
    flex_attention,
)


def normal(*shape):
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return jnp.asarray(values.astype(np.float32))


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


def three(seed_shape):
    q = normal(*seed_shape)
    return q, q[..., ::-1] * 0.7, q[..., ::-1, :] + 0.1


def test_vmap_of_one_example(tiling):
    """J01: a batch by vmap is a batch given directly, and a Python loop; values and gradients."""
    del tiling
    layer = FlexAttention(CausalMask(), SoftCap(5.0))
    q, k, v = three((3, 10, 2, 4))
    one = jax.jit(lambda q, k, v: layer(q, k, v))
    want = jnp.stack([one(*x) for x in zip(q, k, v, strict=True)])

    def loss(q, k, v):
        return (layer(q, k, v) ** 2).sum()

    close(jax.jit(layer)(q, k, v), want)
    close(jax.jit(jax.vmap(layer))(q, k, v), want)
    direct = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    close(jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(q, k, v), direct)


def test_nested_vmap_and_shared_arguments():
    """J01: two leading dims, two vmaps, one of each; a key shared over the batch."""
    q, k, v = three((2, 3, 6, 2, 4))
    want = jax.jit(flex_attention)(q, k, v)
    for fn in (
        jax.vmap(flex_attention),
        jax.vmap(jax.vmap(flex_attention)),
        jax.vmap(flex_attention, in_axes=1, out_axes=1),
    ):
        close(jax.jit(fn)(q, k, v), want)
    shared = jax.jit(jax.vmap(flex_attention, in_axes=(0, None, None)))(q, k[0], v[0])
    close(shared, flex_attention(q, jnp.stack([k[0]] * 2), jnp.stack([v[0]] * 2)))


def test_vmap_of_captured_arrays(tiling):
    """Ids and biases of each example, mapped with it or shared; gradients of both kinds."""
    del tiling
    q, k, v = three((3, 10, 2, 4))
    ids = jnp.asarray([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3, [2] * 10])
    bias = normal(3, 2, 10, 10)

    def one(q, k, v, ids, bias, shared):
        mask, score = DocumentMask(ids), AdditiveBias(bias).then(AdditiveBias(shared))
        return (flex_attention(q, k, v, mask, score) ** 2).sum()

    grad = jax.value_and_grad(one, (0, 4, 5))
    shared = normal(1, 10)
    axes = (0, 0, 0, 0, 0, None)
    values, (dq, dbias, dshared) = jax.jit(jax.vmap(grad, axes))(q, k, v, ids, bias, shared)
    value, want = jax.jit(grad)(q, k, v, ids, bias[:, :, :, :], shared)
    close((values.sum(), dq, dbias, dshared.sum(0)), (value, *want))
    assert dshared.shape == (3, 1, 10)


def test_the_batch_index():
    """`b` counts the leading dims of q in row-major order; a vmapped dim is not among them."""
    q = jnp.zeros((2, 3, 4, 1, 2))
    v = jnp.broadcast_to(jnp.arange(4.0)[:, None, None], q.shape)

    def own(b, h, q_idx, kv_idx):
        return kv_idx == b % 4

    direct = jax.jit(lambda q, v: flex_attention(q, q, v, own))(q, v)
    np.testing.assert_allclose(direct[:, :, 0, 0, 0], [[0, 1, 2], [3, 0, 1]])
    mapped = jax.jit(jax.vmap(lambda q, v: flex_attention(q, q, v, own)))(q, v)
    np.testing.assert_allclose(mapped[:, :, 0, 0, 0], [[0, 1, 2], [0, 1, 2]])
    both = jax.jit(jax.vmap(jax.vmap(lambda q, v: flex_attention(q, q, v, own))))(q, v)
    np.testing.assert_allclose(both[:, :, 0, 0, 0], 0)


def test_forward_mode_and_hessian(tiling):
    """J04: jvp as a difference quotient, a Hessian both ways, linearize."""
    del tiling
    q, k, v = three((9, 1, 2))
    mask = SlidingWindowMask(3)

    def loss(q):
        return (flex_attention(q, k, v, mask) ** 2).sum()

    forward, reverse = jax.jit(
        lambda q: (jax.jacfwd(jax.jacrev(loss))(q), jax.jacrev(jax.jacfwd(loss))(q))
    )(q)
    close(forward, reverse)
    dot = jnp.cos(q)
    value, tangent = jax.jit(lambda q, t: jax.jvp(loss, (q,), (t,)))(q, dot)
    close(tangent, jnp.vdot(jax.jit(jax.grad(loss))(q), dot))
    linear_value, linear = jax.linearize(loss, q)
    close((linear_value, linear(dot)), (value, tangent))
    _, second = jax.jvp(jax.jit(jax.grad(loss)), (q,), (dot,))
    close(second, jnp.tensordot(forward, dot, 3))


def test_remat_and_scan():
    """Under `jax.checkpoint`, and in the scan over layers that models use."""
    q, k, v = three((6, 2, 4))
    layer = FlexAttention(CausalMask())

    def loss(fn):
        def step(x, _):
            return fn(x, k, v) + x, None

        return lambda q: (jax.lax.scan(step, q, length=3)[0] ** 2).sum()

    plain = jax.jit(jax.grad(loss(layer)))(q)
    close(jax.jit(jax.grad(loss(jax.checkpoint(layer))))(q), plain)


def test_without_jit():
    """Eagerly the answer is the same."""
    q, k, v = three((5, 2, 4))
    grads = jax.grad(lambda *a: flex_attention(*a, CausalMask()).sum(), (0, 1, 2))
    close(grads(q, k, v), jax.jit(grads)(q, k, v))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_traces():
    """K07: the layer made anew with the same function, or a mask with other arrays, traces once;
    a lambda made anew is a new function, and so is another window."""
    q = jnp.ones((4, 1, 2))
    traces = []

    @eqx.filter_jit
    def run(layer, q):
        traces.append(layer)
        return layer(q, q, q)

    def count(*masks):
        traces.clear()
        for mask in masks:
            run(FlexAttention(mask), q)
        return len(traces)

    assert count(causal, causal) == 1
    assert count(*(DocumentMask(jnp.full(4, i)) & causal for i in range(3))) == 1
    assert count(*(CausalMask(jnp.asarray(i)) for i in range(3))) == 1
    assert count(SlidingWindowMask(1), SlidingWindowMask(2), SlidingWindowMask(1)) == 2
    assert count(*((lambda b, h, q_idx, kv_idx: q_idx >= kv_idx) for _ in range(2))) == 2


def test_a_function_is_traced_once_a_call():
    calls = []

    def mask(b, h, q_idx, kv_idx):
        calls.append((b.shape, h.dtype))
        return q_idx >= kv_idx

    q = jnp.ones((2, 4, 2, 2))
    jax.jit(jax.grad(lambda q: flex_attention(q, q, q, mask).sum()))(q)
    assert calls == [((), jnp.int32)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        q = jnp.ones((3, 1, 2), dtype)
        out, lse = jax.eval_shape(lambda q: flex_attention(q, q, q, return_lse=True), q)
    assert out.dtype == dtype
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert lse.shape == (1, 3)
