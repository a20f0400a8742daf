# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: chunked: {mask: causal and chunk(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: 43b4e30c1efbfe83
"""`chunked`, packed sequences: Causal within chunks of `size` tokens, 8192 in the local layers of Llama 4 (Hugging
Face transformers, llama4).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "hopper_split", "launch", "portable"]

if TYPE_CHECKING:
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
