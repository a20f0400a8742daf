"""library.yaml as a document: every entry says what it is and where it comes from, and `list` shows them all."""

from __future__ import annotations

import re

import pytest

from codegen.cli.main import main
from codegen.inspect import show
from codegen.inspect.block_status import Grid
from codegen.inspect.call import make_call
from codegen.load.spec_file import default_spec_path, load
from codegen.spec.model import Variant
from tests.support.paths import LIBRARY

VARIANTS = load(LIBRARY).variants
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|PyTorch|torch|attention-gym|transformers|OpenFold|mesh-tensorflow")
TRAINED = {"bias", "gain", "r1", "r2", "reach", "slope", "strength", "temperature"}
"""Names of tensors that every entry trains; tensors of other names are not trained."""


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_an_entry_says_where_it_comes_from(variant: Variant) -> None:
    assert SOURCE.search(variant.doc)
    assert variant.doc.endswith((").", "."))


def test_an_entry_trains_what_is_learned() -> None:
    for variant in VARIANTS.values():
        for tensor in variant.tensors.values():
            assert tensor.grad == (tensor.name in TRAINED), f"{variant.name}.{tensor.name}"


def test_nothing_is_written_twice() -> None:
    """No name and no variant: mask, score and extras of all entries of both files differ."""
    entries = [*load(default_spec_path()).variants.values(), *VARIANTS.values()]
    assert len({variant.name for variant in entries}) == len(entries) >= 46
    kinds = {(variant.mask, variant.score, variant.sink, variant.decay, variant.dropout) for variant in entries}
    assert len(kinds) == len(entries)


def test_list_prints_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--variants", str(LIBRARY)]) == 0
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert [words[0] for words in map(str.split, paragraphs) if words and words[0] in VARIANTS] == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_examples_of_an_entry_show_its_mask(name: str) -> None:
    """The mask as `show` prints it, for 1024 queries and keys."""
    call = make_call(VARIANTS[name], q_len=1024, kv_len=1024, q_offset=0, batch=0, head=0, scalars={}, files={})
    picture = show.picture(VARIANTS[name], [Grid(call=call, block_m=64, block_n=64)], ())
    assert picture.kept is not None
    assert picture.kept > picture.pairs / 100
    assert (picture.kept == picture.pairs) == (VARIANTS[name].mask is None)
