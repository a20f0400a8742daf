# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_images: {mask: 'band(before, after) or (image[b, q_idx] == image[b, kv_idx] and image[b, q_idx] >= 0)',
#     scalars: {before: {type: int, min: 0, example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {image:
#     {dims: [b, kv_idx], dtype: int32, example: 'where(kv_idx % 400 < 256, kv_idx // 400, -1)'}}}
# template: host/variant_init.py.jinja
# hash: 61485b8bc875acab
"""`band_images`, packed sequences: A band, and in both directions within an image; `image` is its number, -1 in text
(Gemma 3, arXiv:2503.19786).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_lists", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "hopper_split", "launch", "portable"]

if TYPE_CHECKING:
    from . import block_lists, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        ".block_lists",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
