# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting_pruned: {mask: "causal and kv_idx >= first_key[b, h, q_idx]", tensors: {first_key: {dims: [b, h,
#     q_idx], dtype: int32}}, decay: true}
# template: portable/decay.py.jinja
# hash: 4095b824bfcddb9f
"""Log-decay of `forgetting_pruned`: the cumulative sum of g, and its gradient.

    g, dg  [B, P, Hq]  natural log; P positions
    decay  [B, Hq, P]  fp32, cumulative sum of g times log2(e)
    drows  [B, Hq, Sq]  fp32, gradient of the decay through the queries that read it
    dcols  [B, Hq, Skv]  fp32, gradient of the decay through the keys that read it

One program serves one query head of one batch row.
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LOG2E, row_sum


@triton.jit(do_not_specialize=["length", "num_heads"])
def forgetting_pruned_decay_cumsum(
    g_ptr,
    decay_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    length,
    num_heads,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    g_base = g_ptr + head // num_heads * stride_gb + head % num_heads * stride_gh
    decay_base = decay_ptr + head * length
    before = 0.0
    for start in range(0, length, BLOCK):
        pos = start + tl.arange(0, BLOCK)
        inside = pos < length
        g = tl.load(g_base + pos.to(tl.int64) * stride_gs, mask=inside, other=0.0).to(tl.float32)
        tl.store(decay_base + pos, (before + tl.cumsum(g, 0)) * LOG2E, mask=inside)
        before += tl.sum(g, 0)


@triton.jit(do_not_specialize=["length", "q_len", "kv_len", "num_heads", "q_offset"])
def forgetting_pruned_decay_grad(
    drows_ptr,
    dcols_ptr,
    q_offset,
    dg_ptr,
    stride_dgb,
    stride_dgs,
    stride_dgh,
    length,
    q_len,
    kv_len,
    num_heads,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    b = head // num_heads
    drows_base = drows_ptr + head * q_len
    dcols_base = dcols_ptr + head * kv_len
    dg_base = dg_ptr + b * stride_dgb + head % num_heads * stride_dgh
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
