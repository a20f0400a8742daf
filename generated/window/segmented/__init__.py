# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: e88d0ecaed57ef50
"""`window`, with segment ids: Causal with a window of `size` keys, the query's own included (Mistral 7B,
arXiv:2310.06825).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "hopper_split", "launch", "portable", "window"]

if TYPE_CHECKING:
    from ... import window
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...window",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
