"""The packed benchmark's own logic: its cases, and that it judges the results of the ops to be right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")

from torch import Tensor

from bench.cases import packed as cases
from bench.peers import packed_peers as peers
from bench.runs import packed
from bench.timing.clock import Clock
from codegen.testing import golden

CASES = {case.name: case for case in cases.cases()}


def test_every_case_has_all_tokens_in_rows_of_one_length() -> None:
    for case in CASES.values():
        assert {sum(row) for row in case.rows} == {case.shape.seq}
        assert case.shape.batch * case.shape.seq == cases.TOKENS
        assert min(length for row in case.rows for length in row) >= 1


def test_front_has_documents_of_all_sizes() -> None:
    front = {case.name: case for case in cases.front_cases()}
    assert set(front) == {
        *(f"documents B{batch} S{seq}" for batch, seq in ((32, 4096), (8, 16384), (2, 65536))),
        "short documents B16 S8192",
        "dense B2 S65536",
        "65536 then 1024 x 64",
        "1024 x 64 then 65536",
    }
    short = front["short documents B16 S8192"]
    assert len(set(short.rows)) == 16
    assert {sum(row) for row in short.rows} == {8192}
    assert 64 <= min(map(min, short.rows)) < 200 < 900 < max(map(max, short.rows)) <= 1024
    assert short.implementations == ("packed", "segments", "fa4", "flex")


def test_work_is_that_of_unmasked_scores() -> None:
    case = cases.PackedCase(name="", rows=((1, 2), (3, 0)), implementations=(), heads=(4, 2), dim=16)
    assert case.flops("fwd") == 4 * 16 * 4 * (1 + 3 + 6)
    assert case.flops("bwd") == 2.5 * case.flops("fwd")


@pytest.mark.parametrize("name", cases.OURS)
@pytest.mark.parametrize("case", ["documents B2 S65536", "forgetting B8 S16384"])
def test_ours_is_taken_for_right(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CHECK_TOKENS", 256)
    small = replace(CASES[case].small(), heads=(4, 2), dim=16)
    if name == "dense":
        small = replace(small, rows=tuple((sum(row),) for row in small.rows))
    assert peers.fault(small, name, "cpu") == ""


def test_fault_finds_documents_that_attend_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CHECK_TOKENS", 256)
    monkeypatch.setitem(peers.BUILDERS, "segments", peers.BUILDERS["dense"])
    small = replace(CASES["documents B2 S65536"].small(), heads=(2, 1), dim=16)
    assert peers.fault(small, "segments", "cpu").startswith("WRONG against float64: ")


def test_peers_can_be_chosen_and_be_absent() -> None:
    case = CASES["documents B2 S65536"]
    assert cases.with_peers(case, None, []) == case
    assert cases.with_peers(case, ("fla",), []).implementations == ("packed", "segments")
    assert cases.with_peers(case, None, ["flex"]).implementations == ("packed", "segments", "fa4")


def test_fa4_is_called_with_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    op = golden.load_op("causal")

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, **options: object) -> object:
        asked.append({"ends": cu_seqlens_q.tolist(), **options})
        return op(q, k, v, cu_seqlens_q=cu_seqlens_q), None

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    rows = ((3, 0, 5), (1, 7, 0))
    small = cases.PackedCase(name="", rows=rows, implementations=(), heads=(4, 2), dim=16)
    assert peers.fault(small, "fa4", "cpu") == ""
    (call,) = asked
    assert call["ends"] == [0, 3, 8, 9, 16]
    assert (call["max_seqlen_q"], call["max_seqlen_k"], call["causal"]) == (7, 7, True)


def test_every_case_is_kept_until_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    clock = Clock(minutes=1.0)

    def measure(case: cases.PackedCase, _: int) -> Iterator[packed.PackedMeasurement]:
        if kept:
            monkeypatch.setattr(Clock, "over", True)
        yield packed.PackedMeasurement(case=case.name, implementation="packed", ms={"fwd": 1.0}, tflops={"fwd": 1.0})

    monkeypatch.setattr(packed, "measure", measure)
    assert packed.run(10, 0, list(CASES.values())[:3], lambda found: kept.append(len(found)), clock)
    assert kept == [1, 2]


def test_every_implementation_is_compiled_and_flex_behind_the_others() -> None:
    front = cases.front_cases()
    alone = [(case.name, *case.implementations) for case in packed.rehearsals(front)]
    assert sorted(alone) == sorted((case.name, name) for case in front for name in case.implementations)
    is_flex = [name == "flex" for _, name in alone]
    assert is_flex == sorted(is_flex)


def test_shares_are_of_the_dense_rate_at_the_length() -> None:
    rates = {
        ("dense B8 S16384", "dense"): 400.0,
        ("dense B2 S65536", "dense"): 500.0,
        ("uniform 1024", "packed"): 300.0,
        ("uniform 1024", "fa4"): 100.0,
        ("65536 then 1024 x 64", "packed"): 475.0,
        ("documents B2 S65536", "packed"): 450.0,
    }
    measured = [
        packed.PackedMeasurement(case=case, implementation=name, tflops={"fwd": rate})
        for (case, name), rate in rates.items()
    ]
    assert list(packed.dense_shares(measured)) == [
        ("uniform 1024", "fwd", 0.75, packed.DENSE_SHARE),
        ("65536 then 1024 x 64", "fwd", 0.95, packed.LONG_SHARE),
    ]
