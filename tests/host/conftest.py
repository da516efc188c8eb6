"""What several tests of attention share."""

import jax
import jax.numpy as jnp
import pytest
from eqxcute.layers.attention import _config


def _dense(q, k, v, mask_fn=None, score_fn=None, *, scale=None, sink=None):
    """Attention with the whole score matrix, keys and values repeated over the group, in the
    dtype of its inputs throughout. Returns output and log-sum-exp. Shapes: batch, length, heads,
    dim."""
    batch, q_len, heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    scale = dim**-0.5 if scale is None else scale
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(scale, q.dtype)
    sizes = (batch, heads, q_len, kv_len)
    indices = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in sizes), indexing="ij")
    allowed = jnp.ones(sizes, bool)
    if mask_fn is not None:
        allowed = jnp.vectorize(mask_fn)(*indices)
    if score_fn is not None:
        # The double `where`, as a masked score may be NaN.
        s = jnp.vectorize(score_fn)(jnp.where(allowed, s, 0), *indices).astype(q.dtype)
    allowed = allowed & (s != -jnp.inf)
    seen = allowed.any(-1, keepdims=True)
    s = jnp.where(allowed, s, jnp.where(seen, -jnp.inf, 0))
    top = s.max(-1, keepdims=True)
    total = jnp.exp(s - top).sum(-1, keepdims=True)
    p = jnp.where(seen, jnp.exp(s - top) / total, 0)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)[..., 0]
    out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
    if sink is not None:
        out = out * jax.nn.sigmoid(jnp.swapaxes(lse, 1, 2) - sink)[..., None].astype(out.dtype)
    return out, lse


@pytest.fixture
def dense_attention():
    return _dense


# Versions change no step that many tiles do not take.
@pytest.fixture(params=(pytest.param("one tile", marks=pytest.mark.slow), "many tiles"))
def tiling(request, monkeypatch):
    """Runs a test in one tile, and in tiles of at most 8 queries by 8 keys."""
    if request.param == "many tiles":
        limits = _config.TileLimits(scores=1, largest=8, smallest=8)
        monkeypatch.setattr(_config, "LIMITS", {"cpu": limits})
    return request.param
