"""Checks and times one case: ours and its peers, on the same inputs, in one process."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.cases.case import Case
from bench.cases.flex_mods import MODS
from bench.peers.torch_peers import Runner, build, forget
from bench.record import OURS, PASSES, TITLES, Cost, Measurement, in_one_line
from codegen.testing import golden
from codegen.testing.golden import BOUND, Inputs, Shape
from codegen.tune import timing
from codegen.tune.timing import Timing

DTYPE = torch.bfloat16
PREPARATIONS = 3
MIB = 2**20


class GpuLostError(RuntimeError):
    """A kernel failed so that this process can no longer use the GPU; `rows` are the measurements up to then."""

    def __init__(self, message: str, rows: list[Measurement]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(kw_only=True)
class Found:
    """The results of a case so far. `runners`: implementations that can be timed."""

    case: Case
    runners: dict[str, Runner] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    times: dict[str, dict[str, Timing]] = field(default_factory=dict)

    def measurements(self) -> list[Measurement]:
        """A measurement for each implementation and pass: a time, or the reason for its absence."""
        names = (OURS, *self.case.peers)
        return [self._measurement(name, which) for name in names for which in PASSES]

    def _measurement(self, name: str, which: str) -> Measurement:
        found = self.times.get(which, {}).get(name)
        row = Measurement(case=self.case.name, which=which, implementation=name, note=self.notes.get(name, ""))
        if found is None:
            return row
        tflops = self.case.flops(which) / found.ms / 1e9
        return replace(row, ms=found.ms, tflops=tflops, spread=found.spread)


def draw(case: Case) -> Inputs:
    """Draw the inputs of a case on the GPU."""
    entry = golden.load_manifest()[case.variant]
    inputs = golden.draw_inputs(
        entry, case.shape, dtype=DTYPE, device="cuda", scalars=case.scalars, own_grads=case.own_grads
    )
    mods = MODS.get(case.variant)
    own = None if mods is None else mods.tensors
    return inputs if own is None else replace(inputs, tensors=inputs.tensors | own(case.shape, "cuda"))


def measure(case: Case, budget_ms: float) -> tuple[list[Measurement], list[Cost]]:
    """Check ours against float64, then time ours and each peer for `budget_ms` of GPU time per pass.

    Raises `GpuLostError` if the process can no longer use the GPU.
    """
    found = Found(case=case)
    fault = verify(case)
    if fault:
        found.notes[OURS] = fault
    forget()
    _build_all(found, draw(case))
    _time_all(found, budget_ms)
    rows, costs = found.measurements(), found.costs
    del found
    gc.collect()
    torch.cuda.empty_cache()
    return rows, costs


def _build_all(found: Found, inputs: Inputs) -> None:
    """Build each implementation, run it once, and compare its results with ours."""
    ours: dict[str, Tensor] | None = None
    faults: dict[str, str] = {}
    for name in (OURS, *found.case.peers):
        if name in found.notes:
            continue
        try:
            start = time.perf_counter()
            runner = build(name, found.case, inputs)
            results = runner.results()
            torch.cuda.synchronize()
            first_s = time.perf_counter() - start
            if name == OURS:
                ours = results
            elif ours is not None:
                faults[name] = _difference(ours, results)
            del results
            found.runners[name] = runner
            found.costs.append(_cost(found.case, name, runner, first_s))
        except Exception as error:  # a peer may be missing or fail in any way; its row says so
            _fail(found, name, error)
    found.notes.update(_wrong(faults))


def _wrong(faults: Mapping[str, str]) -> dict[str, str]:
    """Implementation -> a note that its results are wrong. `faults`: how each peer's differ from ours, "" if not.

    A peer is wrong if another one agrees with ours. If none does, ours are wrong, which is said once.
    """
    differing = {name: fault for name, fault in faults.items() if fault}
    agreeing = [TITLES[name] for name in faults if name not in differing]
    if agreeing:
        others = " and ".join(["ours", *agreeing])
        return {name: f"WRONG, differs from {others}: {fault}" for name, fault in differing.items()}
    if not differing:
        return {}
    name, fault = next(iter(differing.items()))
    return {OURS: f"differs from {TITLES[name]}: {fault}"}


def _time_all(found: Found, budget_ms: float) -> None:
    """Time both passes of all runners in turn. The forward saves the tensors for the backward, as in training."""
    outputs: dict[str, Tensor] = {}
    for name, runner in list(found.runners.items()):
        try:
            outputs[name] = runner.forward()
        except Exception as error:
            _fail(found, name, error)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "fwd": {name: runner.forward for name, runner in found.runners.items()},
        "bwd": {name: functools.partial(runner.gradients, outputs[name]) for name, runner in found.runners.items()},
    }
    for which in PASSES:
        running = {name: call for name, call in calls[which].items() if name in found.runners}
        found.times[which], failed = timing.in_turn(running, budget_ms)
        for name, reason in failed.items():
            _fail(found, name, reason)


def _fail(found: Found, name: str, error: Exception) -> None:
    found.notes[name] = in_one_line(error)
    found.runners.pop(name, None)
    try:
        torch.cuda.synchronize()
    except Exception as lost:
        reason = f"{found.case.name}, {TITLES[name]}: {found.notes[name]}"
        raise GpuLostError(reason, found.measurements()) from lost


def _cost(case: Case, name: str, runner: Runner, first_s: float) -> Cost:
    """The costs of a warm implementation: memory of one forward and backward, and the time of `prepare`."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.gradients(runner.forward())
    torch.cuda.synchronize()
    peak_mib = (torch.cuda.max_memory_allocated() - before) / MIB
    setup_ms = None if runner.prepare is None else wall_ms(runner.prepare)
    return Cost(case=case.name, implementation=name, peak_mib=peak_mib, setup_ms=setup_ms, first_s=first_s)


def wall_ms(call: Callable[[], Any]) -> float:
    """Median wall time of a call, from its start until the GPU has finished its work."""
    wait = timing.clock().wait
    times = []
    for _ in range(PREPARATIONS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def verify(case: Case) -> str:
    """The error of ours against float64 at a smaller size of the same kind; "" if it is right."""
    group = case.shape.heads // case.shape.kv_heads
    return _verify(case.variant, replace(case.shape, batch=1, heads=2 * group, kv_heads=2, seq=1000))


@functools.cache
def _verify(variant: str, shape: Shape) -> str:
    try:
        errors, right = golden.check(variant, shape, DTYPE, "cuda")
    except Exception as error:  # the row reports it, and the case is not timed
        return in_one_line(error)
    return "" if right else f"WRONG against float64: {_worst(errors)}"


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    """The difference of two results at the full size, if it exceeds twice the bound: both are rounded."""
    errors = golden.relative_errors(ours, theirs)
    return "" if max(errors.values()) <= 2 * BOUND[DTYPE] else _worst(errors)


def _worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda each: errors[each])
    return f"{name} is off by {errors[name]:.1e}"
