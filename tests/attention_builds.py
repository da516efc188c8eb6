"""Attention's kernels, compiled for any architecture, and what their cubins hold.

The cubins are read with no tool: an instruction is 16 bytes, whose low 12 bits are its opcode. Those used by tests have
been the same since Volta. nvdisasm 13.5 finds the same instructions.
"""

import struct

import jax
import jax.numpy as jnp
from eqxcute.layers.attention import _attend
from eqxcute.layers.attention._compiled import Functions, compiled
from eqxcute.layers.attention._config import MapLayout
from eqxcute.layers.attention._functions import trace_mask, trace_score

from eqxcute.testing import compile_only

STORE_LOCAL, LOAD_LOCAL = 0x387, 0x983


def like(*shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def capped(s, b, h, q_idx, kv_idx):
    return 20 * jnp.tanh(s / 20)


def built(
    direction,
    dim,
    architecture,
    dtype="bfloat16",
    mask=None,
    score=None,
    deterministic=False,
    **settings,
):
    """A kernel of 2 query heads to one of the keys'. `settings` are more of the forward kernel's fields."""
    mask = None if mask is None else compiled(*trace_mask(mask))[0]
    score = None if score is None else compiled(*trace_score(score, jnp.float32, longest=300))[0]
    lists, layout = None, None
    if mask is not None:
        lists = (tuple(like(1, 1, *n) for n in ((3, 3), (3,), (3,), (3,))),) * 2
        layout = MapLayout((), False, False, (128, 128))
    precision = "3xtf32" if dtype == "float32" else None
    q, k, lse = (
        like(1, 300, 1, 2, dim, dtype=dtype),
        like(1, 300, 1, dim, dtype=dtype),
        like(1, 1, 2, 300, dtype="float32"),
    )
    where = like(1, 1), like(1, 2), lists, (), ()
    functions = Functions(mask, score)
    if direction == "forward":
        kernel = _attend.ForwardKernel(functions, layout, precision, 0.1, **settings)
        return compile_only(kernel, q, k, k, *where, architecture=architecture)
    kernel = _attend.BackwardKernel(
        functions.differentiated(), layout, precision, (), 0.1, deterministic
    )
    return compile_only(kernel, q, k, k, q, lse, q, lse, *where, architecture=architecture)


def sections(cubin):
    """Name, header and bytes of each: ELF, 64 bits."""
    (first,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, first + i * size) for i in range(count)]
    for header in headers:
        at = headers[names][4] + header[0]
        yield cubin[at : cubin.index(b"\0", at)].decode(), header, cubin[header[4] :][: header[5]]
