"""Whether a variant computes the same when all positions shift by one number.

A call on a part of the keys counts its positions from 0, so that they are shifted.
"""

from __future__ import annotations

from collections.abc import Mapping

from codegen.analysis.affine import linear
from codegen.analysis.call_modes import POSITIONAL, has_tokens
from codegen.analysis.schedule import Schedule, analyse
from codegen.ir import expr
from codegen.ir.expr import Const, Expr, Load, Op, TensorSpec, Var, int_var
from codegen.spec.model import Variant


def is_shift_invariant(variant: Variant) -> bool:
    """True if mask and score stay the same when all positions, and the elements of per-token tensors, shift by one
    number, while the numbers of queries and keys do not change."""
    roots = [e for e in (variant.mask, variant.score) if e is not None]
    return all(_change(e, variant.tensors) == 0 for e in roots)


def looks_back(variant: Variant) -> bool:
    """True if a causal comparison is a conjunct of the mask, so that no query attends to a later key."""
    return variant.mask is not None and any(_is_causal(e) for e in expr.conjuncts(variant.mask))


def computes_with_lengths(variant: Variant) -> bool:
    """True if mask or score depend on how many queries or keys a call has."""
    roots = [e for e in (variant.mask, variant.score) if e is not None]
    return any(expr.names(e).intersection(expr.LENGTH_NAMES) for e in roots)


def computes_runs_alone(variant: Variant) -> bool:
    """True if a run of tokens whose queries attend only to keys of the run can be computed as a separate sequence."""
    by_token = any(has_tokens(spec.dims) for spec in variant.tensors.values())
    if variant.decay or variant.dropout or by_token or computes_with_lengths(variant):
        return False
    return is_shift_invariant(variant) and analyse(variant.mask).schedule in (Schedule.DENSE, Schedule.CLOSED_FORM)


def _change(e: Expr, tensors: Mapping[str, TensorSpec]) -> int | None:
    """By how much a value changes when all positions grow by one; None if the change is not a constant."""
    if isinstance(e, Const):
        return 0
    if isinstance(e, Var):
        return int(e.name in POSITIONAL)
    if isinstance(e, Load):
        dims = tensors[e.tensor].dims
        moves = all(
            index in (int_var("q_idx"), int_var("kv_idx")) if dim in POSITIONAL else _change(index, tensors) == 0
            for dim, index in zip(dims, e.indices, strict=True)
        )
        return 0 if moves else None
    assert isinstance(e, Op)
    changes = [_change(x, tensors) for x in e.args]
    known = [x for x in changes if x is not None]
    if len(known) < len(changes):
        return None
    if not any(known):
        return 0
    return _of_operation(e, known)


def _of_operation(e: Op, changes: list[int]) -> int | None:
    """The change of an operation some of whose operands change."""
    same = len(set(changes)) == 1
    if e.op in expr.COMPARISONS:
        return 0 if same else None
    if e.op in ("min", "max"):
        return changes[0] if same else None
    if e.op in ("add", "sub"):
        return changes[0] + (changes[1] if e.op == "add" else -changes[1])
    if e.op == "neg":
        return -changes[0]
    if e.op == "float":
        return changes[0]
    if e.op == "mul":
        for factor, change in ((e.args[0], changes[1]), (e.args[1], changes[0])):
            if isinstance(factor, Const) and float(factor.value).is_integer():
                return int(factor.value) * change
    return None


def _is_causal(e: Expr) -> bool:
    """True if a comparison implies that the key's position is at most the query's."""
    if not (isinstance(e, Op) and e.op in ("lt", "le", "gt", "ge")):
        return False
    larger, smaller = e.args if e.op in ("gt", "ge") else reversed(e.args)
    form = linear(expr.sub(larger, smaller))
    if form is None or (form.q, form.kv) != (1, -1) or not isinstance(form.rest, Const):
        return False
    return int(form.rest.value) <= (1 if e.op in ("lt", "gt") else 0)
