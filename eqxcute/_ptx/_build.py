"""From an instruction to a Python function: looks it up in the tables."""

from . import (  # noqa: F401
    _access,
    _control,
    _convert,
    _copies,
    _mbarrier,
    _scalar,
    _tensor,
    _warp,
    _wgmma,
)
from ._access import access_size
from ._alu import TABLE
from ._fault import Unsupported
from ._table import OPS, guarded, refused
from ._types import reader, writer

__all__ = ["access_size", "build"]


def build(ins, kernel):
    """**Returns:** the function, and whether it decides where lanes go on."""
    name = f"{ins.mods[0]}.cc" if "cc" in ins.mods[1:] else ins.mods[0]
    name = ins.mods[0] if ins.mods[0] in ("addc", "subc", "madc") else name
    try:
        if name in OPS:
            builder, is_control = OPS[name]
            run = builder(ins, kernel)
            return (run if is_control else guarded(run, ins.guard)), is_control
        if name in TABLE:
            return guarded(arithmetic(ins), ins.guard), False
        raise Unsupported("no such entry in its tables")
    except Unsupported as reason:
        return guarded(refused(ins, str(reason)), ins.guard), False


def arithmetic(ins):
    function, result, sources = TABLE[ins.mods[0]](ins)
    if len(ins.args) != len(sources) + 1:
        raise Unsupported(f"{len(ins.args) - 1} operands")
    put = writer(ins.args[0], result)
    gets = [reader(arg, name) for arg, name in zip(ins.args[1:], sources, strict=True)]
    if len(gets) == 1:
        (a,) = gets
        return lambda m: put(m, function(a(m)))
    if len(gets) == 2:
        a, b = gets
        return lambda m: put(m, function(a(m), b(m)))
    if len(gets) == 3:
        a, b, c = gets
        return lambda m: put(m, function(a(m), b(m), c(m)))
    return lambda m: put(m, function(*(get(m) for get in gets)))
