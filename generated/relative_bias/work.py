# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: relative_bias: {mask: causal, score: 'score + bias[h, q_idx - kv_idx]', tensors: {bias: {dims: [h,
#     distances], grad: true}}}
# template: host/work.py.jinja
# hash: 97f0818251ae5089
"""Which keys a block of queries visits under `relative_bias`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="relative_bias",
    tensors={"bias": ("h", "distances")},
    ranges=_ranges,
    shift_invariant=True,
    looks_back=True,
)
