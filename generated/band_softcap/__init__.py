# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: host/variant_init.py.jinja
# hash: 9a7203f3fea7d4a8
"""`band_softcap`: A band, and logits capped at `cap`, as in Gemma 2, VaultGemma and T5Gemma (arXiv:2408.00118).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

__all__ = ["hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
