"""mbarriers, bulk copies and wgmma, in PTX written by hand; and what goes wrong with them."""

import ml_dtypes
import numpy as np
import pytest

from eqxcute._ptx import KernelFault, run_ptx
from eqxcute._ptx._descriptor import matrix, matrix_chunks, swizzled, tensor_map

BF16 = np.dtype(ml_dtypes.bfloat16)
MAP = ".param .align 64 .b8 map[128]"
ARRAYS = 3  # parameters p0, p1, ... whose addresses are %rd0, %rd1, ...
MAKE = """@%thread0 mbarrier.init.shared::cta.b64 [bar], {count};
    fence.mbarrier_init.release.cluster; bar.sync 0;"""
WAIT = "W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [{bar}], {parity}; @!%p1 bra W{n};"
SAVE = "st.global.b32 [%own], %r10;"


def make(count=1) -> str:
    return MAKE.format(count=count)


def wait(parity=0, bar="bar", n=0) -> str:
    return WAIT.format(n=n, bar=bar, parity=parity)


def kernel(code: str, arrays: int, tensor: bool) -> str:
    """Shared memory: `bar` and `bar2`, two mbarriers, and `tile`, 16384 bytes. %r0 is the thread,
    %own its word in the array p0, %at its 16 bytes in `tile`."""
    params = [f".param .u64 p{i}" for i in range(arrays)] + ([MAP] if tensor else [])
    loads = " ".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(arrays))
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.shared .align 1024 .b8 tile[16384];
.shared .align 8 .b8 bar[8];
.shared .align 8 .b8 bar2[8];
.visible .entry k({", ".join(params)})
{{
.reg .pred %p<16>; .reg .pred %thread0; .reg .pred %warp0; .reg .b16 %h<4>; .reg .b32 %r<64>;
.reg .f32 %f<16>; .reg .b32 %at; .reg .b64 %rd<16>; .reg .b64 %own; .reg .b64 %map;
{loads}
mov.u32 %r0, %tid.x; setp.eq.u32 %thread0, %r0, 0; setp.lt.u32 %warp0, %r0, 32;
mul.wide.u32 %own, %r0, 4; add.s64 %own, %rd0, %own;
mov.u32 %at, tile; mad.lo.u32 %at, %r0, 16, %at;
{"mov.b64 %map, map; cvta.param.u64 %map, %map;" if tensor else ""}
{code}
ret;
}}
"""


def run(code: str, *arrays, threads=32, tensor=None, **options):
    """Runs it; the first array is made if there is none. **Returns:** that array."""
    arrays = arrays or (np.zeros(threads, "u4"),)
    params = [*arrays, *([tensor] if tensor is not None else [])]
    text = kernel(code, len(arrays), tensor is not None)
    run_ptx(text, params, block=(threads, 1, 1), **options)
    return arrays[0]


def fault(code: str, *arrays, **options) -> str:
    with pytest.raises(KernelFault) as caught:
        run(code, *arrays, **options)
    return str(caught.value)


# ---------------------------------------------------------------- mbarriers


def test_phases_end_when_all_have_arrived():
    """64 threads write, arrive, wait, and read what another warp wrote: twice, by parity."""
    got = run(
        f"""{make(64)} st.shared.b32 [%at], %r0;
        mbarrier.arrive.shared::cta.b64 %rd5, [bar]; {wait(0, n=0)}
        xor.b32 %r1, %at, 512; ld.shared.b32 %r10, [%r1];
        mbarrier.arrive.shared::cta.b64 _, [bar], 1; {wait(1, n=1)}
        st.shared.b32 [%r1], %r10; {SAVE}""",
        threads=64,
    )
    assert (got == (np.arange(64) ^ 32)).all()


def test_a_wait_by_state_and_a_fresh_barrier_by_parity_one():
    got = run(f"""{make(32)} {wait(1)} mbarrier.arrive.shared::cta.b64 %rd5, [bar];
        T: mbarrier.test_wait.shared::cta.b64 %p1, [bar], %rd5; @!%p1 bra T;
        cvt.u32.u64 %r10, %rd5; {SAVE}""")
    assert (got == 0).all()  # the phase that they arrived in


def test_a_wait_that_may_fail_does_where_nothing_else_can_go_on():
    """A look ahead at a phase that ends only after it."""
    got = run(f"""{make(32)} mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
        mbarrier.arrive.shared::cta.b64 %rd5, [bar]; {wait(0)}
        selp.b32 %r10, 1, 0, %p2; {SAVE}""")
    assert (got == 0).all()


def test_a_wait_whose_result_nobody_looks_at():
    """It may fail: then the copy is still in flight."""
    blind = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;"
    text = fault(f"{make()} {load()} {blind} {READ}", out(), source())
    assert "reads them while a bulk copy to them is in flight" in text


def test_without_a_wait_there_is_a_race():
    text = fault(
        f"""{make(64)} st.shared.b32 [%at], %r0; mbarrier.arrive.shared::cta.b64 %rd5, [bar];
        xor.b32 %r1, %at, 512; ld.shared.b32 %r10, [%r1]; {SAVE}""",
        threads=64,
    )
    assert "race on" in text
    assert "no barrier lies between" in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{make(33)} mbarrier.arrive.shared::cta.b64 %rd5, [bar]; {wait()}", "1 of 33 arrivals"),
        (f"{make(33)} mbarrier.arrive.shared::cta.b64 %rd5, [bar]; {wait()}", "warp 0 of CTA"),
        (f"{make(33)} mbarrier.arrive.shared::cta.b64 %rd5, [bar]; {wait()}", "phase 0"),
        (f"{make(31)} mbarrier.arrive.shared::cta.b64 %rd5, [bar];", "32 arrivals at once"),
        ("mbarrier.arrive.shared::cta.b64 %rd5, [bar];", "no mbarrier.init"),
        (f"{make()} ld.shared.b64 %rd5, [bar];", "where an mbarrier is"),
        (f"{make()} {make()}", "made twice"),
        (
            f"{make()} @%thread0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64; {wait()}",
            "64 bytes missing",
        ),
        (
            f"{make()} @%thread0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;"
            "@%thread0 mbarrier.arrive.shared::cta.b64 _, [bar];",
            "an arrival too many: all 1 are counted",
        ),
        (
            f"{make()} @%thread0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 64;"
            "@%thread0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 80;",
            "16 bytes more than it expects",
        ),
    ],
)
def test_what_is_wrong_with_an_mbarrier(code, words):
    assert words in fault(code)


def test_two_warps_that_wait_for_each_other_are_both_named():
    text = fault(
        f"""@%thread0 mbarrier.init.shared::cta.b64 [bar2], 2; {make()}
        @%warp0 bra A;
        {wait(bar="bar2", n=1)} mbarrier.arrive.shared::cta.b64 _, [bar]; ret;
        A: {wait(bar="bar", n=2)} mbarrier.arrive.shared::cta.b64 _, [bar2];""",
        threads=64,
    )
    assert "Who waits for what" in text
    assert "warp 0 of CTA (0, 0, 0)" in text
    assert "warp 1 of CTA (0, 0, 0)" in text
    assert "1 of 1 arrivals missing" in text
    assert "2 of 2 arrivals missing" in text
    assert "byte 16384 of shared memory" in text
    assert "byte 16392 of shared memory" in text


def test_a_barrier_of_threads_says_how_many_have_come():
    text = fault("@%warp0 bar.sync 3, 64; @!%warp0 bar.sync 4, 64;", threads=64)
    assert "barrier 3 has 32 of 64 threads" in text
    assert "barrier 4 has 32 of 64" in text


def test_a_barrier_used_before_the_threads_have_met():
    text = fault(
        "@%thread0 mbarrier.init.shared::cta.b64 [bar], 32; @%warp0 bra X; "
        "mbarrier.arrive.shared::cta.b64 _, [bar]; X:",
        threads=64,
    )
    assert "race on" in text or "no mbarrier.init" in text


def test_registers_of_all_warps_fit_an_sm():
    good = "@!%warp0 bra X; setmaxnreg.dec.sync.aligned.u32 24; X: ret;"
    run(good, threads=64)
    assert "ask for 81920 registers" in fault("setmaxnreg.inc.sync.aligned.u32 256;", threads=320)
    with pytest.raises(NotImplementedError, match="20 registers"):
        run("setmaxnreg.dec.sync.aligned.u32 20;")


# ---------------------------------------------------------------- bulk copies

EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {bytes};"
LOAD = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%rd1], 512, [bar];"
)
READ = f"ld.shared.b32 %r10, [%at]; {SAVE}"


def load(bytes=512, copy=LOAD) -> str:
    return f"@!%thread0 bra N; {EXPECT.format(bytes=bytes)} {copy} N:"


def source() -> np.ndarray:
    return np.arange(128, dtype="u4")


def out() -> np.ndarray:
    return np.zeros(32, "u4")


def test_a_flat_load():
    got = run(f"{make()} {load()} {wait()} {READ}", out(), source())
    assert (got == 4 * np.arange(32)).all()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{make()} {load()} {READ}", "while a bulk copy to them is in flight"),
        (f"{make()} {load()} {READ}", "wait first for the mbarrier at byte 16384"),
        (f"{make()} {load(bytes=528)} {wait()}", "528 bytes missing (512 are on their way)"),
        (f"{make()} {load(bytes=496)} {wait()}", "expects 496 more bytes in phase 0"),
        (f"{make()} {load()}", "leaves while a bulk copy of 512 bytes is in flight"),
        (f"{make()} {EXPECT.format(bytes=512)} {LOAD}", "arrivals at once"),
        (f"{make(32)} {LOAD}", "32 threads of a warp start the same load: elect one"),
        (f"{make()} {load(1024, LOAD + LOAD)}", "a bulk copy writes them while"),
        (
            f"@%thread0 mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; {load()}",
            "without a fence.mbarrier_init",
        ),
        (f"{make()} {load(copy=LOAD.replace('512', '500'))}", "500 bytes: no multiple of 16"),
        (f"{make()} {load(copy=LOAD.replace('512', '528'))}", "of `argument 1`, which has 512"),
    ],
)
def test_what_is_wrong_with_a_load(code, words):
    assert words in fault(code, out(), source())


def ring(release: str) -> str:
    """A producer, warp 0, fills one slot twice; a consumer, warp 1, reads it and frees it."""
    return f"""@%thread0 mbarrier.init.shared::cta.b64 [bar2], 1; {make()}
        @!%warp0 bra CONSUMER;
        @!%thread0 bra END; {EXPECT.format(bytes=512)} {LOAD}
        {wait(0, bar="bar2", n=1)} {EXPECT.format(bytes=512)} {LOAD} bra END;
        CONSUMER: sub.u32 %at, %at, 512; sub.s64 %own, %own, 128; setp.eq.u32 %p3, %r0, 32;
        {wait(0, n=2)} ld.shared.b32 %r11, [%at]; {release}
        {wait(1, n=3)} ld.shared.b32 %r10, [%at]; add.u32 %r10, %r10, %r11; {SAVE}
        END:"""


def test_a_ring_of_one_slot():
    free = "bar.warp.sync -1; @%p3 mbarrier.arrive.shared::cta.b64 _, [bar2];"
    got = run(ring(free), out(), source(), threads=64)
    assert (got == 8 * np.arange(32)).all()


def test_a_slot_that_nobody_frees():
    text = fault(ring(""), out(), source(), threads=64)
    assert "warp 0 of CTA (0, 0, 0)" in text
    assert "1 of 1 arrivals missing" in text
    assert "warp 1 of CTA (0, 0, 0)" in text
    assert "phase 1" in text


def test_a_slot_that_is_filled_again_before_it_is_free():
    """Freed before the read: the second copy runs into it."""
    early = "@%p3 mbarrier.arrive.shared::cta.b64 _, [bar2];"
    code = ring("").replace("ld.shared.b32 %r11", f"{early} ld.shared.b32 %r11")
    text = fault(code, out(), source(), threads=64)
    assert "race on" in text


def test_a_wait_for_the_mbarrier_of_another_copy():
    """Both have landed, since warp 0 waits for both; warp 1 waits for one and reads the other."""
    other = LOAD.replace("[tile]", "[%r3]").replace("[bar]", "[bar2]")
    text = fault(
        f"""@%thread0 mbarrier.init.shared::cta.b64 [bar2], 1; {make()} mov.u32 %r3, tile;
        add.u32 %r3, %r3, 512; {load()} @!%thread0 bra O;
        {EXPECT.replace("[bar]", "[bar2]").format(bytes=512)} {other} O:
        {wait(0, bar="bar2", n=1)} @!%warp0 bra READ; {wait(0, n=2)} bra END;
        READ: sub.u32 %at, %at, 512; {READ} END:""",
        np.zeros(64, "u4"),
        source(),
        threads=64,
    )
    assert "a bulk copy wrote them, started at PTX line" in text
    assert "thread (32, 0, 0) reads them and has not waited for its mbarrier" in text


STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [tile], 512;"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [tile], 512;"
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
FILL = (
    "cvt.rn.f32.u32 %f1, %r0; mov.b32 %r1, %f1; mov.b32 %r2, 0; "
    "st.shared.v4.b32 [%at], {%r1, %r2, %r2, %r2};"
)


def test_a_flat_store_and_a_flat_sum():
    to = np.ones(128, "f4")
    run(f"{FILL} {FENCE} @!%thread0 bra N; {ADD} {ADD} {DONE} N:", out(), to)
    want = np.ones((32, 4), "f4")
    want[:, 0] += 2 * np.arange(32)
    assert (to.reshape(32, 4) == want).all()
    run(f"{FILL} {FENCE} @!%thread0 bra N; {STORE} {DONE} N:", out(), to)
    assert (to.reshape(32, 4)[:, 0] == np.arange(32)).all()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{FILL} bar.sync 0; @!%thread0 bra N; {STORE} {DONE} N:", "no proxy fence"),
        (
            f"{FILL} @%thread0 {FENCE} @!%thread0 bra N; {STORE} {DONE} N:",
            "thread (1, 0, 0) wrote without a fence.proxy.async after it",
        ),
        (f"{FILL} {FENCE} @!%thread0 bra N; {STORE} N:", "leaves while a bulk store may still"),
        (
            f"{FILL} {FENCE} @!%thread0 bra N; {STORE} cp.async.bulk.commit_group; {FILL} {DONE} N:",
            "while a bulk store at PTX line",
        ),
        (f"{FILL} {FENCE} {ADD} {DONE}", "32 threads of a warp start the same bulk copy"),
        (f"{FENCE} @!%thread0 bra N; {STORE} {DONE} N:", "uninitialised: a bulk store reads"),
    ],
)
def test_what_is_wrong_with_a_store(code, words):
    assert words in fault(code, out(), np.zeros(128, "f4"))


def test_only_a_full_wait_makes_a_store_visible():
    """The thread reads back what it stored: after a wait for the read alone it may be old."""
    back = f"ld.global.b32 %r10, [%rd1+16]; @%thread0 {SAVE}"
    for wait_for, want in ((".read", 7), ("", np.float32(1).view("u4"))):
        done = f"cp.async.bulk.commit_group; cp.async.bulk.wait_group{wait_for} 0;"
        to = np.full(128, 7, "u4")
        code = f"{FILL} {FENCE} @!%thread0 bra N; {STORE} {done} {back} N:"
        assert run(code, out(), to)[0] == want


# ---------------------------------------------------------------- tensor maps


def map_bytes(address, sizes, strides, box, kind=10, span=0) -> bytes:
    """What host code writes: `strides` in bytes, of all dimensions but the innermost."""
    words = np.zeros(32, "u4")
    words[0:2] = address & 0xFFFFFFFF, address >> 32
    words[2] = 2 | (len(sizes) - 1) << 4 | kind << 7 | span << 13
    words[3 : 3 + len(strides)] = [s // 16 for s in strides]
    words[8 : 8 + len(sizes)] = [s - 1 for s in sizes]
    data = bytearray(words.tobytes())
    data[55 : 55 + len(box)] = bytes(b - 1 for b in box)
    return bytes(data)


def test_a_tensor_map_is_read():
    data = map_bytes(0x108000000000, (64, 200, 2, 3), (256, 128, 51200), (64, 192, 1, 1), span=3)
    # As CuTe DSL 4.8.1 wrote it for bfloat16 (3, 200, 2, 64), seen as (64, 200, 2, 3).
    flags = int(np.frombuffer(data, "u4")[2]) | 0x240000
    assert flags == 0x246532
    found = tensor_map(data)
    assert found.sizes == (64, 200, 2, 3)
    assert found.strides == (2, 256, 128, 51200)
    assert found.box == (64, 192, 1, 1)
    assert (found.type, found.span) == ("bf16", 128)


@pytest.mark.parametrize("span", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [(0, 0), (8, 5), (-8, -3), (16, 40), (200, 0)])
def test_a_tensor_load_fills_with_zeros(place, span):
    """Rows of 8 << span elements from an array of 20 by 40, and no further."""
    columns, rows = 8 << span, 16
    x = np.arange(800).astype(BF16).reshape(40, 20)
    wide = np.zeros((40, 24), BF16)  # rows lie a multiple of 16 bytes apart
    wide[:, :20] = x
    base = (16 << 40) + (1 << 39)  # the first array of a launch
    data = map_bytes(base, (20, 40), (48,), (columns, rows), span=span)
    got = np.zeros((rows * columns // 8, 8), BF16)
    size = got.nbytes
    copy = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[tile], [%map, {%r2, %r3}], [bar];"
    )
    code = f"""{make()} mov.b32 %r2, {place[0]}; mov.b32 %r3, {place[1]};
        {load(size, copy)} {wait()}
        mul.wide.u32 %rd5, %r0, 16; add.s64 %rd5, %rd1, %rd5;
        setp.ge.u32 %p4, %r0, {size // 16}; @%p4 bra E;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%at];
        st.global.v4.b32 [%rd5], {{%r4, %r5, %r6, %r7}}; E:"""
    run(code, wide, got, threads=max(32, size // 16), tensor=data)
    padded = np.zeros((400, 500), BF16)
    padded[100:140, 100:120] = x
    want = padded[100 + place[1] :, 100 + place[0] :][:rows, :columns]
    chunk = swizzled(16 * np.arange(len(got)), 16 << span) // 16
    assert (got[chunk].reshape(rows, columns) == want).all()


@pytest.mark.parametrize("place", [(0, 0), (8, -3), (16, 38), (200, 0)])
def test_a_tensor_store_is_clipped(place):
    x = np.full((40, 24), -1, BF16)
    base = (16 << 40) + (1 << 39)
    data = map_bytes(base, (20, 40), (48,), (8, 32), span=0)
    copy = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {%r2, %r3}], [tile];"
    code = f"""mov.b32 %r4, 0x3F803F80; st.shared.v4.b32 [%at], {{%r4, %r4, %r4, %r4}};
        mov.b32 %r2, {place[0]}; mov.b32 %r3, {place[1]};
        {FENCE} @!%thread0 bra N; {copy} {DONE} N:"""
    run(code, x, tensor=data)
    want = np.full((440, 240), -1, BF16)
    want[100 + place[1] : 132 + place[1], 100 + place[0] : 108 + place[0]] = 1
    want = want[100:140, 100:124]
    want[:, 20:] = -1
    assert (x == want).all()


# ---------------------------------------------------------------- wgmma


def test_descriptors_put_every_element_once():
    """16 columns of a matrix take 16 pieces of 8 rows, wherever they lie."""
    for bits in (0, 1, 2, 3):
        operand = matrix(64 | (128 >> 4) << 16 | (1024 >> 4) << 32 | bits << 62)
        assert operand.start == 1024
        assert operand.span == (16, 128, 64, 32)[bits]
        for transposed in (False, True):
            chunks = matrix_chunks(operand, 8, transposed)
            assert len(np.unique(chunks)) == chunks.size == 16
            assert not (chunks % 16).any()
    # The first two rows of 128-byte rows: the second's columns are swapped in pairs.
    chunks = matrix_chunks(matrix(64 | 64 << 32 | 1 << 62), 8, False)
    assert chunks[:2].tolist() == [[1024, 1040], [1024 + 144, 1024 + 128]]


# A, 64 by 16, and after it B, 8 by 16, in 16-byte columns of 8 rows (no swizzle): row r of the
# left half at 16 r, of the right half 1024 bytes on; B likewise, 128 bytes on.
A_BITS, B_BITS = 64 | 64 << 16 | 8 << 32, 192 | 8 << 16 | 8 << 32
ACC = "{%f0, %f1, %f2, %f3}"
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {acc}, {a}, {b}, {keep}, 1, 1{flags};"
)
COMMIT = "wgmma.commit_group.sync.aligned;"
FINISH = "wgmma.wait_group.sync.aligned 0;"
KEEP = "setp.ne.u32 %p5, %r0, %r0; setp.eq.u32 %p6, %r0, %r0; "
FRAGMENT = "{%r20, %r21, %r22, %r23}"


def product(keep="%p5", a="%rd8", flags=", 0, 0") -> str:
    return PRODUCT.format(acc=ACC, a=a, b="%rd9", keep=keep, flags=flags)


def operands(proxy="fence.proxy.async.shared::cta;") -> str:
    """Copies A (p1, 2048 bytes) and B (p2, 256 bytes) to shared memory, 16 bytes a thread."""
    return f"""{KEEP} mov.b64 %rd8, {A_BITS}; mov.b64 %rd9, {B_BITS};
        mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd1, %rd5; add.s64 %rd7, %rd2, %rd5;
        ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd6];
        st.shared.v4.b32 [%at], {{%r20, %r21, %r22, %r23}};
        setp.lt.u32 %p7, %r0, 16; @!%p7 bra M;
        ld.global.v4.b32 {{%r24, %r25, %r26, %r27}}, [%rd7];
        st.shared.v4.b32 [%at+2048], {{%r24, %r25, %r26, %r27}};
        M: {proxy} bar.sync 0; wgmma.fence.sync.aligned;"""


STORE_ACC = (
    "mul.wide.u32 %rd5, %r0, 16; add.s64 %rd5, %rd0, %rd5; st.global.v4.f32 [%rd5], " + ACC + ";"
)


def matrices():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (n, 16)).astype(BF16) for n in (64, 8))

    def halves(x):
        return np.ascontiguousarray(x.reshape(-1, 2, 8).swapaxes(0, 1))

    return a, b, halves(a), halves(b)


def accumulators(c: np.ndarray) -> np.ndarray:
    """A 64 by 8 matrix as the threads hold it, (128, 4)."""
    return c.reshape(4, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(128, 4)


def test_a_product_of_two_tiles():
    a, b, in_a, in_b = matrices()
    c = np.zeros((128, 4), "f4")
    twice = f"{product()} {product('%p6')} {COMMIT} {FINISH}"
    run(f"{operands()} {twice} {STORE_ACC}", c, in_a, in_b, threads=128, written=[0])
    assert (c == accumulators(2 * a.astype("f4") @ b.astype("f4").T)).all()


def test_a_product_with_registers():
    """The fragment: rows t / 4 and 8 below, columns 2 (t % 4) and the next, and 8 to the right."""
    a, b, _, in_b = matrices()
    c = np.zeros((128, 4), "f4")
    grid = a.reshape(4, 2, 8, 2, 4, 2)  # warp, low, row, right, pair, half
    fragment = np.ascontiguousarray(grid.transpose(0, 2, 4, 3, 1, 5))
    by_register = product(a=FRAGMENT, flags=", 0")
    run(
        f"{operands()} {by_register} {COMMIT} {FINISH} {STORE_ACC}",
        *(c, fragment, in_b),
        threads=128,
    )
    assert (c == accumulators(a.astype("f4") @ b.astype("f4").T)).all()


ADD_ONE = "add.f32 %f0, %f0, %f0;"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{operands('')} {product()} {COMMIT} {FINISH}", "no proxy fence: a wgmma reads"),
        (f"{operands()} {product()} {COMMIT} {ADD_ONE}", "reads an accumulator of a wgmma"),
        (f"{operands()} {product()} {COMMIT} mov.b32 %f0, 0f00000000;", "writes to an accumulator"),
        (
            f"{operands()} {product()} {COMMIT} mov.b32 %f9, %f0; add.f32 %f8, %f9, %f9;",
            "%f9: it was started at PTX line",
        ),
        (
            f"{operands()} {product(a=FRAGMENT, flags=', 0')} {COMMIT} add.u32 %r20, %r1, 1;",
            "writes to an operand of a wgmma",
        ),
        (
            f"{operands()} {product()} {COMMIT} st.shared.b32 [%at], %r0; {FINISH}",
            "while a wgmma at PTX line",
        ),
        (
            f"{operands()} {product()} {COMMIT} {FINISH} {ADD_ONE} {product('%p6')}",
            "no wgmma.fence: %f0",
        ),
        (f"{operands()} {product()} {COMMIT}", "leaves while a wgmma may still read"),
        (
            f"{operands()} @%warp0 bra E; {product()} {COMMIT} {FINISH} E:",
            "whose threads have left",
        ),
        (f"{operands()} add.u64 %rd9, %rd9, 2; {product()}", "uninitialised: a wgmma reads"),
        (f"{operands()} {product('%warp0')}", "scale-d differs among the threads"),
    ],
)
def test_what_is_wrong_with_a_product(code, words):
    _, _, in_a, in_b = matrices()
    assert words in fault(code, np.zeros((128, 4), "f4"), in_a, in_b, threads=128)


def test_a_write_may_slip_past_the_fence():
    """The compiler moves arithmetic over a wgmma.fence that stands in its place in the source."""
    a, b, in_a, in_b = matrices()
    c = np.zeros((128, 4), "f4")
    one = " ".join(f"mov.b32 %f{i}, 0f3F000000; add.f32 %f{i}, %f{i}, %f{i};" for i in range(4))
    code = f"{operands()} {one} {product('%p6')} {COMMIT} {FINISH} {STORE_ACC}"
    run(code, c, in_a, in_b, threads=128)
    assert (c == accumulators(1 + a.astype("f4") @ b.astype("f4").T)).all()


def test_groups_end_in_order():
    """After a wait for all groups but one, the first's accumulators are free, the second's not."""
    _, _, in_a, in_b = matrices()
    other = product().replace(ACC, "{%f4, %f5, %f6, %f7}")
    two = f"{operands()} {product()} {COMMIT} {other} {COMMIT} wgmma.wait_group.sync.aligned 1;"
    run(f"{two} {ADD_ONE} {FINISH}", np.zeros((128, 4), "f4"), in_a, in_b, threads=128)
    late = f"{two} add.f32 %f4, %f4, %f4; {FINISH}"
    text = fault(late, np.zeros((128, 4), "f4"), in_a, in_b, threads=128)
    assert "reads an accumulator of a wgmma that is in flight, %f4" in text
