"""The suite `models`: its cases, a run of tiny models on the CPU, failures as rows, and the table of the site."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
pytest.importorskip("transformers", reason="the suite trains models of transformers")

import torch

from bench import __main__ as command
from bench import record
from bench.cases.models import LAYERS, ModelCase, cases, chosen
from bench.runs.models import OUT_OF_MEMORY, QUICK, ModelMeasurement, measure, print_host, said
from docs.generators.benchmarks import OTHER_TABLES

IMPLEMENTATIONS = ("ours", "sdpa", "flex")
CASE = ModelCase(
    name="case", architecture="LlamaForCausalLM", config={}, seq=8, vocabulary=8, implementations=IMPLEMENTATIONS
)


def test_cases_have_published_shapes_and_eight_layers() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert {case.layers for case in every} == {LAYERS}
    assert all(sum(case.documents) == case.seq for case in every if case.documents)
    found = chosen(every, re.compile("gemma-2-2b.*S32768"), ["flex"])
    assert [(case.tokens, case.implementations) for case in found] == [(32768, ("ours", "flex"))]


def test_quick_run_trains_tiny_models_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    arguments = [
        "--suite",
        "models",
        "--quick",
        "--peers",
        "sdpa,xla",
        "--only",
        "gemma|gpt-oss|flax",
        "--json",
        str(path),
    ]
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU trains there")
    assert command.main(arguments) == 0
    rows = record.load(path).others["models"]
    assert {row["note"] for row in rows if row["implementation"] == "ours"} == {""}
    steps = [row for row in rows if row["host_us"] is None]
    assert all(row["ms"] > 0 and row["tokens_per_s"] > 0 for row in steps if row["implementation"] != "sdpa")
    refused = [row for row in steps if row["note"]]
    assert [(row["implementation"], row["case"]) for row in refused] == [("sdpa", "tiny gpt-oss-20b, dense MLP B2 S64")]
    assert "does not support an attention implementation" in refused[0]["note"]
    assert "tokens/s" in capsys.readouterr().out
    steps_table, calls_table = [part for part in OTHER_TABLES["models"](rows) if part.count("\n") > 2]
    assert "gemma-2-2b" in steps_table
    assert "op left out" in calls_table


@pytest.mark.parametrize(
    ("device", "us", "verdict"), [("cuda", 114.0, "OK"), ("cuda", 116.0, "TOO SLOW"), ("cpu", 116.0, "")]
)
def test_python_of_a_layer_is_judged_beside_a_gpu(
    device: str, us: float, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"ours": us, "op alone": 100.0, "ours, op left out": 13.0, "clock": 3.0}
    rows = [ModelMeasurement(case="call", implementation=name, host_us=value) for name, value in known.items()]
    assert print_host(rows, device) is (verdict != "TOO SLOW")
    figure = us - 100 if device == "cuda" else 10
    said = f"call: {figure:.1f} us beside the op's own call, target 15 beside a GPU"
    assert capsys.readouterr().out.endswith(f"{said}{': ' * bool(verdict)}{verdict}\n")


class Failing:
    """A trainee whose peers fail in ways in which they fail on a GPU."""

    def __init__(self) -> None:
        self.released = 0

    def use(self, implementation: str) -> Callable[[], float]:
        def step() -> float:
            if implementation == "sdpa":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB")
            if implementation == "flex":
                raise RuntimeError("no such kernel\nand more")
            return 2.0

        return step

    def wait(self, loss: Any) -> float:
        return float(loss)

    def peak_gib(self, step: Callable[[], Any]) -> float | None:
        step()
        return 1.0

    def release(self) -> None:
        self.released += 1


def test_a_failing_implementation_is_a_row_and_the_others_go_on() -> None:
    trainee = Failing()
    ours, sdpa, flex = measure(CASE, "cpu", QUICK, lambda *_: trainee)
    assert (ours.note, ours.peak_gib, len(ours.rounds)) == ("", 1.0, 5)
    assert (sdpa.note, sdpa.ms) == (OUT_OF_MEMORY, None)
    assert flex.note == "RuntimeError: no such kernel"
    assert trainee.released == 2


def test_a_model_that_does_not_fit_is_out_of_memory_in_every_row() -> None:
    def make(_case: ModelCase, _device: str) -> Failing:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert [row.note for row in measure(CASE, "cpu", QUICK, make)] == [OUT_OF_MEMORY] * 3
    assert said(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")) == OUT_OF_MEMORY


def test_a_loss_that_no_other_has_is_wrong() -> None:
    class Wrong(Failing):
        def use(self, implementation: str) -> Callable[[], float]:
            return lambda: 3.0 if implementation == "ours" else 2.0

    ours, *_ = measure(CASE, "cpu", QUICK, lambda *_: Wrong())
    assert ours.note.startswith("WRONG: a first loss of 3.0000")
