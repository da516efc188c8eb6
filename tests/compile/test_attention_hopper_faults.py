"""Attention's kernels for Hopper with an instruction changed: the PTX interpreter says who waits for what, or what races.

So what its silence says of the kernels as they are is worth something. Each kernel is compiled once, and its PTX changed:
what is changed is told by what it is for, since no line of it is where it was when a kernel changes.
"""

import dataclasses
import re

import numpy as np
import pytest
from eqxcute.layers.attention import _attend
from eqxcute.layers.attention._compiled import Functions
from eqxcute.layers.attention._config import Sm90Backward, Sm90Forward
from eqxcute.layers.attention._kernels import forward90
from eqxcute.layers.attention._kernels.backward90 import Barrier

from eqxcute import testing
from eqxcute.testing import KernelFault, interpret

pytestmark = pytest.mark.slow  # no part of JAX in it: once is enough

LENGTH, DIM = 200, 32  # more tiles than a ring has slots
COMPUTE = 8  # warps that compute: each lets go of every slot
FUNCTIONS = Functions(None, None)
FORWARD = Sm90Forward(tile_kv=64, warpgroups=2, stages=2)
# Each by the name of its class, and a mark.
KERNELS = {
    "Forward90": _attend.ForwardKernel(FUNCTIONS, None, None, 0.25, config=FORWARD),
    "Forward90, persistent": _attend.ForwardKernel(
        FUNCTIONS, None, None, 0.25, config=dataclasses.replace(FORWARD, persistent=True)
    ),
    "Backward90": _attend.BackwardKernel(
        FUNCTIONS, None, None, (), 0.25, config=Sm90Backward(tile_q=64)
    ),
}


def run(name):
    def array(*shape):
        return np.random.default_rng(len(shape)).normal(size=shape).astype("float16")

    q, k, v = array(1, LENGTH, 1, 1, DIM), array(1, LENGTH, 1, DIM), array(1, LENGTH, 1, DIM)
    out, lse = array(1, LENGTH, 1, 1, DIM), np.zeros((1, 1, 1, LENGTH), "f4")
    where = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32), None, (), ()
    more = (out, lse, out, lse) if name == "Backward90" else ()
    return interpret(KERNELS[name], q, k, v, *more, *where, architecture="sm_90a")


@pytest.fixture(scope="module")
def compiled():
    """By name, what `testing._interpreted` holds after a run."""
    found = {}

    def of(name):
        if name not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forward90, "SMS", 1)  # of a persistent grid: one CTA has all tiles
                patch.setattr(testing, "_interpreted", {})
                run(name)  # as it is, it is right
                (found[name],) = testing._interpreted.items()
        return found[name]

    return of


@pytest.fixture
def fault(compiled, monkeypatch):
    """`fault(name, change)`: what the interpreter says where `change` has changed the lines of the kernel."""

    def said(name, change):
        key, whole = compiled(name)
        before, *entries = re.split(r"(?=\.visible \.entry )", whole.ptx)
        named = [name.split(",")[0] in text[:200] and "wgmma" in text for text in entries]
        (mine,) = np.flatnonzero(named)
        lines = entries[mine].split("\n")
        change(lines)
        entries[mine] = "\n".join(lines)
        text = "".join([before, *entries])
        assert text != whole.ptx
        changed = {key: dataclasses.replace(whole, ptx=text)}
        monkeypatch.setattr(testing, "_interpreted", changed)
        with pytest.raises(KernelFault) as caught:
            run(name)
        return str(caught.value)

    return said


# Where things are


def those(lines, pattern):
    found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
    assert found, pattern
    return found


def counts(lines, arrivals):
    """Where mbarriers of so many arrivals are made."""
    registers = {m[1] for m in re.finditer(rf"mov\.b32\s+(%r\d+), {arrivals};", "\n".join(lines))}
    made = those(lines, r"mbarrier\.init")
    return [i for i in made if re.search(r"(%r\d+);", lines[i])[1] in registers]


def waits_before(lines, pattern):
    """For each such line the wait that comes last before it."""
    waits = np.array(those(lines, r"mbarrier\.try_wait"))
    after = [i for i in those(lines, pattern) if i > waits[0]]
    return sorted({int(waits[waits < i][-1]) for i in after})


EXPECT, RELEASE, FENCE = r"arrive\.expect_tx", r"mbarrier\.arrive\.shared", r"wgmma\.fence"


def do_not_wait(lines, i):
    lines[i] = "setp.eq.u32 P1, 0, 0;"


# What is wrong


def arrivals(by):
    """Of those who let go of slots, where they are counted."""

    def change(lines):
        for i in counts(lines, COMPUTE):
            lines[i] = re.sub(r"%r\d+;", f"{COMPUTE + by};", lines[i])

    return change


def bytes_of_the_last(by):
    """Of the last ring that is filled: the number is set once."""

    def change(lines):
        register = re.search(r"(%r\d+);", lines[those(lines, EXPECT)[-1]])[1]
        (at,) = those(lines, rf"mov\.b32\s+{register}, \d+;")
        lines[at] = re.sub(r"(\d+);", lambda m: f"{int(m[1]) + by};", lines[at])

    return change


def nobody_fills_the_first(lines):
    i = counts(lines, 1)[0]
    lines[i] = re.sub(r"%r\d+;", "2;", lines[i])


def filled_without_a_wait(lines):
    for i in waits_before(lines, EXPECT):
        do_not_wait(lines, i)


def read_without_a_wait(lines):
    do_not_wait(lines, waits_before(lines, FENCE)[-1])


def without(pattern, which=None):
    """All of these lines, or one of them."""

    def change(lines):
        for i in those(lines, pattern)[
            slice(None) if which is None else slice(which, which + 1 or None)
        ]:
            lines[i] = ""

    return change


WHO = "Who waits for what"
LOADER = "warp 0 of CTA (0, 0, 0), at "
READERS = "warps 4, 5, 6, 7, 8, 9, 10, 11 of CTA (0, 0, 0), at "
IN_FLIGHT = "while a bulk copy to them is in flight, started at "


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            arrivals(+1),
            (WHO, LOADER, READERS, "1 of 9 arrivals missing; warps that have arrived: 4, 5, 6, 7,"),
        ),
        (arrivals(-1), ("8 arrivals at once where 7 are due, at the mbarrier at byte ",)),
        (without(RELEASE), (WHO, LOADER, READERS, "8 of 8 arrivals missing", "1 of 1 arrivals")),
        (
            nobody_fills_the_first,
            (WHO, READERS, "1 of 2 arrivals missing and", " are on their way"),
        ),
        (bytes_of_the_last(16), (WHO, READERS, " bytes missing (", "warps that have arrived: 0")),
        (bytes_of_the_last(-16), ("the phase ends before they are there",)),
        (filled_without_a_wait, ("an arrival too many: all 1 are counted", " are on their way")),
        (read_without_a_wait, ("a wgmma reads them", IN_FLIGHT, "wait first for the mbarrier")),
        (without(r"fence\.proxy\.async"), ("no proxy fence: ", "without a fence.proxy.async")),
        (without(FENCE), ("no wgmma.fence: ",)),
        (without(r"wgmma\.wait_group"), (" a wgmma ", "wgmma.wait_group comes first")),
        (without(r"bulk\.wait_group"), (" may still read", "bulk.wait_group comes first")),
        (without(r"bar\.sync\s+%r\d+, 128;", -1), ("race on bytes", "no barrier lies between")),
    ],
)
def test_faults(fault, name, change, words):
    text = fault(name, change)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (rf"bar\.sync\s+{Barrier.FREE},", ("race on bytes", "no barrier lies between")),
        (rf"bar\.sync\s+{Barrier.WRITTEN},", ("race on bytes", "no barrier lies between")),
        (rf"bar\.sync\s+{Barrier.FULL + 1},", ("race on bytes", "no barrier lies between")),
        (
            rf"bar\.arrive\s+{Barrier.EMPTY},",
            (
                WHO,
                f"barrier {Barrier.EMPTY} has 128 of 160",
                f"barrier {Barrier.FULL} has 32 of 160",
            ),
        ),
    ],
)
def test_barriers_of_the_backward_kernel(fault, pattern, words):
    text = fault("Backward90", without(pattern))
    for word in words:
        assert word in text


def test_a_slot_that_a_product_still_reads(fault):
    """Of q: its slot is let go of after the last product of a tile, and nothing else waits for that one."""
    text = fault("Backward90", without(r"wgmma\.wait_group", -1))
    assert "a bulk copy writes them while a wgmma at " in text
