"""Comparisons of kernel families on an invented GPU, and the family that calls then run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from codegen.compile.packages import Package
from codegen.load.spec_file import load
from codegen.tune.families import Families, FamilyRequest, FamilyTuner
from codegen.tune.measuring import Contender
from codegen.tune.record import Comparison, Judgement, Machine, Verdict, Workload
from codegen.tune.tuner import Context
from generated._runtime.core import configs
from generated._runtime.core.options import NO_OPTIONS, CallOptions
from tests.support.inline_pool import InlinePool
from tests.support.paths import ROOT

SPEC = load(ROOT / "variants.yaml")
PACKAGE = Package(root=str(ROOT), name="generated")
MACHINE = Machine(gpu="NVIDIA Imaginary 1", arch="sm_90", triton="3.6.0")
SHORT, MIDDLE, LONG = (Workload(seq=seq, group=1) for seq in (512, 2048, 16384))
Times = Callable[[str, Workload], float]


def comparison(pass_: str = "fwd", variant: str = "causal", head_dim: int = 128) -> Comparison:
    return Comparison(variant=variant, mode="dense", dtype="bfloat16", head_dim=head_dim, pass_=pass_)


class MadeUpBench:
    """A bench without a GPU: contenders take the times of `MS`, and fail with the messages of `FAULTS`."""

    MS: Times
    FAULTS: Callable[[Contender], str]
    checked: ClassVar[list[Contender]]
    pool: ClassVar[InlinePool]

    def __init__(self, _package: Package, of: Comparison) -> None:
        self.comparison = of

    def check(self, contender: Contender) -> str:
        type(self).checked.append(contender)
        return type(self).FAULTS(contender)

    def race(self, contenders: Sequence[Contender], workload: Workload) -> tuple[dict[str, float], dict[str, str]]:
        return {each.name: type(self).MS(each.name, workload) for each in contenders}, {}


def families_of(folder: Path) -> Families:
    return Families(Context(spec=SPEC, package=PACKAGE, folder=folder.parent.parent, machine=MACHINE))


def judge(
    folder: Path, *comparisons: Comparison, workloads: Sequence[Workload] = (SHORT, LONG), deadline: float = math.inf
) -> tuple[list[Judgement], list[Comparison]]:
    """The tuner's judgements, and the comparisons left over. Calls afterwards run the families that it chose."""
    found: list[Judgement] = []
    request = FamilyRequest(comparisons=comparisons, workloads=workloads, deadline=deadline, jobs=2)
    compared = families_of(folder)
    left = FamilyTuner(compared, request, found.append, lambda _: None).run()
    compared.forget()
    return found, left


def family_of(
    name: str = "fwd",
    variant: str = "causal",
    seq: int = 16384,
    head_dim: int = 128,
    group: int = 1,
    dtype: str = "bfloat16",
    mode: str = "dense",
    gpu: str = "imaginary_1",
    options: CallOptions = NO_OPTIONS,
) -> str:
    """The family of a kernel of a call."""
    dims = (head_dim, head_dim)
    return configs.tiles_for(variant, mode, "sm_90", gpu, dtype, dims, (group, 1), seq, options)[name].family


def times(**ms: float) -> Times:
    """The same times at every workload."""
    return staticmethod(lambda name, _: ms[name])


def verdict(ms: dict[str, float], ruled: str, taken: str, **failed: str) -> Verdict:
    return Verdict(workload=LONG, ms=ms, failed=failed, config={}, ruled=ruled, taken=taken)
