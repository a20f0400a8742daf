"""Into how many groups a backward splits the query heads that share a key head."""

from __future__ import annotations

import itertools
import math

from generated._runtime.core.head_groups import BLOCKS_PER_PROCESSOR, LEAST_ROWS, choose_number

PROCESSORS = 132
SHARED = (1, 2, 3, 6, 7, 8, 12, 128)
BLOCKS = (1, 8, 64, 131, 132, 230, 231, 1000)
ROWS = (0, 1, 512, LEAST_ROWS - 1, LEAST_ROWS, 10 * LEAST_ROWS)


def test_groups_are_equally_large_no_more_than_needed_and_have_enough_rows() -> None:
    for shared, blocks, rows in itertools.product(SHARED, BLOCKS, ROWS):
        number = choose_number(shared, blocks, rows, PROCESSORS)
        assert shared % number == 0
        assert number == 1 or shared // number * rows >= LEAST_ROWS
        fewer = [n for n in range(1, number) if shared % n == 0]
        assert all(n * blocks < BLOCKS_PER_PROCESSOR * PROCESSORS for n in fewer)


def test_long_calls_of_one_key_head_fill_the_gpu() -> None:
    number = choose_number(8, 64, 8192, PROCESSORS)
    assert number * 64 >= BLOCKS_PER_PROCESSOR * PROCESSORS


def test_calls_with_enough_blocks_are_not_split() -> None:
    assert choose_number(8, math.ceil(BLOCKS_PER_PROCESSOR * PROCESSORS), 10**6, PROCESSORS) == 1
