# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: portable/fwd.py.jinja
# hash: 0dc7f8361ac4bf8e
"""Forward of `window`: `o = softmax(score) v`.

    keep  q_idx >= kv_idx and q_idx - kv_idx < size
    q     [B, Hq, Sq, D]
    k     [B, Hkv, Skv, D]
    v     [B, Hkv, Skv, Dv]
    o     [B, Hq, Sq, Dv]
    lse   [B, Hq, Sq]  fp32, log of the softmax denominator

One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LN2, LOG2E, add_dot, dot_rows, load_tile, store_tile, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "size",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
    ]
)
def window_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_offset,
    size,
    o_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qs: tl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vb,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    size = tl.load(size) if SCALARS_LOADED else size
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    hkv = h // group_size
    start_m = block * BLOCK_M
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    rows = start_m + tl.arange(0, BLOCK_M)
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(q_first - size + 1, 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + 1, kv_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(q_last - size + 1, kv_begin), BLOCK_N) * BLOCK_N
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(kv_end, kv_begin), BLOCK_N) * BLOCK_N)
    full_end = tl.minimum(q_first + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
    gap = full_end - full_begin
    for step in range(kv_begin, kv_end - gap, BLOCK_N):
        start_n = tl.where(step < full_begin, step, step + gap)
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        keep = (q_idx[:, None] >= kv_idx[None, :]) & (q_idx[:, None] - kv_idx[None, :] < size)
        if RAGGED:
            keep = keep & (kv_idx < kv_len)[None, :]
        qk = tl.where(keep, qk, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(qk * qk_scale - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for start_n in range(full_begin, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        p = tl.exp2(qk * qk_scale - max_new[:, None])
        alpha = tl.exp2(row_max - max_new)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o_tile = [part / row_sum[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + b * stride_ob + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + (b * num_heads + h) * q_len
    tl.store(lse_base + rows, lse, mask=rows < q_len)
