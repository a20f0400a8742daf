"""The results of a run as data: measurements, costs and the machine, and their JSON and CSV files.

This module imports neither torch nor Triton, so that stored results can be reported on anywhere.
"""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from codegen.render.files import write_atomically
from codegen.util.errors import naming
from codegen.util.text import pair

OURS = "ours"
PASSES = ("fwd", "bwd")

TITLES = {
    OURS: "ours",
    "flex": "Flex",
    "flex-max": "Flex max",
    "fa2": "FA2",
    "cudnn": "cuDNN",
    "efficient": "Effic.",
    "fa4": "FA4",
    "fla": "FLA",
}
"""Implementations and their titles in tables. FA2, cuDNN and Effic. are backends of PyTorch's SDPA."""


def in_one_line(error: BaseException, most: int = 160) -> str:
    """An error as a note of a row: its type and its first line, of which at most so many characters.

    >>> in_one_line(ValueError("too long\\nby far"))
    'ValueError: too long'
    """
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:most]}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one implementation for one pass of a case. `ms` is None if there is none, and `note` says why.

    `tflops` counts unmasked scores. `spread` is the range of the rounds' medians, divided by their median.
    """

    case: str
    which: str
    implementation: str
    ms: float | None = None
    tflops: float | None = None
    spread: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one implementation of a case costs besides its time per pass.

    `peak_mib`: peak memory of one forward and backward, minus the memory in use before, MiB. `setup_ms`: making the
    schedule or block mask, which the timed passes do not include. `first_s`: time to the first output and gradients in
    the measuring process, which finds compiled kernels in the caches on disk.
    """

    case: str
    implementation: str
    peak_mib: float | None = None
    setup_ms: float | None = None
    first_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelMeasurement:
    """One row of the suite `parallel`.

    Attributes:
        section: "links", "exact", "ours", "peers", "jax" or "replay". ranks: the number of GPUs.
        ms: the slowest rank's milliseconds by pass, "fwd" or "fwd+bwd"; for links those of a collective.
        rank_ms: the milliseconds of every rank.
        one_ms: one GPU's milliseconds for the same call unsharded, the mean over the GPUs.
        scaling: one GPU's time divided by the slowest rank's time and by the number of ranks, 1 at best.
        imbalance: the slowest rank's time over the mean, minus 1. planned: the imbalance that the layout plans.
        predicted_ms: forward and backward by the cost model, for the strategies that have one.
        tflops: of unmasked scores, of all GPUs together, by pass. gb_per_s: bus bandwidth of a collective.
        bits: by result, whether it equals one GPU's bit for bit.
        errors: by result, its error against float32 over the error of one GPU.
        source: "measured"; "modelled" if any part of a time comes from the cost model.
        remark: how it was run. note: why it is missing or wrong.
    """

    section: str
    case: str
    implementation: str
    ranks: int
    ms: dict[str, float] = field(default_factory=dict)
    rank_ms: dict[str, list[float]] = field(default_factory=dict)
    one_ms: dict[str, float] = field(default_factory=dict)
    scaling: dict[str, float] = field(default_factory=dict)
    imbalance: dict[str, float] = field(default_factory=dict)
    planned: float | None = None
    predicted_ms: float | None = None
    tflops: dict[str, float] = field(default_factory=dict)
    gb_per_s: float | None = None
    bits: dict[str, bool] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    source: str = "measured"
    remark: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Name:
    """The parts of a case's name, such as "window(1024) B4 H16/2 S16384 D64", or "D192/128" if values have another
    head dim than keys."""

    variant: str
    scalars: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    dim_v: int

    def __str__(self) -> str:
        scalars = f"({self.scalars})" if self.scalars else ""
        heads, head_dims = pair(self.heads, self.kv_heads), pair(self.dim, self.dim_v)
        return f"{self.variant}{scalars} B{self.batch} H{heads} S{self.seq} D{head_dims}"


_NAME = re.compile(r"(\w+)(?:\(([^)]*)\))? B(\d+) H(\d+)(?:/(\d+))? S(\d+) D(\d+)(?:/(\d+))?")


def parse_name(text: str) -> Name:
    """Parse the name of a case; raises `ValueError` for any other text."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no name of a case such as 'causal B1 H32/8 S16384 D128'")
    variant, scalars, batch, heads, kv_heads, seq, dim, dim_v = match.groups()
    return Name(
        variant=variant,
        scalars=scalars or "",
        batch=int(batch),
        heads=int(heads),
        kv_heads=int(kv_heads or heads),
        seq=int(seq),
        dim=int(dim),
        dim_v=int(dim_v or dim),
    )


@dataclass(kw_only=True)
class Results:
    """The results of a run, in memory and on disk.

    `suites` maps each suite to the names of its cases. `skipped`: cases for which time ran out. `missing`: peers that
    are not installed, with their pip names. `others`: results of the suites that are no speed suites, by suite.
    """

    machine: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    suites: dict[str, list[str]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> list[str]:
        """The names of all cases that were tried, in order."""
        return list(dict.fromkeys(m.case for m in self.measurements))

    def timed(self) -> dict[tuple[str, str, str], Measurement]:
        """The measurements with a time, by case, pass and implementation."""
        return {(m.case, m.which, m.implementation): m for m in self.measurements if m.ms}

    def panels(self) -> dict[str, list[str]]:
        """The cases of each suite that were tried. A file from before there were suites has one, "all"."""
        tried = set(self.cases())
        named = {suite: [case for case in cases if case in tried] for suite, cases in self.suites.items()}
        return {suite: cases for suite, cases in (named or {"all": self.cases()}).items() if cases}

    def right(self) -> bool:
        """True if ours ran and was right in every case that was tried."""
        return not any(m.note for m in self.measurements if m.implementation == OURS)


def _known(kind: type[Any], entries: Iterable[Mapping[str, Any]]) -> list[Any]:
    names = {each.name for each in fields(kind)}
    return [kind(**{key: value for key, value in entry.items() if key in names}) for entry in entries]


def load(path: Path) -> Results:
    """Read a stored run, also one from before suites and costs were stored. ValueError if the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "machine" not in document:
        raise ValueError(f"{path}: not a run that bench stored as JSON")
    own = {each.name for each in fields(Results)} - {"others"}
    return Results(
        machine=document["machine"],
        settings=document.get("settings", {}),
        suites=document.get("suites", {}),
        measurements=_known(Measurement, document.get("measurements", [])),
        costs=_known(Cost, document.get("costs", [])),
        skipped=document.get("skipped", []),
        missing=document.get("missing", {}),
        others={key: value for key, value in document.items() if key not in own},
    )


def save(path: Path, results: Results) -> None:
    """Write a run as JSON, atomically: an interruption leaves the old file or the new one."""
    document = asdict(results)
    document |= document.pop("others")
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def rows(results: Results) -> list[dict[str, Any]]:
    """One flat row for each measurement: case, time, ratio to ours, costs, machine."""
    timed = results.timed()
    costs = {(cost.case, cost.implementation): cost for cost in results.costs}
    found = []
    for m in results.measurements:
        ours = timed.get((m.case, m.which, OURS))
        ratio = m.ms / ours.ms if m.ms and ours and ours.ms else None
        suites = " ".join(suite for suite, cases in results.suites.items() if m.case in cases)
        cost = asdict(costs.get((m.case, m.implementation), Cost(case=m.case, implementation=m.implementation)))
        name = asdict(parse_name(m.case))
        found.append({"suites": suites, **asdict(m), "ratio": ratio, **cost, **name, **results.machine})
    return found


def write_csv(path: Path, results: Results) -> None:
    """Write one line per measurement. `ratio` is its time divided by ours: above 1, ours is faster."""
    lines: Sequence[Mapping[str, Any]] = rows(results)
    with naming(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else ["case"])
        writer.writeheader()
        writer.writerows(lines)


def prepare_file(option: str, path: Path) -> None:
    """Make the folder of a file that a run will write. Raises `ValueError` if the file cannot be written."""
    with _as_value_error(option, "file", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        if path.is_file() or not path.exists():  # it is written beside its place, then moved; a device is not
            tempfile.TemporaryFile(dir=path.parent).close()


def prepare_folder(option: str, folder: Path) -> None:
    """Make a folder that a run will write files into. Raises `ValueError` if they cannot be written."""
    with _as_value_error(option, "folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def _as_value_error(option: str, kind: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: expected a {kind} that can be written, got {path}: {error.strerror}") from None
