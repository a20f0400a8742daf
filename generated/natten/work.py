# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: natten: {mask: 'natten(128, 128, 13)'}
# template: host/work.py.jinja
# hash: f1acf9388ce6ae87
"""Which keys a block of queries visits under `natten`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _may_visit(at: Any) -> Any:
    """Whether queries `at.q_first` to `at.q_last` visit keys `at.kv_first` to `at.kv_last`.

    `at.least` and `at.most` are the extremes of the mask's values over these queries or keys.
    """
    return (
        (
            np.minimum(np.maximum(np.where(at.q_first // 128 == at.q_last // 128, at.q_first % 128, 0), 6), 121)
            - np.where(at.kv_first // 128 == at.kv_last // 128, at.kv_last % 128, 127)
            <= 6
        )
        & (
            np.minimum(np.maximum(np.where(at.q_first // 128 == at.q_last // 128, at.q_last % 128, 127), 6), 121)
            - np.where(at.kv_first // 128 == at.kv_last // 128, at.kv_first % 128, 0)
            >= -6
        )
        & (np.minimum(np.maximum(at.q_first // 128, 6), 121) - at.kv_last // 128 <= 6)
        & (np.minimum(np.maximum(at.q_last // 128, 6), 121) - at.kv_first // 128 >= -6)
    )


WORK = VariantWork(
    op="natten",
    tensors={},
    may_visit=_may_visit,
)
