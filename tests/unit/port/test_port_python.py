"""`codegen port`: Python around the formula, such as loops, `or`, branches and classes, is read as Python reads it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codegen.ir.evaluate import evaluate
from codegen.load.spec_file import load
from codegen.port.command import Report
from codegen.spec.model import Variant
from tests.unit.port.reports import port_text

LENGTH = 24
Q_IDX, KV_IDX = np.meshgrid(np.arange(LENGTH), np.arange(LENGTH), indexing="ij")


def test_and_and_or_give_one_of_their_operands(tmp_path: Path) -> None:
    """`window or 256` is a number, which `True` would stand for otherwise."""
    report = port_text(
        tmp_path,
        """
        def make_default(size=None):
            size = size or 9
            return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size
        def make_given(size):
            reach = size or 9
            return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < reach
        def make_limited(size: int, limit: int):
            reach = limit and min(size, limit)
            return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= reach
        def make_flags(size=None, use=True):
            both = size is not None and size > 3
            return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (both and use)
        """,
    )
    assert report.failures == ()
    near = Q_IDX - KV_IDX
    np.testing.assert_array_equal(_mask(report, "default"), near < 9)
    for size in (0, 4):
        np.testing.assert_array_equal(_mask(report, "given", size=size), near < (size or 9))
        for limit in (0, 2, 7):
            reach = limit and min(size, limit)
            np.testing.assert_array_equal(_mask(report, "limited", size=size, limit=limit), abs(near) <= reach)
    np.testing.assert_array_equal(_mask(report, "flags"), near >= 0)
    assert "# argument size: its default, None, is written in" in report.text


def test_comparisons_of_conditions_with_0_and_1_are_conditions(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def sides(b, h, q_idx, kv_idx):
            first, second = q_idx >= 8, kv_idx >= 8
            return ((first == 1) & (second == 0)) | (1 != (q_idx >= kv_idx)) | (first != second) | (second == True)
        """,
    )
    first, second = Q_IDX >= 8, KV_IDX >= 8
    np.testing.assert_array_equal(
        _mask(report, "sides"), first & ~second | (Q_IDX < KV_IDX) | (first != second) | second
    )
    assert "where" not in report.text


BRANCHES = """
    def make_reach(size=-1, sinks: int = 0):
        def mod(b, h, q_idx, kv_idx):
            keep = q_idx >= kv_idx
            if size != -1:
                keep = keep & (q_idx - kv_idx < size)
            if sinks > 0:
                keep = keep | (kv_idx < sinks)
            return keep
        return mod
    def make_early(size: int):
        def mod(b, h, q_idx, kv_idx):
            if size == 0:
                return q_idx == kv_idx
            elif size < 0:
                return kv_idx <= q_idx
            return (q_idx - kv_idx).abs() < size
        return mod
    def make_chosen(size: int):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < (size if size > 0 else 5)
"""


@pytest.mark.parametrize("size", [-1, 0, 4])
@pytest.mark.parametrize("sinks", [0, 2])
def test_branches_that_scalars_of_the_call_decide(size: int, sinks: int, tmp_path: Path) -> None:
    report = port_text(tmp_path, BRANCHES)
    assert report.failures == ()
    near = Q_IDX - KV_IDX
    reach = ((near >= 0) & (near < size)) if size != -1 else near >= 0
    np.testing.assert_array_equal(_mask(report, "reach", size=size, sinks=sinks), reach | (sinks > KV_IDX))
    early = near == 0 if size == 0 else near >= 0 if size < 0 else abs(near) < size
    np.testing.assert_array_equal(_mask(report, "early", size=size), early)
    np.testing.assert_array_equal(_mask(report, "chosen", size=size), near < (size if size > 0 else 5))


def test_a_branch_writes_common_parts_once(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make(size=-1):
            def near(b, h, q_idx, kv_idx):
                if size == -1:
                    return q_idx >= kv_idx
                return (q_idx >= kv_idx) & (q_idx - kv_idx < size)
            return near
        """,
    )
    assert "mask: q_idx >= kv_idx and (size == -1 or q_idx - kv_idx < size)" in report.text
    assert "size: {type: int, example: -1}" in report.text


def test_branches_that_flags_decide_are_not_ported(tmp_path: Path) -> None:
    for test in ("use", "use[0] > 1", "use.any()"):
        source = """
            def make(use):
                def mask_mod(b, h, q, kv):
                    if TEST:
                        return q > kv
                    return q == kv
                return mask_mod
            """
        report = port_text(tmp_path, source.replace("TEST", test))
        assert len(report.failures) == 1


def test_loops_over_known_lists_are_written_out(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        import operator
        from functools import reduce
        PLACES = [3, 9, 20]
        def places(b, h, q_idx, kv_idx):
            keep = q_idx == kv_idx
            for place in PLACES:
                if place > 5:
                    keep = keep | (kv_idx == place)
            return keep
        def powers(b, h, q_idx, kv_idx):
            keep = q_idx == kv_idx
            for i, (low, high) in enumerate(zip((0, 4), range(2, 9, 4))):
                keep = keep | ((kv_idx >= low + i) & (kv_idx < high))
            return keep
        def reduced(b, h, q_idx, kv_idx):
            return reduce(operator.or_, [q_idx - kv_idx == step for step in range(len(PLACES))])
        def weighted(score, b, h, q_idx, kv_idx):
            return score + sum([0.5 * (kv_idx == place) for place in PLACES])
        """,
    )
    assert report.failures == ()
    np.testing.assert_array_equal(_mask(report, "places"), (Q_IDX == KV_IDX) | np.isin(KV_IDX, (9, 20)))
    powers = (Q_IDX == KV_IDX) | (KV_IDX < 2) | (KV_IDX == 5)
    np.testing.assert_array_equal(_mask(report, "powers"), powers)
    np.testing.assert_array_equal(_mask(report, "reduced"), np.isin(Q_IDX - KV_IDX, (0, 1, 2)))
    variant = _variant(report, "weighted")
    assert variant.score is not None
    got = evaluate(variant.score, {**_indices(), "score": np.ones(1)}, {})
    np.testing.assert_array_equal(np.broadcast_to(got, KV_IDX.shape), 1 + 0.5 * np.isin(KV_IDX, (3, 9, 20)))


def test_loops_over_other_lists_are_not_ported(tmp_path: Path) -> None:
    for loop in ("for x in places", "for x in range(n)", "for x in range(10**6)", "while n"):
        report = port_text(tmp_path, f"def m(b, h, q, kv):\n    {loop}:\n        q = q + 1\n    return q > kv\n")
        assert len(report.failures) == 1
        assert "a loop" in report.failures[0]


def test_functions_read_names_when_they_are_called_and_defaults_when_they_are_defined(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def make_last():
            return or_masks(*[lambda b, h, q_idx, kv_idx: kv_idx % 4 == i for i in range(3)])
        def make_each():
            return or_masks(*[lambda b, h, q_idx, kv_idx, i=i: kv_idx % 4 == i for i in range(3)])
        def make_first():
            size = 3
            def first(b, h, q_idx, kv_idx, size=size):
                return kv_idx % size == 0
            size = 5
            return first
        def make_inner(near: int):
            def inner(b, h, q_idx, kv_idx):
                size = 3
                def is_near(x):
                    return x < size
                if near > 0:
                    size = 5
                return is_near(kv_idx)
            return inner
        """,
    )
    assert report.failures == ()
    np.testing.assert_array_equal(_mask(report, "last"), KV_IDX % 4 == 2)
    np.testing.assert_array_equal(_mask(report, "each"), KV_IDX % 4 < 3)
    np.testing.assert_array_equal(_mask(report, "first"), KV_IDX % 3 == 0)
    for near, size in ((0, 3), (1, 5)):
        np.testing.assert_array_equal(_mask(report, "inner", near=near), size > KV_IDX)


def test_the_files_own_functions_that_join_masks_are_followed(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        def and_masks(*masks):
            if not all(callable(mask) for mask in masks):
                raise RuntimeError
            def joined(batch_idx, head_idx, q_idx, kv_idx):
                keep = q_idx.new_ones((), dtype=torch.bool)
                for mask in masks:
                    keep = keep & mask(batch_idx, head_idx, q_idx, kv_idx).to(keep.device)
                return keep
            return joined
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx
        def make_near(size):
            return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size
        def make_causal_near(size: int):
            return and_masks(make_near(size), causal)
        """,
    )
    assert report.failures == ()
    assert "mask: q_idx - kv_idx < size and q_idx >= kv_idx" in report.text


def test_rounding_functions_of_python_give_integers(tmp_path: Path) -> None:
    report = port_text(
        tmp_path,
        """
        from math import floor
        def make(size: int):
            padded = math.ceil(size / 8) * 8
            half = floor(size / 2)
            def mod(b, h, q_idx, kv_idx):
                return ((kv_idx - padded) // 4 == q_idx // 4) | (kv_idx % 8 == half) | (kv_idx == round(size * 0.3))
            return mod
        def signed(b, h, q_idx, kv_idx):
            return torch.fmod(kv_idx - q_idx, 4) == -1
        """,
    )
    assert report.failures == ()
    for size in (5, 8, 13):
        padded, half = -(-size // 8) * 8, size // 2
        rounded = np.isin(KV_IDX, round(size * 0.3)) | np.isin(KV_IDX % 8, half)
        wanted = ((KV_IDX - padded) // 4 == Q_IDX // 4) | rounded
        np.testing.assert_array_equal(_mask(report, "make", size=size), wanted)
    assert "(kv_idx - int(ceil(size / 8)) * 8) // 4 == q_idx // 4" in report.text  # no division of floats
    signed = torch.fmod(torch.from_numpy(KV_IDX - Q_IDX), 4) == -1
    np.testing.assert_array_equal(_mask(report, "signed"), signed.numpy())


def _variant(report: Report, name: str) -> Variant:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ported.yaml"
        path.write_text(report.text)
        return load(path).variants[name]


def _indices() -> Mapping[str, Any]:
    return {"b": np.zeros(1, int), "h": np.zeros(1, int), "q_idx": Q_IDX, "kv_idx": KV_IDX}


def _mask(report: Report, name: str, **scalars: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    variant = _variant(report, name)
    assert variant.mask is not None
    return np.broadcast_to(evaluate(variant.mask, {**_indices(), **scalars}, {}), Q_IDX.shape)
