# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: host/work.py.jinja
# hash: e500bb3f6d0f3f1e
"""Which keys a block of queries visits under `alibi`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="alibi",
    tensors={"slope": ("h",)},
    ranges=_ranges,
    shift_invariant=True,
    looks_back=True,
)
