# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/variant_init.py.jinja
# hash: ec5f82d71014c889
"""`gemma2_local`, with segment ids: The local layers of Gemma 2, a window of 4096 and logits capped at 50
(arXiv:2408.00118, table 1).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "gemma2_local", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from ... import gemma2_local
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...gemma2_local",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".launch",
        ".portable",
    )
