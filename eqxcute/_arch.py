"""Which GPU a kernel is compiled for, and what differs between GPUs."""

import contextlib
import dataclasses

import jax

from . import _config
from ._errors import ArchitectureError


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a kernel's configuration may need to know of a GPU."""

    capability: tuple[int, int]
    smem_bytes: int  # the most shared memory that one CTA can ask for


_KIB = 1024
# CUDA C++ Programming Guide 13, "Technical specifications per compute capability".
ARCHITECTURES = {
    "sm_80": Facts((8, 0), 163 * _KIB),
    "sm_86": Facts((8, 6), 99 * _KIB),
    "sm_87": Facts((8, 7), 163 * _KIB),
    "sm_89": Facts((8, 9), 99 * _KIB),
    "sm_90": Facts((9, 0), 227 * _KIB),
    "sm_90a": Facts((9, 0), 227 * _KIB),
    "sm_100a": Facts((10, 0), 227 * _KIB),
    "sm_100f": Facts((10, 0), 227 * _KIB),
    "sm_103a": Facts((10, 3), 227 * _KIB),
    "sm_120a": Facts((12, 0), 99 * _KIB),
    "sm_121a": Facts((12, 1), 99 * _KIB),
}

# Part of `jit`'s cache key, so that a function lowered for one architecture is lowered again for the next.
_context = jax.make_user_context(None)


def check(name: str) -> str:
    if name not in ARCHITECTURES:
        raise ArchitectureError(
            f"{name!r} is no architecture that eqxcute compiles for. It knows "
            f"{', '.join(ARCHITECTURES)}; kernels need Ampere (sm_80) or newer."
        )
    return name


@contextlib.contextmanager
def architecture(name: str):
    """Compiles CUDA kernels for the GPU `name`, on a machine that has another one or none.

    ```python
    with eqxcute.architecture("sm_90a"):
        text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    ```

    **Arguments:**

    - `name`: `"sm_80"`, `"sm_90a"`, `"sm_100a"`, `"sm_120a"` and their kin.

    **Raises:**

    `eqxcute.ArchitectureError` for a name that CuTe does not compile for.
    """
    with _context(check(name)):
        yield


def named() -> str | None:
    """The architecture that the user named."""
    name = _context.value or _config.architecture()
    return check(name) if name else None


def current() -> str:
    """The architecture to compile for: the one named, else the device's own. Never a guess."""
    name = named()
    if name:
        return name
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        raise ArchitectureError(
            "A kernel was lowered for CUDA on a machine without a GPU, and no architecture is named. "
            'Name the target: `with eqxcute.architecture("sm_90a"): ...`, or set EQXCUTE_ARCH=sm_90a.'
        ) from None
    return of_capability(device.compute_capability)


def of_capability(capability: str) -> str:
    """`"9.0"` -> `"sm_90a"`: the most specific architecture of that capability."""
    major, minor = (int(part) for part in str(capability).split("."))
    names = [n for n, facts in ARCHITECTURES.items() if facts.capability == (major, minor)]
    if not names:
        raise ArchitectureError(
            f"This GPU has compute capability {capability}; eqxcute compiles for "
            f"{', '.join(ARCHITECTURES)}. The reference path works: pass `implementation='xla'` to "
            "the layer."
        )
    return next((n for n in names if n.endswith("a")), names[0])
