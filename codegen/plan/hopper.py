"""What the templates of Hopper's kernels, written in Gluon, need beside the plans of the portable ones."""

from __future__ import annotations

from codegen.plan.hopper_kernels import sums_by_keys
from codegen.plan.variant import VariantPlan

FORWARD = "hopper_fwd"
"""File stem of the forward, and its name among the hashes of kernels."""

BACKWARD, WIDE_BACKWARD, DELTA = "hopper_bwd", "hopper_bwd_wide", "hopper_delta"
"""The same of the backward, of that for more than 128 columns, and of what runs before and after it."""


def fuses_backward(planned: VariantPlan) -> bool:
    """Whether one kernel can compute dq, dk and dv, with all that the variant gathers besides."""
    return sums_by_keys(planned.terms)
