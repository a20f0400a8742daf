"""`codegen port`: loops that fill a list of masks, or join masks one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from tests.unit.port.reports import formulas, port_text

HEAD = """\
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
def window(size):
    return lambda b, h, q, k: q - k < size
"""
LOOPS = """
masks = []
for i in range(3):
    masks.append(lambda b, h, q, k, i=i: (q >= 4 * i) & (q < 4 * i + 4) & (k >= 4 * i) & (k < 4 * i + 4))
blocks = or_masks(*masks)
last = []
for i in range(3):
    last.append(lambda b, h, q, k: q >= k + i)
all_last = and_masks(*last)
def spans():
    found = []
    for place, (start, end) in enumerate([(0, 3), (5, 9)]):
        def span(b, h, q, k, start=start, end=end, place=place):
            return (q >= start) & (q < end) & (k >= start + place)
        found.append(span)
    return or_masks(*found)
def joined():
    mask = window(-3)
    for size in (-1, -5):
        mask = and_masks(mask, window(size))
    return mask
def nested():
    found = []
    for y in range(2):
        for x in (3, 5):
            found.append(lambda b, h, q, k, y=y, x=x: (q % x == y) & (k // x == y))
    return or_masks(*found)
def extended():
    found = [window(-9)]
    found += [window(-8)]
    found = found + [window(-7)]
    found.extend(window(-i) for i in range(3, 5))
    return and_masks(*found)
def some(count):
    found = []
    for i in range(count):
        found.append(window(-i))
    return and_masks(*found)
two = some(2)
"""


def test_masks_that_a_loop_makes_are_joined(tmp_path: Path) -> None:
    report = port_text(tmp_path, HEAD + LOOPS)
    assert report.failures == ()
    assert set(report.ported) == {"blocks", "all_last", "spans", "joined", "nested", "extended", "two"}
    names: dict[str, Any] = {}
    exec(compile(HEAD + LOOPS, "mods.py", "exec"), names)
    (tmp_path / "mods.yaml").write_text(report.text)
    for name, variant in load(tmp_path / "mods.yaml").variants.items():
        assert variant.mask is not None
        mod: Callable[..., torch.Tensor] = (
            names[name]() if name in ("spans", "joined", "nested", "extended") else names[name]
        )
        places = list(product(range(16), repeat=2))
        q, k = (torch.tensor(values) for values in zip(*places, strict=True))
        keep = evaluate(variant.mask, {"q_idx": q.numpy(), "kv_idx": k.numpy()}, {})
        wanted = mod(torch.tensor(0), torch.tensor(0), q, k).numpy()
        assert 0 < wanted.sum() < wanted.size
        np.testing.assert_array_equal(keep, wanted, err_msg=name)


def test_a_name_from_before_the_loop_keeps_the_result(tmp_path: Path) -> None:
    """Masks that a loop only makes, and joins nowhere, have entries of their own."""
    report = port_text(
        tmp_path,
        HEAD
        + """
near = window(5)
for size in (1, 2):
    near = or_masks(near, window(size))
mods = []
for size in (7, 8):
    def early(b, h, q, k, size=size):
        return k < size
    mods.append(early)
""",
    )
    assert formulas(report) == {
        "near_5": "q_idx - kv_idx < 5",
        "near_7": "q_idx - kv_idx < 5 or q_idx - kv_idx < 1 or q_idx - kv_idx < 2",
        "early": "kv_idx < 7",
        "early_2": "kv_idx < 8",
    }


def test_loops_over_lists_that_are_not_known_give_a_line(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        HEAD
        + """
def of_argument(sizes):
    masks = []
    for size in sizes:
        masks.append(window(size))
    return or_masks(*masks)
def with_break():
    masks = []
    for size in (1, 2):
        masks.append(window(size))
        break
    return or_masks(*masks)
def too_many():
    masks = []
    for y in range(50):
        for x in range(50):
            masks.append(lambda b, h, q, k, y=y, x=x: (q == x) & (k == y))
    return or_masks(*masks)
""",
    )
    reason = (
        "what * stands for is not known; write the arguments one by one, or loop over a list that the file writes out"
    )
    assert [line.partition("mods.py:")[2] for line in report.failures] == [
        f"9: of_argument: {reason}: or_masks(*masks)",
        f"15: with_break: {reason}: or_masks(*masks)",
        f"21: too_many: {reason}: or_masks(*masks)",
    ]
    assert "lambda_20_2" not in report.text


def test_values_that_a_loop_changes_are_scalars(tmp_path: Path) -> None:
    """The first round's value is not that of the others."""
    report = port_text(
        tmp_path,
        HEAD
        + """
size = 0
while size < 9:
    blocks = create_block_mask(window(size), 1, 1, 8, 8)
    size += 1
""",
    )
    assert formulas(report) == {"window": "q_idx - kv_idx < size"}


def test_loops_that_only_use_masks_are_read_once(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        HEAD
        + """
times = []
for length in (128, 256):
    for size in (4, 8):
        times.append(measure(create_block_mask(window(size), 1, 1, length, length)))
""",
    )
    assert formulas(report) == {"window": "q_idx - kv_idx < size"}


def test_several_unknown_values_of_one_name_are_not_one_scalar(tmp_path: Path) -> None:
    """Two calls, rounds of a loop, and a value that a branch or a loop inside of a round gives."""
    report = port_text(
        tmp_path,
        HEAD
        + """
calls = and_masks(window(get(1)), window(get(2)))
items = or_masks(*[window(get(i)) for i in range(2)])
def rounds():
    masks = []
    for i in range(3):
        size = get(i)
        masks.append(window(size))
    return or_masks(*masks)
def branches(flag):
    masks = []
    for i in (1, 2):
        if flag:
            size = i
        else:
            size = -i
        masks.append(window(size))
    return or_masks(*masks)
def counted():
    masks = []
    for i in (1, 2):
        size = 0
        while size < i:
            size += 1
        masks.append(window(size))
    return or_masks(*masks)
def make(size):
    limit = get(size)
    return lambda b, h, q, k: q - k < limit
made = and_masks(make(3), make(4))
near, far = get(3), get(4)
named = and_masks(window(near), window(far))
same = and_masks(window(get(5)), window(get(5)), make(3))
""",
    )
    reason = "has several values here that this file does not give; give each a name of its own: q - k <"
    assert [line.partition("mods.py:")[2] for line in report.failures] == [
        f"3: calls: 'size' {reason} size",
        f"3: items: 'size' {reason} size",
        f"3: rounds: 'size' {reason} size",
        f"3: branches: 'size' {reason} size",
        f"3: counted: 'size' {reason} size",
        f"32: made: 'limit' {reason} limit",
    ]
    assert formulas(report) == {
        "window": "q_idx - kv_idx < size",
        "named": "q_idx - kv_idx < near and q_idx - kv_idx < far",
        "same": "q_idx - kv_idx < size and q_idx - kv_idx < size and q_idx - kv_idx < limit",
    }
