"""The benchmark's command line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from bench.record import OURS, TITLES
from codegen.cli.options import at_least

SPEED = ("front", "core", "fa3", "paper", "fla", "gqa", "dims", "wide", "variants")
"""The speed suites, which are those of `bench.cases.suites`."""

PRINTED = ("pruning", "sparse", "fp8", "schedules", "memory")
"""Suites that only print their table, each a module of `bench.runs`."""

SUITES = (*SPEED, "packed", "decode", "models", "parallel", "jax", *PRINTED, "host")
JAX_CASES = ("same", "cudnn", "pallas", "kvax", "first")
PARALLEL_PARTS = ("links", "exact", "ours", "peers", "jax")
"""Parts of the suite `parallel`, those of `bench.cases.parallel`."""

PEERS = (
    *(name for name in TITLES if name != OURS),
    "pallas",
    "kvax",
    "flashinfer",
    "fa3",
    "sdpa",
    "eager",
    "xla",
    "cp-cudnn",
    "cp-flash",
    "cp-flex",
)

DEFAULT_JOBS = min(12, max(1, (os.cpu_count() or 2) * 3 // 4))
"""Processes that compile at once. Each has a CUDA context and a case's tensors, a few GiB, on the same GPU."""

DESCRIPTION = """Times the generated ops and other attention libraries (peers) on this machine's GPU.

python -m bench --suite front --minutes 10 --json r.json             # the most important cases, with every peer
python -m bench --suite core --minutes 8 --json r.json --plots plots  # all cases of the project's performance targets
python -m bench                                        # every suite
python -m bench --suite fa3,fla --peers flex-max,fa4   # also: paper, gqa, dims, wide, packed, jax, schedules, ...
python -m bench --suite fa3 --only 'causal.*D128' --seqs 4096,65536 --csv speed.csv
python -m bench --suite models --quick                 # tiny models, also on a CPU
python -m bench --suite parallel --ranks 2 --minutes 9 # context parallelism on two GPUs of this host
python -m bench --suite parallel --replay 8,64         # more GPUs than this host has: kernels measured, links modelled
python -m bench --suite core --list                    # list the cases and estimate their time; needs no GPU
python -m bench --from bench/results/h100/2026-11-22-core.json --plots plots  # report of a stored run; needs no GPU
"""


def _numbers(what: str) -> Callable[[str], tuple[int, ...]]:
    """The type of an option that is a list of integers above 0, in words `what`."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return numbers

    return read


def _rates(text: str) -> dict[str, float]:
    """NAME=NUMBER,... with positive numbers."""
    try:
        found = {name: float(number) for name, number in (part.split("=") for part in text.split(","))}
    except ValueError:
        found = {}
    if not found or not all(0 < rate < float("inf") for rate in found.values()):
        raise argparse.ArgumentTypeError(f"expected rates such as link=330e9,forward=650e12, got {text!r}")
    return found


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text!r}")
    return minutes


def _some_of(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by commas, without repetitions."""
    named = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in named if name not in known]:
        raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}; there are {','.join(known)}")
    return named


def _suites(text: str) -> tuple[str, ...]:
    named = _some_of(text, (*SUITES, "all"))
    return SUITES if "all" in named else named


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _add_parts(made: argparse.ArgumentParser, option: str, suite: str, parts: tuple[str, ...]) -> None:
    """An option that names the parts of a suite to run."""
    made.add_argument(
        option,
        type=lambda text: _some_of(text, parts),
        default=parts,
        metavar="NAME,...",
        help=f"parts to run of the suite {suite}: some of {', '.join(parts)}",
    )


def parser() -> argparse.ArgumentParser:
    """The parser of all options. `suite` and `peers` become tuples of names; `peers` is None for each suite's own."""
    made = argparse.ArgumentParser(
        prog="python -m bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--suite", type=_suites, default=SUITES, metavar="NAME,...", help=f"some of {', '.join(SUITES)}; default: all")
    add(
        "--peers",
        type=lambda text: _some_of(text, PEERS),
        metavar="NAME,...",
        help="peers to time, instead of each suite's own (suite core: only those among its own): "
        f"some of {', '.join(PEERS)}",
    )
    add(
        "--only",
        type=_pattern,
        metavar="REGEX",
        help=f"run only cases whose name matches; no effect on jax, host, {', '.join(PRINTED)}",
    )
    add(
        "--seqs",
        type=_numbers("lengths such as 2048,16384"),
        metavar="N,...",
        help="sequence lengths; suites fa3, gqa and core",
    )
    _add_parts(made, "--cases", "jax", JAX_CASES)
    _add_parts(made, "--parts", "parallel", PARALLEL_PARTS)
    add(
        "--ranks", type=at_least(1), metavar="N", help="number of GPUs in the suite parallel; default: all of this host"
    )
    add(
        "--replay",
        type=_numbers("numbers of ranks such as 8,64"),
        default=(),
        metavar="N,...",
        help="suite parallel: time the kernels of each of N ranks in turn on one GPU, and model the links",
    )
    add(
        "--machine",
        type=_rates,
        default={},
        metavar="NAME=RATE,...",
        help="suite parallel: rates that its plans assume, such as link (bytes/s), forward and backward (FLOP/s)",
    )
    add(
        "--quick",
        action="store_true",
        help="a third of the time per pass; fa3, gqa, core and variants: only head_dim 128; models: tiny models",
    )
    add("--minutes", type=_minutes, metavar="N", help="start no new case after N minutes, compile time included")
    add(
        "--jobs",
        type=at_least(0),
        default=DEFAULT_JOBS,
        metavar="N",
        help="processes that compile kernels before the measurements; 0: do not compile beforehand",
    )
    add("--json", type=Path, metavar="FILE", help="write all results to FILE, updated after every case")
    add("--csv", type=Path, metavar="FILE", help=f"write the measurements of the suites {', '.join(SPEED)}")
    add("--plots", type=Path, metavar="DIR", help="draw speed ratios and rates as PNG files; needs matplotlib")
    add("--from", type=Path, dest="stored", metavar="FILE", help="do not measure; report the results of a stored run")
    add(
        "--list",
        action="store_true",
        help="do not measure; list the selected cases, and estimate the time of the suites of single calls",
    )
    return made
