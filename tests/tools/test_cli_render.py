"""`codegen render` and `codegen check`: what they write, what they report, and the remedies that they name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from codegen.cli.main import main
from codegen.render import files, formatting
from tests.support.command_line import SPEC, contents, python
from tests.support.paths import ROOT


def test_rendering_again_touches_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    assert main(["render"]) == 0
    assert {path: path.stat().st_mtime_ns for path in project.rglob("*")} == before
    count = len(contents(project / "generated"))
    assert capsys.readouterr().out == f"generated: up to date ({count} files)\n"
    assert main(["check"]) == 0
    assert capsys.readouterr().out == f"generated: up to date ({count} files)\n"


def test_another_process_renders_the_same_bytes(rendered: Path, tmp_path: Path) -> None:
    spec = rendered / "variants.yaml"
    result = python("-m", "codegen", "render", "--variants", str(spec), "--out", str(tmp_path / "generated"))
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "generated") == contents(rendered / "generated")


def test_check_reports_each_difference_and_the_remedy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "generated" / "causal" / "portable.py").write_text("by hand\n")
    (project / "generated" / "__init__.py").unlink()
    (project / "generated" / "old.py").write_text("")
    assert main(["check"]) == 1
    assert capsys.readouterr().out == (
        "MISSING  __init__.py\n"
        "EDITED   causal/portable.py\n"
        "ORPHAN   old.py (not made by this generator)\n"
        "generated: 3 of its files differ; `python -m codegen render` refuses to lose some of them\n"
        f"EDITED files were changed by hand: {files.KEEP_EDITS}\n"
        f"ORPHAN files not made by this generator: {files.KEEP_FOREIGN}\n"
    )


def remedied(capsys: pytest.CaptureFixture[str]) -> str:
    """The advice of a failed `check`."""
    assert main(["check"]) == 1
    printed: str = capsys.readouterr().out
    return printed[printed.index("generated: ") :]


def test_the_remedy_for_files_that_a_spec_makes_is_a_render(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "generated" / "__init__.py").unlink()
    assert remedied(capsys) == "generated: 1 of its files differ; run `python -m codegen render`\n"
    assert main(["render"]) == main(["check"]) == 0


def test_the_remedy_for_a_foreign_file_is_to_move_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = project / "generated" / "extra.py"
    extra.touch()
    assert remedied(capsys).endswith(f"\nORPHAN files not made by this generator: {files.KEEP_FOREIGN}\n")
    assert main(["render"]) == 2
    assert f"Files not made by this generator: {files.KEEP_FOREIGN}." in capsys.readouterr().err
    extra.unlink()
    assert main(["check"]) == 0
    extra.touch()
    assert main(["render", "--force"]) == main(["check"]) == 0


def test_the_remedy_for_a_lost_manifest_is_to_restore_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = project / "generated" / files.MANIFEST
    text = manifest.read_text()
    manifest.unlink()
    advice = remedied(capsys)
    assert advice.startswith("generated: 1 of its files differ, and `python -m codegen render` refuses the folder:\n")
    assert advice.endswith("give --out a new folder, or restore MANIFEST.json from version control\n")
    manifest.write_text(text)
    assert main(["check"]) == 0


def test_check_against_another_spec_says_whose_the_package_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "other.yaml").write_text("variants: {mine: {mask: causal}}\n")
    assert main(["check", "--variants", "other.yaml"]) == 1
    assert "the folder was made of variants.yaml, and other.yaml would replace it" in capsys.readouterr().out


def test_a_checkout_with_other_line_ends(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Git writes CRLF where core.autocrlf is set."""
    path = project / "generated" / "causal" / "portable.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["check"]) == 1
    assert capsys.readouterr().out == (
        "CRLF     causal/portable.py\n"
        "generated: 1 of its files differ; run `python -m codegen render`\n"
        "CRLF files differ in line ends only: the line `generated/** text eol=lf` in .gitattributes beside the folder "
        "keeps Git from changing them again\n"
    )
    assert main(["render"]) == main(["check"]) == 0


def test_the_remedy_repeats_the_options(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--variants", str(project / "variants.yaml"), "--out", "my ops"]
    assert main(["check", *options]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"run `python -m codegen render --variants {project / 'variants.yaml'} --out 'my ops'`")


def test_a_hand_edit_survives_until_forced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = project / "generated" / "causal" / "portable.py"
    original = edited.read_text()
    edited.write_text("by hand\n")
    assert main(["render"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: generated: nothing was written")
    assert "  causal/portable.py (edited by hand)\n" in error
    assert edited.read_text() == "by hand\n"
    assert main(["render", "--force"]) == 0
    assert edited.read_text() == original


def test_a_variant_that_is_gone_takes_its_folder_along(project: Path) -> None:
    spec = project / "variants.yaml"
    spec.write_text(SPEC.replace("  gpt_oss: {mask: causal and window(128), sink: true}\n", ""))
    assert main(["render"]) == 0
    assert not (project / "generated" / "gpt_oss").exists()
    assert main(["check"]) == 0


# ------------------------------------------------------------------------------------------------------------ formatter


def test_the_formatter_is_the_one_that_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"ruff=={formatting.RUFF}" in project["dependencies"]


def test_another_formatter_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formatting, "version", lambda _name: "0.1.0")
    assert main(["render", "--out", str(project / "other")]) == 2
    assert capsys.readouterr().err == (
        "error: ruff, which formats rendered files, is here as version 0.1.0, which may write other bytes: "
        f"run `pip install ruff=={formatting.RUFF}`\n"
    )
