# SPDX-License-Identifier: Apache-2.0
"""What calls may say of their sequences, in either framework. No framework is imported."""

from itertools import pairwise
from typing import NamedTuple

from .checks import fail

TOKEN_ARGUMENTS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths")


class ByRow(NamedTuple):
    """What an op that reads something by row asks of the positions of a call, where they are not the rows.

    `in_order`: they rise by one from row to row of a segment. `in_step`: the query and the key of a row are one token.
    `as_rows`: nothing else will do. `rule` says so in words.
    """

    in_order: bool
    in_step: bool
    as_rows: bool
    rule: str


def fail_order(op: str, by_row: ByRow, wrong: list[bool]) -> None:
    """Raise the error of positions that are `wrong` in some batch rows, if they are in any."""
    if any(wrong):
        fail(op, "q_positions", by_row.rule, f"others in batch row {wrong.index(True)}")


def check_begins(op: str, name: str, begins: list[int], packed: str, total: int) -> None:
    """Check where the sequences of `packed`, of `total` rows, begin."""
    if begins[0] != 0:
        fail(op, name, "a first value of 0", begins[0])
    for i, (begin, end) in enumerate(pairwise(begins)):
        if end < begin:
            fail(op, name, "values that never decrease", f"{begin} at index {i} and {end} at index {i + 1}")
    if begins[-1] != total:
        fail(op, name, f"a last value of {total}, the rows of {packed}", begins[-1])


def check_alone(op: str, *tokens: object) -> None:
    """Refuse what a packed call does not combine with: the arguments of TOKEN_ARGUMENTS, in that order."""
    for name, value in zip(TOKEN_ARGUMENTS, tokens, strict=True):
        if value is not None:
            fail(op, name, "None in a packed call, beside cu_seqlens_q", type(value).__name__)
