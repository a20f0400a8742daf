# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: portable/bwd_dq.py.jinja
# hash: d44cc05b36e6ee21
"""Gradient of `relative_bias` with respect to q and bias.

    keep          q_idx >= kv_idx
    score         score + bias[h, q_idx - kv_idx]
    o             [B, Hq, Sq, Dv]
    dlse          [B, Hq, Sq]  fp32, gradient of lse
    q             [B, Hq, Sq, D]
    k             [B, Hkv, Skv, D]
    v             [B, Hkv, Skv, Dv]
    do            [B, Hq, Sq, Dv]
    lse           [B, Hq, Sq]  fp32, log of the softmax denominator
    bias          [h, distances]  float32
    delta         [B, Hq, Sq]  fp32, sum(o * do) - dlse
    dq            [B, Hq, Sq, D]
    dbias_atomic  [h, distances]  fp32, added to with atomics

One program serves a block of query rows of one query head. The probabilities are computed again from the saved lse;
`ds = p * (dp - delta)` is the gradient of a score, `delta = sum(o * do) - dlse` what it takes from a row. It is stored
for the kernel of dk and dv.

Not deterministic: the gradient of bias is added with fp32 atomics, in any order, so that equal inputs may give
other last bits.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_pairs(ptrs, PTX: tl.constexpr):
    # One element per query and key, read where it is used: the compiler's pipeline would copy the whole tile to shared
    # memory ahead of time, four bytes an instruction. Shorter elements it leaves alone.
    BITS: tl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth
    if PTX and BITS == 32:
        word = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [ptrs], dtype=tl.int32, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    elif PTX and BITS == 64:
        word = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [ptrs], dtype=tl.int64, is_pure=True, pack=1
        )
        return word.to(ptrs.dtype.element_ty, bitcast=True)
    else:
        return tl.load(ptrs)


@triton.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.jit
def diagonal_sums(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sums of a tile along its diagonals, and the row less the column of each, as vectors of 2 * max(ROWS, COLS).

    A diagonal may have two entries, or be empty and have a sum of 0.
    """
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    # Rotating row r by r places brings a diagonal into one column. In each band of as many rows as columns, what wraps
    # around is on another diagonal than what does not, COLS rows further.
    rotated = tl.gather(tile, (row + col) % COLS, 1)
    DEPTH: tl.constexpr = ROWS if ROWS < COLS else COLS
    BANDS: tl.constexpr = ROWS // DEPTH
    wraps = row % DEPTH + col >= COLS
    inner = tl.sum(tl.reshape(tl.where(wraps, 0.0, rotated), [BANDS, DEPTH, COLS]), 1)
    outer = tl.sum(tl.reshape(tl.where(wraps, rotated, 0.0), [BANDS, DEPTH, COLS]), 1)
    lag = tl.arange(0, BANDS)[:, None] * DEPTH - col
    sums = tl.reshape(tl.join(inner, outer), [2 * BANDS * COLS])
    return sums, tl.reshape(tl.join(lag, lag + COLS), [2 * BANDS * COLS])


@triton.jit
def add_diagonals(ptr, offs, sums):
    """Add each sum to the element at its offset, with atomics."""
    # Far from the diagonal a clamped index is the same for all: one atomic of the total, or thousands of programs queue
    # for that element.
    same = tl.min(offs, 0) == tl.max(offs, 0)
    first = tl.arange(0, sums.shape[0]) == 0
    sums = tl.where(same, tl.where(first, tl.sum(sums, 0), 0.0), sums)
    tl.atomic_add(ptr + offs, sums, mask=sums != 0.0, sem="relaxed")


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
        "q_offset",
        "bias_size_1",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
    ]
)
def relative_bias_bwd_dq(
    o_ptr,
    dlse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    bias_ptr,
    q_offset,
    delta_ptr,
    dq_ptr,
    dbias_atomic_ptr,
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
    stride_bias_0,
    stride_bias_1,
    bias_size_1,
    stride_dbias_atomic_0,
    stride_dbias_atomic_1,
    q_len,
    kv_len,
    num_heads,
    group_size,
    scale,
    HAS_DLSE: tl.constexpr,
    GRAD_BIAS: tl.constexpr,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    PTX: tl.constexpr,
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
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        bias_qk = load_pairs(
            bias_ptr
            + h * stride_bias_0
            + clamp_index(q_idx[:, None] - kv_idx[None, :], bias_size_1).to(tl.int32) * stride_bias_1,
            PTX,
        )
        p = tl.exp2(1.4426950408889634 * scale * qk + 1.4426950408889634 * bias_qk - lse[:, None])
        keep = q_idx[:, None] >= kv_idx[None, :]
        if RAGGED:
            keep = keep & (kv_idx < kv_len)[None, :]
        p = tl.where(keep, p, 0.0)
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        if GRAD_BIAS:
            sums, lag = diagonal_sums(tl.where(keep & in_rows[:, None], ds, 0.0), BLOCK_M, BLOCK_N)
            lag += start_m + q_shift - start_n
            add_diagonals(
                dbias_atomic_ptr,
                h * stride_dbias_atomic_0 + clamp_index(lag, bias_size_1).to(tl.int64) * stride_dbias_atomic_1,
                sums,
            )
        dq = add_dot(dq, ds, k_tile)

    for start_n in range(0, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        bias_qk = load_pairs(
            bias_ptr
            + h * stride_bias_0
            + clamp_index(q_idx[:, None] - kv_idx[None, :], bias_size_1).to(tl.int32) * stride_bias_1,
            PTX,
        )
        p = tl.exp2(1.4426950408889634 * scale * qk + 1.4426950408889634 * bias_qk - lse[:, None])
        dp = dot_rows(do_tile, v_tile)
        ds = p * (dp - delta[:, None])
        if GRAD_BIAS:
            sums, lag = diagonal_sums(tl.where(in_rows[:, None], ds, 0.0), BLOCK_M, BLOCK_N)
            lag += start_m + q_shift - start_n
            add_diagonals(
                dbias_atomic_ptr,
                h * stride_dbias_atomic_0 + clamp_index(lag, bias_size_1).to(tl.int64) * stride_dbias_atomic_1,
                sums,
            )
        dq = add_dot(dq, ds, k_tile)

    dq_base = dq_ptr + b * stride_dqb + h * stride_dqh
    store_tile(dq_base, [part * scale for part in dq], start_m, q_len, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)
