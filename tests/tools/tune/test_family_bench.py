"""Contenders checked and timed on a CPU, where an op computes its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from codegen.spec.model import Pass
from codegen.testing.calls import draw_call
from codegen.tune import measuring, timing
from codegen.tune.measuring import Contender, FamilyBench
from codegen.tune.record import Comparison, Workload
from tests.support.family_races import PACKAGE, comparison


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are drawn for the CPU, where an op computes its reference."""

    def drawn(*args: Any, **options: Any) -> Any:
        return draw_call(*args, **options | {"device": "cpu"})

    monkeypatch.setattr(measuring, "draw_call", drawn)
    monkeypatch.setattr(measuring, "TOKENS", 64)
    monkeypatch.setattr(measuring, "WIDTH", 32)
    measuring.golden_call.cache_clear()
    measuring.timed_call.cache_clear()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mode", ["packed", "segmented"])
def test_contenders_are_held_against_float64_by_mode(mode: str) -> None:
    of = Comparison(variant="causal", mode=mode, dtype="bfloat16", head_dim=16, pass_="bwd")
    bench = FamilyBench(PACKAGE, of)
    contender = Contender(name="portable", family="portable", tiles=())
    assert bench.check(contender) == ""
    op = bench.op
    bench.op = lambda *args, **options: op(*args, **options | ({"q_segment_ids": None} if mode == "segmented" else {}))
    assert ("off by" in bench.check(contender)) is (mode == "segmented")


@pytest.mark.usefixtures("on_cpu")
def test_timed_calls_have_several_uneven_sequences() -> None:
    found = {
        mode: measuring.timed_call(
            PACKAGE,
            Comparison(variant="causal", mode=mode, dtype="bfloat16", head_dim=16, pass_="fwd").group(Pass.FWD),
            Workload(seq=32, group=1),
        )
        for mode in ("packed", "segmented")
    }
    inputs, sequences = found["packed"]
    lengths = sequences["cu_seqlens_q"].diff().tolist()
    assert sum(lengths) == inputs.q.shape[0] == measuring.DOCUMENTS * 32
    assert 16 <= min(lengths) < 32 < max(lengths) <= 48
    inputs, sequences = found["segmented"]
    (ids,) = sequences["q_segment_ids"]
    assert len(ids) == inputs.q.shape[2] == 8 * 32
    lengths = ids.bincount().tolist()
    assert len(lengths) == 8
    assert 15 <= min(lengths) < 32 < max(lengths) <= 49
    assert ids.diff().min() >= 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_contenders_are_held_against_float64(pass_: str) -> None:
    bench = FamilyBench(PACKAGE, comparison(pass_, "alibi", 16))
    contender = Contender(name="portable", family="portable", tiles=(), seq=96)
    right, op = measuring.golden_call, bench.op
    small = right(PACKAGE, comparison("fwd", "alibi", 16).group(Pass.FWD), 96, (2, 2))
    bench_golden = lambda *_: small  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "golden_output", bench_golden)
        assert bench.check(contender) == ""
        bench.op = lambda *args, **options: 1.1 * op(*args, **options)
        assert "off by" in bench.check(contender)
        bench.op = lambda *_args, **_options: 1 // 0
        assert bench.check(contender).startswith("ZeroDivisionError")


@pytest.mark.usefixtures("on_cpu")
def test_race_times_whole_calls() -> None:
    def sample(call: Callable[[], Any], count: int) -> list[float]:
        results = call()
        return [float(len(results)) if isinstance(results, tuple) else 10.0] * count

    contenders = [
        Contender(name="portable", family="portable", tiles=()),
        Contender(name="hopper", family="portable", tiles=()),  # portable too: Hopper's kernels run only on Hopper GPUs
        Contender(name="hopper_dkdv", family="volta", tiles=()),
    ]
    workload = Workload(seq=32, group=1)
    for pass_, ms in (("fwd", 10.0), ("bwd", 4.0)):  # o; the gradients of q, k, v and slope
        with timing.using(timing.Clock(queued=sample)):
            found, failed = FamilyBench(PACKAGE, comparison(pass_, "alibi", 16)).race(contenders, workload)
        assert found == {"portable": ms, "hopper": ms}
        assert "family: expected None or one of" in failed["hopper_dkdv"]


@pytest.mark.usefixtures("on_cpu")
def test_race_reports_inputs_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(measuring, "draw_call", lost)
    contenders = [Contender(name="portable", family="portable", tiles=())]
    found = FamilyBench(PACKAGE, comparison("fwd", "alibi", 16)).race(contenders, Workload(seq=32, group=1))
    assert found == ({}, {"portable": "RuntimeError: CUDA error: an illegal memory access"})
