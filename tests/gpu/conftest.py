"""How GPU tests that are marked `on_cpu` run without a GPU: see `--on-cpu`."""

import os

import pytest

import eqxcute
from eqxcute import _cache, _compile, _primitive
from eqxcute.testing import interpreted


@pytest.fixture(autouse=True)
def on_cpu(request, monkeypatch):
    """The value of `--on-cpu`: with it, calls take the way to the kernels on a CPU too."""
    how = request.config.getoption("--on-cpu")
    architecture = os.environ.get("EQXCUTE_ARCH", "sm_90a")
    if how is None or not request.node.get_closest_marker("on_cpu"):
        yield None
    elif how == "interpreted":
        with interpreted(architecture):
            yield how
    else:
        if how == "compiled":
            monkeypatch.setattr(_primitive, "_lowered_reference", compiled)
        with eqxcute.architecture(architecture):
            yield how


def compiled(call, *operands):
    """What a kernel is lowered to on a CPU, once the kernel is in the cache on disk."""
    import jax

    found = _primitive.view_of(call, [jax.typeof(x) for x in operands])
    plan, architecture = _primitive.plan_of(found), eqxcute._arch.current()
    key = _compile.key_of(found, plan, architecture)
    _cache.fetch(key, lambda: _compile.compile(found, plan, key, architecture))
    return _primitive.reference(call, operands)
