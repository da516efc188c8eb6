"""A byte-level transformer learns Python from the standard library of the Python that runs it.

    uv run --extra examples examples/train_lm.py               # a CPU: under 3 minutes on two cores
    uv run --extra examples examples/train_lm.py --preset gpu  # an NVIDIA GPU; sized for an H200
    uv run --extra examples examples/train_lm.py --resume      # go on from the last checkpoint
    ... --preset gpu --implementation xla   # attention as plain JAX: compare the tokens/s at the end

It prints what runs where, a bar with loss and tokens/s, the loss on files it never trained on
beside a bigram model's on the same bytes, and at the end a sample. Checkpoint and loss curve go to
runs/train_lm/. Ctrl-C saves a checkpoint first; `--resume` then continues exactly.

Reads downwards: settings, text, mask, model, steps, bigram, sample, checkpoint, the run.
Shapes in comments: T tokens in a window, C width, H heads, D = C / H, B windows a step.
"""

import argparse
import dataclasses
import functools as ft
import hashlib
import io
import json
import math
import os
import pathlib
import shlex
import signal
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from eqxcute.layers import BiasReLU, FlexAttention, TileMap, tile_map
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8, UInt32
from matplotlib.figure import Figure

# ---------------------------------------------------------------------------------------- settings


@dataclasses.dataclass(frozen=True)
class Settings:
    """The CPU preset; `GPU` below says what differs. A checkpoint fits these settings only."""

    # Model: small, since two cores do some 10^13 operations in two minutes, and reading more text
    # then helps more than having more parameters.
    context: int = 128  # bytes in a window: some 4 lines of code
    attention_window: int = 64  # how far back a byte sees in one layer; depth carries it further
    width: int = 96
    depth: int = 3
    heads: int = 2  # few: on a CPU attention costs by heads * context
    compute: str = "float32"  # dtype of activations; parameters are float32 always
    implementation: str | None = None  # of the attention: "cute", "xla", or the layer's choice

    # Training.
    steps: int = 1000
    batch: int = 16  # windows a step
    learning_rate: float = 4e-3  # the peak; high, as small models and short runs like it
    warmup: int = 60  # steps up to the peak; then half a cosine down to a tenth of it
    weight_decay: float = 0.1  # of matrices only
    clip: float = 1.0  # of the gradient's norm: the first steps would jump
    seed: int = 0

    # Reporting.
    log_every: int = 10  # steps between two points of the curve; reading a loss waits for it
    evaluate_every: int = 200
    evaluation_windows: int = 256  # 32,768 bytes: another draw moves the loss by about 0.02
    checkpoint_every: int = 200
    sample_length: int = 400
    temperature: float = 0.7  # below 1: a short run's model gives too much to unlikely bytes


CPU = Settings()
GPU = dataclasses.replace(
    CPU,
    context=1024,
    attention_window=512,
    width=512,
    depth=8,
    heads=8,  # of 64, a size that attention kernels like
    compute="bfloat16",  # what the tensor cores are fast at
    steps=2000,
    batch=32,  # 32,768 tokens a step: enough to fill the GPU; the text is read some nine times
    learning_rate=1e-3,  # wider, so lower
    warmup=100,
    evaluate_every=250,
    evaluation_windows=256,
    checkpoint_every=500,
    sample_length=1000,
)
PRESETS = {"cpu": CPU, "gpu": GPU}

VOCABULARY = 256  # bytes
FILE_START = 0  # a NUL stands before each file; a file that has one itself is left out
# Bulk that would drown the rest: tests, tables, other people's packages, bundled applications.
# Folders with a dash go too: they are a build's settings, other on each machine.
SKIPPED_FOLDERS = frozenset(
    "test tests idle_test site-packages dist-packages idlelib lib2to3 turtledemo encodings "
    "pydoc_data ensurepip distutils __pycache__".split()
)
HELD_OUT_SHARE = 12  # one file in twelve is held out
PROMPT = b"\ndef "


class RunError(RuntimeError):
    """A run that cannot begin or continue. The message says why, and what to do."""


# -------------------------------------------------------------------------------------------- text


class Corpus(eqx.Module):
    """Files packed into one stream, in order of their names, a NUL before each."""

    stream: UInt8[Array, " bytes"]
    starts: Int32[Array, " files"]  # where each file's NUL stands

    def windows(
        self, begin: Int[Array, " batch"], length: int
    ) -> tuple[Int32[Array, "batch length"], ...]:
        """Tokens, targets (the next tokens) and the document of each token, from each `begin`."""
        at = begin[:, None] + jnp.arange(length + 1)  # (B, T + 1)
        taken = self.stream[at].astype(jnp.int32)
        documents = jnp.searchsorted(self.starts, at[:, :-1], side="right").astype(jnp.int32)
        return taken[:, :-1], taken[:, 1:], documents  # (B, T) each


def read_files(root: pathlib.Path | None = None) -> list[tuple[str, bytes]]:
    """The standard library's source files, (name, bytes), in order of their names."""
    root = pathlib.Path(sysconfig.get_path("stdlib")) if root is None else root
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and "-" not in name]
        for name in names:
            path = pathlib.Path(folder, name)
            if path.suffix == ".py":
                content = path.read_bytes()
                if content and FILE_START not in content:
                    files.append((path.relative_to(root).as_posix(), content))
    return sorted(files)


def is_held_out(name: str) -> bool:
    """Decided by the name alone, so that a file never changes sides when others come or go."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def pack(files: list[tuple[str, bytes]]) -> Corpus:
    lengths = np.array([1 + len(content) for _, content in files])
    stream = b"".join(bytes([FILE_START]) + content for _, content in files)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Corpus(jnp.asarray(np.frombuffer(stream, np.uint8)), jnp.asarray(starts, jnp.int32))


def even_windows(corpus: Corpus, settings: Settings) -> Int32[Array, " windows"]:
    """Where the windows of an evaluation begin: evenly over the corpus, the same every time."""
    last = corpus.stream.size - settings.context - 1
    return jnp.asarray(np.linspace(0, last, settings.evaluation_windows).astype(np.int32))


def read_text(settings: Settings, root: pathlib.Path | None = None) -> tuple[Corpus, Corpus]:
    """What to train on, and what is held out.

    **Raises:** `RunError` if a side is shorter than a window.
    """
    files = read_files(root)
    sides = [[file for file in files if is_held_out(file[0]) is side] for side in (False, True)]
    for name, side in zip(("to train on", "to hold out"), sides, strict=True):
        size = sum(1 + len(content) for _, content in side)
        if size <= settings.context:
            raise RunError(
                f"{root or sysconfig.get_path('stdlib')} has {size} bytes of Python source {name}, "
                f"and a window takes {settings.context + 1}. Use a Python whose standard library "
                "comes as source files, such as uv's."
            )
    return pack(sides[0]), pack(sides[1])


# -------------------------------------------------------------------------------------------- mask


class SourceMask(eqx.Module):
    """A byte sees itself and the bytes before it, up to `window` of them, in the same file.

    `document` is an array that the mask captures, one number a token. It is an operand of the
    attention, no part of its identity: another batch makes another mask, and nothing recompiles.
    """

    document: Int32[Array, " length"]
    window: int = eqx.field(static=True)

    def __call__(self, b, h, q_idx, kv_idx) -> Bool[Array, "..."]:
        del b, h  # the same for all heads; a batch brings a mask each
        causal = q_idx >= kv_idx
        near = q_idx - kv_idx < self.window
        same_document = self.document[q_idx] == self.document[kv_idx]
        return causal & near & same_document


# ------------------------------------------------------------------------------------------- model


class Norm(eqx.Module):
    """Divides by the root mean square in float32, whatever comes, then scales."""

    scale: Float[Array, " size"]

    def __init__(self, size: int):
        self.scale = jnp.ones(size)

    def __call__(self, x: Float[Array, "*any size"]) -> Float[Array, "*any size"]:
        wide = x.astype(jnp.float32)
        size = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * size).astype(x.dtype) * self.scale


def rotate(x: Float[Array, "length heads dim"]) -> Float[Array, "length heads dim"]:
    """Rotary positions (Su et al. 2021): scores then depend on distances, not on places."""
    length, _, dim = x.shape
    frequency = 1000.0 ** (-np.arange(0, dim, 2) / dim)  # distances here are hundreds, not more
    angle = np.arange(length)[:, None, None] * frequency  # (T, 1, D / 2)
    cos, sin = jnp.asarray(np.cos(angle), x.dtype), jnp.asarray(np.sin(angle), x.dtype)
    left, right = jnp.split(x, 2, axis=-1)  # (T, H, D / 2) each
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def matrix(size_in: int, size_out: int, key, scale: float = 1.0) -> Float[Array, "rows columns"]:
    """Keeps the size of what it multiplies; `scale=0` where a fresh block must add nothing."""
    return scale / math.sqrt(size_in) * jax.random.normal(key, (size_in, size_out))


class Block(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention_norm: Norm
    query_key_value: Float[Array, "width width3"]
    query_norm: Norm
    key_norm: Norm
    attention_out: Float[Array, "width width"]
    mlp_norm: Norm
    mlp_in: Float[Array, "width width4"]
    bias_relu: BiasReLU
    mlp_out: Float[Array, "width4 width"]
    heads: int = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(self, settings: Settings, key):
        width, heads = settings.width, settings.heads
        keys = jax.random.split(key, 4)
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.query_norm, self.key_norm = Norm(width // heads), Norm(width // heads)
        self.query_key_value = matrix(width, 3 * width, keys[0])
        self.attention_out = matrix(width, width, keys[1], scale=0.0)
        self.mlp_in = matrix(width, 4 * width, keys[2])
        self.bias_relu = BiasReLU(4 * width)
        self.mlp_out = matrix(4 * width, width, keys[3], scale=0.0)
        self.heads, self.implementation = heads, settings.implementation

    def __call__(
        self, x: Float[Array, "length width"], mask: SourceMask, tiles: TileMap
    ) -> Float[Array, "length width"]:
        length, width = x.shape
        qkv = self.attention_norm(x) @ self.query_key_value  # (T, 3 C)
        q, k, v = (a.reshape(length, self.heads, -1) for a in jnp.split(qkv, 3, axis=-1))
        q, k = rotate(self.query_norm(q)), rotate(self.key_norm(k))
        attend = FlexAttention(mask_fn=mask, implementation=self.implementation)
        attended = attend(q, k, v, tiles=tiles)  # (T, H, D)
        x = x + attended.reshape(length, width) @ self.attention_out
        hidden = self.bias_relu(self.mlp_norm(x) @ self.mlp_in)  # (T, 4 C)
        return x + hidden @ self.mlp_out


class Transformer(eqx.Module):
    """Takes one window; `jax.vmap` makes it take a batch."""

    embedding: Float[Array, "vocabulary width"]
    blocks: list[Block]
    norm: Norm
    head: Float[Array, "width vocabulary"]
    window: int = eqx.field(static=True)
    compute: str = eqx.field(static=True)

    def __init__(self, settings: Settings, key):
        keys = jax.random.split(key, settings.depth + 2)
        width = settings.width
        self.embedding = jax.random.normal(keys[0], (VOCABULARY, width))
        self.blocks = [Block(settings, key) for key in keys[2:]]
        self.norm = Norm(width)
        self.head = matrix(width, VOCABULARY, keys[1], scale=0.0)  # starts at log 256 = 5.55 nats
        self.window = settings.attention_window
        self.compute = settings.compute

    def __call__(
        self, tokens: Int32[Array, " length"], documents: Int32[Array, " length"]
    ) -> Float[Array, "length vocabulary"]:
        mask = SourceMask(documents, self.window)
        tiles = tile_map(mask, tokens.size, tokens.size)  # what kernels skip, once for all blocks
        # Parameters stay float32 outside; what is computed with is a copy in `compute`.
        model = jax.tree.map(lambda a: a.astype(self.compute), self)
        x = model.embedding[tokens]  # (T, C)
        for block in model.blocks:
            x = block(x, mask, tiles)
        return (model.norm(x) @ model.head).astype(jnp.float32)  # (T, 256)


# ------------------------------------------------------------------------------------------- steps


def mean_loss(
    model: Transformer, corpus: Corpus, begin: Int[Array, " batch"], length: int
) -> Float[Array, ""]:
    """Nats a byte, over the windows that start at `begin`."""
    tokens, targets, documents = corpus.windows(begin, length)
    logits = jax.vmap(model)(tokens, documents)  # (B, T, 256)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class State(eqx.Module):
    """All that training changes. A checkpoint is this, so a resumed run cannot miss a part."""

    model: Transformer
    moments: optax.OptState
    key: UInt32[Array, "..."]  # of the batches still to be drawn
    step: Int32[Array, ""]


def make_optimiser(settings: Settings) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        init_value=settings.learning_rate / (settings.warmup + 1),  # 0 would waste a step
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup,
        decay_steps=max(settings.steps, settings.warmup + 1),
        end_value=settings.learning_rate / 10,
    )
    matrices = ft.partial(jax.tree.map, lambda a: a.ndim >= 2)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(rate, b2=0.98, weight_decay=settings.weight_decay, mask=matrices),
    )


def fresh_state(settings: Settings) -> State:
    model_key, data_key = jax.random.split(jax.random.key(settings.seed))
    model = Transformer(settings, model_key)
    moments = make_optimiser(settings).init(eqx.filter(model, eqx.is_inexact_array))
    return State(model, moments, jax.random.key_data(data_key), jnp.zeros((), jnp.int32))


def make_train_step(settings: Settings) -> Callable[[Corpus, State], tuple[State, Array]]:
    """One jitted step. The old state's memory becomes the new one's; a second trace is an error."""
    optimiser = make_optimiser(settings)

    @eqx.filter_jit(donate="all-except-first")
    @eqx.debug.assert_max_traces(max_traces=1)
    def train_step(corpus: Corpus, state: State) -> tuple[State, Array]:
        key, draw = jax.random.split(jax.random.wrap_key_data(state.key))
        last = corpus.stream.size - settings.context
        begin = jax.random.randint(draw, (settings.batch,), 0, last)  # (B,)
        loss, gradient = eqx.filter_value_and_grad(mean_loss)(
            state.model, corpus, begin, settings.context
        )
        parameters = eqx.filter(state.model, eqx.is_inexact_array)
        updates, moments = optimiser.update(gradient, state.moments, parameters)
        model = eqx.apply_updates(state.model, updates)
        return State(model, moments, jax.random.key_data(key), state.step + 1), loss

    return train_step


def make_evaluate(settings: Settings) -> Callable[[Transformer, Corpus], Array]:
    """Mean loss over windows that lie evenly over a corpus, as many at a time as in training."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def evaluate(model: Transformer, corpus: Corpus) -> Array:
        def loss(at):
            return mean_loss(model, corpus, at[None], settings.context)

        begin = even_windows(corpus, settings)
        return jax.lax.map(loss, begin, batch_size=settings.batch).mean()

    return evaluate


# ------------------------------------------------------------------------------------------ bigram


def bigram_loss(train: Corpus, held_out: Corpus, settings: Settings) -> float:
    """Nats a byte of the model that knows only the byte before, on the windows of an evaluation.

    It counts the pairs in the training files and adds one made-up pair after each byte, spread as
    bytes are in general: so a pair that never came costs something finite.
    """
    stream = np.asarray(train.stream).astype(np.int64)
    pairs = np.bincount(stream[:-1] * VOCABULARY + stream[1:], minlength=VOCABULARY**2)
    pairs = pairs.reshape(VOCABULARY, VOCABULARY)  # [byte, the next]
    general = (pairs.sum(0) + 1) / (pairs.sum() + VOCABULARY)  # nor is any byte impossible
    likely = (pairs + general) / (pairs.sum(1, keepdims=True) + 1)
    begin = even_windows(held_out, settings)
    tokens, targets, _ = map(np.asarray, held_out.windows(begin, settings.context))
    return float(-np.log(likely[tokens, targets]).mean())


# ------------------------------------------------------------------------------------------ sample


def write_sample(model: Transformer, settings: Settings, prompt: bytes) -> bytes:
    """Continues `prompt`, byte by byte.

    The window always has the training length. What stands left of the prompt is another document,
    so the mask hides it, and positions are relative: a short text needs no special case.
    """
    text = np.frombuffer(prompt, np.uint8).astype(np.int32)[-settings.context :]
    pad = settings.context - text.size
    tokens = jnp.asarray(np.pad(text, (pad, 0)))  # (T,)
    documents = jnp.asarray(np.pad(np.ones_like(text), (pad, 0)))  # (T,)

    def grow(carry, key):
        tokens, documents = carry
        logits = model(tokens, documents)[-1] / settings.temperature  # (256,)
        byte = jax.random.categorical(key, logits).astype(jnp.int32)
        return (jnp.append(tokens[1:], byte), jnp.append(documents[1:], documents[-1])), byte

    keys = jax.random.split(jax.random.key(settings.seed), settings.sample_length)
    _, written = jax.lax.scan(grow, (tokens, documents), keys)
    return prompt + np.asarray(written).astype(np.uint8).tobytes()


# -------------------------------------------------------------------------------------- checkpoint


@dataclasses.dataclass
class Checkpoint:
    """What a run is: the state, and the points of the curve so far, [step, loss] each."""

    state: State
    train_curve: list[list]
    held_out_curve: list[list]


def identity(settings: Settings, train: Corpus, held_out: Corpus) -> dict:
    """What a run must share with a checkpoint to continue it."""
    text = hashlib.sha256()
    for corpus in (train, held_out):
        text.update(np.asarray(corpus.stream).tobytes())
    return {**dataclasses.asdict(settings), "text": text.hexdigest()[:16]}


def save(path: pathlib.Path, checkpoint: Checkpoint, run: dict):
    """One line of JSON, then the state's arrays. `path` holds the old one or the new one, whole."""
    body = io.BytesIO()
    eqx.tree_serialise_leaves(body, checkpoint.state)
    header = {
        "run": run,
        "train_curve": checkpoint.train_curve,
        "held_out_curve": checkpoint.held_out_curve,
    }
    content = json.dumps(header).encode() + b"\n" + body.getvalue()
    temporary = path.with_suffix(".part")  # same folder, hence same disk: the rename is atomic
    try:
        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: pathlib.Path, like: State, run: dict) -> Checkpoint:
    """**Raises:** `RunError` for a file that is missing, damaged or of another run."""
    if not path.exists():
        raise RunError(f"No checkpoint at {path}. Start a run without --resume.")
    digest, _, content = path.read_bytes().partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        raise RunError(
            f"{path} is damaged: its content does not have the checksum in its first line. "
            "It cannot be continued; start a run without --resume."
        )
    line, _, body = content.partition(b"\n")
    header = json.loads(line)
    was = header["run"]
    if was != run:
        differences = "; ".join(
            f"{name}: checkpoint {was.get(name)}, this run {run.get(name)}"
            for name in sorted(was.keys() | run.keys())
            if was.get(name) != run.get(name)
        )
        raise RunError(
            f"{path} is of another run ({differences}). Use the flags (and for `text` the Python) "
            "that it was made with, or start a run without --resume."
        )
    state = eqx.tree_deserialise_leaves(io.BytesIO(body), like)
    return Checkpoint(state, header["train_curve"], header["held_out_curve"])


def plot(path: pathlib.Path, checkpoint: Checkpoint, bigram: float):
    figure = Figure(figsize=(7, 4.5), layout="constrained")  # without pyplot: needs no display
    axes = figure.subplots()
    axes.plot(*np.array(checkpoint.train_curve).reshape(-1, 2).T, label="training", alpha=0.6)
    axes.plot(*np.array(checkpoint.held_out_curve).reshape(-1, 2).T, "o-", label="held-out files")
    axes.axhline(bigram, linestyle="--", color="gray", label=f"bigram, held-out: {bigram:.2f}")
    axes.set(xlabel="step", ylabel="nats a byte")
    axes.legend()
    figure.savefig(path, dpi=120)


# ----------------------------------------------------------------------------------------- the run


class Interruption:
    """In this context Ctrl-C only sets `asked`, for the loop to see. A second Ctrl-C raises."""

    def __enter__(self):
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def note(self, number, frame):
        del number, frame
        self.asked = True
        signal.signal(signal.SIGINT, self.before)
        print("\nCtrl-C: this step still ends, then a checkpoint is saved.", file=sys.stderr)

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self.before)


def describe(settings: Settings, state: State, train_text: Corpus, held_out: Corpus, bigram: float):
    length, width, heads = settings.context, settings.width, settings.heads

    def runs_as(implementation: str | None, call, *shapes: tuple[int, ...]) -> str:
        """What the layers pick by themselves: asks for the kernel, to see whether it is had."""
        if implementation == "xla":
            return "plain JAX, as asked"
        try:
            jax.eval_shape(call, *(jax.ShapeDtypeStruct(s, settings.compute) for s in shapes))
        except NotImplementedError as error:
            if implementation == "cute":
                raise RunError(str(error)) from error
            return "plain JAX"
        return "CuTe kernel"

    def attention(q, k, v):
        mask = SourceMask(jnp.zeros(length, jnp.int32), settings.attention_window)
        return FlexAttention(mask_fn=mask, implementation="cute")(q, k, v)

    def bias_relu(x):
        return BiasReLU(4 * width, implementation="cute")(x)

    device, (major, minor) = jax.devices()[0], sys.version_info[:2]
    qkv = 3 * [(length, heads, width // heads)]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    lines = {
        "device": f"{device.device_kind} ({device.platform}), computing in {settings.compute}",
        "attention": f"FlexAttention, {runs_as(settings.implementation, attention, *qkv)}",
        "bias, ReLU": f"BiasReLU, {runs_as(None, bias_relu, (length, 4 * width))}",
        "text": f"Python {major}.{minor}'s standard library, {train_text.stream.size:,} bytes in "
        f"{train_text.starts.size} files",
        "held out": f"{held_out.stream.size:,} bytes in {held_out.starts.size} other files",
        "model": f"{size:,} parameters",
        "step": f"{settings.batch * length:,} tokens, {settings.batch} windows of {length}",
        "to beat": f"{bigram:.3f} nats a held-out byte, a bigram model",
    }
    print("\n".join(f"{name:>10}: {said}" for name, said in lines.items()) + "\n", flush=True)


class Clock:
    """Tokens a second. `restart` leaves out what came before: compiling, evaluating, saving."""

    def __init__(self):
        self.rates: list[float] = []  # one a lap
        self.restart()

    def restart(self):
        self.since = time.perf_counter()

    def lap(self, tokens: int) -> float:
        self.rates.append(tokens / (time.perf_counter() - self.since))
        self.restart()
        return self.rates[-1]

    def median(self) -> float:
        """The first lap warms up, and others may be disturbed: runs are compared without those."""
        return statistics.median(self.rates)


def run_steps(
    settings: Settings,
    checkpoint: Checkpoint,
    train_text: Corpus,
    held_out: Corpus,
    save_now: Callable[[], None],
    asked_to_stop: Callable[[], bool],
) -> Clock:
    """The loop. Brings `checkpoint` forward, in place."""
    train_step, evaluate = make_train_step(settings), make_evaluate(settings)
    first = counted = int(checkpoint.state.step)
    bar = tqdm.tqdm(total=settings.steps, initial=first, unit="step", dynamic_ncols=True)
    clock, shown = Clock(), {}
    for step in range(first + 1, settings.steps + 1):
        checkpoint.state, loss = train_step(train_text, checkpoint.state)
        bar.update()
        if step == first + 1:  # this one compiled
            loss.block_until_ready()
            clock.restart()
            counted = step
        if step % settings.log_every == 0:
            checkpoint.train_curve.append([step, float(loss)])  # waits for the device
            shown["loss"] = f"{float(loss):.3f}"
            if step > counted:
                rate = clock.lap((step - counted) * settings.batch * settings.context)
                shown["tokens/s"] = f"{rate:,.0f}"
                counted = step
        if step % settings.evaluate_every == 0 or step == settings.steps:
            held_out_loss = float(evaluate(checkpoint.state.model, held_out))
            checkpoint.held_out_curve.append([step, held_out_loss])
            shown["held out"] = f"{held_out_loss:.3f}"
            clock.restart()
        bar.set_postfix(shown, refresh=False)
        if asked_to_stop():
            break
        if step % settings.checkpoint_every == 0:
            save_now()
            clock.restart()
    bar.close()
    save_now()
    return clock


def train(
    settings: Settings, out: pathlib.Path, resume: bool = False, root: pathlib.Path | None = None
) -> Checkpoint:
    """Trains, from the start or from the checkpoint in `out`, up to `settings.steps` or Ctrl-C.

    A run that was interrupted and resumed has the losses of one that was not, bit for bit where
    the device computes reproducibly, as a CPU does.
    """
    train_text, held_out = read_text(settings, root)
    checkpoint = Checkpoint(fresh_state(settings), [], [])
    run, path = identity(settings, train_text, held_out), out / "checkpoint.eqx"
    if resume:
        checkpoint = load(path, checkpoint.state, run)
    elif path.exists():
        path.replace(path.with_name("checkpoint-before.eqx"))
        print(f"Starting anew. The old checkpoint is now {out}/checkpoint-before.eqx\n")
    bigram = bigram_loss(train_text, held_out, settings)
    describe(settings, checkpoint.state, train_text, held_out, bigram)

    out.mkdir(parents=True, exist_ok=True)
    with Interruption() as interruption:
        clock = run_steps(
            settings,
            checkpoint,
            train_text,
            held_out,
            save_now=lambda: save(path, checkpoint, run),
            asked_to_stop=lambda: interruption.asked,
        )
    plot(out / "loss.png", checkpoint, bigram)
    if clock.rates:
        laps = len(clock.rates)
        print(
            f"\n{clock.median():,.0f} tokens/s, median of {laps} laps without compiling and evaluating"
        )
    if checkpoint.held_out_curve:
        step, loss = checkpoint.held_out_curve[-1]
        print(f"Held-out loss at step {step}: {loss:.3f} nats a byte. Bigram model: {bigram:.3f}")
    print(f"Saved: {path}, {out}/loss.png")
    return checkpoint


# ------------------------------------------------------------------------------------ command line


def main(arguments: list[str] | None = None):
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--resume", action="store_true", help="continue from --out's checkpoint")
    parser.add_argument("--steps", type=int, help="instead of the preset's number")
    parser.add_argument("--implementation", choices=("cute", "xla"), help="default: the layer's")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/train_lm"))
    flags = parser.parse_args(arguments)
    settings = dataclasses.replace(PRESETS[flags.preset], implementation=flags.implementation)
    if flags.steps is not None:
        if flags.steps < 1:
            parser.error(f"--steps must be at least 1, not {flags.steps}")
        settings = dataclasses.replace(settings, steps=flags.steps)

    try:
        checkpoint = train(settings, flags.out, flags.resume)
    except RunError as error:
        sys.exit(f"train_lm: {error}")
    step = int(checkpoint.state.step)
    if step < settings.steps:
        again = shlex.join([flag for flag in arguments if flag != "--resume"] + ["--resume"])
        print(f"Stopped after step {step} of {settings.steps}. To continue:\n")
        print(f"    uv run --extra examples examples/train_lm.py {again}")
        sys.exit(130)  # what a shell expects after Ctrl-C
    text = write_sample(checkpoint.state.model, settings, PROMPT).decode(errors="replace").strip()
    print(f"\nA sample, temperature {settings.temperature}:\n{'-' * 60}\n{text}\n{'-' * 60}")


if __name__ == "__main__":
    main()
