"""Memory of the pretended GPU: bytes, and for each byte whether it was ever written.

Addresses are made up. Bits 40 and up name a region: one for shared memory, one for local
memory, one for parameters, and one for each array. An array starts in the middle of its
region of a terabyte, so that an address computed wrongly still says which array it came
from.
"""

import dataclasses

import numpy as np

from ._fault import Misstep

REGION_BITS = 40
SHARED, LOCAL, PARAM, FIRST_ARRAY = 1, 2, 3, 16
MIDDLE = 1 << (REGION_BITS - 1)
SHARED_BASE = 1024  # so that an address below the first byte is seen to be wrong
LOCAL_BASE = 1024
_ONES = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class Store:
    """A flat piece of memory, read and written at many places at once.

    Places are byte offsets that the caller has checked: inside, and a multiple of the
    access. Bytes that nobody wrote hold 0xff: NaN in every float type.
    """

    def __init__(self, size: int):
        size = -(-max(size, 1) // 64) * 64
        self.data = np.full(size, 0xFF, np.uint8)
        self.valid = np.zeros(size, np.uint8)  # 1: written
        self._views = {}

    def view(self, which: str, size: int, count: int) -> np.ndarray:
        """`data` or `valid` as rows of `count` words of `size` bytes."""
        key = which, size, count
        if key not in self._views:
            words = getattr(self, which).view(f"u{size}")
            self._views[key] = words if count == 1 else words.reshape(-1, count)
        return self._views[key]

    def gather(self, at: np.ndarray, size: int, count: int) -> np.ndarray:
        """Words at the byte offsets `at`: shape (places,) or (places, count)."""
        return self.view("data", size, count)[at // (size * count)]

    def scatter(self, at: np.ndarray, size: int, count: int, values: np.ndarray) -> None:
        where = at // (size * count)
        self.view("data", size, count)[where] = values
        self.mark(at, size * count)

    def mark(self, at: np.ndarray, total: int) -> None:
        """The bytes have been written."""
        size = min(total, 8)
        self.view("valid", size, total // size)[at // total] = _ONES[size]

    def unwritten(self, at: np.ndarray, total: int) -> int | None:
        """The first place of `at` with a byte that nobody wrote, if there is one."""
        size = min(total, 8)
        good = self.view("valid", size, total // size)[at // total] == _ONES[size]
        if good.all():
            return None
        if good.ndim == 2:
            good = good.all(1)
        return int(np.argmin(good))


@dataclasses.dataclass
class Array:
    """An array of the kernel's arguments, or a variable of the module."""

    name: str
    base: int  # its address
    start: int  # its offset in the store
    size: int
    tracked: bool  # starts unwritten: must be written before it is read
    whole: bool = False  # must be written whole by the end
    constant: bool = False
    touched: bool = False  # the kernel wrote to it


class Global:
    """All arrays in one store, each in its own region of addresses."""

    def __init__(self):
        self.arrays: list[Array] = []
        self.store = Store(0)
        self.used = 0
        self.bases = np.zeros(0, np.int64)
        self.starts = np.zeros(0, np.int64)
        self.sizes = np.zeros(0, np.int64)

    def add(self, name: str, data: np.ndarray, *, tracked=False, constant=False) -> Array:
        """Copies the bytes `data` in. `tracked` ones are poisoned instead."""
        base = ((FIRST_ARRAY + len(self.arrays)) << REGION_BITS) + MIDDLE
        array = Array(name, base, self.used, data.size, tracked, constant)
        self.arrays.append(array)
        grown = Store(self.used + -(-data.size // 256) * 256)
        grown.data[: self.used] = self.store.data[: self.used]
        grown.valid[: self.used] = self.store.valid[: self.used]
        if not tracked:
            grown.data[self.used : self.used + data.size] = data
            grown.valid[self.used : self.used + data.size] = 1
        self.store, self.used = grown, self.used + -(-data.size // 256) * 256
        self.bases = np.array([a.base for a in self.arrays], np.int64)
        self.starts = np.array([a.start for a in self.arrays], np.int64)
        self.sizes = np.array([a.size for a in self.arrays], np.int64)
        return array

    def bytes_of(self, array: Array) -> np.ndarray:
        return self.store.data[array.start : array.start + array.size]

    def first_unwritten(self, array: Array) -> int | None:
        valid = self.store.valid[array.start : array.start + array.size]
        return None if valid.all() else int(np.argmin(valid))

    def locate(self, address: np.ndarray, total: int, verb: str):
        """Byte offsets in the store, and the number of each address's array.

        All in one array gives a plain int. **Raises:** `Misstep`, whose lane counts the
        places, for an address outside of its array, or no multiple of `total`.
        """
        which = (address >> REGION_BITS) - FIRST_ARRAY
        first = int(which[0])
        if (which == first).all() and 0 <= first < len(self.arrays):
            array = self.arrays[first]
            offset = address - array.base
            if int(offset.min()) < 0 or int(offset.max()) + total > array.size:
                self.out_of_bounds(address, total, verb)
            if (offset & (total - 1)).any():
                misaligned(offset, total, f"`{array.name}`", verb)
            return offset + array.start, first
        if ((which < 0) | (which >= len(self.arrays))).any():
            self.out_of_bounds(address, total, verb)
        offset = address - self.bases[which]
        if ((offset < 0) | (offset + total > self.sizes[which])).any():
            self.out_of_bounds(address, total, verb)
        if (offset & (total - 1)).any():
            bad = int(np.argmax((offset & (total - 1)) != 0))
            misaligned(offset, total, f"`{self.arrays[int(which[bad])].name}`", verb)
        return offset + self.starts[which], which

    def out_of_bounds(self, address, total, verb):
        which = (address >> REGION_BITS) - FIRST_ARRAY
        inside = (which >= 0) & (which < len(self.arrays))
        if not inside.all():
            place = int(np.argmin(inside))
            value = int(address[place]) & 0xFFFFFFFFFFFFFFFF
            raise Misstep(f"{verb} {total} bytes at {value:#x}, which is in no array", place)
        offset = address - self.bases[which]
        bad = (offset < 0) | (offset + total > self.sizes[which])
        place = int(np.argmax(bad))
        array, first = self.arrays[int(which[place])], int(offset[place])
        last = first + total - 1
        raise Misstep(
            f"out of bounds: {verb} bytes {first} to {last} of `{array.name}`, which has "
            f"{array.size} bytes",
            place,
        )

    def describe(self, at: int, total: int) -> str:
        """Names bytes by their offset in the store."""
        for array in self.arrays:
            if array.start <= at < array.start + max(array.size, 1):
                first = at - array.start
                return f"bytes {first} to {first + total - 1} of `{array.name}`"
        return f"bytes at {at}"


def misaligned(offset, total, name, verb):
    place = int(np.argmax((offset & (total - 1)) != 0))
    raise Misstep(
        f"misaligned: {verb} {total} bytes at byte {int(offset[place])} of {name}, which is "
        f"no multiple of {total}",
        place,
    )


class Banked:
    """Shared or local memory: a store with one bank a CTA, or a lane."""

    def __init__(self, name: str, banks: int, size: int, base: int):
        self.name = name
        self.size = size
        self.base = base
        self.stride = -(-max(size, 1) // 64) * 64
        self.store = Store(banks * self.stride)

    def locate(self, address: np.ndarray, bank: np.ndarray, total: int, verb: str):
        """Byte offsets in the store. **Raises:** `Misstep`, whose lane counts the places."""
        offset = address - self.base
        if int(offset.min()) < 0 or int(offset.max()) + total > self.size:
            place = int(np.argmax((offset < 0) | (offset + total > self.size)))
            first = int(offset[place])
            raise Misstep(
                f"out of bounds: {verb} bytes {first} to {first + total - 1} of {self.name} "
                f"memory, of which there are {self.size} bytes",
                place,
            )
        if (offset & (total - 1)).any():
            misaligned(offset, total, f"{self.name} memory", verb)
        return offset + bank * self.stride

    def describe(self, at: int, total: int) -> str:
        first = at % self.stride
        return f"bytes {first} to {first + total - 1} of {self.name} memory"
