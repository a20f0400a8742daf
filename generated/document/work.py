# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: host/work.py.jinja
# hash: 72e9e9261722bfbf
"""Which keys a block of queries visits under `document`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _values(at: Any) -> list[tuple[Any, bool]]:
    """The values that the mask compares, at `at.q_idx` or `at.kv_idx`; and of each, whether it is a value per query."""
    return [
        (at.doc[np.clip(at.b, 0, at.doc.shape[0] - 1), np.clip(at.q_idx, 0, at.doc.shape[1] - 1)], True),
        (at.doc[np.clip(at.b, 0, at.doc.shape[0] - 1), np.clip(at.kv_idx, 0, at.doc.shape[1] - 1)], False),
    ]


def _may_visit(at: Any) -> Any:
    """Whether queries `at.q_first` to `at.q_last` visit keys `at.kv_first` to `at.kv_last`.

    `at.least` and `at.most` are the extremes of the mask's values over these queries or keys.
    """
    return (at.q_last >= at.kv_first) & (at.least[0] <= at.most[1]) & (at.most[0] >= at.least[1])


WORK = VariantWork(
    op="document",
    tensors={"doc": ("b", "kv_idx")},
    values=_values,
    may_visit=_may_visit,
    needs=("doc",),
    by_row=True,
    shift_invariant=True,
    looks_back=True,
)
