"""`reference/commands.md`: every command and option, read from the argument parsers."""

from __future__ import annotations

import argparse
import re

from bench.options import parser as bench_parser
from codegen.cli.main import _parser as codegen_parser
from docs.generators import ROOT
from docs.generators.markdown import code, fence, page, table

INTRODUCTION = """Every command and every option. In a checkout the program is `python -m codegen`; installed,
`codegen`. A command prints what is wrong as `error: ...` on the standard error.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | `check` or `compare` found differences, kernels failed in `lint` or `warm`, `port` could not translate all |
| 2 | bad usage or bad input |
| 130 | interrupted |
"""


VARIABLES = """`PYTHON=` is the interpreter that creates `.venv` and runs `test-gpu`; if set, it also runs `fuzz`,
`tune` and `bench` instead of `.venv`. `ARGS=` are options of `demo`, `fuzz`, `tune`, `bench` and `hub`, and of pytest
in `test-gpu`. `TORCH=torch` installs the newest torch instead of the tested one."""


def pages() -> dict[str, str | bytes]:
    commands = "\n\n".join(_command(name, each) for name, each in subcommands(codegen_parser()).items())
    targets = table(["target", "what it does"], [[code(f"make {name}"), text] for name, text in make_targets()])
    bench = _options(bench_parser())
    return {
        "reference/commands.md": page(
            "Commands",
            INTRODUCTION,
            commands,
            "## python -m bench",
            "Times the ops and other attention libraries on a GPU. [How it measures](../benchmarks/method.md).",
            fence(_usage(bench_parser()), "text"),
            bench,
            "## make",
            targets,
            VARIABLES,
        )
    }


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Name -> parser of each command."""
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"## codegen {name}", parser.description or "", fence(_usage(parser), "text"), _options(parser)]
    return "\n\n".join(part for part in parts if part)


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog, width=100)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    return formatter.format_help().removeprefix("usage: ")


def _options(parser: argparse.ArgumentParser) -> str:
    rows = [
        [_spelling(action), (action.help or "").replace("%%", "%")]
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    return table(["argument", "meaning"], rows) if rows else ""


def _spelling(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return code(value)
    takes_value = action.nargs != 0
    return code(" ".join([*action.option_strings[-1:], *([value] if takes_value else [])]))


def make_targets() -> list[tuple[str, str]]:
    """Target and help of each line of the Makefile that `make help` lists."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.findall(r"^([a-z-]+):.*?## (.*)$", text, re.MULTILINE)
