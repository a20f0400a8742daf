"""How the benchmark measures one case: rounds, peers that fail or differ, a lost GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
pytest.importorskip("triton", reason="the benchmark needs Triton")

import torch

from bench.cases.case import Case
from bench.peers import torch_peers as peers
from bench.timing import measure
from bench.timing.measure import GpuLostError
from codegen.testing import golden
from codegen.tune import timing
from tests.support.measured import CASE

# -------------------------------------------------------------------------------------------------------------- rounds


def sampled(log: list[str], ms: dict[str, float]) -> timing.Sample:
    """A sample of calls that only return their names."""

    def sample(call: Callable[[], Any], count: int) -> list[float]:
        name = call()
        log.extend([name] * count)
        return [ms[name]] * count

    return sample


def test_rounds_are_taken_in_turn_and_each_begins_with_another() -> None:
    log: list[str] = []
    calls = {name: partial(str, name) for name in ("a", "b")}
    found, failed = timing.in_turn(calls, 50.0, sampled(log, {"a": 5.0, "b": 10.0}))
    assert not failed
    assert {name: x.ms for name, x in found.items()} == {"a": 5.0, "b": 10.0}
    assert found["a"].spread == 0.0
    # Five calls of each estimate its time. A round then takes ten milliseconds of each, and one call to warm up.
    rounds = log[10:]
    assert rounds == ["a"] * 3 + ["b"] * 2 + ["b"] * 2 + ["a"] * 3 + (["a"] * 3 + ["b"] * 2 + ["b"] * 2 + ["a"] * 3) + (
        ["a"] * 3 + ["b"] * 2
    )


def test_in_turn_calls_slow_functions_a_few_times() -> None:
    log: list[str] = []
    timing.in_turn({"a": partial(str, "a")}, 150.0, sampled(log, {"a": 5000.0}))
    assert len(log) == 3


def test_in_turn_times_a_call_whose_first_compiles_as_any_other() -> None:
    log: list[str] = []

    def sample(call: Callable[[], Any], count: int) -> list[float]:
        log.extend([call()] * count)
        return [4000.0] if len(log) == 1 else [5.0] * count

    found, _ = timing.in_turn({"a": partial(str, "a")}, 50.0, sample)
    assert found["a"].ms == 5.0
    assert len(log) == 5 + timing.ROUNDS * 3


def test_in_turn_goes_on_after_a_failure() -> None:
    def bad() -> str:
        raise RuntimeError("no such kernel")

    log: list[str] = []
    found, failed = timing.in_turn({"bad": bad, "a": partial(str, "a")}, 50.0, sampled(log, {"a": 5.0}))
    assert set(found) == {"a"}
    assert str(failed["bad"]) == "no such kernel"


# ------------------------------------------------------------------------------------------------------------- measure


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure without a GPU: ours computes its reference, and flex is a peer that computes the same."""

    def draw(case: Case) -> golden.Inputs:
        return golden.draw_inputs(
            golden.load_manifest()[case.variant], case.shape, dtype=torch.bfloat16, device="cpu", scalars=case.scalars
        )

    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**20)
    monkeypatch.setattr(measure, "draw", draw)
    monkeypatch.setattr(measure, "verify", lambda case: "")
    monkeypatch.setattr(measure, "forget", lambda: None)

    def sample(call: Callable[[], Any], count: int) -> list[float]:
        call()
        return [2.0] * count

    def absent(case: Case, inputs: golden.Inputs) -> peers.Runner:  # noqa: ARG001 -- as all builders
        raise ImportError("no module named cudnn\nsecond line")

    def broken_backward(case: Case, inputs: golden.Inputs) -> peers.Runner:
        runner = peers.BUILDERS["ours"](case, inputs)
        calls = iter(range(100))

        def forward() -> torch.Tensor:
            if next(calls) >= 2:  # the first two calls are for its results and its memory
                raise RuntimeError("out of memory")
            return runner.forward()

        return peers.Runner(forward=forward, do=runner.do, leaves=runner.leaves)

    monkeypatch.setitem(peers.BUILDERS, "flex", peers.BUILDERS["ours"])
    monkeypatch.setitem(peers.BUILDERS, "cudnn", absent)
    monkeypatch.setitem(peers.BUILDERS, "fa2", broken_backward)
    with timing.using(timing.Clock(sample=sample, wait=lambda: None)):
        yield


@pytest.mark.usefixtures("on_cpu")
def test_a_case_is_measured_past_peers_that_fail() -> None:
    rows, costs = measure.measure(CASE, 10.0)
    assert [(m.implementation, m.which) for m in rows[:4]] == [
        ("ours", "fwd"),
        ("ours", "bwd"),
        ("flex", "fwd"),
        ("flex", "bwd"),
    ]
    assert all(m.ms == 2.0 and m.tflops == CASE.flops(m.which) / 2e9 and not m.note for m in rows[:4])
    assert {m.note for m in rows[4:]} == {"ImportError: no module named cudnn", "RuntimeError: out of memory"}
    assert all(m.ms is None for m in rows[4:])
    assert [(cost.implementation, cost.peak_mib, cost.setup_ms) for cost in costs][:2] == [
        ("ours", 0.0, None),
        ("flex", 0.0, None),
    ]
    assert all(cost.first_s is not None and cost.first_s > 0 for cost in costs)


def _other_results(case: Case, inputs: golden.Inputs) -> peers.Runner:
    return peers.BUILDERS["ours"](Case(variant="full", shape=case.shape), inputs)


@pytest.mark.usefixtures("on_cpu")
def test_ours_is_wrong_if_no_peer_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flex", "fa2"):
        monkeypatch.setitem(peers.BUILDERS, name, _other_results)
    rows, _ = measure.measure(CASE, 10.0)
    assert rows[0].note.startswith("differs from Flex: ")
    assert [m.note for m in rows if m.implementation in ("flex", "fa2")] == [""] * 4


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_is_wrong_if_another_one_agrees_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.BUILDERS, "flex", _other_results)
    monkeypatch.setitem(peers.BUILDERS, "fa2", peers.BUILDERS["ours"])
    rows, _ = measure.measure(CASE, 10.0)
    assert rows[0].note == ""
    assert rows[2].note.startswith("WRONG, differs from ours and FA2: ")


@pytest.mark.usefixtures("on_cpu")
def test_ours_is_not_timed_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "verify", lambda case: "WRONG against float64: dq is off by 1.0e+00")
    rows, _ = measure.measure(CASE, 10.0)
    assert (rows[0].ms, rows[0].note) == (None, "WRONG against float64: dq is off by 1.0e+00")
    assert rows[2].ms == 2.0


@pytest.mark.usefixtures("on_cpu")
def test_a_lost_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def bad(case: Case, inputs: golden.Inputs) -> peers.Runner:  # noqa: ARG001 -- as all builders
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(peers.BUILDERS, "flex", bad)
    with pytest.raises(GpuLostError, match="Flex: RuntimeError: an illegal memory access") as caught:
        measure.measure(CASE, 10.0)
    assert caught.value.rows[2].note == "RuntimeError: an illegal memory access was encountered"


def test_wall_ms_waits_until_a_call_is_done() -> None:
    calls: list[str] = []
    with timing.using(timing.Clock(wait=partial(calls.append, "waited"))):
        assert measure.wall_ms(partial(calls.append, "made")) > 0
    assert calls == ["waited", "made", "waited"] * measure.PREPARATIONS
