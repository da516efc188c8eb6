"""The rows of the table in NumPy, for the many small programs of tests: JAX takes too long to compile or dispatch them.

Integers and booleans are the same as JAX's, bit for bit. Floats differ in the last places, and do not flush subnormals,
as other libraries. 16-bit floats are held in float32. `test_inline_bound.py` holds each row against JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eqxcute.inline import Code, Equation, _table
from eqxcute.inline._code import constant
from eqxcute.inline._interval import ends_dtype


def _bits(x: np.ndarray) -> int:
    return 8 * x.dtype.itemsize


def _unsigned(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f"


def _divided(a, b, quotient: Callable, at_zero: Any):
    """An integer division; NumPy's own answer to the one quotient that overflows wraps around."""
    return np.where(b == 0, at_zero, quotient(a, np.where(b == 0, b.dtype.type(1), b))).astype(
        a.dtype
    )


def _truncated(a, b):
    q = a // b
    return q + ((q * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def _div(a, b):
    if _is_float(a):
        return a / b
    return _divided(a, b, _truncated, np.array(-1).astype(a.dtype))


def _rem(a, b):
    if _is_float(a):
        return np.fmod(a, b)
    return _divided(a, b, lambda x, y: x - _truncated(x, y) * y, a)


def _floor_divide(a, b):
    at_zero = np.array(-1).astype(a.dtype)
    if a.dtype.kind == "i":  # JAX takes one off, as a remainder is left
        at_zero = np.where(a != 0, at_zero - at_zero.dtype.type(1), at_zero)
    return _divided(a, b, lambda x, y: x // y, at_zero)


def _shift(a, by, shifted: Callable, beyond: Any):
    wide = _unsigned(by) >= _bits(a)
    amount = np.where(wide, by.dtype.type(0), by)
    return np.where(wide, beyond, shifted(a, amount)).astype(a.dtype)


def _right_arithmetic(a, by):
    signed = a.view(f"i{a.dtype.itemsize}")
    by = by.view(signed.dtype)
    found = _shift(signed, by, np.right_shift, np.where(signed < 0, -1, 0).astype(signed.dtype))
    return found.view(a.dtype)


def _right_logical(a, by):
    return _shift(_unsigned(a), _unsigned(by), np.right_shift, 0).view(a.dtype)


def _sign(a):
    return np.where(np.isnan(a), a, np.sign(a)) if _is_float(a) else np.sign(a)


def _power(a, *, y: int):
    result = a
    if y == 0:
        return np.ones_like(a)
    for _ in range(abs(y) - 1):
        result = result * a
    return 1 / result if y < 0 else result


def _remainder(a, b):
    return np.where(b == 0, a.dtype.type(0), a % np.where(b == 0, b.dtype.type(1), b)).astype(
        a.dtype
    )


def _bits_of(x):
    """The highest bit first."""
    bytes_ = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.dtype.itemsize)
    return np.unpackbits(bytes_[..., ::-1], axis=-1)


def _leading_zeros(x):
    bits = _bits_of(x)
    return np.where(x == 0, _bits(x), bits.argmax(-1)).astype(x.dtype)


def _select(which, *cases):
    return np.choose(which.astype(np.int64), cases)


def _wrap(x, size):
    return np.where(x < 0, x + size, x).astype(x.dtype)


def _round(x, *, rounding_method):
    if rounding_method == 1:
        return np.round(x)
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(np.float32(1), x), np.float32(0))


def _logistic(x):
    return 1 / (1 + np.exp(-x))


def _larger(a, b):
    """NumPy returns any of two zeros."""
    found = np.maximum(a, b)
    return np.where(a == b, np.where(np.signbit(a), b, a), found) if _is_float(found) else found


def _smaller(a, b):
    found = np.minimum(a, b)
    return np.where(a == b, np.where(np.signbit(a), a, b), found) if _is_float(found) else found


ROWS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "rem": _rem,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "population_count": lambda x: _bits_of(x).sum(-1).astype(x.dtype),
    "clz": _leading_zeros,
    "neg": np.negative,
    "sign": _sign,
    "abs": np.abs,
    "max": _larger,
    "min": _smaller,
    "clamp": lambda low, x, high: _smaller(_larger(x, low), high),
    "square": lambda x: x * x,
    "integer_pow": _power,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": lambda a, by: _shift(a, by, np.left_shift, 0),
    "shift_right_logical": _right_logical,
    "shift_right_arithmetic": _right_arithmetic,
    "select_n": _select,
    "wrap": _wrap,
    "stop_gradient": lambda x: x,
    "is_finite": np.isfinite,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": _round,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "logistic": _logistic,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "atan2": np.arctan2,
}


def _converted(x: np.ndarray, new: np.dtype) -> np.ndarray:
    if new == np.bool_:
        return x != 0
    if jnp.issubdtype(new, jnp.floating):
        return x.astype(new)
    if not _is_float(x):
        return x.astype(new)
    info = np.iinfo(new)
    inside = (x >= float(info.min)) & (x < float(info.max + 1))
    whole = np.where(inside, x, x.dtype.type(0)).astype(new)
    return np.where(
        x >= float(info.max + 1), info.max, np.where(x < info.min, info.min, whole)
    ).astype(new)


def run(e: Equation, inputs: Sequence[np.ndarray], dtypes: Sequence[str]) -> np.ndarray:
    """One operation. `dtypes` are those that its inputs stand for."""
    dtype, params = jnp.dtype(e.dtype), dict(e.params)
    kept = ends_dtype(dtype)
    if e.op == "convert_element_type":
        wide = jnp.dtype(dtypes[0]).itemsize > dtype.itemsize or jnp.dtype(dtypes[0]) != dtype
        return _converted(inputs[0], dtype).astype(kept) if wide else inputs[0]
    if e.op == "bitcast_convert_type":
        return inputs[0].astype(jnp.dtype(dtypes[0])).view(dtype).astype(kept)
    function = ROWS.get(e.op)
    if function is not None:
        return np.asarray(function(*inputs, **params)).astype(kept, copy=False)
    if e.op in ("nextafter", "reduce_precision"):
        inputs = [x.astype(jnp.dtype(d)) for x, d in zip(inputs, dtypes, strict=True)]
    return np.asarray(_table.ROWS[e.op].evaluate(*inputs, **params)).astype(kept)


def run_all(code: Code, arguments: Mapping[str, Any], operands: Sequence[Any]) -> list[np.ndarray]:
    """As `inline_programs.run_all`, with `held`."""
    shape = np.broadcast_shapes(*(np.shape(v) for v in arguments.values()))
    values: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for e in code.equations:
            kept = ends_dtype(e.dtype)
            inputs = [values[n] for n in e.inputs]
            if e.op == "argument":
                value = np.broadcast_to(np.asarray(arguments[e["name"]]).astype(kept), shape)
            elif e.op == "const":
                value = np.full(shape, constant(e)).astype(kept)
            elif e.op == "size":
                value = np.full(shape, operands[e["operand"]].shape[e["dim"]], np.int32)
            elif e.op == "read":
                array = np.asarray(operands[e["operand"]])
                at = [np.clip(i, 0, n - 1) for i, n in zip(inputs, array.shape, strict=True)]
                value = np.broadcast_to(array[tuple(at)].astype(kept), shape)
            else:
                value = run(e, inputs, [code.equations[n].dtype for n in e.inputs])
            values.append(value)
    return values
