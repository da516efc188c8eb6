"""A call of every kernel of `bridge_kernels`, as pytest parameters: (kernel, arguments)."""

import jax.numpy as jnp
import jax.random as jr
import pytest
from bridge_kernels import (
    Accumulate,
    AccumulateByNumber,
    AnyTree,
    Attributes,
    ColumnMajor,
    Copy,
    Histogram,
    LookUp,
    Momentum,
    Reverse,
    RowSum,
    Saxpy,
    ScaleBy,
    SinCos,
    State,
    Table,
)


def normal(*shape, seed=0, dtype="float32"):
    return jr.normal(jr.key(seed), shape).astype(dtype)


N = 77  # fills no block of threads


def cases():
    x, y = normal(N), normal(N, seed=1)
    table = Table(normal(7, seed=2), 3.0)
    found = {
        "saxpy": (Saxpy(2.0), (x, y)),
        "saxpy bfloat16": (Saxpy(2.0, 3.0), (x.astype("bfloat16"), y.astype("bfloat16"))),
        "saxpy empty": (Saxpy(2.0), (x[:0], y[:0])),
        "attributes": (Attributes(), (x,)),
        "attributes changed": (
            Attributes(z=-5, a=1.5, m=False, k=2**40, d=-0.5),
            (x.reshape(7, 11),),
        ),
        "0-d array": (ScaleBy(), (x.reshape(11, 7), jnp.float32(1.5))),
        "two outputs": (SinCos(), (x.reshape(7, 11),)),
        "two outputs, no leading dims": (SinCos(), (x,)),
        "donated": (Accumulate(), (State(x, y), y)),
        "donated, None": (Accumulate(), (State(x, None), y)),
        "donated, by number": (AccumulateByNumber(), (State(x, y), y)),
        "trees out": (Momentum(), ({"m": State(x, None), "x": y}, normal(N, seed=6))),
        "initial value": (Histogram(5), (jr.randint(jr.key(3), (N,), 0, 5),)),
        "column-major": (ColumnMajor(), (x.reshape(7, 11),)),
        "workspace": (Reverse(), (x,)),
        "own arrays": (LookUp(table), (jr.randint(jr.key(4), (3, 5), -3, 12),)),
        "any tree": (AnyTree(), (x, {"b": y, "a": (normal(2, 3), None)})),
        "row sums": (RowSum(), (normal(5, 3, 12),)),
    }
    for dtype in ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"):
        found[f"copy {dtype}"] = (Copy(), (jr.randint(jr.key(5), (N,), 0, 100).astype(dtype),))
    for dtype in ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        found[f"copy {dtype}"] = (Copy(), (jnp.abs(x).astype(dtype),))
    return [pytest.param(*case, id=name) for name, case in found.items()]
