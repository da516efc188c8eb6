"""Users' functions as programs: what makes two of them one, what they may capture and be, their derivatives, and what
messages say of those that cannot be."""

import functools
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqxcute.layers.attention import (
    CausalMask,
    DocumentMask,
    _config,
    _functions,
    flex_attention,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from eqxcute import InlineError, inline
from eqxcute.inline import _trace

ARGUMENTS = (
    inline.Argument("score", "float32"),
    *(inline.Argument(name, "int32", low=0) for name in ("b", "h", "q_idx", "kv_idx")),
)
SIZES = (2, 3, 5, 4)  # of b, h, q_idx and kv_idx
HERE = "test_inline_functions.py"


def traced(fn):
    return inline.trace(fn, ARGUMENTS, role="score_fn")


def digest(fn):
    return traced(fn)[0].code.digest


def everywhere(fn, scores):
    """`fn` at all indices, by `jax.vmap`."""
    indices = [jnp.arange(n, dtype=jnp.int32) for n in SIZES]
    for axis in reversed(range(4)):
        fn = jax.vmap(fn, (0, *(0 if i == axis else None for i in range(4))))
    return fn(scores, *indices)


def scores():
    return jnp.asarray(np.random.default_rng(0).normal(size=SIZES), jnp.float32)


def evaluated(fn):
    """`fn` by way of its program."""

    def run(*scalars):
        program, captured = traced(fn)
        return inline.evaluate(
            program, dict(zip((a.name for a in ARGUMENTS), scalars, strict=True)), captured
        )

    return run


def said(kind, *parts):
    """The message must hold every part."""
    pattern = "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)
    return pytest.raises(kind, match=pattern)


def line_of(fn, text):
    """The number of the line in this file, from `fn` on, that holds `text`."""
    code = getattr(fn, "__code__", None) or fn.__call__.__code__
    with open(__file__) as file:
        lines = file.readlines()
    first = code.co_firstlineno
    return next(n for n, line in enumerate(lines[first - 1 :], first) if text in line)


# Identity


def make(a):
    return lambda s, b, h, q_idx, kv_idx: s * a + q_idx - kv_idx


def test_a_lambda_made_anew_is_the_same_program():
    assert len({digest(make(2.5)) for _ in range(1000)}) == 1


def test_python_numbers_are_part_of_the_program():
    assert digest(make(1.0)) != digest(make(2.0))
    assert digest(make(1.0)) != digest(make(np.float32(2.0)))


@pytest.mark.parametrize("wrap", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_captured_arrays_are_not(wrap):
    """K02: other values, other lengths, other addresses; but another dtype is another program."""

    def looked_up(table):
        return lambda s, b, h, q_idx, kv_idx: s + jnp.asarray(table)[kv_idx]

    same = [looked_up(wrap(np.arange(n, dtype=np.float32) * n)) for n in (3, 4, 1000)]
    assert len(set(map(digest, same))) == 1
    assert digest(looked_up(wrap(np.arange(3, dtype=np.float16)))) != digest(same[0])


def test_captured_numbers_and_module_fields():
    """A 0-d array of JAX is an array, whatever it is a field of."""
    assert digest(make(jnp.asarray(1.0))) == digest(make(jnp.asarray(2.0)))
    assert digest(make(jnp.asarray(1.0))) != digest(make(1.0))
    masks = [CausalMask(jnp.asarray(i)) & DocumentMask(jnp.full(4 + i, i)) for i in range(3)]
    found = {_functions.trace_mask(mask)[0].code.digest for mask in masks}
    assert len(found) == 1
    assert _functions.trace_mask(CausalMask(1))[0].code.digest not in found


def test_names_do_not_matter():
    def first(s, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return s - distance * 0.5

    def second(x, _, __, i, j):
        far = i - j
        unused = jnp.sin(x) * far  # noqa: F841
        return x - far * 0.5

    assert digest(first) == digest(second)


FACTOR = 2.0


def helper(x):
    return x * 3


def uses_helper(s, b, h, q_idx, kv_idx):
    return helper(s) * FACTOR


def test_helpers_and_globals_matter(monkeypatch):
    before = digest(uses_helper)
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    assert digest(uses_helper) != before
    monkeypatch.undo()
    assert digest(uses_helper) == before
    monkeypatch.setitem(globals(), "helper", lambda x: x * 5)
    assert digest(uses_helper) != before


def test_another_process_finds_the_same():
    """K02."""
    program = (
        "import jax.numpy as jnp\n"
        "from eqxcute.layers.attention import CausalMask, DocumentMask, _functions\n"
        "mask = CausalMask() & DocumentMask(jnp.zeros(7, 'int32'))\n"
        "print(_functions.trace_mask(mask)[0].code.digest)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    mask = CausalMask() & DocumentMask(jnp.ones(9, jnp.int32))
    assert found == _functions.trace_mask(mask)[0].code.digest


# What a function can be, and capture

TABLE = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


def by_table(table, s, b, h, q_idx, kv_idx):
    return s * table[h, q_idx]


class Holder(eqx.Module):
    table: jax.Array

    def method(self, s, b, h, q_idx, kv_idx):
        return by_table(self.table, s, b, h, q_idx, kv_idx)


class Nested(eqx.Module):
    parts: dict[str, Holder]
    name: str = "x"

    def __call__(self, s, b, h, q_idx, kv_idx):
        return self.parts["a"].method(s, b, h, q_idx, kv_idx)


class Plain:
    def __init__(self, table):
        self.table = table

    def method(self, s, b, h, q_idx, kv_idx):
        return by_table(self.table, s, b, h, q_idx, kv_idx)


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


def closure(table):
    def inner(s, b, h, q_idx, kv_idx):
        return by_table(table, s, b, h, q_idx, kv_idx)

    return inner


# The kind, and the name that messages have for it.
KINDS = {
    "closure": (closure, "closure.<locals>.inner"),
    "numpy": (lambda table: closure(jnp.asarray(np.asarray(table))), "closure.<locals>.inner"),
    "partial": (lambda table: functools.partial(by_table, table), "by_table"),
    "jax partial": (lambda table: jax.tree_util.Partial(by_table, table), "by_table"),
    "module": (lambda table: Nested({"a": Holder(table)}), "Nested"),
    "module's method": (lambda table: Holder(table).method, "Holder.method"),
    "method": (lambda table: Plain(table).method, "Plain.method"),
    "jit": (lambda table: jax.jit(closure(table)), "closure.<locals>.inner"),
    "filter_jit": (lambda table: eqx.filter_jit(closure(table)), "closure.<locals>.inner"),
    "jit in jit": (lambda table: jax.jit(jax.jit(closure(table))), "closure.<locals>.inner"),
    "checkpoint": (lambda table: jax.checkpoint(closure(table)), "closure.<locals>.inner"),
    "decorated": (lambda table: decorated(closure(table)), "closure.<locals>.inner"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_functions(kind):
    """All of them are one program, capture one array that the gradient reaches, and have a name."""
    make_function, name = KINDS[kind]
    program, captured = traced(make_function(jnp.asarray(TABLE)))
    assert program.code.digest == digest(closure(jnp.asarray(TABLE)))
    assert f"`{name}` (File " in program.name
    assert HERE in program.name
    (operand,) = program.prepare(captured)
    np.testing.assert_array_equal(operand, TABLE)
    if kind == "numpy":
        return

    def total(table):
        program, captured = traced(make_function(table))
        at = {"score": jnp.float32(2), "b": 0, "h": 1, "q_idx": 3, "kv_idx": 0}
        return inline.evaluate(program, at, captured)

    want = np.zeros_like(TABLE)
    want[1, 3] = 2
    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(TABLE)), want)


def curved(table, offset):
    """Of the score, of a captured array and of a captured 0-d one."""

    def score(s, b, h, q_idx, kv_idx):
        slope = table.T[q_idx, h]
        return jnp.tanh(s * slope) + offset * jnp.cumsum(table, axis=1)[h, kv_idx] ** 2

    return score


def transformed(wrap):
    """A few of JAX's transformations of `wrap(curved(...))` and of what it captures."""
    x, table, offset = scores(), jnp.asarray(TABLE), jnp.asarray(0.5)

    def value(x, table, offset):
        return everywhere(wrap(curved(table, offset)), x)

    def total(*args):
        return (value(*args) ** 2).sum()

    grad = jax.grad(total, (0, 1, 2))
    args = (x, table, offset)
    dots = jax.tree.map(jnp.cos, args)

    def scanned(total_so_far, table):
        return total_so_far + total(x, table, offset), None

    return {
        "value": value(*args),
        "jit, captured tracers": jax.jit(value)(*args),
        "grad": grad(*args),
        "jvp": jax.jvp(value, args, dots),
        "jvp of grad": jax.jvp(grad, args, dots),
        "grad of jvp": jax.grad(lambda *a: jax.jvp(total, a, dots)[1], (0, 1, 2))(*args),
        "vmap of captured": jax.vmap(value, (None, 0, None))(x, jnp.stack([table, -table]), offset),
        "vmap of grad": jax.vmap(grad, (None, 0, 0))(x, jnp.stack([table] * 2), jnp.arange(2.0)),
        "scan": lax.scan(scanned, jnp.zeros(()), jnp.stack([table, table + 1]))[0],
        "remat": jax.grad(jax.checkpoint(total), (0, 1, 2))(*args),
    }


def test_transformations():
    """A program is what it was read from, inside of transformations and out."""
    got = jax.jit(lambda: transformed(evaluated))()
    want = jax.jit(lambda: transformed(lambda fn: fn))()
    jax.tree.map_with_path(
        lambda path, g, w: np.testing.assert_allclose(g, w, 2e-5, 2e-5, err_msg=str(path[0])),
        got,
        want,
    )


def test_wide_numbers():
    """With x64 on, Python numbers are wide where JAX has them wide, and so are captured arrays."""
    with jax.enable_x64(True):
        wide = jnp.arange(4, dtype=jnp.int64) * 2**40
        floats = jnp.asarray(np.linspace(0, 1, 4))

        def score(s, b, h, q_idx, kv_idx):
            big = wide[kv_idx] // (q_idx + 1)
            return s + floats[kv_idx] / 3 + (big % 7) * 0.1

        got = jax.jit(lambda x: everywhere(evaluated(score), x))(scores())
        want = jax.jit(lambda x: everywhere(score, x))(scores())
        assert got.dtype == want.dtype == jnp.float64
        np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_inside_shard_map():
    """A shard's own array, and where the shard begins, asked for inside of the function."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    bias = jnp.arange(8.0)

    def shard(wrap, bias):
        def score(s, b, h, q_idx, kv_idx):
            return s * bias[kv_idx] + lax.axis_index("data") + q_idx

        return everywhere(wrap(score), scores())

    def run(wrap):
        fn = functools.partial(shard, wrap)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(bias)

    np.testing.assert_array_equal(run(evaluated), run(lambda fn: fn))


# What is computed from captured arrays alone


def test_steps_keep_their_dtypes():
    """Narrow arrays are held wide for their gradients' sake: each step sees the dtype it was traced with all the same,
    and what is no narrow float is left alone."""
    table = jnp.asarray(TABLE, jnp.bfloat16)
    ids = jnp.arange(3, dtype=jnp.int8)
    flags, key, words = jnp.asarray([True, False, True]), jr.key(3), jr.PRNGKey(3)

    @jax.jit
    def inner(x):
        return lax.cond(x[0, 0] > 0, lambda x: x * 2, lambda x: x + 1, x)

    def score(s, b, h, q_idx, kv_idx):
        bits = lax.bitcast_convert_type(table, jnp.int16)[h, kv_idx] % 8
        moved = jnp.take(table[:, ::-1].T, ids, axis=0)[h, h].astype(s.dtype)
        scanned = lax.scan(lambda c, x: (c + x, c), jnp.zeros(5, table.dtype), table)[1][h, kv_idx]
        here = jnp.where(flags, ids, 7)[h] + bits + inner(table)[h, q_idx] * 0 + scanned
        noise = jr.uniform(jr.fold_in(key, q_idx)) + jr.uniform(jr.fold_in(words, kv_idx))
        return s + here.astype(s.dtype) + moved + noise

    program, captured = traced(score)
    np.testing.assert_array_equal(
        jax.jit(lambda: everywhere(evaluated(score), scores()))(),
        jax.jit(lambda: everywhere(score, scores()))(),
    )
    plain = program.environment(captured)
    for x, y in zip(program.environment(captured, wide=True), plain, strict=True):
        assert (x is None) == (y is None)
        if x is None:
            continue
        assert x.dtype == (jnp.float32 if y.dtype == jnp.bfloat16 else y.dtype)
        np.testing.assert_array_equal(
            *(_bits(v).astype(y.dtype if v is x else v.dtype) for v in (x, y))
        )


def _bits(x):
    return jr.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


READS = (
    lambda t: t.T,
    lambda t: (t * 2).T,
    lambda t: jnp.cumsum(t, axis=1).T,
    lambda t: jnp.take(t, jnp.asarray([2, 0, 0]), axis=0).T,
    lambda t: jnp.broadcast_to(t[0, 0], (5, 3)),
    lambda t: jax.nn.relu(t).T,
)


def test_gradients_through_steps(tiling):
    """Attention's gradient of a captured array that steps lie before, against the same biases computed outside."""
    del tiling
    q = jnp.asarray(np.random.default_rng(2).normal(size=(12, 3, 4)), jnp.float32)

    def loss(table, outside):
        whole = [read(table) for read in READS] if outside else None

        def score(s, b, h, q_idx, kv_idx):
            biases = [read(table) for read in READS] if whole is None else whole
            for i, bias in enumerate(biases):
                s = s + bias[q_idx % 5, h] * jnp.cos(kv_idx * (i + 1))
            return s

        return (flex_attention(q, q, q, CausalMask(), score) ** 2).sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, outside=outside)))(jnp.asarray(TABLE))
        for outside in (False, True)
    )
    assert bool((want != 0).all())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, CausalMask()], ids=["all", "causal"])
def test_narrow_gradients_are_summed_in_float32(mask):
    """S09: contributions of 1 to one number, from 200 queries of 3 heads; a bfloat16 sum of ones stops at 256. Each row is
    read by axes of its own: whatever the mask varies along, sums over the other ones are wide."""
    q = jnp.zeros((200, 3, 2))
    table = jnp.zeros((6, 2), jnp.bfloat16)

    def total(table):
        def score(s, b, h, q_idx, kv_idx):
            zeros = jnp.zeros(200, jnp.int32)
            ones = jnp.where(q_idx + kv_idx < 1000, 1, 2).astype(table.dtype)
            return (
                s
                + table[0][h * 0]
                + (table[1] * 1)[kv_idx * 0]
                + jnp.broadcast_to(table[2, 0], (200,))[q_idx]
                + jnp.take(table[3], zeros, axis=0)[q_idx]
                + table[4, 0]
                + table[5, 0] * ones
            )

        return flex_attention(q, q, q, mask, score, return_lse=True)[1].sum()

    grad = jax.jit(jax.grad(total))(table)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[600, 0]] * 6)


def test_steps_run_once_for_all_tiles(monkeypatch):
    """What depends on captured arrays alone is outside of the loops over tiles."""
    limits = {"cpu": _config.TileLimits(scores=1, largest=8, smallest=8)}
    monkeypatch.setattr(_config, "LIMITS", limits)
    q, table = jnp.ones((20, 1, 4)), jnp.arange(20.0)

    def score(s, b, h, q_idx, kv_idx):
        return s + jnp.cumsum(table)[kv_idx]

    jaxpr = jax.make_jaxpr(lambda q: flex_attention(q, q, q, None, score))(q)
    text = str(jaxpr)
    assert "scan" in text
    assert text.count("cumsum") == 1
    assert text.index("cumsum") < text.index("scan[")


# Derivative rules


@jax.custom_jvp
def tripled(x):
    return x * x


tripled.defjvp(lambda primals, tangents: (primals[0] ** 2, 3 * tangents[0]))


@jax.custom_vjp
def quintupled(x, y):
    return x * y


quintupled.defvjp(lambda x, y: (x * y, x), lambda x, g: (5 * g, 7 * g * x))


def _symbolic_fwd(x, y):
    return x.value * y.value, (x.perturbed, y.perturbed)


def _symbolic_bwd(perturbed, g):
    return tuple(g * (2.0 if p else jnp.nan) for p in perturbed)


@jax.custom_vjp
def symbolic(x, y):
    return x * y


symbolic.defvjp(_symbolic_fwd, _symbolic_bwd, symbolic_zeros=True)


@jax.custom_jvp
def symbolic_forward(x, y):
    return x * y


@functools.partial(symbolic_forward.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    zero = jax.custom_derivatives.SymbolicZero
    live = [t for t in tangents if not isinstance(t, zero)]
    return primals[0] * primals[1], 2 * sum(live)


RULES = {
    "relu at 0": lambda s, t: jax.nn.relu(s * 0) + jax.nn.relu(t),
    "jvp": lambda s, t: tripled(s) + tripled(t),
    "vjp": lambda s, t: quintupled(s, t),
    "vjp, result unused": lambda s, t: quintupled(s, t) * 0 + s,
    "vjp, symbolic zeros": lambda s, t: symbolic(s, 2.0) + t,
    "jvp, symbolic zeros": lambda s, t: symbolic_forward(s, 2.0) + t,
    "nested": lambda s, t: tripled(quintupled(s, tripled(t))),
    "jit": lambda s, t: jax.jit(tripled)(jax.jit(quintupled)(s, t)),
    "stop_gradient": lambda s, t: lax.stop_gradient(s * t) + s * lax.stop_gradient(t),
    "where": lambda s, t: jnp.where(s > 0, jnp.sqrt(jnp.where(s > 0, s, 1.0)), t),
    "softplus": lambda s, t: jax.nn.softplus(s) * jax.nn.gelu(t),
    "logsumexp": lambda s, t: jax.nn.logsumexp(jnp.stack([s, t])),
}


@pytest.mark.parametrize("rule", RULES)
def test_derivative_rules(rule):
    """Rules of functions inside hold, in the score and in what is captured."""
    table = jnp.asarray([0.0, 0.5, -1.0])

    def total(wrap, x, table):
        def score(s, b, h, q_idx, kv_idx):
            return RULES[rule](s, table[h])

        return everywhere(wrap(score), x).sum()

    run = [
        jax.jit(jax.value_and_grad(functools.partial(total, wrap), (0, 1)))(scores(), table)
        for wrap in (evaluated, lambda fn: fn)
    ]
    (got, dgot), (want, dwant) = run
    np.testing.assert_allclose(got, want, rtol=1e-5)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), dgot, dwant)


def test_derivative_rules_in_attention():
    """As if the rules' factors were written out. Attention hands rules on through its own."""
    q = jnp.asarray(np.random.default_rng(2).normal(size=(5, 1, 4)), jnp.float32)
    table = jnp.asarray([0.3, 0.5, -1.0, 2.0, 0.1])

    def by_hand(s, t):
        return _with_slopes(s, t, (s * t * t) ** 2, 15.0, 3 * 7 * s * 3.0)

    def loss(fn, q, table):
        def score(s, b, h, q_idx, kv_idx):
            return fn(s, table[kv_idx])

        return (flex_attention(q, q, q, CausalMask(), score) ** 2).sum()

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, fn), (0, 1)))(q, table)
        for fn in (RULES["nested"], by_hand)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


def _with_slopes(s, t, value, ds, dt):
    """`value`, with these derivatives."""
    stop = lax.stop_gradient
    return stop(value) + stop(ds) * (s - stop(s)) + stop(dt) * (t - stop(t))


# What only JAX can run


def sorted_score(table):
    def score(s, b, h, q_idx, kv_idx):
        low, middle, high = lax.sort(jnp.stack([s, table[h], table[q_idx]]))
        return middle + high * low

    return score


def looping_score(table):
    def score(s, b, h, q_idx, kv_idx):
        def step(state):
            return state[0] + 1, state[1] * 0.5 + table[h]

        return lax.while_loop(lambda state: state[0] < kv_idx, step, (0, s))[1]

    return score


def large_score(table):
    def score(s, b, h, q_idx, kv_idx):
        return s + (jnp.zeros(3000) + q_idx).sum() + table[h]

    return score


def printing_score(table):
    def score(s, b, h, q_idx, kv_idx):
        jax.debug.callback(lambda s: None, s)
        return s * table[h]

    return score


OPAQUE = {
    # The function, its line that is at fault, what is said of it, and whether reverse mode has a rule.
    "sort": (sorted_score, "lax.sort", ("`sort`", "by index"), True),
    "while": (looping_score, "while_loop", ("loop", "fori_loop", "jnp.where"), False),
    "large": (large_score, "jnp.zeros(3000)", ("(3000,)", "1024"), True),
    "effect": (printing_score, "def score", ("side effects", "jax.debug.print"), True),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_a_kernel_cannot_run_jax_does(name):
    """Forward and backward, at all indices and in attention; and the reason names the user's line."""
    make_function, text, parts, reverses = OPAQUE[name]
    table = jnp.asarray([0.3, 0.5, -1.0, 0.1, 0.2])
    program, _ = traced(make_function(table))
    reason = program.code.opaque[0]
    line = line_of(make_function, text)
    for part in ("score_fn", "score", f'{HERE}", line {line}', *parts):
        assert part in reason

    def value(wrap, x, table):
        return everywhere(wrap(make_function(table)), x)

    def run(wrap):
        fn = functools.partial(value, wrap)
        out = [fn(scores(), table), jax.jvp(fn, (scores(), table), (scores(), table))[1]]
        if reverses:
            out.append(jax.grad(lambda *a: (fn(*a) ** 2).sum(), (0, 1))(scores(), table))
        return out

    got, want = jax.jit(lambda: run(evaluated))(), jax.jit(lambda: run(lambda fn: fn))()
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("name", ["sort", "while"])
def test_attention_by_what_a_kernel_cannot_run(name, dense_attention):
    make_function, table = OPAQUE[name][0], jnp.asarray([0.3, 0.5, -1.0, 0.1, 0.2])
    q = jnp.asarray(np.random.default_rng(2).normal(size=(1, 5, 3, 2)), jnp.float32)

    def tangent(attention):
        def out(q, table):
            return attention(q, q, q, None, make_function(table))

        return jax.jit(lambda *args: jax.jvp(out, args, args))(q, table)

    ours = functools.partial(flex_attention, return_lse=True)
    got, want = tangent(ours), tangent(dense_attention)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


def test_a_reason_names_helpers_and_parts():
    """Where the function at fault is called by another one, or is half of a mask."""

    def picks(x):
        return lax.sort(x)[0]

    def mask(b, h, q_idx, kv_idx):
        return picks(jnp.stack([q_idx, kv_idx])) > 3

    for whole in (mask, CausalMask() & mask, ~(DocumentMask(jnp.zeros(4, jnp.int32)) | mask)):
        program, _ = _functions.trace_mask(whole)
        (reason, *_) = program.code.opaque
        line = line_of(picks, "lax.sort")
        for part in ("mask_fn", "picks", f'{HERE}", line {line}', "`sort`"):
            assert part in reason


def test_too_many_operations(monkeypatch):
    """A loop that unrolls to too many, and a function that is too long as it stands."""
    monkeypatch.setattr(_trace, "Builder", functools.partial(_trace.Builder, limit=100))

    def loop(s, b, h, q_idx, kv_idx):
        return lax.fori_loop(0, 60, lambda i, x: jnp.sin(x) + i, s)

    def long(s, b, h, q_idx, kv_idx):
        for i in range(60):
            s = jnp.sin(s) + i
        return s

    for fn, text in ((loop, "fori_loop"), (long, "def long")):
        program, captured = traced(fn)
        reason = program.code.opaque[0]
        for part in ("score_fn", fn.__name__, f'{HERE}", line {line_of(fn, text)}', "operations"):
            assert part in reason
        at = {"score": jnp.float32(0.5), "b": 0, "h": 0, "q_idx": 0, "kv_idx": 0}
        np.testing.assert_allclose(
            inline.evaluate(program, at, captured), fn(*at.values()), rtol=1e-6
        )


def test_an_array_too_long_for_a_kernel():
    def score(table):
        program, _ = traced(lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])
        for part in ("score_fn", HERE, str(2**31), "2**31 - 1", "table[i // n, i % n]"):
            assert part in program.code.opaque[0]

    jax.eval_shape(score, jax.ShapeDtypeStruct((2**31,), jnp.int8))


# Errors


def python_if(s, b, h, q_idx, kv_idx):
    if s > 0:
        return s
    return s * q_idx


def python_int(s, b, h, q_idx, kv_idx):
    return s + int(jnp.asarray(TABLE)[h, q_idx])


def numpy_index(s, b, h, q_idx, kv_idx):
    return s + TABLE[h, q_idx]


def numpy_function(s, b, h, q_idx, kv_idx):
    return s + np.sqrt(kv_idx)


@pytest.mark.parametrize(
    ("fn", "line"),
    [
        (python_if, "if s > 0:"),
        (python_int, "int(jnp.asarray(TABLE)"),
        (numpy_index, "TABLE[h, q_idx]"),
        (numpy_function, "np.sqrt"),
        (jax.jit(python_if), "if s > 0:"),
        (functools.partial(lambda f, *a: f(*a), python_if), "if s > 0:"),
    ],
)
def test_values_that_are_not_known(fn, line):
    """S18: for scores; for masks see test_attention_errors.py."""
    number = line_of(
        {"np.sqrt": numpy_function, "TABLE[h, q_idx]": numpy_index}.get(line, python_if), line
    )
    with said(
        InlineError, "score_fn", HERE, f"line {number}", line, "jnp.where", "jnp.asarray(...)"
    ):
        traced(fn)


KEPT = []


def _keep(x):
    KEPT.append(x)
    return x


class Leaky(eqx.Module):
    value: jax.Array

    def __call__(self, s, b, h, q_idx, kv_idx):
        return s + self.value * 2


ENDED = {
    "jit": lambda x: jax.jit(lambda x: _keep(x))(x),
    "vmap": lambda x: jax.vmap(_keep)(x[None]),
    "grad": lambda x: jax.grad(_keep)(x),
    "scan": lambda x: lax.scan(lambda c, x: (c, _keep(x)), 0, x[None]),
    "jit of grad": lambda x: jax.jit(jax.grad(lambda x: _keep(x)))(x),
}


@pytest.mark.parametrize("inside", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("trace", ENDED)
def test_a_value_of_an_ended_trace(trace, inside):
    """From a closure and from a module's field, wherever attention is called."""
    KEPT.clear()
    ENDED[trace](jnp.asarray(2.0))
    (leaked,) = KEPT

    def score(s, b, h, q_idx, kv_idx):
        return s + leaked

    def run(fn, x):
        traced(fn)
        return x

    call = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap}[inside]
    line = f"line {line_of(score, 's + leaked')}"
    with said(InlineError, "score_fn", "score", HERE, line, "ended", "field of an Equinox"):
        call(functools.partial(run, score))(jnp.ones(2))
    line = f"line {line_of(Leaky, 'self.value')}"
    with said(InlineError, "score_fn", "__call__", HERE, line, "ended"):
        call(functools.partial(run, Leaky(leaked)))(jnp.ones(2))


def test_values_of_traces_that_go_on():
    """Nested transformations, of which none has ended: no error."""

    def run(x):
        def inner(y):
            def body(carry, z):
                def score(s, b, h, q_idx, kv_idx):
                    return s * x[0] + y[0] * carry + z

                program, captured = traced(score)
                at = {"score": x[1], "b": 0, "h": 0, "q_idx": 0, "kv_idx": 0}
                return inline.evaluate(program, at, captured), None

            return lax.scan(jax.checkpoint(body), 1.0, y)[0]

        return jax.vmap(jax.jit(inner))(jnp.stack([x, x + 1])).sum()

    x = jnp.arange(3.0)
    for fn in (run, jax.jit(run), jax.grad(run), jax.jit(jax.hessian(run))):
        assert bool(jnp.isfinite(fn(x)).all())


def test_what_is_returned():
    with said(InlineError, "score_fn", HERE, "number", "(4,)", "at its indices"):
        traced(lambda s, b, h, q_idx, kv_idx: s + jnp.arange(4))
    with said(InlineError, "score_fn", HERE, "number", "str"):
        traced(lambda s, b, h, q_idx, kv_idx: "x")
    for fn, parts in (
        (lambda *a: 1.0, ("mask_fn", "bool", "float")),
        (lambda *a: jnp.zeros(2) > 0, ("mask_fn", "shape ()", "(2,)")),
    ):
        with said(InlineError, HERE, *parts):
            _functions.trace_mask(fn)
    with said(InlineError, "score_fn", HERE, "floating-point", "int32"):
        _functions.trace_score(lambda s, b, h, q_idx, kv_idx: q_idx, jnp.float32)


# Dropout


def dropout_by(key):
    def dropout(s, b, h, q_idx, kv_idx):
        own = jr.fold_in(key, (h * 5 + q_idx) * 5 + kv_idx)
        return jnp.where(jr.bernoulli(own, 0.5) | (q_idx == kv_idx), s, -jnp.inf)

    return dropout


def kept_by(key):
    kept = jax.vmap(lambda n: jr.bernoulli(jr.fold_in(key, n), 0.5))(jnp.arange(3 * 5 * 5))
    return kept.reshape(3, 5, 5) | jnp.eye(5, dtype=bool)


def test_dropout_has_the_bits_of_jax_random():
    """S20: of a typed key, of an old one, and of one among several."""

    @jax.jit
    def run(key):
        x = jnp.zeros((1, 3, 5, 5))
        indices = jnp.meshgrid(*map(jnp.arange, x.shape), indexing="ij")
        return jnp.vectorize(evaluated(dropout_by(key)))(x, *indices)[0] == 0, kept_by(key)

    for key in (jr.key(7), jr.PRNGKey(7)):
        np.testing.assert_array_equal(*run(key))
    one = jr.key(7)
    several = jr.split(one, 2)
    program, captured = traced(lambda s, b, *ijk: s + jr.uniform(several[b]))
    at = {"score": jnp.float32(0), "b": 1, "h": 0, "q_idx": 0, "kv_idx": 0}
    assert inline.evaluate(program, at, captured) == jr.uniform(several[1])


def test_dropout_in_attention():
    """S20: the same bits forward and backward, and under remat: as an explicit mask."""
    key = jr.key(7)
    q, k, v = (jr.normal(x, (5, 3, 4)) for x in jr.split(jr.key(1), 3))
    kept = jax.jit(kept_by)(key)
    assert 0.2 < float(kept.mean()) < 0.9

    def explicit(s, b, h, q_idx, kv_idx):
        return jnp.where(kept[h, q_idx, kv_idx], s, -jnp.inf)

    def loss(score, q, k, v):
        return (flex_attention(q, k, v, CausalMask(), score) ** 2).sum()

    got, again, want = (
        jax.jit(jax.value_and_grad(wrap(functools.partial(loss, fn)), (0, 1, 2)))(q, k, v)
        for wrap, fn in (
            (lambda f: f, dropout_by(key)),
            (jax.checkpoint, dropout_by(key)),
            (lambda f: f, explicit),
        )
    )
    for found in (got, again):
        jax.tree.map(
            lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7), found, want
        )
