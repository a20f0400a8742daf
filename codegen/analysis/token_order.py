"""What a variant requires of the positions in a segmented call, because it reads some tensors by row.

A dim of tokens is indexed by row. Reading it at the token itself is right for positions in any order, and so is reading
a row that a number or another tensor gives. If the index is computed from a position, rows and positions must agree.
The running sum of a log-decay and dropout need that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap

from codegen.analysis.affine import linear
from codegen.analysis.call_modes import POSITIONAL
from codegen.ir import expr
from codegen.ir.expr import Expr, Load, Var, int_var
from codegen.ir.printers import FormulaPrinter
from codegen.spec.model import Variant


@dataclass(frozen=True, kw_only=True)
class ByRow:
    """Requirements on positions, and the reads that cause them, as text.

    `in_order`: positions rise by one from row to row of a segment. `in_step`: the query and the key of a row have the
    same position. `as_rows`: positions equal row numbers.
    """

    in_order: bool
    in_step: bool
    as_rows: bool
    reads: str

    @property
    def rule(self) -> str:
        """The requirement as a phrase for messages and docstrings."""
        if self.as_rows:
            found = "that are the rows themselves"
        else:
            order = "that rise by 1 from row to row of a segment" if self.in_order else ""
            step = "that the query and the key of each row share" if self.in_step else ""
            found = " and ".join(filter(None, (order, step)))
        return f"positions {found} (read by row: {self.reads})"

    @property
    def rule_lines(self) -> list[str]:
        """The phrase in pieces that fit lines of source."""
        return [f"{line} " for line in wrap(self.rule, 90)[:-1]] + wrap(self.rule, 90)[-1:]


@dataclass(frozen=True)
class _Needs:
    in_order: bool = False
    in_step: bool = False
    as_rows: bool = False


def by_row(variant: Variant) -> ByRow | None:
    """The requirements of a variant as written; None if positions may be arbitrary."""
    found = dict(_needs(variant))
    if not found:
        return None
    return ByRow(
        in_order=any(needs.in_order for needs in found.values()),
        in_step=any(needs.in_step for needs in found.values()),
        as_rows=any(needs.as_rows for needs in found.values()),
        reads=", ".join(found),
    )


def _needs(variant: Variant) -> Iterator[tuple[str, _Needs]]:
    for load in expr.loads(*(e for e in (variant.mask, variant.score) if e is not None)):
        dims = variant.tensors[load.tensor].dims
        indices = [(str(dim), index) for dim, index in zip(dims, load.indices, strict=True) if dim in POSITIONAL]
        needs = [found for dim, index in indices if (found := _of_index(dim, index)) is not None]
        if needs:
            yield FormulaPrinter().text(load), _joined(needs)
    if variant.decay:
        yield "the log-decay", _Needs(in_order=True, in_step=True)
    if variant.dropout:
        yield "what dropout drops", _Needs(in_order=True)


def _joined(needs: list[_Needs]) -> _Needs:
    return _Needs(any(n.in_order for n in needs), any(n.in_step for n in needs), any(n.as_rows for n in needs))


def _of_index(dim: str, index: Expr) -> _Needs | None:
    """The requirement of one index into a dim of tokens, or None."""
    if index == int_var(dim) or not _computes_with_positions(index):
        return None
    if isinstance(index, Var):
        return _Needs(in_step=True)
    form = linear(index)
    if form is None or (form.q, form.kv) not in ((1, 0), (0, 1)):
        return _Needs(as_rows=True)
    own = "q_idx" if form.q else "kv_idx"
    return _Needs(in_order=True, in_step=own != dim)


def _computes_with_positions(e: Expr) -> bool:
    """True if a position is part of the value itself, and not only of an index of a tensor read."""
    if isinstance(e, Load):
        return False
    return (isinstance(e, Var) and e.name in POSITIONAL) or any(map(_computes_with_positions, expr.children(e)))
