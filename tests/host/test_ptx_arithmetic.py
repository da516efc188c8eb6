"""The interpreter's arithmetic against Python's integers, NumPy, and exact fractions."""

import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqxcute._ptx._snippet import per_thread

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def dtype(name):
    return np.dtype({"s": "i", "u": "u", "b": "u"}[name[0]] + str(int(name[1:]) // 8))


def wrap(value: int, name: str) -> int:
    bits = int(name[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if name[0] == "s" and value >> (bits - 1) else value


def edges(name: str) -> np.ndarray:
    info = np.iinfo(dtype(name))
    values = {0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1, info.max // 3}
    values |= {wrap(-1, name), wrap(-7, name), wrap(0x5A5A5A5A5A5A5A5A, name)}
    return np.array(sorted(values), dtype(name))


def pairs(name: str, other: str | None = None):
    a, b = edges(name), edges(other or name)
    return np.repeat(a, len(b)), np.tile(b, len(a))


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", BINARY)
def test_integers_wrap_as_in_c(op, name):
    a, b = pairs(name)
    if op in ("div", "rem"):
        a, b = a[b != 0], b[b != 0]
    got = per_thread(f"{op}.{name} %d, %a0, %a1;", dtype(name), a, b)
    want = [wrap(BINARY[op](int(x), int(y)), name) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize("name", INTEGERS)
def test_upper_half_of_a_product(name):
    a, b = pairs(name)
    bits = int(name[1:])
    got = per_thread(f"mul.hi.{name} %d, %a0, %a1;", dtype(name), a, b)
    assert got.tolist() == [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}.get(name)
    if wide:
        got = per_thread(f"mul.wide.{name} %d, %a0, %a1;", dtype(wide), a, b)
        assert got.tolist() == [int(x) * int(y) for x, y in zip(a, b, strict=True)]
        c = np.resize(edges(wide), len(a))
        got = per_thread(f"mad.wide.{name} %d, %a0, %a1, %a2;", dtype(wide), a, b, c)
        rows = zip(a, b, c, strict=True)
        assert got.tolist() == [wrap(int(x) * int(y) + int(z), wide) for x, y, z in rows]


def test_mad_and_saturation():
    a, b = pairs("s32")
    got = per_thread("mad.lo.s32 %d, %a0, %a1, 5;", "i4", a, b)
    assert got.tolist() == [wrap(int(x) * int(y) + 5, "s32") for x, y in zip(a, b, strict=True)]
    got = per_thread("mad.hi.s32 %d, %a0, %a1, -1;", "i4", a, b)
    assert got.tolist() == [wrap((int(x) * int(y) >> 32) - 1, "s32") for x, y in zip(a, b)]  # noqa: B905
    got = per_thread("add.sat.s32 %d, %a0, %a1;", "i4", a, b)
    limited = [max(-(2**31), min(2**31 - 1, int(x) + int(y))) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == limited
    for op, pick in (("min", min), ("max", max)):
        got = per_thread(f"{op}.relu.s32 %d, %a0, %a1;", "i4", a, b)
        assert got.tolist() == [max(pick(int(x), int(y)), 0) for x, y in zip(a, b, strict=True)]


def test_carries():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**64, (2, 64), dtype="u8")
    a[:2], b[:2] = 2**64 - 1, (1, 0)
    split = """mov.b64 {%r0, %r1}, %a0; mov.b64 {%r2, %r3}, %a1;"""
    code = "add.cc.u32 %r4, %r0, %r2; addc.u32 %r5, %r1, %r3; mov.b64 %d, {%r4, %r5};"
    assert (per_thread(split + code, "u8", a, b) == a + b).all()
    code = "sub.cc.u32 %r4, %r0, %r2; subc.u32 %r5, %r1, %r3; mov.b64 %d, {%r4, %r5};"
    assert (per_thread(split + code, "u8", a, b) == a - b).all()
    code = "add.cc.u64 %q0, %a0, %a1; addc.cc.u64 %q1, %a0, -1; addc.u64 %d, 0, 0;"
    want = [int(x) + 2**64 - 1 + (int(x) + int(y) >> 64) >> 64 for x, y in zip(a, b, strict=True)]
    assert per_thread(code, "u8", a, b).tolist() == want


def test_products_of_several_words():
    """(64 bits) times (32 bits) plus 64 bits, in three words, of which a kernel keeps two."""
    rng = np.random.default_rng(1)
    a, c = rng.integers(0, 2**64, (2, 64), dtype="u8")
    b = rng.integers(0, 2**32, 64, dtype="u4")
    a[:2], c[:2], b[:2] = 2**64 - 1, 2**64 - 1, 2**32 - 1
    code = """mov.b64 {%r0, %r1}, %a0; mov.b64 {%r2, %r3}, %a2;
        mad.lo.cc.u32 %r4, %r0, %a1, %r2; madc.hi.u32 %r5, %r0, %a1, 0;
        mad.lo.cc.u32 %r6, %r1, %a1, %r5; madc.hi.cc.u32 %r7, %r1, %a1, 0;
        add.cc.u32 %r6, %r6, %r3; addc.u32 %r7, %r7, 0;"""
    want = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
    got = per_thread(code + "mov.b64 %d, {%r4, %r6};", "u8", a, b, c)
    assert got.tolist() == [w % 2**64 for w in want]
    assert per_thread(code + "mov.b32 %d, %r7;", "u4", a, b, c).tolist() == [w >> 64 for w in want]


@pytest.mark.parametrize("name", ["b16", "b32", "b64"])
def test_logic(name):
    a, b = pairs(name)
    for op, function in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        got = per_thread(f"{op}.{name} %d, %a0, %a1;", dtype(name), a, b)
        assert got.tolist() == [function(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    got = per_thread(f"not.{name} %d, %a0;", dtype(name), a)
    assert got.tolist() == [wrap(~int(x), name) for x in a]
    got = per_thread(f"cnot.{name} %d, %a0;", dtype(name), a)
    assert got.tolist() == [int(x == 0) for x in a]


@pytest.mark.parametrize("name", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_shifts_stop_at_the_width(name):
    bits = int(name[1:])
    a = edges(name)
    amounts = np.array([0, 1, bits - 1, bits, bits + 1, 200, 2**32 - 1], "u4")
    a, n = np.repeat(a, len(amounts)), np.tile(amounts, len(a))
    got = per_thread(f"shl.b{bits} %d, %a0, %a1;", dtype(name), a, n)
    rows = list(zip(a, n, strict=True))
    assert got.tolist() == [wrap(int(x) << min(int(s), bits), name) for x, s in rows]
    got = per_thread(f"shr.{name} %d, %a0, %a1;", dtype(name), a, n)
    assert got.tolist() == [int(x) >> min(int(s), bits) for x, s in rows]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(mode):
    low, high = pairs("u32")
    n = np.resize(np.array([0, 1, 5, 31, 32, 33, 64], "u4"), len(low))
    rows = list(zip(low.tolist(), high.tolist(), n.tolist(), strict=True))

    def amount(s):
        return min(s, 32) if mode == "clamp" else s & 31

    got = per_thread(f"shf.l.{mode}.b32 %d, %a0, %a1, %a2;", "u4", low, high, n)
    assert got.tolist() == [(((b << 32 | a) << amount(s)) >> 32) & 0xFFFFFFFF for a, b, s in rows]
    got = per_thread(f"shf.r.{mode}.b32 %d, %a0, %a1, %a2;", "u4", low, high, n)
    assert got.tolist() == [((b << 32 | a) >> amount(s)) & 0xFFFFFFFF for a, b, s in rows]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.integers(0, 80),
            st.integers(0, 80),
        ),
        min_size=1,
        max_size=32,
    ),
    st.sampled_from(("32", "64")),
)
def test_bit_fields(rows, bits):
    a, b, position, length = (np.array(column, "u8") for column in zip(*rows, strict=True))
    u, width = np.dtype(f"u{int(bits) // 8}"), int(bits)
    a, b, position, length = a.astype(u), b.astype(u), position.astype("u4"), length.astype("u4")
    got = per_thread(f"bfe.u{bits} %d, %a0, %a1, %a2;", u, a, position, length)
    signed = per_thread(f"bfe.s{bits} %d, %a0, %a1, %a2;", u, a, position, length)
    inserted = per_thread(f"bfi.b{bits} %d, %a0, %a1, %a2, %a3;", u, a, b, position, length)
    for i in range(len(rows)):
        x, y, p, n = int(a[i]), int(b[i]), int(position[i]), int(length[i])
        assert got[i] == x >> p & ((1 << n) - 1)
        sign = x >> min(p + n - 1, width - 1) & 1 if n else 0
        want = [x >> (p + j) & 1 if j < n and p + j < width else sign for j in range(width)]
        assert signed[i] == sum(bit << j for j, bit in enumerate(want))
        mask = ((1 << n) - 1) << p & ((1 << width) - 1)
        assert inserted[i] == (y & ~mask) | (x << p & mask)


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits):
    a = edges(f"u{bits}")
    texts = [f"{int(x):0{bits}b}" for x in a]
    assert per_thread(f"popc.b{bits} %d, %a0;", "u4", a).tolist() == [t.count("1") for t in texts]
    zeros = [bits - len(t.lstrip("0")) for t in texts]
    assert per_thread(f"clz.b{bits} %d, %a0;", "u4", a).tolist() == zeros
    top = [(t.rfind("1", 0, 1) if "1" not in t else bits - 1 - t.index("1")) for t in texts]
    got = per_thread(f"bfind.u{bits} %d, %a0;", "i4", a).tolist()
    assert got == [-1 if "1" not in t else n for t, n in zip(texts, top, strict=True)]
    got = per_thread(f"brev.b{bits} %d, %a0;", a.dtype, a).tolist()
    assert got == [int(t[::-1], 2) for t in texts]


def test_bfind_of_signed_numbers():
    a = np.array([0, -1, 1, -2, -(2**31), 2**31 - 1, -256], "i4")
    assert per_thread("bfind.s32 %d, %a0;", "i4", a).tolist() == [-1, -1, 0, 0, 30, 30, 7]
    assert per_thread("bfind.shiftamt.s32 %d, %a0;", "i4", a).tolist()[2:] == [31, 31, 1, 1, 24]


def test_permute_bytes():
    a = np.full(7, 0x83828180, "u4")
    b = np.full(7, 0x07060504, "u4")
    selector = np.array([0x3210, 0x7654, 0x0123, 0x8888, 0xC4B3, 0x5410, 0xFFFF7531], "u4")
    got = per_thread("prmt.b32 %d, %a0, %a1, %a2;", "u4", a, b, selector)
    octets = [0x80, 0x81, 0x82, 0x83, 4, 5, 6, 7]

    def want(word):
        out = 0
        for i in range(4):
            nibble = word >> 4 * i & 15
            byte = octets[nibble & 7]
            out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
        return out

    assert got.tolist() == [want(int(s)) for s in selector]
    for mode, selected in (("f4e", [1, 2, 3, 4]), ("b4e", [1, 0, 7, 6]), ("rc8", [1] * 4)):
        got = per_thread(f"prmt.b32.{mode} %d, %a0, %a1, 1;", "u4", a, b)
        assert got[0] == sum(octets[j] << 8 * i for i, j in enumerate(selected))


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xCA, 0x01])
def test_lop3_reads_its_truth_table(table):
    a, b, c = (np.array([x], "u4") for x in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    got = per_thread(f"lop3.b32 %d, %a0, %a1, %a2, {table};", "u4", a, b, c)
    assert got[0] == int(f"{table:02x}" * 4, 16)


def test_dot_products():
    a, b = np.array([0x80FF7F01], "u4"), np.array([0x02030405], "u4")
    c = np.array([10], "i4")
    got = per_thread("dp4a.s32.u32 %d, %a0, %a1, %a2;", "i4", a, b, c)
    assert got[0] == 10 + 1 * 5 + 127 * 4 - 1 * 3 - 128 * 2
    got = per_thread("dp4a.u32.u32 %d, %a0, %a1, %a2;", "i4", a, b, c)
    assert got[0] == 10 + 1 * 5 + 127 * 4 + 255 * 3 + 128 * 2


# ---------------------------------------------------------------- floats

F32 = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-40, -1e-45, 1e-30,
     16777216.0, 1 / 3, 1e20, -7.25],
    "f4",
)  # fmt: skip


def same(got, want):
    """Equal bits, but any NaN for a NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    nan = want != want
    assert ((got != got) == nan).all(), (got, want)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    good = (got.view(unsigned) == want.view(unsigned)) | nan
    assert good.all(), list(zip(got[~good], want[~good], strict=True))


def grid2(values):
    return np.repeat(values, len(values)), np.tile(values, len(values))


@pytest.mark.parametrize("op", ["add.f32", "sub.rn.f32", "mul.f32", "div.rn.f32"])
def test_float32(op):
    a, b = grid2(F32)
    function = {"a": np.add, "s": np.subtract, "m": np.multiply, "d": np.divide}[op[0]]
    with np.errstate(all="ignore"):
        same(per_thread(f"{op} %d, %a0, %a1;", "f4", a, b), function(a, b))


def test_flush_to_zero():
    a = np.array([1e-40, -1e-40, 2e-38, -2e-38, 1.0], "f4")
    b = np.array([0.0, -0.0, 0.5, 0.5, 2.0], "f4")
    same(per_thread("add.ftz.f32 %d, %a0, %a1;", "f4", a, b),
         np.array([0.0, -0.0, 0.5, 0.5, 3.0], "f4"))  # fmt: skip
    same(per_thread("mul.ftz.f32 %d, %a0, %a1;", "f4", a, b),
         np.array([0.0, 0.0, 0.0, -0.0, 2.0], "f4"))  # fmt: skip
    assert per_thread("mul.f32 %d, %a0, %a1;", "f4", a, b)[2] != 0
    same(per_thread("add.sat.f32 %d, %a0, %a1;", "f4", np.array([1, -1, np.nan], "f4"),
                    np.array([0.5, 0.5, 0], "f4")), np.array([1, 0, 0], "f4"))  # fmt: skip


def rounded(exact: Fraction, mode: str) -> np.float32:
    """To float32 by a search among its neighbours."""
    near = np.float32(float(exact))
    low = np.nextafter(near, np.float32(-np.inf))
    high = np.nextafter(near, np.float32(np.inf))
    options = [x for x in (low, near, high) if np.isfinite(x)]
    below = [x for x in options if Fraction(float(x)) <= exact]
    above = [x for x in options if Fraction(float(x)) >= exact]
    if mode == "rm":
        return max(below)
    if mode == "rp":
        return min(above)
    if mode == "rz":
        return max(below) if exact > 0 else min(above)

    def badness(x):
        odd = struct.unpack("<I", struct.pack("<f", x))[0] & 1
        return abs(Fraction(float(x)) - exact), odd

    return min(options, key=badness)


NORMAL = st.builds(math.ldexp, st.integers(-(2**24), 2**24), st.integers(-60, 20))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(NORMAL, NORMAL, NORMAL), min_size=1, max_size=20),
       st.sampled_from(("rn", "rz", "rm", "rp")))  # fmt: skip
def test_fma_rounds_the_exact_value_once(rows, mode):
    a, b, c = (np.array(column, "f4") for column in zip(*rows, strict=True))
    got = per_thread(f"fma.{mode}.f32 %d, %a0, %a1, %a2;", "f4", a, b, c)
    for i in range(len(rows)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            assert got[i] == rounded(exact, mode)


def test_fma_where_two_roundings_would_differ():
    """a b is half-way between two float32 numbers; c, lost in float64, says which is nearer."""
    a = np.full(2, 1 + 2.0**-12, "f4")
    c = np.array([2.0**-80, -(2.0**-80)], "f4")
    got = per_thread("fma.rn.f32 %d, %a0, %a0, %a1;", "f4", a, c)
    assert got.tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11]


def test_fma_below_the_normal_range():
    """The product is a sliver less than half of a last place, where float64 sees a half."""
    a, b = np.float32((1 + 2.0**-20) * 2.0**-75), np.float32((1 - 2.0**-20) * 2.0**-75)
    c = np.array([2.0**-127 + 2.0**-149], "f4")
    got = per_thread("fma.rn.f32 %d, %a0, %a1, %a2;", "f4", np.array([a]), np.array([b]), c)
    assert got[0] == c[0]


def test_fma64_against_fractions():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 300))
    c[:100] = -(a[:100] * b[:100])  # what is left is the rounding error of the product
    c[100:200] *= 1e-16
    got = per_thread("fma.rn.f64 %d, %a0, %a1, %a2;", "f8", a, b, c)
    for i in range(len(a)):
        assert got[i] == float(Fraction(a[i]) * Fraction(b[i]) + Fraction(c[i]))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_sixteen_bits(name):
    short = np.dtype("f2") if name == "f16" else np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(1)
    a, b, c = rng.standard_normal((3, 256)).astype(short)
    a[:6] = [0.0, -0.0, np.inf, np.nan, 60000.0, 6e-8]
    wide = [x.astype("f8") for x in (a, b, c)]
    exact = {"add": wide[0] + wide[1], "mul": wide[0] * wide[1], "sub": wide[0] - wide[1]}
    for op, value in exact.items():
        with np.errstate(all="ignore"):
            want = value.astype("f4").astype(
                short
            )  # the f4 step is exact for 8- and 11-bit factors
        same(per_thread(f"{op}.{name} %d, %a0, %a1;", short, a, b), want)
    got = per_thread(f"fma.rn.{name} %d, %a0, %a1, %a2;", short, a, b, c)[6:]
    for x, y, z, value in zip(a[6:], b[6:], c[6:], got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(value)) - exact)
        for other in (
            np.nextafter(value, short.type(np.inf)),
            np.nextafter(value, short.type(-np.inf)),
        ):
            assert error <= abs(Fraction(float(other)) - exact)


@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
def test_two_at_once(name):
    short = np.dtype("f2") if name == "f16x2" else np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 64)).astype(short)
    a[:2], b[2:4] = np.nan, np.nan
    packed = a.view("u4"), b.view("u4")
    got = per_thread(f"add.rn.{name} %d, %a0, %a1;", "u4", *packed).view(short)
    same(got, (a.astype("f4") + b.astype("f4")).astype(short))
    got = per_thread(f"max.{name} %d, %a0, %a1;", "u4", *packed).view(short)
    same(got, np.fmax(a.astype("f4"), b.astype("f4")).astype(short))
    got = per_thread(f"max.NaN.{name} %d, %a0, %a1;", "u4", *packed).view(short)
    same(got, np.maximum(a.astype("f4"), b.astype("f4")).astype(short))


def test_two_float32_at_once():
    a, b, c = np.random.default_rng(3).standard_normal((3, 32)).astype("f4")
    packed = a.view("u8"), b.view("u8"), c.view("u8")
    same(per_thread("add.rn.f32x2 %d, %a0, %a1;", "u8", *packed[:2]).view("f4"), a + b)
    got = per_thread("fma.rn.f32x2 %d, %a0, %a1, %a2;", "u8", *packed).view("f4")
    single = per_thread("fma.rn.f32 %d, %a0, %a1, %a2;", "f4", a, b, c)
    same(got, single)


NAN = np.nan


@pytest.mark.parametrize(
    ("op", "a", "b", "want"),
    [
        ("max.f32", 0.0, -0.0, 0.0),
        ("max.f32", -0.0, 0.0, 0.0),
        ("min.f32", 0.0, -0.0, -0.0),
        ("min.f32", -0.0, 0.0, -0.0),
        ("max.f32", NAN, 1.0, 1.0),
        ("max.f32", 1.0, NAN, 1.0),
        ("min.f32", NAN, NAN, NAN),
        ("max.NaN.f32", NAN, 1.0, NAN),
        ("max.NaN.f32", 1.0, NAN, NAN),
        ("max.NaN.f32", -np.inf, 1.0, 1.0),
        ("min.ftz.f32", 1e-40, 1.0, 0.0),
    ],
)
def test_extremes(op, a, b, want):
    got = per_thread(f"{op} %d, %a0, %a1;", "f4", np.array([a], "f4"), np.array([b], "f4"))
    same(got, np.array([want], "f4"))
    if want != want:
        assert got.view("u4")[0] == 0x7FFFFFFF


COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) and a == a and b == b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "num": lambda a, b: a == a and b == b,
}  # fmt: skip


@pytest.mark.parametrize("which", COMPARE)
def test_float_comparisons(which):
    a, b = grid2(F32)
    got = per_thread(f"setp.{which}.f32 %d, %a0, %a1;", bool, a, b)
    assert got.tolist() == [bool(COMPARE[which](x, y)) for x, y in zip(a, b, strict=True)]
    unordered = {"num": "nan"}.get(which, which + "u")
    got = per_thread(f"setp.{unordered}.f32 %d, %a0, %a1;", bool, a, b)
    nan = (a != a) | (b != b)
    if which == "num":
        assert got.tolist() == nan.tolist()
    else:
        want = [bool(COMPARE[which](x, y)) for x, y in zip(a, b, strict=True)]
        assert got.tolist() == (np.array(want) | nan).tolist()


def test_integer_comparisons_and_selection():
    a, b = pairs("s32")
    for which, function in (("lt", np.less), ("ge", np.greater_equal), ("ne", np.not_equal)):
        got = per_thread(f"setp.{which}.s32 %d, %a0, %a1;", bool, a, b)
        assert (got == function(a, b)).all()
        got = per_thread(f"setp.{which}.u32 %d, %a0, %a1;", bool, a, b)
        assert (got == function(a.view("u4"), b.view("u4"))).all()
    assert (
        per_thread("setp.hi.u32 %d, %a0, %a1;", bool, a, b) == (a.view("u4") > b.view("u4"))
    ).all()
    p = a > 3
    got = per_thread("setp.lt.and.s32 %d|%p1, %a0, %a1, %a2;", bool, a, b, p)
    assert (got == ((a < b) & p)).all()
    got = per_thread("setp.lt.and.s32 %p1|%d, %a0, %a1, %a2;", bool, a, b, p)
    assert (got == (~(a < b) & p)).all()
    assert (per_thread("selp.b32 %d, %a0, %a1, %a2;", "i4", a, b, p) == np.where(p, a, b)).all()
    assert (per_thread("selp.b32 %d, %a0, %a1, !%a2;", "i4", a, b, p) == np.where(p, b, a)).all()
    assert (per_thread("slct.b32.s32 %d, %a0, 7, %a1;", "i4", a, b) == np.where(b >= 0, a, 7)).all()
    got = per_thread("set.lt.u32.s32 %d, %a0, %a1;", "i4", a, b)
    assert (got == np.where(a < b, -1, 0)).all()
    got = per_thread("set.lt.f32.s32 %d, %a0, %a1;", "f4", a, b)
    assert (got == np.where(a < b, 1.0, 0.0)).all()


def test_signs():
    same(per_thread("neg.f32 %d, %a0;", "f4", F32), -F32)
    same(per_thread("abs.f32 %d, %a0;", "f4", F32), np.abs(F32))
    a, b = grid2(F32)
    same(per_thread("copysign.f32 %d, %a0, %a1;", "f4", a, b), np.copysign(b, a))
    i = edges("s32")
    assert per_thread("neg.s32 %d, %a0;", "i4", i).tolist() == [wrap(-int(x), "s32") for x in i]
    assert per_thread("abs.s32 %d, %a0;", "i4", i).tolist() == [wrap(abs(int(x)), "s32") for x in i]
    for which, function in (
        ("finite", np.isfinite),
        ("infinite", np.isinf),
        ("notanumber", np.isnan),
    ):
        assert (per_thread(f"testp.{which}.f32 %d, %a0;", bool, F32) == function(F32)).all()


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("ex2.approx.f32", np.exp2),
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.f32", np.log2),
        ("sin.approx.f32", np.sin),
        ("cos.approx.f32", np.cos),
        ("tanh.approx.f32", np.tanh),
        ("sqrt.rn.f32", np.sqrt),
        ("sqrt.approx.f32", np.sqrt),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x)),
        ("rcp.rn.f32", lambda x: 1 / x),
        ("rcp.approx.ftz.f32", lambda x: 1 / x),
    ],
)
def test_functions(op, function):
    x = np.array([0.0, -0.0, 1.0, -1.0, 0.3, 7.5, 100.0, np.inf, -np.inf, np.nan], "f4")
    with np.errstate(all="ignore"):
        same(per_thread(f"{op} %d, %a0;", "f4", x), function(x.astype("f8")).astype("f4"))


# ---------------------------------------------------------------- conversions


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_conversions(source, to):
    a = edges(source)
    register = max(int(to[1:]), 16)  # eight bits live in a register of sixteen
    result = dtype(to[0] + str(register))
    got = per_thread(f"cvt.{to}.{source} %d, %a0;", result, a)
    assert got.tolist() == [wrap(int(x), to) for x in a]
    info = np.iinfo(dtype(to))
    got = per_thread(f"cvt.sat.{to}.{source} %d, %a0;", result, a)
    assert got.tolist() == [min(max(int(x), int(info.min)), int(info.max)) for x in a]


@pytest.mark.parametrize("to", ["s8", "u8", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_floats_to_integers_stop_at_the_ends(mode, to):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3.7, -3.7, 1e30, -1e30, np.inf, -np.inf, np.nan,
                  2147483648.0, -2147483648.0, 300.0], "f4")  # fmt: skip
    function = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    info = np.iinfo(dtype(to))
    low, high = int(info.min), int(info.max)

    def want(value):
        if value != value:
            return 0
        if math.isinf(value):
            return high if value > 0 else low
        return min(max(function(value), low), high)

    result = dtype(to[0] + str(max(int(to[1:]), 16)))
    got = per_thread(f"cvt.{mode}.{to}.f32 %d, %a0;", result, x)
    assert got.tolist() == [want(float(v)) for v in x]


def test_integers_to_floats():
    for source in ("s32", "u32", "s64", "u64"):
        a = np.concatenate([edges(source), np.array([16777217, 33554435], dtype(source))])
        got = per_thread(f"cvt.rn.f32.{source} %d, %a0;", "f4", a)
        assert [Fraction(float(v)) for v in got] == [
            Fraction(float(rounded(Fraction(int(x)), "rn"))) for x in a
        ]
        got = per_thread(f"cvt.rz.f32.{source} %d, %a0;", "f4", a)
        for x, v in zip(a, got, strict=True):
            assert abs(Fraction(float(v))) <= abs(int(x))
    a = edges("s16")
    same(per_thread("cvt.rn.f16.s16 %d, %a0;", "f2", a), a.astype("f2"))


def test_between_floats():
    rng = np.random.default_rng(4)
    x = np.concatenate([F32, rng.standard_normal(100).astype("f4")])
    bf16 = ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        same(per_thread("cvt.rn.f16.f32 %d, %a0;", "f2", x), x.astype("f2"))
        same(per_thread("cvt.rn.bf16.f32 %d, %a0;", bf16, x), x.astype(bf16))
        same(per_thread("cvt.f64.f32 %d, %a0;", "f8", x), x.astype("f8"))
        same(per_thread("cvt.f32.bf16 %d, %a0;", "f4", x.astype(bf16)), x.astype(bf16).astype("f4"))
        same(per_thread("cvt.f32.f16 %d, %a0;", "f4", x.astype("f2")), x.astype("f2").astype("f4"))
        d = rng.standard_normal(100) * 1e3
        same(per_thread("cvt.rn.f32.f64 %d, %a0;", "f4", d), d.astype("f4"))
        same(per_thread("cvt.rni.f32.f32 %d, %a0;", "f4", x), np.rint(x))
    for mode in ("rm", "rp", "rz"):
        got = per_thread(f"cvt.{mode}.f32.f64 %d, %a0;", "f4", d)
        assert all(v == rounded(Fraction(float(y)), mode) for v, y in zip(got, d, strict=True))
    chopped = (x.view("u4") & np.uint32(0xFFFF0000)).view("f4")
    finite = np.isfinite(x)
    got = per_thread("cvt.rz.bf16.f32 %d, %a0;", bf16, x).astype("f4")
    same(got[finite], chopped[finite])


def test_packing_puts_the_first_operand_on_top():
    a, b = np.array([1.0, NAN, 1e6], "f4"), np.array([2.0, -3.0, -1e6], "f4")
    with np.errstate(all="ignore"):
        for name, short in (("f16x2", np.dtype("f2")), ("bf16x2", np.dtype(ml_dtypes.bfloat16))):
            got = per_thread(f"cvt.rn.{name}.f32 %d, %a0, %a1;", "u4", a, b)
            same(got.view(short)[1::2], a.astype(short))
            same(got.view(short)[0::2], b.astype(short))
            got = per_thread(f"cvt.rn.relu.{name}.f32 %d, %a0, %a1;", "u4", a, b).view(short)
            same(got[0::2], np.maximum(b, 0).astype(short))
            assert got[3] != got[3]


def test_eight_bits():
    e4, e5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    a = np.array([1.0, 448.0, 1e9, -np.inf, np.nan, 0.3, 464.0], "f4")
    b = np.array([-1.0, -500.0, 1e-9, np.inf, 2.0, -0.0, 57344.0], "f4")
    for name, short, top in (("e4m3x2", e4, 448.0), ("e5m2x2", e5, 57344.0)):
        got = per_thread(f"cvt.rn.satfinite.{name}.f32 %d, %a0, %a1;", "u2", a, b)
        halves = got.view(short)
        for column, values in ((halves[1::2], a), (halves[0::2], b)):
            want = np.clip(values, -top, top).astype(short)
            same(column.astype("f4"), want.astype("f4"))
        back = per_thread(f"cvt.rn.f16x2.{name} %d, %a0;", "u4", got).view("f2")
        same(back, halves.astype("f2"))


def test_tf32():
    x = np.array([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, -1.0 - 2.0**-12, np.inf, 1e-3], "f4")
    got = per_thread("cvt.rna.tf32.f32 %d, %a0;", "f4", x)
    assert got[0] == 1 + 2.0**-10  # a tie goes away from zero
    assert got[1] == 1 + 2 * 2.0**-10
    assert got[2] == -1.0
    assert got[3] == np.inf
    assert abs(got[4] - 1e-3) <= 1e-3 * 2.0**-11


# ---------------------------------------------------------------- moves


def test_packing_and_unpacking_moves():
    a, b = np.array([0x1234], "u2"), np.array([0xABCD], "u2")
    assert per_thread("mov.b32 %d, {%a0, %a1};", "u4", a, b)[0] == 0xABCD1234
    c = np.array([0x0123456789ABCDEF], "u8")
    assert per_thread("mov.b64 {%r1, %d}, %a0;", "u4", c)[0] == 0x01234567
    assert per_thread("mov.b64 {%d, _}, %a0;", "u4", c)[0] == 0x89ABCDEF
    code = "mov.b64 {%h0, %h1, %h2, %h3}, %a0; mov.b64 %d, {%h3, %h2, %h1, %h0};"
    assert per_thread(code, "u8", c)[0] == 0xCDEF89AB45670123


def test_scopes_shadow_names():
    a = np.array([5], "u4")
    code = "{ .reg .b32 z; mov.b32 z, 7; { .reg .b32 z; mov.b32 z, 1; } add.u32 %d, %a0, z; }"
    assert per_thread(code, "u4", a)[0] == 12


def test_literals():
    a = np.zeros(1, "u4")
    assert per_thread("add.f32 %d, 0f3F800000, 0f40000000;", "f4", a)[0] == 3.0
    assert per_thread("add.f64 %d, 0d3FF0000000000000, 0d4000000000000000;", "f8", a)[0] == 3.0
    assert per_thread("add.s32 %d, -5, 0x10;", "i4", a)[0] == 11
    assert per_thread("mov.u32 %d, WARP_SZ;", "u4", a)[0] == 32


def test_unknown_instructions_are_refused_by_name_when_they_run():
    a = np.arange(4, dtype="u4")
    with pytest.raises(NotImplementedError, match=r"`mul24\.lo\.u32`, PTX line \d+"):
        per_thread("mul24.lo.u32 %d, %a0, %a0;", "u4", a)
    with pytest.raises(NotImplementedError, match=r"tcgen05\.wait::ld\.sync\.aligned"):
        per_thread("tcgen05.wait::ld.sync.aligned;", "u4", a)
    with pytest.raises(NotImplementedError, match=r"wgmma\.mma_async\.sp"):
        per_thread("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 %r0, %q0;", "u4", a)
    # Behind a branch that nobody takes it is harmless.
    got = per_thread("bra L; tcgen05.wait::ld.sync.aligned; L: mov.b32 %d, %a0;", "u4", a)
    assert got.tolist() == [0, 1, 2, 3]
