# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_bias: {mask: 'band(before, after)', score: 'score + bias[b, h, q_idx, kv_idx]', scalars: {before: {type:
#     int, min: 0, example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {bias: {dims: [b, h, q_idx,
#     kv_idx], grad: true}}}
# template: host/variant_init.py.jinja
# hash: dddac793c53e58a7
"""`band_bias`: A band, and a bias per batch row, head and pair that the model has computed, as T5's
(arXiv:1910.10683).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

__all__ = ["hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
