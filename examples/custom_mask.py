"""A mask that trains: each head learns how far back it looks (Sukhbaatar et al. 2019).

    uv run --extra examples examples/custom_mask.py

The task has a known answer: head h must give the mean of the last WINDOWS[h] tokens, and the tokens
are noise, so that no other span will do. All heads start with the same span. It prints the spans
before and after, the loss, and which tiles of queries and keys each head may skip. The exit code is
1 if the loss or a span ends where it should not.

On an NVIDIA GPU attention runs as CuTe kernels, in bfloat16; elsewhere as plain JAX, in float32.
"""

import argparse
import dataclasses
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from eqxcute.layers import FlexAttention, tile_map
from jaxtyping import Array, Bool, Float

# ------------------------------------------------------------------------------------ mask and score


class AdaptiveSpan(eqx.Module):
    """Each head sees `span` keys in full, and then a ramp of `ramp` keys on which its attention
    falls to nothing. Past the ramp a mask forbids what is nothing anyway, so that kernels skip it.

    The spans train through the ramp: with distance x, softmax weights are multiplied by

        m(x) = clip((span + ramp - x) / ramp, 0, 1),     that is, log m(x) is added to the scores.
    """

    share: Float[Array, " heads"]  # of `longest`: numbers near 1 suit optimisers
    longest: int = eqx.field(static=True)
    ramp: int = eqx.field(static=True)

    @property
    def span(self) -> Float[Array, " heads"]:
        return self.longest * jnp.clip(self.share, 0, 1)

    @property
    def seen(self) -> Float[Array, " heads"]:
        """How many keys a query sees: the weights m(x) of all distances together."""
        return self.span + (self.ramp + 1) / 2

    def mask(self, b, h, q_idx, kv_idx) -> Bool[Array, ""]:
        # A mask is True or False and has no gradient; the spans may be read in it nonetheless.
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < self.span[h] + self.ramp)

    def score(self, score, b, h, q_idx, kv_idx) -> Float[Array, ""]:
        weight = (self.span[h] + self.ramp - (q_idx - kv_idx)) / self.ramp
        # At least a millionth: the logarithm of 0 has no gradient, and the mask does the rest.
        return score + jnp.log(jnp.clip(weight, 1e-6, 1.0))


# --------------------------------------------------------------------------------------------- model


@dataclasses.dataclass(frozen=True)
class Settings:
    length: int = 256
    dim: int = 16  # of a token, and of a head
    windows: tuple[int, ...] = (6, 20, 48, 90)  # what each head must find out
    start: int = 32  # the span of all heads at first
    longest: int = 128
    ramp: int = 4
    batch: int = 4
    steps: int = 200
    dtype: str = "float32"
    tile: int = 32  # for the map that is printed

    # A ramp is no edge: what it costs is about 2% of the targets' variance, most of it in the
    # smallest window. Guessing 0 has a loss of 1.
    level: float = 0.06


CPU = Settings()
GPU = Settings(
    length=4096,
    dim=64,
    windows=(24, 80, 192, 360),
    start=128,
    longest=512,
    ramp=16,
    dtype="bfloat16",
    tile=128,
)


class Model(eqx.Module):
    """One layer of attention. Queries and keys must learn to say nothing, values the tokens."""

    query: Float[Array, "dim heads dim"]
    key: Float[Array, "dim heads dim"]
    value: Float[Array, "dim heads dim"]
    adaptive: AdaptiveSpan
    dtype: str = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(self, settings: Settings, implementation: str | None, key):
        heads, dim = len(settings.windows), settings.dim
        keys = jax.random.split(key, 3)
        matrices = [jax.random.normal(k, (dim, heads, dim)) / dim**0.5 for k in keys]
        self.query, self.key, self.value = matrices
        share = jnp.full(heads, settings.start / settings.longest)
        self.adaptive = AdaptiveSpan(share, settings.longest, settings.ramp)
        self.dtype, self.implementation = settings.dtype, implementation

    def __call__(self, x: Float[Array, "length dim"]) -> Float[Array, "length heads dim"]:
        q, k, v = (
            jnp.einsum("td,dhe->the", x, w).astype(self.dtype)
            for w in (self.query, self.key, self.value)
        )
        # Two methods of one module: both hold the spans, and the score's copy gets the gradient.
        attend = FlexAttention(
            self.adaptive.mask, self.adaptive.score, implementation=self.implementation
        )
        return attend(q, k, v).astype(jnp.float32)


def target(x: Float[Array, "length dim"], windows) -> Float[Array, "length heads dim"]:
    """The mean of the last `window` tokens, or of as many as there are."""
    sums = jnp.cumsum(x, axis=0)
    at = jnp.arange(1, 1 + x.shape[0])[:, None]
    means = [
        (sums - jnp.pad(sums, ((w, 0), (0, 0)))[: -w or None]) / jnp.minimum(at, w) for w in windows
    ]
    return jnp.stack(means, axis=1)


def mean_loss(model: Model, x: Float[Array, "batch length dim"], windows) -> Float[Array, ""]:
    """Mean square error, where the targets of each head have a variance of 1."""
    want = jax.vmap(lambda x: target(x, windows))(x)
    error = jax.vmap(model)(x) - want
    return jnp.mean(jnp.mean(error**2, (0, 1, 3)) / jnp.mean(want**2, (0, 1, 3)))


# ---------------------------------------------------------------------------------------------- run


def tokens(settings: Settings, key) -> Float[Array, "batch length dim"]:
    return jax.random.normal(key, (settings.batch, settings.length, settings.dim))


def train(settings: Settings, model: Model) -> tuple[Model, float]:
    """The trained model, and its loss on tokens that it never saw."""
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, settings.steps, alpha=0.05))

    @eqx.filter_jit(donate="all")
    def step(model, moments, key):
        loss, gradient = eqx.filter_value_and_grad(mean_loss)(
            model, tokens(settings, key), settings.windows
        )
        updates, moments = optimiser.update(gradient, moments)
        return eqx.apply_updates(model, updates), moments, loss

    moments = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    *keys, last = jax.random.split(jax.random.key(1), settings.steps + 1)
    for i, key in enumerate(keys):
        before = row(model.adaptive.seen)
        model, moments, loss = step(model, moments, key)
        if i % max(settings.steps // 8, 1) == 0:
            print(f"step {i:4}, loss {loss:.3f}: {before}", flush=True)
    loss = eqx.filter_jit(mean_loss)(model, tokens(settings, last), settings.windows)
    return model, float(loss)


def row(numbers: Array, form: str = "7.1f") -> str:
    return " ".join(format(number, form) for number in numbers.tolist())


def share_of_tiles(model: Model, settings: Settings) -> Float[Array, " heads"]:
    """Those that each head computes. The others are skipped by a kernel."""
    length, heads, tile = settings.length, len(settings.windows), settings.tile
    tiles = tile_map(model.adaptive.mask, length, length, heads=heads, tile=(tile, tile))
    return (tiles.verdicts() > 0).mean((0, 2, 3))


def runs_as(settings: Settings, implementation: str | None) -> str:
    """What the layer picks: asks for the kernel, to see whether it is had."""
    if implementation == "xla":
        return "plain JAX, as asked"
    x = jax.ShapeDtypeStruct((settings.length, settings.dim), "float32")
    try:
        jax.eval_shape(Model(settings, "cute", jax.random.key(0)), x)
    except NotImplementedError as error:
        if implementation == "cute":
            sys.exit(f"custom_mask: {error}")
        return "plain JAX"
    return "CuTe kernels"


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--implementation", choices=("cute", "xla"), help="default: the layer's")
    implementation = parser.parse_args(arguments).implementation
    settings = GPU if jax.default_backend() == "gpu" else CPU

    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}): {runs_as(settings, implementation)}")
    print(f"{settings}\n\nKeys that each head sees:")
    model = Model(settings, implementation, jax.random.key(0))
    tiles_before, since = share_of_tiles(model, settings), time.perf_counter()
    model, loss = train(settings, model)
    seconds = time.perf_counter() - since

    seen, right = model.adaptive.seen, jnp.asarray(settings.windows)
    print(f"\nlearned             {row(seen)}\nright               {row(right, '7')}")
    print(f"tiles done, before  {row(tiles_before, '7.1%')}")
    print(f"tiles done, after   {row(share_of_tiles(model, settings), '7.1%')}")
    print(f"\nloss {loss:.3f}, and below {settings.level} was asked; {seconds:.1f} s of training")
    if not loss < settings.level:  # NaN is not below
        sys.exit("custom_mask: the loss is too high")
    if not bool(jnp.all(jnp.abs(seen - right) <= 1 + 0.05 * right)):
        sys.exit("custom_mask: a head learned another window than the right one")


if __name__ == "__main__":
    main()
