"""Branches, barriers, and the end of a kernel."""

import numpy as np

from ._fault import Misstep, Unsupported
from ._parse import Imm
from ._table import control
from ._types import reader


def holds(guard, m):
    """The lanes of the whole batch where the guard lets the instruction run."""
    return ~m.R[guard.index] if guard.negated else m.R[guard.index]


@control("bra")
def _bra(ins, kernel):
    target, after, guard = ins.target, ins.index + 1, ins.guard
    if guard is None:
        return lambda m: m.go(target)

    def run(m):
        taken = m.within(holds(guard, m))
        if taken is False:
            return m.go(after)
        if m.mask is None:
            if taken is None:
                return target
            m.pc[m.live] = after
        else:
            m.pc[m.mask] = after
        m.pc[m.live if taken is None else taken] = target
        return None

    return run


@control("ret", "exit")
def _ret(ins, kernel):
    after, guard = ins.index + 1, ins.guard

    def run(m):
        if guard is not None:
            leaving = m.within(holds(guard, m))
            if leaving is False:
                return m.go(after)
            m.pc[m.active] = after
            m.set_mask(leaving)
        m.leave()
        return None

    return run


# ---------------------------------------------------------------- joining a warp


def split_ready(m, members=None, width=32):
    """Parts the active lanes: those whose warp's other lanes are here as well, and the rest.

    `width`: 128 for a warpgroup in place of a warp.

    `members`: for each lane of the batch the lanes of its warp that must come, as bits (None:
    every lane that has not left). **Returns:** a mask of the ready lanes, None if all are.
    """
    if m.mask is None:
        return None
    active, alive = m.mask.reshape(-1, width), m.alive.reshape(-1, width)
    if members is None:
        missing = (alive & ~active).any(1)
        ready = m.mask & ~np.repeat(missing, width)
    else:
        weights = np.uint64(1) << np.arange(32, dtype=np.uint64)
        absent = ((alive & ~active) * weights).sum(1)
        ready = m.mask & ((np.repeat(absent, 32) & members.astype(np.uint64)) == 0)
    return None if np.count_nonzero(ready) == np.count_nonzero(m.mask) else ready


def joining(ins, run, members=None, width=32):
    """An instruction that all lanes of a warp (or those named, or a warpgroup) execute together."""
    at, after, guard = ins.index, ins.index + 1, ins.guard

    def op(m):
        passing = None
        if guard is not None:
            inside = m.within(holds(guard, m))
            if inside is False:
                return m.go(after)
            if inside is not None:
                passing = m.active
                m.set_mask(inside)
        named = None if members is None or m.mask is None else members(m)
        ready = split_ready(m, named, width)
        if ready is None and passing is None:
            run(m)
            return m.go(after)
        if passing is not None:
            m.pc[passing] = after
        if ready is not None:
            rest = m.mask & ~ready
            m.parked[rest] = True
            m.pc[rest] = at
            if not ready.any():
                return None
            m.tried.clear()
            m.set_mask(ready)
        run(m)
        m.pc[m.active] = after
        return None

    return op


# ---------------------------------------------------------------- barriers of a CTA


_CLUSTER_BARRIER = 16  # after the CTA's own


class Barrier:
    """One of the sixteen barriers, for every CTA of the batch."""

    def __init__(self, m):
        self.arrived = np.zeros(m.ctas, np.int64)
        self.expected = np.zeros(m.ctas, np.int64)
        self.known = np.zeros((m.ctas, m.clocks.width), np.int64)
        self.everyone = np.zeros(m.ctas, bool)


def _weights(m):
    """How many threads each lane stands for: a warp that is not full counts as full."""
    weight = np.ones(m.lanes, np.int64)
    short = -m.launch.threads % 32
    if short:
        weight[m.thread_of == (m.warps - 1) * 32] += short
    return weight


def _arrive(m, number: int, lanes, count, index: int, blocks: bool):
    """These lanes arrive at the barrier `number`; `count` is None if all threads shall."""
    barrier = m.barriers.setdefault(number, Barrier(m))
    ctas = m.cta_of[lanes]
    expected = m.warps * 32 if count is None else count
    present = np.unique(ctas)
    clash = (barrier.expected[present] != 0) & (barrier.expected[present] != expected)
    if clash.any():
        cta = int(present[np.argmax(clash)])
        raise Misstep(
            f"barrier {number} is waited for by {int(barrier.expected[cta])} threads, and here "
            f"by {expected}",
            int(lanes[np.argmax(ctas == cta)]),
        )
    barrier.expected[present] = expected
    barrier.everyone[present] = count is None
    barrier.arrived += np.bincount(ctas, _weights(m)[lanes], m.ctas).astype(np.int64)
    m.clocks.publish(np.unique(m.warp_of[lanes]), barrier.known)
    if blocks:
        m.waiting[lanes] = number
        m.waits_at[lanes] = index
    over = np.flatnonzero(barrier.arrived > barrier.expected)
    if len(over):
        raise Misstep(
            f"barrier {number}: {int(barrier.arrived[over[0]])} threads arrive where "
            f"{int(barrier.expected[over[0]])} are due",
            int(lanes[0]),
        )
    done = np.flatnonzero((barrier.arrived == barrier.expected) & (barrier.expected > 0))
    if len(done):
        _release(m, number, barrier, done)


def _release(m, number: int, barrier: Barrier, ctas):
    opened = np.zeros(m.ctas, bool)
    opened[ctas] = True
    lanes = np.flatnonzero((m.waiting == number) & opened[m.cta_of])
    whole = opened & barrier.everyone
    if whole.any():
        m.clocks.join_all(np.flatnonzero(whole))
    m.clocks.learn(np.unique(m.warp_of[lanes]), barrier.known)
    m.waiting[lanes] = -1
    m.waits_at[lanes] = -1
    for values in (barrier.arrived, barrier.expected, barrier.known):
        values[ctas] = 0
    m.tried.clear()


@control("bar", "barrier")
def _bar(ins, kernel):
    mods = [m for m in ins.mods[1:] if m not in ("cta", "aligned")]
    if mods[:1] == ["warp"]:
        return _bar_warp(ins)
    if mods[:1] == ["cluster"]:
        return _bar_cluster(ins)
    if mods not in (["sync"], ["arrive"]):
        raise Unsupported("this kind of barrier")
    blocks = mods == ["sync"]
    aligned = ins.mods[0] == "bar" or "aligned" in ins.mods
    number = reader(ins.args[0], "u32")
    count = reader(ins.args[1], "u32") if len(ins.args) > 1 else None
    simple = count is None and isinstance(ins.args[0], Imm) and blocks

    def run(m):
        # Every thread of the batch is here: no book-keeping.
        if simple and m.mask is None and len(m.live) == m.ctas * m.launch.threads:
            m.clocks.join_all()
            return
        lanes = m.active
        numbers = m.spread(number(m))[lanes]
        counts = None if count is None else m.spread(count(m))[lanes]
        m.pc[lanes] = ins.index + 1
        for one in np.unique(numbers).tolist():
            chosen = numbers == one
            due = None
            if counts is not None:
                due = int(counts[chosen][0])
                if due % 32 or not due:
                    raise Misstep(f"a barrier of {due} threads: no multiple of 32", int(lanes[0]))
            _arrive(m, one, lanes[chosen], due, ins.index, blocks)

    if aligned:
        return _then_look(joining(ins, run))
    return _then_look(_alone(ins, run))


def _then_look(op):
    """After a barrier the lanes may have to wait: choose the next group anew."""

    def look(m):
        going = op(m)
        if going is not None and (m.waiting >= 0).any():
            m.pc[m.active] = going
            return None
        return going

    return look


def _alone(ins, run):
    """`barrier` without `.aligned`: lanes of a warp may come one by one."""

    def op(m):
        if ins.guard is not None:
            inside = m.within(holds(ins.guard, m))
            m.pc[m.active] = ins.index + 1
            if inside is False:
                return None
            m.set_mask(inside)
        run(m)
        return m.go(ins.index + 1)

    return op


def _bar_cluster(ins):
    """A cluster is one CTA: its threads wait for one another, and to arrive is nothing more."""
    if "arrive" in ins.mods:
        return lambda m: m.go(ins.index + 1)

    def run(m):
        m.pc[m.active] = ins.index + 1
        _arrive(m, _CLUSTER_BARRIER, m.active, None, ins.index, True)

    return _then_look(_alone(ins, run))


def _bar_warp(ins):
    members = reader(ins.args[0], "b32")

    def named(m):
        return m.spread(members(m))

    def run(m):
        m.clocks.tick(m.running_warps)

    return joining(ins, run, named)
