"""Progress and colour on a terminal: by rich if it is installed, otherwise and in files plain text."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

BAR_WIDTH = 24


class StatusLine:
    """A line on stderr that shows the progress of long work: how much is done, the current step, the time left.

    It is shown only if stderr is a terminal. The context manager erases it at the end.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._start = time.monotonic()
        self._bar: Progress | None = None

    @property
    def count(self) -> str:
        """The number done and the total, such as `[3/20]`."""
        return f"[{self.done}/{self.total}]"

    @property
    def time_left(self) -> str:
        """An estimate by the mean time of what is done, such as `(1:30 left)`; the time taken when all is done."""
        if not self.done:
            return ""
        taken = time.monotonic() - self._start
        return (
            f"({clock(taken / self.done * (self.total - self.done))} left)"
            if self.done < self.total
            else (f"({clock(taken)})")
        )

    def show(self, step: str) -> None:
        """Replace the line."""
        if not sys.stderr.isatty():
            return
        if self._bar is None and (console := _console(sys.stderr)) is not None:
            self._bar = _bar(console, self.total)
        text = f"{self.count} {step}  {self.time_left}"
        if self._bar is None:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=text, refresh=True)

    def erase(self) -> None:
        """Remove the line, for other output or for good; `show` draws it again."""
        if self._bar is not None:
            self._bar.stop()
        elif sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.erase()


def print_coloured(text: str, styles: Mapping[str, str]) -> None:
    """Print a text. With rich on a terminal, matches of a regular expression in `styles` get its style."""
    console = _console(sys.stdout)
    if console is None:
        print(text, flush=True)
        return
    from rich.text import Text

    coloured = Text(text)
    for pattern, style in styles.items():
        coloured.highlight_regex(pattern, style)
    console.print(coloured, soft_wrap=True)


def clock(seconds: float) -> str:
    """A duration as minutes and seconds.

    >>> clock(90)
    '1:30'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _console(file: TextIO) -> Console | None:
    """rich's console for a terminal that can move its cursor; None for any other file, and without rich."""
    if not file.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    console = Console(file=file)
    return console if console.is_interactive else None


def _bar(console: Console, total: int) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.description}", markup=False)
    bar = Progress(BarColumn(BAR_WIDTH), text, console=console, transient=True, auto_refresh=False)
    bar.add_task("", total=total)
    return bar
