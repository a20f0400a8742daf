# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/variant_init.py.jinja
# hash: 33b5396276e6f659
"""`prefix_lm`, packed sequences: Causal, but for a prefix of `length` keys that every query attends to (Raffel et
al., 2020, arXiv:1910.10683).

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
