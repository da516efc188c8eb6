"""`ldmatrix`, `stmatrix` and `mma.sync` against matrices laid out by the PTX manual's words."""

import ml_dtypes
import numpy as np
import pytest

from eqxcute._ptx import KernelFault, run_ptx

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.shared .align 128 .b8 s[4096];
"""


def run(code: str, *arrays, block=32):
    names = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    loads = "".join(f"ld.param.u64 %rd{i}, [p{i}];\n" for i in range(len(arrays)))
    run_ptx(
        f"""{HEAD} .visible .entry k({names}) {{
        .reg .pred %p<8>; .reg .b32 %r<99>; .reg .b64 %rd<20>; .reg .b32 %t;
        {loads} mov.u32 %t, %tid.x; {code} ret; }}""",
        arrays,
        block=(block, 1, 1),
        written=[len(arrays) - 1],
    )


def load(array: int, first: int, count: int, stride: int) -> str:
    """Registers %r<first>...: the thread's row of `count` words in an array."""
    lines = [f"mul.wide.u32 %rd10, %t, {4 * stride}; add.s64 %rd10, %rd{array}, %rd10;"]
    lines += [f"ld.global.b32 %r{first + i}, [%rd10+{4 * i}];" for i in range(count)]
    return "\n".join(lines)


def store(array: int, first: int, count: int) -> str:
    lines = [f"mul.wide.u32 %rd10, %t, {4 * count}; add.s64 %rd10, %rd{array}, %rd10;"]
    lines += [f"st.global.b32 [%rd10+{4 * i}], %r{first + i};" for i in range(count)]
    return "\n".join(lines)


def fragments(matrix: np.ndarray, which: str, per: int) -> np.ndarray:
    """A matrix as registers (32, words), element by element, as the manual lists them.

    `per`: elements a word. groupID is lane / 4, threadID_in_group is lane % 4.
    """
    out = []
    for lane in range(32):
        group, place = lane // 4, lane % 4
        elements = []
        k = matrix.shape[1] if which == "a" else matrix.shape[0]
        for half in range(k // (4 * per)):
            rows = (group, group + 8) if which == "a" else (None,)
            for row in rows:
                for i in range(per):
                    column = place * per + i + 4 * per * half
                    elements.append(matrix[row, column] if which == "a" else matrix[column, group])
        out.append(elements)
    return np.ascontiguousarray(np.array(out, matrix.dtype)).view("u4")


def accumulator(matrix: np.ndarray) -> np.ndarray:
    rows = []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        rows.append([matrix[g, 2 * t], matrix[g, 2 * t + 1], matrix[g + 8, 2 * t],
                     matrix[g + 8, 2 * t + 1]])  # fmt: skip
    return np.array(rows, matrix.dtype)


@pytest.mark.parametrize(
    ("name", "k", "dtype", "per"),
    [
        ("f16", 16, np.float16, 2),
        ("f16", 8, np.float16, 2),
        ("bf16", 16, ml_dtypes.bfloat16, 2),
        ("bf16", 8, ml_dtypes.bfloat16, 2),
        ("tf32", 8, np.float32, 1),
        ("tf32", 4, np.float32, 1),
        ("e4m3", 32, ml_dtypes.float8_e4m3fn, 4),
    ],
)
def test_mma(name, k, dtype, per):
    rng = np.random.default_rng(k)
    a = rng.standard_normal((2, 16, k)).astype(dtype)  # of two warps
    b = rng.standard_normal((2, k, 8)).astype(dtype)
    c = rng.standard_normal((2, 16, 8)).astype("f4")
    fa = np.concatenate([fragments(x, "a", per) for x in a])
    fb = np.concatenate([fragments(x, "b", per) for x in b])
    fc = np.concatenate([accumulator(x) for x in c])
    d = np.zeros((64, 4), "f4")
    na, nb = fa.shape[1], fb.shape[1]
    listed = [", ".join(f"%r{i + j}" for j in range(n)) for i, n in ((0, na), (10, nb), (20, 4))]
    run(
        load(0, 0, na, na) + load(1, 10, nb, nb) + load(2, 20, 4, 4)
        + f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32 {{{listed[2]}}}, {{{listed[0]}}}, "
        + f"{{{listed[1]}}}, {{{listed[2]}}};"
        + store(3, 20, 4),
        fa, fb, fc, d, block=64,
    )  # fmt: skip

    def exact(x):
        if name == "tf32":
            x = (x.view("u4") & np.uint32(0xFFFFE000)).view("f4")
        return x.astype("f8")

    want = np.matmul(exact(a), exact(b)) + c
    want = np.concatenate([accumulator(x.astype("f4")) for x in want])
    assert (d == want).all()


def test_mma_with_f16_sums_and_integers():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype("f2"), rng.standard_normal((16, 8)).astype("f2")
    c = rng.standard_normal((16, 8)).astype("f2")
    d = np.zeros((32, 2), "u4")
    code = load(0, 0, 4, 4) + load(1, 10, 2, 2) + load(2, 20, 2, 2)
    code += "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r20, %r21}, {%r0, %r1, %r2, %r3},"
    code += "{%r10, %r11}, {%r20, %r21};" + store(3, 20, 2)
    run(code, fragments(a, "a", 2), fragments(b, "b", 2), accumulator(c).view("u4"), d)
    want = (a.astype("f8") @ b.astype("f8") + c).astype("f2")
    assert (d == accumulator(want).view("u4")).all()

    a, b = (
        rng.integers(-128, 128, (16, 32)).astype("i1"),
        rng.integers(0, 256, (32, 8)).astype("u1"),
    )
    c = rng.integers(-1000, 1000, (16, 8)).astype("i4")
    d = np.zeros((32, 4), "i4")
    code = load(0, 0, 4, 4) + load(1, 10, 2, 2) + load(2, 20, 4, 4)
    code += "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%r20, %r21, %r22, %r23},"
    code += "{%r0, %r1, %r2, %r3}, {%r10, %r11}, {%r20, %r21, %r22, %r23};" + store(3, 20, 4)
    run(code, fragments(a, "a", 4), fragments(b, "b", 4), accumulator(c), d)
    assert (d == accumulator(a.astype("i8") @ b.astype("i8") + c)).all()


def test_zero_times_nan_is_nan():
    a, b = np.zeros((16, 16), "f2"), np.ones((16, 8), "f2")
    b[3, 5] = np.nan
    d = np.zeros((32, 4), "f4")
    code = (
        load(0, 0, 4, 4) + load(1, 10, 2, 2) + "".join(f"mov.b32 %r{20 + i}, 0;" for i in range(4))
    )
    code += "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23},"
    code += "{%r0, %r1, %r2, %r3}, {%r10, %r11}, {%r20, %r21, %r22, %r23};" + store(2, 20, 4)
    run(code, fragments(a, "a", 2), fragments(b, "b", 2), d)
    want = np.zeros((16, 8))
    want[:, 5] = np.nan
    np.testing.assert_array_equal(d, accumulator(want))


FILL = """mul.lo.u32 %r50, %t, 16; mov.u32 %r51, s; add.u32 %r51, %r51, %r50; mul.wide.u32 %rd11, %t, 16;
add.s64 %rd11, %rd0, %rd11; ld.global.v4.b32 {%r52, %r53, %r54, %r55}, [%rd11];
st.shared.v4.b32 [%r51], {%r52, %r53, %r54, %r55}; bar.sync 0;"""


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    """Row r of matrix i is 16 bytes at the address that lane 8 i + r gives."""
    x = np.arange(32 * 8, dtype="u2").reshape(4, 8, 8)
    out = np.zeros((32, count), "u4")
    registers = ", ".join(f"%r{i}" for i in range(count))
    dot = ".trans" if trans else ""
    run(
        FILL
        + f"ldmatrix.sync.aligned.m8n8.x{count}{dot}.shared.b16 {{{registers}}}, [%r51];"
        + store(1, 0, count),
        x.view("u4"),
        out,
    )
    halves = out.view("u2").reshape(32, count, 2)
    for lane in range(32):
        for i in range(count):
            row, column = lane // 4, 2 * (lane % 4)
            want = x[i, column : column + 2, row] if trans else x[i, row, column : column + 2]
            assert halves[lane, i].tolist() == want.tolist()


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_undoes_ldmatrix(trans):
    x = np.arange(32 * 8, dtype="u2").reshape(4, 8, 8)
    out = np.zeros((32, 4), "u4")
    dot = ".trans" if trans else ""
    run(
        FILL
        + f"ldmatrix.sync.aligned.m8n8.x4{dot}.shared.b16 {{%r0, %r1, %r2, %r3}}, [%r51];"
        + "bar.sync 0;"
        + f"stmatrix.sync.aligned.m8n8.x4{dot}.shared.b16 [%r51+512], {{%r0, %r1, %r2, %r3}};"
        + "bar.sync 0; ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r51+512];"
        + store(1, 4, 4),
        x.view("u4"),
        out,
    )
    assert (out.view("u2").reshape(4, 8, 8) == x).all()


def test_a_warp_may_overwrite_rows_that_it_has_loaded():
    """`ldmatrix` joins the warp: no lane is behind it while another still reads."""
    x = np.zeros((32, 4), "u4")
    run(
        FILL
        + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%r51];"
        + "xor.b32 %r51, %r51, 16; st.shared.v4.b32 [%r51], {%r0, %r1, %r2, %r3};"
        + store(1, 0, 4),
        x,
        x.copy(),
    )


def test_matrix_faults():
    x = np.zeros((32, 4), "u4")
    load_at = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0, %r1, %r2, %r3}}, [%r51{}];"
    with pytest.raises(KernelFault, match="misaligned: reads 16 bytes at byte 8"):
        run(FILL + load_at.format("+8"), x, x)
    with pytest.raises(KernelFault, match="uninitialised: reads bytes 512 to 527 of shared memory"):
        run(FILL + load_at.format("+16"), x, x)
    with pytest.raises(KernelFault, match="race on"):
        run(FILL.replace("bar.sync 0;", "") + "xor.b32 %r51, %r51, 512;" + load_at.format(""),
            np.zeros((64, 4), "u4"), x, block=64)  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"mma\.sync\.aligned\.m8n8k4.*this shape"):
        run(
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd5, %rd6}, {%rd5}, {%rd5}, {%rd5, %rd6};",
            x,
            x,
        )
