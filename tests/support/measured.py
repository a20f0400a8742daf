"""A case of the benchmark, and results as tests make them up."""

from __future__ import annotations

from bench.cases.case import Case
from bench.record import PASSES, Cost, Measurement, Results
from codegen.testing.golden import Shape

CASE = Case(variant="causal", shape=Shape(batch=1, heads=2, kv_heads=2, seq=32, dim=16), peers=("flex", "cudnn", "fa2"))


def rows_of(case: Case, ms: float = 1.0) -> list[Measurement]:
    names = ("ours", *case.peers)
    return [
        Measurement(case=case.name, which=which, implementation=name, ms=ms, tflops=case.flops(which) / ms / 1e9)
        for name in names
        for which in PASSES
    ]


def some_results() -> Results:
    """Ours at 2 ms beside peers at 1 and 3 ms."""
    case = Case(variant="causal", shape=Shape(batch=8, heads=16, kv_heads=16, seq=2048, dim=128), peers=())
    rows = rows_of(case, 2.0)
    for name, ms in (("flex-max", 3.0), ("fa4", 1.0)):
        rows += [
            Measurement(case=case.name, which=which, implementation=name, ms=ms, tflops=case.flops(which) / ms / 1e9)
            for which in PASSES
        ]
    rows.append(Measurement(case=case.name, which="fwd", implementation="fla", note="OutOfMemoryError: too much"))
    return Results(
        machine={"gpu": "NVIDIA H100 80GB HBM3"},
        suites={"fa3": [case.name]},
        measurements=rows,
        costs=[Cost(case=case.name, implementation="ours", peak_mib=12.0, first_s=0.5)],
        skipped=["full B1 H1 S1 D64"],
        missing={"cudnn": "nothing"},
    )


def changed(results: Results, old: str, new: str, factor: float = 1.0) -> list[Measurement]:
    """The measurements of ours under another name, at `factor` times the rate."""
    return [
        Measurement(
            case=m.case.replace(old, new),
            which=m.which,
            implementation=m.implementation,
            ms=1.0,
            tflops=factor * (m.tflops or 0.0),
        )
        for m in results.measurements
        if m.implementation == "ours" and old in m.case
    ]
