# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: window: {mask: causal and window(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/work.py.jinja
# hash: 6cba9f77b39881b0
"""Which keys a block of queries visits under `window`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(np.maximum(at.q_first - at.size + 1, 0), np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="window",
    tensors={},
    scalars={"size": ("int", {"minimum": 1})},
    ranges=_ranges,
    needs=("size",),
    shift_invariant=True,
    looks_back=True,
)
