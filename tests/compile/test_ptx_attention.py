"""An attention kernel of tensor cores, `ldmatrix` and `cp.async`, run on this CPU.

It has most of what makes such kernels go wrong: two stages in flight, swizzled tiles, ragged
ends, fragments that change their role. Taking a wait or a barrier out must be noticed.
"""

import math
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Constexpr, Float32, const_expr, range_constexpr  # noqa: E402
from cutlass.cute.nvgpu import CopyUniversalOp, LoadCacheMode, cpasync, warp  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402
from cutlass.memory import SmemAllocator  # noqa: E402

from eqxcute._ptx import KernelFault, execute  # noqa: E402

BF16 = ml_dtypes.bfloat16
DIM = 64


def rows_view(layout):  # accumulator ((2 cols, 2 rows), M, N) -> (rows, cols)
    ((sc, sr), sm, sn), ((dc, dr), dm, dn) = layout.shape, layout.stride
    return cute.make_layout(((sr, sm), (sc, sn)), stride=((dr, dm), (dc, dn)))


def operand_a_view(
    layout,
):  # accumulator ((2, 2), M, N) -> operand A ((2, 2, 2), M, N/2) of the next m16n8k16
    pairs = cute.logical_divide(layout, (None, None, 2))
    ((sc, sr), sm, (s2, sn)), ((dc, dr), dm, (d2, dn)) = pairs.shape, pairs.stride
    return cute.make_layout(((sc, sr, s2), sm, sn), stride=((dc, dr, d2), dm, dn))


class AttentionSm80:  # o = softmax(scale q k^T + mask) v, scale > 0; a CTA makes tile_m rows of one head
    def __init__(self, dim, causal, tile_m=64, tile_n=64, warps=4, without=()):
        self.dim, self.causal, self.tile_m, self.tile_n, self.warps = (
            dim,
            causal,
            tile_m,
            tile_n,
            warps,
        )
        self.without = without

    @cute.jit
    def __call__(
        self, stream, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, scale: Float32
    ):
        atom = cute.make_composed_layout(
            cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, 64), stride=(64, 1))
        )
        q_layout = cute.tile_to_shape(atom, (self.tile_m, self.dim), (0, 1))
        kv_layout = cute.tile_to_shape(atom, (self.tile_n, self.dim, 2), (0, 1, 2))  # two stages
        by_rows = (
            cute.make_ordered_layout((4 * self.warps, 8), order=(1, 0)),
            cute.make_layout((1, 8)),
        )
        g2s = cute.make_copy_atom(
            cpasync.CopyG2SOp(LoadCacheMode.GLOBAL), q.element_type, num_bits_per_copy=128
        )
        s2g = cute.make_copy_atom(CopyUniversalOp(), q.element_type, num_bits_per_copy=128)
        g2s, s2g = cute.make_tiled_copy_tv(g2s, *by_rows), cute.make_tiled_copy_tv(s2g, *by_rows)
        op = warp.MmaF16BF16Op(q.element_type, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, (self.warps, 1, 1), (16 * self.warps, 16, 16))
        grid = [cute.ceil_div(q.shape[1], self.tile_m), q.shape[2], q.shape[0]]
        if grid[0] * grid[1] * grid[2] > 0:  # an empty grid is a launch error
            self.kernel(
                q, k, v, o, scale * math.log2(math.e), q_layout, kv_layout, g2s, s2g, mma
            ).launch(grid=grid, block=[32 * self.warps, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, q, k, v, o, scale, q_layout, kv_layout, g2s, s2g, mma):
        tid, _, _ = cute.arch.thread_idx()
        x, head, b = cute.arch.block_idx()
        m0 = (cute.arch.grid_dim()[0] - 1 - x) * self.tile_m  # causal: longest rows first
        kv_head = head // (q.shape[2] // k.shape[2])
        mQ, mK, mV, mO = (
            q[b, None, head, None],
            k[b, None, kv_head, None],
            v[b, None, kv_head, None],
            o[b, None, head, None],
        )
        kv_len = mK.shape[0]
        n_tiles = cute.ceil_div(
            cutlass.min(kv_len, m0 + self.tile_m) if const_expr(self.causal) else kv_len,
            self.tile_n,
        )
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(q.element_type, q_layout, 1024)
        sK = smem.allocate_tensor(q.element_type, kv_layout, 1024)
        sV = smem.allocate_tensor(q.element_type, kv_layout, 1024)
        sVt = cute.make_tensor(
            sV.iterator, cute.select(sV.layout, mode=[1, 0, 2])
        )  # (dim, tile_n, stage)
        thr = mma.get_slice(tid)
        acc_o = cute.make_rmem_tensor(thr.partition_shape_C((self.tile_m, self.dim)), Float32)
        row_max = cute.make_rmem_tensor(cute.size(rows_view(acc_o.layout), mode=[0]), Float32)
        row_sum = cute.make_rmem_tensor_like(row_max)
        for tensor, value in ((acc_o, 0.0), (row_max, -Float32.inf), (row_sum, 0.0)):
            tensor.fill(value)
        coords = thr.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))
        self.load(g2s, tid, mQ, sQ, m0)
        self.load(g2s, tid, mK, sK[None, None, 0], 0)
        self.load(g2s, tid, mV, sV[None, None, 0], 0)
        cute.arch.cp_async_commit_group()
        for j in cutlass.range(n_tiles, unroll=1):
            n0, stage = j * self.tile_n, j % 2
            if const_expr("wait" not in self.without):
                cute.arch.cp_async_wait_group(0)  # tile j is here, and ...
            if const_expr("barrier" not in self.without):
                cute.arch.sync_threads()  # ... nobody reads tile j - 1 any more
            if j + 1 < n_tiles:
                self.load(g2s, tid, mK, sK[None, None, 1 - stage], n0 + self.tile_n)
                self.load(g2s, tid, mV, sV[None, None, 1 - stage], n0 + self.tile_n)
            cute.arch.cp_async_commit_group()
            acc_s = cute.make_rmem_tensor(
                thr.partition_shape_C((self.tile_m, self.tile_n)), Float32
            )
            acc_s.fill(0.0)
            self.gemm(mma, tid, acc_s, sQ, sK[None, None, stage], False)
            last = n0 + self.tile_n - 1
            if (last >= kv_len) | (last > m0) if const_expr(self.causal) else last >= kv_len:
                self.mask(acc_s, coords, m0, n0, kv_len)
            self.softmax_step(acc_s, acc_o, row_max, row_sum, scale)
            p = cute.make_rmem_tensor(acc_s.layout, q.element_type)
            p.store(acc_s.load().to(q.element_type))
            self.gemm(
                mma,
                tid,
                acc_o,
                cute.make_tensor(p.iterator, operand_a_view(p.layout)),
                sVt[None, None, stage],
                True,
            )
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.store(mma, s2g, tid, mO, acc_o, row_sum, sQ, m0)

    @cute.jit
    def load(
        self, g2s, tid, m, s, first
    ):  # rows first, first + 1, ... of m; rows past the end become zeros
        tile, thr = (cute.size(s, mode=[0]), self.dim), g2s.get_slice(tid)
        src = thr.partition_S(cute.local_tile(cute.domain_offset((first, 0), m), tile, (0, 0)))
        dst, at = thr.partition_D(s), thr.partition_S(cute.make_identity_tensor(tile))
        for i in range_constexpr(cute.size(dst, mode=[1])):
            if first + at[0, i, 0][0] < m.shape[0]:
                cute.copy(g2s, src[None, i, None], dst[None, i, None])
            elif const_expr("zeros" not in self.without):
                dst[None, i, None].fill(0)

    @cute.jit
    def gemm(
        self, mma, tid, acc, a, sB, b_is_n_major: Constexpr
    ):  # acc += a B^T; a: shared memory, or registers
        thr = mma.get_slice(tid)
        copy_b = cute.make_tiled_copy_B(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(b_is_n_major, 4), sB.element_type), mma
        )
        rA, rB = a, thr.make_fragment_B(thr.partition_B(sB))
        from_b, to_b = copy_b.get_slice(tid).partition_S(sB), copy_b.get_slice(tid).retile(rB)
        if const_expr(a.memspace == cute.AddressSpace.smem):
            copy_a = cute.make_tiled_copy_A(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), a.element_type), mma
            )
            rA = thr.make_fragment_A(thr.partition_A(a))
            from_a, to_a = copy_a.get_slice(tid).partition_S(a), copy_a.get_slice(tid).retile(rA)
        for kk in range_constexpr(cute.size(rA, mode=[2])):
            if const_expr(a.memspace == cute.AddressSpace.smem):
                cute.copy(copy_a, from_a[None, None, kk], to_a[None, None, kk])
            cute.copy(copy_b, from_b[None, None, kk], to_b[None, None, kk])
            cute.gemm(mma, acc, rA[None, None, kk], rB[None, None, kk], acc)

    @cute.jit
    def mask(self, acc_s, coords, m0, n0, kv_len):
        for i in range_constexpr(cute.size(acc_s)):
            row, col = m0 + coords[i][0], n0 + coords[i][1]
            keep = (col < kv_len) & (col <= row) if const_expr(self.causal) else col < kv_len
            acc_s[i] = acc_s[i] if keep else -Float32.inf

    @cute.jit
    def softmax_step(
        self, acc_s, acc_o, row_max, row_sum, scale
    ):  # acc_s becomes exp(s - max); scale has log2(e)
        s = cute.make_tensor(acc_s.iterator, rows_view(acc_s.layout))
        o = cute.make_tensor(acc_o.iterator, rows_view(acc_o.layout))
        for r in range_constexpr(cute.size(row_max)):
            old = row_max[r]
            new = s[r, None].load().reduce(cute.ReductionOp.MAX, old, 0)
            new = cute.arch.warp_reduction_max(new, threads_in_group=4)  # four lanes share a row
            base = Float32(0.0) if new == -Float32.inf else new * scale  # a row that sees nothing
            p = cute.math.exp2(s[r, None].load() * scale - base, fastmath=True)
            shrink = cute.math.exp2(old * scale - base, fastmath=True)
            row_max[r] = new
            row_sum[r] = p.reduce(
                cute.ReductionOp.ADD, row_sum[r] * shrink, 0
            )  # this lane's columns only
            s[r, None].store(p)
            o[r, None].store(o[r, None].load() * shrink)

    @cute.jit
    def store(self, mma, s2g, tid, mO, acc_o, row_sum, sO, m0):
        o = cute.make_tensor(acc_o.iterator, rows_view(acc_o.layout))
        for r in range_constexpr(cute.size(row_sum)):
            total = cute.arch.warp_reduction_sum(row_sum[r], threads_in_group=4)
            o[r, None].store(
                o[r, None].load() * (Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total))
            )
        rO = cute.make_rmem_tensor(acc_o.layout, mO.element_type)
        rO.store(acc_o.load().to(mO.element_type))
        r2s = cute.make_tiled_copy_C(
            cute.make_copy_atom(CopyUniversalOp(), mO.element_type), mma
        ).get_slice(tid)
        cute.copy(
            r2s, r2s.retile(rO), r2s.partition_D(sO)
        )  # a warp overwrites the rows of Q that only it read
        cute.arch.sync_threads()
        tile, thr = (self.tile_m, self.dim), s2g.get_slice(tid)
        dst = thr.partition_D(cute.local_tile(cute.domain_offset((m0, 0), mO), tile, (0, 0)))
        src, at = thr.partition_S(sO), thr.partition_S(cute.make_identity_tensor(tile))
        for i in range_constexpr(cute.size(dst, mode=[1])):
            if m0 + at[0, i, 0][0] < mO.shape[0]:
                cute.copy(s2g, src[None, i, None], dst[None, i, None])


def build(kernel, arch):
    """**Returns:** object, name and PTX."""

    def tensor():
        sizes = (*(cute.sym_int32() for _ in range(3)), DIM)
        return make_fake_compact_tensor(
            BFloat16, sizes, stride_order=(3, 2, 1, 0), assumed_align=16
        )

    q, kv, stream = tensor(), tensor(), make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --generate-line-info --keep-ptx --dump-dir {folder}"
        compiled = cute.compile(kernel, stream, q, kv, kv, q, 1.0, options=options)
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(
            str(path), function_name="eqxcute_attention", export_only_tvm_ffi_symbols=True
        )
        return path.read_bytes(), "eqxcute_attention", compiled.artifacts.PTX


def inputs(batch, heads, kv_heads, queries, keys):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, queries, heads, DIM)).astype(BF16)
    k = rng.standard_normal((batch, keys, kv_heads, DIM)).astype(BF16)
    v = rng.standard_normal((batch, keys, kv_heads, DIM)).astype(BF16)
    return q, k, v


def attention(q, k, v, scale, causal):
    """In float64. A row that sees nothing gives 0."""
    q, k, v = (x.astype("f8") for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def run(built, q, k, v, scale):
    out = np.zeros_like(q)
    execute(*built, [q, k, v, out, scale], names=["q", "k", "v", "o", "scale"], written=[3])
    return out.astype("f8")


@pytest.mark.parametrize(("arch", "causal"), [("sm_80", True), ("sm_90a", False)])
def test_attention_is_right_to_bfloat16(arch, causal):
    built = build(AttentionSm80(DIM, causal), arch)
    assert all(op in built[2] for op in ("mma.sync", "ldmatrix", "cp.async.cg"))
    # Two heads to one of the keys'; ends in the middle of a tile; then a single query.
    for sizes in ((1, 2, 1, 70, 130), (2, 1, 1, 1, 1)):
        q, k, v = inputs(*sizes)
        got, want = run(built, q, k, v, 0.125), attention(q, k, v, 0.125, causal)
        # P and the output are rounded to bfloat16 (8 bits): half a last place each.
        assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max() + 2.0**-8


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("wait", "while a cp.async to them is in flight"),
        ("barrier", "race on bytes"),
        ("zeros", "uninitialised: reads bytes"),
    ],
)
def test_what_is_missing_is_noticed(without, words):
    built = build(AttentionSm80(DIM, False, without=(without,)), "sm_80")
    with pytest.raises(KernelFault) as caught:
        run(built, *inputs(1, 1, 1, 70, 130), 0.125)
    assert words in str(caught.value)
    assert f"{Path(__file__).name}:" in str(caught.value)
    assert caught.value.thread is not None
