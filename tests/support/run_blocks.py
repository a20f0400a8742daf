"""Runs the blocks of pages: `python -m tests.support.run_blocks FOLDER PAGE...`; prints what failed, exit status 1.

Each page has a folder below FOLDER and a namespace of its own, in which its blocks run from top to bottom.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.documents import Block, blocks, commands
from tests.support.paths import ROOT


def run_page(page: Path, folder: Path) -> list[str]:
    """What failed: a text for each block."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    failures = []
    for block in blocks(page):
        if not block.is_run:
            continue
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                run_block(block, namespace)
        except (Exception, SystemExit):
            failures.append(f"{block.place}: {said.getvalue()[-2000:]}\n{traceback.format_exc(limit=-4)}")
    sys.path.remove(str(folder))
    return failures


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    if (file := block.shows) is not None:
        check_excerpt(block, file)
        return
    if block.title and "/" not in block.title:
        Path(block.title).write_text(block.text, encoding="utf-8")
    if block.language == "python":
        # Empty lines before the block make line numbers in a traceback those of the page.
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), namespace)
    elif block.language == "yaml" and "variants:" in block.text:
        load_spec(block)
    elif block.language in ("bash", "console"):
        for command in commands(block):
            run_command(command)


def check_excerpt(block: Block, file: Path) -> None:
    """Check that a block is part of a file, apart from indentation. A line `...` stands for lines that are left out."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    source = "\n".join(lines)
    for part in block.text.split("\n...\n"):
        shown = "\n".join(line.strip() for line in part.strip().splitlines())
        assert shown in source, f"{file.relative_to(ROOT)} has no such lines:\n{part}"


def load_spec(block: Block) -> None:
    from codegen.load.spec_file import load

    path = Path(block.title or "block.yaml")
    path.write_text(block.text, encoding="utf-8")
    load(path)


def run_command(command: str) -> None:
    """Run `codegen render --variants`. For other commands of the repository, only check that their options parse."""
    from bench.options import parser as bench_parser
    from codegen.cli.main import _parser, main

    words = shlex.split(command, comments=True)
    program = " ".join(words[:3])
    if program == "python -m codegen" or words[0] == "codegen":
        arguments = words[3:] if words[0] == "python" else words[1:]
        if arguments[0] == "bench":
            bench_parser().parse_args(arguments[1:])
        elif arguments[0] == "render" and "--variants" in arguments:
            assert main(arguments) == 0, command
        else:
            _parser().parse_args(arguments)
    elif program == "python -m bench":
        bench_parser().parse_args(words[3:])
    elif words[0] == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all("=" in word or f"\n{word}:" in targets for word in words[1:]), f"no such target: {command}"


def main(arguments: list[str]) -> int:
    folder, *names = arguments
    failures = []
    for i, name in enumerate(names):
        begun = time.perf_counter()
        failures += run_page(Path(name), Path(folder).absolute() / str(i))
        print(f"{time.perf_counter() - begun:6.1f} s  {name}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
