"""Pages that no query sees by its position are never read: a server may have given them to other sequences."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from generated import paging
from tests.support.cases import DEVICE
from tests.support.rendering import importable

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float16", framework="torch")

DTYPE = torch.float16
SIZE, PAGE, PAGES = 20, 16, 5
"""The window, and the pages of one sequence of `PAGE * PAGES` keys, which are pages 1 to 5 of a cache of 7."""

SPEC = """
variants:
  doc_window:
    mask: causal and window(size) and doc[b, q_idx] == doc[b, kv_idx]
    tensors: {doc: {dims: [b, kv_idx], dtype: int32}}
    scalars: {size: {type: int, min: 1, example: 20}}
  doc_sinks:
    mask: causal and (window(size) or kv_idx < 4) and doc[b, q_idx] == doc[b, kv_idx]
    tensors: {doc: {dims: [b, kv_idx], dtype: int32}}
    scalars: {size: {type: int, min: 1, example: 20}}
  three_ranges:
    mask: causal and (window(size) or 16 <= kv_idx < 20 or 32 <= kv_idx < 36) and doc[b, q_idx] == doc[b, kv_idx]
    tensors: {doc: {dims: [b, kv_idx], dtype: int32}}
    scalars: {size: {type: int, min: 1, example: 20}}
  head_window:
    mask: causal and q_idx - kv_idx < sizes[h] and doc[b, q_idx] == doc[b, kv_idx]
    tensors: {doc: {dims: [b, kv_idx], dtype: int32}, sizes: {dims: [h], dtype: int32, example: "20"}}
  decay_window:
    mask: causal and window(size)
    decay: true
    scalars: {size: {type: int, min: 1, example: 20}}
"""
READ_BEFORE_THE_WINDOW = {"doc_window": [], "doc_sinks": [0], "three_ranges": [1, 2], "head_window": [0, 1, 2, 3]}
"""The pages that are read although the window does not reach them: sinks, what lies between the ranges of a mask of
three, and all if each head has a window of its own, because splits are planned for all heads together."""


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("unread"), "unread_ops", SPEC):
        yield


@pytest.fixture(params=["kernels", "reference"])
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        kernels = importlib.import_module("unread_ops._runtime.torch.paged_kernels")
        monkeypatch.setattr(kernels, "computes_reference", lambda _: True)


def load(name: str) -> Any:
    return getattr(importlib.import_module("unread_ops.torch"), name)


def without_pages(call: dict[str, Any], of_pages: dict[str, Tensor], unread: list[int]) -> dict[str, Any]:
    """The call with NaN on some pages of the sequence, whose entries of the table are other sequences' or none."""
    table, gone = call["page_table"].clone(), call["page_table"][0, unread].long()
    changed = {name: x.clone() for name, x in of_pages.items()}
    for x in changed.values():
        x[gone] = float("nan")
    table[0, unread[: len(unread) // 2]] = -1
    return {**call, **changed, "page_table": table}


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("variant", sorted(READ_BEFORE_THE_WINDOW))
def test_pages_before_a_window_beside_documents(variant: str) -> None:
    op = load(variant)
    caches = {name: torch.randn(7, PAGE, 1, 16, device=DEVICE).to(DTYPE) for name in ("k", "v")}
    q = torch.randn(1, 2, 1, 16, device=DEVICE).to(DTYPE)
    call: dict[str, Any] = {
        "doc": torch.zeros(7, PAGE, dtype=torch.int32, device=DEVICE),
        "page_table": torch.arange(1, 1 + PAGES, dtype=torch.int32, device=DEVICE)[None],
        "kv_lengths": torch.tensor([PAGE * PAGES], device=DEVICE),
    }
    call |= {"sizes": torch.full((2,), SIZE, dtype=torch.int32, device=DEVICE)} if variant == "head_window" else {}
    call |= {} if variant == "head_window" else {"size": SIZE}
    want = op(q, **caches, **call)
    first_seen = (PAGE * PAGES - SIZE) // PAGE
    unread = [page for page in range(first_seen) if page not in READ_BEFORE_THE_WINDOW[variant]]
    assert torch.equal(op(q, **without_pages(call | caches, caches, unread)), want)


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("variant", ["doc_window", "head_window"])
def test_pages_behind_a_chunk_beside_documents(variant: str) -> None:
    """The pages of later chunks of a prompt hold nothing yet."""
    op = load(variant)
    caches = {name: torch.randn(7, PAGE, 1, 16, device=DEVICE).to(DTYPE) for name in ("k", "v")}
    q = torch.randn(1, 2, 4, 16, device=DEVICE).to(DTYPE)
    sizes = torch.full((2,), SIZE, dtype=torch.int32, device=DEVICE)
    own = {"size": SIZE} if variant == "doc_window" else {"sizes": sizes}
    call: dict[str, Any] = {
        "doc": torch.zeros(7, PAGE, dtype=torch.int32, device=DEVICE),
        "page_table": torch.arange(1, 1 + PAGES, dtype=torch.int32, device=DEVICE)[None],
        "kv_lengths": torch.tensor([PAGE * PAGES], device=DEVICE),
        "q_offset": 2 * PAGE - 4,
        **own,
    }
    want = op(q, **caches, **call)
    assert torch.equal(op(q, **without_pages(call | caches, caches, [2, 3, 4])), want)


@pytest.mark.usefixtures("_route")
def test_pages_before_the_window_of_a_log_decay() -> None:
    op = load("decay_window")
    caches = {name: torch.randn(7, PAGE, 1, 16, device=DEVICE).to(DTYPE) for name in ("k", "v")}
    caches |= {"g": torch.zeros(7, PAGE, 2, device=DEVICE), "g_base": torch.zeros(7, 2, device=DEVICE)}
    call: dict[str, Any] = {
        "size": SIZE,
        "page_table": torch.arange(1, 1 + PAGES, dtype=torch.int32, device=DEVICE)[None],
        "kv_lengths": torch.tensor([PAGE * PAGES], device=DEVICE),
    }
    decays = -torch.rand(1, PAGE * PAGES, 2, device=DEVICE)
    pages = {name: call[name] for name in ("page_table", "kv_lengths")}
    paging.append_decay(decays, caches["g"], caches["g_base"], **pages)
    q = torch.randn(1, 2, 1, 16, device=DEVICE).to(DTYPE)
    want = op(q, **caches, **call)
    torch.testing.assert_close(op(q, **without_pages(call | caches, caches, [0, 1, 2])), want)
    seen = caches | {"g": caches["g"].clone()}
    seen["g"][5, 3] = float("nan")
    assert op(q, **seen, **call).isnan().all(), "a query sees a key whose sum is not a number"
