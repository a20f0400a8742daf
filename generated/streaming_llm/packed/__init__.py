# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: streaming_llm: {mask: causal and (window(size) or prefix(sinks)), scalars: {size: {type: int, min: 1,
#     example: 256}, sinks: {type: int, min: 0, example: 4}}}
# template: host/variant_init.py.jinja
# hash: 3747bbb78da3e951
"""`streaming_llm`, packed sequences: A causal window of `size`, and the first `sinks` keys, kept for good (Xiao et
al., 2024, arXiv:2309.17453).

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
