"""wgmma: products of a warpgroup, whose result may be looked at only after a wait.

A product is computed when it starts, and all warpgroups that start one together are computed
together. Until the `wait_group` that covers it, its accumulators may be neither read nor
written, its operands in registers not written (a plain `mov` carries the ban along), and its
operands in shared memory not either.
"""

import dataclasses

import numpy as np

from ._access import call_on
from ._control import joining
from ._descriptor import matrix, matrix_chunks
from ._fault import Misstep, Unsupported
from ._parse import Imm, Mem, Pair, Reg, Tensor, Vec
from ._proxy import CHUNK
from ._table import control
from ._types import reader

_NO_TARGET = ("st", "red", "stmatrix", "cp", "bar", "barrier", "bra", "mbarrier", "setmaxnreg")
_FLOATS = {"bf16", "f16"}


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


class Products:
    """What is in flight in a batch."""

    def __init__(self, m):
        self.all: list[Product] = []
        self.open: dict[int, list] = {}  # warp -> products not committed
        self.groups: dict[int, list] = {}  # warp -> lists of them
        self.results: dict[int, int] = {}  # register -> bits of warps
        self.sources: dict[int, int] = {}
        self.copies: dict[int, tuple] = {}  # register -> (bits, Product): a mov of a result

    def start(self, m, product: Product, warps) -> None:
        self.all.append(product)
        for part in product.own:
            for at in part:
                m.proxy.reading[at // CHUNK] += 1
        m.proxy.start_reading(product)
        for warp in warps:
            self.open.setdefault(warp, []).append(product)
        for table, registers in ((self.results, product.results), (self.sources, product.sources)):
            for register in registers:
                table[register] = table.get(register, 0) | product.owners

    def commit(self, m) -> None:
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
            for table, registers in (
                (self.results, product.results),
                (self.sources, product.sources),
            ):
                for register in registers:
                    table[register] = table.get(register, 0) | product.owners
        for register, (bits, _) in self.copies.items():
            self.results[register] = self.results.get(register, 0) | bits

    def check(self, m, index: int) -> None:
        """An instruction is about to run: may it touch the registers that it names?"""
        named = m.program.named[index]
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
            if bits := self.results.get(register, 0) & running:
                self.refuse(m, register, bits, "writes to an accumulator")
            if bits := self.sources.get(register, 0) & running:
                self.refuse(m, register, bits, "writes to an operand")

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


def products(m) -> Products:
    if m.proxy.products is None:
        m.proxy.products = Products(m)
    return m.proxy.products


def registers_of(ins):
    """(read, written, is a move): numbers of the registers that an instruction names."""
    if ins.mods[0] == "wgmma":
        return (), (), False
    has_target = ins.mods[0] not in _NO_TARGET and ins.args
    writes = tuple(_registers(ins.args[0])) if has_target else ()
    reads = [r for arg in ins.args[bool(has_target) :] for r in _registers(arg)]
    if ins.guard is not None:
        reads.append(ins.guard.index)
    moves = ins.mods[0] == "mov" and isinstance(ins.args[1], Reg)
    return tuple(reads), writes, moves


def _registers(arg):
    if isinstance(arg, Reg):
        yield arg.index
    elif isinstance(arg, Vec):
        for item in arg.items:
            yield from _registers(item)
    elif isinstance(arg, Pair):
        yield from _registers(arg.first)
        yield from _registers(arg.second)
    elif isinstance(arg, Mem):
        yield from _registers(arg.base)
    elif isinstance(arg, Tensor):
        yield from _registers(arg.map)
        for item in arg.coordinates:
            yield from _registers(item)


# ---------------------------------------------------------------- the instructions


@control("wgmma")
def _wgmma(ins, kernel):
    which = ins.mods[1]
    if which == "fence":
        return joining(ins, lambda m: m.clocks.tick(m.running_warps))
    if which == "commit_group":
        return joining(ins, lambda m: products(m).commit(m))
    if which == "wait_group":
        keep = ins.args[0].value

        def wait(m):
            m.clocks.tick(m.running_warps)
            products(m).wait(m, keep)

        return joining(ins, wait)
    if which != "mma_async" or "sp" in ins.mods:
        raise Unsupported("this kind of wgmma")
    if (kernel.block or (128,))[0] % 128:
        raise Unsupported("blocks that are no multiple of a warpgroup, 128 threads")
    return joining(ins, _mma(ins), width=128)


def _mma(ins):
    shape, d_name, a_name, b_name = ins.mods[-4:]
    n = int(shape[4:-3]) if shape.startswith("m64n") and shape.endswith("k16") else 0
    if not n or d_name != "f32" or a_name != b_name or a_name not in _FLOATS:
        raise Unsupported("this shape, or these types")
    results, a, b, keeps, *flags = ins.args
    in_registers = isinstance(a, Vec)
    if not all(isinstance(x, Imm) for x in flags) or len(results.items) != n // 2:
        raise Unsupported("these operands")
    signs = float(flags[0].value * flags[1].value)
    a_transposed, b_transposed = (
        bool(x.value) for x in (flags[2:] if len(flags) > 3 else (Imm(0), flags[2]))
    )
    results = [r.index for r in results.items]
    sources = [r.index for r in a.items] if in_registers else []
    get_a = None if in_registers else reader(a, "b64")
    get_b, keeps = reader(b, "b64"), reader(keeps, "pred")

    def run(m):
        m.clocks.tick(m.running_warps)
        lanes = m.active
        if len(lanes) % 128 or (m.thread_of[lanes[::128]] % 128).any():
            raise Misstep("a wgmma of a warpgroup whose threads have left in part", int(lanes[0]))
        heads = lanes[::128]
        state = products(m)
        _refuse_operands(m, state, ins, sources, results)
        b_at = _locate(m, ins, get_b, lanes, n, b_transposed)
        a_at = None
        if in_registers:
            left = _a_of_registers(np.stack([m.R[r] for r in sources])[:, lanes], a_name)
        else:
            a_at = _locate(m, ins, get_a, lanes, 64, a_transposed)
            left = _elements(m, a_at, a_name, a_transposed)
        right = _elements(m, b_at, b_name, b_transposed).swapaxes(1, 2)
        total = np.matmul(left, right) * signs
        kept = _uniform(m, keeps, lanes, "scale-d")
        if kept.any():
            old = _c_of_registers(np.stack([m.R[r] for r in results])[:, lanes], n)
            total = total + np.where(kept[:, None, None], old, np.float32(0))
        _put(m, results, lanes, _registers_of_c(total.astype(np.float32), n))
        for group, lane in enumerate(heads.tolist()):
            shared, own = b_at[group].reshape(-1), [[]] * 4
            if a_at is not None:
                rows = a_at[group].reshape((16, 4, -1) if a_transposed else (1, 4, -1))
                own = [[rows[:, warp].reshape(-1)] for warp in range(4)]
            made = Product(
                frozenset(results),
                frozenset(sources),
                15 << (lane // 32),
                shared,
                own,
                ins.index,
                lane,
            )
            state.start(m, made, range(lane // 32, lane // 32 + 4))

    return run


def _refuse_operands(m, state: Products, ins, sources, results) -> None:
    """Accumulators may follow one another; other operands that are in flight may not be read."""
    running = m.running_bits
    for register in sources:
        if bits := state.results.get(register, 0) & running:
            state.refuse(m, register, bits, "reads an accumulator")
    for register in results:
        if bits := state.sources.get(register, 0) & running:
            state.refuse(m, register, bits, "writes to an operand")
        if register in state.copies and (bits := state.copies[register][0] & running):
            state.refuse(m, register, bits, "writes to an accumulator")


def _uniform(m, get, lanes, what: str):
    """One value a warpgroup."""
    values = m.spread(get(m))[lanes].reshape(-1, 128)
    if (bad := (values != values[:, :1]).any(1)).any():
        raise Misstep(
            f"{what} differs among the threads of a warpgroup", int(lanes[128 * np.argmax(bad)])
        )
    return values[:, 0]


def _locate(m, ins, get, lanes, rows: int, transposed: bool):
    """Places of a matrix in shared memory, (warpgroups, ...) as `matrix_chunks` has them; all
    that is to be said against reading it has been said."""
    bits = _uniform(m, get, lanes, "a descriptor")
    address = np.stack([matrix_chunks(matrix(int(x)), rows, transposed) for x in bits])
    heads = lanes[::128]
    each = np.repeat(heads, address[0].size)

    def body(m, each):
        at = m.shared.locate(address.reshape(-1), m.cta_of[each], 16, "a wgmma reads")
        for warp in range(4):
            m.proxy.check_read(m, at, each + 32 * warp, "a wgmma")
        return at

    return call_on(body, m, each).reshape(address.shape)


def _values(words, name: str):
    """16-bit words as float64."""
    if name == "bf16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return words.view(np.float16).astype(np.float64)


def _elements(m, at, name: str, transposed: bool):
    """(warpgroups, rows, 16)."""
    words = m.shared.store.gather(at.reshape(-1), 8, 2).view(np.uint16)
    if transposed:
        return _values(words.reshape(len(at), 16, -1), name).swapaxes(1, 2)
    return _values(words.reshape(len(at), -1, 16), name)


def _a_of_registers(words, name: str):
    """(4, lanes) to (warpgroups, 64, 16). Register r of lane t: rows t / 4 and, if r is odd, 8
    below; columns 2 (t % 4) and the next, and 8 to the right from r = 2 on."""
    halves = np.ascontiguousarray(words)[..., None].view(np.uint16)
    grid = halves.reshape(2, 2, -1, 4, 8, 4, 2)  # right, low, group, warp, row, pair, half
    return _values(np.ascontiguousarray(grid.transpose(2, 3, 1, 4, 0, 5, 6)), name).reshape(
        -1, 64, 16
    )


def _c_of_registers(words, n: int):
    """(n / 2, lanes) to (warpgroups, 64, n). Register e of lane t: row t / 4, 8 below if e / 2 is
    odd; column 8 (e / 4) + 2 (t % 4) + e % 2."""
    grid = words.view(np.float32).reshape(n // 8, 2, 2, -1, 4, 8, 4)
    return grid.transpose(3, 4, 1, 5, 0, 6, 2).reshape(-1, 64, n)


def _registers_of_c(values, n: int):
    grid = values.reshape(-1, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
    return np.ascontiguousarray(grid).reshape(n // 2, -1).view(np.uint32)


def _put(m, results, lanes, words) -> None:
    for register, row in zip(results, words, strict=True):
        if len(lanes) == m.lanes:
            m.R[register] = row
            continue
        filled = m.R[register].copy()
        filled[lanes] = row
        m.R[register] = filled
