"""What a run found, as data: measurements, costs, the machine, and the JSON and CSV files that hold them.

Imports neither torch nor Triton: stored results can be read, judged and drawn anywhere.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from codegen.render.files import write_atomically

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
"""What tables call implementations. FA2, cuDNN and Effic. are backends of PyTorch's `scaled_dot_product_attention`."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One implementation's time for one pass of a case; `ms` is None where there is none, and `note` says why.

    `tflops` counts unmasked scores. `spread` is what the medians of the rounds differ by, over their median.
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
    """What one implementation of a case costs besides time per pass.

    `peak_mib`: most memory in use in one forward and backward, beyond what was there before, MiB. `setup_ms`: making
    the schedule or block mask, which is done before the clock starts. `first_s`: from nothing to the first output and
    gradients in the measuring process, which finds on disk what was compiled beforehand.
    """

    case: str
    implementation: str
    peak_mib: float | None = None
    setup_ms: float | None = None
    first_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Name:
    """A case as its name has it: "window(1024) B4 H16/2 S16384 D64"."""

    variant: str
    scalars: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int

    def __str__(self) -> str:
        scalars = f"({self.scalars})" if self.scalars else ""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.variant}{scalars} B{self.batch} H{heads} S{self.seq} D{self.dim}"


_NAME = re.compile(r"(\w+)(?:\(([^)]*)\))? B(\d+) H(\d+)(?:/(\d+))? S(\d+) D(\d+)")


def parse_name(text: str) -> Name:
    """The parts of a case's name; raises `ValueError` for one that has others."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no name of a case such as 'causal B1 H32/8 S16384 D128'")
    variant, scalars, batch, heads, kv_heads, seq, dim = match.groups()
    return Name(
        variant=variant,
        scalars=scalars or "",
        batch=int(batch),
        heads=int(heads),
        kv_heads=int(kv_heads or heads),
        seq=int(seq),
        dim=int(dim),
    )


@dataclass(kw_only=True)
class Results:
    """A run, while it is made and as it is stored.

    `suites` are the names of the cases of each suite, `skipped` those there was no time for, and `missing` the peers
    that are not installed, with what pip calls them. `others` is what further suites add, by their names.
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
        """All cases that were tried, in their order."""
        return list(dict.fromkeys(m.case for m in self.measurements))

    def timed(self) -> dict[tuple[str, str, str], Measurement]:
        """What has a time, by case, pass and implementation."""
        return {(m.case, m.which, m.implementation): m for m in self.measurements if m.ms}

    def panels(self) -> dict[str, list[str]]:
        """The cases of each suite that were tried; of a file older than suites, all of them as one."""
        tried = set(self.cases())
        named = {suite: [case for case in cases if case in tried] for suite, cases in self.suites.items()}
        return {suite: cases for suite, cases in (named or {"all": self.cases()}).items() if cases}

    def right(self) -> bool:
        """Whether ours ran and was right in everything that was tried."""
        return not any(m.note for m in self.measurements if m.implementation == OURS)


def _known(kind: type[Any], entries: Iterable[Mapping[str, Any]]) -> list[Any]:
    names = {each.name for each in fields(kind)}
    return [kind(**{key: value for key, value in entry.items() if key in names}) for entry in entries]


def load(path: Path) -> Results:
    """A stored run, also one from before there were suites and costs."""
    document = json.loads(path.read_text(encoding="utf-8"))
    own = {each.name for each in fields(Results)} - {"others"}
    return Results(
        machine=document.get("machine", {}),
        settings=document.get("settings", {}),
        suites=document.get("suites", {}),
        measurements=_known(Measurement, document.get("measurements", [])),
        costs=_known(Cost, document.get("costs", [])),
        skipped=document.get("skipped", []),
        missing=document.get("missing", {}),
        others={key: value for key, value in document.items() if key not in own},
    )


def save(path: Path, results: Results) -> None:
    """Write a run as JSON. An interruption leaves the file as it was or as it is to be, never half of it."""
    document = asdict(results)
    document |= document.pop("others")
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def rows(results: Results) -> list[dict[str, Any]]:
    """Everything of each measurement in one flat row: its case, its time, ours beside it, its costs, the machine."""
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
    """One line per measurement; `ratio` is its time over ours: above 1, ours is faster."""
    lines: Sequence[Mapping[str, Any]] = rows(results)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]) if lines else ["case"])
        writer.writeheader()
        writer.writerows(lines)
