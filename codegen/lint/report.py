"""The findings of `lint`, as text tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from codegen.arch.chips import CHIPS
from codegen.lint.look import Finding
from codegen.render.files import write_atomically
from codegen.util.text import aligned

_Key = tuple[str, str, int, str, tuple[int, ...]]
"""Chip, dtype, head_dim, pass and config; the pass of small kernels is `-`."""

HEADER = ("pass", "dtype", "D", "tile", "warps", "stages", "kernels", "regs", "spills", "shared", "matrix", "")


STYLES = {r"\berror\b": "bold red", r"\bwarning\b": "yellow", r"^(sm_\d+|gfx\w+), ": "bold"}
"""Styles of a terminal, by regular expression."""


def lines(findings: Iterable[Finding]) -> list[str]:
    """One table per chip with a row per config: the maxima over its kernels; below it errors and warnings.

    Shared memory is in bytes per program; registers, and spilled bytes written and read, are per thread. The matrix
    instructions are those of the kernel with the most registers.
    """
    text: list[str] = []
    by_key = sorted(findings, key=_key)
    for arch, of_arch in groupby(by_key, lambda finding: finding.job.arch):
        groups = [list(group) for _, group in groupby(of_arch, _key)]
        text += [f"{arch}, {CHIPS[arch].shared_memory} bytes of shared memory", ""]
        text += aligned([HEADER, *(_row(group) for group in groups)])
        problems = [
            line for severity in ("error", "warning") for group in groups for line in _problems(group, severity)
        ]
        text += ["", *problems, ""] if problems else [""]
    return text


def without_repetition(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, with a small kernel that many calls launch kept once per chip, with the most errors."""
    kept: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        own = finding.job if finding.config is not None else finding.job.arch
        key = (finding.kernel, own)
        if key not in kept or len(finding.errors) > len(kept[key].errors):
            kept[key] = finding
    return list(kept.values())


def summary(findings: Sequence[Finding], seconds: float) -> list[str]:
    """The number of kernels, errors and warnings by chip."""
    rows = [("chip", "kernels", "errors", "warnings")]
    for arch, group in groupby(sorted(findings, key=lambda f: f.job.arch), lambda f: f.job.arch):
        rows.append((arch, *_counts(list(group))))
    rows.append(("all", *_counts(findings)))
    return [*aligned(rows), f"in {seconds:.0f} s"]


def save_json(path: Path, findings: Sequence[Finding], triton: str) -> None:
    """Write all findings as JSON, atomically."""
    document = {"triton": triton, "kernels": [asdict(finding) for finding in sorted(findings, key=_key)]}
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def _key(finding: Finding) -> _Key:
    job, config = finding.job, finding.config
    if config is None:
        return (job.arch, "-", 0, "-", ())
    tile = (config.block_m, config.block_n, config.num_warps, config.num_stages)
    return (job.arch, job.dtype, job.head_dim, finding.pass_name, tile)


def _row(group: Sequence[Finding]) -> tuple[str, ...]:
    _, dtype, head_dim, name, tile = _key(group[0])
    block_m, block_n, warps, stages = tile or (0, 0, "-", "-")
    cells = (name, dtype, str(head_dim or "-"), f"{block_m}x{block_n}" if tile else "-", str(warps), str(stages))
    used = [finding.usage for finding in group if finding.usage is not None]
    counts = (
        str(len(group)),
        "error" if any(f.errors for f in group) else "warning" if any(f.warnings for f in group) else "",
    )
    if not used:
        return (*cells, counts[0], "-", "-", "-", "-", counts[1])
    largest = max(used, key=lambda u: u.registers)
    spilled = max((u.spill_stores + u.spill_loads, u.spill_stores, u.spill_loads) for u in used)
    spills = f"{spilled[1]}/{spilled[2]}" if spilled[0] else "0"
    matrix = ", ".join(f"{kind} x{count}" for kind, count in list(largest.instructions.items())[:2]) or "-"
    shared = str(max(u.shared for u in used))
    return (*cells, counts[0], str(largest.registers), spills, shared, matrix, counts[1])


def _problems(group: Sequence[Finding], severity: str) -> list[str]:
    """One line for each kind of problem of a config: its worst kernel, and the number of others."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for finding in group:
        used = finding.usage
        badness = 0 if used is None else used.spill_stores + used.spill_loads + used.shared
        for message in finding.errors if severity == "error" else finding.warnings:
            kind = "".join(c for c in message if not c.isdigit()).split(";")[0]
            found.setdefault(kind, []).append((badness, finding.kernel, message))
    _, dtype, head_dim, name, tile = _key(group[0])
    where = (
        f"{group[0].job.arch} {name} {dtype} D{head_dim} {'x'.join(map(str, tile[:2]))}" if tile else group[0].job.arch
    )
    texts = []
    for having in found.values():
        _, kernel, message = max(having)
        more = f" (and {len(having) - 1} more kernels)" if len(having) > 1 else ""
        texts.append(f"{severity}: {where}: {kernel}: {message}{more}")
    return texts


def _counts(findings: Sequence[Finding]) -> tuple[str, str, str]:
    wrong, doubtful = sum(bool(f.errors) for f in findings), sum(bool(f.warnings) for f in findings)
    return str(len(findings)), str(wrong), str(doubtful)
