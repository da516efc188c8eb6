"""`eqxcute.pointwise` without a GPU: what it means, its derivatives, what it refuses. No kernel is compiled."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcute
from eqxcute import _fallback
from eqxcute.inline._pointwise import PointwiseKernel
from eqxcute.inline._roles import layout
from eqxcute.testing import compile_count


def normal(seed, *shape, dtype="float32"):
    return jr.normal(jr.key(seed), shape, dtype)


def gated(x, y, bias):
    return jax.nn.gelu(x + bias) * y


def assert_close(got, want, rtol=1e-6):
    """`want` may have a wider dtype."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        w = np.asarray(w, np.float64)
        np.testing.assert_allclose(
            np.asarray(g, np.float64), w, rtol, rtol * np.abs(w).max(initial=0)
        )


def total(function):
    def summed(*args):
        outputs = jax.tree.leaves(function(*args))
        return sum(
            jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, "float32")))) for y in outputs
        )

    return summed


def gradient(function, *args, argnums=None):
    """Of the sine of all results, compiled whole."""
    argnums = tuple(range(len(args))) if argnums is None else argnums
    return jax.jit(jax.grad(total(function), argnums))(*args)


def calls(function, *args):
    """How many kernels a function calls."""
    return str(jax.make_jaxpr(function)(*args)).count("eqxcute_kernel[")


@pytest.fixture
def on_cuda(monkeypatch):
    """As if JAX ran on an NVIDIA GPU, and nothing had been warned of."""
    monkeypatch.setattr(_fallback, "platform", lambda: "cuda")
    monkeypatch.setattr(_fallback, "_WARNED", set())


# Values.


def test_a_chain_with_a_row_is_one_kernel():
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    assert_close(eqxcute.pointwise(gated)(*args), gated(*args), 1e-7)
    assert calls(eqxcute.pointwise(gated), *args) == 1


BROADCASTS = [
    # Shapes, roles, and which arrays are spread in memory.
    ([(5, 7), (5, 7)], "full full", []),
    ([(5, 7), (7,)], "full row", []),
    ([(5, 7), (1, 7)], "full row", []),
    ([(5, 7), ()], "full scalar", []),
    ([(5, 7), (1, 1)], "full scalar", []),
    ([(5, 7), (5, 1)], "full column", []),
    ([(5, 7), (5, 1), (7,)], "full column row", []),
    ([(5, 1), (7,)], "column row", []),
    ([(5, 1), (1,)], "full scalar", []),
    ([(7,), (7,)], "full full", []),
    ([(), ()], "full full", []),
    ([(1, 1), ()], "full full", []),
    ([(2, 5, 7), (5, 7)], "full row", []),
    ([(2, 5, 7), (5, 7), (7,)], "full row row", []),
    ([(2, 5, 7), (2, 1, 1)], "full column", []),
    ([(2, 5, 7), (2, 1, 1), (7,)], "full column row", []),
    ([(2, 5, 7), (2, 5, 1), (5, 7)], "full full row", [1]),
    ([(2, 5, 7), (2, 1, 7)], "full full", [1]),
    ([(2, 1, 7), (1, 5, 1)], "full full", [0, 1]),
    ([(0, 7), (7,)], "full row", []),
    ([(5, 0), (5, 1)], "full column", []),
    ([(2, 1, 7), (7,)], "full row", []),
]


@pytest.mark.parametrize(("shapes", "roles", "spread"), BROADCASTS)
def test_broadcasting(shapes, roles, spread):
    found = layout(shapes)
    assert found.roles == tuple(roles.split())
    assert list(found.spread) == spread
    arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]

    def function(*scalars):
        return sum(i * jnp.cos(x) for i, x in enumerate(scalars, 1))

    want = sum(i * np.cos(x) for i, x in enumerate(arrays, 1))
    run = eqxcute.pointwise(function)
    assert_close(jax.jit(eqxcute.pointwise(function, implementation="xla"))(*arrays), want)
    value, gradients = jax.jit(
        lambda *some: (run(*some), jax.grad(total(run), range(len(some)))(*some))
    )(*arrays)
    assert_close(value, want)
    ct = jnp.cos(jnp.asarray(want))
    for i, (x, g) in enumerate(zip(arrays, gradients, strict=True), 1):
        lost = tuple(range(want.ndim - x.ndim))
        kept = np.sum(-i * ct * np.sin(x), axis=lost)
        axes = tuple(d for d in range(x.ndim) if x.shape[d] == 1)
        assert_close(g, np.sum(kept, axis=axes, keepdims=True), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("row", ["bfloat16", "float32"])
def test_dtypes_are_those_of_jax(dtype, row):
    args = normal(0, 3, 5, dtype=dtype), normal(1, 3, 5, dtype=dtype), normal(2, 5, dtype=row)
    got = eqxcute.pointwise(gated)(*args)
    assert got.dtype == jnp.result_type(dtype, row)
    gradients = gradient(eqxcute.pointwise(gated), *args)
    assert [g.dtype for g in gradients] == [x.dtype for x in args]


def test_integers_booleans_and_several_results():
    x, mask = jnp.arange(12, dtype=jnp.int8).reshape(3, 4), jnp.array([True, False, True, False])

    def function(x, keep):
        return {"a": jnp.where(keep, x * 3, -1), "b": (x > 5, x)}

    got = eqxcute.pointwise(function)(x, mask)
    want = function(x, jnp.broadcast_to(mask, x.shape))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


def test_what_depends_on_less_is_as_large_all_the_same():
    x, row = normal(0, 3, 4), normal(1, 4)
    got = eqxcute.pointwise(lambda x, r: (jnp.exp(r), 2.0, x, r))(x, row)
    want = [jnp.exp(row), jnp.float32(2), x, row]
    assert_close(got, tuple(jnp.broadcast_to(w, x.shape) for w in want))


def test_float64():
    with jax.enable_x64(True):
        x = jnp.array([1.0, 2.0])
        got = eqxcute.pointwise(lambda x: x + 1e-12)(x)
        assert got.dtype == jnp.float64
        assert got[0] == 1 + 1e-12


# Captured arrays.


class Scaled(eqx.Module):
    """A learnt slope for negative numbers, and one factor a class."""

    slope: jax.Array
    table: jax.Array

    def __call__(self, x, i):
        return jnp.where(x > 0, x, self.slope * x) * self.table[i]


def scaled(dtype="float32"):
    module = Scaled(jnp.asarray(0.25, dtype), normal(3, 4, dtype=dtype))
    return module, normal(0, 5, 7, dtype=dtype), jr.randint(jr.key(1), (7,), 0, 4)


def test_a_module_trains():
    module, x, i = scaled()

    def loss(run):
        return lambda module, x: total(lambda x: run(module)(x, i))(x)

    def plain(module):
        return lambda x, i: module(x, jnp.broadcast_to(i, x.shape))

    got = eqx.filter_jit(eqx.filter_grad(loss(eqxcute.pointwise)))(module, x)
    want = jax.jit(jax.grad(loss(plain)))(module, x)
    assert_close(got, want, 1e-5)
    trained = eqx.filter_grad(lambda p: total(lambda x: p(x, i))(x))
    trained = eqx.filter_jit(trained)(eqxcute.pointwise(module))
    assert_close(trained.fn, want, 1e-5)


def test_gradients_of_a_16_bit_scalar_and_table_are_summed_in_float32():
    """4,096 ones in bfloat16 stop at 256 if each sum is rounded."""
    slope, table = jnp.bfloat16(1), jnp.ones(2, jnp.bfloat16)
    x, i = jnp.ones((64, 64), jnp.bfloat16), jnp.zeros(64, jnp.int32)

    def loss(slope, table, row):
        y = eqxcute.pointwise(lambda x, row, i: x * row * slope * table[i])(x, row, i)
        return jnp.sum(y.astype(jnp.float32))

    slopes, tables, rows = jax.jit(jax.grad(loss, (0, 1, 2)))(
        slope, table, jnp.ones(64, jnp.bfloat16)
    )
    assert slopes == 4096
    np.testing.assert_array_equal(np.asarray(tables, np.float32), [4096, 0])
    np.testing.assert_array_equal(np.asarray(rows, np.float32), 64)


def test_captured_scalars_may_be_mapped_in_one_kernel():
    slopes, x = normal(0, 3), normal(1, 3, 5, 7)

    def one(slope, x):
        return eqxcute.pointwise(lambda x: jnp.where(x > 0, x, slope * x))(x)

    assert_close(jax.jit(jax.vmap(one))(slopes, x), jnp.where(x > 0, x, slopes[:, None, None] * x))
    assert calls(jax.vmap(one), slopes, x) == 1


def test_a_mapped_table_is_right():
    tables, i = normal(0, 3, 4), jr.randint(jr.key(1), (5,), 0, 4)
    got = jax.vmap(lambda table: eqxcute.pointwise(lambda i: jnp.exp(table[i]))(i))(tables)
    assert_close(got, jnp.exp(tables[:, i]))


# Derivatives.


def test_gradients_against_float64():
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    got = gradient(eqxcute.pointwise(gated), *args)
    with jax.enable_x64(True):
        want = gradient(gated, *[np.asarray(x, np.float64) for x in args])
    assert_close(got, want, 2e-6)


def test_reverse_mode_is_one_kernel_more():
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    assert calls(jax.grad(total(eqxcute.pointwise(gated)), (0, 1, 2)), *args) == 2


def test_only_gradients_that_are_wanted_are_computed():
    """An output of a kernel that nobody reads is written all the same."""
    args = normal(0, 5, 7, dtype="bfloat16"), normal(1, 5, 7, dtype="bfloat16"), normal(2, 7)
    function = total(eqxcute.pointwise(gated))
    for argnums, outputs in (((0,), 1), ((2,), 1), ((0, 1), 2), ((0, 1, 2), 3)):
        jaxpr = jax.make_jaxpr(jax.grad(function, argnums))(*args).jaxpr
        sizes = [
            len(e.outvars)
            for e in _equations(jaxpr)
            if e.primitive.name == "eqxcute_kernel" and len(e.invars) > len(args)
        ]
        assert sizes == [outputs], argnums


def _equations(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None and hasattr(inner, "eqns"):
                yield from _equations(inner)


def test_a_derivative_that_needs_nothing_keeps_nothing():
    x, row = normal(0, 64, 64), normal(1, 64)
    _, pull = jax.vjp(eqxcute.pointwise(lambda x, r: x + r), x, row)
    assert sum(k.size for k in jax.tree.leaves(pull)) == 0
    _, pull = jax.vjp(eqxcute.pointwise(lambda x, r: x * r), x, row)
    assert sum(k.size for k in jax.tree.leaves(pull)) == x.size + row.size


@pytest.mark.parametrize(
    "derivative",
    [
        jax.jacfwd,
        jax.jacrev,
        jax.hessian,
        lambda f: jax.jacrev(jax.jacrev(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
    ],
)
def test_derivatives_of_all_modes_and_second_order(derivative):
    x, y, bias = normal(0, 2, 3), normal(1, 2, 3), normal(2, 3)
    got, want = (
        jax.jit(derivative(lambda b, f=f: total(f)(x, y, b)))(bias)
        for f in (eqxcute.pointwise(gated), gated)
    )
    assert_close(got, want, 2e-5)


def test_forward_mode():
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    tangents = tuple(normal(i + 3, *x.shape) for i, x in enumerate(args))
    got, want = (
        jax.jit(lambda *a, f=f: jax.jvp(f, *a))(args, tangents)
        for f in (eqxcute.pointwise(gated), gated)
    )
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("kind", [0.0, -0.0, np.nan, np.inf, 1.0])
def test_relu_has_its_own_derivative(kind):
    x = jnp.full(3, kind)
    for f in (jax.nn.relu, lambda x: jax.nn.relu(x) * 2):
        got, want = (jax.grad(lambda x, g=g: g(x).sum())(x) for g in (eqxcute.pointwise(f), f))
        np.testing.assert_array_equal(got, want)


def make_step(slope):
    """A step function, with a derivative for training that is of the caller's making."""

    @jax.custom_jvp
    def step(x):
        return jnp.where(x > 0, 1.0, 0.0)

    @step.defjvp
    def _(primals, tangents):
        return step(*primals), slope * tangents[0]

    return step


def test_rules_of_users_hold_and_are_not_mixed_up():
    """Both have the same code: only their derivatives differ."""
    x = normal(0, 4)
    for slope in (3.0, 5.0, 3.0):
        run = eqxcute.pointwise(make_step(slope))
        np.testing.assert_array_equal(run(x), x > 0)
        np.testing.assert_array_equal(
            jax.grad(lambda x, run=run: run(x).sum())(x), jnp.full(4, slope)
        )
        _, tangent = jax.jvp(run, (x,), (jnp.ones(4),))
        np.testing.assert_array_equal(tangent, jnp.full(4, slope))


def test_custom_vjp():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    x = jnp.array([1.0, 2.0])
    ct = jnp.array([0.5, -7.0])
    run = eqxcute.pointwise(lambda x: clipped(x) * 3)
    np.testing.assert_array_equal(jax.vjp(run, x)[1](ct)[0], jnp.clip(ct * 3, -1, 1))


def test_integer_arguments_and_results_have_no_derivative():
    x, i = normal(0, 4), jnp.arange(4)
    run = eqxcute.pointwise(lambda x, i: (x * i, i + 1))
    got = jax.grad(lambda x: run(x, i)[0].sum())(x)
    assert_close(got, i.astype(jnp.float32))


def test_remat_and_scan():
    x, y, bias = normal(0, 6, 4), normal(1, 6, 4), normal(2, 4)
    run = eqxcute.pointwise(gated)
    want = jax.grad(total(gated), (0, 2))(x, y, bias)

    def scanned(x, y, bias):
        return jax.lax.scan(lambda c, row: (c, run(*row, bias)), 0, (x, y))[1]

    for f in (jax.checkpoint(run), scanned):
        assert_close(jax.jit(jax.grad(total(f), (0, 2)))(x, y, bias), want, 1e-5)


# Batching.


@pytest.mark.parametrize(
    ("in_axes", "shapes", "why"),
    [
        ((0, 0, None), [(3, 5, 7), (3, 5, 7), (7,)], "as in a layer"),
        ((0, None, None), [(3, 5, 7), (5, 7), (7,)], "an array that is not mapped becomes a row"),
        ((None, None, 0), [(5, 7), (5, 7), (3, 7)], "a row an example: spread"),
        ((1, 0, None), [(5, 3, 7), (3, 5, 7), ()], "another axis; a scalar"),
        ((0, 0, 0), [(3, 5, 7), (3, 5, 7), (3,)], "a scalar an example is a column"),
        ((0, None, 0), [(3, 5, 7), (5, 1), (3,)], "two kinds of columns"),
    ],
)
def test_vmap_is_one_kernel(in_axes, shapes, why):
    del why
    args = [normal(i, *shape) for i, shape in enumerate(shapes)]

    def plain(x, y, bias):
        return gated(*jnp.broadcast_arrays(x, y, bias))

    run = jax.vmap(eqxcute.pointwise(gated), in_axes)
    assert_close(jax.jit(run)(*args), jax.jit(jax.vmap(plain, in_axes))(*args))
    assert calls(run, *args) == 1
    assert_close(gradient(run, *args), gradient(jax.vmap(plain, in_axes), *args), 1e-5)


def test_nested_vmap_and_gradients_for_each_example():
    x, bias = normal(0, 2, 3, 5), normal(2, 5)
    run = eqxcute.pointwise(lambda x, b: jnp.tanh(x + b))
    twice = jax.vmap(jax.vmap(run, (0, None)), (0, None))
    assert_close(twice(x, bias), jnp.tanh(x + bias))
    assert calls(twice, x, bias) == 1
    got, want = (
        jax.jit(jax.vmap(jax.grad(total(f), 1), (0, None)))(x, bias)
        for f in (run, lambda x, b: jnp.tanh(x + b))
    )
    assert_close(got, want, 1e-5)


# Which implementation, and what is said.


def test_tracing_and_running_on_a_cpu_compile_nothing():
    before = compile_count()
    args = normal(0, 5, 7), normal(1, 5, 7), normal(2, 7)
    jax.jit(jax.grad(total(eqxcute.pointwise(gated))))(*args)
    jax.eval_shape(eqxcute.pointwise(gated), *args)
    assert compile_count() == before


def test_a_function_made_anew_is_the_same_kernel_and_another_number_is_another():
    """The kernel is an argument of jitted functions, by value: equal ones are traced and compiled once."""

    def kernel(f):
        found = []
        jaxpr = jax.make_jaxpr(eqxcute.pointwise(f))(normal(0, 3, 4))
        for eqn in jaxpr.jaxpr.eqns:
            found.append(eqn.params["call"])
        return found[0]

    assert kernel(lambda x: x * 2) == kernel(lambda z: z * 2)
    assert hash(kernel(lambda x: x * 2)) == hash(kernel(lambda z: z * 2))
    assert kernel(lambda x: x * 2) != kernel(lambda x: x * 3)
    assert kernel(lambda x: x * 0.0) != kernel(lambda x: x * -0.0)


def test_xla_binds_no_kernel():
    x = normal(0, 3, 5)
    assert calls(eqxcute.pointwise(jnp.tanh), x) == 1
    assert calls(eqxcute.pointwise(jnp.tanh, implementation="xla"), x) == 0


def test_cute_without_a_gpu_names_the_platform_and_the_function():
    with pytest.raises(NotImplementedError, match=r"gated.*'cpu'"):
        eqxcute.pointwise(gated, implementation="cute")(*[normal(0, 3)] * 3)


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"pointwise.*'cuda'"):
        eqxcute.pointwise(gated, implementation="cuda")


def unsupported(x):
    return jax.lax.igamma(x, x)


def test_what_no_kernel_computes_runs_as_plain_jax_and_says_so_once(on_cuda):
    x = jnp.abs(normal(0, 3, 5)) + 1
    run = eqxcute.pointwise(unsupported)
    with pytest.warns(UserWarning, match=r"unsupported.*igamma"):
        got = run(x)
    assert_close(got, unsupported(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(x)
    with pytest.raises(NotImplementedError, match="igamma"):
        eqxcute.pointwise(unsupported, implementation="cute")(x)


def test_other_dtypes_run_as_plain_jax(on_cuda):
    x = normal(0, 4).astype(jnp.float8_e4m3fn)
    with pytest.warns(UserWarning, match="float8_e4m3fn"):
        got = eqxcute.pointwise(lambda x: x.astype(jnp.float32) * 2)(x)
    assert_close(got, x.astype(jnp.float32) * 2)


@pytest.mark.parametrize("dtype", ["complex64", "int4", "uint4"])
def test_dtypes_of_which_intervals_know_nothing(on_cuda, dtype):
    """The bounds of such an argument were asked of NumPy, which raised."""
    x = jnp.arange(4).astype(dtype)
    with pytest.warns(UserWarning, match=dtype):
        got = eqxcute.pointwise(lambda x, y: (x * y + x, ~(x != y)))(x, x[::-1])
    want = x * x[::-1] + x, x == x[::-1]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def test_spreading_in_memory_is_said_once(on_cuda):
    x, y = normal(0, 2, 5, 7), normal(1, 2, 1, 7)
    run = eqxcute.pointwise(lambda x, y: x + y)
    with pytest.warns(eqxcute.SlowPathWarning, match=r"\(2, 1, 7\) is spread to \(2, 5, 7\)"):
        jax.eval_shape(run, x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(run, x, y)


def test_arrays_that_are_too_large_run_as_plain_jax(on_cuda):
    x = jax.ShapeDtypeStruct((2**31,), jnp.float32)
    with pytest.warns(UserWarning, match=r"2147483648"):
        jax.eval_shape(eqxcute.pointwise(lambda x: x + 1), x)


@pytest.mark.parametrize("exact", [None, True, False])
@pytest.mark.parametrize(
    ("dtype", "fast"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", None), ("int32", None)],
)
def test_when_approximations_are_taken(exact, dtype, fast):
    x = jnp.ones((3, 4), dtype)
    jaxpr = jax.make_jaxpr(eqxcute.pointwise(lambda x: x * x, exact=exact))(x)
    (call,) = [eqn.params["call"] for eqn in jaxpr.jaxpr.eqns]
    kernel, _ = call.restore([x])
    assert isinstance(kernel, PointwiseKernel)
    assert kernel.fast == {None: fast, True: None, False: "bfloat16"}[exact]


# What is refused.


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ("gated", "no array")),
        ((np.ones((2, 3)), np.ones((2, 4)), np.ones(3)), ("`x` (2, 3)", "`y` (2, 4)", "broadcast")),
        ((np.ones(3), 2.0, np.ones(3)), ("`y`", "float", "jnp.asarray")),
        ((np.ones(3), np.ones(3), [1.0]), ("`bias`", "list")),
        ((np.array(["a"]), np.ones(1), np.ones(1)), ("`x`", "<U1", "numbers")),
    ],
)
def test_arguments_that_do_not_fit(args, words):
    with pytest.raises((eqxcute.SpecError, eqxcute.DtypeError)) as caught:
        eqxcute.pointwise(gated)(*args)
    for word in ("test_pointwise.py", *words):
        assert word in str(caught.value)


def test_a_key_is_no_argument():
    with pytest.raises(eqxcute.DtypeError, match=r"`key` is key"):
        eqxcute.pointwise(lambda key: jr.uniform(key))(jr.split(jr.key(0), 3))


def test_not_a_function():
    with pytest.raises(TypeError, match="int"):
        eqxcute.pointwise(3)


def test_unknown_exactness():
    with pytest.raises(ValueError, match="'bfloat16'"):
        eqxcute.pointwise(gated, exact="bfloat16")


def test_functions_that_are_none_of_scalars():
    def branches(x):
        return x if x > 0 else -x

    with pytest.raises(eqxcute.InlineError, match=r"branches.*jnp\.where"):
        eqxcute.pointwise(branches)(normal(0, 3))
    with pytest.raises(eqxcute.InlineError, match=r"shape \(2,\)"):
        eqxcute.pointwise(lambda x: jnp.stack([x, x]))(normal(0, 3))


# Several devices.


@pytest.mark.parametrize(
    ("spec", "row"), [(("a", None), ()), ((None, "b"), ("b",)), (("a", "b"), ("b",))]
)
def test_rows_and_columns_may_be_sharded(spec, row):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    args = normal(0, 16, 6), normal(1, 16, 6), normal(2, 6)
    want = jax.grad(total(gated), (0, 1, 2))(*args)
    with jax.set_mesh(mesh):
        specs = (spec, spec, row)
        args = [
            jax.device_put(x, jax.NamedSharding(mesh, jax.P(*s)))
            for x, s in zip(args, specs, strict=True)
        ]
        got = jax.jit(jax.grad(total(eqxcute.pointwise(gated)), (0, 1, 2)))(*args)
    assert_close([np.asarray(g) for g in got], [np.asarray(w) for w in want], 1e-5)
    assert got[0].sharding.spec == args[0].sharding.spec


def through_table(t):
    def function(x, i):
        y = jax.nn.relu(x * t[i]) + t[0] * jnp.where(i > 2, t[i], 1)
        return jax.lax.fori_loop(0, 2, lambda k, y: y * t[k] + 1, y)

    return function


@pytest.mark.parametrize("spec", [(), ("d",)], ids=["table the same", "table varies"])
def test_a_table_and_rules_inside_shard_map(spec):
    """What varies over the mesh met what was traced as if it did not: reverse mode raised where an array was captured,
    forward mode where `relu` was inside, and so did a loop."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, t, index = normal(0, 16, 6), normal(1, 40 if spec else 5), jnp.arange(6) % 5

    def over_mesh(own):
        def loss(t, x):
            return total(own(through_table(t)))(x, index)

        def shard(t, x):
            grads = jax.grad(loss, (0, 1))(t, x)
            return grads, jax.jvp(loss, (t, x), (t, x))[1][None]

        specs = jax.P(*spec), jax.P("d")
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(specs, jax.P("d")))
        return jax.jit(mapped)(t, x)

    assert_close(over_mesh(eqxcute.pointwise), over_mesh(lambda fn: fn), 1e-5)
