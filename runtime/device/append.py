"""The kernel that writes new tokens to a paged cache."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "num_slots"])
def append_tokens(
    x_ptr,
    slots_ptr,
    scale_ptr,
    cache_ptr,
    stride_xt,
    stride_xh,
    stride_xd,
    stride_page,
    stride_slot,
    stride_head,
    stride_col,
    heads,
    page_size,
    num_slots,
    TOKEN_SCALES: tl.constexpr,
    MOST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one token's keys or values to its slot. A token whose slot is -1, or none of the cache's
    `num_slots`, is skipped.

    MOST is the largest value of a cache of 8-bit floats, and 0 for other caches. With TOKEN_SCALES the kernel computes
    a scale for each token and head, so that the largest value becomes MOST, and writes it to the dense tensor of scales
    [pages, page size, heads]. HEADS and COLUMNS are powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        # The axes of a cache may lie in any order, so that each stride may be large.
        head, col = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, COLUMNS)[None, :].to(tl.int64)
        mask = (head < heads) & (col < HEAD_DIM)
        x = tl.load(x_ptr + token * stride_xt + head * stride_xh + col * stride_xd, mask=mask, other=0.0)
        if TOKEN_SCALES:
            scale = tl.max(tl.abs(x.to(tl.float32)), 1, keep_dims=True) / MOST
            scale = tl.where(scale == 0.0, 1.0, scale)
            tl.store(scale_ptr + slot * heads + head, scale, mask=head < heads)
            x = x.to(tl.float32) / scale
        elif scale_ptr is not None:
            x = x.to(tl.float32) / tl.load(scale_ptr + head, mask=head < heads, other=1.0)
        if MOST > 0:
            x = tl.minimum(tl.maximum(x.to(tl.float32), -MOST), MOST)
        place = cache_ptr + (slot // page_size) * stride_page + (slot % page_size) * stride_slot
        tl.store(place + head * stride_head + col * stride_col, x.to(cache_ptr.dtype.element_ty), mask=mask)
