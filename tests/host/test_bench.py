"""The benchmark program: its counts, its record, its table, and what it does where a rival is missing."""

import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from eqxcute.layers import _timing, bench
from eqxcute.layers._timing import Contender, JaxRun
from eqxcute.layers.attention import _cases

MARKED = "# A title\n<!-- bench attention -->\nnot yet\n<!-- /bench -->\nthe rest\n"


def allowed(case):
    """The mask of a case written out in NumPy: query by key."""
    q, kv = np.arange(case.length)[:, None], np.arange(case.length)[None]
    each = case.length // case.documents
    return {
        "full": q == q + 0 * kv,
        "causal": q >= kv,
        "window": (q >= kv) & (q - kv < case.window),
        "document": (q >= kv) & (q // each == kv // each),
    }[case.mask]


@pytest.mark.parametrize("length", [8, 32])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "document"])
def test_pairs_and_operations_are_those_that_the_mask_lets_through(mask, length):
    """A window of 16 is longer than the shorter row."""
    case = _cases.Case("T", "", 3, length, 4, 2, 24, mask=mask, window=16, documents=4)
    pairs = 3 * 4 * allowed(case).sum()
    assert case.pairs == pairs
    assert case.flops() == 4 * 24 * pairs  # q k and p v: a product and a sum each
    assert case.flops(backward=True) == 10 * 24 * pairs


@pytest.mark.parametrize("case", _cases.CASES, ids=lambda case: case.name)
def test_the_mask_and_score_of_a_case_are_what_its_title_says(case):
    case = case.smoke()
    ids = _cases.document_ids(case) if case.mask == "document" else None
    q, kv = jnp.arange(case.length)[:, None], jnp.arange(case.length)[None]
    mask = case.mask_fn(ids)
    seen = np.ones((case.length, case.length), bool) if mask is None else mask(0, 0, q, kv)
    np.testing.assert_array_equal(seen, allowed(case))
    score = case.score_fn()
    want = {
        "none": None,
        "relpos": 3.0 - 0.05 * (q - kv),
        "softcap": 20 * jnp.tanh(3.0 / 20) + 0 * (q - kv),
    }[case.score]
    if want is None:
        assert score is None
    else:
        got = jnp.broadcast_to(score(jnp.float32(3.0), 0, 0, q, kv), want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_ten_cases_and_their_inputs():
    assert [case.name for case in _cases.CASES] == [f"A{i}" for i in range(1, 11)]
    case = _cases.CASES[5].smoke()  # grouped queries
    q, k, v, cotangent, ids = _cases.make_inputs(case, 1)
    assert case.heads > case.kv_heads
    assert q.shape == cotangent.shape == (1, 32, case.heads, 8)
    assert k.shape == v.shape == (1, 32, case.kv_heads, 8)
    assert ids is None
    assert {x.dtype.name for x in (q, k, v, cotangent)} == {"bfloat16"}
    assert bool((q == _cases.make_inputs(case, 1).q).all())
    assert not bool((q == _cases.make_inputs(case, 2).q).all())


def test_smoke_gives_a_whole_record(tmp_path, capsys):
    out = tmp_path / "record.json"
    assert bench.main(["attention", "--smoke", "--cases", "A7", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    said = capsys.readouterr().out
    assert record["command"].endswith(f"bench attention --smoke --cases A7 --out {out}")
    assert {"jax", "eqxcute", "python"} <= set(record["versions"])
    assert record["device"]["name"]
    assert record["inputs"]["seed"] == 0
    assert record["inputs"]["dtype"] == "bfloat16"
    assert record["clocks"][0]["when"] == "before"
    assert record["clocks"][-1]["when"] == "after A7"
    assert {"commit", "date", "rounds"} <= set(record)
    done = [(row["case"], row["implementation"]) for row in record["rows"]]
    assert done == [("A7", "eqxcute"), ("A7", "xla")]
    for row in record["rows"]:
        assert row["forward_ms"] == pytest.approx(np.median(row["samples_ms"]["forward"]))
        together = np.median(row["samples_ms"]["backward"]) - row["forward_ms"]
        assert row["backward_ms"] == pytest.approx(together)
        assert len(row["samples_ms"]["forward"]) == record["rounds"] == 2
        assert row["first_s"]["forward"] > 0
        assert row["setup_ms"] is None
        assert row["difference"] < bench.LIMIT
        flops = next(c["flops"] for c in record["cases"] if c["name"] == row["case"])
        rate = flops["forward"] / (row["forward_ms"] * 1e-3) / 1e12
        assert row["tflops"]["forward"] == pytest.approx(rate)
    assert "with JAX forward and backward minus forward" in said
    with pytest.raises(SystemExit, match="--smoke"):
        bench.rewritten(MARKED, record)


def test_smoke_without_the_backward_pass(tmp_path):
    out = tmp_path / "record.json"
    arguments = ["attention", "--smoke", "--cases", "A8", "--no-backward", "--seed", "3"]
    assert bench.main([*arguments, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert record["inputs"]["seed"] == 3
    assert list(row["first_s"]) == list(row["samples_ms"]) == ["forward"]
    assert row["backward_ms"] is row["tflops"]["backward"] is row["note"] is None


class Slow(JaxRun):
    """Its pullback can be timed alone, and something was made before."""

    pullback_alone = True
    setup_ms = 1.5


def plus(shift, run=JaxRun):
    def prepare(loaded, case, inputs, smoke):
        return run(lambda q, k, v: q + shift, inputs[:3], inputs.cotangent)

    return prepare


def missing():
    raise ModuleNotFoundError("No module named 'rival'")


def broken(loaded, case, inputs, smoke):
    raise RuntimeError("out of\nmemory")


def no_pullback(loaded, case, inputs, smoke):
    run = plus(0)(loaded, case, inputs, smoke)
    run.backward = broken
    return run


def always(case):
    return True


@pytest.fixture
def rivals(monkeypatch):
    def one(name, prepare, load=lambda: None, can=always):
        return Contender(name, name.title(), load, prepare, can, anywhere=True)

    contenders = [
        one("eqxcute", plus(0)),
        one("absent", plus(0), load=missing),
        one("broken", broken),
        one("half", no_pullback),
        one("other", plus(1)),
        one("pull", plus(0, Slow)),
        one("elsewhere", plus(0), can=lambda case: False),
    ]
    monkeypatch.setattr(_cases, "CONTENDERS", tuple(contenders))


def test_a_rival_that_is_missing_or_fails_is_a_line(rivals, tmp_path, capsys):
    out = tmp_path / "record.json"
    code = bench.main(["attention", "--smoke", "--cases", "A1,A7", "--out", str(out)])
    said, record = capsys.readouterr().out, json.loads(out.read_text())
    assert code == 0
    assert said.count("absent       skipped: not installed (ModuleNotFoundError: No module") == 1
    assert said.count("broken       skipped: RuntimeError: out of memory") == 2  # once a case
    assert {row["implementation"] for row in record["rows"]} == {"eqxcute", "half", "other", "pull"}
    rows = {row["implementation"]: row for row in record["rows"]}
    assert rows["half"]["backward_ms"] is None
    assert rows["half"]["forward_ms"] > 0
    assert "no backward pass: TypeError" in rows["half"]["note"]
    assert rows["other"]["difference"] > 0.5
    assert "DIFFERS" in said
    assert rows["pull"]["backward_ms"] == np.median(rows["pull"]["samples_ms"]["backward"])
    assert rows["pull"]["setup_ms"] == 1.5


def test_ours_that_fails_is_an_exit_code(rivals, monkeypatch):
    ours, *others = _cases.CONTENDERS
    for prepare in (broken, no_pullback):
        failing = dataclasses.replace(ours, prepare=prepare)
        monkeypatch.setattr(_cases, "CONTENDERS", (failing, *others))
        assert bench.main(["attention", "--smoke", "--cases", "A1", "--only", "eqxcute"]) == 1


def test_without_a_gpu_one_sentence_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(bench, "platform", lambda: "cpu")
    monkeypatch.setattr(bench, "os", types.SimpleNamespace(environ={}))
    assert bench.main(["attention"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "needs an NVIDIA GPU, and JAX runs on 'cpu' here" in said.err
    assert said.out == ""


def test_names_that_nothing_has():
    with pytest.raises(SystemExit, match=r"--cases: A77 is not one of A1, A2"):
        bench.main(["attention", "--smoke", "--cases", "A1,A77"])
    with pytest.raises(SystemExit, match=r"--only: cudn is not one of eqxcute, cudnn"):
        bench.main(["attention", "--smoke", "--only", "cudn"])


def row(case, name, forward, backward, setup=None, difference=0.001):
    return {
        "case": case,
        "implementation": name,
        "tflops": {"forward": forward, "backward": backward},
        "setup_ms": setup,
        "difference": difference,
    }


RECORD = {
    "benchmark": "attention",
    "smoke": False,
    "date": "2031-01-02T03:04:05+00:00",
    "device": {"name": "NVIDIA H200", "driver": "580.1"},
    "versions": {"eqxcute": "0.1.0", "jax": "0.10.2", "torch": "2.9.1"},
    "commit": "0123456789abcdef",
    "changed": False,
    "inputs": {"dtype": "bfloat16"},
    "rounds": 11,
    "clocks": [
        {"when": "before", "clocks.sm": "345"},
        {"when": "after A1", "clocks.sm": "1980"},
        {"when": "after A8", "clocks.sm": "990"},
    ],
    "contenders": [
        {"name": "eqxcute", "title": "eqxcute"},
        {"name": "cudnn", "title": "cuDNN"},
        {"name": "fa4", "title": "flash-attn-4"},
        {"name": "flex", "title": "never ran"},
    ],
    "cases": [{"name": "A1", "title": "causal"}, {"name": "A8", "title": "documents"}],
    "rows": [
        row("A1", "eqxcute", 612.4, 540.0),
        row("A1", "cudnn", 571.2, 454.0),
        row("A8", "eqxcute", 7.25, 195.0),
        row("A8", "fa4", 324.0, None, setup=1.3, difference=0.4),
    ],
    "skipped": [{"case": None, "implementation": "flex", "reason": "not installed"}],
}


def test_the_table_is_made_of_the_record(tmp_path, capsys):
    file = tmp_path / "record.json"
    file.write_text(json.dumps(RECORD))
    assert bench.main(["table", str(file)]) == 0
    head, rule, first, second, empty, note = capsys.readouterr().out.splitlines()
    assert head == "| | eqxcute | cuDNN | flash-attn-4 |"
    assert rule == "|---|---|---|---|"
    assert first == "| A1: causal | **612** / **540** | 571 / 454 | - |"
    assert second == "| A8: documents | 7.2 / **195** | - | **324** / - + 1.3 ms (!) |"
    assert empty == ""
    for words in (
        "NVIDIA H200, driver 580.1; eqxcute 0.1.0, commit 0123456789ab; JAX 0.10.2; torch 2.9.1",
        "bfloat16, 2031-01-02",
        "SM clock after each case 990 to 1980 MHz",
        "medians of 11 rounds",
        "(!): the result differs",
    ):
        assert words in note, words


def test_the_readme_is_rewritten_between_its_markers(tmp_path):
    file, readme = tmp_path / "record.json", tmp_path / "README.md"
    file.write_text(json.dumps(RECORD))
    readme.write_text(MARKED)
    for _ in range(2):  # twice is once
        assert bench.main(["readme", str(file), str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith("# A title\n<!-- bench attention -->\n| | eqxcute |")
        assert text.endswith("\n<!-- /bench -->\nthe rest\n")
        assert "not yet" not in text
        assert text.count("| A1: causal |") == 1
    for without in ("no markers", MARKED.replace("attention", "linear"), MARKED[:50]):
        with pytest.raises(
            SystemExit, match="<!-- bench attention --> followed by <!-- /bench -->"
        ):
            bench.rewritten(without, RECORD)


def test_the_readme_of_this_project_has_the_markers():
    text = (bench.HERE.parent / "README.md").read_text()
    assert bench.table(RECORD) in bench.rewritten(text, RECORD)


def test_differences():
    one, two = jnp.array([3.0, 4.0]), jnp.array([3.0, 4.5])
    assert _timing.difference([one, two], [one, one]) == pytest.approx(0.1)
    assert _timing.difference([one], [one, two]) == 0  # as far as both go
    assert _timing.difference([jnp.array([jnp.nan, 1.0])], [one]) == np.inf
    assert _timing.difference([one[:1]], [one]) == np.inf


def test_turns_are_taken_by_all_and_a_failure_ends_one_only():
    taken = []

    def run(name, after=99):
        def call():
            taken.append(name)
            if taken.count(name) > after:
                raise ValueError("stopped")

        return types.SimpleNamespace(forward=call, wait=lambda result: None)

    runs = {"a": run("a"), "b": run("b", after=5), "c": run("c")}
    samples, failed = _timing.take_turns(
        runs, rounds=4, turn_ms=0, passes=dict.fromkeys(runs, ("forward",))
    )
    assert failed == {"b": "ValueError: stopped"}
    assert {name: len(found["forward"]) for name, found in samples.items()} == {"a": 4, "c": 4}
    assert taken.count("b") == 6  # the sixth failed, and there was no seventh
    # Two calls to find how many fit; then, a round, one before and one that counts.
    assert taken.count("a") == taken.count("c") == 2 + 4 * 2
    first = taken.index("b"), taken.index("a"), taken.index("c")
    assert max(first) < 12  # all in the first round
