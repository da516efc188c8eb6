"""The hand-made object of stubs, and what is passed to host code."""

import ctypes
import platform

import numpy as np
import pytest

from eqxcute._ptx._stubs import stub_object, undefined_symbols

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="host code is made for x86-64 Linux",
)


def test_a_stub_object_defines_its_symbols():
    obj = stub_object({"one": 1, "two": None})
    assert undefined_symbols(obj) == []
    with pytest.raises(ValueError, match="not a 64-bit ELF object"):
        undefined_symbols(b"MZ, no object at all")


def test_stubs_jump_to_python():
    orcjit = pytest.importorskip("tvm_ffi_orcjit")
    seen = []
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )

    @kind
    def target(_, arguments, count, result):
        seen.append(count)
        return 0

    address = ctypes.cast(target, ctypes.c_void_p).value
    obj = stub_object({"__tvm_ffi_eqxcute_probe": address, "__tvm_ffi_eqxcute_zero": None})
    module = orcjit.default_session().load_module(obj)
    module.get_function("eqxcute_probe")(1, 2.0, 3)
    module.get_function("eqxcute_zero")()
    assert seen == [3]


def test_tensors_claim_to_be_on_a_gpu():
    tvm_ffi = pytest.importorskip("tvm_ffi")
    from eqxcute._ptx._host import _Tensor

    array = np.zeros((3, 4), "i2")
    tensor = tvm_ffi.from_dlpack(_Tensor(array, 1 << 41))
    assert tuple(tensor.shape) == (3, 4)
    assert str(tensor.dtype) == "int16"
    assert tensor.device.dlpack_device_type() == 2
    # tvm-ffi may hold them for longer than Python does.
    kept = [tvm_ffi.from_dlpack(_Tensor(np.zeros((i, 2), "f4"), 1 << 41)) for i in range(2000)]
    assert [tuple(t.shape) for t in kept] == [(i, 2) for i in range(2000)]
    with pytest.raises(TypeError, match="complex64"):
        _Tensor(np.zeros(3, "c8"), 0)
