# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: portable/portable.py.jinja
# hash: 12f4cb1984c5d62b
"""Triton kernels of `band_softcap`, with segment ids: forward and gradients.

keep            q_idx - kv_idx <= before and kv_idx - q_idx <= after and q_segment_ids[b, rows] == kv_segment_ids[b,
                cols] and kv_segment_ids[b, cols] != padding_id
score           cap * tanh(score / cap)
q               [B, Hq, Sq, D]
k               [B, Hkv, Skv, D]
v               [B, Hkv, Skv, Dv]
q_segment_ids   [b, q_row]  int32
kv_segment_ids  [b, k_row]  int32
q_positions     [B, Sq]  int32, or None: by row
kv_positions    [B, Skv]  int32, or None: by row
ranges          [B, H, blocks, 4]  int32, first visited, first full, end of full and end of visited blocks
o               [B, Hq, Sq, Dv]
lse             [B, Hq, Sq]  fp32, log of the softmax denominator
dlse            [B, Hq, Sq]  fp32, gradient of lse
do              [B, Hq, Sq, Dv]
delta           [B, Hq, Sq]  fp32, sum(o * do) - dlse
dq              [B, Hq, Sq, D]
run_rows        [entries, 8]  int32, or None: the blocks of rows of runs of tokens, which the packed kernels compute
dk              [B, Hkv, Skv, D]
dv              [B, Hkv, Skv, Dv]
"""

import triton
import triton.language as tl

from ..._runtime.device.block_seqs import NUM_BLOCKS
from ..._runtime.device.tl import (
    LN2,
    LOG2E,
    add_dot,
    dot_rows,
    load_tile,
    load_vector,
    row_products,
    store_tile,
    zero_tile,
)
from ..._runtime.device.tl_math import clamp_index, keep_range, tanh


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "before",
        "after",
        "cap",
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
def band_softcap_segmented_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    before,
    after,
    cap,
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
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    padding_id,
    PTX: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    POSITIONS: tl.constexpr,
    HARDWARE_TANH: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`o = softmax(score) v`.

    One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
    softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
    Scores are kept times log2(e), so that each exponential is one `exp2`.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
    cap = tl.load(cap) if SCALARS_LOADED else cap
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    hkv = h // group_size
    start_m = block * BLOCK_M
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    rows = start_m + tl.arange(0, BLOCK_M)
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_idx = (
        tl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=rows < q_len, other=0)
        if POSITIONS
        else rows + q_shift
    )
    q_segment_ids_q = tl.load(
        q_segment_ids_ptr
        + b * stride_q_segment_ids_0
        + clamp_index(rows, q_segment_ids_size_1).to(tl.int64) * stride_q_segment_ids_1
    )

    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + b * stride_ranges_b + start_m // BLOCK_M * 4
    kv_begin, full_begin = tl.load(block_range) * BLOCK_N, tl.load(block_range + 1) * BLOCK_N
    full_end, kv_end = tl.load(block_range + 2) * BLOCK_N, tl.load(block_range + 3) * BLOCK_N

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
    gap = full_end - full_begin
    for step in range(kv_begin, kv_end - gap, BLOCK_N):
        start_n = tl.where(step < full_begin, step, step + gap)
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        cols = start_n + tl.arange(0, BLOCK_N)
        kv_idx = (
            tl.load(kv_positions_ptr + b * stride_kv_positions_b + cols, mask=cols < kv_len, other=0)
            if POSITIONS
            else cols
        )
        kv_segment_ids_kv = tl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
        )
        logit = 1.4426950408889634 * cap * tanh(scale * qk / cap, HARDWARE_TANH)
        logit = keep_range(logit, (q_idx + after)[:, None] - kv_idx[None, :], after + before + 1, float("-inf"), PTX)
        keep = (q_segment_ids_q[:, None] == kv_segment_ids_kv[None, :]) & (kv_segment_ids_kv != padding_id)[None, :]
        if RAGGED:
            keep = keep & (cols < kv_len)[None, :]
        logit = tl.where(keep, logit, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for start_n in range(full_begin, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        logit = 1.4426950408889634 * cap * tanh(scale * qk / cap, HARDWARE_TANH)
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    # One division per row instead of one per element: beside the few blocks of a band, divisions take noticeable time.
    o_tile = [part * (1.0 / row_sum)[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + b * stride_ob + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + (b * num_heads + h) * q_len
    tl.store(lse_base + rows, lse, mask=rows < q_len)


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "before",
        "after",
        "cap",
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
def band_softcap_segmented_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    before,
    after,
    cap,
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
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    padding_id,
    run_rows_ptr,
    HAS_DLSE: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    POSITIONS: tl.constexpr,
    HARDWARE_TANH: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient with respect to q.

    One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse.
    The gradient of a score is `ds = p * (dp - delta)`, where all scores of a row share `delta = sum(o * do) - dlse`.
    delta is stored for the kernel of dk and dv.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
    cap = tl.load(cap) if SCALARS_LOADED else cap
    # If the table of runs has blocks, the packed kernel has computed the call.
    num_run_blocks = tl.load(run_rows_ptr + NUM_BLOCKS) if run_rows_ptr is not None else 0
    if num_run_blocks > 0:
        return
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
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
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
    # If all kept scores of a row are -inf, so is its lse; a finite lse gives probabilities of 0, not NaN.
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    q_idx = (
        tl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=rows < q_len, other=0)
        if POSITIONS
        else rows + q_shift
    )
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
        tanh_val = tanh(scale * qk / cap, HARDWARE_TANH)
        kv_segment_ids_kv = tl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
        )
        p = tl.exp2(1.4426950408889634 * cap * tanh_val - lse[:, None])
        keep = (
            (q_idx[:, None] - kv_idx[None, :] <= before)
            & (kv_idx[None, :] - q_idx[:, None] <= after)
            & (q_segment_ids_q[:, None] == kv_segment_ids_kv[None, :])
            & (kv_segment_ids_kv != padding_id)[None, :]
        )
        if RAGGED:
            keep = keep & (cols < kv_len)[None, :]
        p = tl.where(keep, p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ds = tl.where(keep, ds * (cap * (1.0 / cap) * (1.0 - tanh_val * tanh_val)), 0.0)
        dq = add_dot(dq, ds, k_tile)

    for start_n in range(full_begin, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        tanh_val = tanh(scale * qk / cap, HARDWARE_TANH)
        p = tl.exp2(1.4426950408889634 * cap * tanh_val - lse[:, None])
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ds = ds * (cap * (1.0 / cap) * (1.0 - tanh_val * tanh_val))
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + b * stride_dqb + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "before",
        "after",
        "cap",
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
def band_softcap_segmented_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    ranges_ptr,
    q_offset,
    before,
    after,
    cap,
    dk_ptr,
    dv_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dks: tl.constexpr,
    stride_dvb,
    stride_dvh,
    stride_dvs: tl.constexpr,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
    stride_q_positions_b,
    stride_kv_positions_b,
    q_segment_ids_size_1,
    kv_segment_ids_size_1,
    stride_ranges_b,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    padding_id,
    HEAD_GROUPS: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    POSITIONS: tl.constexpr,
    HARDWARE_TANH: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients with respect to k and v.

    One program serves a block of keys and the query heads that share its key head: all of them, or one of HEAD_GROUPS
    groups. It sums over these heads in a fixed order and without atomics. Its tiles are transposed, keys by queries, so
    that the probabilities are an operand of the second product as they are.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
    cap = tl.load(cap) if SCALARS_LOADED else cap
    num_head_groups = num_heads // group_size
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    head = tl.program_id(0) // num_blocks
    start_n = (tl.program_id(0) % num_blocks) * BLOCK_N
    b = (head // num_head_groups).to(tl.int64)
    head_group = (head % num_head_groups).to(tl.int64)
    hkv = head_group // HEAD_GROUPS
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
    cols = start_n + tl.arange(0, BLOCK_N)
    kv_idx = (
        tl.load(kv_positions_ptr + b * stride_kv_positions_b + cols, mask=cols < kv_len, other=0) if POSITIONS else cols
    )
    kv_segment_ids_kv = tl.load(
        kv_segment_ids_ptr
        + b * stride_kv_segment_ids_0
        + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
    )

    # Of the blocks this one visits, those from full_begin to full_end need no mask.
    block_range = ranges_ptr + b * stride_ranges_b + start_n // BLOCK_N * 4
    row_begin, full_begin = tl.load(block_range) * BLOCK_M, tl.load(block_range + 1) * BLOCK_M
    full_end, row_end = tl.load(block_range + 2) * BLOCK_M, tl.load(block_range + 3) * BLOCK_M

    dk = zero_tile(BLOCK_N, HEAD_DIM, BLOCK_D)
    dv = zero_tile(BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    for member in range(group_size):
        h = head_group * group_size + member
        q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
        row_base = (b * num_heads + h) * q_len
        # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
        gap = full_end - full_begin
        for step in range(row_begin, row_end - gap, BLOCK_M):
            start_m = tl.where(step < full_begin, step, step + gap)
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, RAGGED)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, RAGGED)
            rows = start_m + tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base, rows, q_len, float("inf"), RAGGED) * LOG2E
            delta = load_vector(delta_ptr + row_base, rows, q_len, 0.0, RAGGED)
            # If all kept scores of a row are -inf, so is its lse; a finite lse gives probabilities of 0, not NaN.
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            # Both products without probabilities come first: the second runs during the exponentials of the first.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            # The product starts at -delta, so that registers need not hold delta beside the masks.
            dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta[None, :]
            dp = dot_rows(v_tile, do_tile, dp)
            q_idx = (
                tl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=rows < q_len, other=0)
                if POSITIONS
                else rows + q_shift
            )
            tanh_val = tanh(scale * qk / cap, HARDWARE_TANH)
            q_segment_ids_q = tl.load(
                q_segment_ids_ptr
                + b * stride_q_segment_ids_0
                + clamp_index(rows, q_segment_ids_size_1).to(tl.int64) * stride_q_segment_ids_1
            )
            p = tl.exp2(1.4426950408889634 * cap * tanh_val - lse[None, :])
            keep = (
                (q_idx[None, :] - kv_idx[:, None] <= before)
                & (kv_idx[:, None] - q_idx[None, :] <= after)
                & (q_segment_ids_q[None, :] == kv_segment_ids_kv[:, None])
                & (kv_segment_ids_kv != padding_id)[:, None]
            )
            if RAGGED:
                keep = keep & (rows < q_len)[None, :]
            p = tl.where(keep, p, 0.0)
            dv = add_dot(dv, p, do_tile)
            ds = p * dp
            ds = tl.where(keep, ds * (cap * (1.0 / cap) * (1.0 - tanh_val * tanh_val)), 0.0)
            dk = add_dot(dk, ds, q_tile)

        for start_m in range(full_begin, full_end, BLOCK_M):
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, False)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False)
            rows = start_m + tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base, rows, q_len, float("inf"), False) * LOG2E
            delta = load_vector(delta_ptr + row_base, rows, q_len, 0.0, False)
            # If all kept scores of a row are -inf, so is its lse; a finite lse gives probabilities of 0, not NaN.
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            # Both products without probabilities come first: the second runs during the exponentials of the first.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            dp = dot_rows(v_tile, do_tile)
            tanh_val = tanh(scale * qk / cap, HARDWARE_TANH)
            p = tl.exp2(1.4426950408889634 * cap * tanh_val - lse[None, :])
            dv = add_dot(dv, p, do_tile)
            ds = p * (dp - delta[None, :])
            ds = ds * (cap * (1.0 / cap) * (1.0 - tanh_val * tanh_val))
            dk = add_dot(dk, ds, q_tile)

    dk_base = dk_ptr + b * stride_dkb + head_group * stride_dkh
    dv_base = dv_ptr + b * stride_dvb + head_group * stride_dvh
    store_tile(dk_base, [part * scale for part in dk], start_n, kv_len, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvs, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
