"""The blocks of README.md and of the site's pages run as they stand; docs/README.md has the rules."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from generated._runtime.core.settings import INTERPRET
from tests.support import documents
from tests.support.documents import Block
from tests.support.paths import ROOT
from tests.support.run_blocks import check_excerpt

README = ROOT / "README.md"
LIBRARIES = ("flax", "transformers")
"""Libraries that may not be installed; the pages of the same names need them."""


@pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")
def test_blocks_run_in_reading_order(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="some of the blocks are JAX's")
    # A page may need one more library; if that is not installed, the other pages run.
    pages = [page for page in documents.pages() if page.stem not in LIBRARIES or find_spec(page.stem)]
    hidden = ("TRITON_INTERPRET", "JAX_NUMPY_RANK_PROMOTION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # Pages are written for CPU tensors. They run in other folders, so the checkout is put on the path.
    environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.run_blocks", str(tmp_path), *map(str, pages)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_shows_an_entry_a_kernel_and_calls() -> None:
    found = documents.blocks(README)
    assert [block.language for block in found].count("python") >= 3
    assert any(block.shows == ROOT / "generated/alibi/portable.py" for block in found)
    assert len(README.read_bytes()) <= 8192


def test_excerpt_that_is_not_in_its_file_is_reported() -> None:
    block = Block(page=README, language="python", title="README.md", line=1, text="no such line\n", is_run=True)
    with pytest.raises(AssertionError, match=r"README\.md has no such lines"):
        check_excerpt(block, README)


def test_blocks_in_tabs_and_marked_ones_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = '=== "JAX"\n\n    ```python\n    x = 1\n    ```\n\n<!-- not run: needs a GPU -->\n```bash\nmake bench\n```\n'
    page.write_text(text, encoding="utf-8")
    tab, marked = documents.blocks(page)
    assert (tab.text, tab.line, tab.is_run) == ("x = 1\n", 4, True)
    assert (marked.language, marked.is_run) == ("bash", False)
    assert list(documents.commands(marked)) == ["make bench"]
