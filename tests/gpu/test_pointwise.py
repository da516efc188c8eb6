"""`eqxcute.pointwise` on a GPU: values and gradients against float64, dtypes, captured arrays, more than 2**31 elements."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcute
from eqxcute.testing import assert_as_accurate, compile_count

SHAPES = [
    ((1, 1), "one element, all of it in the tail"),
    ((64,), "one dim"),
    ((4099, 1), "one column"),
    ((1001, 7), "a vector holds the end of one row and the start of the next"),
    ((777, 4099), "wide and odd: a line has 8 rows"),
    ((3, 5, 7, 257), "leading dims"),
    ((4096, 2048), "even and regular, as in practice"),
]


def normal(seed, *shape, dtype="float32"):
    return jr.normal(jr.key(seed), shape, dtype)


def gated(x, y, bias):
    return (jax.nn.gelu(x + bias) * y).astype(x.dtype)


def plain(x, y, bias):
    return gated(x, y, jnp.broadcast_to(bias, x.shape))


def wide(tree):
    """In float64, on the CPU: a GPU library may lack a routine, and is under test itself."""
    cpu = jax.devices("cpu")[0]
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x, np.float64), cpu), tree)


@pytest.mark.parametrize(("shape", "why"), SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_and_gradients(shape, why, dtype):
    del why
    args = normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype), normal(2, shape[-1])
    ct = normal(3, *shape, dtype=dtype)

    def both(function):
        def outputs(args, ct):
            y, pull = jax.vjp(function, *args)
            return y, pull(ct)

        return jax.jit(outputs)

    got, peer = both(eqxcute.pointwise(gated))(args, ct), both(plain)(args, ct)
    with jax.enable_x64(True):
        oracle = both(plain)(*wide((args, ct)))
    assert_as_accurate(got, oracle=oracle, peer=peer)


@pytest.mark.parametrize(
    "shapes",
    [
        [(777, 1001), ()],
        [(777, 1001), (777, 1)],
        [(777, 1024), (777, 1)],
        [(5000, 3), (5000, 1), (3,)],
        [(777, 1), (1001,)],
        [(50, 33, 77), (33, 77), (77,)],
        [(50, 33, 77), (50, 1, 77)],
        [(0, 7), (7,)],
    ],
)
@pytest.mark.filterwarnings("ignore:.*is spread to.*:eqxcute.SlowPathWarning")
def test_broadcasting(shapes):
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]
    got = jax.jit(eqxcute.pointwise(lambda *xs: sum(i * x for i, x in enumerate(xs, 1))))(*args)
    want = sum(i * np.asarray(x, np.float64) for i, x in enumerate(args, 1))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_mixed_dtypes_and_captured_arrays():
    x, y = normal(0, 999, 1001, dtype="bfloat16"), normal(1, 999, 1001)
    keep, i = normal(2, 999, 1001) > 0, jr.randint(jr.key(3), (1001,), -40, 40)
    table, slope = normal(4, 30), jnp.float32(0.25)

    def function(x, y, keep, i):
        return jnp.where(keep, x, y * slope) + table[i], keep & (i > 5), x

    got = jax.jit(eqxcute.pointwise(function))(x, y, keep, i)
    want = jax.jit(eqxcute.pointwise(function, implementation="xla"))(x, y, keep, i)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=1e-6)


def test_random_bits_are_those_of_jax():
    def dropped(x, i):
        return jnp.where(jr.bernoulli(jr.fold_in(jr.key(3), i), 0.5), x, 0)

    x, i = normal(0, 50, 77), jnp.arange(50 * 77, dtype=jnp.int32).reshape(50, 77)
    got = jax.jit(eqxcute.pointwise(dropped))(x, i)
    np.testing.assert_array_equal(got, eqxcute.pointwise(dropped, implementation="xla")(x, i))


def test_unaligned_slices():
    x, y, bias = normal(0, 65, 64), normal(1, 64, 64), normal(2, 64)
    run = jax.jit(
        lambda x, y, bias: eqxcute.pointwise(gated)(x.reshape(-1)[7:4103].reshape(64, 64), y, bias)
    )
    want = plain(x.reshape(-1)[7:4103].reshape(64, 64), y, bias)
    np.testing.assert_allclose(run(x, y, bias), want, rtol=1e-5, atol=1e-6)


def test_a_function_made_anew_compiles_once_whatever_the_sizes():
    def make(a):
        return lambda x, bias: jnp.tanh(x * a) + bias

    eqxcute.pointwise(make(2))(normal(0, 3, 5), normal(1, 5))
    before = compile_count()
    for n in range(1, 50, 7):
        x, bias = normal(n, 3, n, 5 + n), normal(1, 5 + n)
        jax.jit(eqxcute.pointwise(make(2)))(x, bias)
        jax.vmap(eqxcute.pointwise(make(2)), (0, None))(x, bias)
    assert compile_count() == before


def test_cute_insists_and_works_here():
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    np.testing.assert_allclose(
        eqxcute.pointwise(gated, implementation="cute")(*args), plain(*args), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(131072, 16384 + 3), (2**31 // 1001 + 5, 1001)])
def test_more_than_two_to_the_31_elements(shape):
    """Offsets in 32 bits wrap at 2**31 elements. All rows are the same, so every row must be equal to the first."""
    row = normal(0, shape[1], dtype="bfloat16")
    x = jnp.broadcast_to(row, shape)
    y = jax.jit(eqxcute.pointwise(lambda x, r: x + 2 * r))(x, row)
    del x
    assert bool(jax.jit(lambda y: jnp.all(y == y[:1]))(y))
    np.testing.assert_array_equal(
        np.asarray(y[-1], np.float32), np.asarray(row + 2 * row, np.float32)
    )
