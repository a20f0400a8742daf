# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band: {mask: 'band(before, after)', scalars: {before: {type: int, min: 0, example: 256}, after: {type: int,
#     min: 0, example: 32}}}
# template: host/variant_init.py.jinja
# hash: 499c61ab00154caf
"""`band`, packed sequences: Keys at most `before` positions before a query and `after` after it, as FlashAttention's
window (arXiv:2307.08691).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "hopper_split", "launch", "portable"]

if TYPE_CHECKING:
    from . import hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".hopper_split", ".launch", ".portable"
    )
