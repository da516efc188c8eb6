"""Bulk copies, `cp.async.bulk` and `cp.reduce.async.bulk`, with a tensor map or flat.

A load reads its source when it starts and lands when its mbarrier's phase ends (`_mbarrier`).
A store reads shared memory when it starts; nobody may write to what it reads until a
`wait_group` has covered it, and only a wait without `.read` makes the result visible in global
memory, or the end of the kernel.
"""

import collections
import dataclasses

import numpy as np

from ._access import address_reader, apply_atomic, atomic_function, on_lanes, touch, unwritten
from ._descriptor import Box, swizzled, tensor_map
from ._fault import Misstep, Unsupported
from ._mbarrier import attempt, find
from ._memory import PARAM, REGION_BITS
from ._parse import Tensor
from ._proxy import CHUNK
from ._types import reader

_LOW = np.int64((1 << REGION_BITS) - 1)
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_TYPES = ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")


@dataclasses.dataclass(eq=False)
class Flight:
    """A load on its way."""

    at: np.ndarray  # chunks of shared memory
    words: np.ndarray  # (chunks, 16) bytes
    bytes: int
    index: int
    lane: int


@dataclasses.dataclass(eq=False)
class Store:
    """A store, or a reduction, that has started."""

    at: np.ndarray  # chunks of shared memory that it reads
    places: np.ndarray  # in global memory
    words: np.ndarray  # (places, bytes) bytes
    reduction: tuple | None  # its function and type
    index: int
    lane: int
    what: str = "a bulk store"
    until: str = "cp.async.bulk.wait_group"

    def holds(self, at: int) -> bool:
        return bool((self.at == at).any())


class BulkGroups:
    """The stores of one lane."""

    def __init__(self, lane: int):
        self.lane = lane
        self.open: list = []
        self.groups: collections.deque = collections.deque()

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, m, keep: int, only_read: bool) -> None:
        for group in list(self.groups)[: max(len(self.groups) - keep, 0)]:
            for store in group:
                if store in m.proxy.readers:
                    m.proxy.stop_reading(m, store.at, self.lane)
                    m.proxy.readers.remove(store)
                if not only_read:
                    _write(m, store)
            if not only_read:
                self.groups.popleft()

    def finish(self, m) -> None:
        """The kernel's end: all that has been read is written."""
        for group in (*self.groups, self.open):
            for store in group:
                try:
                    _write(m, store)
                except Misstep as misstep:
                    raise m.fault(store.index, misstep) from None


def _write(m, store: Store) -> None:
    memory, at = m.glob.store, store.places
    if not at.size:
        return
    lanes = np.full(len(at), store.lane)
    unit = store.words.shape[1]
    size, count = min(unit, 8), max(unit // 8, 1)
    new = np.ascontiguousarray(store.words).view(f"u{size}").reshape(len(at), count)
    new = new[:, 0] if count == 1 else new
    shadow, describe = m.launch.shadow, m.glob.describe

    def same():
        kept = memory.gather(at, size, count) == new
        return kept if count == 1 else kept.all(1)

    try:
        if store.reduction is None:
            shadow.on_write(at, unit, m.clocks, lanes, describe, same, store.index)
        else:
            place = memory.unwritten(at, unit)
            if place is not None:
                described = describe(int(at[place]), unit)
                raise Misstep(f"uninitialised: adds to {described}, which nobody has written")
            shadow.on_atomic(at, unit, m.clocks, lanes, describe)
            new = apply_atomic(
                store.reduction[0], memory.gather(at, size, count), new, *store.reduction[1:]
            )
    except Misstep as misstep:
        misstep.lane = store.lane
        raise
    memory.scatter(at, size, count, new)


def build(ins):
    """The builder for any `cp` with `bulk` in its name."""
    mods = ins.mods
    if "prefetch" in mods:
        return lambda m: None
    if "commit_group" in mods:
        return _commit
    if "wait_group" in mods:
        keep, only_read = ins.args[0].value, "read" in mods
        return lambda m: _wait(m, keep, only_read)
    if any(x.startswith(("multicast", "cta_group", "im2col", "tile::")) for x in mods):
        raise Unsupported("this kind of bulk copy")
    if "mbarrier::complete_tx::bytes" in mods:
        if "global" not in mods:
            raise Unsupported("copies between the CTAs of a cluster")
        return _load(ins)
    if "bulk_group" in mods:
        return _store(ins)
    raise Unsupported("this kind of bulk copy")


def _groups(m, lane: int) -> BulkGroups:
    if lane not in m.proxy.groups:
        m.proxy.groups[lane] = BulkGroups(lane)
    return m.proxy.groups[lane]


def _commit(m):
    for lane in m.active.tolist():
        _groups(m, lane).commit()


def _wait(m, keep: int, only_read: bool):
    for lane in m.active.tolist():
        if lane in m.proxy.groups:
            m.proxy.groups[lane].wait(m, keep, only_read)


# ---------------------------------------------------------------- operands


def _what(place, size):
    """A function of (machine, lanes) that lists, for each lane, the box of global memory that it
    copies, its swizzle and its type, "b8" where nobody says."""
    if not isinstance(place, Tensor):
        return _flat(address_reader(place), reader(size, "u32"))
    address = address_reader(place.map)
    gets = [reader(x, "s32") for x in place.coordinates]

    def read(m, lanes):
        where = address(m, lanes)
        places = np.stack([m.spread(get(m))[lanes] for get in gets], axis=1)
        return [_box_of(m, *both) for both in zip(where.tolist(), places.tolist(), strict=True)]

    return read


def _box_of(m, address: int, place):
    if address >> REGION_BITS != PARAM:
        raise Unsupported("tensor maps outside of the parameters")
    first = address & int(_LOW)
    found = tensor_map(m.launch.params.data[first : first + 128].tobytes())
    if len(found.sizes) != len(place):
        raise Misstep(f"{len(place)} coordinates for a tensor map of {len(found.sizes)}", 0)
    return found.at(place), found.span, found.type


def _flat(address, size):
    def read(m, lanes):
        sizes = m.spread(size(m))[lanes].astype(np.int64)
        if (bad := (sizes % CHUNK != 0) | (sizes == 0)).any():
            row = int(np.argmax(bad))
            raise Misstep(f"a bulk copy of {int(sizes[row])} bytes: no multiple of {CHUNK}", row)
        out = []
        for first, total in zip(address(m, lanes).tolist(), sizes.tolist(), strict=True):
            offset = np.arange(0, total, CHUNK, dtype=np.int64)
            out.append((Box(first + offset, offset, CHUNK, total), CHUNK, "b8"))
        return out

    return read


def _one_a_warp(m, lanes, what: str) -> None:
    warps = m.warp_of[lanes]
    if (again := warps[1:] == warps[:-1]).any():
        row = int(np.argmax(again)) + 1
        count = int(np.count_nonzero(warps == warps[row]))
        raise Misstep(f"{count} threads of a warp start the same {what}: elect one", row)


def _chunks(m, start: int, lane: int, box: Box, span: int, verb: str):
    """Places in the store of the chunks of a tile at the address `start` of shared memory."""
    align = CHUNK if span == CHUNK else 128
    if start % align:
        raise Misstep(f"misaligned: {verb} shared memory at {start}, no multiple of {align}")
    address = swizzled(start + np.arange(0, box.bytes, CHUNK, dtype=np.int64), span)
    return m.shared.locate(address, np.full(len(address), m.cta_of[lane]), CHUNK, verb)


def _as(row: int, function, *args):
    """Calls it; a misstep in it is of the lane `row`."""
    try:
        return function(*args)
    except Misstep as misstep:
        misstep.lane = row
        raise


# ---------------------------------------------------------------- loads


def _load(ins):
    flat = "tensor" not in ins.mods
    target, mbarrier = address_reader(ins.args[0]), address_reader(ins.args[3 if flat else 2])
    what = _what(ins.args[1], ins.args[2])

    def body(m, lanes):
        _one_a_warp(m, lanes, "load")
        starts = (target(m, lanes) & _LOW).tolist()
        at = m.shared.locate(mbarrier(m, lanes) & _LOW, m.cta_of[lanes], 8, "uses an mbarrier in")
        boxes = what(m, lanes)
        for barrier, rows in find(m, at, lanes):
            _refuse_unfenced(m, barrier, rows)
            for row in rows.tolist():
                lane = int(lanes[row])
                flight = _as(row, _bring, m, lane, starts[row], *boxes[row][:2], ins.index)
                barrier.flights.append(flight)
                m.proxy.moved()
            attempt(rows, lambda b=barrier: b.settle(m))

    return on_lanes(body)


def _refuse_unfenced(m, barrier, rows):
    if m.proxy.unfenced and m.proxy.writer[barrier.at // m.proxy.granule]:
        raise Misstep(
            f"{barrier.name(m)} was made without a fence.mbarrier_init after it: a bulk copy may "
            "not see it",
            int(rows[0]),
        )


def _bring(m, lane: int, start: int, box: Box, span: int, index: int) -> Flight:
    at = _chunks(m, start, lane, box, span, "copies to")
    data = np.zeros(box.bytes, np.uint8)
    if box.address.size:
        places, which = m.glob.locate(box.address, box.unit, "reads")
        unwritten(m, places, which, box.unit)
        lanes = np.full(len(places), lane)
        m.launch.shadow.on_read(places, box.unit, m.clocks, lanes, m.glob.describe)
        words = m.glob.store.gather(places, min(box.unit, 8), max(box.unit // 8, 1))
        pieces = np.ascontiguousarray(words).view(np.uint8).reshape(-1, box.unit)
        data.reshape(-1, box.unit)[box.offset // box.unit] = pieces
    m.proxy.check_write(m, at, np.full(len(at), lane), index)
    m.proxy.flying[at // CHUNK] = True
    return Flight(at, data.reshape(-1, CHUNK), box.bytes, index, lane)


# ---------------------------------------------------------------- stores and reductions


def _store(ins):
    source = address_reader(ins.args[1])
    flat = "tensor" not in ins.mods
    what = _what(ins.args[0], ins.args[2] if flat else None)
    which = next((x for x in ins.mods if x in _REDUCTIONS), None)
    kind = next((x for x in ins.mods if x in _TYPES), "b8")
    if (ins.mods[1] == "reduce") != (which is not None):
        raise Unsupported("this kind of bulk copy")

    def body(m, lanes):
        if flat:
            _one_a_warp(m, lanes, "bulk copy")
        starts, boxes = (source(m, lanes) & _LOW).tolist(), what(m, lanes)
        # The tensor forms are one instruction a warp, also where no thread is elected.
        _, rows = np.unique(m.warp_of[lanes], return_index=True)
        for row in rows.tolist():
            lane, (box, span, name) = int(lanes[row]), boxes[row]
            store = _as(row, _send, m, lane, starts[row], box, span, ins.index)
            if which is not None:
                name = kind if flat else name
                store.reduction = atomic_function(which, name), name
                store.what = "a bulk reduction"
            m.proxy.start_reading(store)
            _groups(m, lane).open.append(store)

    return on_lanes(body)


def _send(m, lane: int, start: int, box: Box, span: int, index: int) -> Store:
    chunks = _chunks(m, start, lane, box, span, "copies from")
    used = np.unique(box.offset // CHUNK)  # what is clipped need not be there
    at, tile = chunks[used], np.zeros((len(chunks), CHUNK), np.uint8)
    if not used.size:
        return Store(at, box.address, tile[:0], None, index, lane)
    m.proxy.check_read(m, at, np.full(len(at), lane), "a bulk store")
    tile[used] = m.shared.store.gather(at, 8, 2).view(np.uint8).reshape(-1, CHUNK)
    places, which = m.glob.locate(box.address, box.unit, "writes")
    touch(m, which)
    words = tile.reshape(-1, box.unit)[box.offset // box.unit]
    return Store(at, places, words, None, index, lane)
