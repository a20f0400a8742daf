"""CONTRIBUTING and ARCHITECTURE name files and names that exist."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

# `codegen/ir/parse.py:FUNCTIONS`, `codegen/ir/parse.py`, `templates/host/`
_REFERENCE = re.compile(r"`((?:codegen|templates|runtime|tests|emulator|bench|examples)/[\w./]*|\w+\.py)(?::(\w+))?`")


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "ARCHITECTURE.md"])
def test_documents_name_what_exists(document: str) -> None:
    references = _REFERENCE.findall((ROOT / document).read_text(encoding="utf-8"))
    assert len(references) > 5
    missing = [path for path, _ in references if not (ROOT / path).exists()]
    assert not missing
    names = [(path, name) for path, name in references if name]
    assert not [(path, name) for path, name in names if name not in (ROOT / path).read_text(encoding="utf-8")]
