"""Gradients of captured arrays, from accumulators: in the PTX interpreter, against NumPy.

The kernel here does what the backward kernels do around them, with dS' read from memory: accumulators of (queries, keys)
by `mma.sync`, or turned ones of (keys, queries) by `wgmma`.
"""

import math
import re
from typing import Any

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers.attention._compiled import compiled
from eqxcute.layers.attention._config import words_workspace
from eqxcute.layers.attention._functions import trace_score
from eqxcute.layers.attention._kernels import bins, hopper
from eqxcute.layers.attention._kernels.captured import start_captured
from eqxcute.layers.attention._kernels.matrix import Products, by_rows, coordinates

import eqxcute
from eqxcute.inline import bind, results, start
from eqxcute.testing import compile_only, interpret

WARPS = 4


class Gradients(eqxcute.Kernel):
    """score, ds (b, h, q, k): a CTA takes `columns` keys of a batch entry, and all its heads and queries, `rows` at once."""

    derived: Any = eqxcute.static()
    ranks: tuple[int, ...] = eqxcute.static()
    rows: int = eqxcute.static(32)
    columns: int = eqxcute.static(32)
    down: int = eqxcute.static(2)  # warps that share the rows; or 0 for warpgroups, each of 64 keys
    deterministic: bool = eqxcute.static(False)

    @property
    def signature(self):
        terms = [" ".join(f"s{i}_{j}" for j in range(n)) or "()" for i, n in enumerate(self.ranks)]
        return f"b h q k, b h q k, ctas, [{', '.join(terms)}] -> {', '.join(terms)}"

    def out_dtypes(self, *arguments):
        return jnp.float32

    def out_tree(self, *arguments):
        return tuple(0 for _ in self.ranks)

    def workspace(self, score, ds, order, arrays):
        if not self.deterministic:
            return ()
        return tuple(jax.ShapeDtypeStruct(words_workspace(x.shape), jnp.int32) for x in arrays)

    @cute.jit
    def launch(self, stream, score, ds, order, arrays, gradients, *words):
        words = words if self.deterministic else [None] * len(gradients)
        targets = tuple(bins.Target(g, w) for g, w in zip(gradients, words, strict=True))
        for i in cutlass.range_constexpr(len(targets)):
            bins.clear(stream, targets[i])
        grid = [score.shape[0] * cute.ceil_div(score.shape[3], self.columns), 1, 1]
        threads = 32 * WARPS if self.down else 2 * self.columns
        self.kernel(score, ds, order, arrays, targets).launch(
            grid=grid, block=[threads, 1, 1], stream=stream
        )
        if cutlass.const_expr(self.deterministic):
            for i in cutlass.range_constexpr(len(targets)):
                bins.fold(stream, targets[i])

    @cute.kernel
    def kernel(self, score, ds, order, arrays, targets):
        tid, _, _ = cute.arch.thread_idx()
        cta = order[cute.arch.block_idx()[0]]
        b, first = cta % score.shape[0], cta // score.shape[0] * self.columns
        if cutlass.const_expr(self.down):
            products = Products(cutlass.BFloat16, self.down, WARPS // self.down)
            at = by_rows(coordinates(products, tid, self.rows, self.columns))
        else:
            mma = hopper.product(cutlass.BFloat16, self.rows)
            group, thread = tid // hopper.WARPGROUP, tid % hopper.WARPGROUP
            at = hopper.by_rows(hopper.coordinates(mma, thread, self.rows))
            first = first + group * hopper.ROWS
        whole = bind(start(self.derived.code, arrays), b=b)
        captured = start_captured(*self.derived, targets, at, first, turned=self.down == 0)
        for h in cutlass.range(score.shape[1], unroll=1):
            head = bind(whole, h=h)
            for j in cutlass.range(cute.ceil_div(score.shape[2], self.rows), unroll=1):
                given = score[b, h, None, None], ds[b, h, None, None]
                self.tile(captured, head, at, given, j * self.rows, first)
            captured.finish_head(head)
        captured.finish(whole)

    @cute.jit
    def tile(
        self,
        captured: cutlass.Constexpr,
        head: cutlass.Constexpr,
        at,
        given,
        first_query,
        first_key,
    ):
        score, ds = given
        for r in cutlass.range_constexpr(cute.size(at, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(at, mode=[1])):
                row, column = at[r, 0][0], at[0, c][1]
                query, key = (row, column) if self.down else (column, row)
                q, k = first_query + query, first_key + key
                s, d = cutlass.Float32(0.0), cutlass.Float32(0.0)
                if (q < score.shape[0]) & (k < score.shape[1]):
                    s, d = score[q, k], ds[q, k]
                values = results(bind(head, q_idx=q, kv_idx=k, score=s))
                captured.add(r, c, d != 0.0, d, values)
        captured.finish_tile(head, first_query)


def by_head(slopes, score, b, h, q_idx, kv_idx):
    return score * slopes[h]


def one_for_all(scale, score, b, h, q_idx, kv_idx):
    return score * scale


def by_key(bias, score, b, h, q_idx, kv_idx):
    return score + bias[b, kv_idx] * jnp.tanh(score)


def by_key_and_head(bias, score, b, h, q_idx, kv_idx):
    return score + bias[h, kv_idx]


def by_query(bias, score, b, h, q_idx, kv_idx):
    return score + score * bias[h, q_idx // 2]


def by_distance(table, score, b, h, q_idx, kv_idx):
    most = table.shape[1] // 2
    return score + table[h, jnp.clip(kv_idx - q_idx - 3, -most, most) + most] * score


def by_bucket(table, score, b, h, q_idx, kv_idx):
    distance = jnp.abs(q_idx - kv_idx)
    far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32)) * 2
    bucket = jnp.where(distance < 4, distance, 4 + far.astype(jnp.int32))
    return score + table[jnp.minimum(bucket, 9) + jnp.where(kv_idx > q_idx, 10, 0)]


def by_entry(bias, score, b, h, q_idx, kv_idx):
    return score * bias[h, q_idx, kv_idx]


def by_block(bias, score, b, h, q_idx, kv_idx):
    return score + bias[(q_idx // 64) * 2 + kv_idx // 64]


CASES = {
    "head": (by_head, (2,)),
    "for all": (one_for_all, ()),
    "column": (by_key, (2, 45)),
    "column and head": (by_key_and_head, (2, 45)),
    "row": (by_query, (2, 20)),
    "distance": (by_distance, (2, 41)),
    "bucket": (by_bucket, (20,)),
    "entry": (by_entry, (2, 37, 45)),
    "pair": (by_block, (4,)),
}
SIZES = 2, 2, 37, 45
# JAX adds up some thousand numbers one after the other, in float32.
TOLERANCE = 2e-5


def given(names):
    """The score function of several, one after the other, and its arrays."""
    rng = np.random.default_rng(0)
    functions = [CASES[name][0] for name in names]
    arrays = [jnp.asarray(rng.standard_normal(CASES[name][1]), jnp.float32) for name in names]

    def whole(arrays):
        def score_fn(score, *indices):
            for f, x in zip(functions, arrays, strict=True):
                score = f(x, score, *indices)
            return score

        return score_fn

    return whole, arrays


def numbers(sizes=SIZES):
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.standard_normal(sizes), jnp.float32) for _ in range(2))


def expected(whole, arrays, score, ds):
    indices = np.indices(score.shape).reshape(4, -1).astype(np.int32)

    def scores(arrays):
        return jax.vmap(whole(arrays))(score.reshape(-1), *indices)

    return jax.vjp(scores, arrays)[1](ds.reshape(-1))[0]


def kernel_of(names, **options):
    whole, arrays = given(names)
    program, captured = trace_score(whole(arrays), jnp.float32)
    function, operands = compiled(program, captured)
    order = [next(i for i, x in enumerate(arrays) if x is y) for y in captured]
    ranks = tuple(x.ndim for x in operands)
    kernel = Gradients(function.derived(), ranks, **options)
    return kernel, whole, arrays, operands, order


def order_of(score, columns=32):
    return jnp.arange(score.shape[0] * -(-score.shape[3] // columns), dtype=jnp.int32)


def interpreted(kernel, *arguments):
    return interpret(kernel, *arguments, architecture="sm_80" if kernel.down else "sm_90a")


def check(names, *numbers, **options):
    """Against JAX, in float32."""
    kernel, whole, arrays, operands, order = kernel_of(names, **options)
    score, ds = numbers
    got = interpreted(kernel, score, ds, order_of(score, kernel.columns), list(operands))
    want = expected(whole, arrays, score, ds)
    for x, i in zip(got, order, strict=True):
        assert x.shape == want[i].shape
        size = np.abs(want[i]).max()
        np.testing.assert_allclose(x, want[i], rtol=0, atol=TOLERANCE * size, err_msg=names[i])


def test_gradients():
    check(list(CASES), *numbers())


TURNED = {"down": 0, "rows": 24, "columns": 64}


def test_gradients_of_turned_accumulators():
    check(list(CASES), *numbers(), **TURNED)


@pytest.mark.slow
# Warps below and beside each other; a warp with one block of rows and with two; gaps between its blocks of columns.
@pytest.mark.parametrize(("rows", "columns", "down"), [(64, 32, 4), (32, 64, 1), (64, 32, 2)])
def test_diagonals_of_every_cut_among_warps(rows, columns, down):
    cut = {"rows": rows, "columns": columns, "down": down}
    check(["distance"], *numbers((1, 2, 70, 75)), **cut)


@pytest.mark.slow
# As few blocks of queries as of keys; two warpgroups, and many blocks of queries.
@pytest.mark.parametrize(("queries", "columns"), [(16, 64), (80, 128)])
def test_diagonals_of_turned_accumulators(queries, columns):
    cut = {"down": 0, "rows": queries, "columns": columns}
    check(["distance"], *numbers((1, 2, 90, 140)), **cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, TURNED], ids=["", "turned"])
def test_what_is_masked_adds_nothing(cut):
    """Neither to sums nor to memory: its derivative may be NaN."""
    kernel, *_, operands, _ = kernel_of(list(CASES), **cut)
    score = jnp.full((1, 2, 37, 45), jnp.nan)
    ctas = order_of(score, kernel.columns)
    got = interpreted(kernel, score, jnp.zeros_like(score), ctas, list(operands))
    assert all(np.all(np.asarray(x) == 0) for x in got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "cut"),
    [
        (["head", "column", "bucket", "pair"], {"rows": 64, "columns": 16, "down": 4}),
        (["head", "column", "row", "distance", "entry", "pair"], TURNED),
    ],
    ids=["", "turned"],
)
def test_deterministic_sums_do_not_depend_on_the_order_of_ctas(names, cut):
    score, ds = numbers()
    kernel, whole, arrays, operands, order = kernel_of(names, deterministic=True, **cut)
    ctas = order_of(score, kernel.columns)
    got = interpreted(kernel, score, ds, ctas, list(operands))
    again = interpreted(kernel, score, ds, ctas[::-1], list(operands))
    want = expected(whole, arrays, score, ds)
    for x, y, i in zip(got, again, order, strict=True):
        np.testing.assert_array_equal(x, y, names[i])
        size = np.abs(want[i]).max()
        np.testing.assert_allclose(x, want[i], rtol=0, atol=TOLERANCE * size, err_msg=names[i])


class AddTerms(eqxcute.Kernel):
    """`x[i]` to entry `at[i]` of an array of pairs, by the words of `bins`."""

    signature = "n, n, m k -> m k"

    def workspace(self, x, at, like):
        return (jax.ShapeDtypeStruct(words_workspace(like.shape), jnp.int32),)

    @cute.jit
    def launch(self, stream, x, at, like, out, words):
        target = bins.Target(out, words)
        bins.clear(stream, target)
        self.kernel(x, at, target).launch(
            grid=[cute.ceil_div(x.shape[0], 128), 1, 1], block=[128, 1, 1], stream=stream
        )
        bins.fold(stream, target)

    @cute.kernel
    def kernel(self, x, at, target):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < x.shape[0]:
            bins.add_term(target, bins.place_of(target, [at[i] // 2, at[i] % 2]), x[i])


@pytest.mark.slow
def test_terms_of_every_size_add_up_exactly():
    rng = np.random.default_rng(0)
    bits = np.frombuffer(rng.bytes(4 * 600), np.float32)
    spread = rng.standard_normal(300) * 2.0 ** rng.integers(-150, 126, 300)
    x = np.concatenate([bits[np.isfinite(bits)], spread]).astype(np.float32)
    groups = [
        x[np.abs(x) < 1e36],
        np.float32([2**24 - 1] * 300 + [1e-45]),
        np.float32([-1e-45]),
        np.float32([1.0, 2**-24, 2**-60]),
        np.float32([3e38, 1e-30, -3e38]),
        np.float32([3e38, 3e38]),
        np.float32([np.inf, 1, -1e30]),
        np.float32([np.inf, -np.inf]),
        np.float32([1, np.nan]),
        np.float32([-np.inf] * 3),
        np.float32([]),
        np.float32([]),
    ]
    at = np.repeat(np.arange(len(groups)), [len(g) for g in groups]).astype(np.int32)
    terms = np.concatenate(groups)
    mixed = rng.permutation(len(terms))
    got = interpret(AddTerms(), terms[mixed], at[mixed], np.zeros((6, 2), np.float32))
    with np.errstate(all="ignore"):
        exact = [math.fsum(g) if np.isfinite(g).all() else np.sum(g) for g in groups]
        want = np.array(exact).astype(np.float32)
    np.testing.assert_array_equal(got.reshape(-1), want)


def test_places_are_addressed_in_64_bits():
    """An array may have more than 2**31 entries."""
    one = np.zeros(1, np.int32)
    code = compile_only(AddTerms(), one.astype(np.float32), one, np.zeros((6, 2), np.float32)).ptx
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.add", code)) >= 3
    narrow = set(re.findall(r"(?:shl\.b32|mul\.lo\.s32|mad\.lo\.s32)\s+(%r\d+)", code))
    wide = re.findall(r"(?:mul\.wide\.[su]32|cvt\.s64\.s32)\s+%rd\d+, (%r\d+)", code)
    assert wide
    assert not narrow & set(wide)
