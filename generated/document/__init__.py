# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/variant_init.py.jinja
# hash: 2d0519927271bb36
"""`document`: Causal within each document of a packed row; `doc` numbers them, in any order.

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

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
