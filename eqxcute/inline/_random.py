"""Random bits as scalar equations, the same bits as JAX's: a counter and a key go in, nothing is kept.

Threefry-2x32 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.2), with 20
rounds.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import _jaxpr

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(build: Any, k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    """Two random words of the key `k0, k1` at the counter `x0, x1`."""

    def word(value):
        return build.const(value, np.uint32)

    def add(a, b):
        return build.op("add", a, b)

    def rotated(x, by):
        left = build.op("shift_left", x, word(by))
        return build.op("or", left, build.op("shift_right_logical", x, word(32 - by)))

    keys = (k0, k1, build.op("xor", build.op("xor", k0, k1), word(_PARITY)))
    x0, x1 = add(x0, k0), add(x1, k1)
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            x0 = add(x0, x1)
            x1 = build.op("xor", x0, rotated(x1, by))
        x0 = add(x0, keys[(group + 1) % 3])
        x1 = add(add(x1, keys[(group + 2) % 3]), word(group + 1))
    return x0, x1


def words_function(eqn: Any) -> Callable:
    """What a primitive of `jax.random` does to the words of its keys."""
    name, params = eqn.primitive.name, eqn.params
    if name == "random_seed":
        implementation = params["impl"]
        return _mapped(implementation.seed, eqn.invars[0].aval.ndim)
    key = eqn.invars[0].aval
    implementation, depth = _jaxpr.key_implementation(key.dtype), key.ndim
    if name == "random_bits":
        return _mapped(
            lambda k: implementation.random_bits(k, params["bit_width"], params["shape"]), depth
        )
    if name == "random_split":
        return _mapped(lambda k: implementation.split(k, params["shape"]), depth)
    return _mapped(implementation.fold_in, depth)


def _mapped(function: Callable, depth: int) -> Callable:
    for _ in range(depth):
        function = jax.vmap(function)
    return function
