"""The kernel that adds up the gradients of keys and values that groups of query heads have left."""

import triton
import triton.language as tl


@triton.jit
def _add_up(
    groups_ptr, sums_ptr, stride_b, stride_h, stride_s, b, h, rows, length, num_heads,
    GROUPS: tl.constexpr, COLS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Write some rows of a head of `sums` [B, H, S, COLS] from `groups` [B, S, H * GROUPS, COLS], dense float32."""
    cols = tl.arange(0, BLOCK_COLS)
    mask = (rows < length)[:, None] & (cols < COLS)[None, :]
    first_groups = ((b * length + rows) * num_heads + h) * GROUPS
    total = tl.zeros([rows.shape[0], BLOCK_COLS], tl.float32)
    for group in tl.static_range(GROUPS):
        offs = (first_groups + group)[:, None] * COLS + cols[None, :]
        total += tl.load(groups_ptr + offs, mask=mask, other=0.0)
    sums_ptrs = sums_ptr + b * stride_b + h * stride_h + rows[:, None] * stride_s + cols[None, :]
    tl.store(sums_ptrs, total.to(sums_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_heads", "length"])
def add_head_groups(
    dk_groups_ptr, dv_groups_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, num_heads, length,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dk and dv, each the sum over the GROUPS groups of its key head, added up in a fixed order.

    A program serves BLOCK rows of one of the `num_heads` key heads of a batch row.
    """
    num_blocks = tl.cdiv(length, BLOCK)
    head = tl.program_id(0) // num_blocks
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    rows = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _add_up(
        dk_groups_ptr, dk_ptr, stride_dkb, stride_dkh, stride_dks, b, h, rows, length, num_heads,
        GROUPS, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    _add_up(
        dv_groups_ptr, dv_ptr, stride_dvb, stride_dvh, stride_dvs, b, h, rows, length, num_heads,
        GROUPS, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip
