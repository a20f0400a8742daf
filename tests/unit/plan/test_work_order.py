"""The order in which Hopper's programs take their blocks of rows or keys."""

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


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (3, 1), (1, 5), (4, 6), (40, 64), (32, 43), (300, 3)])
def test_balanced_blocks_are_each_taken_once(programs: int, heads: int, blocks: int) -> None:
    taken = [block for own in _balanced(programs, heads, blocks) for block in own]
    assert sorted(taken) == [(head, block) for head in range(heads) for block in range(blocks)]


# Of 8192 tokens and 32 heads, 16384 and 16 or 48, 4096 and 28, 2048 and 40: in blocks of 192 or of 128 rows. With pairs
# alone, programs would be idle in 3 to 19 % of their turns.
@pytest.mark.parametrize(
    ("heads", "blocks"), [(32, 43), (16, 86), (48, 86), (32, 64), (16, 128), (28, 32), (28, 22), (40, 16)]
)
def test_balanced_blocks_take_equally_long(heads: int, blocks: int) -> None:
    # A block visits as many others as come before it in the sequence; starting it takes about as long as visiting one.
    own = [sum(blocks - block + 1 for _, block in taken) for taken in _balanced(132, heads, blocks)]
    assert max(own) <= 1.07 * sum(own) / len(own)


def _balanced(programs: int, heads: int, blocks: int) -> list[list[tuple[int, int]]]:
    """The blocks that each program takes, as head and number in the head."""
    found = []
    for program in range(programs):
        num_items, single = _on_numbers("gl", "count_items", programs=programs)(blocks, heads)
        locate = _on_numbers("gl", "balanced_blocks", programs=programs)
        turns = [locate(item, num_items, blocks, heads, single) for item in range(program, num_items, programs)]
        own = [(head, [block, blocks - 1 - block][:count]) for head, block, count in turns]
        found.append([(head, block) for head, both in own for block in both])
    return found


def _first_blocks_first(turn: int, num_items: int, num_blocks: int) -> int:
    found: int = _on_numbers("gl_backward", "first_blocks_first")(turn, num_items, num_blocks)
    return found


def _on_numbers(module: str, name: str, *, programs: int = 1) -> Any:
    """A device function that takes plain numbers."""
    device: Any = pytest.importorskip(f"generated._runtime.device.{module}")
    language = SimpleNamespace(
        maximum=max,
        minimum=min,
        where=lambda condition, a, b: a if condition else b,
        cdiv=lambda a, b: -(-a // b),
        num_programs=lambda _: programs,
    )
    names = {"gl": language, "TURNS_PER_IDLE": getattr(device, "TURNS_PER_IDLE", None)}
    return FunctionType(getattr(device, name).fn.__code__, names)
