"""Functions of JAX as scalar code: every one gives what JAX gives, run as code and evaluated."""

import functools
import inspect
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_programs import run_all
from jax import lax

from eqxcute.inline import Argument, evaluate, trace

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
