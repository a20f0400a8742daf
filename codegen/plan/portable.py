"""The portable kernels of a variant, in Triton: forward, dq, and dk with dv."""

from __future__ import annotations

from codegen.analysis.gradients import GradientKind
from codegen.analysis.schedule import BlockAnalysis
from codegen.plan.kernel import KernelPlan
from codegen.plan.kernel_assembly import key_kernel, query_kernel
from codegen.plan.kernel_builder import KernelBuilder
from codegen.plan.logits import logits
from codegen.plan.signature import Signatures
from codegen.spec.model import Variant


def forward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of o and lse."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    return query_kernel(builder, analysis, sign, name="fwd", args=sign.fwd(), constants=sign.constants())


def query_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dq and delta, which gathers all gradients but sums of columns."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=0)
    terms = [t for t in builder.logits.terms if t.kind is not GradientKind.COLUMN]
    args, constants = sign.dq(), sign.dq_constants()
    return query_kernel(
        builder, analysis, sign, name="bwd_dq", args=args, constants=constants, terms=terms, backward=True
    )


def key_backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dk and dv, which gathers sums of columns."""
    builder = KernelBuilder(variant, sign.mode, logits(variant, sign.mode), query_axis=1, walks_heads=True)
    terms = [t for t in builder.logits.terms if t.kind is GradientKind.COLUMN]
    return key_kernel(builder, analysis, sign, name="bwd_dkdv", terms=terms, reads_keys=bool(terms))
