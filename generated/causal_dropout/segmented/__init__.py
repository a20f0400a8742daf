# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/variant_init.py.jinja
# hash: bf3776d4fc7912c6
"""`causal_dropout`, with segment ids: Causal attention with dropout on the probabilities (Vaswani et al., 2017,
section 5.4).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = ["block_ranges", "causal_dropout", "hopper_bwd", "hopper_fwd", "launch", "portable", "token_order"]

if TYPE_CHECKING:
    from ... import causal_dropout
    from ..._runtime.core import token_order
    from . import block_ranges, hopper_bwd, hopper_fwd, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...causal_dropout",
        "..._runtime.core.token_order",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".launch",
        ".portable",
    )
