"""The file set of a rendered package: its manifest, how it differs from what is on disk, and how it gets there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from codegen.render.install import install, prune, stages
from codegen.render.lock import one_at_a_time
from codegen.util.errors import CodegenError, naming

MANIFEST = "MANIFEST.json"
"""The generator's record of a folder that it made: the variants, and the SHA-256 of every file."""

MANIFEST_FORMAT = 1

TUNED = "tuned"
"""The folder inside a package that belongs to the tuner."""

KEEP_EDITS = (
    "move the change into the spec, or into templates/ of a checkout, and render again, or pass --force to discard it"
)
KEEP_FOREIGN = "move them elsewhere and render again, or pass --force to delete them"
"""What to do about files that were edited by hand, and about files that no render left."""


_FOREIGN = "not made by this generator"


class Status(StrEnum):
    """How a file differs from what the spec renders to."""

    MISSING = "MISSING"  # rendered, not on disk
    CRLF = "CRLF"  # as rendered except for the line ends, which Git changes where core.autocrlf is set
    STALE = "STALE"  # as an earlier render left it
    ORPHAN = "ORPHAN"  # on disk, no longer (or never) rendered
    EDITED = "EDITED"  # neither what is rendered now nor what an earlier render left


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that is not as the spec renders it.

    `path` is relative to the package, with forward slashes. `is_foreign`: an orphan that no render left.
    """

    status: Status
    path: str
    is_foreign: bool = False

    def __str__(self) -> str:
        return f"{self.status:<9}{self.path}{f' ({_FOREIGN})' if self.is_foreign else ''}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The files that `write` wrote, left unchanged and removed, as paths relative to the package."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]

    def __str__(self) -> str:
        if not self.written and not self.removed:
            return f"up to date ({len(self.unchanged)} files)"
        return f"{len(self.written)} written, {len(self.unchanged)} unchanged, {len(self.removed)} removed"


# ------------------------------------------------------------------------------------------------------------ manifest


def with_manifest(texts: Mapping[str, str], variants: Mapping[str, Any], source: str = "") -> dict[str, str]:
    """The rendered files together with the manifest that describes them.

    `variants` holds JSON-able facts per variant; `source` names what the files were made of, such as `variants.yaml`.
    Equal arguments give equal bytes: there is no date, tool version or absolute path in a manifest.
    """
    hashes = {path: _sha256(text.encode()) for path, text in texts.items()}
    manifest = {"format": MANIFEST_FORMAT, "source": source, "variants": variants, "files": hashes}
    return {**texts, MANIFEST: json.dumps(manifest, indent=2, sort_keys=True) + "\n"}


Recorded = Mapping[str, frozenset[str]]
"""Path -> the SHA-256 of the file that renders left there: one, or several if a render was killed half-way."""


def _recorded(out: Path) -> Recorded | None:
    """The files that renders left in the folder; None without a manifest of this generator.

    A render that was killed leaves its staging folder, with the manifest that it was about to install. That manifest
    lists the new files that were installed already. A manifest cannot hold its own hash. It counts as unedited, because
    nobody's work is lost when it is replaced.
    """
    staged = [hashes for stage in stages(out) if (hashes := _manifest(stage / "new" / MANIFEST)) is not None]
    own = _manifest(out / MANIFEST)
    if own is None and not (staged and _read(out / MANIFEST) is None):
        return None
    found: dict[str, frozenset[str]] = {}
    for hashes in (own or {}, *staged):
        for path, digest in hashes.items():
            found[path] = found.get(path, frozenset()) | {digest}
    content = _read(out / MANIFEST)
    return found if content is None else {**found, MANIFEST: frozenset({_sha256(content)})}


def _manifest(path: Path) -> dict[str, str] | None:
    """Path -> SHA-256 as a manifest of this generator says; None if the file is none."""
    try:
        manifest = json.loads(_read(path) or b"")
    except (ValueError, RecursionError):
        return None
    match manifest:
        case {"format": int(version), "files": dict(hashes)}:
            is_ours = version == MANIFEST_FORMAT and all(map(_is_inside, hashes))
            return {path: str(digest) for path, digest in hashes.items()} if is_ours else None
    return None


def _is_inside(path: str) -> bool:
    """Whether a recorded path names a file that a package may have: renders may delete the files that are recorded."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or pure.parts[0] == TUNED:
        return False
    return path.isprintable()  # without NUL and lone surrogates, which no file system takes


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------------------------------------- compare


def compare(out: Path, fresh: Mapping[str, str]) -> list[Difference]:
    """Every file under `out` that is not as `fresh` (path -> text, the manifest included) says, sorted by path."""
    _require_folder(out)
    return _differences(out, fresh, _recorded(out) or {})


def _differences(out: Path, fresh: Mapping[str, str], recorded: Recorded) -> list[Difference]:
    paths = sorted({*fresh, *recorded, *_scan(out)})
    judged = ((path, _status(_read(out / path), fresh.get(path), recorded.get(path))) for path in paths)
    return [
        Difference(status=status, path=path, is_foreign=status is Status.ORPHAN and path not in recorded)
        for path, status in judged
        if status is not None
    ]


def _status(content: bytes | None, text: str | None, recorded: frozenset[str] | None) -> Status | None:
    """The status of one file, given its content on disk, its rendered text and the hashes that renders recorded."""
    if content is None:
        return None if text is None else Status.MISSING
    if text is not None and content == text.encode():
        return None
    with_lf = content.replace(b"\r\n", b"\n")
    if text is not None and with_lf == text.encode():
        return Status.CRLF
    if recorded is not None and recorded.isdisjoint((_sha256(content), _sha256(with_lf))):
        return Status.EDITED
    if text is None:
        return Status.ORPHAN
    return Status.EDITED if recorded is None else Status.STALE


def _scan(out: Path) -> Iterator[str]:
    """Paths of the files under `out` that are the generator's to judge.

    Not judged: tuned configs, compiled Python, and hidden files, which belong to other tools (`.gitattributes`).
    """
    for folder, subfolders, names in os.walk(out):
        relative = Path(folder).relative_to(out)
        foreign = {TUNED, "__pycache__"} if folder == str(out) else {"__pycache__"}
        subfolders[:] = [name for name in subfolders if name not in foreign and not name.startswith(".")]
        yield from ((relative / n).as_posix() for n in names if not n.startswith(".") and not n.endswith(".pyc"))


def _read(path: Path) -> bytes | None:
    # A file where the package needs a folder (NotADirectoryError) is reported under its own name.
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def _require_folder(out: Path) -> None:
    if out.is_symlink() and not out.exists():
        raise CodegenError(f"{out}: a link to {os.readlink(out)}, which does not exist; give --out a folder")
    if out.exists() and not out.is_dir():
        raise CodegenError(f"{out}: not a folder; give --out the folder of the package")


# --------------------------------------------------------------------------------------------------------------- write


def refusal(out: Path, fresh: Mapping[str, str]) -> str:
    """The error with which `write` refuses a folder as a whole, whatever files of it differ; empty if it does not."""
    try:
        _own_folder(out, fresh, force=False)
    except CodegenError as error:
        return str(error)
    return ""


def write(
    out: Path,
    fresh: Mapping[str, str],
    force: bool = False,
    keep_edits: str = KEEP_EDITS,
    keep_foreign: str = KEEP_FOREIGN,
) -> Summary:
    """Make the folder `out` hold exactly `fresh` (path -> text, the manifest included).

    Only files that differ are touched, and all of them or none: after any exception the folder is as it was. Two
    processes that write the same folder take turns.
    Raises CodegenError when the folder was not made by this generator, or, unless `force` is given, when it was made of
    something else or a file that no earlier render left there would be lost. `keep_edits` and `keep_foreign` say what
    to do about such files. Line ends are restored without `force`: nobody's work is lost.
    """
    with one_at_a_time(out):
        differences = _differences(out, fresh, _own_folder(out, fresh, force=force))
        if not force:
            _refuse_losses(out, differences, keep_edits, keep_foreign)
        return _write(out, fresh, differences)


def _write(out: Path, fresh: Mapping[str, str], differences: Iterable[Difference]) -> Summary:
    changed = {d.path for d in differences}
    removed = tuple(sorted(changed - fresh.keys()))
    # The manifest goes last. A render that is killed half-way then leaves files that either the old manifest or the
    # staged one explains, never ones that look edited.
    written = tuple(sorted(changed & fresh.keys(), key=lambda path: (path == MANIFEST, path)))
    interrupted = list(stages(out))
    if changed:
        with naming(out):
            install(out, {path: fresh[path] for path in written}, removed)
            prune(out, removed)
    for stage in interrupted:
        shutil.rmtree(stage)
    return Summary(written=written, unchanged=tuple(sorted(fresh.keys() - changed)), removed=removed)


def _own_folder(out: Path, fresh: Mapping[str, str], *, force: bool) -> Recorded:
    """The files that renders left in a folder that may be written.

    Raises if this generator did not make it or it has links, or, without `force`, if it was made of another spec.
    """
    _require_folder(out)
    recorded = _recorded(out)
    if recorded is None and any(_scan(out)):
        raise CodegenError(
            f"{out}: not a folder this generator made: it is not empty and has no {MANIFEST} of ours; "
            f"give --out a new folder, or restore {MANIFEST} from version control"
        )
    _refuse_links(out, {*fresh, *(recorded or {})})
    if not force:
        _refuse_another(out, _source(_read(out / MANIFEST)), _source(fresh[MANIFEST]))
    return recorded or {}


def _refuse_links(out: Path, paths: Iterable[str]) -> None:
    """Raise if a folder of the package is a link: files would be written and deleted elsewhere, `--force` or not."""
    folders = {folder for path in paths for folder in PurePosixPath(path).parents if folder.parts}
    for link in sorted(out / folder for folder in folders if (out / folder).is_symlink()):
        raise CodegenError(
            f"{link}: a link to {os.readlink(link)}, through which files would be written elsewhere; remove the "
            "link, or give --out a folder without"
        )


def _source(manifest: bytes | str | None) -> str:
    """What a manifest says that its files were made of; "" if there is none, or if it does not say."""
    try:
        return str(json.loads(manifest or "{}").get("source", ""))
    except ValueError:
        return ""


def _refuse_another(out: Path, old: str, new: str) -> None:
    """Raise if the folder was made of something else, such as another spec: all of it would be replaced."""
    if old and new and old != new:
        raise CodegenError(
            f"{out}: the folder was made of {old}, and {new} would replace it: give --out another folder, or delete "
            "this one"
        )


def _refuse_losses(out: Path, differences: Iterable[Difference], keep_edits: str, keep_foreign: str) -> None:
    """Raise if writing would overwrite or delete something that no earlier render left."""
    edited = [d.path for d in differences if d.status is Status.EDITED]
    foreign = [d.path for d in differences if d.is_foreign]
    if edited or foreign:
        lines = [f"{out}: nothing was written, because these files would be lost:"]
        lines += [f"  {path} (edited by hand)" for path in edited]
        lines += [f"  {path} ({_FOREIGN})" for path in foreign]
        lines += [f"Files edited by hand: {keep_edits}."] if edited else []
        lines += [f"Files {_FOREIGN}: {keep_foreign}."] if foreign else []
        raise CodegenError("\n".join(lines))


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all, whatever interrupts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        os.close(descriptor)
        with naming(path):
            Path(name).write_text(text, encoding="utf-8")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
