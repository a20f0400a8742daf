# SPDX-License-Identifier: Apache-2.0
"""Rules for packed sequences, segment ids and positions, for both frameworks. No framework is imported."""

from itertools import pairwise
from typing import Any, NamedTuple

from .checks import check_layout, check_padding_id, fail

TOKEN_ARGUMENTS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths")


class ByRow(NamedTuple):
    """The rule for the positions of a call to an op that reads a tensor by row.

    Positions either equal the row numbers, or they obey the other conditions. `in_order`: they rise by one from row to
    row of a segment. `in_step`: the query and the key of a row are one token. `as_rows`: only row numbers are allowed.
    `rule` is the text for error messages.
    """

    in_order: bool
    in_step: bool
    as_rows: bool
    rule: str


def fail_order(op: str, by_row: ByRow, wrong: list[bool]) -> None:
    """Raise an error if positions are `wrong` in any batch row."""
    if any(wrong):
        fail(op, "q_positions", by_row.rule, f"others in batch row {wrong.index(True)}")


class TokenRows(NamedTuple):
    """The queries, or the keys, of a call: segment ids and positions `[B, S]`, and the row numbers 0 to S - 1."""

    ids: Any
    positions: Any
    rows: Any


def breaks_rule(queries: TokenRows, keys: TokenRows, padding_id: int, by_row: ByRow) -> Any:
    """Booleans `[B]`: true where the positions of a batch row break the rule. Padding may have any position.

    Only operators that torch's tensors and JAX's arrays share are used.
    """
    allowed: list[Any] = []
    equal_rows: list[Any] = []
    for ids, positions, rows in (queries, keys):
        padding = ids == padding_id
        equal_rows.append(((positions == rows[None]) | padding).all(1))
        if by_row.in_order:
            rises = positions[:, 1:] - positions[:, :-1] == 1
            begins = ids[:, 1:] != ids[:, :-1]
            allowed.append((rises | begins | padding[:, 1:]).all(1))
    if by_row.in_step:
        both = min(queries.ids.shape[1], keys.ids.shape[1])
        q_ids, kv_ids = queries.ids[:, :both], keys.ids[:, :both]
        one_token = queries.positions[:, :both] == keys.positions[:, :both]
        one_token = one_token & ((kv_ids == q_ids) | (kv_ids == padding_id))
        padding = queries.ids == padding_id
        allowed += [(one_token | padding[:, :both]).all(1), padding[:, both:].all(1)]
    are_rows = _all_of(equal_rows)
    return ~are_rows if by_row.as_rows else ~(are_rows | _all_of(allowed))


def _all_of(conditions: list[Any]) -> Any:
    together = conditions[0]
    for each in conditions[1:]:
        together = together & each
    return together


def refuse_nested(op: str, name: str, x: Any) -> None:
    """Refuse a nested tensor of torch, whose sizes cannot be compared with others."""
    if getattr(x, "is_nested", False):
        expected = "a tensor that is not nested: pass its values, and its offsets as cu_seqlens"
        fail(op, name, expected, f"a nested tensor, layout {x.layout}")


def check_begins(op: str, name: str, begins: list[int], packed: str, total: int) -> None:
    """Check where sequences begin in the packed tensor `packed`, which has `total` rows."""
    if begins[0] != 0:
        fail(op, name, "a first value of 0", begins[0])
    for i, (begin, end) in enumerate(pairwise(begins)):
        if end < begin:
            fail(op, name, "values that never decrease", f"{begin} at index {i} and {end} at index {i + 1}")
    if begins[-1] != total:
        fail(op, name, f"a last value of {total}, the rows of {packed}", begins[-1])


def check_alone(op: str, layout: object, padding_id: object, *tokens: object) -> None:
    """Refuse the arguments that a packed call does not take, those of TOKEN_ARGUMENTS in that order, and an invalid
    layout or padding id. Packed tensors have one layout, so either name is taken."""
    check_layout(op, layout)
    check_padding_id(op, padding_id)
    for name, value in zip(TOKEN_ARGUMENTS, tokens, strict=True):
        if value is not None:
            fail(op, name, "None in a packed call, beside cu_seqlens_q", type(value).__name__)
