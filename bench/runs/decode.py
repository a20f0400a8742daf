"""The decode suite: a step of several layers in a CUDA graph, each layer with caches of its own, beside its peers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.cases.decode import OURS, DecodeCase
from bench.peers.decode_peers import BUILDERS, CONTIGUOUS, Step, draw, fault
from bench.timing.clock import Clock
from codegen.testing.golden import load_op

COLD_BYTES = 300 * 10**6
"""Bytes of caches that the layers of a step read together: several times what a cache of the chip holds."""

MOST_LAYERS, REPLAYS, CALLS = 40, 15, 200


@dataclass(frozen=True, kw_only=True)
class DecodeMeasurement:
    """One implementation of a case: GPU microseconds of a layer, TB/s of keys and values that the mask lets it read,
    and of what is done once a step. `note`: why it was not measured, or what is wrong."""

    case: str
    implementation: str
    us: float | None = None
    tb_per_s: float | None = None
    plan_us: float | None = None
    note: str = ""


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of each of some calls in a CUDA graph: the median of its replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(REPLAYS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) / len(calls) * 1e3


def copy_tb_per_s() -> float:
    """Bytes read and written by a copy of 2 GB, in TB/s."""
    x = torch.empty(2**29, dtype=torch.float32, device="cuda")
    y = torch.empty_like(x)
    times: list[float] = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * x.numel() * x.element_size() / statistics.median(times) / 1e9


def seen_share(case: DecodeCase) -> float | None:
    """The share of all keys that some query of its sequence may see: all of them, as `draw` makes tensors.

    None for a variant with a tensor that has an element for each pair of query and key: what a call reads of it is not
    counted, so such a row has no rate.
    """
    from bench.cases.pairs import library_spec
    from codegen.inspect.block_status import pairs
    from codegen.inspect.call import make_call

    spec = library_spec().variants[case.variant]
    if any("q_idx" in tensor.dims for tensor in spec.tensors.values()):
        return None
    if spec.mask is None or spec.tensors:
        return 1.0
    seen = 0
    for length in set(case.lengths):
        call = make_call(
            spec,
            q_len=case.queries,
            kv_len=length,
            q_offset=length - case.queries,
            batch=0,
            head=0,
            scalars={},
            files={},
        )
        kept = pairs(spec.mask, call, 0, case.queries)
        seen += int((kept > 0).any(axis=0).sum()) * case.lengths.count(length)
    return seen / sum(case.lengths)


def measure(case: DecodeCase, device: str = "cuda") -> list[DecodeMeasurement]:
    """Check each implementation of a case against float64, then time it."""
    found = []
    for name in case.implementations:
        try:
            if wrong := fault(case, name, device):
                found.append(DecodeMeasurement(case=case.name, implementation=name, note=wrong))
            else:
                found.append(_timed(case, name, device))
        except Exception as error:  # a peer may be missing or fail in any way; its row says so
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
            found.append(DecodeMeasurement(case=case.name, implementation=name, note=reason))
        torch.cuda.empty_cache()
    return found


def _timed(case: DecodeCase, name: str, device: str) -> DecodeMeasurement:
    def layer() -> Step:
        return draw(case, device, contiguous=name in CONTIGUOUS)

    first = layer()
    count = max(2, min(MOST_LAYERS, -(-COLD_BYTES // first.nbytes)))
    # The layers of a model share a page table and lengths.
    layers = [
        first,
        *(Step(**{**vars(layer()), "page_table": first.page_table, "own": first.own}) for _ in range(count - 1)),
    ]
    built = BUILDERS[name](first)
    every = [[partial(call, x) for x in layers] for call in (built.call, *built.others)]
    us = graph_us(every[0]) if built.wait is None else min(_enqueued_us(calls, built.wait) for calls in every)
    share = seen_share(case)
    rate = None if share is None else first.nbytes * share / us / 1e6
    plan_us = graph_us([built.plan] * 8) if built.plan is not None and name in OURS else None
    return DecodeMeasurement(case=case.name, implementation=name, us=us, tb_per_s=rate, plan_us=plan_us)


def _enqueued_us(calls: Sequence[Callable[[], Any]], wait: Callable[[Any], Any]) -> float:
    """Microseconds of each of some calls that are enqueued one after the other."""
    from bench.timing.loops import loop_ms

    def step() -> Any:
        for call in calls:
            last = call()
        return last

    return loop_ms(step, wait) / len(calls) * 1e3


def host_us() -> float:
    """CPU microseconds of a decode call with a plan: Python, checks and launches, without waiting for the GPU."""
    case = DecodeCase(name="host", lengths=(64,) * 8)
    step = draw(case, "cuda")
    built = BUILDERS["codegen"](step)
    for _ in range(20):
        built.call(step)
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        built.call(step)
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def table(measurements: Sequence[DecodeMeasurement], copy: float) -> str:
    """One line per case and implementation."""
    width = max(len(m.case) for m in measurements)
    lines = [f"{'case':{width}} {'by':12} {'us':>9} {'TB/s':>6} {'of copy':>7} {'plan us':>7}"]
    for m in measurements:
        if m.us is None:
            lines.append(f"{m.case:{width}} {m.implementation:12} {m.note}")
            continue
        plan = f"{m.plan_us:7.1f}" if m.plan_us is not None else f"{'':7}"
        rate = f"{'':14}" if m.tb_per_s is None else f"{m.tb_per_s:6.2f} {m.tb_per_s / copy:7.0%}"
        lines.append(f"{m.case:{width}} {m.implementation:12} {m.us:9.1f} {rate} {plan}")
    return "\n".join(lines)


def run(chosen: Sequence[DecodeCase], keep: Callable[[list[dict[str, Any]], float], None], clock: Clock) -> bool:
    """Measure, call `keep` after each case, and print the table. True if ours is right."""
    load_op("causal")
    copy = copy_tb_per_s()
    measurements: list[DecodeMeasurement] = []
    host = DecodeMeasurement(case="CPU time of a call", implementation="codegen", us=host_us())
    for number, case in enumerate(chosen, start=1):
        if clock.over:
            print(f"out of time: skipped {', '.join(each.name for each in chosen[number - 1 :])}", flush=True)
            break
        print(f"[{number}/{len(chosen)}] {case.name}", flush=True)
        measurements += measure(case)
        keep([vars(m) for m in (host, *measurements)], copy)
    if not measurements:
        return True
    print(
        f"\ndecode, bfloat16, keys and values cold; a copy moves {copy:.2f} TB/s; CPU time of a call {host.us:.0f} us\n"
    )
    print(table(measurements, copy), flush=True)
    return not any(m.note for m in measurements if m.implementation in OURS)
