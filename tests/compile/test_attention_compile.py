"""Attention's kernels, as the compiler leaves them: every architecture takes them, and what ptxas makes of them.

The cubins are read here, with no tool: an instruction is 16 bytes, whose low 12 bits are its opcode. Those used here have
been the same since Volta. nvdisasm 13.5 finds the same instructions and the same loops.
"""

import struct
from typing import NamedTuple

import pytest
from attention_builds import LOAD_LOCAL, STORE_LOCAL, built, capped, causal, sections


# Backward for sm_80 and sm_90a: see below. Its atomics are of vectors from Hopper on.
@pytest.mark.parametrize(
    ("direction", "architecture", "dtype", "dim"),
    [
        ("forward", "sm_80", "bfloat16", 64),
        pytest.param("forward", "sm_90a", "float32", 40, marks=pytest.mark.slow),
        *(
            pytest.param(direction, architecture, "bfloat16", 128, marks=pytest.mark.slow)
            for direction in ("forward", "backward")
            for architecture in ("sm_86", "sm_89", "sm_100a", "sm_120a")
        ),
    ],
)
def test_compiles(direction, architecture, dtype, dim):
    code = built(direction, dim, architecture, dtype, causal, capped).ptx
    assert "mma.sync" in code
    assert "cp.async.cg.shared.global" in code
    assert ("ldmatrix" in code) == (dtype != "float32")
    if direction == "backward":
        vectors = architecture in ("sm_100a", "sm_120a")
        assert ("red.global.add.v4.f32" in code) == vectors


# Registers and spills


MMA, BRANCH = 0x23C, 0x947


class Spills(NamedTuple):
    """How many instructions: in loops over tiles, and around them."""

    inside: int
    outside: int


def target(at, low, high, hopper):
    """Where a branch goes, relative to the instruction after it: a signed number in some of its bits."""
    offset = (high & 0x3FFFF) << 32 | low >> 32
    if hopper:
        offset = ((offset >> 2) << 8 | (low >> 16 & 0xFF)) << 2
    bits = 56 if hopper else 50
    offset &= (1 << bits) - 1
    return at + 16 + offset - ((offset >> bits - 1) << bits)


def spills(compiled, kernel):
    """Of the kernel from a file of that name."""
    hopper = int("".join(filter(str.isdigit, compiled.architecture))) >= 90
    ((_, _, code),) = [
        x
        for x in sections(compiled.cubin)
        if x[0].startswith(".text.") and f"_kernels{kernel}" in x[0]
    ]
    found = [
        (16 * i, low & 0xFFF, low, high)
        for i, (low, high) in enumerate(struct.iter_unpack("<QQ", code))
    ]
    loops = [
        (to, at)
        for at, op, low, high in found
        if op == BRANCH and (to := target(at, low, high, hopper)) < at
    ]
    products = [at for at, op, *_ in found if op == MMA]
    # Not those that copy, say.
    loops = [(a, b) for a, b in loops if any(a <= at <= b for at in products)]
    assert loops
    local = [at for at, op, *_ in found if op in (STORE_LOCAL, LOAD_LOCAL)]
    inside = sum(any(a <= at <= b for a, b in loops) for at in local)
    return Spills(inside, len(local) - inside)


# What nvidia-cutlass-dsl 4.8.1 gave, and about a tenth. Out of 256 products of a tile's; causal, so two loops.
@pytest.mark.parametrize(
    ("direction", "dim", "architecture", "inside", "outside"),
    [
        ("forward", 128, "sm_80", 96, 16),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("forward", 64, "sm_80", 0, 0),
                ("backward", 64, "sm_80", 0, 0),
                ("backward", 128, "sm_80", 12, 5),
            )
        ),
    ],
)
def test_spills(direction, dim, architecture, inside, outside):
    """Instructions that read or write local memory."""
    found = spills(built(direction, dim, architecture, mask=causal), direction)
    assert found.inside <= inside
    assert found.outside <= outside
