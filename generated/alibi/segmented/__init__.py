# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/variant_init.py.jinja
# hash: c36e42211b8ca5a5
"""`alibi`, with segment ids: Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".block_ranges", ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
