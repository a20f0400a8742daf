# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/variant_init.py.jinja
# hash: b14ded764d8cceed
"""`window`: Causal with a window of `size` keys, the query's own included (Mistral 7B, arXiv:2310.06825).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from .._runtime.core.lazy import lazy_modules

__all__ = [
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
    from . import bwd_dkdv, bwd_dq, fwd, hopper_bwd, hopper_bwd_wide, hopper_delta, hopper_fwd, launch
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        ".bwd_dkdv",
        ".bwd_dq",
        ".fwd",
        ".hopper_bwd",
        ".hopper_bwd_wide",
        ".hopper_delta",
        ".hopper_fwd",
        ".launch",
    )
