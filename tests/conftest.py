"""What all tests share: a kernel cache of their own, and JAX as strict as it can be."""

import os
import tempfile
import warnings

# Before JAX starts: eight CPU devices, for the tests of sharding.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ["EQXCUTE_CACHE_DIR"] = tempfile.mkdtemp(prefix="eqxcute-tests-")
os.chmod(os.environ["EQXCUTE_CACHE_DIR"], 0o700)
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:  # processes share a GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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
    parser.addoption(
        "--on-cpu",
        choices=("reference", "compiled", "interpreted"),
        help="run GPU tests marked `on_cpu` without a GPU: by the kernels' references; the same, and each kernel compiled "
        "(for EQXCUTE_ARCH, by default sm_90a); or by their PTX, where they are marked `small`",
    )
    parser.addoption(
        "--kernel-cache",
        metavar="FOLDER",
        help="keep compiled kernels there: made by `--on-cpu=compiled` on all cores, they are found on the GPU",
    )


def pytest_configure(config):
    if config.getoption("--kernel-cache"):
        os.environ["EQXCUTE_CACHE_DIR"] = os.path.abspath(config.getoption("--kernel-cache"))
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "on_cpu: a GPU test that `--on-cpu` runs")
    config.addinivalue_line(
        "markers", "small: an `on_cpu` test that the PTX interpreter runs in seconds"
    )
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


def _runs_on_cpu(item) -> bool:
    how = item.config.getoption("--on-cpu")
    marked = item.get_closest_marker("small" if how == "interpreted" else "on_cpu")
    return how is not None and marked is not None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not _has_gpu() and not _runs_on_cpu(item):
        if item.config.getoption("--expect-gpu"):
            pytest.fail("there is no GPU here")
        pytest.skip("needs an NVIDIA GPU")
