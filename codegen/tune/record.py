"""Tuned files: the tuner's results for a variant on a GPU, in the form that the generated package reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from codegen.arch.paged import PagedPass, PagedTileConfig
from codegen.arch.tile_rules import TileConfig
from codegen.render.files import write_atomically
from codegen.spec.model import Pass
from codegen.util.errors import CodegenError

FORMAT = 1
"""The format that the package's `_runtime/core/tuned.py` reads."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One kernel to tune: everything that it is compiled for except its tile."""

    variant: str
    mode: str
    dtype: str
    head_dim: int
    pass_: Pass

    def __str__(self) -> str:
        mode = "" if self.mode == "dense" else f" {self.mode}"
        return f"{self.variant}{mode} {self.dtype} D{self.head_dim} {self.pass_}"


@dataclass(frozen=True, kw_only=True, order=True)
class Workload:
    """The size of a timed call: keys per sequence, and query heads per key head."""

    seq: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest tile of a workload, with milliseconds of the kernel for it and for the default tile."""

    workload: Workload
    tile: TileConfig
    ms: float
    default_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a group; `failed` maps each disqualified tile to the reason."""

    group: Group
    winners: Sequence[Winner]
    failed: Mapping[TileConfig, str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison of kernel families: a variant's forward, `fwd`, or whole backward, `bwd`."""

    variant: str
    mode: str
    dtype: str
    head_dim: int
    pass_: str

    def group(self, pass_: Pass) -> Group:
        """The group of one of its portable kernels."""
        return Group(variant=self.variant, mode=self.mode, dtype=self.dtype, head_dim=self.head_dim, pass_=pass_)

    def __str__(self) -> str:
        mode = "" if self.mode == "dense" else f" {self.mode}"
        return f"{self.variant}{mode} {self.dtype} D{self.head_dim} {self.pass_}, families"


PassTiles = Mapping[Pass, TileConfig]


def config_of(tiles: PassTiles) -> dict[str, dict[str, int]]:
    """Tiles in the form of an op's `config=`."""
    return {str(pass_): asdict(tile) for pass_, tile in tiles.items()}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The times of the contenders on a workload: milliseconds of a whole forward or backward.

    `failed` maps each disqualified contender to the reason. `config`: the tiles of the portable kernels. `ruled`: the
    contender that the built-in rule selects; `taken`: the one that a call of this kind runs from now on.
    """

    workload: Workload
    ms: Mapping[str, float]
    failed: Mapping[str, str]
    config: PassTiles
    ruled: str
    taken: str


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The results of a comparison; `undecided` is the reason for the first workload without a verdict, or empty."""

    comparison: Comparison
    verdicts: Sequence[Verdict]
    undecided: str = ""


@dataclass(frozen=True, kw_only=True)
class PagedGroup:
    """One kernel on paged caches to tune: everything on which the choice of a tile depends. Caches have q's dtype."""

    variant: str
    dtype: str
    head_dim: int
    group: int
    pass_: PagedPass

    def __str__(self) -> str:
        return f"{self.variant} {self.dtype} D{self.head_dim} group {self.group} {self.pass_}"

    @property
    def key(self) -> dict[str, Any]:
        """The fields by which the group's rows in a tuned file are found."""
        names = {"pass": str(self.pass_), "dtype": self.dtype, "kv_dtype": self.dtype}
        return names | {"head_dim": self.head_dim, "group": self.group}


@dataclass(frozen=True, kw_only=True)
class PagedOutcome:
    """The tile of a group, with the geometric means of its times and of the default's, in milliseconds.

    `tile` is None if no tile is right. `times`: the tile's time for each workload, by the workload's name. `failed`
    maps each disqualified tile to the reason.
    """

    group: PagedGroup
    tile: PagedTileConfig | None
    ms: float
    default_ms: float | None
    times: Mapping[str, float]
    failed: Mapping[PagedTileConfig, str]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which a file's entries were measured."""

    gpu: str
    arch: str
    triton: str


class TunedFile:
    """The tuned file of one variant on one GPU, read and rewritten whole. Entries of another GPU are dropped.

    Raises `CodegenError` for a file that cannot be read, because writing it would lose its measurements.
    """

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path = path
        self.machine = machine
        self.entries: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.families: list[dict[str, Any]] = []
        self.paged: list[dict[str, Any]] = []
        self.paged_failed: list[dict[str, Any]] = []
        if not path.exists():
            return
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if (document["format"], document["gpu"]) == (FORMAT, machine.gpu):
                self.entries, self.failed = _rows(document["entries"], *_ENTRY), _rows(document["failed"], "mode")
                self.families = _rows(document.get("families", []), *_VERDICT)
                self.paged = _rows(document.get("paged", []), "kernels", "triton")
                self.paged_failed = _rows(document.get("paged_failed", []))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CodegenError(f"{path}: cannot be read: {what}; repair the file, or delete it") from None

    def has(self, group: Group, kernel_hash: str, workloads: Iterable[Workload]) -> bool:
        """True if every workload of a group was measured on this kernel hash and this Triton."""
        wanted = {(w.seq, w.group) for w in workloads}
        found = {
            (row["seq"], row["group"])
            for row in self.entries
            if _is_of(row, group) and (row["kernel"], row["triton"]) == (kernel_hash, self.machine.triton)
        }
        return wanted <= found

    def has_verdicts(
        self, comparison: Comparison, kernels: Mapping[str, str], configs: Mapping[Workload, PassTiles]
    ) -> bool:
        """True if every workload has a verdict for these kernel hashes, tiles and this Triton."""
        measured = {
            (row["seq"], row["group"]): row["config"]
            for row in self.families
            if _is_of(row, comparison) and (row["kernels"], row["triton"]) == (kernels, self.machine.triton)
        }
        return all(measured.get((w.seq, w.group)) == config_of(config) for w, config in configs.items())

    def has_paged(self, group: PagedGroup, kernels: Mapping[str, str]) -> bool:
        """True if a group was measured on these kernel hashes and this Triton."""
        of_group = [row for row in self.paged if row.items() >= group.key.items()]
        return any((row["kernels"], row["triton"]) == (kernels, self.machine.triton) for row in of_group)

    def add_paged(self, outcome: PagedOutcome, kernels: Mapping[str, str]) -> None:
        """Replace the rows of an outcome's group and write the file atomically."""
        key = outcome.group.key
        self.paged = [row for row in self.paged if not row.items() >= key.items()]
        self.paged_failed = [row for row in self.paged_failed if not row.items() >= key.items()]
        if outcome.tile is not None:
            means = {"ms": _rounded(outcome.ms), "default_ms": _rounded(outcome.default_ms)}
            times = {name: _rounded(ms) for name, ms in outcome.times.items()}
            measured = {"kernels": dict(kernels), "triton": self.machine.triton}
            self.paged.append({**key, "config": asdict(outcome.tile), **means, "times": times, **measured})
        self.paged_failed += [{**key, "config": asdict(t), "reason": reason} for t, reason in outcome.failed.items()]
        write_atomically(self.path, self.text())

    def tiles(self) -> list[tuple[str, str, int, TileConfig]]:
        """Pass, dtype, head_dim and tile of every entry."""
        return [(row["pass"], row["dtype"], row["head_dim"], TileConfig(**row["config"])) for row in self.entries]

    def add(self, outcome: Outcome, kernel_hash: str) -> None:
        """Replace the entries of an outcome's group and write the file atomically."""
        group = outcome.group
        key = _key(group)
        measured = {"kernel": kernel_hash, "triton": self.machine.triton}
        timed = {(winner.workload.seq, winner.workload.group) for winner in outcome.winners}
        # Entries of workloads that were not measured this time stay if they were measured on the same code.
        self.entries = [
            row
            for row in self.entries
            if not _is_of(row, group) or (row["kernel"] == kernel_hash and (row["seq"], row["group"]) not in timed)
        ]
        self.entries += [
            {**key, **asdict(w.workload), "config": asdict(w.tile), "ms": _rounded(w.ms)}
            | {"default_ms": _rounded(w.default_ms), **measured}
            for w in outcome.winners
        ]
        self.failed = [row for row in self.failed if not _is_of(row, group)]
        self.failed += [{**key, "config": asdict(t), "reason": reason} for t, reason in outcome.failed.items()]
        write_atomically(self.path, self.text())

    def judge(self, judgement: Judgement, kernels: Mapping[str, str]) -> None:
        """Replace verdicts for the same workloads, or of other code, and write the file atomically."""
        comparison = judgement.comparison
        timed = {(verdict.workload.seq, verdict.workload.group) for verdict in judgement.verdicts}
        self.families = [
            row
            for row in self.families
            if not _is_of(row, comparison) or (row["kernels"] == kernels and (row["seq"], row["group"]) not in timed)
        ]
        self.families += [
            {**_key(comparison), **asdict(v.workload), "config": config_of(v.config)}
            | {"ms": {name: _rounded(ms) for name, ms in v.ms.items()}, "failed": dict(v.failed)}
            | {"kernels": dict(kernels), "triton": self.machine.triton}
            for v in judgement.verdicts
        ]
        write_atomically(self.path, self.text())

    def text(self) -> str:
        """The file's text: JSON with one line per entry in a fixed order, so that diffs stay small."""
        head = {"format": FORMAT, "variant": self.path.stem, "gpu": self.machine.gpu, "arch": self.machine.arch}
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines += [_listed("entries", self.entries), _listed("failed", self.failed)]
        if self.families:
            lines.append(_listed("families", self.families))
        for name, rows in (("paged", self.paged), ("paged_failed", self.paged_failed)):
            lines += [_listed(name, rows)] if rows else []
        return "{\n" + ",\n".join(lines) + "\n}\n"


_ENTRY = ("mode", "seq", "group", "kernel", "triton")
_VERDICT = ("mode", "seq", "group", "kernels", "triton")


def _rows(rows: Any, *names: str) -> list[dict[str, Any]]:
    """The rows of a part of a file, each of which must have what files are sorted by, and these fields."""
    for row in rows:
        for name in ("pass", "dtype", "head_dim", "config", *names):
            row[name]
    return list(rows)


def _key(of: Group | Comparison) -> dict[str, Any]:
    return {"pass": str(of.pass_), "mode": of.mode, "dtype": of.dtype, "head_dim": of.head_dim}


def _is_of(row: Mapping[str, Any], of: Group | Comparison) -> bool:
    return all(row[name] == value for name, value in _key(of).items())


_PASSES = (*map(str, Pass), "bwd", *map(str, PagedPass))


def _listed(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        key = (row.get("mode", ""), row["dtype"], row["head_dim"], _PASSES.index(row["pass"]))
        return (*key, row.get("group", 0), row.get("seq", 0), json.dumps(row["config"]))

    lines = [f"    {json.dumps(row)}" for row in sorted(rows, key=order)]
    return f'  "{name}": [\n' + ",\n".join(lines) + "\n  ]" if lines else f'  "{name}": []'


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else float(f"{ms:.4g}")
