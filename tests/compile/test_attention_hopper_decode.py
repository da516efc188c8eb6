"""Attention of few queries on Hopper: heads packed into a tile, keys shared out to several CTAs, their results combined."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_builds import built, causal
from attention_formula import (
    Case,
    Formula,
    Sizes,
    by_kernel,
    check,
    check_outputs,
    compare_all,
    given,
)
from attention_hopper import PLAIN, assert_registers_suffice
from eqxcute.layers import flex_attention
from eqxcute.layers.attention import _config
from eqxcute.layers.attention._config import Combination, Sizing

import eqxcute
from eqxcute import testing
from eqxcute._arch import ARCHITECTURES
from eqxcute._ptx._run import Device

FACTS = ARCHITECTURES["sm_90a"]
check_outputs = functools.partial(check_outputs, architecture="sm_90a")


@pytest.fixture
def launched(monkeypatch):
    """With few multiprocessors, and where short sequences are worth sharing out. Gives the grids of Hopper's kernel."""
    monkeypatch.setattr(_config, "SMS", 7)
    monkeypatch.setattr(_config, "COMBINING", 0)
    monkeypatch.setattr(_config, "TUNED", {})
    monkeypatch.setattr(testing, "_interpreted", {})
    grids, launch = [], Device.launch

    def noted(device, name, grid, *rest):
        if "Forward90" in name:
            grids.append(grid[0])
        launch(device, name, grid, *rest)

    monkeypatch.setattr(Device, "launch", noted)
    return grids


# Attention


def _last(c):
    """The queries are the last of the keys, of which every third is padding."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx + 650 >= kv_idx) & (kv_idx % 3 != 0)

    return mask, None


def _lengths(c):
    """Batch entries of different lengths: one has all its keys in one tile. Of most tiles a key is hidden."""

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < 90 + 600 * b + q_idx) & (kv_idx % 200 != 7)

    return mask, None


def _blind(c):
    """Some queries see nothing, others see keys that one CTA has, and the rest all."""

    def mask(b, h, q_idx, kv_idx):
        few = (kv_idx >= 130) & (kv_idx < 140)
        return (q_idx % 3 == 0) & few | (q_idx % 3 == 2)

    return mask, None


def _by_head(c):
    """Arrays and indices of the head, which differ within a tile. The mask is alike for all heads, so that they are packed."""

    def score(s, b, h, q_idx, kv_idx):
        return s * c["slopes"][h] - 0.01 * h * (q_idx - kv_idx) + c["keys"][b, kv_idx]

    return _last(c)[0], score


def _other_heads(c):
    """A map whose lists differ by head: they are not packed."""

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < 128 * (h + 1)) & (kv_idx >= 100 * h)

    return mask, None


LAST, LENGTHS, BLIND = Case(_last), Case(_lengths), Case(_blind)
BY_HEAD = Case(_by_head, {"slopes": (8,), "keys": (2, 700)})
OTHER_HEADS = Case(_other_heads)


@pytest.mark.parametrize(
    ("case", "sizes", "dtype", "grid"),
    [
        # 3 queries of 4 heads lie in one tile of 64 rows, whose keys are shared out to 3 CTAs: two tiles each, or none.
        (LENGTHS, Sizes(2, 3, 700, 4, 1, 64, 64), "bfloat16", 2 * 3),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (LAST, Sizes(1, 3, 700, 8, 2, 64, 64), "bfloat16", 2 * 3),
                (PLAIN, Sizes(1, 1, 700, 4, 1, 128, 128), "bfloat16", 6),
                (PLAIN, Sizes(3, 1, 300, 4, 1, 64, 64), "float16", 3 * 2),
                (BLIND, Sizes(1, 16, 600, 4, 1, 64, 64), "bfloat16", 5),
                (BY_HEAD, Sizes(2, 5, 700, 8, 2, 64, 72), "bfloat16", 4 * 1),
                (BY_HEAD, Sizes(1, 9, 650, 8, 1, 64, 64), "bfloat16", 6),
                (OTHER_HEADS, Sizes(1, 2, 700, 4, 2, 64, 64), "bfloat16", 4 * 1),
                # 3 heads are not packed, of 6 two are.
                (LAST, Sizes(1, 2, 700, 3, 1, 64, 64), "bfloat16", 3 * 2),
                (LAST, Sizes(1, 2, 700, 6, 1, 40, 64), "bfloat16", 3 * 2),
                # More rows than a warpgroup has.
                (LAST, Sizes(1, 40, 700, 4, 1, 128, 128), "bfloat16", 2 * 3),
                (LAST, Sizes(1, 130, 700, 1, 1, 64, 64), "bfloat16", 3),
                (LAST, Sizes(1, 4, 300, 4, 2, 192, 128), "bfloat16", 2 * 3),
                (LAST, Sizes(1, 4, 300, 4, 1, 256, 256), "bfloat16", 3),
            )
        ),
    ],
)
def test_agrees(launched, case, sizes, dtype, grid):
    check_outputs(case, sizes, dtype)
    assert launched == [grid]


@pytest.mark.slow
def test_queries_that_see_nothing():
    out, lse = check_outputs(BLIND, Sizes(1, 16, 600, 4, 1, 64, 64), "bfloat16")
    blind = np.arange(16) % 3 == 1
    assert (np.isneginf(lse[0]) == blind).all()
    assert not out[0, blind].any()


@pytest.mark.slow
def test_gradients(launched):
    check(BY_HEAD, Sizes(1, 5, 700, 8, 2, 64, 64), "bfloat16", architecture="sm_90a", slack=3.0)
    assert launched == [2 * 3]


@pytest.mark.slow
def test_vmap(launched):
    """Each example has its own keys and arrays; it is sized by one, and its grid is that of all."""
    sizes = Sizes(1, 3, 700, 4, 1, 64, 64)
    case = Case(
        lambda c: (_last(c)[0], lambda s, b, h, q, kv: s * c["slopes"][h]), {"slopes": (4,)}
    )
    inputs, cotangents = given(case, sizes, "bfloat16", lead=(2,))
    got = by_kernel(case, inputs, cotangents, "sm_90a", mapped=True)
    compare_all(got, *Formula(case, sizes, "bfloat16", mapped=True)(inputs, cotangents), slack=3.0)
    assert launched == [2 * 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizing",
    [
        Sizing(few=True, pack=4, split=True),
        Sizing(few=True, pack=2, short=True),
        Sizing(pack=16, split=True),
        Sizing(),
    ],
)
def test_any_sizing_is_right(launched, monkeypatch, sizing):
    """As where shards have other sizes than the whole."""
    monkeypatch.setattr(_config, "sizing", lambda *_, **__: sizing)
    group = max(sizing.pack, 4)
    check_outputs(LAST, Sizes(1, 70, 300, group, 1, 64, 64), "bfloat16")


def test_symbolic_sizes_are_not_guessed():
    """In an export, also of what is mapped over an axis of a symbolic size."""
    (n,) = jax.export.symbolic_shape("n")
    k = jax.ShapeDtypeStruct((n, 1, 4096, 2, 64), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((n, 1, 1, 8, 64), jnp.bfloat16)
    attend = functools.partial(flex_attention, implementation="cute")
    for function in (jax.vmap(attend), lambda q, k, v: attend(q[:, 0], k[:, 0], v[:, 0])):
        with eqxcute.architecture("sm_90a"):
            found = jax.eval_shape(function, q, k, k)
        assert found.shape[0] == n


# What is chosen


@pytest.mark.parametrize(
    ("sizes", "options", "want", "parts"),
    [
        # Batch 64, 32 heads: four waves without a split.
        ((2048, 1, 32768, 4), {}, Sizing(few=True, pack=4), 1),
        ((256, 1, 32768, 4), {}, Sizing(few=True, pack=4, split=True), 2),
        ((32, 1, 32768, 4), {}, Sizing(few=True, pack=4, split=True), 16),
        ((32, 16, 32768, 4), {}, Sizing(few=True, pack=4, split=True), 16),
        ((32, 17, 32768, 4), {}, Sizing(pack=4, split=True), 16),
        ((32, 1, 32768, 1), {}, Sizing(few=True, split=True), 4),
        ((32, 1, 32768, 4), {"alike": False}, Sizing(few=True, split=True), 4),
        ((32, 1, 32768, 4), {"met": 2}, Sizing(short=True, few=True, pack=4), 1),
        ((32, 64, 32768, 4), {}, Sizing(few=True, split=True), 4),
        ((32, 8192, 8192, 4), {}, Sizing(), 1),
        ((4, 1, 100, 4), {"met": 1}, Sizing(short=True, few=True, pack=4), 1),
    ],
)
def test_sizing(sizes, options, want, parts):
    options = {"met": sizes[2] / 128, "alike": True} | options
    found = _config.sizing(*sizes, **options)
    assert found == want
    assert not found.split or _config.parts_of(found, *sizes[:3]) == parts


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (64, 256)])
def test_many_bytes_are_on_their_way(dims):
    base = _config.hopper_forward(FACTS, *dims, "bfloat16", (128, 128))
    found = _config.sized(base, Sizing(few=True, pack=4, split=True), FACTS, *dims, (128, 128))
    assert (found.warpgroups, found.pack, found.split) == (1, 4, True)
    assert found.stages * found.tile_kv * sum(dims) * 2 >= 96 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_registers_suffice(dim):
    """Nothing is spilled, and no product waits for the one before it, where one warpgroup computes."""
    sizing = Sizing(few=True, pack=2, split=True)
    assert_registers_suffice(
        built("forward", dim, "sm_90a", mask=causal, sizing=sizing), "Forward90"
    )


# Combining


class CombineKernel(eqxcute.Kernel):
    config: Combination = eqxcute.static()
    dtype: str = eqxcute.static()
    signature = "p r q n g e!%8, p r n g q -> r q n g e, r n g q"

    def out_dtypes(self, *_):
        return self.dtype, jnp.float32

    def launch(self, stream, parts, lses, out, lse):
        from eqxcute.layers.attention._kernels.combine import Combine

        Combine(self.config)(stream, parts, lses, out, lse)


@pytest.mark.parametrize(
    ("shape", "dtype", "warps"),
    [
        # More parts than a warp has lanes; lines of no whole CTAs.
        ((35, 2, 3, 1, 3, 136), "bfloat16", 4),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (((1, 1, 1, 2, 1, 8), "float16", 2), ((4, 1, 5, 2, 2, 256), "bfloat16", 1))
        ),
    ],
)
def test_combine(shape, dtype, warps):
    p, r, q, n, g, _ = shape
    random = np.random.default_rng(0)
    parts = random.normal(size=shape).astype(np.float32)
    lses = (5 * random.normal(size=(p, r, n, g, q))).astype(np.float32)
    lses[: p // 2, :, :, 0] = -np.inf  # parts that saw nothing
    lses[:, 0, 0, 0, -1] = -np.inf  # a query that did not
    parts[np.isneginf(np.moveaxis(lses, 4, 2))] = 0
    kernel = CombineKernel(Combination(warps=warps), dtype)
    out, lse = map(np.asarray, testing.interpret(kernel, parts, lses, architecture="sm_90a"))
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(lses.astype(np.float64)).sum(0))
    weights = np.exp(lses - np.where(np.isneginf(want), 0, want))
    sums = (np.moveaxis(weights, 4, 2)[..., None] * parts).sum(0)
    np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.astype(np.float64), sums, rtol=0, atol=2**-8 * abs(sums).max())
    assert not out[0, -1, 0, 0].any()
