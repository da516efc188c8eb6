"""notebooks/masks.ipynb runs from top to bottom and prints what its words promise."""

import contextlib
import io
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "notebooks" / "masks.ipynb"


@pytest.fixture(scope="module")
def printed() -> list[tuple[str, str]]:
    """Source and output of each code cell."""
    names, outputs = {"__name__": "__main__"}, []
    for cell in json.loads(PATH.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []  # kept without outputs: they would go stale
        source = "".join(cell["source"])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, f"{PATH.name}, {cell['id']}", "exec"), names)
        outputs.append((source, out.getvalue()))
    return outputs


def of(printed, word: str) -> list[str]:
    """The outputs of the cells that have this word in their source."""
    return [out for source, out in printed if word in source]


def test_attention_is_the_formula(printed):
    differences = [float(out.split(":")[1]) for out in of(printed, "largest")]
    assert len(differences) == 2
    assert max(differences) < 1e-5


def test_masks_are_drawn(printed):
    (causal,) = of(printed, "draw(causal)")
    assert causal.splitlines()[1] == "# # . . . . . . . . . ."
    (window,) = of(printed, "draw(Window(4))")
    assert window.splitlines()[-1] == ". . . . . . . . # # # #"
    (files,) = of(printed, "draw(SameFile")
    assert files.splitlines()[6] == ". . . . . # # . . . . ."


def test_and_is_explained(printed):
    (said,) = of(printed, "def wrong")
    assert "`&`" in said
    assert "`wrong`" in said


def test_nothing_is_traced_again(printed):
    assert of(printed, "traces += 1") == ["three masks, traces: 1\n"]


def test_tiles_are_drawn(printed):
    (tiles,) = of(printed, "tile_map(SameFile")
    lines = tiles.splitlines()
    assert "empty=43, partial=14, full=7" in lines[0]
    assert lines[3] == "▒▒▒·····"


def test_the_hole_is_open_and_the_answer_fills_it(printed):
    hole, answer = of(printed, "check(Prompt")
    assert "not yet equal" in hole
    assert hole.count("<-") == 4  # rows 0 to 3 do not see the whole prompt of five
    assert answer.endswith("yours, asked: equal\n")
