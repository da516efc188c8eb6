"""Matrix instructions of a warp: `ldmatrix`, `stmatrix` and `mma.sync`.

All warps that stand at the instruction are computed at once: registers of shape (warps, 32)
become matrices of shape (warps, rows, columns) and back, by index arrays made once.
"""

import numpy as np

from ._access import address_reader, call_on, read, write
from ._control import joining
from ._fault import Unsupported
from ._memory import REGION_BITS
from ._parse import Vec
from ._table import control
from ._types import dtype, reader, writer

_LOW = np.int64((1 << REGION_BITS) - 1)


def _items(arg):
    return arg.items if isinstance(arg, Vec) else (arg,)


def _rows(m, values):
    """The registers of the warps that take part, (warps, 32)."""
    rows = m.spread(values).reshape(-1, 32)
    return rows if m.running_warps is None else rows[m.running_warps]


def _lanes(m):
    """The numbers of their lanes."""
    return _rows(m, m.all_lanes)


def _put(m, put, values):
    """Writes (warps, 32) values to the warps that take part."""
    if m.running_warps is not None:
        full = np.zeros((m.lanes // 32, 32), values.dtype)
        full[m.running_warps] = values
        values = full
    put(m, values.reshape(-1))


def _matrix_form(ins):
    count = next((int(x[1:]) for x in ins.mods if x in ("x1", "x2", "x4")), None)
    if "m8n8" not in ins.mods or count is None or ins.mods[-1] != "b16":
        raise Unsupported("this shape")
    return count, "trans" in ins.mods


@control("ldmatrix")
def _ldmatrix(ins, kernel):
    """Lane 8 i + r gives the address of row r of matrix i; lane t gets elements 2 (t % 4) and
    the next of row t / 4, or with `.trans` those of the transpose."""
    count, trans = _matrix_form(ins)
    puts = [writer(r, "b32") for r in _items(ins.args[0])]
    address = address_reader(ins.args[1])

    def run(m):
        m.clocks.tick(m.running_warps)
        lanes = _lanes(m)
        rows = lanes[:, : 8 * count].reshape(-1)

        def body(m, rows):
            return read(m, "shared", address(m, rows) & _LOW, rows, 4, 4)

        words = np.ascontiguousarray(call_on(body, m, rows))
        halves = words.view(np.uint16).reshape(len(lanes), count, 8, 8)
        if trans:
            halves = halves.swapaxes(2, 3)
        pairs = np.ascontiguousarray(halves).view(np.uint32).reshape(len(lanes), count, 32)
        for j, put in enumerate(puts):
            _put(m, put, pairs[:, j])
        m.clocks.tick(m.running_warps)  # what a lane does next, no lane's read comes after

    return joining(ins, run)


@control("stmatrix")
def _stmatrix(ins, kernel):
    count, trans = _matrix_form(ins)
    gets = [reader(r, "b32") for r in _items(ins.args[1])]
    address = address_reader(ins.args[0])

    def run(m):
        m.clocks.tick(m.running_warps)
        lanes = _lanes(m)
        parts = [_rows(m, get(m)) for get in gets]
        pairs = np.ascontiguousarray(np.stack(parts, axis=1))
        halves = pairs.view(np.uint16).reshape(len(lanes), count, 8, 8)
        if trans:
            halves = halves.swapaxes(2, 3)
        words = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, 4)
        rows = lanes[:, : 8 * count].reshape(-1)

        def body(m, rows):
            write(m, "shared", address(m, rows) & _LOW, rows, 4, 4, words, ins.index)

        call_on(body, m, rows)
        m.clocks.tick(m.running_warps)

    return joining(ins, run)


# ---------------------------------------------------------------- mma.sync

# Where element e of a lane stands, for a lane t with group g = t / 4 and place q = t % 4.
# `per`: elements in a register (2 halves, or 1 number of 32 bits, or 4 bytes).


def _places_a(rows: int, columns: int, per: int):
    """Row and column of the elements of A, (32, elements)."""
    t = np.arange(32)[:, None]
    count = rows * columns // 32
    e = np.arange(count)[None, :]
    register, inside = e // per, e % per
    # Registers: upper rows, lower rows, then the same for the right half of the columns.
    row = t // 4 + 8 * (register % 2)
    column = (t % 4) * per + inside + 4 * per * (register // 2)
    return row, column


def _places_b(rows: int, per: int):
    """Row (k) and column (n) of the elements of B, 8 columns wide."""
    t = np.arange(32)[:, None]
    e = np.arange(rows * 8 // 32)[None, :]
    register, inside = e // per, e % per
    return (t % 4) * per + inside + 4 * per * register, np.broadcast_to(t // 4, (32, e.shape[1]))


def _places_c():
    """Row and column of the four elements of C and D, 16 by 8."""
    t, e = np.arange(32)[:, None], np.arange(4)[None, :]
    return t // 4 + 8 * (e // 2), 2 * (t % 4) + e % 2


_MMA_TYPES = {"f16": 2, "bf16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}


def _elements(values, name: str):
    """Registers (warps, 32, count) as elements, float64 or int64."""
    values = np.ascontiguousarray(values)
    if name == "tf32":  # the hardware drops the low bits
        values = values & np.uint32(0xFFFFE000)
        return values.view(np.float32).astype(np.float64)
    typed = values.view(dtype(name))
    return typed.astype(np.int64 if name in ("s8", "u8") else np.float64)


@control("mma")
def _mma(ins, kernel):
    """D = A B + C. Products and their sum are exact to float64, then rounded once: hardware
    rounds or truncates on the way, in an order that is not documented."""
    shape = next((x for x in ins.mods if x.startswith("m16n8k")), None)
    names = ins.mods[-4:]
    d_name, a_name, b_name, c_name = names
    if shape is None or "sp" in ins.mods or ins.mods[3:6] != (shape, "row", "col"):
        if ins.mods[1:3] != ("sync", "aligned") or shape is None:
            raise Unsupported("this shape")
    known = a_name in _MMA_TYPES and b_name in _MMA_TYPES and "satfinite" not in ins.mods
    if not known or d_name not in ("f32", "f16", "s32") or c_name != d_name:
        raise Unsupported("these types")
    per, k = _MMA_TYPES[a_name], int(shape[6:])
    a_place, b_place, c_place = _places_a(16, k, per), _places_b(k, per), _places_c()
    d_args, *operands = (_items(arg) for arg in ins.args)
    gets = [[reader(r, "b32") for r in part] for part in operands]
    if [len(g) for g in gets[:2]] != [16 * k // (32 * per), 8 * k // (32 * per)]:
        raise Unsupported("this number of registers")
    puts = [writer(r, "b32") for r in d_args]

    def run(m):
        m.clocks.tick(m.running_warps)

        def registers(part):
            return np.stack([_rows(m, get(m)) for get in part], axis=2)

        a = _scatter(_elements(registers(gets[0]), a_name), a_place, (16, k))
        b = _scatter(_elements(registers(gets[1]), b_name), b_place, (k, 8))
        c = np.ascontiguousarray(registers(gets[2])).view(dtype(c_name))
        product = np.matmul(a, b)
        total = product[:, c_place[0], c_place[1]] + c
        out = np.ascontiguousarray(total.astype(dtype(d_name))).view(np.uint32)
        for j, put in enumerate(puts):
            _put(m, put, out[:, :, j])

    return joining(ins, run)


def _scatter(elements, place, shape):
    out = np.zeros((len(elements), *shape), elements.dtype)
    out[:, place[0], place[1]] = elements
    return out
