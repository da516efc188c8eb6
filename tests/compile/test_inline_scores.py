"""Device code of scores, which an exponential takes: in the PTX interpreter against float64, and as PTX."""

import dataclasses
import functools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402

import eqxcute  # noqa: E402
from eqxcute import inline  # noqa: E402
from eqxcute.inline import Argument, Scaled, Step, _emit  # noqa: E402
from eqxcute.inline._small import SMALL  # noqa: E402
from eqxcute.testing import compile_only, interpret  # noqa: E402

THREADS = 64
SCORE = (Argument("score", "float32"),)
PLACE = tuple(Argument(name, "int32", 0, 1 << 24) for name in ("q_idx", "kv_idx"))


class Scored(eqxcute.Kernel):
    """What `steps(begun, scalars)` makes of each element of vectors by name. `begun` is the code at its start."""

    signature = "n, {} -> n"
    code: inline.Code = eqxcute.static()
    steps: Any = eqxcute.static()

    def out_dtypes(self, index, arguments):
        return jnp.float32

    @cute.jit
    def launch(self, stream, index, arguments, out):
        count = cute.ceil_div(index.shape[0], THREADS)
        self.kernel(index, arguments, out).launch(
            grid=[count, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, index, arguments, out):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < index.shape[0]:
            begun = _emit.start(self.code, (), fast="scores")
            out[i] = _emit.results(
                self.steps(begun, {name: x[i] for name, x in arguments.items()})
            )[0]


def bound(begun, scalars):
    return _emit.bind(begun, **scalars)


def small(begun, scalars):
    return _emit.bind(_emit.small(begun), **scalars)


SCALE = 0.088388346


def scaled(prepare):
    """With products in place of scores."""

    def steps(begun, scalars):
        return _emit.bind(prepare(begun), score=Scaled(scalars["score"], cutlass.Float32(SCALE)))

    return steps


def stepped(begun, scalars):
    """Keys 5 from their base, and rows and columns apart."""
    row = _emit.bind(begun, q_idx=scalars["q_idx"])
    return _emit.join(row, _emit.bind(begun, kv_idx=Step(scalars["kv_idx"] - 5, 5)))


def program(function, arguments):
    return inline.trace(function, arguments)[0]


def run(function, steps, run=interpret, **vectors):
    arguments = SCORE if "score" in vectors else PLACE
    code = function if isinstance(function, inline.Code) else program(function, arguments).code
    index = np.arange(len(next(iter(vectors.values()))), dtype=np.int32)
    return run(Scored(code, steps), index, vectors)


def ptx_of(function, steps, **vectors):
    compiled = functools.partial(compile_only, architecture="sm_90a")
    return run(function, steps, compiled, **vectors).ptx


def cap(c):
    return lambda score: c * jnp.tanh(score / c)


# ---------------------------------------------------------------- tanh


def up_to(limit, count=20_001):
    return np.linspace(-limit, limit, count, dtype=np.float32)


@pytest.mark.parametrize("c", [1.0, 20.0, 3000.0])
def test_tanh_of_small_scores(c):
    """The last one is too large to be joined with the polynomial's terms."""
    x = up_to(SMALL * c)
    got, want = run(cap(c), small, score=x), c * np.tanh(x.astype(np.float64) / c)
    assert (np.abs(got - want) <= 2.0**-20 * np.abs(want)).all()
    assert (np.abs(got - want) <= 2.0**-21 * c).all()
    assert got[len(x) // 2] == 0


@pytest.mark.parametrize(
    ("prepare", "limit", "factor"), [(_emit.small, SMALL, 1), (lambda begun: begun, 200, 2)]
)
@pytest.mark.parametrize("c", [20.0, 3000.0])
def test_tanh_of_products(prepare, limit, factor, c):
    x = up_to(limit * c / SCALE)
    got, want = run(cap(c), scaled(prepare), score=x), c * np.tanh(x * np.float64(SCALE) / c)
    assert (np.abs(got - want) <= factor * 2.0**-21 * c).all()


def test_products_are_scores():
    """Where more is made of them than a tanh."""
    x = up_to(30)
    got = run(lambda score: -score * 2 + jnp.square(score), scaled(lambda begun: begun), score=x)
    want = x * np.float64(SCALE)
    np.testing.assert_allclose(got, want * want - 2 * want, atol=2.0**-20)


def test_small_tanh_has_no_special_functions():
    x = up_to(1, 2)
    assert "ex2" in ptx_of(cap(20.0), bound, score=x)
    ptx = ptx_of(cap(20.0), small, score=x)
    assert re.findall(r"\b(ex2|rcp|tanh|div)\b", ptx) == []
    # x^2 and a product with it; factors before and after are in the polynomial.
    assert len(re.findall(r"\bmul\.f32", ptx)) == 2


def test_tanh_of_any_scores():
    x = np.concatenate([up_to(200), np.float32([np.inf, -np.inf])])
    want = 20 * np.tanh(x.astype(np.float64) / 20)
    assert (np.abs(run(cap(20.0), bound, score=x) - want) <= 20 * 2.0**-20).all()


def test_tanh_whose_factor_is_one():
    """Of `exp(2 x)`, as a power of two."""
    half = float(np.log(2) / 2)
    x = up_to(20)
    want = np.tanh(x.astype(np.float64) * half)
    got = run(lambda score: jnp.tanh(score * half), bound, score=x)
    assert (np.abs(got - want) <= 2.0**-20).all()


@pytest.mark.parametrize("steps", [bound, small])
def test_nan_stays(steps):
    assert np.isnan(run(cap(20.0), steps, score=np.float32([np.nan]))).all()


@pytest.mark.parametrize(("steps", "limit"), [(small, 20 * SMALL), (bound, 100)])
def test_slopes(steps, limit):
    """1 - tanh^2, from one tanh."""
    code = inline.differentiate(program(cap(20.0), SCORE)).program.code
    x = up_to(limit)
    want = 1 - np.tanh(x.astype(np.float64) / 20) ** 2
    assert (np.abs(run(code, steps, score=x) - want) <= 2.0**-19.5).all()


# ---------------------------------------------------------------- factors


def test_factors_are_one():
    def chain(score):
        return -(score * 3 / 5) * 0.7

    x = up_to(10)
    got, want = run(chain, bound, score=x), x.astype(np.float64) * -0.42
    assert (np.abs(got - want) <= 2.0**-22.5 * np.abs(want)).all()
    assert len(re.findall(r"\bmul\.f32", ptx_of(chain, bound, score=x[:1]))) == 1


def test_factors_of_sums():
    def total(score):
        a, b = 1 - jnp.abs(score), jnp.square(score)
        return (20 * a + 20 * b) / 20 - (3 * a - 7 * b) + (2 * a) * (3 * b)

    x = up_to(3)
    a, b = 1 - np.abs(x.astype(np.float64)), x.astype(np.float64) ** 2
    want = a + b - (3 * a - 7 * b) + 6 * a * b
    assert (np.abs(run(total, bound, score=x) - want) <= 2.0**-20 * 200).all()


def test_factors_beyond_float32():
    """0 times an infinite factor would be NaN."""
    got = run(lambda score: (score * 1e30) * 1e30, bound, score=np.float32([0, 1, -1]))
    np.testing.assert_array_equal(got, np.float32([0, np.inf, -np.inf]))


# ---------------------------------------------------------------- distances

BIASES = {
    "distance": (lambda q_idx, kv_idx: (q_idx - kv_idx) * jnp.float32(1), lambda q, k: q - k),
    "size": (lambda q_idx, kv_idx: abs(q_idx - kv_idx) * jnp.float32(1), lambda q, k: abs(q - k)),
    "sum": (lambda q_idx, kv_idx: (q_idx + kv_idx).astype(jnp.float32), lambda q, k: q + k),
    "negated": (
        lambda q_idx, kv_idx: -abs(-(q_idx - kv_idx)) * jnp.float32(1),
        lambda q, k: -abs(k - q),
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_distances_are_exact(name):
    function, exact = BIASES[name]
    rng = np.random.default_rng(0)
    q, k = rng.integers(5, (1 << 24) + 1, (2, 4000), dtype=np.int32)
    q[:1000], k[:10] = k[:1000] + rng.integers(-5, 5, 1000, dtype=np.int32), 1 << 24
    q = np.clip(q, 0, 1 << 24)
    want = exact(q.astype(np.int64), k.astype(np.int64)).astype(np.float32)
    for steps in (bound, stepped):
        got = run(function, steps, q_idx=q, kv_idx=k)
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("name", BIASES)
def test_no_pair_is_converted(name):
    code = program(BIASES[name][0], PLACE).code
    begun = _emit.start(code, (), fast="scores").code
    integers = [e for e in begun.equations if e.op == "convert_element_type"]
    depends = [begun.dependences[n] for e in integers for n in e.inputs if _is_needed(begun, e)]
    assert set(depends) == {frozenset(["q_idx"]), frozenset(["kv_idx"])}
    assert _emit.start(code, ()).code == code


def _is_needed(code, e):
    return _emit._needed(code)[code.equations.index(e)]


@pytest.mark.parametrize("high", [None, (1 << 24) + 1])
def test_far_distances_are_integers(high):
    code = program(BIASES["distance"][0], tuple(a._replace(high=high) for a in PLACE)).code
    assert _emit.start(code, (), fast="scores").code == code
    assert code.text != dataclasses.replace(code, arguments=PLACE).text
