"""`python -m codegen tune`: makes a request from the command line, and runs it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codegen import PROGRAM
from codegen.arch.paged import PagedPass
from codegen.compile.packages import find_package, manifest_of
from codegen.inspect.origin import check_origin
from codegen.load.spec_file import load
from codegen.spec.model import Pass, Spec
from codegen.tune.progress import Progress, family_totals, totals
from codegen.tune.record import Comparison, Group, Machine, PagedGroup, Workload
from codegen.util.choices import checked_names
from codegen.util.errors import CodegenError, not_installed
from codegen.util.terminal import clock

if TYPE_CHECKING:
    from codegen.tune.families import Families
    from codegen.tune.tuner import Context

SEQS = (512, 1024, 2048, 4096, 16384)
GROUPED_SEQS = (2048, 16384)
"""Lengths that are timed with one key head per query head, and with one key head per GROUP query heads."""

GROUP = 4
MODES = ("dense", "packed", "segmented")

Manifest = Mapping[str, Any]
"""The variants of a package, as its manifest declares them."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The options of the command; empty lists stand for all. `minutes` is the budget, 0 for none.

    `families`: tune no tiles; only compare families of kernels, with the tiles that are tuned already.
    """

    variants_path: Path
    out: Path
    variants: Sequence[str]
    passes: Sequence[str]
    dtypes: Sequence[str]
    head_dims: Sequence[int]
    seqs: Sequence[int]
    modes: Sequence[str]
    minutes: float
    jobs: int
    families: bool
    again: bool


def run(choice: Choice) -> None:
    """Tune, compare families where the GPU has several, and print what was gained."""
    package = find_package(choice.out)
    spec = load(choice.variants_path)
    # Before a GPU is asked for: a misspelt name is an error on every machine.
    manifest = manifest_of(choice.out)["variants"]
    _check_names(choice, spec, manifest)
    workloads, groups = _workloads(choice), _groups(choice, manifest)
    machine = this_machine()
    paged = _paged_groups(choice, spec, manifest)
    from codegen.tune.families import Families, reserve
    from codegen.tune.paged import tune_paged
    from codegen.tune.tuner import Context

    context = Context(spec=spec, package=package, folder=choice.out.resolve(), machine=machine)
    for variant in dict.fromkeys([*(group.variant for group in groups), *(group.variant for group in paged)]):
        context.file(variant)  # a file that cannot be read is an error before anything is measured
    start = time.monotonic()
    if paged:
        tune_paged(context, paged, minutes=choice.minutes, jobs=choice.jobs, again=choice.again)
    if not groups:
        return
    families = Families(context)
    comparisons = comparisons_of(groups, families, choice.variants)
    if choice.families and not comparisons:
        raise CodegenError(
            f"--families: expected kernels in more than one family, got none. There are two families for 16-bit dtypes "
            f"on sm_90; a variant whose mask takes arguments must be named. This GPU is {machine.gpu} ({machine.arch})"
        )
    budget = choice.minutes * 60 if choice.minutes else None
    if not choice.families:
        wanted = _lacking(choice, families, comparisons, workloads)
        kept = reserve(budget, len(wanted), len(workloads), choice.jobs) if budget else 0.0
        spent = time.monotonic() - start if paged else 0.0
        _tune(choice, context, groups, workloads, budget - kept - spent if budget else None)
    if comparisons:
        deadline = start + budget if budget else math.inf
        _compare(choice, families, comparisons, workloads, deadline)


def _tune(
    choice: Choice, context: Context, groups: Sequence[Group], workloads: Sequence[Workload], budget: float | None
) -> None:
    """Tune the tiles of groups, within a budget in seconds."""
    from codegen.tune.tuner import Request, Tuner

    machine = context.machine
    wanted = [
        group
        for group in groups
        if choice.again or not context.file(group.variant).has(group, context.kernel_hash(group), workloads)
    ]
    print(
        f"{machine.gpu} ({machine.arch}), Triton {machine.triton}: {len(wanted)} kernels to tune, "
        f"{len(groups) - len(wanted)} tuned already; results in {context.file('x').path.parent}",
        flush=True,
    )
    progress = Progress(len(wanted))
    request = Request(groups=wanted, workloads=workloads, budget=budget, jobs=choice.jobs)
    tuner = Tuner(context, request, progress.report, progress.note)
    with _resumable(progress, f"of {len(wanted)} kernels are tuned"):
        left = tuner.run()
    seconds = sum(each.seconds for each in tuner.compiled)
    measuring = clock(tuner.measuring)
    print(f"{len(tuner.compiled)} kernels compiled in {clock(seconds)} of processor time; tiles timed in {measuring}")
    print(totals(progress.outcomes))
    _print_left_out(left, "kernels")


def _compare(
    choice: Choice,
    families: Families,
    comparisons: Sequence[Comparison],
    workloads: Sequence[Workload],
    deadline: float,
) -> None:
    """Compare families of kernels, with the tiles that are tuned by now."""
    from codegen.tune.families import FamilyRequest, FamilyTuner

    families.forget()
    context, machine = families.context, families.context.machine
    wanted = _lacking(choice, families, comparisons, workloads)
    print(
        f"{machine.gpu} ({machine.arch}), Triton {machine.triton}: families of {len(wanted)} forwards and backwards to "
        f"compare, {len(comparisons) - len(wanted)} compared already; results in {context.file('x').path.parent}",
        flush=True,
    )
    progress = Progress(len(wanted))
    request = FamilyRequest(comparisons=wanted, workloads=workloads, deadline=deadline, jobs=choice.jobs)
    tuner = FamilyTuner(families, request, progress.judged, progress.note)
    with _resumable(progress, f"of {len(wanted)} comparisons are made"):
        left = tuner.run()
    seconds = sum(each.seconds for each in tuner.compiled)
    measuring = clock(tuner.measuring)
    print(f"{len(tuner.compiled)} compilations of {clock(seconds)} of processor time; checked and timed in {measuring}")
    print(family_totals(progress.judgements))
    _print_left_out(left, "comparisons")


@contextmanager
def _resumable(progress: Progress, what: str) -> Iterator[None]:
    """On Ctrl-C, say how much is done and stored."""
    try:
        yield
    except KeyboardInterrupt:
        progress.close()
        print(f"\n{progress.done} {what} and written; run the same command again to continue", file=sys.stderr)
        raise
    finally:
        progress.close()


def _print_left_out(left: Sequence[Group] | Sequence[Comparison], things: str) -> None:
    if left:
        print(f"the budget left out {len(left)} {things}, from {left[0]} on; run the same command again for them")


def _lacking(
    choice: Choice, families: Families, comparisons: Sequence[Comparison], workloads: Sequence[Workload]
) -> list[Comparison]:
    return [each for each in comparisons if choice.again or not families.has_verdicts(each, workloads)]


def _check_names(choice: Choice, spec: Spec, manifest: Manifest) -> None:
    """Raise unless the package has kernels of the spec's variants: of those that are named, or if none is, of all."""
    check_origin(spec, choice.out, checked_names("variant", choice.variants, manifest) or manifest)


def default_jobs() -> int:
    """Processes that compile: all cores but the one that measures."""
    return max(1, (os.cpu_count() or 2) - 1)


def this_machine() -> Machine:
    """The GPU of this machine; an error says what is missing."""
    try:
        import torch
        import triton
    except ModuleNotFoundError as error:
        raise CodegenError(f"{not_installed(error.name or '')}, on a machine with a GPU") from None
    if not torch.cuda.is_available():
        raise CodegenError(
            "tune measures kernels, and torch finds no GPU here: it needs an NVIDIA or AMD GPU and a torch built for "
            f"it. Without one, `{PROGRAM} lint` compiles the default tiles for every chip"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
    return Machine(gpu=torch.cuda.get_device_name(), arch=arch, triton=triton.__version__)


def _workloads(choice: Choice) -> list[Workload]:
    if choice.seqs:
        return [Workload(seq=seq, group=group) for group in (1, GROUP) for seq in choice.seqs]
    plain = [Workload(seq=seq, group=1) for seq in SEQS]
    return plain + [Workload(seq=seq, group=GROUP) for seq in GROUPED_SEQS]


def _groups(choice: Choice, manifest: Manifest) -> list[Group]:
    """All kernels to tune, the most important ones first, because a budget may end before the list does.

    dq comes before dkdv, which runs after it in every backward.
    """
    variants = checked_names("variant", choice.variants, manifest) or tuple(manifest)
    named = _named_passes(choice) or tuple(Pass)
    passes = [each for each in (Pass.FWD, Pass.DQ, Pass.DKDV) if each in named]
    modes = checked_names("--modes", choice.modes, MODES) or ("dense",)
    any_variant = manifest[variants[0]]
    known = [dtype for dtype in any_variant["dtypes"] if dtype != "float32"] or any_variant["dtypes"]
    dtypes = checked_names("--dtypes", choice.dtypes, any_variant["dtypes"]) or known
    head_dims = choice.head_dims or any_variant["head_dims"]
    return [
        Group(variant=variant, mode=mode, dtype=dtype, head_dim=head_dim, pass_=pass_)
        for mode in modes
        for dtype in dtypes
        for head_dim in head_dims
        for variant in variants
        for pass_ in passes
    ]


def _named_passes(choice: Choice) -> Sequence[str]:
    return checked_names("--passes", choice.passes, [*map(str, Pass), *map(str, PagedPass)])


def _paged_groups(choice: Choice, spec: Spec, manifest: Manifest) -> list[PagedGroup]:
    """The kernels on paged caches to tune: only those of passes that are named, because tuning them takes long."""
    from codegen.plan.paged.kernels import is_legal
    from codegen.tune.paged_space import GROUPS  # torch

    variants = [name for name in choice.variants or manifest if is_legal(spec.variants[name])]
    passes = [each for each in PagedPass if each in _named_passes(choice)]
    halves = [dtype for dtype in spec.defaults.dtypes if dtype != "float32"] or spec.defaults.dtypes
    return [
        PagedGroup(variant=variant, dtype=dtype, head_dim=head_dim, group=group, pass_=pass_)
        for dtype in choice.dtypes or halves
        for head_dim in choice.head_dims or spec.defaults.head_dims
        for variant in variants
        for pass_ in passes
        for group in GROUPS
    ]


def comparisons_of(groups: Sequence[Group], families: Families, named: Sequence[str]) -> list[Comparison]:
    """The comparisons of families for some kernels: the forward, and the backward if either of its passes is there.

    Variants whose masks depend on a call's arguments are compared only if they are `named`, because only a user knows
    whether the spec's example stands for these calls.
    """
    found = dict.fromkeys(
        Comparison(
            variant=group.variant,
            mode=group.mode,
            dtype=group.dtype,
            head_dim=group.head_dim,
            pass_="fwd" if group.pass_ is Pass.FWD else "bwd",
        )
        for group in groups
        if group.variant in named or not families.depends_on_calls(group.variant)
    )
    return [comparison for comparison in found if not families.refusal(comparison)]
