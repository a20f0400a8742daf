"""The command line: usage, exit codes, and what it imports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from codegen import __version__
from codegen.cli.main import main
from codegen.cli.registry import COMMANDS
from codegen.render import files
from tests.support.command_line import contents, python


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"codegen {__version__}\n"


def test_help_names_every_command_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, entry in COMMANDS.items():
        assert f"{name} {entry.run.__doc__}" in shown


@pytest.mark.parametrize("argv", [[], ["rendre"], ["render", "--fast"], ["schema", "--out", "x"]], ids=" ".join)
def test_bad_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert "usage: codegen" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["render", "check"])
def test_without_a_spec_the_remedy_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([name]) == 2
    assert capsys.readouterr().err == (
        "error: no variants.yaml in this folder: write one, or name a spec with --variants FILE\n"
    )
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["render", "check", "list"])
def test_a_bad_spec_prints_a_line_per_problem_and_writes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text("variants:\n  one: {mask: causl}\n  two: {score: scor + 1}\n")
    assert main([name, "--variants", str(spec)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith(f"error: {spec}:2: variants.one.mask: ")
    assert "causal" in first
    assert second.startswith(f"error: {spec}:3: variants.two.score: ")
    assert contents(tmp_path).keys() == {"mine.yaml"}


def test_a_spec_that_is_not_there_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--variants", str(tmp_path / "none.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "none.yaml" in line


def test_an_error_of_the_file_system_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = project / "variants.yaml" / "generated"
    assert main(["render", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out}: Not a directory\n"


def test_an_interrupt_leaves_no_traceback(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write", interrupt)
    assert main(["render", "--out", str(project / "other")]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# ------------------------------------------------------------------------------------------------------------- imports


def test_the_generator_imports_no_framework(project: Path) -> None:
    code = (
        "import sys; from codegen.cli.main import main; assert not {'yaml', 'jinja2'} & sys.modules.keys();"
        "assert main(sys.argv[1:]) == 0; print(sorted({'torch', 'jax', 'triton'} & sys.modules.keys()))"
    )
    result = python("-c", code, "check", "--variants", str(project / "variants.yaml"))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "[]"), result.stderr


def test_a_package_under_another_name_works_alone(project: Path, tmp_path: Path) -> None:
    """A copy of the folder is enough: neither the generator nor the name `generated` is needed."""
    shutil.copytree(project / "generated", tmp_path / "elsewhere" / "my_ops")
    code = (
        "import sys; sys.modules['codegen'] = sys.modules['generated'] = None\n"
        "import my_ops; assert not {'torch', 'jax', 'triton'} & sys.modules.keys()\n"
        "import torch; from my_ops.torch import causal\n"
        "q = torch.ones(1, 2, 3, 16); print(tuple(causal(q, q, q).shape))"
    )
    result = python("-c", code, cwd=tmp_path / "elsewhere")
    assert (result.returncode, result.stdout) == (0, "(1, 2, 3, 16)\n"), result.stderr
