"""Reports on a package's tuned files. `check` needs this in a bare installation, so numpy is not imported here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from codegen import PROGRAM
from codegen.compile.packages import find_package
from codegen.util.errors import CodegenError
from codegen.util.text import aligned


def stale(out: Path) -> list[str]:
    """A line for each tuned file of which a part was measured on other code than that of the present kernels."""
    if not (out / "tuned").is_dir():
        return []
    package = find_package(out).name
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    lines = []
    for path in sorted((out / "tuned").glob("*/*.json")):
        name = path.relative_to(out).as_posix()
        try:
            old = tuned.stale_parts(path.stem, tuned.read(path))
        except ValueError as error:
            lines.append(f"{name}: cannot be read: {error}")
            continue
        if old:
            lines.append(f"{name}: {', '.join(old)} measured on other kernels than these: tune again, or delete it")
    return lines


def gains(out: Path, gpu: str) -> list[str]:
    """The gain of tuning on a GPU: time of the default tiles divided by time of the tuned tiles, as geometric means by
    variant."""
    package = find_package(out).name
    tuned = importlib.import_module(f"{package}._runtime.core.tuned")
    passes = importlib.import_module(f"{package}._runtime.core.configs").PASSES
    folder = out / "tuned" / (gpu or this_gpu(tuned))
    rows = [("variant", *passes, "all", "most", "cases")]
    every: dict[str, list[float]] = {name: [] for name in passes}
    for path in sorted(folder.glob("*.json")):
        ratios: dict[str, list[float]] = {name: [] for name in passes}
        try:
            entries = tuned.read(path).entries
        except ValueError as error:
            raise CodegenError(f"{path}: cannot be read: {error}") from None
        for entry in entries:
            if entry.default_ms is not None:
                ratios[entry.pass_name].append(entry.default_ms / entry.ms)
        rows.append(_gain_row(path.stem, ratios))
        for name in passes:
            every[name] += ratios[name]
    if len(rows) == 1:
        raise CodegenError(f"{folder}: no tuned files there; `{PROGRAM} tune` on that GPU makes them")
    rows.append(_gain_row("all", every))
    heading = f"speedup of tuned over default tiles on {folder.name}, geometric means over lengths and dtypes"
    return [heading, "", *aligned(rows)]


def _gain_row(name: str, ratios: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    together = [ratio for each in ratios.values() for ratio in each]
    means = [f"{geometric_mean(each):.2f}" if each else "-" for each in (*ratios.values(), together)]
    return (name, *means, f"{max(together):.2f}" if together else "-", str(len(together)))


def this_gpu(tuned: Any) -> str:
    """The folder of tuned tiles of this machine's GPU; `tuned`: the package's module that reads them."""
    try:
        import torch

        found = torch.cuda.is_available()
    except ModuleNotFoundError:
        found = False
    if not found:
        raise CodegenError("--gpu: expected a GPU's name, such as h100: there is none on this machine")
    return str(tuned.gpu_key(torch.cuda.get_device_name()))
