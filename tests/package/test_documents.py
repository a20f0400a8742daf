"""CONTRIBUTING, ARCHITECTURE and the pages written by hand name files and names that exist."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

# `codegen/ir/parse.py:FUNCTIONS`, `codegen/ir/parse.py`, `templates/host/`
_REFERENCE = re.compile(r"`((?:codegen|templates|runtime|tests|emulator|bench|examples)/[\w./]*|\w+\.py)(?::(\w+))?`")


FOLDERS = ("tutorial", "how-to", "explanation")
PAGES = sorted(str(page.relative_to(ROOT)) for name in FOLDERS for page in (ROOT / "docs" / name).glob("*.md"))


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "ARCHITECTURE.md", *PAGES])
def test_documents_name_what_exists(document: str) -> None:
    references = _REFERENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    assert document in PAGES or len(references) > 5
    missing = [path for path, _ in references if not (ROOT / path).exists()]
    assert not missing
    names = [(path, name) for path, name in references if name]
    assert not [(path, name) for path, name in names if name not in (ROOT / path).read_text(encoding="utf-8")]


def test_readme_of_codegen_names_every_module() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)", (ROOT / "codegen/README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {(room, name) for room, text in rows for name in re.findall(r"`(\w+)/?`", text)}
    modules = [*(ROOT / "codegen").glob("*/*.py"), *(ROOT / "codegen" / "plan").glob("*/*.py")]
    there = {(path.parent.name, path.stem) for path in modules if path.stem != "__init__"}
    assert there <= named, sorted(there - named)


CONVENTIONS = {"x_base", "x_tile", "x_offs", "x_ptrs", "stride_xb", "own_span"}
"""Words of templates/README.md that are patterns of names, not names."""


def test_contract_of_templates_names_what_exists() -> None:
    sources = [path for room in ("templates", "codegen", "runtime") for path in (ROOT / room).rglob("*.*")]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.suffix in (".py", ".jinja")]
    known = set(re.findall(r"\w+", " ".join([*texts, *(path.as_posix() for path in sources)])))
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "templates/README.md").read_text(encoding="utf-8"))
    words = {word for text in quoted for word in re.findall(r"[A-Za-z_]\w*", text)}
    assert len(words) > 300
    assert words - known == CONVENTIONS
