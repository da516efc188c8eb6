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
    import jax
    import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--expect-gpu", action="store_true", help="fail, instead of skip, what needs a GPU"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")


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
