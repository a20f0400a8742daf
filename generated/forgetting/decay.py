# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: forgetting: {mask: causal, decay: true}
# template: kernels/decay.py.jinja
# hash: d0d6b2936f292068
"""Log-decay of `forgetting`: the cumulative sum of g, and its gradient.

    g, dg      [B, P, Hq]  natural log; P positions
    decay      [B, Hq, P]  fp32, cumulative sum of g times log2(e)
    drows      [B, Hq, P]  fp32, gradient that reaches the decay as a query's
    dcols      [B, Hq, P]  fp32, gradient that reaches the decay as a key's

One program serves one query head of one batch row.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["length", "num_heads"])
def forgetting_decay_cumsum(
    g_ptr,
    decay_ptr,
    stride_gb,
    stride_gs,
    stride_gh,
    length,
    num_heads,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    g_base = g_ptr + head // num_heads * stride_gb + head % num_heads * stride_gh
    before = 0.0
    for start in range(0, length, BLOCK):
        pos = start + tl.arange(0, BLOCK)
        inside = pos < length
        g = tl.load(g_base + pos.to(tl.int64) * stride_gs, mask=inside, other=0.0).to(tl.float32)
        tl.store(decay_ptr + head * length + pos, (before + tl.cumsum(g, 0)) * LOG2E, mask=inside)
        before += tl.sum(g, 0)


@triton.jit(do_not_specialize=["length", "num_heads"])
def forgetting_decay_grad(
    drows_ptr,
    dcols_ptr,
    dg_ptr,
    stride_dgb,
    stride_dgs,
    stride_dgh,
    length,
    num_heads,
    BLOCK: tl.constexpr,
):
    # g[i] is part of every sum from i on, so its gradient is the sum of theirs: a scan from the end.
    head = tl.program_id(0).to(tl.int64)
    dg_base = dg_ptr + head // num_heads * stride_dgb + head % num_heads * stride_dgh
    after = 0.0
    num_blocks = tl.cdiv(length, BLOCK)
    for step in range(num_blocks):
        pos = (num_blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        inside = pos < length
        drows = tl.load(drows_ptr + head * length + pos, mask=inside, other=0.0)
        dcols = tl.load(dcols_ptr + head * length + pos, mask=inside, other=0.0)
        ddecay = drows + dcols
        dg = after + tl.cumsum(ddecay, 0, reverse=True)
        tl.store(dg_base + pos.to(tl.int64) * stride_dgs, dg.to(dg_ptr.dtype.element_ty), mask=inside)
        after += tl.sum(ddecay, 0)
