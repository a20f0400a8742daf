# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true, prune: true}
# template: host/variant_init.py.jinja
# hash: dba25a7f507a4c6f
"""`forgetting`, packed sequences: Forgetting attention, a log-decay per position and head (Lin et al., 2025,
arXiv:2503.02130).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["decay", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable"]

if TYPE_CHECKING:
    from . import decay, hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__, ".decay", ".hopper_bwd", ".hopper_fwd", ".hopper_fwd_fp8", ".launch", ".portable"
    )
