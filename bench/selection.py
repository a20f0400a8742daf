"""The cases that the options of a run select, and how `--list` prints them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from bench.cases import decode, models, packed
from bench.cases.parallel import PEERS
from bench.options import PRINTED, SPEED
from bench.runs import parallel, speed
from codegen.testing.golden import load_manifest

REPORTED_RANKS = 2
"""Ranks whose jobs are listed if no option says how many: names of jobs do not depend on it."""


def packed_cases(options: argparse.Namespace, gone: Iterable[str] = ()) -> list[packed.PackedCase]:
    """The cases of the suite `packed`, and those that the suite `front` runs too. `gone`: peers not installed."""
    every: list[packed.PackedCase] = []
    if "front" in options.suite:
        every += packed.front_cases()
    if "packed" in options.suite:
        every += packed.cases()
    unique = {case.name: case for case in every}.values()
    return [packed.with_peers(case, options.peers, gone) for case in unique if _is_named(options, case.name)]


def decode_cases(options: argparse.Namespace, gone: Iterable[str] = ()) -> list[decode.DecodeCase]:
    """The cases of the suite `decode`. `gone`: peers not installed."""
    legal = [name for name, entry in load_manifest().items() if not entry["dropout"] and not entry["decay"]]
    found = [case for case in decode.cases(legal) if _is_named(options, case.name)]
    return [decode.with_peers(case, options.peers, gone) for case in found]


def model_cases(options: argparse.Namespace) -> list[models.ModelCase]:
    """The cases of the suite `models`."""
    return models.chosen(models.cases(tiny=options.quick), options.only, options.peers)


def parallel_plan(options: argparse.Namespace, ranks: int, device: str) -> parallel.Plan:
    """The plan of the suite `parallel`."""
    peers = None if options.peers is None else [peer for peer in options.peers if peer in PEERS]
    return parallel.plan(
        ranks,
        device,
        parts=options.parts,
        only=options.only,
        peers=peers,
        replay=options.replay,
        machine=options.machine,
    )


def listed(options: argparse.Namespace) -> list[str]:
    """The selected cases with their implementations, suite by suite; empty if the options select none."""
    lines = []
    if set(SPEED) & set(options.suite):
        plan = speed.plan(options, absent=lambda peers: {})
        lines += [speed.describe(plan, options)] if plan.cases else []
    if {"front", "packed"} & set(options.suite):
        lines += _suite("packed", [(case.name, case.implementations) for case in packed_cases(options)])
    if "decode" in options.suite:
        lines += _suite("decode", [(case.name, case.implementations) for case in decode_cases(options)])
    if "models" in options.suite:
        lines += _suite("models", [(case.name, case.implementations) for case in model_cases(options)])
    if "parallel" in options.suite:
        lines += _suite("parallel", _parallel_jobs(options))
    if "jax" in options.suite:
        lines.append(f"jax: parts {', '.join(options.cases)}")
    return [*lines, *(f"{suite}: one table" for suite in (*PRINTED, "host") if suite in options.suite)]


def _parallel_jobs(options: argparse.Namespace) -> list[tuple[str, Sequence[str]]]:
    is_tiny = options.quick and not torch.cuda.is_available()
    plan = parallel_plan(options, options.ranks or REPORTED_RANKS, "cpu" if is_tiny else "cuda")
    # A job's name has its implementations.
    return [*((job.name, ()) for job in plan.jobs), *([("jax", plan.jax_peers)] if plan.with_jax else [])]


def _suite(name: str, cases: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    lines = [f"{case}  {', '.join(implementations)}".rstrip() for case, implementations in cases]
    return [f"{name}: {len(cases)} cases", *lines] if cases else []


def _is_named(options: argparse.Namespace, name: str) -> bool:
    return options.only is None or bool(options.only.search(name))
