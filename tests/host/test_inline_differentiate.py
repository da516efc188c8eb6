"""Derivatives of programs, against JAX's of the functions themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcute
from eqxcute import inline

ARGUMENTS = [inline.Argument("score", "float32")] + [
    inline.Argument(name, "int32", 0) for name in ("b", "h", "q", "kv")
]
TABLE = jnp.linspace(-2, 3, 12).reshape(3, 4)
NARROW = TABLE.astype(jnp.bfloat16)
SCALE = jnp.float32(1.5)
DOCS = jnp.arange(5) // 2


@jax.custom_jvp
def seven(x):
    return x * x


seven.defjvp(lambda primals, tangents: (seven(primals[0]), tangents[0] * 7.0))


@jax.custom_vjp
def eleven(x):
    return x * x


eleven.defvjp(lambda x: (eleven(x), x), lambda x, ct: (ct * x * 11,))


# What is captured comes last: `fn(score, b, h, q, kv, *captured)`.
CASES = {
    "soft cap": (lambda s, b, h, q, kv: 20 * jnp.tanh(s / 20), ()),
    "alibi": (lambda s, b, h, q, kv, t: s - t[h, 0] * jnp.abs(q - kv), (TABLE,)),
    "relative": (
        lambda s, b, h, q, kv, t: s + t[h, jnp.clip(kv - q, -1, 1) + 1],
        (TABLE,),
    ),
    "negative index": (lambda s, b, h, q, kv, t: s * t[h, q - kv], (TABLE,)),
    "relu": (lambda s, b, h, q, kv, t: jax.nn.relu(s) * t[h, 1], (TABLE,)),
    "own rules": (
        lambda s, b, h, q, kv, a, t: seven(s) * a + eleven(t[h, q]),
        (SCALE, TABLE),
    ),
    "choice": (
        lambda s, b, h, q, kv, t, a: jnp.where(DOCS[q] == DOCS[kv], s * t[h, 1], q * a),
        (TABLE, SCALE),
    ),
    "rows": (lambda s, b, h, q, kv, t: s + jnp.dot(t[h], t[q]), (TABLE,)),
    "same entry twice": (lambda s, b, h, q, kv, t: s * t[h, 0] + t[q, 0] * t[h, 0], (TABLE,)),
    "gated": (lambda s, b, h, q, kv, a: jax.nn.silu(s * a) + jax.nn.gelu(s), (SCALE,)),
    "cond": (
        lambda s, b, h, q, kv, t: jax.lax.cond(q > kv, lambda: s * t[h, 0], lambda: s**3),
        (TABLE,),
    ),
    "loop": (
        lambda s, b, h, q, kv, t: jax.lax.fori_loop(0, 3, lambda i, x: x * t[i, 1] + s, s),
        (TABLE,),
    ),
    "stopped": (lambda s, b, h, q, kv: s * jax.lax.stop_gradient(s), ()),
    "bfloat16": (lambda s, b, h, q, kv, t: s * t[h, q].astype(jnp.float32), (NARROW,)),
}


def _traced(name):
    fn, captured = CASES[name]
    return inline.trace(lambda *indices: fn(*indices, *captured), ARGUMENTS)


def _indices(seed):
    rng = np.random.default_rng(seed)
    sizes = {"b": 2, "h": 3, "q": 4, "kv": 5}
    return {"score": np.float32(rng.normal() * 3)} | {
        k: np.int32(rng.integers(0, n)) for k, n in sizes.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_jax(name):
    """Gradients of the captured arrays, put together from the reads as a backward kernel does."""
    fn, constants = CASES[name]
    program, captured = _traced(name)
    derivative = inline.differentiate(program)
    assert derivative.arguments == ("score",)
    operands = program.prepare(captured)
    reference = jax.jit(jax.grad(fn, argnums=(0, *range(5, 5 + len(constants)))))
    found = jax.jit(lambda values: inline.evaluate(derivative.program, values, captured))
    for seed in range(6):
        values = _indices(seed)
        results = found(values)
        d_score, *d_captured = reference(*values.values(), *constants)
        np.testing.assert_allclose(results[0], d_score, rtol=2e-5, atol=1e-6)
        totals = [np.zeros(x.shape, np.float32) for x in operands]
        for read in derivative.reads:
            at = tuple(int(results[i]) for i in read.indices)
            assert all(0 <= i < n for i, n in zip(at, totals[read.operand].shape, strict=True))
            totals[read.operand][at] += results[read.derivative]
        for constant, wanted in zip(constants, d_captured, strict=True):
            got = _through_prepare(program, captured, constant, totals)
            wanted = np.asarray(wanted, np.float32)
            np.testing.assert_allclose(
                got, wanted, rtol=1e-2 if name == "bfloat16" else 2e-5, atol=1e-6
            )


def _through_prepare(program, captured, constant, totals):
    """The gradient of one captured array, from those of the operands."""
    (at,) = [i for i, x in enumerate(captured) if x is constant]

    def paired(x):
        operands = program.prepare([x if i == at else c for i, c in enumerate(captured)])
        floats = [i for i, o in enumerate(operands) if jnp.issubdtype(o.dtype, jnp.floating)]
        return sum(jnp.vdot(operands[i].astype(jnp.float32), totals[i]) for i in floats)

    return np.asarray(jax.grad(paired)(constant), np.float32)


def test_is_a_program_for_kernels():
    """No function is left that a kernel would not know, and it has the operands of the function itself."""
    for name in CASES:
        program, _ = _traced(name)
        derivative = inline.differentiate(program).program.code
        assert not derivative.opaque
        assert derivative.operands == program.code.operands
        assert derivative.arguments == program.code.arguments


def test_what_has_no_gradient_is_left_out():
    ids, unused = jnp.arange(5), jnp.ones(3)
    program, _ = inline.trace(
        lambda score, b, h, q, kv: jnp.where(ids[q] == ids[kv], score, 0.0) + 0 * b + unused.size,
        ARGUMENTS,
    )
    assert inline.differentiate(program).reads == ()


def test_narrow_captured_values_have_wide_derivatives():
    """Contributions are summed in float32, so they are not rounded to 16 bits one by one."""
    program, _ = _traced("bfloat16")
    derivative = inline.differentiate(program)
    (read,) = derivative.reads
    code = derivative.program.code
    assert code.equations[code.results[read.derivative]].dtype == "float32"


def test_equal_functions_have_equal_derivatives():
    digests = {inline.differentiate(_traced("relative")[0]).program.code.digest for _ in range(3)}
    other = inline.differentiate(_traced("negative index")[0]).program.code.digest
    assert len(digests) == 1
    assert other not in digests


def test_refuses_what_it_cannot_differentiate():
    program, _ = inline.trace(lambda q, kv: q >= kv, {"q": "int32", "kv": "int32"})
    with pytest.raises(eqxcute.InlineError, match="one float result"):
        inline.differentiate(program)

    @jax.custom_jvp
    def entry(table, i):
        return table[i, 0]

    entry.defjvp(lambda p, t: (entry(*p), t[0][p[1], 0]))
    program, _ = inline.trace(lambda score, b, h, q, kv: score + entry(TABLE, h), ARGUMENTS)
    with pytest.raises(eqxcute.InlineError, match=r"rule of its own.*Read the array outside"):
        inline.differentiate(program)

    @jax.custom_jvp
    def scaled(x, ids, i):
        return x * ids[i]

    # Integers have no gradient, but the rule is the function's all the same.
    scaled.defjvp(lambda p, t: (scaled(*p), t[0] * 100.0))
    program, _ = inline.trace(lambda score, b, h, q, kv: scaled(score, DOCS, q), ARGUMENTS)
    with pytest.raises(eqxcute.InlineError, match="rule of its own"):
        inline.differentiate(program)
    program, _ = inline.trace(
        lambda score, b, h, q, kv: jnp.sort(jnp.stack([score, q + 0.5]))[0], ARGUMENTS
    )
    with pytest.raises(eqxcute.InlineError, match=r"test_inline_differentiate.py.*`sort`"):
        inline.differentiate(program)
