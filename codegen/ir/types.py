"""The types of expressions, the names that every expression may read, and the levels of a kernel."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Type(StrEnum):
    """The type of an expression's value."""

    INT = "integer"
    FLOAT = "float"
    BOOL = "boolean"


class ScalarType(StrEnum):
    """Declared type of a run-time scalar."""

    INT = "int"
    FLOAT = "float"


INDEX_NAMES = ("b", "h", "hkv", "q_idx", "kv_idx")
"""Integers that every expression may read: batch index, query head, key head, query position, key position."""

LENGTH_NAMES = ("q_len", "kv_len")
"""Integers that every expression may read: the number of query rows and of keys, in a packed call of the sequence."""

SCORE = "score"
"""The name of the score that a score expression transforms."""


class Level(IntEnum):
    """The shape of a value in a kernel, cheapest to compute first."""

    UNIFORM = 0  # one number per program
    QUERY = 1  # one number per query row
    KEY = 2  # one number per key
    TILE = 3  # one number per (query, key) pair


TILE_NAMES = frozenset((SCORE, "qk"))
"""Names of score tiles."""

QUERY_NAMES = frozenset(("q_idx", "q_row", "rows", "q_head"))
"""Names of vectors over query rows. `q_row` is a row plus the query offset, `rows` where the token of a row lies,
`q_head` its query head, in tiles that hold the rows of several heads."""

KEY_NAMES = frozenset(("kv_idx", "cols"))
"""Names of vectors over keys. `cols` is where the token of a key lies."""

BLOCK_ENDS = ("q_first", "q_last", "kv_first", "kv_last")
"""Names of the first and last positions of a block."""

POSITION_NAMES = frozenset((*INDEX_NAMES, *LENGTH_NAMES, *BLOCK_ENDS)) | QUERY_NAMES | KEY_NAMES
"""Names of positions, of lengths, and of batch rows and heads."""
