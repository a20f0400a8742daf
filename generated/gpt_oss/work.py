# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: gpt_oss: {mask: causal and window(128), sink: true}
# template: host/work.py.jinja
# hash: e86eee7363d7bf66
"""Which keys a block of queries visits under `gpt_oss`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _ranges(at: Any) -> list[tuple[Any, Any]]:
    """First and end of the keys that queries `at.q_first` to `at.q_last` visit."""
    return [(np.maximum(-(-at.q_first + 127), 0), np.minimum(at.q_last + 1, at.kv_len))]


WORK = VariantWork(
    op="gpt_oss",
    tensors={"sink": ("h",)},
    ranges=_ranges,
    shift_invariant=True,
    looks_back=True,
)
