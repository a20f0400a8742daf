# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_images: {mask: 'band(before, after) or (image[b, q_idx] == image[b, kv_idx] and image[b, q_idx] >= 0)',
#     scalars: {before: {type: int, min: 0, example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {image:
#     {dims: [b, kv_idx], dtype: int32, example: 'where(kv_idx % 400 < 256, kv_idx // 400, -1)'}}}
# template: host/work.py.jinja
# hash: 94d3f48d9fd1090c
"""Which keys a block of queries visits under `band_images`: for plans of calls over several GPUs."""

from typing import Any

import numpy as np

from .._runtime.core.parallel.work import VariantWork


def _values(at: Any) -> list[tuple[Any, bool]]:
    """The values that the mask compares, at `at.q_idx` or `at.kv_idx`; and of each, whether it is a value per query."""
    return [
        (at.image[np.clip(at.b, 0, at.image.shape[0] - 1), np.clip(at.q_idx, 0, at.image.shape[1] - 1)], True),
        (at.image[np.clip(at.b, 0, at.image.shape[0] - 1), np.clip(at.kv_idx, 0, at.image.shape[1] - 1)], False),
        (at.image[np.clip(at.b, 0, at.image.shape[0] - 1), np.clip(at.q_idx, 0, at.image.shape[1] - 1)] >= 0, True),
    ]


def _may_visit(at: Any) -> Any:
    """Whether queries `at.q_first` to `at.q_last` visit keys `at.kv_first` to `at.kv_last`.

    `at.least` and `at.most` are the extremes of the mask's values over these queries or keys.
    """
    return (at.q_first - at.kv_last <= at.before) & (at.kv_first - at.q_last <= at.after) | (
        at.least[0] <= at.most[1]
    ) & (at.most[0] >= at.least[1]) & (at.most[2] > 0)


WORK = VariantWork(
    op="band_images",
    tensors={"image": ("b", "kv_idx")},
    scalars={"before": ("int", {"minimum": 0}), "after": ("int", {"minimum": 0})},
    values=_values,
    may_visit=_may_visit,
    needs=("after", "before", "image"),
    by_row=True,
    shift_invariant=True,
)
