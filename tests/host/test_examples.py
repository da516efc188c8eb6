"""The examples as they are run on a CPU, and their references against NumPy."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_kernels import EXAMPLES, NAMES, cases, load

# Arguments of each `main`: small, and odd.
SMALL = dict(vector_add=1027, relu=(3, 5, 7), saxpy=1027, bias_relu=(9, 17), tiled_gemm=(7, 9, 5))


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_short_and_starts_with_how_to_run_it(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 100
    assert lines[0].startswith('"""')
    assert lines[2] == f"    uv run examples/{name}.py"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "saxpy"])
def test_each_example_prints_its_error(name, capsys):
    load(name).main(SMALL[name])
    said = capsys.readouterr().out
    assert "largest error against float64" in said
    error = float(said.split("float64")[1].split()[0])
    assert error < 1e-5  # float32, sums of a few terms


def test_pointwise(capsys):
    """It has no kernel of its own, and so no case among the others."""
    lines = (EXAMPLES / "pointwise.py").read_text().splitlines()
    assert len(lines) < 100
    load("pointwise").main((9, 17))
    said = capsys.readouterr().out
    assert float(said.split("float64")[1].split()[0]) < 0.05  # bfloat16, of numbers up to 8
    assert "= tanh" in said
    assert "gradient of the bias: (17,) float32" in said
    assert "v1:bfloat16 = argument name=gate" in said


def exact(name, kernel, arguments):
    """The formula, written again, in float64."""
    wide = [np.asarray(a, np.float64) for a in arguments]
    if name.startswith("vector_add"):
        return wide[0] + wide[1]
    if name.startswith("relu"):
        return np.maximum(wide[0], 0)
    if name.startswith("saxpy"):
        return 2.5 * wide[0] + wide[1]
    if name.startswith("bias_relu"):
        return np.maximum(wide[0] + wide[1], 0)
    return wide[0] @ wide[1]


@pytest.mark.parametrize(("name", "kernel", "arguments"), cases())
def test_references(name, kernel, arguments):
    want = exact(name, kernel, arguments)
    got = jax.jit(kernel)(*arguments)
    assert got.shape == want.shape
    assert got.dtype == arguments[0].dtype
    eps = float(np.finfo(np.float16).eps if got.dtype != np.float32 else np.finfo(np.float32).eps)
    # Sums of up to 65 terms; bfloat16 only copies.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=8 * eps, atol=32 * eps)


def test_relu_keeps_nan():
    x = np.array([np.nan, -1, 0, 2, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(load("relu").ReLU()(x), [np.nan, 0, 0, 2, np.inf, 0])


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeError, match="float16"):
        load("vector_add").VectorAdd()(np.zeros(3, np.float16), np.zeros(3, np.float16))


# flex_attention.py


FLEX = load("flex_attention")
PAPERS = FLEX.cases(dataclasses.replace(FLEX.CPU, length=64))
TINY = ["--length", "64", "--tile", "16"]


def allowed(name, mask):
    """The mask written again, as a function of Python ints."""
    causal = lambda b, h, q, k: k <= q  # noqa: E731
    if name == "window" or name == "learned sink":
        return lambda b, h, q, k: q - 15 <= k <= q
    if name == "dilated":
        return lambda b, h, q, k: k in [q - i * (4 if h >= 2 else 1) for i in range(4)]
    if name == "chunks":
        return lambda b, h, q, k: k in range(q - q % 16, q + 1)
    if name == "sinks":
        return lambda b, h, q, k: k in range(q - 15, q + 1) or (k < 4 and k <= q)
    if name == "prefix":
        prefix = mask.prefix.tolist()
        return lambda b, h, q, k: k <= q or k < prefix[b]
    if name == "documents":
        rows = mask.document.tolist()
        return lambda b, h, q, k: k <= q and len(set(rows[b][k : q + 1])) == 1  # they are sorted
    if name == "lengths":
        length = mask.length.tolist()
        return lambda b, h, q, k: max(q, k) < length[b]
    if name == "tree":  # 32 guesses behind 32 cached keys, three children a node

        def tree(b, h, q, k):
            while q > 0 and 32 + q != k:
                q = (q - 1) // 3
            return k < 32 or 32 + q == k

        return tree
    return causal


def changed(name, case):
    """The score written again, likewise."""
    if name == "alibi":
        return lambda s, b, h, q, k: s - (0.25, 0.0625, 0.015625, 0.00390625)[h] * (q - k)
    if name == "buckets":
        table = case.score.table.tolist()

        def bucket(d):
            far = 16 + next(i for i in range(16, -1, -1) if d >= 16 * 8 ** (i / 16) or i == 0)
            return d if d < 16 else min(far, 31)

        return lambda s, b, h, q, k: s + table[h][bucket(q - k)]
    if name == "distances":
        table = case.score.table.tolist()
        return lambda s, b, h, q, k: s + table[h][min(q - k, 16)]
    if name == "soft cap":
        return lambda s, b, h, q, k: 50 * math.tanh(s / 50)
    return lambda s, b, h, q, k: s


@pytest.mark.parametrize("name", PAPERS)
def test_masks_and_scores_of_papers(name):
    case = PAPERS[name]
    at = jnp.ix_(*map(jnp.arange, (2, 4, case.q_len or 64, 64)))
    mask = jnp.broadcast_to(case.mask(*at), (2, 4, case.q_len or 64, 64))
    want = allowed(name, case.mask)
    pairs = np.vectorize(want, otypes=[bool])(*map(np.asarray, at))
    np.testing.assert_array_equal(mask, pairs)
    assert not pairs.all()
    if case.score is None:
        return
    s = jax.random.normal(jax.random.key(0), pairs.shape) * 40
    want = np.where(pairs, np.vectorize(changed(name, case))(s, *at[:3], np.minimum(*at[2:])), 0)
    got = np.where(pairs, case.score(s, *at), 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_flex_attention(capsys, tmp_path):
    """The case whose gradient is longest to compile; the others are in the slow one."""
    FLEX.main([*TINY, "--out", str(tmp_path), "--only", "buckets"])
    said = capsys.readouterr().out
    assert "cpu (cpu): plain JAX" in said
    (line,) = [line for line in said.splitlines() if line.startswith("buckets")]
    assert line.split()[1:4] == ["38%", "25%", "38%"]  # of 16 tiles: 6 empty, 4 partial, 6 full
    assert "OVER" not in line
    (picture,) = tmp_path.iterdir()
    assert picture.name == "buckets.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_flex_attention_in_whole(capsys, tmp_path):
    FLEX.main([*TINY, "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("*.png"))) == len(PAPERS)


def test_flex_attention_sees_one_query_that_is_off_by_one(capsys, monkeypatch, tmp_path):
    def shifted(q, k, v, mask, score, sink, tiles, implementation):
        wrong = lambda b, h, i, j: mask(b, h, i - (i == 40), j)  # noqa: E731
        return FLEX.flex_attention(q, k, v, wrong, score, sink=sink)

    monkeypatch.setattr(FLEX, "flex", shifted)
    with pytest.raises(SystemExit, match="over the tolerance: learned sink"):
        FLEX.main([*TINY, "--out", str(tmp_path), "--only", "learned sink"])
    assert (tmp_path / "learned_sink.png").exists()
    assert "OVER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "windows"], "{'windows'} are not among 'causal', 'window'"),
        (["--length", "63"], "--length must be at least 64, not 63"),
        (["--implementation", "cute"], None),
    ],
)
def test_flex_attention_refuses(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        FLEX.main([*flags, "--out", str(tmp_path)])
    if message is None:
        assert "needs an NVIDIA GPU" in str(caught.value)
    else:
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# custom_mask.py


SPAN = load("custom_mask")


@pytest.fixture
def short(monkeypatch):
    small = dict(
        length=96, dim=8, windows=(8, 24), start=12, longest=40, steps=120, tile=4, level=0.12
    )
    monkeypatch.setattr(SPAN, "CPU", dataclasses.replace(SPAN.CPU, **small))


@pytest.mark.slow
def test_custom_mask_learns_the_windows(short, capsys):
    SPAN.main([])
    said = capsys.readouterr().out
    assert "cpu (cpu): plain JAX" in said
    rows = {line[:18].strip(): line[18:].split() for line in said.splitlines()}
    learned = [float(number) for number in rows["learned"]]
    assert abs(learned[0] - 8) < 1
    assert abs(learned[1] - 24) < 2
    assert said.count("14.5    14.5") == 1  # where they start: 12, and half the ramp
    before, after = (rows[f"tiles done, {when}"] for when in ("before", "after"))
    assert before[0] == before[1]  # equal spans at first
    assert float(after[0][:-1]) < float(before[0][:-1]) < float(after[1][:-1])


@pytest.mark.slow
def test_custom_mask_sees_a_mask_that_cuts_too_much(short, capsys, monkeypatch):
    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 4)

    monkeypatch.setattr(SPAN.AdaptiveSpan, "mask", mask)
    with pytest.raises(SystemExit, match="the loss is too high"):
        SPAN.main([])


def test_custom_mask_sees_a_wrong_window(short, monkeypatch):
    monkeypatch.setattr(SPAN, "train", lambda settings, model: (model, 0.0))
    with pytest.raises(SystemExit, match="another window"):
        SPAN.main([])


def test_adaptive_span_has_the_weights_of_the_paper():
    adaptive = SPAN.AdaptiveSpan(jnp.array([0.25, 2.0]), longest=40, ramp=4)
    for h, span in enumerate((10.0, 40.0)):  # a share above 1 is cut
        for distance in range(60):
            weight = min(max((span + 4 - distance) / 4, 0), 1)
            allowed = adaptive.mask(0, h, 70, 70 - distance)
            assert bool(allowed) is (weight > 0)
            if weight > 0:
                got = adaptive.score(jnp.float32(0.5), 0, h, 70, 70 - distance)
                np.testing.assert_allclose(got, 0.5 + math.log(weight), rtol=1e-5)
        assert not adaptive.mask(0, h, 3, 4)
    gradient = eqx.filter_grad(lambda a: a.score(jnp.float32(0), 0, 0, 70, 58))(adaptive).share
    assert gradient[0] == pytest.approx(20)  # log(1/2) of 40 * share - 8 over 4: 40 / 4 / (1 / 2)
    np.testing.assert_allclose(adaptive.seen, [12.5, 42.5])
