"""Kernels over eight CPU devices: the reference on shards, and, by a stand-in target, the custom call on shards."""

import ctypes

import bridge_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_kernels import RowSum, Saxpy
from eqxcute.layers.bias_act._entry import BiasReLUBackward
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqxcute
from eqxcute import _primitive, _registry

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
ROWS = bridge_cases.normal(16, 3, 12)


def mesh(kind, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def placed(x, where, *spec):
    return jax.device_put(x, NamedSharding(where, P(*spec)))


def compiled_text(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


# Explicit meshes: J05.


def test_explicit_mesh_runs_on_shards_and_types_the_output():
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        x = placed(ROWS, where, "data", None, None)
        out = jax.jit(RowSum())(x)
        assert jax.typeof(out).sharding.spec == P("data", None)
        np.testing.assert_allclose(out, ROWS.sum(-1), rtol=1e-5, atol=1e-5)
        text = compiled_text(RowSum(), x)
        assert "all-gather" not in text
        assert "f32[2,3,12]" in text  # a shard


def test_explicit_mesh_gradients_and_remade_shardings():
    where = mesh(AxisType.Explicit)
    x, y = bridge_cases.normal(16), bridge_cases.normal(16, seed=1)

    class Parallel(Saxpy):
        parallel = ("n",)

    def loss(x, y):
        return (Parallel(2.0)(x, y) ** 2).sum()

    want = jax.grad(loss, (0, 1))(x, y)
    with jax.set_mesh(where):
        sharded, whole = placed(x, where, "data"), placed(y, where, None)
        got = jax.jit(jax.grad(loss, (0, 1)))(sharded, whole)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_explicit_mesh_refuses_a_dim_that_must_be_whole():
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        x = placed(bridge_cases.normal(16), where, "data")
        with pytest.raises(
            eqxcute.SpecError,
            match=r"dim 0 of `x` is sharded over the mesh axis 'data'.*whole.*reshard",
        ):
            jax.jit(Saxpy(2.0))(x, x)
        rows = placed(bridge_cases.normal(16, 16), where, None, "data")
        with pytest.raises(eqxcute.SpecError, match=r"dim 1 of `x`"):
            jax.jit(RowSum())(rows)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="jax 0.8 loses the mesh inside vmap")
def test_vmap_over_a_sharded_axis():
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        x = placed(ROWS, where, "data", None, None)
        out = jax.jit(jax.vmap(RowSum()))(x)
        assert jax.typeof(out).sharding.spec == P("data", None)
        np.testing.assert_allclose(out, ROWS.sum(-1), rtol=1e-5, atol=1e-5)


# Inside shard_map: J06.


def test_shard_map_tracks_varying_axes_and_sums_gradients():
    where = mesh(AxisType.Auto)
    x, b = bridge_cases.normal(16, 5), bridge_cases.normal(5, seed=1)

    class AddBias(eqxcute.Kernel):
        signature = "... n, n -> ... n"

        def reference(self, x, b):
            return jnp.tanh(x + b)

        def vjp(self, residuals, ct):
            dx = ct * (1 - residuals[1] ** 2)
            return dx, dx.sum(0)

        def launch(self, stream, x, b, out): ...

    def loss(f):
        return lambda x, b: (f(x, b) ** 2).sum()

    def sharded(x, b):
        return jax.shard_map(
            AddBias(), mesh=where, in_specs=(P("data", None), P(None)), out_specs=P("data", None)
        )(x, b)

    np.testing.assert_allclose(jax.jit(sharded)(x, b), jnp.tanh(x + b), rtol=1e-6)
    got = jax.jit(jax.grad(loss(sharded), (0, 1)))(x, b)
    want = jax.grad(loss(lambda x, b: jnp.tanh(x + b)), (0, 1))(x, b)
    for a, c in zip(got, want, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


# Automatic meshes: XLA's partitioner asks; a CPU function stands in for the compiled kernel.


@pytest.fixture
def target(monkeypatch):
    """Registers `compute(*arrays) -> arrays` as the target of every kernel; yields it and the shapes that it saw."""
    pytest.importorskip("jax_tvm_ffi")
    import jax_tvm_ffi
    import tvm_ffi

    def install(name, inputs, compute):
        shapes = []

        def handler(*tensors):
            arrays = [np.from_dlpack(t) for t in tensors]
            shapes.append(arrays[0].shape)
            for out, value in zip(arrays[inputs:], compute(*arrays[:inputs]), strict=False):
                pointer = ctypes.cast(out.ctypes.data, ctypes.POINTER(ctypes.c_float))
                np.ctypeslib.as_array(pointer, shape=out.shape)[...] = value

        tvm_ffi.register_global_func(f"tests.{name}", handler, override=True)
        function = tvm_ffi.get_global_func(f"tests.{name}")
        jax_tvm_ffi.register_ffi_target(
            f"tests.{name}", function, platform="cpu", pass_owned_tensor=True
        )
        monkeypatch.setattr(_registry, "target", lambda found, plan: f"tests.{name}")
        return shapes

    return install


def launched(kernel, *arguments):
    """The CUDA lowering of a partitioned module, on CPUs."""
    _, call = _primitive.flatten(kernel, arguments)
    return jax.jit(lambda *some: _primitive.launch_partitioned(call, *some))


def test_automatic_mesh_runs_the_kernel_on_shards(target):
    shapes = target("row_sum", 1, lambda x: [x.sum(-1)])
    where = mesh(AxisType.Auto)
    x = placed(ROWS, where, "data", None, None)
    function = launched(RowSum(), x)
    (out,) = function(x)
    np.testing.assert_allclose(out, ROWS.sum(-1), rtol=1e-5, atol=1e-5)
    assert out.sharding.spec[0] == "data"
    assert set(shapes) == {(6, 12)}  # 2 of 16, folded with 3
    assert "all-gather" not in function.lower(x).compile().as_text()


def test_automatic_mesh_gathers_a_dim_that_must_be_whole(target):
    shapes = target("row_sum_whole", 1, lambda x: [x.sum(-1)])
    where = mesh(AxisType.Auto)
    wide = bridge_cases.normal(2, 16)
    (out,) = launched(RowSum(), wide)(placed(wide, where, None, "data"))
    np.testing.assert_allclose(out, wide.sum(-1), rtol=1e-5, atol=1e-5)
    assert set(shapes) == {(2, 16)}


def test_automatic_mesh_adds_up_sums_over_shards(target):
    """A bias gradient is a sum over the rows of all devices; the rows need not be gathered for it."""

    def backward(y, dy):
        dx = np.where(y > 0, dy, 0)
        return dx, dx.sum(0)

    shapes = target("bias_backward", 2, backward)
    where = mesh(AxisType.Auto, (4, 2), ("data", "model"))
    y, dy = bridge_cases.normal(16, 6), bridge_cases.normal(16, 6, seed=1)
    function = launched(BiasReLUBackward("float32"), y, dy)
    spread = [placed(a, where, "data", "model") for a in (y, dy)]
    dx, dbias = function(*spread)
    want = jnp.where(y > 0, dy, 0)
    np.testing.assert_allclose(dx, want, rtol=1e-6)
    np.testing.assert_allclose(dbias, want.sum(0), rtol=1e-5, atol=1e-5)
    assert set(shapes) == {(4, 3)}
    assert "all-gather" not in function.lower(*spread).compile().as_text()
