"""What an index depends on: what one reads off real functions, and on random programs nothing that is not so."""

import inline_numpy
import inline_programs
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcute.inline import Argument, Code, Equation, differentiate, index_kind, trace

SCORE = (
    Argument("score", "float32"),
    *(Argument(name, "int32", 0) for name in ("b", "h", "q_idx", "kv_idx")),
)
VECTOR = jnp.arange(50.0)
TABLE = jnp.ones((4, 50))
BUCKETS = jnp.arange(40) // 2
OFFSET = jnp.asarray(3)


def logarithmic(q, kv):
    """T5's buckets."""
    distance = kv - q
    bucket = jnp.where(distance > 0, 16, 0)
    distance = jnp.abs(distance)
    far = 8 + (jnp.log(distance.astype(jnp.float32) / 8) * 2).astype(jnp.int32)
    return bucket + jnp.where(distance < 8, distance, jnp.minimum(far, 15))


KINDS = {
    "head": [
        lambda s, b, h, q, kv: VECTOR[h],
        lambda s, b, h, q, kv: TABLE[b, 7],
        lambda s, b, h, q, kv: VECTOR[0] * (q - kv),
    ],
    "row": [
        lambda s, b, h, q, kv: VECTOR[q],
        lambda s, b, h, q, kv: TABLE[h, BUCKETS[q] + OFFSET],
    ],
    "column": [
        lambda s, b, h, q, kv: VECTOR[kv // 2],
        lambda s, b, h, q, kv: TABLE[b, jnp.where(kv > 5, kv, h)] * s,
    ],
    "distance": [
        lambda s, b, h, q, kv: VECTOR[q - kv],
        lambda s, b, h, q, kv: VECTOR[-kv + q],
        lambda s, b, h, q, kv: TABLE[h, jnp.clip(kv - q - OFFSET, -20, 20) + 20],
        lambda s, b, h, q, kv: VECTOR[jnp.abs(q + OFFSET - kv)],
        lambda s, b, h, q, kv: VECTOR[BUCKETS[kv - (q + h)]],
        lambda s, b, h, q, kv: VECTOR[3 * q - kv * 3],
        lambda s, b, h, q, kv: VECTOR[(kv - q) * OFFSET],
        lambda s, b, h, q, kv: VECTOR[q - kv + jnp.where(q < kv, 9, 1) + jnp.where(q == kv, h, b)],
        lambda s, b, h, q, kv: TABLE[h, logarithmic(q, kv)],
        lambda s, b, h, q, kv: VECTOR[q.astype(jnp.uint32) - kv.astype(jnp.uint32)],
    ],
    "entry": [
        lambda s, b, h, q, kv: TABLE[q, kv],
        lambda s, b, h, q, kv: TABLE[jnp.clip(kv - OFFSET, 0, 3), q + h],
    ],
    "pair": [
        lambda s, b, h, q, kv: TABLE[q, h] * TABLE[q // 8, kv],
        lambda s, b, h, q, kv: TABLE[q, q - kv],
        lambda s, b, h, q, kv: VECTOR[q + kv],
        lambda s, b, h, q, kv: VECTOR[q // 2 - kv // 2],
        lambda s, b, h, q, kv: VECTOR[q * OFFSET - kv * OFFSET],
        lambda s, b, h, q, kv: VECTOR[s.astype(jnp.int32)],
        lambda s, b, h, q, kv: TABLE[kv - q, h + kv],
        lambda s, b, h, q, kv: VECTOR[(BUCKETS[q] - BUCKETS[kv])],
        lambda s, b, h, q, kv: VECTOR[
            q.astype(jnp.int8).astype(jnp.int32) - kv.astype(jnp.int8).astype(jnp.int32)
        ],
        # Float32 rounds large indices, and 32-bit sums of them may wrap around.
        lambda s, b, h, q, kv: VECTOR[(q.astype(jnp.float32) - kv.astype(jnp.float32)).astype(int)],
        lambda s, b, h, q, kv: VECTOR[jnp.where(q + 5 < kv, 1, 0)],
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_functions(kind):
    for i, value in enumerate(KINDS[kind]):
        fn = lambda s, *indices, value=value: s + value(s, *indices)  # noqa: E731
        program, _ = trace(fn, SCORE)
        derived = differentiate(program)
        found = [index_kind(derived.program.code, read.indices) for read in derived.reads]
        assert found[-1:] == [kind], (i, str(derived.program.code))


ARGUMENTS = tuple(Argument(name, "int32", 0) for name in ("q_idx", "kv_idx", "h"))
DTYPES = ("bool", "int8", "int32", "uint32", "float32")
ROWS = (
    *("add", "sub", "neg", "mul", "lt", "le", "eq", "ne", "abs", "min", "max", "select_n"),
    *("convert_element_type", "floor_divide", "remainder", "shift_left", "sign"),
)


def random_code(seed):
    """One that has differences of q and kv, under the names `d` and `e`."""
    named = (*ARGUMENTS, Argument("d", "int32"), Argument("e", "int32"))
    code = inline_programs.random_code(seed, arguments=named, rows=ROWS, dtypes=DTYPES)
    equations = [Equation("argument", "int32", params=(("name", a.name),)) for a in ARGUMENTS]
    equations += [Equation("sub", "int32", (0, 1)), Equation("sub", "int32", (1, 0))]
    numbers = []
    for e in code.equations:
        if e.op == "argument":
            numbers.append([a.name for a in named].index(e["name"]))
        else:
            equations.append(e._replace(inputs=tuple(numbers[n] for n in e.inputs)))
            numbers.append(len(equations) - 1)
    return Code(ARGUMENTS, code.operands, tuple(equations), tuple(range(len(equations))))


def moved(count):
    """Arguments, and the same with q and kv both further on: by a little, near the end of int32, and far."""
    rng = np.random.default_rng(0)
    start, h = rng.integers(0, 9, (2, count)), rng.integers(0, 9, count)
    start = start + rng.choice([0, 2**31 - 200], count)
    step = np.where(start[0] > 99, 99, rng.choice([1, 2, 99, 2**24 + 1, 2**31 - 99], count))
    names = [a.name for a in ARGUMENTS]
    values = ((*start, h), (*(start + step), h))
    return [dict(zip(names, (x.astype(np.int32) for x in v), strict=True)) for v in values]


def test_a_distance_is_one_on_numbers():
    here, there = moved(64)
    proved = 0
    for seed in range(150):
        code = random_code(seed)
        operands = inline_programs.random_operands(code, seed)
        kinds = [index_kind(code, [n]) for n in code.results]
        one, other = (inline_numpy.run_all(code, x, operands) for x in (here, there))
        for n, kind in enumerate(kinds):
            if kind in ("head", "distance"):
                np.testing.assert_array_equal(one[n], other[n], f"v{n} of\n{code}")
            proved += kind == "distance"
    assert proved > 500
