"""If the kernels cannot run, every test of this folder is skipped."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.cases import DEVICE, INTERPRET
from tests.support.interpreter import (
    call_builtins_directly,
    keep_truth_values,
    match_equal_types_at_once,
    omit_unread_overflow_checks,
    remember_types,
    replace_language_once,
)
from tests.support.paths import LIBRARY
from tests.support.rendering import importable

LIBRARY_PACKAGE = "library_variants"

if INTERPRET:
    keep_truth_values()
    replace_language_once()
    call_builtins_directly()
    omit_unread_overflow_checks()
    remember_types()
    match_equal_types_at_once()

# On a GPU the kernels themselves run.
collect_ignore_glob = [] if INTERPRET else ["hopper/test_hopper_*emulated.py"]


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU: set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an importable package of the variants of library.yaml."""
    # Hypothesis searches source files for numbers to try, which takes long. It leaves out folders of this name.
    folder = tmp_path_factory.mktemp("library") / "tests"
    with importable(folder, LIBRARY_PACKAGE, LIBRARY):
        yield LIBRARY_PACKAGE


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread, because more threads are slower for tensors of the size of a tile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch fills allocated memory with NaN. Its deterministic mode does more, but only warns: the golden may sum."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4, device=DEVICE).isnan().all()
        assert torch.empty(8, device=DEVICE).new_empty((2, 4)).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with sizes for a GPU if kernels are interpreted."""
    if INTERPRET:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
