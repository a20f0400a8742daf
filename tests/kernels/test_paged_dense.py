"""Dense calls with few queries automatically run the kernels of paged calls, and give the dense kernels' results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from generated._runtime.torch import few_queries
from generated._runtime.torch.paged_kernels import PagedKernels
from tests.support.cases import DEVICE, INTERPRET, MANIFEST, Shape, draw, tiles
from tests.support.replaying import never_replaying

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
LEGAL = [name for name, entry in MANIFEST.items() if not entry["dropout"] and not entry["decay"]]
BY_QUERY = [name for name in LEGAL if any("q_idx" in x["dims"] for x in MANIFEST[name]["tensors"].values())]
"""Variants with a tensor per query: split calls would read it by row, dense calls by position, so these never split."""
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
TOLERANCE = 1e-5 if INTERPRET else 2e-2
SHAPE = Shape(batch=2, kv_heads=2, group=2, q_len=2, kv_len=270, dim=32, dim_v=16)
LENGTHS = (270, 101)


@pytest.fixture(autouse=True)
def fewer_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are split from a smaller number on, for which the interpreter is fast enough."""
    monkeypatch.setattr(few_queries, "LEAST_DENSE_KEYS", 256)


@dataclass
class Splits:
    """How many calls split their keys."""

    count: int = 0


@contextmanager
def counting() -> Iterator[Splits]:
    splits, forward = Splits(), PagedKernels.forward

    def counted(kernels: PagedKernels, *args: Any) -> tuple[Tensor, Tensor]:
        splits.count += 1
        return forward(kernels, *args)

    # A replayed call launches its kernels without `forward`.
    with mock.patch.object(PagedKernels, "forward", counted), never_replaying():
        yield splits


def drawn(variant: str, shape: Shape = SHAPE) -> Inputs:
    """A call without gradients."""
    inputs = draw(variant, shape, DTYPE, positions=shape.keys + 20)
    return replace(
        inputs,
        q=inputs.q.detach(),
        k=inputs.k.detach(),
        v=inputs.v.detach(),
        tensors={name: x.detach() for name, x in inputs.tensors.items()},
    )


def check(inputs: Inputs, variant: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Check that a call splits its keys, and that its results are those of the dense kernels."""
    op: Any = golden.load_op(variant)
    with counting() as splits:
        found: tuple[Tensor, Tensor] = inputs.call(op, return_lse=True, **options)
        assert splits.count == 1
        want = inputs.call(op, return_lse=True, family="portable", **options)
        assert splits.count == 1
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride())
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
@pytest.mark.parametrize("variant", [name for name in LEGAL if name not in BY_QUERY])
def test_few_queries_split_their_keys(variant: str, lengths: tuple[int, ...] | None) -> None:
    options: dict[str, Any] = {"q_offset": "end"}
    if lengths is not None:
        options["kv_lengths"] = torch.tensor(lengths, device=DEVICE)
    check(drawn(variant), variant, **options)


@pytest.mark.parametrize("offset", [0, 130, 280, (269, 17)])
def test_positions_of_queries(offset: int | tuple[int, int]) -> None:
    """Positions count from 0 by default. `doc` is read at the query's position, whatever the lengths of keys are."""
    q_offset = torch.tensor(offset, device=DEVICE) if isinstance(offset, tuple) else offset
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    for variant in ("document", "window"):
        check(drawn(variant), variant, q_offset=q_offset, kv_lengths=lengths)
    check(drawn("document"), "document", q_offset=q_offset)


def test_lengths_are_limited_by_what_there_is() -> None:
    lengths = torch.tensor((0, 10**6), device=DEVICE)
    o, lse = check(drawn("full"), "full", kv_lengths=lengths)
    assert (o[0] == 0).all()
    assert (lse[0] == -float("inf")).all()


def test_strides_and_layouts() -> None:
    inputs = drawn("causal")

    def wide(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The same values with the axes in another order in memory, and with gaps between rows."""
        order = [axes.index(axis) for axis in range(4)]
        room = torch.full((*[x.shape[axis] for axis in axes[:3]], 2 * x.shape[3]), float("nan"), dtype=DTYPE)
        room = room.to(DEVICE)[..., : x.shape[3]]
        return room.copy_(x.permute(axes)).permute(order)

    want = check(inputs, "causal", q_offset="end")
    for axes in ((0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)):
        moved = replace(inputs, q=wide(inputs.q, axes), k=wide(inputs.k, axes), v=wide(inputs.v, axes))
        got = check(moved, "causal", q_offset="end")
        assert torch.equal(got[0], want[0])
    columns = replace(inputs, q=inputs.q.mT.contiguous().mT, k=inputs.k.mT.contiguous().mT)
    assert torch.equal(check(columns, "causal", q_offset="end")[0], want[0])
    swapped = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    op: Any = golden.load_op("causal")
    assert torch.equal(op(*swapped, layout="bshd", q_offset="end"), want[0].transpose(1, 2))


def test_same_bits_as_pages() -> None:
    """A dense batch row gives the same bits as a call with its keys in pages, alone or in a batch."""
    inputs, op = drawn("causal"), golden.load_op("causal")
    want = check(inputs, "causal", q_offset="end")[0]
    for b in range(2):
        alone = replace(inputs, q=inputs.q[b : b + 1], k=inputs.k[b : b + 1], v=inputs.v[b : b + 1])
        assert torch.equal(alone.call(op, q_offset="end")[0], want[b])
    size = 10
    caches = [x.transpose(1, 2).reshape(-1, size, *x.shape[1::2]) for x in (inputs.k, inputs.v)]
    table = torch.arange(caches[0].shape[0], device=DEVICE).view(2, -1)
    lengths = torch.full((2,), SHAPE.keys, device=DEVICE)
    assert torch.equal(op(inputs.q, *caches, page_table=table, kv_lengths=lengths), want)


@pytest.mark.parametrize("splits", [1, 64, "balanced"])
def test_rules_for_splits(splits: int | str) -> None:
    check_asked = drawn("alibi")
    op: Any = golden.load_op("alibi")
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    # The third call of a kind is replayed, so calls are not counted here.
    want = check_asked.call(op, q_offset="end", kv_lengths=lengths, return_lse=True)
    got = check_asked.call(op, q_offset="end", kv_lengths=lengths, splits=splits, return_lse=True)
    for x, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(x, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
def test_a_plan_serves_every_layer(lengths: tuple[int, ...] | None) -> None:
    inputs = drawn("window")
    op: Any = golden.load_op("window")
    options: dict[str, Any] = {"q_offset": "end"}
    if lengths is not None:
        options["kv_lengths"] = torch.tensor(lengths, device=DEVICE)
    plan = op.plan(inputs.q, inputs.k, **inputs.scalars, **options)
    assert torch.equal(inputs.call(op, schedule=plan, **options), inputs.call(op, **options))
    with pytest.raises(ArgumentError, match="schedule: expected one made for most keys 269"):
        replace(inputs, k=inputs.k[:, :, 1:], v=inputs.v[:, :, 1:]).call(op, schedule=plan, **options)


def test_more_queries_split_where_a_call_asks() -> None:
    inputs, op = drawn("causal", replace(SHAPE, batch=1, kv_heads=1, q_len=40, kv_len=150)), golden.load_op("causal")
    want = inputs.call(op, q_offset="end")
    with counting() as splits:
        got = inputs.call(op, q_offset="end", splits=32)
        assert splits.count == 1
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_other_calls_stay_dense() -> None:
    inputs = drawn("causal")
    op: Any = golden.load_op("causal")
    ids = torch.zeros((2, SHAPE.keys), dtype=torch.int32, device=DEVICE)
    segments = {"q_segment_ids": ids[:, :2], "kv_segment_ids": ids}
    with counting() as splits:
        inputs.call(op, **segments)
        inputs.call(op, config=tiles(16, 32))
        inputs.call(op, schedule=op.schedule(inputs.q, inputs.k, inputs.v))
        drawn("causal", replace(SHAPE, kv_len=255)).call(op)
        drawn("causal", replace(SHAPE, q_len=33)).call(op)
        replace(inputs, q=inputs.q.clone().requires_grad_()).call(op).sum().backward()
        torch.func.vmap(lambda q: op(q, inputs.k, inputs.v))(inputs.q[None])
        assert splits.count == 0


def test_what_splits_cannot_be_beside() -> None:
    inputs, op = drawn("causal"), golden.load_op("causal")
    ids = torch.zeros((2, SHAPE.keys), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ArgumentError, match="splits: expected None beside q_segment_ids, got 64"):
        inputs.call(op, splits=64, q_segment_ids=ids[:, :2], kv_segment_ids=ids)
    with pytest.raises(ArgumentError, match="splits: expected None where an input requires grad"):
        replace(inputs, q=inputs.q.clone().requires_grad_()).call(op, splits=64)
    with pytest.raises(ArgumentError, match="splits: expected None, 'balanced', 1"):
        inputs.call(op, splits="even")
    with pytest.raises(ArgumentError, match="kv_lengths: expected an integer tensor"):
        inputs.call(op, kv_lengths=torch.zeros(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ArgumentError, match="q_offset: expected an int"):
        inputs.call(op, q_offset="begin")
    with pytest.raises(ArgumentError, match="max_seqlen_q: expected None in a dense call"):
        inputs.call(op, max_seqlen_q=2)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ArgumentError, match="splits: expected None without page_table"):
        op(inputs.q[0].transpose(0, 1), inputs.k[0].mT, inputs.v[0].mT, cu_seqlens_q=cu, splits=64)
