"""Scalar JAX functions inside kernels.

A function of numbers, in `jax.numpy` and `jax.lax`, is traced once (`trace`) and then read in four ways:

- `evaluate`: under JAX, where it is differentiated, batched and sharded as any JAX code is;
- `start`, `bind`, `join`, `results`: as CuTe code, each part as soon as what it depends on is known;
- `bound`: what it can return over whole tiles of its arguments;
- `differentiate`: its derivatives, as programs again.

Arrays that it captures are lifted out: other values are no other program. Two functions that compute the same in the
same way have equal `Code`, whoever wrote them, and so share a kernel.
"""

from ._bound import Span as Span, bound as bound
from ._code import Argument as Argument, Code as Code, Equation as Equation
from ._dependence import Kind as Kind, index_kind as index_kind
from ._differentiate import Derivative as Derivative, Read as Read, differentiate as differentiate
from ._emit import (
    Partial as Partial,
    Scaled as Scaled,
    Step as Step,
    bind as bind,
    join as join,
    result as result,
    results as results,
    small as small,
    start as start,
)
from ._evaluate import evaluate as evaluate, evaluate_prepared as evaluate_prepared
from ._interval import Interval as Interval
from ._small import small_scores as small_scores
from ._trace import Program as Program, describe as describe, trace as trace
