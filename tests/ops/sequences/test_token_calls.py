"""Segment ids, positions and lengths on the CPU, against attention by a mask that is written out here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing.golden import load_op
from generated._runtime.core.settings import INTERPRET
from tests.support.packed_calls import (
    DIM,
    HEADS,
    KV_HEADS,
    MANIFEST,
    Call,
    Packed,
    assert_same,
    ints,
    leaf,
    message,
    own_variant,
    results,
)

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(mode="packed", family="reference", framework="torch"),
]

B, Q_LEN, KV_LEN = 3, 7, 9


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Positions of queries `[B, 1, Sq, 1]` and keys `[B, 1, 1, Skv]`, and the pairs that the call allows."""

    q_idx: Tensor
    kv_idx: Tensor
    may: Tensor


def attend(leaves: Mapping[str, Tensor], keep: Tensor, bias: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention of the pairs that are kept."""
    q = leaves["q"]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (leaves["k"], leaves["v"]))
    scores = (q @ k.mT * DIM**-0.5 + bias).masked_fill(~keep, -1e30)
    probs = scores.softmax(-1) * keep
    lse = torch.where(keep.any(-1), scores.logsumexp(-1), float("-inf"))
    return probs @ v, lse


SLOPE = torch.tensor([0.5, 0.25, 0.125, 1.0])
HAND_MASKS: dict[str, tuple[Call, Callable[[Pairs], Tensor], Callable[[Pairs], Tensor | float]]] = {
    "full": ({}, lambda p: p.may, lambda p: 0.0),
    "causal": ({}, lambda p: p.may & (p.q_idx >= p.kv_idx), lambda p: 0.0),
    "window": (
        {"size": 3},
        lambda p: p.may & (p.q_idx >= p.kv_idx) & (p.q_idx - p.kv_idx < 3),
        lambda p: 0.0,
    ),
    "alibi": (
        {"slope": SLOPE},
        lambda p: p.may & (p.q_idx >= p.kv_idx),
        lambda p: SLOPE.view(-1, 1, 1) * (p.kv_idx - p.q_idx),
    ),
}


def rows(of_each: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(of_each, dtype=torch.int32)


Q_IDS = rows([[0, 1, 0, 0, -1, 2, 2], [5, 5, 5, -1, -1, -1, -1], [-7, 3, 3, 1000, 3, -7, -1]])
KV_IDS = rows([[0, 1, 0, 0, -1, 2, 2, 0, 1], [5, 5, -1, 5, 5, 5, 5, -1, -1], [3, 3, -1, -7, 8, 8, 3, -1, 1000]])
Q_POS = rows([[0, 0, 1, 2, 9, 0, 1], [6, 5, 4, 3, 2, 1, 0], [0, 3, 100, -4, 7, 1, 1]])
KV_POS = rows([[0, 0, 1, 2, 4, 0, 1, 3, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8], [99, 0, -5, -4, 7, 98, 2, 2, 0]])
LENGTHS = ints(9, 0, 4)
TOKEN_CALLS: dict[str, Call] = {
    "ids": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS},
    "ids_serve_both": {"q_segment_ids": Q_IDS},
    "padding_id": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS, "padding_id": 3},
    "positions": {"q_positions": Q_POS, "kv_positions": KV_POS},
    "positions_serve_both": {"q_positions": Q_POS},
    "positions_of_queries": {"q_positions": Q_POS, "kv_positions": torch.arange(KV_LEN).int().expand(B, KV_LEN)},
    "lengths": {"kv_lengths": LENGTHS},
    "lengths_with_padding_0": {"kv_lengths": LENGTHS, "padding_id": 0},
    "lengths_and_offsets": {"kv_lengths": LENGTHS, "q_offset": ints(2, 0, -3)},
    "decode": {"kv_lengths": LENGTHS, "q_offset": "end"},
    "ids_and_offset": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS, "q_offset": 2},
    "end": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS, "q_offset": "end"},
    "all": {
        "q_segment_ids": Q_IDS.mT.contiguous().mT,
        "kv_segment_ids": KV_IDS,
        "q_positions": Q_POS,
        "kv_positions": KV_POS,
        "kv_lengths": LENGTHS,
    },
}


def pairs(call: Call, kv_len: int) -> Pairs:
    """The pairs of a call, by the definition of its arguments."""
    same = torch.full((B, max(Q_LEN, kv_len)), 17)
    q_ids: Tensor = call.get("q_segment_ids", same[:, :Q_LEN])
    kv_ids: Tensor = call["kv_segment_ids"] if "kv_segment_ids" in call else call.get("q_segment_ids", same[:, :kv_len])
    lengths: Tensor = call.get("kv_lengths", ints(*[kv_len] * B))
    padding: int = call.get("padding_id", -1)
    offset = call.get("q_offset", 0)
    offset = lengths - Q_LEN if isinstance(offset, str) else torch.as_tensor(offset)
    q_idx: Tensor = call.get("q_positions", (torch.arange(Q_LEN) + offset.view(-1, 1)).expand(B, Q_LEN))
    rows_of_k = torch.arange(kv_len).expand(B, kv_len)
    kv_idx: Tensor = call["kv_positions"] if "kv_positions" in call else call.get("q_positions", rows_of_k)
    may = (q_ids[:, :, None] == kv_ids[:, None]) & (q_ids != padding)[:, :, None]
    may &= (torch.arange(kv_len) < lengths[:, None])[:, None]
    return Pairs(q_idx=q_idx[:, None, :, None], kv_idx=kv_idx[:, None, None], may=may[:, None])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("call", TOKEN_CALLS)
@pytest.mark.parametrize("variant", HAND_MASKS)
def test_ids_positions_and_lengths_are_masks(variant: str, call: str, layout: str) -> None:
    own, mask, bias = HAND_MASKS[variant]
    options = TOKEN_CALLS[call]
    kv_len = Q_LEN if call.endswith("serve_both") else KV_LEN
    torch.manual_seed(0)
    leaves = {"q": leaf(B, HEADS, Q_LEN, DIM), "k": leaf(B, KV_HEADS, kv_len, DIM), "v": leaf(B, KV_HEADS, kv_len, DIM)}
    given = leaves.values() if layout == "bhsd" else [x.transpose(1, 2) for x in leaves.values()]
    o, lse = load_op(variant)(*given, **own, **options, layout=layout, return_lse=True)
    o = o if layout == "bhsd" else o.transpose(1, 2)
    these = pairs(options, kv_len)
    assert_same(results(o, lse, leaves), results(*attend(leaves, mask(these), bias(these)), leaves))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("q_len", [2, 40])
def test_lengths_count_no_keys_that_are_not_there(q_len: int, framework: str) -> None:
    """A batch row whose length is larger ends with its last key: "end" aligns the last query with that one."""
    pytest.importorskip(framework, reason="the ops are of this framework")
    ops = importlib.import_module(f"generated.{framework}")
    arrays = [torch.randn(B, heads, n, DIM).numpy() for heads, n in ((HEADS, q_len), (KV_HEADS, 9), (KV_HEADS, 9))]
    given = [torch.from_numpy(x) if framework == "torch" else x for x in arrays]

    def call(*lengths: int) -> Any:
        counts = ints(*lengths) if framework == "torch" else ints(*lengths).numpy()
        return np.asarray(ops.causal(*given, kv_lengths=counts, q_offset="end", layout="bhsd"))

    assert np.array_equal(call(12, -1, 4), call(9, 0, 4))


def test_a_padding_query_of_a_sink_has_the_sink_alone() -> None:
    q, k, v, sink = leaf(B, HEADS, Q_LEN, DIM), leaf(B, 2, Q_LEN, DIM), leaf(B, 2, Q_LEN, DIM), leaf(HEADS)
    o, lse = load_op("gpt_oss")(q, k, v, sink=sink, q_segment_ids=Q_IDS, return_lse=True)
    padding = (Q_IDS == -1)[:, None].expand(B, HEADS, Q_LEN)
    assert not o[padding].any()
    assert torch.equal(lse[padding], sink[:, None].expand(B, HEADS, Q_LEN)[padding])
    o.sum().backward()
    assert q.grad is not None
    assert not q.grad[padding].any()
    assert q.grad[~padding].any()


def test_a_tensor_of_tokens_is_read_where_they_lie_in_any_order() -> None:
    torch.manual_seed(0)
    doc = torch.randint(0, 2, (B, Q_LEN), dtype=torch.int32)
    leaves = {"q": leaf(B, HEADS, Q_LEN, DIM), "k": leaf(B, KV_HEADS, Q_LEN, DIM), "v": leaf(B, KV_HEADS, Q_LEN, DIM)}
    options = {"q_segment_ids": Q_IDS, "q_positions": Q_POS, "kv_lengths": ints(7, 0, 4)}
    o, lse = load_op("document")(*leaves.values(), doc=doc, **options, return_lse=True)
    these = pairs(options, Q_LEN)
    keep = these.may & (these.q_idx >= these.kv_idx) & (doc[:, None, :, None] == doc[:, None, None])
    assert_same(results(o, lse, leaves), results(*attend(leaves, keep), leaves))


def test_a_table_of_positions_need_not_be_as_long_as_the_rows(package: str) -> None:
    """The positions of a call index a named dim, whatever its size; `q_idx` and `kv_idx` have one element per row."""
    op, _ = own_variant(package, "tabled")
    q, k = leaf(1, 2, 6, DIM), leaf(1, 2, 6, DIM)
    order, place = ints(1, 0, 2), torch.tensor([0.0, 2.0, -1.0])
    positions = ints(0, 1, 2, 0, 1, 2)[None]
    o, lse = op(q, k, k, order=order, place=place, q_positions=positions, return_lse=True)
    at = positions[0].long()
    keep = order[at][:, None] >= order[at]
    scores = (q @ k.mT * DIM**-0.5 + place[at][:, None] - place[at]).masked_fill(~keep, -1e30)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(o, scores.softmax(-1) @ k)
    call = {"q": q, "k": k, "v": k, "order": order, "place": place}
    assert message(op, call) == "tabled: order: expected shape [>=6], got [3]"


@pytest.mark.parametrize("variant", sorted(set(MANIFEST) - {"causal_dropout", "padding"}))
def test_packed_sequences_are_segments_with_positions(variant: str) -> None:
    """If nothing depends on the batch row, both are descriptions of the same call."""
    lengths = (5, 1, 7, 3)
    packed = Packed.draw(MANIFEST[variant], lengths, lengths)
    own = {n: x[None] if "b" in packed.dims[n] else x for n, x in packed.tensors.items()}
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])[None]
    q, k, v = (x[None] for x in (packed.q, packed.k, packed.v))
    options = {"layout": "bshd", "q_segment_ids": ids, "q_positions": positions, "return_lse": True}
    o, lse = load_op(variant)(q, k, v, **own, **packed.numbers, **options)
    assert_same(packed.call(load_op(variant)), results(o[0], lse[0], packed.leaves))
