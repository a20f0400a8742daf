# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: padding: {mask: 'kv_idx < length[b]', tensors: {length: {dims: [b], dtype: int32, example: 1000 - 100 * b}}}
# template: host/work.py.jinja
# hash: 447e77bcc96cafea
"""Which keys a block of queries visits under `padding`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(0, np.minimum(at.length[np.clip(at.b, 0, at.length.shape[0] - 1)], at.kv_len))]


WORK = VariantWork(
    op="padding",
    tensors={"length": ("b",)},
    ranges=_ranges,
    needs=("length",),
)
