"""The examples as they are run on a CPU, and their references against NumPy."""

import jax
import numpy as np
import pytest
from example_kernels import EXAMPLES, NAMES, cases, load

# Arguments of each `main`: small, and odd.
SMALL = dict(vector_add=1027, relu=(3, 5, 7), saxpy=1027, bias_relu=(9, 17), tiled_gemm=(7, 9, 5))


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_short_and_starts_with_how_to_run_it(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 100
    assert lines[0].startswith('"""')
    assert lines[2] == f"    uv run examples/{name}.py"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "saxpy"])
def test_each_example_prints_its_error(name, capsys):
    load(name).main(SMALL[name])
    said = capsys.readouterr().out
    assert "largest error against float64" in said
    error = float(said.split("float64")[1].split()[0])
    assert error < 1e-5  # float32, sums of a few terms


def test_pointwise(capsys):
    """It has no kernel of its own, and so no case among the others."""
    lines = (EXAMPLES / "pointwise.py").read_text().splitlines()
    assert len(lines) < 100
    load("pointwise").main((9, 17))
    said = capsys.readouterr().out
    assert float(said.split("float64")[1].split()[0]) < 0.05  # bfloat16, of numbers up to 8
    assert "= tanh" in said
    assert "gradient of the bias: (17,) float32" in said
    assert "v1:bfloat16 = argument name=gate" in said


def exact(name, kernel, arguments):
    """The formula, written again, in float64."""
    wide = [np.asarray(a, np.float64) for a in arguments]
    if name.startswith("vector_add"):
        return wide[0] + wide[1]
    if name.startswith("relu"):
        return np.maximum(wide[0], 0)
    if name.startswith("saxpy"):
        return 2.5 * wide[0] + wide[1]
    if name.startswith("bias_relu"):
        return np.maximum(wide[0] + wide[1], 0)
    return wide[0] @ wide[1]


@pytest.mark.parametrize(("name", "kernel", "arguments"), cases())
def test_references(name, kernel, arguments):
    want = exact(name, kernel, arguments)
    got = jax.jit(kernel)(*arguments)
    assert got.shape == want.shape
    assert got.dtype == arguments[0].dtype
    eps = float(np.finfo(np.float16).eps if got.dtype != np.float32 else np.finfo(np.float32).eps)
    # Sums of up to 65 terms; bfloat16 only copies.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8 * eps, atol=32 * eps)


def test_relu_keeps_nan():
    x = np.array([np.nan, -1, 0, 2, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(load("relu").ReLU()(x), [np.nan, 0, 0, 2, np.inf, 0])


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeError, match="float16"):
        load("vector_add").VectorAdd()(np.zeros(3, np.float16), np.zeros(3, np.float16))
