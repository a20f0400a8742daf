"""The contenders that the tuner compares on a GPU with several kernel families: each is correct, and is timed."""

from __future__ import annotations

import pytest
import torch

from tests.support.paths import DEFAULT_SPEC, ROOT

pytest.importorskip("yaml", reason="the tuner reads a spec")

from codegen.compile.packages import Package
from codegen.load.spec_file import load
from codegen.tune.command import this_machine
from codegen.tune.families import Families
from codegen.tune.measuring import FamilyBench
from codegen.tune.record import Comparison, Workload
from codegen.tune.tuner import Context
from generated._runtime.torch.devices import arch_of
from tests.support.cases import DEVICE

pytestmark = pytest.mark.gpu

PACKAGE = Package(root=str(ROOT), name="generated")


@pytest.mark.parametrize("mode", ["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("variant", ["causal", "relative_bias"])
def test_contenders(variant: str, pass_: str, head_dim: int, mode: str) -> None:
    if arch_of(torch.empty(0, device=DEVICE)) != "sm_90":
        pytest.skip("there is one family alone")
    spec, folder = load(DEFAULT_SPEC), ROOT / "generated"
    families = Families(Context(spec=spec, package=PACKAGE, folder=folder, machine=this_machine()))
    of = Comparison(variant=variant, mode=mode, dtype="bfloat16", head_dim=head_dim, pass_=pass_)
    # Hopper's forward has another tile for long sequences of 64 columns.
    for workload in (Workload(seq=1024, group=2), Workload(seq=16384, group=1)):
        contenders, bench = families.contenders(of, workload), FamilyBench(PACKAGE, of)
        assert [bench.check(contender) for contender in contenders] == [""] * len(contenders)
        times, failed = bench.race(contenders, workload)
        assert not failed
        assert list(times) == [contender.name for contender in contenders]
        assert min(times.values()) > 0
