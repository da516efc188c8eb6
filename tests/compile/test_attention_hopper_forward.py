"""Attention's forward kernel for Hopper: in the PTX interpreter against the formula, and as ptxas leaves it."""

import dataclasses
import functools

import numpy as np
import pytest
from attention_builds import built, capped, causal
from attention_formula import Case, Sizes, check_outputs
from attention_hopper import MASKED, PLAIN, assert_registers_suffice
from eqxcute.layers.attention import _config, tile_map
from eqxcute.layers.attention._config import Sm90Forward
from eqxcute.layers.attention._kernels import forward90
from eqxcute.layers.attention._kernels.roles import Plan, Ring, Role

from eqxcute import CompileError, testing
from eqxcute._ptx._run import Device

check = functools.partial(check_outputs, architecture="sm_90a")


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    """CTAs of a persistent grid take several tiles each; and tiles are those that `_config.py` says."""
    monkeypatch.setattr(forward90, "SMS", 3)
    monkeypatch.setattr(_config, "TUNED", {})
    monkeypatch.setattr(testing, "_interpreted", {})


def _blind(c):
    """A mask that only reads: some queries of every tile see nothing, and the last ones see nothing at all."""

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx % 3 == 0) & (q_idx % 5 != h) & (q_idx < 100) & (kv_idx < 100)

    return mask, None


BLIND = Case(_blind)
SIZES = Sizes(1, 150, 300, 4, 1, 64, 64)


@pytest.mark.parametrize(
    ("case", "sizes", "dtype"),
    [
        # Several tiles each way, the last ones ragged. More cases, of dims up to 128, run both kernels: see
        # test_attention_hopper_backward.py.
        (MASKED, Sizes(1, 200, 150, 2, 1, 64, 64), "bfloat16"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (MASKED, Sizes(1, 200, 150, 1, 1, 192, 128), "bfloat16"),
                (MASKED, Sizes(1, 140, 140, 1, 1, 256, 256), "float16"),
                (PLAIN, Sizes(1, 130, 1, 1, 1, 64, 128), "bfloat16"),
            )
        ),
    ],
)
def test_agrees(monkeypatch, case, sizes, dtype):
    """And the shared memory that it asks for is what `_config.py` reckons, and barriers."""
    asked, launch, configs, sized = [], Device.launch, [], _config.sized

    def noted(device, name, *rest):
        if "Forward90" in name:
            asked.append(rest[-1])
        launch(device, name, *rest)

    def noted_config(*arguments):
        configs.append(sized(*arguments))
        return configs[-1]

    monkeypatch.setattr(Device, "launch", noted)
    monkeypatch.setattr(_config, "sized", noted_config)
    check(case, sizes, dtype)
    used = _config.hopper_forward_bytes(configs[-1], sizes.dim, sizes.v_dim, 16)
    assert used < max(asked) <= used + _config.BARRIER_BYTES


@pytest.mark.slow
def test_queries_that_see_nothing():
    out, lse = check(BLIND, SIZES, "bfloat16")
    seen = (np.arange(150) < 100) & (np.arange(150) % 5 != np.arange(4)[:, None])
    assert (np.isneginf(lse[0]) == ~seen).all()
    assert not out[0][~seen.T].any()


@pytest.mark.slow
def test_a_tile_of_the_map_is_many_of_the_kernel():
    """Of a map twice as high and three times as wide as the kernel's; what lies in empty tiles is NaN, and nobody looks."""
    tiles = tile_map(causal, q_len=150, kv_len=300, tile=(256, 384))
    check(MASKED._replace(options={"tiles": tiles}), SIZES, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (PLAIN, Sm90Forward(tile_kv=64, warpgroups=1, stages=1, persistent=True)),
        (MASKED, Sm90Forward(tile_kv=128, warpgroups=2, stages=2, hidden=1)),
        (MASKED, Sm90Forward(tile_kv=128, warpgroups=2, stages=2, pack=4)),
        (PLAIN, Sm90Forward(tile_kv=96, warpgroups=3, stages=2, pack=2, persistent=True)),
    ],
)
def test_configs_agree(monkeypatch, case, config):
    """Without a map any tile will do: not all of them divide those that maps have."""
    monkeypatch.setattr(_config, "HOPPER_FORWARD", (((64, 64), config),))
    check(case, SIZES, "bfloat16")


SCORED = {"mask": causal, "score": capped}


@pytest.mark.parametrize(
    ("dim", "functions"),
    [
        (64, {"mask": causal}),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((64, SCORED), (128, {"mask": causal}), (128, SCORED))
        ),
    ],
)
def test_registers_suffice(dim, functions):
    """Nothing is spilled, and no product waits for the one before it."""
    assert_registers_suffice(built("forward", dim, "sm_90a", **functions), "Forward90")


# Plans


LOAD, COMPUTE = Role("load", 4, 24), Role("compute", 8, 240)


@pytest.mark.parametrize(
    ("roles", "rings", "words"),
    [
        ((LOAD, Role("compute", 12, 240)), (), "95232 registers of 65536"),
        ((LOAD, Role("compute", 6, 240)), (), "6 warps are no whole warpgroups"),
        ((LOAD, Role("compute", 8, 236)), (), "236 registers; setmaxnreg takes multiples of 8"),
        ((LOAD, Role("compute", 4, 264)), (), "264 registers; setmaxnreg takes"),
        ((LOAD, COMPUTE), (Ring("k", 2, 64, "add"),), "ring k: no role is called add"),
        ((LOAD, COMPUTE), (Ring("k", 0, 64),), "ring k: 0 slots of 64 bytes"),
        ((LOAD, COMPUTE), (Ring("k", 2, 72),), "ring k: 2 slots of 72 bytes"),
        ((LOAD, COMPUTE), (Ring("k", 2, 1 << 20),), "1048576 bytes"),
    ],
)
def test_plans_that_cannot_be(roles, rings, words):
    with pytest.raises(ValueError, match=words):
        Plan(roles, rings)


def test_a_plan():
    plan = Plan((LOAD, Role("compute", 8, 216), Role("add", 4, 24)), (Ring("k", 2, 64, "add"),))
    assert plan.threads == 512
    assert [plan.first_warp(x) for x in ("load", "compute", "add")] == [0, 4, 12]
    assert plan.role("add").registers == 24


@pytest.mark.parametrize("ring", ["q", "k", "v"])
def test_bytes_that_are_not_those_of_the_plan(monkeypatch, ring):
    """A ring of fewer: refused as the kernel is traced."""
    plan = forward90.Forward90.plan

    def other(self, *facts):
        found = plan(self, *facts)
        fewer = [
            dataclasses.replace(r, bytes=r.bytes - 16) if r.name == ring else r for r in found.rings
        ]
        return dataclasses.replace(found, rings=tuple(fewer))

    monkeypatch.setattr(forward90.Forward90, "plan", other)
    words = rf"ring {ring}: (\d+) bytes are copied into a slot of "
    with pytest.raises(CompileError, match=words):
        built("forward", 64, "sm_90a")
