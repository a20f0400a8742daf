# SPDX-License-Identifier: Apache-2.0
"""The steps of a ring: keys go from each rank to the next, and a rank skips keys that its rows may not attend to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..checks import fail
from .shards import Chunk, KeyNeeds, Layout
from .work import Array, VariantWork

NO_SINK = float("-inf")
"""A sink that adds nothing to a row's denominator: the row's own sink counts in one step alone."""


@dataclass(frozen=True)
class RingSteps:
    """The ranks whose keys each rank visits.

    Attributes:
        visits: whether a rank visits keys of another: bool `[rank, owner]`.
        count: number of steps; in step t rank r has the keys of rank (r - t) % ranks.
        looks_back: no query attends to a key after it.
    """

    visits: Array
    looks_back: bool

    @property
    def count(self) -> int:
        ranks, owners = np.nonzero(self.visits)
        return 1 + int(((ranks - owners) % len(self.visits)).max(initial=0))

    def visited(self, rank: int, owner: int, run: Chunk, keys: Chunk) -> bool:
        """Whether a run of rows visits a run of keys."""
        return bool(self.visits[rank, owner]) and not (self.looks_back and keys[0] >= sum(run))


def ring_steps(
    layout: Layout, work: VariantWork, needs: KeyNeeds | None, given_tokens: Sequence[str] = ()
) -> RingSteps:
    """The steps of a call. Without `needs` a rank visits all ranks' keys, but none after its rows if `looks_back`.

    given_tokens: the call's ids and positions, by name. If it has positions, row numbers say nothing of the mask.
    """
    looks_back = work.looks_back and not {"q_positions", "kv_positions"} & set(given_tokens)
    visits = np.ones((layout.ranks, layout.ranks), bool)
    for rank in range(layout.ranks):
        last = max((begin + length for begin, length in layout.runs(rank)), default=0)
        for owner in range(layout.ranks):
            runs = layout.runs(owner)
            is_before = not looks_back or any(begin < last for begin, _ in runs)
            visits[rank, owner] = owner == rank or (is_before and (needs is None or _meet(needs.runs[rank], runs)))
    return RingSteps(visits, looks_back)


def _meet(some: tuple[Chunk, ...], others: list[Chunk]) -> bool:
    return any(a < c + d and c < a + b for a, b in some for c, d in others)


def keeps_rows_apart(work: VariantWork) -> bool:
    """Whether an offset between queries and keys tells a call where the keys are; if not, positions do."""
    reads_tokens = any(work.axes(name, "q_idx", "kv_idx") for name in work.tensors)
    return work.shift_invariant and (work.looks_back or not reads_tokens)


def takes_apart(work: VariantWork, *, drops: bool) -> bool:
    """Whether packed documents take calls of their own.

    One call of several documents cannot tell which keys of each document it has. That matters with dropout, and if the
    variant reads a document's number of keys or its element of a tensor.
    """
    return drops or work.by_length or work.by_sequence


def why_no_ring(work: VariantWork, *, is_packed: bool) -> str:
    """Why a call cannot compute with the keys of one rank alone; "" if it can."""
    if work.sized_by_keys:
        return "which reads a tensor whose size follows from the number of keys"
    if work.by_row and not keeps_rows_apart(work):
        why = "attends to keys behind a query" if work.shift_invariant else "computes with positions themselves"
        return f"which reads a tensor at rows of queries and of keys, and {why}"
    if is_packed and work.by_batch:
        return "which computes with the number of a packed sequence"
    return ""


def check_ring(work: VariantWork, *, is_packed: bool) -> None:
    """Refuse a variant that a ring cannot compute."""
    why = why_no_ring(work, is_packed=is_packed)
    if why:
        fail(work.op, "layout", "strategy='gather', 'exchange' or 'heads'", f"strategy='ring' with {work.op}, {why}")
