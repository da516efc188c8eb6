"""A thousand runs of attention's kernels: a race shows as another result now and then."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers import flex_attention

RUNS = 1000


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def capped(s, b, h, q_idx, kv_idx):
    return 20 * jnp.tanh(s / 20)


# (queries, keys, heads, kv heads, dim), the score: tiles that hang over, and more tiles than multiprocessors.
CASES = [
    ((1000, 1100, 16, 4, 128), None),
    ((1000, 1100, 16, 16, 64), None),
    ((700, 900, 8, 8, 128), capped),
    ((3, 20_000, 8, 2, 128), None),
]


@pytest.mark.parametrize(("sizes", "score"), CASES, ids=["gqa", "64", "soft-cap", "decode"])
def test_reruns(sizes, score):
    q_len, kv_len, heads, kv_heads, dim = sizes
    shapes = (2, q_len, heads, dim), (2, kv_len, kv_heads, dim), (2, kv_len, kv_heads, dim)
    q, k, v = (
        jr.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(jr.split(jr.key(0), 3), shapes, strict=True)
    )
    mask = causal if q_len > 16 else None

    @jax.jit
    def run(q, k, v):
        def call(q, k, v):
            return flex_attention(q, k, v, mask, score, return_lse=True, implementation="cute")

        (out, lse), back = jax.vjp(call, q, k, v)
        return out, lse, *back((out, lse * 0.1))

    @jax.jit
    def compare(first, now):
        """Which differ at all; and how far dQ is off, whose terms are added in any order."""
        same = [jnp.array_equal(a, b) for a, b in zip(first, now, strict=True)]
        far = jnp.max(jnp.abs(first[2].astype(jnp.float32) - now[2].astype(jnp.float32)))
        return jnp.stack([*same[:2], *same[3:]]), far

    first = run(q, k, v)
    found = [compare(first, run(q, k, v)) for _ in range(RUNS)]
    same = np.asarray(jnp.stack([s for s, _ in found]))
    far = np.asarray(jnp.stack([f for _, f in found]))
    assert same.all(), f"another result in {(~same).any(1).sum()} of {RUNS} runs"
    assert far.max() <= 2.0**-7 * float(jnp.abs(first[2].astype(jnp.float32)).max())
