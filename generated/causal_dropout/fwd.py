# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: portable/fwd.py.jinja
# hash: f65213fc0991aad7
"""Forward of `causal_dropout`: `o = dropout(softmax(score)) v`.

    keep  q_idx >= kv_idx
    drop  word < threshold, a random word of seed, b * Hq + h, row and key
    q     [B, Hq, Sq, D]
    k     [B, Hkv, Skv, D]
    v     [B, Hkv, Skv, Dv]
    o     [B, Hq, Sq, Dv]
    lse   [B, Hq, Sq]  fp32, log of the softmax denominator

One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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


@triton.jit
def dropout_mask(seed, threshold, head, start_m, start_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which probabilities of a tile are dropped: those whose random word is below `threshold`.

    The word depends on seed, head, row and key alone, so that every kernel draws the same.
    """
    # One Philox gives four words. They go to two rows and two keys, 8 apart each: of a tensor core's product one thread
    # holds all four pairs, whichever way the tile lies, and the compiler computes once what is written for every pair.
    # Blocks begin at multiples of 16, so the index inside the tile tells which of the four a pair is.
    row = tl.arange(0, BLOCK_M)[:, None]
    key = tl.arange(0, BLOCK_N)[None, :]
    row_group = (start_m >> 1) + ((row >> 4 << 3) | (row & 7))
    key_group = (start_n >> 1) + ((key >> 4 << 3) | (key & 7))
    word_0, word_1, word_2, word_3 = tl.philox(seed, key_group, row_group, head.to(tl.int32), 0)
    far_row, far_key = (row & 8) != 0, (key & 8) != 0
    word = tl.where(far_row, tl.where(far_key, word_3, word_2), tl.where(far_key, word_1, word_0))
    return word < threshold


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "seed",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
        "threshold",
    ]
)
def causal_dropout_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_offset,
    seed: tl.uint64,
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
    threshold: tl.uint32,
    keep_scale,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    SCALARS_LOADED: tl.constexpr,
    DROPOUT: tl.constexpr,
    RAGGED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    seed = tl.load(seed) if SCALARS_LOADED else seed
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
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    qk_scale = scale * LOG2E
    q_idx = rows + q_shift

    q_first = start_m + q_shift
    q_last = tl.minimum(start_m + BLOCK_M, q_len) - 1 + q_shift
    kv_end = tl.minimum(q_last + 1, kv_len)
    # Blocks before full_end need no mask.
    full_end = tl.minimum(q_first + 1, kv_len) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, 0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_tile(BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    for start_n in range(full_end, kv_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, RAGGED)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        kv_idx = start_n + tl.arange(0, BLOCK_N)
        keep = q_idx[:, None] >= kv_idx[None, :]
        if RAGGED:
            keep = keep & (kv_idx < kv_len)[None, :]
        qk = tl.where(keep, qk, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(qk * qk_scale - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if DROPOUT:
            drop = dropout_mask(seed, threshold, b * num_heads + h, start_m, start_n, BLOCK_M, BLOCK_N)
            p = tl.where(drop, 0.0, p)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for start_n in range(0, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        max_new = tl.maximum(row_max, tl.max(qk, 1) * qk_scale)
        p = tl.exp2(qk * qk_scale - max_new[:, None])
        alpha = tl.exp2(row_max - max_new)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if DROPOUT:
            drop = dropout_mask(seed, threshold, b * num_heads + h, start_m, start_n, BLOCK_M, BLOCK_N)
            p = tl.where(drop, 0.0, p)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o_tile = [part / row_sum[:, None] for part in acc]
    # What is not dropped is scaled here, once for all keys.
    if DROPOUT:
        o_tile = [part * keep_scale for part in o_tile]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + b * stride_ob + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + (b * num_heads + h) * q_len
    tl.store(lse_base + rows, lse, mask=rows < q_len)
