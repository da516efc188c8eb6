"""Derivatives and batching of kernels: as of the reference, whether the kernel brings its own or not."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcute


class FromReference(eqxcute.Kernel):
    signature = "... n, n -> ... n"

    def reference(self, x, b):
        return jax.nn.relu(x + b)

    def launch(self, stream, x, b, out): ...


class OwnBoth(FromReference):
    """Keeps only its output."""

    def residuals(self, primals, outputs):
        return outputs

    def jvp(self, y, tangents):
        return jnp.where(y > 0, tangents[0] + tangents[1], 0)

    def vjp(self, y, cotangent):
        dx = jnp.where(y > 0, cotangent, 0)
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0)


class OwnReverse(FromReference):
    def vjp(self, residuals, cotangent):
        _, y = residuals
        dx = jnp.where(y > 0, cotangent, 0)
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0)


class OwnForward(FromReference):
    def jvp(self, residuals, tangents):
        _, y = residuals
        return jnp.where(y > 0, tangents[0] + tangents[1], 0)


def plain(x, b):
    return jax.nn.relu(x + b)


KEYS = jr.split(jr.key(0), 3)
X, W = jr.normal(KEYS[0], (4, 3, 5)), jr.normal(KEYS[1], (4, 3, 5))
B = jr.normal(KEYS[2], (5,))
BS = jnp.stack([B, 2 * B])


def loss(f):
    return lambda x, b: (f(x, b) ** 3 * W[: x.shape[0]]).sum()


def squares(f):
    return lambda x, b: (f(x, b) ** 2).sum()


TRANSFORMS = {
    "value": lambda f: f(X, B),
    "grad": lambda f: jax.grad(loss(f), (0, 1))(X, B),
    "jvp": lambda f: jax.jvp(f, (X, B), (W, B)),
    "hessian": lambda f: jax.hessian(lambda b: loss(f)(X, b))(B),
    "linearize": lambda f: jax.linearize(f, X, B)[1](W, B),
    "vjp of jvp": lambda f: jax.vjp(lambda x: jax.jvp(f, (x, B), (W, B))[1], X)[1](W),
    "jvp of grad": lambda f: jax.jvp(jax.grad(loss(f), (0, 1)), (X, B), (W, B)),
    "grad of grad": lambda f: jax.grad(lambda x: (jax.grad(loss(f))(x, B) ** 2).sum())(X),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1))(X, B),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1)))(X, B),
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None))(X, B),
    "vmap over the last axis": lambda f: jax.vmap(f, in_axes=(2, None), out_axes=1)(X, B[:3]),
    "vmap of vmap": lambda f: jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))(X, BS),
    "vmap of grad": lambda f: jax.vmap(jax.grad(squares(f), (0, 1)), in_axes=(0, None))(X, B),
    "vmap of grad over the bias": lambda f: jax.vmap(
        jax.grad(squares(f), (0, 1)), in_axes=(None, 0)
    )(X, BS),
    "vmap of vmap of grad": lambda f: jax.vmap(
        jax.vmap(jax.grad(squares(f), (0, 1)), in_axes=(0, None)), in_axes=(None, 0)
    )(X, BS),
    "grad of vmap over the bias": lambda f: jax.grad(
        lambda bs: (jax.vmap(f, (None, 0))(X, bs) ** 2).sum()
    )(BS),
    "grad of vmap, bias batched, by x": lambda f: jax.grad(
        lambda x: (jax.vmap(f, (None, 0))(x, BS) ** 2).sum()
    )(X),
    "vmap of jvp": lambda f: jax.vmap(lambda x, t: jax.jvp(lambda x: f(x, B), (x,), (t,))[1])(X, W),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(c, B), None), x, None, length=3)[0].sum()
    )(X),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x.sum() > 0, f, lambda x, b: x, x, B).sum())(
        X
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "kernel",
    [FromReference(), OwnBoth(), OwnReverse(), OwnForward()],
    ids=lambda k: type(k).__name__,
)
def test_as_plain_jax(kernel, name):
    transform = TRANSFORMS[name]
    got, want = transform(kernel), transform(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def equations(function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments))


def test_vmap_is_one_call():
    """J01: the batch becomes one of `...`, however deep; nothing loops."""
    for f in (
        jax.vmap(FromReference(), in_axes=(0, None)),
        jax.vmap(jax.vmap(FromReference(), in_axes=(0, None)), in_axes=(0, None)),
        jax.vmap(jax.grad(squares(OwnBoth())), in_axes=(0, None)),
    ):
        text = equations(f, X, B)
        assert text.count("eqxcute_kernel[") == 1
        assert "while" not in text
        assert "scan" not in text


def test_own_residuals_are_all_that_is_kept():
    """G08: `OwnBoth` keeps its output; neither `x` nor the pre-activation is held for the backward pass."""
    _, pull = jax.vjp(OwnBoth(), X, B)
    kept = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "size")]
    assert sum(leaf.size for leaf in kept) == X.size


class Mixed(eqxcute.Kernel):
    """Trees, integers and None among the arguments; a second output that is no float."""

    signature = "[n, n], n, n? -> n, n"

    def out_dtypes(self, pair, index, extra):
        return pair[0].dtype, index.dtype

    def reference(self, pair, index, extra):
        a, b = pair
        return a * b[index] + (0 if extra is None else extra), index + 1

    def launch(self, stream, pair, index, extra, out, more): ...


class MixedOwn(Mixed):
    def vjp(self, residuals, cotangents):
        ((a, b), index, extra), _ = residuals
        ct, none = cotangents
        assert none is None
        return (
            (ct * b[index], jnp.zeros_like(b).at[index].add(ct * a)),
            None,
            None if extra is None else ct,
        )


@pytest.mark.parametrize("kernel", [Mixed(), MixedOwn()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("with_extra", [False, True])
def test_trees_integers_and_none(kernel, with_extra):
    a, b, e = jr.normal(KEYS[0], (3, 4))
    index, e = jnp.array([3, 1, 1, 0]), e if with_extra else None

    def total(f):
        return lambda pair, e: (f(pair, index, e)[0] ** 2).sum()

    got = jax.grad(total(kernel), (0, 1) if with_extra else 0)((a, b), e)
    want = jax.grad(total(kernel.reference), (0, 1) if with_extra else 0)((a, b), e)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    tangent = jax.jvp(lambda p: kernel(p, index, e), ((a, b),), ((b, a),))
    again = jax.jvp(lambda p: kernel.reference(p, index, e), ((a, b),), ((b, a),))
    np.testing.assert_allclose(tangent[1][0], again[1][0], rtol=1e-5)
    assert tangent[1][1].dtype == jax.dtypes.float0


class Asked:
    def __init__(self):
        self.found = []


class OnlyNeeded(Mixed):
    asked: Asked = eqxcute.static()

    def vjp(self, residuals, cotangents, *, needed):
        ((a, b), index, _), _ = residuals
        ct, _ = cotangents
        (of_a, of_b), of_index, of_extra = needed
        assert of_index is None
        self.asked.found.append((of_a, of_b, of_extra))
        full = ct * b[index], jnp.zeros_like(b).at[index].add(ct * a)
        return tuple(x if n else None for x, n in zip(full, (of_a, of_b), strict=True)), None, None


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_a_kernel_may_ask_which_cotangents_are_needed(wanted):
    a, b, e = jr.normal(KEYS[0], (3, 4))
    index = jnp.array([3, 1, 1, 0])
    asked = Asked()
    kernel = OnlyNeeded(asked)
    argnums = tuple(i for i, w in enumerate(wanted) if w)

    def total(f):
        return lambda a, b: (f((a, b), index, e)[0] ** 2).sum()

    got = jax.grad(total(kernel), argnums)(a, b)
    want = jax.grad(total(kernel.reference), argnums)(a, b)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    assert asked.found[-1] == (*wanted, False)


class TreeOut(eqxcute.Kernel):
    """A tree out, with None and an integer in it; and the same with its own derivatives."""

    signature = "n, n -> n, n, n"

    def out_dtypes(self, x, y):
        return x.dtype, jnp.int32, x.dtype

    def out_tree(self, x, y):
        return {"a": (0, None), "b": 1, "c": 2}

    def reference(self, x, y):
        return {"a": (x * y, None), "b": (x > 0).astype(jnp.int32), "c": x + y}

    def launch(self, stream, x, y, out): ...


class TreeOutOwn(TreeOut):
    def jvp(self, residuals, tangents):
        (x, y), outputs = residuals
        assert outputs["a"][1] is None
        return {
            "a": (tangents[0] * y + x * tangents[1], None),
            "b": None,
            "c": tangents[0] + tangents[1],
        }

    def vjp(self, residuals, cotangents):
        (x, y), _ = residuals
        a, c = cotangents["a"][0], cotangents["c"]
        assert cotangents["b"] is None
        return a * y + c, a * x + c


@pytest.mark.parametrize("kernel", [TreeOut(), TreeOutOwn()], ids=lambda k: type(k).__name__)
def test_trees_out(kernel):
    x, y = jr.normal(KEYS[0], (2, 4))
    got, want = kernel(x, y), kernel.reference(x, y)
    assert jax.tree.structure(got) == jax.tree.structure(want)

    def loss(f):
        return lambda x, y: (f(x, y)["a"][0] ** 2 + jnp.sin(f(x, y)["c"])).sum()

    for transform in (
        lambda f: jax.grad(loss(f), (0, 1))(x, y),
        lambda f: jax.jvp(lambda x: f(x, y)["a"][0], (x,), (y,)),
        lambda f: jax.vmap(f)(jnp.stack([x, y]), jnp.stack([y, x])),
        lambda f: jax.jit(jax.hessian(loss(f)))(x, y),
    ):
        for a, b in zip(
            jax.tree.leaves(transform(kernel)),
            jax.tree.leaves(transform(kernel.reference)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class WrongTreeOut(TreeOut):
    def reference(self, x, y):
        return x, y


class TooFew(TreeOut):
    def out_tree(self, x, y):
        return {"a": 0, "b": 1}


def test_a_tree_out_of_another_structure_is_named():
    x = jnp.ones(3)
    with pytest.raises(
        eqxcute.SpecError, match=r"`WrongTreeOut.reference` returned something of another structure"
    ):
        WrongTreeOut()(x, x)
    with pytest.raises(
        eqxcute.SpecError, match=r"`TooFew.out_tree` returned .*2 leaves.*3 outputs"
    ):
        TooFew()(x, x)


class NoDerivative(eqxcute.Kernel):
    signature = "n -> n"

    def launch(self, stream, x, out): ...


class ReverseOnly(NoDerivative):
    def residuals(self, primals, outputs):
        return ()

    def vjp(self, residuals, cotangent):
        return (cotangent,)


class NoForward(FromReference):
    def residuals(self, primals, outputs):
        return outputs

    def vjp(self, y, cotangent):
        dx = jnp.where(y > 0, cotangent, 0)
        return dx, dx.sum(0)


class WithField(FromReference):
    extra: jax.Array = None

    def vjp(self, residuals, cotangent):
        return cotangent, cotangent.sum(0)


class WrongShape(FromReference):
    def vjp(self, residuals, cotangent):
        return cotangent, cotangent


class WrongCount(FromReference):
    def vjp(self, residuals, cotangent):
        return cotangent


class WrongTree(MixedOwn):
    def vjp(self, residuals, cotangents):
        return cotangents[0], None, None


def test_what_cannot_be_differentiated_says_so():
    x, x2 = X[0, 0], X[0]
    with pytest.raises(NotImplementedError, match="`NoDerivative` cannot be differentiated"):
        jax.grad(lambda x: NoDerivative()(x).sum())(x)
    with pytest.raises(NotImplementedError, match="gives reverse mode only"):
        jax.jit(lambda x: jax.jvp(ReverseOnly(), (x,), (x,))[1]).lower(x)
    with pytest.raises(
        NotImplementedError, match=r"`self.extra` is a field that is being differentiated"
    ):
        jax.grad(lambda e: WithField(e)(x2, B).sum())(B)
    with pytest.raises(
        eqxcute.SpecError, match=r"`WrongShape.vjp` returned float32\(3, 5\) for argument \[1\]"
    ):
        jax.grad(lambda b: WrongShape()(x2, b).sum())(B)
    with pytest.raises(eqxcute.SpecError, match="must return a tuple of 2 cotangents"):
        jax.grad(lambda b: WrongCount()(x2, b).sum())(B)
    with pytest.raises(eqxcute.SpecError, match="another structure"):
        jax.grad(lambda p: WrongTree()(p, jnp.arange(4), None)[0].sum())((jnp.ones(4), jnp.ones(4)))


class Batched(eqxcute.Kernel):
    """Brings its own rule for an axis of the shared argument."""

    signature = "... n, n -> ... n"

    def reference(self, x, b):
        return x + b

    def launch(self, stream, x, b, out): ...

    def batch(self, axis_size, batched, x, b):
        if batched != (True, True):
            return NotImplemented
        return self(x + b[:, None], jnp.zeros_like(b[0]))


def test_a_kernel_may_bring_its_own_batching():
    xs, bs = X, jr.normal(KEYS[2], (4, 5))
    np.testing.assert_allclose(jax.vmap(Batched())(xs, bs), xs + bs[:, None], rtol=1e-6)
    text = equations(jax.vmap(Batched()), xs, bs)
    assert text.count("eqxcute_kernel[") == 1
    assert "maps=()" in text
    np.testing.assert_allclose(
        jax.vmap(Batched(), (None, 0))(xs[0], bs), xs[0] + bs[:, None], rtol=1e-6
    )
