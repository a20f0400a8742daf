"""`codegen compare`: which launches are proven equal or found to differ, and which tuned rows are re-keyed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest

from codegen.analysis.call_modes import Mode
from codegen.arch.chips import SAME_TILES
from codegen.arch.tile_rules import TileConfig
from codegen.cli.main import _parser, main
from codegen.compare import command
from codegen.compare.calls import DEFAULT_ARCHS
from codegen.compare.launches import Launch, Level, Request, launches
from codegen.compare.machine import first_difference
from codegen.compare.proof import Packages, Result, Status, compare_calls
from codegen.compare.rekey import rekey
from codegen.compare.sources import kernel_hashes, read_sources, unchanged_kernels, unchanged_variants
from codegen.lint.jobs import Job
from codegen.load.spec_file import load
from codegen.render.code_hash import kernel_hash
from codegen.spec.model import Pass, Variant
from codegen.tune.compiling import HopperTask
from generated._runtime.core.settings import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

SPEC = "variants:\n  band: {mask: q_idx >= kv_idx}\n"
TILE = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
JOB = Job(
    variant="band",
    mode=Mode.DENSE,
    arch="sm_90",
    dtype="bfloat16",
    head_dim=64,
    configs=((Pass.FWD, TILE),),
    family="portable",
)
_NUMBERS = count()


class Inline:
    """Describes launches in this process, in which packages of different names can be imported."""

    def __init__(self, _processes: int) -> None:
        self.requests: list[Request] = []

    def submit(self, item: Request, /) -> Future[list[Launch]]:
        self.requests.append(item)
        done: Future[list[Launch]] = Future()
        done.set_result(launches(item))
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package of one variant."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "spec.yaml").write_text(SPEC)
    assert main(["render", "--variants", str(folder / "spec.yaml"), "--out", str(folder / "band_old")]) == 0
    yield folder / "band_old"
    sys.path[:] = [path for path in sys.path if path != str(folder)]


@pytest.fixture(scope="module")
def band(old: Path) -> Variant:
    return load(old.parent / "spec.yaml").variants["band"]


def edited(old: Path, *edits: tuple[str, str, str]) -> Path:
    """A copy of a package with edits: each replaces a text of a file. Its hashes are those of the edited kernels."""
    new = old.with_name(f"band_new_{next(_NUMBERS)}")
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("__pycache__"))
    hashes = (new / "_runtime/kernels.py").read_text()
    for path, before, after in edits:
        text = (new / path).read_text()
        assert before in text
        (new / path).write_text(text.replace(before, after))
    sources = read_sources(old), read_sources(new)
    for name, path in sources[0].kernels().items():
        if name not in sources[1].kernels():
            continue
        kernels = [name, name.replace("_delta", "_dq_rows")] if name.endswith("_hopper_delta") else [name]
        old_hash, new_hash = (kernel_hash(path, kernels, each.texts) for each in sources)
        hashes = hashes.replace(old_hash, new_hash)
    (new / "_runtime/kernels.py").write_text(hashes)
    return new


def packages_of(old: Path, new: Path, band: Variant) -> Packages:
    unchanged = unchanged_kernels(read_sources(old), read_sources(new))
    return Packages(old=old, new=new, variants={"band": band}, unchanged=unchanged)


def compared(old: Path, new: Path, band: Variant, job: Job = JOB) -> list[Result]:
    return compare_calls(packages_of(old, new, band), [job], 2, workers=Inline)


RENAMED_LOCAL = ("band/portable.py", "row_max", "largest")
CHANGED_CONSTANT = ("_runtime/device/tl.py", "LN2 = tl.constexpr(0.6931471805599453)", "LN2 = tl.constexpr(0.69)")


# ----------------------------------------------------------------------------------------------------- what is compared


def test_equal_code_is_compared_by_what_it_is_specialised_for(old: Path, band: Variant) -> None:
    new = edited(old, ("band/portable.py", "import triton\n", "import triton  # the compiler\n"))
    assert [result.status for result in compared(old, new, band)] == [Status.SAME_SOURCE]


def test_another_launch_of_equal_code_is_found(old: Path, band: Variant) -> None:
    path, stages = "_runtime/core/launches.py", '"num_stages": tile.num_stages'
    assert stages in (old / path).read_text()
    new = edited(old, (path, stages, f"{stages} + 1"))
    (result,) = compared(old, new, band)
    assert (result.status, result.name) == (Status.DIFFERENT, "band_fwd")


def test_a_renamed_local_leaves_the_ir(old: Path, band: Variant) -> None:
    new = edited(old, RENAMED_LOCAL)
    assert "band_fwd" not in unchanged_kernels(read_sources(old), read_sources(new))
    assert [result.status for result in compared(old, new, band)] == [Status.SAME_IR]


def test_other_ir_may_be_the_same_code(old: Path, band: Variant) -> None:
    new = edited(old, ("band/portable.py", "(b * num_heads + h) * q_len", "(h + b * num_heads) * q_len"))
    (result,) = compared(old, new, band)
    assert result.status is Status.SAME_CODE


def test_a_changed_constant_is_found(old: Path, band: Variant) -> None:
    (result,) = compared(old, edited(old, CHANGED_CONSTANT), band)
    assert (result.status, result.name) == (Status.DIFFERENT, "band_fwd")
    assert any(line.startswith("- ") for line in result.detail)
    assert any(line.startswith("+ ") for line in result.detail)


def test_a_kernel_that_does_not_compile_is_no_proof(old: Path, band: Variant) -> None:
    new = edited(old, ("_runtime/device/tl.py", "LN2 = tl.constexpr(0.6931471805599453)", "LN2 = 0.6931471805599453"))
    (result,) = compared(old, new, band)
    assert result.status is Status.FAILED
    assert "LN2" in result.detail[0] or "new: " in result.detail[0]


def test_a_renamed_kernel_is_compared_with_the_one_it_was(old: Path, band: Variant) -> None:
    new = edited(
        old, ("band/portable.py", "def band_fwd", "def ribbon_fwd"), ("band/launch.py", "band_fwd", "ribbon_fwd")
    )
    (result,) = compared(old, new, band)
    assert (result.status, result.name) == (Status.SAME_IR, "band_fwd -> ribbon_fwd")


class Told(Inline):
    """Returns the launches that a test sets, by the name of the package."""

    launches: dict[str, list[Launch]]

    def submit(self, item: Request, /) -> Future[list[Launch]]:
        done: Future[list[Launch]] = Future()
        done.set_result(self.launches[item.package.name])
        return done


def test_a_kernel_that_only_one_package_launches_is_missing(old: Path, band: Variant) -> None:
    launch = Launch(name="band_fwd", level=Level.SOURCE, facts="grid", codes=("code",))
    Told.launches = {"band_old": [launch, replace(launch, name="band_delta")], "band_new": [launch]}
    packages = Packages(old=old, new=old.with_name("band_new"), variants={"band": band})
    found = compare_calls(packages, [JOB], 2, workers=Told)
    assert [(result.name, result.status) for result in found] == [
        ("band_fwd", Status.SAME_SOURCE),
        ("band_delta", Status.MISSING),
    ]
    assert found[1].new is None


# -------------------------------------------------------------------------------------------------------------- sources


def test_a_change_of_an_imported_function_is_a_change_of_the_kernels_that_use_it(old: Path) -> None:
    changed = (
        "_runtime/device/tl.py",
        "def row_products(a_tile, b_tile):",
        "def row_products(a_tile, b_tile, c_tile):",
    )
    sources = read_sources(old), read_sources(edited(old, changed))
    found = sources[0].kernels().keys() - unchanged_kernels(*sources)
    assert found == {"band_bwd_dq", "band_packed_bwd_dq", "band_segmented_bwd_dq"}


def test_a_new_function_beside_those_that_a_kernel_uses_changes_no_kernel(old: Path) -> None:
    added = ("_runtime/device/tl.py", "import triton\n", "import triton\n\n\ndef unused(x):\n    return x\n")
    sources = read_sources(old), read_sources(edited(old, added))
    assert sources[0].kernels().keys() == unchanged_kernels(*sources)
    assert not any(path.startswith("_runtime/device/") for path in sources[0].kernels().values())


def test_device_functions_are_no_kernels_but_parts_of_them(old: Path) -> None:
    imported = ("band/portable.py", "import triton\n", "import triton\n\nfrom .._runtime.extra import double\n")
    used = ("band/portable.py", "    lse_base = lse_ptr +", "    lse_base = double(lse_ptr) +")
    before, after = edited(old, imported, used), edited(old, imported, used)
    for package, factor in ((before, 2), (after, 3)):
        text = f"import triton\n\n\n@triton.jit\ndef double(x):\n    return {factor} * x\n"
        (package / "_runtime/extra.py").write_text(text)
    sources = read_sources(before), read_sources(after)
    assert {"band_fwd", "band_packed_hopper_delta", "band_hopper_bwd_wide"} < sources[0].kernels().keys()
    assert "double" not in sources[0].kernels()
    assert sources[0].kernels().keys() - unchanged_kernels(*sources) == {"band_fwd"}


def test_a_variant_is_unchanged_if_nothing_that_it_shares_changed(old: Path) -> None:
    comment = edited(old, ("band/torch_op.py", "from torch import Tensor\n", "from torch import Tensor  # a class\n"))
    shared = edited(old, ("_runtime/core/configs.py", "import math\n", "import math\n\nx = 1\n"))
    assert unchanged_variants(read_sources(old), read_sources(comment), ["band"]) == {"band"}
    assert not unchanged_variants(read_sources(old), read_sources(shared), ["band"])


def test_the_first_lines_that_differ_are_shown() -> None:
    assert first_difference("a\nb\nc", "a\nx\nc", 1) == ["  line 1: a", "- b", "+ x"]
    assert first_difference("a", "a\nb") == ["  line 1: a", "+ b"]


# ---------------------------------------------------------------------------------------------------------- tuned files


def entry(package: Path, pass_name: str, **changes: Any) -> dict[str, Any]:
    tile = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
    row = {"pass": pass_name, "mode": "dense", "dtype": "bfloat16", "head_dim": 64, "seq": 1024, "group": 1}
    measured = {"kernel": kernel_hashes(package)["band"]["dense"][pass_name], "triton": "3.6.0"}
    return {**row, "config": tile, "ms": 1.0, "default_ms": 2.0, **measured, **changes}


def with_tuned(package: Path, *rows: dict[str, Any]) -> Path:
    path = package / "tuned" / "h100" / "band.json"
    path.parent.mkdir(parents=True)
    head = {"format": 1, "variant": "band", "gpu": "NVIDIA H100 80GB HBM3", "arch": "sm_90"}
    path.write_text(json.dumps({**head, "entries": rows, "failed": []}))
    return path


@pytest.fixture
def triton_36(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.compare.rekey.version", lambda _: "3.6.0")


@pytest.mark.usefixtures("triton_36")
def test_only_rows_of_kernels_that_are_proven_equal_are_rewritten(old: Path, band: Variant) -> None:
    broken = ("band/portable.py", "delta = row_products(o_tile, do_tile)", "delta = row_products(o_tile, missing)")
    new = edited(old, RENAMED_LOCAL, broken)
    path = with_tuned(new, entry(old, "fwd"), entry(old, "fwd", dtype="float16"), entry(old, "dq"), entry(old, "dkdv"))
    found = rekey(packages_of(old, new, band), 2, ["band"], workers=Inline)
    assert {each.part.title: each.fault for each in found} == {
        "dense fwd": "",
        "dense dq": "2 of 2 launches are not proven equal",
    }
    before, after = kernel_hashes(old)["band"]["dense"], kernel_hashes(new)["band"]["dense"]
    assert before["fwd"] != after["fwd"]
    rows = json.loads(path.read_text())["entries"]
    kernels = {(row["pass"], row["dtype"]): row["kernel"] for row in rows}
    assert kernels == {
        ("fwd", "bfloat16"): after["fwd"],
        ("fwd", "float16"): after["fwd"],
        ("dq", "bfloat16"): before["dq"],
        ("dkdv", "bfloat16"): before["dkdv"],
    }


@pytest.mark.usefixtures("triton_36")
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kernel": "0123456789abcdef"}, "it was measured on other kernels than those of the old package"),
        ({"triton": "3.5.0"}, "it was measured with Triton 3.5.0, not with 3.6.0"),
    ],
)
def test_rows_of_unknown_code_are_left_without_compiling(
    changes: dict[str, str], fault: str, old: Path, band: Variant
) -> None:
    new = edited(old, RENAMED_LOCAL)
    path = with_tuned(new, entry(old, "fwd"), entry(old, "fwd", seq=2048, **changes))
    before = path.read_bytes()
    Told.launches = {}
    (found,) = rekey(packages_of(old, new, band), 2, ["band"], workers=Told)
    assert found.fault == fault
    assert path.read_bytes() == before


@pytest.mark.usefixtures("triton_36")
def test_a_verdict_is_proven_without_compiling_its_unchanged_kernels(old: Path, band: Variant) -> None:
    new = edited(old, ("band/hopper_bwd.py", "first_turn = q_turn\n", "first_turn = q_turn + 0\n"))
    hashes = kernel_hashes(old)["band"]["dense"]
    row = entry(old, "dkdv")
    verdict = {name: row[name] for name in ("mode", "dtype", "head_dim", "seq", "group", "triton")}
    verdict |= {"pass": "bwd", "config": {"dkdv": row["config"], "dq": row["config"]}, "failed": {}}
    verdict |= {"ms": {"portable": 2.0, "hopper": 1.0, "hopper_dkdv": 1.5}}
    verdict |= {"kernels": {name: hashes[name] for name in ("dkdv", "dq", "hopper_bwd", "hopper_delta")}}
    path = with_tuned(new)
    path.write_text(json.dumps({**json.loads(path.read_text()), "families": [verdict]}))
    launch = Launch(name="band_hopper_bwd", level=Level.SOURCE, facts="grid", codes=("code",))
    Told.launches = {old.name: [launch], new.name: [launch]}
    (found,) = rekey(packages_of(old, new, band), 2, ["band"], workers=Told)
    assert [isinstance(call, HopperTask) for call in found.part.calls] == [True, True]
    assert found.fault == ""


# -------------------------------------------------------------------------------------------------------------- command


def test_a_package_is_equal_to_itself_without_compiling(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(old.parent / "spec.yaml")
    assert main(["compare", str(old), str(edited(old)), "--variants", spec]) == 0
    printed = capsys.readouterr().out
    assert "equal code, not compiled: band" in printed
    assert "all proven equal" in printed


def test_a_variant_that_one_package_lacks_is_missing(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = edited(old)
    manifest = json.loads((new / "MANIFEST.json").read_text())
    (new / "MANIFEST.json").write_text(json.dumps({**manifest, "variants": {}}))
    assert main(["compare", str(old), str(new), "--variants", str(old.parent / "spec.yaml")]) == 1
    assert "missing in NEW: the variant band" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm90"], "--arch: expected one of sm_80, "),
        (["--modes", "pack"], "--modes: expected one of dense, packed, segmented, got 'pack'"),
        (["bend"], "variant: expected one of band, got 'bend'; did you mean 'band'?"),
    ],
)
def test_bad_input(options: list[str], message: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(old.parent / "spec.yaml")
    assert main(["compare", str(old), str(old), *options, "--variants", spec]) == 2
    assert message in capsys.readouterr().err


# Which tiles it runs is looked at for each chip in test_lint.py, so one chip stands for all.
@pytest.mark.parametrize(
    "chip", [pytest.param(c, marks=[pytest.mark.full] if i else []) for i, c in enumerate(SAME_TILES)]
)
def test_a_chip_without_tiles_of_its_own_is_compared(chip: str, old: Path, band: Variant) -> None:
    spec = str(old.parent / "spec.yaml")
    assert main(["compare", str(old), str(old), "--arch", chip, "--variants", spec]) == 0
    (result,) = compared(old, edited(old, RENAMED_LOCAL), band, replace(JOB, arch=chip))
    assert result.status is Status.SAME_IR


def test_a_folder_without_a_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "no generated package there" in capsys.readouterr().err


def test_chips_with_tuned_tiles_are_compared_by_default(old: Path) -> None:
    new = edited(old)
    (new / "tuned" / "a10").mkdir(parents=True)
    (new / "tuned" / "a10" / "band.json").write_text(json.dumps({"arch": "sm_86", "entries": []}))
    args = ["compare", str(old), str(new), "--variants", str(old.parent / "spec.yaml")]
    options = command.options_of(_parser().parse_args(args))
    selection = command._selection(load(old.parent / "spec.yaml"), options)
    assert selection.archs == ("sm_80", "sm_86", "sm_90")


def test_default_chips_have_default_tiles(old: Path) -> None:
    assert set(DEFAULT_ARCHS) <= set(load(old.parent / "spec.yaml").archs)
