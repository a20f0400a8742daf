"""The portable kernels of a variant, in Triton: forward, dq, dk with dv, and sums of ds by distance."""

from __future__ import annotations

from codegen.analysis.distances import added_by_distance
from codegen.analysis.gradients import GradientKind
from codegen.analysis.schedule import BlockAnalysis
from codegen.ir import expr
from codegen.plan.kernel import KernelPlan
from codegen.plan.kernel_assembly import key_kernel, query_kernel
from codegen.plan.kernel_builder import KernelBuilder
from codegen.plan.logits import LOG2E, Logits, logits
from codegen.plan.signature import Signatures
from codegen.spec.model import Variant


def forward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of o and lse."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    return query_kernel(builder, analysis, sign, name="fwd", args=sign.fwd(), constants=sign.constants())


def query_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dq and delta, which gathers all gradients but sums of columns and of distances."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    terms = [t for t in builder.logits.terms if t.in_dq]
    args, constants = sign.dq(), sign.dq_constants()
    return query_kernel(
        builder, analysis, sign, name="bwd_dq", args=args, constants=constants, terms=terms, backward=True
    )


def key_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dk and dv, which gathers sums of columns."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=1, walks_heads=True)
    terms = [t for t in builder.logits.terms if t.kind is GradientKind.COLUMN]
    return key_kernel(builder, analysis, sign, name="bwd_dkdv", terms=terms, reads_keys=bool(terms))


def distance_backward(variant: Variant, sign: Signatures) -> KernelPlan | None:
    """The kernel of the sums of ds by distance; None if no gradient is made of them.

    Its logit is what the score adds to the product: the same tile for all blocks along a block diagonal.
    """
    terms = [t for t in sign.terms if t.by_distance]
    added = added_by_distance(variant)
    if not terms or added is None:
        return None
    own = Logits(logit=expr.scaled(LOG2E, added), dscore=None, linear=False, terms=())
    builder = KernelBuilder(variant, sign.mode, own, query_axis=0)
    tile = builder.block(partial=True, terms=(), backward=False)
    lowering, args = builder.lowering, sign.distances()
    return KernelPlan(
        name=f"{sign.symbol}_bwd_distances",
        mode=sign.mode,
        args=args,
        constants=sign.constants(),
        legend=sign.legend(args, terms),
        linear=False,
        helpers=frozenset((*lowering.helpers, "distances")),
        prologue=[*builder.index_statements("q", builder.reads), *lowering.prologue],
        partial=tile,
        gradients=terms,
    )
