# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band: {mask: 'band(before, after)', scalars: {before: {type: int, min: 0, example: 256}, after: {type: int,
#     min: 0, example: 32}}}
# template: portable/portable.py.jinja
# hash: 11b06e1efe0d6e6a
"""Triton kernels of `band`: forward and gradients, and what runs before and after Hopper's backward.

keep   q_idx - kv_idx <= before and kv_idx - q_idx <= after
q      [B, Hq, Sq, D]
k      [B, Hkv, Skv, D]
v      [B, Hkv, Skv, Dv]
o      [B, Hq, Sq, Dv]
lse    [B, Hq, Sq]  fp32, log of the softmax denominator
dlse   [B, Hq, Sq]  fp32, gradient of lse
do     [B, Hq, Sq, Dv]
delta  [B, Hq, Sq]  fp32, sum(o * do) - dlse
dq     [B, Hq, Sq, D]
dk     [B, Hkv, Skv, D]
dv     [B, Hkv, Skv, Dv]
"""

import triton
import triton.language as tl

from .._runtime.device.tl import (
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
from .._runtime.device.tl_math import keep_range
from .._runtime.device.tl_rows import load_dq_rows, row_delta, store_dq_rows


@triton.jit(do_not_specialize=["q_offset", "before", "after", "q_len", "kv_len", "num_heads", "group_size"])
def band_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_offset,
    before,
    after,
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
    PTX: tl.constexpr,
    NARROW: tl.constexpr,
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
    """`o = softmax(score) v`.

    One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
    softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
    Scores are kept times log2(e), so that each exponential is one `exp2`.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
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
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(q_first - before, 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + after + 1, kv_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(q_last - before, kv_begin), BLOCK_N) * BLOCK_N
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(kv_end, kv_begin), BLOCK_N) * BLOCK_N)
    full_end = tl.minimum(q_first + after + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
    # In a narrow band it visits all blocks: a second loop would take longer to fill its pipeline than masks take.
    gap = 0 if NARROW else full_end - full_begin
    for step in range(kv_begin, kv_end - gap, BLOCK_N):
        start_n = tl.where(step < full_begin, step, step + gap)
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        qk = keep_range(qk, (q_idx + after)[:, None] - kv_idx[None, :], after + before + 1, float("-inf"), PTX)
        if RAGGED:
            qk = tl.where((kv_idx < kv_len)[None, :], qk, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(qk * qk_scale - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    if not NARROW:
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
    # One division per row instead of one per element: beside the few blocks of a band, divisions take noticeable time.
    o_tile = [part * (1.0 / row_sum)[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + b * stride_ob + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + (b * num_heads + h) * q_len
    tl.store(lse_base + rows, lse, mask=rows < q_len)


@triton.jit(do_not_specialize=["q_offset", "before", "after", "q_len", "kv_len", "num_heads", "group_size"])
def band_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    q_offset,
    before,
    after,
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
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    PTX: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_DLSE: tl.constexpr,
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
    """Gradient with respect to q.

    One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse.
    The gradient of a score is `ds = p * (dp - delta)`, where all scores of a row share `delta = sum(o * do) - dlse`.
    delta is stored for the kernel of dk and dv.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
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
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(q_first - before, 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + after + 1, kv_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(q_last - before, kv_begin), BLOCK_N) * BLOCK_N
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(kv_end, kv_begin), BLOCK_N) * BLOCK_N)
    full_end = tl.minimum(q_first + after + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)

    dq = zero_tile(BLOCK_M, HEAD_DIM, BLOCK_D)
    # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
    # In a narrow band it visits all blocks: a second loop would take longer to fill its pipeline than masks take.
    gap = 0 if NARROW else full_end - full_begin
    for step in range(kv_begin, kv_end - gap, BLOCK_N):
        start_n = tl.where(step < full_begin, step, step + gap)
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        p = tl.exp2(qk * qk_scale - lse[:, None])
        p = keep_range(p, (q_idx + after)[:, None] - kv_idx[None, :], after + before + 1, 0.0, PTX)
        if RAGGED:
            p = tl.where((kv_idx < kv_len)[None, :], p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds, k_tile)

    if not NARROW:
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


@triton.jit(do_not_specialize=["q_offset", "before", "after", "q_len", "kv_len", "num_heads", "group_size"])
def band_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_offset,
    before,
    after,
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
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    PTX: tl.constexpr,
    NARROW: tl.constexpr,
    HEAD_GROUPS: tl.constexpr,
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
    """Gradients with respect to k and v.

    One program serves a block of keys and the query heads that share its key head: all of them, or one of HEAD_GROUPS
    groups. It sums over these heads in a fixed order and without atomics. Its tiles are transposed, keys by queries, so
    that the probabilities are an operand of the second product as they are.
    """
    before = tl.load(before) if SCALARS_LOADED else before
    after = tl.load(after) if SCALARS_LOADED else after
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
    qk_scale = scale * LOG2E
    kv_idx = start_n + tl.arange(0, BLOCK_N)

    kv_first = start_n
    kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = tl.maximum(kv_first - after - q_shift, 0) // BLOCK_M * BLOCK_M
    row_end = tl.minimum(kv_last + before - q_shift + 1, q_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(kv_last - after - q_shift, row_begin), BLOCK_M) * BLOCK_M
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
    full_end = tl.minimum(kv_first + before - q_shift + 1, q_len) // BLOCK_M * BLOCK_M
    full_end = tl.maximum(full_end, full_begin)

    dk = zero_tile(BLOCK_N, HEAD_DIM, BLOCK_D)
    dv = zero_tile(BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    for member in range(group_size):
        h = head_group * group_size + member
        q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
        row_base = (b * num_heads + h) * q_len
        # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
        # In a narrow band it visits all blocks: a second loop would take longer to fill its pipeline than masks take.
        gap = 0 if NARROW else full_end - full_begin
        for step in range(row_begin, row_end - gap, BLOCK_M):
            start_m = tl.where(step < full_begin, step, step + gap)
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, RAGGED)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, RAGGED)
            rows = start_m + tl.arange(0, BLOCK_M)
            # Rows are counted from the block's first row, so that the offsets of each thread are constants.
            row_offs = tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base + start_m, row_offs, q_len - start_m, float("inf"), RAGGED) * LOG2E
            delta = load_vector(delta_ptr + row_base + start_m, row_offs, q_len - start_m, 0.0, RAGGED)
            # Both products without probabilities come first: the second runs during the exponentials of the first.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            # The product starts at -delta, so that registers need not hold delta beside the masks.
            dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta[None, :]
            dp = dot_rows(v_tile, do_tile, dp)
            q_idx = rows + q_shift
            p = tl.exp2(qk * qk_scale - lse[None, :])
            p = keep_range(p, (q_idx + after)[None, :] - kv_idx[:, None], after + before + 1, 0.0, PTX)
            if RAGGED:
                p = tl.where((rows < q_len)[None, :], p, 0.0)
            dv = add_dot(dv, p, do_tile)
            ds = p * dp
            dk = add_dot(dk, ds, q_tile)

        if not NARROW:
            for start_m in range(full_begin, full_end, BLOCK_M):
                q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, False)
                do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False)
                rows = start_m + tl.arange(0, BLOCK_M)
                # Rows are counted from the block's first row, so that the offsets of each thread are constants.
                row_offs = tl.arange(0, BLOCK_M)
                lse = load_vector(lse_ptr + row_base + start_m, row_offs, q_len - start_m, float("inf"), False) * LOG2E
                delta = load_vector(delta_ptr + row_base + start_m, row_offs, q_len - start_m, 0.0, False)
                # Both products without probabilities come first: the second runs during the exponentials of the first.
                qk = dot_rows(k_tile, q_tile)  # [N, M]
                dp = dot_rows(v_tile, do_tile)
                p = tl.exp2(qk * qk_scale - lse[None, :])
                dv = add_dot(dv, p, do_tile)
                ds = p * (dp - delta[None, :])
                dk = add_dot(dk, ds, q_tile)

    dk_base = dk_ptr + b * stride_dkb + head_group * stride_dkh
    dv_base = dv_ptr + b * stride_dvb + head_group * stride_dvh
    store_tile(dk_base, [part * scale for part in dk], start_n, kv_len, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvs, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=["q_len", "num_heads"])
def band_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    q_len,
    num_heads,
    scale,
    HAS_DLSE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What Hopper's backward reads of each row: lse and delta, padded to whole blocks of rows.

    Without WITH_DQ the portable kernel of dq ran before, and stored delta.

        row_lse    [B, Hq, blocks * BLOCK_M]  fp32, -lse / scale, -inf where no probability is above 0
        row_delta  [B, Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row
    """
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    head, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    row_offs = (b * num_heads + h) * q_len + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    if WITH_DQ:
        UNIT: tl.constexpr = 128 // o_ptr.dtype.element_ty.primitive_bitwidth
        o_base = o_ptr + (b * stride_ob + h * stride_oh) * UNIT
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
        delta = row_delta(
            o_base, do_base, dlse_ptr, row_offs, rows, q_len, stride_os, stride_dos, HAS_DLSE, HEAD_DIM_V, BLOCK_DV
        )
    else:
        delta = tl.load(delta_ptr + row_offs, mask=in_rows, other=0.0)
    padded_offs = ((b * num_heads + h) * num_blocks + block) * BLOCK_M + tl.arange(0, BLOCK_M)
    # In a row without any key all probabilities are 0 with lse = inf; -inf minus -inf would be NaN.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + padded_offs, -lse / (scale * LOG2E))
    tl.store(row_delta_ptr + padded_offs, -delta)


@triton.jit(do_not_specialize=["q_len", "num_heads"])
def band_hopper_dq_rows(
    dq_sums_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqs: tl.constexpr,
    q_len,
    num_heads,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dq from the sums `dq_sums` of Hopper's backward. Each program converts one warpgroup's part of a query block.

    dq_sums  [B, Hq, blocks, 2, lines, 32]  fp32, gradient of q before the factor `scale`
    """
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    part, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    head, block = tile // num_blocks, tile % num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * (64 * PART_COLS)
    dq_tile = load_dq_rows(dq_sums_ptr + first, scale, BLOCK_D, BLOCK_M)
    store_dq_rows(dq_ptr, b, stride_dqb, h, stride_dqh, dq_tile, block, part, q_len, stride_dqs, HEAD_DIM, BLOCK_M)
