"""Puts the files of a package in place: all of them or none, whatever interrupts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from codegen.render.lock import remove_empty
from codegen.util.errors import CodegenError

_STAGE = ".render-"
"""How the names of staging folders begin."""

_KEEP = "keep"
"""A file in a staging folder that holds the only copy of something."""


def stages(out: Path) -> Iterator[Path]:
    """The staging folders of renders that were killed."""
    for stage in sorted(out.glob(f"{_STAGE}*")):
        if stage.is_dir() and not stage.is_symlink() and not (stage / _KEEP).exists():
            yield stage


def install(out: Path, texts: Mapping[str, str], removed: Sequence[str]) -> None:
    """Put the texts (path -> text) in place in their order and take `removed` away, or leave everything as it was and
    re-raise.

    The staging folder lies inside `out`, where a rename never crosses file systems. Its name is hidden, so that it does
    not count as a file of the package if the machine loses power.
    """
    absent = _absent_folders(out, texts)
    stage: Path | None = None
    try:
        out.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=out))
        for path, text in texts.items():
            staged = _with_parent(stage / "new" / path)
            staged.write_bytes(text.encode())
        _swap(out, stage, texts, removed, absent)
    except _RestoreError:
        # The staging folder has the only copy of the old files, which the next render must not remove.
        with suppress(OSError):
            (Path(stage or out) / _KEEP).touch()
        raise
    except BaseException:
        _discard(stage, absent)
        raise
    shutil.rmtree(stage)


class _RestoreError(CodegenError):
    """The old files could not be put back."""


def _swap(out: Path, stage: Path, texts: Iterable[str], removed: Iterable[str], absent: Sequence[Path]) -> None:
    """Put the staged files in place, one rename each, with the old ones in `stage/old`; on any exception undo it.

    No file that stays is ever missing. If the process is killed at any point, each file is either old or new, and the
    manifest is old until the end.
    """
    before = {path for path in (*removed, *texts) if (out / path).is_file()}
    try:
        for path in removed:
            os.replace(out / path, _with_parent(stage / "old" / path))
        for path in texts:
            if path in before:
                _keep_copy(out / path, _with_parent(stage / "old" / path))
            os.replace(stage / "new" / path, _with_parent(out / path))
    except BaseException as failure:
        try:
            _restore(out, stage, before, added=set(texts) - before, absent=absent)
        except BaseException as error:
            raise _RestoreError(
                f"{out}: rendering failed ({failure!r}) and the old files could not be put back ({error!r}); "
                f"they are in {stage / 'old'}: move them back by hand"
            ) from failure
        raise


def _keep_copy(path: Path, copy: Path) -> None:
    """Keep what a file holds while it is replaced: a second name for it, or where the disk has no links a copy."""
    try:
        os.link(path, copy, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(path, copy, follow_symlinks=False)


def _restore(out: Path, stage: Path, before: Iterable[str], added: Iterable[str], absent: Iterable[Path]) -> None:
    """Undo a swap that stopped anywhere. It looks at the disk, not at a journal that an interrupt could cut short."""
    for path in added:
        if (out / path).is_file():
            (out / path).unlink()
    remove_empty(absent)
    for path in before:
        if (stage / "old" / path).is_file():
            os.replace(stage / "old" / path, _with_parent(out / path))


def _discard(stage: Path | None, absent: Iterable[Path]) -> None:
    """Remove what a failed render made: the staging folder, then the folders that were not there before."""
    if stage is not None:
        shutil.rmtree(stage)
    remove_empty(absent)


def _absent_folders(out: Path, texts: Iterable[str]) -> list[Path]:
    """The folders that will have to be made, innermost first."""
    targets = [out / _STAGE, *(out / path for path in texts)]
    folders = {folder for target in targets for folder in target.parents if not folder.is_dir()}
    return sorted(folders, key=lambda folder: len(folder.parts), reverse=True)


def prune(out: Path, removed: Iterable[str]) -> None:
    """Remove the folders that held nothing but removed files: Python would still import them as namespace packages."""
    folders = {folder for path in removed for folder in PurePosixPath(path).parents if folder.name}
    for relative in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        folder = out / relative
        if folder.is_dir() and all(child.name == "__pycache__" for child in folder.iterdir()):
            shutil.rmtree(folder)


def _with_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
