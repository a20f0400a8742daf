"""The lock by which only one process at a time renders into a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Hold the lock of a package's folder.

    The lock is on the folder around it, which is made before the first render, so that a second process finds the same
    one. If the render fails, what was made is removed. The system frees the lock when the process ends. Where the
    system or the file system has no such locks, there is none.
    """
    around = out.absolute().parent
    made = [folder for folder in (around, *around.parents) if not folder.exists()]
    descriptor: int | None = None
    try:
        if made:
            around.mkdir(parents=True, exist_ok=True)
        with suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(around, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except BaseException:
        remove_empty(made)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders that are empty. Each comes before the folder around it."""
    for folder in folders:
        with suppress(OSError):  # never made, or in use by someone else by now
            folder.rmdir()
