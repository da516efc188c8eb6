"""Products of wgmma in flight: which registers and which shared memory they hold.

Until the `wait_group` that covers a product, its accumulators may be neither read nor written,
its operands in registers not written, and its operands in shared memory not either. A `mov` is
no look at an accumulator: it carries the ban along. Registers are the PTX's own; what ptxas
makes of them is not seen.
"""

import dataclasses
import functools
import operator

import numpy as np

from ._fault import Misstep

CHUNK = 16  # bytes of shared memory that are read at once


@dataclasses.dataclass(eq=False)
class Product:
    """One wgmma of one warpgroup, in flight."""

    results: frozenset  # numbers of registers
    sources: frozenset
    owners: int  # bits of the warps that have not waited
    at: np.ndarray  # chunks of shared memory that all its warps read
    own: list  # and those of one warp each, its 16 rows
    index: int
    lane: int
    what: str = "a wgmma"
    until: str = "wgmma.wait_group"

    def holds(self, at: int) -> bool:
        parts = [self.at, *(part for own in self.own for part in own)]
        return any((part == at).any() for part in parts)


class Products:
    """What is in flight in a batch."""

    def __init__(self):
        self.all: list[Product] = []
        self.open: dict[int, list] = {}  # warp -> products not committed
        self.groups: dict[int, list] = {}  # warp -> lists of them
        self.results: dict[int, int] = {}  # register -> bits of warps
        self.sources: dict[int, int] = {}
        self.fenced = 0  # bits of warps: a fence since their last group
        self.unfenced: dict[int, int] = {}  # register -> bits: written, and no fence since
        self.copies: dict[int, tuple] = {}  # register -> (bits, Product): a mov of a result

    def start(self, m, product: Product, warps) -> None:
        self.all.append(product)
        for part in product.own:
            for at in part:
                m.proxy.reading[at // CHUNK] += 1
        m.proxy.start_reading(product)
        for warp in warps:
            self.open.setdefault(warp, []).append(product)
        self.watch(product)

    def watch(self, product: Product) -> None:
        for table, registers in ((self.results, product.results), (self.sources, product.sources)):
            for register in registers:
                table[register] = table.get(register, 0) | product.owners

    def commit(self, m) -> None:
        self.fenced &= ~m.running_bits
        for warp in m.running_list:
            self.groups.setdefault(warp, []).append(self.open.pop(warp, []))

    def wait(self, m, keep: int) -> None:
        for warp in m.running_list:
            groups = self.groups.get(warp, [])
            done = [p for group in groups[: max(len(groups) - keep, 0)] for p in group]
            self.groups[warp] = groups[max(len(groups) - keep, 0) :]
            over = []
            for product in done:
                product.owners &= ~(1 << warp)
                over += product.own[warp % 4]
                if not product.owners:
                    over.append(product.at)
                    m.proxy.readers.remove(product)
            for at in over:
                m.proxy.stop_reading(m, at, 32 * warp)
        self.all = [p for p in self.all if p.owners]
        self.copies = {r: (b & p.owners, p) for r, (b, p) in self.copies.items() if b & p.owners}
        self.results, self.sources = {}, {}
        for product in self.all:
            self.watch(product)
        for register, (bits, _) in self.copies.items():
            self.results[register] = self.results.get(register, 0) | bits

    def check(self, m, index: int) -> None:
        """An instruction is about to run: may it touch the registers that it names?"""
        named = m.program.named[index]
        if not named.isdisjoint(m.program.operands):
            self.note_writes(m, index)
        if named.isdisjoint(self.results) and named.isdisjoint(self.sources):
            return
        reads, writes, moves = m.program.registers_of[index]
        running = m.running_bits
        for register in reads:
            if not (bits := self.results.get(register, 0) & running):
                continue
            if moves:
                product = self.producer(register, bits)
                for target in writes:
                    old = self.copies.get(target, (0, product))[0]
                    self.copies[target] = old | bits, product
                    self.results[target] = self.results.get(target, 0) | bits
                return
            self.refuse(m, register, bits, "reads an accumulator")
        for register in writes:
            if register in self.copies:  # the copy is thrown away
                self.forget(register, running)
            if bits := self.results.get(register, 0) & running:
                self.refuse(m, register, bits, "writes to an accumulator")
            if bits := self.sources.get(register, 0) & running:
                self.refuse(m, register, bits, "writes to an operand")

    def check_product(self, m, sources, results, kept: bool) -> None:
        """A wgmma starts. Accumulators may follow one another; other registers that are in
        flight are out of reach, and those written by other instructions need a fence."""
        running = m.running_bits
        for register in sources:
            if bits := self.results.get(register, 0) & running:
                self.refuse(m, register, bits, "reads an accumulator")
        for register in results:
            if bits := self.sources.get(register, 0) & running:
                self.refuse(m, register, bits, "writes to an operand")
        # The compiler moves a conversion past a fence, so one since the last group is enough.
        running &= ~self.fenced
        for register in (*sources, *(results if kept else ())):
            if bits := self.unfenced.get(register, 0) & running:
                name = m.program.kernel.registers[register].name
                raise Misstep(
                    f"no wgmma.fence: {name} is an operand, and was written since the last one",
                    32 * ((bits & -bits).bit_length() - 1),
                )

    def note_writes(self, m, index: int) -> None:
        """Registers of products that an instruction writes to: a `wgmma.fence` must follow. A
        `mov` is as good as what it copies."""
        reads, writes, moves = m.program.registers_of[index]
        running = m.running_bits
        for register in writes:
            if register in m.program.operands:
                bits = running
                if m.program.kernel.code[index].mods[0] == "mov":
                    bits = self.unfenced.get(reads[0], 0) & running if moves else 0
                self.unfenced[register] = self.unfenced.get(register, 0) & ~running | bits

    def fence(self, m) -> None:
        running = m.running_bits
        self.fenced |= running
        self.unfenced = {r: bits & ~running for r, bits in self.unfenced.items() if bits & ~running}

    def forget(self, register: int, bits: int) -> None:
        left = self.copies[register][0] & ~bits
        self.copies[register] = left, self.copies[register][1]
        own = (p.owners for p in self.all if register in p.results)
        self.results[register] = functools.reduce(operator.or_, own, left)

    def producer(self, register: int, bits: int) -> Product:
        for product in self.all:
            if product.owners & bits and (register in product.results | product.sources):
                return product
        return self.copies[register][1]

    def refuse(self, m, register: int, bits: int, does: str) -> None:
        product = self.producer(register, bits)
        warp = (bits & -bits).bit_length() - 1
        name = m.program.kernel.registers[register].name
        raise Misstep(
            f"{does} of a wgmma that is in flight, {name}: it was started at "
            f"{m.place(product.index)}; wgmma.wait_group comes first",
            32 * warp,
        )
