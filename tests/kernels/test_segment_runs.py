"""The table of the runs of segments, beside a plain search."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from generated._runtime.core.segment_runs import SPARE
from generated._runtime.torch.backend import segment_runs
from tests.support.cases import DEVICE

pytestmark = pytest.mark.covers(mode="segmented", family="hopper", direction="forward", framework="torch")


def searched(ids: Tensor, others: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and end of the run of each token, and whether it is whole."""
    same = (ids[:, :, None] == others[:, None, :]) & (others != padding)[:, None, :] & (ids != padding)[:, :, None]
    places = torch.arange(others.shape[1])
    first = torch.where(same, places, others.shape[1]).amin(2)
    end = torch.where(same, places + 1, 0).amax(2)
    count = same.sum(2)
    first = torch.where(count > 0, first, 0)
    return first, end, count == end - first


@pytest.mark.parametrize("lengths", [(150, 150), (64, 1100), (130, 1)])
def test_runs_are_those_that_a_search_finds(lengths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    own_length, other_length = lengths
    in_order = torch.arange(max(lengths)) // 37
    mixed = torch.randint(0, 3, (max(lengths),), generator=generator)
    mixed[5:20] = -1
    ids = torch.stack([in_order, mixed, -in_order]).int()
    own, others = ids[:, :own_length], ids[:, :other_length]
    found = segment_runs(own.to(DEVICE), others.to(DEVICE), 3, -1).cpu()
    blocks = -(-own_length // 64)
    assert found.shape == (3, blocks + SPARE, 3, 64)
    first, end, whole = searched(own, others, -1)
    # Tokens behind the last attend to nothing.
    room = found.shape[1] * 64 - own_length
    first, end = (torch.nn.functional.pad(x, (0, room)) for x in (first, end))
    whole = torch.nn.functional.pad(whole, (0, room), value=True)
    assert torch.equal(found[:, :, 0].flatten(1), first.int())
    assert torch.equal(found[:, :, 1].flatten(1), end.int())
    assert torch.equal(found[:, :, 2, 0].bool(), whole.view(3, -1, 64).all(2))


def test_one_row_of_ids_serves_all_batch_rows() -> None:
    ids = torch.tensor([[4, 4, 1]], dtype=torch.int32, device=DEVICE)
    found = segment_runs(ids, ids.expand(2, -1), 2, -1).cpu()
    assert found[:, 0, :, :3].tolist() == [[[0, 0, 2], [2, 2, 3], [1, 1, 1]]] * 2
