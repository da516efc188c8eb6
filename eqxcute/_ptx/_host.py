"""Calls a compiled kernel's own host code on a machine without a GPU.

The host code checks its arguments, works out grid, block and shared memory, and calls the
CUDA runtime. Here that runtime is a set of Python functions: a launch runs the kernel's PTX
in `_machine`. So what a GPU would be asked to do is what is interpreted.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from ._fault import KernelFault
from ._machine import DEFAULT_BUDGET
from ._run import Device
from ._stubs import stub_object, undefined_symbols

_FAILED = -1  # "an error has been raised": the host code returns, and asks nothing more
_DEVICE_MAX_SHARED = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_DYNAMIC_SHARED = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize
_CLUSTER = 4  # cudaLaunchAttributeClusterDimension
_PLAIN_SHARED = 48 * 1024  # what a kernel may have without asking
_KILOBYTES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227}


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("dynamic_shared", c_uint64),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint32),
    ]


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("kind", c_uint32), ("pad", c_uint32), ("value", c_uint32 * 16)]


class _Library:
    """What a loaded object has asked for: it does so once, when it is first called."""

    def __init__(self):
        self.kernels: list[str] = []  # a handle is a place in here, plus one
        self.shared_limit: dict[int, int] = {}


class _Runtime:
    """The pretended CUDA runtime of one call: one device, one module."""

    def __init__(self, device: Device, library: _Library):
        self.device = device
        self.kernels = library.kernels
        self.shared_limit = library.shared_limit
        self.error: BaseException | None = None

    def max_shared(self) -> int:
        digits = "".join(c for c in self.device.module.target if c.isdigit())
        return _KILOBYTES.get(int(digits or 80), 99) * 1024

    def launch(self, config: _LaunchConfig, handle: int, arguments: int) -> None:
        name = self.kernels[handle - 1]
        kernel = self.device.module.kernels[name]
        for i in range(config.attribute_count):
            at = config.attributes + i * ctypes.sizeof(_LaunchAttribute)
            attribute = _LaunchAttribute.from_address(at)
            cluster = tuple(attribute.value[:3])
            if attribute.kind == _CLUSTER and cluster not in ((1, 1, 1), (0, 0, 0)):
                raise NotImplementedError(
                    f"the PTX interpreter does not know clusters; {name} has {cluster}"
                )
        limit = max(_PLAIN_SHARED, self.shared_limit.get(handle, 0))
        if config.dynamic_shared > limit:
            raise KernelFault(
                f"launch failed: {config.dynamic_shared} bytes of dynamic shared memory, "
                f"but the limit is {limit} on {self.device.module.target}",
                kernel=name,
            )
        places = (c_void_p * len(kernel.params)).from_address(arguments) if kernel.params else ()
        params = [
            ctypes.string_at(place, variable.size)
            for place, variable in zip(places, kernel.params, strict=True)
        ]
        self.device.launch(
            name, tuple(config.grid), tuple(config.block), params, int(config.dynamic_shared)
        )


_LOCK = threading.RLock()  # one call at a time: the functions below find it in `_CURRENT`
_CURRENT: list[_Runtime] = []
_CALLBACKS: dict[str, Any] = {}  # instances of what `ctypes.CFUNCTYPE` gives
# Return 0 and do nothing. The first runs when an object is unloaded, which may be when Python
# itself is gone: it must not be a Python function.
_ZEROS = ("cuda_dialect_unload_library_once", "_cudaSetDevice", "TVMFFIEnvGetStream")


def _raise_in_host(error: BaseException) -> int:
    """Keeps a Python exception for `execute`, and tells tvm-ffi that there is one."""
    import tvm_ffi.libinfo

    _CURRENT[-1].error = _CURRENT[-1].error or error
    library = _tvm_ffi_library(tvm_ffi.libinfo.find_libtvm_ffi())
    library.TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", str(error).encode())
    return _FAILED


@functools.cache
def _tvm_ffi_library(path: str):
    library = ctypes.CDLL(path)
    library.TVMFFIErrorSetRaisedFromCStr.argtypes = [c_char_p, c_char_p]
    library.TVMFFIErrorSetRaisedFromCStr.restype = None
    return library


def _symbol(name: str, result, *arguments):
    """Makes a function the target of the host code's calls to `name`."""

    def add(function):
        @functools.wraps(function)
        def call(*args):
            try:
                return function(*args)
            except BaseException as error:  # noqa: BLE001  (C code cannot let it pass)
                return _raise_in_host(error)

        _CALLBACKS[name] = ctypes.CFUNCTYPE(result, *arguments)(call)
        return function

    return add


@_symbol("cuda_dialect_init_library_once", c_int32, POINTER(c_uint64), c_void_p, c_void_p, c_void_p)
def _init_library(state, load, load_to_device, set_error):
    if state[0]:
        return 0
    libraries = (c_void_p * 16)()
    step = ctypes.CFUNCTYPE(c_int32, c_void_p)(load)(ctypes.addressof(libraries))
    if step == 0:
        to_device = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32)(load_to_device)
        step = to_device(ctypes.addressof(libraries), 0)
    return step


@_symbol(
    "_cudaLibraryLoadData",
    c_int32,
    POINTER(c_void_p),
    *[c_void_p] * 3,
    c_uint32,
    *[c_void_p] * 2,
    c_uint32,
)
def _library_load_data(library, code, *options):
    library[0] = 1
    return 0


@_symbol("_cudaLibraryGetKernel", c_int32, POINTER(c_void_p), c_void_p, c_char_p)
def _library_get_kernel(kernel, library, name):
    kernels = _CURRENT[-1].kernels
    kernels.append(name.decode())
    kernel[0] = len(kernels)
    return 0


@_symbol("_cudaGetDevice", c_int32, POINTER(c_int32))
def _get_device(device):
    device[0] = 0
    return 0


@_symbol("_cudaDeviceGetAttribute", c_int32, POINTER(c_int32), c_int32, c_int32)
def _device_get_attribute(value, which, device):
    if which != _DEVICE_MAX_SHARED:
        raise NotImplementedError(f"the pretended CUDA device has no attribute {which}")
    value[0] = _CURRENT[-1].max_shared()
    return 0


@_symbol("_cudaKernelSetAttributeForDevice", c_int32, c_void_p, c_int32, c_int32, c_int32)
def _kernel_set_attribute(kernel, which, value, device):
    if which == _DYNAMIC_SHARED:
        _CURRENT[-1].shared_limit[kernel] = value
    return 0


@_symbol("_cuKernelGetAttribute", c_int32, POINTER(c_int32), c_int32, c_void_p, c_int32)
def _kernel_get_attribute(value, which, kernel, device):
    runtime = _CURRENT[-1]
    value[0] = 0
    if which == 1:  # bytes of static shared memory
        from ._machine import program

        name = runtime.kernels[kernel - 1]
        if name in runtime.device.module.kernels:
            value[0] = program(runtime.device.ptx, name).shared[1]
    return 0


@_symbol("_cudaLaunchKernelEx", c_int32, POINTER(_LaunchConfig), c_void_p, c_void_p)
def _launch_kernel(config, kernel, arguments):
    _CURRENT[-1].launch(config[0], kernel, arguments)
    return 0


@_symbol("CuteDSLRT_TVMFFISetRaisedCudaError", None, c_void_p, c_int32)
def _set_raised_cuda_error(set_error, code):
    _raise_in_host(RuntimeError(f"the pretended CUDA runtime returned {code}"))


def _refused(name: str):
    def call(*_):
        return _raise_in_host(
            NotImplementedError(f"the pretended CUDA runtime has no function {name}")
        )

    return call


@functools.lru_cache(maxsize=32)
def _load(obj: bytes, symbol: str):
    """The entry of an object, linked to the pretended runtime, and its `_Library`."""
    import tvm_ffi_orcjit

    targets = dict(_CALLBACKS)
    for name in undefined_symbols(obj):
        if name not in (*targets, *_ZEROS) and name.lstrip("_").startswith(("cu", "CuteDSLRT")):
            targets[name] = _CALLBACKS[name] = ctypes.CFUNCTYPE(c_int32)(_refused(name))
    addresses: dict[str, int | None] = dict.fromkeys(_ZEROS)
    addresses |= {n: ctypes.cast(f, c_void_p).value for n, f in targets.items()}
    session = tvm_ffi_orcjit.default_session()
    module = session.load_module([obj, stub_object(addresses)])
    return module.get_function(symbol), _Library()


# ---------------------------------------------------------------- tensors


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


_CUDA = 2
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_NAMED_CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}


_LIBC = ctypes.CDLL(None)
_LIBC.malloc.restype, _LIBC.malloc.argtypes = c_void_p, [ctypes.c_size_t]
_FREE = ctypes.cast(_LIBC.free, c_void_p).value


class _Tensor:
    """An array that claims to lie on a CUDA device, at a made-up address.

    What DLPack hands out lives in one block of C memory whose deleter is C's `free`: tvm-ffi
    may drop it later than Python drops this object.
    """

    def __init__(self, array: np.ndarray, address: int):
        self.address = address
        self.shape = array.shape
        # Row-major, also where NumPy says something else: for sizes of 0 and 1.
        self.strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(array.ndim))
        self.bits = 8 * array.dtype.itemsize
        self.code = _NAMED_CODES.get(array.dtype.name, _CODES.get(array.dtype.kind))
        if self.code is None:
            raise TypeError(f"arrays of {array.dtype} cannot be passed to a kernel")

    def __dlpack__(self, **_):
        ndim = len(self.shape)
        sizes = ctypes.c_int64 * (2 * ndim)
        head = ctypes.sizeof(_DLManagedTensor)
        block = _LIBC.malloc(head + ctypes.sizeof(sizes))
        sizes.from_address(block + head)[:] = [*self.shape, *self.strides]
        managed = _DLManagedTensor.from_address(block)
        managed.context, managed.deleter = None, _FREE
        managed.tensor = _DLTensor(
            self.address,
            _CUDA,
            0,
            ndim,
            self.code,
            self.bits,
            1,
            block + head,
            block + head + 8 * ndim,
            0,
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
        return new(block, b"dltensor", None)

    def __dlpack_device__(self):
        return _CUDA, 0


def execute(
    object_bytes: bytes,
    symbol: str,
    ptx: str,
    arguments: Sequence,
    *,
    names: Sequence[str] = (),
    written: Sequence[int] = (),
    scratch: Sequence[int] = (),
    budget: int = DEFAULT_BUDGET,
) -> None:
    """Runs a compiled kernel on this CPU: its own host code, and its PTX interpreted.

    **Arguments:**

    - `object_bytes`: The object that `compiled.export_to_c(path, function_name=symbol,
        export_only_tvm_ffi_symbols=True)` makes.
    - `symbol`: That name.
    - `ptx`: The PTX of the same compile (`--keep-ptx`; with `--generate-line-info` faults
        name Python lines).
    - `arguments`: What the function takes: C-contiguous arrays, which are changed in place,
        and NumPy or Python scalars. The same memory given twice is one array.
    - `names`: What messages call the arguments. (Keyword only, as all that follow.)
    - `written`: Numbers of the arguments that are outputs: they start poisoned, may not be
        read before they are written, and must be written whole.
    - `scratch`: Numbers of those that start poisoned and need not be written whole: a
        workspace.
    - `budget`: How many instructions a batch of CTAs may run.

    **Raises:** `KernelFault` for what is wrong in a kernel; `NotImplementedError` for what
    the interpreter does not know; ValueError and TypeError from the host code's checks.
    """
    import tvm_ffi

    device = Device(ptx, budget)
    values = []
    for i, argument in enumerate(arguments):
        name = names[i] if i < len(names) else f"argument {i}"
        if not isinstance(argument, np.ndarray):
            values.append(argument.item() if isinstance(argument, np.generic) else argument)
            continue
        if not argument.flags.c_contiguous:
            raise ValueError(f"`{name}` is not C-contiguous; pass np.ascontiguousarray of it")
        address = device.upload(argument, name, written=i in written, scratch=i in scratch)
        values.append(tvm_ffi.from_dlpack(_Tensor(argument, address)))
    with _LOCK:
        function, library = _load(object_bytes, symbol)
        runtime = _Runtime(device, library)
        _CURRENT.append(runtime)
        try:
            function(*values)
        except Exception:
            if runtime.error is not None:
                raise runtime.error from None
            raise
        finally:
            _CURRENT.pop()
    if runtime.error is not None:
        raise runtime.error
    device.download()
