# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/torch_reference.py.jinja
# hash: 83db98cfe469d605
"""`gpt_oss` as plain mathematics.

The kernels are tested against this reference, and the op computes it on the CPU.
"""

import math

import torch
from torch import Tensor

from .._runtime.torch.sequences import packed_sequences


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    q_offset: int | str | Tensor = 0,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    padding_id: int = -1,
    first_batch: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op of the same name, differentiable by autograd, with the whole score matrix in memory.

    Computes in float32, or in float64 where the inputs are float64, and returns o in the dtype of q. `first_batch` is
    the number of the first batch row.
    """
    # All references have the same parameters; this one does not need these.
    del first_batch
    dtype = torch.promote_types(q.dtype, torch.float32)
    sink = sink.to(dtype)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group_size = q.shape[1] // k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    row_offset = k.shape[2] - q.shape[2] if isinstance(q_offset, str) else q_offset
    row_offset = row_offset.view(-1, 1, 1, 1) if isinstance(row_offset, Tensor) else row_offset
    q_row = torch.arange(q.shape[2], device=q.device)[:, None] + row_offset
    q_idx = q_row if q_positions is None else q_positions[:, None, :, None].long()
    kv_row = torch.arange(k.shape[2], device=q.device)
    kv_positions = q_positions if kv_positions is None else kv_positions
    kv_idx = kv_row if kv_positions is None else kv_positions[:, None, None, :].long()

    # Autocast would round the products that the kernels keep in float32.
    with torch.autocast(q.device.type, enabled=False):
        keys = k.to(dtype).repeat_interleave(group_size, 1)
        values = v.to(dtype).repeat_interleave(group_size, 1)
        score = torch.einsum("bhqd,bhkd->bhqk", q.to(dtype), keys) * scale
        keep = (q_idx >= kv_idx) & (q_idx - kv_idx < 128)
        if q_segment_ids is not None:
            q_ids = q_segment_ids[:, None, :, None]
            kv_ids = (q_segment_ids if kv_segment_ids is None else kv_segment_ids)[:, None, None, :]
            keep = keep & (q_ids == kv_ids) & (q_ids != padding_id)
        score = torch.where(keep, score, float("-inf"))
        keyless = (score == float("-inf")).all(-1)
        # `finite` keeps the exponentials in range and has no gradient. Probabilities are not exp(score - lse): if
        # scores are far from 0, lse is rounded so far that these do not sum to 1.
        finite = torch.logsumexp(score.detach(), -1)
        sink_rows = sink[:, None].expand_as(finite)
        keyless = keyless & (sink_rows == float("-inf"))
        finite = torch.logaddexp(finite, sink_rows.detach())
        # A row without any key, whose sink is -inf, has lse = -inf, and probabilities and gradients of 0, not NaN.
        finite = torch.where(keyless, 0.0, finite)
        weights = torch.exp(score - finite[..., None])
        total = weights.sum(-1) + torch.exp(sink_rows - finite)
        total = torch.where(keyless, 1.0, total)
        lse = torch.where(keyless, float("-inf"), finite + torch.log(total))
        probs = weights / total[..., None]
        o = torch.einsum("bhqk,bhkd->bhqd", probs, values).to(q.dtype)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def packed_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor,
    scale: float | None = None,
    return_lse: bool = False,
    q_offset: int | str | Tensor = 0,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The packed call: `reference` of each sequence alone. q, k, v, o are `[total, H, D]`, lse is `[Hq, total_q]`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    sink = sink.to(dtype)
    o_parts = [q.new_empty((0, q.shape[1], v.shape[2]))]
    lse_parts = [q.new_empty((q.shape[1], 0), dtype=torch.promote_types(q.dtype, torch.float32))]
    for sequence in packed_sequences(cu_seqlens_q, cu_seqlens_k, q_offset):
        o, lse = reference(
            q[None, sequence.q_rows],
            k[None, sequence.kv_rows],
            v[None, sequence.kv_rows],
            sink=sink,
            scale=scale,
            layout="bshd",
            return_lse=True,
            q_offset=sequence.q_offset,
            first_batch=sequence.number,
        )
        o_parts.append(o[0])
        lse_parts.append(lse[0])
    o, lse = torch.cat(o_parts), torch.cat(lse_parts, 1)
    return (o, lse) if return_lse else o
