"""examples/train_lm.py: its text, mask, bigram model, and runs that stop and go on."""

import dataclasses
import importlib.util
import math
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers import FlexAttention

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"


def import_script():
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


train_lm = import_script()

TINY = dataclasses.replace(
    train_lm.CPU,
    context=16,
    attention_window=6,
    width=16,
    depth=1,
    steps=6,
    batch=3,
    warmup=2,
    log_every=1,
    evaluate_every=4,
    evaluation_windows=5,  # no multiple of the batch
    sample_length=5,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """A library of forty short files, and files that must be left out."""
    root = tmp_path_factory.mktemp("library")
    for i in range(40):
        folder = root / ("" if i % 2 else f"package{i % 3}")
        folder.mkdir(exist_ok=True)
        (folder / f"module{i}.py").write_text(f"def function{i}(x):\n    return x + {i * i}\n")
    for name in ("test/t.py", "site-packages/s.py", "config-3/c.py", "a/tests/d.py", "text.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("SKIPPED")
    (root / "nul.py").write_bytes(b"SKIPPED\0")
    (root / "empty.py").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def texts(root):
    return train_lm.read_text(TINY, root)


def stream(corpus) -> bytes:
    return np.asarray(corpus.stream).tobytes()


def same_bits(a, b) -> bool:
    a, b = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (a, b))
    return all(x.tobytes() == y.tobytes() for x, y in zip(map(np.asarray, a), b, strict=True))


# Text


def test_files_are_sorted_and_bulk_is_left_out(root):
    names = [name for name, _ in train_lm.read_files(root)]
    assert len(names) == 40
    assert names == sorted(names)
    assert not any(b"SKIPPED" in content for _, content in train_lm.read_files(root))


def test_split_is_by_files(root, texts):
    train_text, held_out = texts
    files = train_lm.read_files(root)
    assert {zlib.crc32(name.encode()) % train_lm.HELD_OUT_SHARE == 0 for name, _ in files} == {
        True,
        False,
    }
    for name, content in files:
        held = train_lm.is_held_out(name)
        assert (content in stream(held_out)) is held
        assert (content in stream(train_text)) is not held
    assert train_text.starts.size + held_out.starts.size == len(files)


def test_reading_twice_gives_the_same(root, texts):
    assert all(map(same_bits, texts, train_lm.read_text(TINY, root)))


def test_windows_against_slices(root, texts):
    train_text, _ = texts
    text = stream(train_text)
    begin = [0, 1, 30, 31, 32, len(text) - 17]
    tokens, targets, documents = train_text.windows(jnp.array(begin), 16)
    for i, at in enumerate(begin):
        assert bytes(np.asarray(tokens[i]).astype(np.uint8)) == text[at : at + 16]
        assert bytes(np.asarray(targets[i]).astype(np.uint8)) == text[at + 1 : at + 17]
        # A document is counted by the NULs up to and with the byte.
        counts = [text[: at + j + 1].count(0) for j in range(16)]
        np.testing.assert_array_equal(documents[i], counts)


def test_the_running_pythons_library_is_enough():
    train_text, held_out = train_lm.read_text(train_lm.CPU)
    assert train_text.stream.size > 2_000_000
    assert train_text.stream.size > 5 * held_out.stream.size > 500_000


def test_too_little_text_says_where(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(train_lm.RunError, match=r"bytes of Python source") as caught:
        train_lm.read_text(TINY, tmp_path)
    assert str(tmp_path) in str(caught.value)


# Mask


def brute_force(document, window: int) -> np.ndarray:
    length = len(document)
    allowed = np.zeros((length, length), bool)
    for q in range(length):
        for k in range(length):
            allowed[q, k] = k <= q and q - k < window and document[q] == document[k]
    return allowed


@pytest.mark.parametrize("window", [1, 3, 20])  # itself only; inside; longer than all
def test_mask_against_brute_force(window):
    document = np.sort(np.random.default_rng(0).integers(0, 4, 12)).astype(np.int32)
    mask = train_lm.SourceMask(jnp.asarray(document), window)
    index = jnp.arange(12)
    one = lambda q, k: mask(0, 0, q, k)  # noqa: E731
    grid = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(index, index)
    np.testing.assert_array_equal(grid, brute_force(document, window))


def test_each_example_of_a_batch_has_its_own_mask():
    """`document` is captured per example: under vmap it has a batch axis that the mask does not
    know of."""
    rng = np.random.default_rng(1)
    document = np.sort(rng.integers(0, 3, (4, 12)), axis=1).astype(np.int32)
    assert len({row.tobytes() for row in document}) == 4
    q, k, v = rng.normal(size=(3, 4, 12, 2, 8)).astype(np.float32)

    def attend(q, k, v, document):
        return FlexAttention(mask_fn=train_lm.SourceMask(document, 5))(q, k, v)

    out = jax.jit(jax.vmap(attend))(q, k, v, document)
    for i in range(4):
        scores = np.einsum("qhd,khd->hqk", q[i], k[i]) / math.sqrt(8)
        scores[:, ~brute_force(document[i], 5)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("hqk,khd->qhd", weights, v[i])
        np.testing.assert_allclose(out[i], expected, rtol=2e-5, atol=2e-6)


# Model


@pytest.fixture(scope="module")
def model():
    """A fresh model's branches end in zeros: it would ignore its context. So all is random."""
    model = train_lm.fresh_state(dataclasses.replace(TINY, depth=2)).model
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    random = [
        jax.random.normal(key, leaf.shape) / 4 for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, random)


def reach(model, documents, changed: int) -> list[int]:
    """At which places the logits move when one byte changes."""
    tokens = jnp.arange(16, dtype=jnp.int32) + 60
    run = eqx.filter_jit(model)
    moved = run(tokens.at[changed].set(9), documents) - run(tokens, documents)
    return np.flatnonzero(np.abs(moved).max(-1)).tolist()


def test_a_byte_moves_what_may_see_it_and_nothing_else(model):
    one = jnp.zeros(16, jnp.int32)
    # Two layers, each seeing five places back: ten in all, and none before.
    assert reach(model, one, 3) == list(range(3, 14))
    two = jnp.array(6 * [1] + 10 * [2], jnp.int32)
    assert reach(model, two, 3) == [3, 4, 5]
    assert reach(model, two, 6) == list(range(6, 16))


def test_what_is_left_of_another_document_does_not_matter(model):
    """A sample is padded on the left: its logits are those of the short text alone."""
    text = jnp.array([4, 8, 15, 16, 23], jnp.int32)
    run = eqx.filter_jit(model)
    alone = run(text, jnp.ones(5, jnp.int32))
    padded = run(jnp.pad(text, (11, 0)), jnp.pad(jnp.ones(5, jnp.int32), (11, 0)))
    np.testing.assert_allclose(padded[11:], alone, rtol=1e-4, atol=1e-4)


def test_bfloat16_computes_near_float32(model):
    settings = dataclasses.replace(TINY, depth=2, compute="bfloat16")
    tree = jax.tree.structure(train_lm.fresh_state(settings).model)
    narrow = jax.tree.unflatten(tree, jax.tree.leaves(model))
    tokens, documents = jnp.arange(16, dtype=jnp.int32), jnp.zeros(16, jnp.int32)
    wide = eqx.filter_jit(model)(tokens, documents)
    logits = eqx.filter_jit(narrow)(tokens, documents)
    assert logits.dtype == jnp.float32
    error = np.abs(logits - wide).max() / np.abs(wide).max()
    assert 0 < error < 0.05  # 8 bits of mantissa, over two blocks; 0 would be no bfloat16


# Bigram


def test_bigram_counts_pairs():
    settings = dataclasses.replace(TINY, context=4, evaluation_windows=1)
    train_text, held_out = train_lm.pack([("a", b"abab")]), train_lm.pack([("b", b"abz" + b"ab")])
    singles = {c: b"\0abab"[1:].count(c) for c in range(256)}
    pairs = list(zip(b"\0abab", b"abab", strict=False))
    loss = 0.0
    for before, after in zip(b"\0abz", b"abza", strict=True):
        general = (singles[after] + 1) / (4 + 256)
        seen = sum(first == before for first, _ in pairs)
        loss -= math.log((pairs.count((before, after)) + general) / (seen + 1))
    assert train_lm.bigram_loss(train_text, held_out, settings) == pytest.approx(loss / 4)


def test_bigram_of_noise_and_of_a_cycle():
    settings = dataclasses.replace(TINY, evaluation_windows=64)
    noise = np.random.default_rng(0).integers(1, 256, 200_000).astype(np.uint8).tobytes()
    half = len(noise) // 2
    train_text, held_out = (
        train_lm.pack([("a", noise[:half])]),
        train_lm.pack([("b", noise[half:])]),
    )
    # It learns a little noise by heart, so it does worse than knowing nothing.
    assert math.log(255) < train_lm.bigram_loss(train_text, held_out, settings) < 7
    cycle = train_lm.pack([("c", bytes(range(1, 255)) * 50)])
    assert train_lm.bigram_loss(cycle, cycle, settings) < 0.2


# Runs


def test_a_run_end_to_end(root, tmp_path, capsys, monkeypatch):
    traced = []
    mean_loss = train_lm.mean_loss
    monkeypatch.setattr(
        train_lm, "mean_loss", lambda *a: (traced.append(a[2].shape), mean_loss(*a))[1]
    )
    monkeypatch.setattr(train_lm, "read_files", lambda _, read=train_lm.read_files: read(root))
    settings = dataclasses.replace(TINY, steps=40, learning_rate=0.02)
    monkeypatch.setitem(train_lm.PRESETS, "cpu", settings)
    train_lm.main(["--out", str(tmp_path)])

    printed = capsys.readouterr()
    for part in ("cpu", "FlexAttention, plain JAX", "BiasReLU, plain JAX", "bigram", "parameters"):
        assert part in printed.out
    assert "tokens/s=" in printed.err
    assert re.search(r"^[\d,]+ tokens/s, median of 39 laps", printed.out, re.MULTILINE)
    assert "loss=" in printed.err
    assert printed.out.count("def ") == 1  # the sample's prompt
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.eqx", "loss.png"]
    # One trace of the step, for forty batches and so forty masks.
    assert traced.count((settings.batch,)) == 1

    texts = train_lm.read_text(settings)
    like = train_lm.fresh_state(settings)
    run = train_lm.identity(settings, *texts)
    checkpoint = train_lm.load(tmp_path / "checkpoint.eqx", like, run)
    assert [step for step, _ in checkpoint.train_curve] == list(range(1, 41))
    assert checkpoint.train_curve[0][1] == pytest.approx(math.log(256), abs=1e-5)
    assert checkpoint.train_curve[-1][1] < 3.5
    assert [step for step, _ in checkpoint.held_out_curve] == list(range(4, 41, 4))


def test_the_rate_at_the_end_is_the_median(monkeypatch):
    """The first lap warms up, and a mean would hold it against the others for ever."""
    times = iter([0.0, 10.0, 10.0, 11.0, 11.0, 12.0, 12.0, 15.0, 17.0, 17.0])
    monkeypatch.setattr(train_lm.time, "perf_counter", lambda: next(times))
    clock = train_lm.Clock()
    assert [clock.lap(100), clock.lap(100), clock.lap(100)] == [10.0, 100.0, 100.0]
    clock.restart()  # an evaluation took 3 seconds
    assert clock.lap(100) == 50.0
    assert clock.median() == 75.0


@pytest.mark.parametrize("implementation", ["cute", "xla"])
def test_the_implementation_reaches_every_attention(
    implementation, root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train_lm, "read_files", lambda _, read=train_lm.read_files: read(root))
    monkeypatch.setitem(train_lm.PRESETS, "cpu", TINY)
    seen = []

    def steps(settings, checkpoint, *rest, save_now, asked_to_stop):
        seen.extend(block.implementation for block in checkpoint.state.model.blocks)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lm, "run_steps", steps)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        train_lm.main(["--implementation", implementation, "--out", str(tmp_path)])
    if implementation == "cute":  # there is none here: said at once, not after a compile
        assert "needs an NVIDIA GPU" in str(caught.value)
        assert not seen
        return
    assert "FlexAttention, plain JAX, as asked" in capsys.readouterr().out
    assert seen == TINY.depth * ["xla"]


def stop_at(monkeypatch, step: int):
    """Ctrl-C during that step of the next run."""
    make = train_lm.make_train_step

    def making(settings):
        train_step, done = make(settings), []

        def stepping(*arguments):
            done.append(None)
            if len(done) == step:
                signal.raise_signal(signal.SIGINT)
            return train_step(*arguments)

        return stepping

    monkeypatch.setattr(train_lm, "make_train_step", making)


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    """A run without interruption, its folder and what it ended as."""
    out = tmp_path_factory.mktemp("whole")
    return out, train_lm.train(TINY, out, root=root)


@pytest.mark.slow
def test_an_interrupted_run_continues_to_the_same_bits(whole, root, tmp_path, monkeypatch):
    (tmp_path / "checkpoint.eqx").write_bytes(b"an old run's")
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        stopped = train_lm.train(TINY, tmp_path, root=root)
    assert int(stopped.state.step) == 3
    assert (tmp_path / "checkpoint-before.eqx").read_bytes() == b"an old run's"
    resumed = train_lm.train(TINY, tmp_path, resume=True, root=root)
    _, expected = whole
    assert resumed.train_curve == expected.train_curve
    assert resumed.held_out_curve == expected.held_out_curve
    assert same_bits(resumed.state, expected.state)
    assert len({loss for _, loss in expected.train_curve}) == TINY.steps  # they do differ


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    """A process of its own, with a real signal; it trains on this Python's library."""
    code = f"""
        import dataclasses, sys
        sys.path.insert(0, {str(SCRIPT.parent)!r})
        import train_lm
        train_lm.PRESETS["cpu"] = dataclasses.replace(
            train_lm.CPU, context=16, width=16, depth=1, batch=2, log_every=5, steps=10**6
        )
        train_lm.main(["--out", {str(tmp_path)!r}])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for piece in iter(lambda: process.stderr.read(20), ""):
        if "loss" in piece:  # the bar shows steps that are done
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "--resume" in out
    assert f"--out {tmp_path}" in out
    assert (tmp_path / "checkpoint.eqx").exists()
    assert not list(tmp_path.glob("*.part"))


# Checkpoints


@pytest.mark.parametrize(
    ("damage", "settings", "message"),
    [
        (lambda data: data[:-100], {}, "damaged"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], {}, "damaged"),
        (lambda data: b"", {}, "damaged"),
        (lambda data: data, {"width": 32}, r"width: checkpoint 16, this run 32"),
        (lambda data: data, {"steps": 7}, r"steps: checkpoint 6, this run 7"),
        (None, {}, "No checkpoint"),
    ],
    ids=["short", "one bit", "empty", "width", "steps", "missing"],
)
def test_a_bad_checkpoint_is_refused(
    whole, root, tmp_path, monkeypatch, capsys, damage, settings, message
):
    """As the command: a message and a failing exit, and the file is left as it is."""
    path = tmp_path / "checkpoint.eqx"
    if damage is not None:
        path.write_bytes(damage((whole[0] / "checkpoint.eqx").read_bytes()))
    before = path.read_bytes() if path.exists() else None
    monkeypatch.setattr(train_lm, "read_files", lambda _, read=train_lm.read_files: read(root))
    monkeypatch.setitem(train_lm.PRESETS, "cpu", dataclasses.replace(TINY, **settings))
    with pytest.raises(SystemExit, match=message) as caught:
        train_lm.main(["--resume", "--out", str(tmp_path)])
    assert str(path) in str(caught.value)
    assert "without --resume" in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_checkpoint_of_other_text_is_refused(whole, tmp_path, root):
    out, _ = whole
    other = tmp_path / "library"
    for name, content in train_lm.read_files(root):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes(content.replace(b"return", b"yield "))
    with pytest.raises(train_lm.RunError, match=r"text: checkpoint \w+, this run \w+"):
        train_lm.train(TINY, out, resume=True, root=other)


def test_a_write_that_fails_leaves_the_old_checkpoint(whole, tmp_path, monkeypatch):
    _, checkpoint = whole
    path = tmp_path / "checkpoint.eqx"
    train_lm.save(path, checkpoint, {"run": 1})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_lm.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        train_lm.save(path, checkpoint, {"run": 2})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.eqx"]


def test_steps_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        train_lm.main(["--steps", "0"])
    assert "--steps must be at least 1, not 0" in capsys.readouterr().err
