"""Attention's kernels with a line changed: the PTX interpreter notices.

So what its silence says of the kernels as they are is worth something.
"""

import dataclasses
import importlib
import importlib.util
import sys

import numpy as np
import pytest
from eqxcute.layers.attention import _attend
from eqxcute.layers.attention._compiled import Functions
from eqxcute.layers.attention._config import Sm80Backward, Sm80Forward

from eqxcute import testing
from eqxcute.testing import KernelFault, interpret

PACKAGE = "eqxcute.layers.attention._kernels"
FORWARD = _attend.ForwardKernel(
    Functions(None, None), None, None, 0.25, config=Sm80Forward(tile_q=32, tile_kv=32, warps=2)
)
BACKWARD = _attend.BackwardKernel(
    *(FORWARD.functions, None, None, (), 0.25),
    config=Sm80Backward(tile_q=32, tile_kv=32, warps=4, down_s=2, down_kv=2, down_q=2, vector=1),
)
ONE_STAGE = dataclasses.replace(BACKWARD, config=dataclasses.replace(BACKWARD.config, stages=1))


def run(kernel, length=70, group=1, v_dim=16):
    def array(*shape):
        return np.random.default_rng(len(shape)).normal(size=shape).astype("float16")

    q, k, v = array(1, length, 1, group, 16), array(1, length, 1, 16), array(1, length, 1, v_dim)
    out, lse = array(1, length, 1, group, v_dim), np.zeros((1, 1, group, length), "f4")
    where = np.zeros((1, 1), np.int32), np.arange(group, dtype=np.int32)[None], None, (), ()
    more = () if kernel is FORWARD else (out, lse, out, lse)
    return interpret(kernel, q, k, v, *more, *where)


pytestmark = pytest.mark.slow  # no part of JAX in it: once is enough


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """`changed(name, old, new, users)`: in `users`, what comes from a kernel module comes from it with a line changed."""

    def change(name, old, new, users):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        text = module.__spec__.loader.get_source(module.__name__)
        assert text.count(old) == 1
        file = tmp_path / f"changed_{name}.py"
        file.write_text(text.replace(old, new))
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{file.stem}", file)
        other = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, other)
        spec.loader.exec_module(other)
        for user in users:
            user = importlib.import_module(f"{PACKAGE}.{user}")
            for attribute, value in list(vars(user).items()):
                if getattr(value, "__module__", None) == module.__name__:
                    monkeypatch.setattr(user, attribute, getattr(other, attribute))
        monkeypatch.setattr(testing, "_interpreted", {})

    return change


WAIT, BARRIER = "cute.arch.cp_async_wait_group(0)\n", "cute.arch.sync_threads()"
IN_FLIGHT, RACE = "while a cp.async to them is in flight", "race on bytes"


# `next_tile` waits for the copies, and for those who still read what it loads next.
@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("stages", WAIT, "pass\n", IN_FLIGHT),
        ("stages", BARRIER, "pass", RACE),
        (
            "matrix",
            "inside = left > i * down",
            "inside = left > -1000",
            "out of bounds: reads bytes",
        ),
    ],
)
def test_forward(changed, name, old, new, words):
    changed(name, old, new, {"stages": ["forward"], "matrix": ["stages", "forward"]}[name])
    with pytest.raises(KernelFault, match=words):
        run(FORWARD)


# There, and between what writes P and dS and what reads them.
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (WAIT + "        cute.arch.sync_threads()  # all", BARRIER + "  # all", IN_FLIGHT),
        (BARRIER + "  # all", "pass  # all", RACE),
        (BARRIER + "\n\n        multiply(", "multiply(", RACE),
    ],
)
def test_backward(changed, old, new, words):
    changed("backward", old, new, ["backward"])
    with pytest.raises(KernelFault, match=words):
        run(BACKWARD)


# A barrier that separates what is read from what is then written to its place, or what is written from who reads it.
@pytest.mark.parametrize(
    ("kernel", "name", "after", "options"),
    [
        # Three tiles: the next head's first takes the place of the last one.
        (
            BACKWARD,
            "backward",
            "        if const_expr(self.config.stages > 1):\n            if",
            {"group": 2},
        ),
        (ONE_STAGE, "backward", "            self.load(tid, sources, tiles, j, 0)", {}),
        (BACKWARD, "backward", "        to_shared(products, tid, acc, tile)", {}),
        (BACKWARD, "backward", "        rows = self.config.tile_kv", {}),
        # Its rows are wider than those of q, so that they are other warps' rows.
        (FORWARD, "forward", "  # before out takes the place of q", {"v_dim": 64}),
        (FORWARD, "forward", "        store_tile(", {}),
    ],
)
def test_barriers(changed, kernel, name, after, options):
    before = "" if after.startswith("  #") else "\n"
    changed(name, BARRIER + before + after, "pass" + before + after, [name])
    with pytest.raises(KernelFault, match=RACE):
        run(kernel, **options)
