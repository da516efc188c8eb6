"""Programs as device code on a GPU, equation by equation.

    python tests/gpu/test_inline.py 10000

runs so many random programs, compiled by as many processes as there are cores, and prints for each row of the table its
largest error in units of float32's last place, and for each kind of equation with wrong values how many there are, with
one of them. It exits with 1 if there are any.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ in ("__main__", "__mp_main__"):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import inline_programs
import jax
import numpy as np
import pytest

pytest.importorskip("cutlass")

import inline_kernels
from inline_kernels import complaints

PER_KERNEL = 40  # programs: jax-tvm-ffi takes 1,024 kernels a process
ELEMENTS = 256


def on_device(kernel, *arguments):
    return jax.jit(lambda *some: kernel(*some))(*arguments)


def run(codes, arguments, operands=(), fast=False):
    return inline_kernels.call(
        inline_kernels.kernel_of(codes, fast), arguments, operands, on_device
    )


def programs(first: int, count: int):
    """The programs with the seeds from `first` on, what they are called with, and what they read."""
    codes = [inline_programs.random_code(seed) for seed in range(first, first + count)]
    arguments = inline_programs.random_arguments(codes[0], first, ELEMENTS)
    return codes, arguments, inline_programs.random_operands(codes[0], first)


# ---------------------------------------------------------------- under pytest


@pytest.mark.parametrize("first", [0, 40, 80])
def test_random_programs(first):
    codes, arguments, operands = programs(first, 40)
    assert complaints(codes, operands, run(codes, arguments, operands), contracted=True) == []


@pytest.mark.parametrize("dtype", inline_programs.all_dtypes())
def test_every_row_on_edges(dtype):
    codes = inline_kernels.row_codes(dtype, inline_programs.all_dtypes())
    pools = [inline_programs.edge_values(dtype, k, 20) for k in range(2)]
    a, b = (grid.reshape(-1) for grid in np.meshgrid(*pools, indexing="ij"))
    arguments = {"p": np.arange(len(a)) % 3 == 0, "a": a, "b": b, "c": np.roll(b, 7)}
    assert complaints(codes, (), run(codes, arguments), contracted=True) == []


def test_functions_on_numbers_of_every_size():
    codes, arguments = inline_kernels.float_functions(1_000_000)
    assert complaints(codes, (), run(codes, arguments), contracted=True) == []


@pytest.mark.parametrize(("name", "fast", "bits"), inline_kernels.FAST)
def test_fast_forms_are_as_exact_as_they_say(name, fast, bits):
    assert inline_kernels.fast_error(name, fast, 1_000_000, on_device) <= 2.0**-bits


# ---------------------------------------------------------------- as a script


def compile_ahead(first: int, count: int) -> int:
    """Puts the kernel into the cache on disk, without a GPU."""
    codes, arguments, operands = programs(first, count)
    kernel = inline_kernels.kernel_of(codes)
    index = np.arange(ELEMENTS, dtype=np.int32)
    call = jax.jit(lambda *some: kernel(*some))
    call.trace(index, arguments, tuple(operands)).lower(lowering_platforms=("cuda",))
    return first


def check(first: int, count: int, results) -> tuple[list[str], dict[str, float]]:
    codes, _, operands = programs(first, count)
    worst: dict[str, float] = {}
    found = complaints(codes, operands, results, worst, contracted=True)
    return [f"seeds from {first}, {line}" for line in found], worst


def kind_of(line: str) -> str:
    """The row and the dtypes of the equation that a line complains of, or how the line begins."""
    found = re.search(r" = (\w+)\{[^(]*\((.*)\) gave (\w+) ", line)
    if not found:
        return line.split(":")[0].split(" ", 3)[-1]
    op, inputs, dtype = found.groups()
    return f"{op}({', '.join(part.split()[0] for part in inputs.split(', ') if part)}) -> {dtype}"


def report(wrong: list[str], worst: dict[str, float]) -> str:
    """All errors, four rows a line and the largest first; then the kinds of wrong values, the most frequent first."""
    cells = [
        f"{op:22}{error:8.3g}" for op, error in sorted(worst.items(), key=lambda item: -item[1])
    ]
    lines = ["   ".join(cells[i : i + 4]) for i in range(0, len(cells), 4)]
    kinds = collections.Counter(map(kind_of, wrong))
    examples = {kind_of(line): line for line in reversed(wrong)}
    lines += [f"{count} x {kind}: {examples[kind][:200]}" for kind, count in kinds.most_common()]
    return "\n".join(lines)


def use_cpu(architecture: str, folder: str) -> None:
    """In each worker, before JAX looks for devices."""
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(EQXCUTE_ARCH=architecture, EQXCUTE_CACHE_DIR=folder)


def main(total: int) -> int:
    from eqxcute import _arch

    start = time.perf_counter()
    architecture, folder = _arch.current(), tempfile.mkdtemp(prefix="eqxcute-inline-")
    os.environ.update(EQXCUTE_ARCH=architecture, EQXCUTE_CACHE_DIR=folder)
    parts = [(first, min(PER_KERNEL, total - first)) for first in range(0, total, PER_KERNEL)]
    wrong, worst = [], {}
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=os.cpu_count(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=use_cpu,
        initargs=(architecture, folder),
    ) as pool:
        compiled = {pool.submit(compile_ahead, *part): part for part in parts}
        checked = []
        for future in concurrent.futures.as_completed(compiled):
            part = compiled[future]
            error = future.exception()
            if error is not None:
                wrong.append(f"seeds from {part[0]} do not compile: {error}")
                continue
            results = run(*programs(*part))
            checked.append(pool.submit(check, *part, results))
        for future in checked:
            lines, errors = future.result()
            wrong += lines
            for op, error in errors.items():
                worst[op] = max(worst.get(op, 0.0), error)
    print(report(wrong, worst))
    seconds = time.perf_counter() - start
    print(f"{total} programs of {ELEMENTS} elements in {seconds:.0f} s: {len(wrong)} wrong values")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
