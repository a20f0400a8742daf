# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: ops/torch_reference.py.jinja
# hash: 80f3159c781efb41
"""`padding` as plain mathematics.

What the kernels are tested against, and what the op computes on the CPU.
"""

import math

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    length: Tensor,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    q_offset: int | str | Tensor = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op of the same name, differentiable by autograd, with the whole score matrix in memory.

    Computes in float32, or in float64 where the inputs are float64, and returns o in the dtype of q.
    """
    del q_offset  # All references are called alike; no position matters to this one.
    dtype = torch.promote_types(q.dtype, torch.float32)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group_size = q.shape[1] // k.shape[1]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    kv_idx = torch.arange(k.shape[2], device=q.device)
    b = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)

    # Autocast would round the products that the kernels keep in float32.
    with torch.autocast(q.device.type, enabled=False):
        keys = k.to(dtype).repeat_interleave(group_size, 1)
        values = v.to(dtype).repeat_interleave(group_size, 1)
        score = torch.einsum("bhqd,bhkd->bhqk", q.to(dtype), keys) * scale
        keep = kv_idx < length[b]
        score = torch.where(keep, score, float("-inf"))
        lse = torch.logsumexp(score, -1)
        # A row without any key has lse = -inf: its probabilities are 0, not NaN.
        finite = torch.where(lse == float("-inf"), 0.0, lse)
        o = torch.einsum("bhqk,bhkd->bhqd", torch.exp(score - finite[..., None]), values).to(q.dtype)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o
