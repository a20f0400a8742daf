# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_sink: {mask: 'band(before, after)', sink: true, scalars: {before: {type: int, min: 0, example: 256},
#     after: {type: int, min: 0, example: 32}}}
# template: host/variant_init.py.jinja
# hash: 51d06c06d68d66be
"""`band_sink`, with segment ids: A band, and a learned sink per head in the denominator, the layers of gpt-oss of
any window (arXiv:2508.10925).

The modules of launches and of kernels are imported when they are first read.
"""

from typing import TYPE_CHECKING

from ..._runtime.core.lazy import lazy_modules

__all__ = [
    "band_sink",
    "block_ranges",
    "hopper_bwd",
    "hopper_fwd",
    "hopper_fwd_fp8",
    "hopper_split",
    "launch",
    "portable",
]

if TYPE_CHECKING:
    from ... import band_sink
    from . import block_ranges, hopper_bwd, hopper_fwd, hopper_fwd_fp8, hopper_split, launch, portable
else:
    __getattr__, __dir__ = lazy_modules(
        __name__,
        "...band_sink",
        ".block_ranges",
        ".hopper_bwd",
        ".hopper_fwd",
        ".hopper_fwd_fp8",
        ".hopper_split",
        ".launch",
        ".portable",
    )
