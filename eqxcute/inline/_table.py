"""The table of primitives: one row each, and nothing else in this package knows a primitive by its name.

A row says how a value is computed under JAX (`evaluate`), and what it can be when its inputs lie in intervals (`bound`).
`_device.py` has a function under the row's name that computes it in a kernel. Derivatives come from JAX, through `evaluate`.
A new primitive is a new row, plus a function in `_device.py`; tests draw their programs from the table, so they cover it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _interval as interval

Kind = Literal["any", "number", "integer", "float", "bits", "bool", "signed"]


class Row(NamedTuple):
    """`takes`: the kind of dtypes that the inputs may have; `gives`: the result's dtype, that of the last input if None.

    `arity`: how many inputs; None for one and more. Parameters of JAX's primitive that change the value are named in
    `params`; all others are dropped.
    """

    evaluate: Callable[..., Any]
    bound: interval.Rule
    takes: Kind = "number"
    arity: int | None = 2
    gives: str | None = None
    params: tuple[str, ...] = ()

    def dtype(self, *dtypes: str, **params) -> np.dtype:
        if "new_dtype" in params:
            return jnp.dtype(params["new_dtype"])
        return jnp.dtype(self.gives or dtypes[-1])


def _convert(x, *, new_dtype):
    return lax.convert_element_type(x, jnp.dtype(new_dtype))


def _bitcast(x, *, new_dtype):
    return lax.bitcast_convert_type(x, jnp.dtype(new_dtype))


def _wrap(x, size):
    return lax.select(x < 0, x + size, x + jnp.zeros_like(size))


def _round(x, *, rounding_method):
    return lax.round(x, lax.RoundingMethod(rounding_method))


def _reduce_precision(x, *, exponent_bits, mantissa_bits):
    return lax.reduce_precision(x, exponent_bits, mantissa_bits)


def _float(evaluate, bound, arity=1) -> Row:
    return Row(evaluate, bound, "float", arity)


def _compare(evaluate, bound) -> Row:
    return Row(evaluate, bound, "any", 2, "bool")


ROWS: dict[str, Row] = {
    # Arithmetic
    "add": Row(lax.add, interval.add),
    "sub": Row(lax.sub, interval.sub),
    "mul": Row(lax.mul, interval.mul),
    "div": Row(lax.div, interval.div),
    "rem": Row(lax.rem, interval.rem),
    "floor_divide": Row(jnp.floor_divide, interval.floor_divide, "integer"),
    "remainder": Row(jnp.remainder, interval.remainder, "integer"),
    "neg": Row(lax.neg, interval.neg, "number", 1),
    "sign": Row(lax.sign, interval.sign, "number", 1),
    "abs": Row(lax.abs, interval.abs_, "signed", 1),
    "max": Row(lax.max, interval.max_, "any"),
    "min": Row(lax.min, interval.min_, "any"),
    "clamp": Row(lax.clamp, interval.clamp, "number", 3),
    "square": Row(lax.square, interval.square, "number", 1),
    "integer_pow": Row(
        lambda x, *, y: lax.integer_pow(x, y), interval.integer_pow, "number", 1, None, ("y",)
    ),
    "pow": Row(lax.pow, interval.unknown, "float"),
    # Comparisons
    "eq": _compare(lax.eq, interval.eq),
    "ne": _compare(lax.ne, interval.ne),
    "lt": _compare(lax.lt, interval.lt),
    "le": _compare(lax.le, interval.le),
    "gt": _compare(lax.gt, interval.gt),
    "ge": _compare(lax.ge, interval.ge),
    # Bits and booleans
    "and": Row(lax.bitwise_and, interval.and_, "bits"),
    "or": Row(lax.bitwise_or, interval.or_, "bits"),
    "xor": Row(lax.bitwise_xor, interval.xor, "bits"),
    "not": Row(lax.bitwise_not, interval.not_, "bits", 1),
    "shift_left": Row(lax.shift_left, interval.shift_left, "integer"),
    "shift_right_logical": Row(lax.shift_right_logical, interval.shift_right_logical, "integer"),
    "shift_right_arithmetic": Row(
        lax.shift_right_arithmetic, interval.shift_right_arithmetic, "integer"
    ),
    "population_count": Row(lax.population_count, interval.bit_count, "integer", 1),
    "clz": Row(lax.clz, interval.bit_count, "integer", 1),
    # Choices and indices
    "select_n": Row(lax.select_n, interval.select_n, "any", None),
    "wrap": Row(_wrap, interval.wrap, "integer"),
    # Dtypes
    "convert_element_type": Row(
        _convert, interval.convert_element_type, "any", 1, None, ("new_dtype",)
    ),
    "bitcast_convert_type": Row(_bitcast, interval.unknown, "number", 1, None, ("new_dtype",)),
    "stop_gradient": Row(lax.stop_gradient, interval.keep, "any", 1),
    # The result of a function with a derivative rule of its own, where that is an older value.
    "copy": Row(lambda x: x, interval.keep, "any", 1),
    # Floats
    "is_finite": Row(lax.is_finite, interval.is_finite, "float", 1, "bool"),
    "floor": _float(lax.floor, interval.integral("floor")),
    "ceil": _float(lax.ceil, interval.integral("ceil")),
    "round": Row(_round, interval.round_, "float", 1, None, ("rounding_method",)),
    "reduce_precision": Row(
        _reduce_precision, interval.unknown, "float", 1, None, ("exponent_bits", "mantissa_bits")
    ),
    "exp": _float(lax.exp, interval.increasing("exp", positive=True)),
    "exp2": _float(lax.exp2, interval.increasing("exp2", positive=True, ulps=128)),
    "log": _float(lax.log, interval.increasing("log", 0)),
    "log1p": _float(lax.log1p, interval.increasing("log1p", -1)),
    "expm1": _float(lax.expm1, interval.increasing("expm1")),
    "tanh": _float(lax.tanh, interval.increasing("tanh")),
    "logistic": _float(lax.logistic, interval.increasing("logistic", positive=True)),
    "erf": _float(lax.erf, interval.increasing("erf")),
    "erfc": _float(lax.erfc, interval.increasing("erfc", falling=True, positive=True, ulps=128)),
    "sqrt": _float(lax.sqrt, interval.increasing("sqrt", 0)),
    "rsqrt": _float(lax.rsqrt, interval.rsqrt),
    "cbrt": _float(lax.cbrt, interval.unknown),
    "sin": _float(lax.sin, interval.limited(-1, 1)),
    "cos": _float(lax.cos, interval.limited(-1, 1)),
    "tan": _float(lax.tan, interval.unknown),
    "asin": _float(lax.asin, interval.unknown),
    "acos": _float(lax.acos, interval.unknown),
    "atan": _float(lax.atan, interval.increasing("arctan")),
    "sinh": _float(lax.sinh, interval.increasing("sinh", ulps=128)),
    "cosh": _float(lax.cosh, interval.unknown),
    "asinh": _float(lax.asinh, interval.increasing("arcsinh")),
    "acosh": _float(lax.acosh, interval.unknown),
    "atanh": _float(lax.atanh, interval.unknown),
    "atan2": _float(lax.atan2, interval.atan2, 2),
    "erf_inv": _float(lax.erf_inv, interval.unknown),
    "nextafter": _float(lax.nextafter, interval.unknown, 2),
}

# The same under another name.
SYNONYMS = {"add_any": "add"}


def _polynomial(op, const, x, *coefficients):
    """Horner's rule; the highest coefficient is the last."""
    return functools.reduce(
        lambda total, c: op("add", op("mul", total, x), c), reversed(coefficients)
    )


# Primitives that are a few others: from `op(name, *values)` and `const(number)` in the values' dtype.
EXPANSIONS: dict[str, Callable[..., int]] = {
    "polynomial": _polynomial,
    "log2": lambda op, const, x: op("div", op("log", x), const(math.log(2))),
    "one_minus_square": lambda op, const, x: op("sub", const(1), op("mul", x, x)),
}
