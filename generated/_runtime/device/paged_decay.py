# SPDX-License-Identifier: Apache-2.0
"""The kernel that continues the running sums of a log-decay in paged caches."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "num_heads", "page_size", "new_rows", "num_pages"])
def append_sums(
    g_ptr,
    cache_ptr,
    base_ptr,
    page_table_ptr,
    page_starts_ptr,
    kv_lengths_ptr,
    cu_seqlens_ptr,
    stride_gt,
    stride_gh,
    stride_page,
    stride_slot,
    stride_head,
    stride_base_page,
    stride_base_head,
    table_stride,
    num_heads,
    page_size,
    new_rows,
    num_pages,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write the running sums of a sequence's new tokens, for HEADS query heads, BLOCK tokens at a time.

    A sum is float64 until it is stored as two float32: the base of its page, and the difference from that base.
    """
    num_groups = tl.cdiv(num_heads, HEADS)
    b = (tl.program_id(0) // num_groups).to(tl.int64)
    # The axes of a cache may lie in any order, so that each stride may be large.
    head = ((tl.program_id(0) % num_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    is_head = head < num_heads
    first = b * new_rows
    count = new_rows
    if cu_seqlens_ptr is not None:
        first = tl.load(cu_seqlens_ptr + b).to(tl.int64)
        count = tl.load(cu_seqlens_ptr + b + 1) - tl.load(cu_seqlens_ptr + b)
    start = tl.load(kv_lengths_ptr + b) - count
    if page_starts_ptr is not None:
        pages = page_table_ptr + tl.load(page_starts_ptr + b)
    else:
        pages = page_table_ptr + b * table_stride
    # The sum of the last token that the sequence had before; 0 if it had none.
    last = tl.maximum(start - 1, 0)
    page = tl.load(pages + last // page_size, mask=start > 0, other=0).to(tl.int64)
    has_last = is_head & (start > 0) & (page >= 0) & (page < num_pages)
    base = tl.load(base_ptr + page * stride_base_page + head * stride_base_head, mask=has_last, other=0.0)
    slot = (last % page_size).to(tl.int64)
    local = tl.load(cache_ptr + page * stride_page + slot * stride_slot + head * stride_head, mask=has_last, other=0.0)
    total = base.to(tl.float64) + local.to(tl.float64)
    # Skip tokens before position 0: a sequence has them if its length is less than the number of its new tokens.
    for at in range(tl.maximum(-start, 0), count, BLOCK):
        nth = at + tl.arange(0, BLOCK)
        position = start + nth
        is_new = nth < count
        token_page = tl.load(pages + position // page_size, mask=is_new, other=-1).to(tl.int64)
        is_new = is_new & (token_page >= 0) & (token_page < num_pages)
        mask = is_new[:, None] & is_head[None, :]
        rows = (first + nth)[:, None] * stride_gt + head[None, :] * stride_gh
        g = tl.load(g_ptr + rows, mask=mask, other=0.0).to(tl.float64)
        sums = total[None, :] + tl.cumsum(g, 0)
        bases = base_ptr + token_page[:, None] * stride_base_page + head[None, :] * stride_base_head
        begins = mask & (position % page_size == 0)[:, None]
        tl.store(bases, (sums - g).to(tl.float32), mask=begins)
        # Other threads of this program have stored the bases of these pages.
        tl.debug_barrier()
        base_of = tl.load(bases, mask=mask, other=0.0).to(tl.float64)
        slots = (position % page_size).to(tl.int64)[:, None] * stride_slot
        cached = cache_ptr + token_page[:, None] * stride_page + slots + head[None, :] * stride_head
        tl.store(cached, (sums - base_of).to(tl.float32), mask=mask)
        total += tl.sum(g, 0)
