"""Puts the checkout on the import path, so that a bare `pytest` finds `generated`, `bench` and `tests`."""

import gc
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# A full collection visits every object of torch, JAX and the collected tests, more than a million. With the defaults
# that is a seventh of the kernel tests' time.
gc.set_threshold(50_000, 20, 100)

# Before anything imports torch or numpy: each of several workers has a core of its own, on which more threads than one
# wait for each other, at twice the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports JAX: tests of sharding need devices, and torch needs memory beside it. XLA's older emitters of
# fused loops compile in two thirds of the time; a version of XLA that does not know the flag would end the process, and
# the emitters of jaxlib 0.10.1 round to 8-bit floats by way of 16 bits, that is, twice.
XLA_FLAGS = ["--xla_force_host_platform_device_count=4"]
if find_spec("jaxlib") is not None and version("jaxlib").startswith("0.10.") and version("jaxlib") != "0.10.1":
    # XLA would split each program to compile the parts in parallel. A worker has only one core, and splitting took an
    # eighth of the processor time of test_jax_sharding.py.
    XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Before anything imports JAX: its own tests run like this, and so may those of whoever calls the ops.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


def pytest_configure() -> None:
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    # Other tests run at the same time: an example, or drawing one, may have to wait for a core.
    settings.register_profile("parallel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("parallel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every test of each product of variants and calls")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full run of each product what covers its pairs (`tests.support.coverage`), but all that is named."""
    if config.getoption("full") or any("::" in argument for argument in config.args):
        return
    if whole := [item for item in items if item.get_closest_marker("full")]:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=whole)
    if not any(item.get_closest_marker("covers") for item in items):
        return
    from tests.support.selection import SELECTION, choose

    items[:], left_out, config.stash[SELECTION] = choose(items)
    config.hook.pytest_deselected(items=left_out)
