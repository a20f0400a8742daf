# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: softcap: {mask: causal, score: softcap(20.0)}
# template: host/variant_init.py.jinja
# hash: 464c7a7c4f0a2d66
"""`softcap`, packed sequences: Causal with logits capped at 20 (Bello et al., 2016, arXiv:1611.09940, section 5.1).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
