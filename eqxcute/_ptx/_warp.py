"""Instructions that the lanes of a warp execute together: shuffles, votes, reductions."""

import numpy as np

from . import _float
from ._control import joining
from ._fault import Misstep, Unsupported
from ._parse import Pair
from ._table import control, plain
from ._types import dtype, reader, writer

_REGISTERS = 1 << 16  # of an SM


def _members(arg):
    get = reader(arg, "b32")
    return lambda m: m.spread(get(m))


def _together(m, value, members):
    """Rows of 32 lanes: the values, and which lanes each lane counts in.

    **Returns:** values of shape (warps, 32), and (warps, 32, 32): does lane j count for i?
    """
    values = m.spread(value).reshape(-1, 32)
    here = (m.alive if m.mask is None else m.mask).reshape(-1, 32)
    bits = (members.reshape(-1, 32, 1) >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return values, here[:, None, :] & (bits == 1)


def _tick(m):
    m.clocks.tick(m.running_warps)


@control("shfl")
def _shfl(ins, kernel):
    if ins.mods[1] != "sync":
        raise Unsupported("shfl without .sync")
    mode = ins.mods[2]
    target = ins.args[0]
    target, found = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value, place, clamp = (reader(a, "b32") for a in ins.args[1:4])
    members = _members(ins.args[4])
    put = writer(target, "b32")
    put_found = None if found is None else writer(found, "pred")

    def run(m):
        lane = (m.all_lanes & 31).astype(np.int64)
        b = (place(m) & np.uint32(31)).astype(np.int64)
        c = clamp(m).astype(np.int64)
        segment, bound = (c >> 8) & 31, c & 31
        top = (lane & segment) | (bound & ~segment)
        source, inside = _source(mode, lane, b, segment, top)
        source = np.where(inside, source, lane)
        index = (m.all_lanes & ~31) | source
        values = m.spread(value(m))
        here = m.alive if m.mask is None else m.mask
        absent = here & ~here[index]
        if absent.any():
            first = int(np.argmax(absent))
            raise Misstep(
                f"{ins.op} reads from lane {int(source[first])}, which does not take part",
                first,
            )
        put(m, values[index])
        if put_found is not None:
            put_found(m, m.spread(inside))
        _tick(m)

    return joining(ins, run, members)


def _source(mode, lane, b, segment, top):
    if mode == "up":
        source = lane - b
        return source, source >= top
    if mode == "down":
        source = lane + b
    elif mode == "bfly":
        source = lane ^ b
    elif mode == "idx":
        source = (lane & segment) | (b & ~segment)
    else:
        raise Unsupported(f"shfl.{mode}")
    return source, source <= top


@control("vote")
def _vote(ins, kernel):
    if ins.mods[1] != "sync":
        raise Unsupported("vote without .sync")
    mode = ins.mods[2]
    value, members = reader(ins.args[1], "pred"), _members(ins.args[2])
    put = writer(ins.args[0], "b32" if mode == "ballot" else "pred")

    def run(m):
        values, counted = _together(m, value(m), members(m))
        yes = values[:, None, :] & counted
        if mode == "ballot":
            bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
            out = np.where(yes, bits, np.uint32(0)).sum(2, dtype=np.uint32)
        elif mode == "any":
            out = yes.any(2)
        elif mode == "all":
            out = (yes == counted).all(2)
        elif mode == "uni":
            out = (yes == counted).all(2) | ~yes.any(2)
        else:
            raise Unsupported(f"vote.{mode}")
        put(m, out.reshape(-1))
        _tick(m)

    return joining(ins, run, members)


@control("match")
def _match(ins, kernel):
    mode, name = ins.mods[1], ins.mods[-1]
    target = ins.args[0]
    target, found = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value, members = reader(ins.args[1], name), _members(ins.args[2])
    put = writer(target, "b32")
    put_found = None if found is None else writer(found, "pred")
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)

    def run(m):
        values, counted = _together(m, value(m), members(m))
        equal = (values[:, None, :] == values[:, :, None]) & counted
        out = np.where(equal, bits, np.uint32(0)).sum(2, dtype=np.uint32)
        if mode == "all":
            every = (equal == counted).all(2)
            full = np.where(counted, bits, np.uint32(0)).sum(2, dtype=np.uint32)
            out = np.where(every, full, np.uint32(0))
            if put_found is not None:
                put_found(m, every.reshape(-1))
        put(m, out.reshape(-1))
        _tick(m)

    return joining(ins, run, members)


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@control("redux")
def _redux(ins, kernel):
    which, name = ins.mods[2], ins.mods[-1]
    if which not in _REDUCE or "abs" in ins.mods:
        raise Unsupported(f"redux.{which}")
    function = _REDUCE[which]
    if name == "f32":
        function = _float.extreme(which, "NaN" in ins.mods)
    value, members = reader(ins.args[1], name), _members(ins.args[2])
    put = writer(ins.args[0], name)

    def run(m):
        values, counted = _together(m, value(m), members(m))
        out = np.zeros(m.lanes, dtype(name)).reshape(-1, 32)
        started = np.zeros(out.shape, bool)
        for j in range(32):
            counts = counted[:, :, j]
            column = np.broadcast_to(values[:, j : j + 1], out.shape)
            both = np.where(started, function(out, column), column)
            out = np.where(counts, both, out)
            started |= counts
        put(m, out.reshape(-1))
        _tick(m)

    return joining(ins, run, members)


@control("elect")
def _elect(ins, kernel):
    """The lowest of the member lanes is the leader."""
    target, members = ins.args[0], _members(ins.args[1])
    put, put_leader = writer(target.first, "b32"), writer(target.second, "pred")

    def run(m):
        _, counted = _together(m, np.zeros(1, bool), members(m))
        leader = counted.argmax(2).reshape(-1)
        put(m, leader.astype(np.uint32))
        put_leader(m, leader == (m.all_lanes & 31))
        _tick(m)

    return joining(ins, run, members)


@control("setmaxnreg")
def _setmaxnreg(ins, kernel):
    """Checks that the warps of a CTA do not ask for more registers than there are: the last to
    ask would wait for ever."""
    count = ins.args[0].value
    if count % 8 or not 24 <= count <= 256:
        raise Unsupported(f"{count} registers: not a multiple of 8 from 24 to 256")

    def run(m):
        m.limits[m.running_list] = count
        sums = 32 * m.limits.reshape(m.ctas, m.warps).sum(1)
        if (sums > _REGISTERS).any():
            raise Misstep(
                f"setmaxnreg: the warps of a CTA ask for {int(sums.max())} registers together, an "
                f"SM has {_REGISTERS}",
                int(m.active[0]),
            )

    return joining(ins, run)


@plain("activemask")
def _activemask(ins, kernel):
    put = writer(ins.args[0], "b32")
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)

    def run(m):
        here = (m.alive if m.mask is None else m.mask).reshape(-1, 32)
        word = np.where(here, bits, np.uint32(0)).sum(1, dtype=np.uint32)
        put(m, np.repeat(word, 32))

    return run
