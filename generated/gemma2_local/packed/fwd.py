# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: portable/fwd.py.jinja
# hash: 1b7675a329c3ed3c
"""Forward of `gemma2_local`, packed sequences: `o = softmax(score) v`.

    keep        q_idx >= kv_idx and q_idx - kv_idx < 4096
    score       50.0 * tanh(0.02 * score)
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    o           [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator

One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LN2, add_dot, dot_rows, load_tile, store_tile, tanh, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_total",
        "num_heads",
        "group_size",
    ]
)
def gemma2_local_packed_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    block_seqs_ptr,
    q_offset,
    o_ptr,
    lse_ptr,
    stride_qh,
    stride_qs: tl.constexpr,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_oh,
    stride_os: tl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    HARDWARE_TANH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * 8
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + 1)
    q_start = tl.load(record + 2).to(tl.int64)
    kv_start = tl.load(record + 4).to(tl.int64)
    q_len, kv_len = tl.load(record + 3), tl.load(record + 5)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_heads
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = program % num_blocks
    h = (program // num_blocks).to(tl.int64)
    hkv = h // group_size
    start_m = block * BLOCK_M
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    rows = start_m + tl.arange(0, BLOCK_M)
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + q_start * stride_qs + h * stride_qh * UNIT
    k_base = k_ptr + kv_start * stride_ks + hkv * stride_kh * UNIT
    v_base = v_ptr + kv_start * stride_vs + hkv * stride_vh * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(-(-q_first + 4095), 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + 1, kv_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(-(-q_last + 4095), kv_begin), BLOCK_N) * BLOCK_N
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
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        logit = 72.13475204444816 * tanh(0.02 * scale * qk, HARDWARE_TANH)
        keep = (q_idx[:, None] >= kv_idx[None, :]) & (q_idx[:, None] - kv_idx[None, :] < 4096)
        keep = keep & (kv_idx < kv_len)[None, :]
        logit = tl.where(keep, logit, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for start_n in range(full_begin, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        logit = 72.13475204444816 * tanh(0.02 * scale * qk, HARDWARE_TANH)
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o_tile = [part / row_sum[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + q_start * stride_os + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + h * q_total + q_start
    tl.store(lse_base + rows, lse, mask=rows < q_len)
