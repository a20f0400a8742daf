"""One variant rendered alone, for the studio: the files that the whole package has of it, and their headers."""

from __future__ import annotations

from codegen.load.spec_file import load
from codegen.render.package import render_variant
from tests.support.paths import DEFAULT_SPEC, ROOT


def test_one_variant_is_rendered_as_in_the_package() -> None:
    files = render_variant(load(DEFAULT_SPEC).variants["alibi"])
    assert {"alibi/portable.py", "alibi/hopper_bwd.py", "alibi/packed/portable.py", "alibi/torch_op.py"} <= set(files)
    for path, text in files.items():
        assert text == (ROOT / "generated" / path).read_text(encoding="utf-8"), path


def test_headers_name_the_spec_file() -> None:
    files = render_variant(load(DEFAULT_SPEC).variants["full"], "models/own masks.yaml")
    for path, text in files.items():
        if path.endswith(".py"):
            second = text.splitlines()[1]
            assert second.startswith("# Generated from own masks.yaml; do not edit."), path
            compile(text, path, "exec")
