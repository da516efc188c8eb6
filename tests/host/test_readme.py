"""The README's code runs, in order, as one program; its commands are the ones that CI calls."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 7
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(8, 2, 16)" in done.stdout
    assert "(512, 256)" in done.stdout
    assert "(100, 64)" in done.stdout
    assert "= tanh" in done.stdout
    assert "TileMap(q_len=512" in done.stdout
    assert "897." in done.stdout  # 3 * 299, interpreted


def test_the_commands_are_there():
    assert "pip install uv && uv run --extra examples examples/train_lm.py" in README
    assert "pip install uv && uv run --extra test pytest" in README


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:examples|notebooks|eqxcute)/[\w./]+\.\w+)`", README):
        assert (ROOT / name).exists(), name
