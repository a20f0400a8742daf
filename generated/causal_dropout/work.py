# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/work.py.jinja
# hash: ced6b59c962846b3
"""Which keys a block of queries visits under `causal_dropout`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="causal_dropout",
    tensors={},
    ranges=_ranges,
    dropout=True,
    shift_invariant=True,
    looks_back=True,
)
