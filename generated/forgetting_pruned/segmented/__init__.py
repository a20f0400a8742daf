# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting_pruned: {mask: "causal and kv_idx >= first_key[b, h, q_idx]", tensors: {first_key: {dims: [b, h,
#     q_idx], dtype: int32}}, decay: true}
# template: host/variant_init.py.jinja
# hash: efd5a3101d9074a5
"""`forgetting_pruned`, with segment ids: forgetting from `first_key` on, which its `prune` finds (Lin et al., 2025,
arXiv:2504.06949).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "decay", "hopper_bwd", "hopper_fwd", "hopper_fwd_fp8", "launch", "portable", "token_order"]

if TYPE_CHECKING:
    from ..._runtime.core import token_order
    from .. import decay
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "..._runtime.core.token_order",
        "..decay",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".launch",
        ".portable",
    )
