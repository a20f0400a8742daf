"""Backwards that split the query heads of a key head into groups, as calls of few key heads do on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from generated._runtime.core import head_groups
from tests.support.cases import DTYPES, Shape, draw, evaluate, with_frameworks, with_variants
from tests.support.judge import check_call
from tests.support.packings import MIXED, draw_packed, with_kinds
from tests.support.segments import by_token, ints

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

SHAPE = Shape(batch=2, kv_heads=2, group=2, q_len=70, kv_len=90, dim=40, dim_v=24)
SIX_HEADS = replace(SHAPE, group=6)


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Groups pay however few rows they have. After the test, each backward has split its heads.

    On a GPU a kernel's first call chooses twice: once more for the process that compiles what the call will launch.
    """
    found: list[int] = []
    choose = head_groups.choose_number

    def chosen(*sizes: int) -> int:
        found.append(choose(*sizes))
        return found[-1]

    monkeypatch.setattr(head_groups, "LEAST_ROWS", 1)
    monkeypatch.setattr(head_groups, "choose_number", chosen)
    yield found
    assert found
    assert min(found) > 1


@with_variants
def test_dense(variant: str) -> None:
    check_call(variant, draw(variant, SHAPE, DTYPES[0]), q_offset="end")


@pytest.mark.parametrize("variant", ["causal", "alibi", "gpt_oss"])
@pytest.mark.covers(framework="jax")
def test_in_jax(variant: str) -> None:
    check_call(variant, draw(variant, SHAPE, DTYPES[0]), framework="jax", q_offset="end")


@with_kinds
@pytest.mark.covers(mode="packed")
def test_packed(variant: str) -> None:
    check_call(variant, draw_packed(variant, MIXED, DTYPES[0], group=4), **MIXED.options())


@with_frameworks
@pytest.mark.covers(mode="segmented")
def test_segmented(framework: str) -> None:
    shape = Shape(group=6, q_len=70, dim=40)
    ids = ints([[0] * 30 + [1] * 40])
    check_call("causal", draw("causal", shape, DTYPES[0]), framework=framework, q_segment_ids=ids)


IDS = ([0] * 30 + [1] * 40, [-1] * 7 + [2] * 63, [1] * 20 + [3] * 30 + [1] * 20)


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("stored", ["by heads", "by tokens"])
@pytest.mark.parametrize("variant", ["causal", "alibi"])
@pytest.mark.covers(mode="segmented")
def test_segmented_batches(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], variant: str, stored: str, batch: int, number: int
) -> None:
    shape = Shape(batch=batch, kv_heads=2, group=4, q_len=70, dim=16)
    monkeypatch.setattr(head_groups, "LEAST_ROWS", 4 // number * shape.q_len)
    inputs = draw(variant, shape, DTYPES[0])
    check_call(variant, by_token(inputs) if stored == "by tokens" else inputs, q_segment_ids=ints(IDS[:batch]))
    assert set(numbers) == {number}


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("variant", ["causal", "alibi"])
@pytest.mark.covers(mode="segmented", framework="jax")
def test_segmented_batches_in_jax(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], variant: str, number: int
) -> None:
    shape = Shape(batch=2, kv_heads=2, group=4, q_len=70, dim=16)
    monkeypatch.setattr(head_groups, "LEAST_ROWS", 4 // number * shape.q_len)
    check_call(variant, draw(variant, shape, DTYPES[0]), framework="jax", q_segment_ids=ints(IDS[:2]))
    assert set(numbers) == {number}


def test_of_two_heads_each(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    monkeypatch.setattr(head_groups, "LEAST_ROWS", 2 * SIX_HEADS.q_len)
    check_call("causal", draw("causal", SIX_HEADS, DTYPES[0]))
    assert set(numbers) == {3}


def test_in_float32() -> None:
    check_call("causal", draw("causal", SHAPE, torch.float32))


def test_equal_calls_have_equal_gradients() -> None:
    inputs = draw("alibi", SHAPE, DTYPES[0])
    first, again = (evaluate("alibi", inputs, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
