# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: portable/bwd_dkdv.py.jinja
# hash: 642911335f933cd6
"""Gradients of `window` with respect to k and v.

    keep   q_idx >= kv_idx and q_idx - kv_idx < size
    q      [B, Hq, Sq, D]
    k      [B, Hkv, Skv, D]
    v      [B, Hkv, Skv, Dv]
    do     [B, Hq, Sq, Dv]
    lse    [B, Hq, Sq]  fp32, log of the softmax denominator
    delta  [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dk     [B, Hkv, Skv, D]
    dv     [B, Hkv, Skv, Dv]

One program serves a block of keys of one key head. It sums over all query heads that share the key head, in a fixed
order and without atomics. Its tiles are transposed, keys by queries: the probabilities then feed the second product as
they are.
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LOG2E, add_dot, dot_rows, load_tile, load_vector, store_tile, zero_tile


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
def window_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_offset,
    size,
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
    num_kv_heads = num_heads // group_size
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    head = tl.program_id(0) // num_blocks
    start_n = (tl.program_id(0) % num_blocks) * BLOCK_N
    b = (head // num_kv_heads).to(tl.int64)
    hkv = (head % num_kv_heads).to(tl.int64)
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
    qk_scale = scale * LOG2E
    kv_idx = start_n + tl.arange(0, BLOCK_N)

    kv_first = start_n
    kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = tl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
    row_end = tl.minimum(kv_last + size - q_shift, q_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
    full_end = tl.minimum(kv_first + size - q_shift, q_len) // BLOCK_M * BLOCK_M
    full_end = tl.maximum(full_end, full_begin)

    dk = zero_tile(BLOCK_N, HEAD_DIM, BLOCK_D)
    dv = zero_tile(BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    for member in range(group_size):
        h = hkv * group_size + member
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
            # Both products that need no probability come first: the second runs while the first is exponentiated.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            # Starting at -delta leaves one vector less to keep beside the masks.
            dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta[None, :]
            dp = dot_rows(v_tile, do_tile, dp)
            q_idx = rows + q_shift
            p = tl.exp2(qk * qk_scale - lse[None, :])
            keep = (q_idx[None, :] >= kv_idx[:, None]) & (q_idx[None, :] - kv_idx[:, None] < size)
            if RAGGED:
                keep = keep & (rows < q_len)[None, :]
            p = tl.where(keep, p, 0.0)
            dv = add_dot(dv, p, do_tile)
            ds = p * dp
            dk = add_dot(dk, ds, q_tile)

        for start_m in range(full_begin, full_end, BLOCK_M):
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, False)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False)
            rows = start_m + tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base, rows, q_len, float("inf"), False) * LOG2E
            delta = load_vector(delta_ptr + row_base, rows, q_len, 0.0, False)
            # Both products that need no probability come first: the second runs while the first is exponentiated.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            dp = dot_rows(v_tile, do_tile)
            p = tl.exp2(qk * qk_scale - lse[None, :])
            dv = add_dot(dv, p, do_tile)
            ds = p * (dp - delta[None, :])
            dk = add_dot(dk, ds, q_tile)

    dk_base = dk_ptr + b * stride_dkb + hkv * stride_dkh
    dv_base = dv_ptr + b * stride_dvb + hkv * stride_dvh
    store_tile(dk_base, [part * scale for part in dk], start_n, kv_len, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvs, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
