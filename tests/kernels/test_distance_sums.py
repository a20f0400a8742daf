"""The gradient of a table by head and distance, computed from sums by distance."""

from __future__ import annotations

import pytest
import torch

from generated._runtime.core.distances import lag_axis
from generated._runtime.torch.distance_sums import distance_sums
from tests.support.cases import DEVICE


@pytest.mark.covers(mode="dense", direction="backward", framework="torch")
@pytest.mark.parametrize("has_limits", [False, True])
@pytest.mark.parametrize("offsets", [None, (3, -40)], ids=str)
@pytest.mark.parametrize(("size", "sign", "rest"), [(1, 1, 0), (31, 1, -3), (600, -1, 5)])
def test_sums_go_where_they_are_read(
    size: int, sign: int, rest: int, offsets: tuple[int, ...] | None, has_limits: bool
) -> None:
    batch, heads, rows, keys = 2, 3, 20, 17
    # The distances of the first and the last element, in ascending order.
    ends = sorted(sign * (element - rest) for element in (0, size - 1))
    first, last = ends if has_limits else (None, None)
    q, k = (torch.empty(batch, heads, length, 1, device=DEVICE) for length in (rows, keys))
    given = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    axis = lag_axis(rows, keys, 7 if given is None else None, first, last)
    pieces = torch.randn(batch, heads, 4, axis.size, device=DEVICE)
    far = torch.randn(batch, heads, 2, 5, device=DEVICE)

    got = distance_sums(pieces, far, q, k, 7, given, first, last, size, sign, rest)
    assert torch.equal(got, distance_sums(pieces, far, q, k, 7, given, first, last, size, sign, rest))

    want = torch.zeros(heads, size, dtype=torch.float64, device=DEVICE)
    for row, offset in enumerate(offsets or (7, 7)):
        distances = torch.arange(axis.size, device=DEVICE) - axis.origin + offset
        want.index_add_(1, (sign * distances + rest).clamp(0, size - 1), pieces[row].double().sum(1))
    before, behind = far.double().sum((0, 3)).unbind(1)
    want[:, 0] += before if sign > 0 else behind
    want[:, -1] += behind if sign > 0 else before
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [0, 3])
def test_no_pairs_leave_zeros(size: int) -> None:
    q, k = torch.empty(0, 2, 5, 1, device=DEVICE), torch.empty(0, 2, 6, 1, device=DEVICE)
    sums = torch.empty(0, 2, 2, 30, device=DEVICE)
    got = distance_sums(sums, sums, q, k, 0, None, None, 2, size, 1, 0)
    assert torch.equal(got, torch.zeros(2, size, device=DEVICE))
