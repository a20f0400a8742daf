# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: portable/bwd_dq.py.jinja
# hash: f91c8cb5e87ed9e8
"""Gradient of `forgetting` with respect to q and g.

    keep         q_idx >= kv_idx
    o            [B, Hq, Sq, Dv]
    dlse         [B, Hq, Sq]  fp32, gradient of lse
    q            [B, Hq, Sq, D]
    k            [B, Hkv, Skv, D]
    v            [B, Hkv, Skv, Dv]
    do           [B, Hq, Sq, Dv]
    lse          [B, Hq, Sq]  fp32, log of the softmax denominator
    decay        [B, Hq, P]  fp32, cumulative log-decay times log2(e)
    delta        [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dq           [B, Hq, Sq, D]
    ddecay_rows  [B, Hq, Sq]  fp32, partial sums

One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse;
`ds = p * (dp - delta)` is the gradient of a score, `delta = sum(o * do) - dlse` what it takes from a row. It is stored
for the kernel of dk and dv.
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LOG2E, add_dot, clamp_index, dot_rows, load_tile, row_products, store_tile, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "decay_size_2",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
    ]
)
def forgetting_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    decay_ptr,
    q_offset,
    delta_ptr,
    dq_ptr,
    ddecay_rows_ptr,
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
    stride_decay_0,
    stride_decay_1,
    decay_size_2,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    HAS_DLSE: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
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
    # Later rows see more keys: start them first, so that the last programs to finish are short ones.
    start_m = (num_blocks - 1 - block) * BLOCK_M
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
    dlse = tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0) if HAS_DLSE else 0.0
    delta -= dlse
    has_key = lse > float("-inf")
    # A row may keep only scores of -inf; against a finite lse their probability is 0, not NaN.
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    q_idx = rows + q_shift
    decay_q = tl.load(decay_ptr + b * stride_decay_0 + h * stride_decay_1 + clamp_index(q_idx, decay_size_2))

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_end = tl.minimum(q_last + 1, kv_len)
    # Blocks before full_end need no mask.
    full_end = tl.minimum(q_first + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, 0)

    dq = zero_tile(BLOCK_M, HEAD_DIM, BLOCK_D)
    ddecay_rows = tl.zeros([BLOCK_M], tl.float32)
    for start_n in range(full_end, kv_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        decay_kv = tl.load(decay_ptr + b * stride_decay_0 + h * stride_decay_1 + clamp_index(kv_idx, decay_size_2))
        p = tl.exp2(1.4426950408889634 * scale * qk + (decay_q[:, None] - decay_kv[None, :]) - lse[:, None])
        keep = q_idx[:, None] >= kv_idx[None, :]
        if RAGGED:
            keep = keep & (kv_idx < kv_len)[None, :]
        p = tl.where(keep, p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ddecay_rows += tl.sum(ds, 1)
        dq = add_dot(dq, ds, k_tile)

    for start_n in range(0, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        decay_kv = tl.load(decay_ptr + b * stride_decay_0 + h * stride_decay_1 + kv_idx)
        p = tl.exp2(1.4426950408889634 * scale * qk + (decay_q[:, None] - decay_kv[None, :]) - lse[:, None])
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ddecay_rows += tl.sum(ds, 1)
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + b * stride_dqb + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)
    # The ds of a row sum to dlse; what they sum to besides is the rounding of o in delta. The keys' sums would
    # gather that over the whole sequence, so dkdv, which runs next, gets the delta of the unrounded o.
    unrounded = ddecay_rows + delta - dlse
    ddecay_rows = tl.where(has_key, dlse, 0.0)
    tl.store(delta_ptr + row_offs, tl.where(has_key, unrounded, delta), mask=in_rows)
    tl.store(ddecay_rows_ptr + row_offs, ddecay_rows, mask=in_rows)
