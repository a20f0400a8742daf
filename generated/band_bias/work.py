# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_bias: {mask: 'band(before, after)', score: 'score + bias[b, h, q_idx, kv_idx]', scalars: {before: {type:
#     int, min: 0, example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {bias: {dims: [b, h, q_idx,
#     kv_idx], grad: true}}}
# template: host/work.py.jinja
# hash: 1d06f14a0900e478
"""Which keys a block of queries visits under `band_bias`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(np.maximum(at.q_first - at.before, 0), np.minimum(at.q_last + at.after + 1, at.kv_len))]


WORK = VariantWork(
    op="band_bias",
    tensors={"bias": ("b", "h", "q_idx", "kv_idx")},
    scalars={"before": ("int", {"minimum": 0}), "after": ("int", {"minimum": 0})},
    ranges=_ranges,
    needs=("after", "before"),
    shift_invariant=True,
)
