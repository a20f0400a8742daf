"""Block analysis: which blocks of keys a block of queries must visit under a mask, and the reverse.

If every atom of a mask is a step function of the positions (`affine.forms`), the visited keys have closed-form bounds:
one range, or two disjoint ones, without a table or a set-up kernel. For any other mask a set-up kernel writes a table
from interval arithmetic (`intervals`): ranges of blocks if the visited blocks normally form one run, else lists. A
block that cannot be decided is partial, which costs time and never exactness. README.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from codegen.analysis.affine import forms, terms, weakest
from codegen.analysis.intervals import Decision, decide
from codegen.analysis.ranges import EVERYTHING, NOTHING, Range, Union, hull_of, union_of
from codegen.ir import expr
from codegen.ir.expr import FALSE, TRUE, Expr, Level, Op, Var


class Schedule(StrEnum):
    """How a kernel finds the blocks it visits, cheapest first."""

    DENSE = "dense"  # no mask
    CLOSED_FORM = "closed_form"  # bounds computed from the block index
    RANGES = "ranges"  # one run of visited blocks and a run of full blocks inside it, from a set-up kernel
    LISTS = "lists"  # compressed lists of partial and full blocks, from a set-up kernel


@dataclass(frozen=True, kw_only=True)
class BlockAnalysis:
    """What the kernels need to know about a mask.

    `keys` and `queries` are the bounds along each axis for one block of the other; a schedule with a table leaves them
    open. `decision` classifies a block. `tables_per_head`: every query head needs its own table.
    """

    schedule: Schedule
    keys: Union = EVERYTHING
    queries: Union = EVERYTHING
    decision: Decision | None = None
    tables_per_head: bool = False


def analyse(mask: Expr | None) -> BlockAnalysis:
    """The schedule of a mask, and its block bounds along both axes.

    >>> causal = analyse(expr.compare("ge", expr.int_var("q_idx"), expr.int_var("kv_idx")))
    >>> str(causal.schedule), causal.keys.main.first
    ('closed_form', None)
    """
    if mask is None or mask == TRUE:
        return BlockAnalysis(schedule=Schedule.DENSE)
    decision = decide(mask)
    found = terms(mask)
    if _nothing_kept(decision, found):
        return BlockAnalysis(schedule=Schedule.CLOSED_FORM, keys=NOTHING, queries=NOTHING, decision=decision)
    if found is not None and all(map(_closed, (atom for term in found for atom in term))):
        keys, queries = union_of(found, keys=True), union_of(found, keys=False)
        if keys is not None and queries is not None:
            return BlockAnalysis(schedule=Schedule.CLOSED_FORM, keys=keys, queries=queries, decision=decision)
    schedule = Schedule.RANGES if found is not None and _normally_one_run(found) else Schedule.LISTS
    per_head = bool(expr.names(mask) & {"h", "hkv"})
    return BlockAnalysis(schedule=schedule, decision=decision, tables_per_head=per_head)


def keeps_nothing(mask: Expr) -> bool:
    """True if a mask provably keeps no pair in any call.

    >>> from codegen.ir.parse import Scope, parse
    >>> keeps_nothing(parse("33 < kv_idx and kv_idx < 3", Scope(), expr.Type.BOOL))
    True
    """
    return mask == FALSE or _nothing_kept(decide(mask), terms(mask))


def bounds_of_keys(mask: Expr, usable: Callable[[Expr], bool]) -> Union:
    """Ranges of keys outside of which a mask keeps none, if it has no exact ones; no block in them counts as full.

    They follow from the atoms that have closed-form bounds and are `usable`; the others may keep any key. More than two
    ranges become one, from the first key to the last.
    """
    found = terms(mask)
    if found is None:
        return Union(main=Range(has_full=False))
    known = weakest(tuple(atom for atom in term if _closed(atom) and usable(atom)) for term in found)
    ranges = union_of(known, keys=True) or Union(main=hull_of(known))
    other = None if ranges.other is None else ranges.other.without_full()
    return replace(ranges, main=ranges.main.without_full(), other=other)


def _nothing_kept(decision: Decision, found: Sequence[tuple[Expr, ...]] | None) -> bool:
    return decision.may == FALSE or (found is not None and not found)


def _closed(atom: Expr) -> bool:
    """True if closed-form bounds lose nothing to an atom: it has such bounds, or it can decide no block."""
    return expr.level(atom) is Level.UNIFORM or bool(forms(atom)) or _undecidable(atom)


def _undecidable(atom: Expr) -> bool:
    decision = decide(atom)
    return decision.may == TRUE and decision.must == FALSE


# ------------------------------------------------------------------------------------------------- ranges from a table


def _normally_one_run(found: Sequence[tuple[Expr, ...]]) -> bool:
    """True if a block normally visits one run of blocks, given what tensors usually hold.

    That holds for a closed-form range combined with comparisons of a query's value and a key's value that both follow
    their positions. A condition on a key or a query alone may leave holes; beside an equality of groups it is taken for
    padding.
    """
    rests = {frozenset(atom for atom in term if not _closed(atom)) for term in found}
    if len(rests) != 1:
        return False
    closed = [tuple(filter(_closed, term)) for term in found]
    for keys in (True, False):
        union = union_of(closed, keys=keys)
        if union is None or union.other is not None:
            return False
    rest = rests.pop()
    grouped = any(map(_groups, rest))
    return all(_groups(atom) or _limits(atom) or (grouped and _is_padding(atom)) for atom in rest)


def _groups(atom: Expr) -> bool:
    """`doc[q_idx] == doc[kv_idx]`, `q_idx // size == kv_idx // size`: equal values, both from tensors or neither.

    A tensor's value that equals a position (`parent[q_idx] == kv_idx`) may point anywhere and does not count.
    """
    sides = _separated(atom, ("eq",))
    return sides is not None and len({_from_tensor(side) for side in sides}) == 1


def _limits(atom: Expr) -> bool:
    """`kv_idx < limit[q_idx]`, `time[kv_idx] <= time[q_idx]`: a query's value and a key's value are ordered.

    `q_idx < until[kv_idx]` does not count: keys with a large `until` leave holes between them.
    """
    sides = _separated(atom, ("lt", "le", "gt", "ge"))
    return sides is not None and _from_tensor(sides[0]) >= _from_tensor(sides[1])


def _from_tensor(values: Sequence[Expr]) -> bool:
    return any(expr.loads(*values))


def _is_padding(atom: Expr) -> bool:
    """`doc[kv_idx] != -1`: a value of the key or the query differs from a uniform value, or is ordered against it."""
    if not (isinstance(atom, Op) and atom.op in ("ne", "lt", "le", "gt", "ge")):
        return False
    return min(map(expr.level, atom.args)) is Level.UNIFORM and any(map(_monotone, atom.args))


def _separated(atom: Expr, operations: Sequence[str]) -> tuple[list[Expr], list[Expr]] | None:
    """The query's and the key's summands of a comparison of monotone values; None for any other atom."""
    if not (isinstance(atom, Op) and atom.op in operations):
        return None
    parts = [part for side in atom.args for part in expr.summands(side)]
    if not all(expr.level(x) is Level.UNIFORM or _monotone(x) for x in parts):
        return None
    queries, keys = ([x for x in parts if expr.level(x) is level] for level in (Level.QUERY, Level.KEY))
    return (queries, keys) if queries and keys else None


def _monotone(e: Expr) -> bool:
    """True if a value of a query or a key is monotone in its position, provided that its tensors' elements are."""
    if expr.level(e) not in (Level.QUERY, Level.KEY):
        return False
    if isinstance(e, Var):
        return True
    varying = [x for x in expr.children(e) if expr.level(x) is not Level.UNIFORM]
    if isinstance(e, Op) and e.op not in ("add", "sub", "neg", "mul", "floordiv", "min", "max", "float"):
        return False
    return len(varying) == 1 and _monotone(varying[0])
