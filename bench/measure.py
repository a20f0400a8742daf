"""Checks and times one case: ours and its peers, on the same inputs, in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.testing import do_bench

from bench import golden
from bench.cases import Case
from bench.golden import BOUND, Inputs, Shape
from bench.mods import MODS
from bench.peers import OURS, TITLES, Runner, build

DTYPE = torch.bfloat16
PASSES = ("fwd", "bwd")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One implementation's time for one pass of a case; `ms` is None where there is none, and `note` says why."""

    case: str
    which: str
    implementation: str
    ms: float | None = None
    tflops: float | None = None
    note: str = ""


def draw(case: Case) -> Inputs:
    """The inputs of a case, on the GPU."""
    entry = golden.load_manifest()[case.variant]
    inputs = golden.draw_inputs(
        entry, case.shape, dtype=DTYPE, device="cuda", scalars=case.scalars, own_grads=case.own_grads
    )
    mods = MODS.get(case.variant)
    own = None if mods is None else mods.tensors
    return inputs if own is None else replace(inputs, tensors=inputs.tensors | own(case.shape, "cuda"))


def measure(case: Case, rep_ms: int) -> Iterator[Measurement]:
    """Ours first, once it is known to be right, then each peer; `rep_ms` is how long a pass is repeated for."""
    if fault := verify(case):
        yield from _missing(case, OURS, fault)
    inputs = draw(case)
    ours: dict[str, Tensor] | None = None
    for name in (OURS, *case.peers):
        if name == OURS and fault:
            continue
        try:
            runner = build(name, case, inputs)
            results = runner.results()
            if name == OURS:
                ours = results
            elif ours is not None and (fault := _difference(ours, results)):
                # Said once: a second peer would repeat it.
                yield from _missing(case, OURS, f"differs from {TITLES[name]}: {fault}")
                ours = None
            del results
            yield from _time(case, name, runner, rep_ms)
        except Exception as error:  # a peer may be absent or fail in any way: the row says so
            yield from _missing(case, name, f"{type(error).__name__}: {_first_line(error)}")


def rehearse(case: Case) -> None:
    """Run everything the case will run, once, so that it is compiled and in the caches on disk."""
    verify(case)
    inputs = draw(case)
    for name in (OURS, *case.peers):
        # What fails here fails again in `measure`, which reports it.
        with contextlib.suppress(Exception):
            build(name, case, inputs).results()


def verify(case: Case) -> str:
    """What is wrong with ours at a smaller size of the same kind, against float64; "" when nothing is."""
    group = case.shape.heads // case.shape.kv_heads
    return _verify(case.variant, Shape(batch=1, heads=2 * group, kv_heads=2, seq=1000, dim=case.shape.dim))


@functools.cache
def _verify(variant: str, shape: Shape) -> str:
    try:
        errors, right = golden.check(variant, shape, DTYPE, "cuda")
    except Exception as error:  # whatever it is, the row says it, and the case is not timed
        return f"{type(error).__name__}: {_first_line(error)}"
    return "" if right else f"WRONG against float64: {_worst(errors)}"


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    """What parts two results of the full size; both are rounded, hence twice the bound."""
    errors = golden.relative_errors(ours, theirs)
    return "" if max(errors.values()) <= 2 * BOUND[DTYPE] else _worst(errors)


def _worst(errors: dict[str, float]) -> str:
    name = max(errors, key=lambda each: errors[each])
    return f"{name} is off by {errors[name]:.1e}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


def _missing(case: Case, name: str, note: str) -> Iterator[Measurement]:
    for which in PASSES:
        yield Measurement(case=case.name, which=which, implementation=name, note=note)


def _time(case: Case, name: str, runner: Runner, rep_ms: int) -> Iterator[Measurement]:
    """Both passes. The forward is a training step's: it keeps what the backward needs."""
    o = runner.forward()
    timed = {"fwd": runner.forward, "bwd": lambda: runner.gradients(o)}
    for which in PASSES:
        ms: float = do_bench(timed[which], rep=rep_ms, return_mode="median")
        tflops = case.flops(which) / ms / 1e9
        yield Measurement(case=case.name, which=which, implementation=name, ms=ms, tflops=tflops)
