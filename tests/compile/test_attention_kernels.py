"""Attention by its kernels, forward and backward, in the PTX interpreter, against the formula in float64.

Most cases run in tiles far smaller than a GPU's, so that small lengths take many of them, and compile fast.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import (
    Case,
    Formula,
    Sizes,
    by_kernel,
    check,
    compare_all,
    given,
    normal,
)
from eqxcute.layers.attention import SoftCap, _config, _entry, flex_attention, tile_map
from eqxcute.layers.attention._config import Sm80Backward, Sm80Forward, Sm80Queries

from eqxcute import testing
from eqxcute._arch import ARCHITECTURES
from eqxcute._ptx._run import Device
from eqxcute.testing import assert_as_accurate, interpreted

SMALL = {
    "FORWARD": {
        16: (((256, 256), Sm80Forward(tile_q=32, tile_kv=32, warps=2)),),
        32: (((256, 256), Sm80Forward(tile_q=32, tile_kv=16, warps=2)),),
    },
    "BACKWARD": {
        16: (
            (
                (256, 256),
                Sm80Backward(tile_q=32, tile_kv=32, warps=4, down_s=2, down_kv=2, down_q=2),
            ),
        ),
        32: (
            (
                (256, 256),
                Sm80Backward(
                    tile_q=32, tile_kv=32, warps=4, down_s=2, down_kv=2, down_q=2, stages=1
                ),
            ),
        ),
    },
    "QUERIES": {
        16: (((256, 256), Sm80Queries(tile_q=32, tile_kv=32, warps=2)),),
        32: (((256, 256), Sm80Queries(tile_q=32, tile_kv=16, warps=2)),),
    },
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Of kernels, and 64 x 64 of maps. What was compiled with others is out of sight."""
    for name, table in SMALL.items():
        monkeypatch.setattr(_config, name, table)
    monkeypatch.setattr(_entry, "MAP_TILE", (64, 64))
    monkeypatch.setattr(testing, "_interpreted", {})


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def strict(b, h, q_idx, kv_idx):
    return q_idx > kv_idx


DOCUMENTS = jnp.arange(130) // jnp.asarray(47)


def documents(b, h, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx + b >= kv_idx)


def _capped(c):
    """Gemma's soft cap, and ALiBi with trained slopes."""

    def score(s, b, h, q_idx, kv_idx):
        return 2 * jnp.tanh(s / 2) + c["slopes"][h] * (kv_idx - q_idx) / 16

    return documents, score


CAPPED = Case(_capped, {"slopes": (6,)})


# One kernel of each, called with lengths around those of tiles.
@pytest.mark.slow
def test_ragged_lengths_and_groups(small_tiles):
    lengths = ((63, 65), (1, 130), (65, 1))
    check(CAPPED, Sizes(2, 130, 130, 6, 2, 16, 24), "bfloat16", lengths=lengths)


def _shaken(c):
    """A table of distances, a bias of pairs, arrays of queries and of keys, in no simple way; a window that differs from
    head to head. What no pair that is seen reads is NaN."""

    def mask(b, h, q_idx, kv_idx):
        return (jnp.abs(q_idx - kv_idx) < 20 + 3 * h) & (kv_idx < 60)

    def score(s, b, h, q_idx, kv_idx):
        s = s * (1 + c["keys"][b, kv_idx] / 4) + c["pairs"][h, q_idx, kv_idx]
        s = jnp.sin(s) * c["queries"][q_idx] + c["table"][h, kv_idx - q_idx + 70]
        # NaN at masked pairs.
        return s + jnp.sqrt(30.0 - jnp.abs(q_idx - kv_idx)) * c["all"]

    return mask, score


SHAKEN = Case(
    _shaken,
    {"table": (2, 140), "pairs": (2, 66, 70), "queries": (66,), "keys": (1, 70), "all": ()},
    {"precision": "3xtf32", "scale": -0.3},
)


@pytest.mark.slow
def test_scores_of_many_arrays_and_nan_where_masked(small_tiles):
    sizes = Sizes(1, 66, 70, 2, 2, 8, 16)
    formula = Formula(SHAKEN, sizes, "float32")
    clean, cotangents = given(SHAKEN, sizes, "float32")
    dirty = {n: x.copy() for n, x in clean.items()}
    dirty["keys"][:, 60:] = dirty["pairs"][..., 60:] = dirty["table"][:, :40] = np.nan
    got = by_kernel(SHAKEN, dirty, cotangents)
    compare_all(got, *formula(clean, cotangents))
    assert not got[1]["keys"][:, 60:].any()


def _strict(c):
    return strict, None


def test_empty_rows_and_any_scale_on_hopper(small_tiles):
    """The first query sees nothing: 0, -inf, and no gradient. Scales are one kernel; it has no score function, and so
    the scale in an exponent."""
    sizes = Sizes(1, 70, 70, 2, 1, 40, 8)
    for scale in (-0.2, 0.0):
        case = Case(_strict, {}, {"scale": scale})
        inputs, cotangents = given(case, sizes, "float16")
        (out, lse), grads = got = by_kernel(case, inputs, cotangents, "sm_90a")
        compare_all(got, *Formula(case, sizes, "float16")(inputs, cotangents))
        assert not out[:, 0].any()
        assert np.isneginf(lse[..., 0]).all()
        assert not grads["q"][:, 0].any()
    assert len(testing._interpreted) == 2


def _by_example(c):
    """A mask by what is mapped, and a score of a mapped and of a shared array."""

    def mask(b, h, q_idx, kv_idx):
        return c["documents"][q_idx] == c["documents"][kv_idx]

    def score(s, b, h, q_idx, kv_idx):
        return s * c["slopes"][b, h] + SHARED[kv_idx % 8]

    return mask, score


SHARED = jnp.asarray(normal(9, 8), jnp.float32)


def test_vmap_of_gradients(small_tiles):
    """Documents of each example: the tile map is made on the device. In a fixed order the sums have equal bits, whatever
    the order of CTAs is."""
    case = Case(_by_example, {"slopes": (2, 2)}, {"deterministic": True})
    sizes = Sizes(2, 70, 70, 2, 1, 16, 16)
    inputs, cotangents = given(case, sizes, "bfloat16", lead=(3,))
    ends = np.asarray([[20, 70], [66, 67], [1, 69]])
    inputs["documents"] = (np.arange(70) >= ends[..., None]).sum(1).astype(np.float32)
    got = by_kernel(case, inputs, cotangents, mapped=True)
    compare_all(got, *Formula(case, sizes, "bfloat16", mapped=True)(inputs, cotangents))


def _plain(c):
    return None, None


@pytest.mark.slow
def test_tf32(small_tiles):
    case = Case(_plain, {}, {"precision": "tf32"})
    check(case, Sizes(1, 70, 50, 1, 1, 40, 24), "float32")


# Tiles of maps


def _causal(c):
    return causal, None


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "dim", "v_dim"), [((64, 64), 192, 128), ((256, 128), 16, 16)])
def test_tiles_of_another_size_and_none_that_is_empty(tile, dim, v_dim):
    """By the tiles that a GPU gets. What lies in empty tiles is NaN, and nobody looks."""
    lengths = {"q_len": 130, "kv_len": 290}
    case = Case(_causal, {}, {"tiles": tile_map(causal, **lengths, tile=tile)})
    sizes = Sizes(1, **lengths, heads=1, kv_heads=1, dim=dim, v_dim=v_dim)
    inputs, cotangents = given(case, sizes, "float16")
    first = -(-lengths["q_len"] // tile[1]) * tile[1]
    dirty = {n: x.copy() for n, x in inputs.items()}
    dirty["k"][:, first:] = dirty["v"][:, first:] = np.nan
    got = by_kernel(case, dirty, cotangents)
    compare_all(got, *Formula(case, sizes, "float16")(inputs, cotangents))


# Dims and dtypes, by the tiles that a GPU gets


# The last is whether in a fixed order, which has a kernel more.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision", "dim", "v_dim", "deterministic"),
    [
        ("bfloat16", None, 8, 8, False),
        ("bfloat16", None, 40, 40, True),
        ("bfloat16", None, 96, 96, False),
        ("bfloat16", None, 128, 128, True),
        ("float16", None, 192, 128, True),
        ("bfloat16", None, 256, 256, False),
        ("float32", "3xtf32", 128, 96, False),
        ("float32", "tf32", 192, 64, False),
    ],
)
def test_dims(dtype, precision, dim, v_dim, deterministic, monkeypatch):
    """And the shared memory that each launch asks for is what `_config.py` reckons."""
    asked, launch = [], Device.launch

    def noted(device, name, *rest):
        asked.append((name, rest[-1]))
        launch(device, name, *rest)

    monkeypatch.setattr(Device, "launch", noted)
    options = {"precision": precision, "deterministic": deterministic}
    # Three passes leave 2^-21 of a product, where float32 rounds to 2^-24.
    slack = 3.0 if precision == "3xtf32" else 2.0
    check(Case(_plain, {}, options), Sizes(1, 70, 130, 1, 1, dim, v_dim), dtype, slack=slack)
    facts, bits = ARCHITECTURES["sm_80"], _config.BITS[dtype]
    for kernel, (choose, size) in SUMS.items():
        (*_, found) = [n for name, n in asked if f"_kernels{kernel}" in name] or [None]
        if kernel != "queries" or deterministic:
            assert found == size(choose(facts, dim, v_dim, dtype), dim, v_dim, bits)


SUMS = {
    "forward": (_config.forward, _config.forward_bytes),
    "backward": (_config.backward, _config.backward_bytes),
    "queries": (_config.queries, _config.queries_bytes),
}


# Every GPU of the family, so also those with 99 KiB.
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiles_fit(architecture):
    facts = ARCHITECTURES[architecture]
    for dtype, dim, v_dim, side in itertools.product(
        _config.BITS, range(8, 257, 8), range(8, 257, 8), (64, 128)
    ):
        bits = _config.BITS[dtype]
        columns = _config.tile_columns(dim, bits) + _config.tile_columns(v_dim, bits)
        for choose, size in SUMS.values():
            config = choose(facts, dim, v_dim, dtype, (side, side))
            # Where 32 rows of q, k, v, dO and of the scores need more than 99 KiB. `flex_attention` says so.
            if choose is _config.backward and dtype == "float32" and facts.smem_bytes == 99 << 10:
                assert (config is None) == (columns > 352)
            if config is not None:
                assert size(config, dim, v_dim, bits) <= facts.smem_bytes
                assert side % config.tile_q == side % config.tile_kv == 0
            else:
                assert columns > 352


@pytest.mark.slow
def test_three_passes_take_no_approximation_of_scores():
    """A tanh that is right to 2**-21 of 1 is 50 times that here, and six times plain JAX's error in the output."""
    rng = np.random.default_rng(0)
    q, k, v = (4 * rng.standard_normal((40, 1, 16)) for _ in range(3))
    attend = functools.partial(flex_attention, score_fn=SoftCap(50.0))
    inputs = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    with interpreted("sm_80"):
        got = jax.jit(attend)(*inputs)
    q, k, v = (np.asarray(x, np.float64)[:, 0] for x in inputs)
    e = np.exp(50 * np.tanh(q @ k.T / 4 / 50))
    oracle = (e @ v / e.sum(-1, keepdims=True))[:, None]
    peer = attend(*inputs, implementation="xla")
    assert_as_accurate(np.asarray(got), oracle=oracle, peer=np.asarray(peer), ulps=2.0)
