# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: streaming_llm: {mask: causal and (window(size) or prefix(sinks)), scalars: {size: {type: int, min: 1,
#     example: 256}, sinks: {type: int, min: 0, example: 4}}}
# template: host/work.py.jinja
# hash: d0eba7a0915ca258
"""Which keys a block of queries visits under `streaming_llm`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [
        (np.maximum(at.q_first - at.size + 1, 0), np.minimum(at.q_last + 1, at.kv_len)),
        (0, np.minimum(at.q_last + 1, np.minimum(at.sinks, at.kv_len))),
    ]


WORK = VariantWork(
    op="streaming_llm",
    tensors={},
    scalars={"size": ("int", {"minimum": 1}), "sinks": ("int", {"minimum": 0})},
    ranges=_ranges,
    needs=("sinks", "size"),
    looks_back=True,
)
