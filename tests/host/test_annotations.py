"""The shapes in signatures are true: the layers run with every annotation checked.

In a process of its own, since the checks come before the layers' own and would hide their messages.
"""

import subprocess
import sys

PROGRAM = """
import jaxtyping
with jaxtyping.install_import_hook("eqxcute.layers", "beartype.beartype"):
    import eqxcute.layers
    import eqxcute.layers.attention as attention
    import eqxcute.layers.bias_act
import jax, jax.numpy as jnp, jax.random as jr, pytest
from eqxcute.layers import BiasReLU, FlexAttention, MultiheadAttention, bias_relu, flex_attention

for dtype in ("float32", "bfloat16", "float16"):
    x, bias = jr.normal(jr.key(0), (2, 3, 5)).astype(dtype), jnp.ones(5)
    for some in (x, x[0], x[0, 0]):
        assert bias_relu(some, bias).shape == BiasReLU(5)(some).shape == some.shape
        jax.grad(lambda x: bias_relu(x, bias).sum())(some)
    jax.vmap(BiasReLU(5))(x)

q = jr.normal(jr.key(0), (2, 6, 4, 8))
k = jr.normal(jr.key(1), (2, 7, 2, 8))
v = jr.normal(jr.key(2), (2, 7, 2, 3))
masks = [
    None, attention.FullMask(), attention.CausalMask(), attention.CausalMask(offset=1), attention.SlidingWindowMask(2),
    attention.PrefixLMMask(jnp.array(2)), attention.ChunkedMask(3), attention.DilatedMask(2),
    attention.PaddingMask(jnp.array([3, 5])), ~attention.CausalMask() | attention.SlidingWindowMask(1),
    attention.DocumentMask(jnp.zeros(6, jnp.int32), jnp.zeros(7, jnp.int32)),
]
for mask in masks:
    out, lse = FlexAttention(mask)(q, k, v, return_lse=True)
    assert out.shape == (2, 6, 4, 3) and lse.shape == (2, 4, 6)
scores = [attention.ALiBi(4), attention.SoftCap(20.0), attention.AdditiveBias(jnp.zeros((6, 7)))]
for score in scores:
    jax.grad(lambda q: flex_attention(q, k, v, score_fn=score, sink=jnp.zeros(4)).sum())(q)
assert jax.vmap(FlexAttention())(q, k, v).shape == (2, 6, 4, 3)
assert flex_attention(q[0], k[0], v[0]).shape == (6, 4, 3)
heads = MultiheadAttention(4, 8, 7, 6, 5, mask_fn=attention.CausalMask(), num_kv_heads=2, key=jr.key(0))
x, y, z = jnp.ones((6, 8)), jnp.ones((9, 7)), jnp.ones((9, 6))
for mask in (None, jnp.ones((6, 9), bool), jnp.ones((4, 6, 9), bool), attention.FullMask(), lambda *indices: True):
    assert heads(x, y, z, mask).shape == (6, 5)
with pytest.raises(jaxtyping.TypeCheckError):
    flex_attention(q[0, 0, 0], k, v)
print("checked")
"""


def test_annotations_hold():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert "checked" in done.stdout, done.stderr[-3000:]
