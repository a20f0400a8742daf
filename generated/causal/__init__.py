# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal: {mask: causal}
# template: host/variant_init.py.jinja
# hash: 8ab49ade947fc728
"""`causal`: A query attends to itself and to what came before (Vaswani et al., 2017, section 3.2.3).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

__all__ = ["hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "hopper_split", "launch", "portable"]

if TYPE_CHECKING:
    from . import hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".hopper_split", ".launch", ".portable"
    )
