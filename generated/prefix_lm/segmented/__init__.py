# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/variant_init.py.jinja
# hash: 28efb27780cdb118
"""`prefix_lm`, with segment ids: Causal, but for a prefix of `length` keys that every query attends to (Raffel et
al., 2020, arXiv:1910.10683).

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
    "portable",
    "prefix_lm",
]

if TYPE_CHECKING:
    from ... import prefix_lm
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...prefix_lm",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
