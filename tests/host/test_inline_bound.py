"""Bounds over tiles: never wrong, on random programs; and exact, on masks."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from inline_numpy import run_all
from inline_programs import edge_values, random_code, random_operands, run_all as run_all_jax

from eqxcute.inline import Argument, Code, Equation, Span, _bound, bound, trace
from eqxcute.inline._code import Operand
from eqxcute.inline._interval import ends_dtype

TILES, SIZE = 8, 8
INDICES = [Argument(name, "int32", 0) for name in ("b", "h", "q", "kv")]


# Random programs


@functools.cache
def _pool(dtype: str, low: int | None) -> np.ndarray:
    """Numbers in rising order."""
    if low is not None:
        return np.arange(low, low + 40).astype(dtype)
    values = edge_values(dtype, 3, 60)
    held = values.astype(ends_dtype(dtype))
    return values[np.argsort(held, kind="stable")][: int((held == held).sum())]  # NaN comes last


@functools.lru_cache(maxsize=256)
def _inputs(arguments: tuple[Argument, ...], seed: int) -> tuple[dict, dict]:
    """Spans of random tiles, and values inside."""
    rng = np.random.default_rng(seed)
    spans, values = {}, {}
    for a in arguments:
        pool, kind = _pool(a.dtype, a.low), ends_dtype(a.dtype)
        first = rng.integers(0, len(pool), (TILES, 1))
        last = np.minimum(first + rng.choice([0, 0, 1, 3, len(pool)], (TILES, 1)), len(pool) - 1)
        inside = first + (rng.random((TILES, SIZE)) * (last - first + 1)).astype(int)
        inside[:, :1], inside[:, 1:2] = first, last
        spans[a.name] = Span(pool[first].astype(kind), pool[last].astype(kind))
        values[a.name] = pool[inside]
    return spans, values


@functools.lru_cache(maxsize=256)
def _operands(operands: tuple[Operand, ...], seed: int) -> list[np.ndarray]:
    return random_operands(Code((), operands, (), ()), seed)


def assert_sound(seed: int, run=run_all, code: Code | None = None, xp=np) -> None:
    """Every value of every equation lies in its interval."""
    code = random_code(seed) if code is None else code
    # Some dozens of inputs serve all programs: the same ones again cost nothing.
    spans, values = _inputs(code.arguments, seed % 61)
    operands = _operands(code.operands, seed % 53)
    every = Code(code.arguments, code.operands, code.equations, tuple(range(len(code.equations))))
    if xp is np:
        found = bound(every, spans, operands, np)
    else:
        found = jax.jit(lambda spans, arrays: bound(every, spans, arrays, jnp))(
            spans, [jnp.asarray(a) for a in operands]
        )
    seen = run(code, values, operands)
    for n, (interval, value) in enumerate(zip(found, seen, strict=True)):
        value = np.asarray(value)
        value = value.astype(np.float32) if value.dtype.kind == "V" else value
        nan = value != value
        with np.errstate(invalid="ignore"):
            out = ~nan & ((value < interval.lo) | (value > interval.hi)) | (
                nan & ~np.asarray(interval.nan)
            )
        if out.any():
            at = tuple(int(i[0]) for i in np.nonzero(out))
            ends = [np.broadcast_to(x, value.shape)[at] for x in interval]
            raise AssertionError(
                f"assert_sound({seed}): v{n} is {value[at]}, but bounded by {ends}; of\n{code.text}\ninputs "
                f"{[(m, seen[m][at]) for m in code.equations[n].inputs]}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_random_programs_stay_in_their_intervals(block):
    for seed in range(1000 * block, 1000 * (block + 1)):
        assert_sound(seed)


@given(st.integers(10_000, 2**40))
@settings(max_examples=300, deadline=None)
def test_more_random_programs_stay_in_their_intervals(seed):
    assert_sound(seed)


ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "max",
    "square",
    "select_n",
    "lt",
    "convert_element_type",
)


@pytest.mark.parametrize("held", [True, False])
def test_programs_under_jax_stay_in_their_intervals(held):
    """Op by op; one dtype at a time has fewer operations to compile."""
    for seed, dtype in enumerate(("float16", "bfloat16", "float32", "int32", "uint32")):
        for i in range(5):
            code = random_code(10 * seed + i, dtypes=("bool", "int32", dtype), rows=ARITHMETIC)
            assert_sound(seed, functools.partial(run_all_jax, held=held), code)


@pytest.mark.parametrize("seed", range(6))
def test_compiled_programs_stay_in_their_intervals(seed):
    """XLA fuses, contracts multiplications and additions, and keeps 16-bit floats in float32."""
    code = random_code(
        seed, dtypes=("bool", "bfloat16", "float32"), rows=ARITHMETIC, equations=(20, 30)
    )

    def run(code, values, operands):
        return jax.jit(lambda values: run_all_jax(code, values, operands, held=False))(values)

    assert_sound(seed, run, code)


@pytest.mark.parametrize("seed", range(4))
def test_traced_bounds_hold(seed):
    assert_sound(seed, xp=jnp)


# Masks


def _spans(sizes, tiles) -> dict[str, Span]:
    """As for attention: b and h are points, q and kv tiles."""
    spans = {}
    for axis, (a, length, tile) in enumerate(zip(INDICES, sizes, (1, 1, *tiles), strict=True)):
        count = -(-length // tile)
        lo = (np.arange(count, dtype=np.int32) * tile).reshape(
            [-1 if d == axis else 1 for d in range(4)]
        )
        hi = lo if tile == 1 else np.minimum(lo + tile - 1, length - 1)
        spans[a.name] = Span(lo, hi, length, tile)
    return spans


def _exact(fn, sizes, tiles) -> tuple[np.ndarray, np.ndarray]:
    """Whether all and any of each tile are True."""
    grid = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in sizes), indexing="ij")
    mask = np.asarray(jax.jit(jnp.vectorize(fn))(*grid))
    starts = [np.arange(0, n, t) for n, t in zip(sizes[2:], tiles, strict=True)]
    every = np.logical_and.reduceat(np.logical_and.reduceat(mask, starts[0], 2), starts[1], 3)
    some = np.logical_or.reduceat(np.logical_or.reduceat(mask, starts[0], 2), starts[1], 3)
    return every, some


def _bounds(fn, sizes, tiles, xp) -> tuple[np.ndarray, np.ndarray]:
    program, captured = trace(fn, INDICES)
    spans = _spans(sizes, tiles)
    operands = program.prepare(captured)
    if xp is np:
        (found,) = bound(program.code, spans, operands, np)
    else:
        ((lo, hi),) = jax.jit(lambda xs: [i[:2] for i in bound(program.code, spans, xs, jnp)])(
            operands
        )
        found = (lo, hi)
    shape = (*sizes[:2], *(-(-n // t) for n, t in zip(sizes[2:], tiles, strict=True)))
    return tuple(np.broadcast_to(x, shape) for x in found[:2])


def _documents(length: int, count: int, seed: int = 0, permuted: bool = True) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
    ids = rng.permutation(count) if permuted else np.arange(count)
    return np.repeat(ids, np.diff([0, *ends, length])).astype(np.int32)


RNG = np.random.default_rng(0)
SIZES, SHAPE = (2, 2, 100, 130), (16, 8)
LENGTHS = jnp.array([77, 130])
IDS = jnp.asarray(_documents(130, 20))
BATCH_IDS = jnp.asarray(np.stack([_documents(130, 20, 1), _documents(130, 9, 2)]))
TABLE = jnp.asarray(RNG.random((100, 130)) < 0.1)
LOWER = jnp.asarray(np.tri(100, 130, dtype=bool))
HEADS = jnp.asarray(RNG.random((2, 400)) < 0.02)
BIAS = jnp.asarray(np.where(RNG.random(400) < 0.1, np.nan, RNG.standard_normal(400)), np.float32)
WINDOWS = jnp.array([5, 40])

MASKS = {
    "all": lambda b, h, q, kv: q >= 0,
    "causal": lambda b, h, q, kv: q >= kv,
    "bottom right": lambda b, h, q, kv: q + 30 >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 20),
    "two-sided": lambda b, h, q, kv: jnp.abs(q - kv) <= 20,
    "unsigned window": lambda b, h, q, kv: (q - kv).astype(jnp.uint32) < 20,
    "chunks": lambda b, h, q, kv: q // 24 == kv // 24,
    "causal chunks": lambda b, h, q, kv: (q // 24 == kv // 24) & (q >= kv),
    "chunks by shifts": lambda b, h, q, kv: (q >> 5) == (kv >> 5),
    "chunks by bits": lambda b, h, q, kv: (q & -32) == (kv & -32),
    "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 37),
    "prefix of each row": lambda b, h, q, kv: (q >= kv) | (kv < LENGTHS[b] - 40),
    "padding": lambda b, h, q, kv: kv < LENGTHS[b],
    "both paddings": lambda b, h, q, kv: (kv < LENGTHS[b]) & (q < LENGTHS[b]),
    "not": lambda b, h, q, kv: ~(q < kv),
    "where": lambda b, h, q, kv: jnp.where(h == 0, q >= kv, q - kv < 9),
    "window of each head": lambda b, h, q, kv: (q - kv < WINDOWS[h]) & (q >= kv),
    "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "dilated tiles": lambda b, h, q, kv: (q // 16 - kv // 8) % 3 == 0,
    "strided columns": lambda b, h, q, kv: (kv % 64 < 8) | (q - kv < 8),
    "documents": lambda b, h, q, kv: IDS[q] == IDS[kv],
    "causal documents": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "documents of each row": lambda b, h, q, kv: (BATCH_IDS[b, q] == BATCH_IDS[b, kv]) & (q >= kv),
    "not another document": lambda b, h, q, kv: ~(IDS[q] != IDS[kv]),
    "documents of two arrays": lambda b, h, q, kv: IDS[:100][q] == IDS[kv],
    "table": lambda b, h, q, kv: TABLE[q, kv],
    "lower table": lambda b, h, q, kv: LOWER[q, kv],
    "diagonal": lambda b, h, q, kv: TABLE[:, :100][q, q],
    "by distance": lambda b, h, q, kv: HEADS[h, q - kv + 150],
    "floats by distance": lambda b, h, q, kv: BIAS[q - kv + 150] > 1,
    "scaled index": lambda b, h, q, kv: IDS[q // 3 + 7] > 4,
    "past the end": lambda b, h, q, kv: IDS[jnp.maximum(q - 20, 0)] < IDS[kv + 50],
    "row of a read": lambda b, h, q, kv: IDS[q + LENGTHS[b]] > 9,
}
# How many times more tiles are partial than need be, where it is not 1. XLA takes one size for all windows, NumPy does not.
LOOSE = {"diagonal": 1.5, "past the end": 1.1}
LOOSER = {"row of a read": 1.6}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_exact(name):
    every, some = _exact(MASKS[name], SIZES, SHAPE)
    known = _bounds(MASKS[name], SIZES, SHAPE, np)
    traced = _bounds(MASKS[name], SIZES, SHAPE, jnp)
    for (lo, hi), loose in ((known, LOOSE), (traced, {**LOOSE, **LOOSER})):
        assert not (lo & ~every).any(), "full, and is not"
        assert not (some & ~hi).any(), "empty, and is not"
        assert (lo != hi).sum() <= loose.get(name, 1) * (every != some).sum()
    if name not in LOOSER:
        np.testing.assert_array_equal(known, traced)


@pytest.mark.parametrize(
    "name", ["window", "documents of each row", "by distance", "padding", "diagonal"]
)
def test_everything_traced_says_the_same(name, monkeypatch):
    """As at lengths whose numbers of tiles are too many for constants."""
    every, some = _exact(MASKS[name], SIZES, SHAPE)
    monkeypatch.setattr(_bound, "_SMALL", 0)
    lo, hi = _bounds(MASKS[name], SIZES, SHAPE, jnp)
    assert not (lo & ~every).any()
    assert not (some & ~hi).any()
    loose = {"by distance": 1.1, "diagonal": 1.5}.get(name, 1)
    assert (lo != hi).sum() <= loose * (every != some).sum()


# Ids


def _id_masks():
    rng = np.random.default_rng(5)
    ids = {
        "sorted": _documents(256, 12, permuted=False),
        "permuted": _documents(256, 12),
        "far apart": _documents(256, 12) * 100_003 + 7,
        "of one hash": _documents(256, 12) << 16,
        "negative": -_documents(256, 12) * 3 - 1,
        "bytes": _documents(256, 12).astype(np.int8) * 20 - 120,
        "unsigned": _documents(256, 12).astype(np.uint32) - np.uint32(4),
        "padded": np.concatenate([_documents(200, 12), np.full(56, -1, np.int32)]),
        "scattered": rng.integers(0, 5, 256).astype(np.int32),
        "one each": rng.permutation(256).astype(np.int32),
        "one": np.zeros(256, np.int32),
    }
    return {name: jnp.asarray(x) for name, x in ids.items()}


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("name", _id_masks())
def test_ids_may_come_in_any_order(name, xp):
    ids = _id_masks()[name]

    def fn(b, h, q, kv):
        return ids[q] == ids[kv]

    sizes = (1, 1, 256, 256)
    every, some = _exact(fn, sizes, SHAPE)
    lo, hi = _bounds(fn, sizes, SHAPE, xp)
    assert not (lo & ~every).any()
    assert not (some & ~hi).any()
    if name not in ("scattered", "of one hash"):
        assert (lo != hi).sum() == (every != some).sum()


def test_ids_of_different_rows_are_not_taken_for_those_of_one():
    """Each row names its ids by itself only where both reads are of one row."""

    def fn(b, h, q, kv):
        return BATCH_IDS[b, q] == BATCH_IDS[1 - b, kv]

    every, some = _exact(fn, SIZES, SHAPE)
    for xp in (np, jnp):
        lo, hi = _bounds(fn, SIZES, SHAPE, xp)
        assert not (lo & ~every).any()
        assert not (some & ~hi).any()


# Reads

READS = {
    "q": lambda q, kv, b: q,
    "kv": lambda q, kv, b: kv,
    "b": lambda q, kv, b: b,
    "3": lambda q, kv, b: 3,
    "q - kv": lambda q, kv, b: q - kv,
    "q - 9": lambda q, kv, b: q - 9,
    "2 * kv": lambda q, kv, b: 2 * kv,
    "kv // 5": lambda q, kv, b: kv // 5,
    "q + b": lambda q, kv, b: q + b,
    "-q": lambda q, kv, b: -q,
    "q * kv": lambda q, kv, b: q * kv,
}


@pytest.mark.parametrize("xp", [np, jnp])
def test_reads_hold_what_is_under_the_tile(xp):
    rng = np.random.default_rng(0)
    names = list(READS)
    for case in range(60 if xp is np else 12):
        rank = int(rng.integers(1, 4))
        picked = [names[i] for i in rng.integers(0, len(names), rank)]
        shape = tuple(int(n) for n in rng.integers(1, 50, rank))
        array = jnp.asarray(rng.integers(-99, 100, shape), jnp.int32)
        if case % 3 == 0:
            array = jnp.where(array > 80, jnp.nan, array.astype(jnp.float32))

        def fn(b, h, q, kv, picked=picked, array=array):
            return array[tuple(READS[name](q, kv, b) for name in picked)]

        sizes, tiles = (3, 1, 37, 29), (8, 4)
        program, captured = trace(fn, INDICES)
        b, _, q, kv = np.meshgrid(*map(np.arange, sizes), indexing="ij")
        at = [np.broadcast_to(READS[name](q, kv, b), q.shape) for name in picked]
        at = [np.clip(np.where(i < 0, i + n, i), 0, n - 1) for i, n in zip(at, shape, strict=True)]
        values = np.asarray(array)[tuple(at)].astype(np.float64)
        run = functools.partial(bound, program.code, _spans(sizes, tiles), xp=xp)
        (found,) = (run if xp is np else jax.jit(run))(operands=program.prepare(captured))
        full = [
            np.repeat(np.repeat(x, 8, 2), 4, 3)[:, :, :37, :29] if np.ndim(x) else x
            for x in (np.broadcast_to(x, (3, 1, 5, 8)) for x in found)
        ]
        nan = np.isnan(values)
        what = f"{picked} of {shape}"
        assert not (nan & ~full[2]).any(), what
        assert np.all(nan | ((values >= full[0]) & (values <= full[1]))), what
        if picked in (["q"], ["kv"], ["b"], ["kv // 5"]) and array.dtype == jnp.int32:
            low, high = (
                f.reduceat(f.reduceat(values, np.arange(0, 37, 8), 2), np.arange(0, 29, 4), 3)
                for f in (np.minimum, np.maximum)
            )
            np.testing.assert_array_equal(np.broadcast_to(found.lo, low.shape), low, what)
            np.testing.assert_array_equal(np.broadcast_to(found.hi, high.shape), high, what)


def test_windows_of_many_sizes_are_exact():
    """One read, whose index is an interval of another width in each tile."""
    rng = np.random.default_rng(0)
    values = rng.integers(-999, 999, 77).astype(np.int32)
    lo = rng.integers(-20, 90, (300, 1)).astype(np.int32)
    hi = lo + rng.integers(0, 100, (300, 1)).astype(np.int32)
    code = Code(
        (Argument("i", "int32"),),
        (Operand("int32", 1),),
        (
            Equation("argument", "int32", (), (("name", "i"),)),
            Equation("read", "int32", (0,), (("operand", 0),)),
        ),
        (1,),
    )
    (found,) = bound(code, {"i": Span(lo, hi)}, [values])
    for n in range(300):
        inside = values[np.clip(np.arange(lo[n, 0], hi[n, 0] + 1), 0, 76)]
        assert (found.lo[n, 0], found.hi[n, 0]) == (inside.min(), inside.max())


def test_nothing_known_is_everything():
    program, _ = trace(lambda q, kv: (q >= kv) & LOWER[q, kv], {"q": jnp.int32, "kv": jnp.int32})
    (found,) = bound(program.code, {}, [None] * len(program.code.operands))
    assert (found.lo, found.hi) == (False, True)
    spans = {name: Span(*(np.full((1, 1), n, np.int32) for n in (0, 7))) for name in ("q", "kv")}
    (found,) = bound(
        program.code, {**spans, "kv": Span(*2 * [np.full((1, 1), 9, np.int32)])}, [None]
    )
    assert not found.hi.any()


def test_what_the_compiler_cannot_read_is_everything():
    def fn(q, kv):
        return jax.lax.lgamma(q.astype(jnp.float32)) > kv

    program, captured = trace(fn, {"q": jnp.int32, "kv": jnp.int32})
    span = Span(*2 * [np.zeros((1, 1), np.int32)])
    assert program.code.opaque
    (found,) = bound(program.code, {"q": span, "kv": span}, program.prepare(captured))
    assert (np.all(found.lo), np.all(found.hi)) == (False, True)


@pytest.mark.parametrize("name", ["documents", "window"])
def test_long_sequences_take_little_memory(name):
    """262,144 positions: 2048 x 2048 tiles. Neither a number for each pair of positions nor a wide one for each tile."""
    length = 262_144
    ids = jnp.asarray(_documents(length, 300))
    masks = {
        "documents": lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 4096),
    }
    program, captured = trace(masks[name], INDICES)
    spans = _spans((1, 1, length, length), (128, 128))

    def verdicts(operands):
        (found,) = bound(program.code, spans, operands, jnp)
        return found.lo, found.hi

    memory = jax.jit(verdicts).lower(program.prepare(captured)).compile().memory_analysis()
    assert memory.output_size_in_bytes < 2 * 2048 * 2048 + 100
    assert memory.temp_size_in_bytes < 8 * 2**20
