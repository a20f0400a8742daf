"""Steps of continuous batching in transformers: the values that layers share, and the op call for each kind of step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import paging

_PAGES = ("page_table", "page_starts", "kv_lengths")
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "q_offset")
GIVEN = ("q", "k", "v", "scale", "schedule", "splits", *_PAGES, *_SEQUENCES)
"""Arguments of an op that the calls of `Tokens` give."""


@dataclass(eq=False)
class Step:
    """What the layers of one forward pass share. It lives until the next pass on the same cache begins."""

    cu_seqlens_q: Tensor
    capturing: bool
    layers: set[int] = field(default_factory=set)
    made: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Any], *read: Any) -> Any:
        """The result of `make`, computed once per key. Tensors in `read` are kept alive, so that ids in keys stay."""
        if key not in self.made:
            self.made[key] = make(), read
        return self.made[key][0]


_STEPS: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()


def step_of(cache: Any, layer: int, cu_seqlens_q: Tensor) -> Step:
    """The step that a layer's call belongs to. A second call of the same layer begins a new step, even with the same
    tensors: a CUDA graph is captured in a second pass, and must contain the kernels that make the plan."""
    capturing = cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing()
    step = _STEPS.get(cache)
    if step is None or layer in step.layers or step.cu_seqlens_q is not cu_seqlens_q or step.capturing != capturing:
        step = _STEPS[cache] = Step(cu_seqlens_q, capturing)
    step.layers.add(layer)
    return step


@lru_cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments of a function."""
    return frozenset(inspect.signature(function).parameters)


@dataclass(frozen=True, eq=False)
class Own:
    """The op of a layer and its own arguments. `planned` selects the arguments that a plan or schedule reads."""

    op: Any
    arguments: dict[str, Any]
    splits: int | str | None

    def planned(self, make: Callable[..., Any]) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name in parameters(make)}

    def key(self, make: Callable[..., Any], q: Tensor, k: Tensor) -> Hashable:
        """The key under which equal layers share plans and schedules."""
        values = ((name, id(x) if isinstance(x, Tensor) else x) for name, x in self.planned(make).items())
        return self.op, q.shape, k.shape, *values


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """One layer's call: q `[T, Hq, D]`, k and v `[T, Hkv, D]`, caches `[slots, Hkv, D]`. Each method is a kind of step
    and returns o `[T, Hq, D]`."""

    step: Step
    own: Own
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    most_queries: int
    group: int

    def decode(self, table: Tensor, block_size: int) -> Tensor:
        """One token of each request, with a block table. Rows that pad a CUDA graph have length 0 and touch no key."""
        lengths = self._lengths()
        slots = self.step.once(("slots", self.group), lambda: paging.slots(table, lengths - 1, block_size))
        shape = (-1, block_size, *self.k_cache.shape[1:])
        k_cache, v_cache = self.k_cache.view(shape), self.v_cache.view(shape)
        paging.append(self.k, self.v, k_cache, v_cache, slots)
        o = self._on_pages(self.q[:, :, None], k_cache, v_cache, page_table=table, kv_lengths=lengths)
        return o[:, :, 0]

    def mixed(self, read: Tensor, write: Tensor) -> Tensor:
        """Any number of tokens of each request: once the new keys are written, keys are read as pages of one token."""
        table = self.step.once(("table", self.group), lambda: read.int())
        return self._by_slot(table, write)

    def next_in_ring(self, read: Tensor, write: Tensor, sentinel: int) -> Tensor:
        """One token of each request, in the ring buffer of a sliding layer. The new key overwrites a key that its query
        does not see, so keys are read in place. `read` has the sentinel in the place of the new token's slot."""

        def table() -> Tensor:
            return read.masked_scatter(read == sentinel, write).int()

        return self._by_slot(self.step.once(("table", self.group), table), write)

    def first(self, write: Tensor) -> Tensor:
        """Prompts without cached tokens."""
        paging.append(self.k, self.v, self.k_cache[:, None], self.v_cache[:, None], write)
        return self.packed(self.k, self.v)

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        """The keys of all requests concatenated. The queries of a request belong to its last keys."""
        op = self.own.op
        call = {
            "cu_seqlens_q": self._closed(self.cu_seqlens_q, self.q),
            "cu_seqlens_k": self._closed(self.cu_seqlens_k, k),
            "q_offset": "end",
        }
        schedule = self.step.once(
            ("schedule", self.own.key(op.schedule, self.q, k)),
            lambda: op.schedule(self.q, k, v, **call, backward=False, **self.own.planned(op.schedule)),
            self.own.arguments,
        )
        o: Tensor = op(self.q, k, v, **call, scale=self.scale, schedule=schedule, **self.own.arguments)
        return o

    def _closed(self, begins: Tensor, tokens: Tensor) -> Tensor:
        """`begins` plus a last sequence of the tokens that pad a captured step. This sequence may be empty."""
        total = tokens.shape[0]
        found: Tensor = self.step.once(
            ("closed", id(begins), total), lambda: nn.functional.pad(begins, (0, 1), value=total), begins
        )
        return found

    def _by_slot(self, table: Tensor, write: Tensor) -> Tensor:
        k_cache, v_cache = self.k_cache[:, None], self.v_cache[:, None]
        paging.append(self.k, self.v, k_cache, v_cache, write)
        return self._on_pages(
            self.q,
            k_cache,
            v_cache,
            page_table=table,
            page_starts=self.cu_seqlens_k,
            kv_lengths=self._lengths(),
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=max(self.most_queries, 1),
        )

    def _on_pages(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
        op, splits = self.own.op, self.own.splits
        plan = self.step.once(
            ("plan", self.own.key(op.plan, q, k_cache), call["page_table"].shape),
            lambda: op.plan(q, k_cache, **call, splits=splits, **self.own.planned(op.plan)),
            self.own.arguments,
        )
        own = self.own.arguments
        o: Tensor = op(q, k_cache, v_cache, **call, scale=self.scale, splits=splits, schedule=plan, **own)
        return o

    def _lengths(self) -> Tensor:
        begins = self.cu_seqlens_k
        lengths: Tensor = self.step.once(("lengths", id(begins)), lambda: begins.diff().int(), begins)
        return lengths
