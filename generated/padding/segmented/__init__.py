# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: host/variant_init.py.jinja
# hash: 26e16debb48b794a
"""`padding`, with segment ids: Keys from `length[b]` on are padding, which no query attends to (Vaswani et al.,
2017, arXiv:1706.03762).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = [
    "block_ranges",
    "hopper_bwd",
    "hopper_fwd",
    "hopper_fwd_fp8",
    "hopper_split",
    "launch",
    "padding",
    "portable",
]

if TYPE_CHECKING:
    from ... import padding
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...padding",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
