"""The command line: `python -m codegen render | check | list | schema`.

A subcommand is one function with the `@command` decorator; its docstring is its help. Modules that take time to import
are imported by the command that needs them.

Exit codes: 0 done, 1 `check` found differences, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import __version__, files
from codegen.errors import CodegenError, SpecError

if TYPE_CHECKING:
    from codegen.expr import TensorSpec
    from codegen.spec import Variant

DEFAULT_VARIANTS = Path("variants.yaml")
DEFAULT_OUT = "generated"

EXIT_OK, EXIT_DIFFERENT, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

Option = Callable[[argparse.ArgumentParser], object]
"""Adds one option to a subcommand."""

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


# ------------------------------------------------------------------------------------------------------------- options


def variants_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", type=Path, metavar="FILE", help=f"the spec (default: {DEFAULT_VARIANTS})")


def out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"the package (default: {DEFAULT_OUT}/ beside the spec)"
    )


def force_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="overwrite files edited by hand and delete files the generator did not make",
    )


# ------------------------------------------------------------------------------------------------------------ commands


@command("render", variants_option, out_option, force_option)
def render(args: argparse.Namespace) -> int:
    """Write the package that the spec describes; only files that differ are touched."""
    variants = _variants_path(args)
    out = _out_path(args, variants)
    print(f"{out}: {files.write(out, _render_package(variants), force=args.force)}")
    return EXIT_OK


@command("check", variants_option, out_option)
def check(args: argparse.Namespace) -> int:
    """Render in memory and report every file of the package that differs."""
    variants = _variants_path(args)
    out = _out_path(args, variants)
    fresh = _render_package(variants)
    differences = files.compare(out, fresh)
    if not differences:
        print(f"{out}: up to date ({len(fresh)} files)")
        return EXIT_OK
    for difference in differences:
        print(difference)
    print(f"{out}: {len(differences)} of its files differ; run `{_render_command(args)}`")
    if any(d.status is files.Status.EDITED for d in differences):
        print(f"EDITED files were changed by hand: {files.KEEP_EDITS}")
    return EXIT_DIFFERENT


@command("list", variants_option)
def list_variants(args: argparse.Namespace) -> int:
    """Print a table of the variants: the spec's, or the library's where there is no spec."""
    from codegen.load import library_path, load

    default = DEFAULT_VARIANTS if DEFAULT_VARIANTS.is_file() else library_path()
    spec = load(args.variants or default)
    header = ("name", "mask", "score", "tensors", "scalars", "extras")
    for line in _table([header, *(_row(variant) for variant in spec.variants.values())]):
        print(line)
    return EXIT_OK


@command("schema")
def schema(_args: argparse.Namespace) -> int:
    """Print the JSON Schema of spec files, for editors."""
    import json

    from codegen.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


def _variants_path(args: argparse.Namespace) -> Path:
    given: Path | None = args.variants
    if given is None and not DEFAULT_VARIANTS.is_file():
        raise CodegenError(f"no {DEFAULT_VARIANTS} in this folder: write one, or name a spec with --variants FILE")
    return given or DEFAULT_VARIANTS


def _out_path(args: argparse.Namespace, variants: Path) -> Path:
    given: Path | None = args.out
    return given or variants.parent / DEFAULT_OUT


def _render_package(variants: Path) -> dict[str, str]:
    """Path -> text of the whole package, its manifest included."""
    from codegen.load import load
    from codegen.render import manifest_entries
    from codegen.render import render as render_texts

    spec = load(variants)
    return files.with_manifest(render_texts(spec), manifest_entries(spec))


def _render_command(args: argparse.Namespace) -> str:
    """The `render` that mends what `check`, called with `args`, found."""
    words = ["python", "-m", "codegen", "render"]
    for flag, value in (("--variants", args.variants), ("--out", args.out)):
        words += [] if value is None else [flag, str(value)]
    return shlex.join(words)


# --------------------------------------------------------------------------------------------------------------- table


def _row(variant: Variant) -> tuple[str, ...]:
    from codegen.gradients import is_deterministic

    extras = [name for name in ("decay", "dropout", "sink") if getattr(variant, name)]
    extras += [] if is_deterministic(variant) else ["atomic"]
    return (
        variant.name,
        _one_line(variant.mask_text),
        _one_line(variant.score_text),
        ", ".join(_describe_tensor(tensor) for tensor in variant.tensors.values()) or "-",
        ", ".join(f"{scalar.name}: {scalar.type.value}" for scalar in variant.scalars.values()) or "-",
        ", ".join(extras) or "-",
    )


def _describe_tensor(tensor: TensorSpec) -> str:
    """`slope[h] float32 (grad)`"""
    dims = ", ".join(str(dim) for dim in tensor.dims)
    return f"{tensor.name}[{dims}] {tensor.dtype}" + (" (grad)" if tensor.grad else "")


def _one_line(text: str) -> str:
    """An expression of the spec, which YAML lets run over several lines."""
    return " ".join(text.split()) or "-"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines, columns aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# ---------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors a user can cause are one message on stderr."""
    args = _parser().parse_args(argv)
    run: Run = args.run
    try:
        code = run(args)
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
        return code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Nothing may be left for the interpreter to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except SpecError as error:
        messages = [str(problem) for problem in error.problems]
    except CodegenError as error:
        messages = [str(error)]
    except OSError as error:
        messages = [f"{error.filename}: {error.strerror}" if error.filename else str(error)]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    for message in messages:
        print(f"error: {message}", file=sys.stderr)
    return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="codegen", description="Render attention variants into Triton kernels and framework ops."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        doc = entry.run.__doc__ or ""
        subparser = subparsers.add_parser(name, help=doc, description=doc)
        for add_option in entry.options:
            add_option(subparser)
        subparser.set_defaults(run=entry.run)
    return parser
