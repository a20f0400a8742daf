"""The two kinds of kernels that both families have: programs own blocks of query rows, or blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.analysis.gradients import GradientKind, GradientTerm
from codegen.analysis.ranges import Union
from codegen.analysis.schedule import BlockAnalysis
from codegen.ir import expr
from codegen.ir.expr import Op
from codegen.plan.code.loop_bounds import key_bounds, query_bounds
from codegen.plan.code.statements import uses
from codegen.plan.kernels.builder import KernelBuilder
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan
from codegen.plan.kernels.signature import Signatures


def query_kernel(
    builder: KernelBuilder,
    analysis: BlockAnalysis,
    sign: Signatures,
    *,
    name: str,
    args: Sequence[ArgGroup],
    constants: Sequence[str],
    terms: Sequence[GradientTerm] = (),
    backward: bool = False,
) -> KernelPlan:
    """A kernel whose programs own blocks of query rows; it gathers `terms`."""
    full = builder.block(partial=False, terms=terms, backward=backward)
    partial = builder.block(partial=True, terms=terms, backward=backward)
    row_term = builder.term(builder.logits.row_term)
    lowering = builder.lowering
    bounds = key_bounds(analysis, lowering)
    reads = builder.reads | uses(lowering.prologue, bounds.statements)
    return KernelPlan(
        name=f"{sign.symbol}_{name}",
        mode=sign.mode,
        args=args,
        constants=constants,
        legend=sign.legend(args, terms),
        differentiated=_listed("q", terms),
        linear=builder.logits.linear,
        longest_first=analysis.keys.main.end is not None and analysis.keys.main.first is None,
        helpers=frozenset(lowering.helpers),
        prologue=[*builder.index_statements("q", reads), *lowering.prologue],
        bounds=bounds,
        full=full,
        partial=partial,
        row_term=row_term,
        gradients=terms,
    )


def key_kernel(
    builder: KernelBuilder,
    analysis: BlockAnalysis,
    sign: Signatures,
    *,
    name: str,
    terms: Sequence[GradientTerm],
    reads_keys: bool,
) -> KernelPlan:
    """A kernel whose programs own blocks of keys and loop over the query heads that share them; it gathers `terms`.

    `reads_keys`: the kernel reads the vector of keys, even if no expression of the variant does.
    """
    by_pairs = [t for t in terms if t.kind is not GradientKind.ROW]
    full = builder.block(partial=False, terms=by_pairs, backward=True)
    partial = builder.block(partial=True, terms=by_pairs, backward=True)
    key_term, block_term = builder.term(builder.logits.key_term), builder.term(builder.logits.block_term)
    lowering = builder.lowering
    bounds = query_bounds(analysis, lowering)
    reads = builder.reads | uses(lowering.prologue, lowering.head_prologue) | ({builder.key} if reads_keys else set())
    args = sign.dkdv(terms)
    return KernelPlan(
        name=f"{sign.symbol}_{name}",
        mode=sign.mode,
        args=args,
        constants=sign.dkdv_constants(terms),
        legend=sign.legend(args, terms),
        differentiated=_listed("kv", terms),
        linear=builder.logits.linear,
        longest_first=bounds.begins_partial and not bounds.two_sided and not bounds.jumps,
        starts_long=_starts_long(analysis.queries),
        helpers=frozenset(lowering.helpers),
        prologue=[*builder.index_statements("kv", reads), *lowering.prologue],
        head_prologue=lowering.head_prologue,
        bounds=bounds,
        bounds_per_head=analysis.tables_per_head or _reads_head(analysis.queries),
        full=full,
        partial=partial,
        key_term=key_term,
        block_term=block_term,
        gradients=terms,
    )


def _listed(inputs: Sequence[str], terms: Sequence[GradientTerm]) -> str:
    """The inputs and tensors whose gradients a kernel computes, as text for its docstring: `k, v and slope`."""
    *others, last = *inputs, *dict.fromkeys("g" if t.tensor == "decay" else t.tensor for t in terms)
    return f"{', '.join(others)} and {last}" if others else last


def _reads_head(union: Union) -> bool:
    """True if the bounds of a loop differ between query heads."""
    ranges = [union.main] if union.other is None else [union.main, union.other]
    bounds = [e for r in ranges for e in (r.first, r.end, r.full_first, r.full_end) if e is not None]
    return any(expr.reads_head(e) for e in bounds)


def _starts_long(union: Union) -> bool:
    """True if the rows that visit a block of keys end at the later of two limits, one of which some keys alone have."""
    end = union.main.end
    return (
        isinstance(end, Op)
        and end.op == "max"
        and any(isinstance(e, Op) and e.op == "where" for part in end.args for e in expr.walk(part))
    )
