"""What the values of a jaxpr are while it is walked, and what is raised when one cannot be had.

Three kinds meet:

- `Known`: concrete, from literals alone. Computed on the spot, by JAX.
- `Outer`: an array that no argument of the function reaches. Computed before the kernel, by JAX, from the captured
  arrays; what the function reads of it by index, or what is small, becomes `read` equations.
- `Scalars`: depends on an argument. An array of equations' numbers, one for each element.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

ELEMENTS = 1024  # of an array that is taken apart
STEPS = 4096  # of a loop that is unrolled


class Known(NamedTuple):
    value: Any


class View(NamedTuple):
    """Each element of an array is one of array `number`: for each of that one's dims a fixed index, or the own dim that
    runs along it."""

    number: int
    aval: Any
    fixed: tuple[int | None, ...]
    dims: tuple[int | None, ...]


class Outer(NamedTuple):
    """`number` in what is computed before the kernel. With a `view` the kernel reads another array instead."""

    number: int
    aval: Any
    view: View | None = None


class Scalars(NamedTuple):
    """`numbers` has the array's shape; a PRNG key has its words as further axes."""

    numbers: np.ndarray
    aval: Any


Value = Known | Outer | Scalars


class Step(NamedTuple):
    """A part of what is computed before the kernel: `run(*inputs)` gives a list.

    `moves`: it only moves numbers, so it runs in any dtype.
    """

    run: Callable[..., list]
    inputs: tuple[Known | Outer, ...]
    outputs: tuple[int, ...]
    moves: bool = False


class Region(NamedTuple):
    """Equations `start` to `stop` compute what `run` computes under JAX, in another way.

    A function with a derivative rule of its own is inlined for a kernel, and called as it is under JAX, which knows its
    rule. What has no row of the table is a region of opaque equations. No equation outside uses one inside, but for the
    outputs. An output's number is -1 where nobody needs it, or where it is an older value.
    """

    start: int
    stop: int
    run: Callable[..., list]
    inputs: tuple[Value, ...]
    outputs: tuple[Scalars, ...]


class Unsupported(Exception):
    """Not a program for a kernel. The message says what it met and what to write instead.

    `placed`: it says where, too.
    """

    def __init__(self, message: str, placed: bool = False):
        super().__init__(message)
        self.placed = placed


def numbered(flat: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    return np.array(flat, np.int64).reshape(shape)


def abstract(shape: Sequence[int], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def abstract_of(x: Any) -> Any:
    """Of an array, or of a number."""
    dtype = getattr(x, "dtype", None)
    return abstract(np.shape(x), np.asarray(x).dtype if dtype is None else dtype)
