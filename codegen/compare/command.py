"""The command `compare`: from its options to what it prints."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch  # noqa: F401 - compiling needs both; a missing one is reported before any work
import triton  # noqa: F401

from codegen import PROGRAM
from codegen.analysis.call_modes import Mode
from codegen.compare import report
from codegen.compare.calls import DEFAULT_ARCHS, default_calls, tuned_archs
from codegen.compare.launches import Level
from codegen.compare.proof import Packages, Result, compare_calls
from codegen.compare.rekey import rekey
from codegen.compare.sources import Sources, read_sources, unchanged_kernels, unchanged_variants
from codegen.compile.packages import manifest_of
from codegen.inspect.origin import check_origin
from codegen.lint.jobs import Selection, default_dtypes
from codegen.render.files import MANIFEST
from codegen.spec.model import Spec
from codegen.util.choices import checked_names
from codegen.util.errors import CodegenError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line."""

    old: Path
    new: Path
    names: Sequence[str]
    archs: Sequence[str]
    modes: Sequence[str]
    jobs: int
    fast: bool
    everything: bool
    machine_code: bool


def options_of(args: argparse.Namespace) -> Options:
    """The options; raises `CodegenError` for a folder without a package."""
    for folder in (args.old, args.new):
        if not (folder / MANIFEST).is_file():
            raise CodegenError(f"{folder}: no generated package there; `{PROGRAM} render --out DIR` makes one")
        manifest_of(folder)
    return Options(
        old=args.old.resolve(),
        new=args.new.resolve(),
        names=args.names,
        archs=args.arch.split(",") if args.arch else (),
        modes=args.modes.split(",") if args.modes else (),
        jobs=args.jobs,
        fast=args.fast,
        everything=args.all,
        machine_code=args.machine_code,
    )


def check_spec(spec: Spec, options: Options) -> None:
    """Refuse a spec whose variants are not those of the new package: calls would be made of other arguments."""
    there = _variants_of(options.new)
    check_origin(spec, options.new, [name for name in options.names or sorted(there) if name in there])


def run(spec: Spec, options: Options) -> bool:
    """Compare, and print what was found; true if everything is proven equal."""
    start = time.monotonic()
    selection = _selection(spec, options)
    found = _variants_of(options.old), _variants_of(options.new)
    lacking = [f"missing in {side}: the variant {name}" for side, names in _lacking(selection, found) for name in names]
    both = [name for name in selection.variants if name in found[0] and name in found[1]]
    sources = read_sources(options.old), read_sources(options.new)
    skipped = frozenset[str]()
    if not options.everything:
        skipped = unchanged_variants(*sources, found[0] | found[1]) & {*both}
    compared = [name for name in both if name not in skipped]
    packages = _packages(spec, options, sources)
    chosen = [call for call in default_calls(spec, selection, options.new) if call.variant in compared]
    first = Level.CODE if options.machine_code else Level.SOURCE
    results = compare_calls(packages, chosen, options.jobs, first=first)
    unreached = _unreached(results, packages, sources, compared, selection.modes)
    if skipped:
        print(f"equal code, not compiled: {', '.join(name for name in both if name in skipped)}")
    lines = report.table(results) if results else []
    for line in [*lines, *lacking, *unreached, *report.problems(results)]:
        print(line)
    unequal = sum(not result.status.is_equal for result in results) + len(lacking) + len(unreached)
    seconds = time.monotonic() - start
    print(f"{len(results)} launches of {len(chosen)} calls compared in {seconds:.0f} s: {_verdict(unequal)}")
    return not unequal


def run_rekey(spec: Spec, options: Options) -> bool:
    """Rewrite the tuned files of the new package where the proof holds; true if no stale row was left."""
    start = time.monotonic()
    selection = _selection(spec, options)
    sources = read_sources(options.old), read_sources(options.new)
    packages = _packages(spec, options, sources)
    found = rekey(packages, options.jobs, selection.variants)
    results = list({id(result): result for each in found for result in each.results}.values())
    for line in [*report.rekeyed(found), *report.problems(results)]:
        print(line)
    left = [each for each in found if each.fault]
    rows = sum(len(each.part.rows) for each in found if not each.fault)
    print(
        f"{rows} rows re-keyed, {sum(len(each.part.rows) for each in left)} left, in {time.monotonic() - start:.0f} s"
    )
    return not left


def _selection(spec: Spec, options: Options) -> Selection:
    default_archs = [arch for arch in {*DEFAULT_ARCHS, *tuned_archs(options.new)} if arch in spec.chips]
    return Selection(
        variants=checked_names("variant", options.names, spec.variants) or tuple(spec.variants),
        archs=checked_names("--arch", options.archs, spec.chips) or tuple(sorted(default_archs)),
        dtypes=default_dtypes(spec),
        modes=[Mode(name) for name in checked_names("--modes", options.modes, [m.value for m in Mode])] or tuple(Mode),
        fast=options.fast,
        tuned=True,
    )


def _packages(spec: Spec, options: Options, sources: tuple[Sources, Sources]) -> Packages:
    unchanged = frozenset[str]() if options.everything else unchanged_kernels(*sources)
    return Packages(old=options.old, new=options.new, variants=spec.variants, unchanged=unchanged)


def _variants_of(package: Path) -> set[str]:
    return set(json.loads((package / MANIFEST).read_text(encoding="utf-8"))["variants"])


def _lacking(selection: Selection, found: tuple[set[str], set[str]]) -> list[tuple[str, list[str]]]:
    sides = zip(("OLD", "NEW"), found, strict=True)
    return [(side, [name for name in selection.variants if name not in names]) for side, names in sides]


def _unreached(
    results: Iterable[Result],
    packages: Packages,
    sources: tuple[Sources, Sources],
    variants: Sequence[str],
    modes: Sequence[Mode],
) -> list[str]:
    """The kernels that changed and that no call launched, so that nothing is proven about them."""
    launched = {launch.name for result in results for launch in (result.old, result.new) if launch is not None}
    lines = []
    for side, source in zip(("OLD", "NEW"), sources, strict=True):
        for name, path in source.kernels().items():
            if name in launched | packages.unchanged or not _is_selected(path, variants, packages, modes):
                continue
            lines.append(f"not launched by any call: {name} of {side}, in {path}")
    return lines


def _is_selected(path: str, variants: Sequence[str], packages: Packages, modes: Sequence[Mode]) -> bool:
    """True if the calls of these variants and modes should launch the kernels of a file."""
    folder, _, rest = path.partition("/")
    if folder not in packages.variants:  # shared by all variants
        return bool(variants) and set(modes) == set(Mode)
    mode = rest.partition("/")[0] if "/" in rest else Mode.DENSE.value
    return folder in variants and mode in {each.value for each in modes}


def _verdict(unequal: int) -> str:
    return f"{unequal} not proven equal" if unequal else "all proven equal"
