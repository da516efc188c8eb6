"""Tile maps: what they say of each tile, against the mask entry by entry; lists, cost, printing."""

import math
import sys
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers import FlexAttention, TileMap, flex_attention, tile_map
from eqxcute.layers.attention import (
    CausalMask,
    ChunkedMask,
    DilatedMask,
    DocumentMask,
    FullMask,
    PaddingMask,
    PrefixLMMask,
    SlidingWindowMask,
    _config,
    _masks,
    _tiles,
)
from hypothesis import given, settings, strategies as st

EMPTY, PARTIAL, FULL = 0, 1, 2


def dense(mask_fn, q_len, kv_len, batch=1, heads=1):
    """The mask at every position: it is called with all indices at once, and computes in NumPy."""
    shape = (batch, heads, q_len, kv_len)
    indices = [
        np.arange(n, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(shape)
    ]
    mask_fn = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, mask_fn)
    with mock.patch.object(_masks, "jnp", np):
        return np.broadcast_to(np.asarray(mask_fn(*indices)), shape)


def exact(allowed, tile):
    """Verdicts by counting."""
    counts, sizes = allowed.astype(np.int32), np.ones(allowed.shape, np.int32)
    for axis, step in zip((2, 3), tile, strict=True):
        starts = np.arange(0, allowed.shape[axis], step)
        if len(starts) == 0:
            return np.zeros([-(-n // t) for n, t in zip(allowed.shape, (1, 1, *tile), strict=True)])
        counts, sizes = (np.add.reduceat(x, starts, axis=axis) for x in (counts, sizes))
    return np.where(counts == 0, EMPTY, np.where(counts == sizes, FULL, PARTIAL))


def check_sound(tiles, want):
    """Nothing is called empty or full that is not. Returns the partial tiles, and the exact number."""
    got = np.broadcast_to(np.asarray(tiles.verdicts()), want.shape)
    wrong = (got != PARTIAL) & (got != want)
    assert not wrong.any(), f"wrong at {np.argwhere(wrong)[:4].tolist()}: {tiles}"
    return int((got == PARTIAL).sum()), int((want == PARTIAL).sum())


def check_lists(tiles):
    """The lists hold the verdicts, each once and sorted, both ways; schedules are longest first."""
    verdicts = np.asarray(tiles.verdicts())
    for lists, kinds in (
        (tiles.forward, verdicts),
        (tiles.backward, np.swapaxes(verdicts, -1, -2)),
    ):
        assert lists.tiles.shape == kinds.shape
        assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(lists))
        flat = math.prod(kinds.shape[:-1]), kinds.shape[-1]
        rows = zip(
            np.asarray(lists.tiles).reshape(flat),
            np.asarray(lists.partial).reshape(-1),
            np.asarray(lists.full).reshape(-1),
            kinds.reshape(flat),
            strict=True,
        )
        for row, partial, full, kind in rows:
            parts = np.split(row, [partial, partial + full])
            for part, wanted in zip(parts, (PARTIAL, FULL, EMPTY), strict=True):
                np.testing.assert_array_equal(part, np.flatnonzero(kind == wanted))
        assert lists.order.shape == lists.partial.shape
        heads, n = math.prod(lists.order.shape[:-1]), lists.order.shape[-1]
        works = np.asarray(lists.partial + lists.full).reshape(heads, n)
        for work, order in zip(works, np.asarray(lists.order).reshape(heads, n), strict=True):
            np.testing.assert_array_equal(np.sort(order), np.arange(n))
            ranked = list(zip(-work[order], order, strict=True))
            assert ranked == sorted(ranked)


def programs(jaxpr):
    """A program and those inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from programs(inner)


def equations(jaxpr):
    return sum(len(one.eqns) for one in programs(jaxpr))


def biggest(jaxpr):
    """Elements of the largest array."""
    made = [v.aval for one in programs(jaxpr) for eqn in one.eqns for v in eqn.outvars]
    return max(math.prod(aval.shape) for aval in made if hasattr(aval, "shape"))


def ids_of(kind, length, documents=5, batch=None):
    random = np.random.default_rng(0)
    shape = (length,) if batch is None else (batch, length)
    ids = np.sort(random.integers(0, documents, shape), axis=-1)
    if kind == "permuted":
        ids = random.permutation(documents)[ids]
    if kind == "interleaved":
        ids = np.broadcast_to(np.arange(length) % documents, shape)
    return jnp.asarray(ids, jnp.int32)


# Verdicts

N = 1500  # not a multiple of 128
PLAIN = {
    "full": FullMask(),
    "causal": CausalMask(),
    "causal, back": CausalMask(-130),
    "causal, ahead": CausalMask(129),
    "causal, array": CausalMask(jnp.int32(77)),
    "window": SlidingWindowMask(300),
    "window of two sides": SlidingWindowMask(200, 140),
    "window to the right": SlidingWindowMask(None, 140),
    "window with offset": SlidingWindowMask(128, 0, offset=jnp.int32(-40)),
    "prefix": PrefixLMMask(333),
    "prefix, array": PrefixLMMask(jnp.int32(640)),
    "chunks": ChunkedMask(256),
    "chunks, odd": ChunkedMask(300),
    "padding": PaddingMask(jnp.int32(1000), jnp.int32(1200)),
    "documents": DocumentMask(ids_of("sorted", N)),
    "documents, permuted": DocumentMask(ids_of("permuted", N)),
    "documents, interleaved": DocumentMask(ids_of("interleaved", N)),
    "causal documents": CausalMask() & DocumentMask(ids_of("sorted", N)),
    "causal documents, permuted": CausalMask() & DocumentMask(ids_of("permuted", N, 12)),
    "causal chunks": CausalMask() & ChunkedMask(384),
    "window or sinks": SlidingWindowMask(256) | ((lambda b, h, q, k: k < 4) & CausalMask()),
    "not causal": ~CausalMask(),
    "outside a window": CausalMask() & ~SlidingWindowMask(500, None),
    "padded causal": CausalMask() & PaddingMask(jnp.int32(900)),
    "dilated": DilatedMask(3),
    "dilated, far": DilatedMask(600),
    "dilated window": DilatedMask(4) & SlidingWindowMask(511),
}


@pytest.mark.parametrize("name", PLAIN)
def test_verdicts_are_sound_and_sharp(name):
    """The bar: at most 1.1 times the partial tiles that there are. Measured here: as many."""
    mask = PLAIN[name]
    tiles = tile_map(mask, N, N)
    partial, least = check_sound(tiles, exact(dense(mask, N, N), (128, 128)))
    assert partial <= 1.1 * least
    check_lists(tiles)


def test_where_verdicts_are_loose():
    """Parts that differ are known each alone: no distance is both under 101 and over 110, but a tile
    has distances of either kind."""
    mask = CausalMask() & SlidingWindowMask(100) & ~SlidingWindowMask(110)
    tiles = tile_map(mask, N, N)
    partial, least = check_sound(tiles, exact(dense(mask, N, N), (128, 128)))
    assert least == 0
    assert partial == 22


def test_masks_with_a_common_part_are_exact():
    """The window ends where causal does. By intervals alone the diagonal would be partial."""
    mask = CausalMask() & ~SlidingWindowMask(500)
    tiles = tile_map(mask, N, N)
    partial, least = check_sound(tiles, exact(dense(mask, N, N), (128, 128)))
    assert partial == least == 16


@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (128, 80), (16, 8)])
@pytest.mark.parametrize("lengths", [(500, 333), (333, 500), (129, 1), (1, 129), (128, 256)])
def test_ragged_lengths_and_other_tiles(lengths, tile):
    """B01, B02: one map, whatever the tile; queries and keys differ."""
    q_len, kv_len = lengths
    masks = [
        CausalMask.bottom_right(q_len, kv_len),
        SlidingWindowMask(70, 30),
        DocumentMask(ids_of("sorted", q_len), ids_of("sorted", kv_len)),
        FullMask(),
    ]
    for mask in masks:
        tiles = tile_map(mask, q_len, kv_len, tile=tile)
        partial, least = check_sound(tiles, exact(dense(mask, q_len, kv_len), tile))
        assert partial <= 1.1 * least
        check_lists(tiles)


def test_batch_entries_and_heads_have_lists_of_their_own():
    ids = ids_of("sorted", 300, batch=3)
    slopes = np.array([3, 60], np.int32)
    masks = {
        "b": DocumentMask(ids),
        "h": lambda b, h, q, k: abs(q - k) <= jnp.asarray(slopes)[h],
        "bh": DocumentMask(ids) & (lambda b, h, q, k: (q >= k) | (h == 1)),
    }
    for name, mask in masks.items():
        tiles = tile_map(mask, 300, 300, batch=3, heads=2, tile=(32, 16))
        assert tiles.forward.tiles.shape == (
            3 if "b" in name else 1,
            2 if "h" in name else 1,
            10,
            19,
        )
        check_sound(tiles, exact(dense(mask, 300, 300, 3, 2), (32, 16)))
        check_lists(tiles)


def test_one_copy_where_the_mask_ignores_batch_and_heads():
    """B11."""
    tiles = tile_map(CausalMask(), 512, 512, batch=4, heads=64)
    assert tiles.forward.tiles.shape == tiles.backward.tiles.shape == (1, 1, 4, 4)


def test_mask_from_a_table():
    """B12."""
    table = jnp.asarray(np.random.default_rng(0).random((2, 96, 96)) < 0.002)

    def mask(b, h, q, k):
        return table[b, q, k]

    tiles = tile_map(mask, 96, 96, batch=2, tile=(16, 16))
    check_sound(tiles, exact(dense(mask, 96, 96, 2), (16, 16)))
    check_lists(tiles)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0), (1, 1)])
@pytest.mark.parametrize("traced", [False, True])
def test_no_queries_or_keys(lengths, traced):
    def build(offset):
        return tile_map(CausalMask(offset), *lengths, tile=(2, 2))

    tiles = (jax.jit(build) if traced else build)(jnp.int32(0))
    n, m = tiles.shape
    assert tiles.forward.tiles.shape == (1, 1, n, m)
    assert tiles.backward.order.shape == (1, 1, m)
    check_lists(tiles)
    str(tiles)


LENGTHS, TILES = (1, 7, 60, 97), ((16, 16), (8, 24), (32, 5))


@st.composite
def masks(draw, q_len, kv_len, depth=2):
    near = st.integers(-40, 40)
    if depth and draw(st.booleans()):
        first, second = (draw(masks(q_len, kv_len, depth - 1)) for _ in range(2))
        return draw(st.sampled_from([first & second, first | second, ~first]))
    kind = draw(st.integers(0, 8))
    array = draw(st.booleans())
    number = draw(near)
    maybe = jnp.int32(number) if array else number
    if kind == 0:
        return CausalMask(maybe)
    if kind == 1:
        left, right = draw(
            st.tuples(st.none() | st.integers(0, 40), st.none() | st.integers(0, 40))
        )
        return SlidingWindowMask(left, right, offset=maybe)
    if kind == 2:
        sort = draw(st.sampled_from(["sorted", "permuted", "interleaved"]))
        documents = draw(st.integers(1, 6))
        return DocumentMask(ids_of(sort, q_len, documents), ids_of(sort, kv_len, documents))
    if kind == 3:
        return DocumentMask(ids_of("sorted", q_len, batch=2), ids_of("permuted", kv_len, batch=2))
    if kind == 4:
        return PrefixLMMask(jnp.array([number, 20]))
    if kind == 5:
        return ChunkedMask(draw(st.integers(1, 50)))
    if kind == 6:
        return DilatedMask(draw(st.integers(1, 50)))
    if kind == 7:
        return PaddingMask(jnp.array([abs(number), 30]), jnp.int32(50) if array else None)
    scale = draw(st.integers(-3, 3))
    return CausalMask() & (lambda b, h, q, k: (q * scale + k * h) // 7 > number)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_combinations_are_sound(data):
    q_len, kv_len = data.draw(st.sampled_from(LENGTHS)), data.draw(st.sampled_from(LENGTHS))
    tile = data.draw(st.sampled_from(TILES))
    mask = data.draw(masks(q_len, kv_len))
    tiles = tile_map(mask, q_len, kv_len, batch=2, heads=2, tile=tile)
    check_sound(tiles, exact(dense(mask, q_len, kv_len, 2, 2), tile))
    check_lists(tiles)


# Static and traced


def equal(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


TRACED = {
    "documents": lambda x: CausalMask() & DocumentMask(x["ids"]),
    "lengths": lambda x: PaddingMask(x["lengths"]) | SlidingWindowMask(5, offset=x["lengths"]),
    "heads": lambda x: lambda b, h, q, k: abs(q - k) < x["lengths"][h],
    "table": lambda x: lambda b, h, q, k: x["table"][q, k] > 0.5,
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_arrays_give_the_same_map(name):
    arrays = {
        "ids": ids_of("sorted", 90, batch=2),
        "lengths": jnp.array([20, 60]),
        "table": jnp.linspace(0, 1, 90 * 90).reshape(90, 90),
    }

    def build(arrays):
        return tile_map(TRACED[name](arrays), 90, 90, batch=2, heads=2, tile=(16, 8))

    host, traced = build(arrays), jax.jit(build)(arrays)
    equal(host, traced)
    check_lists(traced)


def test_wide_integers_change_nothing():
    ids = ids_of("sorted", 90)

    def build(ids):
        return tile_map(CausalMask() & DocumentMask(ids), 90, 90, tile=(16, 8))

    want = build(ids)
    with jax.enable_x64(True):
        equal(build(ids), want)
        equal(jax.jit(build)(ids), want)
        equal(build(ids.astype(jnp.int64)).backward, want.backward)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16"])
def test_narrow_integers_change_nothing(dtype):
    """With 16 bits XLA's compiler for CPUs aborted the process."""
    ids = jnp.stack([ids_of("sorted", 53), ids_of("sorted", 53)[::-1]]) % 100

    def build(ids):
        def mask(b, h, q_idx, kv_idx):
            return ids[b, q_idx] == ids[b, kv_idx + 1]

        return tile_map(mask, 37, 53, batch=2, tile=(8, 16))

    want = build(ids)
    equal(build(ids.astype(dtype)).backward, want.backward)
    equal(jax.jit(build)(ids.astype(dtype)).backward, want.backward)


def test_gradients_pass_by():
    """The mask reads floats that are differentiated; the map of it has no derivative, and JAX
    carries no tangents through it."""
    table = jnp.linspace(0, 1, 24)

    def loss(table):
        tiles = tile_map(lambda b, h, q, k: table[q] + table[k] > 0.7, 24, 24, tile=(8, 8))
        return (table**2).sum() * tiles.forward.partial.sum()

    plain = tile_map(lambda b, h, q, k: table[q] + table[k] > 0.7, 24, 24, tile=(8, 8))
    want = 2 * table * plain.counts()["partial"]
    np.testing.assert_allclose(jax.grad(loss)(table), want)
    forward = jax.make_jaxpr(loss)(table)
    both = jax.make_jaxpr(lambda table: jax.jvp(loss, (table,), (table,)))(table)
    assert equations(both.jaxpr) < equations(forward.jaxpr) + 20


def test_small_map_of_a_known_mask_is_a_constant_of_the_program(monkeypatch):
    mask = CausalMask(jnp.int32(3)) & DocumentMask(ids_of("sorted", 100))

    def build():
        return tile_map(mask, 100, 100, tile=(16, 16))

    want = build()
    for most, in_the_program in ((49, False), (48, True)):
        monkeypatch.setattr(_tiles, "MOST_CONSTANT_TILES", most)
        traced = jax.make_jaxpr(lambda: build())()  # a function that no cache knows
        assert (equations(traced.jaxpr) > 50) == in_the_program
        equal(jax.jit(lambda: build())(), want)
    # Outside `jit` nothing is traced, whatever the size.
    monkeypatch.setattr(_tiles, "_lists_in_jax", None)
    equal(build(), want)


def test_vmap_gives_each_example_a_map():
    ids = jnp.stack([ids_of("sorted", 64, n) for n in (1, 3, 6)])

    def build(row):
        return tile_map(DocumentMask(row), 64, 64, tile=(8, 8))

    mapped = jax.vmap(build)(ids)
    assert mapped.forward.tiles.shape == (3, 1, 1, 8, 8)
    for i, row in enumerate(ids):
        equal(jax.tree.map(lambda x, i=i: x[i], mapped), build(row))
    assert mapped.verdicts().shape == (3, 1, 1, 8, 8)


def test_known_mask_inside_shard_map():
    """Not under `jit`, what is computed of the captured arrays was traced, and no NumPy array."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    ids = jnp.arange(40) // 7

    def verdicts(x):
        made = tile_map(lambda b, h, q_idx, kv_idx: ids[::-1][q_idx] == ids[kv_idx], 40, 40)
        return x + made.verdicts().sum()

    got = jax.shard_map(verdicts, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(
        jnp.zeros(8)
    )
    np.testing.assert_array_equal(got, np.ones(8))


def test_changed_ids_trace_and_compile_nothing():
    """B10."""
    count = []

    @jax.jit
    def build(ids):
        count.append(1)
        return tile_map(CausalMask() & DocumentMask(ids), 96, 96, tile=(8, 8))

    for documents in range(1, 5):
        ids = ids_of("sorted", 96, documents)
        equal(build(ids), tile_map(CausalMask() & DocumentMask(ids), 96, 96, tile=(8, 8)))
    assert len(count) == 1


def test_functions_made_anew_share_the_traced_code():
    ids = ids_of("sorted", 96)

    def build(ids):
        return tile_map(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 96, 96, tile=(8, 8))

    jax.vmap(build)(ids[None])
    before = _tiles._lists_in_jax._cache_size()
    for _ in range(3):
        jax.vmap(build)(ids[None])
    assert _tiles._lists_in_jax._cache_size() == before


# Cost


def test_nothing_has_the_size_of_queries_times_keys():
    """B09."""

    def build(ids):
        mask = CausalMask() & SlidingWindowMask(4096) & DocumentMask(ids)
        return tile_map(mask, 96_000, 96_000)

    jaxpr = jax.make_jaxpr(build)(jax.ShapeDtypeStruct((96_000,), jnp.int32))
    assert biggest(jaxpr.jaxpr) <= 2 * 750**2  # a scatter's indices are pairs


# Passing it in


def qkv(batch=2, q_len=24, kv_len=40, heads=4):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, n, h, 8) for n, h in ((q_len, heads), (kv_len, 2), (kv_len, 2))]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def test_attention_takes_a_map():
    mask = CausalMask(16) & DocumentMask(ids_of("sorted", 24), ids_of("sorted", 40))
    layer = FlexAttention(mask)

    @jax.jit
    def run(tiles, *qkv):
        mapped = jax.vmap(lambda *qkv: layer(*qkv, tiles=tiles))(*qkv)
        return flex_attention(*qkv, mask), flex_attention(*qkv, mask, tiles=tiles), mapped

    want, got, mapped = run(tile_map(mask, 24, 40, tile=(8, 8)), *qkv())
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(mapped, want, atol=1e-6)


def test_map_of_other_sizes_is_refused():
    """B07."""
    made = tile_map(CausalMask(), 40, 40, tile=(8, 8))
    q, k, v = qkv()
    again = r"tile_map\(mask_fn, 24, 40, batch=2, heads=4, tile=\(8, 8\)\)"
    with pytest.raises(ValueError, match=r"q_len=40, but q and k have q_len=24. .*" + again):
        flex_attention(q, k, v, CausalMask(), tiles=made)
    per_batch = tile_map(PaddingMask(jnp.array([3, 4, 5])), 24, 40, batch=3)
    with pytest.raises(ValueError, match=r"batch=3, but q and k have batch=2"):
        flex_attention(q, k, v, PaddingMask(jnp.array([3, 4])), tiles=per_batch)
    per_head = tile_map(lambda b, h, q, k: h > k, 24, 40, heads=2)
    with pytest.raises(ValueError, match=r"heads=2, but q and k have heads=4"):
        flex_attention(q, k, v, lambda b, h, q, k: h > k, tiles=per_head)


def test_map_of_another_mask_is_refused():
    q, k, v = qkv()
    made = tile_map(CausalMask(), 24, 40)
    with pytest.raises(ValueError, match="made from another mask"):
        flex_attention(q, k, v, CausalMask(1), tiles=made)
    with pytest.raises(ValueError, match="without mask_fn"):
        flex_attention(q, k, v, tiles=made)
    with pytest.raises(TypeError, match="tiles must be a TileMap"):
        flex_attention(q, k, v, CausalMask(), tiles=made.forward)
    # Other values in the same mask are what a map is passed in for.
    made = tile_map(CausalMask(jnp.int32(3)), 24, 40)
    flex_attention(q, k, v, CausalMask(jnp.int32(4)), tiles=made)


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((jnp.zeros(3), 4), {}, "q_len must be a Python int"),
        ((4, -1), {}, "kv_len must be from 0"),
        ((4, 4), {"batch": True}, "batch must be a Python int"),
        ((4, 4), {"tile": 128}, "tile must be a pair"),
        ((4, 4), {"tile": (0, 8)}, "tile must be from 1"),
        ((4, 4), {"implementation": "fast"}, "implementation='fast' is not known"),
    ],
)
def test_wrong_arguments_are_named(arguments, named, message):
    with pytest.raises((TypeError, ValueError), match=message):
        tile_map(CausalMask(), *arguments, **named)


def test_what_is_no_mask_is_named():
    with pytest.raises(TypeError, match="must be a function"):
        tile_map(None, 4, 4)
    with pytest.raises(TypeError, match="must be a function"):
        tile_map(CausalMask, 4, 4)
    with pytest.raises(TypeError, match="must return a bool"):
        tile_map(lambda b, h, q, k: q - k, 4, 4)
    with pytest.raises(ValueError, match="q_ids was made for q_len 5"):
        tile_map(DocumentMask(jnp.zeros(5, jnp.int32)), 4, 5)


# Looking at it


def test_printing():
    tiles = tile_map(CausalMask(), 24, 32, tile=(8, 8))
    assert repr(tiles) == (
        "TileMap(q_len=24, kv_len=32, tile=8x8, tiles=3x4, batch=shared, heads=shared, empty=6, "
        "partial=3, full=3, work=50.0%)"
    )
    assert str(tiles).splitlines()[1:4] == ["▒···", "█▒··", "██▒·"]
    assert tiles.counts() == {"empty": 6, "partial": 3, "full": 3}
    big = tile_map(CausalMask(), 65_536, 65_536)
    assert len(str(big)) < 300
    assert "Array" not in str(big)


def test_printing_where_values_are_not_known():
    seen = []

    @jax.jit
    def build(offset):
        tiles = tile_map(CausalMask(offset), 64, 64, tile=(8, 8))
        seen.append(str(tiles))
        assert tiles.counts() is None
        return tiles

    mapped = jax.vmap(build)(jnp.arange(3))
    assert seen[0].endswith("traced)")
    assert "empty=" in str(mapped)
    assert "traced" in repr(jax.tree.map(lambda x: x.shape, mapped))
    assert isinstance(mapped, TileMap)


def test_drawing(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = DocumentMask(ids_of("sorted", 96, batch=2))
    tiles = tile_map(mask, 96, 96, batch=2, tile=(16, 8))
    ax = tiles.draw(b=1, h=3)
    np.testing.assert_array_equal(ax.images[0].get_array(), tiles.verdicts()[1, 0])
    assert tiles.draw(ax) is ax
    matplotlib.pyplot.close("all")
    with pytest.raises(ValueError, match="b must be from 0 to 1"):
        tiles.draw(b=2)
    with pytest.raises(ValueError, match="no tiles"):
        tile_map(CausalMask(), 0, 4).draw()
    with pytest.raises(ValueError, match="inside jit"):
        jax.jit(lambda o: tile_map(CausalMask(o), 64, 64).draw())(jnp.int32(0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        tiles.draw()


# The kernel's meaning


@pytest.mark.parametrize("shape", [(1, 1), (3, 65), (2, 3, 40), (4, 0), (0, 4)])
def test_numpy_and_jax_compact_alike(shape):
    verdicts = np.random.default_rng(1).integers(0, 3, shape).astype(np.int8)
    want = _tiles._numpy_lists(verdicts)
    got = _tiles.CompactKernel().reference(jnp.asarray(verdicts))
    for a, b in zip(got, (want.tiles, want.partial, want.full), strict=True):
        np.testing.assert_array_equal(a, b)
    assert _config.MOST_CONSTANT_TILES == 1 << 16
