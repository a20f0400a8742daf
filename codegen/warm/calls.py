"""The calls whose kernels are compiled ahead of time, and how each is made: real shapes and strides, no values."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

import torch

from codegen.analysis.call_modes import Mode
from codegen.compile.packages import Package
from codegen.spec.model import Variant
from codegen.testing.calls import Inputs, Shape, draw_inputs, load_manifest, load_op, packed
from codegen.testing.paged_calls import PagedShape, draw_paged_call, new_tokens
from codegen.util.text import pair

PAGED = "paged"
"""The mode of calls on paged caches: prompts, decoding steps of one token, and appending to the caches."""

MODES = (*map(str, Mode), PAGED)


class Layout(StrEnum):
    """The order of a tensor's axes in memory, which decides the strides that kernels are compiled for."""

    BHSD = "bhsd"
    BSHD = "bshd"


class Scales(StrEnum):
    """What the scales of a cache of 8-bit floats are: a number other than 1, or floats for each key head, or for each
    token and head."""

    NUMBER = "number"
    HEAD = "head"
    TOKEN = "token"


CACHES = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of paged caches other than that of q."""


class WarmPass(StrEnum):
    """The passes of a call, whose kernels are compiled."""

    FORWARD = "fwd"
    BACKWARD = "bwd"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of the compiler: an architecture, and a folder of tuned tiles, "" for the architecture's defaults."""

    arch: str
    gpu: str


@dataclass(frozen=True, kw_only=True)
class WarmCall:
    """One call of an op. `heads`: query heads and key heads; `page_size` is 0 except for calls on paged caches.

    `head_dim` is that of queries and keys, `head_dim_v` that of values. On paged caches with one key head, values with
    fewer columns are the first columns of the keys, as in latent attention. `trained`: gradients of the variant's own
    tensors are asked for, too. `cache`: the dtype of paged caches, "" for that of q. `scales`: those of 8-bit floats.
    """

    variant: str
    mode: str
    dtype: str
    head_dim: int
    head_dim_v: int
    heads: tuple[int, int]
    seq: int
    layout: Layout
    batch: int = 1
    backward: bool = True
    trained: bool = True
    page_size: int = 0
    cache: str = ""
    scales: Scales = Scales.NUMBER

    def __str__(self) -> str:
        pages = f" pages of {self.page_size}" if self.page_size else ""
        pages += f" {self.cache} {self.scales}" if self.cache else ""
        heads = "/".join(map(str, self.heads))
        head_dims = pair(self.head_dim, self.head_dim_v)
        return f"{self.variant} {self.mode}{pages} {self.dtype} H{heads} S{self.seq} D{head_dims} {self.layout}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of attention in a model: the variant, the numbers of query heads and key heads, and the head dims of
    keys and values."""

    variant: str
    heads: tuple[int, int]
    head_dim: int
    head_dim_v: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compile: every layer in every mode, dtype and length."""

    layers: tuple[Layer, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    seqs: tuple[int, ...]
    layout: Layout
    batch: int
    page_sizes: tuple[int, ...]
    backward: bool
    trained: bool
    cache: str = ""
    scales: Scales = Scales.NUMBER

    def calls(self, package: str) -> Iterator[WarmCall]:
        """The calls, in the order of the request. Variants without a paged call, such as those with dropout, have
        none."""
        entries = load_manifest(package)
        for layer, mode, dtype, seq in product(self.layers, self.modes, self.dtypes, self.seqs):
            call = WarmCall(
                variant=layer.variant,
                mode=mode,
                dtype=dtype,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim_v,
                heads=layer.heads,
                seq=seq,
                layout=self.layout,
                batch=self.batch,
                backward=self.backward and mode != PAGED,
                trained=self.trained,
            )
            if mode != PAGED:
                yield call
            elif not entries[layer.variant]["dropout"]:
                paged = replace(call, cache=self.cache, scales=self.scales)
                yield from (replace(paged, page_size=size) for size in self.page_sizes)


def run_call(call: WarmCall, package: Package, variant: Variant | None) -> None:
    """Call the op on CPU tensors; `variant`: its entry of the spec, for calls on paged caches."""
    if call.mode == PAGED:
        assert variant is not None
        _run_paged(call, package.name, variant)
    else:
        _run(call, package.name)


def _run(call: WarmCall, package: str) -> None:
    inputs = _inputs(call, package)
    o = inputs.call(load_op(call.variant, package), **_sequences(call))
    if call.backward:
        do = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype)
        torch.autograd.grad(o, list(inputs.leaves().values()), do)


def _inputs(call: WarmCall, package: str) -> Inputs:
    entry = load_manifest(package)[call.variant]
    heads, kv_heads = call.heads
    shape = Shape(
        batch=call.batch, heads=heads, kv_heads=kv_heads, seq=call.seq, dim=call.head_dim, dim_v=call.head_dim_v
    )
    dtype = getattr(torch, call.dtype)
    inputs = draw_inputs(entry, shape, dtype=dtype, device="cpu", own_grads=call.trained, values=False)
    if call.mode == Mode.PACKED:
        inputs = packed(entry, inputs)
    elif call.layout is Layout.BSHD:
        q, k, v = (
            torch.zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=dtype).transpose(1, 2).requires_grad_()
            for x in (inputs.q, inputs.k, inputs.v)
        )
        inputs = replace(inputs, q=q, k=k, v=v)
    if not call.backward:
        for leaf in inputs.leaves().values():
            leaf.requires_grad_(False)
    return inputs


def _sequences(call: WarmCall) -> dict[str, Any]:
    """The arguments that tell the sequences of a call apart."""
    if call.mode == Mode.PACKED:
        return {"cu_seqlens_q": torch.arange(0, (call.batch + 1) * call.seq, call.seq, dtype=torch.int32)}
    if call.mode == Mode.SEGMENTED:
        return {"q_segment_ids": torch.zeros(call.batch, call.seq, dtype=torch.int32)}
    return {}


def _run_paged(call: WarmCall, package: str, variant: Variant) -> None:
    """Call the op for a prompt of `seq` tokens, then for one token; before each call a token is appended."""
    heads, kv_heads = call.heads
    paging = importlib.import_module(f"{package}.paging")
    op = load_op(call.variant, package)
    for queries in (call.seq, 1):
        shape = PagedShape(
            lengths=[call.seq] * call.batch,
            queries=queries,
            group=heads // kv_heads,
            kv_heads=kv_heads,
            head_dim=call.head_dim,
            page_size=call.page_size,
            dim_v=call.head_dim_v,
            values_in_keys=kv_heads == 1 and call.head_dim_v < call.head_dim,
        )
        drawn = draw_paged_call(variant, shape, call.dtype, "cpu", cache_dtype=call.cache)
        if call.layout is Layout.BSHD:
            drawn = replace(drawn, q=drawn.q.transpose(1, 2).contiguous().transpose(1, 2))
        # Keys and values have one scale: in latent attention values are inside keys.
        scales = dict.fromkeys(("k_scale", "v_scale"), _scale(call.scales, drawn.k)) if call.cache else {}
        slots = torch.zeros(call.batch, dtype=torch.int32)
        paging.append(*new_tokens(shape, call.dtype), drawn.k, drawn.v, slots, **scales)
        drawn.call(op, **scales)


def _scale(kind: Scales, cache: torch.Tensor) -> float | torch.Tensor:
    """Scales of a cache `[pages, page size, Hkv, D]`."""
    if kind is Scales.NUMBER:
        return 0.5
    return torch.ones(cache.shape[2:3] if kind is Scales.HEAD else cache.shape[:3])
