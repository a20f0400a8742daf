# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: portable/bwd_dq.py.jinja
# hash: 2b7cccf3d962f94a
"""Gradient of `softcap`, packed sequences with respect to q.

    keep        q_idx >= kv_idx
    score       20.0 * tanh(0.05 * score)
    o           [total_q, Hq, Dv]
    dlse        [Hq, total_q]  fp32, gradient of lse
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    do          [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    delta       [Hq, total_q]  fp32, sum(o * do) - dlse
    dq          [total_q, Hq, D]

One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse;
`ds = p * (dp - delta)` is the gradient of a score, `delta = sum(o * do) - dlse` what it takes from a row. It is stored
for the kernel of dk and dv.
"""

import triton
import triton.language as tl

from ..._runtime.device.tl import LOG2E, add_dot, dot_rows, load_tile, row_products, store_tile, tanh, zero_tile


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_total",
        "num_heads",
        "group_size",
    ]
)
def softcap_packed_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    block_seqs_ptr,
    q_offset,
    delta_ptr,
    dq_ptr,
    stride_qh,
    stride_qs: tl.constexpr,
    stride_kh,
    stride_ks: tl.constexpr,
    stride_vh,
    stride_vs: tl.constexpr,
    stride_doh,
    stride_dos: tl.constexpr,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dqh,
    stride_dqs: tl.constexpr,
    q_total,
    num_heads,
    group_size,
    scale,
    HAS_DLSE: tl.constexpr,
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
    # Later rows see more keys: start them first, so that the last programs to finish are short ones.
    start_m = (num_blocks - 1 - block) * BLOCK_M
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    rows = start_m + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + q_start * stride_qs + h * stride_qh * UNIT
    k_base = k_ptr + kv_start * stride_ks + hkv * stride_kh * UNIT
    v_base = v_ptr + kv_start * stride_vs + hkv * stride_vh * UNIT
    do_base = do_ptr + q_start * stride_dos + h * stride_doh * UNIT
    o_base = o_ptr + q_start * stride_os + h * stride_oh * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    row_offs = h * q_total + q_start + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    # The part of ds that a whole row shares.
    o_tile = load_tile(o_base, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    delta = row_products(o_tile, do_tile)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0)
    tl.store(delta_ptr + row_offs, delta, mask=in_rows)
    # A row may keep only scores of -inf; against a finite lse their probability is 0, not NaN.
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_end = tl.minimum(q_last + 1, kv_len)
    # Blocks before full_end need no mask.
    full_end = tl.minimum(q_first + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, 0)

    dq = zero_tile(BLOCK_M, HEAD_DIM, BLOCK_D)
    for start_n in range(full_end, kv_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        tanh_val = tanh(0.05 * scale * qk, HARDWARE_TANH)
        p = tl.exp2(28.85390081777927 * tanh_val - lse[:, None])
        keep = q_idx[:, None] >= kv_idx[None, :]
        keep = keep & (kv_idx < kv_len)[None, :]
        p = tl.where(keep, p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ds = tl.where(keep, ds * (1.0 - tanh_val * tanh_val), 0.0)
        dq = add_dot(dq, ds, k_tile)

    for start_n in range(0, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        tanh_val = tanh(0.05 * scale * qk, HARDWARE_TANH)
        p = tl.exp2(28.85390081777927 * tanh_val - lse[:, None])
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        ds = ds * (1.0 - tanh_val * tanh_val)
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + q_start * stride_dqs + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)
