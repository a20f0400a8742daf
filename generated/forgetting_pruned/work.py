# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: forgetting_pruned: {mask: "causal and kv_idx >= first_key[b, h, q_idx]", tensors: {first_key: {dims: [b, h,
#     q_idx], dtype: int32}}, decay: true}
# template: host/work.py.jinja
# hash: 2f660abf762237c9
"""Which keys a block of queries visits under `forgetting_pruned`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _values(at: Any) -> list[tuple[Any, bool]]:
    """The values that the mask compares, at `at.q_idx` or `at.kv_idx`; and of each, whether it is a value per query."""
    return [
        (
            at.first_key[
                np.clip(at.b, 0, at.first_key.shape[0] - 1),
                np.clip(at.h, 0, at.first_key.shape[1] - 1),
                np.clip(at.q_idx, 0, at.first_key.shape[2] - 1),
            ],
            True,
        ),
    ]


def _may_visit(at: Any) -> Any:
    """Whether queries `at.q_first` to `at.q_last` visit keys `at.kv_first` to `at.kv_last`.

    `at.least` and `at.most` are the extremes of the mask's values over these queries or keys.
    """
    return (at.q_last >= at.kv_first) & (at.kv_last >= at.least[0])


WORK = VariantWork(
    op="forgetting_pruned",
    tensors={"first_key": ("b", "h", "q_idx"), "g": ("b", "kv_idx", "h")},
    values=_values,
    may_visit=_may_visit,
    needs=("first_key",),
    by_row=True,
    looks_back=True,
)
