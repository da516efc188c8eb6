"""How exact the attention kernels are, and that they are the same each time: random masks and scores, dims, dtypes, precision,
bits, alignment, and JAX's transformations. `--on-cpu` runs this without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Problem,
    attend,
    by_kernels,
    by_plain_jax,
    check,
    close,
    cotangents,
    derivatives,
    kernels_made,
    normal,
    plain,
    qkv,
    random_problem,
)
from eqxcute.layers import flex_attention
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    RelativeBias,
    SlidingWindowMask,
)

from eqxcute.testing import assert_as_accurate

pytestmark = pytest.mark.on_cpu
small = pytest.mark.small

SEEDS = [
    n for n in range(43) if n not in (1, 22, 23, 42)
]  # the masks of those let next to nothing through


@pytest.mark.parametrize("seed", [pytest.param(n, marks=small) if n < 12 else n for n in SEEDS])
def test_random_masks_and_scores(seed, on_cpu):
    problem = random_problem(seed, 40 if on_cpu == "interpreted" else 300)
    # A third of them in a fixed order: that is another backward pass.
    got = check(problem, deterministic=seed % 3 == 0)
    assert np.isfinite(got["lse"]).mean() > 0.03
    assert any(bool(got[f"d{n}"].any()) for n in "qk")


# ---------------------------------------------------------------- dims and dtypes

DIMS = {
    ("bfloat16", "fast"): (
        *(1, 8, 16, 24, 31, 40, 64, 72, 96, 104, 128, 136, 144, 160, 176, 192, 256),
        *((192, 128), (64, 256)),
    ),
    ("float32", "fast"): (8, 31, 64, 96, 128, 160, 256, (192, 128), (64, 256)),
    ("float16", "fast"): (40, 64, 128, 192),
    ("bfloat16", "deterministic"): (40, 64, 104, 128, 136, 192, 256, (192, 128), (64, 256)),
    ("float32", "deterministic"): (64, 128, 192, 256),
}


def documents(c):
    return CausalMask(3) & DocumentMask(c["ids"], c["kv_ids"]), None


@pytest.mark.parametrize(
    ("dtype", "order", "dim"),
    [(*kind, dim) for kind, dims in DIMS.items() for dim in dims],
    ids=str,
)
def test_any_dim(dim, dtype, order):
    """H04, H05: no dim is refused, and none spills into its neighbours; ends inside of tiles, and empty, partial and full
    ones."""
    dim, v_dim = dim if isinstance(dim, tuple) else (dim, dim)
    arrays = qkv(2, 333, 290, 4, 2, dim, v_dim, dtype=dtype)
    arrays["ids"] = jnp.arange(333) // 150
    arrays["kv_ids"] = jnp.minimum(jnp.arange(290) // 150, 1)
    check(Problem(documents, arrays), deterministic=order == "deterministic")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_captured_and_no_mask(dim, dtype):
    check(Problem(plain, qkv(2, 513, 260, 4, 1, dim, dtype=dtype)))


# What the score reads, by how many places share an entry: each is summed in its own way.
READS = {
    "scalar": ((), lambda x, b, h, q, kv: x),
    "head": ((4,), lambda x, b, h, q, kv: x[h]),
    "batch and head": ((2, 4), lambda x, b, h, q, kv: x[b, h]),
    "query": ((90,), lambda x, b, h, q, kv: x[q]),
    "query of a head": ((4, 90), lambda x, b, h, q, kv: x[h, q]),
    "key": ((130,), lambda x, b, h, q, kv: x[kv]),
    "key of a batch entry": ((2, 130), lambda x, b, h, q, kv: x[b, kv]),
    "pair": ((90, 130), lambda x, b, h, q, kv: x[q, kv]),
    "pair of a head": ((2, 4, 90, 130), lambda x, b, h, q, kv: x[b, h, q, kv]),
    "distance": ((4, 41), lambda x, b, h, q, kv: x[h, jnp.clip(kv - q, -20, 20) + 20]),
    "bucket": ((7,), lambda x, b, h, q, kv: x[(q * 3 + kv * 5 + h) % 7]),
    "two places": ((130,), lambda x, b, h, q, kv: x[kv] * x[q]),
    "integers of it": ((5,), lambda x, b, h, q, kv: x[(q // 16 + kv // 16) % 5]),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("read", READS)
def test_the_gradient_of_every_kind_of_read(read, deterministic):
    """S07 and its kind: alone, and of a score that is not linear."""
    shape, x = READS[read]

    def functions(c):
        def score(s, *at):
            return 4 * jnp.tanh(s / 4) + x(c["table"], *at) * (1 + 0.1 * s)

        return SlidingWindowMask(60, 40), score

    arrays = qkv(2, 90, 130, 4, 2, 16) | {"table": 0.5 * normal(8, *shape)}
    check(Problem(functions, arrays), deterministic=deterministic)


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_gradients_at_large_dims(dim, dtype):
    """The tiles are smaller there, and fewer registers are left."""

    def functions(c):
        return CausalMask(), RelativeBias(c["table"]).then(AdditiveBias(c["bias"]))

    arrays = qkv(1, 150, 150, 2, 2, dim, dtype=dtype)
    arrays |= {"table": normal(8, 2, 33), "bias": normal(9, 150, 150)}
    check(Problem(functions, arrays))


# ---------------------------------------------------------------- precision of float32

# Of a product: how far rounding both factors may move it. Tf32 has 11 bits; with what they leave out, 21.
UNITS = {"tf32": 2.0**-10, "3xtf32": 2.0**-20}


def spread(arrays) -> float:
    """The largest sum of absolute products that makes a score: what roundings in it are relative to."""
    q, k = (np.abs(np.asarray(arrays[n], np.float64)) for n in "qk")
    return float(np.einsum("bqhd,bkhd->bhqk", q, k).max()) / np.sqrt(q.shape[-1])


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("precision", UNITS)
def test_precision_of_float32(precision, size):
    """H09: `unit` times the products that make a score is how far that may be off. So is the LSE. The weights are off by that
    factor twice, the output by as much of the largest value, and by `unit` for the product with the values.
    Gradients, whose roundings cancel, are off by 2 units of their norm under the interpreter; 8 are allowed."""
    arrays = qkv(1, 128, 128, 2, 2, 64)
    arrays["q"] = arrays["q"] * size
    problem = Problem(plain, arrays)
    got, (want, peer) = by_kernels(problem, precision=precision), by_plain_jax(problem)
    unit = UNITS[precision]
    moved = unit * spread(arrays)
    error = {n: np.abs(np.asarray(got[n], np.float64) - want[n]).max() for n in got}
    rounding = {n: 4 * np.abs(np.asarray(peer[n], np.float64) - want[n]).max() for n in got}
    assert error["lse"] <= moved + rounding["lse"]
    assert (
        error["out"] <= (np.expm1(2 * moved) + unit) * np.abs(arrays["v"]).max() + rounding["out"]
    )
    for n in ("dq", "dk", "dv"):
        off = np.linalg.norm(np.asarray(got[n], np.float64) - want[n]) / np.linalg.norm(want[n])
        assert off <= 8 * unit, n


def test_precision_is_what_was_asked_for(on_cpu):
    """H09: the default is `"3xtf32"`, and `"tf32"` is not."""
    problem = Problem(plain, qkv(1, 128, 128, 2, 2, 64))
    results = {p: by_kernels(problem, precision=p) for p in (None, *UNITS)}
    for n in ("out", "lse", "dk", "dv"):
        np.testing.assert_array_equal(results[None][n], results["3xtf32"][n])
    if on_cpu in (None, "interpreted"):
        want, _ = by_plain_jax(problem)
        for n in ("out", "dq", "dk", "dv"):
            fast, exact = (
                np.abs(np.asarray(results[p][n], np.float64) - want[n]).max() for p in UNITS
            )
            assert fast > 32 * exact, n


# ---------------------------------------------------------------- the same bits


def everything(c):
    """A mask, and a score that reads in every way."""

    def score(s, b, h, q, kv):
        s = 8 * jnp.tanh(s / 8) * c["scalar"] + c["query"][b, q] + c["key"][h, kv]
        return s + c["table"][h, jnp.clip(kv - q, -20, 20) + 20] + c["bias"][q, kv]

    return CausalMask() & DocumentMask(c["ids"]), score


def of_everything(length=700, dim=64, dtype="bfloat16", batch=2):
    arrays = qkv(batch, length, length, 4, 2, dim, dtype=dtype)
    arrays |= {"ids": jnp.arange(length) // max(length // 3, 1), "scalar": jnp.float32(0.9)}
    arrays |= {"query": normal(1, batch, length), "key": normal(2, 4, length)}
    arrays |= {"table": normal(3, 4, 41), "bias": normal(4, length, length)}
    return Problem(everything, arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_inputs_give_equal_bits(dtype):
    """Forward always, backward with `deterministic`, gradients of captured arrays included. K09."""
    problem = of_everything(dtype=dtype)
    given = problem.arrays, cotangents(problem)
    run = derivatives(problem, "cute", deterministic=True)
    first = jax.tree.map(np.asarray, run(*given))
    for _ in range(20):
        again = run(*given)
        for name, x in first.items():
            assert x.tobytes() == np.asarray(again[name]).tobytes(), name


@pytest.mark.parametrize("mask", [None, CausalMask()], ids=["dense", "causal"])
def test_the_backward_pass_right_after_what_it_reads_was_written(mask):
    """K09: by another kernel, just before. Fast and in a fixed order: within rounding of each other each time."""
    problem = Problem(lambda c: (mask, None), qkv(2, 700, 700, 4, 2, 64, dtype="bfloat16"))

    def loss(arrays, **options):
        out, lse = attend(problem, arrays, "cute", **options)
        return (out.astype("float32") ** 2).sum() + jnp.sin(lse).sum()

    ordered = jax.jit(jax.grad(functools.partial(loss, deterministic=True)))(problem.arrays)
    fast = jax.jit(jax.grad(loss))
    wide = {n: np.asarray(x, np.float64) for n, x in ordered.items()}
    for _ in range(20):
        got = fast(problem.arrays)
        for n in "qkv":
            assert_as_accurate(got[n], oracle=wide[n], peer=ordered[n], ulps=2.0)


# ---------------------------------------------------------------- where the arrays lie


def doubled(x):
    """What XLA may slice by pointer: made inside `jit`, and no argument."""
    return x * 2


PIECES = {
    "rows": lambda x: doubled(x)[1:],
    "columns": lambda x: doubled(x)[:, 3:67],
    "a step": lambda x: doubled(x)[:, ::2],
    "a dynamic slice": lambda x: jax.lax.dynamic_slice_in_dim(doubled(x), x.shape[1] // 3, 64, 1),
    "a scan": None,
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (33, "bfloat16"), (33, "float32")])
def test_slices_of_larger_arrays(dim, dtype, piece):
    """H12: XLA may hand a kernel a pointer into the middle of a buffer."""
    arrays = qkv(3, 131, 131, 1, 1, dim, dtype=dtype)
    dout = normal(5, 3, 131, 1, dim, dtype=dtype)
    given = *(arrays[n] for n in "qkv"), dout

    def both(q, k, v, dout):
        out, pull = jax.vjp(
            lambda *a: flex_attention(*a, CausalMask(), implementation="cute"), q, k, v
        )
        return out, *pull(dout)

    def sliced(*given):
        if piece == "a scan":
            return jax.lax.map(lambda xs: both(*xs), [doubled(x)[:, None] for x in given])
        return both(*map(PIECES[piece], given))

    def whole(*given):  # without anything to fuse: each array is a result before it is an argument
        if piece == "a scan":
            parts = [both(*(doubled(x)[i : i + 1] for x in given)) for i in range(3)]
            return [jnp.stack(xs) for xs in zip(*parts, strict=True)]
        return jax.jit(both)(*jax.block_until_ready([PIECES[piece](x) for x in given]))

    got, want = jax.jit(sliced)(*given), whole(*given)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        close(g, w, ("out", "dq", "dk", "dv")[i])


def test_results_inside_of_larger_arrays():
    """H12: XLA may have a kernel write into the middle of a buffer."""
    q, k, v = qkv(1, 64, 64, 1, 1, 64, dtype="bfloat16").values()

    def attention(q):
        return flex_attention(q, k, v, implementation="cute")

    want = jax.jit(attention)(q)
    for at in (1, 3, 64):
        got = jax.jit(lambda b, at=at: b.at[:, at : at + 64].set(attention(q)))(
            jnp.zeros((1, 200, 1, 64), q.dtype)
        )
        close(got[:, at : at + 64], want)
        assert not bool(got[:, :at].any() | got[:, at + 64 :].any())


def test_donated_buffers():
    """A residual stream that is overwritten by what attention makes of it."""
    q, k, v = qkv(2, 130, 130, 2, 2, 64, dtype="bfloat16").values()

    def step(x):
        def loss(x):
            return (
                flex_attention(x, k, v, CausalMask(), implementation="cute").astype("float32") ** 2
            ).sum()

        return x + flex_attention(x, k, v, CausalMask(), implementation="cute"), jax.grad(loss)(x)

    want = jax.jit(step)(q)
    got = jax.jit(step, donate_argnums=0)(q + 0)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_one_kernel_for_all_lengths_heads_and_batches():
    """K03: and for all values that are captured."""
    made = set()
    for length in (1, 2, 31, 64, 65, 200):
        arrays = qkv(1 + length % 3, length, length + 1, 2 * (1 + length % 2), 2, 16)
        arrays |= {"window": jnp.int32(length // 2), "slope": jnp.float32(length)}

        def functions(c):
            mask = lambda b, h, q, kv: abs(q - kv) <= c["window"]  # noqa: E731
            return mask, lambda s, b, h, q, kv: s - c["slope"] * jnp.abs(q - kv)

        by_kernels(Problem(functions, arrays))
        made.add(kernels_made())
    assert len(made) == 1
