"""Named FFI targets. A kernel is registered once a process, under a name that is its content."""

import importlib.metadata
import re
import threading

from . import _arch, _artifact, _cache, _compile
from ._errors import BackendError, CompileError
from ._kernel import attributes_of
from ._primitive import Plan, View

# jax-tvm-ffi keeps a fixed table of handlers; none is ever freed.
SLOTS = 1024

_lock = threading.RLock()
_targets: dict[str, str] = {}


def target(found: View, plan: Plan) -> str:
    """The name of the FFI target for a call: compiled, loaded and registered at need.

    Two threads that need the same kernel compile it once.
    """
    _check_pair()
    architecture = _arch.current()
    key = _compile.key_of(found, plan, architecture)
    with _lock:
        if key not in _targets:
            _check_slots(found)
            artifact = _cache.fetch(key, lambda: _compile.compile(found, plan, key, architecture))
            _targets[key] = _register(artifact, found)
        return _targets[key]


def _register(artifact: _artifact.Artifact, found: View) -> str:
    import jax_tvm_ffi

    name = f"eqxcute.{_compile.snake(found.name)}.{artifact.key[:16]}"
    attributes = [f"attrs.{name}" for name in attributes_of(found.kernel)]
    jax_tvm_ffi.register_ffi_target(
        name,
        _artifact.load(artifact),
        ["args", "rets", *attributes],
        platform="gpu",
        allow_cuda_graph=type(found.kernel).cuda_graph,
    )
    return name


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _check_pair() -> None:
    """What a kernel needs to reach CUDA.

    jax and jax-tvm-ffi each know a version of XLA's FFI; a handler that is newer than jax is lost without a word."""
    for package, purpose in (
        ("nvidia-cutlass-dsl", "are compiled by"),
        ("jax-tvm-ffi", "reach CUDA through"),
    ):
        if _version(package) is None:
            raise BackendError(
                f"Kernels {purpose} {package}, which is not installed here: `pip install {package}` (it has wheels for Linux)."
            )
    jax, bridge = _version("jax") or (), _version("jax-tvm-ffi") or ()
    if bridge >= (0, 1, 3) and jax < (0, 9, 1):
        have = ".".join(map(str, jax))
        raise BackendError(
            f"jax {have} cannot call kernels registered by jax-tvm-ffi {'.'.join(map(str, bridge))}, which needs jax 0.9.1 or "
            'newer. Run `pip install "jax-tvm-ffi==0.1.2"`, or upgrade jax.'
        )


def _check_slots(found: View) -> None:
    import jax_tvm_ffi

    if jax_tvm_ffi.registered_count() >= SLOTS:
        raise CompileError(
            f"`{found.name}` is the {SLOTS + 1}th kernel of this process, and jax-tvm-ffi has {SLOTS} places for them, never "
            "freed. Kernels differ by class, static fields, dtypes, dims marked `!` and architecture: give values that "
            "vary as `eqxcute.attribute()` or as arrays, and leave sizes that vary without `!`."
        )
