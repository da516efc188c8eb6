"""The kernels of examples/ and small arrays for them, shared by the tests of all three folders."""

import functools
import importlib.util
import pathlib

import ml_dtypes  # noqa: F401  (names bfloat16 for NumPy)
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
NAMES = ("vector_add", "relu", "saxpy", "bias_relu", "tiled_gemm")


@functools.cache
def load(name):
    """An example as a module. Its `main` is guarded, so nothing runs."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(seed, *shape, dtype="float32"):
    """In NumPy, since the cases are made when tests are collected."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cases():
    """(name, kernel, arguments): small, with ragged ends."""
    add, relu, saxpy = load("vector_add").VectorAdd, load("relu").ReLU, load("saxpy")
    bias_relu, gemm = load("bias_relu").BiasReLU, load("tiled_gemm").TiledGemm
    x, y = normal(0, 2051), normal(1, 2051)
    return [
        ("vector_add, a ragged end", add(), (x, y)),
        ("vector_add, less than a vector", add(), (x[:3], y[:3])),
        ("vector_add, whole blocks", add(), (x[:2048], y[:2048])),
        ("vector_add, nothing", add(), (x[:0], y[:0])),
        ("relu, three dims", relu(), (normal(2, 3, 5, 37),)),
        ("relu, bfloat16", relu(), (normal(2, 7, 41, dtype="bfloat16"),)),
        ("relu, a scalar", relu(), (np.array(-1.5, np.float32),)),
        ("saxpy, static", saxpy.StaticSaxpy(2.5), (x, y)),
        ("saxpy, attribute", saxpy.AttributeSaxpy(2.5), (x, y)),
        ("saxpy, array", saxpy.ArraySaxpy(), (x, y, np.float32(2.5))),
        ("bias_relu, one narrow step", bias_relu(), (normal(3, 3, 5, 7), normal(4, 7))),
        ("bias_relu, two steps", bias_relu(), (normal(3, 2, 2051), normal(4, 2051))),
        ("bias_relu, one example", bias_relu(), (normal(3, 256), normal(4, 256))),
        ("tiled_gemm, ragged", gemm(), (normal(5, 67, 19), normal(6, 19, 70))),
        ("tiled_gemm, one entry", gemm(), (normal(5, 1, 5), normal(6, 5, 1))),
        ("tiled_gemm, an empty sum", gemm(), (normal(5, 3, 0), normal(6, 0, 5))),
        ("tiled_gemm, float16", gemm(), [normal(i, 65, 65, dtype="float16") for i in (5, 6)]),
    ]
