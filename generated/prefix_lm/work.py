# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: prefix_lm: {mask: causal or prefix(length), scalars: {length: {type: int, min: 0, example: 128}}}
# template: host/work.py.jinja
# hash: e1475422de45c841
"""Which keys a block of queries visits under `prefix_lm`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.maximum(np.minimum(at.q_last + 1, at.kv_len), np.minimum(at.length, at.kv_len)))]


WORK = VariantWork(
    op="prefix_lm",
    tensors={},
    scalars={"length": ("int", {"minimum": 0})},
    ranges=_ranges,
    needs=("length",),
)
