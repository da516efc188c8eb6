"""The kernel that sorts tiles by verdict: compiled for every architecture, run by the PTX interpreter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers import tile_map
from eqxcute.layers.attention import CausalMask, DocumentMask
from eqxcute.layers.attention._config import COMPACTION, Compaction
from eqxcute.layers.attention._tiles import CompactKernel

from eqxcute.testing import check_kernel, compile_only, interpret

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


def compiled(architecture="sm_90a"):
    return compile_only(
        CompactKernel(), jax.ShapeDtypeStruct((2, 3, 100), "int8"), architecture=architecture
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_everywhere(architecture):
    built = compiled(architecture)
    assert built.cubin[:4] == b"\x7fELF"
    assert f".target {architecture}" in built.ptx


def test_loads_are_in_flight_together_and_nothing_is_divided():
    code = compiled().ptx
    kinds = re.findall(r"(ld\.global\.s8|vote\.sync\.ballot|st\.global|@%p\d+ bra)", code)
    short = {"ld": "L", "vo": "V", "st": "S", "@%": "B"}
    told = "".join(short[kind[:2]] for kind in kinds)
    # Neither pass branches between its loads.
    assert told.count("L" * COMPACTION.loads) == told.count("L") // COMPACTION.loads == 2
    assert told.count("V") == 2 * COMPACTION.loads
    assert not re.search(r"\b(div|rem)\.[su]", code)
    assert not re.search(r"\b(ld|st)\.local", code)


def test_rows_are_addressed_in_64_bits():
    """Rows times tiles may be more than 2**31."""
    code = compiled().ptx
    assert len(re.findall(r"(?:mad\.lo|mul\.lo)\.s64", code)) >= 2
    narrow = set(re.findall(r"(?:shl\.b32|mul\.lo\.s32|mad\.lo\.s32)\s+(%r\d+)", code))
    assert not narrow & set(re.findall(r"mul\.wide\.[su]32\s+%rd\d+, (%r\d+), \d", code))


SHAPES = [(1, 1), (3, 31), (5, 32), (2, 3, 33), (9, 255), (2, 257), (1, 1000), (4, 0), (0, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers(shape):
    verdicts = jnp.asarray(np.random.default_rng(0).integers(0, 3, shape), jnp.int8)
    check_kernel(CompactKernel(), verdicts, interpreted=True)
    check_kernel(CompactKernel(Compaction(warps=2, loads=2)), verdicts, interpreted=True)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_rows_of_one_kind(kind):
    check_kernel(CompactKernel(), jnp.full((3, 70), kind, jnp.int8), interpreted=True)


def test_a_map_through_the_kernel():
    """What the GPU would give for a causal document mask, from its verdicts on."""
    ids = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 5, 1000), jnp.int32))
    tiles = tile_map(CausalMask() & DocumentMask(ids), 1000, 1000, tile=(32, 16))
    verdicts = tiles.verdicts()
    for lists, kinds in ((tiles.forward, verdicts), (tiles.backward, jnp.swapaxes(verdicts, 2, 3))):
        got = interpret(CompactKernel(), kinds)
        for one, other in zip(got, (lists.tiles, lists.partial, lists.full), strict=True):
            np.testing.assert_array_equal(one, other)
