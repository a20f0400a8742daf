"""Schedules: tables of blocks, made once for calls of one size, give the results of a call without a schedule."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import generated
from codegen.testing import calls, golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.configs import PASSES
from generated._runtime.torch import schedule as torch_schedule
from tests.support.cases import DEVICE, VARIANTS, Shape, draw, evaluate, tiles, variants_where

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

SCHEDULED = variants_where(golden.has_tables)
RANGED, LISTED = (
    [name for name in SCHEDULED if (Path(generated.__file__).parent / name / f"block_{schedule}.py").exists()]
    for schedule in ("ranges", "lists")
)
SHAPE = Shape(q_len=150, kv_len=200, batch=2, dim=16)
CONFIG = tiles(32, 16)


def _schedule(variant: str, inputs: Inputs, **options: Any) -> Any:
    return make_schedule(golden.load_op(variant), inputs, **options)


def test_some_variants_have_schedules() -> None:
    assert {*RANGED, *LISTED} == set(SCHEDULED) < set(VARIANTS)
    assert "document" in RANGED
    assert "natten" in LISTED


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("variant", SCHEDULED)
def test_a_schedule_changes_no_bit(variant: str, backward: bool) -> None:
    inputs = draw(variant, replace(SHAPE, q_len=100, kv_len=130))
    schedule = _schedule(variant, inputs, config=CONFIG, backward=backward)
    assert schedule.nbytes > 0
    got = evaluate(variant, inputs, config=CONFIG, schedule=schedule)
    for name, want in evaluate(variant, inputs, config=CONFIG).items():
        assert torch.equal(got[name], want), name


@pytest.mark.parametrize("variant", LISTED)
def test_counted_lists_are_those_with_room_of_their_own(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size, lists are counted before they are filled, so that each has exactly the memory that it needs."""
    inputs = draw(variant, SHAPE)
    roomy = _schedule(variant, inputs, config=CONFIG)
    monkeypatch.setattr(torch_schedule, "DENSE_ENTRIES", 0)
    exact = _schedule(variant, inputs, config=CONFIG)
    assert exact.nbytes <= roomy.nbytes, "equal where a mask skips no block of this call"
    for spans, entries, exact_spans, exact_entries in zip(
        *(x.tables[i::2] for x in (roomy, exact) for i in (0, 1)), strict=True
    ):
        assert _lists(spans, entries) == _lists(exact_spans, exact_entries)
        begin, partial_end, full_begin, end = exact_spans.reshape(-1, 4).unbind(1)
        assert torch.equal(partial_end, full_begin)
        assert torch.equal(begin[1:], end[:-1])


def _lists(spans: torch.Tensor, entries: torch.Tensor) -> list[tuple[list[int], list[int]]]:
    """Partial and full blocks of each list."""
    rows = spans.reshape(-1, 4).tolist()
    return [(entries[a:b].tolist(), entries[c:d].tolist()) for a, b, c, d in rows]


@pytest.mark.parametrize("variant", SCHEDULED)
def test_a_schedule_of_another_call_is_refused(variant: str) -> None:
    inputs = draw(variant, SHAPE)
    schedule = _schedule(variant, inputs, config=CONFIG)
    shorter = draw(variant, replace(SHAPE, q_len=90))
    with pytest.raises(ArgumentError, match=f"{variant}: schedule: expected one made for q length 90, got .* 150"):
        evaluate(variant, shorter, config=CONFIG, schedule=schedule)
    with pytest.raises(ArgumentError, match=r"schedule: expected one made for q_offset 7, got .* 0"):
        evaluate(variant, inputs, config=CONFIG, schedule=schedule, q_offset=7)
    with pytest.raises(
        ArgumentError, match=r"schedule: expected one made for fwd blocks of 64 by 64, .* got .* 32 by 16"
    ):
        evaluate(variant, inputs, config=tiles(64, 64), schedule=schedule)
    with pytest.raises(ArgumentError, match=f"schedule: expected what {variant}.schedule"):
        evaluate(variant, inputs, schedule=schedule.tables)


def test_a_schedule_of_another_op_is_refused() -> None:
    schedule = _schedule("natten", draw("natten", SHAPE), config=CONFIG)
    with pytest.raises(ArgumentError, match=r"expected one made by document.schedule, got one made by natten.schedule"):
        evaluate("document", draw("document", SHAPE), config=CONFIG, schedule=schedule)


def test_a_schedule_checks_its_arguments() -> None:
    inputs = draw("document", SHAPE)
    op: Any = golden.load_op("document")
    with pytest.raises(ArgumentError, match=r"document: doc: expected a torch.Tensor of shape"):
        op.schedule(inputs.q, inputs.k, inputs.v)
    with pytest.raises(ArgumentError, match=r"document: doc: expected dtype torch.int32 or another of integers"):
        op.schedule(inputs.q, inputs.k, inputs.v, doc=inputs.tensors["doc"].float())


# Documents one after the other, documents in random order that recur, and one document for all tokens.
DOCUMENTS = {
    "sorted": lambda n: torch.arange(n) // 37,
    "random": lambda n: torch.randint(0, 3, (n,)) * (torch.arange(n) // 20 % 3),
    "one": lambda n: torch.zeros(n),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("q_len", "kv_len", "q_offset"), [(150, 200, 0), (200, 150, -9), (40, 4800, 4760)])
def test_ranges_hold_what_is_visited(q_len: int, kv_len: int, q_offset: int, documents: str) -> None:
    """No pair is kept outside a range, and all pairs in its full blocks. For sorted documents both are exact."""
    torch.manual_seed(0)
    rows = torch.stack([DOCUMENTS[documents](5000) for _ in range(2)]).to(DEVICE, torch.int32)
    q, k = (torch.empty(2, 1, n, 16, device=DEVICE) for n in (q_len, kv_len))
    op: Any = golden.load_op("document")
    block_m, block_n = 32, 16
    schedule = op.schedule(q, k, k, doc=rows, q_offset=q_offset, config=tiles(block_m, block_n))
    q_idx, kv_idx = torch.arange(q_len, device=DEVICE) + q_offset, torch.arange(kv_len, device=DEVICE)
    q_doc, kv_doc = (rows[:, index.clamp(min=0)] for index in (q_idx, kv_idx))
    keep = (q_idx[:, None] >= kv_idx) & (q_doc[:, :, None] == kv_doc[:, None])
    for name, table in zip(PASSES, schedule.tables, strict=True):
        by_keys = name == "dkdv"
        visited, full = _blocks(keep.mT, block_n, block_m) if by_keys else _blocks(keep, block_m, block_n)
        first, full_begin, full_end, end = table[:, 0].unbind(-1)
        others = torch.arange(visited.shape[2], device=DEVICE)
        in_range, in_full = (
            (others >= a[..., None]) & (others < b[..., None]) for a, b in ((first, end), (full_begin, full_end))
        )
        assert (in_range >= visited).all()
        assert (in_full <= full).all()
        assert (first <= full_begin).all()
        assert (full_begin <= full_end).all()
        assert (full_end <= end).all()
        if documents != "random":
            assert torch.equal(in_range, visited)
            assert torch.equal(in_full, full)
            assert not table[:, 0][~visited.any(-1)].any()


def _blocks(keep: torch.Tensor, own: int, other: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that keep any pair, and the complete blocks along `other` that keep all: `[B, own, other]` each."""
    rows, cols = (-(-n // size) for n, size in zip(keep.shape[1:], (own, other), strict=True))
    missing = (0, cols * other - keep.shape[2], 0, rows * own - keep.shape[1])
    some, every = (
        torch.nn.functional.pad(keep, missing, value=value).unflatten(2, (cols, other)).unflatten(1, (rows, own))
        for value in (False, True)
    )
    full = every.all(4).all(2)
    full[:, :, keep.shape[2] // other :] = False
    return some.any(4).any(2), full


def test_ranges_take_four_numbers_for_each_row_of_blocks() -> None:
    """Passes with the same blocks have one table."""
    inputs = draw("document", SHAPE)
    rows, keys = -(-SHAPE.q_len // 32), -(-SHAPE.keys // 16)
    assert _schedule("document", inputs, config=CONFIG).nbytes == SHAPE.batch * (rows + keys) * 16
    assert _schedule("document", inputs, config=CONFIG, backward=False).nbytes == SHAPE.batch * rows * 16
    apart = _schedule("document", inputs, config={**CONFIG, "dq": {**CONFIG["dq"], "block_n": 32}})
    assert apart.nbytes == SHAPE.batch * (2 * rows + keys) * 16


def test_schedules_in_a_graph() -> None:
    """In a traced call, the tables are made inside the operator, or are passed to it."""
    inputs = draw("document", SHAPE)
    op: Any = golden.load_op("document")
    schedule = _schedule("document", inputs)

    def call(q: torch.Tensor, schedule: Any) -> torch.Tensor:
        o: torch.Tensor = op(q, inputs.k, inputs.v, doc=inputs.tensors["doc"], schedule=schedule)
        return o

    want = call(inputs.q, None)
    for given in (None, schedule):
        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(inputs.q, given), want)


def test_on_the_cpu_a_schedule_is_empty() -> None:
    support = importlib.import_module("generated.document.torch_op")
    if DEVICE != "cpu":
        pytest.skip("a GPU makes tables")
    inputs = draw("document", SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "runs_reference", lambda q: True)
        schedule = _schedule("document", inputs)
        assert schedule.tables == ()
        assert schedule.nbytes == 0
        evaluate("document", inputs, schedule=schedule)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("document", "dense"), ("natten", "dense"), ("document", "packed"), ("causal", "packed"), ("causal", "segmented")],
)
def test_a_schedule_of_fake_tensors_has_no_tables(variant: str, mode: str) -> None:
    """Like one of meta tensors, it serves calls of its size, which have shapes without values."""
    inputs, options = calls.draw_call(variant, mode, "float16", 16, seq=40, device=DEVICE, batch=2)
    with FakeTensorMode() as fake:
        own: dict[str, torch.Tensor] = {name: fake.from_tensor(x) for name, x in inputs.tensors.items()}
        options = {name: fake.from_tensor(x) for name, x in options.items()}
        q, k, v = map(fake.from_tensor, (inputs.q, inputs.k, inputs.v))
        faked = replace(inputs, q=q, k=k, v=v, tensors=own)
        schedule = make_schedule(golden.load_op(variant), faked, **options)
        o = faked.call(golden.load_op(variant), schedule=schedule, **options)
    assert schedule.tables == ()
    assert o.shape == inputs.q.shape
