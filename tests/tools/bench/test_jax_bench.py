"""The JAX benchmark's own logic: its cases, which results are right, how it continues after failures, its table."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
pytest.importorskip("jax", reason="the JAX benchmark needs JAX")

import jax
import jax.numpy as jnp

from bench import __main__ as command
from bench.cases.case import Case
from bench.cases.packed import TOKENS
from bench.options import JAX_CASES, parser
from bench.peers import jax_peers, kvax_peer
from bench.peers.jax_peers import BUILDERS, OURS, JaxCase
from bench.peers.torch_peers import build
from bench.record import Results
from bench.runs import in_jax
from bench.runs.in_jax import JaxMeasurement, line
from bench.timing import first_call, loops
from bench.timing.clock import Clock
from codegen.testing.golden import Shape

DOCUMENTS = JaxCase(name="documents", rows=((5, 30, 13), (20, 1, 27)), heads=(4, 2), dim=16)
DENSE = JaxCase(name="dense", rows=((48,), (48,)), heads=(4, 2), dim=16)
FULL = JaxCase(name="full", rows=((32,), (32,)), heads=(2, 2), dim=16, variant="full", dtype="float16")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jax_peers, "CHECK_ROWS", 24)
    monkeypatch.setattr(loops, "ROUND_S", 1e-4)
    yield
    jax_peers.draw.cache_clear()
    in_jax.measured.cache_clear()
    jax_peers.expected_results.cache_clear()


def row(implementation: str, **more: Any) -> JaxMeasurement:
    return JaxMeasurement(section="kvax", case="some", implementation=implementation, **more)


# ---------------------------------------------------------------------------------------------------------------- cases


def test_documents_are_those_of_the_packed_suite() -> None:
    case = in_jax.documents(4096, TOKENS // 4096)
    assert case.name == "12 documents B32 H32/8 S4096 D128"
    assert {len(row) for row in case.rows} == {12}
    assert sum(map(sum, case.rows)) == TOKENS


def test_work_is_that_of_unmasked_scores() -> None:
    case = JaxCase(name="", rows=((1, 2), (3, 0)), heads=(4, 2), dim=16)
    assert case.flops("fwd") == 4 * 16 * 4 * (1 + 3 + 6)
    whole = JaxCase(name="", rows=((3,),), heads=(4, 2), dim=16, variant="full")
    assert whole.flops("fwd") == pytest.approx(4 * 16 * 4 * 9)
    assert in_jax.unmasked_tflops(whole, {"fwd": 1e-9, "fwd+bwd": 1e-9})["fwd+bwd"] == pytest.approx(
        3.5 * whole.flops("fwd")
    )


def test_all_parts_can_be_asked_for() -> None:
    assert tuple(in_jax.SECTIONS) == JAX_CASES
    assert parser().parse_args(["--cases", "first,same"]).cases == ("first", "same")
    with pytest.raises(SystemExit):
        parser().parse_args(["--cases", "causal"])


# --------------------------------------------------------------------------------------------------------- right, wrong


@pytest.mark.parametrize("case", [DOCUMENTS, DENSE, FULL], ids=lambda case: case.name)
def test_ours_is_taken_for_right(case: JaxCase) -> None:
    for name in OURS[1:] if case is DOCUMENTS else OURS[:1]:
        assert jax_peers.fault(case, name, BUILDERS[name](case)) == ""


def test_what_is_wrong_is_found() -> None:
    """Two faults: documents that see each other, and one NaN among small errors."""
    assert jax_peers.fault(DOCUMENTS, "ours", BUILDERS["ours"](DOCUMENTS)).startswith("WRONG against float32: ")
    program = BUILDERS["ours"](DENSE)
    broken = replace(program, op=lambda q, k, v: program.op(q, k, v).at[-1, -1, 0, 0].set(jnp.nan))
    assert jax_peers.fault(DENSE, "ours", broken) == "WRONG against float32: o is off by nan"


def test_the_ops_of_torch_and_jax_are_compared_on_the_same_tensors() -> None:
    case = Case(variant="forgetting", shape=Shape(batch=2, heads=4, kv_heads=2, seq=40, dim=16))
    inputs = in_jax.drawn(case, "cpu")
    runner, program = build("ours", case, inputs), in_jax.twin(case, inputs)
    bits, wrong = in_jax.compared(runner, program)
    assert (list(bits), wrong) == (["o", "dq", "dk", "dv", "dg"], "")
    slower = replace(program, op=lambda g, **rest: program.op(g=g / 2, **rest))
    bits, wrong = in_jax.compared(runner, slower)
    assert not any(bits.values())
    assert wrong.startswith("WRONG: ")


def test_chained_calls_feed_one_another() -> None:
    program = BUILDERS["ours"](FULL)
    q, k, v = program.leaves.values()
    twice = program.op(program.op(q, k, v), k, v)
    assert jnp.allclose(program.chained(2)["fwd"]()[0], twice, atol=1e-2)
    o, dq, dk, dv = program.both()
    again = replace(program, leaves={"q": dq, "k": dk, "v": dv}, do=o).both()
    for found, wanted in zip(program.chained(2)["fwd+bwd"](), (*again[1:], again[0]), strict=True):
        assert jnp.allclose(found, wanted, atol=1e-2)


# -------------------------------------------------------------------------------------------------------------- running


def test_what_fails_is_said_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: JaxCase) -> Any:
        raise ModuleNotFoundError("No module named 'kvax'\nand more")

    monkeypatch.setitem(in_jax.PEERS, "kvax", absent)
    monkeypatch.setitem(in_jax.PEERS, "kvax patched", lambda case: in_jax.PEERS["ours"](case))
    failed, wrong, fine = in_jax.timed("kvax", DOCUMENTS, ("kvax", "kvax patched", "ours packed"))
    assert (failed.ms, failed.note) == ({}, "ModuleNotFoundError: No module named 'kvax'")
    assert not wrong.ms
    assert wrong.note.startswith("WRONG")
    assert list(fine.ms) == ["fwd", "fwd+bwd", "schedule"]
    assert (fine.tflops["fwd"] > 0, fine.note) == (True, "")


def test_two_parts_share_what_they_both_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = in_jax.timed("kvax", DENSE, ("ours",))
    monkeypatch.setitem(in_jax.PEERS, "ours", None)
    assert list(in_jax.timed("cudnn", DENSE, ("ours",))) == [replace(one, section="cudnn")]


def test_a_round_is_many_calls_and_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is faked and advances a microsecond per reading, so that the load of the machine does not matter."""
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) * 1e-6)
    calls: list[int] = []
    waits: list[None] = []
    assert loops.loop_ms(lambda: calls.append(1), waits.append) > 0
    assert len(waits) == 2 + loops.ROUNDS
    assert len(calls) == 2 + loops.ROUNDS * loops.MOST_CALLS


def test_rows_are_kept_after_each_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def part(*rows: JaxMeasurement) -> Any:
        return lambda: iter(rows)

    monkeypatch.setitem(in_jax.SECTIONS, "same", part(row("ours", ms={"fwd": 1.0}, tflops={"fwd": 2.0})))
    monkeypatch.setitem(in_jax.SECTIONS, "first", part(row("kvax", note="absent")))
    kept: list[int] = []

    def keep(rows: Sequence[JaxMeasurement]) -> None:
        kept.append(len(rows))

    assert in_jax.run(["same", "first"], keep)
    assert kept == [1, 2]
    assert "absent" in capsys.readouterr().out
    monkeypatch.setitem(in_jax.SECTIONS, "first", part(row("ours packed", note="WRONG")))
    assert not in_jax.run(["first"], keep)


def test_the_command_writes_what_there_is_after_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    monkeypatch.setattr(in_jax, "require_gpu", lambda: None)

    def first() -> Iterator[JaxMeasurement]:
        assert [each["implementation"] for each in json.loads(path.read_text())["jax"]] == ["ours"]
        yield row("cold cache")

    monkeypatch.setitem(in_jax.SECTIONS, "same", lambda: iter([row("ours")]))
    monkeypatch.setitem(in_jax.SECTIONS, "first", first)
    options = parser().parse_args(["--cases", "same,first", "--json", str(path)])
    results = Results()
    assert command.run_jax(options, results, partial(command.keep_results, options, results), Clock())
    assert [each["implementation"] for each in json.loads(path.read_text())["jax"]] == ["ours", "cold cache"]


def test_the_best_blocks_of_pallas_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": 1.0, "pallas default": 3.0, "pallas 128x128, 64x64": 2.0}
    monkeypatch.setattr(in_jax, "PALLAS_BLOCKS", {name.removeprefix("pallas "): None for name in list(times)[1:]})
    monkeypatch.setattr(in_jax, "ours", lambda case: None)
    monkeypatch.setattr(in_jax, "pallas_program", lambda case, blocks: None)
    monkeypatch.setattr(
        in_jax, "_chained_ms", lambda case, name, program: ({"fwd": times[name], "fwd+bwd": 9 - times[name]}, "")
    )
    *_, best = in_jax.pallas()
    assert best.ms == {"fwd": 2.0, "fwd+bwd": 6.0}
    assert best.remark == "pallas 128x128, 64x64, pallas default"


def test_a_row_names_what_it_is_compared_with() -> None:
    ours = row("ours packed", ms={"fwd": 2.0, "fwd+bwd": 4.0, "schedule": 0.5}, tflops={"fwd": 100.0, "fwd+bwd": 90.0})
    peer = row("kvax", ms={"fwd": 3.0, "fwd+bwd": 8.0}, tflops={"fwd": 66.0, "fwd+bwd": 45.0}, note="as told")
    text = line(peer, [ours, replace(ours, case="other"), replace(peer, implementation="cudnn")])
    assert [cell.split() for cell in text.split("|")][1:] == [
        ["fwd", "3.000", "ms", "66", "TF"],
        ["fwd+bwd", "8.000", "ms", "45", "TF"],
        ["1.50", "/", "2.00", "of", "ours", "packed"],
        ["as", "told"],
    ]
    assert "schedule 0.500 ms" in line(ours, [])
    assert line(row("ours", same_bits={"o": True, "dq": True}), []).endswith("same bits: o, dq")
    assert line(row("ours", same_bits={"o": True, "dq": False}), []).endswith("OTHER BITS: dq")


# ------------------------------------------------------------------------------------------------------------ processes


def test_the_first_call_is_timed_in_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = first_call.phases(32)
    assert list(seconds) == [
        "import jax",
        "first array",
        "import causal",
        "first forward",
        "first gradient",
        "second gradient",
    ]
    assert min(seconds.values()) >= 0
    monkeypatch.setattr(sys, "executable", "false")
    (failed,) = in_jax.first()
    assert failed.note == "RuntimeError: cold cache: the process ended with 1: no output"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_imports_are_timed_in_a_fresh_process(framework: str) -> None:
    seconds = first_call.in_process(["imports", framework], {})
    assert list(seconds) == ["framework", *first_call.IMPORT_BARS_S]
    # Next to other tests a process may wait for long: the limits themselves are those of a quiet machine.
    assert seconds["package"] + seconds["first variant"] < 10 * sum(first_call.IMPORT_BARS_S.values())


def test_what_is_timed_is_not_imported_beforehand() -> None:
    code = "import sys, bench.timing.first_call; print(sorted({'jax', 'torch', 'numpy', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_kvax_gets_its_hints_back() -> None:
    """Only integers that are divisible by 16 get hints; the patched attribute is restored."""
    given: list[dict[Any, Any]] = []

    def source(_: Any, **rest: Any) -> None:
        given.append(rest["attrs"])

    def compile_kernel(*_: Any, **options: Any) -> tuple[Any, Any]:
        lib.tc.ASTSource(None, signature={}, constexprs={}, attrs={(0,): "an array's"})
        return "kernel", options

    lib = SimpleNamespace(get_or_create_triton_kernel=compile_kernel, tc=SimpleNamespace(ASTSource=source))
    tc = lib.tc
    scalars = [(1, "i32", 128), (2, "i32", 1), (3, "B", False), (4, "fp64", 16.0), (5, "i64", 2**40), (6, "i32", 0)]
    assert kvax_peer.with_hints(lib)(None, "cuda", None, [], scalars, num_warps=8) == ("kernel", {"num_warps": 8})
    hint = [["tt.divisibility", 16]]
    assert given == [{(0,): "an array's", (1,): hint, (5,): hint, (6,): hint}]
    assert lib.tc is tc


def test_jax_leaves_memory_to_torch() -> None:
    code = "import os, bench.runs.in_jax; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "false\n"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(RuntimeError):
        in_jax.require_gpu()
