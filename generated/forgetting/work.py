# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting: {mask: causal, decay: true, prune: true}
# template: host/work.py.jinja
# hash: be98883c01250be2
"""Which keys a block of queries visits under `forgetting`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="forgetting",
    tensors={"g": ("b", "kv_idx", "h")},
    ranges=_ranges,
    by_row=True,
    shift_invariant=True,
    looks_back=True,
)
