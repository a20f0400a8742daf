"""The output of the command `show`."""

from __future__ import annotations

import pytest

from codegen.cli.main import main


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["show", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["show", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
