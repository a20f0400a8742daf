"""The Python interpreters of this machine, of the versions that are supported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SUPPORTED = ("3.11", "3.12", "3.13")

_ASK = "import ensurepip, sys, venv; print(*sys.version_info[:2], sep='.'); print(sys.executable)"


@cache
def found() -> dict[str, Path]:
    """Version -> an interpreter of it that can make virtual environments; versions without one are left out."""
    interpreters = {}
    for version in SUPPORTED:
        for candidate in _candidates(version):
            executable = _executable(candidate, version)
            if executable is not None:
                interpreters[version] = executable
                break
    return interpreters


def summary() -> str:
    """Which versions were found and which were not, as one line.

    >>> summary().startswith("Pythons found: ")
    True
    """
    there = found()
    missing = [version for version in SUPPORTED if version not in there]
    return f"Pythons found: {', '.join(there) or 'none'}" + (f"; not found: {', '.join(missing)}" if missing else "")


def _candidates(version: str) -> Iterator[Path]:
    """Where an interpreter may be: the one that runs this, the search path, the folders of version managers."""
    name = f"python{version}"
    yield Path(sys.executable)
    on_path = shutil.which(name)
    if on_path is not None:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted((pyenv / "versions").glob(f"{version}.*/bin/{name}"), reverse=True)
    yield from sorted((Path.home() / ".local/share/uv/python").glob(f"*-{version}.*/bin/{name}"), reverse=True)
    yield from (folder / name for folder in (Path("/usr/local/bin"), Path("/usr/bin"), Path("/opt/homebrew/bin")))


def _executable(candidate: Path, version: str) -> Path | None:
    """The interpreter that runs as `candidate`, which may be a shim; None unless it works and is of the version."""
    try:
        done = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n")
    return Path(lines[1]) if done.returncode == 0 and lines[0] == version else None
