"""Rank replay: the local work of many ranks, one after the other on one GPU, and the predicted time of all together.

Kernels and local copies are measured. There are no links: their times come from the cost model, with the rates of a
`Machine`, so every time that includes them is marked "modelled". The effects of power limits and of links that several
busy GPUs share are neither measured nor modelled.

The GPU holds the arguments of the whole call once and, beside them, the tensors of one rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.cases.parallel import Job, ParallelCase
from bench.peers.parallel_ours import draw, make_plan, nodes_of, one_gpu, sharded
from bench.peers.replayed import lone
from bench.runs.parallel_run import Rows, Run, chosen, row_of
from bench.timing.ranks import Ranks, free_memory, once_ms
from codegen.testing.calls import Inputs
from generated._runtime.core.parallel.costs import Cost

MOST_COMPARED = 8
"""With more ranks than this, only the strategy that auto chooses and "2d" are replayed."""

MEASURED_MS, MOST_CALLS = 200.0, 10
"""Milliseconds that the measured calls of a rank take together, and the largest number of these calls."""


def replay(run: Run, ranks: Ranks, job: Job) -> Rows:
    """A row for each strategy: the slowest rank's local work, balance, and the predicted scaling."""
    case, size = job.case, job.ranks
    assert case is not None
    inputs = draw(case, run.device, run.dtype)
    call = one_gpu(case, inputs)
    run.say(doing=f"{case} on one GPU")
    one, note = ranks.attempt(lambda: _local_ms(ranks, call.both))
    free_memory(run.device)
    if one is None:
        yield row_of(run, "replay", str(case), "one GPU", ranks=size, note=note)
        return
    names, refused = chosen(run, "replay", case, size, ("auto", "2d") if size > MOST_COMPARED else ())
    for strategy in names:
        run.say(doing=f"{case} by {strategy}, {size} ranks")
        row = row_of(run, "replay", str(case), strategy, ranks=size)

        def every(strategy: str = strategy) -> tuple[list[float], float, float, float]:
            times: list[float] = []
            nodes = nodes_of(strategy, size, run.machine)
            # Under "heads" all ranks do the same work, and so do the ranks of a node, which share its rows.
            alike = size if strategy == "heads" else size // nodes if nodes else 1
            for rank in range(0, size, alike):
                ms, cost, imbalance, predicted = _of_rank(run, ranks, case, inputs, (strategy, nodes, size, rank))
                times.append(ms)
                run.say(doing=f"{case} by {strategy}, rank {rank} of {size}")
            # The cost model's own rule for the overlap of exchange and kernels, with the measured time of kernels.
            total = replace(cost, kernels=max(times) / 1e3, per_call=0.0, joins=0.0).total
            return times, imbalance, total * 1e3, predicted * 1e3

        result, note = ranks.attempt(every)
        # The next strategy allocates other sizes.
        free_memory(run.device)
        if result is None:
            yield replace(row, note=note)
            continue
        times, planned, total, predicted = result
        mean = sum(times) / len(times)
        yield replace(
            row,
            ms={"fwd+bwd": total, "kernels": max(times)},
            rank_ms={"kernels": times},
            one_ms={"fwd+bwd": one},
            scaling={"fwd+bwd": one / size / total, "kernels": one / size / mean},
            imbalance={"kernels": max(times) / mean - 1},
            tflops={"fwd+bwd": case.flops("fwd+bwd") / total / 1e9},
            planned=planned,
            predicted_ms=predicted,
            source="modelled",
            remark=_links(run, size) + ("; chosen by auto" if strategy == names[0] else ""),
        )
    yield from refused


def _of_rank(
    run: Run, ranks: Ranks, case: ParallelCase, inputs: Inputs, which: tuple[str, int, int, int]
) -> tuple[float, Cost, float, float]:
    """Milliseconds of one rank, and the cost, the imbalance and the seconds that its plan predicts.

    Layout, collectives and tensors of the rank are freed at the end of this function, before the next rank's are made.

    Args:
        which: the strategy, its nodes, the number of ranks, and which of them it is.
    """
    strategy, nodes, size, rank = which
    layout = make_plan(case, lone(rank, size, nodes, run.device), strategy, run.machine)
    assert layout.cost is not None
    ms = _local_ms(ranks, sharded(case, inputs, layout, rank).both)
    return ms, layout.cost, layout.imbalance, layout.predicted


def _links(run: Run, ranks: int) -> str:
    """The rates that links are modelled with."""
    machine, given = run.machine, run.spec["machine"]
    text = f"links {machine.link / 1e9:.0f} GB/s{'' if 'link' in given else ', assumed'}"
    if ranks > getattr(machine, "node", ranks):
        between = getattr(machine, "nic", machine.link)
        text += f"; between nodes {between / 1e9:.0f} GB/s{'' if 'nic' in given else ', assumed'}"
    return text


def _local_ms(ranks: Ranks, call: Callable[[], Any]) -> float:
    """Milliseconds of a forward and backward, after one that compiles and allocates and one that is recorded."""
    once_ms(ranks, call)
    once_ms(ranks, call)
    ms = once_ms(ranks, call)
    return once_ms(ranks, call, min(MOST_CALLS, round(MEASURED_MS / ms))) if 2 * ms < MEASURED_MS else ms
