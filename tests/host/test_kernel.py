"""Kernels on the reference path: what they take, what they give, and what they refuse."""

import bridge_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_kernels import Copy, Histogram, LookUp, Saxpy, State, Table

import eqxcute
from eqxcute import BackendError, DtypeError, SpecError, testing


@pytest.mark.parametrize(("kernel", "arguments"), bridge_cases.cases())
def test_a_kernel_is_its_reference(kernel, arguments):
    want = jax.tree.leaves(kernel.reference(*arguments))
    for call in (kernel, jax.jit(lambda *some: kernel(*some))):
        got = jax.tree.leaves(call(*arguments))
        assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(
                a.astype(jnp.float32),
                b.astype(jnp.float32),
                rtol=1e-2 if a.dtype == jnp.bfloat16 else 1e-6,
            )


def test_arguments_by_name_and_python_numbers():
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(Saxpy(2.0)(x, y=x), 3 * x)
    np.testing.assert_array_equal(Saxpy(2.0)(y=x, x=x), 3 * x)
    np.testing.assert_array_equal(Saxpy(2.0)(np.arange(3.0, dtype=np.float32), x), 3 * x)
    with pytest.raises(SpecError, match=r"no argument `alpha` left.*x, y"):
        Saxpy(2.0)(x, alpha=x)


def test_tracing_calls_no_compiler():
    before = testing.compile_count()
    for case in bridge_cases.cases():
        kernel, arguments = case.values
        jax.make_jaxpr(kernel.__call__)(*arguments)
        jax.eval_shape(lambda *some, k=kernel: k(*some), *arguments)
        jax.jit(lambda *some, k=kernel: k(*some)).lower(*arguments)
    assert testing.compile_count() == before


class Bare(eqxcute.Kernel):
    signature = "n, n -> n"
    dtypes = {"x": ("float32", "bfloat16")}

    def launch(self, stream, x, y, out): ...


class Wrong(Bare):
    def reference(self, x, y):
        return jnp.stack([x, y])


class WrongDtype(Bare):
    def reference(self, x, y):
        return x > y


class TooMany(Bare):
    def reference(self, x, y):
        return x, y


class Dtypes(Bare):
    def out_dtypes(self, x, y):
        return x.dtype, y.dtype


class NoSignature(eqxcute.Kernel):
    def reference(self, x):
        return x


class Deep(eqxcute.Kernel):
    signature = "n -> n"
    options: object = eqxcute.static()

    def reference(self, x):
        return x


X = jnp.arange(4.0)


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (lambda: Bare()(X[None], X), SpecError, ["`Bare`", "`x` has shape (1, 4)", "rank 1"]),
        (lambda: Bare()(X, X[:3]), SpecError, ["`x` has `n=4`", "`y` has `n=3`"]),
        (lambda: Bare()(X), SpecError, ["takes 2 arguments (x, y", "got 1"]),
        (
            lambda: Bare()(X.astype("float16"), X),
            DtypeError,
            ["`x` is float16", "float32 or bfloat16", "astype"],
        ),
        (
            lambda: Copy()(X.astype("complex64")),
            DtypeError,
            ["`x` is complex64", "real and imaginary"],
        ),
        (lambda: Copy()(X.astype("int4")), DtypeError, ["`x` is int4", "pack two"]),
        (lambda: Copy()(jax.random.key(0)), DtypeError, ["`x` is key", "key_data"]),
        (lambda: Copy()("text"), DtypeError, ["`x` must be an array, got str"]),
        (lambda: Bare()(X, X), BackendError, ["`Bare` has no `reference`", "'cpu'"]),
        (lambda: Wrong()(X, X), SpecError, ["`Wrong.reference`", "float32(2, 4)", "float32(4,)"]),
        (
            lambda: WrongDtype()(X, X),
            SpecError,
            ["`WrongDtype.reference`", "bool(4,)", "float32(4,)"],
        ),
        (lambda: TooMany()(X, X), SpecError, ["`TooMany.reference`", "float32(2, 4)"]),
        (lambda: Dtypes()(X, X), SpecError, ["`Dtypes.out_dtypes` returned 2 dtypes", "1 outputs"]),
        (lambda: NoSignature()(X), SpecError, ["`NoSignature` has no signature"]),
        (lambda: Deep([1, 2]), SpecError, ["`Deep`", "`options`", "list", "not hashable", "tuple"]),
        (lambda: Deep({"a": 1}), SpecError, ["`options`", "dict", "frozen dataclass"]),
        (
            lambda: Deep(np.arange(3)),
            SpecError,
            ["`options`", "array of shape (3,)", "ordinary field"],
        ),
        (lambda: Deep((1, np.arange(3))), SpecError, ["`options`", "array of shape (3,)"]),
        (lambda: Saxpy(1.0, "2"), SpecError, ["attribute `beta`", "got str"]),
        (
            lambda: jax.jit(lambda b: Saxpy(1.0, b)(X, X))(2.0),
            SpecError,
            ["attribute `beta`", "`()`"],
        ),
        (lambda: eqxcute.attribute(dtype="float16"), SpecError, ["'float16'", "float32, float64"]),
    ],
)
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_bad_input_is_named(call, error, parts):
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_jax_array_in_a_static_field_is_refused():
    with pytest.raises(SpecError, match=r"`options` holds an array of shape \(4,\)"):
        Deep(X)


class Integers(eqxcute.Kernel):
    signature = "n -> n"
    small: int = eqxcute.attribute()

    def reference(self, x):
        return x * self.small


def test_an_attribute_that_does_not_fit_is_refused():
    with pytest.raises(SpecError, match=r"`small` is 2147483648.*does not fit 32 bits.*int64"):
        Integers(2**31)
    assert Integers(-(2**31)).small == -(2**31)


def test_values_that_compare_equal_are_not_one_kernel():
    """1, 1.0 and True are equal in Python; a kernel traced with one must not serve the other."""

    class Times(eqxcute.Kernel):
        signature = "n -> n"
        by: object = eqxcute.static()

        def out_dtypes(self, x):
            return (
                (x * self.by).dtype
                if not isinstance(x, jax.ShapeDtypeStruct)
                else jnp.result_type(x.dtype, type(self.by))
            )

        def reference(self, x):
            return x * self.by

    x = jnp.arange(3)
    both = jax.jit(lambda x: (Times(2)(x), Times(2.0)(x)))(x)
    assert [out.dtype for out in both] == [jnp.int32, jnp.float32]


class Typed(eqxcute.Kernel):
    """Gives what its static field makes of `x`."""

    signature = "n -> n"
    by: object = eqxcute.static()

    def out_dtypes(self, x):
        return jnp.result_type(x.dtype, type(self.by[0]))

    def reference(self, x):
        return x * self.by[0]


def test_neither_are_they_inside_a_tuple():
    x = jnp.arange(3)
    assert Typed((2,))(x).dtype == jnp.int32
    assert Typed((2.0,))(x).dtype == jnp.float32
    assert Typed((2,))(x).dtype == jnp.int32
    signs = [float(1 / Typed((zero,))(x + 1.0)[0]) for zero in (0.0, -0.0)]
    assert signs == [np.inf, -np.inf]


def test_without_jit():
    x = jnp.arange(3.0)
    with jax.disable_jit():
        np.testing.assert_array_equal(Saxpy(2.0)(x, x), 3 * x)
        np.testing.assert_array_equal(jax.grad(lambda x: Saxpy(2.0)(x, x).sum())(x), [3, 3, 3])


def test_x64_is_obeyed_call_by_call():
    class Wide(eqxcute.Kernel):
        signature = "n -> n"

        def out_dtypes(self, x):
            return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32

        def reference(self, x):
            return x.astype(self.out_dtypes(x))

    x = np.arange(3, dtype=np.float32)
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            assert Wide()(x).dtype == (np.float64 if wide else np.float32)


@pytest.mark.parametrize("option", ["dtypes", "layouts", "sums"])
def test_a_misspelt_option_is_named(option):
    value = {"sums": ("outt",)}.get(option, {"xx": ("float32",) if option == "dtypes" else (0,)})
    cls = type("Odd", (Saxpy,), {option: value, "__module__": __name__, "__annotations__": {}})
    with pytest.raises(
        SpecError, match=rf"`Odd.{option}`: '(xx|outt)' names no array.*there are '"
    ):
        cls(2.0)(jnp.arange(3.0), jnp.arange(3.0))


def test_a_traced_value_in_a_static_function_is_refused():
    with pytest.raises(
        SpecError, match=r"static field `options` closes over a value that JAX is tracing"
    ):
        jax.jit(lambda a: Deep(lambda x: x + a)(jnp.arange(3.0)))(1.0)


def test_attributes_of_other_number_types():
    import enum

    class Count(enum.IntEnum):
        TWO = 2

    assert Integers(Count.TWO)(jnp.arange(3)).tolist() == [0, 2, 4]
    with pytest.raises(SpecError, match=r"`beta` is 1e\+300.*does not fit 32 bits.*float64"):
        Saxpy(1.0, 1e300)
    Saxpy(1.0, float("inf"))
    Saxpy(1.0, float("nan"))


def test_a_peer_that_is_not_finite_allows_nothing():
    one = jnp.ones(3)
    with jax.enable_x64(True):
        oracle = np.ones(3)
    with pytest.raises(AssertionError, match="peer is not finite"):
        testing.assert_as_accurate(100 * one, oracle=oracle, peer=one * jnp.inf)
    with pytest.raises(AssertionError, match=r"Off by 0.1 at \(0,\)"):
        testing.assert_as_accurate(1.1 * one, oracle=oracle, peer=one)
    testing.assert_as_accurate(one, oracle=oracle, peer=one)


def test_a_kernel_retraces_only_for_what_differs():
    """K07: a kernel re-made with equal fields, as each step of a training loop does, is the same kernel."""
    traces = []

    @jax.jit
    def step(table, x):
        traces.append(1)
        return LookUp(Table(table, 2.0))(x) + Histogram(5)(x)[0]

    for seed in range(3):
        step(bridge_cases.normal(7, seed=seed), jnp.arange(3))
    assert len(traces) == 1


def test_named_outputs_and_trees_keep_their_structure():
    x = bridge_cases.normal(5)
    assert jax.tree.structure(State(x, None)) == jax.tree.structure(State(x, None))
    got = jax.eval_shape(lambda x: Saxpy(2.0)(x, x), x)
    assert (got.shape, got.dtype) == ((5,), jnp.float32)
