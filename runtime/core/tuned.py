"""Measurements on a GPU: `tuned/<gpu>/<variant>.json` beside the variants, written by `codegen tune`."""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..archs import TILE_VALUES
from ..kernels import KERNEL_HASHES
from .tiles import HOPPER, PORTABLE, PagedTile, Tile

# A file without `families` has this format too.
FORMAT = 1
PACKAGE = Path(__file__).resolve().parents[2]
COMMAND = "codegen tune"

HOPPER_DKDV = "hopper_dkdv"
CONTENDERS = (PORTABLE, HOPPER_DKDV, HOPPER)
"""The kernels that a forward or a backward can run: the portable family; Hopper's for dk and dv, with the portable dq;
Hopper's for everything."""

# Parts of a GPU's name that do not tell its chip or its power from others.
_NOISE = re.compile(r"nvidia|amd|tesla|geforce|instinct|generation|\d+ ?gi?b|hbm\d\w*|sxm\d*|oam", re.IGNORECASE)


class Problem(NamedTuple):
    """The properties of a call that a tile is chosen by.

    `mode`: dense, packed or segmented. `head_dim`: the larger of q's and v's. `group`: query heads per key head. `seq`:
    keys of a sequence, the average in a packed call.
    """

    mode: str
    dtype: str
    head_dim: int
    group: int
    seq: int

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} head_dim {self.head_dim} group {self.group} seq {self.seq}"


class Entry(NamedTuple):
    """The fastest tile of one kernel for one problem, with its time and that of the default tile, in ms.

    `kernel`: hash of the code that was measured. `triton`: the version of Triton. `default_ms` is None if the default
    does not run.
    """

    pass_name: str
    problem: Problem
    tile: Tile
    ms: float
    default_ms: float | None
    kernel: str
    triton: str


class Verdict(NamedTuple):
    """The times of a forward (`fwd`) or a whole backward (`bwd`) on a problem, with the kernels of each family.

    `ms`: time of each contender that gave right results. `failed`: why the others did not. `kernels`: hashes of the
    code that was measured, by kernel. `triton`: the version of Triton.
    """

    pass_name: str
    problem: Problem
    ms: Mapping[str, float]
    failed: Mapping[str, str]
    kernels: Mapping[str, str]
    triton: str


class PagedProblem(NamedTuple):
    """The properties of a call on paged caches that a tile is chosen by.

    `head_dim`: q's. `group`: query heads per key head. `dtype`, `kv_dtype`: of queries and of caches.
    """

    dtype: str
    kv_dtype: str
    head_dim: int
    group: int

    def __str__(self) -> str:
        cache = "" if self.kv_dtype == self.dtype else f" on {self.kv_dtype}"
        return f"paged {self.dtype}{cache} head_dim {self.head_dim} group {self.group}"


class PagedEntry(NamedTuple):
    """The tile of a kernel on paged caches that is the fastest on average over lengths and batch sizes.

    `ms`, `default_ms`: geometric means of this tile's times and of the default's. `kernels`: hashes of the code that
    was measured, by kernel. `triton`: the version of Triton.
    """

    pass_name: str
    problem: PagedProblem
    tile: PagedTile
    ms: float
    default_ms: float | None
    kernels: Mapping[str, str]
    triton: str


class Measured(NamedTuple):
    """The measurements of a variant in one file. `gpu`: the name that the driver gives. `arch`: such as sm_90."""

    gpu: str
    entries: tuple[Entry, ...]
    verdicts: tuple[Verdict, ...]
    paged: tuple[PagedEntry, ...] = ()
    arch: str = ""

    @property
    def folder(self) -> str:
        """The folder of the GPU's measurements."""
        return gpu_key(self.gpu)


_NOTHING = Measured("", (), ())

PAGED = "paged"
"""The mode of calls on paged caches, as hashes of kernels and tuned files call it."""


def gpu_key(name: str) -> str:
    """The folder of a GPU's tuned tiles, from the name that the driver gives.

    >>> gpu_key("NVIDIA H100 80GB HBM3"), gpu_key("NVIDIA H100 PCIe"), gpu_key("NVIDIA GeForce RTX 4090")
    ('h100', 'h100_pcie', 'rtx_4090')
    """
    words = re.findall(r"[a-z0-9]+", _NOISE.sub(" ", name).lower())
    return "_".join(words)


def tuned_path(gpu: str, variant: str, package: Path = PACKAGE) -> Path:
    """The file with the measurements of a variant on a GPU."""
    return package / "tuned" / gpu / f"{variant}.json"


def read(path: Path) -> Measured:
    """The content of a file. A ValueError says what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        entries = tuple(_entry(row) for row in document["entries"])
        verdicts = tuple(_verdict(row) for row in document.get("families", ()))
        paged = tuple(_paged_entry(row) for row in document.get("paged", ()))
        return Measured(str(document["gpu"]), entries, verdicts, paged, str(document["arch"]))
    except KeyError as error:
        raise ValueError(f"it lacks or misspells {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a value has another type than in a tuned file: {error}") from None


def _entry(row: Mapping[str, Any]) -> Entry:
    _check_tile(row, Tile._fields)
    return Entry(
        pass_name=str(row["pass"]),
        problem=_problem(row),
        tile=Tile(**row["config"]),
        ms=float(row["ms"]),
        default_ms=None if row["default_ms"] is None else float(row["default_ms"]),
        kernel=str(row["kernel"]),
        triton=str(row["triton"]),
    )


def _paged_entry(row: Mapping[str, Any]) -> PagedEntry:
    _check_numbers(row, [row["head_dim"], row["group"]])
    _check_tile(row, PagedTile._fields)
    return PagedEntry(
        pass_name=str(row["pass"]),
        problem=PagedProblem(str(row["dtype"]), str(row["kv_dtype"]), row["head_dim"], row["group"]),
        tile=PagedTile(**row["config"]),
        ms=float(row["ms"]),
        default_ms=None if row["default_ms"] is None else float(row["default_ms"]),
        kernels={str(name): str(code) for name, code in row["kernels"].items()},
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
    return Problem(str(row["mode"]), str(row["dtype"]), row["head_dim"], row["group"], row["seq"])


def _check_numbers(row: Mapping[str, Any], numbers: Sequence[Any]) -> None:
    if not all(type(number) is int and number > 0 for number in numbers):
        raise ValueError(f"a number of {dict(row)} is no positive int")


def _check_tile(row: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raise for what no kernel can be compiled with, as the call's own `config=` does."""
    _check_numbers(row, [row["config"][field] for field in fields])
    for field, allowed in TILE_VALUES.items():
        if row["config"][field] not in allowed:
            raise ValueError(f"{field} of {dict(row)} is none of {', '.join(map(str, allowed))}")


def measurements(gpu: str, arch: str, variant: str) -> Iterator[Measured]:
    """What was measured on this GPU, then what was measured on others of its architecture, in the order of their
    folders. Nothing without a GPU.

    For a problem that was not measured on a GPU, such a measurement is closer to it than a default: of the tiles that
    were tuned on an H100 and on an H200, 85 % are the same.
    """
    if not gpu:
        return
    yield tuned_entries(gpu, variant)
    own = tuned_path(gpu, variant)
    for path in sorted(own.parents[1].glob(f"*/{own.name}")):
        others = _NOTHING if path == own else tuned_entries(path.parent.name, variant, warns=False)
        if others.arch == arch:
            yield others


@cache
def tuned_entries(gpu: str, variant: str, warns: bool = True) -> Measured:
    """The measurements on a GPU that are valid for the present kernels. The rest is ignored with one warning."""
    path = tuned_path(gpu, variant)
    if not gpu or not path.is_file():
        return _NOTHING
    try:
        measured = read(path)
    except (ValueError, OSError) as error:
        return _ignored(path, variant, f"it cannot be read: {error}", warns)
    if measured.folder != gpu:
        return _ignored(path, variant, f"it was made on {measured.gpu}", warns)
    stale = stale_parts(variant, measured)
    if stale:
        _ignored(path, variant, f"its {', '.join(stale)} were measured on other kernels than these", warns)
    return measured._replace(
        entries=tuple(entry for entry in measured.entries if is_fresh(variant, entry)),
        verdicts=tuple(verdict for verdict in measured.verdicts if is_fresh(variant, verdict)),
        paged=tuple(entry for entry in measured.paged if is_fresh(variant, entry)),
    )


def is_fresh(variant: str, found: Entry | Verdict | PagedEntry) -> bool:
    """True if the code that was measured is that of the variant's present kernels."""
    known = KERNEL_HASHES.get(variant, {}).get(_mode_of(found), {})
    kernels = {found.pass_name: found.kernel} if isinstance(found, Entry) else found.kernels
    return all(known.get(name) == code for name, code in kernels.items())


def stale_parts(variant: str, measured: Measured) -> list[str]:
    """The parts of a file that were measured on other code than that of the present kernels: passes, then families."""
    tiles = {_kernel_of(entry) for entry in measured.entries if not is_fresh(variant, entry)}
    families = {_kernel_of(verdict) for verdict in measured.verdicts if not is_fresh(variant, verdict)}
    paged = {entry.pass_name for entry in measured.paged if not is_fresh(variant, entry)}
    return [*sorted(tiles), *sorted(paged), *(f"families of {name}" for name in sorted(families))]


def _mode_of(found: Entry | Verdict | PagedEntry) -> str:
    return PAGED if isinstance(found, PagedEntry) else found.problem.mode


def _kernel_of(found: Entry | Verdict) -> str:
    mode = found.problem.mode
    return found.pass_name if mode == "dense" else f"{mode} {found.pass_name}"


def _ignored(path: Path, variant: str, reason: str, warns: bool) -> Measured:
    message = f"{path}: ignored, defaults in its place: {reason}; to measure again: {COMMAND} {variant}"
    if warns:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return _NOTHING
