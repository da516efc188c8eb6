"""Programs as device code: against JAX and float64 in the PTX interpreter, and as PTX for every architecture."""

import dataclasses
import math
import re
from typing import Any

import inline_kernels
import inline_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import Boolean  # noqa: E402
from inline_kernels import complaints, interpreted  # noqa: E402

import eqxcute  # noqa: E402
from eqxcute import InlineError, inline  # noqa: E402
from eqxcute._ptx import _alu, _machine  # noqa: E402
from eqxcute.inline import Argument, Code, Equation, _device, _emit, _table  # noqa: E402
from eqxcute.inline._code import Builder, Operand  # noqa: E402
from eqxcute.testing import compile_only, interpret  # noqa: E402

INDICES = [Argument(name, "int32", 0) for name in ("b", "h", "q", "kv")]


# ---------------------------------------------------------------- values


def test_every_row_has_an_emitter():
    assert set(_device.EMIT) == set(_table.ROWS)


def pairs(dtype):
    pools = [inline_programs.edge_values(dtype, k, 9) for k in range(2)]
    return (grid.reshape(-1) for grid in np.meshgrid(*pools, indexing="ij"))


@pytest.mark.parametrize("dtype", inline_programs.all_dtypes())
def test_every_row_on_edges(dtype):
    codes = inline_kernels.row_codes(dtype, inline_programs.all_dtypes())
    a, b = pairs(dtype)
    rng = np.random.default_rng(0)
    arguments = {"p": rng.random(len(a)) < 0.5, "a": a, "b": b, "c": rng.permutation(b)}
    got = interpreted(codes, arguments)
    assert complaints(codes, (), got) == []


# Of which float64 has no functions in the interpreter.
PLAIN = [n for n, row in _table.ROWS.items() if row.takes != "float"] + [
    "floor",
    "ceil",
    "is_finite",
]


def test_functions_on_numbers_of_every_size():
    codes, arguments = inline_kernels.float_functions(20_000)
    assert complaints(codes, (), interpreted(codes, arguments)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 25))
def test_random_programs(first):
    codes = [inline_programs.random_code(s, equations=(5, 11)) for s in range(first, first + 25)]
    arguments = inline_programs.random_arguments(codes[0], first, 64)
    operands = inline_programs.random_operands(codes[0], first)
    found = complaints(codes, operands, interpreted(codes, arguments, operands))
    assert found == [], f"seeds from {first}"


@pytest.fixture
def other_arithmetic(monkeypatch):
    """`monkeypatch`, for what instructions compute. Programs that the interpreter keeps hold what they are made of."""
    _machine.program.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    _machine.program.cache_clear()


# What PTX says of its approximations, as relative errors. `exp` and `rsqrt` are little else than one of them.
APPROXIMATIONS = {"ex2": 2.0**-22.5, "rcp": 2.0**-23, "rsqrt": 2.0**-22.9, "lg2": 2.0**-22.5}


@pytest.mark.parametrize("sign", [-1, 1])
def test_functions_hold_with_the_errors_of_approximations(other_arithmetic, sign):
    """The interpreter computes `ex2.approx` and the like exactly. Hardware does not."""
    for name, error in APPROXIMATIONS.items():
        exact = _alu.UNARY_FLOAT[name]
        other_arithmetic.setitem(
            _alu.UNARY_FLOAT, name, lambda x, f=exact, by=1 + sign * error: f(x) * by
        )
    codes, arguments = inline_kernels.float_functions(20_000)
    codes = [c for c in codes if c.equations[-1].op not in ("exp", "rsqrt")]
    assert complaints(codes, (), interpreted(codes, arguments)) == []


def test_nan_where_the_assembler_takes_comparisons_as_true(other_arithmetic):
    """ptxas takes an ordered comparison of float32 as true that holds for all numbers, but not for NaN. Here it may be any."""
    plain = _alu.comparison

    def comparison(which, name):
        compare = plain(which, name)
        if name != "f32" or which not in ("lt", "le", "gt", "ge"):
            return compare
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)

    other_arithmetic.setattr(_alu, "comparison", comparison)
    codes = inline_kernels.row_codes("float32", inline_programs.all_dtypes())
    a, b = (g.reshape(-1) for g in np.meshgrid(*[np.float32([np.nan, -2, 0.5, 1, 2])] * 2))
    arguments = {"p": a > 0, "a": a, "b": b, "c": np.roll(b, 1)}
    assert complaints(codes, (), interpreted(codes, arguments)) == []


def test_wide_numbers_where_jax_has_them():
    with jax.enable_x64(True):
        for dtype in ("int64", "uint64", "float64"):
            codes = inline_kernels.row_codes(dtype, ("bool", "int32", "uint32", "float32", dtype))
            plain = [c for c in codes if c.equations[-1].op in PLAIN]
            a, b = pairs(dtype)
            got = interpreted(plain, {"p": a > b, "a": a, "b": b, "c": b[::-1]})
            assert complaints(plain, (), got) == []


def with_constants(name: str, *inputs: float, dtype: str = "float32"):
    """One row, of `x` where an input is None and else of constants."""
    argument = Argument("x", dtype)
    build = Builder()
    x = build.argument(argument)
    result = build.op(name, *(x if v is None else build.const(v, dtype) for v in inputs))
    return Code((argument,), (), tuple(build.equations), (result,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_atan2_of_constant_zeros(dtype):
    codes = [with_constants("atan2", a, b, dtype=dtype) for a in (0.0, -0.0) for b in (0.0, -0.0)]
    got = interpreted(codes, {"x": np.zeros(1, jnp.dtype(dtype))})
    assert complaints(codes, (), got) == []
    np.testing.assert_allclose([values[-1][0] for values in got], [0, np.pi, 0, -np.pi], rtol=1e-6)


def test_powers_of_edges():
    """Compilers know square roots and products for some, and those differ at -inf and -0."""
    x = inline_programs.edge_values("float32", 0, 20)
    powers = (0.5, -0.5, 0.25, 0.75, 1.0, 1.5, 2.0, 3.0, -1.0, -2.0, 0.0, np.inf, -np.inf, np.nan)
    codes = [with_constants("pow", None, y) for y in powers]
    codes += [with_constants("pow", y, None) for y in (0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf)]
    assert complaints(codes, (), interpreted(codes, {"x": x})) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_explicit_conversions_round(dtype):
    """Of a value that is held in float32, by every way there is."""

    def rounded(x):
        return jnp.arccos(x).astype(dtype).astype(jnp.float32), x.astype(dtype) + jnp.float32(0)

    x = np.linspace(-1, 1, 64, dtype=np.float32)
    code = inline.trace(rounded, {"x": "float32"})[0].code
    again = Equation("convert_element_type", dtype, (1,), (("new_dtype", dtype),))
    argument = Argument("x", dtype)
    kept = [Equation("argument", dtype, (), (("name", "x"),)), Equation("acos", dtype, (0,), ())]
    direct = Code((argument,), (), (*kept, again), (2,))
    assert complaints([code], (), interpreted([code], {"x": x})) == []
    got = interpreted([direct], {"x": x.astype(jnp.dtype(dtype))})
    assert complaints([direct], (), got) == []


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_integers_are_rounded_twice_on_their_way_to_sixteen_bits(dtype, architecture):
    """As JAX does: to float32 first."""
    x = np.array([3212836862 & 0x7FFFFFFF, 3212836862, 2**25 + 2**17 + 1], np.uint32).astype(dtype)
    code = inline.trace(lambda x: x.astype(jnp.bfloat16), {"x": dtype})[0].code
    (got,) = interpreted([code], {"x": x}, architecture=architecture)
    np.testing.assert_array_equal(
        got[-1], np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
    )


# ---------------------------------------------------------------- what is read


def reader(rank: int, dtype: str = "int32"):
    """Code that reads a captured array at `i`, `j`, `k`, as they are."""
    arguments = [Argument(name, "int32") for name in "ijk"[:rank]]
    build = Builder()
    build.operands.append(Operand(dtype, rank))
    build.read(0, [build.argument(a) for a in arguments])
    n = len(build.equations) - 1
    return Code(tuple(arguments), tuple(build.operands), tuple(build.equations), (n,))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 3)])
@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "uint8"])
def test_indices_are_clamped(shape, dtype):
    """An access outside of its array would be a fault in the interpreter."""
    array = (
        np.arange(np.prod(shape, dtype=int)) % 2
        if dtype == "bool"
        else np.arange(np.prod(shape, dtype=int))
    )
    array = array.reshape(shape).astype(jnp.dtype(dtype))
    index = np.array([0, 1, 2, 3, 4, 5, -1, -7, 2**31 - 1, -(2**31)], np.int32)
    grids = [g.reshape(-1) for g in np.meshgrid(*[index] * len(shape), indexing="ij")] or [index]
    arguments = dict(zip("ijk", grids, strict=False))
    code = reader(len(shape), dtype)
    (got,) = interpreted(
        [code], {name: arguments[name] for name in "ijk"[: len(shape)]} or {"": index}, (array,)
    )
    want = array[tuple(np.clip(g, 0, n - 1) for g, n in zip(grids, shape, strict=False))]
    np.testing.assert_array_equal(
        got[-1], np.broadcast_to(want, got[-1].shape).astype(got[-1].dtype)
    )


class Baked(eqxcute.Kernel):
    """table[i, 5], of which a row's size is compiled in: CuTe's offsets are then of 32 bits, if indices are."""

    signature = "n, r 1024 -> n"
    code: inline.Code = eqxcute.static()

    @cute.jit
    def launch(self, stream, index, table, out):
        self.kernel(index, table, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, index, table, out):
        t = cute.arch.thread_idx()[0]
        layout = cute.make_layout((table.shape[0], 1024), stride=(1024, 1))
        table = cute.make_tensor(table.iterator, layout)
        out[t] = _emit.results(_emit.bind(_emit.start(self.code, (table,)), i=index[t], j=5))[0]


def test_offsets_have_64_bits():
    index, table = jnp.arange(32), jnp.zeros((3, 1024), jnp.int32)
    ptx = compile_only(Baked(reader(2)), index, table).ptx
    assert "shl.b32" not in ptx
    assert "mul.wide.s32" in ptx


class Mask(eqxcute.Kernel):
    """Whether row `q` sees any of the columns: a mask bound to its row outside of the loop, to columns inside."""

    signature = "n, {} -> n"
    code: inline.Code = eqxcute.static()

    def out_dtypes(self, columns, operands):
        return jnp.bool_

    @cute.jit
    def launch(self, stream, columns, operands, out):
        self.kernel(columns, operands, out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, columns, operands, out):
        q = cute.arch.thread_idx()[0]
        row = _emit.bind(_emit.start(self.code, operands), b=0, h=0, q=q)
        seen = Boolean(False)
        for kv in cutlass.range(columns.shape[0], unroll=1):
            (keep,) = _emit.results(_emit.bind(row, kv=kv))
            seen = seen | keep
        out[q] = seen


def mask_ptx(function, architecture="sm_90a") -> tuple[str, str]:
    """The instructions before the loop over columns, and those in it."""
    program, captured = inline.trace(function, INDICES)
    kernel = Mask(program.code)
    ptx = compile_only(
        kernel, jnp.zeros(32, jnp.int32), program.prepare(captured), architecture=architecture
    ).ptx
    body = re.sub(r"(?m)^\s*(\.loc|//).*$", "", ptx[ptx.index("{", ptx.index(".visible .entry")) :])
    head, rest = re.split(r"\$L__BB\d+_\d+:", body, maxsplit=1)
    return head, rest[: rest.index("bra")]


DOC = jnp.arange(100) // 7


def test_rows_are_read_outside_of_the_loop():
    head, loop = mask_ptx(lambda b, h, q, kv: (q >= kv) & (DOC[q] == DOC[kv]))
    assert head.count("ld.global") == loop.count("ld.global") == 1
    # Indices start at 0 and are captured as they are: one clamp each is left, the upper one.
    assert head.count("min.s32") == loop.count("min.s32") == 1
    assert "max.s32" not in head + loop


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (lambda b, h, q, kv: q // 128 == kv // 128, ("div", "rem", "mul.hi", "selp")),
        (lambda b, h, q, kv: (q - kv) % 4 == 0, ("div", "rem", "mul", "selp")),
        (lambda b, h, q, kv: q % 3 == kv % 3, ("div", "rem", "selp")),
        (lambda b, h, q, kv: abs(q - kv) <= 128, ("div", "selp", "ld.global")),
        (lambda b, h, q, kv: (q << 3) == (kv >> 1), ("selp", "setp.lt.u32", "min")),
    ],
    ids=["// 128", "% 4", "% 3", "window", "shifts"],
)
def test_constants_give_short_code(function, without):
    for part in mask_ptx(function):
        assert [name for name in without if name in part.replace("_selp", "")] == []


def test_a_mask_in_a_loop():
    program, captured = inline.trace(
        lambda b, h, q, kv: (q >= kv) & (DOC[q] == DOC[kv]) & (kv % 5 == 2), INDICES
    )
    got = interpret(Mask(program.code), jnp.zeros(32, jnp.int32), program.prepare(captured))
    q, kv = np.arange(32)[:, None], np.arange(32)
    want = (q >= kv) & (np.asarray(DOC)[q] == np.asarray(DOC)[kv]) & (kv % 5 == 2)
    np.testing.assert_array_equal(got, want.any(1))


# ---------------------------------------------------------------- binding


class Bound(eqxcute.Kernel):
    """The first result of `steps(code, operands, i)` for eight indices."""

    signature = "n, {} -> n"
    code: inline.Code = eqxcute.static()
    steps: Any = eqxcute.static()

    def out_dtypes(self, index, operands):
        return self.code.equations[self.code.results[0]].dtype

    @cute.jit
    def launch(self, stream, index, operands, out):
        self.kernel(index, operands, out).launch(grid=[1, 1, 1], block=[8, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, index, operands, out):
        i = index[cute.arch.thread_idx()[0]]
        out[i] = _emit.results(self.steps(self.code, operands, i))[0]


def run_bound(function, steps, arguments=INDICES):
    program, captured = inline.trace(function, arguments)
    return interpret(
        Bound(program.code, steps), jnp.arange(8, dtype=jnp.int32), program.prepare(captured)
    )


def test_each_part_is_emitted_once(monkeypatch):
    """Rows first, columns apart, then both: no equation twice."""
    emitted = []
    plain = _emit._emitted

    def noted(partial, n, values, arguments):
        emitted.append(n)
        return plain(partial, n, values, arguments)

    monkeypatch.setattr(_emit, "_emitted", noted)

    def steps(code, operands, i):
        begun = _emit.start(code, operands)
        rows, columns = _emit.bind(begun, q=i), _emit.bind(begun, kv=7 - i)
        counts.append(len(emitted))
        return _emit.join(_emit.bind(rows, b=0), _emit.bind(columns, h=1))

    counts = []
    got = run_bound(lambda b, h, q, kv: DOC[q] * 10 + DOC[kv] + b + h, steps)
    q = np.arange(8)
    np.testing.assert_array_equal(got, np.asarray(DOC)[q] * 10 + np.asarray(DOC)[7 - q] + 1)
    assert sorted(emitted) == sorted(set(emitted))
    assert counts[0] < len(emitted)


def test_what_no_result_needs_is_not_emitted(monkeypatch):
    names = []
    plain = _emit._emitted
    monkeypatch.setattr(
        _emit,
        "_emitted",
        lambda p, n, v, a: (names.append(p.code.equations[n].op), plain(p, n, v, a))[1],
    )
    program, _ = inline.trace(lambda q: (jnp.sin(q.astype(jnp.float32)), q + 1), {"q": "int32"})
    code = dataclasses.replace(program.code, results=program.code.results[1:])
    got = interpret(
        Bound(code, lambda c, o, i: _emit.bind(_emit.start(c, o), q=i)),
        jnp.arange(8, dtype=jnp.int32),
        [],
    )
    np.testing.assert_array_equal(got, np.arange(1, 9))
    assert "sin" not in names


def test_sixteen_bits_are_rounded_at_results_alone():
    """(x + 2^-10) - x in bfloat16 would be 0 if the sum were rounded."""

    def steps(code, operands, i):
        return _emit.bind(_emit.start(code, operands), x=cutlass.Float32(1.0))

    got = run_bound(lambda x: (x + jnp.bfloat16(2.0**-10)) - x, steps, {"x": "bfloat16"})
    assert got.dtype == jnp.bfloat16
    assert (got == 2.0**-10).all()


def test_messages():
    code, operands = reader(1), (object(),)
    with pytest.raises(ValueError, match="got 0, the code reads 1"):
        _emit.start(code, ())
    begun = _emit.start(code, operands)
    with pytest.raises(ValueError, match="i must be bound first"):
        _emit.results(begun)
    with pytest.raises(ValueError, match="one `start`"):
        _emit.join(begun, _emit.start(code, operands[:]))
    with pytest.raises(ValueError, match="`i`"):
        _emit.bind(dataclasses.replace(begun, bound=frozenset("i")), i=3)
    sorts = Equation("opaque", "int32", (), (("why", "it sorts"),))
    with pytest.raises(InlineError, match="it sorts"):
        _emit.start(dataclasses.replace(code, equations=(*code.equations, sorts)), operands)


# ---------------------------------------------------------------- instructions


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_every_architecture(architecture):
    codes = inline_kernels.row_codes("float32", inline_programs.all_dtypes())
    a = np.ones(1, np.float32)
    arguments = {"p": a > 0, "a": a, "b": a, "c": a}
    kernel = inline_kernels.kernel_of(codes, base=inline_kernels.Quickly)
    built = compile_only(kernel, np.zeros(1, np.int32), arguments, (), architecture=architecture)
    assert f".target {architecture}" in built.ptx


def ptx_of(code: Code, dtype: str = "float32") -> str:
    """Without what other tests and the kernel itself need."""
    kernel = inline_kernels.kernel_of([code])
    arguments = {a.name: np.zeros(1, jnp.dtype(a.dtype)) for a in code.arguments}
    return compile_only(kernel, np.zeros(1, np.int32), arguments, (), architecture="sm_90a").ptx


def test_extremes_of_squares_and_constants():
    """ptxas takes `x * x >= -1.5` as true, of NaN too: minima must not be comparisons."""

    def extremes(x):
        square = x * x
        some = jnp.minimum(square, -1.5), jnp.maximum(-abs(x), 2.0), jnp.clip(square, -3.0, -2.0)
        return *some, jnp.maximum(x, 0.0), jnp.minimum(x, jnp.inf)

    ptx = ptx_of(inline.trace(extremes, {"x": "float32"})[0].code)
    assert len(re.findall(r"(?:min|max)\.NaN\.f32", ptx)) >= 4
    assert re.findall(r"setp\.\w+\.f32|selp\.f32", ptx) == []


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "sign", "is_finite"])
def test_comparisons_are_unordered(name):
    """ptxas does not touch these."""
    inputs = (None, 2.0) if name in ("lt", "le", "gt", "ge") else (None,)
    ptx = ptx_of(with_constants(name, *inputs))
    compared = re.findall(r"setp\.(\w+)\.f32", ptx)
    assert compared
    assert set(compared) <= {"ltu", "leu", "gtu", "geu"}


INSTRUCTIONS = {
    "tanh": ["tanh.approx.f32"],
    "exp": ["mul.f32", "ex2.approx.ftz.f32"],
    "exp2": ["ex2.approx.ftz.f32"],
    "rsqrt": ["rsqrt.approx.ftz.f32"],
    "logistic": ["mul.f32", "ex2.approx.ftz.f32", "add.f32", "rcp.approx.ftz.f32"],
    "div": ["div.full.f32"],
}


@pytest.mark.parametrize(("name", "fast", "bits"), inline_kernels.FAST)
def test_fast_forms(name, fast, bits):
    code = inline_kernels.row_code(name, "float32")
    a = np.ones(1, np.float32)
    kernel = inline_kernels.kernel_of([code], fast)
    ptx = compile_only(kernel, np.zeros(1, np.int32), {"p": a > 0, "a": a, "b": a, "c": a}, ()).ptx
    assert re.findall(r"(?m)^\s*([a-z0-9.]+\.f32)\b", ptx) == INSTRUCTIONS[name]
    assert inline_kernels.fast_error(name, fast, 5000, interpret) <= 2.0**-bits


@pytest.mark.parametrize("fast", ["scores", "bfloat16"])
def test_what_becomes_an_integer_has_no_fast_form(fast):
    """T5's buckets with 4 exact ones up to 400: distance 40 is just in the next one, if log(10) / log(100) is right."""

    def bucket(distance):
        far = jnp.log(distance.astype(jnp.float32) / 4) / math.log(100) * 4
        return far.astype(jnp.int32), far

    code = inline.trace(bucket, {"distance": "int32"})[0].code
    distances = {"distance": np.arange(4, 400, dtype=np.int32)}
    (got,) = inline_kernels.interpreted([code], distances, fast=fast)
    (want,) = inline_kernels.interpreted([code], distances)
    for n in code.results:
        np.testing.assert_array_equal(got[n], want[n])
    assert want[code.results[0]][36] == 2


def test_half_precision_has_no_fast_tanh():
    """11 bits are too few for it."""
    code = inline_kernels.row_code("tanh", "float32")
    a = np.ones(1, np.float32)
    kernel = inline_kernels.kernel_of([code], "float16")
    ptx = compile_only(kernel, np.zeros(1, np.int32), {"p": a > 0, "a": a, "b": a, "c": a}, ()).ptx
    assert "tanh.approx" not in ptx
