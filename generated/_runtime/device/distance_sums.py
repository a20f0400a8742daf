# SPDX-License-Identifier: Apache-2.0
"""The kernel that computes the gradient of a table by head and distance from the sums that a backward leaves."""

import triton
import triton.language as tl


@triton.jit
def range_sum(ptr, first, end, BLOCK: tl.constexpr):
    """The sum of the numbers from `first` on and before `end`."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        sums += tl.load(ptr + places, mask=places < end, other=0.0)
    return tl.sum(sums, 0)


@triton.jit(
    do_not_specialize=[
        "row_offset", "batch", "num_heads", "num_pieces", "num_lags", "lag_origin", "far_parts", "size", "rest",
    ]
)  # fmt: skip
def distance_sums(
    pieces_ptr, far_ptr, row_offset, sums_ptr,
    batch, num_heads, num_pieces, num_lags, lag_origin, far_parts, size, rest,
    SIGN: tl.constexpr, OFFSET_PER_BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `sums` [Hq, size], each added up in a fixed order.

    Element `SIGN * distance + rest` of a head is the sum of ds at that distance. The first and the last element also
    have the sums of all distances beyond theirs.

    pieces   [B, Hq, num_pieces, num_lags]  fp32, sums of ds by distance
    far      [B, Hq, 2, far_parts]  fp32, sums of ds at smaller and at larger distances than these
    """
    num_blocks = tl.cdiv(size, BLOCK)
    h, first = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks * BLOCK
    elements = first + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for b in range(batch):
        shift = tl.load(row_offset + b) if OFFSET_PER_BATCH else row_offset
        # The index in a piece of the distance of element 0.
        origin = lag_origin - shift - SIGN * rest
        head = (b * num_heads + h).to(tl.int64)
        pieces, far = pieces_ptr + head * num_pieces * num_lags, far_ptr + head * 2 * far_parts
        places = origin + SIGN * elements
        inside = (elements < size) & (places >= 0) & (places < num_lags)
        for piece in range(num_pieces):
            sums += tl.load(pieces + piece * num_lags + places, mask=inside, other=0.0)
        for end in tl.static_range(2):
            element = 0 if end == 0 else size - 1
            if (element >= first) & (element < first + BLOCK):
                # The distances beyond this element's are the larger ones if BEHIND, else the smaller ones.
                BEHIND: tl.constexpr = (end == 1) == (SIGN > 0)
                beyond = range_sum(far + BEHIND * far_parts, 0, far_parts, BLOCK)
                place = origin + SIGN * element
                begin, limit = (tl.maximum(place + 1, 0), num_lags) if BEHIND else (0, tl.minimum(place, num_lags))
                for piece in range(num_pieces):
                    beyond += range_sum(pieces + piece * num_lags, begin, limit, BLOCK)
                sums += tl.where(elements == element, beyond, 0.0)
    tl.store(sums_ptr + h.to(tl.int64) * size + elements, sums, mask=elements < size)
