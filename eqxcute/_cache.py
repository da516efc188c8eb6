"""Compiled kernels on disk, by content.

One file an entry, `<key>.kernel`, written under a temporary name and renamed. A file lock an entry, so that processes that
need the same kernel compile it once. Entries are executable code: a folder that others can write to is refused. Whatever
else goes wrong with the disk costs the cache, never the run.
"""

import contextlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock

from . import _artifact, _config
from ._artifact import Artifact
from ._errors import CacheError, CacheWarning

# Longer than any compile: then the other process hangs, and this one compiles for itself.
_LOCK_SECONDS = 600.0


def fetch(key: str, compile: Callable[[], Artifact]) -> Artifact:
    """The entry `key`, or what `compile()` makes, which is kept.

    **Raises:**

    `eqxcute.CacheError` if others can write to the folder.
    """
    if not _config.cache_enabled():
        return compile()
    folder = _folder()
    if folder is None:
        return compile()
    found = _read(folder, key)
    if found is not None:
        return found
    with _lock(folder, key) as locked:
        found = _read(folder, key) if locked else None  # another process may have made it meanwhile
        if found is None:
            found = compile()
            _write(folder, found)
    return found


def _folder() -> Path | None:
    folder = _config.cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        _warn(
            f"The kernel cache {folder} cannot be used ({error}); kernels are compiled in each process."
        )
        return None
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    problem = (
        f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        if mine
        else "belongs to another user"
    )
    raise CacheError(
        f"The kernel cache {folder} {problem}. Its entries are code that this process would run, so it is not used. Run "
        f"`chmod 700 {folder}`, name another folder with EQXCUTE_CACHE_DIR, or set EQXCUTE_CACHE=0."
    )


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.kernel"


def _read(folder: Path, key: str) -> Artifact | None:
    path = _path(folder, key)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"The cached kernel {path} cannot be read ({error}); it is compiled anew.")
        return None
    try:
        artifact = _artifact.parse(data)
        if artifact.key != key:
            raise ValueError("it is the entry of another kernel")
    except ValueError as error:
        _warn(f"The cached kernel {path} is of no use: {error}. It is compiled anew and replaced.")
        return None
    with contextlib.suppress(OSError):  # a read-only disk: the entry just looks unused
        os.utime(path)
    return artifact


@contextlib.contextmanager
def _lock(folder: Path, key: str):
    """Holds the entry's lock. Yields False where there is none to be had: then the kernel is compiled regardless."""
    lock = filelock.FileLock(folder / f"{key}.lock", mode=0o600)
    try:
        lock.acquire(timeout=_LOCK_SECONDS)
    except (OSError, filelock.Timeout) as error:
        if isinstance(error, filelock.Timeout):
            _warn(
                f"Another process has held {lock.lock_file} for {_LOCK_SECONDS:.0f} s; the kernel is compiled here too."
            )
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _write(folder: Path, artifact: Artifact) -> None:
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as file:
            temporary = Path(file.name)
            file.write(artifact.dump())
        os.replace(temporary, _path(folder, artifact.key))
        _prune(folder, _config.cache_bytes())
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        _warn(f"The kernel {artifact.symbol} could not be kept in {folder} ({error}).")


def _prune(folder: Path, limit: float) -> None:
    """Removes the entries that were used longest ago, until the rest is within the limit."""
    for path in [
        *folder.glob(".new-*"),
        *folder.glob("*.lock"),
    ]:  # left by processes that were killed
        with contextlib.suppress(FileNotFoundError):
            orphan = path.name.startswith(".new-") or not path.with_suffix(".kernel").exists()
            if orphan and time.time() - path.stat().st_mtime > 24 * 3600:
                path.unlink()
    entries = []
    for path in folder.glob("*.kernel"):
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            return
        total -= size
        for gone in (path, path.with_suffix(".lock")):
            gone.unlink(missing_ok=True)


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
