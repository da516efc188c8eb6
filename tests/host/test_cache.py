"""The disk cache: what goes wrong with a disk costs the cache, never the run; what others can write is never run."""

import os
import stat
import warnings

import pytest

from eqxcute import CacheError, CacheWarning, SpecError, _cache as cache
from eqxcute._artifact import Artifact, parse


def artifact(key="k" * 8, size=1000):
    return Artifact(key, f"eqxcute_{key}", "sm_90a", "compiler 1", os.urandom(size))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "kernels"
    monkeypatch.setenv("EQXCUTE_CACHE_DIR", str(path))
    return path


class Compiler:
    def __init__(self, made):
        self.made, self.calls = made, 0

    def __call__(self):
        self.calls += 1
        return self.made


def test_a_hit_compiles_nothing_and_gives_the_same_bytes(folder):
    compiler = Compiler(artifact())
    first, second = (cache.fetch("k" * 8, compiler) for _ in range(2))
    assert (first, second, compiler.calls) == (compiler.made, compiler.made, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [p for p in folder.iterdir() if p.name.startswith(".new-")]


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda data: data[:-1], "damaged or cut short"),
        (lambda data: data[:-5] + b"\0" + data[-4:], "damaged or cut short"),
        (lambda data: data[:30], "header is damaged"),
        (lambda data: b"", "not a compiled kernel"),
        (lambda data: b"\x7fELF" + data, "not a compiled kernel"),
        (lambda data: data.replace(b'"symbol"', b'"cymbal"'), "header is damaged"),
    ],
)
def test_a_damaged_entry_is_a_reported_miss_and_is_replaced(folder, damage, part):
    compiler = Compiler(artifact())
    cache.fetch("k" * 8, compiler)
    (entry,) = folder.glob("*.kernel")
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.warns(CacheWarning, match=part):
        assert cache.fetch("k" * 8, compiler) == compiler.made
    assert compiler.calls == 2
    assert parse(entry.read_bytes()) == compiler.made
    cache.fetch("k" * 8, compiler)
    assert compiler.calls == 2


def test_an_entry_of_another_kernel_is_a_reported_miss(folder):
    cache.fetch("k" * 8, Compiler(artifact()))
    (folder / ("k" * 8 + ".kernel")).rename(folder / ("m" * 8 + ".kernel"))
    other = Compiler(artifact("m" * 8))
    with pytest.warns(CacheWarning, match="the entry of another kernel"):
        assert cache.fetch("m" * 8, other) == other.made
    assert other.calls == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        CacheError, match=rf"mode {mode:o}.*chmod 700 .*EQXCUTE_CACHE_DIR.*EQXCUTE_CACHE=0"
    ):
        cache.fetch("k" * 8, Compiler(artifact()))


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(CacheError, match=r"belongs to another user.*EQXCUTE_CACHE_DIR"):
        cache.fetch("k" * 8, Compiler(artifact()))


def test_a_full_disk_costs_the_cache_only(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compiler = Compiler(artifact())
    for _ in range(2):
        with pytest.warns(CacheWarning, match="No space left"):
            assert cache.fetch("k" * 8, compiler) == compiler.made
    assert compiler.calls == 2
    assert not list(folder.glob(".new-*"))


def test_a_folder_that_cannot_be_made_costs_the_cache_only(folder):
    folder.write_text("a file")
    compiler = Compiler(artifact())
    with pytest.warns(CacheWarning, match="cannot be used"):
        assert cache.fetch("k" * 8, compiler) == compiler.made


def test_a_read_only_disk_still_gives_hits(folder, monkeypatch):
    compiler = Compiler(artifact())
    cache.fetch("k" * 8, compiler)

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(cache.tempfile, "NamedTemporaryFile", read_only)
    monkeypatch.setattr(cache.filelock.FileLock, "acquire", read_only)
    assert cache.fetch("k" * 8, compiler) == compiler.made
    assert compiler.calls == 1
    other = Compiler(artifact("m" * 8))
    with pytest.warns(CacheWarning, match="Read-only"):
        assert cache.fetch("m" * 8, other) == other.made


def test_the_least_recently_used_go_first(folder, monkeypatch):
    keys = [letter * 8 for letter in "abcd"]
    for age, key in enumerate(keys):
        cache.fetch(key, Compiler(artifact(key)))
        os.utime(folder / f"{key}.kernel", ns=(age, age))
    cache.fetch(keys[0], Compiler(None))  # used again: now the newest
    one = (folder / f"{keys[0]}.kernel").stat().st_size
    monkeypatch.setenv("EQXCUTE_CACHE_BYTES", str(3 * one + 10))
    cache.fetch("e" * 8, Compiler(artifact("e" * 8)))
    assert sorted(p.stem for p in folder.glob("*.kernel")) == [keys[0], keys[3], "e" * 8]


def test_the_cache_can_be_switched_off(folder, monkeypatch):
    monkeypatch.setenv("EQXCUTE_CACHE", "0")
    compiler = Compiler(artifact())
    cache.fetch("k" * 8, compiler)
    cache.fetch("k" * 8, compiler)
    assert compiler.calls == 2
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EQXCUTE_CACHE", "yes"),
        ("EQXCUTE_CACHE_BYTES", "1 GB"),
        ("EQXCUTE_CACHE_BYTES", "-1"),
        ("EQXCUTE_CACHE_BYTES", "nan"),
    ],
)
def test_bad_settings_are_named(folder, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=f"{name}='{value}'"):
        cache.fetch("k" * 8, Compiler(artifact()))


def test_a_failing_compile_leaves_no_lock_and_no_entry(folder):
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.fetch("k" * 8, fails)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.fetch("k" * 8, Compiler(artifact()))
