# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: portable/bwd_dq.py.jinja
# hash: dc07d558103660a3
"""Gradient of `document`, with segment ids with respect to q.

    keep            q_idx >= kv_idx and doc[b, q_row] == doc[b, cols] and q_segment_ids[b, rows] == kv_segment_ids[b,
                    cols] and kv_segment_ids[b, cols] != padding_id
    o               [B, Hq, Sq, Dv]
    dlse            [B, Hq, Sq]  fp32, gradient of lse
    q               [B, Hq, Sq, D]
    k               [B, Hkv, Skv, D]
    v               [B, Hkv, Skv, Dv]
    do              [B, Hq, Sq, Dv]
    lse             [B, Hq, Sq]  fp32, log of the softmax denominator
    doc             [b, kv_idx]  int32
    q_segment_ids   [b, q_row]  int32
    kv_segment_ids  [b, k_row]  int32
    q_positions     [B, Sq]  int32, or None: by row
    kv_positions    [B, Skv]  int32, or None: by row
    ranges          [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks
    delta           [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dq              [B, Hq, Sq, D]

One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse;
`ds = p * (dp - delta)` is the gradient of a score, `delta = sum(o * do) - dlse` what it takes from a row. It is stored
for the kernel of dk and dv.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LOG2E, add_dot, clamp_index, dot_rows, load_tile, row_products, store_tile, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "doc_size_1",
        "q_segment_ids_size_1",
        "kv_segment_ids_size_1",
        "stride_ranges_b",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
        "padding_id",
    ]
)
def document_segmented_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    doc_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    delta_ptr,
    dq_ptr,
    stride_qb,
    stride_qh,
    stride_qs: tl.constexpr,
    stride_kb,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vb,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dqb,
    stride_dqh,
    stride_dqs: tl.constexpr,
    stride_doc_0,
    stride_doc_1,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    doc_size_1,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    padding_id,
    HAS_DLSE: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    POSITIONS: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    hkv = h // group_size
    start_m = block * BLOCK_M
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    rows = start_m + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
    o_base = o_ptr + (b * stride_ob + h * stride_oh) * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    row_offs = (b * num_heads + h) * q_len + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    # The part of ds that a whole row shares.
    o_tile = load_tile(o_base, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    delta = row_products(o_tile, do_tile)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0)
    tl.store(delta_ptr + row_offs, delta, mask=in_rows)
    qk_scale = scale * LOG2E
    q_row = rows + q_shift
    q_idx = (
        tl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=rows < q_len, other=0)
        if POSITIONS
        else rows + q_shift
    )
    doc_q = tl.load(doc_ptr + b * stride_doc_0 + clamp_index(q_row, doc_size_1).to(tl.int64) * stride_doc_1)
    q_segment_ids_q = tl.load(
        q_segment_ids_ptr
        + b * stride_q_segment_ids_0
        + clamp_index(rows, q_segment_ids_size_1).to(tl.int64) * stride_q_segment_ids_1
    )

    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + b * stride_ranges_b + start_m // BLOCK_M * 4
    kv_begin, full_begin = tl.load(block_range) * BLOCK_N, tl.load(block_range + 1) * BLOCK_N
    full_end, kv_end = tl.load(block_range + 2) * BLOCK_N, tl.load(block_range + 3) * BLOCK_N

    dq = zero_tile(BLOCK_M, HEAD_DIM, BLOCK_D)
    # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
    gap = full_end - full_begin
    for step in range(kv_begin, kv_end - gap, BLOCK_N):
        start_n = tl.where(step < full_begin, step, step + gap)
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        cols = start_n + tl.arange(0, BLOCK_N)
        kv_idx = (
            tl.load(kv_positions_ptr + b * stride_kv_positions_b + cols, mask=cols < kv_len, other=0)
            if POSITIONS
            else cols
        )
        doc_kv = tl.load(doc_ptr + b * stride_doc_0 + clamp_index(cols, doc_size_1).to(tl.int64) * stride_doc_1)
        kv_segment_ids_kv = tl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
        )
        p = tl.exp2(qk * qk_scale - lse[:, None])
        keep = (
            (q_idx[:, None] >= kv_idx[None, :])
            & (doc_q[:, None] == doc_kv[None, :])
            & (q_segment_ids_q[:, None] == kv_segment_ids_kv[None, :])
            & (kv_segment_ids_kv != padding_id)[None, :]
        )
        if RAGGED:
            keep = keep & (cols < kv_len)[None, :]
        p = tl.where(keep, p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds, k_tile)

    for start_n in range(full_begin, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        p = tl.exp2(qk * qk_scale - lse[:, None])
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + b * stride_dqb + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)
