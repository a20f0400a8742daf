"""The batches of the tests of segmented calls: their sizes, and the ids of their tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.cases import Shape, tiles
from tests.support.segments import ints, restarting

BATCH, LENGTH, KEYS = 2, 70, 90
SELF = Shape(batch=BATCH, q_len=LENGTH, group=1, dim=32)
CROSS = Shape(batch=BATCH, q_len=LENGTH, kv_len=KEYS, group=1, dim=32)
# Several blocks along both axes.
TILES = tiles(32, 32)
with_kinds = pytest.mark.parametrize("variant", ["causal", "window", "alibi", "softcap", "forgetting", "gpt_oss"])


def _alike(*ids: int, shift: int = 0) -> list[int]:
    """One id behind the other, each for as long, but for the first."""
    each = LENGTH // len(ids)
    row = [ids[0]] * (LENGTH - each * len(ids) + shift) + [x for x in ids for _ in range(each)]
    return row[:LENGTH]


def randomly(low: int, high: int, length: int = LENGTH) -> Tensor:
    """Any order: no block of queries is free of any id."""
    return ints(torch.randint(low, high, (BATCH, length), generator=torch.Generator().manual_seed(length)))


IDS: dict[str, Callable[[], Tensor]] = {
    "one": lambda: ints([[7] * LENGTH] * BATCH),
    "documents": lambda: ints([_alike(0, 1, 2, 3), _alike(0, 1, shift=9)]),
    "back_again": lambda: ints([_alike(0, 1, 0, 0), _alike(5, -7, 5, 2**30, -7)]),
    "falling": lambda: ints([_alike(3, 2, 1), _alike(-2, -3, -9)]),
    "padded": lambda: ints([_alike(0, 0, -1), _alike(-1, 4, -1, 4)]),
    "random": lambda: randomly(-3, 3),
    "all_padding": lambda: ints([[-1] * LENGTH, _alike(0, 1)]),
}


def restarted(ids: Tensor) -> Tensor:
    """Positions that start again with each run of ids."""
    return ints([restarting(row) for row in ids.tolist()])
