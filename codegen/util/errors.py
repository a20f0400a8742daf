"""The errors a user of the generator can meet, and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class CodegenError(Exception):
    """Base of every error that `python -m codegen` reports without a traceback."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule in a spec file.

    `where` is the dotted path of the offending entry (`variants.alibi.score`), empty for the file as a whole;
    `line` counts from 1.
    """

    file: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


class SpecError(CodegenError):
    """A spec that breaks the rules: every problem of the file, in file order."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.file, p.line)))
        super().__init__("\n".join(str(p) for p in self.problems))


class ExprError(CodegenError):
    """A bad expression; `column` counts from 1 inside the expression's own text.

    `unknown` is the name that nothing defines, if that is what is wrong, `within` are the named expressions that read
    it, outermost first, and `indexed` says that it is read as a tensor.
    """

    def __init__(
        self, message: str, column: int, *, unknown: str = "", within: tuple[str, ...] = (), indexed: bool = False
    ) -> None:
        self.message = message
        self.column = column
        self.unknown = unknown
        self.within = within
        self.indexed = indexed
        super().__init__(f"{message} (column {column})")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a system error that names no file name this one: a failed write, as to a full disk, has only a number.

    >>> with naming(Path("generated")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'generated'
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The nearest spelling as the tail of an error message, or an empty string.

    >>> did_you_mean("scor", ["score", "kv_idx"])
    "; did you mean 'score'?"
    """
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.7)
    close.sort(key=lambda candidate: sorted(candidate) != sorted(name))  # letters in another order are one slip
    return f"; did you mean '{close[0]}'?" if close else ""


REQUIREMENTS = {
    "PIL": "pillow",
    "kernels": "kernels==0.16.2",
    "torch": "'torch>=2.11'",
    "triton": "'triton>=3.6,<3.10'",
    "jax": "'jax>=0.10.1'",
}
"""Module -> what to install, if that is more than the module's name."""


def not_installed(module: str) -> str:
    """The message if a package is missing that a command needs, but the generator does not.

    >>> not_installed("matplotlib")
    'matplotlib is not installed: pip install matplotlib'
    """
    return f"{module} is not installed: pip install {REQUIREMENTS.get(module, module)}"
