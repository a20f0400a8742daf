"""The package that tests of its file set write into."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.render import files
from tests.support.package_files import OLD


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A package as `OLD` leaves it, with a tuned config and compiled Python in it."""
    folder = tmp_path / "package"
    files.write(folder, OLD)
    for path in ("tuned/h100/causal.json", "alibi/__pycache__/fwd.pyc", ".gitattributes"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("not the generator's")
    return folder
