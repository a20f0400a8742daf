"""The kernel files of a mode, and the names that their kernels have among the hashes."""

from __future__ import annotations

from codegen.plan.hopper.kernels import sums_by_keys
from codegen.plan.paged.kernels import PagedPlan
from codegen.plan.variant import VariantPlan

PORTABLE = "portable"
"""File stem of the kernels in Triton."""

FORWARD, WIDE_FORWARD = "hopper_fwd", "hopper_fwd_wide"
"""File stem of Hopper's forward, in Gluon.

The names among the hashes are those of the forward, and of the forward for more than 256 columns."""

FORWARD_FP8 = "hopper_fwd_fp8"
"""File stem of Hopper's forward of float8_e4m3fn."""

LATENT = "hopper_latent"
"""File stem of Hopper's forward of latent attention, on paged caches."""

BACKWARD, WIDE_BACKWARD, DELTA = "hopper_bwd", "hopper_bwd_wide", "hopper_delta"
"""File stem of Hopper's backward.

The names among the hashes are those of the backward, of the backward for more than 128 columns, and of the kernels that
run before and after a backward."""

SPLIT, SPLIT_KEYS, SPLIT_ROWS = "hopper_split", "hopper_split_keys", "hopper_split_rows"
"""File stem of Hopper's backward for more than 256 columns, and the names of its kernels among the hashes."""


def fuses_backward(planned: VariantPlan) -> bool:
    """Whether one kernel can compute dq, dk and dv, and all other gradients of the variant."""
    return sums_by_keys(planned.terms)


def measured_kernels(planned: VariantPlan) -> dict[str, tuple[str, list[str]]]:
    """Name among the hashes -> file stem and the kernels whose code the hash covers."""
    after = [f"{planned.symbol}_hopper_dq_rows"] if fuses_backward(planned) else []
    split = {}
    if planned.hopper_split_keys is not None and planned.hopper_split_rows is not None:
        split = {
            SPLIT_KEYS: (SPLIT, [planned.hopper_split_keys.name]),
            SPLIT_ROWS: (SPLIT, [planned.hopper_split_rows.name]),
        }
    return split | {
        "fwd": (PORTABLE, [planned.fwd.name]),
        "dq": (PORTABLE, [planned.dq.name]),
        "dkdv": (PORTABLE, [planned.dkdv.name]),
        FORWARD: (FORWARD, [planned.hopper_fwd.name]),
        WIDE_FORWARD: (FORWARD, [planned.hopper_fwd_wide]),
        BACKWARD: (BACKWARD, [planned.hopper_bwd.name]),
        WIDE_BACKWARD: (BACKWARD, [planned.hopper_bwd_wide.name]),
        DELTA: (PORTABLE, [planned.hopper_delta.name, *after]),
    }


RUNS = "runs_"
"""Prefix, among the hashes of segmented calls, of the packed kernels that compute runs of tokens."""


def kernels_of_runs(planned: VariantPlan) -> list[str]:
    """Names of the packed kernels that compute the segmented calls of this plan whose segments are runs of tokens."""
    backward = ["dq", BACKWARD, WIDE_BACKWARD] if planned.hopper_bwd.leaves_runs else []
    return [FORWARD, WIDE_FORWARD, *backward] if planned.hopper_fwd.leaves_runs else []


PAGED = "paged"
"""The folder of kernels on paged caches, and the mode of their hashes and of tuned rows."""

MERGE_FILE, MERGE = "device/paged.py", "merge_splits"
"""The module of the runtime with the kernel that joins the splits of all variants, and that kernel."""


def measured_paged_kernels(planned: PagedPlan) -> dict[str, tuple[str, list[str]]]:
    """Name among the hashes -> file below the variant's folder, or the runtime's for `merge`, and the kernel.

    A step on paged caches runs all of them, so a tuned row holds for the hashes of all.
    """
    file = f"{PAGED}/{PORTABLE}.py"
    return {
        "fwd": (file, [planned.forward.name]),
        "plan": (file, [planned.plan.name]),
        "merge": (MERGE_FILE, [MERGE]),
    }
