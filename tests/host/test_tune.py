"""Tuning: which configurations are tried, the record, and how the kernels' tables take what it says."""

import dataclasses
import json
import sys
import tomllib

import jax.numpy as jnp
import pytest
from eqxcute.layers import bench
from eqxcute.layers.attention import _attend, _config, _tune, _tuned
from eqxcute.layers.attention._compiled import Functions
from eqxcute.layers.attention._config import KINDS, Sm90Backward, Sm90Forward

from eqxcute import _fingerprint
from eqxcute._arch import ARCHITECTURES

FACTS = ARCHITECTURES["sm_90a"]
DIMS = bench._dims(_tune.DIMS + ",256")
CASES = _tune.cases(DIMS)
KEY = _tuned.Key("forward", 64, 64, "full", False)
OTHER = Sm90Forward(tile_kv=64, warpgroups=2, stages=3)


def entry(config=OTHER, **more):
    return {**KEY._asdict(), "config": dataclasses.asdict(config), **more}


# Candidates


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_candidates_are_the_static_tables_and_others_that_fit(case):
    found = _tune.candidates(case, _tune.MOST)
    assert found[0] == _tune.static(case)
    assert 2 < len(found) == len(set(found)) <= _tune.MOST
    assert _tune.candidates(case, _tune.MOST_QUICK) == found[: _tune.MOST_QUICK]
    dims = case.dim, case.v_dim
    for config in found:
        assert _tune.fits(case, config)
        tile = None if case.mask == "full" else (128, 128)
        if case.direction == "backward":
            used = _config.hopper_backward_bytes(config, *dims, 16)
            assert tile is None or tile[0] % config.tile_q == 0
            assert config.ds_stages in (1, config.stages)
        else:
            used = _config.hopper_forward_bytes(config, *dims, 16)
            # Scores, what they become, and the output: of those that a thread has, 32 are for the rest.
            held = config.tile_kv / 2 + config.tile_kv / 4 + case.v_dim / 2
            assert held <= config.registers[1] - 32
        assert used + _config.BARRIER_BYTES <= 227 * 1024


def test_what_is_known_to_be_fast_is_tried():
    def tried(*case):
        return [_tune.tried(x) for x in _tune.candidates(_tune.Case(*case), _tune.MOST)]

    fast = {"tile_kv": 128, "hidden": 0, "warpgroups": 2, "stages": 2}
    assert fast in tried("forward", 128, 128, "full", False)
    narrow = {"tile_kv": 128, "hidden": 2, "warpgroups": 3, "stages": 2}
    assert narrow in tried("forward", 64, 64, "sparse", False)
    base = {"hidden": False, "stages": 2}
    assert {**base, "tile_q": 128, "ds_stages": 2} in tried("backward", 64, 64, "sparse", False)
    assert {**base, "tile_q": 64, "ds_stages": 1} in tried("backward", 128, 128, "full", False)


def test_work_is_counted_as_the_benchmark_counts_it():
    from eqxcute.layers.attention._cases import Case

    sizes = _tune.Sizes(3, 32, 4)
    for mask, name in (("full", "full"), ("causal", "sparse")):
        for backward, direction in ((False, "forward"), (True, "backward")):
            want = Case("T", "", 3, 32, 4, 4, 64, mask=mask).flops(backward)
            assert _tune.flops(_tune.Case(direction, 64, 64, name, False), sizes) == want
    # Of five products, three have the dim of q and k, two that of v.
    assert (
        _tune.flops(_tune.Case("backward", 192, 128, "full", False), sizes) == 2 * 12 * 32**2 * 832
    )


def test_another_takes_the_place_of_the_static_one_only_if_it_is_faster():
    base = _config.hopper_forward_table(FACTS, 64, 64)
    assert _tune.chosen({base: 1.005, OTHER: 1.0}, base) == base
    assert _tune.chosen({base: 1.02, OTHER: 1.0}, base) == OTHER
    assert _tune.chosen({OTHER: 1.0}, base) == OTHER  # the static one failed


# The program


def test_dims_of_the_command_line(monkeypatch):
    assert bench._dims("64, 192/128") == [(64, 64), (192, 128)]
    for dims, said in (
        ("40", r"\(40, 40\) is worked on as \(64, 64\)"),
        ("512", r"no kernel of sm_90a for \(512, 512\)"),
    ):
        with pytest.raises(SystemExit, match=said):
            bench.main(["tune", "attention", "--smoke", "--dims", dims])


def test_on_another_gpu_one_sentence_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(bench, "platform", lambda: "cuda")
    monkeypatch.setattr(bench._arch, "current", lambda: "sm_100a")
    assert bench.main(["tune", "attention"]) == 2
    assert "is for sm_90a, and this GPU is sm_100a" in capsys.readouterr().err


class Fake:
    """A call that takes no time, and of one configuration another result or none."""

    def __init__(self, case, config, given):
        self.config, self.backward_of = config, case.direction == "backward"
        assert len(given) == (12 if self.backward_of else 8)

    def forward(self):
        if getattr(self.config, "hidden", 0) == 0 and not self.backward_of:
            raise RuntimeError("out of registers")
        return [jnp.ones(2) * (1 + (self.backward_of and self.config.hidden))] * 2

    def wait(self, result):
        pass

    def results(self, backward):
        return self.forward()


def test_the_record_and_what_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_tune, "Call", Fake)
    monkeypatch.setattr(
        _tune, "arguments", lambda case, *_: (0,) * (12 if case.direction == "backward" else 8)
    )
    few = [case for case in CASES if case.dim == 64 and case.mask == "full" and not case.score]
    monkeypatch.setattr(_tune, "cases", lambda dims: few)
    monkeypatch.setattr(
        _tune, "candidates", lambda case, most: [_tune.static(case), *_variants(case)]
    )
    out = tmp_path / "tuned.json"
    assert bench.main(["tune", "attention", "--smoke", "--dims", "64", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["command"].endswith(f"bench tune attention --smoke --dims 64 --out {out}")
    assert {"device", "versions", "commit", "clocks", "date", "inputs"} <= set(record)
    assert [(x["direction"], x["dim"], len(x["candidates"])) for x in record["entries"]] == [
        ("forward", 64, 1),
        ("backward", 64, 1),
    ]
    reasons = [x["reason"] for x in record["skipped"]]
    assert reasons == [
        "RuntimeError: out of registers",
        "ValueError: its result is off the first one's by 1",
    ]
    assert "skipped: RuntimeError: out of registers" in capsys.readouterr().out
    # A trial is no table.
    assert _tuned.read(record, KINDS)[0] == {}
    found, wrong = _tuned.read({**record, "smoke": False}, KINDS)
    assert not wrong
    assert list(found.values()) == [_tune.static(case) for case in few]


def test_a_process_that_compiles_and_one_that_died(monkeypatch):
    """Each answers with what went wrong; after one that died there is another."""
    script = (
        "import sys\nfor line in sys.stdin: print(['null', '\"spills\"'][int(line)], flush=True)"
    )
    compilers = _tune.Compilers(0, [(64, 64)], 2)
    assert json.loads(compilers._command[-1]) == [[[64, 64]], 2]
    compilers._command = [sys.executable, "-c", script]
    compilers._start()
    try:
        assert [compilers.compile(0), compilers.compile(1)] == [None, "spills"]
        said = compilers.compile(2)
        assert said is not None
        assert "its compiler died" in said
        assert "IndexError" in said
        assert compilers.compile(1) == "spills"
    finally:
        compilers.close()


def _variants(case):
    change = {"hidden": True} if case.direction == "backward" else {"hidden": 0}
    return [dataclasses.replace(_tune.static(case), **change)]


def test_a_case_without_figures_is_an_exit_code(monkeypatch):
    monkeypatch.setattr(_tune, "Call", lambda *_: 1 / 0)
    few = [case for case in CASES if case.dim == 64 and case.mask == "full" and not case.score]
    monkeypatch.setattr(_tune, "cases", lambda dims: few)
    assert bench.main(["tune", "attention", "--smoke", "--dims", "64"]) == 1


def test_smoke_calls_the_kernels_themselves(monkeypatch, tmp_path):
    """Plain JAX stands for them here; of one case of either direction, with a mask and a score."""
    few = [case for case in CASES if case.dim == 64 and case.mask == "sparse" and case.score]
    monkeypatch.setattr(_tune, "cases", lambda dims: few)
    out = tmp_path / "tuned.json"
    assert bench.main(["tune", "attention", "--smoke", "--dims", "64", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["skipped"] == []
    assert [len(x["candidates"]) for x in record["entries"]] == [2, 2]
    for one in record["entries"]:
        assert one["ms"] == pytest.approx(one["candidates"][0][1], rel=0.02, abs=1e-3)


# What the kernels' tables make of it


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_entry_goes_before_the_static_table(monkeypatch, direction):
    config = OTHER if direction == "forward" else Sm90Backward(tile_q=64, stages=3)
    choose = getattr(_config, f"hopper_{direction}")
    table = {_tuned.Key(direction, 64, 64, "sparse", True): config}
    asked = {
        (tile, scored): choose(FACTS, 64, 64, "bfloat16", tile, scored=scored)
        for tile in (None, (128, 128))
        for scored in (False, True)
    }
    monkeypatch.setattr(_config, "TUNED", table)
    for (tile, scored), before in asked.items():
        for dim in (64, 40):  # columns count
            found = choose(FACTS, dim, dim, "float16", tile, scored=scored)
            assert found == (config if tile and scored else before)
            assert config != before
        assert choose(FACTS, 64, 64, "float32", tile, scored=scored) is None
        assert choose(FACTS, 128, 64, "bfloat16", tile, scored=scored) != config


def test_an_entry_that_does_not_fit_leaves_the_static_table(monkeypatch):
    before = _config.hopper_forward(FACTS, 64, 64, "bfloat16", (128, 128))
    wide = Sm90Forward(tile_kv=96, warpgroups=2, stages=2)
    key = KEY._replace(mask="sparse")
    monkeypatch.setattr(_config, "TUNED", {key: wide})
    assert _config.map_tile("sm_90a", 64, 64, "bfloat16") == (128, 192)
    assert _config.map_tile("sm_90a", 64, 64, "bfloat16", scored=True) != (128, 192)
    assert _config.hopper_forward(FACTS, 64, 64, "bfloat16", (128, 192)) == wide
    assert _config.hopper_forward(FACTS, 64, 64, "bfloat16", (128, 128)) == before  # a user's map
    large = dataclasses.replace(wide, stages=9)
    monkeypatch.setattr(_config, "TUNED", {key: large})
    assert _config.hopper_forward(FACTS, 64, 64, "bfloat16", (128, 192)) != large
    assert _config.map_tile("sm_90a", 64, 64, "bfloat16") != (128, 192)
    queries = Sm90Backward(tile_q=192)
    backward = _config.hopper_backward(FACTS, 64, 64, "bfloat16", (128, 128))
    monkeypatch.setattr(_config, "TUNED", {key._replace(direction="backward"): queries})
    assert _config.hopper_backward(FACTS, 64, 64, "bfloat16", (128, 128)) == backward


def test_the_table_is_in_the_compile_key(monkeypatch):
    kernel = _attend.ForwardKernel(Functions(None, None), None, precision=None, scale=0.125)

    def key():
        return _fingerprint.fingerprint(kernel, {"eqxcute"})

    monkeypatch.setattr(_config, "TUNED", {KEY: OTHER})
    before = key()
    assert key() == before
    monkeypatch.setattr(_config, "TUNED", {KEY: dataclasses.replace(OTHER, hidden=1)})
    assert key() != before


def test_what_is_wrong_with_a_table_is_said_and_left_out(tmp_path):
    fields = dataclasses.asdict(OTHER)
    bad = {
        "has no field tile_k, but tile_kv": entry(config=OTHER)
        | {"config": {**fields, "tile_k": 1}},
        "stages of Sm90Forward is True": entry() | {"config": {**fields, "stages": True}},
        "missing 1 required": entry() | {"config": {"tile_kv": 64, "warpgroups": 2}},
        "KeyError: 5": entry() | {"config": {**fields, "warpgroups": 5}},
        "KeyError: 'mask'": {name: x for name, x in entry().items() if name != "mask"},
        "is none that is asked for": entry(mask="causal"),
        "KeyError: 'sideways'": entry(direction="sideways"),
    }
    good = entry()
    found, wrong = _tuned.read({"entries": [good, *bad.values(), good]}, KINDS)
    assert found == {KEY: OTHER}
    for number, (said, words) in enumerate(zip(wrong, (*bad, "was there before"), strict=True), 1):
        assert said.startswith(f"Entry {number}: ")
        assert words in said
    file = tmp_path / "table.json"
    assert _tuned.load(file, KINDS) == {}
    for text in ("no JSON", "[]", '{"entries": 3}', json.dumps({"smoke": True, "entries": [good]})):
        file.write_text(text)
        assert _tuned.load(file, KINDS) == {}, text
    file.write_text(json.dumps({"entries": [good, *bad.values()]}))
    assert _tuned.load(file, KINDS) == {KEY: OTHER}


@pytest.mark.skipif(not _config.TUNED_FILE.exists(), reason="no table was measured yet")
def test_each_entry_of_the_table_that_comes_with_the_package():
    found, wrong = _tuned.read(json.loads(_config.TUNED_FILE.read_text()), KINDS)
    assert wrong == []
    assert found == _config.TUNED != {}
    for key, config in found.items():
        assert _tune.fits(_tune.Case(*key), config), (key, config)


def test_the_table_is_in_the_package():
    text = (bench.HERE.parent / "pyproject.toml").read_text()
    shipped = tomllib.loads(text)["tool"]["setuptools"]["package-data"]["eqxcute.layers.attention"]
    assert any(_config.TUNED_FILE.match(pattern) for pattern in shipped)
    assert _config.TUNED_FILE.parent.name == "attention"
