"""The example kernels, compiled for every architecture and run on a CPU by the PTX interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_kernels import cases, load

from eqxcute.testing import assert_as_accurate, compile_only, interpret

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
CASES = cases()
# One case a kernel: the shapes do not matter to the compiler.
KERNELS = {type(kernel).__name__: (kernel, arguments) for _, kernel, arguments in reversed(CASES)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_everywhere(name, architecture):
    kernel, arguments = KERNELS[name]
    compiled = compile_only(kernel, *arguments, architecture=architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert f".target {architecture}" in compiled.ptx


@pytest.mark.parametrize(("name", "kernel", "arguments"), CASES)
def test_numbers(name, kernel, arguments):
    del name
    got = interpret(kernel, *arguments)
    arguments = [jnp.asarray(a) for a in arguments]
    with jax.enable_x64(True):
        oracle = kernel.reference(*(a.astype(jnp.float64) for a in arguments))
    assert_as_accurate(got, oracle=oracle, peer=kernel.reference(*arguments))


def test_relu_keeps_nan():
    x = np.array([np.nan, -1, 0, 2, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(interpret(load("relu").ReLU(), x), [np.nan, 0, 0, 2, np.inf, 0])


def test_vector_add_moves_sixteen_bytes():
    kernel, arguments = KERNELS["VectorAdd"]
    code = compile_only(kernel, *arguments).ptx
    assert code.count("ld.global.v4.b32") == 2
    assert code.count("st.global.v4.b32") == 1


def test_bias_relu_has_its_loads_in_flight_together():
    x, bias = np.zeros((3, 4096), np.float32), np.zeros(4096, np.float32)
    code = compile_only(load("bias_relu").BiasReLU(), x, bias).ptx
    first_store = code.index("st.global")
    assert code[:first_store].count("ld.global.b32") == 16  # 8 of x, 8 of bias


def test_saxpy_compiles_as_often_as_it_says(capsys):
    load("saxpy").main(1027)
    lines = capsys.readouterr().out.splitlines()[1:]
    counts = [tuple(map(int, (line.split()[1], line.split()[3]))) for line in lines]
    assert counts == [(4, 4), (1, 4), (1, 1)]  # compiled, traced: static, attribute, array
