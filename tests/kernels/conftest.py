"""Where the kernels cannot run, every test of this folder is skipped."""

import pytest
import torch

from .cases import INTERPRET


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    if not INTERPRET and not torch.cuda.is_available():
        pytest.skip("no GPU: set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRET:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="sizes for a GPU, not for the interpreter"))
