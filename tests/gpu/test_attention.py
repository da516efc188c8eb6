"""The attention kernels on inputs that broke others: values, LSE and gradients, many of them known by hand.

With q = 0 all scores are equal, so that a row is the mean of the values that it sees. `--on-cpu` runs this without a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Problem,
    agree,
    attend,
    by_kernels,
    check,
    close,
    kernels_made,
    launches,
    normal,
    plain,
    qkv,
    zeros_q,
)
from eqxcute.layers import FlexAttention, flex_attention
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    PaddingMask,
    SlidingWindowMask,
    SoftCap,
)

pytestmark = pytest.mark.on_cpu
small = pytest.mark.small


def of_mask(mask):
    return lambda c: (mask, None)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def rows(out):
    """Of a single head, whose rows have equal entries: of each its first, and its largest."""
    out = np.asarray(out, np.float64)[0, :, 0]
    return np.stack([out[:, 0], out.max(1)])


def known(problem: Problem, out, lse=None, **options):
    """Outputs and gradients against float64, and the outputs against what they are by hand."""
    got = check(problem, **options)
    found, want = {"out": rows(got["out"]).astype(got["out"].dtype)}, {"out": np.stack([out, out])}
    if lse is not None:
        found["lse"], want["lse"] = got["lse"][0, 0], np.asarray(lse)
    with np.errstate(divide="ignore"):
        rounded = {n: np.asarray(x).astype(found[n].dtype) for n, x in want.items()}
    agree(found, {n: np.asarray(x, np.float64) for n, x in want.items()}, rounded)
    return got


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float64))


def mean_below(counts):
    """Of 0, 1, ..., n - 1; 0 of none."""
    return np.maximum(np.asarray(counts) - 1, 0) / 2


# ---------------------------------------------------------------- masks and softmax


def after(c):
    """Keys more than `ahead` before the query."""
    return (lambda b, h, q_idx, kv_idx: kv_idx + c["ahead"] < q_idx), None


EMPTY = [  # length and `ahead`
    pytest.param(4, 0, marks=small, id="one-row"),
    pytest.param(70, 66, marks=small, id="a-whole-tile"),
    pytest.param(300, 0, id="the-first-of-many-tiles"),
    pytest.param(300, 200, id="most-tiles"),
    pytest.param(300, 300, id="all"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("length", "ahead"), EMPTY)
def test_a_row_that_sees_no_key(length, ahead, dtype):
    """M01, M02: it gives 0, an LSE of -inf, and zero gradients, whatever flows into it."""
    problem = Problem(after, zeros_q(length, length, dtype=dtype) | {"ahead": jnp.int32(ahead)})
    seen = np.maximum(np.arange(length) - ahead, 0)
    known(problem, mean_below(seen), log(seen))
    problem.arrays["q"] = normal(3, *problem.arrays["q"].shape, dtype=dtype)
    got = check(problem)
    empty = min(ahead + 1, length)
    assert not bool(got["dq"][:, :empty].any())
    assert all(bool(jnp.isfinite(got[f"d{n}"]).all()) for n in "qkv")
    assert not bool(got["dk"][:, length - empty :].any())  # keys that nobody sees
    assert not bool(got["dv"][:, length - empty :].any())


@pytest.mark.parametrize("by", ["shift", "-inf"])
@pytest.mark.parametrize("length", [pytest.param(64, marks=small), 192, 320, 704])
def test_scores_far_from_zero(length, by):
    """M04: the padding of the last tile is no key, whatever its score becomes; rows with an LSE below -88, or above 88."""

    def functions(c):
        if by == "shift":
            return (lambda *_: True), lambda s, *_: s + c["shift"]
        return None, lambda s, b, h, i, j: jnp.where((j < i) | (j == 0), s, -jnp.inf) + c["shift"]

    arrays = qkv(1, length, length, 1, 1, 64, dtype="bfloat16")
    for shift in (-100, 200):
        check(Problem(functions, arrays | {"shift": jnp.int32(shift)}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "length", [pytest.param(n, marks=small) for n in (1, 2, 31, 65)] + [63, 64, 127, 129, 137, 255]
)
def test_lengths_that_are_no_whole_tiles(length, dtype):
    """M06."""
    counts = np.arange(1, length + 1)
    known(
        Problem(of_mask(causal), zeros_q(length, length, dtype=dtype)),
        mean_below(counts),
        log(counts),
    )


@small
def test_one_query_of_many_keys():
    """M06."""
    known(Problem(plain, zeros_q(1, 64)), [31.5], [np.log(64)])
    known(Problem(plain, zeros_q(1, 257)), [128], [np.log(257)])


@small
def test_causal_of_unequal_lengths():
    """M07: top-left by default, bottom-right by offset; the same function at other sizes is the same kernel."""
    functions = lambda c: (CausalMask(c["offset"]), None)  # noqa: E731
    kernels = set()
    for q_len, kv_len in ((4, 6), (2, 9), (65, 70)):
        problem = Problem(functions, zeros_q(q_len, kv_len) | {"offset": jnp.int32(0)})
        for offset in (0, kv_len - q_len):
            problem.arrays["offset"] = jnp.int32(offset)
            seen = np.arange(q_len) + 1 + offset
            known(problem, mean_below(seen), log(seen))
            kernels.add(kernels_made())
    assert len(kernels) == 1
    fixed = Problem(of_mask(CausalMask.bottom_right(4, 6)), zeros_q(4, 6))
    known(fixed, [1, 1.5, 2, 2.5], log([3, 4, 5, 6]))


@small
def test_packed_documents():
    """M10."""
    functions = lambda c: (CausalMask() & DocumentMask(c["ids"]), None)  # noqa: E731
    ids = jnp.asarray([0, 0, 1, 1, 1])
    known(
        Problem(functions, zeros_q(5, 5) | {"ids": ids}), [0, 0.5, 2, 2.5, 3], log([1, 2, 1, 2, 3])
    )


@small
def test_documents_of_one_token_and_of_many():
    """M10: and out of order."""
    functions = lambda c: (DocumentMask(c["ids"]), None)  # noqa: E731
    ids = np.r_[np.zeros(3), np.arange(1, 40), np.full(90, 7), np.zeros(2)].astype(np.int32)
    same = ids[:, None] == ids
    out = (same * np.arange(len(ids))).sum(1) / same.sum(1)
    arrays = zeros_q(len(ids), len(ids)) | {"ids": jnp.asarray(ids)}
    known(Problem(functions, arrays), out, log(same.sum(1)))


@small
@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 4, 0), (2, 0, 4), (0, 4, 4)])
def test_nothing_to_do(batch, q_len, kv_len):
    """M12: zeros and -inf, and nothing is launched."""
    problem = Problem(of_mask(causal), qkv(batch, q_len, kv_len, 4, 4, 64))
    got = by_kernels(problem)
    assert got["out"].shape == (batch, q_len, 4, 64)
    assert not any(bool(got[n].any()) for n in ("out", "dq", "dk", "dv"))
    assert got["lse"].shape == (batch, 4, q_len)
    assert bool((got["lse"] == -jnp.inf).all())
    grad = jax.grad(lambda arrays: attend(problem, arrays, "cute")[0].sum())
    assert not launches(grad, problem.arrays)


@small
@pytest.mark.parametrize("lengths", [[1, 17, 30, 31], [31, 0, 32, 2]], ids=str)
def test_padding_of_each_batch_entry(lengths):
    """M13: as an explicit [batch, heads, q, kv] mask."""
    arrays = qkv(4, 32, 32, 4, 4, 16) | {"lengths": jnp.asarray(lengths)}
    got = check(Problem(lambda c: (PaddingMask(c["lengths"]), None), arrays))
    table = jnp.arange(32) < arrays["lengths"][:, None, None, None]
    arrays["table"] = jnp.broadcast_to(table, (4, 4, 32, 32))
    want = check(Problem(lambda c: ((lambda *at: c["table"][at]), None), arrays))
    for name in ("out", "lse"):
        np.testing.assert_array_equal(got[name], want[name])


# ---------------------------------------------------------------- scores and what they capture


@small
def test_a_soft_cap_of_the_score_and_not_of_the_cap():
    """S01."""
    e0 = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1)
    k, v = (jnp.concatenate([x, 0 * x], 1) for x in (e0, jnp.ones_like(e0)))
    problem = Problem(
        lambda c: (None, SoftCap(2.0)), {"q": 10 * e0, "k": k, "v": v}, lambda c: {"scale": 1.0}
    )
    capped = 2 * np.tanh(5)
    p = 1 / (1 + np.exp(-capped))
    assert abs(p - 0.880778) < 1e-6
    known(problem, [p], [np.log1p(np.exp(capped))])


@pytest.mark.parametrize("cap", [20, 50])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_soft_cap_of_large_scores(dim, cap):
    """S02: scores of some hundreds."""
    functions = lambda c: (None, lambda s, *_: c["cap"] * jnp.tanh(s / c["cap"]))  # noqa: E731
    arrays = qkv(1, 1024, 1024, 1, 1, dim, dtype="bfloat16")
    arrays["q"] = arrays["q"] * 50
    check(Problem(functions, arrays | {"cap": jnp.float32(cap)}))


@pytest.mark.parametrize("length", [pytest.param(20, marks=small), 128])
def test_masked_positions_read_nothing(length):
    """S03: a buffer that is one entry short, or has NaN past its valid end, is as good as a clean one; in gradients too."""

    def functions(c):
        def score(s, b, h, q_idx, kv_idx):
            x = c["buffer"][kv_idx]
            return s * x + jnp.exp(x) - jnp.log(jnp.abs(x))

        return (lambda b, h, q_idx, kv_idx: (kv_idx < length - 1) & (q_idx >= kv_idx)), score

    arrays = qkv(1, length, length, 2, 1, 16)
    clean = normal(8, length).at[-1].set(1)
    want = check(Problem(functions, arrays | {"buffer": clean}), deterministic=True)
    assert want["dbuffer"][-1] == 0
    assert bool((want["dbuffer"][:-1] != 0).all())
    for buffer in (clean.at[-1].set(jnp.nan), clean.at[-1].set(jnp.inf), clean[:-1]):
        got = by_kernels(Problem(functions, arrays | {"buffer": buffer}), deterministic=True)
        for name in ("out", "lse", "dq", "dk", "dv"):
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        shared = len(clean[:-1])
        np.testing.assert_array_equal(got["dbuffer"][:shared], want["dbuffer"][:shared])


@pytest.mark.parametrize(
    ("batch", "heads", "length"), [pytest.param(1, 2, 20, marks=small), (2, 3, 256), (64, 64, 64)]
)
def test_an_index_that_leaves_the_table_where_masked(batch, heads, length):
    """S04: q_idx - kv_idx is below 0 or past the table's end at masked positions, which JAX reads as others."""
    window = min(64, length // 2)

    def functions(c):
        def score(s, b, h, q_idx, kv_idx):
            return s + c["table"][b, h, q_idx, q_idx - kv_idx]

        return SlidingWindowMask(window - 1), score

    arrays = qkv(batch, length, length, heads, heads, 64, dtype="bfloat16")
    arrays["table"] = normal(8, batch, heads, length, window)
    got = check(Problem(functions, arrays))
    assert not bool(got["dtable"][:, :, 0, 1:].any())
    assert bool((got["dtable"][:, :, window:] != 0).all())


BIASES = [  # of batch and heads, as `[..., q, kv]`
    pytest.param("batch", (2, 3, 48, 48), marks=small),
    pytest.param("heads", (2, 3, 48, 48), marks=small),
    pytest.param("neither", (2, 3, 130, 200)),
    pytest.param("both", (2, 3, 130, 200)),
    pytest.param("both", (16, 16, 128, 128), id="both-of-256"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("of", "sizes"), BIASES)
def test_the_gradient_of_a_bias(of, sizes, dtype):
    """S07, S08, S09: summed over what it does not depend on, in float32; in its own dtype."""
    batch, heads, q_len, kv_len = sizes
    first = {"batch": (batch, 1), "heads": (1, heads), "neither": (1, 1), "both": (batch, heads)}
    arrays = qkv(batch, q_len, kv_len, heads, heads, 64, dtype="bfloat16")
    arrays["bias"] = normal(8, *first[of], q_len, kv_len, dtype=dtype)
    check(Problem(lambda c: (None, AdditiveBias(c["bias"])), arrays))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("read", ["scalar", "head"])
@pytest.mark.parametrize("length", [pytest.param(40, marks=small), 600])
def test_a_narrow_gradient_is_summed_wide(length, read, deterministic):
    """S09: each row shifts its LSE by 1, so the gradient is the number of rows; a bfloat16 sum of ones stops at 256."""
    arrays = qkv(1, length, length, 2, 1, 16)
    captured = jnp.ones(() if read == "scalar" else (2,), jnp.bfloat16)

    def total(c):
        def score(s, b, h, q_idx, kv_idx):
            return s + (c if read == "scalar" else c[h])

        return flex_attention(
            *arrays.values(),
            *(SlidingWindowMask(3), score),
            return_lse=True,
            deterministic=deterministic,
            implementation="cute",
        )[1].sum()

    grad = jax.jit(jax.grad(total))(captured)
    assert grad.dtype == jnp.bfloat16
    want = jnp.full(captured.shape, length * (2 if read == "scalar" else 1), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.asarray(want, np.float32))


@small
def test_the_lse_is_a_natural_logarithm():
    """S12: ln 4 and not 2."""
    known(Problem(plain, zeros_q(1, 4)), [1.5], [1.3862943611198906])


@small
@pytest.mark.parametrize("sink", [0.0, [0.0]], ids=["for-all", "a-head"])
def test_a_sink_takes_its_share(sink):
    """S14: 4 equal keys and a sink are five; its gradient flows through the output, and the LSE does not count it."""
    arrays = zeros_q(1, 4) | {"sink": jnp.asarray(sink, jnp.float32)}
    arrays["v"] = jnp.ones_like(arrays["v"])
    known(Problem(plain, arrays, lambda c: {"sink": c["sink"]}), [0.8], [np.log(4)])


@pytest.mark.parametrize(
    "mask", [None, causal, lambda *at: at[3] + 2 < at[2]], ids=["", "causal", "empty rows"]
)
def test_the_gradient_of_a_sink_with_the_lse_in_use(mask):
    """S14."""
    arrays = qkv(2, 130, 200, 4, 2, 64, dtype="bfloat16") | {"sink": normal(9, 4)}
    check(Problem(of_mask(mask), arrays, lambda c: {"sink": c["sink"]}))


@small
def test_functions_get_the_query_head():
    """S15: head 5 is ordinary attention, every other is the mean of the values of its kv head."""
    arrays = qkv(1, 6, 6, 8, 2, 16)
    score = lambda s, b, h, q_idx, kv_idx: jnp.where(h == 5, s, 0.0)  # noqa: E731
    got = check(Problem(lambda c: (None, score), arrays))
    mean = np.repeat(np.asarray(arrays["v"]).mean(1), 4, axis=1)[:, None].repeat(6, 1)
    others = np.delete(np.arange(8), 5)
    np.testing.assert_allclose(got["out"][:, :, others], mean[:, :, others], atol=2.0**-20)
    assert not bool(got["dq"][:, :, others].any())
    assert bool(got["dq"][:, :, 5].any())


MASKS = {
    "of-indices": lambda c: lambda b, h, q, kv: (q * 7 + kv * 13 + h * 3 + b) % 5 > 1,
    "of-a-table": lambda c: lambda b, h, q, kv: c["table"][b, q, kv],
    "of-floats": lambda c: lambda b, h, q, kv: c["floats"][q] + c["floats"][kv] > 0,
    "anti-causal": lambda c: lambda b, h, q, kv: q <= kv,
    "dilated": lambda c: lambda b, h, q, kv: (q - kv) % 3 == 0,
    "nothing": lambda c: lambda *_: False,
    "everything": lambda c: lambda *_: True,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_in_the_backward_pass_too(name):
    """S16, B12."""
    arrays = qkv(2, 200, 200, 4, 2, 64, dtype="bfloat16")
    arrays["table"] = normal(8, 2, 200, 200) > 0.5
    arrays["floats"] = normal(9, 200)
    check(Problem(lambda c: (MASKS[name](c), None), arrays))


@small
def test_distance_and_sign_of_a_slope():
    """S19."""
    score = lambda s, b, h, q_idx, kv_idx: s - (q_idx - kv_idx)  # noqa: E731
    weights = np.tril(np.exp(np.minimum(np.arange(3) - np.arange(3)[:, None], 0.0)))
    out, lse = (weights * np.arange(3)).sum(1) / weights.sum(1), np.log(weights.sum(1))
    np.testing.assert_allclose(out, [0, 0.731059, 1.575210], atol=1e-6)
    np.testing.assert_allclose(lse, [0, 0.313262, 0.407606], atol=1e-6)
    known(Problem(lambda c: (causal, score), zeros_q(3, 3)), out, lse)


@small
def test_there_is_no_dropout():
    """S20."""
    with pytest.raises(TypeError, match="dropout"):
        FlexAttention(dropout_p=0.5, implementation="cute")


# ---------------------------------------------------------------- heads, dims, dtypes


@pytest.mark.parametrize("heads", [(12, 2), (28, 4), (96, 8), (7, 1)], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 4096), (100, 100)])
def test_any_ratio_of_heads(q_len, kv_len, heads):
    """H01."""
    check(Problem(plain, qkv(1, q_len, kv_len, *heads, dim=16)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [pytest.param((4, 2), marks=small), (5, 1)], ids=str)
def test_any_ratio_of_heads_with_a_mask_of_heads(heads, dtype):
    """H01, and a list of tiles a head."""
    mask = lambda b, h, q_idx, kv_idx: q_idx - kv_idx >= 30 * h  # noqa: E731
    check(Problem(of_mask(mask), qkv(2, 70, 40, *heads, dim=24, dtype=dtype)))


@small
def test_dims_that_no_kernel_takes():
    """H07: an error that names the dim, before anything runs; H03."""
    q = jnp.ones((1, 4, 1, 512), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"dim is 512.*up to 256"):
        flex_attention(q, q, q, implementation="cute")
    q = jnp.ones((1, 4, 6, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"6.*4"):
        flex_attention(q, q[:, :, :4], q[:, :, :4], implementation="cute")


@small
def test_scores_beyond_float16():
    """H10: a raw score of 80 000 is above 65 504."""
    arrays = zeros_q(8, 8, 64, "float16")
    arrays["q"] = arrays["k"] = jnp.full_like(arrays["k"], 100)
    known(Problem(plain, arrays), np.full(8, 3.5), np.full(8, 80000 + np.log(8)))


@pytest.mark.parametrize("order", ["BHSD", "BSHD", "SBHD"])
def test_heads_before_lengths(order):
    """H13: what is transposed for the call gives the same."""
    arrays = qkv(2, 130, 200, 4, 2, 64, dtype="bfloat16")
    there = {"BHSD": (0, 2, 1, 3), "BSHD": (0, 1, 2, 3), "SBHD": (1, 0, 2, 3)}[order]
    given = [jnp.transpose(arrays[n], there) for n in "qkv"]

    def run(*given):
        q, k, v = (jnp.transpose(x, np.argsort(there)) for x in given)
        out = flex_attention(q, k, v, CausalMask(), implementation="cute")
        return jnp.transpose(out, there)

    def both(run):
        def outputs(*given):
            out, pull = jax.vjp(run, *given)
            return out, pull(jnp.sin(out))

        return jax.jit(outputs)

    straight = both(lambda *a: flex_attention(*a, CausalMask(), implementation="cute"))
    got = both(run)(*given)
    want = jax.tree.map(lambda x: jnp.transpose(x, there), straight(*(arrays[n] for n in "qkv")))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(g, w)
    assert launches(run, *given)["forward_kernel"] == 1
