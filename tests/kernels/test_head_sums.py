"""Sums over all axes except heads."""

from __future__ import annotations

import pytest
import torch

from generated._runtime.torch.head_sums import head_sums
from tests.support.cases import DEVICE


@pytest.mark.parametrize("shape", [(1, 3, 7), (3, 2, 5), (2, 2, 1100), (1, 4, 0)], ids=str)
def test_sums_of_heads(shape: tuple[int, ...]) -> None:
    parts = torch.randn(shape, device=DEVICE)
    got = head_sums(parts)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), parts.double().sum((0, 2)), rtol=0, atol=1e-4)
    assert torch.equal(got, head_sums(parts))
