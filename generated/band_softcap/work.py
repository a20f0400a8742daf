# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_softcap: {mask: 'band(before, after)', score: softcap(cap), scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}, cap: {type: float, example: 50.0}}}
# template: host/work.py.jinja
# hash: c289336a116cd484
"""Which keys a block of queries visits under `band_softcap`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(np.maximum(at.q_first - at.before, 0), np.minimum(at.q_last + at.after + 1, at.kv_len))]


WORK = VariantWork(
    op="band_softcap",
    tensors={},
    scalars={"before": ("int", {"minimum": 0}), "after": ("int", {"minimum": 0}), "cap": ("float", {})},
    ranges=_ranges,
    needs=("after", "before"),
    shift_invariant=True,
)
