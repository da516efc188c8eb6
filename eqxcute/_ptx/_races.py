"""Who touched which byte when: finds accesses that no barrier orders.

Every warp has a clock. It moves on at each barrier and at each instruction that joins the
lanes of the warp (`shfl.sync`, `bar.warp.sync`, `mma.sync`, ...). A stamp is the thread and
the clock of its warp at the time of an access. An earlier access comes before a later one if
both are the same thread's, or

- in one warp: the clock has moved on since;
- in one CTA: a barrier joined the two warps after the earlier one (vector clocks: what each
  warp knows of every other's clock);
- in one CTA: an mbarrier's phase has ended after the earlier one arrived, and the later one's
  warp has waited for it. What a bulk copy wrote counts as written by a warp of its own, one an
  mbarrier, that nothing but a wait for this mbarrier knows of;
- anywhere: the earlier warp has since met a fence, or a release. (That is lenient: the later
  side should have an acquire as well.)

Two stores of the same value are let pass, and so are atomics among each other. The last
write, the last atomic and the last two reads by different warps are kept for each granule
(the smallest access that the kernel makes): what is not kept can hide a race, never make one
up.
"""

import numpy as np

from ._fault import Misstep

_CLOCK = np.int64(0xFFFFFFFF)
ENGINE = 1 << 24  # the first warp that stands for an mbarrier's copies
ENGINE_CLOCK = 1 << 31  # their clocks start here: no barrier of threads gets so far


class Clocks:
    """The clocks of a batch of CTAs. `fences` spans all warps of the launch."""

    def __init__(self, ctas: int, warps: int, first_cta: int, fences: np.ndarray, columns: int = 0):
        self.ctas, self.warps = ctas, warps
        self.width = warps + columns  # a warp's own knowledge: of warps, then of mbarriers
        self.first_warp = first_cta * warps
        self.fences = fences
        lanes = np.arange(ctas * warps * 32, dtype=np.int64)
        self.thread = lanes + self.first_warp * 32
        self.warp = lanes >> 5  # in the batch
        self.clock = np.ones(ctas * warps, np.int64)
        self.known = np.zeros((ctas * warps, self.width), np.int64)
        self.floor = np.zeros(len(lanes), np.int64)  # a barrier of all has joined up to here
        self._stamp = None

    @property
    def stamp(self) -> np.ndarray:
        """One a lane: thread and clock."""
        if self._stamp is None:
            self._stamp = (self.thread << np.int64(32)) | self.clock[self.warp]
        return self._stamp

    def tick(self, warps) -> None:
        """These warps (None: all) have joined their lanes."""
        if warps is None:
            self.clock += 1
        else:
            self.clock[warps] += 1
        self._stamp = None

    def join_all(self, ctas=None) -> None:
        """Every thread of these CTAs (None: all) has met a barrier."""
        clock = self.clock.reshape(self.ctas, self.warps)
        floor = self.floor.reshape(self.ctas, -1)
        known = self.known.reshape(self.ctas, self.warps, self.width)
        if ctas is None:
            ctas = slice(None)
        top = clock[ctas].max(1)
        known[ctas, :, : self.warps] = top[:, None, None]
        if self.width > self.warps:
            copies = known[ctas, :, self.warps :].max(1)
            known[ctas, :, self.warps :] = copies[:, None]
        floor[ctas] = top[:, None]
        clock[ctas] = top[:, None] + 1
        self._stamp = None

    def publish(self, warps: np.ndarray, into: np.ndarray) -> None:
        """These warps arrive at a barrier: what they know goes into its vector clocks."""
        own = warps % self.warps
        self.known[warps, own] = self.clock[warps]
        np.maximum.at(into, warps // self.warps, self.known[warps])
        self.clock[warps] += 1
        self._stamp = None

    def learn(self, warps: np.ndarray, known: np.ndarray) -> None:
        """These warps leave a barrier."""
        self.known[warps] = np.maximum(self.known[warps], known[warps // self.warps])

    def fence(self, lanes) -> None:
        """What these lanes' warps know of has been made visible to other CTAs."""
        warps = np.unique(self.warp[lanes])
        self.known[warps, warps % self.warps] = self.clock[warps]
        base = self.first_warp + warps // self.warps * self.warps
        for v in range(self.warps):
            np.maximum.at(self.fences, base + v, self.known[warps, v])
        self.clock[warps] += 1
        self._stamp = None

    def unordered(self, old: np.ndarray, lanes: np.ndarray):
        """Where the stamps `old` (a row a lane) are not before what the lanes do now.

        **Returns:** row and column numbers, or None.
        """
        maybe = (old >> np.int64(32)) != self.thread[lanes][:, None]
        maybe &= old != 0
        if not maybe.any():
            return None
        rows, columns = np.nonzero(maybe)
        stamp = old[rows, columns]
        mine = self.warp[lanes[rows]]
        bad = (stamp & _CLOCK) > self.seen(stamp, mine)
        if not bad.any():
            return None
        return rows[bad], columns[bad]

    def seen(self, stamp: np.ndarray, mine: np.ndarray) -> np.ndarray:
        """Up to which clock of the stamps' warps the warps `mine` know."""
        theirs = stamp >> np.int64(37)
        engine = theirs >= ENGINE
        if not engine.any():
            return self._seen_of_warps(theirs, mine)
        copies = self.known[mine, np.where(engine, self.warps + theirs - ENGINE, 0)]
        warps = self._seen_of_warps(np.where(engine, self.first_warp, theirs), mine)
        return np.where(engine, copies, warps)

    def _seen_of_warps(self, theirs, mine):
        theirs = theirs - self.first_warp
        inside = (theirs >= 0) & (theirs // self.warps == mine // self.warps)
        seen = self.known[mine, theirs % self.warps]
        seen = np.where(theirs == mine, self.clock[mine] - 1, seen)
        fenced = self.fences[theirs + self.first_warp]
        return np.where(inside, np.maximum(seen, np.where(theirs == mine, 0, fenced)), fenced)

    def knows(self, warp: int, stamp: np.ndarray) -> np.ndarray:
        """Which stamps of its own CTA are before what the warp does now."""
        cta = (stamp >> np.int64(37)) - self.first_warp
        mine = np.full(len(stamp), warp)
        return (cta // self.warps == warp // self.warps) & (
            (stamp & _CLOCK) <= self.seen(stamp, mine)
        )


class Shadow:
    """The stamps of one store."""

    def __init__(self, size: int, granule: int, across_ctas: bool):
        count = -(-size // granule)
        count = -(-count // 64) * 64
        self.granule = granule
        self.across_ctas = across_ctas
        self.write = np.zeros(count, np.int64)
        self.atomic = np.zeros(count, np.int64)
        self.read = np.zeros(count, np.int64)
        self.other = np.zeros(count, np.int64)  # a read by another warp than `read`'s
        self.write_at = np.full(count, -1, np.int32)  # the instruction
        self.any_atomic = False

    def rows(self, stamps: np.ndarray, at: np.ndarray, total: int) -> np.ndarray:
        count = max(total // self.granule, 1)
        return stamps.reshape(-1, count)[at // (self.granule * count)]

    def put(self, stamps: np.ndarray, at: np.ndarray, total: int, value: np.ndarray) -> None:
        count = max(total // self.granule, 1)
        stamps.reshape(-1, count)[at // (self.granule * count)] = value[:, None]

    def clash(self, stamps, at, total, clocks: Clocks, lanes):
        """Rows, columns and stamps of earlier accesses that are not before this one."""
        old = self.rows(stamps, at, total)
        if self.across_ctas:
            if not old.any():
                return None
        elif ((old & _CLOCK) <= clocks.floor[lanes][:, None]).all():
            return None
        found = clocks.unordered(old, lanes)
        return None if found is None else (*found, old)

    def on_read(self, at, total, clocks: Clocks, lanes, describe) -> None:
        self.check_read(at, total, clocks, lanes, describe)
        self.note_read(at, total, clocks, lanes)

    def check_read(self, at, total, clocks: Clocks, lanes, describe) -> None:
        self.refuse(self.write, "wrote", "reads", at, total, clocks, lanes, describe)
        if self.any_atomic:
            self.refuse(self.atomic, "changed", "reads", at, total, clocks, lanes, describe)

    def note_read(self, at, total, clocks: Clocks, lanes) -> None:
        mine = clocks.stamp[lanes]
        old = self.rows(self.read, at, total)
        self.put(self.read, at, total, mine)
        now = self.rows(self.read, at, total)
        warp = (mine >> np.int64(37))[:, None]
        lost = (now >> np.int64(37)) != warp  # another warp's stamp took the place of mine
        older = ((old >> np.int64(37)) != warp) & (old != 0) & ~lost
        keep = np.where(lost, mine[:, None], np.where(older, old, 0))
        if keep.any():
            self.keep_other(at, total, keep)

    def keep_other(self, at, total, keep) -> None:
        count = max(total // self.granule, 1)
        index = (at // self.granule)[:, None] + np.arange(count)
        used = keep != 0
        self.other[index[used]] = keep[used]

    def on_write(self, at, total, clocks: Clocks, lanes, describe, same, index: int) -> None:
        """`same()` tells for each place whether memory holds the new value already."""
        self.refuse(self.write, "wrote", "writes", at, total, clocks, lanes, describe, same)
        self.refuse(self.read, "read", "writes", at, total, clocks, lanes, describe)
        self.refuse(self.other, "read", "writes", at, total, clocks, lanes, describe)
        if self.any_atomic:
            self.refuse(self.atomic, "changed", "writes", at, total, clocks, lanes, describe)
        self.put(self.write, at, total, clocks.stamp[lanes])
        self.put(self.write_at, at, total, np.full(len(lanes), index, np.int32))

    def on_atomic(self, at, total, clocks: Clocks, lanes, describe) -> None:
        self.any_atomic = True
        self.refuse(self.write, "wrote", "changes", at, total, clocks, lanes, describe)
        self.refuse(self.read, "read", "changes", at, total, clocks, lanes, describe)
        self.refuse(self.other, "read", "changes", at, total, clocks, lanes, describe)
        self.put(self.atomic, at, total, clocks.stamp[lanes])

    def refuse(self, stamps, did, does, at, total, clocks, lanes, describe, same=None):
        found = self.clash(stamps, at, total, clocks, lanes)
        if found is None:
            return
        rows, columns, old = found
        if same is not None:
            differs = ~same()[rows]
            if not differs.any():
                return
            rows, columns = rows[differs], columns[differs]
        row, column = int(rows[0]), int(columns[0])
        byte = int(at[row]) + column * self.granule
        raise Race(describe(byte, self.granule), did, does, old[row, column], row, self, byte)


class Race(Misstep):
    """Two accesses that nothing orders; the machine names the other thread."""

    def __init__(self, place, did, does, stamp, row, shadow, byte):
        super().__init__(f"race on {place}", row)
        self.did, self.does = did, does
        self.thread = int(stamp) >> 32
        self.instruction = -1
        if did == "wrote":
            self.instruction = int(shadow.write_at[byte // shadow.granule])
