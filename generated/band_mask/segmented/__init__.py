# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_mask: {mask: 'band(before, after) and keep[b, h, q_idx, kv_idx]', scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {keep: {dims: [b, h, q_idx, kv_idx], dtype:
#     bool, example: (31 * i2 + 17 * i3) % 3 != 0}}}
# template: host/variant_init.py.jinja
# hash: 44a6b011c4c09f44
"""`band_mask`, with segment ids: A band, and a boolean per batch row, head and pair from the call (`mask` of
jax.nn.dot_product_attention, JAX).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = [
    "band_mask",
    "block_ranges",
    "hopper_bwd",
    "hopper_fwd",
    "hopper_fwd_fp8",
    "hopper_split",
    "launch",
    "portable",
]

if TYPE_CHECKING:
    from ... import band_mask
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...band_mask",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
