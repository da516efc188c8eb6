"""The table of configurations that were measured: how it is read, and what is wrong with one.

A record in JSON, of which only `entries` matter here, each with `direction`, `dim`, `v_dim` (columns in shared memory),
`mask` ("full", or "sparse" with a tile map), `score` (whether there is a function) and `config`, the fields of a dataclass.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """What an entry is for."""

    direction: str
    dim: int
    v_dim: int
    mask: str
    score: bool


def load(path: Path, kinds: Mapping[str, type]) -> dict[Key, Any]:
    """The entries that are right. None where there is no file, or no record in it: the static tables serve then."""
    try:
        return read(json.loads(path.read_text()), kinds)[0]
    except (OSError, ValueError):
        return {}


def read(record: Any, kinds: Mapping[str, type]) -> tuple[dict[Key, Any], list[str]]:
    """The entries that are right, and what is wrong with the others, in sentences. `kinds`: dataclasses by direction."""
    entries = record.get("entries") if isinstance(record, dict) else None
    if not isinstance(entries, list):
        return {}, ["The record has no list of entries."]
    if record.get("smoke"):
        return {}, ["The record is of --smoke, whose figures mean nothing."]
    found: dict[Key, Any] = {}
    wrong = []
    for number, entry in enumerate(entries):
        try:
            key, config = _entry(entry, kinds)
            if key in found:
                raise ValueError(f"{tuple(key)} was there before")
        except (KeyError, TypeError, ValueError) as error:
            wrong.append(f"Entry {number}: {type(error).__name__}: {error}. Measure anew.")
            continue
        found[key] = config
    return found, wrong


def _entry(entry: Any, kinds: Mapping[str, type]) -> tuple[Key, Any]:
    key = Key(*(entry[name] for name in Key._fields))
    if [type(x) for x in key] != [str, int, int, str, bool] or key.mask not in ("full", "sparse"):
        raise ValueError(f"{key} is none that is asked for")
    kind = kinds[key.direction]
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, value in entry["config"].items():
        if name not in fields:
            raise ValueError(f"{kind.__name__} has no field {name}, but {', '.join(fields)}")
        if type(value) is not fields[name]:
            raise ValueError(f"{name} of {kind.__name__} is {value!r}")
    config = kind(**entry["config"])
    _ = config.registers  # there are none for a number of warpgroups that no kernel has
    return key, config
