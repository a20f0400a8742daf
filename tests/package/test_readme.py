"""The README's Python runs as it stands, from top to bottom in one namespace, on the references of the ops."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from generated._runtime.torch.support import INTERPRET
from tests.support.paths import ROOT
from tests.support.rendering import importable

README = (ROOT / "README.md").read_text(encoding="utf-8")

SPEC, SPEC_PACKAGE = "dialogue.yaml", "dialogue_ops"
"""The spec that the README spells out, and the package that it renders from it."""

EXCERPT = "generated/alibi/bwd_dq.py"
"""The file that the README shows a loop of."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, the line it begins in, the text, and the paragraph before it."""

    language: str
    line: int
    text: str
    before: str


def blocks() -> list[Block]:
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        before = README[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
        line = README.count("\n", 0, match.start()) + 2
        found.append(Block(language=match[1], line=line, text=match[2], before=before))
    return found


def test_readme_shows_a_loop_as_it_is_generated() -> None:
    (excerpt,) = (block for block in blocks() if block.language == "python" and f"`{EXCERPT}`" in block.before)
    assert textwrap.indent(excerpt.text, "    ") in (ROOT / EXCERPT).read_text(encoding="utf-8")


@pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")
def test_readme_runs_in_reading_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="one of the blocks is JAX's")
    (spec,) = (block for block in blocks() if f"`{SPEC}`" in block.before)
    assert f"render --variants {SPEC} --out {SPEC_PACKAGE}" in README
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    with importable(tmp_path / "own", SPEC_PACKAGE, spec.text):
        ran = [block for block in blocks() if block.language == "python" and f"`{EXCERPT}`" not in block.before]
        for block in ran:
            # The lines before it are empty, so that a traceback names the README's own.
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / "README.md"), "exec"), namespace)
    assert len(ran) >= 5
    assert SPEC_PACKAGE in sys.modules
    assert namespace["dslope"].shape == (8,)
    assert [tuple(output.shape) for output in namespace["outputs"]] == [(5, 8, 64), (300, 8, 64), (42, 8, 64)]
