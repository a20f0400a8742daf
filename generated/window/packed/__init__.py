# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: 8f86f69848e40d2c
"""`window`, packed sequences: Causal with a window of `size` keys, the query's own included (Mistral 7B,
arXiv:2310.06825).

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
