"""Where the bridge meets CuTe: the function that XLA calls, traced and compiled. Imports the DSL; imported late.

XLA hands over flat arrays and attributes. The entry point rebuilds the kernel and its arguments from them and calls the
kernel's own `launch`.
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import cutlass
import cutlass.cute as cute
import equinox as eqx
import jax
import numpy as np
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import _dtypes
from ._kernel import attributes_of, brings, replace_fields
from ._primitive import Array, Plan, Size, View, is_struct


@dataclasses.dataclass(frozen=True)
class Built:
    """What the compiler made. `ptx` and `cubin` are there if they were asked for."""

    object: bytes
    ptx: str | None
    cubin: bytes | None


@cute.jit
def cond(pred, true_fn, false_fn, operands):
    """See `eqxcute.cond`."""
    return true_fn(*operands) if pred else false_fn(*operands)


class Entry:
    """The function that is compiled: `(stream, *arrays, *attributes)`."""

    def __init__(self, found: View, plan: Plan):
        self.found = found
        self.plan = plan

    def __repr__(self):  # enters the name of the compiled function
        return type(self.found.kernel).__name__

    @cute.jit
    def __call__(self, stream, *values):
        self.enter(stream, list(values))

    def enter(self, stream, values: list) -> None:
        def take(arrays):
            return [_reviewed(values.pop(0), array) for array in arrays]

        inputs = take(self.plan.inputs)
        del values[: len(self.plan.initial)]  # the same buffers as the outputs they start
        outputs, scratch = take(self.plan.outputs), take(self.plan.workspace)
        arrays, rest = eqx.partition((self.found.kernel, self.found.arguments), is_struct)
        kernel, arguments = eqx.combine(
            jax.tree.unflatten(jax.tree.structure(arrays), inputs), rest
        )
        kernel = replace_fields(kernel, dict(zip(attributes_of(kernel), values, strict=True)))
        if brings(kernel, "out_tree"):
            outputs = [jax.tree.unflatten(self.found.tree, outputs)]
        type(kernel).launch(kernel, stream, *arguments, *outputs, *scratch)


def _reviewed(tensor, array: Array):
    """The tensor with its dims in the order of the signature, over memory in the order of the layout."""
    if array.order == tuple(range(len(array.order))):
        return tensor
    back = [int(i) for i in np.argsort(array.order)]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=back))


def _fake(array: Array, symbols: dict):
    """A stand-in for an array, with its sizes as the plan has them.

    CuTe computes an offset in the width of the stride, and a number is 32 bits wide. So a stride is a number only where
    no offset can pass 2**31; else it is a 64-bit symbol.
    """
    dims = [array.dims[i] for i in array.order]
    sizes = [_size(dim, symbols) for dim in dims]
    strides, known, fixed = (
        [],
        1,
        True,
    )  # of the inner dims: a divisor of their product, and whether it is exact
    for dim in reversed(dims):
        small = fixed and dim.number is not None and dim.number * known < 2**31
        strides.append(
            known if small or (known == 1 and fixed) else cute.sym_int64(divisibility=known)
        )
        fixed = fixed and dim.number is not None
        known = known * dim.number if dim.number else known * dim.multiple
        known = math.gcd(known, 2**20) if not fixed else known
    dtype = getattr(cutlass, _dtypes.CUTE_NAMES[array.dtype.name])
    return make_fake_tensor(dtype, tuple(sizes), stride=tuple(reversed(strides)), assumed_align=16)


def _size(dim: Size, symbols: dict):
    if dim.number is not None:
        return dim.number
    if dim.symbol not in symbols:
        symbols[dim.symbol] = cute.sym_int32(divisibility=dim.multiple)
    return symbols[dim.symbol]


_ATTRIBUTES = {
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "bool": cutlass.Boolean,
}


def build(
    found: View,
    plan: Plan,
    symbol: str,
    architecture: str,
    *,
    inspect: bool = False,
    before_passes: Callable[[], None] = lambda: None,
) -> Built:
    """Traces and compiles a kernel. `inspect` keeps PTX, with line numbers, and cubin."""
    symbols: dict = {}
    arrays = [_fake(a, symbols) for a in plan.inputs]
    arrays += [_fake(plan.outputs[i], symbols) for i, _ in plan.initial]
    arrays += [_fake(a, symbols) for a in (*plan.outputs, *plan.workspace)]
    scalars = [_ATTRIBUTES[v.dtype.name](0) for v in attributes_of(found.kernel).values()]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory(prefix="eqxcute-") as folder:
        options = f"--enable-tvm-ffi --gpu-arch {architecture} {type(found.kernel).compile_options}"
        if inspect:
            options += f" --keep-ptx --keep-cubin --generate-line-info --dump-dir {folder}"
        compiled = cute.compile(
            Entry(found, plan),
            stream,
            *arrays,
            *scalars,
            options=options,
            trace_finalize_hooks=lambda *_: before_passes(),
        )
        file = Path(folder) / "kernel.o"
        compiled.export_to_c(str(file), function_name=symbol, export_only_tvm_ffi_symbols=True)
        return Built(
            file.read_bytes(),
            compiled.artifacts.PTX if inspect else None,
            compiled.artifacts.CUBIN if inspect else None,
        )
