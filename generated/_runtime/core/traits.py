# SPDX-License-Identifier: Apache-2.0
"""Facts about a variant that decide between the families of kernels and between their tiles."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VariantTraits:
    """What the generator derived from a variant's mask, score and gradients.

    Attributes:
        score_is_scaled_product: the score is the scaled product of query and key: no score expression, no dropout.
        score_is_cheap: the score expression calls no function and reads nothing per key or pair; no dropout, no decay.
        keys_start_at_zero: every query attends to one contiguous key range that starts at key 0.
        rows_are_alike: all rows attend to the same keys, so the mask cuts no tile.
        keys_are_runs: a row attends to contiguous key ranges, which no list of blocks describes.
        segmented_keys_are_runs: the same in a segmented call.
        keys_are_wide_bands: a row attends to a key range from a table, or to keys up to a distance that is not known to
            be short.
        backward_can_fuse: one kernel of Hopper's family can compute dq, dk and dv.
        gradients_use_atomics: a gradient is added with atomics, in any order.
    """

    score_is_scaled_product: bool
    score_is_cheap: bool
    keys_start_at_zero: bool
    rows_are_alike: bool
    keys_are_runs: bool
    segmented_keys_are_runs: bool
    keys_are_wide_bands: bool
    backward_can_fuse: bool
    gradients_use_atomics: bool
