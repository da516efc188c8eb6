"""Code: what the builder makes simpler stays the same, and equal functions have equal text."""

import hashlib

import hypothesis
import inline_numpy
import inline_programs
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from eqxcute.inline import Argument, Code, Equation, trace
from eqxcute.inline._code import Builder, TooLong, bits_of, constant

INDICES = (Argument("q", "int32", 0), Argument("k", "int32", 0), Argument("i", "int32"))


def code_of(fn, arguments=INDICES):
    return trace(fn, arguments)[0].code


# Simplification


def rebuilt(code):
    """The code, made again by a builder that simplifies, and the new number of each equation."""
    build = Builder()
    build.operands = list(code.operands)
    arguments, numbers = {a.name: a for a in code.arguments}, []
    for e in code.equations:
        inputs = [numbers[n] for n in e.inputs]
        if e.op == "argument":
            n = build.argument(arguments[e["name"]])
        elif e.op == "const":
            n = build.const(constant(e), e.dtype)
        elif e.op == "read":
            n = build.read(e["operand"], inputs)
        elif e.op == "size":
            n = build.size(e["operand"], e["dim"])
        else:
            n = build.op(e.op, *inputs, **dict(e.params))
        numbers.append(n)
    return build, numbers


def assert_equal(found, expected, message):
    """Zeros have their signs."""
    np.testing.assert_array_equal(found, expected, err_msg=message)
    if found.dtype.kind == "f":
        zero = expected == 0
        np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(expected[zero]), message)


@hypothesis.settings(max_examples=250, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.integers(0, 2**31))
def test_simpler_code_has_the_same_values(seed):
    """Small dtypes hit their ends."""
    dtypes = ("bool", "int8", "uint8", "int32", "uint32", "float32")
    code = inline_programs.random_code(seed, dtypes=dtypes)
    build, numbers = rebuilt(code)
    arguments = inline_programs.random_arguments(code, seed, 32)
    operands = inline_programs.random_operands(code, seed)
    simple = Code(code.arguments, code.operands, tuple(build.equations), ())
    before = inline_numpy.run_all(code, arguments, operands)
    after = inline_numpy.run_all(simple, arguments, operands)
    for i, n in enumerate(numbers):
        assert_equal(after[n], before[i], f"v{i} of\n{code}\nis v{n} of\n{simple}")


_WHOLE = (
    *("add", "sub", "mul", "div", "rem", "floor_divide", "remainder", "max", "min", "eq", "ne"),
    *("and", "or", "xor", "lt", "le", "shift_left", "shift_right_logical"),
    "shift_right_arithmetic",
)
IDENTITIES = {
    "bool": ("and", "or", "xor", "eq", "ne", "max", "min", "lt", "le", "gt", "ge"),
    "int8": _WHOLE,
    "uint8": _WHOLE,
    "float32": ("add", "sub", "mul", "div", "rem", "max", "min", "pow", "eq", "ne", "le"),
}


@pytest.mark.parametrize("dtype", IDENTITIES)
def test_operations_with_a_known_number(dtype):
    """x + 0 and its like, both ways round, for every x that is special."""
    values = inline_programs.edge_values(dtype, 1, 8)
    build = Builder()
    x = build.argument(Argument("x", dtype))
    made = []
    for c in [0, 1, -1, 7, np.inf, np.nan, -0.0] if dtype == "float32" else np.unique(values):
        c = build.const(c, dtype)
        for name in IDENTITIES[dtype]:
            made += [(name, i, build.op(name, *i)) for i in ((x, c), (c, x), (x, x))]
    code = Code((Argument("x", dtype),), (), tuple(build.equations), ())
    found = inline_numpy.run_all(code, {"x": values}, [])
    for name, inputs, n in made:
        equation = Equation(name, build.equations[n].dtype, inputs)
        with np.errstate(all="ignore"):
            expected = inline_numpy.run(equation, [found[i] for i in inputs], [dtype, dtype])
        assert_equal(found[n], expected, f"{name} {inputs} {dtype}")
    simpler = sum(build.equations[n].op != name for name, _, n in made)
    assert (simpler > 0) == (dtype != "float32")


def test_floats_are_left_alone():
    """x + 0.0 is not x for -0.0, x * 0 not 0 for infinity, x == x not True for NaN."""
    for fn in (lambda x: x + 0.0, lambda x: x * 0.0, lambda x: x == x, lambda x: x - x):
        code = code_of(fn, {"x": "float32"})
        assert [e.op for e in code.equations if e.op not in ("argument", "const")] != []


# Text


def sized(make):
    return {code_of(make(jnp.arange(n, dtype=jnp.float32))).digest for n in (10, 500, 70_000)}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: lambda q, k, i: x[i],
        lambda x: lambda q, k, i: x[q],
        lambda x: lambda q, k, i: x[q - k] + x[-1 - q],
        lambda x: lambda q, k, i: x[-1] * q + x[0],
        lambda x: lambda q, k, i: jnp.take(x, i, mode="clip"),
        lambda x: lambda q, k, i: jnp.take(x, i, mode="fill"),
        lambda x: lambda q, k, i: jnp.take(x, i, mode="wrap"),
        lambda x: lambda q, k, i: lax.dynamic_slice(x, (i,), (3,)).sum(),
        lambda x: lambda q, k, i: x.at[i].get(mode="fill", fill_value=0),
        lambda x: lambda q, k, i: x[i.astype(jnp.uint32)] + x[i.astype(jnp.uint8)],
        lambda x: lambda q, k, i: x[x[i].astype(jnp.int32)],
        lambda x: lambda q, k, i: (x * 2)[i] + x.sum() + x[::-1][i] + x[1:][q],
        lambda x: lambda q, k, i: x.reshape(-1, 5).T[i, q],
        lambda x: lambda q, k, i: jnp.stack([x, x])[i, k],
    ],
)
def test_a_longer_array_is_no_other_code(make):
    assert len(sized(make)) == 1


def test_numbers_are_told_apart_by_their_bits():
    payload = np.frombuffer(np.uint32(0x7FC12345).tobytes(), np.float32)[0]
    numbers = [0.0, -0.0, np.nan, -np.nan, payload, np.inf, 1.0]
    texts = {code_of(lambda x, c=c: x * c, {"x": "float32"}).text for c in map(np.float32, numbers)}
    assert len(texts) == len(numbers)
    assert (
        bits_of(constant(code_of(lambda x: x * payload, {"x": "float32"}).equations[1]), np.float32)
        == 0x7FC12345
    )


def test_dtypes_and_the_lowest_index_are_in_the_text():
    texts = {
        code_of(lambda x: x + 1, [Argument("x", d)]).text for d in ("int32", "uint32", "float32")
    }
    texts.add(code_of(lambda x: x + 1, [Argument("x", "int32", 0)]).text)
    assert len(texts) == 4


def test_the_digest_is_of_the_text():
    code = code_of(lambda q, k, i: q > k)
    assert hashlib.sha256(code.text.encode()).hexdigest().startswith(code.digest)
    assert str(code) == code.text
    assert "lt v1 v0" in code.text  # the normal form of q > k


# The builder


def test_equal_values_are_shared_within_a_scope_and_not_after_it():
    build = Builder()
    x = build.argument(Argument("x", "int32"))
    outside = build.op("neg", x)
    build.enter()
    assert build.op("neg", x) == outside
    inside = build.op("abs", x)
    assert build.op("abs", x) == inside
    build.leave()
    assert build.op("abs", x) != inside


def test_going_back_forgets():
    build = Builder(limit=4)
    x = build.argument(Argument("x", "int32"))
    kept = build.op("neg", x)
    build.op("abs", x)
    build.op("not", x)
    with pytest.raises(TooLong):
        build.op("sign", x)
    build.back(2)
    assert len(build.equations) == len(build.intervals) == 2
    assert build.op("neg", x) == kept
    assert build.op("sign", x) == 2 == len(build.equations) - 1
    assert build.op("abs", x) == 3


def test_a_copy_is_a_value_of_its_own():
    build = Builder()
    x = build.argument(Argument("x", "float32"))
    assert len({x, build.copy(x), build.copy(x)}) == 3
    assert build.op("copy", x) == x
