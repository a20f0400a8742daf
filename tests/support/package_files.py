"""Two file sets of a package, one after the other in a folder, and what tests ask of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.render import files
from codegen.render.files import Status
from codegen.util.errors import CodegenError

VARIANTS = {"causal": {"mask": "q_idx >= kv_idx"}}
OLD = files.with_manifest({"__init__.py": "", "causal/fwd.py": "old\n", "alibi/fwd.py": "alibi\n"}, VARIANTS)
NEW = files.with_manifest({"__init__.py": "", "causal/fwd.py": "new\n", "full/bwd/dq.py": "full\n"}, VARIANTS)

Tree = dict[str, bytes | None]


def tree(root: Path) -> Tree:
    """Everything under a folder: files by content, folders as None."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


def judged(out: Path, fresh: dict[str, str] = NEW) -> dict[str, Status]:
    return {difference.path: difference.status for difference in files.compare(out, fresh)}


def refused(out: Path, fresh: dict[str, str] = NEW, force: bool = False) -> str:
    """The message of a refusal that left everything alone."""
    before = tree(out.parent)
    with pytest.raises(CodegenError) as error:
        files.write(out, fresh, force=force)
    assert tree(out.parent) == before
    return str(error.value).replace(str(out), "OUT")
