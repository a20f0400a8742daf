"""The portable kernels of a variant, in Triton: forward, dq, dk with dv, and sums of ds by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.analysis.call_modes import Mode
from codegen.analysis.distances import added_by_distance
from codegen.analysis.gradients import GradientKind
from codegen.analysis.mask_ranges import RangedMask, split_ranges
from codegen.analysis.ranges import Union
from codegen.analysis.schedule import BlockAnalysis, Schedule
from codegen.ir import expr
from codegen.ir.expr import Expr, Var
from codegen.plan.code.host import HostCode, host, listed, sum_of_scalars
from codegen.plan.code.logits import LOG2E, Logits, logits
from codegen.plan.kernels.assembly import key_kernel, query_kernel
from codegen.plan.kernels.builder import KernelBuilder
from codegen.plan.kernels.far_blocks import SUMS, far_blocks, limits, sums
from codegen.plan.kernels.kernel import KernelPlan
from codegen.plan.kernels.signature import Signatures
from codegen.spec.model import Variant

_PTX, _NARROW = "PTX", "NARROW"

_ONE_LOOP_UP_TO = 256
"""The most keys of a band of fixed width whose blocks are all visited with the mask, in one loop. A second loop, for
the one to three blocks between the edges, takes longer to fill its pipeline than the masks of these blocks take."""


class _PortableBuilder(KernelBuilder):
    """A builder for kernels that decide a range of distances with one comparison."""

    def ranges(self, keep: Expr | None) -> RangedMask:
        found = split_ranges(keep, self.variant.scalars)
        if found.ranges:
            self.lowering.helpers.add("keep_range")
        return found


def forward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of o and lse."""
    builder = _PortableBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    analysis = _in_one_loop(variant, analysis)
    return _finished(
        query_kernel(builder, analysis, sign, name="fwd", args=sign.fwd(), constants=sign.constants()), variant
    )


def query_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dq and delta, which gathers all gradients but sums of columns and of distances."""
    builder = _PortableBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    terms = [t for t in builder.logits.terms if t.in_dq]
    args, constants = sign.dq(), sign.dq_constants()
    analysis = _in_one_loop(variant, analysis)
    return _finished(
        query_kernel(
            builder, analysis, sign, name="bwd_dq", args=args, constants=constants, terms=terms, backward=True
        ),
        variant,
    )


def key_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dk and dv, which gathers sums of columns."""
    builder = _PortableBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=1, walks_heads=True)
    terms = [t for t in builder.logits.terms if t.kind is GradientKind.COLUMN]
    analysis = _in_one_loop(variant, analysis)
    return _finished(key_kernel(builder, analysis, sign, name="bwd_dkdv", terms=terms, reads_keys=bool(terms)), variant)


def distance_backward(variant: Variant, sign: Signatures) -> KernelPlan | None:
    """The kernel of the sums of ds by distance; None if no gradient needs them.

    Its logit is what the score adds to the product: the same tile for all blocks along a block diagonal.
    """
    terms = [t for t in sign.terms if t.by_distance]
    added = added_by_distance(variant)
    if not terms or added is None:
        return None
    own = Logits(logit=expr.scaled(LOG2E, expr.without_powers(added)), dscore=None, linear=False, terms=())
    builder = KernelBuilder(variant, sign.mode, own, query_axis=0)
    tile = builder.block(partial=True, terms=(), backward=False)
    far = far_blocks(variant)
    lowering, args = builder.lowering, sign.distances(sums(far), limits(far))
    return KernelPlan(
        name=f"{sign.symbol}_bwd_distances",
        mode=sign.mode,
        args=args,
        constants=[*([] if far is None else [SUMS]), *sign.constants()],
        legend=sign.legend(args, terms),
        linear=False,
        helpers=frozenset((*lowering.helpers, "distances")),
        prologue=[*builder.index_statements("q", builder.reads), *lowering.prologue],
        partial=tile,
        gradients=terms,
        far=far,
    )


def _in_one_loop(variant: Variant, analysis: BlockAnalysis) -> BlockAnalysis:
    """The analysis of a mask, without full blocks if the mask keeps a narrow band."""
    band = split_ranges(variant.mask, variant.scalars).band
    if band is None or band > _ONE_LOOP_UP_TO or analysis.schedule is not Schedule.CLOSED_FORM:
        return analysis
    return replace(analysis, keys=_without_full(analysis.keys), queries=_without_full(analysis.queries))


def _without_full(union: Union) -> Union:
    main, other = (
        None if r is None else replace(r, full_first=None, full_end=None, has_full=False)
        for r in (union.main, union.other)
    )
    assert main is not None
    return replace(union, main=main, other=other)


def _finished(plan: KernelPlan, variant: Variant) -> KernelPlan:
    """The plan with the constants of a mask with ranges: that of `keep_range`, and whether a band is narrow."""
    if "keep_range" not in plan.helpers:
        return plan
    scalars = split_ranges(variant.mask, variant.scalars).band_scalars
    bounds = plan.bounds
    if scalars is not None and bounds is not None and bounds.two_sided and plan.mode is not Mode.SEGMENTED:
        plan = replace(plan, narrow=_is_narrow(scalars), constants=[_NARROW, *plan.constants])
    return plan if _PTX in plan.constants else replace(plan, constants=[_PTX, *plan.constants])


def _is_narrow(scalars: Mapping[Expr, int]) -> HostCode:
    """Source of whether a band is narrow; false for a band whose width is in memory."""
    named = {term.name: factor for term, factor in scalars.items() if isinstance(term, Var)}
    rest = sum(factor for term, factor in scalars.items() if not isinstance(term, Var))
    width = sum_of_scalars(named)
    return host(f"not backend.is_loaded({{}}) and {{}} <= {_ONE_LOOP_UP_TO - rest}", listed(named), width)
