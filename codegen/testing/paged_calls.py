"""Calls on paged caches, drawn for the tuner and for lint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codegen.analysis.paged_calls import PAGE, SLOT, paged_dims
from codegen.ir.expr import TensorSpec
from codegen.spec.model import Variant

FREE_SIZE = 16
"""The size of a dim with a free name."""

Fill = Callable[[TensorSpec, Sequence[int]], Tensor]
"""Makes one of a variant's own tensors with a given shape."""


@dataclass(frozen=True, kw_only=True)
class PagedShape:
    """The sizes of a call: `queries` of each sequence, `lengths` in keys.

    `dim_v`: the head dim of values, if it is not `head_dim`. `values_in_keys`: values are the first columns of keys, as
    in latent attention.
    """

    lengths: Sequence[int]
    queries: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    dim_v: int | None = None
    values_in_keys: bool = False

    @property
    def head_dim_v(self) -> int:
        """The head dim of values."""
        return self.head_dim if self.dim_v is None else self.dim_v

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def most_pages(self) -> int:
        """Pages of the longest sequence."""
        return max(-(-max(self.lengths) // self.page_size), 1)

    @property
    def pages(self) -> int:
        """Pages of all sequences."""
        return self.batch * self.most_pages


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The arguments of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    own: dict[str, Any]
    table: Tensor
    lengths: Tensor

    def call(self, op: Any, **options: Any) -> Any:
        """Call `op` with these arguments."""
        pages = {"page_table": self.table, "kv_lengths": self.lengths}
        return op(self.q, self.k, self.v, **self.own, **pages | options)

    def plain(self) -> PagedCall:
        """The same values on the CPU in float32, for which an op computes its plain reference."""

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.cpu().float() if x.is_floating_point() else x.cpu()

        own = {name: moved(x) for name, x in self.own.items()}
        q, k, v, table, lengths = map(moved, (self.q, self.k, self.v, self.table, self.lengths))
        return PagedCall(q=q, k=k, v=v, own=own, table=table, lengths=lengths)


def draw_paged_call(
    variant: Variant, shape: PagedShape, dtype: str, device: str, seed: int = 0, cache_dtype: str = ""
) -> PagedCall:
    """Random values on pages in a random order. `cache_dtype`: that of the caches; empty if it is that of q."""
    generator = torch.Generator(device=device).manual_seed(seed)
    typed = getattr(torch, dtype)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(typed)

    def fill(spec: TensorSpec, sizes: Sequence[int]) -> Tensor:
        kind = getattr(torch, spec.dtype)
        if spec.dtype == "bool":
            return torch.rand(*sizes, generator=generator, device=device) > 0.3
        if spec.dtype.startswith("int"):
            # Numbers of documents for keys and queries, lengths for others.
            most = 3 if {"kv_idx", "q_idx"} & set(spec.dims) else max(shape.lengths)
            return torch.randint(0, most, tuple(sizes), generator=generator, device=device, dtype=kind)
        return (torch.rand(*sizes, generator=generator, device=device) * 0.1).to(kind)

    def cached(columns: int) -> Tensor:
        x = normal(shape.pages, shape.page_size, shape.kv_heads, columns)
        return x.to(getattr(torch, cache_dtype)) if cache_dtype else x

    own = own_arguments(variant, shape, shape.pages, fill, device)
    table = random_table(shape, shape.pages, device, seed)
    if variant.decay:
        steps = torch.rand(
            shape.batch, shape.most_pages, shape.page_size, shape.heads, generator=generator, device=device
        )
        _fill_decay_caches(own, table, steps * -0.1)
    q = normal(shape.batch, shape.heads, shape.queries, shape.head_dim)
    k = cached(shape.head_dim)
    return PagedCall(
        q=q,
        k=k,
        v=k[..., : shape.head_dim_v] if shape.values_in_keys else cached(shape.head_dim_v),
        own=own,
        table=table,
        lengths=torch.tensor(list(shape.lengths), dtype=torch.int32, device=device),
    )


def new_tokens(shape: PagedShape, dtype: str) -> tuple[Tensor, Tensor]:
    """A key and a value for each sequence, to append to the caches: zeros on the CPU."""
    sizes, typed = (shape.batch, shape.kv_heads), getattr(torch, dtype)
    k = torch.zeros(*sizes, shape.head_dim, dtype=typed)
    v = k[..., : shape.head_dim_v] if shape.values_in_keys else torch.zeros(*sizes, shape.head_dim_v, dtype=typed)
    return k, v


def random_table(shape: PagedShape, pages: int, device: str, seed: int = 0) -> Tensor:
    """The page table: different pages for each sequence, drawn from `pages` pages in a random order."""
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: shape.pages]
    return order.view(shape.batch, shape.most_pages).int().to(device)


def own_arguments(variant: Variant, shape: PagedShape, pages: int, fill: Fill, device: str) -> dict[str, Any]:
    """The variant's tensors, those with an element for every key on `pages` pages, and its scalars.

    The caches of a log-decay hold zeros: nothing decays.
    """
    sizes: dict[str | int, int] = {"b": shape.batch, "h": shape.heads, "hkv": shape.kv_heads}
    sizes |= {PAGE: pages, SLOT: shape.page_size, "q_idx": shape.queries, "kv_idx": max(shape.lengths)}

    def tensor(spec: TensorSpec) -> Tensor:
        return fill(spec, [dim if isinstance(dim, int) else sizes.get(dim, FREE_SIZE) for dim in paged_dims(spec.dims)])

    arguments: dict[str, Any] = {name: tensor(spec) for name, spec in variant.tensors.items()}
    arguments |= {name: spec.typical(max(shape.lengths)) for name, spec in variant.scalars.items()}
    if variant.sink:
        arguments["sink"] = torch.zeros(shape.heads, device=device)
    if variant.decay:
        arguments["g"] = torch.zeros(pages, shape.page_size, shape.heads, device=device)
        arguments["g_base"] = torch.zeros(pages, shape.heads, device=device)
    return arguments


def _fill_decay_caches(own: dict[str, Any], table: Tensor, decays: Tensor) -> None:
    """Write the running sums of `decays [B, pages, slots, H]`, as `paging.append_decay` would."""
    sums = decays.double().flatten(1, 2).cumsum(1).view_as(decays)
    bases = torch.cat([torch.zeros_like(sums[:, :1, -1]), sums[:, :-1, -1]], 1).float()
    own["g_base"][table.long()] = bases
    own["g"][table.long()] = (sums - bases.double()[:, :, None]).float()


def seen_whole(spec: TensorSpec, sizes: Sequence[int], *, most: int, device: str) -> Tensor:
    """Contents with which masks keep as many pairs as possible: flags set, lengths not below `most`, one document."""
    kind = getattr(torch, spec.dtype)
    of_keys = "kv_idx" in spec.dims or "q_idx" in spec.dims
    value = 1 if spec.dtype == "bool" else most if spec.dtype.startswith("int") and not of_keys else 0
    return torch.full(tuple(sizes), value, dtype=kind, device=device)
