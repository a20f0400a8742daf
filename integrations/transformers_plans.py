"""The call of an op for a call of attention from transformers, and the check whether a later call can reuse it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .transformers_masks import AttentionMask
from .transformers_sharing import autocast_dtype
from .transformers_tokens import packed_row

VECTORS = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")
"""Keywords of a call that say which tokens are of one sequence."""

CHOSEN_KEYS = ("indices", "block_indices")
"""Keywords of a call that choose the keys of each query, as the indexers of sparse attention do. No op reads them."""

MOST_KEPT = 8
"""How many plans a mask keeps. Its layers need one plan, or two if caches or head dims differ between layers."""


class Plan:
    """The call of an op that computes a call of attention.

    Attributes:
        op: an op of the package.
        arguments: all of its arguments except those that differ between layers.
        dtype: the dtype that q, k and v are cast to; None if they have one dtype.
        sink, bias, dropout: which arguments differ between layers: sinks, the bias tensor with this name, and a seed.
    """

    __slots__ = ("arguments", "bias", "dropout", "dtype", "has_own", "is_packed", "op", "sink")

    def __init__(
        self,
        op: Callable[..., Any],
        arguments: Mapping[str, Any],
        dtype: torch.dtype | None = None,
        *,
        sink: bool = False,
        bias: str | None = None,
        dropout: bool = False,
    ) -> None:
        self.op, self.arguments, self.dtype = op, arguments, dtype
        self.sink, self.bias, self.dropout = sink, bias, dropout
        self.has_own = sink or dropout or bias is not None
        self.is_packed = "cu_seqlens_q" in arguments

    def run(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, given: Mapping[str, Any]) -> Tensor:
        """o `[B, Sq, Hq, Dv]` of q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`."""
        arguments = self.arguments
        if self.has_own:
            arguments = {**arguments, **self._of_layer(query, given)}
        if self.dtype is not None:
            query, key, value = query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)
        if not self.is_packed:
            o: Tensor = self.op(query, key, value, scale=scaling, **arguments)
            return o.transpose(1, 2)
        batch, _, length, _ = query.shape
        o = self.op(packed_row(query), packed_row(key), packed_row(value), scale=scaling, **arguments)
        return o.view(batch, length, o.shape[1], o.shape[2])

    def _of_layer(self, query: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.sink:
            own["sink"] = given["s_aux"]
        if self.bias is not None:
            bias = given["position_bias"]
            own[self.bias] = bias.expand(query.shape[0], query.shape[1], *bias.shape[2:])
        if self.dropout:
            own["seed"] = seed()
        return own


def seed() -> Tensor:
    """A seed from torch's CPU generator: checkpointing and manual_seed repeat it, and ops cannot read it from a GPU."""
    return torch.randint(2**31, ())


class KeptPlan:
    """A plan, and the properties of its call that another call must share to reuse it.

    `serves` compares only the properties that the plan depends on, cheap ones first. Between two layers the CPU does so
    much other work that a few reads from tensors take longer than all the Python code here.
    """

    __slots__ = (
        "autocast",
        "backward",
        "cap",
        "cu_seqlens_k",
        "cu_seqlens_q",
        "device",
        "dropout",
        "dtypes",
        "has_bias",
        "has_sink",
        "k_shape",
        "kind",
        "most_keys",
        "most_queries",
        "plan",
        "position_ids",
        "q_shape",
        "reads_values",
        "sides",
        "v_shape",
        "versions",
    )

    def __init__(
        self,
        plan: Plan,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask | None,
        dropout: float,
        given: Mapping[str, Any],
    ) -> None:
        self.plan, self.dropout, self.cap = plan, dropout, given.get("softcap")
        self.has_sink = given.get("s_aux") is not None
        self.has_bias = given.get("position_bias") is not None
        self.q_shape, self.k_shape, self.v_shape = query.shape, key.shape, value.shape
        self.dtypes = query.dtype, key.dtype, value.dtype
        self.most_queries, self.most_keys = given.get("max_length_q"), given.get("max_length_k")
        self.sides = None if mask is not None else sides_of(module, given)
        # The vectors are kept alive, so that an equal id means the same tensor.
        self.cu_seqlens_q, self.cu_seqlens_k, self.position_ids = (given.get(name) for name in VECTORS)
        read = [self.cu_seqlens_q, self.cu_seqlens_k, self.position_ids, *(() if mask is None else mask.tensors())]
        self.versions = tuple((x, x._version) for x in read if isinstance(x, Tensor) and not x.is_inference())
        # A plan without tensors has no schedule either: it consists of numbers that follow from the lengths alone.
        self.reads_values = plan.dtype is not None or not all(
            isinstance(x, int | float | str) for x in plan.arguments.values()
        )
        self.kind, self.device = query.device.type, query.get_device()
        self.autocast = autocast_dtype(self.kind)
        self.backward = torch.is_grad_enabled() or bool(module.training)

    def serves(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, given: Mapping[str, Any]
    ) -> bool:
        """Whether the plan serves a call, which must have the mask, or the None, that the plan was made with."""
        get = given.get
        if not (
            get("position_ids") is self.position_ids
            and get("cu_seq_lens_q") is self.cu_seqlens_q
            and get("cu_seq_lens_k") is self.cu_seqlens_k
            and get("max_length_q") is self.most_queries
            and get("max_length_k") is self.most_keys
            and (get("s_aux") is not None) is self.has_sink
            and (get("position_bias") is not None) is self.has_bias
            and get("softcap") == self.cap
            and dropout == self.dropout
            and not get("output_attentions")
            and get("indices") is None
            and get("block_indices") is None
            and query.shape == self.q_shape
            and key.shape == self.k_shape
            and (query.dtype, key.dtype, value.dtype) == self.dtypes
        ):
            return False
        for x, version in self.versions:
            if x._version != version:
                return False
        if self.sides is not None and sides_of(module, given) != self.sides:
            return False
        return not self.reads_values or (
            value.shape == self.v_shape
            and query.get_device() == self.device
            and (torch.is_grad_enabled() or bool(module.training)) is self.backward
            and autocast_dtype(self.kind) is self.autocast
        )


def sides_of(module: Any, given: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether a call without a mask is causal, and its window."""
    is_causal = given.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = given.get("sliding_window")
    return bool(is_causal), None if window is None else int(window)
