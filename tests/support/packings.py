"""Packed calls: which there are to test, their inputs, and what they are by definition: one dense call per sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from tests.support import plain
from tests.support.cases import DEVICE, MANIFEST, tiles

Dense = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where sequences begin and end among the query rows, and among the keys."""

    q: tuple[int, ...]
    k: tuple[int, ...]

    @staticmethod
    def of(*ends: int) -> Packing:
        """Self-attention: as many keys as queries."""
        return Packing(q=(0, *ends), k=(0, *ends))

    @property
    def sequences(self) -> int:
        return len(self.q) - 1

    @property
    def rows(self) -> list[slice]:
        return [slice(*ends) for ends in itertools.pairwise(self.q)]

    @property
    def keys(self) -> list[slice]:
        return [slice(*ends) for ends in itertools.pairwise(self.k)]

    def options(self) -> dict[str, Tensor]:
        """The op's arguments for it."""
        ends = {"cu_seqlens_q": self.q, "cu_seqlens_k": self.k}
        return {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in ends.items()}

    def __str__(self) -> str:
        queries, keys = ("_".join(map(str, ends[1:])) for ends in (self.q, self.k))
        return queries if self.q == self.k else f"{queries}x{keys}"


# Sequences of queries without keys, of keys without queries, of neither, and of other lengths on both sides.
MIXED = Packing(q=(0, 20, 20, 70, 71, 71), k=(0, 30, 45, 45, 130, 130))
THREE = Packing.of(9, 60, 81)
SMALL_TILES = tiles(32, 32)

OFFSETS: dict[str, Callable[[], Any]] = {
    "0": lambda: 0,
    "end": lambda: "end",
    "13": lambda: 13,
    "-9": lambda: -9,
    "tensor": lambda: torch.tensor([30, 0, -20, 50, 7], dtype=torch.int32, device=DEVICE),
}
"""What a call of MIXED may have as its `q_offset`."""

# What is different from one to the next: a second bound, a read of positions, a derivative, a vector of its own, none.
KINDS = ("causal", "window", "alibi", "softcap", "forgetting")
with_kinds = pytest.mark.parametrize("variant", KINDS)


def draw_packed(
    variant: str,
    packing: Packing,
    dtype: torch.dtype = torch.float16,
    *,
    kv_heads: int = 1,
    group: int = 1,
    dim: int = 64,
    dim_v: int = 0,
) -> Inputs:
    """Arguments of one packed call: q and do `[total_q, Hq, D]`, k and v `[total_k, Hkv, D]`, dlse `[Hq, total_q]`."""
    entry = MANIFEST[variant]
    total_q, total_k = packing.q[-1], packing.k[-1]
    shape = golden.Shape(
        batch=packing.sequences,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seq=max(total_q, total_k, 1),
        dim=max(dim, dim_v),
    )
    whole = golden.draw_inputs(entry, shape, dtype=dtype, device=DEVICE)

    def cut(x: Tensor, rows: int, cols: int) -> Tensor:
        return x.detach()[0, :, :rows, :cols].transpose(0, 1).contiguous()

    tensors = {name: _packed_tensor(entry, name, x.detach(), total_q, total_k) for name, x in whole.tensors.items()}
    return replace(
        whole,
        q=cut(whole.q, total_q, dim).requires_grad_(),
        k=cut(whole.k, total_k, dim).requires_grad_(),
        v=cut(whole.v, total_k, dim_v or dim).requires_grad_(),
        do=cut(whole.do, total_q, dim_v or dim),
        dlse=whole.dlse[0, :, :total_q].contiguous(),
        tensors={name: x.requires_grad_(whole.tensors[name].requires_grad) for name, x in tensors.items()},
    )


def _packed_tensor(entry: plain.Entry, name: str, x: Tensor, total_q: int, total_k: int) -> Tensor:
    """A tensor `[batch, ...]` of a dense call as a packed one takes it; integers that change inside a sequence."""
    if _per_pair(entry, name):
        return x[0, :, :total_q, :total_k].contiguous()
    if _per_row(entry, name):
        # Positions, which begin anew in each sequence.
        return (x[0, :, :total_q] % 96).contiguous()
    if _per_key(entry, name):
        x = x[0, :total_k]
        return x.contiguous() if x.is_floating_point() else (torch.arange(total_k, device=DEVICE) // 37).to(x.dtype)
    if _per_sequence(entry, name) and not x.is_floating_point():
        return (23 * torch.arange(1, len(x) + 1, device=DEVICE)).to(x.dtype)
    return x.clone()


def _per_pair(entry: plain.Entry, name: str) -> bool:
    """Whether a tensor is `[b, h, q_idx, kv_idx]`, which is packed as `[h, total_q, total_k]`."""
    return name in entry["tensors"] and entry["tensors"][name]["dims"] == ["b", "h", "q_idx", "kv_idx"]


def _per_row(entry: plain.Entry, name: str) -> bool:
    """Whether a tensor is `[b, h, q_idx]`, which is packed as `[h, total_q]`."""
    return name in entry["tensors"] and entry["tensors"][name]["dims"] == ["b", "h", "q_idx"]


def _per_key(entry: plain.Entry, name: str) -> bool:
    return name == "g" or "kv_idx" in _dims(entry, name)


def _per_sequence(entry: plain.Entry, name: str) -> bool:
    return "b" in _dims(entry, name) and not _per_key(entry, name)


def _dims(entry: plain.Entry, name: str) -> list[str | int]:
    dims: list[str | int] = entry["tensors"].get(name, {"dims": []})["dims"]
    assert "q_idx" not in dims or dims == ["b", "h", "q_idx"], "no variant has another tensor with one per query"
    assert "b" not in dims[1:], "the batch comes first in every tensor of the library"
    assert "kv_idx" not in dims or dims[:2] == ["b", "kv_idx"]
    return dims


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """One sequence of a packed call, and views of the call's tensors as those of a dense call."""

    entry: plain.Entry
    number: int
    rows: slice
    keys: slice

    def tokens(self, x: Tensor, where: slice) -> Tensor:
        """`[total, H, D]` as `[1, H, S, D]`."""
        return x[where].transpose(0, 1)[None]

    def own(self, name: str, x: Any) -> Any:
        """An own argument as the dense call of this sequence takes it."""
        if not isinstance(x, Tensor):
            return x
        if _per_pair(self.entry, name):
            return x[None, :, self.rows, self.keys]
        if _per_row(self.entry, name):
            return x[None, :, self.rows]
        if _per_key(self.entry, name):
            return x[self.keys][None]
        return x[self.number : self.number + 1] if _per_sequence(self.entry, name) else x

    def at_positions(self, name: str, x: Any, options: Mapping[str, Any]) -> Any:
        """A tensor by pair or row has an element for each query row of a packed call; a dense one reads by position."""
        if not (_per_pair(self.entry, name) or _per_row(self.entry, name)):
            return x
        queries, keys = x.shape[2], self.keys.stop - self.keys.start
        offset = keys - queries if options["q_offset"] == "end" else options["q_offset"]
        positions = torch.arange(max(queries + offset, 1), device=x.device)
        return x[:, :, (positions - offset).clamp(0, queries - 1)]

    def inputs(self, inputs: Inputs) -> Inputs:
        """The dense call."""
        own = {name: self.own(name, x) for name, x in inputs.tensors.items()}
        return replace(
            inputs,
            q=self.tokens(inputs.q, self.rows),
            k=self.tokens(inputs.k, self.keys),
            v=self.tokens(inputs.v, self.keys),
            do=self.tokens(inputs.do, self.rows),
            dlse=inputs.dlse[None, :, self.rows],
            tensors=own,
        )

    def options(self, q_offset: Any, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the dense call; an offset for each sequence becomes one number, and a dropout counts sequences."""
        offset = int(q_offset[self.number]) if isinstance(q_offset, Tensor) else q_offset
        return {"q_offset": offset, **({"first_batch": self.number} if self.entry["dropout"] else {}), **rest}


def _sequences(entry: plain.Entry, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> Iterator[_Sequence]:
    ends = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    packing = Packing(q=tuple(cu_seqlens_q.tolist()), k=tuple(ends.tolist()))
    for number, (rows, keys) in enumerate(zip(packing.rows, packing.keys, strict=True)):
        yield _Sequence(entry=entry, number=number, rows=rows, keys=keys)


def per_sequence(entry: plain.Entry, dense: Dense) -> Dense:
    """The packed op that a dense one defines: `(o, lse)` of one call of it for each sequence, one behind the other."""

    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        return_lse: bool = True,
        q_offset: Any = 0,
        scale: float | None = None,
        **own: Any,
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        found = []
        for part in _sequences(entry, cu_seqlens_q, cu_seqlens_k):
            x = part.tokens(q, part.rows), part.tokens(k, part.keys), part.tokens(v, part.keys)
            if not x[0].numel() or not x[1].numel():
                found.append(_without_keys(x[0], v.shape[2], own.get("sink")))
                continue
            options = part.options(q_offset, {"scale": scale})
            arguments = {name: part.at_positions(name, part.own(name, value), options) for name, value in own.items()}
            o, lse = dense(*x, **arguments, **options, return_lse=True)
            found.append((o[0].transpose(0, 1), lse[0]))
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found], 1)

    return op


def _without_keys(q: Tensor, dim_v: int, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The denominator is the sink, or nothing."""
    _, heads, length, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((heads, length), float("-inf"), dtype=lse_dtype)
    if sink is not None:
        lse = sink.to(lse_dtype)[:, None].expand(heads, length)
    return q.new_zeros(length, heads, dim_v), lse


def term_sizes(
    entry: plain.Entry,
    inputs: Inputs,
    dtype: torch.dtype,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    q_offset: Any = 0,
    **rest: Any,
) -> tuple[dict[str, Tensor], float]:
    """`plain.term_sizes` of every sequence: side by side, and added up for what all of them share."""
    leaves = inputs.leaves()
    sizes = {"o": torch.zeros_like(inputs.do)}
    sizes |= {f"d{name}": torch.zeros_like(leaf, requires_grad=False) for name, leaf in leaves.items()}
    largest = 1.0
    for part in _sequences(entry, cu_seqlens_q, cu_seqlens_k):
        call = part.inputs(inputs)
        if not call.q.numel():
            continue
        if not call.k.numel():
            if "dsink" in sizes:  # each of these rows has the sink for a denominator
                sizes["dsink"] += call.dlse[0].abs().sum(1)
            continue
        options = part.options(q_offset, rest)
        tensors = {name: part.at_positions(name, x, options) for name, x in call.tensors.items()}
        found, score = plain.term_sizes(entry, replace(call, tensors=tensors), dtype, **options)
        largest = max(largest, score)
        for name, size in found.items():
            if name[1:] in tensors and tensors[name[1:]] is not call.tensors[name[1:]]:
                (size,) = torch.autograd.grad(tensors[name[1:]], call.tensors[name[1:]], size)
            whole = sizes[name]
            if name in ("o", "dq", "dk", "dv"):
                whole[part.rows if name in ("o", "dq") else part.keys] += size[0].transpose(0, 1)
            elif not _per_pair(entry, name[1:]) and _per_key(entry, name[1:]):
                whole[part.keys] += size[0]
            else:
                part.own(name[1:], whole).add_(size)
    tiny = plain.smallest_size(dtype)
    return {name: size.clamp(min=tiny) for name, size in sizes.items()}, largest


def spoil(inputs: Inputs, packing: Packing, number: int, value: float) -> Inputs:
    """The same call, of one sequence's keys and values each one row."""

    def spoilt(x: Tensor) -> Tensor:
        x = x.detach().clone()
        x[packing.keys[number]] = value
        return x.requires_grad_()

    return replace(inputs, k=spoilt(inputs.k), v=spoilt(inputs.v))


def assert_others_same(packing: Packing, number: int, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The same bits for all tokens but one sequence's."""
    for name, wanted in want.items():
        where = packing.rows if name in ("o", "lse", "dq") else packing.keys
        if name in ("o", "dq", "lse", "dk", "dv", "dg"):
            axis = 1 if name == "lse" else 0
            for other in range(packing.sequences):
                if other != number:
                    rows = torch.arange(wanted.shape[axis], device=wanted.device)[where[other]]
                    assert torch.equal(got[name].index_select(axis, rows), wanted.index_select(axis, rows)), name
