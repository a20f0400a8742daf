"""From a variant to everything its templates print: all its kernels, in one mode of calls.

All decisions are made here and in the planners of the two families; a template prints statements and names. See
templates/README.md for the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.analysis import schedule as blocks
from codegen.analysis.call_modes import Mode, specialised, split_mask
from codegen.analysis.distances import Lags, kept_lags
from codegen.analysis.gradients import GradientTerm, gradient_terms
from codegen.analysis.shifts import computes_runs_alone
from codegen.plan.code.host import HostCode
from codegen.plan.hopper import kernels as hopper_kernels
from codegen.plan.hopper.fp8 import fp8_kernel
from codegen.plan.hopper.split import split_keys_kernel, split_rows_kernel
from codegen.plan.kernels import portable
from codegen.plan.kernels.block_tables import ListsPlan, lists_plan
from codegen.plan.kernels.far_blocks import host_limits
from codegen.plan.kernels.kernel import KernelPlan, pointers
from codegen.plan.kernels.signature import TABLES, Signatures
from codegen.plan.kernels.token_layout import InMode
from codegen.spec.model import Variant
from codegen.spec.symbols import symbolised


@dataclass(frozen=True, kw_only=True)
class VariantPlan(InMode):
    """All kernels of a variant in one mode, and what its ops need to know. Names of kernels begin with `symbol`.

    `variant` is the `written` variant, specialised for the mode. `hopper_fwd_wide` names the kernel for more than 256
    columns, which has the plan of `hopper_fwd`. `hopper_fwd_of_terms` is that plan for up to 256 columns, if products
    add a term of each key to the scores. The kernels `hopper_split_...` exist if the score is the scaled product and
    nothing else has a gradient.
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
    hopper_fwd_of_terms: KernelPlan | None
    hopper_fwd_wide: str
    hopper_fwd_fp8: KernelPlan | None
    hopper_bwd: KernelPlan
    hopper_bwd_wide: KernelPlan
    hopper_split_keys: KernelPlan | None
    hopper_split_rows: KernelPlan | None
    hopper_delta: KernelPlan
    lists: ListsPlan | None
    terms: tuple[GradientTerm, ...]
    kept_lags: Lags
    far_limits: tuple[HostCode, HostCode]
    portable_legend: str

    @property
    def computes_runs(self) -> bool:
        """True if the packed forward computes segmented calls whose segments are runs of tokens."""
        return self.packed and computes_runs_alone(self.written)

    @property
    def differentiates_runs(self) -> bool:
        """True if the packed backward computes such calls, too."""
        return self.computes_runs and _differentiates_runs(self.written, self.terms, self.hopper_delta)


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
    hopper_delta = hopper_kernels.delta(variant, sign)
    hopper_fwd = hopper_kernels.forward(variant, analysis, sign)
    if mode is Mode.SEGMENTED and computes_runs_alone(written):
        hopper_fwd = replace(hopper_fwd, leaves_runs=True)
        if plan(written, Mode.PACKED).differentiates_runs:
            hopper_bwd = replace(hopper_bwd, leaves_runs=True)
            dq = replace(dq, leaves_runs=True, args=[*dq.args, pointers("run_rows")])
    hopper_fwd_fp8 = None if variant.dropout else fp8_kernel(hopper_fwd, sign)
    hopper_bwd_wide = hopper_kernels.wide_backward(hopper_bwd)
    is_product = variant.score is None and not variant.dropout and not terms
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
        hopper_fwd_of_terms=hopper_kernels.forward_of_terms(variant, analysis, sign, hopper_fwd),
        hopper_fwd_wide=hopper_kernels.wide_forward_name(hopper_fwd),
        hopper_fwd_fp8=hopper_fwd_fp8,
        hopper_bwd=hopper_bwd,
        hopper_bwd_wide=hopper_bwd_wide,
        hopper_split_keys=split_keys_kernel(hopper_bwd_wide, sign) if is_product else None,
        hopper_split_rows=split_rows_kernel(hopper_fwd, sign) if is_product else None,
        hopper_delta=hopper_delta,
        lists=lists_plan(variant, analysis, sign),
        terms=terms,
        kept_lags=kept_lags(variant.mask),
        far_limits=host_limits(variant),
        portable_legend=sign.legend(
            [group for kernel in kernels for group in kernel.args],
            [term for kernel in kernels for term in kernel.gradients],
        ),
    )


def _differentiates_runs(written: Variant, terms: Sequence[GradientTerm], delta: KernelPlan) -> bool:
    """True if the backward of a run is that of a packed sequence: it gathers no gradients besides dq, dk and dv, reads
    nothing by batch row, and adds nothing to lse by position."""
    by_batch = any("b" in spec.dims for spec in written.tensors.values())
    return not terms and not written.sink and not by_batch and delta.row_term is None


def _analysis(variant: Variant, mode: Mode) -> blocks.BlockAnalysis:
    """The schedule in a mode. Segmented calls read tables that a kernel makes of their ids, whatever the mask keeps."""
    found = blocks.analyse(variant.mask)
    if mode is Mode.SEGMENTED and found.schedule not in TABLES and variant.mask is not None:
        return blocks.analyse(split_mask(variant.mask)[1])
    return found
