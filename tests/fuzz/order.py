"""Whether a call with positions is legal, by docs/reference/calls.md: what is read by row through a position needs rows
that agree with the positions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise

from .attention import Entry
from .calls import Call
from .expressions import ROWS, parsed


class Verdict(Enum):
    """What an op has to do with a call. EITHER: this rule is not as fine as the op's."""

    LEGAL = "legal"
    EITHER = "either"
    ILLEGAL = "illegal"


Tokens = list[tuple[int | None, int]]
"""Of one batch row's queries or keys: the segment, None for padding, and the position."""


def verdict(entry: Entry, call: Call) -> Verdict:
    """Whether the positions of a call are any that the entry may have."""
    running = bool(entry.get("decay") or entry.get("dropout"))
    others = reads_by_row(entry)
    if call.q_positions is None or not (running or others):
        return Verdict.LEGAL
    rows = [_tokens(call, batch) for batch in range(call.batch)]
    if all(map(_are_rows, rows)):
        return Verdict.LEGAL
    ordered = all(_rises(side) for row in rows for side in row)
    if running and not ordered:
        return Verdict.ILLEGAL
    in_step = all(queries == keys for queries, keys in rows)
    return Verdict.EITHER if others or (entry.get("decay") and not in_step) else Verdict.LEGAL


def reads_by_row(entry: Entry) -> bool:
    """Whether a dim of tokens has an index that computes with positions, other than the token's own."""
    dims = {name: declared["dims"] for name, declared in entry.get("tensors", {}).items()}
    for text in (entry.get("mask"), entry.get("score")):
        for node in ast.walk(parsed(text)) if text else ():
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                for dim, part in zip(dims[node.value.id], parts, strict=False):
                    own = isinstance(part, ast.Name) and part.id == dim
                    if dim in ROWS and not own and any(name in ROWS for name in _names(part)):
                        return True
    return False


def _names(node: ast.AST) -> Iterator[str]:
    """The names of an index, without those that only say where another tensor is read."""
    if isinstance(node, ast.Name):
        yield node.id
    if not isinstance(node, ast.Subscript):
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _tokens(call: Call, batch: int) -> tuple[Tokens, Tokens]:
    """The queries and the keys of a batch row."""
    sides = (
        (call.q_lens[0], call.q_segment_ids, call.q_positions),
        (call.kv_lens[0], call.kv_segment_ids or call.q_segment_ids, call.kv_positions or call.q_positions),
    )
    found = []
    for length, ids, positions in sides:
        assert positions is not None
        segments: list[int | None] = [None if x == call.padding_id else x for x in ids[batch]] if ids else [0] * length
        found.append(list(zip(segments, positions[batch], strict=True)))
    queries, keys = found
    if call.kv_lengths is not None:
        reach = call.kv_lengths[batch]
        keys = [*keys[:reach], *((None, position) for _, position in keys[reach:])]
    return queries, keys


def _are_rows(row: tuple[Tokens, Tokens]) -> bool:
    return all(segment is None or position == i for side in row for i, (segment, position) in enumerate(side))


def _rises(side: Tokens) -> bool:
    """Whether positions rise by one from row to row of a segment."""
    return all(
        after[1] == before[1] + 1 or after[0] != before[0] or after[0] is None for before, after in pairwise(side)
    )
