"""From a variant to everything its templates print: all its kernels, in one mode of calls.

All decisions are made here and in the planners of the two families; a template prints statements and names. See
templates/README.md for the contract.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.analysis import schedule as blocks
from codegen.analysis.call_modes import Mode, specialised, split_mask
from codegen.analysis.distances import Lags, kept_lags
from codegen.analysis.gradients import GradientTerm, gradient_terms
from codegen.plan import hopper_kernels, portable
from codegen.plan.block_tables import ListsPlan, lists_plan
from codegen.plan.hopper_fp8 import fp8_kernel
from codegen.plan.kernel import KernelPlan
from codegen.plan.signature import TABLES, Signatures
from codegen.plan.token_layout import InMode
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised


@dataclass(frozen=True, kw_only=True)
class VariantPlan(InMode):
    """All kernels of a variant in one mode, and what its ops need to know. Their names begin with `symbol`.

    `variant` is what the mode makes of the one that was `written`.
    """

    written: Variant
    variant: Variant
    symbol: str
    analysis: blocks.BlockAnalysis
    fwd: KernelPlan
    dq: KernelPlan
    dkdv: KernelPlan
    distances: KernelPlan | None
    hopper_fwd: KernelPlan
    hopper_fwd_fp8: KernelPlan | None
    hopper_bwd: KernelPlan
    hopper_bwd_wide: KernelPlan
    hopper_delta: KernelPlan
    lists: ListsPlan | None
    terms: tuple[GradientTerm, ...]
    kept_lags: Lags
    portable_legend: str


def plan(written: Variant, mode: Mode = Mode.DENSE) -> VariantPlan:
    """Decide everything about a variant's kernels for one mode of calls."""
    variant = specialised(symbolised(written), mode)
    analysis = _analysis(variant, mode)
    terms = gradient_terms(variant, mode)
    sign = Signatures(variant, mode, terms, analysis)
    fwd = portable.forward(variant, analysis, sign)
    dq, dkdv = portable.query_backward(variant, analysis, sign), portable.key_backward(variant, analysis, sign)
    distances = portable.distance_backward(variant, sign)
    hopper_bwd = hopper_kernels.backward(variant, analysis, sign)
    hopper_fwd = hopper_kernels.forward(variant, analysis, sign)
    hopper_fwd_fp8 = None if variant.dropout else fp8_kernel(hopper_fwd, sign)
    kernels = [fwd, dq, dkdv, *([] if distances is None else [distances])]
    return VariantPlan(
        written=written,
        variant=variant,
        mode=mode,
        symbol=sign.symbol,
        analysis=analysis,
        fwd=fwd,
        dq=dq,
        dkdv=dkdv,
        distances=distances,
        hopper_fwd=hopper_fwd,
        hopper_fwd_fp8=hopper_fwd_fp8,
        hopper_bwd=hopper_bwd,
        hopper_bwd_wide=hopper_kernels.wide_backward(hopper_bwd),
        hopper_delta=hopper_kernels.delta(variant, sign),
        lists=lists_plan(variant, analysis, sign),
        terms=terms,
        kept_lags=kept_lags(variant.mask),
        portable_legend=sign.legend(
            [group for kernel in kernels for group in kernel.args],
            [term for kernel in kernels for term in kernel.gradients],
        ),
    )


def _analysis(variant: Variant, mode: Mode) -> blocks.BlockAnalysis:
    """The schedule in a mode. Segmented calls read tables that a kernel makes of their ids, whatever the mask keeps."""
    found = blocks.analyse(variant.mask)
    if mode is Mode.SEGMENTED and found.schedule not in TABLES and variant.mask is not None:
        return blocks.analyse(split_mask(variant.mask)[1])
    return found
