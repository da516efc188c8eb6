"""Pointwise kernels, compiled for every architecture and run on a CPU by the PTX interpreter."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcute
from eqxcute.inline._pointwise import PointwiseKernel
from eqxcute.inline._walk import Config
from eqxcute.testing import assert_as_accurate, compile_count, compile_only, interpret

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
# Small settings, so that a small array has several strips, blocks and walkers.
SMALL = Config(threads=32, lines=2)


def normal(seed, *shape, dtype="float32"):
    return jr.normal(jr.key(seed), shape, dtype)


def gated(x, y, bias):
    """The chain of the benchmark. The result has the dtype of x."""
    return (jax.nn.gelu(x + bias) * y).astype(x.dtype)


PLAIN = jax.jit(lambda x, y, bias: gated(x, y, jnp.broadcast_to(bias, x.shape)))


def kernel_of(function, *args):
    """The one kernel that a function calls, and what it is called with."""
    jaxpr = jax.make_jaxpr(function)(*args)
    (call,) = [e.params["call"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "eqxcute_kernel"]
    (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "eqxcute_kernel"]
    return call.restore([jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars])


def compiled(function, *args, architecture="sm_90a", **config):
    kernel, arguments = kernel_of(function, *args)
    if config:
        kernel = dataclasses.replace(kernel, config=Config(**config))
    return compile_only(kernel, *arguments, architecture=architecture)


@pytest.fixture(params=[None])
def interpreted(request, monkeypatch):
    """Pointwise kernels that are called outside of traces run in the interpreter, with the settings of the parameter."""
    called = []

    def run(kernel, *args):
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return usual(kernel, *args)
        called.append(kernel)
        if request.param is not None:
            kernel = dataclasses.replace(kernel, config=request.param)
        return interpret(kernel, *args)

    usual = PointwiseKernel.__call__
    monkeypatch.setattr(PointwiseKernel, "__call__", run)
    return called


def small(*more):
    return pytest.mark.parametrize("interpreted", [SMALL, *more], indirect=True)


# Instructions.


def shapes(dtype, row="float32"):
    x = jax.ShapeDtypeStruct((3, 5), dtype)
    return x, x, jax.ShapeDtypeStruct((5,), row)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_everywhere(dtype, architecture):
    code = compiled(eqxcute.pointwise(gated), *shapes(dtype), architecture=architecture)
    assert code.cubin[:4] == b"\x7fELF"
    assert f".target {architecture}" in code.ptx
    assert not re.search(r"\b(ld|st)\.local", code.ptx)


def test_loads_sixteen_bytes_and_converts_two_numbers_at_a_time():
    code = compiled(eqxcute.pointwise(gated), *shapes("bfloat16")).ptx
    assert code.count("ld.global.v4.b32") == 2 + 2  # x and y; the bias is float32
    assert code.count("st.global.v4.b32") == 1
    assert code.count("cvt.rn.bf16x2.f32") == 4
    assert code.count("cvt.rn.bf16.f32") == 1  # the tail
    assert code.count("tanh.approx.f32") == 8 + 1


def test_an_element_of_the_chain_is_few_instructions():
    """The H200 has time for about 43 instructions an element at the speed of its memory, in bfloat16. The chain is ten, and
    two more to widen x and y: a shift or a mask each, where `cvt.f32.bf16` of the upper half of a word is two.
    """
    code = compiled(eqxcute.pointwise(gated), *shapes("bfloat16")).ptx
    first, last = code.index("ld.global.v4.b32"), code.index("st.global.v4.b32")
    body = code[first:last]
    assert len(re.findall(r"\.f32 ", body.replace("\t", " "))) == 8 * 10 + 4
    assert body.count("0xFFFF0000") + body.count("-65536") == 8
    assert "cvt.f32.bf16" not in body


def test_all_lines_are_loaded_before_the_first_is_used():
    code = compiled(eqxcute.pointwise(gated), *shapes("bfloat16"), lines=4).ptx
    kinds = re.findall(r"(ld\.global\.v4\.b32|tanh|st\.global\.v4\.b32)", code)
    order = "".join({"l": "L", "t": "T", "s": "S"}[kind[0]] for kind in kinds)
    assert re.search("L{8}T+S(T+S){3}", order)


def test_dtypes_of_different_widths_share_a_vector():
    """Sixteen booleans, in one access, go with four times four float32."""
    mask, x = jax.ShapeDtypeStruct((3, 5), bool), jax.ShapeDtypeStruct((3, 5), "float32")
    code = compiled(eqxcute.pointwise(lambda m, x: jnp.where(m, x, 0)), mask, x).ptx
    assert code.count("ld.global.v4.b32") == 1 + 4
    assert code.count("st.global.v4.b32") == 4


def test_a_row_is_computed_once_for_all_lines():
    def function(x, row):
        return x * jnp.tanh(row)

    x, row = jax.ShapeDtypeStruct((3, 5), "bfloat16"), jax.ShapeDtypeStruct((5,), "bfloat16")
    code = compiled(eqxcute.pointwise(function), x, row, lines=4).ptx
    assert code.count("tanh.approx") == 8 + 1


def test_no_offset_is_computed_in_32_bits():
    """At 2**31 elements a 32-bit line * length wraps, silently (cutlass#2312)."""
    for dtype in ("bfloat16", "float32"):
        code = compiled(eqxcute.pointwise(gated), *shapes(dtype)).ptx
        narrow = set(re.findall(r"(?:shl\.b32|mul\.lo\.s32|mad\.lo\.s32)\s+(%r\d+)", code))
        used = set(re.findall(r"mul\.wide\.[su]32\s+%rd\d+, (%r\d+), \d", code))
        # The tail's column, below the width, is the one number that is.
        assert len(narrow & used) <= 1
        assert re.search(r"mul\.wide\.s32\s+%rd\d+, %r\d+, %r\d+", code)  # line * length


# Numbers.

SHAPES = [
    ((1, 5), "all of it in the tail, for 8 elements a vector"),
    ((7, 1), "one column: all arrays are full"),
    ((5, 7), "a vector holds the end of one row and the start of the next"),
    ((67, 24), "whole vectors; the last line ends early"),
    ((9, 2063), "wide and odd: several strips, a period is the line; ends in a tail"),
    ((2, 3, 10), "leading dims; half a vector over"),
]


@small(Config(threads=32, lines=1, ctas=3))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers(interpreted, dtype):
    """Of float32 the chain is as exact as JAX's own; bfloat16 takes the hardware's tanh."""
    for shape, _ in SHAPES:
        args = normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype), normal(2, shape[-1])
        got = eqxcute.pointwise(gated)(*args)
        with jax.enable_x64(True):
            oracle = PLAIN(*[np.asarray(x, np.float64) for x in args])
        assert_as_accurate(got, oracle=oracle, peer=PLAIN(*args))
    assert len(interpreted) == len(SHAPES)


ROLES = [
    ([(9, 37), ()], "a scalar"),
    ([(9, 37), (9, 1)], "a column, of a width that is no multiple of the vector"),
    ([(9, 40), (9, 1)], "of one that is"),
    ([(50, 3), (50, 1), (3,)], "several rows a vector; a row too"),
    ([(9, 1), (13,)], "no array is full"),
    ([(5, 3, 7), (3, 7), (7,)], "rows of two dims, and of one"),
    ([(5, 3, 7), (5, 1, 7)], "spread in memory first"),
    ([(1001,), (1001,)], "one dim"),
    ([(), ()], "none"),
]


@small()
@pytest.mark.parametrize(("args", "why"), ROLES)
def test_roles(interpreted, args, why):
    del why
    args = [normal(i, *shape) for i, shape in enumerate(args)]
    got = eqxcute.pointwise(lambda *xs: sum(i * x for i, x in enumerate(xs, 1)))(*args)
    want = sum(i * x for i, x in enumerate(args, 1))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert len(interpreted) == 1


@small()
def test_a_tail_of_several_rows(interpreted):
    x, column = jnp.arange(15.0, dtype=jnp.bfloat16).reshape(5, 3), jnp.arange(5.0)[:, None]
    got = eqxcute.pointwise(lambda x, c: (x + c).astype(x.dtype))(x, column.astype(x.dtype))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32) + column)
    assert len(interpreted) == 1


@small()
def test_mixed_dtypes_and_several_results(interpreted):
    x, y = normal(0, 9, 37, dtype="bfloat16"), normal(1, 9, 37)
    keep, scale = normal(2, 9, 37) > 0, normal(3, 37, dtype="float16")
    count = jnp.arange(37, dtype=jnp.int8)

    def function(x, y, keep, scale, count):
        return jnp.where(keep, x, y) * scale, keep & (count > 5), count * jnp.int8(7), x

    got = eqxcute.pointwise(function)(x, y, keep, scale, count)
    want = eqxcute.pointwise(function, implementation="xla")(x, y, keep, scale, count)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
    assert len(interpreted) == 1


@small()
def test_captured_arrays(interpreted):
    """A table, read at indices that are clamped, or count from the end; and a scalar."""
    table, slope, x = normal(0, 10), jnp.float32(0.25), normal(1, 5, 7)
    i = jr.randint(jr.key(2), (7,), -14, 14)
    run = eqxcute.pointwise(lambda x, i: jnp.where(x > 0, x, x * slope) + table[i])
    np.testing.assert_allclose(run(x, i), jnp.where(x > 0, x, x * slope) + table[i], rtol=1e-6)
    assert len(interpreted) == 1


@small()
def test_special_values(interpreted):
    kinds = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1.0, -1.0, 1e-30])
    for dtype in ("bfloat16", "float32"):
        x = jnp.resize(kinds, (5, 13)).astype(dtype)
        got = eqxcute.pointwise(lambda x: jnp.maximum(x, 0) + jnp.where(x != x, 7, jnp.sign(x)))(x)
        want = jnp.maximum(x, 0) + jnp.where(x != x, 7, jnp.sign(x))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert len(interpreted) == 2


@small()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients(interpreted, dtype):
    args = normal(0, 5, 37, dtype=dtype), normal(1, 5, 37, dtype=dtype), normal(2, 37)
    ct = normal(3, 5, 37, dtype=dtype)
    got = jax.vjp(eqxcute.pointwise(gated), *args)[1](ct)
    assert len(interpreted) == 1  # of the gradient; the forward kernel was called with tracers

    pull = jax.jit(lambda args, ct: jax.vjp(PLAIN, *args)[1](ct))
    with jax.enable_x64(True):
        oracle = pull(*jax.tree.map(lambda x: np.asarray(x, np.float64), (args, ct)))
    assert_as_accurate(got, oracle=oracle, peer=pull(args, ct))


@small()
def test_64_bits(interpreted):
    with jax.enable_x64(True):
        x, i = normal(0, 3, 7, dtype="float64"), jnp.arange(7)
        got = eqxcute.pointwise(lambda x, i: (jnp.exp(x) * 2, i * 2**40))(x, i)
        np.testing.assert_allclose(got[0], jnp.exp(x) * 2, rtol=1e-14)
        np.testing.assert_array_equal(got[1], jnp.broadcast_to(i * 2**40, x.shape))
    assert len(interpreted) == 1


# One kernel for one function.


def test_a_function_made_anew_compiles_once(interpreted):
    def make(a):
        return lambda s, bias: s * a + bias

    before = compile_count()
    for n in range(4):
        x, bias = normal(n, 3 + n, 5 + n), normal(n + 1, 5 + n)
        np.testing.assert_allclose(
            eqxcute.pointwise(make(2))(x, bias), x * 2 + bias, rtol=1e-5, atol=1e-6
        )
    assert compile_count() == before + 1
    x, bias = normal(0, 3, 5), normal(1, 5)
    eqxcute.pointwise(lambda other, name: other * 2 + name)(x, bias)
    assert compile_count() == before + 1
    eqxcute.pointwise(make(3))(x, bias)
    assert compile_count() == before + 2


def test_another_captured_array_compiles_nothing(interpreted):
    x = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    before = compile_count()
    for n in (3, 50):
        table = normal(n, n)
        np.testing.assert_array_equal(eqxcute.pointwise(lambda i, t=table: t[i])(x), table[x])
    assert compile_count() == before + 1


def test_another_derivative_rule_is_the_same_kernel(interpreted):
    before = compile_count()
    for slope in (2.0, 3.0):

        @jax.custom_jvp
        def step(x):
            return jnp.where(x > 0.25, 1.0, 0.0)

        step.defjvp(lambda p, t, slope=slope: (p[0], slope * t[0]))
        eqxcute.pointwise(step)(normal(0, 3, 5))
    assert compile_count() == before + 1
