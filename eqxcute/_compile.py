"""From a kernel to an artifact: the compile key, the compiler behind its lock, and the watchdog."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import platform
import re
import threading
from collections.abc import Iterator

from . import _config, _fingerprint
from ._artifact import Artifact
from ._errors import ArchitectureError, CompileError, CompileTimeout, SpecError
from ._kernel import attributes_of, replace_fields
from ._primitive import Array, Plan, View

# The DSL keeps options and kernels on one object: two threads inside it end the process.
_COMPILER = threading.RLock()
_compiles = 0


def count() -> int:
    """How often this process has called the compiler."""
    return _compiles


def compiler() -> str:
    return "nvidia-cutlass-dsl " + importlib.metadata.version("nvidia-cutlass-dsl")


def key_of(found: View, plan: Plan, architecture: str) -> str:
    """The compile key as a digest: equal for kernels that compile to the same code, in every process."""
    attributes = {name: value.dtype.name for name, value in attributes_of(found.kernel).items()}

    def dims(array: Array):
        return [
            array.dtype.name,
            [[d.number, d.symbol, d.multiple] for d in array.dims],
            array.order,
        ]

    parts = {
        "kernel": _fingerprint.of_kernel(replace_fields(found.kernel, attributes)),
        "arguments": _fingerprint.fingerprint(str(_structure(found))),
        "arrays": [
            [dims(a) for a in arrays] for arrays in (plan.inputs, plan.outputs, plan.workspace)
        ],
        "initial": [i for i, _ in plan.initial],
        "attributes": attributes,
        "architecture": architecture,
        "compiler": compiler(),
        "host": platform.machine(),
        "bridge": _fingerprint.source_digest("eqxcute._launcher"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _structure(found: View):
    import jax

    return jax.tree.structure(found.arguments)


def symbol_of(found: View, key: str) -> str:
    """`eqxcute_bias_relu_1f0c...`: a name that is an identifier."""
    return f"eqxcute_{snake(found.name)}_{key[:16]}"


def snake(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def compile(found: View, plan: Plan, key: str, architecture: str) -> Artifact:
    """Calls the compiler.

    **Raises:**

    `eqxcute.CompileError` if it refuses, `eqxcute.CompileTimeout` if tracing takes too long.
    """
    symbol = symbol_of(found, key)
    return Artifact(
        key, symbol, architecture, compiler(), build(found, plan, symbol, architecture).object
    )


def build(found: View, plan: Plan, symbol: str, architecture: str, *, inspect: bool = False):
    """What `_launcher.build` gives, one at a time, within the time limit, its errors told as ours."""
    global _compiles
    with _COMPILER:
        try:
            from . import _launcher
        except ImportError as error:
            raise CompileError(
                f"`{found.name}` needs the CuTe DSL to compile, which does not import here ({error}). It has wheels for "
                "Linux: `pip install nvidia-cutlass-dsl`."
            ) from error
        _compiles += 1
        try:
            with deadline(_config.compile_timeout(), found.name) as in_time:
                return _launcher.build(
                    found, plan, symbol, architecture, inspect=inspect, before_passes=in_time
                )
        except (CompileTimeout, SpecError, ArchitectureError):
            raise
        except Exception as error:
            raise CompileError(
                f"`{found.name}` does not compile for {architecture}.\n{error}"
            ) from error


class _Stop(BaseException):
    """Ends a trace from another thread. No Exception: CuTe takes those for its own failures."""


@contextlib.contextmanager
def deadline(seconds: float | None, name: str) -> Iterator:
    """Ends the block with `CompileTimeout` unless it calls the function that it is given within `seconds`.

    The compiler calls it when a kernel is traced: the passes that follow are one call of C++, which nothing stops.
    """
    if seconds is None:
        yield lambda: None
        return
    guard, state = threading.Lock(), {"armed": True, "fired": False}
    thread = ctypes.c_ulong(threading.get_ident())

    def fire():
        with guard:
            if state["armed"]:
                state.update(armed=False, fired=True)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Stop))

    def disarm():
        with guard:
            state["armed"] = False
        timer.cancel()

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield disarm
        finally:
            disarm()
            if state["fired"]:  # whatever of it has not yet arrived
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
    except _Stop:
        raise CompileTimeout(
            f"`{name}` was still being traced after {seconds:g} s. A Python loop over a run-time tensor or size never ends: "
            "use `cutlass.range` or a `while` inside `@cute.jit`. EQXCUTE_COMPILE_TIMEOUT sets the limit in seconds."
        ) from None
