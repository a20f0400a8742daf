"""One rank of the parallel suite, a process of its own: `python -m bench.runs.parallel_ranks SPEC RANK`.

SPEC is a JSON file of `bench.runs.parallel`, which starts all ranks and reads their messages. Messages are lines of
JSON in the file SPEC.RANK: the `begin` of a job, the step that a rank is `doing`, the job's `rows`, its `end`, the name
of a job that was `skipped`, or why the ranks are `lost`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cases.parallel import ASSUMED_FLOPS, Job, ParallelCase
from bench.peers.parallel_ours import (
    Call,
    Captured,
    draw,
    make_plan,
    nodes_of,
    one_gpu,
    reference,
    relative,
    row_axis,
    sharded,
    squared_errors,
)
from bench.record import ParallelMeasurement
from bench.runs.parallel_replay import replay
from bench.runs.parallel_run import PASSES, Rows, Run, chosen, row_of, timed
from bench.timing.ranks import Ranks, RanksLostError, free_memory, side_by_side_ms
from codegen.testing.calls import BOUND, Inputs
from generated.torch_parallel import Layout

LINK_MB = (1, 4, 16, 64, 256, 512)
SAME_BITS = ("o", "lse", "dq")
"""Results that have one GPU's bits under the strategies `EXACT`."""

EXACT = ("heads", "gather", "exchange")
CAPTURED_S = 0.2
"""If a step on one GPU takes at most this many seconds, by estimate, auto's strategy is also timed in a CUDA graph."""

MOST_ERROR = 1.1
"""Largest error of dk and dv over the error of one GPU."""


# ---------------------------------------------------------------------------------------------------------------- links


def links(run: Run, ranks: Ranks, _job: Job) -> Rows:
    """Bus bandwidth: bytes that a rank receives from the others in a second."""
    import torch.distributed as dist

    size, rank = ranks.size, ranks.rank
    for mb in (1,) if run.is_tiny else LINK_MB:
        run.say(doing=f"links, {mb} MB")
        count = mb * 2**20 // 2 // size
        whole, part = (torch.zeros(n, dtype=torch.bfloat16, device=run.device) for n in (count * size, count))
        given = torch.zeros_like(whole)

        def send_recv(given: Tensor = given, whole: Tensor = whole) -> None:
            pair = [
                dist.P2POp(dist.isend, given, (rank + 1) % size),
                dist.P2POp(dist.irecv, whole, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        def gather(whole: Tensor = whole, part: Tensor = part) -> None:
            dist.all_gather_into_tensor(whole, part)

        def scatter(whole: Tensor = whole, part: Tensor = part) -> None:
            dist.reduce_scatter_tensor(part, whole)

        def all_to_all(given: Tensor = given, whole: Tensor = whole) -> None:
            dist.all_to_all_single(whole, given)

        shared = (size - 1) / size
        calls = {
            "all-gather": (gather, shared),
            "reduce-scatter": (scatter, shared),
            "all-to-all": (all_to_all, shared),
            "send-receive": (send_recv, 1.0),
        }
        for name, (call, share) in calls.items():
            ms, note = ranks.attempt(functools.partial(_link_ms, ranks, call))
            rate = None if ms is None else mb * 2**20 * share / ms / 1e6
            times = {} if ms is None else {"call": ms}
            yield row_of(run, "links", f"{mb} MB", name, ms=times, gb_per_s=rate, note=note)


def _link_ms(ranks: Ranks, call: Callable[[], None]) -> float:
    """Milliseconds of a collective on the slowest rank, after one call that sets up its connections."""
    call()
    return max(side_by_side_ms(ranks, {"": call})[""])


# ----------------------------------------------------------------------------------------------------------------- ours


def exact(run: Run, ranks: Ranks, job: Job) -> Rows:
    """Compare bits and errors with those of one GPU, on a small case.

    Gradients are added in a fixed order, because otherwise no two calls have the same bits.
    """
    assert job.case is not None
    case = job.case.small()
    inputs = draw(case, run.device, run.dtype)
    one = one_gpu(case, inputs).results(deterministic=True)
    want = reference(case, inputs).results()
    alone = relative([squared_errors(case, one, want, None, 0)])
    names, refused = chosen(run, "exact", case, run.size)
    for strategy in names:
        run.say(doing=f"{case} by {strategy}")

        def compare(strategy: str = strategy) -> tuple[dict[str, bool], dict[str, float]]:
            layout = make_plan(case, _mesh(run, ranks, strategy), strategy, run.machine)
            got = sharded(case, inputs, layout, ranks.rank).results(deterministic=True)
            same = {}
            for name, x in got.items():
                axis = row_axis(case, name)
                same[name] = torch.equal(x, one[name] if axis < 0 else layout.shard(one[name], axis))
            every = ranks.gather([same, squared_errors(case, got, want, layout, ranks.rank)])
            bits = {name: all(each[0][name] for each in every) for name in same}
            return bits, relative([each[1] for each in every])

        both, note = ranks.attempt(compare)
        row = row_of(run, "exact", str(case), strategy, note=note)
        if both is not None:
            bits, errors = both
            ratios = {name: error / max(alone[name], 1e-12) for name, error in errors.items()}
            row = replace(row, bits=bits, errors=ratios, note=_fault(run, strategy, bits, errors, ratios))
        yield row
    yield from refused


def _fault(run: Run, strategy: str, bits: dict[str, bool], errors: dict[str, float], ratios: dict[str, float]) -> str:
    """What is wrong with exact results; "" for nothing.

    On a CPU bits are not compared, because calls of fewer rows add in another order.
    """
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= BOUND[run.dtype]:
        return f"WRONG against float32: {worst} is off by {errors[worst]:.1e}"
    if run.device != "cuda":
        return ""
    if strategy in EXACT and (other := [name for name in SAME_BITS if not bits[name]]):
        return f"not the bits of one GPU: {', '.join(other)}"
    less = [name for name in ("dk", "dv") if ratios[name] > MOST_ERROR]
    return f"less exact than one GPU: {', '.join(f'{name} {ratios[name]:.2f}x' for name in less)}" if less else ""


def ours(run: Run, ranks: Ranks, job: Job) -> Rows:
    """One GPU and every strategy, side by side."""
    case = job.case
    assert case is not None
    inputs = draw(case, run.device, run.dtype)
    calls: dict[str, Any] = {"one GPU": one_gpu(case, inputs)}
    run.say(doing=f"{case} on one GPU")
    _, note = ranks.attempt(calls["one GPU"].both)
    if note:
        yield row_of(run, "ours", str(case), "one GPU", note=note)
        return
    layouts: dict[str, Layout] = {}
    names, refused = chosen(run, "ours", case, run.size, job.implementations)
    for strategy in names:
        run.say(doing=f"{case} by {strategy}")

        def build(strategy: str = strategy) -> tuple[Layout, Call]:
            layout = make_plan(case, _mesh(run, ranks, strategy), strategy, run.machine)
            call = sharded(case, inputs, layout, ranks.rank)
            call.both()
            return layout, call

        built, note = ranks.attempt(build)
        if built is None:
            yield row_of(run, "ours", str(case), strategy, note=note)
        else:
            layouts[strategy], calls[strategy] = built
    # In longer steps the time of the host is hidden, so they need no graph.
    if run.device == "cuda" and names[0] in calls and case.flops("fwd+bwd") < ASSUMED_FLOPS * CAPTURED_S:
        run.say(doing=f"{case} by {names[0]}, captured")
        captured, note = ranks.attempt(lambda: Captured.of(calls[names[0]]))
        if captured is None:
            yield row_of(run, "ours", str(case), f"{names[0]}, CUDA graph", note=note)
        else:
            layouts[f"{names[0]}, CUDA graph"], calls[f"{names[0]}, CUDA graph"] = layouts[names[0]], captured
    run.say(doing=f"{case}, timing")
    times, note = ranks.attempt(lambda: _both_passes(ranks, calls))
    if times is None:
        yield row_of(run, "ours", str(case), "all", note=note)
        return
    one_ms = {which: sum(times[which]["one GPU"]) / run.size for which in PASSES}
    run.one_ms[str(case)] = one_ms
    for strategy, layout in layouts.items():
        remark = "chosen by auto" if strategy == names[0] else ""
        rank_ms = {which: times[which][strategy] for which in PASSES}
        row = row_of(run, "ours", str(case), strategy, planned=layout.imbalance, remark=remark)
        yield replace(timed(case, row, rank_ms, one_ms), predicted_ms=1e3 * layout.predicted)
    yield from refused


def _mesh(run: Run, ranks: Ranks, strategy: str) -> Any:
    """The mesh that a strategy needs. All ranks must call this together."""
    nodes = nodes_of(strategy, run.size, run.machine)
    if not nodes:
        return ranks.mesh
    from torch.distributed.device_mesh import init_device_mesh

    if nodes not in run.grids:
        run.grids[nodes] = init_device_mesh(run.device, (nodes, run.size // nodes), mesh_dim_names=("nodes", "cp"))
    return run.grids[nodes]


def _both_passes(ranks: Ranks, calls: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    return {
        "fwd": side_by_side_ms(ranks, {name: call.forward for name, call in calls.items()}),
        "fwd+bwd": side_by_side_ms(ranks, {name: call.both for name, call in calls.items()}),
    }


# ---------------------------------------------------------------------------------------------------------------- peers


def peers(run: Run, ranks: Ranks, job: Job) -> Rows:
    """torch's own context parallelism, on the inputs of ours; checked against one GPU."""
    assert job.case is not None
    inputs = draw(job.case, run.device, run.dtype)
    for name in job.implementations:
        yield _peer(run, ranks, job.case, inputs, name)


def _peer(run: Run, ranks: Ranks, case: ParallelCase, inputs: Inputs, name: str) -> ParallelMeasurement:
    from bench.peers.parallel_peers import BUILDERS, Peer

    run.say(doing=f"{case} by {name}")
    row = row_of(run, "peers", str(case), name)
    with contextlib.ExitStack() as stack:

        def build() -> Peer:
            peer: Peer = stack.enter_context(BUILDERS[name](case, inputs, ranks.mesh, ranks.rank))
            return peer

        peer, note = ranks.attempt(build)
        if peer is None:
            return replace(row, note=note)
        wrong, note = ranks.attempt(functools.partial(_peer_fault, run, ranks, case, inputs, peer))
        if wrong is None or wrong:
            return replace(row, note=note or wrong or "")
        run.say(doing=f"{case} by {name}, timing")
        times, note = ranks.attempt(functools.partial(_both_passes, ranks, {name: peer}))
    row = replace(row, remark=peer.remark, note=note)
    if times is None:
        return row
    return timed(case, row, {which: times[which][name] for which in PASSES}, run.one_ms.get(str(case), {}))


def _peer_fault(run: Run, ranks: Ranks, case: ParallelCase, inputs: Inputs, peer: Any) -> str:
    """The errors of a peer's o and dq against one GPU's; "" if they are right. The bound is twice ours."""
    call = one_gpu(case, inputs)
    want = {"o": call.forward().detach(), "dq": call.both()[0]}
    got = {"o": peer.forward().detach(), "dq": peer.both()[0]}
    errors = {}
    for name, x in got.items():
        whole = want[name].transpose(0, 1)[None] if case.documents else want[name]
        wanted = whole.index_select(2, peer.rows).float()
        errors[name] = float((x.float() - wanted).norm() / wanted.norm())
    every = ranks.gather(errors)
    worst = {name: max(each[name] for each in every) for name in errors}
    bad = [f"{name} is off by {error:.1e}" for name, error in worst.items() if not error <= 2 * BOUND[run.dtype]]
    return f"WRONG: {', '.join(bad)}" if bad else ""


# ---------------------------------------------------------------------------------------------------------- the process


PARTS: dict[str, Callable[[Run, Ranks, Job], Rows]] = {
    "links": links,
    "exact": exact,
    "ours": ours,
    "peers": peers,
    "replay": replay,
}


def _measured(run: Run, ranks: Ranks, job: Job) -> None:
    """Write each row as soon as it is found, because later calls may crash."""
    for row in PARTS[job.part](run, ranks, job):
        if run.rank == 0:
            run.say(rows=[asdict(row)])


def measure(run: Run, ranks: Ranks) -> None:
    """Measure every job for which there is time by the first rank's clock."""
    for job in run.todo():
        left = run.spec["deadline"] - time.time() if run.spec["deadline"] else float("inf")
        if not ranks.gather(left > job.seconds)[0]:
            run.say(skipped=job.name)
            continue
        run.say(begin=job.name)
        _, note = ranks.attempt(functools.partial(_measured, run, ranks, job))
        if note and run.rank == 0:
            run.say(rows=[asdict(row_of(run, job.part, str(job.case or job.part), "all", note=note))])
        run.say(end=job.name)
        free_memory(run.device)


@contextlib.contextmanager
def joined(run: Run) -> Iterator[Ranks]:
    """The ranks, as a process group on this host; a single rank has no group."""
    spec, rank = run.spec, run.rank
    if run.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if run.size == 1:
        yield Ranks(0, 1, run.device, None, None, spec["patience"])
        return
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    dist: Any = distributed  # some of whose names are in no __all__

    patience = timedelta(seconds=spec["patience"])
    store = dist.TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=patience)
    own_device: dict[str, Any] = {"device_id": torch.device("cuda", rank)} if run.device == "cuda" else {}
    dist.init_process_group(
        "nccl" if run.device == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=run.size,
        timeout=patience,
        **own_device,
    )
    mesh = init_device_mesh(run.device, (run.size,), mesh_dim_names=("cp",))
    # A connection of its own: a request that waits blocks all others on the same connection.
    said = dist.PrefixStore("said", dist.TCPStore("127.0.0.1", spec["port"], is_master=False, timeout=patience))
    yield Ranks(rank, run.size, run.device, said, mesh, spec["patience"])
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 3 if the ranks can no longer work together."""
    path, rank = Path(arguments[0]), int(arguments[1])
    run = Run(json.loads(path.read_text(encoding="utf-8")), rank, Path(f"{path}.{rank}"))
    try:
        with joined(run) as ranks:
            measure(run, ranks)
    except RanksLostError as error:
        run.say(lost=str(error))
        sys.stderr.flush()
        # Skip the interpreter's shutdown, which would wait for the other ranks.
        os._exit(3)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
