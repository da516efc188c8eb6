"""Which implementation a layer or a pointwise function runs: what `implementation=` means, in one place."""

import threading
import warnings
from typing import Final, Literal, get_args

import jax

from . import _arch

Implementation = Literal["cute", "xla"]

_WARNED: Final[set[str]] = set()
_LOCK: Final = threading.Lock()


def platform() -> str:
    """The platform JAX runs on by default: "cuda", "rocm", "cpu", "tpu", ..."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    # JAX calls both makers' chips "gpu"; the version string tells them apart.
    version = jax.devices()[0].client.platform_version.lower()
    return "rocm" if "rocm" in version else "cuda"


def check_name(layer: str, implementation: str | None) -> None:
    """Refuse a name that no layer knows."""
    if implementation is None or implementation in get_args(Implementation):
        return
    raise ValueError(
        f"{layer}: implementation={implementation!r} is not known. Use None (the best that "
        f'works), "cute" (the GPU kernel, or an error) or "xla" (plain JAX, anywhere).'
    )


def choose(layer: str, implementation: str | None, *, missing: str | None = None) -> Implementation:
    """Resolve `implementation` for one call. Where an architecture is named, kernels are for that one, as on CUDA.

    **Arguments:**

    - `layer`: The layer's public name; it stands in messages, and one warning is given a name.
    - `implementation`: What the user asked for.
    - `missing`: Why no kernel can serve this call, as a full clause. `None` if one can.

    **Returns:** `"cute"` or `"xla"`.

    **Raises:** `ValueError` for an unknown name; `NotImplementedError` where "cute" is asked for
    and cannot be had.
    """
    check_name(layer, implementation)
    if implementation == "xla":
        return "xla"
    where = "cuda" if _arch.named() else platform()
    if implementation == "cute":
        if where != "cuda":
            raise NotImplementedError(
                f'{layer}: implementation="cute" needs an NVIDIA GPU, and JAX runs on '
                f'{where!r} here. Use implementation="xla", or None to let the platform decide.'
            )
        if missing is not None:
            raise NotImplementedError(
                f'{layer}: implementation="cute" cannot serve this call: {missing}. Use '
                f'implementation="xla", or None to fall back with a warning.'
            )
        return "cute"
    if where != "cuda":
        return "xla"
    if missing is None:
        return "cute"
    warn_once(
        layer,
        f'{layer} runs as plain JAX on this GPU: {missing}. Pass implementation="xla" to say '
        "that this is meant. (Said once a process.)",
        UserWarning,
    )
    return "xla"


def warn_once(key: str, message: str, category: type[Warning], stacklevel: int = 4) -> None:
    """Warn, unless it was done under this key."""
    with _LOCK:
        if key in _WARNED:
            return
        _WARNED.add(key)
    warnings.warn(message, category, stacklevel=stacklevel)
