"""What tests of attention's two kernels for Hopper share: cases, and what ptxas leaves of a kernel.

Opcodes as nvdisasm 13.5 names them: HGMMA, with its operand `a` in shared memory or in registers, and WARPGROUP, which a fence
is and a wait. Where ptxas serialises products it adds waits, and says C75xx, which CuTe keeps to itself.
"""

import collections
import re
import struct

import jax.numpy as jnp
from attention_builds import LOAD_LOCAL, STORE_LOCAL, causal, sections
from attention_formula import Case

MASKED = Case(lambda c: (causal, None))
PLAIN = Case(lambda c: (None, None))


def soft(c):
    """Of normal scores, some warps' are all small, others' are not; and biases of the distance."""

    def score(s, b, h, q_idx, kv_idx):
        return 7 * jnp.tanh(s / 7) - 0.05 * abs(q_idx - kv_idx)

    return causal, score


def window_and_score(c):
    """A window that starts after some keys, and a score whose slope is NaN where nothing is seen."""

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 60) & (kv_idx >= 5)

    def score(s, b, h, q_idx, kv_idx):
        far = jnp.sqrt((q_idx - kv_idx).astype(jnp.float32) + 1)
        return 3 * jnp.tanh(s / 3) * far / (1 + far)

    return mask, score


def _captured(c):
    """Reads of every kind: by head, distance, key, query and pair."""

    def score(s, b, h, q_idx, kv_idx):
        near = c["table"][jnp.clip(kv_idx - q_idx, -60, 60) + 60]
        by_side = c["keys"][kv_idx] + c["queries"][h, q_idx] + c["pairs"][q_idx, kv_idx]
        return s * c["slopes"][h] + near + by_side

    return causal, score


WINDOW = Case(window_and_score)
SOFT = Case(soft)
ARRAYS = {"slopes": (2,), "table": (121,), "keys": (150,), "queries": (2, 200), "pairs": (200, 150)}
CAPTURED = Case(_captured, ARRAYS)


PRODUCTS, GROUPS = (0x9F0, 0xDF0), 0x9C5


def assert_registers_suffice(found, name: str) -> None:
    """In the kernel of class `name`, nothing is spilled, and no product waits for the one before it."""
    entries = [x for x in re.split(r"\.entry ", found.ptx)[1:] if "wgmma" in x]
    (entry,) = [x for x in entries if name in x[:200]]
    (code,) = [c for n, _, c in sections(found.cubin) if n == f".text.{entry.split('(')[0]}"]
    ops = collections.Counter(low & 0xFFF for low, _ in struct.iter_unpack("<QQ", code))
    products, waits = (
        len(re.findall(rf"wgmma\.{x}", entry)) for x in ("mma_async", "(fence|wait)")
    )
    assert products > 0
    assert sum(ops[x] for x in PRODUCTS) == products
    assert ops[GROUPS] <= waits
    assert ops[STORE_LOCAL] == ops[LOAD_LOCAL] == 0
