"""wgmma: products of a warpgroup, whose result may be looked at only after a wait.

A product is computed when it starts, and all warpgroups that start one together are computed
together; `_products` knows what may not be touched meanwhile. Products and their sum are exact
to float64, then rounded once to float32: hardware truncates on the way.
"""

import numpy as np

from ._access import call_on
from ._control import joining
from ._descriptor import matrix, matrix_chunks
from ._fault import Misstep, Unsupported
from ._parse import Imm, Vec
from ._products import Product
from ._table import control
from ._types import reader

_FLOATS = {"bf16", "f16"}


# ---------------------------------------------------------------- the instructions


@control("wgmma")
def _wgmma(ins, kernel):
    which = ins.mods[1]
    if which == "fence":

        def fence(m):
            m.clocks.tick(m.running_warps)
            m.proxy.products.fence(m)

        return joining(ins, fence)
    if which == "commit_group":
        return joining(ins, lambda m: m.proxy.products.commit(m))
    if which == "wait_group":
        keep = ins.args[0].value

        def wait(m):
            m.clocks.tick(m.running_warps)
            m.proxy.products.wait(m, keep)

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
        state = m.proxy.products
        kept = _uniform(m, keeps, lanes, "scale-d")
        state.check_product(m, sources, results, kept.any())
        b_at = _locate(m, ins, get_b, lanes, n, b_transposed)
        a_at = None
        if in_registers:
            left = _a_of_registers(np.stack([m.R[r] for r in sources])[:, lanes], a_name)
        else:
            a_at = _locate(m, ins, get_a, lanes, 64, a_transposed)
            left = _elements(m, a_at, a_name, a_transposed)
        right = _elements(m, b_at, b_name, b_transposed).swapaxes(1, 2)
        total = np.matmul(left, right) * signs
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
