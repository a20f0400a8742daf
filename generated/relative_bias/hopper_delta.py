# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: hopper/delta.py.jinja
# hash: 96df815d0d151ffb
"""What runs before the backward of `relative_bias` on Hopper.

o         [B, Hq, Sq, Dv]
do        [B, Hq, Sq, Dv]
lse       [B, Hq, Sq]  fp32, log of the softmax denominator
dlse      [B, Hq, Sq]  fp32, gradient of lse
delta     [B, Hq, Sq]  fp32, sum(o * do) - dlse
row_lse   [B, Hq, blocks * BLOCK_M]  fp32, lse times log2(e), inf where no probability is above 0
row_delta [B, Hq, blocks * BLOCK_M]  fp32, -delta, 0 beyond the last row
"""

import triton
import triton.language as tl

from .._runtime.device.tl import LOG2E, load_rows


@triton.jit(do_not_specialize=["q_len", "num_heads"])
def relative_bias_hopper_delta(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    row_lse_ptr,
    row_delta_ptr,
    stride_ob,
    stride_oh,
    stride_os: tl.constexpr,
    stride_dob,
    stride_doh,
    stride_dos: tl.constexpr,
    q_len,
    num_heads,
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
    tl.store(row_lse_ptr + padded_offs, lse)
    tl.store(row_delta_ptr + padded_offs, -delta)
