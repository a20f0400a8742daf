"""The order in which Hopper's backwards take their blocks of keys."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from codegen.analysis.call_modes import Mode
from codegen.load.spec_file import load
from codegen.plan.variant import plan
from tests.support.paths import DEFAULT_SPEC

SPEC = load(DEFAULT_SPEC)


@pytest.mark.parametrize(
    ("variant", "narrow", "wide"),
    [
        ("streaming_llm", "first_blocks_first", "first_blocks_first"),
        ("causal", "", "longest_first"),
        ("prefix_lm", "", "longest_first"),
        ("window", "", ""),
        ("padding", "", ""),
        ("document", "", ""),
    ],
)
def test_blocks_that_most_rows_visit_come_first(variant: str, narrow: str, wide: str) -> None:
    dense = plan(SPEC.variants[variant])
    assert (dense.hopper_bwd.work_order, dense.hopper_bwd_wide.work_order) == (narrow, wide)
    packed = plan(SPEC.variants[variant], Mode.PACKED)
    assert (packed.hopper_bwd.work_order, packed.hopper_bwd_wide.work_order) == ("", "")


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (3, 1), (1, 5), (4, 6)])
def test_first_blocks_first_takes_each_block_once(heads: int, blocks: int) -> None:
    items = heads * blocks
    turns = [_first_blocks_first(turn, items, blocks) for turn in range(items + 2)]
    assert turns[:heads] == [head * blocks for head in range(heads)]
    assert sorted(turns[:items]) == list(range(items))
    assert turns[items:] == [items, items]


def _first_blocks_first(turn: int, num_items: int, num_blocks: int) -> int:
    """The device function on plain numbers."""
    gluon_backward: Any = pytest.importorskip("generated._runtime.device.gl_backward")
    language = SimpleNamespace(maximum=max, where=lambda condition, a, b: a if condition else b)
    function = FunctionType(gluon_backward.first_blocks_first.fn.__code__, {"gl": language})
    found: int = function(turn, num_items, num_blocks)
    return found
