"""The kernels beside the backward one, by the PTX interpreter against NumPy in float64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers.attention._config import (
    BEFORE,
    BeforeBackward,
    MapLayout,
    Sm80Backward,
    Sm80Queries,
)
from eqxcute.layers.attention._functions import trace_mask, trace_score

import eqxcute
from eqxcute.inline import differentiate
from eqxcute.testing import compile_only, interpret


def normal(seed, *shape, dtype="float32"):
    """In NumPy: JAX would compile something for each shape."""
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def f64(x):
    return np.asarray(x, np.float64)


def assert_close(got, want, units, eps=None):
    """Within so many `eps`, by default of the dtype, of the largest entry."""
    eps = float(jnp.finfo(got.dtype).eps) if eps is None else eps
    error = np.abs(f64(got) - want).max()
    assert error <= units * eps * np.abs(want).max(), error / (eps * np.abs(want).max())


def padded(x, value):
    """`(R, N, G, Q)` as `(R * N * G, Qpad)`."""
    length = x.shape[-1]
    x = np.reshape(x, (-1, length))
    return np.pad(x, ((0, 0), (0, -length % BEFORE.rows)), constant_values=value)


# Before: delta, lse in base 2, zeroed sums


class BeforeKernel(eqxcute.Kernel):
    config: BeforeBackward = eqxcute.static(BEFORE)
    signature = "... q n g e!%8, ... q n g e!%8, ... n g q, ... n g q?, l m, s -> l m, l m, s"

    def out_dtypes(self, *_):
        return jnp.float32, jnp.float32, jnp.float32

    def launch(self, stream, out, dout, lse, dlse, _, __, lse2, delta, sums):
        from eqxcute.layers.attention._kernels.before import Before

        Before(self.config)(stream, out, dout, lse, dlse, lse2, delta, sums)


@pytest.mark.slow
# The last of these has threads without a query, warps whose queries have lanes to spare, and ends a sweep early.
@pytest.mark.parametrize(
    ("shape", "dtype", "sums", "has_dlse", "config"),
    [
        ((2, 70, 1, 2, 64), "bfloat16", 4096, True, BEFORE),
        ((1, 200, 2, 1, 256), "float32", 40004, False, BEFORE),
        ((1, 130, 1, 2, 40), "float16", 4, True, BeforeBackward(rows=32, threads=64, sweeps=3)),
    ],
)
def test_before(shape, dtype, sums, has_dlse, config):
    rows, length, n, g, _ = shape
    out, dout = normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype)
    lse, dlse = normal(2, rows, n, g, length), normal(3, rows, n, g, length)
    lse[0, 0, 0, 3], dlse[0, 0, 0, 3] = -np.inf, np.nan
    like = np.zeros((rows * n * g, length + -length % BEFORE.rows), np.float32)
    given = (out, dout, lse, dlse if has_dlse else None, like, np.zeros(sums, np.float32))
    lse2, delta, zeros = interpret(BeforeKernel(config), *given)
    want = np.einsum("rqnge,rqnge->rngq", f64(out), f64(dout)) - (f64(dlse) if has_dlse else 0)
    nothing = np.isneginf(lse)
    want = padded(np.where(nothing, 0, want), 0)
    assert_close(delta, want, 8)
    want = padded(np.where(nothing, np.inf, f64(lse) * math.log2(math.e)), np.inf)
    np.testing.assert_allclose(f64(lse2), want, rtol=3e-7)
    assert not np.asarray(zeros).any()


def test_before_has_its_loads_in_flight_together_and_64_bit_addresses():
    def like(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    x, lse = like(2, 300, 2, 3, 64, dtype="bfloat16"), like(2, 2, 3, 300)
    code = compile_only(BeforeKernel(), x, x, lse, lse, like(12, 384), like(4096)).ptx
    kinds = re.findall(r"(ld\.global\.v4|st\.global\.v4|shfl|@%p\d+ bra)", code)
    told = "".join({"ld": "L", "st": "S", "sh": "H", "@%": "B"}[kind[:2]] for kind in kinds)
    assert "L" * 2 * BEFORE.sweeps in told
    assert told.count("L") == 2 * BEFORE.sweeps
    assert told.count("S") >= 1
    narrow = set(re.findall(r"(?:mul\.lo\.s32|mad\.lo\.s32)\s+(%r\d+)", code))
    assert not narrow & set(re.findall(r"mul\.wide\.[su]32\s+%rd\d+, (%r\d+), \d", code))


# After: sums in the order of registers to dQ


class AfterKernel(eqxcute.Kernel):
    scale: float = eqxcute.attribute()
    config: Sm80Backward = eqxcute.static()
    signature = "s, ... q n g d!%8 -> ... q n g d"

    def out_dtypes(self, sums, like):
        return like.dtype

    def launch(self, stream, sums, _, dq):
        from eqxcute.layers.attention._kernels.after import After

        After(self.config)(stream, sums, dq, self.scale)


def registers(config, width):
    """The row and the column of each number of a block, as `mma.sync` has its accumulators."""
    down, threads = config.down_q, 32 * config.warps
    across = config.warps // down
    counts = (threads, width // (8 * across), config.tile_q // (16 * down), 2, 2)
    thread, n, m, below, right = np.indices(counts).reshape(5, threads, -1)
    warp, lane = thread // 32, thread % 32
    row = 16 * (down * m + warp % down) + 8 * below + lane // 4
    column = 8 * (across * n + warp // down) + 2 * (lane % 4) + right
    by_vector = (threads, -1, config.vector)
    return [x.reshape(by_vector).swapaxes(0, 1).ravel() for x in (row, column)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "warps", "down", "vector"),
    [
        ((2, 70, 2, 2, 64), "bfloat16", 64, 4, 2, 4),
        ((1, 50, 1, 2, 40), "float16", 64, 4, 1, 1),
        ((1, 70, 2, 1, 128), "float32", 128, 4, 2, 4),
    ],
)
def test_after(shape, dtype, width, warps, down, vector):
    config = Sm80Backward(
        tile_q=32, tile_kv=64, warps=warps, down_s=2, down_kv=2, down_q=down, vector=vector
    )
    rows, length, n, g, dim = shape
    whole = f64(normal(0, rows, n, g, -(-length // 32), 32, width))
    row, column = registers(config, width)
    sums = whole[..., row, column].ravel().astype(np.float32)
    got = interpret(AfterKernel(0.3, config), sums, np.zeros(shape, jnp.dtype(dtype)))
    want = 0.3 * whole.reshape(rows, n, g, -1, width)[..., :length, :dim].transpose(0, 3, 1, 2, 4)
    assert got.dtype == dtype
    assert_close(got, want, 1)


# The queries' gradient in a fixed order


class QueriesKernel(eqxcute.Kernel):
    scale: float = eqxcute.attribute()
    config: Sm80Queries = eqxcute.static()
    functions: tuple = eqxcute.static((None, None, None))
    layout: MapLayout | None = eqxcute.static(None)
    passes: int = eqxcute.static(1)
    parallel = ("n",)
    signature = (
        "... q n g d!%8, ... k n d!%8, ... k n e!%8, ... q n g e!%8, l m, l m, ... c!, n g, {}, {}, {} "
        "-> ... q n g d"
    )

    def out_dtypes(self, q, *_):
        return q.dtype

    def launch(self, stream, *arrays):
        from eqxcute.layers.attention._kernels.queries import QueriesBackward

        kernel = QueriesBackward(self.config, *self.functions, self.layout, self.passes)
        kernel(stream, *arrays, self.scale)


def forward_lists(seen, tile):
    """As a tile map has them: tiles, partial ones first, how many are partial and full, and the longest rows first."""
    across = [(0, -size % side) for size, side in zip(seen.shape[2:], tile, strict=True)]
    parts = np.pad(seen, ((0, 0), (0, 0), *across))
    inside = np.pad(np.ones_like(seen), ((0, 0), (0, 0), *across))
    cut = (*seen.shape[:2], parts.shape[2] // tile[0], tile[0], parts.shape[3] // tile[1], tile[1])
    some = parts.reshape(cut).any((3, 5))
    every = (parts | ~inside).reshape(cut).all((3, 5))
    kind = np.where(every, 1, np.where(some, 0, 2))
    counts = [(kind == i).sum(-1) for i in (0, 1)]
    found = (
        np.argsort(kind, -1, "stable"),
        *counts,
        np.argsort(-counts[0] - counts[1], -1, "stable"),
    )
    return tuple(x.astype(np.int32) for x in found)


def gradient(shape, dtype, config, passes=1, mask=None, score=None, slope=None, tile=None):
    """dQ from the kernel, and from NumPy. `score` is traced, so its NumPy twin comes with its slope."""
    rows, length, keys, n, g, dim, v_dim = shape
    heads, scale = n * g, dim**-0.5
    q, k = (
        normal(0, rows, length, n, g, dim, dtype=dtype),
        normal(1, rows, keys, n, dim, dtype=dtype),
    )
    v = normal(2, rows, keys, n, v_dim, dtype=dtype)
    dout = normal(3, rows, length, n, g, v_dim, dtype=dtype)
    delta = normal(4, rows, n, g, length)  # whatever it is

    b, h, q_idx, kv_idx = np.indices((rows, heads, length, keys)).reshape(
        4, rows, n, g, length, keys
    )
    seen = np.ones_like(b, bool) if mask is None else mask(b, h, q_idx, kv_idx)
    s, ds = np.einsum("rqngd,rknd->rngqk", f64(q), f64(k)) * scale, 1.0
    if slope is not None:
        with np.errstate(invalid="ignore"):
            s, ds = slope(s, h, q_idx, kv_idx)
    total = np.where(seen, np.exp(s), 0).sum(-1)
    with np.errstate(divide="ignore"):
        lse2 = np.where(total > 0, np.log2(total), np.inf)
    p = np.where(seen, np.exp2(s * math.log2(math.e) - lse2[..., None]), 0)
    dp = np.einsum("rqnge,rkne->rngqk", f64(dout), f64(v))
    ds = np.where(seen, p * (dp - delta[..., None]) * ds, 0)
    want = np.einsum("rngqk,rknd->rqngd", ds, f64(k)) * scale

    codes, lists, layout, mask_arrays, score_arrays = [None] * 3, None, None, (), ()
    if mask is not None:
        program, captured = trace_mask(mask)
        codes[0], mask_arrays = program.code, tuple(program.prepare(captured))
        lists = forward_lists(seen.reshape(rows, heads, length, keys), tile)
        layout = MapLayout((), True, True, tile)
    if score is not None:
        program, captured = trace_score(score, jnp.float32)
        codes[1:], score_arrays = (
            (program.code, differentiate(program).program.code),
            tuple(program.prepare(captured)),
        )
    kernel = QueriesKernel(scale, config, tuple(codes), layout, passes)
    got = interpret(
        kernel,
        *(q, k, v, dout),
        *(padded(x, z).astype(np.float32) for x, z in ((lse2, np.inf), (delta, 0))),
        np.arange(rows, dtype=np.int32)[:, None],
        np.arange(heads, dtype=np.int32).reshape(n, g),
        *(lists, mask_arrays, score_arrays),
    )
    return got, want


SMALL = Sm80Queries(tile_q=32, tile_kv=16, warps=2)


@pytest.mark.slow
# Units and eps: twice what was seen. tf32 has 10 bits of mantissa.
@pytest.mark.parametrize(
    ("shape", "dtype", "passes", "units", "eps"),
    [
        ((2, 40, 70, 1, 2, 128, 40), "bfloat16", 1, 1, None),
        ((1, 20, 40, 2, 1, 40, 64), "float16", 1, 1, None),
        ((1, 20, 40, 1, 1, 24, 16), "float32", 1, 2, 2.0**-10),
    ],
)
def test_queries(shape, dtype, passes, units, eps):
    got, want = gradient(shape, dtype, SMALL, passes)
    assert got.dtype == dtype
    assert_close(got, want, units, eps)


def test_queries_with_a_mask_and_a_score():
    """Causal, but for a query that sees nothing in one head. The score's slope is NaN where the mask says no, and the
    score infinite past the last key. Tiles of the map are 3 x 4 of the kernel's, and the last reaches past the padding."""
    bias = jnp.asarray([0.5, -1.0])

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx != 3) | (h == 1))

    def score(s, b, h, q_idx, kv_idx):
        return jnp.tanh(s) * jnp.sqrt(q_idx - kv_idx + 0.25) + bias[h] / (130 - kv_idx)

    def slope(s, h, q_idx, kv_idx):
        root = np.sqrt(q_idx - kv_idx + 0.25)
        return np.tanh(s) * root + f64(bias)[h] / (130 - kv_idx), (1 - np.tanh(s) ** 2) * root

    shape = (1, 200, 130, 1, 2, 24, 16)
    got, want = gradient(shape, "float32", SMALL, 3, mask, score, slope, (96, 64))
    assert_close(got, want, 16)
