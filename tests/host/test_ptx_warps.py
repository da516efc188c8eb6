"""Lanes that part and meet, warps, barriers, and races in shared memory."""

import numpy as np
import pytest

from eqxcute._ptx import KernelFault, run_ptx
from eqxcute._ptx._snippet import per_thread

LANES = np.arange(32, dtype="u4")


def kernel(code: str, files: str = "") -> str:
    """One parameter, an array, at %rd0. %r0 is the thread, %rd1 its word in the array, %s its
    word in shared memory, of which there are 4096 bytes."""
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.shared .align 16 .b8 s[4096];
.visible .entry k(.param .u64 p0)
{{
.reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b32 %s; .reg .b64 %rd<16>;
ld.param.u64 %rd0, [p0];
mov.u32 %r0, %tid.x; mov.u32 %r1, %laneid; mov.u32 %r2, %warpid;
mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
mov.u32 %s, s; mad.lo.u32 %s, %r0, 4, %s;
{code}
ret;
}}
{files}
"""


def run(code: str, threads: int = 32, out=None, **options) -> np.ndarray:
    out = np.zeros(threads, "u4") if out is None else out
    run_ptx(kernel(code), [out], block=(threads, 1, 1), **options)
    return out


def fault(code: str, threads: int = 32, **options) -> str:
    with pytest.raises(KernelFault) as caught:
        run(code, threads, **options)
    return str(caught.value)


SAVE = "st.global.b32 [%rd1], %r10;"


# ---------------------------------------------------------------- control flow


def test_lanes_part_and_meet_again():
    """Different trip counts, then one shuffle that all must reach together."""
    got = run(f"""mov.u32 %r10, 0; mov.u32 %r11, %r0;
        LOOP: setp.eq.u32 %p1, %r11, 0; @%p1 bra DONE; add.u32 %r10, %r10, %r11;
        sub.u32 %r11, %r11, 1; bra LOOP;
        DONE: shfl.sync.bfly.b32 %r12, %r10, 1, 31, -1; add.u32 %r10, %r10, %r12; {SAVE}""")
    sums = LANES * (LANES + 1) // 2
    assert (got == sums + sums[LANES ^ 1]).all()


def test_blocks_out_of_line():
    """The body of the `if` stands behind the place where both sides meet."""
    got = run(f"""mov.u32 %r10, 1; setp.lt.u32 %p1, %r0, 7; @%p1 bra BODY;
        JOIN: shfl.sync.idx.b32 %r11, %r10, 3, 31, -1; add.u32 %r10, %r10, %r11; {SAVE} bra END;
        BODY: mov.u32 %r10, 100; bra JOIN; END:""")
    assert (got == np.where(LANES < 7, 200, 101)).all()


def test_predicates():
    got = run(f"setp.lt.u32 %p1, %r0, 9; mov.u32 %r10, 5; @%p1 add.u32 %r10, %r10, 1;"
              f"@!%p1 mov.u32 %r10, 0; {SAVE}")  # fmt: skip
    assert (got == np.where(LANES < 9, 6, 0)).all()


def test_lanes_that_leave_early():
    got = run(f"mov.u32 %r10, 3; setp.ge.u32 %p1, %r0, 40; @%p1 ret; {SAVE}", 64)
    assert (got == np.where(np.arange(64) < 40, 3, 0)).all()


def test_special_registers():
    got = run("mad.lo.u32 %r10, %r2, 1000, %r1;" + SAVE, 96)
    assert (got == np.arange(96) // 32 * 1000 + np.arange(96) % 32).all()
    for name, function in (
        ("lt", lambda i: (1 << i) - 1),
        ("le", lambda i: (2 << i) - 1),
        ("eq", lambda i: 1 << i),
        ("gt", lambda i: 0xFFFFFFFF ^ ((2 << i) - 1)),
        ("ge", lambda i: 0xFFFFFFFF ^ ((1 << i) - 1)),
    ):
        got = run(f"mov.u32 %r10, %lanemask_{name}; {SAVE}", 64)
        assert got.tolist() == 2 * [function(i) for i in range(32)]
    with pytest.raises(NotImplementedError, match="%envreg"):
        run("mov.b32 %r10, %envreg3;")


# ---------------------------------------------------------------- shuffles and votes


def shuffled(mode, lane, b, clamp):
    """PTX's own definition, for one lane: source, and whether it is in range."""
    segment, bound, b = clamp >> 8 & 31, clamp & 31, b & 31
    top, bottom = lane & segment | bound & ~segment & 31, lane & segment
    if mode == "up":
        j = lane - b
        inside = j >= top
    elif mode == "down":
        j = lane + b
        inside = j <= top
    elif mode == "bfly":
        j = lane ^ b
        inside = j <= top
    else:
        j = bottom | b & ~segment & 31
        inside = j <= top
    return (j, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8, 4])
def test_shuffles(mode, width):
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 2, 5, 17, 31):
        code = f"shfl.sync.{mode}.b32 %d|%p1, %a0, {b}, {clamp}, -1;"
        got = per_thread(code + "selp.u32 %r1, 1000, 0, %p1; add.u32 %d, %d, %r1;", "u4", LANES)
        pairs = [shuffled(mode, lane, b, clamp) for lane in range(32)]
        assert got.tolist() == [j + 1000 * inside for j, inside in pairs]


def test_shuffle_among_half_a_warp():
    got = run(f"""mov.u32 %r10, 7; setp.ge.u32 %p1, %r1, 16; @%p1 bra END;
        shfl.sync.bfly.b32 %r10, %r0, 8, 31, 0xffff; END: {SAVE}""")
    assert (got == np.where(LANES < 16, LANES ^ 8, 7)).all()


def test_shuffle_from_a_lane_that_is_not_there():
    text = fault("""setp.ge.u32 %p1, %r1, 16; @%p1 bra END;
        shfl.sync.bfly.b32 %r10, %r0, 16, 31, 0xffff; END:""")
    assert "reads from lane 16, which does not take part" in text


def test_shuffle_that_half_the_warp_never_reaches():
    text = fault("""setp.ge.u32 %p1, %r1, 16; @%p1 bra OTHER;
        shfl.sync.bfly.b32 %r10, %r0, 1, 31, -1; bra END;
        OTHER: shfl.sync.bfly.b32 %r10, %r0, 2, 31, -1; END:""")
    assert "deadlock" in text
    assert "16 of 32 threads of a CTA wait for the rest of their warp" in text


def test_votes():
    p = LANES % 3 == 0
    bits = int(sum(1 << int(i) for i in LANES[p]))
    got = per_thread("vote.sync.ballot.b32 %d, %a0, -1;", "u4", p)
    assert got.tolist() == [bits] * 32
    for mode, want in (("any", True), ("all", False), ("uni", False)):
        assert per_thread(f"vote.sync.{mode}.pred %d, %a0, -1;", bool, p).tolist() == [want] * 32
    even = LANES % 2 == 0
    got = per_thread("@%a0 vote.sync.all.pred %d, %a1, 0x55555555; @!%a0 setp.ne.u32 %d, 0, 0;",
                     bool, even, even)  # fmt: skip
    assert got.tolist() == even.tolist()


def test_match():
    x = LANES // 5
    got = per_thread("match.any.sync.b32 %d, %a0, -1;", "u4", x)
    assert got.tolist() == [sum(1 << int(j) for j in LANES if x[j] == x[i]) for i in range(32)]
    got = per_thread("match.all.sync.b32 %d|%p1, %a0, -1;", "u4", np.full(32, 4, "u4"))
    assert got.tolist() == [0xFFFFFFFF] * 32
    assert per_thread("match.all.sync.b32 %d|%p1, %a0, -1;", "u4", x).tolist() == [0] * 32


@pytest.mark.parametrize(("which", "kind", "want"), [
    ("add", "u32", 496 + 32 * 5), ("min", "s32", -5), ("max", "u32", 2**32 - 1),
    ("or", "b32", 0xFFFFFFFF), ("and", "b32", 0), ("xor", "b32", None),
])  # fmt: skip
def test_redux(which, kind, want):
    x = (LANES + np.uint32(5)).astype("u4")
    if which in ("min", "max", "or"):
        x[3] = 2**32 - (5 if which == "min" else 1)
    if want is None:
        want = int(np.bitwise_xor.reduce(x))
    got = per_thread(f"redux.sync.{which}.{kind} %d, %a0, -1;", "u4", x)
    assert (got == np.uint32(want & 0xFFFFFFFF)).all()


def test_who_is_here():
    got = run(f"""mov.u32 %r10, 0; setp.lt.u32 %p1, %r1, 4; @!%p1 bra END;
        activemask.b32 %r10; END: {SAVE}""")
    assert got.tolist() == [15] * 4 + [0] * 28
    got = run(f"elect.sync %r10|%p1, -1; selp.u32 %r10, 1, 0, %p1; {SAVE}", 64)
    assert got.tolist() == [1] + [0] * 31 + [1] + [0] * 31


# ---------------------------------------------------------------- barriers


def exchange(between: str, partner: str = "xor.b32 %r11, %r0, 32;") -> str:
    return f"""st.shared.b32 [%s], %r0; {between} {partner} mov.u32 %r12, s;
    mad.lo.u32 %r12, %r11, 4, %r12; ld.shared.b32 %r10, [%r12]; {SAVE}"""


@pytest.mark.parametrize("barrier", [
    "bar.sync 0;", "barrier.sync 0;", "barrier.sync.aligned 0;", "barrier.cta.sync.aligned 0;",
    "barrier.cta.sync 0;", "bar.sync 5;", "bar.sync 1, 128;", "mov.u32 %r20, 3; bar.sync %r20, 128;",
])  # fmt: skip
def test_a_barrier_orders_warps(barrier):
    got = run(exchange(barrier), 128)
    assert (got == np.arange(128) ^ 32).all()


def test_a_missing_barrier_is_a_race():
    text = fault(exchange(""), 128)
    assert "race on bytes 128 to 131 of shared memory: thread (32, 0, 0) wrote" in text
    assert "wrote them at PTX line" in text
    assert "thread (32, 0, 0) of CTA" not in text
    assert "no barrier lies between" in text
    assert "(st.shared.b32)" in text


def test_a_barrier_that_is_missing_before_the_next_round():
    """Reads of the first round and writes of the second: found as well."""
    code = exchange("bar.sync 0;") + "{} st.shared.b32 [%s], %r10;"
    text = fault(code.format(""), 64)
    assert "read them" in text
    run(code.format("bar.sync 0;"), 64)


@pytest.mark.parametrize("joins", [
    "bar.warp.sync -1;", "shfl.sync.idx.b32 %r20, %r0, 0, 31, -1;", "vote.sync.any.pred %p1, %p1, -1;",
])  # fmt: skip
def test_within_a_warp_a_joining_instruction_orders(joins):
    partner = "xor.b32 %r11, %r0, 1;"
    assert (run(exchange(joins, partner), 64) == np.arange(64) ^ 1).all()
    assert "race on" in fault(exchange("", partner), 64)
    # It does not order another warp.
    assert "race on" in fault(exchange(joins), 64)


def test_named_barriers_join_only_who_comes():
    """Warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2."""
    pairs = "shr.u32 %r20, %r0, 6; add.u32 %r20, %r20, 1; bar.sync %r20, 64;"
    assert (run(exchange(pairs), 128) == np.arange(128) ^ 32).all()
    text = fault(exchange(pairs, "xor.b32 %r11, %r0, 64;"), 128)
    assert "race on" in text


def test_producers_arrive_and_consumers_wait():
    code = f"""setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
    st.shared.b32 [%s], %r0; {{}} bra END;
    CONSUMER: bar.sync 1, 64; sub.u32 %r11, %r0, 32; mov.u32 %r12, s; mad.lo.u32 %r12, %r11, 4, %r12;
    ld.shared.b32 %r10, [%r12]; {SAVE} END:"""
    got = run(code.format("bar.arrive 1, 64;"), 64)
    assert got[32:].tolist() == list(range(32))
    text = fault(code.format(""), 64)
    assert "deadlock" in text
    assert "32 of 64 threads of a CTA wait for others at PTX line" in text


def test_a_barrier_in_divergent_code():
    text = fault("setp.ge.u32 %p1, %r0, 16; @%p1 bra END; bar.sync 0; END:", 64)
    assert "deadlock: not all threads arrive at a barrier" in text
    assert "16 of 64 threads of a CTA wait" in text
    assert "48 threads of this CTA have left the kernel, the first is (16, 0, 0)" in text


def test_warps_that_skip_a_barrier():
    text = fault("setp.ge.u32 %p1, %r0, 32; @%p1 bra END; bar.sync 0; END:", 96)
    assert "32 of 96 threads" in text
    assert "64 threads of this CTA have left" in text


def test_barriers_that_wait_for_each_other():
    text = fault("""setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; bra END;
        OTHER: bar.sync 2, 64; END:""", 64)  # fmt: skip
    assert text.count("32 of 64 threads of a CTA") == 2
    assert "barrier 1 has 32 of 64" in text
    assert "barrier 2 has 32 of 64" in text


def test_wrong_counts():
    text = fault("""setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; bra END;
        OTHER: bar.sync 1, 96; END:""", 64)  # fmt: skip
    assert "barrier 1 is waited for by 64 threads, and here by 96" in text
    assert "no multiple of 32" in fault("bar.sync 1, 40;", 64)


def test_a_block_that_is_not_whole_warps():
    got = run(exchange("bar.sync 0;", "sub.u32 %r11, 99, %r0;"), 100)
    assert (got == 99 - np.arange(100)).all()
    got = run(exchange("bar.sync 1, 128;", "sub.u32 %r11, 99, %r0;"), 100)
    assert (got == 99 - np.arange(100)).all()


def test_each_cta_has_its_own_barriers_and_memory():
    code = exchange("bar.sync 0;").replace(SAVE, """mov.u32 %r30, %ctaid.x; mad.lo.u32 %r10, %r30, 1000, %r10;
        mad.lo.u32 %r31, %r30, 64, %r0; mul.wide.u32 %rd3, %r31, 4; add.s64 %rd3, %rd0, %rd3;
        st.global.b32 [%rd3], %r10;""")  # fmt: skip
    out = np.zeros(64 * 70, "u4")  # more CTAs than one batch holds
    run_ptx(kernel(code), [out], grid=(70, 1, 1), block=(64, 1, 1), written=[0])
    cta, thread = np.divmod(np.arange(out.size), 64)
    assert (out == cta * 1000 + (thread ^ 32)).all()


def test_ctas_that_loop_different_numbers_of_times():
    code = f"""mov.u32 %r20, %ctaid.x; mov.u32 %r21, 0; mov.u32 %r10, 0;
    LOOP: {exchange("bar.sync 0;").replace(SAVE, "bar.sync 0;")}
    add.u32 %r22, %r22, %r10; add.u32 %r21, %r21, 1; setp.le.u32 %p1, %r21, %r20; @%p1 bra LOOP;
    mad.lo.u32 %r31, %r20, 64, %r0; mul.wide.u32 %rd3, %r31, 4; add.s64 %rd3, %rd0, %rd3;
    st.global.b32 [%rd3], %r22;"""
    out = np.zeros(64 * 5, "u4")
    code = "mov.u32 %r22, 0;" + code
    run_ptx(kernel(code), [out], grid=(5, 1, 1), block=(64, 1, 1), written=[0])
    cta, thread = np.divmod(np.arange(out.size), 64)
    assert (out == (cta + 1) * (thread ^ 32)).all()


# ---------------------------------------------------------------- more races


def test_writes_of_one_value_are_no_race():
    store = "mov.u32 %r12, s; st.shared.b32 [%r12], {};"
    run(store.format("%r30").replace("mov", "mov.u32 %r30, 5; mov", 1), 64)
    assert "write different values" in fault(store.format("%r0"), 32)
    assert "race on" in fault(store.format("%r2"), 64)


def test_bytes_beside_each_other_are_no_race():
    run(
        "cvt.u16.u32 %h0, %r0; mov.u32 %r12, s; add.u32 %r12, %r12, %r0; st.shared.b8 [%r12], %h0;",
        64,
    )


def test_atomics_do_not_race_with_each_other_but_with_plain_stores():
    clear = "setp.eq.u32 %p1, %r0, 0; mov.u32 %r12, s; @%p1 st.shared.b32 [%r12], 0;"
    add = "red.shared.add.u32 [%r12], 1;"
    run(f"{clear} bar.sync 0; {add} bar.sync 0; ld.shared.b32 %r10, [%r12]; {SAVE}", 64)
    assert "race on" in fault(f"{clear} {add}", 64)
    assert "race on" in fault(f"{clear} bar.sync 0; {add} ld.shared.b32 %r10, [%r12];", 64)


def test_a_flag_with_release_and_acquire_orders():
    code = f"""setp.eq.u32 %p1, %r0, 0; mov.u32 %r12, s; add.u32 %r12, %r12, 1024;
    @%p1 st.shared.b32 [%r12], 0; bar.sync 0; setp.ge.u32 %p2, %r0, 32; @%p2 bra WAIT;
    st.shared.b32 [%s], %r0; bar.warp.sync -1; {{}} @%p1 st.release.cta.shared.b32 [%r12], 1; bra END;
    WAIT: ld.acquire.cta.shared.b32 %r11, [%r12]; setp.eq.u32 %p3, %r11, 0; @%p3 bra WAIT;
    ld.shared.b32 %r10, [%s+-128]; {SAVE} END:"""
    for fence in ("", "membar.cta;", "fence.acq_rel.gpu;"):
        assert run(code.format(fence), 64)[32:].tolist() == list(range(32))
    assert "race on" in fault(code.format("").replace(".release.cta", ".volatile"), 64)


def test_many_readers_then_one_writer():
    """Every warp reads one word; the last of them then writes it."""
    code = """setp.eq.u32 %p1, %r0, 0; mov.u32 %r12, s; @%p1 st.shared.b32 [%r12], 0; bar.sync 0;
    ld.shared.b32 %r10, [%r12]; {} setp.eq.u32 %p2, %r0, {}; @%p2 st.shared.b32 [%r12], 1;"""
    for writer in (0, 33, 127):
        assert "read them" in fault(code.format("", writer), 128)
        run(code.format("bar.sync 0;", writer), 128)


# ---------------------------------------------------------------- places in Python


def test_faults_name_lines():
    code = f""".loc 1 40 3
    st.shared.b32 [%s], %r0; xor.b32 %r11, %r0, 32; mov.u32 %r12, s;
    .loc 1 42 7, function_name $info, inlined_at 1 90 3
    mad.lo.u32 %r12, %r11, 4, %r12; ld.shared.b32 %r10, [%r12]; {SAVE}"""
    with pytest.raises(KernelFault) as caught:
        run_ptx(
            kernel(code, '.file 1 "/home/me/model.py"\n'), [np.zeros(64, "u4")], block=(64, 1, 1)
        )
    assert "wrote them at /home/me/model.py:40 (st.shared.b32)" in str(caught.value)
    assert "at /home/me/model.py:42\n" in str(caught.value)
    assert caught.value.where == "/home/me/model.py:42"
    assert caught.value.kernel == "k"
    assert caught.value.cta == (0, 0, 0)
