"""Rows that are packed, unpacked and added up by a table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from generated._runtime.torch.parallel import row_sums
from tests.support.cases import DEVICE

SIZES = [(1, 2, 16, 16), (2, 3, 40, 24), (1, 8, 128, 128)]


def drawn(batch: int, heads: int, dim: int, *, heads_first: bool) -> Tensor:
    """Rows `[37, batch, heads, dim]`; with `heads_first` they are a view of memory in that order."""
    if heads_first:
        return torch.randn(batch, heads, 37, dim, device=DEVICE).half().permute(2, 0, 1, 3)
    return torch.randn(37, batch, heads, dim, device=DEVICE).half()


def table_of(rows: int, *limits: int) -> Tensor:
    """Random row numbers below each limit, a fifth of them -1."""
    columns = [torch.randint(-(limit // 4), limit, (rows,)).clamp(min=-1) for limit in limits]
    return torch.stack(columns, 1).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packed_rows_are_those_of_the_table(size: tuple[int, ...], heads_first: bool) -> None:
    batch, heads, *dims = size
    k, v = (drawn(batch, heads, dim, heads_first=heads_first) for dim in dims)
    table = table_of(11, 37).clamp(min=0)
    rows = table[:, 0].long()
    assert torch.equal(row_sums.packed_keys(k, v, table), torch.cat([k[rows].flatten(1), v[rows].flatten(1)], 1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("terms", [0, 1, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_add_rows_in_order(size: tuple[int, ...], terms: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, heads, *dims = size
    k, v = (drawn(batch, heads, dim, heads_first=True) for dim in dims)
    came = torch.randn(19, batch * heads * sum(dims), device=DEVICE).half() if terms else None
    table = table_of(30, 37, *[19] * terms)
    got = row_sums.summed_gradients(k, v, came, table, dtype)
    monkeypatch.setattr(row_sums, "_runs_kernel", lambda _: False)
    want = row_sums.summed_gradients(k, v, came, table, dtype)
    for x, wanted in zip(got, want, strict=True):
        assert x.dtype == getattr(torch, dtype)
        assert torch.equal(x, wanted)


def test_rows_without_a_term_are_zero() -> None:
    k = torch.tensor([2.0, 1.0], device=DEVICE).half().view(2, 1, 1, 1)
    came = torch.tensor([[7.0, 3.0]], device=DEVICE).half()
    table = torch.tensor([[-1, -1], [0, -1], [-1, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    of_k, of_v = row_sums.unpacked_keys(k, k, came, table, "float16")
    assert of_k.flatten().tolist() == [0.0, 2.0, 7.0, 8.0]
    assert of_v.flatten().tolist() == [0.0, 2.0, 3.0, 4.0]
