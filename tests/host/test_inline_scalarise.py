"""Functions of JAX as scalar code: every one gives what JAX gives, run as code and evaluated."""

import functools
import inspect
import operator

import inline_numpy
import inline_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_programs import run_all
from jax import lax

from eqxcute.inline import Argument, _trace, evaluate, trace
from eqxcute.inline._code import Builder

rng = np.random.default_rng(0)
v5 = jnp.asarray(rng.integers(-9, 9, 5), jnp.int32)
v1 = jnp.asarray([7], jnp.int32)
f5 = jnp.asarray(rng.standard_normal(5), jnp.float32)
m34 = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
t234 = jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)
t5 = jnp.asarray(rng.integers(0, 99, (2, 1, 3, 2, 2)), jnp.int32)
scalar = jnp.float32(2.5)
at5 = jnp.asarray([4, 0, -1, 9, 2], jnp.int32)
u8 = jnp.asarray([1, 3, 200, 0, 2], jnp.uint8)
i8 = jnp.asarray([1, -1, -3, 0, 100], jnp.int8)
u32 = jnp.asarray([1, 2**31, 2**32 - 1, 0, 2], jnp.uint32)
b5 = jnp.asarray([True, False, True, True, False])
offsets = jnp.asarray([0, 3, 3, 7, 12], jnp.int32)
edges = jnp.asarray([-1.5, -0.0, 0.5, 2.0], jnp.float32)
c5 = v5.astype(jnp.complex64) + 2j
bf5 = f5.astype(jnp.bfloat16)

# Values of what the functions are called with, by name: i and j are any indices, h is at least 0.
_SOME = [-7, -6, -5, -2, -1, 0, 1, 2, 3, 4, 5, 6, 100, 2**31 - 1, -(2**31), 2]
COLUMNS = {
    "i": np.array(_SOME, np.int32),
    "j": np.array(_SOME[3:] + _SOME[:3], np.int32),
    "h": np.array([0, 1, 2, 3, 4, 5, 6, 7, 2, 1, 0, 100, 2**31 - 1, 3, 4, 1], np.int32),
    "x": np.array(
        [0, -0.0, 1, -1, 0.5, -0.3, 2.5, -2.5, 1e-3, 30, -30, np.inf, -np.inf, np.nan, 0.7, 3.25],
        np.float32,
    ),
    "y": np.array(
        [2, -1, 0, 0.5, -0.0, 3, -2, 1.5, np.nan, -0.7, 8, np.inf, 1, 1, -np.inf, 0.25], np.float32
    ),
    "p": np.array([0.01, 0.2, 0.5, 0.9, 1, 0.33, 0.75, 0.6] * 2, np.float32),
}


def arguments_of(fn):
    names, low = list(inspect.signature(fn).parameters), {"h": 0}
    return [Argument(n, COLUMNS[n].dtype.name, low.get(n)) for n in names]


def columns_of(fn):
    return {a.name: COLUMNS[a.name] for a in arguments_of(fn)}


def jitted(fn, *arguments):
    """Compiled as fast as can be: it runs once."""
    lowered = jax.jit(fn).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


def check(fn, **tolerance):
    """The function, its program evaluated, and its code run equation by equation, agree."""
    program, captured = trace(fn, arguments_of(fn))
    columns = columns_of(fn)
    expected = jitted(jax.vmap(fn), *columns.values())
    evaluated = jitted(jax.vmap(lambda scalars: evaluate(program, scalars, captured)), columns)
    compare(evaluated, expected, **tolerance)
    check_code(program, captured, columns, expected, **tolerance)
    return program


def check_code(program, captured, columns, expected, **tolerance):
    assert program.code.opaque == ()
    values = run_all(program.code, columns, program.prepare(captured))
    results = [values[n] for n in program.code.results]
    compare(jax.tree.unflatten(program.tree, results), expected, **tolerance)


def compare(found, expected, rtol=2e-6, atol=1e-7):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol, atol)
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


INDEXING = {
    "x[i]": lambda i: v5[i],
    "x[h]": lambda h: v5[h],
    "x[i, j]": lambda i, j: m34[i, j],
    "x[i][j]": lambda i, j: m34[i][j],
    "x[i, ...][k]": lambda i: m34[i, ...][2],
    "x[i, :][-1]": lambda i: t234[1, i, :][-1],
    "x[:, i][1]": lambda i: m34[:, i][1],
    "x[-1]": lambda i: v5[-1] + i,
    "x[i, -1]": lambda i: m34[i, -1],
    "x[1, i]": lambda i: m34[1, i],
    "x[i - j]": lambda i, j: v5[i - j],
    "x[-1 - h]": lambda h: v5[-1 - h],
    "x[h - 2]": lambda h: v5[h - 2],
    "x[i % 5]": lambda i: v5[i % 5],
    "x[i // 2]": lambda i: v5[i // 2],
    "one element": lambda i: v1[i],
    "size-1 dims": lambda i, j: v1.reshape(1, 1)[i, j],
    "rank 0": lambda x: x * scalar,
    "rank 0 []": lambda x: x * scalar[()],
    "rank 3": lambda i, j: t234[i, j, 2],
    "rank 5": lambda i, j, h: t5[i, j, h, j, i],
    "take clip": lambda i: jnp.take(v5, i, mode="clip"),
    "take fill": lambda i: jnp.take(f5, i, mode="fill"),
    "take fill int": lambda i: jnp.take(v5, i, mode="fill"),
    "take fill bool": lambda i: jnp.take(b5, i, mode="fill"),
    "take fill uint8": lambda i: jnp.take(u8, i, mode="fill"),
    "take fill value": lambda i: jnp.take(v5, i, mode="fill", fill_value=-3),
    "take wrap": lambda i: jnp.take(v5, i, mode="wrap"),
    "take axis": lambda i: jnp.take(m34, i, axis=1)[2],
    "get fill": lambda i, j: m34.at[i, j].get(mode="fill", fill_value=7.5),
    "get drop": lambda i: v5.at[i].get(mode="drop"),
    "get clip": lambda i: v5.at[i].get(mode="clip"),
    "get promise": lambda h: v5.at[jnp.minimum(h, 4)].get(mode="promise_in_bounds"),
    "get row fill": lambda i: m34.at[i].get(mode="fill", fill_value=1)[1],
    "take_along_axis": lambda i: jnp.take_along_axis(m34, i[None, None], axis=1)[1, 0],
    "dynamic_slice": lambda i: lax.dynamic_slice(v5, (i,), (3,))[1],
    "dynamic_slice whole": lambda i: lax.dynamic_slice(v5, (i,), (5,))[1],
    "dynamic_slice 2": lambda i, j: lax.dynamic_slice(m34, (i, j), (2, 3))[1, 2],
    "dynamic_slice sum": lambda i: lax.dynamic_slice_in_dim(f5, i, 2).sum(),
    "dynamic_index": lambda i: lax.dynamic_index_in_dim(m34, i, 1, keepdims=False)[2],
    "uint8 index": lambda i: v5[u8[i]],
    "int8 index": lambda i: v5[i8[i]],
    "uint32 index": lambda i: v5[u32[i]],
    "bool index": lambda i: v5[b5[i].astype(jnp.int32)],
    "nested": lambda i: f5[at5[v5[i]]],
    "stride": lambda i: f5[::2][i],
    "reversed": lambda i: f5[::-1][i],
    "part": lambda i: f5[1:4][i],
    "transposed": lambda i, j: m34.T[i, j],
    "transposed 3": lambda i, j: jnp.transpose(t234, (2, 0, 1))[i, j, 1],
    "reshaped": lambda i: m34.reshape(12)[i],
    "reshaped 1": lambda i, j: m34.reshape(3, 1, 4, 1)[i, 0, j, 0],
    "squeezed": lambda i: jnp.squeeze(t5, 1)[i, 1, 0, 1],
    "broadcast": lambda i, j: jnp.broadcast_to(f5, (3, 5))[i, j],
    "broadcast 1": lambda i, j: jnp.broadcast_to(f5[:, None], (5, 7))[i, j],
    "column": lambda i: m34[:, 1][i],
    "column of 1": lambda i: t5[:, 0, 1][i, 0, 1],
    "list": lambda i: jnp.array([4, 5, 9])[i],
    "numpy list": lambda i: jnp.asarray(np.arange(6.0, dtype=np.float32))[i],
    "two reads of a list": lambda i, j: (lambda t: t[i] + t[j])(jnp.array([4, 5, 9])),
    "prepared": lambda i: (f5 * 2 + 1)[i],
    "prepared scalar": lambda x: x * (f5.sum() + f5[0]),
    "bfloat16 table": lambda i: bf5[i].astype(jnp.float32),
    "read in float": lambda i: v5[i].astype(jnp.float32) * 0.5,
    "mixed": lambda i, j: m34[i, v5[j]] + f5[j],
    "array index": lambda i: v5[jnp.stack([i, i + 1])].sum(),
    "grid": lambda i, j: m34[jnp.stack([i, j])[:, None], jnp.array([0, 2])].sum(),
    "roll": lambda i: jnp.roll(f5, i)[1],
    "not from the end": lambda i: v5.at[jnp.where(i < 0, i + 3, i)].get(
        mode="clip", wrap_negative_indices=False
    ),
    "by its size": lambda i: v5.at[i + 5].get(mode="clip", wrap_negative_indices=False),
    "gather rows": lambda h: m34[jnp.minimum(h, 2)].max(),
}

SMALL = {
    "one_hot": lambda h: jax.nn.one_hot(h, 5) @ f5,
    "one_hot table": lambda h: (jax.nn.one_hot(h, 3) @ m34)[2],
    "arange select": lambda h: jnp.where(jnp.arange(5) == h, f5, 0).sum(),
    "in a list": lambda i: (jnp.arange(4) * 3 == i).any(),
    "all": lambda i: (jnp.arange(4) < i).all(),
    "isin": lambda i: jnp.isin(i, jnp.array([1, 2, -5])),
    "dot": lambda i: jnp.dot(m34[i], m34[1]),
    "dot of ints": lambda i: jnp.dot(jnp.stack([i, i + 1]), v5[:2]),
    "vdot": lambda x, y: jnp.vdot(jnp.stack([x, y]), jnp.stack([y, x])),
    "matmul": lambda x: (jnp.ones((2, 3)) * jnp.minimum(jnp.nan_to_num(x), 3) @ m34)[1, 2],
    "batched matmul": lambda i: jnp.matmul(t234[i][None], jnp.ones((1, 4, 2)))[0, 1, 1],
    "einsum": lambda i, j: jnp.einsum("a,ab,b->", m34[:, i], m34, m34[j]),
    "outer": lambda x: jnp.outer(jnp.stack([x, x + 1]), jnp.arange(3.0))[1, 2],
    "select": lambda i: jnp.select([i < 0, i < 3, i < 9], [i, i * 2, i + 1], -7),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0, x >= 1], [lambda z: -z, lambda z: z * z, 3.0]),
    "clip": lambda i: jnp.clip(i, -3, 4),
    "clip x": lambda x: jnp.clip(x, -0.5, y_max := 2.0) + y_max,
    "lax.clamp": lambda x: lax.clamp(0.0, x, 1.0),
    "argmax": lambda x, y: jnp.argmax(jnp.stack([x, y, x * 2, jnp.float32(0)])),
    "argmin": lambda x, y: jnp.argmin(jnp.stack([x, y, -x])),
    "argmax ints": lambda i, j: jnp.argmax(jnp.stack([i, j, i])),
    "max": lambda x, y: jnp.stack([x, y]).max(),
    "min": lambda i, j: jnp.stack([i, j]).min(),
    "sum": lambda i, j: jnp.stack([i, j, i]).sum(),
    "prod": lambda i: jnp.stack([i, i]).prod(),
    "mean": lambda x: jnp.stack([x, x + 1]).mean(),
    "var": lambda p: jnp.stack([p, p + 1, p * p]).var(),
    "sum of bfloat16": lambda p: (
        jnp.stack([p, p * 2]).astype(jnp.bfloat16).sum().astype(jnp.float32)
    ),
    "cumsum": lambda i: jnp.cumsum(v5 + i)[3],
    "cumprod": lambda i: jnp.cumprod(v5 * 0 + i)[2],
    "cummax": lambda i: lax.cummax(v5 + i, reverse=True)[1],
    "concatenate": lambda i: jnp.concatenate([v5, jnp.stack([i])])[5],
    "append": lambda i, h: jnp.append(v5, i)[h],
    "pad": lambda i: jnp.pad(jnp.stack([i, i + 1]), (1, 2), constant_values=5).sum(),
    "pad negative": lambda i: lax.pad(v5 + i, 3, [(-1, 2, 1)])[3],
    "flip": lambda i: jnp.flip(jnp.stack([i, 2 * i]))[0],
    "diff": lambda i: jnp.diff(jnp.stack([i, 2 * i, 7 * i]))[1],
    "tile": lambda i: jnp.tile(jnp.stack([i, 2 * i]), 2)[3],
    "repeat": lambda i: jnp.repeat(jnp.stack([i, 2 * i]), 2)[1],
    "split": lambda i: jnp.split(v5[:4] + i, 2)[1][0],
    "unstack": lambda i: jnp.unstack(v5 + i)[2],
    "at set": lambda i, x: jnp.zeros(4).at[2].set(x)[2],
    "at set i": lambda i, x: jnp.arange(4.0).at[i].set(x).sum(),
    "at add i": lambda i: jnp.arange(4).at[i].add(5)[2],
    "at mul i": lambda i: jnp.arange(1, 5).at[i].multiply(5)[2],
    "at max row": lambda i: jnp.zeros((3, 2)).at[i].max(m34[0, :2]).sum(),
    "at set two": lambda i, j: jnp.zeros((3, 4)).at[i, j].set(1.0)[1, 2],
    "at set clip": lambda i: jnp.arange(4).at[i].set(9, mode="clip").sum(),
    "update slice": lambda i: lax.dynamic_update_slice(jnp.arange(6), jnp.array([7, 8]), (i,))[3],
    "bincount": lambda i, h: jnp.bincount(jnp.stack([h, h + 1]), length=4)[1],
    "vmap": lambda i: jax.vmap(lambda a: a * i + 1)(v5).sum(),
    "vmap rows": lambda i: jax.vmap(lambda row: row[i])(m34).max(),
    "vmap both": lambda i: jax.vmap(lambda row, k: row[k - i])(m34, jnp.arange(3)).max(),
    "tri": lambda i, j: jnp.tri(4)[i, j],
    "meshgrid": lambda i: (jnp.meshgrid(jnp.arange(3), jnp.arange(2) + i)[1]).sum(),
    "linalg.norm": lambda p: jnp.linalg.norm(jnp.stack([p, 2 * p])),
    "cross": lambda p: jnp.cross(jnp.stack([p, p, p + 1]), m34[0, :3])[1],
    "empty sum": lambda i: jnp.zeros((0,), jnp.int32).sum() + i,
    "empty max": lambda i: jnp.max(jnp.stack([i])[:0], initial=4),
    "empty all": lambda i: (jnp.stack([i])[:0] > 3).all(),
    "searchsorted": lambda i: jnp.searchsorted(offsets, i),
    "searchsorted right": lambda i: jnp.searchsorted(offsets, i, side="right"),
    "searchsorted floats": lambda x: jnp.searchsorted(edges, x),
    "searchsorted all": lambda i: jnp.searchsorted(offsets, i, method="compare_all"),
    "same document": lambda i, j: jnp.searchsorted(offsets, i) == jnp.searchsorted(offsets, j),
    "digitize": lambda x: jnp.digitize(x, edges),
    "interp": lambda p: jnp.interp(p, jnp.array([0.0, 0.3, 1.0]), f5[:3]),
    "polyval": lambda p: jnp.polyval(f5, p),
    "unwrap": lambda p: jnp.unwrap(jnp.stack([p, p + 7, p - 4]))[2],
    "trapezoid": lambda p: jnp.trapezoid(jnp.stack([p, p * p, p + 1])),
    "several results": lambda i, x: (i + 1, {"a": x * 2, "b": [i < 3]}),
}

CONTROL = {
    "switch": lambda i, x: lax.switch(i, [lambda a: a, lambda a: a * 2, lambda a: a - 1], x),
    "switch of two": lambda i, x: lax.switch(i, [lambda: x, lambda: x * 2]),
    "cond": lambda i, x: lax.cond(i > 2, lambda: x + v5[1], lambda: x * 2),
    "cond of known": lambda i: lax.cond(True, lambda a: a, lambda a: -a, i),
    "nested cond": lambda i, j: lax.cond(
        i > 2, lambda: lax.cond(j > i, lambda: v5[i], lambda: j), lambda: i
    ),
    "cond pair": lambda i, x: lax.cond(i > 2, lambda: (i, x), lambda: (3, x * 2))[0],
    "fori": lambda i: lax.fori_loop(0, 5, lambda k, c: c * 3 + k, i),
    "fori reads": lambda i: lax.fori_loop(0, 5, lambda k, c: c + v5[k] * (v5[k] < i), 0),
    "fori reads rows": lambda i: lax.fori_loop(0, 3, lambda k, c: c + m34[k, i], 0.0),
    "fori float": lambda p: lax.fori_loop(0, 4, lambda k, c: c * p + k, 1.0),
    "scan": lambda i: lax.scan(lambda c, a: (c + a * i, c), i, v5)[0],
    "scan ys": lambda i: lax.scan(lambda c, a: (c + a * i, c), i, v5)[1][3],
    "scan reverse": lambda i: lax.scan(lambda c, a: (c - a * i, c * a), i, v5, reverse=True)[1][1],
    "scan rows": lambda i: lax.scan(lambda c, r: (c + r[i], None), 0.0, m34)[0],
    "scan trees": lambda i: lax.scan(
        lambda c, a: ((c[0] + a[0], c[1] ^ a[1]), None), (i, i), (v5, at5)
    )[0][1],
    "scan over nothing": lambda i: lax.scan(lambda c, _: (c * 2, c), i, None, length=3)[1][2],
    "scan of outer": lambda i: lax.scan(lambda c, a: (c + a, c), 0, v5)[1][i],
    "while decided": lambda i: lax.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, i)
    )[1],
    "map": lambda i: lax.map(lambda a: a * i, v5).sum(),
    "python loop": lambda i: functools.reduce(operator.add, [v5[k] * (i + k) for k in range(5)]),
    "jit inside": lambda i: jax.jit(lambda a: v5[a] + 1)(i),
    "jit twice": lambda i, j: (lambda g: g(i) - g(j))(jax.jit(lambda a: v5[a] + 1)),
    "remat": lambda x: jax.checkpoint(lambda a: jnp.tanh(a) * a)(x),
    "associative_scan": lambda i: lax.associative_scan(jnp.add, v5 + i)[4],
}

ACTIVATIONS = {
    name: getattr(jax.nn, name)
    for name in (
        *("relu", "relu6", "silu", "softplus", "sigmoid", "log_sigmoid", "elu", "selu", "celu"),
        *(
            "leaky_relu",
            "hard_tanh",
            "hard_sigmoid",
            "hard_silu",
            "mish",
            "squareplus",
            "soft_sign",
        ),
        *("sparse_plus", "sparse_sigmoid", "tanh", "identity"),
    )
} | {
    "gelu": lambda x: jax.nn.gelu(x),
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax": lambda p: jax.nn.softmax(jnp.stack([p, 2 * p, 1 - p]))[1],
    "log_softmax": lambda p: jax.nn.log_softmax(jnp.stack([p, 2 * p, 1 - p]))[0],
    "logsumexp": lambda x, y: jax.nn.logsumexp(jnp.stack([x, y])),
    "logsumexp b": lambda p: jax.nn.logsumexp(jnp.stack([p, 2 * p]), b=jnp.array([1.0, -0.5])),
    "standardize": lambda p: jax.nn.standardize(jnp.stack([p, p * p, p + 1]))[0],
    "log1mexp": lambda p: jax.nn.log1mexp(p),
}

_OF_ONE = (
    *("sinc", "nan_to_num", "isnan", "isinf", "isfinite", "signbit", "isneginf", "isposinf"),
    *("exp2", "cbrt", "round", "trunc", "rint", "sign", "abs", "fabs", "negative", "positive"),
    *("reciprocal", "square", "sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "floor"),
    *("ceil", "sin", "cos", "tan", "arctan", "tanh", "sinh", "cosh", "arcsin", "arccos"),
    *("arcsinh", "arccosh", "arctanh", "deg2rad", "rad2deg"),
)
_OF_TWO = (
    *("logaddexp", "logaddexp2", "hypot", "heaviside", "fmod", "floor_divide", "remainder"),
    *("power", "float_power", "copysign", "maximum", "minimum", "fmax", "fmin", "arctan2"),
    *("add", "subtract", "multiply", "divide", "nextafter", "equal", "less", "greater_equal"),
)


def _one(f):
    return lambda x: f(x)


def _two(f):
    return lambda x, y: f(x, y)


FLOATS = {name: _one(getattr(jnp, name)) for name in _OF_ONE}
FLOATS |= {name: _two(getattr(jnp, name)) for name in _OF_TWO}
FLOATS |= {
    "divmod": lambda x, y: jnp.divmod(x, y),
    "modf": lambda x: jnp.modf(x),
    "round 2": lambda p: jnp.round(p, 2),
    "x ** 3": lambda x: x**3,
    "x ** -2": lambda x: x**-2,
    "x ** 0": lambda x: x**0,
    "x ** i": lambda x, h: x ** jnp.minimum(h, 6),
    "x ** 0.5": lambda p: p**0.5,
    "ldexp": lambda p, h: jnp.ldexp(p, h % 9),
    "frexp": lambda p: jnp.frexp(p),
    "clip": lambda x, y: jnp.clip(x, y, 1.0),
    "isclose": lambda x, y: jnp.isclose(x, y),
    "erf": lambda x: lax.erf(x),
    "erfc": lambda x: lax.erfc(x),
    "erf_inv": lambda p: lax.erf_inv(p),
    "rsqrt": lambda p: lax.rsqrt(p),
    "round away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rem": lambda x, y: lax.rem(x, y),
    "integer_pow": lambda p: lax.integer_pow(p, 5),
    "bits": lambda x: lax.bitcast_convert_type(jnp.abs(x), jnp.int32),
    "from bits": lambda h: lax.bitcast_convert_type(h, jnp.float32),
    "to bfloat16": lambda x: lax.reduce_precision(x, 8, 7),
    "to float16": lambda x: lax.reduce_precision(x, 5, 10),
    "to float32": lambda x: lax.reduce_precision(x, 8, 23),
    "xlogy": lambda p: jax.scipy.special.xlogy(p, p),
    "entr": lambda p: jax.scipy.special.entr(p),
    "expit": lambda x: jax.scipy.special.expit(x),
    "logit": lambda p: jax.scipy.special.logit(p * 0.9),
    "ndtr": lambda x: jax.scipy.special.ndtr(x),
    "log_ndtr": lambda p: jax.scipy.special.log_ndtr(p),
    "ndtri": lambda p: jax.scipy.special.ndtri(p * 0.9),
    "nan_to_num 3": lambda x: jnp.nan_to_num(x, nan=1.0, posinf=5.0, neginf=-6.0),
    "where": lambda x, y: jnp.where(jnp.isnan(x), y, x),
    "lexical": lambda x: jnp.where(x < 0, -x, x) + 0.0,
}

INTEGERS = {
    "floor_divide": lambda i, j: i // j,
    "remainder": lambda i, j: i % j,
    "divmod": lambda i, j: divmod(i, j),
    "fmod": lambda i, j: jnp.fmod(i, j),
    "lax.div": lambda i, j: lax.div(i, jnp.where(j == 0, 3, j)),
    "lax.rem": lambda i, j: lax.rem(i, jnp.where(j == 0, 3, j)),
    "true_divide": lambda i, j: i / j,
    "abs": lambda i: jnp.abs(i),
    "sign": lambda i: jnp.sign(i),
    "i ** 3": lambda i: i**3,
    "i ** h": lambda i, h: i ** jnp.minimum(h, 7),
    "and": lambda i, j: (i & j) | (i ^ 5),
    "bitwise": lambda i, j: jnp.bitwise_or(jnp.bitwise_xor(i, j), jnp.bitwise_and(i, 12)),
    "invert": lambda i: ~i,
    "invert bool": lambda i: ~(i < 3),
    "shift": lambda i, h: (i << (h % 32)) + (i >> (h % 31)),
    "left_shift": lambda i: jnp.left_shift(i, 3),
    "shift logical": lambda i: lax.shift_right_logical(i, 5),
    "shift too far": lambda i: (i << 33, i >> 40, lax.shift_right_logical(i, -1)),
    "population_count": lambda i: lax.population_count(i),
    "bitwise_count": lambda i: jnp.bitwise_count(i),
    "clz": lambda i: lax.clz(i),
    "max": lambda i, j: jnp.maximum(i, j) - jnp.minimum(i, j),
    "square": lambda i: jnp.square(i),
    "logical": lambda i, j: jnp.logical_xor(i > 0, jnp.logical_and(i, jnp.logical_not(j))),
    "float of": lambda i: i.astype(jnp.float32) / 3,
    "unsigned": lambda i, j: i.astype(jnp.uint32) // (j.astype(jnp.uint32) | 1),
    "unsigned compare": lambda i, j: i.astype(jnp.uint32) < j.astype(jnp.uint32),
    "int8": lambda i, j: i.astype(jnp.int8) * j.astype(jnp.int8),
    "uint8": lambda i, j: i.astype(jnp.uint8) - j.astype(jnp.uint8) // jnp.uint8(3),
    "to int8 and back": lambda i: i.astype(jnp.int8).astype(jnp.int32),
    "float to int": lambda p: (p * 100).astype(jnp.int32),
    "weak": lambda i: i * 2.5 + 1,
    "bool arithmetic": lambda i, j: (i < j) * 3 + (i == j),
    "python in": lambda i: (i == 3) | (i == 5),
    "distance": lambda i, j: -jnp.abs(i - j) * 0.5,
    "alibi": lambda x, h, i, j: x + (i - j) * jnp.exp2(-(h + 1.0)),
    "minimum of many": lambda i: jnp.min(jnp.abs(at5 - i)),
}

GROUPS = {
    "indexing": INDEXING,
    "small": SMALL,
    "control": CONTROL,
    "activations": ACTIVATIONS,
    "floats": FLOATS,
    "integers": INTEGERS,
}


def _called(fn):
    """jax.nn's functions are called with x, whatever they call it."""
    return fn if set(inspect.signature(fn).parameters) <= set(COLUMNS) else lambda x: fn(x)


@functools.cache
def _group(group):
    """Of each function of a group its program, what it captures, and what it gives under JAX: compiled together."""
    functions = {name: _called(fn) for name, fn in GROUPS[group].items()}
    traced = {name: trace(fn, arguments_of(fn)) for name, fn in functions.items()}

    def both(columns):
        expected, evaluated = {}, {}
        for name, fn in functions.items():
            given = {a: columns[a] for a in columns_of(fn)}
            expected[name] = fn(*given.values())
            evaluated[name] = evaluate(traced[name][0], given, traced[name][1])
        return expected, evaluated

    return functions, traced, *jitted(jax.vmap(both), COLUMNS)


@pytest.mark.parametrize(("group", "name"), [(g, name) for g in GROUPS for name in GROUPS[g]])
def test_as_jax(group, name):
    functions, traced, expected, evaluated = _group(group)
    program, captured = traced[name]
    compare(evaluated[name], expected[name])
    check_code(program, captured, columns_of(functions[name]), expected[name])


# Random bits

key, legacy_key = jax.random.key(3), jax.random.PRNGKey(5)
keys = jax.random.split(jax.random.key(1), 4)
legacy_keys = jax.random.split(jax.random.PRNGKey(2), 4)


def folded(i):
    return jax.random.fold_in(key, i)


RANDOM = {
    "bits": lambda i: jax.random.bits(folded(i)),
    "8 bits": lambda i: jax.random.bits(folded(i), (), jnp.uint8),
    "16 bits": lambda i: jax.random.bits(jax.random.fold_in(legacy_key, i), (3,), jnp.uint16)[2],
    "uniform": lambda i: jax.random.uniform(folded(i), minval=-2),
    "legacy": lambda i: jax.random.uniform(jax.random.fold_in(legacy_key, i)),
    "bfloat16": lambda i: jax.random.uniform(folded(i), (), jnp.bfloat16).astype(jnp.float32),
    "one of 5": lambda i: jax.random.uniform(folded(i), (5,))[3],
    "bernoulli": lambda i: jax.random.bernoulli(folded(i), 0.3),
    "normal": lambda i: jax.random.normal(folded(i)),
    "gumbel": lambda i: jax.random.gumbel(folded(i)),
    "exponential": lambda i: jax.random.exponential(folded(i)),
    "randint": lambda i: jax.random.randint(folded(i), (), -3, 11),
    "choice": lambda i: jax.random.choice(folded(i), v5),
    "fold twice": lambda i, j: jax.random.uniform(jax.random.fold_in(folded(i), j)),
    "split": lambda i, h: jax.random.uniform(jax.random.split(folded(i), 3)[h % 3]),
    "split outside": lambda h: jax.random.uniform(jax.random.split(key, 4)[h % 4]),
    "keys": lambda i, j: jax.random.uniform(jax.random.fold_in(keys[i], j)),
    "legacy keys": lambda i: jax.random.uniform(legacy_keys[i]),
    "known key": lambda i: jax.random.bits(jax.random.fold_in(jax.random.key(7), i)),
    "known legacy": lambda i: jax.random.bits(jax.random.fold_in(jax.random.PRNGKey(7), i)),
    "seed": lambda i: jax.random.bits(jax.random.key(i)),
    "legacy seed": lambda i: jax.random.bits(jax.random.PRNGKey(i)),
    "where": lambda i: jax.random.bits(jnp.where(i > 2, key, keys[1])),
    "cond": lambda i: jax.random.bits(lax.cond(i > 2, lambda: key, lambda: keys[i])),
    "clone": lambda i: jax.random.bits(jax.random.clone(folded(i))),
    "data": lambda i: jax.random.key_data(folded(i))[1],
    "wrapped": lambda i: jax.random.bits(
        jax.random.wrap_key_data(jnp.stack([i, i]).astype(jnp.uint32))
    ),
    "vmap": lambda i: jax.vmap(jax.random.uniform)(jax.random.split(folded(i), 3)).sum(),
    "scan": lambda i: lax.scan(
        lambda c, k: (c ^ jax.random.bits(jax.random.fold_in(k, i)), None), jnp.uint32(0), keys
    )[0],
    "dropout": lambda x, i, j: jnp.where(
        jax.random.uniform(folded(i * 64 + j)) < 0.1, 0.0, x / 0.9
    ),
}


@pytest.mark.parametrize("partitionable", [True, False])
def test_random_bits_are_those_of_jax(partitionable):
    """Compiled together, which is ten times as fast. The older order of bits differs in a few of them only."""
    older = ("bits", "8 bits", "16 bits", "one of 5", "split", "keys")
    random = {n: fn for n, fn in RANDOM.items() if partitionable or n in older}
    with jax.threefry_partitionable(partitionable):
        traced = {n: trace(fn, arguments_of(fn)) for n, fn in random.items()}

        def all_of(columns):
            return {n: fn(*(columns[a] for a in columns_of(fn))) for n, fn in random.items()}

        expected = jitted(jax.vmap(all_of), COLUMNS)
        for name, (program, captured) in traced.items():
            assert not program.code.opaque, name
            values = inline_numpy.run_all(program.code, COLUMNS, program.prepare(captured))
            compare(values[program.code.results[0]], expected[name], rtol=1e-4)
        for name in ("keys", "16 bits"):
            check(RANDOM[name])


# Functions with derivative rules of their own


@jax.custom_jvp
def tripled(x):
    """Twice x, with a derivative of 3."""
    return x * 2


@jax.custom_vjp
def same(x):
    """x, with a derivative of 10."""
    return x


@jax.custom_vjp
def both(x):
    return x, x


@jax.custom_vjp
def sines(x):
    y = jnp.sin(x)
    return y, y


@jax.custom_vjp
def swapped(x, y):
    return y, x


@jax.custom_vjp
def three(x):
    return jnp.float32(3)


@jax.custom_vjp
def entry(table, i):
    return table[i]


@jax.custom_jvp
def squares(a):
    return a * a


@jax.custom_vjp
def with_index(i, x):
    return i + 1, x * i


@jax.custom_vjp
def with_parts(i, x):
    """What its integers and booleans are made of is known inside only."""
    part = (i % 8) * 2
    return part - 3, ~(part < 4), jnp.where(part < 2, part, part + 5), x * part


@jax.custom_jvp
def outermost(x):
    return tripled(x) + jnp.sin(x)


@jax.custom_jvp
def hard(x):
    """What no kernel computes."""
    return jax.scipy.special.gammaln(x)


for rule, factor in ((tripled, 3), (squares, 4), (outermost, 100), (hard, 11)):
    rule.defjvp(lambda p, t, rule=rule, factor=factor: (rule(*p), t[0] * factor))
same.defvjp(lambda x: (x, None), lambda _, g: (g * 10,))
both.defvjp(lambda x: ((x, x), None), lambda _, g: (g[0] * 2 + g[1] * 5,))
sines.defvjp(lambda x: (sines(x), None), lambda _, g: (g[0] * 2 + g[1] * 5,))
swapped.defvjp(lambda x, y: ((y, x), None), lambda _, g: (g[0] * 2, g[1] * 5))
three.defvjp(lambda x: (jnp.float32(3), None), lambda _, g: (g * 7,))
entry.defvjp(lambda t, i: (t[i], t.shape), lambda shape, g: (jnp.full(shape, g * 2), None))
with_parts.defvjp(lambda i, x: (with_parts(i, x), None), lambda _, g: (None, g[3] * 8))
with_index.defvjp(lambda i, x: ((i + 1, x * i), None), lambda _, g: (None, g[1] * 6))

# From a captured table to a function.
RULED = {
    "jvp": lambda t: lambda x, i: tripled(x) * t[i],
    "an input": lambda t: lambda x, i: same(x) * t[i],
    "an input twice": lambda t: lambda x, i: (lambda a, b: a * 3 + b * t[i])(*both(x)),
    "inputs": lambda t: lambda x, i: (lambda a, b: a * 3 + b * 7)(*swapped(x, t[i])),
    "a result twice": lambda t: lambda x, i: (lambda a, b: a * 3 + b * t[i])(*sines(x)),
    "a constant of another": lambda t: lambda x, i: three(tripled(x)) * t[i],
    "a constant": lambda t: lambda x, i: three(x) * t[i],
    "of a captured array": lambda t: lambda x, i: entry(t, i) * x,
    "of a captured number": lambda t: lambda x, i: swapped(t[0], x)[1] * x + same(t[1]),
    "of captured arrays only": lambda t: lambda x, i: squares(t)[i] * x + (squares(t) * 2)[1],
    "of an array": lambda t: lambda x, i: squares(jnp.stack([x, x + 1])).sum() * t[i],
    "an element": lambda t: lambda x, i: squares(jnp.stack([x, x + 1]))[i % 2] * t[i],
    "of an index": lambda t: lambda x, i: (lambda a, b: b * t[a])(*with_index(i % 4, x)),
    "of parts": lambda t: lambda x, i: (
        lambda a, b, c, d: d * jnp.where((a <= 0) & ~b, t[jnp.minimum(c, 4)], 3)
    )(*with_parts(i, x)),
    "nested": lambda t: lambda x, i: outermost(x) * t[i] + tripled(x),
    "twice": lambda t: lambda x, i: tripled(x) + tripled(x) * t[i] + x * 2,
    "equal outside after": lambda t: lambda x, i: tripled(x) + x * 2,
    "equal outside before": lambda t: lambda x, i: x * 2 + tripled(x),
    "of itself": lambda t: lambda x, i: tripled(same(tripled(same(x)))),
    "relu": lambda t: lambda x, i: jax.nn.relu(x) * t[i] + jax.nn.relu(x - 1),
    "silu": lambda t: lambda x, i: jax.nn.silu(x) + jax.nn.softplus(x) * t[i],
    "in cond": lambda t: lambda x, i: lax.cond(i > 2, lambda: tripled(x), lambda: same(x) * t[i]),
    "in scan": lambda t: lambda x, i: lax.scan(lambda c, a: (tripled(c) + a * x, None), x, t)[0],
    "in fori": lambda t: lambda x, i: lax.fori_loop(0, 3, lambda k, c: same(c) * 0.5 + t[k], x),
    "in jit": lambda t: lambda x, i: jax.jit(lambda a: same(a) * tripled(a) * t[i])(x),
    "in vmap": lambda t: lambda x, i: jax.vmap(lambda a: tripled(a * x))(t).sum(),
    "in remat": lambda t: lambda x, i: jax.checkpoint(lambda a: jnp.sin(same(a)) * t[i])(x),
    "stop_gradient": lambda t: lambda x, i: lax.stop_gradient(x) * x * t[i],
    "grad inside": lambda t: lambda x, i: jax.grad(lambda a: tripled(a) * a)(x) * t[i],
    "unused": lambda t: lambda x, i: (tripled(x), x * t[i])[1],
    "one of two used": lambda t: lambda x, i: swapped(x, t[i])[0] * x,
    "views": lambda t: lambda x, i: t[::-1][i] * x + t[-1] + t[2] * t[3] + m34.T[i, 1],
    "opaque inside": lambda t: lambda x, i: hard(jnp.abs(x) + 1) * t[i],
    "opaque": lambda t: lambda x, i: jax.scipy.special.gammaln(jnp.abs(x) + 1) * t[i] + jnp.abs(x),
    "opaque sort": lambda t: lambda x, i: jnp.sort(jnp.stack([x, x * 2, t[i]]))[1] * x,
    "opaque loop": lambda t: lambda x, i: x * t[0]
    * lax.while_loop(lambda c: c[0] < i % 4, lambda c: (c[0] + 1, c[1]), (0, i))[0],
}  # fmt: skip


def test_derivative_rules_are_kept():
    """With respect to the argument and to the captured table: all of `RULED` in one compilation."""
    x = jnp.asarray([0.5, -0.3, 1.5, 2.25, -1.5, 0.1], jnp.float32)
    i = jnp.asarray([0, 3, -1, 4, 1, -5], jnp.int32)
    weights = jnp.arange(1.0, 7.0)
    traced = {n: trace(make(f5), {"x": "float32", "i": "int32"}) for n, make in RULED.items()}

    def by_jax(name, x, t):
        return weights @ jax.vmap(RULED[name](t))(x, i)

    def by_program(name, x, t):
        program, captured = traced[name]
        captured = [t if c is f5 else c for c in captured]
        return weights @ jax.vmap(lambda x, i: evaluate(program, {"x": x, "i": i}, captured))(x, i)

    def all_of(total):
        def gradients(x, t):
            return {n: jax.value_and_grad(functools.partial(total, n), (0, 1))(x, t) for n in RULED}

        return jitted(gradients, x, f5)

    expected, found = all_of(by_jax), all_of(by_program)
    for name, (program, captured) in traced.items():
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected[name]), strict=True):
            np.testing.assert_allclose(a, b, 2e-5, 1e-5, err_msg=name)
        assert bool(program.code.opaque) == name.startswith("opaque"), name
        if not program.code.opaque:  # what a kernel computes, without the rules
            values = inline_numpy.run_all(program.code, {"x": x, "i": i}, program.prepare(captured))
            total = weights @ values[program.code.results[0]]
            np.testing.assert_allclose(total, expected[name][0], 1e-4, 1e-4, err_msg=name)


def test_a_rule_gets_captured_numbers_as_values():
    """So that what is read is seen by who differentiates with respect to it."""
    program, _ = trace(RULED["of a captured number"](f5), {"x": "float32", "i": "int32"})
    assert [type(v).__name__ for r in program.regions for v in r.inputs] == ["Scalars", "Scalars"]


def test_a_view_is_no_operand():
    """Rows, columns, transposes and single elements are read where they lie."""

    def fn(i, j):
        loop = sum(t234[1, k, 2] * j for k in range(3))
        scan = lax.scan(lambda c, row: (c + row[1, i], None), 0.0, t234)[0]
        turned = t234.T[i, j, 1] + t234[:, 1][j, i] + t234.reshape(2, 1, 3, 4)[j, 0, i, i]
        return loop + scan + turned + jnp.broadcast_to(t234[0, 0, 3], (5,))[i]

    program, captured = trace(fn, arguments_of(fn))
    assert len(captured) == len(program.code.operands) == 1
    assert program.prepare(captured)[0] is captured[0]


# Limits


OPAQUE = {
    "a loop too long": (lambda i: lax.fori_loop(0, 5000, lambda k, c: c ^ k, i), "5000 steps"),
    "a loop of unknown length": (
        lambda i: lax.fori_loop(0, i % 9, lambda k, c: c + k, 0),
        "depends on an index",
    ),
    "an array too large": (lambda i: (jnp.arange(2000) == i).any(), "(2000,)"),
    "a product too large": (lambda x: (jnp.ones((40, 40)) @ jnp.full(40, x))[0], "1600 products"),
    "no code": (lambda x: jnp.sort(jnp.stack([x, x + 1]))[0], "`sort`"),
    "igamma": (lambda p: lax.igamma(p, p), "`igamma`"),
    "complex": (lambda x: jnp.abs(x + 1j), "complex64"),
    "a captured complex": (lambda i: c5[i].real + c5[1].imag * i, "complex64"),
    "8-bit floats": (lambda x: (x.astype(jnp.float8_e5m2) * 2).astype(jnp.float32), "float8_e5m2"),
    "bits taken apart": (lambda i: lax.bitcast_convert_type(i, jnp.uint8)[1], "bits apart"),
    "other precisions": (lambda x: lax.reduce_precision(x, 4, 3), "4 and 3 bits"),
    "a write to a large array": (
        lambda i: jnp.zeros(600).at[jnp.stack([i, i])].set(1.0)[3],
        "writes 2 numbers",
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_stays_opaque_says_why_and_runs_under_jax(name):
    assert_opaque(*OPAQUE[name])


def test_loops_that_unroll_to_too_many_operations(monkeypatch):
    """The outer loop is opaque, what stands around it is not."""
    monkeypatch.setattr(_trace, "Builder", functools.partial(Builder, limit=200))

    def steps(x, n):
        def inner(_, c):
            return lax.fori_loop(0, n, lambda k, d: d * 1.5 + k, c)

        return lax.fori_loop(0, n, inner, x)

    code = assert_opaque(
        lambda p: steps(p * 2, 3) + steps(p, 20), "`scan` unrolls to too many operations"
    )
    assert sum(e.op == "mul" for e in code.equations) == 10
    assert sum(e.op == "opaque" for e in code.equations) == 1


def assert_opaque(fn, why):
    program, captured = trace(fn, arguments_of(fn))
    assert program.code.opaque
    for reason in program.code.opaque:
        assert why in reason or "`real`" in reason or "`imag`" in reason, reason
        assert reason.count("File") == 1, reason
        assert f'{__file__.rsplit("/", 1)[1]}", line ' in reason
    columns = columns_of(fn)
    found = jitted(jax.vmap(lambda scalars: evaluate(program, scalars, captured)), columns)
    compare(found, jitted(jax.vmap(fn), *columns.values()))
    return program.code


def test_a_message_names_its_own_caller():
    """JAX keeps the jaxpr of `jnp.sort`, with the lines of who called it first."""

    def first(x):
        return jnp.sort(jnp.stack([x, x, x]))[0]

    def second(x):
        return jnp.sort(jnp.stack([x, x, x]))[0]

    for fn in (first, second):
        (reason,) = assert_opaque(fn, "`sort`").opaque
        assert f"line {inspect.getsourcelines(fn)[1] + 1})" in reason


# Dtypes

OF_ANY_DTYPE = {
    "identity": lambda x, _: x,
    "weak int": lambda x, _: x * 2 + 1,
    "weak float": lambda x, _: x * 0.5 - 0.25,
    "compare": lambda x, _: x > 1,
    "divide": lambda x, _: x / 3,
    "floor": lambda x, _: x // 3,
    "remainder": lambda x, _: x % 3,
    "negative": lambda x, _: -x,
    "abs": lambda x, _: jnp.abs(x),
    "sign": lambda x, _: jnp.sign(x),
    "power": lambda x, _: x**2,
    "where": lambda x, _: jnp.where(x > 0, x, 0),
    "maximum": lambda x, _: jnp.maximum(x, 1),
    "clip": lambda x, _: jnp.clip(x, 1, 2),
    "sum": lambda x, _: jnp.stack([x, x]).sum(),
    "mean": lambda x, _: jnp.stack([x, x]).mean(),
    "min": lambda x, _: jnp.stack([x, x]).min(),
    "any": lambda x, _: jnp.stack([x, x]).any(),
    "argmax": lambda x, _: jnp.argmax(jnp.stack([x, x])),
    "dot": lambda x, _: jnp.dot(jnp.stack([x, x]), jnp.stack([x, x])),
    "exp": lambda x, _: jnp.exp(x),
    "round": lambda x, _: jnp.round(x),
    "invert": lambda x, _: ~x,
    "bits": lambda x, _: (x & 3) | (x << 2),
    "read": lambda x, t: t[x.astype(jnp.int32)],
    "fill": lambda x, t: jnp.take(t, x.astype(jnp.int32), mode="fill"),
    **{f"to {d}": lambda x, _, d=d: x.astype(d) for d in inline_programs.all_dtypes()},
}  # fmt: skip


def _takes(fn, dtype):
    try:
        jax.eval_shape(fn, jax.ShapeDtypeStruct((), dtype), jnp.ones(2, dtype))
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("dtype", [*inline_programs.all_dtypes(), "int64", "uint64", "float64"])
def test_dtypes(dtype):
    """In and out, with Python numbers, which are weak."""
    with jax.enable_x64(dtype.endswith("64")), np.errstate(all="ignore"):
        values = inline_programs.edge_values(dtype, 1, 20)
        if jnp.issubdtype(dtype, jnp.floating):  # some flush subnormals, others do not
            values = values[~((values != 0) & (np.abs(values) < jnp.finfo(dtype).tiny * 4))]
        table = jnp.asarray(inline_programs.edge_values(dtype, 3, 20))
        taken = {n: fn for n, fn in OF_ANY_DTYPE.items() if _takes(fn, dtype)}
        assert len(taken) > 24

        def all_of(x):
            return {n: fn(x, table) for n, fn in taken.items()}

        expected = jitted(jax.vmap(all_of), values)
        for name, fn in taken.items():
            program, captured = trace(lambda x, fn=fn: fn(x, table), {"x": dtype})
            assert not program.code.opaque, name
            run = inline_numpy.run_all
            narrow = "float16" in program.code.text
            if narrow:  # rounds after each operation, as JAX does
                run = functools.partial(run_all, held=False)
            found = run(program.code, {"x": values}, program.prepare(captured))
            n, wanted = program.code.results[0], expected[name]
            assert program.code.equations[n].dtype == wanted.dtype, name
            compare(found[n], wanted, rtol=1e-2 if narrow else 1e-5)
