"""The inputs of a layer in the decode suite, and an implementation that is built for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases.decode import DecodeCase
from codegen.testing import golden

DTYPE = torch.bfloat16
SPREAD = 64.0
"""Factor of normal values in an 8-bit cache, whose largest number is 448."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A layer's inputs.

    q is `[B, Hq, queries, D]`, or `[total, Hq, D]` if sequences have different numbers of queries. Caches are
    `[pages, page size, Hkv, D]`; in latent attention v is a view of k's first columns. `scales`: those of 8-bit caches,
    `[Hkv]`. `packing`: the arguments of a packed call.
    """

    case: DecodeCase
    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor
    kv_lengths: Tensor
    own: Mapping[str, Any]
    scales: Mapping[str, Tensor]
    packing: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values of all sequences."""
        columns = self.k.shape[3] + (self.v.shape[3] if self.case.value_dim is None else 0)
        return sum(self.case.lengths) * self.k.shape[2] * columns * self.k.element_size()

    def gathered(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one sequence in float64, `[1, Hkv, S, D]`, times their scales."""
        length, size = self.case.lengths[sequence], self.k.shape[1]
        places = torch.arange(length, device=self.q.device)
        pages = self.page_table[sequence].long()[places // size]
        found = []
        for name, x in (("k_scale", self.k), ("v_scale", self.v)):
            # Not every device indexes 8-bit floats.
            rows = x.view(torch.uint8)[pages, places % size].view(x.dtype) if self.scales else x[pages, places % size]
            scaled = rows.double() * self.scales[name].double()[:, None] if self.scales else rows.double()
            found.append(scaled.transpose(0, 1)[None])
        k, v = found
        return k, v

    def rows(self, x: Tensor, sequence: int) -> Tensor:
        """The rows of one sequence in q or o, `[1, Hq, queries, D]`."""
        if not self.packing:
            return x[sequence : sequence + 1]
        first = sum(self.case.counts[:sequence])
        return x[first : first + self.case.counts[sequence]].transpose(0, 1)[None]


def draw(case: DecodeCase, device: str, *, contiguous: bool = False) -> Step:
    """Random inputs, on pages in random order, or with a page for each sequence."""
    count = len(case.lengths)
    size = max(case.lengths) if contiguous else case.page_size
    needed = [-(-length // size) for length in case.lengths]
    table = torch.full((count, max(needed)), -1, dtype=torch.int32)
    order = torch.arange(count) if contiguous else torch.randperm(sum(needed))
    first = 0
    for row, pages in zip(table, needed, strict=True):
        row[:pages] = order[first : first + pages].int()
        first += pages
    shape = (sum(needed), size, case.kv_heads, case.dim)
    k, scales = _cache(case, shape, device)
    v, v_scale = (k[..., : case.value_dim], scales) if case.value_dim is not None else _cache(case, shape, device)
    packing: dict[str, Any] = {}
    q_shape: tuple[int, ...] = (count, case.heads, case.counts[0], case.dim)
    if isinstance(case.queries, tuple):
        ends = torch.tensor([0, *itertools.accumulate(case.queries)], dtype=torch.int32, device=device)
        packing = {"cu_seqlens_q": ends, "max_seqlen_q": max(case.queries)}
        q_shape = (sum(case.queries), case.heads, case.dim)
    return Step(
        case=case,
        q=torch.randn(q_shape, dtype=DTYPE, device=device),
        k=k,
        v=v,
        page_table=table.to(device),
        kv_lengths=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        own=_own(case, shape[:2], device),
        scales={} if scales is None or v_scale is None else {"k_scale": scales, "v_scale": v_scale},
        packing=packing,
    )


def _cache(case: DecodeCase, shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor | None]:
    """Normal values in the cache's dtype, and their scales if it has 8 bits."""
    x = torch.randn(shape, dtype=DTYPE, device=device)
    dtype: torch.dtype = getattr(torch, case.cache)
    if dtype.itemsize > 1:
        return x.to(dtype), None
    # Each head has another scale.
    scales = (1 + torch.rand(case.kv_heads, device=device)) / SPREAD
    return x.mul_(SPREAD).to(dtype), scales


def _own(case: DecodeCase, pages: tuple[int, int], device: str) -> dict[str, Any]:
    """The arguments of the variant itself.

    A tensor with an element for every key lies in pages; one with an element for every pair of query and key does not.
    """
    entry = golden.load_manifest()[case.variant]
    sizes = {"h": (case.heads,), "hkv": (case.kv_heads,), "b": (len(case.lengths),), "kv_idx": pages}
    found: dict[str, Any] = {}
    for name, spec in entry["tensors"].items():
        if "q_idx" in spec["dims"]:
            x = torch.rand(len(case.lengths), case.heads, case.counts[0], max(case.lengths), device=device)
            found[name] = x < 0.7 if spec["dtype"] == "bool" else x
            continue
        dims = [dim for dim in spec["dims"] if dim != "b" or "kv_idx" not in spec["dims"]]
        shape = [n for dim in dims for n in (sizes.get(dim, (16384,)) if isinstance(dim, str) else (dim,))]
        if not spec["dtype"].startswith("int"):
            found[name] = torch.rand(shape, device=device) * 0.1
        elif "kv_idx" in dims:
            found[name] = torch.zeros(shape, dtype=torch.int32, device=device)  # one document
        else:
            found[name] = torch.full(shape, max(case.lengths), dtype=torch.int32, device=device)
    for name in entry["scalars"]:
        found[name] = entry["scalar_examples"][name]
    if entry["sink"]:
        found["sink"] = torch.randn(case.heads, device=device)
    return found


@dataclass(frozen=True, kw_only=True)
class Built:
    """An implementation: `call` computes a layer from its inputs.

    `result` converts the output of `call` to a tensor like q. `plan` makes what all layers of a step share.

    `programs` is for implementations that torch cannot capture in a CUDA graph. It makes programs from the layers of a
    step: each computes all layers, with other options, and the fastest counts. `wait` blocks until the output of a
    program is there. `layers`: the least number of layers.
    """

    call: Callable[[Step], Any]
    plan: Callable[[], Any] | None = None
    result: Callable[[Any], Tensor] = lambda o: o
    programs: Callable[[Sequence[Step]], Sequence[Callable[[], Any]]] | None = None
    wait: Callable[[Any], Any] | None = None
    layers: int = 2
