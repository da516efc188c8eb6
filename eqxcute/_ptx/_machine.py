"""Runs a kernel: lanes in groups that stand at the same instruction.

A batch of CTAs runs at a time, all their lanes in one set of arrays. The group of lanes at
the lowest instruction goes first, so that lanes which parted meet again where their paths
join. A branch, a barrier or an instruction that joins the lanes of a warp may split a group.
"""

import functools

import numpy as np

from ._fault import KernelFault, Misstep
from ._memory import LOCAL, LOCAL_BASE, PARAM, REGION_BITS, SHARED, SHARED_BASE, Banked
from ._parse import Kernel, Module, Sym, parse
from ._proxy import COLUMNS, MBARRIER, Proxy
from ._races import ENGINE, Clocks, Race, Shadow
from ._registers import operands_of, registers_of
from ._types import UNSIGNED, width

LANES = 2048  # a batch has about so many: enough to make NumPy's overhead small
BATCH_BYTES = 1 << 25  # of shared memory, in a batch
_NEVER = 1 << 30  # the place of a lane that has left the kernel
_FAIR = 1024  # so often the last group goes first: a spinning lane may wait for it
DEFAULT_BUDGET = 3_000_000  # instructions of a batch: about half a minute


class Program:
    """A kernel as a list of Python functions, one an instruction."""

    def __init__(self, kernel: Kernel, module: Module):
        from ._build import build  # the tables of instructions; they import this module

        self.kernel = kernel
        self.module = module
        self.ops, self.control = [], []
        for instruction in kernel.code:
            op, control = build(instruction, kernel)
            self.ops.append(op)
            self.control.append(control)
        count = len(self.ops)
        self.stop = [count] * (count + 1)
        for i in range(count - 1, -1, -1):
            ends = i + 1 in kernel.labels or i + 1 == count or self.control[i + 1]
            self.stop[i] = i if self.control[i] else (i + 1 if ends else self.stop[i + 1])
        self.shared = self._shared_layout()
        self.local = self._layout("local", LOCAL_BASE)
        self.params = self._param_layout()
        self.granules = {space: self._granule(space) for space in ("global", "shared")}
        mods = [i.mods for i in kernel.code]
        # Whether anything but threads touches shared memory; whether registers can be in flight.
        self.has_proxy = any(x[0] in ("mbarrier", "wgmma") or "bulk" in x for x in mods)
        self.has_products = any(x[0] == "wgmma" for x in mods)
        if self.has_products:
            self.operands = operands_of(kernel.code)
            self.registers_of = [registers_of(i) for i in kernel.code]
            self.named = [frozenset((*r, *w)) for r, w, _ in self.registers_of]

    def _used(self):
        names = {arg.name for i in self.kernel.code for arg in _symbols(i.args)}
        return [v for n, v in self.module.variables.items() if n in names]

    def _layout(self, space: str, base: int):
        """Addresses of the variables of a space, and where the last one ends."""
        places, at = {}, base
        for variable in [*self._used(), *self.kernel.variables.values()]:
            if variable.space == space and variable.size:
                at = -(-at // variable.align) * variable.align
                places[variable.name] = at
                at += variable.size
        return places, at - base

    def _shared_layout(self):
        places, size = self._layout("shared", SHARED_BASE)
        dynamic = [v for v in self._used() if v.space == "shared" and not v.size]
        start = size
        for variable in dynamic:  # all of them are one and the same memory
            start = -(-start // variable.align) * variable.align
        places.update({v.name: SHARED_BASE + start for v in dynamic})
        return places, size, start

    def _param_layout(self):
        places, at = {}, 0
        for variable in self.kernel.params:
            at = -(-at // variable.align) * variable.align
            places[variable.name] = at
            at += variable.size
        return places, at

    def _granule(self, space: str) -> int:
        """The smallest access to a space, in bytes."""
        from ._build import access_size

        sizes = [access_size(i, space) for i in self.kernel.code]
        return min((s for s in sizes if s), default=16)


def _symbols(args):
    for arg in args:
        if isinstance(arg, Sym):
            yield arg
        else:
            for inner in ("base", "items", "first"):
                value = getattr(arg, inner, None)
                if value is not None:
                    yield from _symbols(value if isinstance(value, tuple) else (value,))


@functools.lru_cache(maxsize=64)
def program(text: str, name: str) -> Program:
    """The kernel `name` of a PTX text, ready to run; kept for the next call."""
    module = parse(text)
    return Program(module.kernels[name], module)


class Launch:
    """One launch: a program, a grid, and what all its CTAs share."""

    def __init__(self, program, grid, block, dynamic_shared, params, memory, variables, budget):
        self.program = program
        self.grid, self.block = grid, block
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // 32)
        self.ctas = grid[0] * grid[1] * grid[2]
        _, static, start = program.shared
        self.dynamic_shared = dynamic_shared
        self.shared_bytes = start + dynamic_shared if dynamic_shared else max(static, start)
        self.memory = memory
        self.budget = budget
        self.variables = variables  # name -> Array: the module's own
        self.params = params  # bytes, laid out
        self.fences = np.zeros(self.ctas * self.warps, np.int64)
        self.shadow = Shadow(memory.store.data.size, program.granules["global"], True)

    def run(self) -> None:
        batch = max(1, LANES // (self.warps * 32))
        batch = max(1, min(batch, BATCH_BYTES // max(self.shared_bytes, 1)))
        with np.errstate(all="ignore"):
            for first in range(0, self.ctas, batch):
                Machine(self, first, min(batch, self.ctas - first)).run()


class Machine:
    """A batch of CTAs. Instructions are functions of it; see `_build`."""

    def __init__(self, launch: Launch, first: int, count: int):
        self.launch = launch
        self.program = launch.program
        self.first, self.ctas, self.warps = first, count, launch.warps
        self.lanes = count * launch.warps * 32
        self.all_lanes = np.arange(self.lanes)
        per_cta = launch.warps * 32
        self.cta_of = self.all_lanes // per_cta
        self.thread_of = self.all_lanes % per_cta
        self.warp_of = self.all_lanes >> 5
        self.alive = self.thread_of < launch.threads
        self.live = np.flatnonzero(self.alive)
        self.pc = np.where(self.alive, 0, _NEVER)
        self.parked = np.zeros(self.lanes, bool)  # waits for the rest of its warp
        self.waiting = np.full(self.lanes, -1, np.int16)  # the barrier it waits at
        self.waits_at = np.full(self.lanes, -1, np.int32)  # that barrier's instruction
        self.barriers = {}
        self.mask = None  # None: every lane that has not left
        self._active = self._running = self._bits = None  # made when asked for
        self.R = [self._zeros(r.type) for r in self.program.kernel.registers]
        self.carry = np.zeros(self.lanes, bool)  # of add.cc
        self.call_params = {}
        self.glob = launch.memory
        self.shared = Banked("shared", count, launch.shared_bytes, SHARED_BASE)
        self.local = Banked("local", self.lanes, self.program.local[1], LOCAL_BASE)
        columns = COLUMNS if self.program.has_proxy else 0
        self.clocks = Clocks(count, launch.warps, first, launch.fences, columns)
        self.shared_shadow = Shadow(
            self.shared.store.data.size, self.program.granules["shared"], False
        )
        self.copies = None  # of cp.async, made by the first one
        self.proxy = Proxy(self) if self.program.has_proxy else None
        self.limits = np.zeros(count * launch.warps, np.int64)  # of registers, by setmaxnreg
        self.steps = 0
        self.turns = 0
        self.tried = set()  # places of parked lanes that were tried in vain
        self._specials = {}

    @functools.cached_property
    def _zero(self):
        zero = {size: np.zeros(self.lanes, t) for size, t in UNSIGNED.items()}
        return {**zero, "pred": np.zeros(self.lanes, bool)}

    def _zeros(self, name: str):
        return self._zero["pred" if name == "pred" else width(name)]

    # -------------------------------------------------------------- lanes

    @property
    def active(self) -> np.ndarray:
        """Numbers of the lanes that run now."""
        if self.mask is None:
            return self.live
        if self._active is None:
            self._active = np.flatnonzero(self.mask)
        return self._active

    @property
    def running_warps(self):
        """Numbers of the warps that have an active lane; None if all have."""
        if self._running is None:
            present = np.zeros(self.lanes // 32, bool)
            present[self.warp_of[self.active]] = True
            self._running = False if present.all() else np.flatnonzero(present)
        return None if self._running is False else self._running

    @property
    def running_list(self) -> list[int]:
        """The same, also where all have."""
        warps = self.running_warps
        return list(range(self.lanes // 32)) if warps is None else np.asarray(warps).tolist()

    @property
    def running_bits(self) -> int:
        """The same as bits of a number."""
        if self._bits is None:
            self._bits = sum(1 << warp for warp in self.running_list)
        return self._bits

    def set_mask(self, mask) -> None:
        self.mask, self._active, self._running, self._bits = mask, None, None, None

    def spread(self, values) -> np.ndarray:
        """One entry a lane, also of a literal."""
        return values if len(values) == self.lanes else np.broadcast_to(values, (self.lanes,))

    def within(self, mask):
        """`mask` as `set_mask` wants it: None if all run, False if none."""
        mask = mask & (self.alive if self.mask is None else self.mask)
        count = np.count_nonzero(mask)
        if count == len(self.live):
            return None
        return mask if count else False

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        while (pc := self.choose()) is not None:
            self.run_group(pc)
        if self.proxy is not None:
            self.proxy.finish(self)

    def choose(self) -> int | None:
        """Sets the mask to the group that runs next. None: all lanes have left."""
        blocked = self.parked | (self.waiting >= 0)
        place = np.where(blocked, _NEVER, self.pc)
        pc = int(place.min())
        if pc == _NEVER:
            if not len(self.live):
                return None
            if (pc := self.retry()) is None:
                return self.choose()
        else:
            self.tried.clear()
            self.turns += 1
            if self.turns % _FAIR == 0:
                pc = int(place[place < _NEVER].max())
        mask = (self.pc == pc) & (self.waiting < 0)
        self.parked &= ~mask
        self.set_mask(None if np.count_nonzero(mask) == len(self.live) else mask)
        return pc

    def retry(self) -> int | None:
        """Every lane waits. Some may go on, since others have left in the meantime; or since a
        wait that may fail does so (then None: choose again)."""
        places = sorted(set(self.pc[self.parked].tolist()) - self.tried)
        if not places:
            if self.proxy is not None and self.proxy.unstick(self):
                return None
            self.deadlock()
        self.tried.add(places[0])
        return places[0]

    def run_group(self, pc: int) -> None:
        ops, stop, labels = self.program.ops, self.program.stop, self.program.kernel.labels
        while True:
            end, i = stop[pc], pc
            flying = self.flying
            try:
                if flying is None:
                    for i in range(pc, end):
                        ops[i](self)
                else:
                    for i in range(pc, end):
                        flying.check(self, i)
                        ops[i](self)
                self.steps += end - pc + 1
                if self.steps > self.launch.budget:
                    raise Misstep(
                        f"{self.launch.budget} instructions have run: an endless loop, or "
                        "a budget too small",
                        int(self.active[0]),
                    )
                i = end
                if end == len(ops):
                    self.leave()
                    return
                if flying is not None:
                    flying.check(self, end)
                if end > pc and end in labels:  # others may join here
                    going = self.go(end)
                else:
                    going = ops[end](self)
            except Misstep as misstep:
                raise self.fault(i, misstep) from None
            if going is None:
                return
            pc = going

    @property
    def flying(self):
        """The products in flight, whose registers are watched; None in a kernel without any."""
        return None if self.proxy is None else self.proxy.products

    def leave(self) -> None:
        """The active lanes have reached the end."""
        lanes = self.active
        self.alive[lanes] = False
        self.pc[lanes] = _NEVER
        self.live = np.flatnonzero(self.alive)
        self.tried.clear()

    def go(self, pc: int):
        """The active lanes go on at `pc`; a step in a row if nobody else could be met."""
        if self.mask is None:
            return pc
        self.pc[self.mask] = pc
        return None

    # -------------------------------------------------------------- what lanes can ask

    def special(self, name: str) -> np.ndarray:
        """`%tid.x` and its like, without the percent sign."""
        if name in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo"):
            return np.full(self.lanes, self.steps, np.uint64)
        if name not in self._specials:
            from ._special import SPECIALS

            self._specials[name] = SPECIALS(self, name)
        return self._specials[name]

    def address_of(self, symbol: Sym) -> np.ndarray:
        """The address of a variable in its own space, as an array of length 1."""
        name = symbol.name
        for places in (self.program.shared[0], self.program.local[0], self.program.params[0]):
            if name in places:
                return np.array([places[name] + symbol.offset], np.uint64)
        if name in self.launch.variables:
            return np.array([self.launch.variables[name].base + symbol.offset], np.uint64)
        raise Misstep(f"no variable `{name}`")

    # -------------------------------------------------------------- errors

    def coordinates(self, thread: int, size) -> tuple:
        return thread % size[0], thread // size[0] % size[1], thread // (size[0] * size[1])

    def name_thread(self, lane: int) -> tuple:
        """CTA and thread, as (x, y, z)."""
        cta = self.coordinates(self.first + int(self.cta_of[lane]), self.launch.grid)
        return cta, self.coordinates(int(self.thread_of[lane]), self.launch.block)

    def place(self, index: int) -> str:
        """An instruction for a message."""
        instruction = self.program.kernel.code[index]
        where = instruction.where or f"PTX line {instruction.line}"
        return f"{where} ({instruction.op})"

    def fault(self, index: int, misstep: Misstep) -> KernelFault:
        code = self.program.kernel.code
        instruction = code[min(index, len(code) - 1)]
        what, cta, thread = misstep.what, None, None
        if misstep.lane is not None:
            cta, thread = self.name_thread(misstep.lane)
            if isinstance(misstep, Race):
                what = self.describe_race(misstep, cta, thread)
        text = instruction.text if len(instruction.text) < 120 else instruction.text[:117] + "..."
        return KernelFault(
            what,
            where=instruction.where,
            instruction=f"`{text}` (PTX line {instruction.line})",
            kernel=self.program.kernel.name,
            cta=cta,
            thread=thread,
        )

    def describe_race(self, race: Race, cta, thread) -> str:
        if race.thread >> 5 >= ENGINE:
            return (
                f"{race.what}: a bulk copy wrote them, started at {self.place(race.instruction)}, "
                f"thread {thread} {race.does} them and has not waited for its mbarrier"
            )
        per_cta = self.warps * 32
        other_cta = self.coordinates(race.thread // per_cta, self.launch.grid)
        other = self.coordinates(race.thread % per_cta, self.launch.block)
        who = f"thread {other}"
        if other_cta != cta:
            who += f" of CTA {other_cta}"
        if race.instruction >= 0:
            who += f" {race.did} them at {self.place(race.instruction)}"
        else:
            who += f" {race.did} them"
        between = "no barrier" if other_cta == cta else "no fence"
        return f"{race.what}: {who}, thread {thread} {race.does} them, {between} lies between"

    def deadlock(self) -> None:
        lines: list[str] = []
        reached: list[int] = []  # instructions at which threads are stuck: there is one at least
        waits = (self.waiting >= 0) & (self.waiting != MBARRIER)
        for instruction in sorted(set(self.waits_at[waits].tolist())):
            lanes = np.flatnonzero(waits & (self.waits_at == instruction))
            reached.append(instruction)
            lines.append(self._waiters(lanes, instruction) + self._missing(int(lanes[0])))
        for instruction in sorted(set(self.pc[self.parked].tolist())):
            lanes = np.flatnonzero(self.parked & (self.pc == instruction))
            reached.append(instruction)
            lines.append(self._waiters(lanes, instruction, "for the rest of their warp"))
        stuck = (self.waiting >= 0) | self.parked
        first = int(np.flatnonzero(stuck)[0])
        if (by_mbarrier := self.waiting == MBARRIER).any():
            first = int(np.flatnonzero(by_mbarrier)[0])
            reached.insert(0, int(self.waits_at[first]))
            lines += self.proxy.stuck(self, int(self.cta_of[first])) if self.proxy else []
        cta = self.cta_of == self.cta_of[first]
        gone = cta & ~self.alive & (self.thread_of < self.launch.threads)
        if gone.any():
            left = int(np.flatnonzero(gone)[0])
            lines.append(
                f"{np.count_nonzero(gone)} threads of this CTA have left the kernel, the "
                f"first is {self.name_thread(left)[1]}"
            )
        what = "deadlock: not all threads arrive at a barrier.\n  " + "\n  ".join(lines)
        if (self.waiting == MBARRIER).any():
            what = "deadlock: nothing can go on. Who waits for what:\n  " + "\n  ".join(lines)
        raise self.fault(reached[0], Misstep(what, first))

    def _waiters(self, lanes, instruction: int, what="for others"):
        cta = self.cta_of[lanes[0]]
        lanes = lanes[self.cta_of[lanes] == cta]
        thread = self.name_thread(int(lanes[0]))[1]
        return (
            f"{len(lanes)} of {self.launch.threads} threads of a CTA wait {what} at "
            f"{self.place(instruction)}, the first is {thread}"
        )

    def _missing(self, lane: int) -> str:
        """What the barrier that a lane waits at lacks."""
        number, cta = int(self.waiting[lane]), int(self.cta_of[lane])
        barrier = self.barriers[number]
        arrived, due = int(barrier.arrived[cta]), int(barrier.expected[cta])
        return f": barrier {number} has {arrived} of {due} threads"


def generic_window(space: str) -> int:
    """What `cvta` adds to an address in a space to make it generic."""
    window = {"shared": SHARED, "local": LOCAL, "param": PARAM}.get(space, 0)
    return window << REGION_BITS
