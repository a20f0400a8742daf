"""A small spec, and processes of Python, for tests of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

SPEC = """\
variants:
  causal: {mask: causal}
  gpt_oss: {mask: causal and window(128), sink: true}
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # A different hash seed than in this process, so that iteration over a set would change the output.
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)
