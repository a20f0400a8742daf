# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: host/variant_init.py.jinja
# hash: 2f5dc31f8e19de03
"""`natten`: Neighbourhood attention on an image of 128 x 128 positions, 13 x 13 keys (Hassani et al., 2023,
arXiv:2204.07143).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

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
