"""A program under JAX: its meaning, and what differentiates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _table
from ._code import Equation, constant
from ._jaxpr import is_key, key_implementation, word_dtype
from ._scalarise import Known, Outer, Region, Scalars
from ._trace import Program


def evaluate(
    program: Program,
    arguments: Mapping[str, Any],
    captured: Sequence[Any],
    *,
    settle: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """What the function returns for these scalars.

    **Arguments:**

    - `program`: From `trace`.
    - `arguments`: A scalar for each name. For arrays of them use `jax.vmap`.
    - `captured`: The captured arrays, as `trace` returned them or other ones of their shapes and dtypes.
    - `settle`: Gets each value that is read, and the dtype the program expects, and returns it in that dtype.
        (Keyword only argument.)

    Derivatives are JAX's. A function inside with a derivative rule of its own keeps it.
    """
    return evaluate_prepared(program, arguments, program.environment(captured), settle=settle)


def evaluate_prepared(
    program: Program,
    arguments: Mapping[str, Any],
    outside: Sequence[Any],
    *,
    settle: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """As `evaluate`, with what `program.environment` gave: for many calls with the same captured arrays."""
    settle = settle or (lambda value, dtype: value.astype(dtype))
    operands = [outside[n] for n in program.operands]
    code = program.code
    regions = {r.start: r for r in program.regions}
    values: list[Any] = [None] * len(code.equations)
    n = 0
    while n < len(code.equations):
        region = regions.get(n)
        if region is not None:
            _run_region(region, values, outside, settle)
            n = region.stop
            continue
        values[n] = _equation(code.equations[n], values, arguments, operands, settle)
        n += 1
    return jax.tree.unflatten(program.tree, [values[r] for r in code.results])


def _equation(e: Equation, values, arguments, operands, settle) -> Any:
    inputs = [values[n] for n in e.inputs]
    if e.op == "argument":
        return jnp.asarray(arguments[e["name"]], e.dtype)
    if e.op == "const":
        return jnp.asarray(constant(e))
    if e.op == "size":
        return jnp.int32(operands[e["operand"]].shape[e["dim"]])
    if e.op == "read":
        return settle(read(operands[e["operand"]], inputs), e.dtype)
    params = dict(e.params)
    return _table.ROWS[e.op].evaluate(*inputs, **params)


def read(array: Any, indices: Sequence[Any]) -> Any:
    """One element; each index is clamped to the array."""
    if not indices:
        return jnp.asarray(array)
    return jnp.asarray(array).at[tuple(indices)].get(mode="clip", wrap_negative_indices=False)


def _run_region(region: Region, values, outside, settle) -> None:
    def whole(v):
        if isinstance(v, Known):
            return v.value
        if isinstance(v, Outer):
            array = outside[v.number]
            is_float = jnp.issubdtype(v.aval.dtype, jnp.floating)
            return array.astype(v.aval.dtype) if is_float else array
        return _assembled(v, values)

    reads = any(isinstance(v, Outer) for v in region.inputs)
    results = region.run(*map(whole, region.inputs))
    for out, result in zip(region.outputs, results, strict=True):
        if is_key(out.aval):
            result = jax.random.key_data(result)
        flat = jnp.ravel(result)
        for i, n in enumerate(out.numbers.reshape(-1)):
            if n >= 0:
                values[n] = settle(flat[i], flat.dtype) if reads else flat[i]


def _assembled(v: Scalars, values) -> Any:
    parts = [values[int(n)] for n in v.numbers.reshape(-1)]
    if v.numbers.shape == ():
        return parts[0]
    array = (
        jnp.stack(parts).reshape(v.numbers.shape)
        if parts
        else jnp.zeros(v.numbers.shape, word_dtype(v.aval))
    )
    if is_key(v.aval):
        return jax.random.wrap_key_data(array, impl=key_implementation(v.aval.dtype).name)
    return array
