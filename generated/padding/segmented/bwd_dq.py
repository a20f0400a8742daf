# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: portable/bwd_dq.py.jinja
# hash: ed213ca6efeb83a7
"""Gradient of `padding`, with segment ids with respect to q.

    keep            kv_idx < length[b] and q_segment_ids[b, rows] == kv_segment_ids[b, cols] and kv_segment_ids[b, cols]
                    != padding_id
    o               [B, Hq, Sq, Dv]
    dlse            [B, Hq, Sq]  fp32, gradient of lse
    q               [B, Hq, Sq, D]
    k               [B, Hkv, Skv, D]
    v               [B, Hkv, Skv, Dv]
    do              [B, Hq, Sq, Dv]
    lse             [B, Hq, Sq]  fp32, log of the softmax denominator
    length          [b]  int32
    q_segment_ids   [b, q_row]  int32
    kv_segment_ids  [b, k_row]  int32
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

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.constexpr_function
def second_width(REST):
    """Columns of a tile's second part, which holds REST: a power of two that a matrix product takes."""
    return max(triton.next_power_of_2(REST), 16)


@triton.jit
def load_columns(
    ptr,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    # The start moves a 64-bit scalar; the tile of offsets stays 32-bit and the same in every iteration.
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    ptrs = ptr + tl.cast(start, tl.int64) * stride_row + (row * stride_row + col)
    if BOUNDED:
        mask = start + row < length
        if COLS < BLOCK_COLS:
            mask = mask & (col < COLS)
        return tl.load(ptrs, mask=mask, other=0.0)
    else:
        if COLS < BLOCK_COLS:
            return tl.load(ptrs, mask=col < COLS, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def load_tile(
    ptr,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows `start` to `start + ROWS` of a `[length, COLS]` matrix; zero in columns and, if BOUNDED, rows beyond it.

    A tuple: the first BLOCK_COLS columns, and the others where there are more.
    """
    first = load_columns(ptr, start, length, stride_row, ROWS, COLS, BLOCK_COLS, BOUNDED)
    if COLS <= BLOCK_COLS:
        return (first,)
    else:
        REST: tl.constexpr = COLS - BLOCK_COLS
        rest = load_columns(ptr + BLOCK_COLS, start, length, stride_row, ROWS, REST, second_width(REST), BOUNDED)
        return first, rest


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A tile of sums, in the parts of `load_tile`."""
    first = tl.zeros([ROWS, BLOCK_COLS], tl.float32)
    if COLS <= BLOCK_COLS:
        return (first,)
    else:
        return first, tl.zeros([ROWS, second_width(COLS - BLOCK_COLS)], tl.float32)


@triton.jit
def dot_rows(a_tile, b_tile, acc=None):
    """`a_tile @ b_tile.T`, added to `acc`: of each row of one the product with each row of the other."""
    for i in tl.static_range(len(a_tile)):
        acc = tl.dot(a_tile[i], tl.trans(b_tile[i]), acc, input_precision="ieee")
    return acc


@triton.jit
def add_dot(acc, weights, tile, alpha=None):
    """`acc + weights @ tile`, part by part; with `alpha` the rows of `acc` are multiplied by it first."""
    weights = weights.to(tile[0].dtype)
    if alpha is not None:
        acc = [part * alpha[:, None] for part in acc]
    first = tl.dot(weights, tile[0], acc[0], input_precision="ieee")
    if len(tile) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, tile[1], acc[1], input_precision="ieee")


@triton.jit
def row_products(a_tile, b_tile):
    """Of each row of one tile the product with the same row of the other."""
    sums = tl.sum(a_tile[0].to(tl.float32) * b_tile[0].to(tl.float32), 1)
    for i in tl.static_range(1, len(a_tile)):
        sums += tl.sum(a_tile[i].to(tl.float32) * b_tile[i].to(tl.float32), 1)
    return sums


@triton.jit
def store_tile(
    ptr,
    tile,
    start,
    length,
    stride_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Write `tile` over rows `start` to `start + ROWS` of a `[length, COLS]` matrix, nothing beyond its edges."""
    row = tl.arange(0, ROWS)[:, None]
    for i in tl.static_range(len(tile)):
        col = i * BLOCK_COLS + tl.arange(0, tile[i].shape[1])[None, :]
        ptrs = ptr + tl.cast(start, tl.int64) * stride_row + (row * stride_row + col)
        tl.store(ptrs, tile[i].to(ptr.dtype.element_ty), mask=(start + row < length) & (col < COLS))


@triton.jit(
    do_not_specialize=[
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
def padding_segmented_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    length_ptr,
    q_segment_ids_ptr,
    kv_segment_ids_ptr,
    kv_positions_ptr,
    ranges_ptr,
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
    stride_length_0,
    stride_q_segment_ids_0,
    stride_q_segment_ids_1,
    stride_kv_segment_ids_0,
    stride_kv_segment_ids_1,
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
    HAS_DLSE: tl.constexpr,
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
    length_val = tl.load(length_ptr + b * stride_length_0)
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
        kv_segment_ids_kv = tl.load(
            kv_segment_ids_ptr
            + b * stride_kv_segment_ids_0
            + clamp_index(cols, kv_segment_ids_size_1).to(tl.int64) * stride_kv_segment_ids_1
        )
        p = tl.exp2(qk * qk_scale - lse[:, None])
        keep = (
            (kv_idx < length_val)[None, :]
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
