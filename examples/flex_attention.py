"""Masks and scores from papers, a few lines each, and what a kernel skips of each.

    uv run --extra examples examples/flex_attention.py

Each goes through `flex_attention`, forward and backward, and is compared with dense attention in
float32. A table shows the shares of tiles that are empty (skipped), partial (computed with the
mask) and full (without it), the largest error, and the time of a call. Pictures of each mask and
its tiles go to runs/flex_attention/. The exit code is 1 if an error is over its tolerance.

On an NVIDIA GPU the CuTe kernels run, in bfloat16; elsewhere plain JAX, in float32 and smaller.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqxcute.layers import TileMap, flex_attention, tile_map
from jaxtyping import Array, Bool, Float, Int
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from eqxcute.testing import benchmark

# ------------------------------------------------------------------------------------------- masks
#
# A mask says of one query and one key whether the query may see the key. `b` is the example in the
# batch and `h` the query head. Numbers that shape the model are static; what changes from batch to
# batch is an array, and another array compiles nothing anew.


def causal(b, h, q_idx, kv_idx):
    """No query sees a later key (Vaswani et al. 2017)."""
    return q_idx >= kv_idx


class Window(eqx.Module):
    """The query's own key and the `size - 1` before it (Beltagy et al. 2020; Jiang et al. 2023)."""

    size: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size)


class DilatedWindow(eqx.Module):
    """A window for the first half of the heads; for the others as many keys, `step` apart, so that
    they reach further at the same price (Beltagy et al. 2020)."""

    size: int = eqx.field(static=True)
    step: int = eqx.field(static=True)
    heads: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx):
        step = jnp.where(h < self.heads // 2, 1, self.step)
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < self.size * step) & (distance % step == 0)


class Chunks(eqx.Module):
    """The sequence in blocks, each of which sees itself alone, causally (Liu et al. 2018)."""

    size: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx // self.size == kv_idx // self.size)


class SinksAndWindow(eqx.Module):
    """A window, and the first few keys for ever: attention that has nothing to look at goes there
    (Xiao et al. 2023, StreamingLLM)."""

    sinks: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < self.size) | (kv_idx < self.sinks))


class PrefixLM(eqx.Module):
    """A prefix that is read in both directions, then causal (Raffel et al. 2020)."""

    prefix: Int[Array, " batch"]

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < self.prefix[b])


class Documents(eqx.Module):
    """Documents packed into one row see only themselves (Krell et al. 2021)."""

    document: Int[Array, "batch length"]

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (self.document[b, q_idx] == self.document[b, kv_idx])


class Lengths(eqx.Module):
    """Examples of unequal length, padded to one. Padded queries see nothing and give 0 (an encoder
    such as that of Devlin et al. 2019)."""

    length: Int[Array, " batch"]

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx < self.length[b]) & (kv_idx < self.length[b])


class Tree(eqx.Module):
    """Speculative decoding: a tree of guesses, checked in one call. The queries are the guesses,
    the keys a cache and then the guesses; each sees the cache, itself and what it follows from
    (Miao et al. 2023, SpecInfer; Cai et al. 2024, Medusa)."""

    is_ancestor: Bool[Array, "guesses guesses"]
    cached: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx):
        # At least 0: a negative index would count from the end.
        guess = jnp.maximum(kv_idx - self.cached, 0)
        return (kv_idx < self.cached) | self.is_ancestor[q_idx, guess]


def ancestors(parents: list[int]) -> Bool[np.ndarray, "guesses guesses"]:
    """Row i: node i and those above it. A parent stands before its children; the root's is -1."""
    table = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table


# ------------------------------------------------------------------------------------------ scores
#
# A score function changes q . k / sqrt(dim) before the softmax. Float arrays in it get gradients.


class ALiBi(eqx.Module):
    """A penalty on distance, of another slope for each head (Press et al. 2021)."""

    heads: int = eqx.field(static=True)

    def __call__(self, score, b, h, q_idx, kv_idx):
        slope = jnp.exp2(-8.0 * (h + 1) / self.heads)
        return score - slope * (q_idx - kv_idx)


class BucketBias(eqx.Module):
    """A learned bias for each head and bucket of distances: near ones have a bucket each, far ones
    share, up to 128, beyond which all is one (Raffel et al. 2020, T5, its decoder)."""

    table: Float[Array, "heads buckets"]

    def __call__(self, score, b, h, q_idx, kv_idx):
        near = self.table.shape[1] // 2
        distance = jnp.maximum(q_idx - kv_idx, 0)
        octaves = jnp.log(jnp.maximum(distance, near) / near) / math.log(128 / near)  # 0 to 1
        far = jnp.minimum(near + (near * octaves).astype(jnp.int32), 2 * near - 1)
        return score + self.table[h, jnp.where(distance < near, distance, far)]


class DistanceBias(eqx.Module):
    """A learned bias for each head and distance, clipped (Shaw et al. 2018, on scores alone)."""

    table: Float[Array, "heads distances"]

    def __call__(self, score, b, h, q_idx, kv_idx):
        most = self.table.shape[1] - 1
        return score + self.table[h, jnp.clip(q_idx - kv_idx, 0, most)]


def soft_cap(score, b, h, q_idx, kv_idx):
    """Scores stay between -50 and 50 (Gemma Team 2024, Gemma 2)."""
    return 50.0 * jnp.tanh(score / 50.0)


# ------------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int = 2
    length: int = 512
    heads: int = 4
    kv_heads: int = 2  # each serves two query heads
    dim: int = 32
    dtype: str = "float32"
    tile: int = 64


CPU = Sizes()
# Kernels step through tiles of 128 or divisors of it.
GPU = Sizes(length=4096, heads=8, dim=64, dtype="bfloat16", tile=128)
# Of the largest number of each result, the output or a gradient. bfloat16 has 8 bits, and the
# backward pass rounds probabilities and scores' gradients to it before it sums.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}


class Case(NamedTuple):
    mask: Callable
    score: Callable | None = None
    sink: Float[Array, " heads"] | None = None  # a logit per head that takes part without a value
    q_len: int | None = None  # as many as keys, else


def cases(sizes: Sizes) -> dict[str, Case]:
    length, heads = sizes.length, sizes.heads
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    part = jnp.asarray(rng.integers(length // 4, length, sizes.batch), jnp.int32)
    document = jnp.asarray(np.sort(rng.integers(0, 5, (sizes.batch, length))), jnp.int32)
    guesses = min(64, length // 2)
    tree = ancestors([(node - 1) // 3 if node else -1 for node in range(guesses)])
    window = length // 4
    return {
        "causal": Case(causal),
        "window": Case(Window(window)),
        "dilated": Case(DilatedWindow(window // 4, 4, heads)),
        "chunks": Case(Chunks(length // 4)),
        "sinks": Case(SinksAndWindow(4, window)),
        "prefix": Case(PrefixLM(part // 2)),
        "documents": Case(Documents(document)),
        "lengths": Case(Lengths(part)),
        "tree": Case(Tree(jnp.asarray(tree), length - guesses), q_len=guesses),
        "alibi": Case(causal, ALiBi(heads)),
        "buckets": Case(causal, BucketBias(draw(heads, 32))),
        "distances": Case(causal, DistanceBias(draw(heads, 17))),
        "soft cap": Case(causal, soft_cap),
        # A head may attend to nothing in particular (OpenAI 2025, gpt-oss; cf. Xiao et al. 2023).
        "learned sink": Case(Window(window), sink=draw(heads)),
    }


# ------------------------------------------------------------------------------------------- check


def dense(q, k, v, mask, score, sink):
    """The formula, with all scores at once. Masks and scores take whole arrays of indices too."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / math.sqrt(q.shape[-1])
    at = jnp.ix_(*map(jnp.arange, s.shape))  # b, h, q_idx, kv_idx, each along its own axis
    s = s if score is None else score(s, *at)
    seen = mask(*at)
    s = jnp.where(seen, s, -1e30)  # finite: a row that sees nothing has no inf - inf
    top = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    p = jnp.where(seen, jnp.exp(s - top), 0)
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink[:, None, None] - top)
    p /= jnp.maximum(total, 1e-30)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")


def flex(q, k, v, mask, score, sink, tiles, implementation):
    return flex_attention(
        q, k, v, mask, score, sink=sink, tiles=tiles, implementation=implementation
    )


@eqx.filter_jit
def with_gradients(attend, cotangent, mask, floats, *more):
    """The output, and the gradients of q, k, v, and of what score and sink hold."""
    out, pull = eqx.filter_vjp(lambda f: attend(*f[:3], mask, *f[3:], *more), floats)
    return out, pull(cotangent.astype(out.dtype))[0]


def largest_error(got: Any, want: Any) -> float:
    """Over all results, each relative to its largest number. NaN if anything is."""

    def error(got, want):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        return np.abs(got - want).max() / np.abs(want).max()

    return float(np.max(jax.tree.leaves(jax.tree.map(error, got, want))))


class Result(NamedTuple):
    tiles: TileMap
    error: float
    forward: float  # seconds a call
    backward: float  # seconds a call, forward included


def run(case: Case, sizes: Sizes, implementation: str | None) -> Result:
    q_len = case.q_len or sizes.length
    keys = jax.random.split(jax.random.key(0), 4)
    shape = lambda length, heads: (sizes.batch, length, heads, sizes.dim)  # noqa: E731
    q = jax.random.normal(keys[0], shape(q_len, sizes.heads), sizes.dtype)
    k, v = (
        jax.random.normal(key, shape(sizes.length, sizes.kv_heads), sizes.dtype)
        for key in keys[1:3]
    )
    cotangent = jax.random.normal(keys[3], q.shape, sizes.dtype)
    tile = (sizes.tile, sizes.tile)
    tiles = tile_map(
        case.mask, q_len, sizes.length, batch=sizes.batch, heads=sizes.heads, tile=tile
    )
    floats = (q, k, v, case.score, case.sink)
    wide = (*(x.astype(jnp.float32) for x in (q, k, v)), case.score, case.sink)
    attention = (flex, cotangent, case.mask, floats, tiles, implementation)
    got = with_gradients(*attention)
    want = with_gradients(dense, cotangent, case.mask, wide)

    few = {} if on_gpu() else dict(calls=2, rounds=3)
    forward = eqx.filter_jit(flex)
    arguments = (q, k, v, case.mask, case.score, case.sink, tiles, implementation)
    return Result(
        tiles,
        largest_error(got, want),
        benchmark(forward, *arguments, **few),
        benchmark(with_gradients, *attention, **few),
    )


# ---------------------------------------------------------------------------------------- pictures


def draw(path: pathlib.Path, name: str, case: Case, tiles: TileMap):
    """The mask and its tiles, of the first example and the last head."""
    b, h = 0, tiles.heads - 1
    q_idx, kv_idx = np.ix_(np.arange(tiles.q_len), np.arange(tiles.kv_len))
    seen = np.asarray(case.mask(b, h, q_idx, kv_idx))
    figure = Figure(figsize=(10, 4.5), layout="constrained")  # without pyplot: needs no display
    left, right = figure.subplots(1, 2)
    left.imshow(seen, cmap=ListedColormap(["#f2f2f2", "#2f5d8a"]), aspect="auto", vmin=0, vmax=1)
    left.set(title=f"{name}: example {b}, head {h}", xlabel="key", ylabel="query")
    tiles.draw(right, b=b, h=h).set(aspect="auto", title="tiles")
    figure.savefig(path, dpi=100)


# ------------------------------------------------------------------------------------ command line


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def runs_as(sizes: Sizes, implementation: str | None) -> str:
    """What `flex_attention` picks: asks for the kernel, to see whether it is had."""
    if implementation == "xla":
        return "plain JAX, as asked"
    q = jax.ShapeDtypeStruct((sizes.length, sizes.heads, sizes.dim), sizes.dtype)
    kv = jax.ShapeDtypeStruct((sizes.length, sizes.kv_heads, sizes.dim), sizes.dtype)
    try:
        jax.eval_shape(lambda *qkv: flex_attention(*qkv, causal, implementation="cute"), q, kv, kv)
    except NotImplementedError as error:
        if implementation == "cute":
            sys.exit(f"flex_attention: {error}")
        return "plain JAX"
    return "CuTe kernels"


def main(arguments: list[str] | None = None):
    preset = GPU if on_gpu() else CPU
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/flex_attention"))
    parser.add_argument("--length", type=int, default=preset.length, help="at least 64")
    parser.add_argument("--tile", type=int, default=preset.tile, help="queries and keys of a tile")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="instead of all")
    parser.add_argument("--implementation", choices=("cute", "xla"), help="default: the layer's")
    flags = parser.parse_args(arguments)
    if flags.length < 64:
        parser.error(f"--length must be at least 64, not {flags.length}")
    sizes = dataclasses.replace(preset, length=flags.length, tile=flags.tile)
    chosen = cases(sizes)
    if flags.only:
        if unknown := set(flags.only) - set(chosen):
            parser.error(f"--only: {unknown} are not among {', '.join(map(repr, chosen))}")
        chosen = {name: chosen[name] for name in flags.only}

    device, tolerance = jax.devices()[0], TOLERANCE[sizes.dtype]
    print(f"{device.device_kind} ({device.platform}): {runs_as(sizes, flags.implementation)}")
    print(f"{sizes}\n")
    print(f"{'':14}   share of tiles         error, at    ms a call, and")
    print(f"{'':14}empty partial  full   most {tolerance:.0e}    with gradients")
    flags.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, case in chosen.items():
        result = run(case, sizes, flags.implementation)
        draw(flags.out / f"{name.replace(' ', '_')}.png", name, case, result.tiles)
        counts = result.tiles.counts()
        shares = [count / sum(counts.values()) for count in counts.values()]
        ok = result.error <= tolerance  # False for NaN too
        failed += [] if ok else [name]
        print(
            f"{name:14}{shares[0]:5.0%} {shares[1]:7.0%} {shares[2]:5.0%}  {result.error:9.1e} "
            f"{'' if ok else 'OVER':4} {result.forward * 1e3:8.2f} {result.backward * 1e3:8.2f}",
            flush=True,
        )
    print(f"\nPictures: {flags.out}/")
    if failed:
        sys.exit(f"flex_attention: over the tolerance: {', '.join(failed)}")


if __name__ == "__main__":
    main()
