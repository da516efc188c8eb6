"""The bridge on a GPU: every feature gives what the reference gives, also under JAX's transformations."""

import bridge_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_kernels import Accumulate, Copy, LookUp, Reverse, RowSum, Saxpy, State, Table

from eqxcute.testing import check_kernel, compile_count


@pytest.mark.parametrize(("kernel", "arguments"), bridge_cases.cases())
def test_kernel_gives_what_its_reference_gives(kernel, arguments):
    actual = jax.jit(lambda *some: kernel(*some))(*arguments)
    want = kernel.reference(*arguments)
    for got, ref in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        assert got.dtype == ref.dtype
        # float32 sums of a few terms, in another order
        tolerance = 2e-2 if got.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(got).astype(np.float64),
            np.asarray(ref).astype(np.float64),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_64_bit_dtypes(dtype):
    with jax.enable_x64(True):
        x = (jnp.arange(300) * 2**33).astype(dtype)
        np.testing.assert_array_equal(jax.jit(Copy())(x), x)


def test_gradients_and_vmap():
    x, y = bridge_cases.normal(77), bridge_cases.normal(77, seed=1)
    check_kernel(Saxpy(2.0), x, y)
    check_kernel(RowSum(), bridge_cases.normal(5, 3, 12))
    rows = bridge_cases.normal(5, 3, 12)
    np.testing.assert_allclose(
        jax.vmap(jax.vmap(RowSum()))(rows), rows.sum(-1), rtol=1e-5, atol=1e-5
    )
    grown = jax.vmap(jax.grad(lambda row: RowSum()(row)))(rows[0])
    np.testing.assert_array_equal(grown, jnp.ones((3, 12)))


def test_vmap_over_what_cannot_grow_launches_once_an_example():
    x = bridge_cases.normal(4, 77)
    with pytest.warns(UserWarning, match="launched 4 times"):
        reversed_rows = jax.jit(jax.vmap(Reverse()))(x)
    np.testing.assert_array_equal(reversed_rows, x[:, ::-1])


def test_donated_buffer_does_not_change_a_value_that_is_still_used():
    x, y = bridge_cases.normal(77), bridge_cases.normal(77, seed=1)

    @jax.jit
    def both(x, y):
        total = Accumulate()(State(x, None), y)
        return total, 2 * x

    total, double = both(x, y)
    np.testing.assert_allclose(total, x + y, rtol=1e-6)
    np.testing.assert_array_equal(double, 2 * x)


def test_slices_of_bigger_arrays():
    """Alignment: XLA may pass a pointer into the middle of a buffer."""
    x = bridge_cases.normal(1000)
    kernel = Saxpy(2.0)
    for start in (1, 3, 4, 33, 128):
        got = jax.jit(lambda x, s=start: kernel(x[s : s + 64], x[s + 1 : s + 65]))(x)
        np.testing.assert_allclose(
            got, 2 * x[start : start + 64] + x[start + 1 : start + 65], rtol=1e-6
        )

    def dynamic(x, i):
        return kernel(jax.lax.dynamic_slice(x, (i,), (64,)), x[:64])

    for i in (0, 1, 7, 100):
        np.testing.assert_allclose(jax.jit(dynamic)(x, i), 2 * x[i : i + 64] + x[:64], rtol=1e-6)
    rows = x.reshape(20, 50)

    def scanned(rows):  # XLA slices `rows` by pointer
        return jax.lax.scan(lambda c, row: (c, kernel(row, row)), 0.0, rows)[1]

    np.testing.assert_allclose(jax.jit(scanned)(rows), 3 * rows, rtol=1e-6)


def test_results_written_into_bigger_arrays():
    """Alignment again: XLA may have the kernel write into the middle of a buffer."""
    x, y, kernel = bridge_cases.normal(1024), bridge_cases.normal(1024, seed=1), Saxpy(2.0)
    for start in (3, 4, 32, 64):
        got = jax.jit(lambda b, x, y, s=start: b.at[s : s + 1024].set(kernel(x, y)))(
            jnp.zeros(4096), x, y
        )
        np.testing.assert_allclose(got[start : start + 1024], 2 * x + y, rtol=1e-5, atol=1e-6)

    def loop(b, x, y):
        def step(i, b):
            read = jax.lax.dynamic_slice(b, (i * 1024 + 3,), (1024,))
            return jax.lax.dynamic_update_slice(b, kernel(x, y) + 0 * read, (i * 1024 + 5,))

        return jax.lax.fori_loop(0, 3, step, b)

    got = jax.jit(loop)(jnp.zeros(4096), x, y)
    for i in range(3):
        rows = slice(i * 1024 + 5, i * 1024 + 1029)
        np.testing.assert_allclose(got[rows], 2 * x + y, rtol=1e-5, atol=1e-6)


def test_a_donated_buffer_is_the_result_s():
    x, y = bridge_cases.normal(1024), bridge_cases.normal(1024, seed=1)
    step = jax.jit(lambda m, g: Accumulate()(State(m, None), g), donate_argnums=0)
    assert " copy(" not in step.lower(x, y).compile().as_text()
    before = (x + 0).block_until_ready()
    where = before.unsafe_buffer_pointer()
    assert step(before, y).unsafe_buffer_pointer() == where


def test_one_kernel_serves_all_sizes_and_attribute_values():
    x = bridge_cases.normal(300)
    jax.block_until_ready(jax.jit(Saxpy(5.0))(x, x))
    before = compile_count()
    for n in (1, 2, 31, 64, 65, 300):
        np.testing.assert_allclose(
            jax.jit(Saxpy(5.0, float(n)))(x[:n], x[:n]), (5 + n) * x[:n], rtol=1e-5
        )
    assert compile_count() == before


def test_inside_control_flow_and_many_calls():
    x = bridge_cases.normal(77)
    kernel = Saxpy(1.0)

    @jax.jit
    def loop(x):
        x = jax.lax.fori_loop(0, 50, lambda _, y: kernel(y, x) * 0.5, x)
        return jax.lax.cond(x[0] > 1e9, lambda x: x, lambda x: kernel(x, x), x)

    np.testing.assert_allclose(loop(x), 2 * x, rtol=1e-5)
    table = Table(bridge_cases.normal(7), 2.0)
    found = jax.jit(lambda t, i: LookUp(t)(i))(table, jnp.arange(-2, 9))
    want = np.zeros(11, np.float32)
    want[2:9] = 2 * np.asarray(table.values)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_host_memory_stays_flat_over_many_calls_with_an_attribute():
    import resource

    x = bridge_cases.normal(77)
    step = jax.jit(lambda y: jax.lax.fori_loop(0, 10_000, lambda _, z: Saxpy(0.5, 0.5)(z, z), y))
    jax.block_until_ready(step(x))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        jax.block_until_ready(step(x))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 4096, f"{grown} KiB more after 50,000 calls"
