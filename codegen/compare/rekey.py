"""Rewrites the hashes of kernels in tuned files, if the new kernels are proven to be the code that was measured.

An entry has the time of one kernel with one tile, a verdict the times of all kernels of a forward or backward. A
kernel's hash is rewritten if all its entries were measured on the old package's kernel with the installed Triton, and
if for the dtype, head_dim and tile of each entry the machine code of the old and the new kernel is equal. The hashes of
a verdict are rewritten if this holds for all of the verdict's kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from codegen.arch.tile_rules import TileConfig
from codegen.compare.calls import Call
from codegen.compare.proof import Packages, Result, Workers, compare_calls, processes
from codegen.compare.sources import KernelHashes, kernel_hashes
from codegen.compile.packages import Package
from codegen.render.files import write_atomically
from codegen.spec.model import Pass
from codegen.tune.compiling import CUT_SEQ, SMALL_HEADS, WHOLE_SEQ, HopperTask, Task
from codegen.tune.record import Group, Machine, TunedFile, Workload

Row = dict[str, Any]
"""An entry or a verdict in the form of a tuned file."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a tuned file that are rewritten together: the entries of a kernel, or one verdict.

    `hashes`: the new hash of each kernel. `fault`: the reason why they cannot be rewritten even if the code is equal.
    """

    path: Path
    title: str
    rows: tuple[Row, ...]
    hashes: Mapping[str, str]
    calls: tuple[Call, ...]
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Rekeyed:
    """A part and its outcome: `fault` says why it was not rewritten, `results` are the comparisons made for it."""

    part: Part
    fault: str
    results: tuple[Result, ...] = ()


def rekey(
    packages: Packages,
    jobs: int,
    variants: Iterable[str],
    *,
    workers: Callable[[int], Workers] = processes,
) -> list[Rekeyed]:
    """Rewrite the tuned files of the new package; returns all stale parts, rewritten or not."""
    hashes = kernel_hashes(packages.old), kernel_hashes(packages.new)
    wanted = set(variants)
    files = {path: _read(path) for path in sorted(packages.new.glob("tuned/*/*.json")) if path.stem in wanted}
    parts = [part for path, file in files.items() for part in _parts(path, file, *hashes, version("triton"))]
    calls = dict.fromkeys(call for part in parts if not part.fault for call in part.calls)
    results: dict[Call, list[Result]] = {call: [] for call in calls}
    for result in compare_calls(packages, list(calls), jobs, workers=workers):
        results[result.call].append(result)
    found = [_judged(part, results) for part in parts]
    for path, file in files.items():
        if any(each.part.path == path and not each.fault for each in found):
            _rewrite([each.part for each in found if each.part.path == path and not each.fault])
            write_atomically(path, file.text())
    return found


def _read(path: Path) -> TunedFile:
    document = json.loads(path.read_text(encoding="utf-8"))
    return TunedFile(path, Machine(gpu=document["gpu"], arch=document["arch"], triton=""))


def _parts(path: Path, file: TunedFile, old: KernelHashes, new: KernelHashes, triton: str) -> Iterator[Part]:
    """The parts of a file that are stale: they do not hold for the new package's kernels."""
    entries: dict[tuple[str, str], list[Row]] = {}
    for row in file.entries:
        entries.setdefault((row["mode"], row["pass"]), []).append(row)
    for (mode, pass_name), rows in entries.items():
        measured = [{pass_name: row["kernel"]} for row in rows]
        calls = [call for row in rows for call in _entry_calls(path.stem, file.machine.arch, row)]
        yield from _part(path, f"{mode} {pass_name}", rows, measured, calls, old, new, triton)
    for row in file.families:
        title = f"{row['mode']} families of {row['pass']} {row['dtype']} D{row['head_dim']} seq {row['seq']}"
        calls = list(_verdict_calls(path.stem, file.machine.arch, row))
        yield from _part(path, title, [row], [row["kernels"]], calls, old, new, triton)


def _part(
    path: Path,
    title: str,
    rows: Sequence[Row],
    measured: Sequence[Mapping[str, str]],
    calls: Sequence[Call],
    old: KernelHashes,
    new: KernelHashes,
    triton: str,
) -> Iterator[Part]:
    """The part of these rows; none if they hold for the new package. `measured`: the kernels' hashes in each row."""
    mode, names = rows[0]["mode"], measured[0].keys()
    before, after = (
        {name: hashes.get(path.stem, {}).get(mode, {}).get(name, "") for name in names} for hashes in (old, new)
    )
    if all(kernels == after for kernels in measured):
        return
    others = {row["triton"] for row in rows} - {triton}
    if not all(after.values()):
        fault = "the new package has no such kernel"
    elif not all(kernels == before for kernels in measured):
        fault = "it was measured on other kernels than those of the old package"
    elif others:
        fault = f"it was measured with Triton {', '.join(sorted(others))}, not with {triton}"
    else:
        fault = ""
    # A portable kernel whose hash is unchanged is the same code, and need not be compiled.
    same = {name for name in names if before[name] == after[name]}
    compared = dict.fromkeys(call for call in calls if not (isinstance(call, Task) and call.group.pass_ in same))
    yield Part(path=path, title=title, rows=tuple(rows), hashes=after, calls=tuple(compared), fault=fault)


def _entry_calls(variant: str, arch: str, row: Row) -> Iterator[Call]:
    """Calls with an entry's tile: with sequences of whole blocks, like the measured ones, and with a cut last block."""
    group = _group(variant, row, Pass(row["pass"]))
    for seq in (WHOLE_SEQ, CUT_SEQ):
        tile = TileConfig(**row["config"])
        yield Task(package=_ANY, arch=arch, group=group, tile=tile, seq=seq, heads=_heads(row))


def _verdict_calls(variant: str, arch: str, row: Row) -> Iterator[Call]:
    """Calls with the kernels of each family that a verdict compares."""
    heads = _heads(row)
    for pass_name, config in row["config"].items():
        group = _group(variant, row, Pass(pass_name))
        yield Task(package=_ANY, arch=arch, group=group, tile=TileConfig(**config), seq=WHOLE_SEQ, heads=heads)
    is_forward = row["pass"] == "fwd"
    group = _group(variant, row, Pass.FWD if is_forward else Pass.DKDV)
    # The length decides about the tile of Hopper's forward.
    seq = row["seq"] if is_forward else WHOLE_SEQ
    contenders = {*row["ms"], *row["failed"]}
    for name, with_dq in (("hopper", True), ("hopper_dkdv", False)):
        if name in contenders:
            yield HopperTask(package=_ANY, arch=arch, group=group, with_dq=with_dq, seq=seq, heads=heads)


_ANY = Package(root="", name="")
"""Placeholder in a call that is to be compared: `calls.run` replaces it by each of the two packages."""


def _group(variant: str, row: Row, pass_: Pass) -> Group:
    return Group(variant=variant, mode=row["mode"], dtype=row["dtype"], head_dim=row["head_dim"], pass_=pass_)


def _heads(row: Row) -> tuple[int, int]:
    """Heads that stand for those of the measured call. Calls that are not dense have the measured heads, because the
    strides of packed calls depend on them."""
    if row["mode"] == "dense":
        return SMALL_HEADS
    from codegen.tune.measuring import timed_heads

    return timed_heads(row["head_dim"], Workload(seq=row["seq"], group=row["group"]))


def _judged(part: Part, results: Mapping[Call, Sequence[Result]]) -> Rekeyed:
    if part.fault:
        return Rekeyed(part=part, fault=part.fault)
    compared = tuple(result for call in part.calls for result in results[call])
    if not part.calls or any(not results[call] for call in part.calls):
        return Rekeyed(part=part, fault="a call launched none of its kernels", results=compared)
    if unequal := [result for result in compared if not result.status.is_equal]:
        words = f"{len(unequal)} of {len(compared)} launches are not proven equal"
        return Rekeyed(part=part, fault=words, results=compared)
    return Rekeyed(part=part, fault="", results=compared)


def _rewrite(parts: Iterable[Part]) -> None:
    """Give the rows of these parts the new hashes. The rows are the objects that `TunedFile.text` writes."""
    for part in parts:
        for row in part.rows:
            if "kernels" in row:
                row["kernels"] = {name: part.hashes[name] for name in row["kernels"]}
            else:
                row["kernel"] = part.hashes[row["pass"]]
