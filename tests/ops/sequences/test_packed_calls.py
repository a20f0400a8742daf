"""A packed call gives the results of one dense call per sequence, by the references on the CPU; schedules of calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from codegen.testing.golden import load_op
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from tests.support.packed_calls import (
    DIM_V,
    HEADS,
    MANIFEST,
    Call,
    Packed,
    assert_same,
    begins,
    ints,
    own_variant,
    with_variants,
)

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(mode="packed", family="reference", framework="torch"),
]

OWN = ("per_pair", "per_row", "mapped", "everything")
Q_LENS, KV_LENS = (5, 0, 7, 3, 0, 9), (6, 4, 4, 0, 0, 12)
OFFSETS: dict[str, tuple[Any, Sequence[int]]] = {
    "zero": (0, (0,) * 6),
    "number": (3, (3,) * 6),
    "end": ("end", tuple(k - q for q, k in zip(Q_LENS, KV_LENS, strict=True))),
    "each": (ints(4, 1, -2, 0, 7, -9), (4, 1, -2, 0, 7, -9)),
}
with_offsets = pytest.mark.parametrize("offset", OFFSETS)


def check_packed_call(op: Callable[..., Any], entry: Mapping[str, Any], offset: str) -> None:
    packed = Packed.draw(entry, Q_LENS, KV_LENS)
    q_offset, offsets = OFFSETS[offset]
    assert_same(packed.call(op, q_offset=q_offset), packed.one_by_one(op, offsets))


@with_offsets
@with_variants
def test_a_packed_call_is_dense_calls(variant: str, offset: str) -> None:
    check_packed_call(load_op(variant), MANIFEST[variant], offset)


@with_offsets
@pytest.mark.parametrize("variant", OWN)
def test_tensors_of_every_kind_in_a_packed_call(package: str, variant: str, offset: str) -> None:
    check_packed_call(*own_variant(package, variant), offset)


@with_variants
def test_one_set_of_lengths_serves_queries_and_keys(variant: str) -> None:
    packed = Packed.draw(MANIFEST[variant], (4, 0, 8), (4, 0, 8))
    want = packed.one_by_one(load_op(variant), (0, 0, 0))
    assert_same(packed.call(load_op(variant), cu_seqlens_k=None, q_offset="end"), want)


@with_variants
@pytest.mark.parametrize("lengths", [((), ()), ((0,), (0,)), ((3,), (0,)), ((0, 0), (2, 1))])
def test_packed_calls_of_nothing(variant: str, lengths: tuple[Sequence[int], Sequence[int]]) -> None:
    packed = Packed.draw(MANIFEST[variant], *lengths)
    call = {**packed.tensors, **packed.numbers, "return_lse": True}
    cu_seqlens = {"cu_seqlens_q": begins(lengths[0]), "cu_seqlens_k": begins(lengths[1])}
    o, lse = load_op(variant)(packed.q, packed.k, packed.v, **call, **cu_seqlens)
    rows = sum(lengths[0])
    assert o.shape == (rows, HEADS, DIM_V)
    assert lse.shape == (HEADS, rows)
    assert not o.any()
    sink = packed.tensors["sink"][:, None] if MANIFEST[variant]["sink"] else torch.tensor(float("-inf"))
    assert torch.equal(lse, sink.expand(HEADS, rows))
    for name, grad in packed.call(load_op(variant)).items():
        assert name in ("lse", "dsink") or not grad.any(), name


def test_a_packed_call_reads_any_strides_and_keeps_the_dtype() -> None:
    packed = Packed.draw(MANIFEST["causal"], Q_LENS, KV_LENS)
    want = packed.call(load_op("causal"))
    q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (packed.q, packed.k, packed.v))
    call = {"cu_seqlens_q": begins(Q_LENS).repeat_interleave(2)[::2], "cu_seqlens_k": begins(KV_LENS)}
    assert torch.equal(load_op("causal")(q, k, v, **call), want["o"])
    o, lse = load_op("causal")(q.half(), k.half(), v.half(), **call, return_lse=True, layout="bshd")
    assert (o.dtype, lse.dtype) == (torch.float16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert load_op("causal")(q, k, v, **call).dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_autocast_takes_inputs_of_several_dtypes(packed: bool) -> None:
    """As rotary embeddings in float32 give them: q and k in float32, v in autocast's dtype."""
    q, k, v = torch.randn(3, 9, 2, 16) if packed else torch.randn(3, 1, 2, 9, 16)
    call = {"cu_seqlens_q": begins((4, 5))} if packed else {}
    op: Any = load_op("causal")
    leaf = k.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = op(q, k, v, **call)
        schedule = op.schedule(q, leaf, v.bfloat16(), **call)
        o = op(q, leaf, v.bfloat16(), **call, schedule=schedule)
    assert torch.equal(o, want)
    o.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    with pytest.raises(ArgumentError, match=r"v: expected dtype torch\.float32, that of q, got torch.bfloat16"):
        op(q, k, v.bfloat16(), **call)


def schedule_arguments(variant: str, packed: Packed) -> Call:
    own = packed.tensors | packed.numbers
    taken = inspect.signature(load_op(variant).schedule).parameters  # type: ignore[attr-defined]
    return {name: value for name, value in own.items() if name in taken}


@with_variants
def test_every_op_has_schedules_of_every_kind_of_call(variant: str) -> None:
    op: Any = load_op(variant)
    packed = Packed.draw(MANIFEST[variant], (4, 8), (4, 8))
    masks = schedule_arguments(variant, packed)
    made = op.schedule(packed.q, packed.k, packed.v, **masks, cu_seqlens_q=begins((4, 8)))
    want = packed.call(op)
    assert_same(packed.call(op, schedule=made), want)
    with pytest.raises(ArgumentError, match="schedule: expected one made for q_offset 2, got one made for q_offset 0"):
        packed.call(op, schedule=made, q_offset=2)
    batch = [x[None].transpose(1, 2) for x in (packed.q, packed.k, packed.v)]
    own = {n: x[None] if "kv_idx" in packed.dims[n] else x for n, x in packed.tensors.items()}
    own = {n: x[:1] if list(packed.dims[n]) == ["b"] else x for n, x in own.items()}
    own = {n: x[None] if list(packed.dims[n]) == ["b", "h", "q_idx"] else x for n, x in own.items()}
    masks = {n: own.get(n, x) for n, x in masks.items()}
    with pytest.raises(
        ArgumentError, match=r"schedule: expected one made for calls of dense rows, got .* of packed sequences"
    ):
        op(*batch, **own, **packed.numbers, schedule=made)
    ids = {"q_segment_ids": torch.zeros(1, 12, dtype=torch.int32)}
    made = op.schedule(*batch, **masks, **ids)
    assert torch.equal(
        op(*batch, **own, **packed.numbers, **ids, schedule=made), op(*batch, **own, **packed.numbers, **ids)
    )
    for other, kind in (({}, "dense rows"), ({"q_positions": torch.arange(12).int()[None]}, "rows with positions")):
        with pytest.raises(ArgumentError, match=f"calls of {kind}, got one made for calls of rows with segment ids"):
            op(*batch, **own, **packed.numbers, **other, schedule=made)
    with pytest.raises(ArgumentError, match="schedule: expected one made for calls of packed sequences"):
        packed.call(op, schedule=made)
