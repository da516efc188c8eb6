"""Attention through its kernels' primitive, without a GPU: with an architecture named, `flex_attention` binds the kernels,
which on a CPU run as their references. So all but the device code is what runs on a GPU."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers import FlexAttention, flex_attention, tile_map
from eqxcute.layers.attention import (
    AdditiveBias,
    CausalMask,
    DocumentMask,
    RelativeBias,
    SoftCap,
    _attend,
    _compiled,
    _entry,
    _reference,
    _tiles,
)
from eqxcute.layers.attention._config import EMPTY, FULL
from eqxcute.layers.attention._functions import Block, mask_block, trace_mask, trace_score
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqxcute
from eqxcute import _fallback, _registry
from eqxcute._primitive import view_of
from eqxcute._sharding import split
from eqxcute.inline import evaluate

FORWARD, BACKWARD = "ForwardKernel", "BackwardKernel"


def some_slow(names, *quick):
    """Parameters, all but the quick ones marked: for what hardly depends on versions."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in names]


@pytest.fixture(autouse=True)
def on_kernels():
    with eqxcute.architecture("sm_80"):
        yield


def normal(*shape, dtype="float32"):
    values = np.random.default_rng(sum(shape) + len(shape)).normal(size=shape)
    return jnp.asarray(values, dtype)


def three(q_shape, kv_heads=None, v_dim=None, kv_len=None, dtype="float32"):
    *lead, length, heads, dim = q_shape
    k_shape = (*lead, kv_len or length, kv_heads or heads)
    q, k = normal(*q_shape, dtype=dtype), normal(*k_shape, dim, dtype=dtype) * 0.7
    return q, k, normal(*k_shape, v_dim or dim, dtype=dtype) + jnp.asarray(0.1, dtype)


def kernels(function, *arguments):
    """The kernel of each call in the jaxpr, at any depth, and how many outputs it has."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "eqxcute_kernel":
                call = eqn.params["call"]
                assert not call.maps  # one launch
                kernel, _ = call.restore([None] * len(eqn.invars))
                found.append((type(kernel).__name__, kernel, len(eqn.outvars)))
            for inner in inside(eqn):
                walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def inside(eqn):
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    found = (getattr(leaf, "jaxpr", leaf) for leaf in leaves)
    return [inner for inner in found if hasattr(inner, "eqns")]


def calls(function, *arguments):
    """How often the forward and the backward kernel are called."""
    names = [name for name, *_ in kernels(function, *arguments)]
    return names.count(FORWARD), names.count(BACKWARD)


def run(function, *arguments):
    """Compiled, in half the time that `jit` takes."""
    lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


def close(got, want, rtol=2e-5, atol=2e-5):
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(
            np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=rtol, atol=atol
        ),
        got,
        want,
    )


def attend(how, mask=None, score=None, sink=None):
    def run(q, k, v, *captured):
        given = {} if sink is None else {"sink": sink}
        functions = [f(*captured) if f is not None else None for f in (mask, score)]
        return flex_attention(q, k, v, *functions, **given, return_lse=True, implementation=how)

    return run


def loss(function):
    """Of output and LSE, with a cotangent of its own for every entry."""

    def total(*arguments):
        return with_outputs(function)(*arguments)[0]

    return total


def with_outputs(function):
    def total(*arguments):
        outputs = function(*arguments)
        weights = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in outputs]
        finite = [jnp.where(x == -jnp.inf, 0, x) for x in outputs]
        return sum(jnp.sum(x * w) for x, w in zip(finite, weights, strict=True)), outputs

    return total


def full(function, numbers):
    """Outputs, and gradients of the arguments with these numbers."""

    def both(*arguments):
        (_, outputs), grads = jax.value_and_grad(with_outputs(function), numbers, has_aux=True)(
            *arguments
        )
        return outputs, grads

    return both


def compare(transform, arguments, rtol=2e-5, atol=2e-5, **functions):
    """A transformed call by kernels and in plain JAX. Returns what it gives."""
    got, want = (run(transform(attend(how, **functions)), *arguments) for how in ("cute", "xla"))
    close(got, want, rtol, atol)
    return got


# Values and gradients.


def biased(bias, *_):
    return lambda s, b, h, i, j: s + bias[h, i, j] * jnp.tanh(s)


def windowed(*_):
    return lambda b, h, i, j: (i >= j) & (i - j < 4 + b + h) & (i != 3)  # row 3 sees nothing


CASES = {
    "plain": (three((2, 9, 4, 8)), {}),
    "grouped heads, lengths and dims that differ, padded": (
        three((2, 9, 6, 5), kv_heads=2, v_dim=11, kv_len=12),
        {"mask": windowed},
    ),
    "score": (three((9, 2, 8)), {"score": lambda *_: SoftCap(2.0)}),
    "captured": (
        (*three((2, 9, 4, 8), kv_heads=2), normal(4, 9, 9)),
        {"mask": windowed, "score": biased},
    ),
    "sink": (three((9, 2, 8)), {"mask": windowed, "sink": jnp.asarray([0.5, -1.0])}),
    "one query": (three((1, 2, 8), kv_len=7), {"mask": lambda *_: CausalMask(offset=3)}),
}


@pytest.mark.parametrize(
    "name", some_slow(CASES, "grouped heads, lengths and dims that differ, padded", "captured")
)
def test_values_and_gradients(name):
    """Against plain JAX, with cotangents of the LSE."""
    arguments, functions = CASES[name]
    numbers = tuple(range(len(arguments)))
    compare(lambda f: full(f, numbers), arguments, **functions)
    mine = attend("cute", **functions)
    assert calls(mine, *arguments) == (1, 0)
    assert calls(jax.grad(loss(mine), numbers), *arguments) == (1, 1)


@pytest.mark.parametrize("dtype", some_slow(["float16", "bfloat16"], "bfloat16"))
def test_narrow_dtypes(dtype):
    """Gradients of captured arrays are summed in float32 and come in the array's dtype (S09)."""
    q, k, v = three((2, 40, 4, 8), kv_heads=2, dtype=dtype)
    table = normal(40, dtype=dtype)

    def score(table):
        return lambda s, b, h, i, j: s + table[j]

    def grads(how, *arguments):
        return run(
            jax.grad(loss(attend(how, lambda _: CausalMask(), score)), (0, 1, 2, 3)), *arguments
        )

    got = grads("cute", q, k, v, table)
    assert [g.dtype for g in got] == [dtype] * 4
    wide = grads("xla", *(x.astype(jnp.float32) for x in (q, k, v, table)))
    eps = float(jnp.finfo(dtype).eps)
    for g, w in zip(got, wide, strict=True):
        close(g, w, rtol=4 * eps, atol=4 * eps * float(jnp.abs(w).max()))


def test_what_needs_no_gradient():
    """S11: unused floats get zeros, integers nothing; an array that cannot matter has no output of the kernel's."""
    q, k, v = three((6, 2, 8))
    ids, unused, used = jnp.arange(6) // 3, normal(3), normal(6)

    def total(unused, used, where):
        def score(s, b, h, i, j):
            return s + used[j] + jnp.sign(where[i]) + 0 * ids[i]

        return flex_attention(q, k, v, DocumentMask(ids), score).sum()

    grad = jax.grad(total, (0, 1, 2))
    got = run(grad, unused, used, used)
    close((got[0], got[2]), (jnp.zeros(3), jnp.zeros(6)))
    assert jnp.abs(got[1]).max() > 0.1
    (outputs,) = [n for name, _, n in kernels(grad, unused, used, used) if name == BACKWARD]
    assert outputs == 4  # dq, dk, dv and that of `used`


def test_modules_train():
    """Fields of a score module, and the sink, by `eqx.filter_grad`."""
    q, k, v = three((2, 8, 4, 8))

    def grads(how):
        layer = FlexAttention(
            CausalMask(), RelativeBias(normal(4, 7)), sink=normal(4), implementation=how
        )
        parameters, rest = eqx.partition(layer, eqx.is_inexact_array)

        def total(parameters):
            return (eqx.combine(parameters, rest)(q, k, v) ** 2).sum()

        return jax.tree.leaves(run(jax.grad(total), parameters))

    got, want = grads("cute"), grads("xla")
    assert len(got) == 2
    close(got, want)


# Forward mode and second order.


def test_forward_mode_and_second_order():
    """J04: `jvp`, `linearize`, a Hessian both ways. Reverse mode inside stays on the kernels."""
    q, k, v = three((7, 2, 8))
    bias = normal(2, 7, 7)
    functions = {"mask": windowed, "score": biased}
    arguments = (q, k, v, bias)

    def derivatives(f):
        def of(x):
            return loss(f)(q * x[0], k, v, bias * x[1])

        def both(x):
            value, push = jax.linearize(of, x)
            hessians = jax.hessian(of)(x), jax.jacrev(jax.jacfwd(of))(x)
            return value, push(x), jax.jvp(loss(f), arguments, arguments), *hessians

        return lambda: both(jnp.ones(2))

    *_, first, second = compare(derivatives, (), rtol=1e-4, atol=1e-4, **functions)
    close(first, second, rtol=1e-4, atol=1e-4)
    mine = loss(attend("cute", **functions))
    assert calls(lambda *args: jax.jvp(mine, args, args), *arguments) == (1, 0)
    assert calls(lambda *args: jax.jvp(jax.grad(mine), args, args), *arguments) == (1, 1)


@pytest.mark.slow
def test_reverse_over_reverse():
    q, k, v = three((6, 2, 8))
    bias = normal(2, 6, 6)

    def squares(f):
        grads = jax.grad(loss(f), (0, 1, 2, 3))
        return jax.grad(lambda *args: sum((g**2).sum() for g in grads(*args)), (0, 1, 2, 3))

    compare(squares, (q, k, v, bias), rtol=1e-4, atol=1e-3, score=biased)


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), 3 * tangents[0]))


@jax.custom_jvp
def times(x, table):
    return x * table[0]


times.defjvp(
    lambda primals, tangents: (times(*primals), tangents[0] * primals[1][0] + tangents[1].sum())
)


def test_derivative_rules(monkeypatch):
    """The rule holds. One that gets a whole captured array has no backward kernel, and a warning says so once."""
    q, k, v = three((6, 2, 8))

    def grads(f):
        return jax.grad(loss(f), (0, 3))

    def of_scalars(table):
        return lambda s, b, h, i, j: clipped(s) + clipped(table[j])

    compare(grads, (q, k, v, normal(6)), score=of_scalars)

    def of_array(table):
        return lambda s, b, h, i, j: times(s, table) + table[j]

    monkeypatch.setattr(_fallback, "_WARNED", set())
    with pytest.warns(UserWarning, match="gradient of FlexAttention.*derivative rule of its own"):
        compare(grads, (q, k, v, normal(6)), score=of_array)
    assert calls(grads(attend("cute", score=of_array)), q, k, v, normal(6)) == (1, 0)


# What device code reads.


def test_a_kernel_is_keyed_by_what_it_computes():
    """K02: functions made anew are one kernel; another derivative rule of the same function is another backward kernel."""

    def function(score):
        return _compiled.compiled(*trace_score(score, jnp.float32))[0]

    def twice(s, *_):
        return clipped(s)

    def plain(s, *_):
        return jnp.clip(s, -1, 1)

    a, b, c = (function(f) for f in (lambda s, *_: clipped(s), twice, plain))
    assert a.digest == b.digest == c.digest
    a, b, c = (f.differentiated() for f in (a, b, c))
    assert a.derived_digest == b.derived_digest != c.derived_digest
    assert a != c
    tables = (jnp.zeros(4), jnp.ones(7))
    first, second = (function(lambda s, b, h, i, j, t=t: s + t[j]) for t in tables)
    assert (first, hash(first)) == (second, hash(second))
    assert first.over_axis(1, (True,)).digest != first.digest
    assert first.over_axis(1, (True,)) != first.over_axis(2, (True,))


def test_the_code_of_mapped_arrays():
    """Reads of a mapped array have the columns of `rows` as first indices, and the derivative says where it was read."""
    table, other = normal(3, 2, 5), normal(4)
    where = jnp.arange(5)

    def made(table):
        def mine(s, b, h, i, j):
            return s * table[h, j] + jnp.tanh(other[i] * s) * table.shape[1] + where[j]

        return _compiled.compiled(*trace_score(mine, jnp.float32))

    function, arrays = made(table[0])
    flags = tuple(x.shape == (2, 5) for x in arrays)
    mapped = function.over_axis(2, flags)
    given = tuple(table if f else x for f, x in zip(flags, arrays, strict=True))
    names = [a.name for a in mapped.code.arguments]
    assert names == ["score", "b", "h", "q_idx", "kv_idx", "v2"]
    derived = mapped.derived()

    def of(code, example):
        values = dict(score=0.7, b=0, h=1, q_idx=2, kv_idx=9, v2=example)  # 9 is clamped
        tree = jax.tree.structure((0,) * len(code.results))
        program = dataclasses.replace(mapped.program, code=code, tree=tree)
        return evaluate(program, values, given)

    (value,) = of(mapped.code, 2)
    whole = jax.value_and_grad(
        lambda s, t: s * t[1, 4] + jnp.tanh(other[2] * s) * 5 + where[4], (0, 1)
    )
    want, (slope, of_table) = whole(jnp.float32(0.7), table[2])
    close(value, want)
    found = of(derived.code, 2)
    close(found[0], slope)
    (read,) = [r for r in derived.reads if flags[r.operand]]
    assert [int(found[i]) for i in read.indices] == [2, 1, 4]
    close(found[read.derivative], of_table[1, 4])
    only = mapped.derived([not f for f in flags])
    assert [flags[r.operand] for r in only.reads] == [False]
    assert len(only.code.results) == 3  # d score, d other[i], i


def seen(kernel, rows, heads, lists, direction):
    """The verdict for each pair of tiles, entry of the batch and head, found as a kernel finds it; and whether all is in
    order."""
    tiles, partial, full, order = lists[direction]
    work = partial + full
    ranked = jnp.take_along_axis(work, order, -1)
    ok = (jnp.diff(ranked, axis=-1) <= 0).all()
    ok &= (jnp.sort(order, -1) == jnp.arange(order.shape[-1])).all()
    flat, layout = rows.reshape(-1, rows.shape[-1]), kernel.layout
    at = [flat[:, c, None, None] for c in layout.columns]
    at += [flat[:, 0, None, None] if layout.has_b else 0, heads[None] if layout.has_h else 0]
    kinds = _tiles._spread(jnp, tiles, partial, full)[tuple(jnp.broadcast_arrays(*at))]
    return jnp.broadcast_to(kinds, (len(flat), *heads.shape, *kinds.shape[-2:])), ok


def right(kernel, q, k, rows, heads, lists, mask_arrays):
    """Whether the lists say of every tile what the mask says of its entries, both ways."""
    kinds, ok = seen(kernel, rows, heads, lists, 0)
    if lists[1] is not None:
        turned, fine = seen(kernel, rows, heads, lists, 1)
        ok &= fine & (jnp.swapaxes(turned, -1, -2) == kinds).all()
    flat, mask = rows.reshape(-1, rows.shape[-1]), kernel.functions.mask
    q_len, kv_len = q.shape[-4], k.shape[-3]
    block = Block(flat[:, 0], heads, jnp.arange(q_len), jnp.arange(kv_len))
    allowed = mask_block(mask.program, mask.for_rows(mask_arrays, flat), block, mask.by_row)
    tile_q, tile_k = kernel.layout.tile
    kinds = jnp.repeat(jnp.repeat(kinds, tile_q, -2), tile_k, -1)[..., :q_len, :kv_len]
    ok &= ((kinds != FULL) | allowed).all() & ((kinds != EMPTY) | ~allowed).all()
    return ok & (kinds == FULL).any() & (kinds == EMPTY).any()


@pytest.fixture
def only_lists(monkeypatch):
    """Kernels that compute nothing but whether their lists are right: 1, or else 0."""

    def forward(self, q, k, v, rows, heads, lists, mask_arrays, score_arrays):
        ok = right(self, q, k, rows, heads, lists, mask_arrays)
        lead, (q_len, n, g, _) = q.shape[:-4], q.shape[-4:]
        out = jnp.broadcast_to(ok, (*q.shape[:-1], v.shape[-1])).astype(v.dtype)
        return out, jnp.zeros((*lead, n, g, q_len))

    def backward(self, q, k, v, out, lse, dout, dlse, rows, heads, lists, mask_arrays, *score):
        assert lists[1] is not None
        ok = right(self, q, k, rows, heads, lists, mask_arrays)
        dq, dk, dv = (jnp.broadcast_to(ok, x.shape).astype(x.dtype) for x in (q, k, v))
        return dq, dk, dv, ()

    monkeypatch.setattr(_attend.ForwardKernel, "reference", forward)
    monkeypatch.setattr(_attend.BackwardKernel, "reference", backward)
    monkeypatch.setattr(_entry, "MAP_TILE", (4, 2))
    monkeypatch.setattr(_entry, "KERNEL_TILE", 2)


def fine(transform, *arguments, **functions):
    """Whether all lists of a call and its gradient are right, that being computed by `only_lists`."""
    call = transform(full(attend("cute", **functions), (0,)))
    assert calls(call, *arguments) == (1, 1)
    (out, _), (grad,) = run(call, *arguments)
    return bool((out == 1).all() and (grad == 1).all())


IDS = jnp.asarray([[0] * 5 + [1] * 9, [0] * 9 + [1] * 5, [2] * 4 + [3] * 10])


def by_batch(ids):
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


@pytest.mark.usefixtures("only_lists")
def test_tile_lists():
    """Of masks that depend on neither, either and both of `b` and `h`, known and traced, made here and given."""
    q, k, v = three((3, 14, 2, 8))

    def by_head(ids):
        return lambda b, h, i, j: (i // 4 >= j // 4) & (j >= 4 * h)

    def by_both(ids):
        return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (j >= 4 * h)

    def given(q, k, v, ids):
        tiles = tile_map(by_both(ids), 14, 14, batch=3, heads=2, tile=(4, 2))
        return flex_attention(q, k, v, by_both(ids), tiles=tiles)

    for mask in (lambda ids: CausalMask(), by_head, by_batch, by_both):
        assert fine(lambda f: f, q, k, v, IDS, mask=mask)
    assert (run(given, q, k, v, IDS) == 1).all()
    wrong = tile_map(CausalMask(), 14, 14, tile=(4, 2))
    wrong = eqx.tree_at(lambda t: t.forward.partial, wrong, wrong.forward.partial[..., ::-1])
    assert not (flex_attention(q, k, v, CausalMask(), tiles=wrong) == 1).any()


@pytest.mark.slow
@pytest.mark.usefixtures("only_lists")
def test_lists_under_vmap():
    """Ids that are mapped give lists that are, indexed by a column of `rows`."""
    q, k, v = three((3, 2, 14, 2, 8))
    ids = jnp.stack([IDS[:2], IDS[1:], IDS[::2]])
    axes = (None, None, None, 0)
    assert fine(lambda f: jax.vmap(f, axes), q[0], k[0], v[0], ids, mask=by_batch)
    # Nested, ids along the outer axis, and along both.
    q, k, v = (jnp.stack([x, x[::-1]]) for x in (q, k, v))
    for where in ("outer", "both"):
        outer, inner = (0 if where in (side, "both") else None for side in ("outer", "inner"))
        given = jnp.stack([ids, ids[::-1]])
        given = given[:, 0] if inner is None else given

        def nested(f, outer=outer, inner=inner):
            return jax.vmap(jax.vmap(f, (0, 0, 0, inner)), (0, 0, 0, outer))

        assert fine(nested, q, k, v, given, mask=by_batch)


@pytest.mark.usefixtures("only_lists")
def test_a_given_map_under_vmap():
    """A TileMap of each example, mapped with it."""
    q, k, v = three((3, 14, 2, 8))
    tiles = jax.vmap(lambda ids: tile_map(DocumentMask(ids), 14, 14, tile=(4, 2)))(IDS)

    def call(q, k, v, ids, tiles):
        return flex_attention(q, k, v, DocumentMask(ids), tiles=tiles, return_lse=True)

    (out, _), (grad,) = run(jax.vmap(full(call, (0,))), q, k, v, IDS, tiles)
    assert (out == 1).all()
    assert (grad == 1).all()
    with pytest.raises(ValueError, match=r"made under jax\.vmap"):
        call(q[0], k[0], v[0], IDS[0], tiles)


def looped(function, axes, arguments):
    """`jax.vmap` as a Python loop."""
    size = next(x.shape[a] for x, a in zip(arguments, axes, strict=True) if a is not None)
    found = [
        function(
            *(x if a is None else jnp.take(x, i, a) for x, a in zip(arguments, axes, strict=True))
        )
        for i in range(size)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def test_inference_makes_no_lists_for_the_backward_pass():
    """Traced lists of queries are made in the backward pass, from those of keys."""
    q = normal(14, 2, 8)

    def total(q, ids):
        return flex_attention(q, q, q, DocumentMask(ids)).sum()

    names = [name for name, *_ in kernels(total, q, IDS[0])]
    assert names == ["CompactKernel", FORWARD]
    names = [name for name, *_ in kernels(jax.grad(total), q, IDS[0])]
    assert names == ["CompactKernel", FORWARD, "CompactKernel", BACKWARD]


# vmap.


AXES = {
    "all": (0, 0, 0, 0, 0),
    "queries alone": (0, None, None, None, None),
    "shared captured": (0, 0, 0, None, None),
    "one captured": (0, 0, 0, 0, None),
    "captured alone": (None, None, None, 0, 0),
    "other axes": (1, 2, 0, 1, 0),
}


@pytest.mark.parametrize("name", some_slow(AXES, "one captured", "other axes"))
def test_vmap(name):
    """J01: vmap, vmap of grad, grad of vmap; always one launch. Under vmap of grad shared arrays have a gradient an
    example."""
    axes = AXES[name]
    one = (*three((2, 6, 2, 8)), normal(2, 6, 6), normal(6))
    arguments = [
        x if a is None else jnp.stack([x, x * 0.5, -x], a) for x, a in zip(one, axes, strict=True)
    ]

    def score(bias, column):
        return lambda s, b, h, i, j: s + bias[h, i, j] * jnp.tanh(s) + column[j] * (b + 1)

    numbers = tuple(range(5))
    mine = attend("cute", mask=windowed, score=score)
    plain = attend("xla", mask=windowed, score=score)
    mapped = jax.vmap(full(mine, numbers), axes)
    want = looped(one_example(plain, numbers), axes, arguments)
    close(run(mapped, *arguments), want, atol=1e-4)
    assert calls(mapped, *arguments) == (1, 1)
    assert calls(jax.vmap(mine, axes), *arguments) == (1, 0)

    def whole(*arguments):
        """Every example's loss."""
        return jax.vmap(loss(mine), axes)(*arguments).sum()

    assert calls(jax.grad(whole, numbers), *arguments) == (1, 1)
    if name in ("one captured", "other axes"):
        _, grads = want
        summed = [
            g.sum(0) if a is None else jnp.moveaxis(g, 0, a)
            for g, a in zip(grads, axes, strict=True)
        ]
        close(run(jax.grad(whole, numbers), *arguments), tuple(summed), atol=1e-4)


_COMPILED = {}


def one_example(function, numbers):
    """Compiled once for all forms of vmap."""
    return _COMPILED.setdefault("vmap", jax.jit(full(function, numbers)))


def test_vmap_of_linear_maps_and_jacobians():
    """Cotangents alone mapped, and tangents alone."""
    q, k, v = three((4, 1, 8))
    bias = normal(1, 4, 4)

    def jacobians(f):
        def of(x):
            return f(q[..., :] * x, k, v, bias * x)[0][:, 0, 0]

        return lambda: (jax.jacrev(of)(jnp.float32(0.5)), jax.jacfwd(of)(jnp.float32(0.5)))

    close(*compare(jacobians, (), score=biased))


def test_the_batch_index():
    """`b` counts the leading dims; axes that vmap adds are none of them, under it and inside."""
    q, k, v = three((2, 3, 4, 1, 8))

    def mask():
        return lambda b, h, i, j: j == b % 4

    def three_ways(f):
        return lambda *args: [f(*args), jax.vmap(f)(*args), jax.vmap(jax.vmap(f))(*args)]

    compare(three_ways, (q, k, v), mask=mask)


# Shards.


SPECS = {
    "batch": (P("data"), P("data")),
    "heads": (P(None, None, "data"), P(None, "data")),
}


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", ["shard_map", "automatic", "explicit"])
@pytest.mark.parametrize("axis", SPECS)
def test_shards(axis, kind):
    """Batch or heads over two devices: `b` and `h` are those of the whole, and gradients of captured arrays are sums over
    the shards."""
    q, k, v = three((4, 6, 4, 8), kv_heads=2)
    bias, slopes = normal(4, 6), normal(4)

    def call(q, k, v, bias, slopes, shard):
        # In shard_map indices are those of the shard.
        b0, h0 = (2 * shard, 0) if axis == "batch" else (0, 2 * shard)

        def score(s, b, h, i, j):
            return s + bias[h + h0, j] * jnp.tanh(s) * slopes[b + b0]

        def mask(b, h, i, j):
            return (i >= j) & (j >= b + b0 - h - h0)

        return flex_attention(q, k, v, mask, score, return_lse=True)

    arguments, numbers = (q, k, v, bias, slopes), (0, 1, 2, 3, 4)
    want = _COMPILED.get("shards") or jax.jit(full(lambda *args: call(*args, 0), numbers))(
        *arguments
    )
    _COMPILED["shards"] = want
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=types, devices=jax.devices()[:2])
    spec, lse_spec = SPECS[axis]
    if kind == "shard_map":
        sharded, spread = (
            jax.shard_map(
                lambda *args: call(*args, jax.lax.axis_index("data")),
                mesh=mesh,
                in_specs=(spec,) * 3 + (P(), P()),
                out_specs=(spec, lse_spec),
            ),
            arguments,
        )
    else:
        sharded = lambda *args: call(*args, 0)  # noqa: E731
        spread = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arguments[:3]]
        spread += [jax.device_put(x, NamedSharding(mesh, P())) for x in arguments[3:]]
    with jax.set_mesh(mesh):
        got = run(full(sharded, numbers), *spread)
    close(got, want, atol=1e-4)
    if kind != "shard_map":
        assert got[0][0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


def test_how_xla_splits_the_backward_kernel():
    """Over batch and heads; gradients of captured arrays are sums over both, and lists are whole everywhere."""
    q, k, v = three((4, 6, 4, 8), kv_heads=2)
    mine = loss(attend("cute", by_batch_of, biased_of))
    ids, bias = jnp.zeros((4, 6), jnp.int32), normal(4, 6)
    jaxpr = jax.make_jaxpr(jax.grad(mine, (0, 4)))(q, k, v, ids, bias).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if "Backward" in str(e.params.get("call"))]
    found = view_of(eqn.params["call"], [x.aval for x in eqn.invars])
    names = {leaf.name: i for i, leaf in enumerate(found.operands)}
    specs = [P()] * len(names)
    specs[names["q"]] = P("x", None, "y")
    how = split(found, specs, strict=True)
    assert how.inputs[names["dlse"]] == P("x", "y", None, None)
    assert how.inputs[names["rows"]] == P("x", None)
    assert how.inputs[names["heads"]] == P("y", None)
    assert {how.inputs[i] for name, i in names.items() if "[" in name} <= {
        P(None, None),
        P(*[None] * 3),
        P(*[None] * 4),
    }
    outputs = dict(zip(found.output_names, how.outputs, strict=True))
    assert outputs["gradients[2]"] == P("x", None, "y", None)
    assert how.sums == [(), (), (), ("x", "y")]


def by_batch_of(ids, _):
    return by_batch(ids)


def biased_of(_, bias):
    return lambda s, b, h, i, j: s + bias[h, j]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_derivative_rules_in_shards():
    q, k, v = three((2, 6, 2, 8))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def call(q, k, v, table):
        def score(s, b, h, i, j):
            return jax.nn.relu(s) + jax.nn.silu(table[j] * s)

        return [flex_attention(q, k, v, CausalMask(), score)]

    specs = (P("data"),) * 3 + (P(),)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=[P("data")])
    arguments = (q, k, v, normal(6))
    got, want = (run(full(f, (0, 1, 2, 3)), *arguments) for f in (sharded, call))
    close(got, want)


# What reverse mode keeps.


def test_remat_policies():
    """With output and LSE kept by name the forward kernel runs once, whatever follows it; with nothing kept, twice."""
    q, k, v = three((6, 2, 8))
    weights = normal(8, 8)
    names = jax.checkpoint_policies.save_only_these_names(*_attend.NAMES)

    def block(q, weights):
        out = flex_attention(q @ weights, k, v, CausalMask(), sink=jnp.float32(0.5))
        return jnp.tanh(out @ weights) * out

    def grad(**how):
        wrapped = jax.checkpoint(block, **how)
        return jax.grad(lambda q, weights: (wrapped(q, weights) ** 2).sum(), (0, 1))

    assert calls(grad(policy=names), q, weights) == (1, 1)
    assert calls(grad(), q, weights) == (2, 1)
    plain = jax.grad(lambda q, weights: (block(q, weights) ** 2).sum(), (0, 1))
    close(run(grad(policy=names), q, weights), run(plain, q, weights))

    def layers(q):
        step = jax.checkpoint(lambda x, _: (block(x, weights), None), policy=names)
        return (jax.lax.scan(step, q, length=3)[0] ** 2).sum()

    assert calls(jax.grad(layers), q) == (1, 1)


def test_what_reverse_mode_keeps():
    """q, k, v, output and LSE, and what has the size of the lengths or less."""
    length = 512
    q = jax.ShapeDtypeStruct((length, 4, 16), jnp.bfloat16)
    k = v = jax.ShapeDtypeStruct((length, 2, 16), jnp.bfloat16)
    mask = CausalMask() & DocumentMask(jnp.zeros(length, jnp.int32))

    def call(q, k, v, bias):
        return flex_attention(q, k, v, mask, lambda s, b, h, i, j: s + bias[j])

    bias = jax.ShapeDtypeStruct((length,), jnp.float32)
    pull = jax.eval_shape(lambda *args: jax.vjp(call, *args)[1], q, k, v, bias)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull) if x.size > length)
    grouped = (length, 2, 2, 16)
    assert shapes == sorted([(length, 2, 16)] * 2 + [grouped] * 2 + [(2, 2, length)])


def largest(jaxpr):
    """Entries of the largest array that a jaxpr makes."""
    sizes = [getattr(v.aval, "size", 0) for eqn in jaxpr.eqns for v in eqn.outvars]
    return max([0, *sizes, *(largest(inner) for eqn in jaxpr.eqns for inner in inside(eqn))])


def test_memory_grows_with_the_length():
    """Forward mode and second derivatives, which no kernel computes, by tiles."""
    length = 16384
    q = jax.ShapeDtypeStruct((length, 1, 8), jnp.float32)

    def total(q):
        return (flex_attention(q, q, q, CausalMask(), SoftCap(3.0)) ** 2).sum()

    for fn in (
        lambda q: jax.jvp(total, (q,), (q,)),
        lambda q: jax.jvp(jax.grad(total), (q,), (q,)),
        jax.grad(lambda q: (jax.grad(total)(q) ** 2).sum()),
    ):
        assert largest(jax.make_jaxpr(fn)(q).jaxpr) < length**2 / 32


# Lowered for CUDA.


def test_one_custom_call(monkeypatch):
    """Nothing but the call and reshapes; with the gradient one more. Compiling is the compile tests' business."""
    targets = []

    def target(found, plan):
        targets.append(found.name)
        return f"eqxcute.{found.name}"

    monkeypatch.setattr(_registry, "target", target)
    q = jax.ShapeDtypeStruct((2, 6, 2, 8), jnp.bfloat16)

    def total(q, bias):
        return flex_attention(q, q, q, CausalMask(), AdditiveBias(bias)).astype("float32").sum()

    bias = jax.ShapeDtypeStruct((6, 6), jnp.float32)
    with eqxcute.architecture("sm_90a"):
        for fn, want in ((total, [FORWARD]), (jax.grad(total, (0, 1)), [FORWARD, BACKWARD])):
            targets.clear()
            text = jax.jit(fn).trace(q, bias).lower(lowering_platforms=("cuda",)).as_text()
            assert targets == want
            assert text.count("custom_call @eqxcute.") == len(want)


def test_precision():
    """It is the kernel's field for float32 alone, and JAX's own in plain JAX."""
    for dtype, given, want, passes in (
        ("float32", None, "3xtf32", 3),
        ("float32", "tf32", "tf32", 1),
        ("bfloat16", "tf32", None, 1),
    ):
        q = normal(4, 1, 8, dtype=dtype)

        def call(q, how, given=given):
            layer = FlexAttention(precision=given, deterministic=True, implementation=how)
            return layer(q, q, q)

        ((_, kernel, _),) = kernels(functools.partial(call, how="cute"), q)
        assert (kernel.precision, kernel.deterministic) == (want, True)
        assert _attend._passes(kernel.precision) == passes
        text = str(jax.make_jaxpr(functools.partial(call, how="xla"))(q))
        assert ("HIGHEST" in text) == (want == "3xtf32")
    assert set(_reference.PRECISIONS) == {None, "tf32", "3xtf32"}


def test_a_mask_is_traced_once():
    """A mask is traced once a call, forward and backward."""
    traces = []

    def mask(b, h, i, j):
        traces.append(None)
        return i >= j

    q = normal(4, 1, 8)
    jax.jit(jax.grad(lambda q: flex_attention(q, q, q, mask).sum()))(q)
    assert len(traces) == 1


def test_a_mask_keeps_no_tangents():
    """What the mask alone captures has a zero gradient."""
    q, k, v = three((6, 2, 8))
    limit = jnp.float32(2.5)

    def total(limit):
        return flex_attention(q, k, v, lambda b, h, i, j: j < limit).sum()

    assert jax.grad(total)(limit) == 0
    program, captured = trace_mask(lambda b, h, i, j: j < limit)
    function, arrays = _compiled.compiled(program, captured)
    assert [x.shape for x in arrays] == [()]
    assert function.ranks == (0,)


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 0.0, -0.0])
def test_a_scale_that_float32_has_not_is_0(scale):
    """In the kernel it would be 0, and 0 times -inf is NaN."""
    q, found = _attend._scaled_up(jnp.full(4, 3.0), scale)
    assert found == 1.0
    assert not q.any()
