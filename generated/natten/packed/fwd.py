# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: portable/fwd.py.jinja
# hash: e82b97b72d6abbff
"""Forward of `natten`, packed sequences: `o = softmax(score) v`.

    keep        abs(min(max(q_idx % 128, 6), 121) - kv_idx % 128) <= 6 and abs(min(max(q_idx // 128, 6), 121) - kv_idx
                // 128) <= 6
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    spans       [H, entries, 4]  int32, first, partial end, full begin and end of a block's list
    block_list  [entries]  int16 or int32, lists of the blocks to visit
    o           [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator

One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LN2, LOG2E, add_dot, dot_rows, floor_div, floor_mod, load_tile, store_tile, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_total",
        "num_heads",
        "group_size",
    ]
)
def natten_packed_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    block_seqs_ptr,
    spans_ptr,
    block_list_ptr,
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
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    # The list of this block: partial blocks from the left, full ones from the right.
    span = spans_ptr + (first_entry + start_m // BLOCK_M) * 4
    list_begin, partial_end = tl.load(span), tl.load(span + 1)
    full_begin, list_end = tl.load(span + 2), tl.load(span + 3)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    for list_entry in range(list_begin, partial_end):
        start_n = tl.load(block_list_ptr + list_entry).to(tl.int32) * BLOCK_N
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        keep = (
            tl.abs(tl.minimum(tl.maximum(floor_mod(q_idx, 128), 6), 121)[:, None] - floor_mod(kv_idx, 128)[None, :])
            <= 6
        ) & (
            tl.abs(tl.minimum(tl.maximum(floor_div(q_idx, 128), 6), 121)[:, None] - floor_div(kv_idx, 128)[None, :])
            <= 6
        )
        keep = keep & (kv_idx < kv_len)[None, :]
        qk = tl.where(keep, qk, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(qk * qk_scale - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for list_entry in range(full_begin, list_end):
        start_n = tl.load(block_list_ptr + list_entry).to(tl.int32) * BLOCK_N
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
    o_base = o_ptr + q_start * stride_os + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + h * q_total + q_start
    tl.store(lse_base + rows, lse, mask=rows < q_len)
