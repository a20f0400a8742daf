"""The family of kernels that a call runs after measurements on a simulated GPU."""

from __future__ import annotations

import doctest
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen.tune.record import Workload
from generated._runtime.core import configs, families, tuned
from generated._runtime.core.options import checked_options
from tests.support.family_races import (
    LONG,
    MIDDLE,
    SHORT,
    MadeUpBench,
    comparison,
    families_of,
    family_of,
    judge,
    times,
)


def test_measurements_overrule_the_rule(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=1.02, hopper_dkdv=1.02)
    judge(folder, comparison("fwd"), comparison("bwd"))
    assert [family_of(name) for name in configs.PASSES] == ["portable"] * 3
    assert [family_of(name, gpu="") for name in configs.PASSES] == ["hopper"] * 3
    # Another GPU of the architecture takes the measurement in place of one of its own.
    assert [family_of(name, gpu="imaginary_2") for name in configs.PASSES] == ["portable"] * 3


def test_less_than_a_percent_is_noise(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=1.005, hopper_dkdv=0.999)
    (forward, backward), _ = judge(folder, comparison("fwd"), comparison("bwd"), workloads=[LONG])
    assert [forward.verdicts[0].taken, backward.verdicts[0].taken] == ["hopper", "hopper"]
    assert [family_of(name) for name in configs.PASSES] == ["hopper"] * 3


def test_kernels_of_a_backward(folder: Path, made_up: type[MadeUpBench]) -> None:
    for ms, wanted, in_order in (
        ({"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 1.0}, "hopper portable", "hopper portable"),
        ({"portable": 1.0, "hopper_dkdv": 1.1, "hopper": 0.9}, "hopper hopper", "portable portable"),
        ({"portable": 1.0, "hopper_dkdv": 0.9, "hopper": 0.8}, "hopper hopper", "hopper portable"),
    ):
        made_up.MS = times(**ms)
        judge(folder, comparison("bwd"))
        assert f"{family_of('dkdv')} {family_of('dq')}" == wanted
        # The one kernel for all gradients has no fixed order, so one of the other choices is taken.
        in_fixed_order = checked_options("causal", None, None, True)
        assert f"{family_of('dkdv', options=in_fixed_order)} {family_of('dq', options=in_fixed_order)}" == in_order


def test_a_call_that_names_a_family_gets_it(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = times(portable=1.0, hopper=2.0, hopper_dkdv=2.0)
    judge(folder, comparison("fwd"), comparison("bwd"))
    hopper = checked_options("causal", None, "hopper")
    assert [family_of(name, options=hopper) for name in configs.PASSES] == ["hopper"] * 3
    made_up.MS = times(portable=2.0, hopper=1.0, hopper_dkdv=1.1)
    judge(folder, comparison("fwd", "natten"), comparison("bwd", "natten"))
    assert [family_of(name, "natten") for name in configs.PASSES] == ["hopper"] * 3
    portable = checked_options("natten", None, "portable")
    assert [family_of(name, "natten", options=portable) for name in configs.PASSES] == ["portable"] * 3
    own = checked_options("natten", {"fwd": configs.Tile(64, 64, 4, 2)._asdict()})
    assert [family_of(name, "natten", options=own) for name in configs.PASSES] == ["portable", "hopper", "hopper"]


def test_the_nearest_verdict_counts(folder: Path, made_up: type[MadeUpBench]) -> None:
    def slow_when_short(name: str, workload: Workload) -> float:
        return 2.0 if name == "hopper" and workload.seq == 512 else 1.0 if name == "portable" else 0.9

    made_up.MS = staticmethod(slow_when_short)
    judge(folder, comparison())
    assert [family_of(seq=seq) for seq in (128, 512, 2800, 3000, 100_000)] == ["portable"] * 3 + ["hopper"] * 2
    assert family_of(seq=512, group=8) == "portable"
    assert family_of(seq=512, dtype="float16") == "portable"
    assert family_of(seq=512, head_dim=112) == "portable"
    assert family_of(seq=512, head_dim=256) == "hopper"
    assert family_of(seq=512, variant="full") == "hopper"


def test_of_lengths_as_near_the_group_decides(folder: Path, made_up: type[MadeUpBench]) -> None:
    made_up.MS = staticmethod(lambda name, workload: 2.0 if (name == "hopper") == (workload.group == 4) else 1.0)
    judge(folder, comparison(), workloads=[LONG, Workload(seq=16384, group=4)])
    assert [family_of(group=group) for group in (1, 4, 8)] == ["hopper", "portable", "portable"]


def test_where_the_rule_held_it_holds_between(folder: Path, made_up: type[MadeUpBench]) -> None:
    """The rule knows more about lengths between the measured ones: at 64 columns its forward changes at 1024."""
    ruled = families_of(folder).ruled
    made_up.MS = staticmethod(lambda name, workload: 1.0 if name == ruled(comparison(head_dim=64), workload) else 2.0)
    judge(folder, comparison(head_dim=64), workloads=[SHORT, MIDDLE])
    wanted = {512: "portable", 1000: "portable", 1024: "hopper", 1100: "hopper", 2048: "hopper"}
    assert {seq: family_of(seq=seq, head_dim=64) for seq in wanted} == wanted


def test_wrong_kernels_do_not_run_beside_measured_workloads(folder: Path, made_up: type[MadeUpBench]) -> None:
    """At 512 keys the rule takes a separate kernel for dq, at 2048 the one kernel that was wrong."""
    made_up.FAULTS = staticmethod(lambda contender: "wrong" if contender.name == "hopper" else "")
    judge(folder, comparison("bwd"), workloads=[SHORT])
    found = [(family_of("dkdv", seq=seq), family_of("dq", seq=seq)) for seq in (512, 2048)]
    assert found == [("hopper", "portable")] * 2
    assert family_of("dq", seq=2048, gpu="") == "hopper"


def test_examples() -> None:
    assert doctest.testmod(families, raise_on_error=True).attempted > 0


@pytest.mark.usefixtures("made_up")
def test_other_chips_and_modes_are_as_ever(folder: Path) -> None:
    judge(folder, comparison("fwd", "natten"), comparison("bwd", "natten"))
    assert family_of(variant="natten") == "hopper"
    assert family_of(variant="natten", mode="packed") == "portable"
    assert family_of(variant="natten", dtype="float32") == "portable"
    for arch in ("sm_80", "sm_100"):
        given = ("dense", arch, "imaginary_1", "bfloat16", (128, 128), (1, 1), 16384)
        assert {tile.family for tile in configs.tiles_for("natten", *given).values()} == {"portable"}


def broken(change: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update(change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (broken({"kernels": {"fwd": "0123"}}), "its families of fwd were measured on other kernels"),
        (broken({"mode": "packed"}), "its families of packed fwd were measured on other kernels"),
        (broken({"ms": {}}), "are no times of some of portable, hopper_dkdv, hopper"),
        (broken({"ms": {"volta": 1.0}}), "are no times of some of portable, hopper_dkdv, hopper"),
        (broken({"ms": {"hopper": 0.0}}), "are no times of some of"),
        (broken({"ms": 3.0}), "another type than in a tuned file"),
        (broken({"seq": 0}), "no positive int"),
        (lambda row: row.pop("kernels"), "lacks or misspells 'kernels'"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_unusable_tuned_files_warn_once(folder: Path, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    judge(folder, comparison(variant="natten"), workloads=[LONG])
    path = folder / "natten.json"
    assert family_of(variant="natten") == "hopper"
    document = json.loads(path.read_text())
    change(document["families"][0])
    path.write_text(json.dumps(document))
    tuned.tuned_entries.cache_clear()
    configs.tiles_for.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [family_of(variant="natten", seq=seq) for seq in (512, 16384)] == ["portable", "portable"]
    (message,) = [str(warning.message) for warning in caught]
    assert str(path) in message
    assert reason in message
    assert "codegen tune natten" in message
