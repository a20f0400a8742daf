# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gemma2_local: {mask: causal and window(4096), score: softcap(50.0)}
# template: host/work.py.jinja
# hash: 0da580a0163a5f09
"""Which keys a block of queries visits under `gemma2_local`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(np.maximum(-(-at.q_first + 4095), 0), np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="gemma2_local",
    tensors={},
    ranges=_ranges,
    shift_invariant=True,
    looks_back=True,
)
