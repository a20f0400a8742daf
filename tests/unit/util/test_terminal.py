"""Progress and colour: on a terminal with rich, on one without, and in a file."""

from __future__ import annotations

import builtins
import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from codegen.util.terminal import StatusLine, print_coloured

STYLES = {r"\bMISSED\b": "bold red"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def shown(action: Callable[[], None]) -> str:
    """What a terminal receives that is both stdout and stderr."""
    stream = Terminal()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        action()
    return stream.getvalue()


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(name="rich")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def work() -> None:
    with StatusLine(2) as status:
        status.show("[first] step")
        status.done += 1
        status.show("second step")


def test_rich_draws_a_bar_and_erases_it() -> None:
    drawn = shown(work)
    assert "━" in drawn
    assert "[0/2] [first] step" in drawn
    assert "[1/2] second step  (0:00 left)" in drawn
    assert drawn.rstrip().endswith("\x1b[2K")


@pytest.mark.usefixtures("without_rich")
def test_without_rich_the_line_is_plain() -> None:
    clear = "\r\x1b[K"
    assert shown(work) == f"{clear}[0/2] [first] step  {clear}[1/2] second step  (0:00 left){clear}"


def test_a_file_gets_no_progress_and_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    print_coloured("two targets: met, MISSED", STYLES)
    assert capsys.readouterr() == ("two targets: met, MISSED\n", "")


def test_only_matches_are_coloured_and_long_lines_are_not_wrapped() -> None:
    long = "x" * 300
    assert (
        shown(lambda: print_coloured(f"[b] met MISSED {long}", STYLES)) == f"[b] met \x1b[1;31mMISSED\x1b[0m {long}\n"
    )


@pytest.mark.usefixtures("without_rich")
def test_without_rich_nothing_is_coloured() -> None:
    assert shown(lambda: print_coloured("MISSED", STYLES)) == "MISSED\n"


def test_the_generator_imports_no_rich() -> None:
    code = "import sys, codegen.cli.main, codegen.util.terminal; print('rich' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
