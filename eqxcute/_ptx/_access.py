"""Loads, stores and atomics, each access checked."""

import numpy as np

from . import _float
from ._fault import Misstep, Unsupported
from ._memory import FIRST_ARRAY, LOCAL, REGION_BITS, SHARED
from ._parse import SINK, Imm, Reg, Sym, Vec
from ._table import plain
from ._types import UNSIGNED, dtype, from_bits, is_float, is_packed, is_signed, reader, width

_SPACES = {
    "global": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "local": "local",
    "param": "param",
    "param::entry": "param",
    "param::func": "param",
    "const": "global",
}
_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel")
_NEUTRAL = ("weak", "cta", "cluster", "gpu", "sys", "nc", "noftz")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
_LOW = np.int64((1 << REGION_BITS) - 1)


class Form:
    """What the modifiers of a memory instruction say."""

    def __init__(self, ins):
        self.space, self.count, self.strong = None, 1, False
        self.release = self.hint = False
        self.rest = []
        self.type = ins.mods[-1]
        for mod in ins.mods[1:-1]:
            if mod in _SPACES:
                self.space = _SPACES[mod]
            elif mod in ("v2", "v4", "v8"):
                self.count = int(mod[1:])
            elif mod in _STRONG:
                self.strong = True
                self.release |= mod in ("release", "acq_rel")
            elif mod == "L2::cache_hint":
                self.hint = True
            elif mod not in _NEUTRAL + _CACHE and not mod.startswith(("L1::", "L2::")):
                self.rest.append(mod)
        self.size = width(self.type) if self.type != "b128" else 16
        if self.size > 8:
            raise Unsupported("128-bit registers")
        self.total = self.size * self.count

    def only(self):
        if self.rest:
            raise Unsupported(f"the modifier .{self.rest[0]}")
        return self


def access_size(ins, space: str) -> int | None:
    """The bytes of one access of the instruction to a space; None if it makes none."""
    if ins.mods[0] in ("ldmatrix", "stmatrix"):
        return 16 if space == "shared" else None
    if "bulk" in ins.mods:
        return 16
    if ins.mods[0] == "mbarrier":
        return 8 if space == "shared" else None
    if ins.mods[:2] == ("cp", "async") and len(ins.args) >= 3 and isinstance(ins.args[2], Imm):
        return ins.args[2].value
    if ins.mods[0] not in ("ld", "st", "atom", "red"):
        return None
    spaces = [_SPACES[m] for m in ins.mods if m in _SPACES]
    if spaces and spaces[0] != space:
        return None
    try:
        return Form(ins).total
    except Unsupported:
        return None


def address_reader(mem):
    """A function of (machine, lanes) that gives addresses as int64."""
    if isinstance(mem.base, Reg):
        i = mem.base.index
        if width(mem.base.type) == 4:  # the sum wraps: compilers split addresses at will
            small = np.array(mem.offset & 0xFFFFFFFF, np.uint32)
            return lambda m, lanes: (m.R[i][lanes] + small).view(np.int32).astype(np.int64)
        offset = np.int64(mem.offset)
        return lambda m, lanes: m.R[i][lanes].astype(np.int64) + offset
    if isinstance(mem.base, Sym):
        symbol = Sym(mem.base.name, mem.base.offset + mem.offset)

        def constant(m, lanes):
            return np.full(len(lanes), m.address_of(symbol)[0].astype(np.int64))

        return constant
    return lambda m, lanes: np.full(len(lanes), mem.offset, np.int64)


def on_lanes(body):
    """Runs `body(m, lanes)`. A misstep in it counts places: make them lanes."""

    def run(m):
        call_on(body, m, m.active)

    return run


def call_on(body, m, lanes):
    try:
        return body(m, lanes)
    except Misstep as misstep:
        if misstep.lane is not None:
            misstep.lane = int(lanes[misstep.lane])
        raise


def by_space(address, function, empty):
    """Splits generic addresses by their region; `function(space, rows)` gives words."""
    region = address >> REGION_BITS
    first = int(region[0])
    if (region == first).all():
        return function(_space_of(first), None)
    out = empty
    for value in np.unique(region).tolist():
        rows = np.flatnonzero(region == value)
        part = function(_space_of(value), rows)
        if part is not None:
            out[rows] = part
    return out


def _space_of(region: int) -> str:
    if region == SHARED:
        return "shared"
    return "local" if region == LOCAL else "global"


# ---------------------------------------------------------------- the accesses


def read(m, space, address, lanes, size, count, strong=False):
    """Words of `size` bytes: an array of shape (lanes, count), or (lanes,) for one."""
    total = size * count
    if space is None:

        def part(where, rows):
            pick = slice(None) if rows is None else rows
            low = address[pick] & _LOW if where != "global" else address[pick]
            try:
                return read(m, where, low, lanes[pick], size, count, strong)
            except Misstep as misstep:
                if rows is not None and misstep.lane is not None:
                    misstep.lane = int(rows[misstep.lane])
                raise

        shape = (len(lanes),) if count == 1 else (len(lanes), count)
        return by_space(address, part, np.zeros(shape, UNSIGNED[size]))
    if space == "global":
        at, which = m.glob.locate(address, total, "reads")
        unwritten(m, at, which, total)
        if not strong:
            m.launch.shadow.on_read(at, total, m.clocks, lanes, m.glob.describe)
        return m.glob.store.gather(at, size, count)
    bank = m.shared if space == "shared" else m.local
    at = bank.locate(address, m.cta_of[lanes] if space == "shared" else lanes, total, "reads")
    if space == "shared":
        refuse_in_flight(m, at, total, "reads")
    place = bank.store.unwritten(at, total)
    if place is not None:
        described = bank.describe(int(at[place]), total)
        raise Misstep(f"uninitialised: reads {described}, which nobody has written", place)
    if space == "shared" and not strong:
        m.shared_shadow.on_read(at, total, m.clocks, lanes, bank.describe)
    return bank.store.gather(at, size, count)


def unwritten(m, at, which, total):
    """Refuses to read what nobody has written, of global memory."""
    arrays = m.glob.arrays
    if isinstance(which, int):
        tracked = arrays[which].tracked
    else:
        tracked = any(arrays[w].tracked for w in np.unique(which).tolist())
    if tracked and (place := m.glob.store.unwritten(at, total)) is not None:
        described = m.glob.describe(int(at[place]), total)
        raise Misstep(f"uninitialised: reads {described}, which nobody has written", place)


def refuse_in_flight(m, at, total, verb):
    if m.proxy is not None:
        m.proxy.refuse(m, at, total, verb)
    if m.copies is not None and (place := m.copies.in_flight(at, total)) is not None:
        described = m.shared.describe(int(at[place]), total)
        raise Misstep(
            f"race on {described}: {verb} them while a cp.async to them is in flight; "
            "cp.async.wait_group comes first",
            place,
        )


def write(m, space, address, lanes, size, count, words, index, strong=False):
    """`words`: unsigned, of shape (lanes,) or (lanes, count)."""
    total = size * count
    if space is None:

        def part(where, rows):
            pick = slice(None) if rows is None else rows
            low = address[pick] & _LOW if where != "global" else address[pick]
            try:
                write(m, where, low, lanes[pick], size, count, words[pick], index, strong)
            except Misstep as misstep:
                if rows is not None and misstep.lane is not None:
                    misstep.lane = int(rows[misstep.lane])
                raise

        by_space(address, part, None)
        return
    if space == "local":
        at = m.local.locate(address, lanes, total, "writes")
        m.local.store.scatter(at, size, count, words)
        return
    if space == "global":
        at, which = m.glob.locate(address, total, "writes")
        touch(m, which)
        store, shadow, describe = m.glob.store, m.launch.shadow, m.glob.describe
    else:
        at = m.shared.locate(address, m.cta_of[lanes], total, "writes")
        refuse_in_flight(m, at, total, "writes")
        store, shadow, describe = m.shared.store, m.shared_shadow, m.shared.describe

    def same():
        held = store.gather(at, size, count) == words
        return held if count == 1 else held.all(1)

    if strong:
        shadow.on_atomic(at, total, m.clocks, lanes, describe)
    else:
        shadow.on_write(at, total, m.clocks, lanes, describe, same, index)
    if m.proxy is not None and space == "shared":
        m.proxy.wrote(at, total, lanes)
    store.scatter(at, size, count, words)
    if not (kept := same()).all() and not strong:
        place = int(np.argmin(kept))
        raise Misstep(
            f"race on {describe(int(at[place]), total)}: two threads write different values "
            "to them in one instruction",
            place,
        )


def touch(m, which):
    numbers = [which] if isinstance(which, int) else np.unique(which).tolist()
    for number in numbers:
        m.glob.arrays[number].touched = True


# ---------------------------------------------------------------- ld and st


def put_words(m, lanes, arg, words, name):
    """Fills a register of the given lanes with loaded words, extended to its width."""
    if arg == SINK:
        return
    size = width(arg.type)
    if words.dtype.itemsize != size:
        if is_signed(name):
            words = words.view(f"i{words.dtype.itemsize}").astype(f"i{size}")
        words = words.astype(UNSIGNED[size])
    if len(lanes) == m.lanes:
        m.R[arg.index] = np.ascontiguousarray(words)
        return
    filled = m.R[arg.index].copy()
    filled[lanes] = words
    m.R[arg.index] = filled


@plain("ld", "ldu")
def _ld(ins, kernel):
    form = Form(ins).only()
    targets = ins.args[0].items if isinstance(ins.args[0], Vec) else (ins.args[0],)
    if form.space == "param":
        return _ld_param(ins, form, targets)
    address = address_reader(ins.args[1])

    def body(m, lanes):
        words = read(m, form.space, address(m, lanes), lanes, form.size, form.count, form.strong)
        if form.count == 1:
            put_words(m, lanes, targets[0], words, form.type)
            return
        for j, target in enumerate(targets):
            put_words(m, lanes, target, words[:, j], form.type)

    return on_lanes(body)


def _ld_param(ins, form, targets):
    mem = ins.args[1]
    base = mem.base
    if isinstance(base, Sym) and "#" in base.name:  # of a call
        key = base.name, base.offset + mem.offset

        def from_call(m):
            put_words(m, m.active, targets[0], m.call_params[key][m.active], form.type)

        return from_call
    address = address_reader(mem)

    def body(m, lanes):
        at = address(m, lanes) & _LOW
        words = m.launch.params.gather(at, form.size, form.count)
        for j, target in enumerate(targets):
            part = words if form.count == 1 else words[:, j]
            put_words(m, lanes, target, part, form.type)

    return on_lanes(body)


@plain("st")
def _st(ins, kernel):
    form = Form(ins).only()
    source = ins.args[1]
    sources = source.items if isinstance(source, Vec) else (source,)
    if form.space == "param":
        base = ins.args[0].base
        key = base.name, base.offset + ins.args[0].offset
        get = reader(sources[0], f"b{8 * form.size}")

        def to_call(m):
            m.call_params[key] = m.spread(get(m))

        return to_call
    address = address_reader(ins.args[0])
    gets = [reader(s, f"b{8 * form.size}") for s in sources]

    def body(m, lanes):
        parts = [_pick(get(m), lanes) for get in gets]
        words = parts[0] if form.count == 1 else np.stack(parts, axis=1)
        write(
            m,
            form.space,
            address(m, lanes),
            lanes,
            form.size,
            form.count,
            words,
            ins.index,
            form.strong,
        )
        if form.release:
            m.clocks.fence(lanes)

    return on_lanes(body)


def _pick(values, lanes):
    """Of a literal, or one entry a lane."""
    return np.broadcast_to(values, (len(lanes),)) if len(values) == 1 else values[lanes]


# ---------------------------------------------------------------- atomics


def _increment(old, value):
    return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old, value):
    return np.where((old == 0) | (old > value), value, old - old.dtype.type(1))


_ATOMIC = {
    "add": lambda old, a: (old + a).astype(old.dtype),
    "and": lambda old, a: old & a,
    "or": lambda old, a: old | a,
    "xor": lambda old, a: old ^ a,
    "exch": lambda old, a: a,
    "inc": _increment,
    "dec": _decrement,
}


def atomic_function(which: str, name: str):
    if which in ("min", "max"):
        if is_float(name):
            return _float.extreme(which, False)
        return np.minimum if which == "min" else np.maximum
    if which not in _ATOMIC:
        raise Unsupported(f"the atomic .{which}")
    return _ATOMIC[which]


def _turns(at: np.ndarray):
    """Rows in turns, such that within a turn all places differ; order is kept."""
    order = np.argsort(at, kind="stable")
    sorted_at = at[order]
    new = np.r_[True, sorted_at[1:] != sorted_at[:-1]]
    start = np.flatnonzero(new)
    rank = np.arange(len(at)) - np.repeat(start, np.diff(np.r_[start, len(at)]))
    by_rank = np.argsort(rank, kind="stable")
    cuts = np.flatnonzero(np.diff(rank[by_rank])) + 1
    return [order[part] for part in np.split(by_rank, cuts)]


@plain("atom", "red")
def _atomic(ins, kernel):
    returns = ins.mods[0] == "atom"
    form = Form(ins)
    which = form.rest[0]
    if len(form.rest) != 1 or which == "shared::cluster":
        raise Unsupported(f"the modifier .{form.rest[-1]}")
    cas = which == "cas"
    function = None if cas else atomic_function(which, form.type)
    target = ins.args[0] if returns else None
    mem, *operands = ins.args[1:] if returns else ins.args
    if form.hint:
        operands = operands[:-1]
    address = address_reader(mem)
    operands = [o.items if isinstance(o, Vec) else (o,) for o in operands]
    targets = target.items if isinstance(target, Vec) else (target,)
    bits = f"b{8 * form.size}"
    gets = [[reader(part, bits) for part in operand] for operand in operands]

    def body(m, lanes):
        values = [np.stack([_pick(get(m), lanes) for get in operand], axis=1) for operand in gets]
        store, at = _atomic_place(m, form, address(m, lanes), lanes)
        old = np.zeros_like(values[0])
        for rows in _turns(at):
            held = store.gather(at[rows], form.size, form.count).reshape(len(rows), form.count)
            if cas:
                new = np.where(held == values[0][rows], values[1][rows], held)
            else:
                new = apply_atomic(function, held, values[0][rows], form.type)
            old[rows] = held
            shaped = new if form.count > 1 else new[:, 0]
            store.scatter(at[rows], form.size, form.count, shaped)
        if form.release:
            m.clocks.fence(lanes)
        if returns:
            for j, register in enumerate(targets):
                put_words(m, lanes, register, old[:, j], form.type)

    return on_lanes(body)


def apply_atomic(function, held, value, name):
    """An atomic's function on bits; packed types have two numbers in a word."""
    flat = held.reshape(-1), np.ascontiguousarray(value).reshape(-1)
    if is_packed(name):
        out = function(*(from_bits(f, name) for f in flat))
        return np.ascontiguousarray(out).view(held.dtype).reshape(held.shape)
    out = function(*(f.view(dtype(name)) for f in flat))
    return out.view(held.dtype).reshape(held.shape)


def _atomic_place(m, form, address, lanes):
    space = form.space
    if space is None:
        regions = np.unique(address >> REGION_BITS)
        if len(regions) > 1 and regions[0] < FIRST_ARRAY:
            raise Unsupported("one atomic on several kinds of memory")
        space = _space_of(int(regions[0]))
        address = address & _LOW if space != "global" else address
    if space == "global":
        at, which = m.glob.locate(address, form.total, "changes")
        touch(m, which)
        unwritten(m, at, which, form.total)
        m.launch.shadow.on_atomic(at, form.total, m.clocks, lanes, m.glob.describe)
        return m.glob.store, at
    at = m.shared.locate(address, m.cta_of[lanes], form.total, "changes")
    refuse_in_flight(m, at, form.total, "changes")
    place = m.shared.store.unwritten(at, form.total)
    if place is not None:
        described = m.shared.describe(int(at[place]), form.total)
        raise Misstep(f"uninitialised: changes {described}, which nobody has written", place)
    m.shared_shadow.on_atomic(at, form.total, m.clocks, lanes, m.shared.describe)
    if m.proxy is not None:
        m.proxy.wrote(at, form.total, lanes)
    return m.shared.store, at
