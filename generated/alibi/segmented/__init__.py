# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/variant_init.py.jinja
# hash: 19f1e47f145b720b
"""`alibi`, with segment ids: Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = [
    "block_ranges",
    "bwd_dkdv",
    "bwd_dq",
    "fwd",
    "hopper_bwd",
    "hopper_bwd_wide",
    "hopper_delta",
    "hopper_fwd",
    "launch",
]

if TYPE_CHECKING:
    from . import block_ranges, bwd_dkdv, bwd_dq, fwd, hopper_bwd, hopper_bwd_wide, hopper_delta, hopper_fwd, launch
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        ".block_ranges",
        ".bwd_dkdv",
        ".bwd_dq",
        ".fwd",
        ".hopper_bwd",
        ".hopper_bwd_wide",
        ".hopper_delta",
        ".hopper_fwd",
        ".launch",
    )
