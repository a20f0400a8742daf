"""What web pages are made of: highlighted source, pictures, kinds, formulas, and entries as they are written."""

from __future__ import annotations

import io
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from codegen.inspect.block_status import Status
from codegen.inspect.entries import entry_text
from codegen.inspect.highlight import python_html
from codegen.inspect.images import COLORS, blocks_svg, data_uri, pairs_png, shares
from codegen.inspect.kinds import kinds
from codegen.inspect.mathematics import formulas, legend
from codegen.inspect.portrait import View, draw
from codegen.load.spec_file import load, load_text
from codegen.util.errors import CodegenError
from tests.support.paths import DEFAULT_SPEC, LIBRARY, ROOT

VARIANTS = load(DEFAULT_SPEC).variants
ALL = {**VARIANTS, **load(LIBRARY).variants}


# ------------------------------------------------------------------------------------------------------------ highlight


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


@pytest.mark.parametrize(
    "path", ["generated/alibi/portable.py", "generated/full/hopper_fwd.py", "generated/causal/torch_op.py"]
)
def test_highlighting_keeps_every_character(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text_of(python_html(text)) == text


def test_highlighting_marks_tokens() -> None:
    html = python_html('for x in range(3): y.float()  # <b>\nz = "a&b"\n')
    assert '<span class="k">for</span>' in html
    assert '<span class="b">range</span>(<span class="n">3</span>)' in html
    assert "y.float()" in html
    assert '<span class="c"># &lt;b&gt;</span>' in html
    assert '<span class="s">&quot;a&amp;b&quot;</span>' in html


@pytest.mark.parametrize("text", ["", "no newline", "def (", '"""open', "  <script>"])
def test_what_is_no_python_is_escaped(text: str) -> None:
    assert text_of(python_html(text)) == text
    assert "<script" not in python_html(text)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_blocks_are_drawn_in_runs() -> None:
    statuses = np.array([[1, 0, 0], [2, 2, 1]])
    svg = ElementTree.fromstring(blocks_svg(statuses))
    paths = {path.get("fill"): path.get("d") for path in svg}
    assert paths[COLORS[Status.FULL]] == "M0 1h2v1h-2z"
    assert paths[COLORS[Status.PARTIAL]] == "M0 0h1v1h-1zM2 1h1v1h-1z"


def test_shares_of_cells_of_unequal_sizes() -> None:
    kept = np.ones((5, 3), bool)
    kept[0, 0] = False
    np.testing.assert_allclose(shares(kept, most=2), [[8 / 9], [1.0]])


def test_pairs_are_transparent_where_none_is_kept() -> None:
    kept = np.zeros((512, 512), bool)
    kept[0, 0] = kept[2:4, 2:4] = True
    image = Image.open(io.BytesIO(pairs_png(kept))).convert("RGBA")
    assert image.size == (256, 256)
    corner, inner, empty = (image.getpixel(at) for at in ((0, 0), (1, 1), (5, 5)))
    assert isinstance(corner, tuple)
    assert isinstance(inner, tuple)
    assert isinstance(empty, tuple)
    assert (corner[3], inner[3], empty[3]) == (63, 255, 0)


def test_data_uris() -> None:
    assert data_uri(b"x") == "data:image/png;base64,eA=="
    assert data_uri("<svg/>").startswith("data:image/svg+xml;base64,")


def test_a_portrait_has_the_numbers_of_show() -> None:
    portrait = draw(VARIANTS["causal"], View(q_len=512, kv_len=512))
    assert (portrait.skipped, portrait.share(Status.PARTIAL), portrait.share(Status.FULL)) == (0.4375, 0.125, 0.4375)
    assert portrait.kept == pytest.approx(0.501, abs=1e-3)
    assert portrait.schedule == "closed_form"


def test_a_portrait_takes_scalars_and_ignores_those_of_the_score() -> None:
    window = draw(VARIANTS["window"], View(q_len=256, kv_len=256), {"size": "1"})
    assert window.kept == 1 / 256
    with pytest.raises(CodegenError, match="--set size: expected at least 1, got 0"):
        draw(VARIANTS["window"], View(), {"size": "0"})


def test_a_portrait_that_is_too_large_is_refused() -> None:
    with pytest.raises(CodegenError, match="the picture is too large: 1048576 queries by 1048576 keys"):
        draw(VARIANTS["causal"], View(q_len=2**20, kv_len=2**20))
    text = "variants: {v: {mask: 'm[b, q_idx] > 0', tensors: {m: {dims: [b, q_idx, 99999], dtype: int32}}}}"
    spec = load_text(text.replace("m[b, q_idx]", "m[b, q_idx, 0]"), "text")
    with pytest.raises(CodegenError, match=r"the tensor 'm' is too large to be drawn: \[1, 1024, 99999\]"):
        draw(spec.variants["v"], View())
    text = "variants: {v: {mask: 'm[0] > 0 and n > 0', scalars: {n: int}, tensors: {m: {dims: [9 * n], dtype: int32}}}}"
    with pytest.raises(CodegenError, match="too large to be drawn"):
        draw(load_text(text, "text").variants["v"], View(), {"n": "999999999"})


# ------------------------------------------------------------------------------------------------------ kinds, formulas


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", []),
        ("causal", ["mask"]),
        ("document", ["mask", "packed"]),
        ("softcap", ["mask", "score"]),
        ("alibi", ["mask", "bias", "trained", "per head"]),
        ("forgetting", ["mask", "trained", "decay", "per head"]),
        ("gpt_oss", ["mask", "trained", "sink", "per head"]),
        ("causal_dropout", ["mask", "dropout"]),
        ("shared_bias", ["bias", "trained"]),
    ],
)
def test_kinds(name: str, expected: list[str]) -> None:
    assert kinds(ALL[name]) == expected


@pytest.mark.parametrize("name", ALL)
def test_formulas_and_legends_are_well_formed(name: str) -> None:
    found = formulas(ALL[name])
    flags = [flag for flag in ("decay", "sink", "dropout") if getattr(ALL[name], flag)]
    assert [f.label for f in found] == ["mask", *(["score"] if ALL[name].score is not None else []), *flags]
    for element in [*(f.element for f in found), *(symbol for symbol, _ in legend(ALL[name]))]:
        assert ElementTree.fromstring(element).tag.endswith("math")


@pytest.mark.parametrize("name", ALL)
def test_an_entry_is_a_spec_of_its_own(name: str) -> None:
    variant = ALL[name]
    path = DEFAULT_SPEC if name in VARIANTS else LIBRARY
    text = entry_text(path.read_text(encoding="utf-8"), variant, with_macros=path == LIBRARY)
    spec = load_text(text, "entry")
    read = spec.variants[name]
    # The spec has one entry, which gives two variants if it has `prune: true`.
    assert {each.line for each in spec.variants.values()} == {read.line}
    assert len(spec.variants) == 1 + ("prune: true" in text)
    assert (read.mask, read.score, read.tensors, read.scalars) == (
        variant.mask,
        variant.score,
        variant.tensors,
        variant.scalars,
    )
    assert "archs" not in text
