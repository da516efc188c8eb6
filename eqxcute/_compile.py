"""From a kernel to an artifact: the compile key, the compiler behind its lock, and the watchdog."""

import contextvars
import ctypes
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from . import _arch, _config, _fingerprint, _libraries
from ._artifact import Artifact
from ._errors import ArchitectureError, CompileError, CompileTimeout, SpecError
from ._kernel import attributes_of, replace_fields
from ._primitive import Array, Plan, View

_LAUNCHER = str(Path(__file__).with_name("_launcher.py"))

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

    own = _fingerprint.own_roots(found.kernel)
    parts = {
        "kernel": _fingerprint.fingerprint(replace_fields(found.kernel, attributes), own),
        "arguments": _fingerprint.structure_fingerprint(found.arguments, own),
        "arrays": [
            [dims(a) for a in arrays] for arrays in (plan.inputs, plan.outputs, plan.workspace)
        ],
        "initial": [i for i, _ in plan.initial],
        "attributes": attributes,
        "architecture": architecture,
        "compiler": compiler(),
        "host": platform.machine(),
        "bridge": _libraries.bridge_digest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


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
        if any(thread.is_alive() for thread in _abandoned):
            raise CompileError(
                f"`{found.name}` cannot be compiled: a trace that ran out of time has not stopped, and CuTe compiles one "
                "kernel at a time. Restart the process."
            )
        _compiles += 1

        x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # JAX adds it when it runs

        def work(traced):
            with _arch.architecture(architecture), jax.enable_x64(x64):
                return _launcher.build(
                    found, plan, symbol, architecture, inspect=inspect, before_passes=traced
                )

        try:
            return within(_config.compile_timeout(), found.name, work)
        except (CompileTimeout, SpecError, ArchitectureError):
            raise
        except Exception as error:
            raise CompileError(
                f"`{found.name}` does not compile for {architecture}.\n{error}"
            ) from error


class _Stop(BaseException):
    """Ends a trace from another thread. No Exception: CuTe takes those for its own failures."""


def within(seconds: float | None, name: str, work: Callable[[Callable[[], None]], Any]) -> Any:
    """`work(traced)` in a thread of its own, ended with `CompileTimeout` unless it calls `traced()` within `seconds`.

    It does so when the kernel is traced: the passes that follow are one call of C++, which nothing stops. The thread is
    thrown away, and with it whatever MLIR keeps a thread: a trace that is stopped half-way leaves no context behind.
    """
    settled, result, failure = threading.Event(), [], []

    def run():
        try:
            result.append(work(settled.set))
        except BaseException as error:  # noqa: BLE001  raised again below
            failure.append(error)
        finally:
            settled.set()

    worker = threading.Thread(
        target=contextvars.copy_context().run, args=(run,), daemon=True, name=f"compile {name}"
    )
    worker.start()
    try:
        in_time = settled.wait(seconds)
        if in_time:
            worker.join()
    except BaseException:  # Ctrl-C
        _stop(worker)
        raise
    if not in_time:
        _stop(worker)
    if not in_time and worker.is_alive():
        _abandoned.append(worker)
    if not in_time and not result:
        raise CompileTimeout(
            f"`{name}` was still being traced after {seconds:g} s. A Python loop over a run-time tensor or size never ends: "
            "use `cutlass.range` or a `while` inside `@cute.jit`. EQXCUTE_COMPILE_TIMEOUT sets the limit in seconds."
        )
    if failure:
        raise failure[0]
    return result[0]


_STOP_SECONDS = 10.0  # a trace that waits longer, for a lock say, is left behind

# Threads that did not stop. The compiler is theirs until they do.
_abandoned: list[threading.Thread] = []


def _stop(worker: threading.Thread) -> None:
    """Raises `_Stop` in a thread that traces a kernel, where that is safe, until it has ended."""
    thread = worker.ident or 0
    end = time.monotonic() + _STOP_SECONDS
    while worker.is_alive() and time.monotonic() < end:
        # While this thread looks, that one waits for it: what it finds is where the exception arrives.
        if _may_be_stopped(sys._current_frames().get(thread)):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread), ctypes.py_object(_Stop)
            )
            worker.join(0.2)
        else:
            time.sleep(0.0005)


def _may_be_stopped(frame: types.FrameType | None) -> bool:
    """True if no function that C++ may have called is running: an exception out of one ends the process.

    MLIR's bindings call Python to make values: constructors of CuTe's classes, from inside a generated property. So none of
    either may be on the stack, which must reach down to the kernel's launcher.
    """
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == _LAUNCHER:
            return True
        if "nvidia_cutlass_dsl" in file and (
            "/_mlir/" in file or name in ("__init__", "__new__", "<lambda>")
        ):
            return False
        frame = frame.f_back
    return False
