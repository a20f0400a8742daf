"""The kernels of the Hopper family, in Gluon: forward, backward, and what runs before and after the backward.

They evaluate a term that all keys of a row, or all rows of a key, share once per row or key. They split the mask if a
part of it is cheaper to evaluate on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.analysis.call_modes import Mode, split_mask
from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.analysis.indexing import DECAY
from codegen.analysis.mask_runs import Limits, split_limits
from codegen.analysis.schedule import BlockAnalysis
from codegen.analysis.score_bounds import bounds, fixed_reference
from codegen.analysis.score_split import NOTHING, split_sides
from codegen.ir import expr
from codegen.ir.expr import Expr, Level, Load, Op, Var
from codegen.plan.code.logits import PRODUCT, Logits, logits
from codegen.plan.code.statements import assign, uses
from codegen.plan.code.tree import Broadcast, Code, Infix, Name
from codegen.plan.kernels.assembly import key_kernel, query_kernel
from codegen.plan.kernels.builder import KernelBuilder, unless_true
from codegen.plan.kernels.far_blocks import SUMS, far_blocks, far_score, limits, sums
from codegen.plan.kernels.kernel import FarBlocks, KernelPlan
from codegen.plan.kernels.signature import Signatures
from codegen.spec.model import Variant

_SUMS = ("add", "sub", "neg", "mul", "float")


class HopperBuilder(KernelBuilder):
    """Builds the code of one kernel, with a mask in up to two parts."""

    def masks(self) -> tuple[Expr | None, Expr | None, Limits]:
        mask = self.variant.mask if self.variant.mask is not None else expr.TRUE
        if self.by_position:
            limits = split_limits(mask, "q_idx" if self.transposed else "kv_idx")
            return unless_true(limits.rest), None, limits
        # Positions that a call gives need not follow each other.
        own, same = split_mask(mask)
        if own == expr.TRUE:
            return unless_true(same), None, Limits()
        return own, unless_true(same), Limits()


def sums_by_keys(terms: Sequence[GradientTerm]) -> bool:
    """True if programs that own blocks of keys can gather all gradients. They can add up the gradients of a head, and
    those of a row if these are sums of ds, which are gathered as dq is. Sums by distance have a kernel of their own."""
    return all(t.kind in (GradientKind.COLUMN, GradientKind.HEAD) or t.is_sum for t in terms if not t.by_distance)


def forward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of o and lse. It adds the part of a score that all keys of a row share to the row's maximum."""
    return forward_kernel(variant, analysis, sign, sign.constants())[0]


def forward_of_terms(
    variant: Variant, analysis: BlockAnalysis, sign: Signatures, whole: KernelPlan
) -> KernelPlan | None:
    """The forward `whole`, if products can add the part of a score that all rows of a key share; else None.

    They can if the rest of the score is the scaled product and a part that all keys of a row share, without dropout.
    """
    found = logits(variant, sign.mode)
    sides = split_sides(found.logit, PRODUCT, in_order=_in_order(sign), from_rows=True)
    if sides is None or variant.dropout or expr.level(sides.keys) is not Level.KEY:
        return None
    if sides.rows != NOTHING and expr.level(sides.rows) is not Level.QUERY:
        return None
    own = replace(found, logit=PRODUCT, linear=True, row_term=sides.rows)
    builder = HopperBuilder(variant, sign.mode, own, query_axis=0)
    plan = query_kernel(builder, analysis, sign, name="hopper_fwd", args=sign.fwd(), constants=sign.constants())
    hoisted = len(builder.lowering.prologue)
    statements, key_term = builder.lowering.of_block(sides.keys)
    prologue = [*plan.prologue, *builder.lowering.prologue[hoisted:]]
    start = Infix("+", Name("start_m"), Name("q_shift")) if plan.has_offset else Name("start_m")
    first_use = next((i for i, line in enumerate(prologue) if "row_start" in line.uses), len(prologue))
    return replace(
        plan,
        prologue=[*prologue[:first_use], assign("row_start", start), *prologue[first_use:]],
        key_term=key_term,
        key_statements=[*builder.index_statements("kv", expr.names(sides.keys)), *statements],
        key_term_is_finite=all(map(_is_finite, expr.walk(sides.keys))),
        leaves_runs=whole.leaves_runs,
    )


def _is_finite(e: Expr) -> bool:
    """True if a part of a key's term may not be infinite: a sum of positions and log-decays, times factors."""
    if expr.level(e) is Level.UNIFORM or isinstance(e, Var):
        return True
    return e.tensor == DECAY.name if isinstance(e, Load) else isinstance(e, Op) and e.op in _SUMS


def forward_kernel(
    variant: Variant, analysis: BlockAnalysis, sign: Signatures, constants: Sequence[str]
) -> tuple[KernelPlan, HopperBuilder]:
    """The kernel of o and lse, with the given compile-time constants, and its builder."""
    whole = logits(variant, sign.mode)
    # A sink's logit is not bounded.
    reference = None if variant.sink else fixed_reference(whole.logit)
    builder = HopperBuilder(variant, sign.mode, whole.split_by_rows(in_order=_in_order(sign)), query_axis=0)
    plan = query_kernel(builder, analysis, sign, name="hopper_fwd", args=sign.fwd(), constants=constants)
    return replace(plan, fixed_reference=reference), builder


def backward(variant: Variant, analysis: BlockAnalysis, sign: Signatures) -> KernelPlan:
    """The kernel of dk and dv, and of dq if it can gather all gradients.

    It adds the part of a score that all rows of a key share once per key. The part that all keys of a row share comes
    with the row's lse, from `delta`.
    """
    own = _split_by_sides(variant, sign)
    builder = HopperBuilder(variant, sign.mode, own, query_axis=1, walks_heads=True)
    far = _far_blocks(variant, builder)
    gathers_all = sums_by_keys(own.terms)
    terms = [t for t in own.terms if t.kind is GradientKind.COLUMN or (gathers_all and not t.by_distance)]
    plan = key_kernel(builder, analysis, sign, name="hopper_bwd", terms=terms, reads_keys=True)
    assert plan.bounds is not None
    assert plan.full is not None
    assert plan.partial is not None
    # The kernel of `delta` computes terms of a row alone: names that only they read are no arguments here.
    blocks = [plan.full.parts, plan.partial.parts, plan.key_term, plan.block_term]
    read = uses(plan.prologue, plan.head_prologue, plan.bounds.statements, *blocks)
    if far is not None or "row_start" in uses(plan.block_term):
        read |= {"q_shift"}
    args, constants = sign.read_only(plan.args, plan.constants, read)
    first_number = next(i for i, group in enumerate(args) if group.names[0].startswith("stride_"))
    return replace(
        plan,
        args=[*args[:first_number], *sums(far), *args[first_number:], *limits(far)],
        constants=[*([] if far is None else [SUMS]), *constants],
        far=far,
        legend=sign.legend(args, terms),
        sums_by_products=gathers_all and own.dscore is None,
        dscore_is_bounded=own.dscore is not None and bounds(own.dscore).is_bounded,
    )


def _far_blocks(variant: Variant, builder: HopperBuilder) -> FarBlocks | None:
    """A backward's far blocks, with their logits. All ds of a far block go to the gradient of one element."""
    far = far_blocks(variant) if any(term.by_distance for term in builder.logits.terms) else None
    if far is None:
        return None
    score = expr.substitute(builder.logits.logit, {"qk": expr.const(0.0)})
    added = [far_score(variant, score, side) for side in far.sides]
    _, (scaled, *rests) = builder.lowering.block(PRODUCT, *added, whole=True)
    assert scaled is not None
    found: dict[str, Code] = {}
    for side, own, rest in zip(far.sides, added, rests, strict=True):
        assert rest is not None
        lse = Name("lse")
        is_number = expr.level(own) is Level.UNIFORM
        less = Broadcast(Infix("-", rest, lse), 1) if is_number else Infix("-", rest, Broadcast(lse, 1))
        found[side] = Infix("+", scaled, less)
    return replace(far, logits=found)


def wide_forward_name(forward: KernelPlan) -> str:
    """The name of the forward for more than 256 columns, which has the plan of `forward`."""
    return f"{forward.name}_wide"


def wide_backward(plan: KernelPlan) -> KernelPlan:
    """The backward for more than 128 columns. Its blocks take longer, and if each program took a long and a short block
    in turn, more programs would be without work at the end. So it takes the longest blocks first."""
    return replace(plan, name=f"{plan.name}_wide", orders_work=plan.longest_first and not plan.shares_work)


def delta(variant: Variant, sign: Signatures) -> KernelPlan:
    """The kernel before the backward. It computes delta, and the part of a score that all keys of a row share."""
    own = _split_by_sides(variant, sign)
    builder = KernelBuilder(variant, sign.mode, own, query_axis=0)
    row_term = builder.term(own.row_term)
    lowering = builder.lowering
    hoisted = uses(row_term, lowering.prologue)
    prologue = [*builder.index_statements("q", builder.reads | hoisted), *lowering.prologue]
    args, constants = sign.row_terms(hoisted | uses(prologue))
    return KernelPlan(
        name=f"{sign.symbol}_hopper_delta",
        mode=sign.mode,
        args=args,
        constants=constants,
        linear=own.linear,
        helpers=frozenset(lowering.helpers),
        prologue=prologue,
        row_term=row_term,
        stores_delta=any(t.by_distance for t in sign.terms),
    )


def _split_by_sides(variant: Variant, sign: Signatures) -> Logits:
    return logits(variant, sign.mode).split_by_sides(in_order=_in_order(sign))


def _in_order(sign: Signatures) -> bool:
    """True if positions are the numbers of rows and keys; a segmented call may give any positions."""
    return sign.mode is not Mode.SEGMENTED
