"""The decode suite: a step of several layers in a CUDA graph, each layer with caches of its own, beside its peers."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.cases.decode import BASES, FEW_QUERIES, OURS, DecodeCase
from bench.peers.decode_peers import BUILDERS, CONTIGUOUS, fault
from bench.peers.decode_step import Built, Step, draw
from bench.timing.clock import Clock
from bench.timing.warm_compile import compile_in_parallel
from codegen.testing.golden import load_op

COLD_BYTES = 300 * 10**6
"""Bytes of KV caches that the layers of a step read together: several times the size of the chip's L2 cache."""

MOST_LAYERS, REPLAYS, CALLS = 40, 15, 200
MOST_JOBS = 8
"""Processes that compile at once."""

ROWS = 512
"""Query rows whose pairs with keys are counted at a time."""


@dataclass(frozen=True, kw_only=True)
class DecodeMeasurement:
    """One implementation of a case: GPU microseconds of a layer, and of the plan, which is made once a step.

    `tb_per_s` counts the keys and values that the mask lets the call read. `tflops` counts scores that the mask keeps,
    for prompts and latent attention. `ratio`: the time of the implementation `over`, on the same case, divided by the
    time of this one. `note`: why it was not measured, or what is wrong.
    """

    case: str
    implementation: str
    us: float | None = None
    tb_per_s: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    over: str = ""
    plan_us: float | None = None
    note: str = ""


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds per call of some calls in one CUDA graph: the median of its replays."""
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


def rates(case: DecodeCase) -> tuple[float | None, float | None]:
    """The share of keys that a sequence's queries may see, and the FLOPs of the scores that the mask keeps.

    The share is None if a sequence has more than FEW_QUERIES queries. The FLOPs are None unless the case is a prompt or
    has latent attention. Both are None for a step with prompts beside decoding sequences, for which no rate is
    meaningful.
    """
    few = max(case.counts) <= FEW_QUERIES
    if not few and min(case.counts) <= FEW_QUERIES:
        return None, None
    flops = None
    if not few or case.value_dim is not None:
        columns = case.dim + (case.value_dim or case.dim)
        flops = 2.0 * case.heads * columns * _over_sequences(case, kept_pairs)
    return seen_share(case) if few else None, flops


def seen_share(case: DecodeCase) -> float | None:
    """The share of all keys that some query of their sequence may see; all keys if the variant has tensors.

    With the tensors that `draw` makes, every key may be seen. None if a tensor has an element for each pair of query
    and key: the bytes that a call reads of such a tensor are not counted, so the row has no rate.
    """
    from bench.cases.pairs import library_spec

    spec = library_spec().variants[case.variant]
    if any("q_idx" in tensor.dims for tensor in spec.tensors.values()):
        return None
    if spec.mask is None or spec.tensors:
        return 1.0
    return _over_sequences(case, seen_keys) / sum(case.lengths)


def _over_sequences(case: DecodeCase, counted: Callable[[str, int, int], int]) -> int:
    return sum(counted(case.variant, *each) for each in zip(case.counts, case.lengths, strict=True))


@functools.cache
def seen_keys(variant: str, queries: int, length: int) -> int:
    """The number of keys of a sequence that at least one of its last queries may see."""
    return int(sum(kept.any(axis=0) for kept in _kept(variant, queries, length)).astype(bool).sum())


@functools.cache
def kept_pairs(variant: str, queries: int, length: int) -> int:
    """The number of pairs of one of a sequence's last queries and a key that the mask keeps."""
    return sum(int(kept.sum()) for kept in _kept(variant, queries, length))


def _kept(variant: str, queries: int, length: int) -> list[Any]:
    """For each ROWS of a sequence's last queries, whether a query may see a key: bool, `[rows, keys]`."""
    import numpy as np

    from bench.cases.pairs import library_spec
    from codegen.inspect.block_status import pairs
    from codegen.inspect.call import make_call

    spec = library_spec().variants[variant]
    if spec.mask is None:
        return [np.ones((queries, length), dtype=bool)]
    offset = length - queries
    call = make_call(spec, q_len=queries, kv_len=length, q_offset=offset, batch=0, head=0, scalars={}, files={})
    return [pairs(spec.mask, call, first, first + ROWS) for first in range(0, queries, ROWS)]


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
    return compared(found)


def compared(rows: Sequence[DecodeMeasurement]) -> list[DecodeMeasurement]:
    """The rows of a case; those of ours with the ratio to the implementation that they are compared with."""
    timed = {m.implementation: m.us for m in rows if m.us is not None}
    found = []
    for m in rows:
        base = next((name for name in BASES.get(m.implementation, ()) if name in timed), None)
        found.append(replace(m, ratio=timed[base] / m.us, over=base) if base is not None and m.us is not None else m)
    return found


def _timed(case: DecodeCase, name: str, device: str) -> DecodeMeasurement:
    case = case.read_by(name)

    def layer() -> Step:
        return draw(case, device, contiguous=name in CONTIGUOUS)

    first = layer()
    built = BUILDERS[name](first)
    count = max(built.layers, min(MOST_LAYERS, -(-COLD_BYTES // first.nbytes)))
    # The layers of a model share a page table and lengths.
    layers = [
        first,
        *(Step(**{**vars(layer()), "page_table": first.page_table, "own": first.own}) for _ in range(count - 1)),
    ]
    us = graph_us([partial(built.call, x) for x in layers]) if built.programs is None else _program_us(built, layers)
    share, flops = rates(case)
    return DecodeMeasurement(
        case=case.name,
        implementation=name,
        us=us,
        tb_per_s=None if share is None else first.nbytes * share / us / 1e6,
        tflops=None if flops is None else flops / us / 1e6,
        plan_us=graph_us([built.plan] * 8) if built.plan is not None and name in OURS else None,
    )


def _program_us(built: Built, layers: Sequence[Step]) -> float:
    """Microseconds of a layer in the fastest of the programs of all layers, without those that fail."""
    from bench.timing.loops import loop_ms

    if built.programs is None or built.wait is None:
        raise ValueError("expected programs and what waits for them")
    times: list[float] = []
    failed: list[Exception] = []
    for program in built.programs(layers):
        try:
            times.append(loop_ms(program, built.wait))
        except Exception as error:  # too large for the GPU, as an option of a peer may be
            failed.append(error)
    if not times:
        raise failed[0]
    return min(times) / len(layers) * 1e3


def rehearse(case: DecodeCase) -> None:
    """Check our implementations of a case once, so that their kernels are in the cache on disk."""
    for name in case.implementations:
        # A failure here happens again in `measure`, which reports it. JAX compiles its programs in one process.
        if name in OURS and name != "jax":
            with contextlib.suppress(Exception):
                fault(case, name, "cuda")


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
    lines = [f"{'case':{width}} {'by':12} {'us':>9} {'TB/s':>6} {'of copy':>7} {'TF':>4} {'plan us':>7}  times as fast"]
    for m in measurements:
        if m.us is None:
            lines.append(f"{m.case:{width}} {m.implementation:12} {m.note}")
            continue
        plan = f"{m.plan_us:7.1f}" if m.plan_us is not None else f"{'':7}"
        rate = f"{'':14}" if m.tb_per_s is None else f"{m.tb_per_s:6.2f} {m.tb_per_s / copy:7.0%}"
        flops = f"{'':4}" if m.tflops is None else f"{m.tflops:4.0f}"
        ratio = "" if m.ratio is None else f"{m.ratio:6.3f} of {m.over}"
        lines.append(f"{m.case:{width}} {m.implementation:12} {m.us:9.1f} {rate} {flops} {plan} {ratio}".rstrip())
    return "\n".join(lines)


def run(
    chosen: Sequence[DecodeCase], keep: Callable[[list[dict[str, Any]], float], None], clock: Clock, jobs: int = 0
) -> bool:
    """Compile in `jobs` processes, measure, call `keep` after each case, and print the table. True if ours is right."""
    if jobs > 0:
        compile_in_parallel(rehearse, chosen, min(jobs, MOST_JOBS), clock.at(0.5), "decode: compiling")
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
        "\ndecode, bfloat16, keys and values cold; TF: TFLOP/s of unmasked scores; "
        f"a copy moves {copy:.2f} TB/s; CPU time of a call {host.us:.0f} us\n"
    )
    print(table(measurements, copy), flush=True)
    return not any(m.note for m in measurements if m.implementation in OURS)
