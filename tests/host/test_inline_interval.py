"""No value escapes its interval: every rule against all values of small intervals, as JAX computes them."""

import functools

import inline_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_programs import edge_values, taken

from eqxcute.inline import Equation, _table
from eqxcute.inline._interval import Interval, ends_dtype, flushed

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("float16", "bfloat16", "float32")
PARAMS = {
    "integer_pow": [{"y": y} for y in (-3, -1, 0, 1, 2, 3, 5, 8)],
    "round": [{"rounding_method": m} for m in (0, 1)],
    "reduce_precision": [{"exponent_bits": 5, "mantissa_bits": 10}],
    "convert_element_type": [{"new_dtype": d} for d in ("bool", *INTEGERS, *FLOATS)],
    "bitcast_convert_type": [],
}


def _values(dtype: str, arity: int) -> np.ndarray:
    """In rising order, without NaN; the last ones are -0.0 and 0.0, if it has them. Always as many, to compile once."""
    if dtype == "bool":
        return np.array([False, True])
    if dtype in FLOATS:
        if arity == 1 and dtype != "float32":
            drawn = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(dtype))
        else:
            drawn = edge_values(dtype, 1, (1 << 16) if arity == 1 else 60)
        drawn = drawn.astype(np.float32)
        values = np.unique(drawn[~np.isnan(drawn)])
        if arity == 1:
            zeros = np.zeros((1 << 16) - len(values))
        else:
            values = values[np.linspace(0, len(values) - 1, 64).round().astype(int)]
            zeros = np.zeros(2)
        zeros[0] = -0.0
        return np.concatenate([values, zeros]).astype(jnp.dtype(dtype))
    info = np.iinfo(dtype)
    if info.bits == 8:
        return np.arange(info.min, info.max + 1).astype(dtype)
    anchors = [
        info.min,
        -1,
        0,
        1 << (info.bits // 2),
        info.max // 3,
        1 << (info.bits - 2),
        info.max,
    ]
    numbers = {a + i for a in anchors for i in range(-9, 10) if info.min <= a + i <= info.max}
    return np.array(sorted(numbers)).astype(dtype)


def _spans(dtype: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last place in `values` of intervals: short ones everywhere, and some long ones."""
    n = len(values)
    rng = np.random.default_rng(n)
    every = np.arange(n) if n < 1000 else rng.integers(0, n, 2000)
    first = np.concatenate([every, rng.integers(0, n, 60)])
    width = np.concatenate([rng.choice([0, 0, 1, 2, 4], len(every)), rng.integers(0, n, 60)])
    last = np.minimum(first + width, n - 1)
    if dtype not in FLOATS and dtype != "bool":  # no gaps
        wide = values.astype(np.int64)
        whole = wide[last] - wide[first] == last - first
        first, last = first[whole], last[whole]
    elif dtype in FLOATS:
        zeros = int(np.nonzero(np.diff(values.astype(np.float32)) < 0)[0][-1]) + 1
        keep = last < zeros
        first = np.concatenate([first[keep], [zeros, n - 1]])
        last = np.concatenate([last[keep], [zeros, n - 1]])
    return first, last


def _rows(dtype: str, arity: int) -> list[tuple[str, dict]]:
    rows = [
        (name, params)
        for name, row in _table.ROWS.items()
        if row.arity == arity and dtype in taken(row.takes, [dtype])
        for params in PARAMS.get(name, [{}])
    ]
    return [r for r in rows if not (r[1].get("y", 0) < 0 and dtype in INTEGERS)]


@functools.cache
def _tables(dtype: str, count: int, arity: int):
    """The compiled functions of all rows."""
    rows = _rows(dtype, arity)
    return rows, jax.jit(
        lambda *xs: [_table.ROWS[name].evaluate(*xs, **params) for name, params in rows]
    )


def _seen(table: np.ndarray, spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least, largest and NaN of the table's box under each tuple of spans, one axis for each input."""
    wide = table.astype(np.float64) if table.dtype.kind not in "iub" else table.astype(np.int64)
    nan = np.isnan(wide) if wide.dtype.kind == "f" else np.zeros(wide.shape, bool)
    low = np.where(nan, np.inf, wide) if wide.dtype.kind == "f" else wide
    high = np.where(nan, -np.inf, wide) if wide.dtype.kind == "f" else wide
    for axis, (first, last) in enumerate(spans):
        cuts = [(*[slice(None)] * axis, slice(i, j + 1)) for i, j in zip(first, last, strict=True)]
        low = np.stack([low[c].min(axis) for c in cuts], axis)
        high = np.stack([high[c].max(axis) for c in cuts], axis)
        nan = np.stack([nan[c].any(axis) for c in cuts], axis)
    return low, high, nan


def _intervals(dtype: str, values: np.ndarray, spans, arity: int) -> list[Interval]:
    held = values.astype(ends_dtype(dtype))
    found = []
    for axis in range(arity):
        first, last = (
            held[s].reshape([-1 if d == axis else 1 for d in range(arity)]) for s in spans
        )
        found.append(flushed(np, dtype, Interval(first, last, np.False_)))
    return found


def _assert_inside(what, bound: Interval, seen) -> None:
    low, high, nan = seen
    none = low > high  # nothing but NaN
    lo, hi = (np.asarray(x).astype(low.dtype) for x in bound[:2])
    out = ~none & ((low < lo) | (high > hi))
    shown = [
        f"[{a}, {b}] has {c} to {d}"
        for a, b, c, d in zip(*(x[out] for x in (lo, hi, low, high)), strict=True)
    ]
    assert not shown, f"{what}: {shown[:4]}"
    assert not (nan & ~np.asarray(bound.nan)).any(), f"{what}: a NaN that was not foreseen"
    assert np.all(lo <= hi), f"{what}: an empty interval"


def _assert_numpy(e: Equation, inputs, table: np.ndarray) -> None:
    """That what longer programs are tested with computes as JAX does."""
    dtypes = [x.dtype.name for x in inputs]
    if any(x.dtype != ends_dtype(x.dtype) for x in inputs) or e.op in ("cbrt", "erf_inv"):
        return
    with np.errstate(all="ignore"):
        found = inline_numpy.run(e, inputs, dtypes)
    table = table.astype(ends_dtype(e.dtype))
    if table.dtype != np.float32:
        # XLA takes subnormals for 0, NumPy does not.
        tiny = [(x != 0) & (np.abs(x) < 2.4e-38) for x in inputs if x.dtype == np.float32]
        wrong = (found != table) & ~functools.reduce(np.logical_or, tiny, np.False_)
        assert not wrong.any(), f"NumPy's {e.op} {e.dtype}: {[x[wrong][0] for x in inputs]}"
        return
    usual = [(x == 0) | (np.abs(x) > 2.4e-38) for x in inputs if x.dtype == np.float32]
    usual = functools.reduce(np.logical_and, usual, ~np.isnan(table))
    with np.errstate(all="ignore"):
        near = (found == table) | (np.abs(found - table) <= 2e-5 * np.abs(table) + 2.4e-38)
    assert np.all(near | ~usual), f"NumPy's {e.op}: {[x[usual & ~near][0] for x in inputs]}"


def _check(dtype: str, arity: int, held: bool) -> None:
    values = _values(dtype, arity)
    kind = ends_dtype(dtype) if held else jnp.dtype(dtype)
    spans = _spans(dtype, values)
    rows, run = _tables(kind.name, len(values), arity)
    grids = np.meshgrid(*[values.astype(kind)] * arity, indexing="ij")
    tables = dict(zip([repr(r) for r in rows], map(np.asarray, run(*grids)), strict=True))
    intervals = _intervals(dtype, values, spans, arity)
    for name, params in _rows(dtype, arity):
        if held and kind != dtype and name in ("nextafter", "reduce_precision"):
            continue  # of the bits in memory
        out = _table.ROWS[name].dtype(*[dtype] * arity, **params)
        table = tables[repr((name, params))]
        _assert_numpy(
            Equation(name, jnp.dtype(out).name, (0,) * arity, tuple(params.items())), grids, table
        )
        if params.get("new_dtype") in ("float16", "bfloat16") and not held:
            table = table.astype(np.float32)
        with np.errstate(all="ignore"):
            bound = _table.ROWS[name].bound(np, out, *intervals, **params)
        shape = np.broadcast_shapes(*(i.lo.shape for i in intervals))
        bound = Interval(*(np.broadcast_to(x, shape) for x in bound))
        _assert_inside(f"{name} {params} {dtype}", bound, _seen(table, [spans] * arity))


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
@pytest.mark.parametrize("arity", [1, 2])
def test_no_integer_escapes(dtype, arity):
    _check(dtype, arity, held=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arity", [1, 2])
@pytest.mark.parametrize("held", [False, True])
def test_no_float_escapes(dtype, arity, held):
    _check(dtype, arity, held)


def test_clamp_lies_in_its_interval():
    values = np.arange(-6, 7).astype(np.int8)
    first, last = np.triu_indices(len(values))
    grids = np.meshgrid(*[values] * 3, indexing="ij")
    table = np.minimum(np.maximum(grids[1], grids[0]), grids[2])
    intervals = _intervals("int8", values, (first, last), 3)
    bound = _table.ROWS["clamp"].bound(np, np.dtype(np.int8), *intervals)
    low, high, _ = _seen(table, [(first, last)] * 3)
    np.testing.assert_array_equal(bound.lo, low)
    np.testing.assert_array_equal(bound.hi, high)


@pytest.mark.parametrize("which", ["bool", "int32"])
def test_a_selection_is_of_what_can_be_chosen(which):
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = 2 if which == "bool" else int(rng.integers(2, 5))
        cases = [np.sort(rng.integers(-9, 9, 2)).astype(np.int16) for _ in range(count)]
        first, last = (
            np.sort(rng.integers(0, count, 2))
            if which == "bool"
            else np.sort(rng.integers(-1, 6, 2))
        )
        chosen = Interval(*(np.array(n, which) for n in (first, last)), np.False_)
        bound = _table.ROWS["select_n"].bound(
            np, np.dtype(np.int16), chosen, *(Interval(*c, np.False_) for c in cases)
        )
        picked = cases[min(max(int(first), 0), count - 1) : min(max(int(last), 0), count - 1) + 1]
        assert (bound.lo, bound.hi) == (min(c[0] for c in picked), max(c[1] for c in picked))


@pytest.mark.parametrize("nan", [True, False])
def test_a_selection_is_nan_only_if_the_chosen_case_is(nan):
    cases = [Interval(np.float32(0), np.float32(1), np.bool_(n)) for n in (nan, not nan)]
    which = Interval(np.False_, np.False_, np.False_)
    bound = _table.ROWS["select_n"].bound(np, np.dtype(np.float32), which, *cases)
    assert bool(bound.nan) is nan


EXACT = (
    "add",
    "sub",
    "mul",
    "max",
    "min",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "neg",
    "abs",
    "not",
    "sign",
)
BY_CONSTANT = ("floor_divide", "div", "shift_right_arithmetic", "shift_right_logical")


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", [*EXACT, *BY_CONSTANT, "remainder", "rem", "and", "or", "wrap"])
def test_what_masks_are_made_of_is_exact(name, dtype):
    """Loose is allowed, but not here: on these tiles depend. Where nothing wraps around, the ends are attained."""
    row = _table.ROWS[name]
    if dtype not in taken(row.takes, [dtype]) or (dtype == "uint8" and name in ("neg", "not")):
        return  # these always wrap around
    arity, out = row.arity, row.dtype(dtype)
    values = _values(dtype, arity)
    near = values[(values.astype(int) >= -40) & (values.astype(int) < 41)]
    first, last = _spans(dtype, near)
    second = near[(near > 0) & (near < 8)] if name not in (*EXACT, "wrap") else near
    points = np.arange(len(second))
    spans = [(first, last), (first, last) if name in EXACT else (points, points)][:arity]
    inputs = np.meshgrid(near, second, indexing="ij")[:arity] if arity == 2 else [near]
    table = inline_numpy.run(Equation(name, out.name, (0,) * arity), inputs, [dtype] * arity)
    with np.errstate(all="ignore"):
        exact = inline_numpy.ROWS[name](*(x.astype(np.int64) for x in inputs))
    intervals = []
    for axis, (s, of) in enumerate(zip(spans, [near, second], strict=False)):
        ends = (of[end].reshape([-1 if d == axis else 1 for d in range(arity)]) for end in s)
        intervals.append(Interval(*ends, np.False_))
    with np.errstate(all="ignore"):
        bound = row.bound(np, out, *intervals)
    low, high, _ = _seen(table, spans)
    wraps = _seen((table != exact).astype(np.int8), spans)[1].astype(bool)
    fits = ~wraps & np.ones(np.broadcast_shapes(*(i.lo.shape for i in intervals)), bool)
    if name in ("remainder", "rem", "and", "or"):
        # Exact within one multiple of the divisor; of bits, within one run of the lowest ones.
        a, b = intervals
        step = b.lo + 1 if name in ("and", "or") else b.lo
        fits &= (a.lo // step == a.hi // step) & ((name != "rem") | (a.lo >= 0))
        fits &= (name not in ("and", "or")) | ((b.lo & (b.lo + 1)) == 0)
    if name == "wrap":
        a, b = intervals
        fits &= ((a.hi < 0) | (a.lo >= 0)) & (b.lo > 0)
    assert fits.mean() > 0.02
    lo, hi = (np.broadcast_to(x, fits.shape).astype(low.dtype) for x in bound[:2])
    wrong = fits & ((lo != low) | (hi != high))
    shown = [
        f"[{a}, {b}] is [{c}, {d}]"
        for a, b, c, d in zip(*(x[wrong] for x in (lo, hi, low, high)), strict=True)
    ]
    assert not shown, shown[:5]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bool", "int32", "uint32", "float32"])
def test_rules_are_the_same_as_xla_operations(dtype):
    """Inside a program the same rules run in XLA."""
    for arity in (1, 2):
        values = _values(dtype, 2)
        first, last = (s[::7] for s in _spans(dtype, values))
        rows = [r for r in _rows(dtype, arity)]
        intervals = _intervals(dtype, values, (first, last), arity)

        def bounds(xp, *intervals, rows=rows, arity=arity):
            results = []
            for name, params in rows:
                row = _table.ROWS[name]
                bound = row.bound(xp, row.dtype(*[dtype] * arity, **params), *intervals, **params)
                results.append(bound)
            return results

        with np.errstate(all="ignore"):
            known = bounds(np, *intervals)
        traced = jax.jit(functools.partial(bounds, jnp))(
            *(Interval(*map(jnp.asarray, i)) for i in intervals)
        )
        for (name, params), a, b in zip(rows, known, traced, strict=True):
            for x, y in zip(a, b, strict=True):
                if np.asarray(x).dtype == np.float32:
                    near = np.isclose(x, y, rtol=1e-4, atol=1e-37)
                    assert near.all(), (
                        f"{name} {params}: {np.broadcast_to(x, near.shape)[~near][:3]}"
                    )
                elif name not in ("mul", "shift_left", "integer_pow", "square"):
                    np.testing.assert_array_equal(*np.broadcast_arrays(x, y), f"{name} {params}")
            # Products near the dtype's ends may be everything in XLA, where there are no wider integers.
            if np.asarray(a.lo).dtype != np.float32:
                assert np.all((b.lo <= a.lo) & (b.hi >= a.hi)), f"{name} {params}"


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("mul", 1e-20, 1e-20),
        ("div", 1e-30, 1e10),
        ("sub", 1.5e-38, 1.2e-38),
        ("integer_pow", 1e-13, None),
    ],
)
def test_what_xla_flushes_is_in_the_interval(name, a, b, sign):
    """The rules in XLA on CPU get 0 where other libraries get a subnormal number."""
    points = [np.float32(sign * a)]
    points += [] if b is None else [np.float32(sign * b if name == "sub" else b)]
    params = {"y": 3} if name == "integer_pow" else {}
    exact = {"mul": 1e-40, "div": 1e-40, "sub": 3e-39, "integer_pow": 1e-39}[name] * sign
    rule = functools.partial(_table.ROWS[name].bound, jnp, np.dtype(np.float32), **params)
    found = jax.jit(rule)(*(Interval(p, p, np.False_) for p in points))
    assert float(found.lo) <= exact <= float(found.hi)
    assert abs(float(found.lo)) + abs(float(found.hi)) < 1e-37
