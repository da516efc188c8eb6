"""The package as a whole: importing is harmless, public names are documented, classes are final or abstract."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import eqxcute.layers
import pytest

import eqxcute
import eqxcute.testing

ROOT = Path(__file__).resolve().parents[2]


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_has_no_side_effect():
    """J12: no CuTe, no tvm-ffi, no backend, no compiler; it works without the CuTe DSL installed."""
    out = in_a_fresh_process(
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('cutlass', 'tvm_ffi', 'jax_tvm_ffi', 'tvm_ffi_orcjit', 'nvidia_cutlass_dsl'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "import eqxcute, eqxcute.layers, eqxcute.testing\n"
        "import jax, jax._src.xla_bridge as bridge\n"
        "assert not bridge._backends, 'a backend was started'\n"
        "import jax.numpy as jnp\n"
        "print(eqxcute.layers.bias_relu(jnp.array([-1.0, 2.0]), jnp.zeros(2)))\n"
        "q = jnp.ones((4, 2, 8))\n"
        "print(eqxcute.layers.flex_attention(q, q, q).shape)\n"
    )
    assert "[0. 2.]" in out
    assert "(4, 2, 8)" in out


def public():
    for module in (eqxcute, eqxcute.layers, eqxcute.testing):
        for name, value in vars(module).items():
            if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                own = "eqxcute.testing" if module is eqxcute.testing else "eqxcute"
                if value.__module__.startswith(own):
                    yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("value", list(public()))
def test_public_names_have_docstrings(value):
    assert value.__doc__
    assert len(value.__doc__) > 20
    if inspect.isfunction(value):
        assert "**" in value.__doc__, "a function's docstring has **Arguments:** or **Returns:**"


def sources():
    for folder in ("eqxcute", "layers"):
        yield from (ROOT / folder).rglob("*.py")


def test_kernels_import_no_jax_and_the_bridge_no_layer():
    for path in sources():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not (
                    "_kernels" in path.parts and name.split(".")[0] in ("jax", "equinox")
                ), path
                assert not (
                    path.is_relative_to(ROOT / "eqxcute") and "layers" in name.split(".")
                ), path


def test_every_package_is_packaged():
    import tomllib

    named = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = set()
    for init in [*(ROOT / "eqxcute").rglob("__init__.py"), *(ROOT / "layers").rglob("__init__.py")]:
        parts = init.parent.relative_to(ROOT).parts
        found.add(".".join(("eqxcute", *parts) if parts[0] == "layers" else parts))
    assert named == found


def test_no_path_of_a_machine_and_no_package_registry_is_committed():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        assert not name.endswith((".lock", ".pyc")), name
