# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting_pruned: {mask: "causal and kv_idx >= first_key[b, h, q_idx]", tensors: {first_key: {dims: [b, h,
#     q_idx], dtype: int32}}, decay: true}
# template: portable/decay.py.jinja
# hash: 43113bd78ef63672
"""Log-decay of `forgetting_pruned`, packed sequences: the cumulative sum of g, and its gradient.

    g, dg           [total_k, Hq]  natural log
    decay           [Hq, total_k]  fp32, cumulative sum of g times log2(e), from the first key of each sequence on
    drows           [Hq, total_q]  fp32, gradient of the decay through the queries that read it
    dcols           [Hq, total_k]  fp32, gradient of the decay through the keys that read it
    cu_seqlens_q/k  [n + 1]  int32, where the sequences begin

One program serves one query head of one sequence.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LOG2E, row_sum


@triton.jit(do_not_specialize=["kv_total", "num_heads"])
def forgetting_pruned_packed_decay_cumsum(
    g_ptr,
    cu_seqlens_k_ptr,
    decay_ptr,
    stride_gs,
    stride_gh,
    kv_total,
    num_heads,
    BLOCK: tl.constexpr,
):
    b = (tl.program_id(0) // num_heads).to(tl.int64)
    h = (tl.program_id(0) % num_heads).to(tl.int64)
    kv_start = tl.load(cu_seqlens_k_ptr + b).to(tl.int64)
    kv_len = (tl.load(cu_seqlens_k_ptr + b + 1) - kv_start).to(tl.int32)
    g_base = g_ptr + kv_start * stride_gs + h * stride_gh
    decay_base = decay_ptr + h * kv_total + kv_start
    length = kv_len
    before = 0.0
    for start in range(0, length, BLOCK):
        pos = start + tl.arange(0, BLOCK)
        inside = pos < length
        g = tl.load(g_base + pos.to(tl.int64) * stride_gs, mask=inside, other=0.0).to(tl.float32)
        tl.store(decay_base + pos, (before + tl.cumsum(g, 0)) * LOG2E, mask=inside)
        before += tl.sum(g, 0)


@triton.jit(do_not_specialize=["q_total", "kv_total", "num_heads", "q_offset"])
def forgetting_pruned_packed_decay_grad(
    drows_ptr,
    dcols_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_offset,
    dg_ptr,
    stride_dgs,
    stride_dgh,
    q_total,
    kv_total,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = (tl.program_id(0) // num_heads).to(tl.int64)
    h = (tl.program_id(0) % num_heads).to(tl.int64)
    q_start = tl.load(cu_seqlens_q_ptr + b).to(tl.int64)
    q_len = (tl.load(cu_seqlens_q_ptr + b + 1) - q_start).to(tl.int32)
    kv_start = tl.load(cu_seqlens_k_ptr + b).to(tl.int64)
    kv_len = (tl.load(cu_seqlens_k_ptr + b + 1) - kv_start).to(tl.int32)
    drows_base = drows_ptr + h * q_total + q_start
    dcols_base = dcols_ptr + h * kv_total + kv_start
    dg_base = dg_ptr + kv_start * stride_dgs + h * stride_dgh
    length = kv_len
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    # Queries before the first position read the decay of the first position, queries behind the last that of the last.
    first_row = tl.minimum(tl.maximum(-q_shift, 0), q_len)
    end_row = tl.minimum(tl.maximum(length - q_shift, 0), q_len)
    before = row_sum(drows_base, 0, first_row, BLOCK)
    # g[i] is a term of each cumulative sum from i on, so its gradient is the sum of theirs: a scan from the end.
    after = row_sum(drows_base, end_row, q_len, BLOCK)
    num_blocks = tl.cdiv(length, BLOCK)
    for step in range(num_blocks):
        pos = (num_blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        rows = pos - q_shift
        in_rows = (rows >= first_row) & (rows < end_row)
        drows = tl.load(drows_base + rows, mask=in_rows, other=0.0) + tl.where(pos == 0, before, 0.0)
        dcols = tl.load(dcols_base + pos, mask=pos < kv_len, other=0.0)
        ddecay = drows + dcols
        dg = after + tl.cumsum(ddecay, 0, reverse=True)
        tl.store(dg_base + pos.to(tl.int64) * stride_dgs, dg.to(dg_ptr.dtype.element_ty), mask=pos < length)
        after += tl.sum(ddecay, 0)
