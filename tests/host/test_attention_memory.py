"""Attention's memory grows with the length, not with its square: forward and backward."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqxcute.layers.attention import (
    AdditiveBias,
    ALiBi,
    CausalMask,
    DocumentMask,
    FlexAttention,
    SlidingWindowMask,
    _config,
    flex_attention,
)

DIM = 16


def layer(length):
    """A mask and a score that hold arrays of the length, and none of its square."""
    ids = jnp.zeros(length, jnp.int32)
    return FlexAttention(CausalMask() & DocumentMask(ids), ALiBi(slopes=jnp.ones(1)))


def programs(length):
    """Forward; reverse mode of everything; forward and reverse over reverse."""
    spec = jax.ShapeDtypeStruct((length, 1, DIM), jnp.float32)
    fn = layer(length)

    def loss(q, k, v, slopes):
        mine = eqx.tree_at(lambda x: x.score_fn.slopes, fn, slopes)
        return (mine(q, k, v) ** 2).sum()

    def product(*args):
        return jax.jvp(jax.grad(loss, (0, 1, 2, 3)), args, args)[1]

    def squares(*args):
        return sum((g**2).sum() for g in jax.grad(loss, (0, 1, 2, 3))(*args))

    specs = (spec,) * 3
    slopes = jax.ShapeDtypeStruct((1,), jnp.float32)
    return {
        "forward": (lambda *args: fn(*args), specs),
        "reverse": (jax.grad(loss, (0, 1, 2, 3)), (*specs, slopes)),
        "forward over reverse": (product, (*specs, slopes)),
        "reverse over reverse": (jax.grad(squares, (0, 1, 2, 3)), (*specs, slopes)),
    }


def largest(jaxpr):
    """Entries of the largest array that a jaxpr makes, at any depth."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [getattr(v.aval, "size", 0) for v in eqn.outvars]
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                sizes.append(largest(inner))
    return max(sizes)


@pytest.mark.parametrize(
    "name", ["forward", "reverse", "forward over reverse", "reverse over reverse"]
)
def test_no_array_of_the_length_squared(name):
    """In the program as traced: nothing is larger than a tile, or than a few times the inputs.
    The limit of a tile does not depend on the length."""
    for length in (2048, 8192, 32768):
        fn, specs = programs(length)[name]
        size = largest(jax.make_jaxpr(fn)(*specs).jaxpr)
        assert size <= max(_config.CPU.scores, 4 * length * DIM), length
        assert size < length**2


@pytest.mark.parametrize("name", ["forward", "reverse", "reverse over reverse"])
def test_temporary_memory_as_compiled(name):
    """What XLA allocates besides arguments and results, at 8192: a dense score array is 268 MB,
    a dense mask 67 MB."""
    fn, specs = programs(8192)[name]
    memory = jax.jit(fn).lower(*specs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8192**2 / 2
    fn, specs = programs(32768)[name]
    longer = jax.jit(fn).lower(*specs).compile().memory_analysis()
    # Four times the length: four times the arrays of the length, and tiles as before.
    assert longer.temp_size_in_bytes <= 4 * memory.temp_size_in_bytes


def kept(fn, *specs):
    """Shapes that reverse mode keeps from the forward pass, but for the smallest: JAX 0.8 keeps
    the numbers of the tiles too."""
    pull = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *specs)
    return sorted(x.shape for x in jax.tree.leaves(pull) if x.size > 16)


@pytest.mark.parametrize("length", [64, 4096])
def test_what_reverse_mode_keeps(length):
    """q, k, v, the output and the LSE, and what the functions capture; in one tile as in many."""
    q = jax.ShapeDtypeStruct((length, 4, DIM), jnp.bfloat16)
    k = v = jax.ShapeDtypeStruct((length, 2, DIM), jnp.bfloat16)
    ids = jnp.zeros(length, jnp.int32)
    mask = CausalMask() & DocumentMask(ids) & SlidingWindowMask(16)

    def fn(q, k, v, slopes):
        return flex_attention(q, k, v, mask, ALiBi(slopes=slopes))

    shapes = kept(fn, q, k, v, jax.ShapeDtypeStruct((4,), jnp.float32))
    grouped = (1, 2, 2, length, DIM)
    want = [(1, 2, length, DIM)] * 2 + [grouped] * 2 + [(1, 2, 2, length), (length,)]
    assert shapes == sorted(want)


def test_a_bias_gradient_is_as_large_as_the_bias():
    """The one array of the length squared is the user's own, and is not copied per head."""
    length = 2048
    spec = jax.ShapeDtypeStruct((length, 8, DIM), jnp.float32)
    bias = jax.ShapeDtypeStruct((length, length), jnp.float32)

    def loss(q, bias):
        return flex_attention(q, q, q, None, AdditiveBias(bias)).sum()

    size = largest(jax.make_jaxpr(jax.grad(loss, (0, 1)))(spec, bias).jaxpr)
    assert size <= 4 * _config.CPU.scores  # the four indices of each entry of a tile
