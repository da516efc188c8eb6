"""The async proxy: copies and products that touch shared memory while the threads go on.

For each 16 bytes of shared memory it is known whether a bulk copy to them is on its way and
how many products or stores still read them; for each granule, which thread wrote to it by an
ordinary store that no `fence.proxy.async` has followed. So a thread that touches what is in
flight is found, and a product or a bulk store that would read what it may not see yet.
"""

import numpy as np

from ._fault import Misstep
from ._products import CHUNK, Products
from ._races import ENGINE, ENGINE_CLOCK

COLUMNS = 128  # so many mbarriers may a CTA have
MBARRIER = 64  # in `Machine.waiting`: for an mbarrier; lower numbers are named barriers


class Proxy:
    """What is in flight in a batch of CTAs."""

    def __init__(self, m):
        size = m.shared.store.data.size
        self.flying = np.zeros(size // CHUNK, bool)
        self.reading = np.zeros(size // CHUNK, np.int32)
        self.granule = m.shared_shadow.granule
        self.writer = np.zeros(size // self.granule, np.int32)  # a lane, plus 1
        self.words = np.zeros(size // 8, bool)  # of 8 bytes: an mbarrier
        self.unfenced = False
        self.readers: list = []  # `Product`s and `Store`s
        self.barriers: dict = {}  # place in the store -> Mbarrier
        self.used: dict = {}  # the same, also of those that are no more
        self.waits_for = np.full(m.lanes, -1, np.int32)  # an mbarrier's number
        self.tries = np.full((m.lanes, 3), -1, np.int64)  # instruction, mbarrier, phase of the last
        self.denied = np.zeros(m.lanes, bool)  # its next try fails, since nothing moves
        self.was_denied: set = set()  # (lane, instruction, mbarrier)
        self.groups: dict = {}  # lane -> BulkGroups
        self.products = Products() if m.program.has_products else None

    # -------------------------------------------------------------- what threads do

    def refuse(self, m, at, total: int, verb: str) -> None:
        """An ordinary access of shared memory, which may not touch what is in flight."""
        chunk = at // CHUNK
        if (bad := self.flying[chunk]).any():
            place = int(np.argmax(bad))
            raise Misstep(self.in_flight(m, int(at[place]), total, verb), place)
        if self.barriers and (bad := self.words[at // 8] | self.words[(at + total - 1) // 8]).any():
            place = int(np.argmax(bad))
            described = m.shared.describe(int(at[place]), total)
            raise Misstep(f"{verb} {described}, where an mbarrier is", place)
        if verb != "reads" and (bad := self.reading[chunk] > 0).any():
            place = int(np.argmax(bad))
            raise Misstep(self.in_use(m, int(at[place]), total, verb), place)

    def wrote(self, at, total: int, lanes) -> None:
        """Ordinary stores: nothing of the async proxy sees them before a fence."""
        self.unfenced = True
        count = max(total // self.granule, 1)
        self.writer.reshape(-1, count)[at // (self.granule * count)] = (lanes + 1)[:, None]

    def fence(self, m) -> None:
        """`fence.proxy.async` of the active lanes: for their stores, and for those they know."""
        if not self.unfenced:
            return
        places = np.flatnonzero(self.writer)
        fencing = np.zeros(m.lanes, bool)
        fencing[m.active] = True
        seen = fencing[self.writer[places] - 1]
        if not seen.all():
            stamp = m.shared_shadow.write[places]
            for warp in np.unique(m.warp_of[m.active]).tolist():
                seen |= m.clocks.knows(warp, stamp)
        self.writer[places[seen]] = 0
        self.unfenced = not seen.all()

    # -------------------------------------------------------------- what engines do

    def check_read(self, m, at, lanes, what: str) -> None:
        """An engine will read the chunks `at` on behalf of `lanes`, one a chunk."""
        chunk = at // CHUNK
        if (bad := self.flying[chunk]).any():
            place = int(np.argmax(bad))
            raise Misstep(self.in_flight(m, int(at[place]), CHUNK, f"{what} reads"), place)
        place = m.shared.store.unwritten(at, CHUNK)
        if place is not None:
            described = m.shared.describe(int(at[place]), CHUNK)
            raise Misstep(f"uninitialised: {what} reads {described}, not all written", place)
        if self.unfenced:
            count = max(CHUNK // self.granule, 1)
            writers = self.writer.reshape(-1, count)[at // (self.granule * count)]
            if (bad := writers.any(1)).any():
                place = int(np.argmax(bad))
                lane = int(writers[place][writers[place] > 0][0]) - 1
                described = m.shared.describe(int(at[place]), CHUNK)
                raise Misstep(
                    f"no proxy fence: {what} reads {described}, which thread "
                    f"{m.name_thread(lane)[1]} wrote without a fence.proxy.async after it",
                    place,
                )
        m.shared_shadow.check_read(at, CHUNK, m.clocks, lanes, m.shared.describe)

    def start_reading(self, reader) -> None:
        self.reading[reader.at // CHUNK] += 1
        self.readers.append(reader)

    def stop_reading(self, m, at, lane: int) -> None:
        """A reader is done with these chunks, and `lane` knows."""
        self.reading[at // CHUNK] -= 1
        m.shared_shadow.note_read(at, CHUNK, m.clocks, np.full(len(at), lane))

    def check_write(self, m, at, lanes, index: int) -> None:
        """A bulk copy to the chunks `at` starts."""
        chunk = at // CHUNK
        if (bad := self.flying[chunk]).any():
            place = int(np.argmax(bad))
            raise Misstep(self.in_flight(m, int(at[place]), CHUNK, "a bulk copy writes"), place)
        if self.barriers and (bad := self.words[at // 8] | self.words[at // 8 + 1]).any():
            place = int(np.argmax(bad))
            described = m.shared.describe(int(at[place]), CHUNK)
            raise Misstep(f"a bulk copy writes {described}, where an mbarrier is", place)
        if (bad := self.reading[chunk] > 0).any():
            place = int(np.argmax(bad))
            raise Misstep(self.in_use(m, int(at[place]), CHUNK, "a bulk copy writes"), place)

        def same():
            return np.zeros(len(at), bool)

        shadow = m.shared_shadow
        shadow.on_write(at, CHUNK, m.clocks, lanes, m.shared.describe, same, index)

    def land(self, m, flight, column: int, phase: int) -> None:
        """What a bulk copy brought is there, for those who have seen the mbarrier's phase end."""
        at, shadow = flight.at, m.shared_shadow
        self.flying[at // CHUNK] = False
        m.shared.store.scatter(at, 8, 2, flight.words.view(np.uint64))
        count = max(CHUNK // self.granule, 1)
        self.writer.reshape(-1, count)[at // (self.granule * count)] = 0
        stamp = np.int64(((ENGINE + column) << 37) | (ENGINE_CLOCK + phase))
        shadow.put(shadow.write, at, CHUNK, np.full(len(at), stamp))
        shadow.put(shadow.write_at, at, CHUNK, np.full(len(at), flight.index, np.int32))

    # -------------------------------------------------------------- words

    def in_flight(self, m, at: int, total: int, verb: str) -> str:
        described = m.shared.describe(at, total)
        for barrier in self.barriers.values():
            for flight in barrier.flights:
                if (flight.at == at // CHUNK * CHUNK).any():
                    return (
                        f"race on {described}: {verb} them while a bulk copy to them is in flight, "
                        f"started at {m.place(flight.index)}; wait first for {barrier.name(m)}"
                    )
        return f"race on {described}: {verb} them while a bulk copy to them is in flight"

    def in_use(self, m, at: int, total: int, verb: str) -> str:
        described = m.shared.describe(at, total)
        for reader in self.readers:
            if reader.holds(at // CHUNK * CHUNK):
                return (
                    f"race on {described}: {verb} them while {reader.what} at "
                    f"{m.place(reader.index)} may still read them; {reader.until} comes first"
                )
        return f"race on {described}: {verb} them while they may still be read"

    # -------------------------------------------------------------- the end

    def first_try(self, lanes, index: int, barrier) -> np.ndarray:
        """Which lanes have not tried this wait in this phase yet."""
        now = np.array([index, barrier.number, barrier.phase])
        fresh = (self.tries[lanes] != now).any(1)
        self.tries[lanes] = now
        return fresh

    def unstick(self, m) -> bool:
        """Nothing moves: let waits that may fail do so, once each. **Returns:** is there one?"""
        lanes = np.flatnonzero(self.waits_for >= 0)
        found = False
        for lane in lanes.tolist():
            key = lane, int(m.waits_at[lane]), int(self.waits_for[lane])
            if key not in self.was_denied:
                self.was_denied.add(key)
                self.denied[lane] = found = True
                self.wake(m, np.array([lane]))
        return found

    def stuck(self, m, cta: int) -> list[str]:
        """Lines for a deadlock: which warps of a CTA wait for which mbarrier, and what it lacks."""
        waiting = np.flatnonzero((m.waiting == MBARRIER) & (m.cta_of == cta))
        by_number = {b.number: b for b in self.barriers.values()}
        lines = []
        for index, number in sorted(
            {(int(m.waits_at[i]), int(self.waits_for[i])) for i in waiting}
        ):
            lanes = waiting[(m.waits_at[waiting] == index) & (self.waits_for[waiting] == number)]
            warps = sorted({int(m.thread_of[i]) >> 5 for i in lanes})
            what = "an mbarrier that is no more"
            if (barrier := by_number.get(number)) is not None:
                made = f"made at {m.place(barrier.made)}"
                what = f"{barrier.name(m)} ({made}), {barrier.state()}"
            who = "warp" if len(warps) == 1 else "warps"
            lines.append(
                f"{who} {', '.join(map(str, warps))} of CTA {m.name_thread(int(lanes[0]))[0]}, at "
                f"{m.place(index)}: for {what}"
            )
        return lines

    def moved(self) -> None:
        """An mbarrier has changed: a wait that failed may be worth another try."""
        self.was_denied.clear()

    def wake(self, m, lanes) -> None:
        self.waits_for[lanes] = -1
        m.waiting[lanes] = -1
        m.waits_at[lanes] = -1
        m.tried.clear()

    def finish(self, m) -> None:
        """All CTAs of the batch have left."""
        for barrier in self.barriers.values():
            for flight in barrier.flights:
                raise m.fault(
                    flight.index,
                    Misstep(
                        f"the CTA leaves while a bulk copy of {flight.bytes} bytes is in flight; "
                        f"nobody has waited for {barrier.name(m)}",
                        flight.lane,
                    ),
                )
        for reader in self.readers:
            raise m.fault(
                reader.index,
                Misstep(
                    f"the CTA leaves while {reader.what} may still read its shared memory; "
                    f"{reader.until} comes first",
                    reader.lane,
                ),
            )
        for groups in self.groups.values():
            groups.finish(m)
