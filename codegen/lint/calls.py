"""Calls an op, forward and backward, with arguments of the right shapes; their values do not matter."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from codegen.analysis.call_modes import Mode, packed_dims
from codegen.ir.expr import TensorSpec
from codegen.lint.jobs import FP8, Job
from codegen.spec.model import Pass, Variant

BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 500
"""Sizes of the call: two query heads share a key head, and the last block is cut, which needs the most resources."""

FREE_SIZE = 16
"""The size of a dim with a free name."""


def run_call(variant: Variant, job: Job, package: str) -> None:
    """Call the op of `package` as `job` says; only forward if the job has no other pass.

    Passes that `job` names run with its configs, the others with the chip's defaults.
    """
    dtype = getattr(torch, job.dtype)
    packed, scaled = job.mode is Mode.PACKED, job.dtype == FP8
    length = LENGTH if job.length is None else job.length + LENGTH
    value_dim = job.head_dim if job.value_dim is None else job.value_dim
    q, k, v = (
        torch.zeros(
            (BATCH * length, heads, dim) if packed else (BATCH, heads, length, dim),
            dtype=dtype,
            requires_grad=not scaled,
        )
        for heads, dim in ((HEADS, job.head_dim), (KV_HEADS, job.head_dim), (KV_HEADS, value_dim))
    )
    own = _own_arguments(variant, job.mode, length)
    if scaled:
        own = {name: x.detach() if isinstance(x, Tensor) else x for name, x in own.items()}
        own |= dict.fromkeys(("q_scale", "k_scale", "v_scale"), 1.0)
    op = getattr(importlib.import_module(f"{package}.torch"), variant.name)
    config = {p.value: asdict(tile) for p, tile in job.configs} if job.length is None else {}
    o, lse = op(
        q, k, v, **own, **_mode_arguments(job.mode, length), config=config, family=job.family or None, return_lse=True
    )
    if any(p is not Pass.FWD for p, _ in job.configs):
        leaves = [x for x in (q, k, v, *own.values()) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad((o, lse), leaves, (torch.zeros_like(o), torch.zeros_like(lse)))


def _own_arguments(variant: Variant, mode: Mode, length: int) -> dict[str, Any]:
    """The variant's tensors, requiring grad where they can, and its scalars."""
    arguments: dict[str, Any] = {name: _tensor(spec, mode, length) for name, spec in variant.tensors.items()}
    arguments |= {name: spec.typical(length) for name, spec in variant.scalars.items()}
    if variant.sink:
        arguments["sink"] = torch.zeros(HEADS, requires_grad=True)
    if variant.decay:
        tokens = (BATCH * length,) if mode is Mode.PACKED else (BATCH, length)
        arguments["g"] = torch.zeros((*tokens, HEADS), requires_grad=True)
    if variant.dropout:
        arguments |= {"dropout_p": 0.1, "seed": 7}
    return arguments


def _tensor(spec: TensorSpec, mode: Mode, length: int) -> Tensor:
    packed = mode is Mode.PACKED
    sizes = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS}
    sizes |= dict.fromkeys(("q_idx", "kv_idx"), BATCH * length if packed else length)
    dims = packed_dims(spec.dims) if packed else spec.dims
    shape = [dim if isinstance(dim, int) else sizes.get(dim, FREE_SIZE) for dim in dims]
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype), requires_grad=spec.grad)


def _mode_arguments(mode: Mode, length: int) -> dict[str, Any]:
    """The arguments that select the call mode."""
    if mode is Mode.PACKED:
        return {"cu_seqlens_q": torch.arange(0, (BATCH + 1) * length, length, dtype=torch.int32)}
    if mode is Mode.SEGMENTED:
        rows = torch.arange(length, dtype=torch.int32).expand(BATCH, length)
        return {"q_segment_ids": rows // 100, "q_positions": rows % 100}
    return {}
