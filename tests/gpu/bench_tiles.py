"""Tile maps on a GPU: time and memory, beside torch's create_block_mask and FlashAttention-4's blocks.

    python tests/gpu/bench_tiles.py           everything that is installed
    python tests/gpu/bench_tiles.py own       without the rivals

needs a GPU. Each map is first compared with the one that NumPy makes, list by list. Ids are
traced, as in training on packed sequences. Times are medians of `ROUNDS` turns of `CALLS` calls,
queued without waiting. `extra` is what XLA allocates besides the map: 8 bytes a tile of the map's
own lists are in `map`.
"""

import functools
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from eqxcute.layers import tile_map
from eqxcute.layers.attention import CausalMask, DocumentMask, SlidingWindowMask
from eqxcute.layers.attention._config import COMPACTION, Compaction
from eqxcute.layers.attention._tiles import CompactKernel, _lists_in_numpy

ROUNDS, CALLS = 11, 20
TILE = 128


def documents(length, count, kind="sorted"):
    """Ids of `count` documents of random lengths."""
    random = np.random.default_rng(0)
    ids = np.zeros(length, np.int32)
    ids[np.sort(random.choice(np.arange(1, length), count - 1, replace=False))] = 1
    ids = np.cumsum(ids, dtype=np.int32)
    return random.permutation(count).astype(np.int32)[ids] if kind == "permuted" else ids


# Name, length, ids, mask of ids; the first is the bar: 0.3 ms, 64 MB.
CASES = [
    (
        "causal & 64 documents",
        262_144,
        documents(262_144, 64),
        lambda ids: CausalMask() & DocumentMask(ids),
    ),
    (
        "the same, ids permuted",
        262_144,
        documents(262_144, 64, "permuted"),
        lambda ids: CausalMask() & DocumentMask(ids),
    ),
    (
        "causal & 32 documents",
        800_000,
        documents(800_000, 32),
        lambda ids: CausalMask() & DocumentMask(ids),
    ),
    (
        "window 4096 & documents",
        96_000,
        documents(96_000, 16),
        lambda ids: SlidingWindowMask(4095) & DocumentMask(ids),
    ),
    (
        "causal & 8 documents (A8)",
        16_384,
        documents(16_384, 8),
        lambda ids: CausalMask() & DocumentMask(ids),
    ),
]


def median(call, wait):
    wait(call())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def check(name, got, want):
    for path, one in jax.tree.leaves_with_path(got):
        other = functools.reduce(lambda x, key: getattr(x, key.name), path, want)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=f"{name} {path}")


def ours(name, length, ids, mask):
    def build(ids, implementation=None):
        return tile_map(mask(ids), length, length, implementation=implementation)

    ids = jnp.asarray(ids)
    host = []
    for _ in range(3):
        start = time.perf_counter()
        want = jax.block_until_ready(build(ids))
        host.append(time.perf_counter() - start)
    print(f"  {want!r}")
    for label, how in (("eqxcute, kernel", "cute"), ("eqxcute, plain JAX", "xla")):
        compiled = jax.jit(functools.partial(build, implementation=how)).lower(ids).compile()
        check(f"{name}, {label}", compiled(ids), want)
        memory = compiled.memory_analysis()
        seconds = median(lambda call=compiled: call(ids), jax.block_until_ready)
        row(
            label,
            seconds,
            f"map {memory.output_size_in_bytes / 1e6:.1f} MB, extra {memory.temp_size_in_bytes / 1e6:.1f} MB, "
            f"{compiled.as_text().count(' fusion(')} fusions",
        )
    row("eqxcute, NumPy on the host, with copies", min(host), "the best of 3")


def row(label, seconds, note):
    print(f"  {label:44} {seconds * 1e3:9.3f} ms  {note}", flush=True)


def torch_peer(length, ids):
    """torch's block mask, built by its compiled function as its own documentation advises."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    held = torch.as_tensor(np.array(ids), device="cuda")

    def mask(b, h, q, k):
        return (q >= k) & (held[q] == held[k])

    def wait(_):
        torch.cuda.synchronize()

    for label, compiled in (("torch create_block_mask, compiled", True), ("torch, eager", False)):
        if not compiled and length > 100_000:
            print(f"  {label:44} not run: it makes a {length} x {length} mask")
            continue
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()

            def call(compiled=compiled):
                return create_block_mask(
                    mask,
                    None,
                    None,
                    length,
                    length,
                    device="cuda",
                    BLOCK_SIZE=TILE,
                    _compile=compiled,
                )

            seconds = median(call, wait)
            peak = torch.cuda.max_memory_allocated() - before
            row(label, seconds, f"peak {peak / 1e6:.1f} MB")
        except Exception as error:  # noqa: BLE001  # a peer that fails is a row, not the end
            print(f"  {label:44} failed: {type(error).__name__}: {str(error)[:120]}")


def flash_peer(length, ids):
    import cutlass
    import torch
    from cutlass import cute
    from flash_attn.cute import utils
    from flash_attn.cute.compute_block_sparsity import compute_block_sparsity

    @cute.jit
    def mask(b, h, q, kv, seqlen_info, aux_tensors):
        ids = aux_tensors[0]
        same = ids[cutlass.Int32(q[0])] == ids[cutlass.Int32(kv[0])]
        return (q >= kv) & utils.scalar_to_ssa(same, cutlass.Boolean)

    held = torch.as_tensor(np.array(ids), device="cuda")

    def call():
        return compute_block_sparsity(TILE, TILE, 1, 1, length, length, mask, [held], "cuda")

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = median(call, lambda _: torch.cuda.synchronize())
    peak = torch.cuda.max_memory_allocated() - before
    row("flash-attn-4 compute_block_sparsity", seconds, f"peak {peak / 1e6:.1f} MB")


def peers(name, length, ids):
    if "documents" not in name or "window" in name:
        return
    for peer in (torch_peer, flash_peer):
        try:
            peer(length, ids)
        except ImportError as error:
            print(f"  {peer.__name__}: not installed ({error})")
        except Exception as error:  # noqa: BLE001  # a peer that fails is a row, not the end
            print(f"  {peer.__name__} failed: {type(error).__name__}: {str(error)[:120]}")


def kernel_alone():
    """Settings of the compaction kernel, on the bar's verdicts: reads 4.2 MB, writes 16.8 MB."""
    _, length, ids, mask = CASES[0]
    tiles = tile_map(mask(jnp.asarray(ids)), length, length)
    verdicts = tiles.verdicts()
    want, _ = _lists_in_numpy(np.asarray(verdicts))
    print(f"compaction alone, {verdicts.shape[-2]} rows of {verdicts.shape[-1]}")
    for warps in (1, 2, 4, 8):
        for loads in (4, 8, 16):
            config = Compaction(warps=warps, loads=loads)
            kernel = jax.jit(CompactKernel(config))
            for one, other in zip(
                kernel(verdicts), (want.tiles, want.partial, want.full), strict=True
            ):
                np.testing.assert_array_equal(one, other)
            seconds = median(lambda kernel=kernel: kernel(verdicts), jax.block_until_ready)
            chosen = " (the default)" if config == COMPACTION else ""
            row(f"warps {warps}, loads {loads}{chosen}", seconds, "")


def main():
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    print(asked.stdout.strip() or jax.devices()[0].device_kind, "| JAX", jax.__version__)
    for name, length, ids, mask in CASES:
        print(f"\n{name}, length {length}, tile {TILE}")
        ours(name, length, ids, mask)
        if "own" not in sys.argv[1:]:
            peers(name, length, ids)
    print()
    kernel_alone()


if __name__ == "__main__":
    main()
