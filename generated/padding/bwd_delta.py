# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: kernels/bwd_delta.py.jinja
# hash: 64c03d143425de74
"""First step of the backward of `padding`.

`delta = sum(o * do) - dlse` is the part of the softmax gradient that a whole row shares.

    keep   kv_idx < length[b]
    o      [B, Hq, Sq, Dv]
    do     [B, Hq, Sq, Dv]
    dlse   [B, Hq, Sq]  fp32, gradient of lse
    delta  [B, Hq, Sq]  fp32, sum(o * do) - dlse
"""

import triton
import triton.language as tl


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
    """Rows `start` to `start + ROWS` of a `[length, COLS]` matrix; zero in columns and, if BOUNDED, rows beyond it."""
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


@triton.jit(
    do_not_specialize=[
        "q_len",
        "num_heads",
    ]
)
def padding_bwd_delta(
    o_ptr,
    do_ptr,
    dlse_ptr,
    delta_ptr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    q_len,
    num_heads,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    num_blocks = tl.cdiv(q_len, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = (tl.program_id(0) // num_blocks).to(tl.int64)
    b = head // num_heads
    h = head % num_heads
    start_m = block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    o_base = o_ptr + b * stride_ob + h * stride_oh
    do_base = do_ptr + b * stride_dob + h * stride_doh
    o_tile = load_tile(o_base, start_m, q_len, stride_os, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    do_tile = load_tile(do_base, start_m, q_len, stride_dos, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    row_ptrs = head * q_len + rows
    in_rows = rows < q_len
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + row_ptrs, mask=in_rows, other=0.0)
    tl.store(delta_ptr + row_ptrs, delta, mask=in_rows)
