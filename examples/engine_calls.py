"""The attention functions that two small engines call, computed by an op of this package.

`FlashAttentionCalls` has the two functions of the package `flash_attn` that nano-vllm reads, `MinivllmCalls` the three
of MinivLLM's `layers/attention.py`. Names, arguments and shapes are those of the engines. Importing this module does
not replace the engines' functions: `examples/nano_vllm.py` and `examples/minivllm.py` show how to do that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from generated import paging


@dataclass(eq=False)
class FlashAttentionCalls:
    """`flash_attn_varlen_func` and `flash_attn_with_kvcache` by `op`, whose own tensors and scalars are `own`.

    The first layer of a step makes its plan. Each layer has its own cache, so a cache that this step has already used
    marks the beginning of a new step.
    """

    op: Any
    own: dict[str, Any] = field(default_factory=dict)
    _layers: set[int] = field(default_factory=set, repr=False)
    _of: tuple[Any, ...] = field(default=(), repr=False)
    _plan: Any = field(default=None, repr=False)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,  # noqa: ARG002 - the grid follows from the table
        softmax_scale: float,
        causal: bool,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Prompts: q `[T, Hq, D]`; k and v alike, or with `block_table` caches `[blocks, block size, Hkv, D]`."""
        _check_causal(causal)
        if block_table is None:
            call = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "q_offset": "end"}
            o: Tensor = self.op(q, k, v, scale=softmax_scale, **call, **self.own)
            return o
        pages = {"page_table": block_table, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        return self._paged(q, k, v, softmax_scale, kv_lengths=cu_seqlens_k.diff(), **pages)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        """Decoding: q `[B, 1, Hq, D]`, caches `[blocks, block size, Hkv, D]`, which hold the new token already."""
        _check_causal(causal)
        pages = {"page_table": block_table, "kv_lengths": cache_seqlens, "layout": "bshd"}
        return self._paged(q, k_cache, v_cache, softmax_scale, **pages)

    def _paged(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, **pages: Any) -> Tensor:
        of = (pages["page_table"], q.shape)
        if k_cache.data_ptr() in self._layers or not self._of or of[0] is not self._of[0] or of[1] != self._of[1]:
            self._layers, self._of = set(), of
            self._plan = self.op.plan(q, k_cache, **pages)
        self._layers.add(k_cache.data_ptr())
        o: Tensor = self.op(q, k_cache, v_cache, scale=scale, schedule=self._plan, **pages, **self.own)
        return o


def _check_causal(causal: bool) -> None:
    if not causal:
        raise ValueError("causal: expected True, as a decoder calls it, got False")


class MinivllmCalls:
    """`flash_attention_prefill`, `paged_attention_decode` and `store_kvcache` by `op`."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def flash_attention_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, *_sizes: int
    ) -> Tensor:
        """q `[T, Hq, D]`, k and v `[T, Hkv, D]`; heads and head_dim, the last arguments, are read from the shapes."""
        o: Tensor = self.op(q, k, v, scale=scale, cu_seqlens_q=cu_seqlens)
        return o

    def paged_attention_decode(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        *_sizes: int,
    ) -> Tensor:
        """query `[B, Hq, D]`, caches `[blocks, block size, Hkv, D]`; the tables are padded with -1."""
        pages = {"page_table": block_tables, "kv_lengths": context_lens}
        o: Tensor = self.op(query[:, :, None], k_cache, v_cache, scale=scale, **pages)
        return o[:, :, 0]

    def store_kvcache(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *_sizes: int
    ) -> None:
        """key and value `[T, Hkv, D]`; a slot of -1 is skipped."""
        paging.append(key, value, k_cache, v_cache, slot_mapping)


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence in float64: q `[Sq, Hq, D]` at the end of k and v `[Skv, Hkv, D]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    rows = torch.arange(len(q), device=q.device) + len(k) - len(q)
    future = torch.arange(len(k), device=q.device) > rows[:, None]
    return torch.einsum("hqk,khd->qhd", score.masked_fill(future, float("-inf")).softmax(-1), v)
