"""The BiasReLU kernels, compiled for every architecture and run on a CPU by the PTX interpreter."""

import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers.bias_act._config import LOADS, Config
from eqxcute.layers.bias_act._entry import BiasReLUBackward, BiasReLUKernel

from eqxcute.testing import assert_as_accurate, compile_only, interpret

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
# The vector is 8 elements, or 4; the bias of the same width, wider, or narrower than x.
DTYPES = (
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
)


def forward(dtype="bfloat16", bias_dtype="float32", architecture="sm_90a", **config):
    x, bias = jax.ShapeDtypeStruct((3, 5, 7), dtype), jax.ShapeDtypeStruct((7,), bias_dtype)
    kernel = BiasReLUKernel(Config(**config)) if config else BiasReLUKernel()
    return compile_only(kernel, x, bias, architecture=architecture)


def backward(dtype="bfloat16", bias_dtype="float32", architecture="sm_90a", **config):
    y = jax.ShapeDtypeStruct((3, 5, 7), dtype)
    config = (Config(**config),) if config else ()
    return compile_only(BiasReLUBackward(bias_dtype, *config), y, y, architecture=architecture)


def stream_kernel(compiled):
    """The PTX of the kernel that walks the arrays, without that of the column sums."""
    kernels = re.split(r"(?=\.visible \.entry)", compiled.ptx)[1:]
    (stream,) = [k for k in kernels if "ld.global.v4" in k or ".v4.b32" in k]
    return stream


# Instructions.


# The others, see `test_registers_do_not_spill`.
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "bias_dtype"), DTYPES)
def test_compiles_everywhere(dtype, bias_dtype, architecture):
    for compiled in (
        forward(dtype, bias_dtype, architecture),
        backward(dtype, bias_dtype, architecture),
    ):
        assert compiled.cubin[:4] == b"\x7fELF"
        assert f".target {architecture}" in compiled.ptx


def test_forward_loads_sixteen_bytes_and_all_before_the_first_use():
    """Four lines in flight: four loads with nothing that needs them in between."""
    code = stream_kernel(forward(lines=4))
    kinds = re.findall(r"(ld\.global\.v4\.b32|max\.NaN|st\.global\.v4\.b32)", code)
    assert re.search(
        "L{4}M+S(M+S){3}", "".join({"l": "L", "m": "M", "s": "S"}[k[0]] for k in kinds)
    )
    # The block, the loop over its rest; two of the bias (float32). Single elements: tail and odd bias.
    assert code.count("ld.global.v4.b32") == 4 + 1 + 2
    assert code.count("st.global.v4.b32") == 4 + 1


def test_backward_loads_sixteen_bytes_and_all_before_the_first_use():
    code = stream_kernel(backward(lines=4))
    kinds = re.findall(r"(ld\.global\.v4\.b32|setp\.\w+\.f32|st\.global\.v4\.b32)", code)
    assert re.search(
        "L{8}[^L]+S", "".join({"l": "L", "s": "S"}[k[0]] if "global" in k else "C" for k in kinds)
    )
    assert code.count("ld.global.v4.b32") == 2 * (4 + 1)
    assert code.count("st.global.v4.b32") == 4 + 1 + 2  # dx, and the sums: 8 float32


def test_sum_kernel_has_its_loads_in_flight_together():
    """As a plain unrolled loop each load waited for the check whether there is another row."""
    kernels = re.split(r"(?=\.visible \.entry)", backward().ptx)[1:]
    sums = [k for k in kernels if ".v4.b32" not in k]
    assert sums
    for code in sums:
        assert code[: code.index("add.f32")].count("ld.global.b32") == LOADS


@pytest.mark.parametrize(
    ("hint", "load", "store"),
    [
        ("none", "ld.global.v4.b32", "st.global.v4.b32"),
        ("no_allocate", "ld.global.L1::no_allocate.v4.b32", "st.global.L1::no_allocate.v4.b32"),
        ("streaming", "ld.global.cs.v4.b32", "st.global.cs.v4.b32"),
    ],
)
def test_cache_hints_reach_the_instructions(hint, load, store):
    code = stream_kernel(forward(lines=4, load=hint, store=hint))
    assert code.count(load) >= 5
    assert code.count(store) == 5


@pytest.mark.parametrize("build", [forward, backward])
def test_nan_is_kept_and_there_are_no_divisions(build):
    code = build().ptx
    assert not re.search(r"\bmax\.f32|\bmax\.bf16", code)
    assert not re.search(r"\b(div|rem)\.[su]", code)


@pytest.mark.parametrize("build", [forward, backward])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_offset_is_computed_in_32_bits(build, dtype):
    """At 2**31 elements a 32-bit line * length wraps, silently (cutlass#2312). The only 32-bit product
    on the way to an address may be a thread's place, which is below the length of a line."""
    code = stream_kernel(build(dtype))
    # `place * V` or `line * length` in 32 bits shows as a product that only its size in bytes widens.
    narrow = set(re.findall(r"(?:shl\.b32|mul\.lo\.s32|mad\.lo\.s32)\s+(%r\d+)", code))
    assert not narrow & set(re.findall(r"mul\.wide\.[su]32\s+%rd\d+, (%r\d+), \d", code))
    assert re.search(r"mul\.wide\.s32\s+%rd\d+, %r\d+, %r\d+", code)  # line * length


@pytest.mark.parametrize("build", [forward, backward])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_do_not_spill(build, architecture, capfd, monkeypatch):
    cls = BiasReLUKernel if build is forward else BiasReLUBackward
    monkeypatch.setattr(cls, "compile_options", "remarks{ptx}")
    assert not re.search(r"\b(ld|st)\.local", build(architecture=architecture).ptx)
    said = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said.out + said.err)
    assert spills
    assert set(spills) == {"0"}


# Numbers.

# Small settings, so that a small array has several strips, blocks and walkers.
SMALL = dict(threads=32, lines=2)
SHAPES = [
    ((1, 8), "less than a warp"),
    ((3, 1), "one column: a line has many rows"),
    ((5, 7), "a vector holds the end of one row and the start of the next"),
    ((1, 5), "all of it in the tail, for 8 elements a vector"),
    ((67, 24), "whole vectors; the last line ends early"),
    ((9, 2063), "wide and odd: several strips, a period is the line; ends in a tail"),
    ((70, 520), "three strips a row, more lines than a block"),
    ((2, 3, 10), "leading dims; half a vector over"),
]


def inputs(shape, dtype, bias_dtype):
    xkey, bkey, ykey = jr.split(jr.key(0), 3)
    x, bias = jr.normal(xkey, shape, dtype), jr.normal(bkey, shape[-1:], bias_dtype)
    return x, bias, jr.normal(ykey, shape, dtype)


def check_forward(kernel, x, bias):
    got = interpret(kernel, x, bias)
    with jax.enable_x64(True):
        oracle = kernel.reference(x.astype(jnp.float64), bias.astype(jnp.float64))
    assert_as_accurate(got, oracle=oracle, peer=kernel.reference(x, bias))


def check_backward(kernel, y, dy):
    got = interpret(kernel, y, dy)
    want = kernel.reference(y, dy)
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want[0], np.float32))
    with jax.enable_x64(True):
        wide = BiasReLUBackward("float64").reference(y.astype(jnp.float64), dy.astype(jnp.float64))
    assert_as_accurate(got[1], oracle=wide[1], peer=want[1])


ODD = [shape for shape, _ in SHAPES if shape in ((5, 7), (9, 2063))]
NUMBERS = [(shape, *dtypes) for dtypes in DTYPES[:2] for shape, _ in SHAPES]
NUMBERS += [(shape, *dtypes) for dtypes in DTYPES[2:] for shape in ODD]


@pytest.mark.parametrize(("shape", "dtype", "bias_dtype"), NUMBERS)
def test_numbers(shape, dtype, bias_dtype):
    x, bias, dy = inputs(shape, dtype, bias_dtype)
    check_forward(BiasReLUKernel(Config(**SMALL)), x, bias)
    y = jnp.maximum(x + 0.5, 0)
    check_backward(BiasReLUBackward(bias_dtype, Config(ctas=6, **SMALL)), y, dy)


@pytest.mark.parametrize(
    ("shape", "ctas", "why"),
    [
        ((150, 40), 1, "one CTA a strip takes all blocks"),
        ((150, 40), 17, "two walkers"),
        ((1501, 7), 24, "three walkers, and a tail that only one of them may add"),
        (
            (40, 128),
            6,
            "each column stands 16 times in a line: the sum kernel's groups come out even",
        ),
    ],
)
def test_numbers_when_few_ctas_share_the_work(shape, ctas, why):
    del why
    x, bias, dy = inputs(shape, "bfloat16", "float32")
    check_forward(BiasReLUKernel(Config(ctas=ctas, **SMALL)), x, bias)
    check_backward(BiasReLUBackward("float32", Config(ctas=ctas, **SMALL)), x, dy)


def test_numbers_of_the_settings_that_users_get():
    x, bias, dy = inputs((33, 129), "bfloat16", "float32")
    check_forward(BiasReLUKernel(), x, bias)
    check_backward(BiasReLUBackward("float32"), x, dy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_special_values(dtype):
    """Every kind of number meets every place: whole vectors, the end of a row, the tail."""
    kinds = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1.0, -1.0], dtype)
    x = jnp.resize(kinds, (5, 13))
    bias = jnp.zeros(13, dtype).at[3].set(jnp.nan).at[4].set(-1)
    got = interpret(BiasReLUKernel(Config(**SMALL)), x, bias)
    want = jax.nn.relu(x + jnp.broadcast_to(bias, x.shape))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    dy = jnp.resize(jnp.array([2.0, jnp.nan, -3.0], dtype), (5, 13))
    dx, dbias = interpret(BiasReLUBackward(dtype, Config(ctas=4, **SMALL)), want, dy)
    pulled = jax.vjp(lambda x: jax.nn.relu(x + jnp.broadcast_to(bias, x.shape)), x)[1](dy)[0]
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(pulled, np.float32))
    summed = np.asarray(pulled, np.float64).sum(0)
    np.testing.assert_allclose(np.asarray(dbias, np.float64), summed)


def test_no_rows_give_a_bias_gradient_of_zero():
    y = jnp.zeros((0, 24), jnp.bfloat16)
    dx, dbias = interpret(BiasReLUBackward("float32", Config(ctas=4, **SMALL)), y, y)
    assert dx.shape == (0, 24)
    np.testing.assert_array_equal(dbias, np.zeros(24))


def test_equal_inputs_give_equal_bits():
    y, _, dy = inputs((150, 40), "float32", "float32")
    kernel = BiasReLUBackward("float32", Config(ctas=17, **SMALL))
    first, second = interpret(kernel, y, dy), interpret(kernel, y, dy)
    np.testing.assert_array_equal(first[1].view(jnp.int32), second[1].view(jnp.int32))
