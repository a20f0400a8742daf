"""Packed calls, segment ids, positions and lengths, as the plain reference computes them on the CPU.

A packed call is compared with dense calls, one per sequence; the rest with attention by a mask written out here.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.testing.golden import load_manifest, load_op
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated._runtime.torch.sequences import check_packed
from tests.support.rendering import importable

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(mode="packed", family="reference", framework="torch"),
]

MANIFEST = load_manifest()
with_variants = pytest.mark.parametrize("variant", MANIFEST)
Call = dict[str, Any]

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
# Beyond every position a test reaches.
REACH = 40

# What the library has no example of: every place of the dims `b`, `q_idx` and `kv_idx`, and `b` as a number.
SPEC = """
variants:
  per_pair:
    mask: seen[b, q_idx, kv_idx] or kv_idx == b
    score: score + bias[b, h, q_idx, kv_idx] + far[h, q_idx - kv_idx]
    tensors:
      seen: {dims: [b, q_idx, kv_idx], dtype: bool}
      bias: {dims: [b, h, q_idx, kv_idx], grad: true}
      far: {dims: [h, 9], grad: true}
  per_row:
    mask: kv_idx < length[b] + q_idx
    score: score * key[kv_idx, b] + query[q_idx] + gain[b, h] * table[b // 2] + query[kv_idx + 2] + 0.1 * b
    tensors:
      length: {dims: [b], dtype: int32}
      key: {dims: [kv_idx, b], grad: true}
      query: {dims: [q_idx], grad: true}
      gain: {dims: [b, h], grad: true}
      table: {dims: [n], grad: true}
  mapped:
    mask: group[b, order[q_idx]] <= group[b, kv_idx // 2]
    score: score + place[q_idx] - place[kv_idx]
    tensors:
      group: {dims: [b, kv_idx], dtype: int32}
      order: {dims: [n], dtype: int32}
      place: {dims: [n], grad: true}
  tabled:
    mask: order[q_idx] >= order[kv_idx]
    score: score + place[q_idx] - place[kv_idx]
    tensors: {order: {dims: [n], dtype: int32}, place: {dims: [n], grad: true}}
  everything: {mask: causal and window(5), score: softcap(20.0), sink: true, decay: true, dropout: true}
"""
OWN = ("per_pair", "per_row", "mapped", "everything")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A package of the variants above."""
    with importable(tmp_path_factory.mktemp("sequences"), "sequence_variants", SPEC) as package:
        yield package.name


def own_variant(package: str, variant: str) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    module = importlib.import_module(f"{package}.torch")
    path = Path(module.__file__ or "").parents[1] / "MANIFEST.json"
    return getattr(module, variant), json.loads(path.read_text(encoding="utf-8"))["variants"][variant]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, requires_grad=True)


def begins(lengths: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def results(o: Tensor, lse: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """o, lse and the gradient of every leaf; a row without any key has no gradient by its lse."""
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape)).sum()
    loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * torch.randn(lse.shape)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "lse": lse, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """The same up to the order of a few sums in float32."""
    for name, wanted in want.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=2e-5, msg=partial("{}: {}".format, name))
        assert not got[name].isnan().any(), name


# -------------------------------------------------------------------------------------------------------- packed calls


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed call: lengths of its sequences, tensors in packed form, the dims of the variant's own."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    q: Tensor
    k: Tensor
    v: Tensor
    dims: Mapping[str, Sequence[str | int]]
    tensors: dict[str, Tensor]
    numbers: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def draw(entry: Mapping[str, Any], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Packed:
        torch.manual_seed(0)
        dims = {name: declared["dims"] for name, declared in entry["tensors"].items()}
        sizes = {"b": len(q_lens), "h": HEADS, "hkv": KV_HEADS, "q_idx": sum(q_lens), "kv_idx": sum(kv_lens)}
        tensors = {}
        for name, declared in entry["tensors"].items():
            shape = [sizes.get(d, REACH) if isinstance(d, str) else d for d in packed_dims(dims[name])]
            dtype = getattr(torch, declared["dtype"])
            integers = torch.randint(0, 2 if dtype == torch.bool else 4, shape)
            tensors[name] = torch.randn(shape) if dtype.is_floating_point else integers.to(dtype)
            tensors[name].requires_grad_(declared["grad"])
        if entry["decay"]:
            dims["g"], tensors["g"] = ["b", "kv_idx", "h"], (-torch.rand(sum(kv_lens), HEADS)).requires_grad_()
        if entry["sink"]:
            dims["sink"], tensors["sink"] = ["h"], leaf(HEADS)
        numbers: dict[str, Any] = dict.fromkeys(entry["scalars"], 3)
        numbers |= {"dropout_p": 0.4, "seed": 11} if entry["dropout"] else {}
        return Packed(
            q_lens=q_lens,
            kv_lens=kv_lens,
            q=leaf(sum(q_lens), HEADS, DIM),
            k=leaf(sum(kv_lens), KV_HEADS, DIM),
            v=leaf(sum(kv_lens), KV_HEADS, DIM_V),
            dims=dims,
            tensors=tensors,
            numbers=numbers,
        )

    @property
    def leaves(self) -> dict[str, Tensor]:
        own = {name: x for name, x in self.tensors.items() if x.requires_grad}
        return {"q": self.q, "k": self.k, "v": self.v, **own}

    def call(self, op: Callable[..., Any], **options: Any) -> dict[str, Tensor]:
        options = {"cu_seqlens_q": begins(self.q_lens), "cu_seqlens_k": begins(self.kv_lens), **options}
        o, lse = op(self.q, self.k, self.v, **self.tensors, **self.numbers, return_lse=True, **options)
        return results(o, lse, self.leaves)

    def one_by_one(self, op: Callable[..., Any], offsets: Sequence[int]) -> dict[str, Tensor]:
        """The same by dense calls: sequence s as row s of a batch, whose other rows are left out of the result."""
        parts = []
        for s, offset in enumerate(offsets):
            q_begin, kv_begin = sum(self.q_lens[:s]), sum(self.kv_lens[:s])
            q = self.q[q_begin : q_begin + self.q_lens[s]]
            k, v = (x[kv_begin : kv_begin + self.kv_lens[s]] for x in (self.k, self.v))
            batch = [x.expand(len(offsets), *x.shape) for x in (q, k, v)]
            own = {name: self._dense(name, x, s, offset) for name, x in self.tensors.items()}
            o, lse = op(*batch, **own, **self.numbers, layout="bshd", q_offset=offset, return_lse=True)
            parts.append((o[s], lse[s]))
        o, lse = (torch.cat(part, axis) for axis, part in enumerate(zip(*parts, strict=True)))
        return results(o, lse, self.leaves)

    def _dense(self, name: str, x: Tensor, s: int, offset: int) -> Tensor:
        """One of the variant's own tensors as a dense call has it, where the rows of sequence s are its positions."""
        positions = torch.arange(REACH)
        kept = packed_dims(self.dims[name])
        for axis, dim in enumerate(kept):
            lengths, shift = {"q_idx": (self.q_lens, offset), "kv_idx": (self.kv_lens, 0)}.get(str(dim), ([], 0))
            if not lengths:
                continue
            length = lengths[s]
            # Without rows nothing attends, and any element will do.
            rows = sum(lengths[:s]) + (positions - shift).clamp(0, length - 1) if length else 0 * positions
            x = x.index_select(axis, rows)
            if name == "g":
                # Behind the last row the cumulative sum stays what it is.
                x = x * (positions < length)[:, None]
        if len(kept) == len(self.dims[name]):
            return x
        axis = list(self.dims[name]).index("b")
        return x.unsqueeze(axis).repeat_interleave(len(self.q_lens), axis)


def packed_dims(dims: Sequence[str | int]) -> list[str | int]:
    """The dims a tensor has in a packed call."""
    return [dim for dim in dims if dim != "b" or not {"q_idx", "kv_idx"} & set(dims)]


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


# ------------------------------------------------------------------------------- segment ids, positions and lengths

B, Q_LEN, KV_LEN = 3, 7, 9


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Positions and rows of queries `[B, 1, Sq, 1]` and keys `[B, 1, 1, Skv]`, and which pairs the call lets attend."""

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
    """Positions of the call's own index a named dim; along `q_idx` and `kv_idx` there is an element per row."""
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
    """Where nothing depends on the batch row, two ways to say the same."""
    lengths = (5, 1, 7, 3)
    packed = Packed.draw(MANIFEST[variant], lengths, lengths)
    own = {n: x[None] if "b" in packed.dims[n] else x for n, x in packed.tensors.items()}
    ids = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])[None]
    q, k, v = (x[None] for x in (packed.q, packed.k, packed.v))
    options = {"layout": "bshd", "q_segment_ids": ids, "q_positions": positions, "return_lse": True}
    o, lse = load_op(variant)(q, k, v, **own, **packed.numbers, **options)
    assert_same(packed.call(load_op(variant)), results(o[0], lse[0], packed.leaves))


# ------------------------------------------------------------------------------------------------------------ schedules


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


# ------------------------------------------------------------------------------------------------------- bad arguments


def message(op: Callable[..., Any], call: Call) -> str:
    call = dict(call)
    with pytest.raises(ValueError, match="expected") as caught:
        op(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    # Each package has an ArgumentError of its own.
    assert type(caught.value).__name__ == "ArgumentError"
    return str(caught.value)


def packed_call() -> Call:
    q, k, v = torch.zeros(8, 4, 32), torch.zeros(6, 2, 32), torch.zeros(6, 2, 16)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 6)}


def dense_call() -> Call:
    return {"q": torch.zeros(2, 4, 8, 32), "k": torch.zeros(2, 2, 6, 32), "v": torch.zeros(2, 2, 6, 16)}


ONE_PER_ROW = torch.zeros(2, 8, dtype=torch.int32)
INTEGERS = "expected an integer tensor [n + 1] on cpu"
BAD_PACKED: list[tuple[str, Call, str]] = [
    ("dtype", {"cu_seqlens_q": torch.tensor([0.0, 3, 8])}, f"cu_seqlens_q: {INTEGERS}, got torch.float32 [3] on cpu"),
    (
        "dtype_of_k",
        {"cu_seqlens_k": torch.tensor([False, True])},
        f"cu_seqlens_k: {INTEGERS}, got torch.bool [2] on cpu",
    ),
    (
        "range",
        {"cu_seqlens_q": torch.tensor([0, 2**31, 8])},
        "cu_seqlens_q: expected values that torch.int32 holds, got 2147483648",
    ),
    ("dims", {"cu_seqlens_q": ints(0, 3, 8)[None]}, f"cu_seqlens_q: {INTEGERS}, got torch.int32 [1, 3] on cpu"),
    ("empty", {"cu_seqlens_k": ints()}, f"cu_seqlens_k: {INTEGERS}, got torch.int32 [0] on cpu"),
    ("device", {"cu_seqlens_q": ints(0, 3, 8).to("meta")}, f"cu_seqlens_q: {INTEGERS}, got torch.int32 [3] on meta"),
    ("list", {"cu_seqlens_q": [0, 3, 8]}, f"cu_seqlens_q: {INTEGERS}, got list"),
    ("keys_alone", {"cu_seqlens_q": None}, f"cu_seqlens_q: {INTEGERS}, got NoneType"),
    (
        "queries_alone",
        {"cu_seqlens_k": None},
        "cu_seqlens_k: expected an integer tensor [n + 1] where q and k differ in length, got None for q of 8 rows and "
        "k of 6",
    ),
    (
        "number_of_sequences",
        {"cu_seqlens_k": ints(0, 3, 3, 6)},
        "cu_seqlens_k: expected 3 elements, as many as cu_seqlens_q, got 4",
    ),
    ("start", {"cu_seqlens_q": ints(1, 3, 8)}, "cu_seqlens_q: expected a first value of 0, got 1"),
    (
        "decrease",
        {"cu_seqlens_k": ints(0, 7, 6)},
        "cu_seqlens_k: expected values that never decrease, got 7 at index 1 and 6 at index 2",
    ),
    ("end", {"cu_seqlens_q": ints(0, 3, 7)}, "cu_seqlens_q: expected a last value of 8, the rows of q, got 7"),
    ("end_of_k", {"cu_seqlens_k": ints(0, 3, 8)}, "cu_seqlens_k: expected a last value of 6, the rows of k, got 8"),
    (
        "rank",
        {"q": torch.zeros(1, 4, 8, 32)},
        "q: expected 3 dimensions [total, H, D], got 4 dimensions [1, 4, 8, 32]",
    ),
    (
        "heads",
        {"q": torch.zeros(8, 3, 32)},
        "q: expected a head count that is a multiple of k's 2, got 3 in [total, H, D] = [8, 3, 32]",
    ),
    (
        "rows_of_v",
        {"v": torch.zeros(5, 2, 16)},
        "v: expected sequence length 6, that of k, got 5 in [total, H, D] = [5, 2, 16]",
    ),
    (
        "head_dim",
        {"k": torch.zeros(6, 2, 16)},
        "k: expected head_dim 32, that of q, got 16 in [total, H, D] = [6, 2, 16]",
    ),
    ("scale", {"scale": "1"}, "scale: expected a finite number or None, got '1'"),
    ("offset_word", {"q_offset": "start"}, "q_offset: expected an int, 'end' or an integer tensor, got 'start'"),
    ("offset_float", {"q_offset": 0.5}, "q_offset: expected an int, got 0.5"),
    (
        "offset_shape",
        {"q_offset": ints(0, 1, 2)},
        "q_offset: expected an int, 'end' or an integer tensor [2] on cpu, got torch.int32 [3] on cpu",
    ),
    ("config", {"config": 3}, "config: expected None or a dict of pass name -> tile, got 3"),
    ("schedule", {"schedule": 3}, "schedule: expected what causal.schedule(...) returns, or None, got int"),
    *(
        (name, {name: ONE_PER_ROW}, f"{name}: expected None in a packed call, beside cu_seqlens_q, got Tensor")
        for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths")
    ),
]
BAD_TOKENS: list[tuple[str, Call, str]] = [
    (
        "ids_of_keys_alone",
        {"kv_segment_ids": ONE_PER_ROW[:, :6]},
        "q_segment_ids: expected an integer tensor [2, 8] beside kv_segment_ids, got None",
    ),
    (
        "ids_of_queries_alone",
        {"q_segment_ids": ONE_PER_ROW},
        "kv_segment_ids: expected an integer tensor [2, 6] where q and k differ in length, got None",
    ),
    (
        "positions_of_keys_alone",
        {"kv_positions": ONE_PER_ROW[:, :6]},
        "q_positions: expected an integer tensor [2, 8] beside kv_positions, got None",
    ),
    (
        "positions_of_queries_alone",
        {"q_positions": ONE_PER_ROW},
        "kv_positions: expected an integer tensor [2, 6] where q and k differ in length, got None",
    ),
    (
        "shape_of_ids",
        {"q_segment_ids": ONE_PER_ROW, "kv_segment_ids": ONE_PER_ROW},
        "kv_segment_ids: expected an integer tensor [2, 6] on cpu, got torch.int32 [2, 8] on cpu",
    ),
    (
        "dtype_of_ids",
        {"q_segment_ids": ONE_PER_ROW.bool()},
        "q_segment_ids: expected an integer tensor [2, 8] on cpu, got torch.bool [2, 8] on cpu",
    ),
    (
        "device_of_positions",
        {"q_positions": ONE_PER_ROW.to("meta")},
        "q_positions: expected an integer tensor [2, 8] on cpu, got torch.int32 [2, 8] on meta",
    ),
    (
        "list_of_positions",
        {"q_positions": ONE_PER_ROW, "kv_positions": [0]},
        "kv_positions: expected an integer tensor [2, 6] on cpu, got list",
    ),
    (
        "shape_of_lengths",
        {"kv_lengths": ints(1, 2, 3)},
        "kv_lengths: expected an integer tensor [2] on cpu, got torch.int32 [3] on cpu",
    ),
    (
        "dtype_of_lengths",
        {"kv_lengths": torch.tensor([1.0, 2.0])},
        "kv_lengths: expected an integer tensor [2] on cpu, got torch.float32 [2] on cpu",
    ),
    ("number_of_lengths", {"kv_lengths": 3}, "kv_lengths: expected an integer tensor [2] on cpu, got int"),
    *(
        (
            f"positions_and_offset_{i}",
            {"q_positions": ONE_PER_ROW, "kv_positions": ONE_PER_ROW[:, :6], "q_offset": offset},
            f"q_offset: expected 0 beside q_positions, which say where queries are, got {got}",
        )
        for i, (offset, got) in enumerate([(2, "2"), ("end", "'end'"), (ints(0, 0), "Tensor"), (False, "False")])
    ),
    ("padding_id", {"kv_lengths": ints(1, 2), "padding_id": None}, "padding_id: expected an int of 32 bits, got None"),
    (
        "padding_id_too_large",
        {"kv_lengths": ints(1, 2), "padding_id": 2**31},
        "padding_id: expected an int of 32 bits, got 2147483648",
    ),
]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*rest, id=name) for name, *rest in BAD_PACKED])
def test_bad_arguments_of_a_packed_call(change: Call, text: str) -> None:
    assert message(load_op("causal"), packed_call() | change) == f"causal: {text}"
    if not {"scale", "schedule"} & change.keys():
        assert message(load_op("causal").schedule, packed_call() | change) == f"causal: {text}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*rest, id=name) for name, *rest in BAD_TOKENS])
def test_bad_ids_positions_and_lengths(change: Call, text: str) -> None:
    assert message(load_op("causal"), dense_call() | change) == f"causal: {text}"
    assert message(load_op("causal").schedule, dense_call() | change) == f"causal: {text}"  # type: ignore[attr-defined]


BAD_OWN: list[tuple[str, str, Tensor | None, str]] = [
    ("forgetting", "g", torch.zeros(2, 8, 4), "expected shape [6, 4], got [2, 8, 4]"),
    ("forgetting", "g", torch.zeros(8, 4), "expected shape [6, 4], got [8, 4]"),
    ("forgetting", "g", None, "expected a torch.Tensor of shape [6, 4], got nothing"),
    ("document", "doc", ints(*range(8)), "expected shape [6], got [8]"),
    ("padding", "length", ints(1, 2, 3), "expected shape [2], got [3]"),
    ("gpt_oss", "sink", torch.zeros(2), "expected shape [4], got [2]"),
]


@pytest.mark.parametrize(("variant", "name", "value", "text"), BAD_OWN)
def test_bad_own_tensors_of_a_packed_call(variant: str, name: str, value: Tensor | None, text: str) -> None:
    assert message(load_op(variant), packed_call() | {name: value}) == f"{variant}: {name}: {text}"


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [("seen", (2, 8, 6), "[8, 6], got [2, 8, 6]"), ("bias", (4, 8, 8), "[4, 8, 6], got [4, 8, 8]")],
)
def test_bad_tensors_per_pair_of_a_packed_call(package: str, name: str, shape: Sequence[int], text: str) -> None:
    op, _ = own_variant(package, "per_pair")
    good = {"seen": torch.ones(8, 6, dtype=torch.bool), "bias": torch.zeros(4, 8, 6), "far": torch.zeros(4, 9)}
    assert op(**packed_call(), **good).shape == (8, 4, 16)
    bad = good | {name: torch.zeros(shape, dtype=good[name].dtype)}
    assert message(op, packed_call() | bad) == f"per_pair: {name}: expected shape {text}"


def test_values_are_not_read_where_that_would_wait() -> None:
    """Of fake tensors and those without a device there are none."""
    with FakeTensorMode():
        x, cu_seqlens = torch.zeros(8, 2, 16), torch.ones(3, dtype=torch.int32)
        assert check_packed("op", x, x, x, None, cu_seqlens, None)[0] is cu_seqlens
    x, cu_seqlens = torch.zeros(8, 2, 16, device="meta"), torch.ones(3, dtype=torch.int32, device="meta")
    assert check_packed("op", x, x, x, None, cu_seqlens, None)[0] is cu_seqlens
