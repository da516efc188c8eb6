"""A compiled kernel as bytes: an object file, and what is known of it.

The file begins with a magic line and a line of JSON; the rest is the object, whose digest is in the JSON. It loads without
the compiler: `apache-tvm-ffi-orcjit` links it into the process, with CuTe's runtime library.
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

MAGIC = b"eqxcute kernel 1\n"


@dataclasses.dataclass(frozen=True)
class Artifact:
    key: str  # the compile key's digest
    symbol: str  # the function in the object, without tvm-ffi's prefix
    architecture: str
    compiler: str
    object: bytes

    def dump(self) -> bytes:
        header = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "object"
        }
        header["sha256"] = hashlib.sha256(self.object).hexdigest()
        return MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n" + self.object


def parse(data: bytes) -> Artifact:
    """The reverse of `dump`. Raises `ValueError`, saying what is wrong, for anything else."""
    if not data.startswith(MAGIC):
        raise ValueError("it is not a compiled kernel, or one of another version of eqxcute")
    line, _, code = data[len(MAGIC) :].partition(b"\n")
    try:
        header = json.loads(line)
        digest = header.pop("sha256")
        artifact = Artifact(object=code, **header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from None
    if hashlib.sha256(code).hexdigest() != digest:
        raise ValueError("its contents do not match their digest: it is damaged or cut short")
    return artifact


@functools.cache
def _runtime() -> ctypes.CDLL:
    """CuTe's runtime library, its symbols visible to the objects that are linked later."""
    return ctypes.CDLL(str(runtime_library()), ctypes.RTLD_GLOBAL)


def runtime_library() -> Path:
    """The newest flavour that the driver can run: what the DSL itself picks."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    found = {
        int(p.parts[-3][2:]): p
        for root in roots
        for p in root.glob("cu*/lib/libcute_dsl_runtime.so")
    }
    newest = _driver_major()
    usable = [major for major in found if newest is None or major <= newest]
    if not usable:
        have = f"only those for CUDA {sorted(found)}" if found else "none"
        raise RuntimeError(
            f"No CuTe runtime library for this machine: {have} installed, the driver takes CUDA {newest}. Install "
            "`eqxcute[cuda12]` or `eqxcute[cuda13]`."
        )
    return found[max(usable)]


def _driver_major() -> int | None:
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        return (
            version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
        )
    except (OSError, AttributeError):
        return None


def load(artifact: Artifact) -> Any:
    """Links the object into the process, for good, and returns its `tvm_ffi.Function`."""
    import tvm_ffi_orcjit

    _runtime()
    module = tvm_ffi_orcjit.default_session().load_module(artifact.object, keep_module_alive=True)
    return module.get_function(artifact.symbol)
