"""For which scores tanh is a polynomial."""

import math

import jax
import jax.numpy as jnp
import pytest

from eqxcute import inline
from eqxcute.inline import Argument
from eqxcute.inline._small import SMALL

ARGUMENTS = [Argument("score", "float32"), Argument("q_idx", "int32", 0)]


def limit(function):
    return inline.small_scores(inline.trace(function, ARGUMENTS)[0].code)


@pytest.mark.parametrize(
    ("function", "factor"),
    [
        (lambda s, q_idx: jnp.tanh(s), 1),
        (lambda s, q_idx: 20 * jnp.tanh(s / 20), 1 / 20),
        (lambda s, q_idx: jnp.tanh(-(3 * s) * 0.5) + q_idx, 1.5),
        (lambda s, q_idx: jnp.tanh(jax.lax.stop_gradient(s) / -7) * s, 1 / 7),
        (lambda s, q_idx: jnp.tanh(s / 5) + jnp.tanh(2 * s) * jnp.exp(s), 2),
        (lambda s, q_idx: jnp.tanh(s / 5 + 1 - 1), None),
        (lambda s, q_idx: jnp.tanh(s * q_idx), None),
        (lambda s, q_idx: jnp.tanh(5 / s), None),
        (lambda s, q_idx: jnp.tanh(s * s), None),
        (lambda s, q_idx: jnp.tanh(s) + jnp.tanh(s + q_idx), None),
        (lambda s, q_idx: jnp.tanh(s * 0), None),
        (lambda s, q_idx: jnp.tanh(s.astype(jnp.bfloat16)).astype(jnp.float32), None),
        (lambda s, q_idx: jnp.exp(s) + q_idx, None),
    ],
)
def test_limits(function, factor):
    found = limit(function)
    if factor is None:
        assert found is None
    else:
        assert math.isclose(found * factor, SMALL, rel_tol=1e-6)
        assert found * factor < SMALL


def test_slopes_have_the_limit_of_scores():
    program, _ = inline.trace(lambda s, q_idx: 30 * jnp.tanh(s / 30), ARGUMENTS)
    slope = inline.differentiate(program).program.code
    assert inline.small_scores(slope) == inline.small_scores(program.code) is not None
