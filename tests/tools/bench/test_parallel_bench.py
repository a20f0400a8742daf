"""The suite `parallel`: its cases, a run of two processes on the CPU, ranks that fail, and its tables."""

from __future__ import annotations

import gc
import importlib.util
import re
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")

import torch
from torch import distributed

from bench import __main__ as command
from bench import record
from bench.cases import parallel as cases
from bench.options import PARALLEL_PARTS, parser
from bench.peers.parallel_ours import draw, machine_of, nodes_of, one_gpu, reference, strategies
from bench.peers.replayed import lone
from bench.record import ParallelMeasurement
from bench.report.parallel import rates, report
from bench.runs import parallel, parallel_replay
from bench.runs.parallel_replay import replay
from bench.runs.parallel_run import Run
from bench.timing.clock import Clock
from bench.timing.ranks import Ranks, RanksLostError
from docs.generators.benchmarks import OTHER_TABLES

needs_processes = pytest.mark.skipif(
    not distributed.is_available(), reason="this build of torch has no torch.distributed"
)
SPEC: dict[str, Any] = {"ranks": 1, "device": "cpu", "tiny": True, "machine": {}, "one_ms": {}, "patience": 20.0}


# ---------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("variant", ["causal", "window", "gpt_oss", "documents"])
def test_pairs_are_the_scores_that_the_mask_keeps(variant: str) -> None:
    seq = 300
    case = {
        "causal": cases.causal(seq),
        "window": cases.window(seq, size=17),
        "gpt_oss": cases.other("gpt_oss", seq),
        "documents": cases.documents(seq),
    }[variant]
    rows, keys = torch.arange(seq)[:, None], torch.arange(seq)
    kept = rows >= keys
    if variant in ("window", "gpt_oss"):
        kept &= rows - keys < {"window": 17, "gpt_oss": 128}[variant]
    if case.documents:
        ids = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents))
        kept &= ids[:, None] == ids
    assert case.pairs == int(kept.sum())


def test_documents_fill_the_sequence_also_when_shrunk() -> None:
    for case in (cases.documents(131072), cases.lognormal(131072)):
        for each in (case, case.small(), cases.tiny(case)):
            assert sum(each.documents) == each.seq == each.cu_seqlens[-1]
    assert len(cases.lognormal(131072).documents) > 20


@pytest.mark.parametrize("is_tiny", [False, True])
def test_jobs_have_names_of_their_own(is_tiny: bool) -> None:
    found = [*cases.jobs(2, is_tiny=is_tiny), *cases.replays((8, 64), is_tiny=is_tiny)]
    assert len({job.name for job in found}) == len(found)
    assert {job.part for job in found} == {*PARALLEL_PARTS, "replay"} - {"jax"}


def test_nine_minutes_of_two_gpus_have_all_but_the_last_cases() -> None:
    found = cases.jobs(2)
    total = 0.0
    for job in found[:-1]:
        total += job.seconds
    assert found[-1].case == cases.causal(4 * 131072)
    assert total < 9 * 60 - parallel.JAX_S


def test_options_name_rates_and_parts() -> None:
    options = parser().parse_args(
        ["--suite", "parallel", "--machine", "link=3.3e11,forward=6e14", "--parts", "links,ours", "--replay", "8,64"]
    )
    assert (options.machine, options.parts, options.replay) == (
        {"link": 3.3e11, "forward": 6e14},
        ("links", "ours"),
        (8, 64),
    )
    assert options.parts[0] in cases.PARTS == PARALLEL_PARTS
    for wrong in ("link", "link=-1", "link=fast"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--machine", wrong])


def test_a_mesh_of_two_dims_is_for_one_strategy() -> None:
    machine = machine_of({"link": 1e11})
    assert (machine.link, machine.latency) == (1e11, type(machine)().latency)
    assert [nodes_of("2d", ranks, machine) for ranks in (2, 4, 5, 8, 16, 64)] == [0, 2, 0, 2, 2, 8]
    assert nodes_of("gather", 64, machine) == 0


def test_a_rate_that_no_machine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--suite", "parallel", "--quick", "--machine", "lnik=1e9"]) == 1
    assert "no such rate: lnik; there are" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- a run


@needs_processes
def test_quick_run_measures_two_processes_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    only = "links|exact 12 documents|ours causal S32$|cp-flash" + ("|jax" if importlib.util.find_spec("jax") else "")
    arguments = ["--suite", "parallel", "--quick", "--only", only, "--peers", "cp-flash", "--json", str(path)]
    if torch.cuda.is_available():
        pytest.skip("a machine with GPUs measures those")
    assert command.main(arguments) == 0
    rows = record.load(path).others["parallel"]
    by_section: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_section.setdefault(row["section"], []).append(row)
    assert {row["implementation"] for row in by_section["ours"]} >= set(strategies()) - {"ring"}
    assert all(row["ranks"] == 2 and row["case"].endswith("P2") for row in rows)
    assert all(row["ms"]["fwd+bwd"] > 0 and len(row["rank_ms"]["fwd"]) == 2 for row in by_section["ours"] if row["ms"])
    heads = next(row for row in by_section["exact"] if row["implementation"] == "heads")
    assert set(heads["bits"]) == {"o", "lse", "dq", "dk", "dv"}
    assert all(heads["bits"].values())
    assert all(0.5 < row["errors"]["dk"] < 1.5 for row in by_section["exact"] if row["errors"])
    assert {row["implementation"] for row in by_section["links"]} >= {"all-gather", "send-receive"}
    assert all(row["gb_per_s"] > 0 for row in by_section["links"])
    # torch's own context parallelism does not support CPUs: the row states this, and the run continues.
    assert all(row["note"] for row in by_section["peers"])
    assert not any(row["note"] for row in rows if row["section"] != "peers")
    if "jax" in only:
        assert {row["implementation"] for row in by_section["jax"]} == {"ours, auto"}
    printed = capsys.readouterr().out
    assert "Ours over several GPUs" in printed
    assert "As measured here: --machine link=" in printed
    assert "chosen by auto" in "\n".join(OTHER_TABLES["parallel"](rows))


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hides the objects of earlier tests from the garbage collector. A measurement calls it, often for a second each in
    a process that has run thousands of tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_replay_marks_what_is_modelled(tmp_path: Path) -> None:
    spec = {**SPEC, "machine": {"link": 1e9}}
    run = Run(spec, 0, tmp_path / "lines")
    case = cases.tiny(cases.documents(131072))
    rows = list(replay(run, Ranks(0, 1, "cpu", None, None, 20.0), cases.Job(part="replay", case=case, ranks=4)))
    measured = [row for row in rows if row.ms]
    assert {"gather", "exchange"} <= {row.implementation for row in measured}
    for row in measured:
        assert (row.source, row.ranks, row.case) == ("modelled", 4, f"{case} P4")
        assert row.ms["fwd+bwd"] > row.ms["kernels"] == max(row.rank_ms["kernels"])
        assert "links 1 GB/s" in row.remark
        assert "assumed" not in row.remark
    # Two key heads are repeated for four ranks. Eight ranks cannot split four query heads: `heads` is refused.
    gather = next(row for row in measured if row.implementation == "gather")
    assert len(gather.rank_ms["kernels"]) == 4
    refused = replay(run, Ranks(0, 1, "cpu", None, None, 20.0), cases.Job(part="replay", case=case, ranks=8))
    heads = next(row for row in refused if row.implementation == "heads")
    assert (heads.ms, heads.note) == ({}, "")
    assert heads.remark.startswith("refused: ")
    text = report([asdict(row) for row in rows])
    assert "modelled, links 1 GB/s" in text


@pytest.mark.usefixtures("few_objects")
def test_replay_has_the_tensors_of_one_rank_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a rank begins, the collectives of earlier ranks are freed, and so are their buffers and all tensors."""
    of_before: list[weakref.ref[Any]] = []
    counts: dict[bool, list[int]] = {False: [], True: []}

    def watched(rank: int, size: int, nodes: int, device: str) -> Any:
        assert not [ref for ref in of_before if ref() is not None]
        found = lone(rank, size, nodes, device)
        of_before.extend(map(weakref.ref, found if nodes else [found]))
        counts[bool(nodes)].append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        return found

    monkeypatch.setattr(parallel_replay, "lone", watched)
    case = cases.tiny(cases.documents(131072))
    job = cases.Job(part="replay", case=case, ranks=4)
    gc.collect()
    gc.disable()  # inside a strategy, reference counts must free everything
    try:
        rows = list(replay(Run(SPEC, 0, tmp_path / "lines"), Ranks(0, 1, "cpu", None, None, 20.0), job))
    finally:
        gc.enable()
    assert {"heads", "gather", "exchange", "ring", "2d"} == {row.implementation for row in rows if row.ms}
    assert not any(row.note for row in rows)
    assert len(of_before) > 4 * 3
    assert {*counts[False], *counts[True]} == {counts[False][0]}


def test_references_compute_the_same_as_ours() -> None:
    for case in (cases.tiny(cases.lognormal(32768)), cases.tiny(cases.other("forgetting", 32768))):
        inputs = draw(case, "cpu", torch.float32)
        got, want = one_gpu(case, inputs).results(), reference(case, inputs).results()
        assert set(got) == set(want)
        assert want["o"].dtype == torch.float64
        for name, x in got.items():
            assert torch.allclose(x.double(), want[name], atol=1e-4), name


# ------------------------------------------------------------------------------------------------------ ranks that fail


def of_two_ranks(patience: float, of_rank: Callable[[Ranks], Any]) -> list[Any]:
    """The result or the error of `of_rank` on each of two ranks, which are threads."""
    dist: Any = distributed  # TCPStore is in no __all__
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("127.0.0.1", host.port, is_master=False) for _ in range(2)]

    def run(rank: int) -> Any:
        try:
            return of_rank(Ranks(rank, 2, "cpu", stores[rank], None, patience))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@needs_processes
def test_an_error_of_one_rank_is_one_of_all_and_they_go_on() -> None:
    def of_rank(ranks: Ranks) -> tuple[Any, ...]:
        def inner() -> list[int]:
            if ranks.rank == 1:
                raise ValueError("no room\nand more")
            return ranks.gather(ranks.rank)

        def outer() -> tuple[Any, str]:
            return ranks.attempt(inner)

        first = ranks.attempt(outer)
        return first, ranks.attempt(lambda: ranks.gather(ranks.rank)), ranks.gather("end")

    begun = time.monotonic()
    for first, second, last in of_two_ranks(30.0, of_rank):
        (found, note), outer_note = first
        assert (found, outer_note) == (None, "")
        assert note == "ValueError: no room"
        assert second == ([0, 1], "")
        assert last == ["end", "end"]
    assert time.monotonic() - begun < 15


@needs_processes
def test_a_silent_rank_ends_the_others() -> None:
    gone = threading.Event()

    def of_rank(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            gone.wait(20)
            return None
        try:
            return ranks.attempt(lambda: ranks.gather(0))
        finally:
            gone.set()

    error, _ = of_two_ranks(1.0, of_rank)
    assert isinstance(error, RanksLostError)
    assert "no answer of ranks [1]" in str(error)


FAKE = """
    import json, os, sys, time
    from pathlib import Path

    path, rank = sys.argv[1], sys.argv[2]
    spec = json.loads(Path(path).read_text())
    with open(f"{path}.{rank}", "w") as file:
        def say(**what):
            print(json.dumps(what), file=file, flush=True)
        for job in spec["jobs"]:
            say(begin=job)
            if "S32768" in job:
                if rank == "1":
                    print("a crash", file=sys.stderr, flush=True)
                    os._exit(7)
                time.sleep(60)
            if "S16384" in job:
                time.sleep(60)
            say(rows=[ROW] if rank == "0" else [])
            say(end=job)
"""


@needs_processes
def test_a_crash_and_a_hang_cost_their_own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = asdict(ParallelMeasurement(section="ours", case="some P2", implementation="gather", ranks=2))
    (tmp_path / "fake_ranks.py").write_text(textwrap.dedent(FAKE).replace("ROW", repr(row)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(parallel, "RANKS_MODULE", "fake_ranks")
    made = parallel.plan(2, "cuda", parts=("ours",), only=re.compile(r"causal|window"))
    what = replace(made, silence=1.5)
    kept: list[int] = []
    begun = time.monotonic()
    right, skipped = parallel.run(what, lambda rows: kept.append(len(rows)), Clock())
    assert time.monotonic() - begun < 20
    assert (right, skipped) == (False, [])
    assert len(kept) == len(what.jobs)


@needs_processes
def test_a_run_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_ranks.py").write_text(textwrap.dedent(FAKE).replace("ROW", "{}"), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(parallel, "RANKS_MODULE", "fake_ranks")
    monkeypatch.setattr(parallel, "ENDING_S", 1.0)
    what = parallel.plan(2, "cuda", parts=("ours",), only=re.compile("causal S16384"))
    begun = time.monotonic()
    rows: list[dict[str, Any]] = []
    right, _ = parallel.run(what, rows.extend, Clock(minutes=3 / 60))
    assert time.monotonic() - begun < 10
    assert not right
    assert rows[-1]["note"] == "out of time"


@needs_processes
def test_no_job_starts_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "RANKS_MODULE", "no_such_module")
    what = parallel.plan(2, "cuda", parts=("ours",))
    right, skipped = parallel.run(what, lambda rows: None, Clock(minutes=0.01))
    assert right
    assert skipped == [job.name for job in what.jobs]


# --------------------------------------------------------------------------------------------------------------- tables


def test_rates_for_the_next_run_come_from_what_was_measured() -> None:
    one = {"fwd": 2.0, "fwd+bwd": 7.0}
    causal = ParallelMeasurement(
        section="ours",
        case="causal S1 P2",
        implementation="heads",
        ranks=2,
        ms={"fwd+bwd": 3.5},
        one_ms=one,
        tflops={"fwd+bwd": 1400.0},
    )
    link = ParallelMeasurement(section="links", case="1 MB P2", implementation="all-gather", ranks=2, gb_per_s=300.0)
    # 4.9e12 operations: the forward's 2 of 7 parts take 2 ms, the backward's 5 of 7 take 5 ms.
    assert rates([asdict(causal), asdict(link)]) == "forward=7e+14,backward=7e+14,link=3e+11"


def test_a_peer_stands_beside_what_auto_chose() -> None:
    def row(section: str, implementation: str, ms: float, remark: str = "") -> dict[str, Any]:
        named = ParallelMeasurement(section=section, case="causal S1 P2", implementation=implementation, ranks=2)
        return asdict(replace(named, ms={"fwd+bwd": ms}, remark=remark))

    rows = [row("ours", "heads", 2.0, "chosen by auto"), row("ours", "gather", 1.0), row("peers", "cp-cudnn", 3.0)]
    (line,) = [line for line in report(rows).splitlines() if "cuDNN" in line]
    assert line.split()[-1] == "1.50"
