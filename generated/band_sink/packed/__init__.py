# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_sink: {mask: 'band(before, after)', sink: true, scalars: {before: {type: int, min: 0, example: 256},
#     after: {type: int, min: 0, example: 32}}}
# template: host/variant_init.py.jinja
# hash: b4d95505a55cba90
"""`band_sink`, packed sequences: A band, and a learned sink per head in the denominator, the layers of gpt-oss of
any window (arXiv:2508.10925).

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
