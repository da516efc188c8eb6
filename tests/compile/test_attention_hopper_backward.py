"""Attention's backward kernel for Hopper: in the PTX interpreter against the formula, and as ptxas leaves it."""

import collections
import re
import struct

import jax.numpy as jnp
import pytest
from attention_builds import LOAD_LOCAL, STORE_LOCAL, built, causal, sections
from attention_formula import Case, Sizes, check
from eqxcute.layers.attention import _config
from eqxcute.layers.attention._config import Sm90Backward

from eqxcute import testing
from eqxcute._arch import ARCHITECTURES

MASKED = Case(lambda c: (causal, None))
PLAIN = Case(lambda c: (None, None))


def _window(c):
    """A window that starts after some keys, and a score whose slope is NaN where nothing is seen."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 60) & (kv_idx >= 5)

    def score(s, b, h, q_idx, kv_idx):
        far = jnp.sqrt((q_idx - kv_idx).astype(jnp.float32) + 1)
        return 3 * jnp.tanh(s / 3) * far / (1 + far)

    return mask, score


def _captured(c):
    """Reads of every kind: by head, distance, key, query and pair."""

    def score(s, b, h, q_idx, kv_idx):
        near = c["table"][jnp.clip(kv_idx - q_idx, -60, 60) + 60]
        by_side = c["keys"][kv_idx] + c["queries"][h, q_idx] + c["pairs"][q_idx, kv_idx]
        return s * c["slopes"][h] + near + by_side

    return causal, score


WINDOW = Case(_window)
ARRAYS = {"slopes": (2,), "table": (121,), "keys": (150,), "queries": (2, 200), "pairs": (200, 150)}
CAPTURED = Case(_captured, ARRAYS)
DETERMINISTIC = {"deterministic": True}


@pytest.mark.parametrize(
    ("case", "sizes", "dtype"),
    [
        # Several tiles each way, the last ones ragged.
        (MASKED, Sizes(1, 130, 140, 2, 1, 64, 64), "bfloat16"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                # Queries that see nothing.
                (WINDOW, Sizes(1, 150, 200, 2, 1, 64, 64), "bfloat16"),
                (MASKED, Sizes(2, 200, 200, 4, 2, 128, 128), "bfloat16"),
                (PLAIN, Sizes(1, 77, 130, 2, 2, 128, 128), "float16"),
                (PLAIN, Sizes(1, 1, 200, 2, 1, 96, 96), "bfloat16"),
                (WINDOW, Sizes(1, 200, 77, 2, 1, 8, 8), "bfloat16"),
                (CAPTURED, Sizes(1, 200, 150, 2, 1, 64, 64), "bfloat16"),
                (
                    CAPTURED._replace(options=DETERMINISTIC),
                    Sizes(1, 200, 150, 2, 1, 128, 128),
                    "bfloat16",
                ),
                (
                    MASKED._replace(options=DETERMINISTIC),
                    Sizes(1, 150, 300, 2, 1, 64, 64),
                    "float16",
                ),
            )
        ),
    ],
)
def test_agrees(case, sizes, dtype):
    # Gradients of what is captured are sums of many terms: their errors vary more.
    check(case, sizes, dtype, architecture="sm_90a", slack=3.0 if case.arrays else 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Sm90Backward(tile_q=64, late=False, ds_stages=2),
        Sm90Backward(tile_q=64, dk_first=True),
        Sm90Backward(tile_q=128, bulk=False),
        Sm90Backward(tile_q=128, stages=1, dk_first=True, bulk=False, ds_stages=1),
    ],
)
def test_orders_agree(monkeypatch, config):
    """Of products, and how dQ is added."""
    monkeypatch.setattr(_config, "HOPPER_BACKWARD", (((64, 64), config),))
    monkeypatch.setattr(testing, "_interpreted", {})
    check(MASKED, Sizes(1, 200, 200, 2, 1, 64, 64), "bfloat16", architecture="sm_90a")


# As ptxas leaves it. Opcodes as nvdisasm 13.5 names them: HGMMA, with its operand `a` in shared memory or in registers, and
# WARPGROUP, which a fence is and a wait. Where ptxas serialises products it adds waits.

PRODUCTS, GROUPS = (0x9F0, 0xDF0), 0x9C5


@pytest.mark.parametrize(
    ("dim", "functions", "deterministic"),
    [
        (128, {"mask": causal}, False),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (64, {"mask": causal}, False),
                (64, {}, False),
                (96, {"mask": causal}, False),
                (128, {}, False),
                (128, {"mask": causal}, True),
                (64, dict(zip(("mask", "score"), _window(None), strict=True)), False),
                (128, dict(zip(("mask", "score"), _window(None), strict=True)), False),
            )
        ),
    ],
)
def test_registers_suffice(dim, functions, deterministic):
    """Nothing is spilled, and no product waits for the one before it."""
    found = built("backward", dim, "sm_90a", deterministic=deterministic, **functions)
    (entry,) = [x for x in re.split(r"\.entry ", found.ptx)[1:] if "Backward90" in x[:200]]
    (code,) = [
        c for n, _, c in sections(found.cubin) if n.startswith(".text.") and "Backward90" in n
    ]
    ops = collections.Counter(low & 0xFFF for low, _ in struct.iter_unpack("<QQ", code))
    products, waits = (
        len(re.findall(rf"wgmma\.{x}", entry)) for x in ("mma_async", "(fence|wait)")
    )
    assert products > 0
    assert sum(ops[x] for x in PRODUCTS) == products
    assert ops[GROUPS] <= waits
    assert ops[STORE_LOCAL] == ops[LOAD_LOCAL] == 0


@pytest.mark.parametrize(
    ("dim", "v_dim", "tile_q"),
    [(64, 64, 128), (40, 8, 128), (128, 128, 64), (72, 128, 64), (64, 65, 64), (136, 64, None)],
)
def test_tiles(dim, v_dim, tile_q):
    facts = ARCHITECTURES["sm_90a"]
    found = _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 128))
    assert (None if found is None else found.tile_q) == tile_q
    assert _config.hopper_backward(facts, dim, v_dim, "float32") is None
    scored = _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 128), scored=True)
    assert (None if scored is None else scored.tile_q) == (None if tile_q is None else 64)
    # A map's tile is whole tiles.
    assert _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 64)) is None
