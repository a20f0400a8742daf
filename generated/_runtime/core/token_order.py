# SPDX-License-Identifier: Apache-2.0
"""The check of positions on a GPU, for ops that read a tensor by row: if they disagree with rows, results are NaN."""

import triton
import triton.language as tl


@triton.jit
def disagreement(ids, earlier_ids, positions, earlier_positions, rows, inside, padding_id):
    """Whether each token's position differs from its row, and whether it does not follow the token before it."""
    real = inside & (ids != padding_id)
    follows = (rows == 0) | (ids != earlier_ids) | (positions == earlier_positions + 1)
    return real & (positions != rows), real & ~follows


# One program checks one batch row. The host need not wait, and the check costs a fraction of the row's attention.
@triton.jit(do_not_specialize=["q_len", "kv_len", "num_heads", "padding_id"])
def mark_disorder(
    q_ids_ptr,
    kv_ids_ptr,
    q_positions_ptr,
    kv_positions_ptr,
    o_ptr,
    lse_ptr,
    stride_q_ids_b,
    stride_q_ids_s,
    stride_kv_ids_b,
    stride_kv_ids_s,
    stride_q_positions_b,
    stride_kv_positions_b,
    stride_ob,
    stride_oh,
    stride_os,
    q_len,
    kv_len,
    num_heads,
    padding_id,
    IN_ORDER: tl.constexpr,
    IN_STEP: tl.constexpr,
    AS_ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make o and lse of a batch row NaN if its positions neither equal its rows nor obey the rule of the constants.

        q_ids, kv_ids              [B, Sq], [B, Skv]  int32, segment ids
        q_positions, kv_positions  [B, Sq], [B, Skv]  int32
        o                          [B, Hq, Sq, Dv]
        lse                        [B, Hq, Sq]  fp32

    IN_ORDER: positions rise by one from row to row of a segment. IN_STEP: the query and the key of a row have the same
    position and, unless the key is padding, the same id. AS_ROWS: positions must equal the rows.
    """
    b = tl.program_id(0).to(tl.int64)
    not_rows = tl.zeros([BLOCK], tl.int32)
    not_right = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.maximum(q_len, kv_len), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        earlier = tl.maximum(rows - 1, 0)
        in_q, in_kv = rows < q_len, rows < kv_len
        q_ids_base = q_ids_ptr + b * stride_q_ids_b
        q_ids = tl.load(q_ids_base + rows * stride_q_ids_s, mask=in_q, other=0)
        earlier_ids = tl.load(q_ids_base + earlier * stride_q_ids_s, mask=in_q, other=0)
        q_positions = tl.load(q_positions_ptr + b * stride_q_positions_b + rows, mask=in_q, other=0)
        earlier_positions = tl.load(q_positions_ptr + b * stride_q_positions_b + earlier, mask=in_q, other=0)
        moved, unordered = disagreement(q_ids, earlier_ids, q_positions, earlier_positions, rows, in_q, padding_id)
        not_rows |= moved.to(tl.int32)
        if IN_ORDER:
            not_right |= unordered.to(tl.int32)
        kv_ids_base = kv_ids_ptr + b * stride_kv_ids_b
        kv_ids = tl.load(kv_ids_base + rows * stride_kv_ids_s, mask=in_kv, other=0)
        earlier_ids = tl.load(kv_ids_base + earlier * stride_kv_ids_s, mask=in_kv, other=0)
        kv_positions = tl.load(kv_positions_ptr + b * stride_kv_positions_b + rows, mask=in_kv, other=0)
        earlier_positions = tl.load(kv_positions_ptr + b * stride_kv_positions_b + earlier, mask=in_kv, other=0)
        moved, unordered = disagreement(kv_ids, earlier_ids, kv_positions, earlier_positions, rows, in_kv, padding_id)
        not_rows |= moved.to(tl.int32)
        if IN_ORDER:
            not_right |= unordered.to(tl.int32)
        if IN_STEP:
            one_token = in_kv & (kv_positions == q_positions) & ((kv_ids == q_ids) | (kv_ids == padding_id))
            not_right |= (in_q & (q_ids != padding_id) & ~one_token).to(tl.int32)
    disorder = tl.max(not_rows, 0)
    if not AS_ROWS:
        disorder = disorder * tl.max(not_right, 0)
    if disorder == 0:
        return
    cols = tl.arange(0, BLOCK_DV)[None, :]
    for head in range(num_heads):
        for start in range(0, q_len, 16):
            rows = start + tl.arange(0, 16)
            lse_ptrs = lse_ptr + (b * num_heads + head) * q_len + rows
            tl.store(lse_ptrs, tl.full([16], float("nan"), tl.float32), mask=rows < q_len)
            o_ptrs = o_ptr + b * stride_ob + head * stride_oh + rows.to(tl.int64)[:, None] * stride_os + cols
            inside = (rows < q_len)[:, None] & (cols < HEAD_DIM_V)
            tl.store(o_ptrs, tl.full([16, BLOCK_DV], float("nan"), o_ptr.dtype.element_ty), mask=inside)
