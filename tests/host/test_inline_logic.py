"""The normal form of comparisons and booleans: right on all values, and sharp where masks are combined."""

import itertools

import numpy as np
import pytest
from eqxcute.layers import tile_map
from eqxcute.layers.attention import CausalMask, ChunkedMask, PrefixLMMask, SlidingWindowMask
from hypothesis import given, strategies as st
from inline_programs import run_all

from eqxcute.inline._code import Argument, Builder, Code

NAMES = ("x", "y", "z")
POINTS = np.array(list(itertools.product(range(7), repeat=3)), np.int32)


def build_formula(build, numbers, formula):
    """`formula` is nested tuples: ("le", 0, 1) compares arguments, ("and", f, g), ("not", f), ("sub0", "le", 0, 1)."""
    op, *rest = formula
    if op in ("and", "or"):
        return build.op(op, *(build_formula(build, numbers, f) for f in rest))
    if op == "not":
        return build.op("not", build_formula(build, numbers, rest[0]))
    if op == "sub0":
        name, a, b, flipped = rest
        difference = build.op("sub", numbers[a], numbers[b])
        zero = build.const(0, "int32")
        return build.op(name, *((zero, difference) if flipped else (difference, zero)))
    return build.op(op, numbers[rest[0]], numbers[rest[1]])


def truth(formula, points):
    op, *rest = formula
    compare = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "eq": np.equal, "ne": np.not_equal,
    }  # fmt: skip
    if op == "and":
        return truth(rest[0], points) & truth(rest[1], points)
    if op == "or":
        return truth(rest[0], points) | truth(rest[1], points)
    if op == "not":
        return ~truth(rest[0], points)
    if op == "sub0":
        name, a, b, flipped = rest
        difference = points[:, a] - points[:, b]
        return compare[name](0, difference) if flipped else compare[name](difference, 0)
    return compare[op](points[:, rest[0]], points[:, rest[1]])


comparison = st.sampled_from(("lt", "le", "gt", "ge", "eq", "ne"))
argument = st.integers(0, 2)
atoms = st.tuples(comparison, argument, argument) | st.tuples(
    st.just("sub0"), comparison, argument, argument, st.booleans()
)
formulas = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(st.just("not"), inner) | st.tuples(st.sampled_from(("and", "or")), inner, inner)
    ),
    max_leaves=10,
)


@pytest.mark.parametrize("low", [None, 0], ids=["any", "not negative"])
@given(formula=formulas)
def test_formulas_keep_their_values(low, formula):
    arguments = [Argument(name, "int32", low) for name in NAMES]
    build = Builder()
    numbers = [build.argument(a) for a in arguments]
    result = build_formula(build, numbers, formula)
    code = Code(tuple(arguments), (), tuple(build.equations), (result,))
    points = POINTS if low == 0 else POINTS - 3
    values = run_all(code, dict(zip(NAMES, points.T, strict=True)), [])
    got = np.broadcast_to(np.asarray(values[result]), len(points))
    np.testing.assert_array_equal(got, truth(formula, points))


def made(*formulas_, low=0):
    arguments = [Argument(name, "int32", low) for name in NAMES]
    build = Builder()
    numbers = [build.argument(a) for a in arguments]
    return build, [build_formula(build, numbers, f) for f in formulas_]


P, Q = ("le", 0, 1), ("eq", 1, 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ge", 0, 1), ("le", 1, 0)),
        (("gt", 0, 1), ("not", ("le", 0, 1))),
        (("sub0", "le", 0, 1, False), P),
        (("sub0", "ge", 0, 1, True), P),
        (("not", ("and", P, Q)), ("or", ("lt", 1, 0), ("ne", 1, 2))),
        (("and", P, ("or", ("not", P), Q)), ("and", P, Q)),
        (("or", P, ("and", ("not", P), Q)), ("or", P, Q)),
        (("and", P, ("or", P, Q)), P),
        (("or", P, ("and", P, Q)), P),
        (("and", ("and", P, Q), P), ("and", P, Q)),
        (("and", P, P), P),
    ],
)
def test_one_form(one, other):
    _, (a, b) = made(one, other)
    assert a == b


def test_contradictions_are_decided():
    build, (never, always) = made(("and", P, ("not", P)), ("or", Q, ("ne", 1, 2)))
    assert build.value(never) == False  # noqa: E712
    assert build.value(always) == True  # noqa: E712


def test_what_may_wrap_around_is_left_alone():
    _, (a, b) = made(("sub0", "le", 0, 1, False), P, low=None)
    assert a != b


def test_floats_are_not_negated():
    """Not below is not the same as not less: NaN."""
    arguments = [Argument(name, "float32") for name in NAMES]
    build = Builder()
    x, y, _ = (build.argument(a) for a in arguments)
    below = build.op("lt", x, y)
    assert build.equations[build.op("not", below)].op == "not"


@pytest.mark.parametrize(
    "mask",
    [
        CausalMask() & ~SlidingWindowMask(50),
        CausalMask() & ~SlidingWindowMask(50, 20),
        ~CausalMask() & SlidingWindowMask(30, 40),
        ~(PrefixLMMask(37) & CausalMask()),
        CausalMask() & ~ChunkedMask(24),
        CausalMask() & (~CausalMask() | ChunkedMask(24)),
        ~(~SlidingWindowMask(30) | ~CausalMask()),
    ],
    ids=lambda mask: str(mask)[:40],
)
def test_masks_that_share_a_part_have_exact_tiles(mask):
    """Intervals alone would call a tile on the diagonal partial, whatever the parts say together."""
    length, tile = 160, 16
    at = np.arange(length)
    allowed = np.asarray(mask(0, 0, at[:, None], at[None, :]))
    cut = allowed.reshape(length // tile, tile, length // tile, tile).swapaxes(1, 2)
    whole, some = cut.all((2, 3)), cut.any((2, 3))
    verdicts = np.asarray(tile_map(mask, length, length, tile=(tile, tile)).verdicts())[0, 0]
    np.testing.assert_array_equal(verdicts, whole.astype(int) + some)
