"""The special registers: who a lane is, and how large the launch is."""

import numpy as np

from ._fault import Unsupported


def _axis(value, axis: str):
    return value["xyz".index(axis)]


def _coordinate(number, size, axis: str):
    if axis == "x":
        return number % size[0]
    if axis == "y":
        return number // size[0] % size[1]
    return number // (size[0] * size[1])


def SPECIALS(m, name: str) -> np.ndarray:
    """One number a lane of the machine `m`."""
    base, _, axis = name.partition(".")
    grid, block = m.launch.grid, m.launch.block
    lane = m.all_lanes & 31
    cta = m.first + m.cta_of
    one = np.uint64(1)
    bit = one << lane.astype(np.uint64)
    values = {
        "tid": lambda: _coordinate(m.thread_of, block, axis),
        "ntid": lambda: _axis(block, axis),
        "ctaid": lambda: _coordinate(cta, grid, axis),
        "nctaid": lambda: _axis(grid, axis),
        # A cluster is one CTA.
        "clusterid": lambda: _coordinate(cta, grid, axis),
        "nclusterid": lambda: _axis(grid, axis),
        "cluster_ctaid": lambda: 0,
        "cluster_nctaid": lambda: 1,
        "cluster_ctarank": lambda: 0,
        "cluster_nctarank": lambda: 1,
        "is_explicit_cluster": lambda: 0,
        "laneid": lambda: lane,
        "warpid": lambda: m.thread_of >> 5,
        "nwarpid": lambda: m.warps,
        "smid": lambda: 0,
        "nsmid": lambda: 1,
        "gridid": lambda: 0,
        "lanemask_eq": lambda: bit,
        "lanemask_lt": lambda: bit - one,
        "lanemask_le": lambda: bit | (bit - one),
        "lanemask_gt": lambda: ~(bit | (bit - one)) & np.uint64(0xFFFFFFFF),
        "lanemask_ge": lambda: ~(bit - one) & np.uint64(0xFFFFFFFF),
        "dynamic_smem_size": lambda: m.launch.dynamic_shared,
        "total_smem_size": lambda: m.launch.shared_bytes,
    }
    if base not in values:
        raise Unsupported(f"the special register %{name}")
    value = np.asarray(values[base](), np.int64)
    return np.ascontiguousarray(np.broadcast_to(value, (m.lanes,))).view(np.uint64)
