"""Every environment variable that eqxcute reads. Each is read when it is needed, not at import.

| variable                | values               | meaning                                                  |
|-------------------------|----------------------|----------------------------------------------------------|
| EQXCUTE_ARCH            | `sm_90a`, ...        | compile for this GPU; default: the device's own          |
| EQXCUTE_CACHE           | `0`, `1`             | keep compiled kernels on disk; default 1                 |
| EQXCUTE_CACHE_DIR       | a folder             | where; default: `eqxcute` in the user's cache folder     |
| EQXCUTE_CACHE_BYTES     | an integer           | largest size of that folder; default 1 GiB               |
| EQXCUTE_COMPILE_TIMEOUT | seconds, 0 for none  | longest trace of one kernel; default 300                 |
"""

import os
from pathlib import Path

import platformdirs

from ._errors import SpecError


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # `not >=` and not `<`, so that `nan` is refused too.
    if not value >= 0:
        raise SpecError(f"{name}={text!r} must be a number that is not negative.")
    return value


def architecture() -> str | None:
    return os.environ.get("EQXCUTE_ARCH") or None


def cache_enabled() -> bool:
    text = os.environ.get("EQXCUTE_CACHE", "1")
    if text not in ("0", "1"):
        raise SpecError(f"EQXCUTE_CACHE={text!r} must be 0 or 1.")
    return text == "1"


def cache_dir() -> Path:
    named = os.environ.get("EQXCUTE_CACHE_DIR")
    return Path(named) if named else Path(platformdirs.user_cache_dir("eqxcute", appauthor=False))


def cache_bytes() -> float:
    return _number("EQXCUTE_CACHE_BYTES", 2.0**30)


def compile_timeout() -> float | None:
    """In seconds, or None for no limit."""
    return _number("EQXCUTE_COMPILE_TIMEOUT", 300.0) or None
