"""The build hook's renaming of imports: which statements it edits, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the hook is a plugin of hatchling")

from hatch_build import renamed, write_renamed

SOURCE = '''\
"""Uses `codegen.ir`.

>>> from codegen.ir import expr
"""

from __future__ import annotations

import codegen.files as files, os
from codegen import __version__
from codegen.ir.nodes import (
    Node,  # ä
    codegen,
)
from codegenerator import other
from . import codegen as own

NAME = "codegen.ir"


def late() -> None:
    x = "ä"; from codegen.late import y
    from codegen.late import z
'''


def test_renamed_edits_the_imports_of_the_generator_alone() -> None:
    before, after = SOURCE.splitlines(), renamed(SOURCE).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("import codegen.files as files, os", "import attention_codegen.codegen.files as files, os"),
        ("from codegen import __version__", "from attention_codegen.codegen import __version__"),
        ("from codegen.ir.nodes import (", "from attention_codegen.codegen.ir.nodes import ("),
        ('    x = "ä"; from codegen.late import y', '    x = "ä"; from attention_codegen.codegen.late import y'),
        ("    from codegen.late import z", "    from attention_codegen.codegen.late import z"),
    ]


@pytest.mark.parametrize("text", ["import codegen", "x = 1\nimport os, codegen.ir"])
def test_import_that_binds_the_old_name_is_refused(text: str) -> None:
    line = text.count("\n") + 1
    with pytest.raises(ValueError, match=rf"^a\.py:{line}: write `from package import module` for codegen"):
        renamed(text, "a.py")


def test_import_over_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a\.py:1: expected the module's name right after `from`"):
        renamed("from \\\n    codegen import x", "a.py")


def test_write_renamed_copies_all_but_bytecode(tmp_path: Path) -> None:
    source, target = tmp_path / "codegen", tmp_path / "copy"
    (source / "ir" / "__pycache__").mkdir(parents=True)
    (source / "ir" / "__pycache__" / "a.pyc").write_bytes(b"\0")
    (source / "ir" / "a.py").write_text("from codegen import b\n", encoding="utf-8")
    (source / "README.md").write_text("from codegen import b\n", encoding="utf-8")
    write_renamed(source, target)
    copied = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert copied == {
        "README.md": "from codegen import b\n",
        "ir/a.py": "from attention_codegen.codegen import b\n",
    }
