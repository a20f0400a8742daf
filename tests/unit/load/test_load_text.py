"""A spec that is a text and no file: the same values, and errors under the name that it is given."""

from __future__ import annotations

import pytest

from codegen.load.spec_file import load, load_text
from codegen.util.errors import SpecError
from tests.support.paths import DEFAULT_SPEC


def test_a_text_inherits_as_a_file_does() -> None:
    spec = load_text("variants:\n  mine: {mask: causal and window(4)}\n", "a text")
    library = load(DEFAULT_SPEC)
    assert (spec.path, spec.defaults, spec.archs) == ("a text", library.defaults, library.archs)
    assert spec.variants["mine"].mask_text == "causal and window(4)"


def test_problems_of_a_text_have_its_name_and_their_line() -> None:
    with pytest.raises(SpecError) as caught:
        load_text("variants:\n  mine:\n    mask: causl\n    score: scor\n", "a text")
    assert [(p.file, p.line, p.where) for p in caught.value.problems] == [
        ("a text", 3, "variants.mine.mask"),
        ("a text", 4, "variants.mine.score"),
    ]
