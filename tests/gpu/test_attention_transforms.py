"""The attention kernels under JAX's transformations: `vmap`, forward mode, `jax.checkpoint`; how often they are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    Problem,
    agree,
    attend,
    close,
    is_float,
    launches,
    normal,
    qkv,
)
from eqxcute.layers import FlexAttention, flex_attention
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    SlidingWindowMask,
    SoftCap,
)

pytestmark = pytest.mark.on_cpu
small = pytest.mark.small

NAMES = ("flex_attention_out", "flex_attention_lse")


def example(c):
    """Of one example, without its batch dim."""
    bias = AdditiveBias(c["bias"]).then(AdditiveBias(c["shared"]))
    return CausalMask(c["offset"]) & DocumentMask(c["ids"]), bias


def examples(length=130, count=3):
    arrays = qkv(count, length, length, 2, 1, 16)
    arrays |= {"bias": normal(1, count, 2, length, length), "shared": normal(2, 1, length)}
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (count, length)))
    return arrays | {"ids": jnp.asarray(ids), "offset": jnp.int32(2)}


IN_AXES = {"q": 0, "k": 0, "v": 0, "bias": 0, "shared": None, "ids": 0, "offset": None}


def loss(arrays):
    out, lse = attend(Problem(example, arrays), arrays, "cute", deterministic=True)
    seen = jnp.where(lse > -jnp.inf, lse, 0)
    return (out**2).sum() + jnp.sin(seen).sum()


def value_and_grad(arrays):
    fixed = {n: x for n, x in arrays.items() if not is_float(x)}
    moving = {n: x for n, x in arrays.items() if is_float(x)}
    return jax.value_and_grad(lambda moving: loss(moving | fixed))(moving)


@pytest.mark.parametrize("length", [pytest.param(20, marks=small), 130])
def test_vmap_of_grad(length):
    """J01: as a Python loop over the examples, in one launch; captured arrays that are mapped, and shared ones."""
    arrays = examples(length)
    mapped = jax.vmap(value_and_grad, (IN_AXES,))
    values, grads = jax.jit(mapped)(arrays)
    one = jax.jit(value_and_grad)
    for i in range(3):
        each = {n: x if IN_AXES[n] is None else x[i] for n, x in arrays.items()}
        value, grad = one(each)
        close(values[i], value)
        for n, g in grad.items():
            close(grads[n][i], g, n)
    counted = launches(mapped, arrays)
    assert (counted["forward_kernel"], counted["backward_kernel"]) == (1, 1)


@pytest.mark.parametrize("length", [pytest.param(20, marks=small), 130])
def test_grad_of_vmap(length):
    """J01: what is shared gets the sum over the examples."""
    arrays = examples(length)
    fixed = {n: arrays[n] for n in ("ids", "offset")}

    def total(moving):
        return jax.vmap(loss, (IN_AXES,))(moving | fixed).sum()

    moving = {n: x for n, x in arrays.items() if n not in fixed}
    got = jax.jit(jax.grad(total))(moving)
    _, each = jax.jit(jax.vmap(value_and_grad, (IN_AXES,)))(arrays)
    for n, g in got.items():
        want = each[n] if IN_AXES[n] == 0 else each[n].sum(0)
        close(g, want, n)
    counted = launches(jax.grad(total), moving)
    assert (counted["forward_kernel"], counted["backward_kernel"]) == (1, 1)


@small
def test_nested_vmap_and_shared_arguments():
    """J01: one launch each."""
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(6, 20, 20, 2, 2, 16).values())
    layer = FlexAttention(CausalMask(), SoftCap(5.0), implementation="cute")
    want = jax.jit(layer)(q, k, v)
    shared = jax.vmap(layer, (0, None, None))
    for fn in (jax.vmap(layer), jax.vmap(jax.vmap(layer)), jax.vmap(layer, in_axes=1, out_axes=1)):
        close(jax.jit(fn)(q, k, v), want)
        assert launches(fn, q, k, v)["forward_kernel"] == 1
    got = jax.jit(shared)(q, k[0], v[0])
    for i in range(2):
        close(got[i], layer(q[i], k[0], v[0]))
    assert launches(shared, q, k[0], v[0])["forward_kernel"] == 1


@small
def test_the_batch_index_under_vmap():
    """`b` counts the leading dims that an example has itself."""
    q = jnp.zeros((2, 3, 4, 1, 8))
    v = jnp.broadcast_to(jnp.arange(4.0)[:, None, None], q.shape)

    def own(q, v):
        mask = lambda b, h, q_idx, kv_idx: kv_idx == b % 4  # noqa: E731
        return flex_attention(q, q, v, mask, implementation="cute")[..., 0, 0, 0]

    np.testing.assert_array_equal(jax.jit(own)(q, v), [[0, 1, 2], [3, 0, 1]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(own))(q, v), [[0, 1, 2], [0, 1, 2]])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(own)))(q, v), np.zeros((2, 3)))


# ---------------------------------------------------------------- other derivatives


def smooth(c):
    def score(s, b, h, q_idx, kv_idx):
        return 3 * jnp.tanh(s / 3) + c["bias"][q_idx, kv_idx]

    return SlidingWindowMask(5), score


def of_length(length):
    return Problem(smooth, qkv(1, length, length, 1, 1, 8) | {"bias": normal(1, length, length)})


def wide(tree):
    cpu = jax.devices("cpu")[0]
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x, np.float64), cpu), tree)


def as_exact(function, *arguments):
    """`function(implementation)` with the kernels against float64, as exact as plain JAX."""
    got = jax.jit(function("cute"))(*arguments)
    peer = jax.jit(function("xla"))(*arguments)
    with jax.enable_x64(True):
        oracle = jax.jit(function("xla"))(*wide(arguments))
    got, peer, oracle = (dict(enumerate(jax.tree.leaves(x))) for x in (got, peer, oracle))
    agree(got, oracle, peer)


@pytest.mark.parametrize("length", [pytest.param(8, marks=small), 130])
def test_forward_mode(length):
    """J04: jvp, and linearize."""
    problem = of_length(length)
    moves = {n: jnp.cos(x) for n, x in problem.arrays.items()}

    def jvp(how):
        return lambda x, t: jax.jvp(lambda x: attend(problem, x, how), (x,), (t,))

    def linearized(how):
        return lambda x, t: jax.linearize(lambda x: attend(problem, x, how), x)[1](t)

    as_exact(jvp, problem.arrays, moves)
    as_exact(linearized, problem.arrays, moves)


@small
def test_second_derivatives():
    """J04: a Hessian, and forward over reverse."""
    problem = of_length(8)

    def hessian(how):
        def of(arrays):
            fn = lambda q: (attend(problem, arrays | {"q": q}, how)[0] ** 2).sum()  # noqa: E731
            return jax.hessian(fn)(arrays["q"])

        return of

    def product(how):
        def of(arrays, moves):
            fn = lambda x: (attend(problem, x, how)[0] ** 2).sum()  # noqa: E731
            return jax.jvp(jax.grad(fn), (arrays,), (moves,))[1]

        return of

    as_exact(hessian, problem.arrays)
    as_exact(product, problem.arrays, {n: jnp.cos(x) for n, x in problem.arrays.items()})


# ---------------------------------------------------------------- what reverse mode keeps


@small
def test_remat_runs_the_kernel_once_where_its_results_are_kept():
    problem = Problem(lambda c: (CausalMask(), None), qkv(1, 20, 20, 2, 1, 16))
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)

    def grads(wrap):
        def block(arrays):
            x = {n: jnp.sin(a) for n, a in arrays.items()}
            return attend(problem, x, "cute", deterministic=True)[0]

        fn = wrap(block)
        return jax.grad(lambda arrays: (fn(arrays) ** 2).sum())

    plain = grads(lambda f: f)
    kept = grads(lambda f: jax.checkpoint(f, policy=policy))
    again = grads(jax.checkpoint)
    want = jax.jit(plain)(problem.arrays)
    for fn, forwards in ((plain, 1), (kept, 1), (again, 2)):
        got = jax.jit(fn)(problem.arrays)
        for n in "qkv":
            close(got[n], want[n], n)
        counted = launches(fn, problem.arrays)
        assert (counted["forward_kernel"], counted["backward_kernel"]) == (forwards, 1)


def kept_by(fn, *specs):
    """Shapes that reverse mode keeps from the forward pass."""
    pull = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *specs)
    return sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(pull) if x.size > 16)


def test_residuals_are_inputs_output_and_lse():
    """And what tells each CTA where it is: the numbers of the batch entries and heads, the lists of tiles."""
    length, group = 4096, (2, 2)
    q = jax.ShapeDtypeStruct((3, length, 4, 64), jnp.bfloat16)
    k = v = jax.ShapeDtypeStruct((3, length, 2, 64), jnp.bfloat16)
    keeps = kept_by(lambda *a: flex_attention(*a, CausalMask(), implementation="cute"), q, k, v)
    grouped = ((3, length, *group, 64), "bfloat16")
    want = [grouped, grouped, (k.shape, "bfloat16"), (v.shape, "bfloat16")]
    want.append(((3, *group, length), "float32"))
    large = [x for x in keeps if np.prod(x[0]) > 4 * 32**2]
    assert large == sorted(want)


def test_layers_of_a_scan():
    """As models run them: remat in a scan, gradients of a stack of weights."""
    x = normal(0, 2, 130, 64).astype("bfloat16")
    weights = normal(1, 3, 3, 64, 64) / 8

    def layer(x, w):
        q, k, v = (jnp.dot(x, m.astype(x.dtype)).reshape(*x.shape[:2], 2, 32) for m in w)
        return x + flex_attention(q, k, v, CausalMask(), implementation=how).reshape(x.shape), None

    def loss(weights):
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype("float32") ** 2).mean()

    results = {}
    for how in ("cute", "xla"):
        results[how] = jax.jit(jax.value_and_grad(loss))(weights)
    (value, grad), (plain_value, plain_grad) = results["cute"], results["xla"]
    np.testing.assert_allclose(value, plain_value, rtol=2.0**-8)
    off = np.linalg.norm(grad - plain_grad) / np.linalg.norm(plain_grad)
    assert off <= 2.0**-7  # each of the two is rounded to bfloat16, 8 bits
