# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: hopper/delta.py.jinja
# hash: 9a86839c4b6cff1a
"""What runs before the backward of `forgetting` on Hopper.

    o         [B, Hq, Sq, Dv]
    do        [B, Hq, Sq, Dv]
    lse       [B, Hq, Sq]  fp32, log of the softmax denominator
    dlse      [B, Hq, Sq]  fp32, gradient of lse
    delta     [B, Hq, Sq]  fp32, sum(o * do) - dlse
    row_lse   [B, Hq, blocks * BLOCK_M]  fp32, (row_term - lse) / scale, -inf where no probability is above 0
    row_delta [B, Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row

`row_term` is what the logits of a row share: all of its keys have it, and so it is found here.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def clamp_index(index, size):
    # No index leaves its tensor, whatever the call's offsets: reads are clamped to the ends.
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.jit
def load_rows(ptr, rows, length, stride_row, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Rows of a `[length, COLS]` matrix, zero beyond its edges."""
    cols = tl.arange(0, BLOCK_COLS)
    ptrs = ptr + (rows.to(tl.int64) * stride_row)[:, None] + cols[None, :]
    return tl.load(ptrs, mask=(rows < length)[:, None] & (cols < COLS)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["q_offset", "decay_size_2", "q_len", "num_heads"])
def forgetting_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    decay_ptr,
    q_offset,
    delta_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    stride_decay_0,
    stride_decay_1,
    decay_size_2,
    q_len,
    num_heads,
    scale,
    Q_OFFSET_PER_BATCH: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """lse and delta as copies of whole blocks need them.

    Without WITH_DQ another kernel has dq, and left delta.
    """
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    head, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    b = (head // num_heads).to(tl.int64)
    h = (head % num_heads).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len
    q_shift = tl.load(q_offset + b) if Q_OFFSET_PER_BATCH else q_offset
    q_idx = rows + q_shift
    decay_q = tl.load(decay_ptr + b * stride_decay_0 + h * stride_decay_1 + clamp_index(q_idx, decay_size_2))
    row_term = decay_q
    row_offs = (b * num_heads + h) * q_len + rows
    lse = tl.load(lse_ptr + row_offs, mask=in_rows, other=float("inf")) * LOG2E
    if WITH_DQ:
        UNIT: tl.constexpr = 128 // o_ptr.dtype.element_ty.primitive_bitwidth
        o_base = o_ptr + (b * stride_ob + h * stride_oh) * UNIT
        do_base = do_ptr + (b * stride_dob + h * stride_doh) * UNIT
        o_tile = load_rows(o_base, rows, q_len, stride_os, HEAD_DIM_V, BLOCK_DV)
        do_tile = load_rows(do_base, rows, q_len, stride_dos, HEAD_DIM_V, BLOCK_DV)
        delta = tl.sum(o_tile * do_tile, 1)
        if HAS_DLSE:
            delta -= tl.load(dlse_ptr + row_offs, mask=in_rows, other=0.0)
    else:
        delta = tl.load(delta_ptr + row_offs, mask=in_rows, other=0.0)
    padded_offs = ((b * num_heads + h) * num_blocks + block) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A row without any key has none of positive probability either; -inf minus -inf would be NaN.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(row_lse_ptr + padded_offs, (row_term - lse) / (scale * LOG2E))
    tl.store(row_delta_ptr + padded_offs, -delta)
