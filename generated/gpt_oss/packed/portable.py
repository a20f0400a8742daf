# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: portable/portable.py.jinja
# hash: 5c8afa6ae153ede6
"""Triton kernels of `gpt_oss`, packed sequences: forward and gradients, and what runs before and after Hopper's
backward.

    keep        q_idx >= kv_idx and q_idx - kv_idx < 128
    q           [total_q, Hq, D]
    k           [total_k, Hkv, D]
    v           [total_k, Hkv, Dv]
    sink        [Hq]  fp32, logit in the denominator only
    block_seqs  [entries, 8]  int32, the sequence of each block: number, -1 for none; first entry; start and length of
                its queries, and of its keys; how many blocks there are
    o           [total_q, Hq, Dv]
    lse         [Hq, total_q]  fp32, log of the softmax denominator
    dlse        [Hq, total_q]  fp32, gradient of lse
    do          [total_q, Hq, Dv]
    delta       [Hq, total_q]  fp32, sum(o * do) - dlse
    dq          [total_q, Hq, D]
    dsink       [Hq, entries]  fp32, partial sums
    dk          [total_k, Hkv, D]
    dv          [total_k, Hkv, Dv]
"""

import triton
import triton.language as tl

from ..._runtime.device.block_seqs import FIRST_ENTRY, KV_LEN, KV_START, Q_LEN, Q_START, RECORD
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
from ..._runtime.device.tl_block_seqs import load_sequence
from ..._runtime.device.tl_math import keep_range
from ..._runtime.device.tl_rows import load_dq_rows, row_delta, store_dq_rows


@triton.jit(do_not_specialize=["q_offset", "q_total", "num_heads", "group_size"])
def gpt_oss_packed_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    sink_ptr,
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
    PTX: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
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
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_start = tl.load(record + Q_START).to(tl.int64)
    kv_start = tl.load(record + KV_START).to(tl.int64)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
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
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + q_start * stride_qs + h * stride_qh * UNIT
    k_base = k_ptr + kv_start * stride_ks + hkv * stride_kh * UNIT
    v_base = v_ptr + kv_start * stride_vs + hkv * stride_vh * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(-(-q_first + 127), 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + 1, kv_len)

    # The sink acts as a first key without a value: its logit adds only to the denominator.
    sink = tl.load(sink_ptr + h) * LOG2E
    row_max = tl.zeros([BLOCK_M], tl.float32) + sink
    row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    for start_n in range(kv_begin, kv_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        qk = keep_range(qk, q_idx[:, None] - kv_idx[None, :], 128, float("-inf"), PTX)
        qk = tl.where((kv_idx < kv_len)[None, :], qk, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        # While all scores of a row are -inf, so is its maximum, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(qk * qk_scale - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = sink.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    # One division per row instead of one per element: beside the few blocks of a band, divisions take noticeable time.
    o_tile = [part * (1.0 / row_sum)[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + q_start * stride_os + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + h * q_total + q_start
    tl.store(lse_base + rows, lse, mask=rows < q_len)


@triton.jit(do_not_specialize=["q_offset", "q_total", "num_heads", "group_size"])
def gpt_oss_packed_bwd_dq(
    o_ptr,
    dlse_ptr,
    sink_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    block_seqs_ptr,
    q_offset,
    delta_ptr,
    dq_ptr,
    dsink_ptr,
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
    PTX: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
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
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_heads * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_start = tl.load(record + Q_START).to(tl.int64)
    kv_start = tl.load(record + KV_START).to(tl.int64)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
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
    in_rows = rows < q_len
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
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
    # The sink's gradient is p_sink * (dp - delta). A sink has no value, so dp is 0. One partial sum per program.
    p_sink = tl.where(lse == float("-inf"), 0.0, tl.exp2(tl.load(sink_ptr + h) * LOG2E - lse))
    tl.store(
        dsink_ptr + h * (tl.num_programs(0) // num_heads) + first_entry + start_m // BLOCK_M,
        -tl.sum(tl.where(in_rows, p_sink * delta, 0.0), 0),
    )
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_begin = tl.maximum(-(-q_first + 127), 0) // BLOCK_N * BLOCK_N
    kv_end = tl.minimum(q_last + 1, kv_len)

    dq = zero_tile(BLOCK_M, HEAD_DIM, BLOCK_D)
    for start_n in range(kv_begin, kv_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        p = tl.exp2(qk * qk_scale - lse[:, None])
        p = keep_range(p, q_idx[:, None] - kv_idx[None, :], 128, 0.0, PTX)
        p = tl.where((kv_idx < kv_len)[None, :], p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + q_start * stride_dqs + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["q_offset", "q_total", "num_heads", "group_size"])
def gpt_oss_packed_bwd_dkdv(
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
    PTX: tl.constexpr,
    HEAD_GROUPS: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
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
    num_head_groups = num_heads // group_size
    # A sequence's programs follow each other, long sequences come first; there may be more programs than blocks.
    record = block_seqs_ptr + tl.program_id(0) // num_head_groups * RECORD
    b, first_entry = tl.load(record).to(tl.int64), tl.load(record + FIRST_ENTRY)
    q_start = tl.load(record + Q_START).to(tl.int64)
    kv_start = tl.load(record + KV_START).to(tl.int64)
    q_len, kv_len = tl.load(record + Q_LEN), tl.load(record + KV_LEN)
    if b < 0:
        return
    program = tl.program_id(0) - first_entry * num_head_groups
    num_blocks = tl.cdiv(kv_len, BLOCK_N)
    head_group = (program // num_blocks).to(tl.int64)
    start_n = (program % num_blocks) * BLOCK_N
    hkv = head_group // HEAD_GROUPS
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    # Rows begin at multiples of 16 bytes. Strides count units of 16 bytes, so that the compiler knows the alignment.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    k_base = k_ptr + kv_start * stride_ks + hkv * stride_kh * UNIT
    v_base = v_ptr + kv_start * stride_vs + hkv * stride_vh * UNIT
    k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
    qk_scale = scale * LOG2E
    kv_idx = start_n + tl.arange(0, BLOCK_N)

    kv_first = start_n
    kv_last = tl.minimum(start_n + BLOCK_N, kv_len) - 1
    row_begin = tl.maximum(kv_first - q_shift, 0) // BLOCK_M * BLOCK_M
    row_end = tl.minimum(kv_last - q_shift + 128, q_len)

    dk = zero_tile(BLOCK_N, HEAD_DIM, BLOCK_D)
    dv = zero_tile(BLOCK_N, HEAD_DIM_V, BLOCK_DV)
    for member in range(group_size):
        h = head_group * group_size + member
        q_base = q_ptr + q_start * stride_qs + h * stride_qh * UNIT
        do_base = do_ptr + q_start * stride_dos + h * stride_doh * UNIT
        row_base = h * q_total + q_start
        for start_m in range(row_begin, row_end, BLOCK_M):
            q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
            rows = start_m + tl.arange(0, BLOCK_M)
            # Rows are counted from the block's first row, so that the offsets of each thread are constants.
            row_offs = tl.arange(0, BLOCK_M)
            lse = load_vector(lse_ptr + row_base + start_m, row_offs, q_len - start_m, float("inf"), True) * LOG2E
            delta = load_vector(delta_ptr + row_base + start_m, row_offs, q_len - start_m, 0.0, True)
            # Both products without probabilities come first: the second runs during the exponentials of the first.
            qk = dot_rows(k_tile, q_tile)  # [N, M]
            # The product starts at -delta, so that registers need not hold delta beside the masks.
            dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - delta[None, :]
            dp = dot_rows(v_tile, do_tile, dp)
            q_idx = rows + q_shift
            p = tl.exp2(qk * qk_scale - lse[None, :])
            p = keep_range(p, q_idx[None, :] - kv_idx[:, None], 128, 0.0, PTX)
            p = tl.where((rows < q_len)[None, :], p, 0.0)
            dv = add_dot(dv, p, do_tile)
            ds = p * dp
            dk = add_dot(dk, ds, q_tile)

    dk_base = dk_ptr + kv_start * stride_dks + head_group * stride_dkh
    dv_base = dv_ptr + kv_start * stride_dvs + head_group * stride_dvh
    store_tile(dk_base, [part * scale for part in dk], start_n, kv_len, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_n, kv_len, stride_dvs, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=["q_total", "num_row_blocks", "num_entries"])
def gpt_oss_packed_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    sink_ptr,
    row_seqs_ptr,
    delta_ptr,
    dsink_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_oh,
    stride_os: tl.constexpr,
    stride_doh,
    stride_dos: tl.constexpr,
    q_total,
    num_row_blocks,
    num_entries,
    scale,
    HAS_DLSE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What Hopper's backward reads of each row: lse and delta, padded to whole blocks of rows.

    Without WITH_DQ the portable kernel of dq ran before, and stored delta.

        row_seqs   [entries, 8]  int32, the sequence of each block of rows, in the form of `block_seqs`
        row_lse    [Hq, blocks * BLOCK_M]  fp32, -lse / scale, -inf where no probability is above 0
        row_delta  [Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row
    """
    h, entry = (tl.program_id(0) // num_entries).to(tl.int64), tl.program_id(0) % num_entries
    b, first_entry, q_start, q_len = load_sequence(row_seqs_ptr, entry)
    # There may be more entries than blocks.
    if b < 0:
        return
    block = entry - first_entry
    # Each sequence is padded to whole blocks of rows, and begins behind the last block of the sequence before.
    row_block = h * num_row_blocks + q_start // BLOCK_M + b + block
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    row_offs = h * q_total + q_start + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    if WITH_DQ:
        UNIT: tl.constexpr = 128 // o_ptr.dtype.element_ty.primitive_bitwidth
        o_base = o_ptr + q_start * stride_os + h * stride_oh * UNIT
        do_base = do_ptr + q_start * stride_dos + h * stride_doh * UNIT
        delta = row_delta(
            o_base, do_base, dlse_ptr, row_offs, rows, q_len, stride_os, stride_dos, HAS_DLSE, HEAD_DIM_V, BLOCK_DV
        )
        # The sink's gradient is p_sink * (dp - delta). A sink has no value, so dp is 0. One partial sum per program.
        p_sink = tl.where(lse == float("-inf"), 0.0, tl.exp2(tl.load(sink_ptr + h) * LOG2E - lse))
        dsink = -tl.sum(tl.where(in_rows, p_sink * delta, 0.0), 0)
        tl.store(dsink_ptr + h * num_entries + entry, dsink)
    else:
        delta = tl.load(delta_ptr + row_offs, mask=in_rows, other=0.0)
    padded_offs = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # In a row without any key all probabilities are 0 with lse = inf; -inf minus -inf would be NaN.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + padded_offs, -lse / (scale * LOG2E))
    tl.store(row_delta_ptr + padded_offs, -delta)


@triton.jit(do_not_specialize=["num_row_blocks", "num_entries"])
def gpt_oss_packed_hopper_dq_rows(
    dq_sums_ptr,
    row_seqs_ptr,
    dq_ptr,
    stride_dqh,
    stride_dqs: tl.constexpr,
    num_row_blocks,
    num_entries,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dq from the sums `dq_sums` of Hopper's backward. Each program converts one warpgroup's part of a query block.

    dq_sums  [Hq, blocks, 2, lines, 32]  fp32, gradient of q before the factor `scale`
    """
    PART_COLS: tl.constexpr = BLOCK_D * BLOCK_M // 128
    part, tile = tl.program_id(0) % 2, tl.program_id(0) // 2
    h, entry = (tile // num_entries).to(tl.int64), tile % num_entries
    b, first_entry, q_start, q_len = load_sequence(row_seqs_ptr, entry)
    # There may be more entries than blocks.
    if b < 0:
        return
    block = entry - first_entry
    # Each sequence is padded to whole blocks of rows, and begins behind the last block of the sequence before.
    row_block = h * num_row_blocks + q_start // BLOCK_M + b + block
    first = (2 * row_block + part) * (64 * PART_COLS)
    dq_tile = load_dq_rows(dq_sums_ptr + first, scale, BLOCK_D, BLOCK_M)
    store_dq_rows(
        dq_ptr, q_start, stride_dqs, h, stride_dqh, dq_tile, block, part, q_len, stride_dqs, HEAD_DIM, BLOCK_M
    )
