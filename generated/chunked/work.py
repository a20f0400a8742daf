# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: chunked: {mask: causal and chunk(size), scalars: {size: {type: int, min: 1, example: 256}}}
# template: host/work.py.jinja
# hash: d0246d7b60f6211a
"""Which keys a block of queries visits under `chunked`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _may_visit(at: Any) -> Any:
    """Whether queries `at.q_first` to `at.q_last` visit keys `at.kv_first` to `at.kv_last`.

    `at.least` and `at.most` are the extremes of the mask's values over these queries or keys.
    """
    return (
        (at.q_last >= at.kv_first)
        & (
            np.minimum(at.q_first // at.size, at.q_last // at.size)
            <= np.maximum(at.kv_first // at.size, at.kv_last // at.size)
        )
        & (
            np.maximum(at.q_first // at.size, at.q_last // at.size)
            >= np.minimum(at.kv_first // at.size, at.kv_last // at.size)
        )
    )


WORK = VariantWork(
    op="chunked",
    tensors={},
    scalars={"size": ("int", {"minimum": 1})},
    may_visit=_may_visit,
    needs=("size",),
    looks_back=True,
)
