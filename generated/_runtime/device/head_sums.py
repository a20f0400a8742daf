# SPDX-License-Identifier: Apache-2.0
"""The kernel that adds up the parts that a backward's programs leave of each head, as for the gradient of a sink."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_heads", "count", "total"])
def head_sums(parts_ptr, sums_ptr, num_heads, count, total, BLOCK: tl.constexpr):
    """Write `sums` [Hq] of `parts` [B, Hq, count], float32, added up in a fixed order. `total` is B * count."""
    h = tl.program_id(0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, total, BLOCK):
        part = first + tl.arange(0, BLOCK)
        offs = (part // count * num_heads + h).to(tl.int64) * count + part % count
        sums += tl.load(parts_ptr + offs, mask=part < total, other=0.0)
    tl.store(sums_ptr + h, tl.sum(sums, 0))
