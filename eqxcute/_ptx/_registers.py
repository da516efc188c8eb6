"""Which registers an instruction reads and writes."""

from ._parse import Mem, Pair, Reg, Tensor, Vec

_NO_TARGET = ("st", "red", "stmatrix", "cp", "bar", "barrier", "bra", "setmaxnreg")


def registers_of(ins):
    """(read, written, is a move): numbers of the registers that an instruction names. wgmma,
    which has rules of its own, names none."""
    if ins.mods[0] == "wgmma":
        return (), (), False
    has_target = ins.mods[0] not in _NO_TARGET and bool(ins.args)
    writes = tuple(_registers(ins.args[0])) if has_target else ()
    reads = [r for arg in ins.args[has_target:] for r in _registers(arg)]
    if ins.guard is not None:
        reads.append(ins.guard.index)
    moves = ins.mods[0] == "mov" and isinstance(ins.args[1], Reg)
    return tuple(reads), writes, moves


def operands_of(code) -> frozenset:
    """The registers that the products of a kernel are computed from and written to."""
    products = (i for i in code if i.mods[:2] == ("wgmma", "mma_async"))
    return frozenset(
        r for i in products for arg in i.args if isinstance(arg, Vec) for r in _registers(arg)
    )


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
