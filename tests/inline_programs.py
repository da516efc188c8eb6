"""Random programs over the whole table of primitives, and their values under JAX.

A program is known by its seed: `random_code(7)` is the same anywhere.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcute.inline import Argument, Code, Equation, _table
from eqxcute.inline._code import Builder, Operand, constant
from eqxcute.inline._interval import ends_dtype, everything

_NARROW = (
    "bool",
    *("int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32"),
)
_WIDE = ("int64", "uint64", "float64")

OPERANDS = (
    Operand("int32", 1),
    Operand("float32", 2),
    Operand("bool", 2),
    Operand("int8", 1),
    Operand("bfloat16", 1),
    Operand("uint32", 3),
    Operand("float32", 0),
)


def all_dtypes() -> tuple[str, ...]:
    return (*_NARROW, *_WIDE) if jax.config.jax_enable_x64 else _NARROW


def _is(dtype: str, kind: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), kind)


def taken(kind: str, dtypes: Sequence[str] | None = None) -> list[str]:
    """The dtypes that a row with `takes=kind` has."""
    allowed = {
        "any": lambda d: True,
        "number": lambda d: d != "bool",
        "integer": lambda d: _is(d, jnp.integer),
        "float": lambda d: _is(d, jnp.floating),
        "bits": lambda d: not _is(d, jnp.floating),
        "bool": lambda d: d == "bool",
        "signed": lambda d: _is(d, jnp.floating) or _is(d, jnp.signedinteger),
    }[kind]
    return [d for d in (dtypes or all_dtypes()) if allowed(d)]


def edge_values(dtype: Any, seed: int = 0, count: int = 0) -> np.ndarray:
    """Where arithmetic breaks, and then `count` random numbers, small ones and any bits alike."""
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return np.concatenate([[False, True], rng.random(count) < 0.5])
    bits = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype)
    small = rng.integers(0, 9, count) - (0 if _is(dtype, jnp.unsignedinteger) else 4)
    if not _is(dtype, jnp.floating):
        info = np.iinfo(dtype)
        ends = [0, 1, 2, info.max, info.max - 1, info.min, info.min + 1, info.max // 2 + 1, 7]
        if info.min < 0:
            ends += [-1, -2, -7]
        edges = np.array(ends, object).astype(dtype)
        return np.concatenate([edges, np.where(rng.random(count) < 0.6, small.astype(dtype), bits)])
    info = jnp.finfo(dtype)
    tiny, least = float(info.smallest_normal), float(info.smallest_subnormal)
    top, eps = float(info.max), float(info.eps)
    sizes = [0.0, 1.0, 0.5, 1.5, 2.5, np.inf, top, top / 2, tiny, tiny / 2, least, 1 + eps, 1 - eps]
    sizes += [3.1415927, 88.5, 2.0**31, 2.0**32, 300.0]
    with np.errstate(over="ignore"):
        edges = np.array([s * x for x in sizes for s in (1, -1)] + [np.nan], np.float64).astype(
            dtype
        )
        drawn = (rng.standard_normal(count) * 3).astype(dtype)
    choice = rng.integers(0, 3, count)
    picked = np.where(choice == 0, drawn, np.where(choice == 1, small.astype(dtype), bits))
    return np.concatenate([edges, picked.astype(dtype)])


@functools.cache
def _edges(dtype: str, seed: int) -> np.ndarray:
    return edge_values(dtype, seed, 24)


def default_arguments(dtypes: Sequence[str] | None = None) -> tuple[Argument, ...]:
    """Indices `q` and `kv`, and one argument of each dtype."""
    of_each = [Argument(f"x_{d}", d) for d in (dtypes or all_dtypes())]
    return (Argument("q", "int32", 0), Argument("kv", "int32", 0), *of_each)


class _Generator:
    def __init__(self, seed, arguments, operands, rows, dtypes):
        self.rng = np.random.default_rng(seed)
        self.dtypes = tuple(dtypes)
        self.rows = list(rows)
        self.build = Builder()
        self.build.operands.extend(operands)
        # A third of all programs keep what the builder would fold.
        self.direct = self.rng.random() < 0.3
        self.pool: dict[str, list[int]] = {}
        for a in arguments:
            self.add(self.build.argument(a))

    def add(self, n: int) -> int:
        numbers = self.pool.setdefault(self.build.equations[n].dtype, [])
        if n not in numbers:
            numbers.append(n)
        return n

    def pick(self, of: Sequence) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def const(self, dtype: str) -> int:
        value = self.pick(_edges(dtype, int(self.rng.integers(8))))
        return self.add(self.build.const(value, dtype))

    def value(self, dtype: str) -> int:
        """Some value of this dtype, made if there is none."""
        pool = self.pool.get(dtype, [])
        chance = self.rng.random()
        if pool and chance < 0.75:
            # Recent ones more often: programs get deep.
            return pool[-1 - int(self.rng.integers(len(pool)) * self.rng.random())]
        if chance < 0.9 or dtype == "bool":
            return self.const(dtype)
        source = self.pick([d for d in self.pool if self.pool[d]])
        return self.op("convert_element_type", self.value_of(source), new_dtype=dtype)

    def value_of(self, dtype: str) -> int:
        return self.pick(self.pool[dtype])

    def op(self, name: str, *inputs: int, **params: Any) -> int:
        if not self.direct:
            return self.add(self.build.op(name, *inputs, **params))
        dtypes = [self.build.equations[n].dtype for n in inputs]
        dtype = jnp.dtype(_table.ROWS[name].dtype(*dtypes, **params)).name
        equation = Equation(name, dtype, inputs, tuple(sorted(params.items())))
        return self.add(self.build._append(equation, everything(dtype)))

    def read(self) -> int:
        k = int(self.rng.integers(len(self.build.operands)))
        indices = []
        for dim in range(self.build.operands[k].rank):
            i = self.value("int32")
            if self.rng.random() < 0.3:
                i = self.op("wrap", i, self.add(self.build.size(k, dim)))
            indices.append(i)
        return self.add(self.build.read(k, indices))

    def row(self, name: str) -> int | None:
        row = _table.ROWS[name]
        dtypes = taken(row.takes, self.dtypes)
        if not dtypes:
            return None
        dtype, params = self.pick(dtypes), {}
        if name == "convert_element_type":
            params["new_dtype"] = self.pick(self.dtypes)
        elif name == "bitcast_convert_type":
            width = jnp.dtype(dtype).itemsize
            params["new_dtype"] = self.pick(
                [d for d in self.dtypes if d != "bool" and jnp.dtype(d).itemsize == width]
            )
        elif name == "integer_pow":
            lowest = -3 if _is(dtype, jnp.floating) else 0
            params["y"] = int(self.rng.integers(lowest, 6))
        elif name == "round":
            params["rounding_method"] = int(self.rng.integers(2))
        elif name == "reduce_precision":
            bits = self.pick(((8, 7), (5, 10), (8, 23)))
            params |= dict(zip(("exponent_bits", "mantissa_bits"), bits, strict=True))
        elif name == "select_n":
            return self.select(dtype)
        return self.op(name, *(self.value(dtype) for _ in range(row.arity or 1)), **params)

    def select(self, dtype: str) -> int:
        count = 2
        if self.rng.random() < 0.6 or "int32" not in self.dtypes:
            which = self.value("bool")
        else:  # in range: what JAX does outside is not said
            count = int(self.rng.integers(2, 5))
            low, high = (self.build.const(np.int32(n), "int32") for n in (0, count - 1))
            which = self.op("clamp", low, self.value("int32"), high)
        return self.op("select_n", which, *(self.value(dtype) for _ in range(count)))


def random_code(
    seed: int,
    *,
    arguments: Sequence[Argument] | None = None,
    operands: Sequence[Operand] | None = None,
    equations: tuple[int, int] = (8, 25),
    rows: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
) -> Code:
    """A program of between so many operations. Every value is a result, or what one is made of.

    `rows`: names of rows of the table, all by default. `dtypes`: what values may have, all by default.
    """
    dtypes = tuple(dtypes or all_dtypes())
    arguments = default_arguments(dtypes) if arguments is None else tuple(arguments)
    if operands is None:
        operands = [o for o in OPERANDS if o.dtype in dtypes] if "int32" in dtypes else []
    make = _Generator(seed, arguments, operands, rows or _table.ROWS, dtypes)
    start = len(make.build.equations)
    wanted = int(make.rng.integers(equations[0], equations[1] + 1))
    for _ in range(3 * wanted):
        if len(make.build.equations) - start >= wanted:
            break
        if operands and make.rng.random() < 0.08:
            make.read()
        else:
            make.row(make.pick(make.rows))
    found = make.build.equations
    used = {n for e in found for n in e.inputs}
    results = [n for n in range(start, len(found)) if n not in used] or [len(found) - 1]
    return Code(tuple(arguments), tuple(operands), tuple(found), tuple(results))


def random_operands(code: Code, seed: int = 0, longest: int = 12) -> list[np.ndarray]:
    """An array for each operand, of small sizes."""
    rng = np.random.default_rng(seed)
    arrays = []
    for i, o in enumerate(code.operands):
        shape = tuple(int(n) for n in rng.integers(1, longest + 1, o.rank))
        values = edge_values(o.dtype, seed + i, 2 * longest)
        arrays.append(rng.choice(values, shape).astype(jnp.dtype(o.dtype)))
    return arrays


def random_arguments(code: Code, seed: int = 0, size: int = 64) -> dict[str, np.ndarray]:
    """`size` values for each argument, edges among them. Arguments with a `low` stay small and above it."""
    rng = np.random.default_rng(seed)
    values = {}
    for i, a in enumerate(code.arguments):
        pool = edge_values(a.dtype, seed + i, size)
        if a.low is not None:
            pool = np.array([0, 1, 2, 3, 5, 8, 13, 40], pool.dtype) + pool.dtype.type(a.low)
        values[a.name] = rng.choice(pool, size).astype(jnp.dtype(a.dtype))
    return values


def run_all(
    code: Code, arguments: Mapping[str, Any], operands: Sequence[Any], *, held: bool = True
) -> list[Any]:
    """The values of all equations, op by op under JAX, over arrays of arguments of one shape.

    `held`: 16-bit floats are computed in float32, as kernels do, and rounded where they are converted to or their bits
    are taken; the values are returned as float32. Otherwise each operation rounds, as JAX does.
    """
    shape = np.broadcast_shapes(*(np.shape(v) for v in arguments.values()))
    values: list[Any] = []
    for e in code.equations:
        values.append(
            _run(e, [values[n] for n in e.inputs], code, arguments, operands, shape, held)
        )
    return values


def _run(e: Equation, inputs, code: Code, arguments, operands, shape, held: bool) -> Any:
    dtype = jnp.dtype(e.dtype)
    kept = ends_dtype(dtype) if held else dtype
    if e.op == "argument":
        return jnp.broadcast_to(jnp.asarray(arguments[e["name"]], dtype), shape).astype(kept)
    if e.op == "const":
        return jnp.asarray(np.full(shape, constant(e)).astype(kept))
    if e.op == "size":
        return jnp.full(shape, operands[e["operand"]].shape[e["dim"]], np.int32)
    if e.op == "read":
        array = operands[e["operand"]]
        at = tuple(jnp.clip(i, 0, n - 1) for i, n in zip(inputs, array.shape, strict=True))
        return jnp.broadcast_to(jnp.asarray(array)[at], shape).astype(kept)
    evaluate, params = _table.ROWS[e.op].evaluate, dict(e.params)
    rounds = e.op in ("bitcast_convert_type", "nextafter")
    if rounds and held:  # of the bits that the values have in memory
        inputs = [x.astype(code.equations[n].dtype) for x, n in zip(inputs, e.inputs, strict=True)]
    return evaluate(*inputs, **params).astype(kept)
