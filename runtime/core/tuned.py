"""What was measured on a GPU: `tuned/<gpu>/<variant>.json` beside the variants, written by `codegen tune`."""

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..kernels import KERNEL_HASHES

# Files without `families` are of this format, too.
FORMAT = 1
PACKAGE = Path(__file__).resolve().parents[2]
COMMAND = "codegen tune"

CONTENDERS = PORTABLE, HOPPER_DKDV, HOPPER = ("portable", "hopper_dkdv", "hopper")
"""Whose kernels a forward or a backward runs: the portable family's; Hopper's for dk and dv, beside the portable dq;
Hopper's for all that there is to compute."""

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
        return PORTABLE


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


class Verdict(NamedTuple):
    """What a forward, `fwd`, or a whole backward, `bwd`, took on a problem with each family's kernels, in ms.

    `ms`: by contender, of those that gave right results; `failed`: the reasons of the others. `kernels`: the hashes of
    the code that was measured, by kernel, with Triton `triton`.
    """

    pass_name: str
    problem: Problem
    ms: Mapping[str, float]
    failed: Mapping[str, str]
    kernels: Mapping[str, str]
    triton: str


class Measured(NamedTuple):
    """What a file says of a variant on the GPU of that name."""

    gpu: str
    entries: tuple[Entry, ...]
    verdicts: tuple[Verdict, ...]


_NOTHING = Measured("", (), ())


def gpu_key(name: str) -> str:
    """The folder of a GPU's tuned tiles, from the name that its driver gives.

    >>> gpu_key("NVIDIA H100 80GB HBM3"), gpu_key("NVIDIA H100 PCIe"), gpu_key("NVIDIA GeForce RTX 4090")
    ('h100', 'h100_pcie', 'rtx_4090')
    """
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", name).lower())
    return "_".join(words)


def tuned_path(gpu: str, variant: str, package: Path = PACKAGE) -> Path:
    """The file of what was measured of a variant on a GPU."""
    return package / "tuned" / gpu / f"{variant}.json"


def read(path: Path) -> Measured:
    """What a file says; ValueError says what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        entries = tuple(_entry(row) for row in document["entries"])
        return Measured(str(document["gpu"]), entries, tuple(_verdict(row) for row in document.get("families", ())))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks or misspells {error}") from None


def _entry(row: Mapping[str, Any]) -> Entry:
    _check_numbers(row, [row["config"][field] for field in Tile._fields])
    return Entry(
        pass_name=str(row["pass"]),
        problem=_problem(row),
        tile=Tile(**row["config"]),
        ms=float(row["ms"]),
        default_ms=None if row["default_ms"] is None else float(row["default_ms"]),
        kernel=str(row["kernel"]),
        triton=str(row["triton"]),
    )


def _verdict(row: Mapping[str, Any]) -> Verdict:
    times = {str(name): float(ms) for name, ms in row["ms"].items()}
    if not times or not times.keys() <= set(CONTENDERS) or not all(0 < ms < math.inf for ms in times.values()):
        raise ValueError(f"ms of {dict(row)} are no times of some of {', '.join(CONTENDERS)}")
    return Verdict(
        pass_name=str(row["pass"]),
        problem=_problem(row),
        ms=times,
        failed={str(name): str(reason) for name, reason in row["failed"].items()},
        kernels={str(name): str(code) for name, code in row["kernels"].items()},
        triton=str(row["triton"]),
    )


def _problem(row: Mapping[str, Any]) -> Problem:
    _check_numbers(row, [row["head_dim"], row["group"], row["seq"]])
    return Problem(row["mode"], row["dtype"], row["head_dim"], row["group"], row["seq"])


def _check_numbers(row: Mapping[str, Any], numbers: Sequence[Any]) -> None:
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"a number of {dict(row)} is no positive int")


@cache
def tuned_entries(gpu: str, variant: str) -> Measured:
    """What holds for the kernels as they are. What cannot be used is ignored, aloud, once."""
    path = tuned_path(gpu, variant)
    if not gpu or not path.is_file():
        return _NOTHING
    try:
        measured = read(path)
    except (ValueError, OSError) as error:
        return _ignored(path, variant, f"it cannot be read: {error}")
    if gpu_key(measured.gpu) != gpu:
        return _ignored(path, variant, f"it was made on {measured.gpu}")
    fresh = Measured(
        measured.gpu,
        tuple(entry for entry in measured.entries if is_fresh(variant, entry)),
        tuple(verdict for verdict in measured.verdicts if is_fresh(variant, verdict)),
    )
    stale = stale_parts(variant, measured)
    if stale:
        _ignored(path, variant, f"its {', '.join(stale)} were measured on other kernels than these")
    return fresh


def is_fresh(variant: str, found: Entry | Verdict) -> bool:
    """Whether the code that was measured is what the variant's kernels are now."""
    known = KERNEL_HASHES.get(variant, {}).get(found.problem.mode, {})
    kernels = found.kernels if isinstance(found, Verdict) else {found.pass_name: found.kernel}
    return all(known.get(name) == code for name, code in kernels.items())


def stale_parts(variant: str, measured: Measured) -> list[str]:
    """What of a file was measured on other kernels than the variant's are now: its passes, then its families'."""
    tiles = {_kernel_of(entry) for entry in measured.entries if not is_fresh(variant, entry)}
    families = {_kernel_of(verdict) for verdict in measured.verdicts if not is_fresh(variant, verdict)}
    return [*sorted(tiles), *(f"families of {name}" for name in sorted(families))]


def _kernel_of(found: Entry | Verdict) -> str:
    mode = found.problem.mode
    return found.pass_name if mode == "dense" else f"{mode} {found.pass_name}"


def _ignored(path: Path, variant: str, reason: str) -> Measured:
    message = f"{path}: ignored, defaults in its place: {reason}; to measure again: {COMMAND} {variant}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _NOTHING
