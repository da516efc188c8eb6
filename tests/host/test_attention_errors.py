"""What attention refuses, and that it says what to do instead."""

import functools
import re
import subprocess
import sys
import warnings

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
    DocumentMask,
    FlexAttention,
    PaddingMask,
    RelativeBias,
    SlidingWindowMask,
    SoftCap,
    alibi_slopes,
    flex_attention,
    tile_map,
)

import eqxcute
from eqxcute import _fallback


def refused(kind, *parts):
    """The message must hold every part."""
    pattern = "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(kind, match=pattern)


def ones(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


SHAPES = {
    "rank": ((4, 8), (4, 1, 8), (4, 1, 8), ("q must have shape", "(4, 8)", "q_len heads dim")),
    "leading dims": ((2, 4, 1, 8), (4, 1, 8), (4, 1, 8), ("q and k", "leading dims", "vmap")),
    "batch": ((2, 4, 1, 8), (3, 4, 1, 8), (2, 4, 1, 8), ("q and k", "batch dim 0", "2", "3")),
    "dim": ((4, 1, 8), (4, 1, 16), (4, 1, 8), ("q and k", "in dim", "q has 8", "k has 16")),
    "kv_len": ((4, 1, 8), (5, 1, 8), (6, 1, 8), ("k and v", "kv_len", "k has 5", "v has 6")),
    "kv_heads": ((4, 4, 8), (4, 2, 8), (4, 1, 8), ("k and v", "kv_heads", "k has 2", "v has 1")),
    "heads": ((4, 6, 8), (4, 4, 8), (4, 4, 8), ("multiple", "6 heads", "k and v have 4")),
    "no dim": ((4, 1, 0), (4, 1, 0), (4, 1, 8), ("at least 1", "(4, 1, 0)")),
    "no heads": ((4, 0, 8), (4, 1, 8), (4, 1, 8), ("at least 1", "(4, 0, 8)")),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    """H03 among them."""
    q, k, v, parts = SHAPES[name]
    with refused(ValueError, "FlexAttention", *parts):
        flex_attention(ones(*q), ones(*k), ones(*v))


def test_mixed_dtypes():
    """H08: after a float32 norm of q or k."""
    q, k, v = ones(4, 1, 8, dtype="bfloat16"), ones(4, 1, 8), ones(4, 1, 8, dtype="float16")
    with refused(TypeError, "q is bfloat16", "k is float32", "v is float16"):
        flex_attention(q, k, v)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_that_are_not_supported(dtype):
    x = ones(4, 1, 8, dtype=dtype)
    with refused(TypeError, dtype, "bfloat16", "float32"):
        flex_attention(x, x, x)


def python_if(b, h, q_idx, kv_idx):
    if q_idx > 3:
        return kv_idx < 2
    return kv_idx < 3


LENGTHS = [1, 2, 3]


def python_list(b, h, q_idx, kv_idx):
    return kv_idx < LENGTHS[b]


def numpy_array(b, h, q_idx, kv_idx):
    return kv_idx < np.asarray(LENGTHS)[b]


def python_int(b, h, q_idx, kv_idx):
    return kv_idx < int(jnp.asarray(LENGTHS)[b])


def python_and(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 1


class OwnMask(eqx.Module):
    def __call__(self, b, h, q_idx, kv_idx):
        return not (q_idx >= kv_idx)


@pytest.mark.parametrize(
    ("mask", "name", "line"),
    [
        (python_if, "python_if", "if q_idx > 3:"),
        (python_list, "python_list", "LENGTHS[b]"),
        (numpy_array, "numpy_array", "np.asarray(LENGTHS)[b]"),
        (python_int, "python_int", "int(jnp.asarray(LENGTHS)[b])"),
        (python_and, "python_and", "q_idx >= kv_idx and kv_idx > 1"),
        (OwnMask(), "OwnMask", "not (q_idx >= kv_idx)"),
        (CausalMask() & python_if, "python_if", "if q_idx > 3:"),
        (lambda b, h, i, j: bool(i >= j), "<lambda>", "bool(i >= j)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_python_control_flow_on_an_index(mask, name, line):
    """S18: the user's function, its file and line, and what to write instead."""
    x = ones(4, 1, 8)
    with refused(TypeError, name, "test_attention_errors.py", line, "jnp.where", "`&`", "`~`"):
        flex_attention(x, x, x, mask)


def float_mask(b, h, q_idx, kv_idx):
    return jnp.where(q_idx >= kv_idx, 0.0, -jnp.inf)


def test_what_a_mask_returns():
    x = ones(4, 1, 8)
    where = "test_attention_errors.py"
    with refused(TypeError, "mask_fn", "float_mask", where, "bool", "float32", "score_fn"):
        flex_attention(x, x, x, float_mask)
    with refused(TypeError, "float_mask", where, "bool", "float32"):
        flex_attention(x, x, x, CausalMask() & float_mask)
    with refused(TypeError, "mask_fn", "bool", "int32"):
        flex_attention(x, x, x, lambda b, h, q_idx, kv_idx: q_idx - kv_idx)
    with refused(TypeError, "mask_fn", "shape ()", "(4,)"):
        flex_attention(x, x, x, lambda b, h, q_idx, kv_idx: jnp.arange(4) <= q_idx)
    with refused(TypeError, "mask_fn", "tuple"):
        flex_attention(x, x, x, lambda b, h, q_idx, kv_idx: (q_idx, kv_idx))
    with refused(TypeError, "mask_fn", "NoneType"):
        flex_attention(x, x, x, lambda b, h, q_idx, kv_idx: None)


def test_what_a_score_returns():
    x = ones(4, 1, 8)
    with refused(TypeError, "score_fn", "bool", "mask_fn"):
        flex_attention(x, x, x, None, lambda s, b, h, q_idx, kv_idx: q_idx >= kv_idx)
    with refused(TypeError, "score_fn", "int32"):
        flex_attention(x, x, x, None, lambda s, b, h, q_idx, kv_idx: q_idx)
    with refused(TypeError, "score_fn", "shape ()", "(4,)"):
        flex_attention(x, x, x, None, lambda s, b, h, q_idx, kv_idx: s + jnp.arange(4.0))


def test_arrays_where_functions_are_expected():
    """M15: and bools where a bias is expected."""
    mask = jnp.ones((4, 4), bool)
    x = ones(4, 1, 8)
    for call in (FlexAttention, lambda *functions: flex_attention(x, x, x, *functions)):
        with refused(TypeError, "mask_fn", "function", "mask[b, q_idx, kv_idx]"):
            call(mask)
        with refused(TypeError, "score_fn", "function", "AdditiveBias(bias)"):
            call(None, jnp.zeros((4, 4)))
        with refused(TypeError, "class CausalMask", "CausalMask(...)"):
            call(CausalMask)
    with refused(TypeError, "AdditiveBias", "bools", "0 and 1", "mask_fn"):
        AdditiveBias(mask)
    with refused(TypeError, "AdditiveBias", "floats", "int32"):
        AdditiveBias(jnp.ones((4, 4), jnp.int32))
    with refused(TypeError, "ComposedScore", "AdditiveBias(bias)"):
        SoftCap(1.0).then(jnp.zeros((4, 4)))


def test_masks_made_for_other_sizes():
    """B07: the message says how to make it anew."""
    mask = CausalMask() & DocumentMask(jnp.zeros(1024, jnp.int32))
    for length in (512, 1000):
        x = ones(length, 1, 8)
        with refused(ValueError, "q_ids", "1024", str(length), "anew"):
            flex_attention(x, x, x, mask)
    x = ones(2, 4, 3, 8)
    with refused(ValueError, "kv_ids", "kv_len", "5", "4"):
        flex_attention(x, x, x, DocumentMask(jnp.zeros(4, jnp.int32), jnp.zeros(5, jnp.int32)))
    with refused(ValueError, "3 rows", "2 batch entries", "vmap"):
        flex_attention(x, x, x, ~DocumentMask(jnp.zeros((3, 4), jnp.int32)))
    with refused(ValueError, "PaddingMask", "3 entries", "2 batch entries", "vmap"):
        flex_attention(x, x, x, CausalMask() | PaddingMask(jnp.ones(3, jnp.int32)))
    with refused(ValueError, "AdditiveBias", "(1, 3, 4, 5)", "kv_len"):
        flex_attention(x, x, x, None, AdditiveBias(jnp.zeros((1, 3, 4, 5))))
    for score in (ALiBi(4), RelativeBias(jnp.zeros((4, 5)))):
        with refused(ValueError, "4 heads", "q has 3"):
            flex_attention(x, x, x, None, ComposedScore(SoftCap(1.0), score))


def test_constructors():
    with refused(ValueError, "SlidingWindowMask: left", "at least 0", "-1"):
        SlidingWindowMask(-1)
    with refused(TypeError, "SlidingWindowMask: left", "static"):
        SlidingWindowMask(jnp.asarray(3))
    with refused(ValueError, "ChunkedMask: size", "at least 1"):
        ChunkedMask(0)
    with refused(TypeError, "CausalMask: offset", "integers", "float32"):
        CausalMask(1.5)
    with refused(ValueError, "DocumentMask: q_ids", "1 or 2", "()"):
        DocumentMask(jnp.asarray(3))
    with refused(TypeError, "DocumentMask: q_ids", "integers"):
        DocumentMask(jnp.ones(3))
    with refused(ValueError, "RelativeBias", "odd", "4"):
        RelativeBias(jnp.zeros((2, 4)))
    with refused(ValueError, "ALiBi", "num_heads or slopes"):
        ALiBi()
    with refused(ValueError, "alibi_slopes", "at least 1"):
        alibi_slopes(0)
    for cap in (0.0, -1.0, float("nan"), float("inf")):
        with refused(ValueError, "SoftCap", "above 0"):
            SoftCap(cap)
    with refused(TypeError, "scale", "learned", "q"):
        jax.eval_shape(lambda s: FlexAttention(scale=s), jnp.ones(()))
    for scale in (float("nan"), float("-inf")):
        with refused(ValueError, "scale", "finite", str(scale)):
            FlexAttention(scale=scale)
    # S20: there is no dropout.
    with pytest.raises(TypeError, match="dropout"):
        FlexAttention(dropout_p=0.1)


def test_sinks():
    x = ones(4, 2, 8)
    with refused(ValueError, "sink", "(heads,) = (2,)", "(3,)"):
        flex_attention(x, x, x, sink=jnp.zeros(3))
    with refused(TypeError, "sink", "int32"):
        flex_attention(x, x, x, sink=jnp.zeros(2, jnp.int32))


# Which implementation


def test_unknown_implementation():
    x = ones(4, 1, 8)
    with refused(ValueError, "FlexAttention", "'triton'", '"cute"', '"xla"', "None"):
        flex_attention(x, x, x, implementation="triton")
    with refused(ValueError, "'triton'"):
        FlexAttention(implementation="triton")


def test_cute_cannot_be_had(monkeypatch):
    """J13: without a GPU the platform is the reason, on one what the kernel lacks."""
    x = ones(4, 1, 8)
    for call in (
        lambda: flex_attention(x, x, x, implementation="cute"),
        lambda: FlexAttention(implementation="cute"),
    ):
        with refused(NotImplementedError, "FlexAttention", '"cute"', "'cpu'", '"xla"'):
            call()
    monkeypatch.setattr(_fallback, "platform", lambda: "cuda")
    for call, reason in LACKS:
        with refused(NotImplementedError, "FlexAttention", '"cute"', reason, '"xla"'):
            call("cute")


def opaque(s, b, h, q_idx, kv_idx):
    return s + jax.random.gamma(jax.random.key(0), s)


def too_many(implementation):
    q = jax.ShapeDtypeStruct((1 << 20, 1 << 10, 64, 8), jnp.float16)
    attend = functools.partial(flex_attention, implementation=implementation)
    jax.eval_shape(attend, q, q, q)


def test_too_many_tiles_under_vmap():
    """Each example has few: they are counted together, where the mapped axis joins them."""
    q = jax.ShapeDtypeStruct((1 << 20, 64, 1 << 10, 8), jnp.float16)
    attend = functools.partial(flex_attention, implementation="cute")
    with eqxcute.architecture("sm_80"), refused(ValueError, "jax.vmap", "tiles", "batch_size="):
        jax.eval_shape(jax.vmap(attend), q, q, q)


def too_many_in_whole_tiles(implementation):
    """One query a head, but a CTA for each of the kernel's tiles in a tile of the map."""
    q = jax.ShapeDtypeStruct((1 << 20, 1, 1 << 9, 8), jnp.float16)
    attend = functools.partial(flex_attention, mask_fn=CausalMask(), implementation=implementation)
    jax.eval_shape(attend, q, q, q)


LACKS = [  # H07 among them
    (lambda how: attend_with(ones(4, 1, 264), how), "dim is 264, and the kernel takes up to 256"),
    (
        lambda how: flex_attention(
            ones(4, 1, 8), ones(4, 1, 8), ones(4, 1, 512), implementation=how
        ),
        "v_dim is 512",
    ),
    (lambda how: attend_with(ones(4, 1, 8), how, None, opaque), "`opaque`"),
    (too_many, "tiles"),
    (too_many_in_whole_tiles, "tiles"),
]


def attend_with(x, how, *functions):
    return flex_attention(x, x, x, *functions, implementation=how)


def test_float64_has_no_kernel(monkeypatch):
    monkeypatch.setattr(_fallback, "platform", lambda: "cuda")
    with jax.enable_x64(True), refused(NotImplementedError, "float64", "float16, bfloat16"):
        attend_with(ones(4, 1, 8, dtype="float64"), "cute")


def test_a_fallback_warns_once_and_says_why(monkeypatch):
    """J13: on a GPU, not elsewhere, and not if plain JAX was asked for."""
    x = ones(4, 1, 264)
    monkeypatch.setattr(_fallback, "_WARNED", set())
    flex_attention(x, x, x)
    monkeypatch.setattr(_fallback, "platform", lambda: "cuda")
    flex_attention(x, x, x, implementation="xla")
    with pytest.warns(UserWarning, match="FlexAttention.*dim is 264"):
        flex_attention(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(x, x, x)


def test_tiles_of_the_kernel():
    """B02: a map's tiles are whole tiles of the kernel's, or an error says so before anything runs."""
    x = ones(200, 1, 8)
    tiles = tile_map(CausalMask(), 200, 200, tile=(64, 80))
    flex_attention(x, x, x, CausalMask(), tiles=tiles)
    with (
        eqxcute.architecture("sm_80"),
        refused(ValueError, "tiles of (64, 80)", "multiples of 64", "tile=(64, 128)", '"xla"'),
    ):
        flex_attention(x, x, x, CausalMask(), tiles=tiles)


def test_unknown_precision():
    """H09."""
    x = ones(4, 1, 8)
    for call in (
        lambda: flex_attention(x, x, x, precision="float32"),
        lambda: FlexAttention(precision="float32"),
    ):
        with refused(ValueError, "FlexAttention", "'float32'", '"tf32"', '"3xtf32"'):
            call()


def test_importing_does_nothing():
    """J12: neither the CuTe DSL nor a device is touched."""
    code = (
        "import sys, eqxcute.layers.attention\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not any(m.split('.')[0] in ('cutlass', 'tvm_ffi') for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
