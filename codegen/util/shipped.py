"""Where the files that the generator reads are: its templates, the runtime it copies, and its own spec files."""

from __future__ import annotations

from pathlib import Path


def shipped_path(name: str) -> Path:
    """A file or folder that comes with the generator: beside the code in an installed wheel, above it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_data" / name
    return installed if installed.exists() else package.parent / name
