"""Random variants and calls, from a fixed seed, against an evaluator that shares no code with the generator.

`make fuzz` runs thousands of them; `tests/fuzz/README.md` says what is drawn, and how to repeat a failure.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.fuzz.processes import run_all
from tests.fuzz.session import Outcome, Plan
from tests.support.cases import INTERPRET

pytest.importorskip("jinja2", reason="rendering needs jinja2")
pytest.importorskip("yaml", reason="rendering needs pyyaml")
pytest.importorskip("ruff", reason="rendering needs ruff, the formatter")

SEED = 21
CHUNK = 10

FAMILIES = {"portable": 20, "hopper": 10}
"""Variants drawn for each family of kernels, interpreted or emulated: as many as fit into half a minute on two cores.
The plain reference is tested together with the portable family."""

ON_GPU = 300

REFUSED = 0.03
"""The largest share of drawn variants that the loader may refuse; refused variants are not tested."""


def check(outcome: Outcome, variants: int) -> None:
    text = "\n\n".join(f"variant {number}: {failure.describe()}" for number, failure in outcome.failures)
    assert not outcome.failures, text
    assert len(outcome.refused) <= max(REFUSED * variants, 1), outcome.refused
    assert outcome.variants + len(outcome.refused) == variants


@pytest.mark.skipif(not INTERPRET, reason="compiled kernels: test_compiled_kernels")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("family", "first"), [(family, n) for family, count in FAMILIES.items() for n in range(0, count, CHUNK)]
)
def test_random_variants(family: str, first: int) -> None:
    plan = Plan(seed=SEED, families=(family,), calls=0)
    check(run_all(plan, range(first, first + CHUNK), chunk=CHUNK), CHUNK)


@pytest.mark.skipif(INTERPRET, reason="sizes for a GPU, not for the interpreter")
def test_compiled_kernels() -> None:
    """Forward and every gradient in both settings of `deterministic`."""
    plan = Plan(seed=SEED, families=("portable", "hopper"), calls=0, device="cuda")
    started, jobs = time.monotonic(), max((os.cpu_count() or 2) - 2, 2)
    outcome = run_all(plan, range(ON_GPU), chunk=5, jobs=jobs)
    print(f"{outcome.calls} calls in {time.monotonic() - started:.0f} s by {jobs} processes")
    check(outcome, ON_GPU)
