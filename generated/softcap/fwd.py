# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: portable/fwd.py.jinja
# hash: 0b022358419395f8
"""Forward of `softcap`: `o = softmax(score) v`.

    keep   q_idx >= kv_idx
    score  20.0 * tanh(0.05 * score)
    q      [B, Hq, Sq, D]
    k      [B, Hkv, Skv, D]
    v      [B, Hkv, Skv, Dv]
    o      [B, Hq, Sq, Dv]
    lse    [B, Hq, Sq]  fp32, log of the softmax denominator

One program serves a block of query rows of one query head. The scores of a row are folded in block by block (online
softmax, arXiv:2205.14135): `row_max` is the largest score so far, `row_sum` the sum of exponentials relative to it.
Scores are kept times log2(e), so that each exponential is one `exp2`.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, HARDWARE: tl.constexpr):
    if HARDWARE:
        # One instruction, relative error 2**-11: less than what rounding a score to 16 bits costs.
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        far = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
        # Near zero the difference above cancels; there a polynomial keeps float32's relative error (Cephes, tanhf).
        z = x * x
        poly = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z
        near = x + x * z * ((poly + 1.33314422036e-1) * z - 3.33332819422e-1)
        return tl.where(tl.abs(x) < 0.625, near, far)


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


@triton.jit(
    do_not_specialize=[
        "q_offset",
        "q_len",
        "kv_len",
        "num_heads",
        "group_size",
    ]
)
def softcap_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    q_offset,
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
    Q_OFFSET_PER_BATCH: tl.constexpr,
    HARDWARE_TANH: tl.constexpr,
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
    # Rows begin at multiples of 16 bytes, and these strides count such units: the compiler can tell from the product.
    UNIT: tl.constexpr = 128 // q_ptr.dtype.element_ty.primitive_bitwidth
    q_base = q_ptr + (b * stride_qb + h * stride_qh) * UNIT
    k_base = k_ptr + (b * stride_kb + hkv * stride_kh) * UNIT
    v_base = v_ptr + (b * stride_vb + hkv * stride_vh) * UNIT
    q_tile = load_tile(q_base, start_m, q_len, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, True)
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
        logit = 28.85390081777927 * tanh(0.05 * scale * qk, HARDWARE_TANH)
        keep = q_idx[:, None] >= kv_idx[None, :]
        if RAGGED:
            keep = keep & (kv_idx < kv_len)[None, :]
        logit = tl.where(keep, logit, float("-inf"))
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, RAGGED)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    for start_n in range(0, full_end, BLOCK_N):
        k_tile = load_tile(k_base, start_n, kv_len, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, False)
        qk = dot_rows(q_tile, k_tile)  # [M, N]
        logit = 28.85390081777927 * tanh(0.05 * scale * qk, HARDWARE_TANH)
        max_new = tl.maximum(row_max, tl.max(logit, 1))
        # While a row has met no key its maximum is -inf, and -inf minus -inf is NaN.
        max_ref = tl.where(max_new == float("-inf"), 0.0, max_new)
        p = tl.exp2(logit - max_ref[:, None])
        alpha = tl.exp2(row_max - max_ref)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = load_tile(v_base, start_n, kv_len, stride_vs, BLOCK_N, HEAD_DIM_V, BLOCK_DV, False)
        acc = add_dot(acc, p, v_tile, alpha)
        row_max = max_new

    # A row without any key gives o = 0 and lse = -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    o_tile = [part / row_sum[:, None] for part in acc]
    lse = (row_max + tl.log2(row_sum)) * LN2
    o_base = o_ptr + b * stride_ob + h * stride_oh
    store_tile(o_base, o_tile, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    lse_base = lse_ptr + (b * num_heads + h) * q_len
    tl.store(lse_base + rows, lse, mask=rows < q_len)
