"""The subcommands of the command line, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from codegen.cli.options import Option

Run = Callable[[argparse.Namespace], int]
"""Runs a subcommand; returns its exit code."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand and the options it takes."""

    run: Run
    options: tuple[Option, ...]


COMMANDS: dict[str, Command] = {}


def command(name: str, *options: Option) -> Callable[[Run], Run]:
    """Register a function as the subcommand `name`."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(run=run, options=options)
        return run

    return register
