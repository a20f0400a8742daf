# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/variant_init.py.jinja
# hash: bbe6d814d6ce832c
"""`gpt_oss`, with segment ids: The sliding-window layers of gpt-oss, a learned sink per head in the denominator
(arXiv:2508.10925).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = [
    "block_ranges",
    "gpt_oss",
    "hopper_bwd",
    "hopper_fwd",
    "hopper_fwd_fp8",
    "hopper_split",
    "launch",
    "portable",
]

if TYPE_CHECKING:
    from ... import gpt_oss
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...gpt_oss",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
