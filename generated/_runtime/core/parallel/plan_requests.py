# SPDX-License-Identifier: Apache-2.0
"""What a plan was asked for, checked before any work is counted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...archs import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..checks import OFFSET_LIMIT, check_choice, fail
from .costs import Machine
from .plan_arguments import (
    check_begins,
    check_count,
    check_groups,
    check_heads,
    check_masks,
    check_own,
    check_ranks,
    check_segments,
)
from .shards import DEALS
from .work import Array, VariantWork, work_of

STRATEGIES = ("auto", "heads", "gather", "exchange", "ring", "2d")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """The arguments of `plan`, which documents them, checked.

    Attributes:
        works, given: of each mask, its variant's work and the arguments that it reads.
        ranks: among which rows are dealt. inner: the ranks of each of these, a node; 1 on a mesh of one dim.
        has_nodes: whether nodes were asked for.
        strategy: "heads" if a variant allows no other.
        groups: head groups; None if the plan chooses them.
    """

    works: Sequence[VariantWork]
    given: Sequence[Mapping[str, Any]]
    seq: int
    heads: tuple[int, int]
    head_dim: int
    ranks: int
    inner: int
    has_nodes: bool
    begins: tuple[int, ...] | None
    ids: Array | None
    strategy: str
    balance: str
    groups: int | None
    machine: Machine

    @property
    def unsplit(self) -> str:
        """Why heads cannot be split, if some variant computes with the number of a head; else ""."""
        return _unsplit(self.works)


def checked_request(
    op: Any,
    ranks: int | tuple[int, int],
    *,
    seq: int,
    heads: tuple[int, int],
    head_dim: int,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    masks: Sequence[tuple[Any, Mapping[str, Any]]] | None = None,
    strategy: str = "auto",
    balance: str = "work",
    head_groups: int | None = None,
    machine: Machine | None = None,
    own: Mapping[str, Any] | None = None,
) -> PlanRequest:
    """Check the arguments of `plan` for so many ranks, or for nodes and the ranks of a node."""
    seq = check_count("seq", seq, most=OFFSET_LIMIT)
    head_dim = check_count("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM)
    heads = check_heads(heads)
    machine = Machine() if machine is None else machine
    if not isinstance(machine, Machine):
        fail("plan", "machine", "a Machine or None", type(machine).__name__)
    check_choice("plan", "strategy", strategy, STRATEGIES)
    row_ranks, inner = check_ranks(ranks, strategy, machine)
    has_nodes = isinstance(ranks, tuple)
    check_choice("plan", "balance", balance, DEALS)
    if cu_seqlens is not None and segment_ids is not None:
        fail("plan", "segment_ids", "None beside cu_seqlens", type(segment_ids).__name__)
    if seq < row_ranks * inner:
        fail("plan", "seq", f"at least a row for each of {row_ranks * inner} ranks", seq)
    begins = None if cu_seqlens is None else check_begins(cu_seqlens, seq)
    ids = None if segment_ids is None else check_segments(segment_ids, seq)
    calls = [(op, own or {})] if masks is None else check_masks(masks)
    works = [work_of(each) for each, _ in calls]
    for (each, given), work in zip(calls, works, strict=True):
        check_own(each, work, given, seq)
    groups = None if head_groups is None else check_groups(head_groups, heads, inner)
    if why := _unsplit(works):
        groups = one_group(groups, why)
    if row_ranks * inner > 1:
        strategy = _of_query_counts(works, strategy, has_nodes=has_nodes)
    return PlanRequest(
        works=works,
        given=[given for _, given in calls],
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        ranks=row_ranks,
        inner=inner,
        has_nodes=has_nodes,
        begins=begins,
        ids=ids,
        strategy=strategy,
        balance=balance,
        groups=groups,
        machine=machine,
    )


def _unsplit(works: Sequence[VariantWork]) -> str:
    return next((f"{work.op}, which computes with the number of a head" for work in works if not work.by_heads), "")


def one_group(groups: int | None, what: str) -> int:
    """One group of key heads, because of `what`; more must not have been asked for."""
    if groups not in (None, 1):
        fail("plan", "head_groups", f"None or 1 with {what}", groups)
    return 1


def _of_query_counts(works: Sequence[VariantWork], strategy: str, *, has_nodes: bool) -> str:
    """The strategy that was asked for; "heads" if a variant computes with the number of queries of the whole call."""
    op = next((work.op for work in works if work.by_queries), "")
    if not op:
        return strategy
    if has_nodes or strategy not in ("auto", "heads"):
        got = "'2d'" if has_nodes else repr(strategy)
        why = f"{op}, which computes with the number of queries of the whole call"
        fail("plan", "strategy", "'heads', on a mesh of one dim", f"{got} with {why}")
    return "heads"
