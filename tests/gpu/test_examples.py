"""The example kernels on a GPU, at odd sizes, and the examples as they are run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_kernels import NAMES, cases, load, normal

from eqxcute.testing import check_kernel

LARGER = [
    ("vector_add", load("vector_add").VectorAdd(), (normal(0, 10**6 + 1), normal(1, 10**6 + 1))),
    ("relu", load("relu").ReLU(), (normal(2, 101, 103, 107),)),
    ("bias_relu", load("bias_relu").BiasReLU(), (normal(3, 1001, 5003), normal(4, 5003))),
    ("tiled_gemm", load("tiled_gemm").TiledGemm(), (normal(5, 515, 301), normal(6, 301, 707))),
]


@pytest.mark.parametrize(("name", "kernel", "arguments"), cases() + LARGER)
def test_numbers_and_gradients(name, kernel, arguments):
    del name
    check_kernel(kernel, *arguments)
    first, second = (np.asarray(jax.jit(kernel)(*arguments)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_relu_keeps_nan():
    x = jnp.array([jnp.nan, -1, 0, 2, jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(load("relu").ReLU()(x), [np.nan, 0, 0, 2, np.inf, 0])


@pytest.mark.parametrize("name", NAMES)
def test_each_example_prints_a_time(name, capsys):
    small = dict(
        vector_add=10**6, relu=(7, 8, 9), saxpy=10**6, bias_relu=(99, 100), tiled_gemm=(65, 66, 67)
    )
    load(name).main(small[name])
    said = capsys.readouterr().out
    assert "GB/s" in said or "TFLOP/s" in said


def test_flex_attention_runs_on_kernels(capsys, tmp_path):
    load("flex_attention").main(["--length", "1000", "--out", str(tmp_path)])  # a ragged end
    said = capsys.readouterr().out
    assert "CuTe kernels" in said
    assert "OVER" not in said
    assert len(list(tmp_path.glob("*.png"))) == 14


def test_custom_mask_trains_on_kernels(capsys):
    load("custom_mask").main([])
    assert "CuTe kernels" in capsys.readouterr().out
