"""The packed benchmark's own logic: what its cases are, and that it takes what the ops compute for right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")

from bench.cases import packed as cases
from bench.peers import packed_peers as peers
from bench.runs import packed
from bench.timing.clock import Clock

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
        "65536 then 1024 x 64",
        "1024 x 64 then 65536",
    }
    short = front["short documents B16 S8192"]
    assert len(set(short.rows)) == 16
    assert {sum(row) for row in short.rows} == {8192}
    assert 64 <= min(map(min, short.rows)) < 200 < 900 < max(map(max, short.rows)) <= 1024
    assert short.implementations == ("packed", "segments", "flex")


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
    assert cases.with_peers(case, None, ["flex"]).implementations == ("packed", "segments")


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
