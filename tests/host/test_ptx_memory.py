"""The interpreter's loads, stores, atomics and copies, and the faults it finds in them."""

import ml_dtypes
import numpy as np
import pytest

from eqxcute._ptx import KernelFault, run_ptx

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
"""
REGISTERS = """
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .f32 %f<16>; .reg .b64 %rd<64>;
"""


def kernel(code: str, params: int = 2, shared: str = "") -> str:
    """A kernel whose parameters' addresses are in %rd0, %rd1, ...; %r0 is the thread, %r1 the
    CTA, %rd20 the thread's number in the launch times four."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    return f"""{HEAD}
{shared}
.visible .entry k({names})
{{
{REGISTERS}
{loads}
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r3, %r1, %r2, %r0;
mul.wide.u32 %rd20, %r3, 4;
mul.wide.u32 %rd21, %r0, 4;
{code}
ret;
}}
"""


def run(code, *arrays, shared="", **options):
    run_ptx(kernel(code, len(arrays), shared), arrays, **options)


def fault(code, *arrays, **options) -> str:
    with pytest.raises(KernelFault) as caught:
        run(code, *arrays, **options)
    return str(caught.value)


def numbers(count, dtype="u4"):
    return np.arange(count).astype(dtype)


# ---------------------------------------------------------------- loads and stores


@pytest.mark.parametrize(("vector", "word", "register"), [
    ("", "b32", "%r10"), ("v2", "b32", "{%r10, %r11}"), ("v4", "b32", "{%r10, %r11, %r12, %r13}"),
    ("v2", "b64", "{%rd40, %rd41}"), ("v4", "b64", "{%rd40, %rd41, %rd42, %rd43}"),
    ("v8", "b32", "{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}"),
    ("v4", "b16", "{%h0, %h1, %h2, %h3}"), ("v2", "b8", "{%h0, %h1}"),
])  # fmt: skip
def test_vectors(vector, word, register):
    size = int(word[1:]) // 8 * int(vector[1:] or 1)
    x = np.random.default_rng(0).integers(0, 256, 32 * size).astype("u1")
    y = np.zeros_like(x)
    dot = f".{vector}" if vector else ""
    run(
        f"""mul.wide.u32 %rd30, %r0, {size}; add.s64 %rd0, %rd0, %rd30; add.s64 %rd1, %rd1, %rd30;
        ld.global{dot}.{word} {register}, [%rd0]; st.global{dot}.{word} [%rd1], {register};""",
        x, y, written=[1],
    )  # fmt: skip
    assert (x == y).all()


@pytest.mark.parametrize(("kind", "want"), [("s8", -3), ("u8", 253), ("b8", 253)])
def test_small_loads_are_extended(kind, want):
    x, y = np.full(1, -3, "i1"), np.zeros(1, "i4")
    run(f"ld.global.{kind} %r10, [%rd0]; st.global.b32 [%rd1], %r10;", x, y, block=(1, 1, 1))
    assert y[0] == want
    run(f"ld.global.{kind} %h0, [%rd0]; cvt.s32.s16 %r10, %h0; st.global.b32 [%rd1], %r10;",
        x, y, block=(1, 1, 1))  # fmt: skip
    assert y[0] == want


def test_modifiers_that_change_nothing():
    x, y = numbers(32), numbers(32)
    for mods in ("nc", "L1::no_allocate", "cs", "L2::256B", "nc.L1::no_allocate.L2::128B", "volatile",
                 "relaxed.gpu", "acquire.sys"):  # fmt: skip
        mods = f"{mods}.global" if mods in ("volatile", "relaxed.gpu") else f"global.{mods}"
        mods = "acquire.sys.global" if "acquire" in mods else mods
        y[:] = 0
        run(f"""add.s64 %rd0, %rd0, %rd20; add.s64 %rd1, %rd1, %rd20;
            ld.{mods}.b32 %r10, [%rd0]; st.global.b32 [%rd1], %r10;""", x, y)  # fmt: skip
        assert (x == y).all()


def test_generic_addresses_of_all_kinds():
    """Each thread gets a pointer to shared, local or global memory, and does not know which."""
    x, y = numbers(96), np.zeros(96, "u4")
    code = """
    .local .align 8 .b8 depot[8];
    add.s64 %rd0, %rd0, %rd20; add.s64 %rd1, %rd1, %rd20;
    mov.u64 %rd30, depot; cvta.local.u64 %rd31, %rd30;
    mov.u64 %rd32, s; cvta.shared.u64 %rd33, %rd32; add.s64 %rd33, %rd33, %rd20;
    rem.u32 %r10, %r0, 3;
    setp.eq.u32 %p1, %r10, 1; selp.b64 %rd34, %rd31, %rd33, %p1;
    setp.eq.u32 %p2, %r10, 2; selp.b64 %rd34, %rd1, %rd34, %p2;
    ld.global.b32 %r11, [%rd0];
    st.b32 [%rd34], %r11;
    ld.b32 %r12, [%rd34];
    isspacep.shared %p3, %rd34; selp.u32 %r13, 100, 0, %p3;
    isspacep.local %p3, %rd34; selp.u32 %r14, 200, 0, %p3;
    isspacep.global %p3, %rd34; selp.u32 %r15, 300, 0, %p3;
    add.u32 %r12, %r12, %r13; add.u32 %r12, %r12, %r14; add.u32 %r12, %r12, %r15;
    st.global.b32 [%rd1], %r12;
    """
    run(code, x, y, shared=".shared .align 4 .b8 s[384];", block=(96, 1, 1), written=[1])
    assert (y == x + np.array([100, 200, 300])[x % 3]).all()


def test_parameters_by_value_and_constants():
    text = f"""{HEAD}
    .const .align 4 .u32 table[4] = {{10, 20, 0x1E, 40}};
    .global .align 8 .b8 bytes[3] = {{1, 2, 3}};
    .visible .entry k(.param .align 8 .b8 box[24], .param .f32 scale, .param .u64 out)
    {{ {REGISTERS}
    mov.u32 %r0, %tid.x;
    ld.param.v2.b32 {{%r1, %r2}}, [box+8];
    ld.param.u8 %h1, [box+17];
    mov.b64 %rd1, box; mul.wide.u32 %rd2, %r0, 4; add.s64 %rd1, %rd1, %rd2; ld.param.b32 %r3, [%rd1];
    mov.u64 %rd4, table; add.s64 %rd4, %rd4, %rd2; ld.const.u32 %r4, [%rd4];
    ld.const.u32 %r6, [table+8];
    ld.global.u8 %h2, [bytes+2];
    ld.param.f32 %f1, [scale]; cvt.rzi.u32.f32 %r5, %f1;
    add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; add.u32 %r1, %r1, %r4; add.u32 %r1, %r1, %r5;
    add.u32 %r1, %r1, %r6;
    cvt.u32.u16 %r7, %h1; add.u32 %r1, %r1, %r7; cvt.u32.u16 %r7, %h2; add.u32 %r1, %r1, %r7;
    ld.param.u64 %rd3, [out]; add.s64 %rd3, %rd3, %rd2; st.global.u32 [%rd3], %r1; ret; }}
    """
    out = np.zeros(4, "u4")
    box = np.array([1, 2, 3, 4, 0x0500, 0], "u4")
    run_ptx(text, [box.tobytes(), np.float32(1000), out], block=(4, 1, 1), written=[2])
    want = [3 + 4 + box[i] + (10, 20, 30, 40)[i] + 1000 + 30 + 5 + 3 for i in range(4)]
    assert out.tolist() == want


def test_several_ctas_in_three_dimensions():
    out = np.zeros(2 * 3 * 4 * 2 * 2 * 8, "u4")
    code = """
    mov.u32 %r4, %tid.y; mov.u32 %r5, %tid.z; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %ctaid.z;
    mov.u32 %r8, %nctaid.x; mov.u32 %r9, %nctaid.y; mov.u32 %r10, %ntid.y; mov.u32 %r11, %ntid.z;
    mad.lo.u32 %r12, %r5, %r10, %r4; mad.lo.u32 %r12, %r12, %r2, %r0;
    mad.lo.u32 %r13, %r7, %r9, %r6; mad.lo.u32 %r13, %r13, %r8, %r1;
    mul.lo.u32 %r14, %r2, %r10; mul.lo.u32 %r14, %r14, %r11;
    mad.lo.u32 %r15, %r13, %r14, %r12;
    mul.wide.u32 %rd3, %r15, 4; add.s64 %rd3, %rd0, %rd3; st.global.u32 [%rd3], %r15;
    """
    run(code, out, grid=(2, 3, 4), block=(8, 2, 2), written=[0])
    assert (out == np.arange(out.size)).all()


# ---------------------------------------------------------------- atomics


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("op", "dtype", "start", "function"), [
    ("add.u32", "u4", 5, lambda v: 5 + sum(v)), ("add.u64", "u8", 2**40, lambda v: 2**40 + sum(v)),
    ("add.f32", "f4", 0.5, lambda v: 0.5 + sum(v)), ("add.f64", "f8", 0.5, lambda v: 0.5 + sum(v)),
    ("min.s32", "i4", 9, min), ("max.s32", "i4", -9, max), ("max.u64", "u8", 0, max),
    ("and.b32", "u4", 0xFFFFFFFF, lambda v: 0), ("or.b32", "u4", 0, lambda v: 63),
    ("xor.b32", "u4", 1, lambda v: 1), ("inc.u32", "u4", 0, lambda v: None),
])  # fmt: skip
def test_atomics_on_one_word(op, dtype, start, function, space):
    """64 threads, values 0 to 63, one place: the order is the lanes'."""
    dtype = np.dtype(dtype)
    bits = 8 * dtype.itemsize
    value = "%r10" if bits == 32 else "%rd30"
    kind = op.split(".")[1]
    convert = {"f": "cvt.rn", "s": "cvt", "u": "cvt", "b": "cvt"}[kind[0]]
    source = (
        f"{convert}.{kind.replace('b', 'u')}.u32 {value}, %r0;"
        if kind != "u32"
        else "mov.u32 %r10, %r0;"
    )
    if kind in ("s32", "b32"):
        source = "mov.b32 %r10, %r0;"
    out = np.full(1, start, dtype)
    place, around = "%rd0", ("", "")
    if space == "shared":
        place = "%rd3"
        around = (
            f"mov.u64 %rd3, s; setp.eq.u32 %p1, %r0, 0; @%p1 ld.global.b{bits} %rd9, [%rd0];"
            f"@%p1 st.shared.b{bits} [s], %rd9; bar.sync 0;",
            f"bar.sync 0; @%p1 ld.shared.b{bits} %rd9, [s]; @%p1 st.global.b{bits} [%rd0], %rd9;",
        )
    run(f"{source}{around[0]} red.{space}.{op} [{place}], {value}; {around[1]}", out,
        block=(64, 1, 1), shared=".shared .align 8 .b8 s[8];")  # fmt: skip
    want = function(range(64))
    if want is None:  # inc: up to the bound that each lane brings
        want = 0
        for bound in range(64):
            want = 0 if want >= bound else want + 1
    assert out[0] == want


def test_atomics_return_the_old_value():
    count, old = np.zeros(3, "u4"), np.zeros(96, "u4")
    run("""rem.u32 %r10, %r0, 3; mul.wide.u32 %rd3, %r10, 4; add.s64 %rd3, %rd0, %rd3;
        atom.global.add.u32 %r11, [%rd3], 2; add.s64 %rd1, %rd1, %rd20; st.global.u32 [%rd1], %r11;""",
        count, old, block=(96, 1, 1), written=[1])  # fmt: skip
    assert count.tolist() == [64] * 3
    assert old.tolist() == [2 * (i // 3) for i in range(96)]


def test_compare_and_swap_loop():
    """A lock-free float maximum, as compilers write it: lanes leave the loop one by one."""
    out, x = np.full(1, -1e9, "f4"), np.random.default_rng(0).standard_normal(64).astype("f4")
    run("""add.s64 %rd1, %rd1, %rd20; ld.global.f32 %f1, [%rd1]; ld.volatile.global.b32 %r10, [%rd0];
        AGAIN: mov.b32 %f2, %r10; max.f32 %f3, %f1, %f2; mov.b32 %r11, %f3;
        atom.global.cas.b32 %r12, [%rd0], %r10, %r11;
        setp.ne.b32 %p1, %r12, %r10; mov.b32 %r10, %r12; @%p1 bra AGAIN;""",
        out, x, block=(64, 1, 1))  # fmt: skip
    assert out[0] == x.max()


def test_vector_and_packed_reductions():
    out = np.zeros(4, "f4")
    run("""mov.f32 %f1, 0f3F800000; cvt.rn.f32.u32 %f2, %r0;
        red.global.add.v4.f32 [%rd0], {%f1, %f2, %f1, %f1};""", out)  # fmt: skip
    assert out.tolist() == [32, 496, 32, 32]
    halves = np.zeros(2, "f2")
    run("mov.b32 %r10, 0x40003C00; red.global.add.noftz.f16x2 [%rd0], %r10;", halves)
    assert halves.tolist() == [32, 64]
    brain = np.zeros(2, ml_dtypes.bfloat16)
    run("mov.b32 %r10, 0x40003F80; red.global.add.noftz.bf16x2 [%rd0], %r10;", brain)
    assert brain.astype("f4").tolist() == [32, 64]


# ---------------------------------------------------------------- faults


def test_out_of_bounds_names_array_bytes_and_thread():
    x, y = numbers(31), np.zeros(32, "u4")
    text = fault("""add.s64 %rd0, %rd0, %rd20; add.s64 %rd1, %rd1, %rd20;
        ld.global.b32 %r10, [%rd0]; st.global.b32 [%rd1], %r10;""", x, y, names=["x", "y"])  # fmt: skip
    assert "out of bounds: reads bytes 124 to 127 of `x`, which has 124 bytes" in text
    assert "`ld.global.b32 %r10, [%rd0]` (PTX line" in text
    assert "kernel k, CTA (0, 0, 0), thread (31, 0, 0)" in text


def test_out_of_bounds_before_the_first_byte_and_far_away():
    x = numbers(32)
    assert "bytes -4 to -1 of `x`" in fault("ld.global.b32 %r10, [%rd0+-4];", x, names=["x"])
    text = fault("mov.b64 %rd5, 0x200000000; add.s64 %rd0, %rd0, %rd5; st.global.b32 [%rd0], %r0;",
                 x, names=["x"], block=(1, 1, 1))  # fmt: skip
    assert "writes bytes 8589934592 to 8589934595 of `x`" in text
    text = fault("mov.b64 %rd5, 16; ld.global.b32 %r10, [%rd5];", x)
    assert "0x10, which is in no array" in text


def test_one_byte_too_far():
    x = numbers(31, "u1")
    code = "cvt.u64.u32 %rd5, %r0; add.s64 %rd0, %rd0, %rd5; ld.global.u8 %r10, [%rd0];"
    assert "reads bytes 31 to 31 of `x`, which has 31 bytes" in fault(code, x, names=["x"])
    code = "add.s64 %rd0, %rd0, %rd5; st.global.u8 [%rd0], %r0;"
    code = "cvt.u64.u32 %rd5, %r0;" + code
    assert "writes bytes 31 to 31 of `x`" in fault(code, x, names=["x"])
    run(code, x, block=(31, 1, 1))
    assert x.tolist() == list(range(31))


def test_an_access_lies_in_one_array():
    x, y = numbers(64, "u1"), numbers(64, "u1")
    assert "bytes 64 to 67 of `x`" in fault(
        "ld.global.b32 %r10, [%rd0+64];", x, y, names=["x", "y"]
    )


def test_misaligned():
    x = numbers(64)
    text = fault("ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd0+8];", x, names=["x"])
    assert "misaligned: reads 16 bytes at byte 8 of `x`, which is no multiple of 16" in text
    text = fault("mov.u32 %r10, s; st.shared.b32 [%r10+2], %r0;", x, block=(1, 1, 1),
                 shared=".shared .align 4 .b8 s[64];")  # fmt: skip
    assert "misaligned: writes 4 bytes at byte 2 of shared memory" in text


def test_shared_memory_has_the_size_of_the_launch():
    x = numbers(32)
    code = "mov.u32 %r10, d; mad.lo.u32 %r10, %r0, 4, %r10; st.shared.b32 [%r10], %r0;"
    dynamic = ".extern .shared .align 16 .b8 d[];"
    run_ptx(kernel(code, 1, dynamic), [x], shared=128)
    with pytest.raises(
        KernelFault, match="bytes 124 to 127 of shared memory, of which there are 124"
    ):
        run_ptx(kernel(code, 1, dynamic), [x], shared=124)


def test_addresses_of_32_bits_wrap():
    """A compiler may put the larger part of an address into the offset."""
    y = np.zeros(32, "u4")
    run(
        """mov.u32 %r10, s; add.u32 %r10, %r10, -8192; mad.lo.u32 %r10, %r0, 4, %r10;
        st.shared.b32 [%r10+8192], %r0; ld.shared.b32 %r11, [%r10+8192];
        add.s64 %rd0, %rd0, %rd20; st.global.b32 [%rd0], %r11;""",
        y,
        shared=".shared .align 4 .b8 s[128];",
    )
    assert y.tolist() == list(range(32))
    text = fault("mov.u32 %r10, s; st.shared.b32 [%r10+-4], %r0;", y,
                 shared=".shared .align 4 .b8 s[128];")  # fmt: skip
    assert "out of bounds: writes bytes -4 to -1 of shared memory" in text


def test_uninitialised_shared_and_local_memory():
    x = numbers(32)
    shared = ".shared .align 4 .b8 s[256];"
    text = fault("""mov.u32 %r10, s; mad.lo.u32 %r11, %r0, 4, %r10; st.shared.b32 [%r11], %r0;
        bar.sync 0; ld.shared.b32 %r12, [%r11+4];""", x, shared=shared)  # fmt: skip
    assert "uninitialised: reads bytes 128 to 131 of shared memory" in text
    assert "thread (31, 0, 0)" in text
    text = fault(".local .align 4 .b8 d[8]; st.local.b16 [d], %h0; ld.local.b32 %r1, [d];", x)
    assert "uninitialised: reads bytes 0 to 3 of local memory" in text


def test_outputs_start_poisoned_and_must_be_written_whole():
    x, y = numbers(32), np.zeros((4, 8), "u4")
    text = fault("ld.global.b32 %r10, [%rd1];", x, y, names=["x", "y"], written=[1])
    assert "reads bytes 0 to 3 of `y`, which nobody has written" in text
    code = (
        """setp.eq.u32 %p1, %r0, 13; add.s64 %rd1, %rd1, %rd20; @!%p1 st.global.b32 [%rd1], %r0;"""
    )
    text = fault(code, x, y, names=["x", "y"], written=[1])
    assert "unwritten: no kernel wrote `y` at index (1, 5) (byte 52 of 128)" in text
    text = fault("red.global.add.u32 [%rd1], 1;", x, y, names=["x", "y"], written=[1])
    assert "changes" in text or "nobody has written" in text


def test_scratch_may_be_written_in_part():
    x, y = numbers(32), np.zeros(64, "u4")
    code = """add.s64 %rd0, %rd0, %rd20; add.s64 %rd1, %rd1, %rd20; st.global.b32 [%rd1], %r0;
    ld.global.b32 %r10, [%rd1+{}]; st.global.b32 [%rd0], %r10;"""
    run(code.format(0), x, y, written=[0], scratch=[1])
    text = fault(code.format(128), x, y, names=["x", "y"], written=[0], scratch=[1])
    assert "uninitialised: reads bytes 128 to 131 of `y`" in text


def test_read_only_arrays():
    x = numbers(32)
    x.flags.writeable = False
    with pytest.raises(KernelFault, match="wrote to `x`, which is read-only"):
        run("add.s64 %rd0, %rd0, %rd20; st.global.b32 [%rd0], %r0;", x, names=["x"])


def test_one_array_given_twice_is_one():
    x = numbers(32)
    run("""add.s64 %rd0, %rd0, %rd20; add.s64 %rd1, %rd1, %rd20; ld.global.b32 %r10, [%rd0];
        add.u32 %r10, %r10, 1; st.global.b32 [%rd1], %r10;""", x, x)  # fmt: skip
    assert x.tolist() == list(range(1, 33))


def test_launch_limits():
    x = numbers(1)
    for options, words in (
        ({"grid": (0, 1, 1)}, "every size must be at least 1"),
        ({"block": (1025, 1, 1)}, "at most 1024 threads"),
        ({"grid": (1, 65536, 1)}, "65535"),
    ):
        assert words in fault("", x, **options)
    text = kernel("", 1).replace("{", ".reqntid 64, 1, 1\n{", 1)
    with pytest.raises(KernelFault, match=r"compiled for \(64, 1, 1\)"):
        run_ptx(text, [x])


def test_trap_and_endless_loop():
    x = numbers(1)
    assert "trap: the kernel stopped itself" in fault("trap;", x)
    text = fault("AGAIN: add.u32 %r0, %r0, 1; bra AGAIN;", x, budget=5000)
    assert "5000 instructions have run: an endless loop" in text


# ---------------------------------------------------------------- races on global memory


STORE = "st.global.b32 [%rd0], %r10;"


def test_two_ctas_write_one_place():
    x = numbers(4)
    text = fault(f"mov.u32 %r10, %r1; {STORE}", x, names=["x"], grid=(2, 1, 1), block=(1, 1, 1))
    assert "race on bytes 0 to 3 of `x`" in text
    run(f"mov.u32 %r10, 7; {STORE}", x, grid=(2, 1, 1))  # the same value: harmless


def test_a_cta_reads_what_another_wrote():
    x = np.zeros(64, "u4")
    code = """add.s64 %rd3, %rd0, %rd20; st.global.b32 [%rd3], %r3;
    xor.b32 %r10, %r3, 32; mul.wide.u32 %rd4, %r10, 4; add.s64 %rd4, %rd0, %rd4;
    bar.sync 0; ld.global.b32 %r11, [%rd4];"""
    text = fault(code, x, names=["x"], grid=(2, 1, 1))
    assert "race on" in text
    assert "of CTA (" in text
    assert "no fence lies between" in text
    run(code, np.zeros(64, "u4"), block=(64, 1, 1))  # within a CTA the barrier orders it


def test_the_last_cta_sums_up_behind_fences():
    """The usual way to end a reduction: write, fence, count; the last one reads all."""
    parts, count, out = np.zeros(8, "u4"), np.zeros(1, "u4"), np.zeros(1, "u4")
    code = """setp.ne.u32 %p1, %r0, 0; @%p1 bra END; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd0, %rd4;
    add.u32 %r10, %r1, 1; st.global.b32 [%rd4], %r10; membar.gl;
    atom.global.add.u32 %r11, [%rd1], 1; setp.ne.u32 %p2, %r11, 7; @%p2 bra END; membar.gl;
    mov.u32 %r12, 0; mov.u32 %r13, 0;
    LOOP: ld.global.b32 %r14, [%rd0]; add.u32 %r12, %r12, %r14; add.s64 %rd0, %rd0, 4;
    add.u32 %r13, %r13, 1; setp.lt.u32 %p3, %r13, 8; @%p3 bra LOOP; st.global.b32 [%rd2], %r12; END:"""
    run(code, parts, count, out, grid=(8, 1, 1), written=[0, 2])
    assert out[0] == 36
    text = fault(code.replace("membar.gl;", ""), np.zeros(8, "u4"), np.zeros(1, "u4"), out,
                 grid=(8, 1, 1), names=["parts", "count", "out"])  # fmt: skip
    assert "of `parts`" in text


def test_a_cta_waits_for_another():
    """A spinning thread stands at a lower instruction than the one it waits for."""
    flag, out = np.zeros(1, "u4"), np.zeros(1, "u4")
    run("""setp.eq.u32 %p1, %r1, 0; @%p1 bra SET;
        SPIN: ld.acquire.gpu.global.b32 %r10, [%rd0]; setp.eq.u32 %p2, %r10, 0; @%p2 bra SPIN;
        ld.global.b32 %r11, [%rd1]; st.global.b32 [%rd1], 9; bra END;
        SET: st.global.b32 [%rd1], 5; mov.u32 %r12, 1; st.release.gpu.global.b32 [%rd0], %r12; END:""",
        flag, out, grid=(2, 1, 1), block=(1, 1, 1))  # fmt: skip
    assert out[0] == 9


# ---------------------------------------------------------------- cp.async


COPY = """mov.u32 %r10, s; mad.lo.u32 %r10, %r0, 16, %r10; mul.wide.u32 %rd3, %r0, 16;
add.s64 %rd0, %rd0, %rd3; add.s64 %rd1, %rd1, %rd3;"""
ROOM = ".shared .align 16 .b8 s[1024];"
BACK = """ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10];
st.global.v4.b32 [%rd1], {%r20, %r21, %r22, %r23};"""


def test_copies_land_at_their_wait():
    x, y = numbers(128), np.zeros(128, "u4")
    start = "cp.async.cg.shared.global [%r10], [%rd0], 16;"
    for wait in ("cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"):
        y[:] = 0
        run(f"{COPY} {start} {wait} {BACK}", x, y, shared=ROOM, written=[1])
        assert (x == y).all()
    for wait in ("", "cp.async.commit_group;", "cp.async.commit_group; cp.async.wait_group 1;",
                 "cp.async.wait_group 0;"):  # fmt: skip
        text = fault(f"{COPY} {start} {wait} {BACK}", x, y, shared=ROOM)
        assert "while a cp.async to them is in flight" in text


def test_groups_land_in_order():
    x, y = numbers(128), np.zeros(128, "u4")
    run(f"""{COPY} cp.async.ca.shared.global [%r10], [%rd0], 16; cp.async.commit_group;
        cp.async.ca.shared.global [%r10+512], [%rd0], 16; cp.async.commit_group; cp.async.commit_group;
        cp.async.wait_group 2; {BACK}""", x, y, shared=ROOM, written=[1])  # fmt: skip
    assert (x == y).all()


def test_copies_fill_with_zeros():
    x, y = numbers(128) + np.uint32(1), np.zeros(128, "u4")
    run(f"""{COPY} setp.lt.u32 %p1, %r0, 16; selp.u32 %r30, 16, 0, %p1; setp.eq.u32 %p2, %r0, 16;
        selp.u32 %r30, 8, %r30, %p2; cp.async.cg.shared.global [%r10], [%rd0], 16, %r30;
        cp.async.wait_all; {BACK}""", x, y, shared=ROOM, written=[1])  # fmt: skip
    want = x.copy()
    want[66:] = 0
    assert (y == want).all()


def test_another_thread_needs_a_barrier_after_the_wait():
    x, y = numbers(256), np.zeros(256, "u4")
    other = "xor.b32 %r11, %r0, 32; mov.u32 %r10, s; mad.lo.u32 %r10, %r11, 16, %r10;"
    start = f"{COPY} cp.async.cg.shared.global [%r10], [%rd0], 16; cp.async.wait_all;"
    options = {"shared": ROOM, "block": (64, 1, 1)}
    assert "race on" in fault(f"{start} {other} {BACK}", x, y, **options)
    run(f"{start} bar.sync 0; {other} {BACK}", x, y, **options)
    assert (y.reshape(2, 128) == x.reshape(2, 128)[::-1]).all()


def test_a_copy_must_not_overwrite_what_others_still_read():
    x, y = numbers(256), np.zeros(256, "u4")
    first = "st.shared.v4.b32 [%r10], {%r0, %r0, %r0, %r0}; bar.sync 0;"
    read = "xor.b32 %r11, %r0, 32; mov.u32 %r12, s; mad.lo.u32 %r12, %r11, 16, %r12; ld.shared.b32 %r13, [%r12];"
    copy = "cp.async.cg.shared.global [%r10], [%rd0], 16; cp.async.wait_all;"
    options = {"shared": ROOM, "block": (64, 1, 1)}
    text = fault(f"{COPY} {first} {read} {copy}", x, y, **options)
    assert "read them" in text
    run(f"{COPY} {first} {read} bar.sync 0; {copy}", x, y, **options)


# ---------------------------------------------------------------- printing


def test_printf(capsys):
    text = f"""{HEAD}
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .global .align 1 .b8 form[11] = {{37, 100, 58, 32, 37, 46, 50, 102, 37, 10, 0}};
    .visible .entry k(.param .u64 p0) {{ {REGISTERS}
    .local .align 8 .b8 depot[16];
    mov.u32 %r0, %tid.x; cvt.rn.f64.u32 %rd5, %r0;
    mov.b64 %rd1, depot; cvta.local.u64 %rd2, %rd1; st.local.b32 [%rd1], %r0; st.local.b64 [%rd1+8], %rd5;
    mov.b64 %rd3, form; cvta.global.u64 %rd4, %rd3;
    {{ .param .b64 a0; .param .b64 a1; .param .b32 r0;
    st.param.b64 [a0], %rd4; st.param.b64 [a1], %rd2; call.uni (r0), vprintf, (a0, a1); ld.param.b32 %r1, [r0]; }}
    ret; }}"""
    text = text.replace("102, 37, 10, 0", "102, 10, 0, 0")
    run_ptx(text, [numbers(1)], block=(2, 1, 1))
    assert capsys.readouterr().out == "0: 0.00\n1: 1.00\n"
