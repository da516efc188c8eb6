"""Attention's backward kernel for Hopper: in the PTX interpreter against the formula, and as ptxas leaves it."""

import pytest
from attention_builds import built, causal
from attention_formula import Sizes, check
from attention_hopper import (
    CAPTURED,
    MASKED,
    PLAIN,
    SOFT,
    WINDOW,
    assert_registers_suffice,
    window_and_score,
)
from eqxcute.layers.attention import _config
from eqxcute.layers.attention._config import Sm90Backward

from eqxcute import testing
from eqxcute._arch import ARCHITECTURES

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
                (WINDOW, Sizes(1, 150, 200, 1, 1, 64, 64), "bfloat16"),
                (MASKED, Sizes(2, 150, 130, 4, 2, 128, 128), "bfloat16"),
                (SOFT, Sizes(1, 130, 200, 2, 1, 64, 64), "bfloat16"),
                (PLAIN, Sizes(1, 77, 130, 2, 2, 128, 128), "float16"),
                (PLAIN, Sizes(1, 1, 200, 2, 1, 96, 96), "bfloat16"),
                (WINDOW, Sizes(1, 200, 77, 2, 1, 8, 8), "bfloat16"),
                (CAPTURED, Sizes(1, 200, 150, 2, 1, 64, 64), "bfloat16"),
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
def test_another_configuration_agrees(monkeypatch):
    config = Sm90Backward(tile_q=64, stages=3, ds_stages=3, hidden=True)
    monkeypatch.setattr(_config, "HOPPER_BACKWARD", (((64, 64), config),))
    monkeypatch.setattr(testing, "_interpreted", {})
    check(MASKED, Sizes(1, 150, 130, 2, 1, 64, 64), "bfloat16", architecture="sm_90a")


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
                (64, dict(zip(("mask", "score"), window_and_score(None), strict=True)), False),
                (128, dict(zip(("mask", "score"), window_and_score(None), strict=True)), False),
            )
        ),
    ],
)
def test_registers_suffice(dim, functions, deterministic):
    """Nothing is spilled, and no product waits for the one before it."""
    found = built("backward", dim, "sm_90a", deterministic=deterministic, **functions)
    assert_registers_suffice(found, "Backward90")


@pytest.mark.parametrize(
    ("dim", "v_dim", "tile_q"),
    [(64, 64, 128), (40, 8, 128), (128, 128, 64), (72, 128, 64), (64, 65, 64), (136, 64, None)],
)
def test_tiles(dim, v_dim, tile_q):
    facts = ARCHITECTURES["sm_90a"]
    found = _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 128))
    assert (None if found is None else found.tile_q) == tile_q
    assert _config.hopper_backward(facts, dim, v_dim, "float32") is None
    # Past that many queries nothing is known of them: a tile may not reach there.
    for queries in (192, 256):
        assert _config.hopper_backward(facts, dim, v_dim, "bfloat16", (queries, 128)) is None
    scored = _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 128), scored=True)
    assert (None if scored is None else scored.tile_q) == (None if tile_q is None else 64)
    # A map's tile is whole tiles.
    assert _config.hopper_backward(facts, dim, v_dim, "bfloat16", (128, 64)) is None
