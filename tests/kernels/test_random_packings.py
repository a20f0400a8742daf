"""Packings that nobody chose: results as the definition has them, and nothing of one sequence in another."""

from __future__ import annotations

import itertools

import pytest

from tests.support.cases import DTYPES, INTERPRET, evaluate, tiles
from tests.support.judge import check_results
from tests.support.packings import Packing, assert_others_same, draw_packed, spoil

pytest.importorskip("hypothesis", reason="random packings need hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

# The interpreter takes half a second for each.
EXAMPLES = 6 if INTERPRET else 200
LONGEST, MOST = (40, 4) if INTERPRET else (400, 12)

lengths = st.one_of(st.sampled_from([0, 1, 16, 32]), st.integers(0, LONGEST))
pairs = st.one_of(st.tuples(lengths, lengths), lengths.map(lambda n: (n, n)))


def _packing(sequences: list[tuple[int, int]]) -> Packing:
    queries, keys = ([length[side] for length in sequences] for side in (0, 1))
    return Packing(q=(0, *itertools.accumulate(queries)), k=(0, *itertools.accumulate(keys)))


def _seen(sequences: list[tuple[int, int]]) -> bool:
    return any(queries and keys for queries, keys in sequences)


packings = st.lists(pairs, min_size=1, max_size=MOST).filter(_seen).map(_packing)


@pytest.mark.parametrize("variant", ["window", "alibi", "softcap", "forgetting"])
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(packing=packings, q_offset=st.sampled_from([0, "end", 5, -3]))
def test_random_packings(variant: str, packing: Packing, q_offset: int | str) -> None:
    inputs = draw_packed(variant, packing, DTYPES[0], dim=32)
    got = evaluate(variant, inputs, config=tiles(32, 16), q_offset=q_offset, **packing.options())
    # No ratios: of so few rows the mean error is now and then luck, and there are many packings.
    check_results(variant, inputs, got, ratios=False, q_offset=q_offset, **packing.options())


@pytest.mark.parametrize("variant", ["window", "alibi", "softcap", "forgetting"])
@settings(max_examples=EXAMPLES // 3, deadline=None, derandomize=True)
@given(packing=packings.filter(lambda packing: packing.sequences > 1), number=st.integers(0, MOST - 1))
def test_random_sequences_do_not_see_each_other(variant: str, packing: Packing, number: int) -> None:
    number %= packing.sequences
    inputs = draw_packed(variant, packing, DTYPES[0], dim=32)
    want = evaluate(variant, inputs, config=tiles(32, 16), **packing.options())
    for value in (float("nan"), float("inf")):
        spoilt = spoil(inputs, packing, number, value)
        got = evaluate(variant, spoilt, config=tiles(32, 16), **packing.options())
        assert_others_same(packing, number, got, want)
