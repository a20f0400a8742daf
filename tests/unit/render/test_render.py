"""The statements that every rendered file has, and the error of a failed render."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jinja2
import pytest

from codegen.analysis.call_modes import Mode
from codegen.load.spec_file import load
from codegen.plan.paged.kernels import paged_plan
from codegen.render import package as render
from codegen.render.manifest import manifest_entries
from codegen.util.errors import CodegenError

pytest.importorskip("ruff", reason="rendering needs ruff, the formatter")


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Template -> the text by which its first `def` is replaced."""
    replaced: dict[str, str] = {}
    fill = render._fill

    def broken(env: jinja2.Environment, template: str, **context: Any) -> str:
        return fill(env, template, **context).replace("def ", replaced.get(template, "def "), 1)

    monkeypatch.setattr(render, "_fill", broken)
    return replaced


def test_a_file_that_the_formatter_refuses_is_named_with_its_variant_template_and_line(
    tmp_path: Path, filled: dict[str, str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal}\n")
    filled["portable/decay.py.jinja"] = "def ("  # a template of another variant
    filled["host/launch.py.jinja"] = "def ("
    with pytest.raises(CodegenError) as raised:
        render.render(load(spec))
    lines = str(raised.value).splitlines()
    assert lines[0] == "the formatter refused rendered files, a fault of the generator:"
    refused = [line for line in lines if line.endswith("(variant early, template host/launch.py.jinja)")]
    assert {line.partition(":")[0] for line in refused} == {
        "early/launch.py",
        "early/packed/launch.py",
        "early/segmented/launch.py",
    }
    assert any("Expected" in line for line in refused)  # the formatter's own words
    assert any(line.strip().startswith("def (") for line in lines)


def test_an_error_of_a_template_names_template_and_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal}\n")
    monkeypatch.setattr(render, "_TITLES", dict.fromkeys(Mode, jinja2.StrictUndefined(name="title")))
    with pytest.raises(jinja2.UndefinedError) as raised:
        render.render(load(spec))
    (note,) = raised.value.__notes__
    assert note == "while filling the template portable/portable.py.jinja for variant: early: {mask: causal}"


def test_every_rendered_module_begins_with_its_licence(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal, decay: true}\n")
    texts = render.render(load(spec))
    modules = {path for path in texts if path.endswith((".py", ".pyi"))}
    assert modules > {
        "__init__.py",
        "packing.py",
        "_runtime/core/tuned.py",
        "early/portable.py",
        "early/packed/launch.py",
    }
    assert all(texts[path].startswith("# SPDX-License-Identifier: Apache-2.0\n") for path in modules)


def test_segmented_calls_run_the_dense_hopper_delta_where_only_its_name_would_differ(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal}\n  linear: {score: score - 0.1 * (q_idx - kv_idx)}\n")
    files = render.render(load(spec))
    assert "hopper_delta" not in files["early/segmented/portable.py"]
    # The dense hopper_delta adds a term of the row to its logits, so segmented calls need their own.
    assert "def linear_segmented_hopper_delta" in files["linear/segmented/portable.py"]
    launches = files["early/segmented/launch.py"]
    assert "kernels.early.portable.early_hopper_delta" in launches
    assert "early_segmented_hopper_delta" not in launches
    space: dict[str, Any] = {}
    exec(files[render.KERNELS_FILE].replace("from .core.tiles import VariantTraits", "VariantTraits = dict"), space)
    hashes = space["KERNEL_HASHES"]["early"]
    assert set(hashes["paged"]) == {"fwd", "plan", "merge"}
    assert hashes["segmented"]["hopper_delta"] == hashes["dense"]["hopper_delta"]


def test_hashes_of_kernels_on_paged_caches_follow_their_code(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal}\n  dropped: {mask: causal, dropout: true}\n")
    files = render.render(load(spec))
    assert "dropped/paged/portable.py" not in files
    planned = paged_plan(load(spec).variants["early"])
    assert planned is not None
    hashes = render._paged_hashes(files, "early", planned)
    nothing: set[str] = set()
    for path, old, changed in (
        ("_runtime/archs.py", "narrow_forward_from=1024", nothing),  # by which the host chooses kernels
        ("early/paged/portable.py", "row_max = max_new", {"fwd"}),
        ("early/paged/portable.py", "entries += parts", {"plan"}),
        ("_runtime/device/paged.py", "row_max = max_new", {"merge"}),
        ("_runtime/device/paged.py", "// PAGE_SIZE", {"fwd"}),
    ):
        assert old in files[path]
        edited = files | {path: files[path].replace(old, f"{old} + 0")}
        others = render._paged_hashes(edited, "early", planned)
        assert {name for name in hashes if hashes[name] != others[name]} == changed


def test_the_manifest_names_the_modes_of_a_variant(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("variants:\n  early: {mask: causal}\n  dropped: {mask: causal, dropout: true}\n")
    entries = manifest_entries(load(spec))
    assert entries["early"]["modes"] == ["dense", "packed", "segmented", "paged"]
    assert entries["dropped"]["modes"] == ["dense", "packed", "segmented"]


def test_a_template_is_compiled_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    template = tmp_path / "a.jinja"
    template.write_text("before")
    first = render.make_environment(tmp_path).get_template(template.name)
    assert render.make_environment(tmp_path).get_template(template.name) is first
    template.write_text("after")
    os.utime(template, (0, 0))  # another time, however coarse those of the file system are
    assert render.make_environment(tmp_path).get_template(template.name).render() == "after"
