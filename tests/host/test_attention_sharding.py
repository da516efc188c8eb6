"""Attention over eight CPU devices: batch, heads and queries sharded, in `shard_map`, by XLA and by types (J05 to J07)."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers import flex_attention
from eqxcute.layers.attention import CausalMask, DocumentMask
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
SPECS = {"batch": P("data", None, None, None), "heads": P(None, None, "data", None)}
LENGTH = 300  # several tiles, of which the mask empties some


def inputs(length=LENGTH):
    q, k, v = (jr.normal(key, (8, length, 8, 16)) for key in jr.split(jr.key(0), 3))
    mask = CausalMask() & DocumentMask(jnp.repeat(jnp.arange(4), 75)[:length])

    def attend(q, k, v):
        return flex_attention(q, k, v, mask)

    return attend, (q, k, v)


def loss(attend):
    return lambda *qkv: (attend(*qkv) ** 2).sum()


def agree(attend, sharded, arrays, spread):
    np.testing.assert_allclose(jax.jit(sharded)(*spread), attend(*arrays), rtol=1e-4, atol=1e-5)
    got = jax.jit(jax.grad(loss(sharded), (0, 1, 2)))(*spread)
    want = jax.jit(jax.grad(loss(attend), (0, 1, 2)))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("axis", SPECS)
def test_shard_map(axis):
    attend, arrays = inputs()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = SPECS[axis]
    agree(
        attend,
        jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec),
        arrays,
        arrays,
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axis", SPECS)
def test_mesh(axis, kind):
    attend, arrays = inputs()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, NamedSharding(mesh, SPECS[axis])) for x in arrays]
        agree(attend, attend, arrays, spread)
        text = jax.jit(attend).lower(*spread).compile().as_text()
    assert "all-gather(" not in text


def test_queries_sharded_by_position_need_an_offset():
    """In `shard_map` indices are those of the shard: the mask is told where the shard begins."""
    _, (q, k, v) = inputs(16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def shard(q, k, v):
        first = jax.lax.axis_index("data") * q.shape[1]
        return flex_attention(q, k, v, CausalMask(offset=first))

    rows = P(None, "data", None, None)
    got = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(rows, P(), P()), out_specs=rows))(
        q, k, v
    )
    np.testing.assert_allclose(got, flex_attention(q, k, v, CausalMask()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("captured", [False, True])
def test_derivative_rules_in_shards(captured):
    """In `shard_map` the score function is traced with the types that it runs with: it varies over the mesh."""
    _, arrays = inputs(16)
    bias = jr.normal(jr.key(3), (8, 16))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def attend(q, k, v, bias):
        def score(s, b, h, q_idx, kv_idx):
            return jax.nn.relu(s) + (
                jax.nn.relu(bias[b, kv_idx]) * jax.nn.silu(s) if captured else 0
            )

        return flex_attention(q, k, v, CausalMask(), score)

    spec = SPECS["batch"]
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec,) * 3 + (P("data", None),), out_specs=spec
    )

    def loss(f):
        return lambda *args: (f(*args) ** 2).sum()

    got = jax.jit(jax.grad(loss(sharded), (0, 1, 2, 3)))(*arrays, bias)
    want = jax.jit(jax.grad(loss(attend), (0, 1, 2, 3)))(*arrays, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
