"""Masks that read a grid, a tensor with an element for each run of queries by run of keys: its values decide blocks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden_jax
from codegen.testing.golden import Inputs
from tests.support.cases import DEVICE, tiles
from tests.support.rendering import importable

SPEC = """
variants:
  chosen:
    mask: causal and chosen[b, h, q_idx // size, kv_idx // size]
    scalars: {size: {type: int, min: 1}}
    tensors: {chosen: {dims: [b, h, q_runs, kv_runs], dtype: bool}}
  gate:
    mask: gate[hkv, kv_idx // 16, q_idx // 32] > limit
    scalars: {limit: {type: float}}
    tensors: {gate: {dims: [hkv, kv_runs, q_runs]}}
  ranked:
    mask: rank[(q_idx + 7) >> 4, kv_idx >> 5] < 2 or q_idx - kv_idx < 20 and q_idx >= kv_idx
    tensors: {rank: {dims: [q_runs, kv_runs], dtype: int64}}
  shared:
    mask: kept[h % 3, turn[b], q_idx // 20, kv_idx // 16]
    tensors: {turn: {dims: [b], dtype: int32}, kept: {dims: [parts, turns, q_runs, kv_runs], dtype: bool}}
  picked:
    mask: causal and kv_idx // 32 in best[b, q_idx // 64]
    tensors: {best: {dims: [b, q_runs, 2], dtype: int32}}
"""
BATCH, HEADS, KV_HEADS, DIM, RUNS = 2, 2, 2, 16, 7


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package."""
    with importable(tmp_path_factory.mktemp("grids") / "tests", "grid_variants", SPEC) as package:
        yield package.name


def _own(name: str) -> dict[str, Any]:
    torch.manual_seed(3)
    if name == "chosen":
        return {"chosen": torch.rand(BATCH, HEADS, RUNS, RUNS, device=DEVICE) < 0.3, "size": 24}
    if name == "gate":
        gate = torch.rand(KV_HEADS, RUNS, RUNS, device=DEVICE)
        gate[0, 1, 1] = float("nan")  # no comparison with it holds
        return {"gate": gate, "limit": 0.6}
    if name == "shared":
        kept = torch.rand(2, 3, RUNS, RUNS, device=DEVICE) < 0.3
        return {"kept": kept, "turn": torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)}
    if name == "picked":
        return {"best": torch.randint(0, 4, (BATCH, RUNS, 2), dtype=torch.int32, device=DEVICE)}
    return {"rank": torch.randint(0, 6, (RUNS, RUNS), device=DEVICE)}


def _inputs(q_len: int, kv_len: int) -> list[Tensor]:
    shapes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    return [torch.randn(BATCH, *shape, DIM, device=DEVICE, requires_grad=True) for shape in shapes]


def _results(op: Any, inputs: list[Tensor], **own: Any) -> list[Tensor]:
    o, lse = op(*inputs, **own, return_lse=True)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=DEVICE).to(x.dtype) for x in (o, lse)]
    return [o, lse, *torch.autograd.grad([o, lse], inputs, weights)]


# Blocks that are shorter than a run, as long, and longer; offsets at which blocks lie across runs, or beyond the grid.
@pytest.mark.parametrize(
    ("name", "block_m", "block_n", "q_offset"),
    [
        ("chosen", 16, 64, 0),
        ("chosen", 64, 64, 170),
        ("gate", 32, 32, 20),
        ("gate", 64, 16, 0),
        ("ranked", 64, 16, -15),
        ("ranked", 32, 32, 0),
        ("shared", 32, 64, 30),
        ("picked", 32, 32, 0),
    ],
)
def test_against_the_reference(package: str, name: str, block_m: int, block_n: int, q_offset: int) -> None:
    own = _own(name)
    inputs = _inputs(100, 140)
    op = getattr(importlib.import_module(f"{package}.torch"), name)
    reference = importlib.import_module(f"{package}.{name}.torch_reference").reference
    got = _results(op, inputs, **own, q_offset=q_offset, config=tiles(block_m, block_n))
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    want = _results(reference, doubled, **own, q_offset=q_offset)
    for mine, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["chosen", "ranked"])
def test_packed_and_with_segment_ids(package: str, name: str) -> None:
    """Positions start anew in each sequence; those of segments may be given."""
    own, ends = _own(name), torch.tensor([0, 40, 41, 120], dtype=torch.int32, device=DEVICE)
    whole = importlib.import_module(f"{package}.torch")
    op = getattr(whole, name)
    if name == "chosen":
        own["chosen"] = own["chosen"][:1].expand(3, -1, -1, -1).contiguous()
    q, k, v = (torch.randn(120, heads, DIM, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    got = op(q, k, v, **own, cu_seqlens_q=ends, config=tiles(32, 32))
    ids = torch.bucketize(torch.arange(120, device=DEVICE), ends[1:].long(), right=True)[None].int()
    positions = (torch.arange(120, device=DEVICE) - ends[:-1].long()[ids[0].long()])[None].int()
    one = own | ({"chosen": own["chosen"][:1]} if name == "chosen" else {})
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    segmented = op(*rows, **one, q_segment_ids=ids, q_positions=positions, config=tiles(32, 32))
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        want = op(*(x[:, :, begin:end] for x in rows), **one, config=tiles(16, 16))[0].transpose(0, 1)
        torch.testing.assert_close(got[begin:end], want, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(segmented[0, :, begin:end].transpose(0, 1), want, rtol=2e-5, atol=2e-5)


def test_the_length_of_runs_decides_the_tiles(package: str) -> None:
    """Not the example's, 24, but the call's; of several lengths, what divides them all."""
    whole = importlib.import_module(f"{package}.torch")
    q, k, v = _inputs(100, 140)

    def sides(name: str, **own: Any) -> set[int]:
        schedule = getattr(whole, name).schedule(q, k, v, **_own(name) | own)
        return {side for blocks in schedule.tiles.values() for side in blocks}

    assert max(sides("chosen", size=32)) == 32
    usual = sides("chosen", size=24)
    assert usual == sides("chosen", size=torch.tensor(24))
    assert max(usual) > 32 == max(sides("chosen", size=160))
    assert sides("gate") == usual  # runs of 16 and 32
    assert max(sides("picked")) == 32


def test_in_jax(package: str) -> None:
    own = _own("chosen")
    q, k, v = _inputs(100, 140)
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        do=torch.randn_like(q),
        dlse=torch.randn(BATCH, HEADS, 100, device=DEVICE),
        tensors={"chosen": own["chosen"]},
        scalars={"size": own["size"]},
    )
    got = golden_jax.evaluate("chosen", inputs, package=package, config=tiles(32, 32))
    op = importlib.import_module(f"{package}.torch").chosen
    want = _results(op, [q, k, v], **own, config=tiles(32, 32))
    torch.testing.assert_close(got["o"], want[0], rtol=1e-4, atol=1e-4)


def test_blocks_that_the_grid_leaves_out_are_not_listed(package: str) -> None:
    whole = importlib.import_module(f"{package}.torch")
    chosen = torch.zeros(1, HEADS, RUNS, RUNS, dtype=torch.bool, device=DEVICE)
    chosen[0, :, 5, 1] = chosen[0, 1, 3, 0] = True
    q, k, v = (x[:1] for x in _inputs(7 * 64, 7 * 64))
    schedule = whole.chosen.schedule(q, k, v, chosen=chosen, size=64, config=tiles(64, 64), backward=False)
    spans, _ = schedule.tables
    begin, partial_end, full_begin, end = spans.reshape(HEADS, RUNS, 4).unbind(2)
    partial, full = partial_end - begin, end - full_begin
    want = torch.zeros(HEADS, RUNS, dtype=torch.int32, device=DEVICE)
    want[:, 5], want[1, 3] = 1, 1
    assert not partial.any()
    assert torch.equal(full.int(), want)
