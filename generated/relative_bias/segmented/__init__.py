# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/variant_init.py.jinja
# hash: 4a8ce811bd959293
"""`relative_bias`, with segment ids: A learned bias per head and distance; those beyond the table have its last
(Raffel et al., 2020, arXiv:1910.10683).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".block_ranges", ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
