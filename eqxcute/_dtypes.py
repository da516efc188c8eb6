"""Which JAX dtypes a kernel takes, and what CuTe calls them. Imports neither CuTe nor a device."""

import numpy as np

from ._errors import DtypeError

# JAX's name -> the name in `cutlass`. Everything that arrives through XLA's FFI and jax-tvm-ffi, and that
# CuTe can load and store.
CUTE_NAMES = {
    "bool": "Boolean",
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "Uint8",
    "uint16": "Uint16",
    "uint32": "Uint32",
    "uint64": "Uint64",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float32": "Float32",
    "float64": "Float64",
    "float8_e4m3fn": "Float8E4M3FN",
    "float8_e5m2": "Float8E5M2",
    "float8_e8m0fnu": "Float8E8M0FNU",
}

# The way out for dtypes that people do try.
INSTEAD = {
    "complex64": "pass real and imaginary parts as two float32 arrays",
    "complex128": "pass real and imaginary parts as two float64 arrays",
    "int4": "XLA hands no 4-bit arrays to custom calls; pack two into a uint8",
    "uint4": "XLA hands no 4-bit arrays to custom calls; pack two into a uint8",
    "int2": "XLA hands no 2-bit arrays to custom calls; pack four into a uint8",
    "uint2": "XLA hands no 2-bit arrays to custom calls; pack four into a uint8",
    "float4_e2m1fn": "XLA hands no 4-bit arrays to custom calls; pack two into a uint8",
}


def check(kernel: str, name: str, dtype, allowed: tuple[str, ...] | None = None) -> None:
    """Raises `DtypeError` unless CuTe, and the kernel, take `dtype`."""
    came = np.dtype(dtype).name if not _extended(dtype) else str(dtype)
    if came not in CUTE_NAMES:
        way = INSTEAD.get(came, "convert it first")
        if _extended(dtype):
            way = "pass `jax.random.key_data(key)`, which is uint32"
        raise DtypeError(
            f"`{kernel}`: `{name}` is {came}, which no CuTe kernel takes: {way}.\n"
            f"Kernels take {', '.join(CUTE_NAMES)}."
        )
    if allowed is not None and came not in allowed:
        raise DtypeError(
            f"`{kernel}`: `{name}` is {came}, but the kernel takes {' or '.join(allowed)}. "
            f"Convert it with `{name}.astype(...)`."
        )


def _extended(dtype) -> bool:
    """True for JAX's extended dtypes, such as those of `jax.random.key`."""
    return not isinstance(dtype, (np.dtype, type))
