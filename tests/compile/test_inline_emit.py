"""Programs as device code: against JAX and float64 in the PTX interpreter, and as PTX for every architecture."""

import inline_kernels
import inline_programs
import numpy as np
import pytest

pytest.importorskip("cutlass")

from inline_kernels import complaints, interpreted

from eqxcute.inline import Argument, _device, _table

INDICES = [Argument(name, "int32", 0) for name in ("b", "h", "q", "kv")]


# ---------------------------------------------------------------- values


def test_every_row_has_an_emitter():
    assert set(_device.EMIT) == set(_table.ROWS)


@pytest.mark.parametrize("dtype", inline_programs.all_dtypes())
def test_every_row_on_edges(dtype):
    codes = inline_kernels.row_codes(dtype, inline_programs.all_dtypes())
    pools = [inline_programs.edge_values(dtype, k, 9) for k in range(2)]
    a, b = (grid.reshape(-1) for grid in np.meshgrid(*pools, indexing="ij"))
    rng = np.random.default_rng(0)
    arguments = {"p": rng.random(len(a)) < 0.5, "a": a, "b": b, "c": rng.permutation(b)}
    got = interpreted(codes, arguments)
    assert complaints(codes, (), got, {}) == []


FUNCTIONS = [n for n, row in _table.ROWS.items() if row.takes == "float" and row.gives is None]


def test_functions_on_numbers_of_every_size():
    codes = [
        inline_kernels.row_code(n, "float32", **inline_kernels.variants(n, "float32", [])[0])
        for n in FUNCTIONS
    ]
    a = inline_kernels.wide_floats(20_000)
    b = np.random.default_rng(1).permutation(a)
    got = interpreted(codes, {"p": a > 0, "a": a, "b": b, "c": b})
    assert complaints(codes, (), got, {}) == []


@pytest.mark.parametrize("first", range(0, 300, 25))
def test_random_programs(first):
    codes = [inline_programs.random_code(s, equations=(6, 14)) for s in range(first, first + 25)]
    arguments = inline_programs.random_arguments(codes[0], first, 64)
    operands = inline_programs.random_operands(codes[0], first)
    found = complaints(codes, operands, interpreted(codes, arguments, operands), {})
    assert found == [], f"seeds from {first}"
