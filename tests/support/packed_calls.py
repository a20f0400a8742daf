"""Packed calls as the plain reference computes them on the CPU, and the dense calls with equal results."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing.golden import load_manifest

MANIFEST = load_manifest()
with_variants = pytest.mark.parametrize("variant", MANIFEST)
Call = dict[str, Any]

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
# Beyond every position a test reaches.
REACH = 40


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
    """o, lse and the gradient of every leaf. The loss leaves out the lse of rows without any key."""
    torch.manual_seed(1)
    loss = (o * torch.randn(o.shape)).sum()
    loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * torch.randn(lse.shape)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "lse": lse, **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Check that results are equal up to the order of a few float32 sums."""
    for name, wanted in want.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-5, atol=2e-5, msg=partial("{}: {}".format, name))
        assert not got[name].isnan().any(), name


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed call: lengths of its sequences, tensors in packed form, and the dims of the variant's own tensors."""

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
        """The same by dense calls: sequence s is row s of a batch, and only row s of the result is used."""
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
        """One of the variant's own tensors for a dense call of sequence s, indexed by its positions."""
        positions = torch.arange(REACH)
        kept = packed_dims(self.dims[name])
        for axis, dim in enumerate(kept):
            lengths, shift = {"q_idx": (self.q_lens, offset), "kv_idx": (self.kv_lens, 0)}.get(str(dim), ([], 0))
            if not lengths:
                continue
            length = lengths[s]
            # Without rows nothing attends, so any element will do.
            rows = sum(lengths[:s]) + (positions - shift).clamp(0, length - 1) if length else 0 * positions
            x = x.index_select(axis, rows)
            if name == "g":
                # After the last row the cumulative sum stays constant.
                x = x * (positions < length)[:, None]
        if len(kept) == len(self.dims[name]):
            return x
        axis = list(self.dims[name]).index("b")
        return x.unsqueeze(axis).repeat_interleave(len(self.q_lens), axis)


def packed_dims(dims: Sequence[str | int]) -> list[str | int]:
    """The dims a tensor has in a packed call."""
    return [dim for dim in dims if dim != "b" or not {"q_idx", "kv_idx"} & set(dims)]


def message(op: Callable[..., Any], call: Call) -> str:
    call = dict(call)
    with pytest.raises(ValueError, match="expected") as caught:
        op(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    # Each package has an ArgumentError of its own.
    assert type(caught.value).__name__ == "ArgumentError"
    return str(caught.value)
