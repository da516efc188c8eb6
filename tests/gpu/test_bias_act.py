"""BiasReLU on a GPU: values and gradients against float64, equal bits, and arrays over 2**31 elements."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers.bias_act import BiasReLU, bias_relu
from eqxcute.layers.bias_act._config import Config
from eqxcute.layers.bias_act._entry import BiasReLUBackward, BiasReLUKernel

from eqxcute.testing import assert_as_accurate, check_kernel, compile_count

FLOATS = ("bfloat16", "float16", "float32")
SHAPES = [
    ((0, 64), "no rows: nothing is launched forward; the bias gradient is zero"),
    ((1, 1), "one element, all of it in the tail"),
    ((64,), "one example"),
    ((4099, 1), "one column: a line has thousands of rows"),
    ((1001, 7), "a vector holds the end of one row and the start of the next"),
    ((333, 1000), "whole vectors of 8, a line has several rows"),
    ((777, 4099), "wide and odd: a line has 8 rows"),
    ((3, 5, 7, 257), "leading dims"),
    ((4096, 2048), "even and regular, as in practice"),
    ((2, 400_003), "very wide and odd: more strips than CTAs per walker"),
]


def inputs(shape, dtype, bias_dtype, seed=0):
    xkey, bkey = jr.split(jr.key(seed))
    return jr.normal(xkey, shape, dtype), jr.normal(bkey, shape[-1:], bias_dtype)


@pytest.mark.parametrize(("shape", "why"), SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
def test_values_and_gradients(shape, why, dtype, bias_dtype):
    del why
    check_kernel(BiasReLUKernel(), *inputs(shape, dtype, bias_dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype):
    kinds = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1.0, -1.0], dtype)
    x, bias = jnp.resize(kinds, (50, 131)), jnp.zeros(131, dtype).at[3].set(jnp.nan)
    dy = jr.normal(jr.key(1), x.shape, dtype)

    def plain(x, bias):
        return jax.nn.relu(x + jnp.broadcast_to(bias, x.shape))

    got, pulled = jax.vjp(bias_relu, x, bias)
    want, wanted = jax.vjp(plain, x, bias)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    dx, wanted_dx = pulled(dy)[0], wanted(dy)[0]
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(wanted_dx, np.float32))


def test_equal_inputs_give_equal_bits():
    x, bias = inputs((5001, 1003), "float32", "float32")
    dy = jr.normal(jr.key(1), x.shape)
    pulled = jax.jit(lambda: jax.vjp(bias_relu, x, bias)[1](dy))
    first = [np.asarray(g).view(np.int32) for g in pulled()]
    for _ in range(10):
        for one, other in zip(first, pulled(), strict=True):
            np.testing.assert_array_equal(one, np.asarray(other).view(np.int32))


def test_all_sizes_share_one_kernel_a_pair_of_dtypes():
    BiasReLU(8)(jnp.ones((2, 8)))
    before = compile_count()
    for size in (1, 7, 1000):
        layer = BiasReLU(size)
        eqx.filter_jit(layer)(jnp.ones((3, size)))
        eqx.filter_jit(lambda x, layer=layer: jax.vmap(layer)(x))(jnp.ones((5, size)))
    assert compile_count() == before


def test_cute_insists_and_works_here():
    x, bias = inputs((5, 7), "float32", "float32")
    got = bias_relu(x, bias, implementation="cute")
    np.testing.assert_array_equal(got, bias_relu(x, bias, implementation="xla"))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        bias_relu(x.astype(jnp.float64), bias, implementation="cute")


@pytest.mark.parametrize(
    "config", [dict(ctas=7), dict(lines=8), dict(threads=128, load="streaming")]
)
def test_other_settings(config):
    x, bias = inputs((1003, 517), "bfloat16", "float32")
    kernel = BiasReLUKernel(Config(**config))
    peer = kernel.reference(x, bias)
    np.testing.assert_array_equal(
        np.asarray(kernel(x, bias), np.float32), np.asarray(peer, np.float32)
    )
    backward = BiasReLUBackward("float32", Config(**{"ctas": 99, **config}))
    got = backward(peer, x)
    with jax.enable_x64(True):
        wide = BiasReLUBackward("float64").reference(
            peer.astype(jnp.float64), x.astype(jnp.float64)
        )
    assert_as_accurate(got[1], oracle=wide[1], peer=backward.reference(peer, x)[1])


@pytest.mark.parametrize("shape", [(131072, 16384), (175000, 12288), (2**31 // 1001 + 5, 1001)])
def test_more_than_two_to_the_31_elements(shape):
    """Offsets in 32 bits wrap at 2**31 elements and read, or write, the start again. All rows are the
    same, so every row must be equal to the first, the last above all."""
    rows, width = shape
    row, bias = inputs((width,), "bfloat16", "bfloat16")
    want = np.asarray(
        jax.nn.relu(row.astype(jnp.float32) + bias.astype(jnp.float32)).astype(row.dtype)
    )
    x = jnp.broadcast_to(row, shape)
    same = jax.jit(lambda y: jnp.all(y == y[:1]))
    y = jax.jit(BiasReLUKernel())(x, bias)
    del x
    assert bool(same(y))
    for i in (0, rows // 2, rows - 1):
        np.testing.assert_array_equal(np.asarray(y[i], np.float32), np.asarray(want, np.float32))
    dx, dbias = jax.jit(BiasReLUBackward("float32"))(y, y)
    np.testing.assert_array_equal(np.asarray(dx[-1], np.float32), np.asarray(want, np.float32))
    assert bool(same(dx))
    np.testing.assert_allclose(dbias, rows * want.astype(np.float64), rtol=1e-4)
