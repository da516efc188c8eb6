"""Attention by its kernels in the PTX interpreter, against the formula in float64 and in the kernels' own rounding."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from eqxcute.layers.attention import flex_attention

from eqxcute.testing import assert_as_accurate, interpreted


class Sizes(NamedTuple):
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int


class Case(NamedTuple):
    """`functions(arrays)` gives mask_fn and score_fn; `arrays` are of these shapes and get gradients."""

    functions: Callable
    arrays: dict[str, tuple[int, ...]] = {}
    options: dict[str, Any] = {}


# The formula


def scores(products, arrays, functions, sizes):
    """The scores of all pairs, and which are seen. A masked one is 0: what the function gives there may be NaN."""
    mask_fn, score_fn = functions(arrays)
    indices = [jnp.asarray(x, jnp.int32) for x in np.indices(sizes)]
    seen = jnp.ones(sizes, bool) if mask_fn is None else jnp.vectorize(mask_fn)(*indices)
    if score_fn is None:
        return products, seen
    safe = [jnp.where(seen, x, 0) for x in indices]
    found = jnp.vectorize(score_fn)(jnp.where(seen, products, 0), *safe)
    return jnp.where(seen, found, 0), seen


def softmax(s, seen):
    """Probabilities and log-sum-exp."""
    some = seen.any(-1, keepdims=True)
    s = jnp.where(seen, s, jnp.where(some, -jnp.inf, 0))
    lse = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.where(some, jnp.exp(s - lse), 0), jnp.where(some, lse, -jnp.inf)[..., 0]


def repeated(x, heads):
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def dense(inputs, functions, scale):
    """Output and LSE by the formula."""
    q, k, v = (inputs[n] for n in "qkv")
    k, v = repeated(k, q.shape[2]), repeated(v, q.shape[2])
    products = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    p, lse = softmax(*scores(products, inputs, functions, products.shape))
    return jnp.einsum("bhqk,bkhd->bqhd", p, v), lse


def rounded_dense(inputs, cotangents, functions, scale, rounded, dtype):
    """Output, LSE and all gradients in float32, where tensor cores round the operands of products and `out` is rounded."""
    arrays = {n: x for n, x in inputs.items() if n not in "qkv"}
    q, k, v, dout = (x.astype("float32") for x in (*(inputs[n] for n in "qkv"), cotangents[0]))
    group = q.shape[2] // k.shape[2]
    k, v = repeated(k, q.shape[2]), repeated(v, q.shape[2])

    def product(spec, a, b):
        return jnp.einsum(spec, rounded(a), rounded(b), precision="highest")

    def of_heads(x, like):
        return x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3).astype(like.dtype)

    products = product("bqhd,bkhd->bhqk", q, k) * scale
    s, pull, seen = jax.vjp(
        lambda *args: scores(*args, functions, products.shape), products, arrays, has_aux=True
    )
    p, lse = softmax(s, seen)
    out = product("bhqk,bkhd->bqhd", p, v).astype(dtype)
    delta = jnp.einsum("bqhd,bqhd->bhq", out.astype("float32"), dout)
    dlse = jnp.where(lse == -jnp.inf, 0, cotangents[1])
    ds = p * (product("bqhd,bkhd->bhqk", dout, v) - (delta - dlse)[..., None])
    ds, captured = pull(ds)
    found = {
        "q": (product("bhqk,bkhd->bqhd", ds, k) * scale).astype(dtype),
        "k": of_heads(product("bhqk,bqhd->bkhd", ds, q) * scale, inputs["k"]),
        "v": of_heads(product("bhqk,bqhd->bkhd", p, dout), inputs["v"]),
    }
    return (out, lse), found | captured


def to_tf32(x):
    """10 bits of mantissa, ties away from 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0x1000) & ~jnp.uint32(0x1FFF), x.dtype)


# Kernels against it


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def given(case, sizes, dtype, lead=()):
    """Inputs, and cotangents of output and LSE."""
    s = sizes
    shapes = {
        "q": (s.batch, s.q_len, s.heads, s.dim),
        "k": (s.batch, s.kv_len, s.kv_heads, s.dim),
        "v": (s.batch, s.kv_len, s.kv_heads, s.v_dim),
    }
    narrow = {
        n: normal(i, *lead, *x).astype(jnp.dtype(dtype)) for i, (n, x) in enumerate(shapes.items())
    }
    arrays = {
        n: normal(5 + i, *lead, *x).astype("float32")
        for i, (n, x) in enumerate(case.arrays.items())
    }
    out = normal(3, *lead, s.batch, s.q_len, s.heads, s.v_dim).astype(jnp.dtype(dtype))
    return narrow | arrays, (out, normal(4, *lead, s.batch, s.heads, s.q_len).astype("float32"))


def derivatives(attention, inputs, cotangents):
    found, pull = jax.vjp(attention, inputs)
    return found, pull(cotangents)[0]


def run(function, inputs, cotangents, mapped=False):
    function = jax.jit(jax.vmap(function) if mapped else function)
    return jax.tree.map(np.asarray, function(inputs, cotangents))


def by_kernel(case, inputs, cotangents, architecture="sm_80", mapped=False):
    with interpreted(architecture):
        function = functools.partial(derivatives, functools.partial(_attention, case))
        return run(function, inputs, cotangents, mapped)


def _attention(case, inputs):
    options = {"return_lse": True, "implementation": "cute"} | case.options
    q, k, v = (inputs[n] for n in "qkv")
    return flex_attention(q, k, v, *case.functions(inputs), **options)


class Formula:
    """What is expected of a case, at lengths up to the given ones: JAX compiles it once."""

    def __init__(self, case, sizes, dtype, mapped=False, gradients=True):
        self.sizes, self.dtype = sizes, jnp.dtype(dtype)
        scale = case.options.get("scale", sizes.dim**-0.5)
        rounded = {
            "tf32": to_tf32,
            "3xtf32": lambda x: x,
            None: lambda x: x.astype(dtype).astype("float32"),
        }
        rounded = rounded[case.options.get("precision")]

        def functions(q_len, kv_len, inputs):
            mask_fn, score_fn = case.functions(inputs)

            def inside(b, h, q_idx, kv_idx):
                seen = True if mask_fn is None else mask_fn(b, h, q_idx, kv_idx)
                return seen & (q_idx < q_len) & (kv_idx < kv_len)

            return inside, score_fn

        def peer(inputs, cotangents, *lengths):
            of = functools.partial(functions, *lengths)
            found, grads = rounded_dense(inputs, cotangents, of, scale, rounded, dtype)
            return found, grads if gradients else {}

        def oracle(inputs, cotangents, *lengths):
            of = functools.partial(functions, *lengths)
            if not gradients:
                return dense(inputs, of, scale), {}
            return derivatives(lambda x: dense(x, of, scale), inputs, cotangents)

        axes = (0, 0, None, None)
        self.peer, self.oracle = (
            jax.jit(jax.vmap(f, axes) if mapped else f) for f in (peer, oracle)
        )

    def __call__(self, inputs, cotangents):
        """In float64, and in float32 with what tensor cores round."""
        lengths = inputs["q"].shape[-3], inputs["k"].shape[-3]
        more = [n - m for n, m in zip((self.sizes.q_len, self.sizes.kv_len), lengths, strict=True)]

        def padded(x, by, axis):
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, by)
            return np.pad(x, widths)

        by = {"q": more[0], "k": more[1], "v": more[1]}
        inputs = {n: padded(x, by[n], -3) if n in by else x for n, x in inputs.items()}
        cotangents = padded(cotangents[0], more[0], -3), padded(cotangents[1], more[0], -1)

        def cut(found):
            (out, lse), grads = jax.tree.map(np.asarray, found)
            grads = {
                n: x[..., : x.shape[-3] - by[n], :, :] if n in by else x for n, x in grads.items()
            }
            return (out[..., : lengths[0], :, :], lse[..., : lengths[0]]), grads

        peer = cut(self.peer(inputs, cotangents, *lengths))
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda x: x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x,
                (inputs, cotangents),
            )
            return cut(self.oracle(*wide, *lengths)), peer


def check(case, sizes, dtype, *, architecture="sm_80", lengths=(), slack=2.0):
    """At the sizes, and at other lengths of queries and keys."""
    formula = Formula(case, sizes, dtype)
    for q_len, kv_len in ((sizes.q_len, sizes.kv_len), *lengths):
        inputs, cotangents = given(case, sizes._replace(q_len=q_len, kv_len=kv_len), dtype)
        got = by_kernel(case, inputs, cotangents, architecture)
        compare_all(got, *formula(inputs, cotangents), slack)


def check_outputs(case, sizes, dtype, *, architecture="sm_80", slack=2.0):
    """Output and LSE alone, which are the case's own: half the time."""
    formula = Formula(case, sizes, dtype, gradients=False)
    inputs, cotangents = given(case, sizes, dtype)
    with interpreted(architecture):
        got = run(lambda inputs, _: _attention(case, inputs), inputs, cotangents)
    compare_all((got, {}), *formula(inputs, cotangents), slack)
    return got


def compare_all(got, oracle, peer, slack=2.0):
    for name, *three in zip(("out", "lse"), got[0], oracle[0], peer[0], strict=True):
        compare(name, *three, slack)
    for name in got[1]:
        compare(f"d {name}", got[1][name], oracle[1][name], peer[1][name], slack)


def compare(name, got, oracle, peer, slack):
    try:
        # The largest of a few errors varies more than that of many.
        slack = slack if got.size > 64 else 2 * slack
        assert_as_accurate(got, oracle=oracle, peer=peer, slack=slack)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
