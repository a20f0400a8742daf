"""The command line: `python -m codegen COMMAND`; `--help` lists the commands.

A subcommand is one function with the `@command` decorator; its docstring is its help. Modules that take time to import
are imported by the command that needs them.

Exit codes: 0 done, 1 `check` found differences, `lint` kernels that cannot run, `compare` kernels that differ, or
`port` what it cannot translate, or `warm` kernels that do not compile, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from codegen import PACKAGE, __version__
from codegen.cli.calls import check_one_gpu, described_calls, given, refuse, split_report
from codegen.cli.options import (
    call_options,
    compare_options,
    explain_options,
    force_option,
    from_config_option,
    hub_options,
    json_option,
    lint_options,
    name_argument,
    out_option,
    package_option,
    passed_on,
    picture_options,
    port_options,
    split_options,
    studio_options,
    tune_options,
    variants_option,
    warm_options,
)
from codegen.cli.places import check_importable, out_path, package_path, rendered_variant, spec_path, variants_path
from codegen.cli.registry import COMMANDS, Run, command
from codegen.cli.rendered import advice, render_command, render_package, rendered
from codegen.render import files
from codegen.util.errors import CodegenError, SpecError, did_you_mean, naming, not_installed

if TYPE_CHECKING:
    from codegen.spec.model import Spec

EXIT_OK, EXIT_DIFFERENT, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


# ------------------------------------------------------------------------------------------------------------ commands


@command("render", from_config_option, variants_option, out_option, force_option)
def render(args: argparse.Namespace) -> int:
    """Generate the package of kernels and ops from a spec; unchanged files are left alone."""
    out = out_path(args)
    check_importable(out)
    if args.from_config is None:
        _render(args, out)
        return EXIT_OK
    from codegen.cli.from_config import write_spec

    with _extra():
        args.variants = write_spec(args)
    try:
        _render(args, out)
    except BaseException:
        args.variants.unlink()  # a spec that is there would be refused by the next attempt
        raise
    print(f"{args.variants}: the variants of the model")
    return EXIT_OK


def _render(args: argparse.Namespace, out: Path) -> None:
    from codegen.load.hints import hints

    spec, texts = rendered(variants_path(args))
    for hint in hints(spec):
        print(f"hint: {hint}", file=sys.stderr)
    print(f"{out}: {files.write(out, texts, force=args.force)}")


@command("check", variants_option, out_option)
def check(args: argparse.Namespace) -> int:
    """Check that the package on disk is what its spec generates; print every file that differs."""
    variants = variants_path(args)
    out = out_path(args)
    fresh = render_package(variants)
    differences = files.compare(out, fresh)
    if not differences:
        from codegen.inspect.tuned_files import stale

        print(f"{out}: up to date ({len(fresh)} files)")
        # Stale tuned files do not fail the check: whoever changes a kernel may have no such GPU.
        for line in stale(out):
            print(f"note: {line}")
        return EXIT_OK
    for difference in differences:
        print(difference)
    for line in advice(args, out, fresh, differences):
        print(line)
    return EXIT_DIFFERENT


@command("list", variants_option, json_option)
def list_variants(args: argparse.Namespace) -> int:
    """Print the formula and arguments of each variant of the spec, or of the built-in library if there is no spec."""
    from codegen.inspect.listing import as_json, as_text

    spec = _spec_or_library(args)
    print(as_json(spec) if args.json else as_text(spec, columns=shutil.get_terminal_size().columns))
    return EXIT_OK


@command(
    "show",
    name_argument,
    call_options,
    picture_options,
    split_options,
    variants_option,
    out_option,
    package_option,
)
def show(args: argparse.Namespace) -> int:
    """Print a variant's formulas and draw the blocks that its mask skips, or how several GPUs share the work."""
    spec = _spec_or_library(args)
    if args.name not in spec.variants:
        other = "" if args.variants else "; --variants FILE names another spec"
        hint = did_you_mean(args.name, spec.variants) or f"; it has {', '.join(spec.variants)}{other}"
        raise CodegenError(f"{spec.path} has no variant '{args.name}'{hint}")
    variant = spec.variants[args.name]
    with _extra():
        from codegen.inspect import show as shown
        from codegen.inspect.block_status import Grid

        if args.png is not None:
            from codegen.inspect import plot
    if args.ranks is not None:
        print(split_report(variant, args))
        return EXIT_OK
    check_one_gpu(args)
    calls = described_calls(variant, args)
    encoding = sys.stdout.encoding or "utf-8"  # a stream in memory has none
    if args.pages is not None:
        from codegen.inspect.show_pages import report

        print(report(spec, variant, calls[0], args.pages, encoding=encoding))
        return EXIT_OK
    block = shown.default_block(calls, packed=bool(args.segments))
    block_m, block_n = args.block or (block, block)
    grids = [Grid(call=call, block_m=block_m, block_n=block_n) for call in calls]
    picture = shown.picture(variant, grids, args.segments or ())
    if args.png is not None:
        plot.save(picture, args.png)
    print(shown.report(picture, columns=shutil.get_terminal_size().columns, encoding=encoding))
    return EXIT_OK


@command("tune", tune_options, variants_option, out_option, package_option)
def tune(args: argparse.Namespace) -> int:
    """Time tile sizes and kernel families on this machine's GPU and store the fastest, which the ops then use."""
    from codegen.spec.model import DTYPE_NAMES
    from codegen.tune.command import Choice, default_jobs, run

    choice = Choice(
        variants_path=spec_path(args),
        out=package_path(args, of_spec=True),
        variants=args.names,
        passes=args.passes,
        dtypes=[DTYPE_NAMES.get(name, name) for name in args.dtypes],
        head_dims=args.head_dims,
        seqs=args.seqs,
        modes=args.modes,
        minutes=args.budget,
        jobs=args.jobs or default_jobs(),
        families=args.families,
        again=args.again,
    )
    run(choice)
    return EXIT_OK


@command("explain", explain_options, variants_option, out_option, package_option)
def explain(args: argparse.Namespace) -> int:
    """Print the tiles and kernel families that a call uses on a GPU; without NAME, the speedups from tuning."""
    out = package_path(args, of_spec=True)
    described = given(args, "dtype", "head_dim", "seq", "group", "mode", "kv_heads")
    if args.name is None:
        from codegen.inspect.tuned_files import gains

        options = {f"--{name.replace('_', '-')}": value for name, value in described.items()}
        refuse(options, "{} describes a call of a variant: give the variant's name")
        print("\n".join(gains(out, args.gpu or "")))
        return EXIT_OK
    with _extra():
        from codegen.inspect.explain import Question, answer
    question = Question(variant=args.name, gpu=args.gpu or "", **described)
    print("\n".join(answer(out, question, rendered_variant(args, out))))
    return EXIT_OK


@command("lint", lint_options, variants_option, out_option)
def lint(args: argparse.Namespace) -> int:
    """Compile the kernels with their default tiles for every chip, without a GPU; report errors and slow code."""
    from codegen.load.spec_file import load

    variants = variants_path(args)
    out = out_path(args)
    with _extra():
        from codegen.lint import command as linter
    spec = load(variants)
    # Bad options are refused before kernels are compiled, which takes minutes.
    selected = linter.selection(spec, args)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise CodegenError(f"--json: expected a file in a folder that is there, got {args.json}")
    if files.compare(out, render_package(variants)):
        raise CodegenError(f"{out} is not what {variants} renders to: run `{render_command(args)}`")
    findings, seconds = linter.run(spec, out, selected, args.jobs)
    linter.print_report(findings, seconds)
    if args.json is not None:
        linter.save(args.json, findings)
    return EXIT_DIFFERENT if any(finding.errors for finding in findings) else EXIT_OK


@command("warm", warm_options, variants_option, out_option, package_option)
def warm(args: argparse.Namespace) -> int:
    """Compile the kernels that a model will launch into Triton's disk cache, in parallel and without a GPU."""
    out = package_path(args, of_spec=True)
    with _extra():
        from codegen.warm import command as warmer

        request = warmer.request_of(args, out)
    target = warmer.target_of(out, args.gpu)
    report = warmer.run(request, target, out, _spec_or_library(args), args.jobs)
    print("\n".join(warmer.lines(report, target, args.jobs)))
    return EXIT_DIFFERENT if report.failures else EXIT_OK


@command("compare", compare_options, variants_option)
def compare(args: argparse.Namespace) -> int:
    """Check that two packages compile to the same machine code, without a GPU; exit code 1 if they do not."""
    from codegen.load.spec_file import load

    spec = load(spec_path(args))
    with _extra():
        from codegen.compare import command as comparison
    options = comparison.options_of(args)
    comparison.check_spec(spec, options)
    is_equal = comparison.run_rekey(spec, options) if args.rekey else comparison.run(spec, options)
    return EXIT_OK if is_equal else EXIT_DIFFERENT


@command("studio", studio_options)
def studio(args: argparse.Namespace) -> int:
    """Open a local web page to write a variant and see its formulas, mask and kernels."""
    with _extra():
        from codegen.studio.server import serve
    serve(args.port, opens=not args.no_open)
    return EXIT_OK


@command("port", port_options)
def port(args: argparse.Namespace) -> int:
    """Translate FlexAttention's mask_mod and score_mod functions into a spec; exit code 1 if one is not translated."""
    from codegen.port.command import port as translate

    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise CodegenError(f"--out: expected a file in a folder that is there, got {args.out}")
    if args.out is not None and args.out.exists() and args.out.samefile(args.file):
        raise CodegenError(f"--out: expected another file than the one to port, got {args.out}")
    found = translate(args.file, args.function)
    if args.out is None:
        print(found.text, end="")
    else:
        with naming(args.out):
            args.out.write_text(found.text, encoding="utf-8")
        print(f"{args.out}: {len(found.ported)} {'entry' if len(found.ported) == 1 else 'entries'}")
    for line in found.failures:
        print(line, file=sys.stderr)
    return EXIT_DIFFERENT if found.failures else EXIT_OK


@command("hub", hub_options)
def hub(args: argparse.Namespace) -> int:
    """Write a package's torch ops in the form of a Hugging Face Hub kernel; nothing is uploaded."""
    from codegen.hub.command import write_kernel

    print(write_kernel(args))
    if args.check:
        with _extra():
            from codegen.hub.check import check_kernel

            print(check_kernel(args.package, args.out))
    return EXIT_OK


@command("schema")
def schema(_args: argparse.Namespace) -> int:
    """Print the JSON Schema of spec files, which editors use for completion and checks."""
    import json

    from codegen.load.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


@command("bench", passed_on)
def bench(args: argparse.Namespace) -> int:
    """Time the generated ops and other attention libraries on a GPU; takes the options of `python -m bench`."""
    if PACKAGE != "generated":
        raise CodegenError("the benchmark is not installed: run `python -m bench` in a checkout of the repository")
    try:
        # By name: the generator does not depend on its benchmark, which only a checkout has.
        measure = importlib.import_module("bench.__main__").main
    except ModuleNotFoundError as error:
        raise CodegenError(f"the benchmark needs {error.name}, which is not installed") from None
    return int(measure(args.arguments))


def _spec_or_library(args: argparse.Namespace) -> Spec:
    from codegen.load.spec_file import load

    return load(spec_path(args))


@contextmanager
def _extra() -> Iterator[None]:
    """Turn a failed import of a package that only some commands need into an error that names the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("codegen", __name__.split(".")[0]):
            raise
        raise CodegenError(not_installed(package)) from None


# ---------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors a user can cause are one message on stderr."""
    if sys.stdout is None:  # closed, as by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a doc may have characters that a terminal lacks
    args = _parser().parse_args(argv)
    run: Run = args.run
    try:
        code = run(args)
        sys.stdout.flush()  # here, where the error of a closed pipe is handled
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
    except MemoryError as error:
        messages = [f"not enough memory; try smaller sizes ({error})" if str(error) else "not enough memory"]
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
