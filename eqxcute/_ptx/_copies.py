"""`cp.async`: copies to shared memory that land only when they are waited for.

The source is read when the copy starts. Until the wait that covers it, its target may be
neither read nor written, by any thread; afterwards it counts as written by the waiting one.
"""

import numpy as np

from . import _bulk
from ._access import address_reader, on_lanes, read, refuse_in_flight
from ._fault import Unsupported
from ._parse import Imm
from ._table import plain
from ._types import reader


class Copies:
    """The copies in flight of a batch."""

    def __init__(self, m):
        self.group = np.zeros(m.lanes, np.int64)  # the number of each lane's open group
        self.flying = np.zeros(m.shared.store.data.size, np.uint8)
        self.pending = []  # (lanes, places, words, groups, instruction)

    def in_flight(self, at, total: int) -> int | None:
        size = min(total, 8)
        rows = self.flying.view(f"u{size}").reshape(-1, total // size)[at // total].any(1)
        return int(np.argmax(rows)) if rows.any() else None

    def start(self, lanes, at, words, total: int, index: int) -> None:
        self.flying.reshape(-1, total)[at // total] = 1
        self.pending.append((lanes, at, words, self.group[lanes].copy(), index))

    def land(self, m, limit) -> None:
        """`limit`: for each lane of the batch, the first group that may stay in flight."""
        left = []
        for lanes, at, words, groups, index in self.pending:
            landed = groups < limit[lanes]
            if landed.any():
                self.put(m, lanes[landed], at[landed], words[landed], index)
            if not landed.all():
                stay = ~landed
                left.append((lanes[stay], at[stay], words[stay], groups[stay], index))
        self.pending = left

    def put(self, m, lanes, at, words, index):
        total = words.shape[1]
        self.flying.reshape(-1, total)[at // total] = 0
        m.shared.store.view("data", 1, total)[at // total] = words
        m.shared.store.mark(at, total)
        shadow = m.shared_shadow
        shadow.put(shadow.write, at, total, m.clocks.stamp[lanes])
        shadow.put(shadow.write_at, at, total, np.full(len(lanes), index, np.int32))
        if m.proxy is not None:
            m.proxy.wrote(at, total, lanes)


def _copies(m) -> Copies:
    if m.copies is None:
        m.copies = Copies(m)
    return m.copies


@plain("cp")
def _cp(ins, kernel):
    mods = ins.mods
    if "bulk" in mods:
        return _bulk.build(ins)
    if mods[:2] != ("cp", "async") or "mbarrier" in mods:
        raise Unsupported("an arrival when copies of a thread have landed")
    if mods[2] == "commit_group":
        return _commit
    if mods[2] == "wait_group":
        keep = ins.args[0].value
        return lambda m: _wait(m, keep)
    if mods[2] == "wait_all":
        return _wait_all
    return _start(ins)


def _start(ins):
    if not isinstance(ins.args[2], Imm):
        raise Unsupported("a size that is not a literal")
    total = ins.args[2].value
    target, source = address_reader(ins.args[0]), address_reader(ins.args[1])
    hint = "L2::cache_hint" in ins.mods
    more = ins.args[3:-1] if hint else ins.args[3:]
    used = reader(more[0], "pred" if _is_predicate(more[0]) else "u32") if more else None
    ignore = bool(more) and _is_predicate(more[0])

    def body(m, lanes):
        at = m.shared.locate(target(m, lanes), m.cta_of[lanes], total, "copies to")
        copies = _copies(m)
        refuse_in_flight(m, at, total, "writes")
        words = np.zeros((len(lanes), total), np.uint8)
        sizes = np.full(len(lanes), total)
        if used is not None:
            given = m.spread(used(m))[lanes]
            sizes = np.where(given, 0, total) if ignore else given.astype(np.int64)
        whole = np.flatnonzero(sizes == total)
        address = source(m, lanes)
        if len(whole):
            words[whole] = _source_words(m, address[whole], lanes[whole], total)
        for row in np.flatnonzero((sizes > 0) & (sizes < total)).tolist():
            for j in range(int(sizes[row])):
                part = read(m, "global", address[row : row + 1] + j, lanes[row : row + 1], 1, 1)
                words[row, j] = part[0]

        def same():
            return np.zeros(len(lanes), bool)

        shadow = m.shared_shadow
        shadow.on_write(at, total, m.clocks, lanes, m.shared.describe, same, ins.index)
        copies.start(lanes, at, words, total, ins.index)

    return on_lanes(body)


def _source_words(m, address, lanes, total):
    size = min(total, 8)
    words = read(m, "global", address, lanes, size, total // size)
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(lanes), total)


def _is_predicate(arg) -> bool:
    return getattr(arg, "type", None) == "pred"


def _commit(m):
    _copies(m).group[m.active] += 1


def _wait(m, keep: int):
    copies = _copies(m)
    limit = np.zeros(m.lanes, np.int64)
    limit[m.active] = copies.group[m.active] - keep
    copies.land(m, limit)


def _wait_all(m):
    _commit(m)
    _wait(m, 0)
