"""What all tests share: a kernel cache of their own, and JAX as strict as it can be."""

import os
import tempfile
import warnings

# Before JAX starts: eight CPU devices, for the tests of sharding.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["EQXCUTE_CACHE_DIR"] = tempfile.mkdtemp(prefix="eqxcute-tests-")
os.chmod(os.environ["EQXCUTE_CACHE_DIR"], 0o700)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of others' imports
    import equinox as _equinox  # noqa: F401
    import hypothesis
    import jax
    import pytest

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("eqxcute", deadline=None)
hypothesis.settings.load_profile("eqxcute")


def pytest_addoption(parser):
    parser.addoption(
        "--expect-gpu", action="store_true", help="fail, instead of skip, what needs a GPU"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line(
        "markers", "slow: long enumerations that hardly depend on versions: CI runs them once"
    )


def pytest_xdist_auto_num_workers(config):
    """`-n auto`, as pyproject.toml has it: one process for one GPU, and no more than pay for their start."""
    return 1 if config.getoption("--expect-gpu") else min(os.cpu_count() or 1, 4)


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "/tests/gpu/" in str(item.path).replace(os.sep, "/"):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not _has_gpu():
        if item.config.getoption("--expect-gpu"):
            pytest.fail("there is no GPU here")
        pytest.skip("needs an NVIDIA GPU")
