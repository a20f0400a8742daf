"""Formats rendered files with the pinned formatter, and says which template a refused file came from."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from codegen.util.errors import CodegenError, naming
from codegen.util.text import LINE_LENGTH

RUFF = "0.17.5"
"""The version of the formatter, which is a part of rendering."""


def format_files(files: Mapping[str, str]) -> dict[str, str]:
    """Format Python files with the pinned formatter, all in one call, independent of any settings around it."""
    with tempfile.TemporaryDirectory(prefix="codegen-") as folder:
        root = Path(folder)
        for path, text in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with naming(root):
                target.write_text(text, encoding="utf-8")
        command = [_ruff(), "format", "--isolated", "--no-cache", f"--line-length={LINE_LENGTH}"]
        result = subprocess.run(
            [*command, "--target-version=py311", str(root)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            words = result.stderr.replace(f"{root.resolve()}/", "").replace(f"{root}/", "")
            raise CodegenError(
                f"the formatter refused rendered files, a fault of the generator:\n{_placed(words, files)}"
            )
        return {path: (root / path).read_text(encoding="utf-8") for path in files}


def _placed(words: str, files: Mapping[str, str]) -> str:
    """The formatter's words, with the variant and the template of each file they name, and the line they are about.

    >>> header = "# variant: v: {mask: causal}\\n# template: a.py.jinja\\n"
    >>> print(_placed("error: Failed to parse v/a.py:3:2: Bad", {"v/a.py": header + " x"}))
    v/a.py:3:2: Bad (variant v, template a.py.jinja)
         x
    """
    lines: list[str] = []
    for line in words.strip().splitlines():
        found = re.fullmatch(r"error: Failed to parse (.+?):(\d+):\d+: .*", line)
        if found is None or found[1] not in files:
            lines.append(line)
            continue
        text = files[found[1]].splitlines()
        said = (re.match(r"# (variant|template): ([^:\s]+)", x) for x in text[: int(found[2])])
        source = ", ".join(f"{x[1]} {x[2]}" for x in said if x is not None)
        lines.append(f"{line.removeprefix('error: Failed to parse ')} ({source})")
        lines += [f"    {x}" for x in text[int(found[2]) - 1 : int(found[2])]]
    return "\n".join(lines)


def _ruff() -> str:
    """The ruff of this environment, wherever its package installed the program."""
    try:
        from ruff import find_ruff_bin

        found: str | None = str(find_ruff_bin())
    except (ImportError, FileNotFoundError):
        found = None
    try:
        there = version("ruff")
    except PackageNotFoundError:
        found = None
    if found is None or there != RUFF:
        is_there = "is not installed" if found is None else f"is here as version {there}, which may write other bytes"
        raise CodegenError(f"ruff, which formats rendered files, {is_there}: run `pip install ruff=={RUFF}`")
    return found
