"""Measures the generated ops beside their peers on this machine's GPU.

python -m bench                              # everything
python -m bench --suite host                 # the CPU's cost of a call; also: issue and paper (speed), memory
python -m bench --suite packed --json p.json  # documents of unequal lengths in one call
python -m bench --suite jax --cases same,first  # the JAX ops beside torch's; also: cudnn, pallas, kvax
python -m bench --only 'causal.*D128' --seqs 4096,65536 --csv speed.csv
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case, issue_cases, paper_cases
from bench.pool import DEFAULT_JOBS, spread

SUITES = ("issue", "paper", "packed", "jax", "schedules", "host", "memory")
JAX_CASES = ("same", "cudnn", "pallas", "kvax", "first")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"expected lengths such as 2048,16384, got {text!r}")
    return lengths


def _jax_cases(text: str) -> list[str]:
    cases = text.split(",")
    if not set(cases) <= set(JAX_CASES):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(JAX_CASES)}, got {text!r}")
    return cases


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=(*SUITES, "all"), default="all")
    parser.add_argument("--seqs", type=_lengths, default=[2048, 16384], help="sequence lengths of the speed suite")
    parser.add_argument(
        "--only", type=_pattern, metavar="REGEX", help="the cases of the speed and packed suites that match"
    )
    parser.add_argument(
        "--cases", type=_jax_cases, default=list(JAX_CASES), help="parts of the jax suite, such as same,first"
    )
    parser.add_argument("--quick", action="store_true", help="head_dim 128 alone, each pass repeated for less long")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the speed suite's measurements")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write them, and those of the packed and jax suites, with the machine they were made on",
    )
    parser.add_argument("--jobs", type=int, default=DEFAULT_JOBS, help="processes that compile beforehand; 0: none")
    return parser


def machine() -> dict[str, str]:
    """What the figures depend on."""
    found = {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0]}
    for package in ("torch", "triton", "fla-core", "jax", "jax-triton", "kvax"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found | {"cudnn": str(torch.backends.cudnn.version())}


def _compile_beforehand(cases: list[Case], jobs: int) -> None:
    from bench.measure import rehearse  # needs Triton

    start = time.perf_counter()
    for done, _ in enumerate(spread(rehearse, cases, jobs), start=1):
        seconds = time.perf_counter() - start
        print(f"\rcompiling, {jobs} processes: {done}/{len(cases)} cases, {seconds:.0f} s", end="", flush=True)
    print(flush=True)


def _speed(options: argparse.Namespace, suites: Sequence[str], document: dict[str, Any]) -> bool:
    """The cases of the speed suites, added to the JSON `document`; whether everything of ours was right."""
    from bench import report
    from bench.measure import Measurement, measure

    dims = (128,) if options.quick else (64, 128)
    every = (issue_cases(options.seqs, dims) if "issue" in suites else []) + (
        paper_cases() if "paper" in suites else []
    )
    cases = [case for case in every if not options.only or options.only.search(case.name)]
    if not cases:
        print("--only matches no case of the speed suite", file=sys.stderr)
        return False
    if options.jobs > 0:
        _compile_beforehand(cases, options.jobs)
    measurements: list[Measurement] = []
    for number, case in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)}] {case.name}", end="", flush=True)
        start = time.perf_counter()
        measurements += measure(case, 30 if options.quick else 100)
        print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    print("\nbfloat16; TF: TFLOP/s of unmasked scores; ratio: the peer's time over ours, above 1 ours is faster\n")
    print(report.table(measurements), flush=True)
    if options.csv:
        report.write_csv(options.csv, measurements)
    document["measurements"] = [asdict(m) for m in measurements]
    return not any(m.note for m in measurements if m.implementation == "ours")


def _packed(options: argparse.Namespace, document: dict[str, Any]) -> bool:
    """The packed suite, added to the JSON `document`; whether ours was right and fast enough."""
    from bench import packed

    chosen = [case for case in packed.cases() if not options.only or options.only.search(case.name)]
    if not chosen:
        # `--suite all --only ...` may ask for cases of the speed suite alone.
        print("--only matches no case of the packed suite", file=sys.stderr)
        return bool(options.suite == "all")
    right, measurements = packed.run(10 if options.quick else 30, options.jobs, chosen)
    document["packed"] = [asdict(m) for m in measurements]
    return right


def _jax(options: argparse.Namespace, document: dict[str, Any]) -> bool:
    """The jax suite, added to the JSON `document`, which is written after each section; whether ours was right."""
    try:
        from bench import in_jax

        in_jax.require_gpu()
    except (ImportError, RuntimeError) as error:
        print(f"the jax suite cannot run: {error}", file=sys.stderr)
        return bool(options.suite == "all")

    def keep(measurements: Sequence[in_jax.JaxMeasurement]) -> None:
        document["jax"] = [asdict(m) for m in measurements]
        _write(options, document)

    return in_jax.run(options.cases, keep)


def _write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """0 when every suite asked for came out right, 1 when not, 2 when it cannot run here."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("python -m bench measures GPU kernels, and torch finds no GPU here. On a CPU: python -m bench.demo")
        return 2
    found = machine()
    print(", ".join(f"{name} {what}" for name, what in found.items()), flush=True)
    wanted = SUITES if options.suite == "all" else (options.suite,)
    document: dict[str, Any] = {"machine": found}
    right = True
    if {"issue", "paper"} & set(wanted):
        right = _speed(options, wanted, document) and right
    if "packed" in wanted:
        right = _packed(options, document) and right
    _write(options, document)
    if "jax" in wanted:
        right = _jax(options, document) and right
    if "schedules" in wanted:
        from bench import schedules

        right = schedules.run() and right
    if "host" in wanted:
        from bench import host

        host_right, rows = host.run()
        document["host"] = [asdict(row) for row in rows]
        _write(options, document)
        right = host_right and right
    if "memory" in wanted:
        from bench import memory

        right = memory.run() and right
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
