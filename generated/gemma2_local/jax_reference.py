# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/jax_reference.py.jinja
# hash: f3c423af14c4ed48
"""`gemma2_local` as plain mathematics in jax.numpy.

The kernels are tested against this reference, and the op computes it on the CPU.
"""

import jax
import jax.numpy as jnp
from jax import Array

from .._runtime.jax.gradients import sequence_of_rows


def reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    q_offset: int | str | Array = 0,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    padding_id: int = -1,
) -> Array | tuple[Array, Array]:
    """The op of the same name, differentiable by JAX, with the whole score matrix in memory.

    Computes in float32, or in float64 where the inputs are float64, and returns o in the dtype of q.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    if layout == "bshd":
        q, k, v = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    group_size = q.shape[1] // k.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    row_offset = k.shape[2] - q.shape[2] if isinstance(q_offset, str) else q_offset
    row_offset = jnp.asarray(row_offset).reshape(-1, 1, 1, 1)
    q_row = jnp.arange(q.shape[2]).reshape(1, 1, -1, 1) + row_offset
    q_idx = q_row if q_positions is None else q_positions[:, None, :, None]
    kv_row = jnp.arange(k.shape[2]).reshape(1, 1, 1, -1)
    kv_positions = q_positions if kv_positions is None else kv_positions
    kv_idx = kv_row if kv_positions is None else kv_positions[:, None, None, :]

    keys = jnp.repeat(k.astype(dtype), group_size, 1)
    values = jnp.repeat(v.astype(dtype), group_size, 1)
    score = jnp.einsum("bhqd,bhkd->bhqk", q.astype(dtype), keys, precision="highest") * scale
    keep = (q_idx >= kv_idx) & (q_idx - kv_idx < 4096)
    if q_segment_ids is not None:
        q_ids = q_segment_ids[:, None, :, None]
        kv_ids = (q_segment_ids if kv_segment_ids is None else kv_segment_ids)[:, None, None, :]
        keep = keep & (q_ids == kv_ids) & (q_ids != padding_id)
    # The score of a pair that is not kept, and its derivative, may be NaN: so it is computed from a product of zero.
    score = jnp.where(keep, score, 0.0)
    score = 50.0 * jnp.tanh(0.02 * score)
    # A score of -inf means that the row does not see the key, and the row may see no other key.
    keep = keep & (score != -jnp.inf)

    score = jnp.where(keep, score, -jnp.inf)
    keyless = (score == -jnp.inf).all(-1)
    # `finite` keeps the exponentials in range and has no gradient. Probabilities are not exp(score - lse): if
    # scores are far from 0, lse is rounded so far that these do not sum to 1.
    finite = jax.nn.logsumexp(score, -1)
    # A row without any key has lse = -inf, and probabilities and gradients of 0, not NaN.
    finite = jax.lax.stop_gradient(jnp.where(keyless, 0.0, finite))
    weights = jnp.exp(score - finite[..., None])
    total = weights.sum(-1)
    total = jnp.where(keyless, 1.0, total)
    lse = jnp.where(keyless, -jnp.inf, finite + jnp.log(total))
    probs = weights / total[..., None]
    o = jnp.einsum("bhqk,bhkd->bhqd", probs, values, precision="highest").astype(q.dtype)
    if layout == "bshd":
        o = o.transpose(0, 2, 1, 3)
    return (o, lse) if return_lse else o


def packed_reference(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    q_offset: int | str | Array = 0,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
) -> Array | tuple[Array, Array]:
    """The packed call: queries attend within their sequence. q, k, v, o are `[total, H, D]`, lse is `[Hq, total_q]`."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    group_size = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    q_seq = sequence_of_rows(cu_seqlens_q, q.shape[0]).reshape(1, -1, 1)
    kv_seq = sequence_of_rows(cu_seqlens_k, k.shape[0]).reshape(1, 1, -1)
    row_offset = jnp.diff(cu_seqlens_k - cu_seqlens_q) if isinstance(q_offset, str) else q_offset
    q_idx = (
        jnp.arange(q.shape[0]).reshape(1, -1, 1)
        - cu_seqlens_q[q_seq]
        + (row_offset if isinstance(row_offset, int) else row_offset[q_seq])
    )
    kv_idx = jnp.arange(k.shape[0]).reshape(1, 1, -1) - cu_seqlens_k[kv_seq]

    keys = jnp.repeat(k.astype(dtype), group_size, 1)
    values = jnp.repeat(v.astype(dtype), group_size, 1)
    score = jnp.einsum("qhd,khd->hqk", q.astype(dtype), keys, precision="highest") * scale
    keep = (q_idx >= kv_idx) & (q_idx - kv_idx < 4096)
    keep = keep & (q_seq == kv_seq)
    # The score of a pair that is not kept, and its derivative, may be NaN: so it is computed from a product of zero.
    score = jnp.where(keep, score, 0.0)
    score = 50.0 * jnp.tanh(0.02 * score)
    # A score of -inf means that the row does not see the key, and the row may see no other key.
    keep = keep & (score != -jnp.inf)

    score = jnp.where(keep, score, -jnp.inf)
    keyless = (score == -jnp.inf).all(-1)
    # `finite` keeps the exponentials in range and has no gradient. Probabilities are not exp(score - lse): if
    # scores are far from 0, lse is rounded so far that these do not sum to 1.
    finite = jax.nn.logsumexp(score, -1)
    # A row without any key has lse = -inf, and probabilities and gradients of 0, not NaN.
    finite = jax.lax.stop_gradient(jnp.where(keyless, 0.0, finite))
    weights = jnp.exp(score - finite[..., None])
    total = weights.sum(-1)
    total = jnp.where(keyless, 1.0, total)
    lse = jnp.where(keyless, -jnp.inf, finite + jnp.log(total))
    probs = weights / total[..., None]
    o = jnp.einsum("hqk,khd->qhd", probs, values, precision="highest").astype(q.dtype)
    return (o, lse) if return_lse else o
