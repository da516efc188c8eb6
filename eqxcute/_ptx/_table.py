"""The table of instructions that are more than arithmetic.

An entry builds, from an instruction and its kernel, a function of the machine. A plain one
changes registers or memory of the active lanes. A control one also decides where lanes go
on: it returns the next place, or None once it has set `m.pc` for each active lane.
"""

from ._fault import Unsupported

OPS = {}  # opcode -> (builder, is control)


def plain(*names):
    def add(build):
        OPS.update({name: (build, False) for name in names})
        return build

    return add


def control(*names):
    def add(build):
        OPS.update({name: (build, True) for name in names})
        return build

    return add


def guarded(run, guard):
    """A plain function that only the lanes run where the predicate holds."""
    if guard is None:
        return run
    i, negated = guard.index, guard.negated

    def some(m):
        holds = ~m.R[i] if negated else m.R[i]
        before = m.mask
        mask = m.within(holds)
        if mask is False:
            return
        m.set_mask(mask)
        run(m)
        m.set_mask(before)

    return some


def refused(ins, reason: str):
    """A function that raises when a lane gets to an instruction we do not know."""
    where = f" ({ins.where})" if ins.where else ""
    message = f"the PTX interpreter does not know `{ins.op}`, PTX line {ins.line}{where}: {reason}"

    def run(m):
        raise NotImplementedError(message)

    return run


def need(condition: bool, ins, what: str) -> None:
    if not condition:
        raise Unsupported(f"{what} in {ins.op}")
