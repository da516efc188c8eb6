"""mbarriers: phases that end when all arrivals are counted and all bytes have come.

A bulk copy lands as late as it may: when its phase needs nothing else, and someone waits for
it. The first try for a phase that has not ended fails, as any may: so code that does not look
is found. The next one blocks its lanes until the phase ends. When nothing else can run, it
fails once more, and if nothing comes of that, it is a deadlock.
"""

import numpy as np

from ._access import address_reader, call_on
from ._control import holds
from ._fault import Misstep, Unsupported
from ._memory import REGION_BITS
from ._parse import SINK, Pair
from ._proxy import COLUMNS, MBARRIER
from ._races import ENGINE_CLOCK
from ._table import control, guarded, plain
from ._types import reader, writer

_LOW = np.int64((1 << REGION_BITS) - 1)
_MOST_BYTES = (1 << 20) - 1


class Mbarrier:
    """One mbarrier of one CTA."""

    def __init__(self, at: int, cta: int, count: int, index: int, column: int, width: int):
        self.at, self.cta, self.made = at, cta, index
        self.column = column  # in the clocks of its CTA
        self.number = column + cta * COLUMNS
        self.count = self.pending = count
        self.bytes = 0  # expected in this phase, and not yet there
        self.phase = 0
        self.flights: list = []
        self.asked = False  # someone waits for this phase
        self.arrived: list = []  # warps, in this phase
        self.gathered = np.zeros(width, np.int64)  # what they knew
        self.known = np.zeros(width, np.int64)  # who waits knows this afterwards

    def name(self, m) -> str:
        return f"the mbarrier at byte {self.at % m.shared.stride} of shared memory"

    @property
    def coming(self) -> int:
        return sum(flight.bytes for flight in self.flights)

    def settle(self, m) -> None:
        """Ends the phase if it may end."""
        if self.pending:
            return
        if self.bytes < 0:
            raise Misstep(f"{self.name(m)} has got {-self.bytes} bytes more than it expects")
        coming = self.coming
        if coming > self.bytes:
            raise Misstep(
                f"{self.name(m)} expects {self.bytes} more bytes in phase {self.phase}, and copies "
                f"of {coming} bytes are on their way to it: the phase ends before they are there"
            )
        if coming < self.bytes or (coming and not self.asked):
            return
        proxy = m.proxy
        self.phase += 1
        for flight in self.flights:
            proxy.land(m, flight, self.column, self.phase)
        self.flights, self.arrived, self.asked = [], [], False
        self.pending, self.bytes = self.count, 0
        np.maximum(self.known, self.gathered, out=self.known)
        self.known[m.warps + self.column] = ENGINE_CLOCK + self.phase
        self.gathered[:] = 0
        proxy.moved()
        lanes = np.flatnonzero(proxy.waits_for == self.number)
        proxy.wake(m, lanes)

    def state(self) -> str:
        """What is missing, for a message."""
        missing = []
        if self.pending:
            missing.append(f"{self.pending} of {self.count} arrivals missing")
        if self.bytes:
            coming = f" ({self.coming} are on their way)" if self.flights else ""
            missing.append(f"{self.bytes} bytes missing{coming}")
        who = ""
        if self.arrived:
            warps = ", ".join(str(w) for w in sorted(set(self.arrived)))
            who = f"; warps that have arrived: {warps}"
        return f"phase {self.phase}: {' and '.join(missing) or 'nothing missing'}{who}"


def _places(m, address, lanes):
    """Places in the store of the mbarriers that lanes name."""
    return m.shared.locate(address(m, lanes) & _LOW, m.cta_of[lanes], 8, "uses an mbarrier in")


def find(m, at, lanes):
    """Pairs of an mbarrier and the rows that use it. **Raises:** `Misstep` where there is none."""
    shadow = m.shared_shadow
    found = []
    for place in np.unique(at).tolist():
        rows = np.flatnonzero(at == place)
        barrier = m.proxy.barriers.get(place)
        if barrier is None:
            raise Misstep(
                f"uninitialised: no mbarrier.init has made an mbarrier of "
                f"{m.shared.describe(place, 8)}",
                int(rows[0]),
            )
        found.append((barrier, rows))
    m_clocks, describe = m.clocks, m.shared.describe
    shadow.refuse(shadow.write, "wrote", "uses", at, 8, m_clocks, lanes, describe)
    return found


def attempt(rows, run):
    """Calls `run()`; a misstep in it is of the lane of the first row."""
    try:
        run()
    except Misstep as misstep:
        if misstep.lane is None:
            misstep.lane = int(rows[0])
        raise


def _arrive(m, barrier: Mbarrier, lanes, rows, number: int, expected: int, drop: bool) -> None:
    """`number` arrivals of the lanes `rows`, together, after `expected` bytes more."""
    clocks = m.clocks
    if number > barrier.pending:
        if barrier.pending:
            what = f"{number} arrivals at once where {barrier.pending} are due"
        elif barrier.bytes:
            what = f"an arrival too many: all {barrier.count} are counted"
        else:
            what = "an arrival at an mbarrier whose count is 0"
        raise Misstep(f"{what}, at {barrier.name(m)}, {barrier.state()}", int(rows[0]))
    barrier.bytes += expected
    if barrier.bytes > _MOST_BYTES:
        raise Misstep(f"{barrier.name(m)} expects more than {_MOST_BYTES} bytes", int(rows[0]))
    for warp in np.unique(m.warp_of[lanes[rows]]).tolist():
        clocks.known[warp, warp % m.warps] = clocks.clock[warp]
        np.maximum(barrier.gathered, clocks.known[warp], out=barrier.gathered)
        clocks.tick(warp)
        barrier.arrived.append(warp % m.warps)
    barrier.pending -= number
    if drop:
        barrier.count -= number
    m.proxy.moved()
    attempt(rows, lambda: barrier.settle(m))


# ---------------------------------------------------------------- the instructions


def _init(ins):
    address, count = address_reader(ins.args[0]), reader(ins.args[1], "u32")

    def body(m, lanes):
        at = _places(m, address, lanes)
        counts = m.spread(count(m))[lanes]
        proxy, shadow = m.proxy, m.shared_shadow

        def same():
            return np.zeros(len(at), bool)

        for row, place in enumerate(at.tolist()):
            if not 0 < counts[row] < 1 << 20:
                raise Misstep(f"an mbarrier for {int(counts[row])} arrivals", row)
            if place in proxy.barriers:
                raise Misstep(f"{proxy.barriers[place].name(m)} is made twice", row)
        shadow.on_write(at, 8, m.clocks, lanes, m.shared.describe, same, ins.index)
        for row, place in enumerate(at.tolist()):
            cta = int(m.cta_of[lanes[row]])
            if place not in proxy.used:
                column = sum(b.cta == cta for b in proxy.used.values())
                if column == COLUMNS:
                    raise Unsupported(f"more than {COLUMNS} mbarriers in a CTA")
            else:
                column = proxy.used[place].column
            made = Mbarrier(place, cta, int(counts[row]), ins.index, column, m.clocks.width)
            proxy.barriers[place] = proxy.used[place] = made
            proxy.words[place // 8] = True
        proxy.wrote(at, 8, lanes)
        proxy.moved()

    return body


def _inval(ins):
    address = address_reader(ins.args[0])

    def body(m, lanes):
        at = _places(m, address, lanes)
        for barrier, rows in find(m, at, lanes):
            if barrier.flights:
                raise Misstep(
                    f"{barrier.name(m)} is no more, and copies are in flight", int(rows[0])
                )
            del m.proxy.barriers[barrier.at]
            m.proxy.words[barrier.at // 8] = False

    return body


def _count_bytes(ins, sign: int):
    address, size = address_reader(ins.args[0]), reader(ins.args[1], "u32")

    def body(m, lanes):
        at = _places(m, address, lanes)
        sizes = m.spread(size(m))[lanes].astype(np.int64)
        for barrier, rows in find(m, at, lanes):
            barrier.bytes += sign * int(sizes[rows].sum())
            m.proxy.moved()
            attempt(rows, lambda b=barrier: b.settle(m))

    return body


def _arrival(ins):
    mods = ins.mods
    if "noComplete" in mods:
        raise Unsupported("arrivals that may not complete a phase")
    expects, drop = "expect_tx" in mods, mods[1] == "arrive_drop"
    has_state = not hasattr(ins.args[0], "base")
    target, mem, *more = ins.args if has_state else (SINK, *ins.args)
    address, put = address_reader(mem), writer(target, "b64")
    given = reader(more[0], "u32") if more else None

    def body(m, lanes):
        at = _places(m, address, lanes)
        values = np.ones(len(lanes), np.int64)
        if given is not None:
            values = m.spread(given(m))[lanes].astype(np.int64)
        state = np.zeros(m.lanes, np.uint64)
        for barrier, rows in find(m, at, lanes):
            state[lanes[rows]] = barrier.phase
            total = int(values[rows].sum())
            number, expected = (len(rows), total) if expects else (total, 0)
            _arrive(m, barrier, lanes, rows, number, expected, drop)
        put(m, state)

    return body


_SIMPLE = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrival,
    "arrive_drop": _arrival,
    "expect_tx": lambda ins: _count_bytes(ins, 1),
    "complete_tx": lambda ins: _count_bytes(ins, -1),
}


@control("mbarrier")
def _mbarrier(ins, kernel):
    which = ins.mods[1]
    if which in ("try_wait", "test_wait"):
        return _wait(ins)
    if which not in _SIMPLE or ("shared" not in ins.op and ins.mods[-1] != "b64"):
        raise Unsupported("this use of an mbarrier")
    body = _SIMPLE[which](ins)

    def run(m):
        call_on(body, m, m.active)

    some = guarded(run, ins.guard)

    def op(m):
        some(m)
        return m.go(ins.index + 1)

    return op


def _wait(ins):
    by_parity = "parity" in ins.mods
    target = ins.args[0].first if isinstance(ins.args[0], Pair) else ins.args[0]
    put, address = writer(target, "pred"), address_reader(ins.args[1])
    phase = reader(ins.args[2], "u32" if by_parity else "b64")
    after = ins.index + 1

    def body(m, lanes):
        """**Returns:** for each row whether it is done, and whether that is a success."""
        at = _places(m, address, lanes)
        phases = m.spread(phase(m))[lanes].astype(np.int64)
        success, failed = np.zeros((2, len(lanes)), bool)
        proxy = m.proxy

        def ended(barrier, rows):
            if by_parity:
                return (barrier.phase & 1) != (phases[rows] & 1)
            return barrier.phase > phases[rows]

        for barrier, rows in find(m, at, lanes):
            early = rows[~ended(barrier, rows)]
            failed[early] = proxy.first_try(lanes[early], ins.index, barrier)
            if not failed[early].all():
                barrier.asked = True
                attempt(rows, lambda b=barrier: b.settle(m))
            good = rows[ended(barrier, rows) & ~failed[rows]]
            success[good] = True
            for warp in np.unique(m.warp_of[lanes[good]]).tolist():
                known = m.clocks.known
                np.maximum(known[warp], barrier.known, out=known[warp])
            stuck = lanes[rows[~success[rows] & ~failed[rows]]]
            proxy.waits_for[stuck] = barrier.number
        failed |= proxy.denied[lanes] & ~success
        proxy.denied[lanes] = False
        proxy.waits_for[lanes[failed]] = -1
        return success | failed, success

    def op(m):
        if ins.guard is not None:
            inside = m.within(holds(ins.guard, m))
            if inside is False:
                return m.go(after)
            m.pc[m.active] = after
            m.set_mask(inside)
        lanes = m.active
        done, success = call_on(body, m, lanes)
        if done.all():
            full = np.zeros(m.lanes, bool)
            full[lanes] = success
            put(m, full)
            if ins.guard is None:
                return m.go(after)
            m.pc[lanes] = after
            return None
        stuck = lanes[~done]
        m.pc[stuck] = ins.index
        m.waiting[stuck] = MBARRIER
        m.waits_at[stuck] = ins.index
        if done.any():
            full = np.zeros(m.lanes, bool)
            mask = full.copy()
            full[lanes], mask[lanes[done]] = success, True
            m.set_mask(mask)
            put(m, full)
            m.pc[lanes[done]] = after
        return None

    return op


@plain("mapa")
def _mapa(ins, kernel):
    """A cluster is one CTA: its addresses are the CTA's own."""
    name = ins.mods[-1].replace("u", "b")
    get, rank, put = (
        reader(ins.args[1], name),
        reader(ins.args[2], "u32"),
        writer(ins.args[0], name),
    )

    def run(m):
        if (bad := m.spread(rank(m))[m.active] != 0).any():
            raise Misstep("a cluster of one CTA has no other", int(m.active[np.argmax(bad)]))
        put(m, get(m))

    return run
