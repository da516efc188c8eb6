"""BiasReLU without a GPU: what it means, its derivatives, what it refuses. No kernel is compiled."""

import warnings

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers.bias_act import BiasReLU, _config, bias_relu
from hypothesis import given

import eqxcute
from eqxcute import _fallback
from eqxcute.testing import compile_count

FLOATS = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = (None, "xla")


def plain(x, bias):
    return jax.nn.relu(x + jnp.broadcast_to(bias, x.shape))


def inputs(*shape, dtype="float32", bias_dtype="float32"):
    xkey, bkey = jr.split(jr.key(0))
    return jr.normal(xkey, shape, dtype), jr.normal(bkey, shape[-1:], bias_dtype)


def assert_equal(got, want):
    """NumPy's own comparison takes a bfloat16 NaN to differ from itself."""
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def kernel_calls(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("eqxcute_kernel[")


def total(function):
    return lambda *args: jnp.sum(function(*args).astype(jnp.float32))


# Values.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_as_in_jax_nn_relu(dtype, implementation):
    x = jnp.array([jnp.nan, -1, 0, 2, jnp.inf, -jnp.inf], dtype)
    got = bias_relu(x, jnp.zeros(6, dtype), implementation=implementation)
    assert_equal(got, [np.nan, 0, 0, 2, np.inf, 0])
    assert_equal(got, jax.nn.relu(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((0, 64), "no rows"),
        ((4, 0), "no columns"),
        ((64,), "one example"),
        ((1, 64), "one row"),
        ((5, 1), "one column"),
        ((3, 7), "odd"),
        ((2, 0, 3, 5), "leading dims, one empty"),
        ((2, 3, 4, 9), "leading dims"),
    ],
)
def test_shapes(shape, why, implementation):
    del why
    x, bias = inputs(*shape)
    got = bias_relu(x, bias, implementation=implementation)
    want = np.maximum(np.asarray(x, np.float64) + np.asarray(bias, np.float64), 0)
    assert got.shape == shape
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sum_is_float32_and_rounded_once(implementation):
    """bfloat16 steps by 2 at 256. 257 + 2**-10 rounds up; with the bias rounded to bfloat16 first
    it would be 257, a tie, which goes down."""
    x = jnp.array([256], jnp.bfloat16)
    bias = jnp.array([1 + 2**-10], jnp.float32)
    got = bias_relu(x, bias, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    assert got[0] == 258


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_result_has_the_dtype_of_x_and_gradients_that_of_their_argument(dtype, bias_dtype):
    x, bias = inputs(3, 5, dtype=dtype, bias_dtype=bias_dtype)
    assert bias_relu(x, bias).dtype == x.dtype
    dx, dbias = jax.grad(total(bias_relu), (0, 1))(x, bias)
    assert dx.dtype == x.dtype
    assert dbias.dtype == bias.dtype
    _, tangent = jax.jvp(bias_relu, (x, bias), (x, bias))
    assert tangent.dtype == x.dtype


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        x, bias = jnp.array([1.0]), jnp.array([1e-12])
        got = bias_relu(x, bias)
        assert got.dtype == jnp.float64
        assert got[0] == 1 + 1e-12


# Derivatives.


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x", "bias", "slope"),
    [
        (3.0, -3.0, 0),
        (-0.0, -0.0, 0),
        (0.0, -0.0, 0),
        (np.nan, 0.0, 0),
        (np.inf, 0.0, 1),
        (-np.inf, 0.0, 0),
        (2.0, 1.0, 1),
    ],
)
def test_gradient_where_relu_bends(x, bias, slope, implementation):
    """0 at 0, at -0 and at NaN, as `jax.grad(jax.nn.relu)` has it."""
    args = jnp.array([x]), jnp.array([bias])
    want = jax.grad(total(plain), (0, 1))(*args)
    assert want[0][0] == slope
    got = jax.grad(total(lambda *a: bias_relu(*a, implementation=implementation)), (0, 1))(*args)
    assert_equal(got[0], want[0])
    assert_equal(got[1], want[1])


@pytest.mark.parametrize("shape", [(0, 6), (1, 1), (9, 7), (2, 3, 5)])
def test_gradients_equal_those_of_plain_jax(shape):
    x, bias = inputs(*shape)
    ct = jr.normal(jr.key(7), shape)
    got = jax.vjp(bias_relu, x, bias)[1](ct)
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) for a in (x, bias, ct)]
        want = jax.vjp(plain, *wide[:2])[1](wide[2])
    assert_equal(got[0], want[0])  # copied or zero: exact
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_gradients_in_float64():
    def gradient(f, *args):
        return jax.grad(lambda *a: jnp.sum(f(*a) ** 3), (0, 1))(*args)

    with jax.enable_x64(True):
        args = [a.astype(jnp.float64) for a in inputs(5, 3)]
        for got, want in zip(gradient(bias_relu, *args), gradient(plain, *args), strict=True):
            assert got.dtype == jnp.float64
            np.testing.assert_allclose(got, want, rtol=1e-14)


def test_bias_gradient_sums_in_float32():
    """4,096 ones in bfloat16 stop at 256 if each sum is rounded."""
    x = jnp.ones((4096, 3), jnp.bfloat16)
    dbias = jax.grad(total(bias_relu), 1)(x, jnp.zeros(3, jnp.bfloat16))
    assert_equal(dbias, np.full(3, 4096))


def test_forward_mode_and_second_derivatives():
    x, bias = inputs(4, 3)
    tangents = jr.normal(jr.key(1), (4, 3)), jr.normal(jr.key(2), (3,))
    got, want = (jax.jvp(f, (x, bias), tangents)[1] for f in (bias_relu, plain))
    np.testing.assert_allclose(got, want, rtol=1e-6)

    def cubed(f):
        return lambda b: jnp.sum(f(x, b) ** 3)

    for derivative in (
        jax.hessian,
        lambda f: jax.jacrev(jax.jacrev(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
    ):
        np.testing.assert_allclose(
            derivative(cubed(bias_relu))(bias), jax.hessian(cubed(plain))(bias), rtol=1e-5
        )


def test_only_the_result_is_kept_for_the_gradient():
    """A pre-activation, a mask or x beside it would double the memory of a layer."""
    x, bias = inputs(8, 16, dtype="bfloat16")
    y, pullback = jax.vjp(bias_relu, x, bias)
    kept = jax.tree.leaves(pullback)
    assert [(k.shape, k.dtype) for k in kept] == [(y.shape, y.dtype)]
    assert_equal(kept[0], y)


def test_remat_and_scan():
    x, bias = inputs(6, 4)

    def scanned(x, bias):
        return jax.lax.scan(lambda c, row: (c, bias_relu(row, bias)), 0, x)[1]

    want = jax.grad(total(plain), (0, 1))(x, bias)
    for f in (jax.checkpoint(bias_relu), scanned):
        got = jax.jit(jax.grad(total(f), (0, 1)))(x, bias)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


def test_sum_that_underflows_float16_has_no_gradient():
    """Documented: the gradient goes by the result, which is 0 here."""
    args = jnp.zeros(1, jnp.float16), jnp.full(1, 1e-8, jnp.float32)
    assert bias_relu(*args)[0] == 0
    assert jax.grad(total(bias_relu), 1)(*args)[0] == 0


# Batching.


def test_nested_vmap_is_one_launch_and_equals_leading_dims():
    x, bias = inputs(2, 3, 5)
    layer = eqx.tree_at(lambda m: m.bias, BiasReLU(5), bias)
    assert kernel_calls(jax.vmap(jax.vmap(layer)), x) == 1
    assert_equal(jax.vmap(jax.vmap(layer))(x), layer(x))
    assert_equal(jax.vmap(layer, in_axes=1, out_axes=1)(x), layer(x))


def test_gradient_of_a_mapped_layer_is_two_launches():
    x, bias = inputs(2, 3, 5)
    mapped = jax.vmap(jax.vmap(bias_relu, (0, None)), (0, None))
    gradient = jax.grad(total(mapped), (0, 1))
    assert kernel_calls(gradient, x, bias) == 2
    want = jax.grad(total(plain), (0, 1))(x, bias)
    for got, ref in zip(gradient(x, bias), want, strict=True):
        np.testing.assert_allclose(got, ref, rtol=1e-6)


def test_a_gradient_for_each_example():
    x, bias = inputs(4, 3, 5)
    gradient = jax.grad(total(bias_relu), (0, 1))
    got = jax.vmap(gradient, (0, None))(x, bias)
    for i in range(4):
        for mapped, single in zip(got, gradient(x[i], bias), strict=True):
            np.testing.assert_allclose(mapped[i], single, rtol=1e-6)


def test_a_bias_for_each_example():
    x, bias = inputs(4, 3, 5)
    biases = bias + jnp.arange(4.0)[:, None]
    got = jax.vmap(bias_relu)(x, biases)
    want = jnp.stack([bias_relu(x[i], biases[i]) for i in range(4)])
    assert_equal(got, want)
    assert jax.vmap(bias_relu, (None, 0))(x, biases).shape == (4, 4, 3, 5)


# Which implementation.


def test_tracing_and_running_on_a_cpu_compile_nothing():
    before = compile_count()
    x, bias = inputs(3, 5)
    jax.jit(jax.grad(total(bias_relu)))(x, bias)
    jax.eval_shape(bias_relu, x, bias)
    assert compile_count() == before


def test_xla_binds_no_kernel():
    x, bias = inputs(3, 5)
    assert kernel_calls(bias_relu, x, bias) == 1
    assert kernel_calls(lambda *a: bias_relu(*a, implementation="xla"), x, bias) == 0


def test_cute_without_a_gpu_names_the_platform():
    x, bias = inputs(3, 5)
    with pytest.raises(NotImplementedError, match=r"BiasReLU.*'cpu'"):
        BiasReLU(5, implementation="cute")(x)
    with pytest.raises(NotImplementedError, match=r"bias_relu.*'cpu'"):
        bias_relu(x, bias, implementation="cute")


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r'"cute".*"xla"'):
        BiasReLU(5, implementation="cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        bias_relu(*inputs(3, 5), implementation="cuda")


@pytest.fixture
def on_cuda(monkeypatch):
    """As if JAX ran on an NVIDIA GPU, and nothing had been warned of."""
    monkeypatch.setattr(_fallback, "platform", lambda: "cuda")
    monkeypatch.setattr(_fallback, "_WARNED", set())


def test_fallback_warns_once_by_name_and_says_why(on_cuda):
    with jax.enable_x64(True):
        layer = BiasReLU(5, dtype=jnp.float64)
        x = jnp.ones((2, 5))
        with pytest.warns(UserWarning, match=r"BiasReLU.*float64"):
            layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)


def test_cute_says_what_it_cannot_do(on_cuda):
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="x is float64"):
        bias_relu(jnp.ones((2, 5), jnp.float64), jnp.ones(5), implementation="cute")


def test_mapped_biases_warn_on_a_gpu(on_cuda):
    x, bias = inputs(4, 5)
    with pytest.warns(UserWarning, match=r"BiasReLU.*vmap"):
        jax.eval_shape(jax.vmap(bias_relu), x, jnp.broadcast_to(bias, (4, 5)))


# What is refused.


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("x", "bias", "words"),
    [
        (ones(2, 3), ones(3, dtype=bool), ("`bias`", "bool", "jnp.where")),
        (ones(2, 3), ones(3, dtype=np.int32), ("`bias`", "int32")),
        (ones(2, 3, dtype=np.int32), ones(3), ("`x`", "int32")),
        (ones(2, 3), ones(3, dtype=np.complex64), ("`bias`", "complex64")),
        ([[1.0, 2.0]], ones(2), ("`x`", "list")),
    ],
)
def test_what_is_not_floating_is_a_type_error(x, bias, words):
    with pytest.raises(TypeError) as caught:
        bias_relu(x, bias)
    assert isinstance(caught.value, eqxcute.DtypeError)
    for word in (*words, "bias_relu"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("x", "bias", "words"),
    [
        ((2, 3), (4,), ("(2, 3)", "(4,)", "3 is not 4")),
        ((2, 3), (2, 3), ("`bias`", "rank 1", "(2, 3)", "vmap")),
        ((), (3,), ("`x`", "rank at least 1")),
        ((3,), (), ("`bias`", "rank 1", "()")),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_that_do_not_fit(x, bias, words, implementation):
    with pytest.raises(eqxcute.SpecError) as caught:
        bias_relu(jnp.ones(x), jnp.ones(bias), implementation=implementation)
    for word in words:
        assert word in str(caught.value)


def test_layer_names_itself_in_errors():
    with pytest.raises(ValueError, match=r"`BiasReLU`.*\(2, 3\).*\(4,\)"):
        BiasReLU(4)(jnp.ones((2, 3)))


# The layer.


def test_layer_is_one_leaf_that_starts_at_zero():
    layer = BiasReLU(7, dtype=jnp.bfloat16)
    (bias,) = jax.tree.leaves(layer)
    assert bias.shape == (7,)
    assert bias.dtype == jnp.bfloat16
    assert not bias.any()
    assert BiasReLU(7).bias.dtype == jnp.float32
    x = inputs(3, 7)[0]
    assert_equal(eqx.filter_jit(layer)(x, key=jr.key(0)), jax.nn.relu(x))


def test_layer_refuses_a_dtype_that_is_not_floating():
    with pytest.raises(TypeError, match="int32"):
        BiasReLU(7, dtype=jnp.int32)


# Sizes of the scratch arrays, and settings.


@given(
    rows=st.integers(0, 10**9),
    width=st.integers(1, 10**6),
    itemsize=st.sampled_from([2, 4]),
    threads=st.sampled_from([32, 256]),
    ctas=st.sampled_from([1, 1056]),
)
def test_partial_sums_cover_whole_lines_and_stay_small(rows, width, itemsize, threads, ctas):
    config = _config.Config(threads=threads, ctas=ctas)
    walkers, repeats, same = _config.parts_shape(rows, width, itemsize, config)
    vector = 16 // itemsize
    assert same == width
    assert repeats * width % vector == 0  # a line is whole vectors
    places = repeats * width // vector
    strips = -(-places // threads)
    assert walkers >= 1
    assert walkers * strips <= max(ctas, strips)  # about as many CTAs as asked for
    assert places <= max(width, _config.STRIPS * threads)
    assert walkers == 1 or (walkers - 1) * config.lines * repeats < rows  # none without work


@pytest.mark.parametrize(
    "wrong", [dict(threads=48), dict(threads=2048), dict(lines=0), dict(ctas=-1), dict(load="fast")]
)
def test_settings_that_cannot_work_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"`{name}`"):
        _config.Config(**wrong)


# Several devices.


@pytest.mark.parametrize(
    ("spec", "bias_spec"), [(("a", None), ()), ((None, "b"), ("b",)), (("a", "b"), ("b",))]
)
def test_rows_and_columns_may_be_sharded(spec, bias_spec):
    """Rows are independent but for the bias gradient, which is summed over the shards; columns wholly."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x, bias = inputs(16, 6)
    want = jax.grad(total(plain), (0, 1))(x, bias)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        bias = jax.device_put(bias, jax.NamedSharding(mesh, jax.P(*bias_spec)))
        got = jax.jit(jax.grad(total(bias_relu), (0, 1)))(x, bias)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)
    assert got[0].sharding.spec == x.sharding.spec
