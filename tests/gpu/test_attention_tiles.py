"""The attention kernels with lists of tiles, at large sizes, and the memory they take. `--on-cpu` runs the small ones without
a GPU."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Problem,
    attend,
    by_kernels,
    check,
    close,
    kernels_made,
    normal,
    qkv,
)
from eqxcute.layers import flex_attention, tile_map
from eqxcute.layers.attention import CausalMask, DocumentMask, SlidingWindowMask

small = pytest.mark.small
on_cpu = pytest.mark.on_cpu


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# ---------------------------------------------------------------- lists


@on_cpu
@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("dim", [64, 128])
def test_lists_forward_and_backward(length, dim):
    """B01: a mask of which tiles are skipped, against the same as a table, and against float64."""
    arrays = qkv(1, length, length, 2, 1, dim, dtype="bfloat16")
    listed = check(Problem(lambda c: (causal, None), arrays))
    arrays["table"] = jnp.tril(jnp.ones((length, length), bool))
    table = by_kernels(Problem(lambda c: ((lambda b, h, q, kv: c["table"][q, kv]), None), arrays))
    for name, x in listed.items():
        close(table[name], x, name)


MAPS = [  # dims of heads, tile of the map
    ((64, 64), (128, 128), "fast"),
    ((64, 64), (64, 128), "fast"),
    ((64, 64), (128, 64), "deterministic"),
    ((64, 64), (64, 64), "fast"),
    ((64, 64), (192, 320), "deterministic"),
    ((192, 128), (128, 128), "fast"),
    ((192, 128), (256, 64), "deterministic"),
    ((256, 256), (64, 128), "fast"),
    ((256, 256), (128, 64), "deterministic"),
]


def mixed(c):
    """Empty, partial and full tiles, in lists of their own for each head and batch entry."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx + 40 * h >= kv_idx) & (kv_idx >= c["start"][b])

    return mask, None


@on_cpu
@pytest.mark.parametrize(("dims", "tile", "order"), MAPS, ids=str)
def test_maps_of_any_tile(dims, tile, order):
    """B02: the tiles of the kernels lie in those of the map, whichever these are."""
    arrays = qkv(2, 270, 333, 4, 2, *dims, dtype="bfloat16") | {"start": jnp.asarray([0, 150])}
    tiles = tile_map(mixed(arrays)[0], 270, 333, batch=2, heads=4, tile=tile)
    check(Problem(mixed, arrays), tiles=tiles, deterministic=order == "deterministic")


@on_cpu
@small
@pytest.mark.parametrize("tile", [(128, 80), (100, 128)])
def test_a_map_of_tiles_that_do_not_fit(tile):
    """B02: one error for forward and backward, that says what to do."""
    arrays = qkv(1, 200, 200, 1, 1, 64)
    tiles = tile_map(causal, 200, 200, tile=tile)
    with pytest.raises(ValueError, match="multiples of 64"):
        by_kernels(Problem(lambda c: (causal, None), arrays), tiles=tiles)


@on_cpu
@small
def test_only_the_first_tile_of_keys():
    """B03: as attention over those keys alone."""
    arrays = qkv(1, 20, 192, 2, 1, 16)
    first = lambda b, h, q_idx, kv_idx: kv_idx // 64 == 0  # noqa: E731
    got = check(Problem(lambda c: (first, None), arrays))
    fewer = {n: x[:, :64] for n, x in arrays.items()}
    want = check(Problem(lambda c: (None, None), fewer))
    for name in ("out", "lse", "dq"):
        close(got[name], want[name], name)
    for name in ("dk", "dv"):
        close(got[name][:, :64], want[name], name)
        assert not bool(got[name][:, 64:].any())


@on_cpu
@pytest.mark.parametrize(("length", "at"), [pytest.param(64, 30, marks=small), (512, 300)])
def test_decoding_one_position(length, at):
    """B06: the row of the prefill, from one query and an offset, and each batch entry at its own."""
    arrays = qkv(4, length, length, 4, 2, 16)
    near = SlidingWindowMask(at // 2)
    full = by_kernels(Problem(lambda c: (CausalMask() & near, None), arrays))

    def decode(ats):
        rows = jnp.broadcast_to(jnp.asarray(ats), (4,))[:, None, None, None]
        one = arrays | {"q": jnp.take_along_axis(arrays["q"], rows, 1), "at": jnp.asarray(ats)}

        def functions(c):
            return CausalMask(c["at"]) & SlidingWindowMask(at // 2, offset=c["at"]), None

        return check(Problem(functions, one))

    close(decode(at)["out"][:, 0], full["out"][:, at])
    ats = [at, 5, length - 1, 0]
    close(decode(ats)["out"][:, 0], full["out"][jnp.arange(4), jnp.asarray(ats)])


@on_cpu
@small
def test_one_list_for_all_heads():
    """B11."""
    tiles = tile_map(causal, 4096, 4096, heads=64, batch=8)
    assert tiles.forward.tiles.shape == (1, 1, 32, 32)


@on_cpu
@pytest.mark.parametrize("length", [96_000, 262_144])
def test_a_map_is_small_and_is_made_in_little_memory(length):
    """B09: of 10 bytes a tile, besides what sorting them takes; the mask of a pair each would be 9 GB and 69 GB."""

    def make(offset):
        return tile_map(CausalMask(offset) & SlidingWindowMask(4096), length, length)

    memory = jax.jit(make).lower(jnp.int32(0)).compile().memory_analysis()
    count = (-(-length // 128)) ** 2
    assert memory.output_size_in_bytes < 9 * count
    assert memory.temp_size_in_bytes < 80 * count
    if jax.default_backend() == "gpu":
        assert memory.temp_size_in_bytes < 20 * count
        tiles = jax.jit(make)(jnp.int32(0))
        met = np.asarray(tiles.forward.partial + tiles.forward.full)[0, 0]
        assert met.max() == 4096 // 128 + 1
        assert met[0] == 1


@pytest.mark.slow
def test_a_map_of_documents_takes_less_than_attention():
    """B10: 32 documents, 800,000 tokens, other ids each time."""
    length, count = 800_000, 32
    q = k = v = normal(0, 1, 1000, 1, 64, dtype="bfloat16")
    q, k, v = (jnp.tile(x, (1, length // 1000, 1, 1)) for x in (q, k, v))

    @jax.jit
    def make(ids):
        return tile_map(CausalMask() & DocumentMask(ids), length, length)

    @jax.jit
    def run(q, k, v, ids, tiles):
        mask = CausalMask() & DocumentMask(ids)
        return flex_attention(q, k, v, mask, tiles=tiles, implementation="cute")

    took, made = {"map": [], "attention": []}, []
    for seed in range(4):
        ends = np.sort(np.random.default_rng(seed).choice(length, count - 1, replace=False))
        ids = jnp.asarray(np.searchsorted(ends, np.arange(length), side="right"), jnp.int32)
        start = time.perf_counter()
        tiles = jax.block_until_ready(make(ids))
        took["map"].append(time.perf_counter() - start)
        start = time.perf_counter()
        jax.block_until_ready(run(q, k, v, ids, tiles))
        took["attention"].append(time.perf_counter() - start)
        made.append(kernels_made())
    assert len(set(made)) == 1  # nothing is compiled anew
    print({n: f"{1e3 * min(x[1:]):.1f} ms" for n, x in took.items()})
    assert min(took["map"][1:]) < min(took["attention"][1:])


# ---------------------------------------------------------------- large sizes


def sums(function):
    """Of a loss that is a sum: its outputs, and the gradients of q, k and v."""

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(jnp.ones_like(out))

    return run


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_of_keys():
    """L02: the last 64 keys lie past 2**31 elements, and a query sees those alone. Offsets of 32 bits wrap."""
    queries, dim, last = 128, 128, 64
    length = 2**31 // dim + 1024

    @jax.jit
    def make():
        seen = (jnp.arange(length) >= length - last)[None, :, None, None]
        k = jnp.broadcast_to(jnp.where(seen, 1, 7), (1, length, 1, dim)).astype(jnp.bfloat16)
        return k, jnp.broadcast_to(seen, k.shape).astype(jnp.bfloat16)

    def attention(q, k, v):
        mask = lambda b, h, q_idx, kv_idx: kv_idx >= length - last  # noqa: E731
        return flex_attention(q, k, v, mask, implementation="cute")

    k, v = make()
    q = normal(0, 1, queries, 1, dim, dtype="bfloat16")
    out, (dq, dk, dv) = sums(attention)(q, k, v)
    assert bool((out == 1).all())
    assert not bool(dq.any())  # equal scores and equal values
    # Each of the 64 keys has 1 / 64 of each of 128 queries.
    assert bool(jax.jit(lambda x: (x[:, -last:] == queries / last).all())(dv))
    for x in (dk, dv):
        assert not bool(jax.jit(lambda x: x[:, :-last].any())(x))


@pytest.mark.slow
def test_a_table_of_more_than_two_to_the_31_elements():
    """L04: row i sees i + 1 keys, of which the first 8 have value 1."""
    length = 46_400
    table = jax.jit(lambda: jnp.tril(jnp.ones((1, length, length), bool)))()
    q = jnp.zeros((1, length, 1, 16))
    v = jnp.broadcast_to((jnp.arange(length) < 8)[None, :, None, None], q.shape).astype(q.dtype)

    @jax.jit
    def run(q, v, table):
        mask = lambda b, h, q_idx, kv_idx: table[b, q_idx, kv_idx]  # noqa: E731
        fn = lambda v: flex_attention(q, q, v, mask, implementation="cute")  # noqa: E731
        out, pull = jax.vjp(fn, v)
        return out[0, :, 0, 0], pull(jnp.ones_like(out))[0][0, :, 0, 0]

    out, dv = (np.asarray(x, np.float64) for x in run(q, v, table))
    i = np.arange(length)
    np.testing.assert_allclose(out, np.minimum(8, i + 1) / (i + 1), rtol=2.0**-20)
    want = np.cumsum((1 / (i + 1))[::-1])[::-1]  # of all rows from the key's own on
    np.testing.assert_allclose(dv, want, rtol=1e-4)  # sums of 46,400 terms in float32


@pytest.mark.slow
def test_more_tiles_of_queries_than_a_grid_has_in_y():
    """L07: 65,536 tiles of 64 queries, and one query."""
    queries, keys, dim = 64 * 65_535 + 1, 64, 64
    q = jnp.zeros((1, queries, 1, dim), jnp.bfloat16)
    k = normal(0, 1, keys, 1, dim, dtype="bfloat16")
    v = jnp.broadcast_to(jnp.arange(keys)[None, :, None, None], k.shape).astype(k.dtype)
    out, (dq, dk, dv) = sums(lambda *a: flex_attention(*a, implementation="cute"))(q, k, v)
    assert bool((out == 31.5).all())
    del out
    assert not bool(dk.any())
    # Each key has 1 / 64 of each query; of values that differ, only q = 0 knows nothing.
    np.testing.assert_allclose(np.asarray(dv, np.float32), queries / keys, rtol=2.0**-8)
    assert bool((dq == dq[:, :1]).all())


@on_cpu
@pytest.mark.parametrize("rows", [pytest.param(300, marks=small), 70_001])
def test_more_rows_than_a_grid_has_in_y(rows, on_cpu):
    """L07: batch times heads above 65,535."""
    if on_cpu is not None:
        rows = min(rows, 6)
    first = qkv(1, 4, 4, 2, 1, 16)
    problem = Problem(lambda c: (causal, None), first)
    many = Problem(problem.functions, {n: jnp.tile(x, (rows, 1, 1, 1)) for n, x in first.items()})
    one = check(problem)
    got = by_kernels(many)
    for name in ("out", "lse"):
        close(got[name], jnp.broadcast_to(one[name], got[name].shape), name)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_memory_of_a_long_row(deterministic):
    """16384 queries of 16 heads: an array of all scores would be 8.6 GB in bfloat16. Besides arguments and results there are
    the output, its cotangent, and float32 sums of dq: 64 + 64 + 128 MiB; the LSE and its kin are 1 MiB each."""
    shape, mib = (1, 16384, 16, 128), 2**20
    spec = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def both(q, k, v, dout):
        def attention(*a):
            return flex_attention(
                *a, CausalMask(), deterministic=deterministic, implementation="cute"
            )

        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(dout)

    compiled = jax.jit(both).lower(*[spec] * 4).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= (32 if deterministic else 160) * mib, temporary / mib
    q, k, v, dout = (normal(i, *shape, dtype="bfloat16") for i in range(4))
    jax.block_until_ready((q, k, v, dout))
    before = jax.devices()[0].memory_stats()
    results = jax.block_until_ready(compiled(q, k, v, dout))
    after = jax.devices()[0].memory_stats()
    peak = after["peak_bytes_in_use"] - before["bytes_in_use"]
    # The peak is of the whole process: it says something only where this is the largest so far.
    if after["peak_bytes_in_use"] > before["peak_bytes_in_use"]:
        assert peak <= (4 * 64 + 192) * mib, peak / mib
    assert all(bool(jnp.isfinite(x).all()) for x in results)


def test_memory_grows_with_the_length_and_not_with_its_square():
    """With a score, captured gradients and a mask that reads ids."""

    def temporary(length):
        arrays = qkv(1, 128, 128, 4, 2, 64, dtype="bfloat16")
        specs = {
            n: jax.ShapeDtypeStruct((1, length, *x.shape[2:]), x.dtype) for n, x in arrays.items()
        }
        specs |= {"ids": jax.ShapeDtypeStruct((length,), jnp.int32)}
        specs |= {"slopes": jax.ShapeDtypeStruct((4,), jnp.float32)}

        def functions(c):
            def score(s, b, h, q_idx, kv_idx):
                return s - c["slopes"][h] * jnp.abs(q_idx - kv_idx)

            return CausalMask() & DocumentMask(c["ids"]), score

        def grads(arrays):
            moving = {n: arrays[n] for n in ("q", "k", "v", "slopes")}
            problem = Problem(functions, arrays)
            return jax.grad(lambda m: attend(problem, arrays | m, "cute")[0].sum().astype(float))(
                moving
            )

        return jax.jit(grads).lower(specs).compile().memory_analysis().temp_size_in_bytes

    # Lists of tiles do grow with the square: 8 bytes for 128 x 128 pairs, 8 MiB at 131,072.
    assert temporary(131_072) <= 8.5 * temporary(16_384) + 2 * 8 * 1024**2
