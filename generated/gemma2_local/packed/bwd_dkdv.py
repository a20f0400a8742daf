# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: portable/bwd_dkdv.py.jinja
# hash: 3277b6f6681ada19
"""Gradients of `gemma2_local`, packed sequences with respect to k and v.

    keep        q_idx >= kv_idx and q_idx - kv_idx < 4096
    score       50.0 * tanh(0.02 * score)
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    do          [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator
    delta       [Hq, total_q]  fp32, sum(o * do) - dlse
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    dk          [total_k, Hkv, D]
    dv          [total_k, Hkv, Dv]

One program serves a block of keys of one key head. It sums over all query heads that share the key head, in a fixed
order and without atomics. Its tiles are transposed, keys by queries: the probabilities then feed the second product as
they are.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LOG2E, add_dot, dot_rows, load_tile, load_vector, store_tile, tanh, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_total",
        "num_heads",
        "group_size",
    ]
)
def gemma2_local_packed_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    block_seqs_ptr,
    q_offset,
    dk_ptr,
    dv_ptr,
    stride_qh,
    stride_qs: tl.constexpr,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_doh,
    stride_dos: tl.constexpr,
    stride_dkh,
    stride_dks: tl.constexpr,
    stride_dvh,
    stride_dvs: tl.constexpr,
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
    num_kv_heads = num_heads // group_size
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_kv_heads * 8
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + 1)
    q_start = tl.load(record + 2).to(tl.int64)
    kv_start = tl.load(record + 4).to(tl.int64)
    q_len, kv_len = tl.load(record + 3), tl.load(record + 5)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_kv_heads
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    hkv = (program // num_blocks).to(tl.int64)
    start_n = (program % num_blocks) * BLOCK_N
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    k_base = k_ptr + kv_start * stride_ks + hkv * stride_kh * UNIT
    v_base = v_ptr + kv_start * stride_vs + hkv * stride_vh * UNIT
    k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
    kv_idx = start_n + tl.arange(0, BLOCK_N)

    kv_first = start_n
    kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = tl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
    row_end = tl.minimum(kv_last - q_shift + 4096, q_len)
    # Blocks from full_begin to full_end need no mask.
    full_begin = tl.cdiv(tl.maximum(kv_last - q_shift, row_begin), BLOCK_M) * BLOCK_M
    full_begin = tl.minimum(full_begin, tl.cdiv(tl.maximum(row_end, row_begin), BLOCK_M) * BLOCK_M)
    full_end = tl.minimum(kv_first - q_shift + 4096, q_len) // BLOCK_M * BLOCK_M
    full_end = tl.maximum(full_end, full_begin)

    dk = zero_tile(BLOCK_N, HEAD_DIM, BLOCK_D)
    dv = zero_tile(BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    for member in range(group_size):
        h = hkv * group_size + member
        q_base = q_ptr + q_start * stride_qs + h * stride_qh * UNIT
        do_base = do_ptr + q_start * stride_dos + h * stride_doh * UNIT
        row_base = h * q_total + q_start
        # Partial blocks lie on both sides of the full ones; the loop steps over the gap.
        gap = full_end - full_begin
        for step in range(row_begin, row_end - gap, BLOCK_M):
            start_m = tl.where(step < full_begin, step, step + gap)
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
            rows = start_m + tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base, rows, q_len, float("inf"), True) * LOG2E
            delta = load_vector(delta_ptr + row_base, rows, q_len, 0.0, True)
            # A row may keep only scores of -inf; against a finite lse their probability is 0, not NaN.
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            # Both products that need no probability come first: the second runs while the first is exponentiated.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            # Starting at -delta leaves one vector less to keep beside the masks.
            dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta[None, :]
            dp = dot_rows(v_tile, do_tile, dp)
            q_idx = rows + q_shift
            tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
            p = tl.exp2(72.13475204444816 * tanh_val - lse[None, :])
            keep = (q_idx[None, :] >= kv_idx[:, None]) & (q_idx[None, :] - kv_idx[:, None] < 4096)
            keep = keep & (rows < q_len)[None, :]
            p = tl.where(keep, p, 0.0)
            dv = add_dot(dv, p, do_tile)
            ds = p * dp
            ds = tl.where(keep, ds * (1.0 - tanh_val * tanh_val), 0.0)
            dk = add_dot(dk, ds, q_tile)

        for start_m in range(full_begin, full_end, BLOCK_M):
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, False)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, False)
            rows = start_m + tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base, rows, q_len, float("inf"), False) * LOG2E
            delta = load_vector(delta_ptr + row_base, rows, q_len, 0.0, False)
            # A row may keep only scores of -inf; against a finite lse their probability is 0, not NaN.
            lse = tl.where(lse == float("-inf"), 0.0, lse)
            # Both products that need no probability come first: the second runs while the first is exponentiated.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            dp = dot_rows(v_tile, do_tile)
            tanh_val = tanh(0.02 * scale * qk, HARDWARE_TANH)
            p = tl.exp2(72.13475204444816 * tanh_val - lse[None, :])
            dv = add_dot(dv, p, do_tile)
            ds = p * (dp - delta[None, :])
            ds = ds * (1.0 - tanh_val * tanh_val)
            dk = add_dot(dk, ds, q_tile)

    dk_base = dk_ptr + kv_start * stride_dks + hkv * stride_dkh
    dv_base = dv_ptr + kv_start * stride_dvs + hkv * stride_dvh
    store_tile(dk_base, [part * scale for part in dk], start_n, kv_len, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvs, BLOCK_N, HEAD_DIM_V, BLOCK_DV)
