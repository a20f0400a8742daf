"""Tiles measured on a GPU: `tuned/<gpu>/<variant>.json` beside the variants, written by `python -m codegen tune`."""

import json
import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .kernels import KERNEL_HASHES

FORMAT = 1
PACKAGE = Path(__file__).resolve().parent.parent
COMMAND = "python -m codegen tune"

# What of a GPU's name tells neither its chip nor its power apart from others.
_NOISE = re.compile(r"nvidia|amd|tesla|geforce|instinct|generation|\d+ ?gi?b|hbm\d\w*|sxm\d*|oam", re.IGNORECASE)


class Tile(NamedTuple):
    """Block sizes and launch options of one kernel of the portable family."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def family(self) -> str:
        """The family of the kernel."""
        return "portable"


class Problem(NamedTuple):
    """What a tile is chosen for, beside the kernel.

    `mode`: dense, packed or segmented. `head_dim`: the larger of q's and v's. `group`: query heads per key head. `seq`:
    keys of a sequence, on average where they are packed.
    """

    mode: str
    dtype: str
    head_dim: int
    group: int
    seq: int

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} head_dim {self.head_dim} group {self.group} seq {self.seq}"


class Entry(NamedTuple):
    """What the tuner found for one kernel and problem: the fastest tile, and what its default took beside it, in ms.

    `kernel`: the hash of the code that was measured, with Triton `triton`. `default_ms` is None where the default does
    not run.
    """

    pass_name: str
    problem: Problem
    tile: Tile
    ms: float
    default_ms: float | None
    kernel: str
    triton: str


def gpu_key(name: str) -> str:
    """The folder of a GPU's tuned tiles, from the name that its driver gives.

    >>> gpu_key("NVIDIA H100 80GB HBM3"), gpu_key("NVIDIA H100 PCIe"), gpu_key("NVIDIA GeForce RTX 4090")
    ('h100', 'h100_pcie', 'rtx_4090')
    """
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", name).lower())
    return "_".join(words)


def tuned_path(gpu: str, variant: str, package: Path = PACKAGE) -> Path:
    """The file of a variant's tiles on a GPU."""
    return package / "tuned" / gpu / f"{variant}.json"


def read(path: Path) -> tuple[str, list[Entry]]:
    """The GPU's name and the entries of a file; ValueError says what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        return str(document["gpu"]), [_entry(row) for row in document["entries"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks or misspells {error}") from None


def _entry(row: Mapping[str, Any]) -> Entry:
    numbers = [row["config"][field] for field in Tile._fields]
    numbers += [row["head_dim"], row["group"], row["seq"]]
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"a number of {dict(row)} is no positive int")
    return Entry(
        pass_name=str(row["pass"]),
        problem=Problem(row["mode"], row["dtype"], row["head_dim"], row["group"], row["seq"]),
        tile=Tile(**row["config"]),
        ms=float(row["ms"]),
        default_ms=None if row["default_ms"] is None else float(row["default_ms"]),
        kernel=str(row["kernel"]),
        triton=str(row["triton"]),
    )


@cache
def tuned_entries(gpu: str, variant: str) -> tuple[Entry, ...]:
    """The entries that hold for the kernels as they are. What cannot be used is ignored, aloud, once."""
    path = tuned_path(gpu, variant)
    if not gpu or not path.is_file():
        return ()
    try:
        name, entries = read(path)
    except (ValueError, OSError) as error:
        return _ignored(path, variant, f"it cannot be read: {error}")
    if gpu_key(name) != gpu:
        return _ignored(path, variant, f"it was made on {name}")
    known = KERNEL_HASHES.get(variant, {})
    fresh = [entry for entry in entries if known.get(entry.problem.mode, {}).get(entry.pass_name) == entry.kernel]
    if len(fresh) < len(entries):
        stale = ", ".join(sorted({entry.pass_name for entry in entries} - {entry.pass_name for entry in fresh}))
        what = f"its {stale}" if stale else f"{len(entries) - len(fresh)} of its entries"
        _ignored(path, variant, f"{what} were measured on other kernels than these")
    return tuple(fresh)


def _ignored(path: Path, variant: str, reason: str) -> tuple[Entry, ...]:
    message = f"{path}: ignored, default tiles in its place: {reason}; to measure again: {COMMAND} {variant}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return ()
