"""The command line on packages in other places, under other names, and of other specs."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from codegen.cli import places
from codegen.cli.main import main
from codegen.render import files
from codegen.util.errors import not_installed
from tests.support.command_line import contents, python
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", ["my-ops", "1ops", "my ops", "class", "ops.v2"])
def test_render_refuses_a_folder_that_no_python_can_import(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", "--out", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out: no Python can import a package from {name!r}: ")
    assert not (project / name).exists()


def test_render_refuses_the_name_of_a_library(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--out", "torch"]) == 2
    assert capsys.readouterr().err.startswith("error: --out: a package 'torch' would hide the library torch")
    assert not (project / "torch").exists()


@pytest.mark.parametrize("name", ["math", "codegen", "yaml", "types"])
def test_render_refuses_the_name_of_a_module_that_python_needs(
    name: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", "--out", name]) == 2
    assert f"a package '{name}' would hide" in capsys.readouterr().err
    assert not (project / name).exists()


@pytest.mark.usefixtures("project")
def test_render_refuses_a_namespace_of_torchs_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--out", "prim"]) == 2
    assert "--out: torch keeps the name 'prim'" in capsys.readouterr().err


def test_render_does_not_replace_the_package_of_another_spec(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, before = project / "other.yaml", contents(project / "generated")
    other.write_text("variants: {mine: {mask: causal}}\n")
    assert main(["render", "--variants", "other.yaml"]) == 2
    assert "the folder was made of variants.yaml, and other.yaml would replace it" in capsys.readouterr().err
    assert contents(project / "generated") == before
    assert main(["hub", "generated", "--out", "kernel"]) == 0
    assert main(["render", "--out", "kernel"]) == 2
    assert "was made of the kernel" in capsys.readouterr().err
    assert main(["hub", "generated", "--out", "generated/kernel"]) == 2
    assert "expected a folder beside the package generated, got generated/kernel, a folder inside of it" in (
        capsys.readouterr().err
    )
    assert main(["render", "--variants", "other.yaml", "--force"]) == 0


def test_links_to_nothing_and_to_themselves_are_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "loop").symlink_to("loop")
    (project / "nothing").symlink_to("nowhere")
    assert main(["render", "--out", "loop"]) == 2
    assert main(["render", "--out", "nothing"]) == 2
    loop, nothing = capsys.readouterr().err.splitlines()
    assert loop.startswith(("error: --out: loop is no folder", "error: loop: a link to loop"))
    assert nothing == "error: nothing: a link to nowhere, which does not exist; give --out a folder"


@pytest.mark.usefixtures("project")
def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["list"]) == 0


@pytest.mark.parametrize("option", ["--passes", "--dtypes", "--modes"])
def test_tune_checks_its_options_before_it_asks_for_a_gpu(option: str, project: Path) -> None:
    result = python("-m", "codegen", "tune", "causal", option, "foo", "--out", str(project / "generated"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {option}: expected one of ")


def test_compare_needs_the_spec_of_the_packages(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(project / "generated", project / "again")
    (project / "variants.yaml").write_text("variants: {mine: {mask: causal}}\n")
    assert main(["compare", "generated", "again"]) == 2
    assert "name the spec that it is rendered from with --variants FILE" in capsys.readouterr().err


def test_render_refuses_an_expression_that_is_too_deep(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "deep.yaml").write_text(
        f"variants: {{deep: {{score: {'tanh(' * 190}score{')' * 190}}}}}", encoding="utf-8"
    )
    assert main(["render", "--variants", "deep.yaml", "--out", "deep"]) == 2
    error = capsys.readouterr().err
    assert "variants.deep" in error
    assert "the expression is nested too deeply" in error
    assert not (project / "deep").exists()


def test_a_named_spec_is_explained_by_its_own_package(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "other").mkdir()
    spec = project / "other" / "attention.yaml"
    spec.write_text("variants: {causal: {mask: causal}}", encoding="utf-8")
    assert main(["explain", "causal", "--gpu", "h100", "--variants", str(spec)]) == 2
    assert "no generated package there; render" in capsys.readouterr().err


def test_explain_reads_the_spec_of_the_package_only(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant of another spec may have the same name, here the window of another size."""
    options = ["--variants", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "explained_ops")]
    spec = "masks: {near: q_idx - kv_idx < SIZE}\nvariants: {window: {mask: causal and near}}\n"
    (tmp_path / "mine.yaml").write_text(spec.replace("SIZE", "64"))
    assert main(["render", *options]) == 0
    capsys.readouterr()
    question = ["explain", "window", "--gpu", "h100"]
    assert main([*question, *options]) == 0
    assert "32768   32704 to 32767" in capsys.readouterr().out
    monkeypatch.chdir(project)  # its variants.yaml has another window
    assert main([*question, *options[2:]]) == 0
    printed = capsys.readouterr().out
    assert "which keys are read: not known without the spec of this package" in printed
    assert "to 32767" not in printed
    (tmp_path / "mine.yaml").write_text(spec.replace("SIZE", "32"))  # the entry is equal, but not its mask
    assert main([*question, *options]) == 2
    assert "mine.yaml is not the one that the package in " in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--seq", "64"], ["--dtype", "bf16"], ["--head-dim", "64"], ["--mode", "packed"]])
def test_explain_without_a_name_refuses_options_of_a_call(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--gpu", "h100", *option, "--out", str(ROOT / "generated")]) == 2
    message = f"error: {option[0]} describes a call of a variant: give the variant's name\n"
    assert capsys.readouterr().err == message


def test_render_takes_a_private_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--out", "_ops"]) == 0
    assert (project / "_ops" / files.MANIFEST).is_file()
    assert capsys.readouterr().err == ""


def test_render_hints_at_a_dim_that_is_read_at_the_other_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "variants:\n"
        "  both: {mask: 'doc[q_idx] == doc[kv_idx]', tensors: {doc: {dims: [q_idx], dtype: int32}}}\n"
        "  slip: {score: 'score + w[h, kv_idx]', tensors: {w: {dims: [h, q_idx]}}}\n"
        "  table: {score: 'score + w[q_idx - kv_idx]', tensors: {w: {dims: [n]}}}\n"
    )
    assert main(["render", "--variants", str(spec)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"hint: {spec}:3: variants.slip.tensors.w: its dim q_idx has the size of that axis, but is only read at "
        "kv_idx; if it has an element for each kv_idx, declare the dim kv_idx"
    )


def test_explain_finds_a_package_by_its_import_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(project / "generated", tmp_path / "site" / "vendored_ops")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "causal", "--gpu", "a100", "--package", "vendored_ops"]) == 0
    assert capsys.readouterr().out.startswith("causal on a100 (sm_80)")


@pytest.mark.parametrize("name", ["nowhere_to_be_found", "json"])
def test_a_package_that_is_none_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "causal", "--gpu", "a100", "--package", name]) == 2
    assert f"--package: expected the name of a generated package, got '{name}'" in capsys.readouterr().err


def test_explain_names_a_folder_without_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nothing"
    assert main(["explain", "causal", "--gpu", "a100", "--out", str(out)]) == 2
    remedy = f"`python -m codegen render --out {out}` makes one"
    assert capsys.readouterr().err == f"error: {out}: no generated package there; {remedy}\n"


@pytest.mark.parametrize(("options", "spec"), [([], "SPEC"), (["--variants", "my specs/a.yaml"], "'my specs/a.yaml'")])
def test_the_command_that_makes_a_package_names_its_spec(
    options: list[str], spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder without variants.yaml `render` needs a spec."""
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "causal", "--gpu", "a100", "--out", "ops", *options]) == 2
    remedy = f"`python -m codegen render --variants {spec} --out ops` makes one"
    assert capsys.readouterr().err == f"error: ops: no generated package there; {remedy}\n"


def test_explain_names_the_spec_in_the_command_that_tunes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "first.yaml").write_text("variants: {causal: {mask: causal}}", encoding="utf-8")
    assert main(["render", "--variants", "first.yaml", "--out", "first_ops"]) == 0
    assert main(["explain", "causal", "--gpu", "h200", "--out", "first_ops"]) == 0
    command = "`python -m codegen tune causal --variants first.yaml --out first_ops` on that GPU makes it"
    assert command in capsys.readouterr().out


def test_package_and_out_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "causal", "--package", "generated", "--out", "generated"]) == 2
    assert capsys.readouterr().err == "error: --package and --out both name a package: leave one out\n"


# These tests run commands in other processes, because each imports a package with the name of the checkout's.


def test_tune_names_an_unknown_variant_before_it_asks_for_a_gpu(project: Path) -> None:
    spec, out = str(project / "variants.yaml"), str(project / "generated")
    result = python("-m", "codegen", "tune", "causl", "--variants", spec, "--out", out)
    assert result.returncode == 2
    assert result.stderr.startswith("error: variant: expected one of ")
    assert result.stderr.endswith("got 'causl'; did you mean 'causal'?\n")


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_tune_names_a_missing_framework(module: str, project: Path) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from codegen.cli.main import main; sys.exit(main())"
    command = ["-c", code, "tune", "--variants", str(project / "variants.yaml"), "--out", str(project / "generated")]
    result = python(*command, "causal")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {not_installed(module)}, on a machine with a GPU\n"
    misspelt = python(*command, "causl")
    assert misspelt.stderr.endswith("got 'causl'; did you mean 'causal'?\n")


def test_tune_names_a_spec_that_is_not_the_packages_own(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("variants: {full: {}}\n")
    result = python("-m", "codegen", "tune", "gpt_oss", "--variants", str(other), "--out", str(project / "generated"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {other} has no variant 'gpt_oss', which the package in ")


@pytest.mark.parametrize("command", [["tune", "causal"], ["warm", "causal", "--gpu", "h100", "--modes", "paged"]])
def test_a_spec_that_changed_since_the_render_is_named(command: list[str], project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("variants: {causal: {mask: causal and window(7)}}\n")
    result = python("-m", "codegen", *command, "--variants", str(other), "--out", str(project / "generated"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: the variant 'causal' of {other} is not the one that the package in ")


def test_the_collection_is_rendered_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not rendered next to the file, which is inside the generator if that is installed."""
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(variants=Path("library.yaml"), out=None)
    assert places.variants_path(args).samefile(ROOT / "library.yaml")
    assert places.out_path(args) == Path("generated")
