"""The portable kernels of a variant, in Triton: forward, dq, and dk with dv."""

from __future__ import annotations

from dataclasses import replace

from codegen.analysis.gradients import GradientKind
from codegen.analysis.mask_ranges import RangedMask, split_ranges
from codegen.analysis.schedule import BlockAnalysis, Schedule, Union
from codegen.ir.expr import Expr
from codegen.plan.kernel import KernelPlan
from codegen.plan.kernel_assembly import key_kernel, query_kernel
from codegen.plan.kernel_builder import KernelBuilder
from codegen.plan.logits import logits
from codegen.plan.signature import Signatures
from codegen.spec.model import Variant

_PTX = "PTX"

_ONE_LOOP_UP_TO = 256
"""Keys of a band of fixed width up to which all blocks are visited with the mask, in one loop. A second loop, for the one
to three blocks between the edges, takes longer to fill its pipeline than their masks take."""


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
    return _with_ptx(query_kernel(builder, analysis, sign, name="fwd", args=sign.fwd(), constants=sign.constants()))


def query_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dq and delta, which gathers all gradients but sums of columns."""
    builder = _PortableBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    terms = [t for t in builder.logits.terms if t.kind is not GradientKind.COLUMN]
    args, constants = sign.dq(), sign.dq_constants()
    analysis = _in_one_loop(variant, analysis)
    return _with_ptx(
        query_kernel(builder, analysis, sign, name="bwd_dq", args=args, constants=constants, terms=terms, backward=True)
    )


def key_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dk and dv, which gathers sums of columns."""
    builder = _PortableBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=1, walks_heads=True)
    terms = [t for t in builder.logits.terms if t.kind is GradientKind.COLUMN]
    analysis = _in_one_loop(variant, analysis)
    return _with_ptx(key_kernel(builder, analysis, sign, name="bwd_dkdv", terms=terms, reads_keys=bool(terms)))


def _in_one_loop(variant: Variant, analysis: BlockAnalysis) -> BlockAnalysis:
    """The analysis of a mask without full blocks, if it keeps a narrow band."""
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


def _with_ptx(plan: KernelPlan) -> KernelPlan:
    """The plan with the constant that `keep_range` wants."""
    if "keep_range" not in plan.helpers or _PTX in plan.constants:
        return plan
    return replace(plan, constants=[_PTX, *plan.constants])
