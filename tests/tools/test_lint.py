"""`codegen lint`: the kernels that it checks, its errors and warnings, its output, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from codegen.analysis.call_modes import Mode
from codegen.arch.chips import ARCHS, SAME_TILES
from codegen.arch.tile_rules import NARROW_HEAD_DIM, TileConfig
from codegen.cli.main import main
from codegen.compile.offline import compile_launches
from codegen.lint import kernels, report
from codegen.lint.jobs import Job, Selection, jobs, tuned_jobs
from codegen.lint.kernels import Usage
from codegen.lint.look import Finding, Task, look_at
from codegen.lint.paged_jobs import paged_jobs
from codegen.load.spec_file import load
from codegen.spec.model import Pass
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import DEFAULT_SPEC, ROOT

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

SPEC = load(DEFAULT_SPEC)
EVERYTHING = Selection(variants=tuple(SPEC.variants), archs=ARCHS, dtypes=("bfloat16", "float32"))
FITTING = Usage(threads=128, registers=255, spill_stores=0, spill_loads=0, shared=101_376, instructions={"mma": 1})
CONFIG = TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


def job(arch: str = "sm_90", config: TileConfig = CONFIG, head_dim: int = 64) -> Job:
    configs = ((Pass.FWD, config),)
    return Job(variant="causal", mode=Mode.DENSE, arch=arch, dtype="bfloat16", head_dim=head_dim, configs=configs)


def look(job: Job) -> list[Finding]:
    return look_at(Task(job=job, variant=SPEC.variants[job.variant], package=ROOT / "generated"))


def finding(kernel: str = "causal_fwd", **changes: object) -> Finding:
    return replace(Finding(kernel=kernel, job=job(), config=CONFIG, usage=FITTING), **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- what is looked at


def test_every_default_config_is_looked_at_for_the_largest_head_dim_it_serves() -> None:
    looked = {(j.arch, j.dtype, j.head_dim, *entry) for j in jobs(SPEC, EVERYTHING) for entry in j.configs}
    for arch in SPEC.archs.values():
        tables = [("bfloat16", rows) for rows in (arch.half, *arch.short.values())] + [("float32", arch.float32)]
        for dtype, rows in tables:
            for p, by_dim in rows.items():
                for head_dim, config in by_dim.items():
                    assert (arch.name, dtype, head_dim, p, config) in looked


def test_a_variants_own_configs_take_the_place_of_the_chips() -> None:
    own = SPEC.variants["forgetting"].archs["sm_90"].half[Pass.FWD][128]
    selection = replace(EVERYTHING, variants=["forgetting"], archs=["sm_90"], head_dims=[128], passes=[Pass.FWD])
    assert own != SPEC.archs["sm_90"].half[Pass.FWD][128]
    assert jobs(SPEC, selection)[0].configs == ((Pass.FWD, own),)


@pytest.mark.parametrize(("chip", "like"), SAME_TILES.items())
def test_a_chip_without_tiles_of_its_own_is_looked_at_with_those_it_runs(chip: str, like: str) -> None:
    selection = replace(EVERYTHING, variants=["causal", "forgetting"])
    of_chip, of_like = (jobs(SPEC, replace(selection, archs=[arch])) for arch in (chip, like))
    assert of_chip == [replace(job, arch=chip) for job in of_like if not job.family]
    paged, paged_like = (paged_jobs(SPEC, replace(selection, archs=[arch]), ROOT / "none") for arch in (chip, like))
    assert paged == [replace(job, arch=chip) for job in paged_like]


def test_kernels_compile_for_chips_without_tiles_of_their_own() -> None:
    """Without the command, which renders the package first to compare it: other tests run it."""
    selection = replace(EVERYTHING, variants=["causal"], archs=tuple(SAME_TILES), dtypes=["bfloat16"], head_dims=[64])
    chosen = jobs(SPEC, replace(selection, passes=[Pass.FWD], modes=[Mode.DENSE], fast=True))
    found = [each for job in chosen for each in look(job)]
    assert [each for each in found if each.errors] == []
    printed = "\n".join(report.summary(found, 1.0))
    assert [chip for chip in SAME_TILES if chip not in printed] == []


def test_nothing_is_compiled_twice() -> None:
    entries = [
        (j.variant, j.mode, j.arch, j.dtype, j.head_dim, j.value_dim, j.family, *entry)
        for j in jobs(SPEC, EVERYTHING)
        for entry in j.configs
    ]
    assert len(entries) == len(set(entries))


def test_tuned_tiles_are_looked_at_where_no_default_is_the_same() -> None:
    selection = replace(EVERYTHING, variants=["causal"], archs=["sm_90"], modes=[Mode.DENSE], tuned=True)
    known = jobs(SPEC, selection)
    tuned = tuned_jobs(ROOT / "generated" / "tuned", selection, known)
    portable = [j for j in known if j.dtype == "bfloat16" and not j.family]
    defaults = {(j.head_dim, *entry) for j in portable for entry in j.configs}
    entries = [(j.head_dim, *entry) for j in tuned for entry in j.configs]
    assert entries
    assert len(entries) == len(set(entries))
    assert not defaults & set(entries)
    assert {j.dtype for j in tuned} == {"bfloat16"}
    assert tuned_jobs(ROOT / "generated" / "tuned", replace(selection, archs=["sm_80"]), known) == []


FAST = jobs(SPEC, replace(EVERYTHING, fast=True))
OF_CAUSAL = jobs(SPEC, replace(EVERYTHING, variants=["causal"], modes=[Mode.DENSE]))


def kernels_of(chosen: Iterable[Job]) -> set[tuple[str, str, int, str, Pass, TileConfig]]:
    """The kernels that may differ in their use of a chip; sm_120 has the instructions and the memory of sm_89."""
    chips = {"sm_120": "sm_89"}
    entries = [(j, *entry) for j in chosen for entry in j.configs]
    return {(chips.get(j.arch, j.arch), j.dtype, j.head_dim, j.family, p, tile) for j, p, tile in entries}


def narrow(chosen: Iterable[Job]) -> list[Job]:
    return [j for j in chosen if j.head_dim <= NARROW_HEAD_DIM]


def test_fast_compiles_every_default_tile_of_causal_up_to_256() -> None:
    found = [j for j in FAST if j.variant == "causal" and j.mode is Mode.DENSE]
    assert kernels_of(narrow(OF_CAUSAL)) == kernels_of(narrow(found))


def test_fast_compiles_wider_heads_of_causal_for_one_chip_and_dtype() -> None:
    found = [j for j in FAST if j.head_dim > NARROW_HEAD_DIM]
    assert max(j.head_dim for j in found) == max(j.head_dim for j in OF_CAUSAL)
    assert {p for j in found for p, _ in j.configs} == {Pass.FWD, Pass.DKDV, Pass.DQ}
    assert len({(j.arch, j.dtype) for j in found}) == 1


def test_fast_compiles_every_variant_in_every_mode_and_every_pass() -> None:
    assert {(j.variant, j.mode) for j in FAST} == {(name, mode) for name in SPEC.variants for mode in Mode}
    kernels = {(j.variant, p, j.family) for j in FAST for p, _ in j.configs}
    assert {(name, p, "") for name in SPEC.variants for p in Pass} <= kernels
    assert {(name, Pass.FWD, "hopper") for name in SPEC.variants} <= kernels
    assert {(mode, p) for mode in Mode for p in Pass} == {(j.mode, p) for j in FAST for p, _ in j.configs}


def test_fast_compiles_for_every_chip_each_pass_dtype_and_head_dim_up_to_256() -> None:
    def pairs(chosen: Iterable[Job]) -> set[object]:
        entries = [(j, p) for j in chosen for p, _ in j.configs]
        return {x for j, p in entries for x in ((j.arch, j.dtype, p), (j.arch, j.dtype, j.head_dim))}

    assert pairs(narrow(OF_CAUSAL)) == pairs(narrow(FAST))


def test_fast_compiles_a_small_part_of_everything() -> None:
    everything = sum(len(j.configs) for j in jobs(SPEC, EVERYTHING))
    assert sum(len(j.configs) for j in FAST) < everything / 15


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_a_config_that_needs_more_shared_memory_than_the_chip_has_is_an_error() -> None:
    config = TileConfig(block_m=128, block_n=128, num_warps=8, num_stages=4)
    (found,) = look(job("sm_89", config, head_dim=128))
    assert found.config == config
    assert found.usage is not None
    assert found.usage.instructions["mma m16n8k16"] > 0
    assert found.errors == (f"{found.usage.shared} bytes of shared memory, sm_89 has 101376",)


def test_a_kernel_that_spills_is_a_warning() -> None:
    (found,) = look(job("sm_80", TileConfig(block_m=128, block_n=128, num_warps=4, num_stages=1), head_dim=128))
    assert found.errors == ()
    assert [warning for warning in found.warnings if warning.startswith("spills ")] != []


def test_amd_kernels_are_read_too() -> None:
    (found,) = look(job("gfx942", replace(CONFIG, num_stages=1)))
    assert found.usage is not None
    assert found.usage.threads == 256
    assert 0 < found.usage.registers <= 512
    assert any(kind.startswith("mfma ") for kind in found.usage.instructions)


def test_wgmma_that_the_assembler_serialises_is_a_warning() -> None:
    (found,) = look(job("sm_90", TileConfig(block_m=128, block_n=128, num_warps=4, num_stages=2), head_dim=128))
    assert [warning for warning in found.warnings if "wgmma" in warning] != []


@pytest.mark.parametrize(
    ("used", "arch", "message"),
    [
        (FITTING, "sm_89", None),
        (replace(FITTING, shared=101_377), "sm_120", "101377 bytes of shared memory, sm_120 has 101376"),
        (replace(FITTING, threads=512), "sm_80", "131072 registers of a program, it has 65536"),
        (replace(FITTING, tensor_columns=640), "sm_100", "640 columns of tensor memory, sm_100 has 512"),
        (replace(FITTING, shared=0, threads=256, registers=512), "gfx942", None),
        (replace(FITTING, shared=0, threads=512, registers=260), "gfx942", "528 registers of a SIMD, it has 512"),
    ],
)
def test_limits(used: Usage, arch: str, message: str | None) -> None:
    assert kernels.errors(used, arch) == ([] if message is None else [message])


def test_a_16_bit_kernel_without_matrix_instructions_is_a_warning() -> None:
    used = replace(FITTING, instructions={})
    assert kernels.warnings(used, multiplies_halves=True) == ["no matrix instruction"]
    assert kernels.warnings(used, multiplies_halves=False) == []


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_table_has_a_row_per_config_with_the_most_that_a_kernel_takes() -> None:
    wrong = finding("window_fwd", usage=replace(FITTING, shared=240_000), errors=("240000 bytes",))
    spilling = finding("alibi_fwd", usage=replace(FITTING, spill_stores=200, spill_loads=8), warnings=("spills 200",))
    assert report.lines([finding(), wrong, spilling]) == [
        "sm_90, 232448 bytes of shared memory",
        "",
        "pass  dtype     D   tile   warps  stages  kernels  regs  spills  shared  matrix",
        "fwd   bfloat16  64  64x32  4      2       3        255   200/8   240000  mma x1  error",
        "",
        "error: sm_90 fwd bfloat16 D64 64x32: window_fwd: 240000 bytes",
        "warning: sm_90 fwd bfloat16 D64 64x32: alibi_fwd: spills 200",
        "",
    ]
    assert report.summary([finding(), wrong, spilling], 61.0) == [
        "chip   kernels  errors  warnings",
        "sm_90  3        1       1",
        "all    3        1       1",
        "in 61 s",
    ]


def test_a_small_kernel_is_reported_once_for_each_chip() -> None:
    small = finding("document_extremes", config=None)
    others = [replace(small, job=job(head_dim=128)), replace(small, job=job("sm_80")), finding()]
    assert report.without_repetition([small, *others]) == [small, *others[1:]]


def test_json_is_written_in_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lint.json"
    report.save_json(path, [finding()], "3.6.0")
    document = json.loads(path.read_text())
    assert document["triton"] == "3.6.0"
    assert document["kernels"][0]["usage"]["registers"] == 255
    before = path.read_bytes()
    with pytest.raises(TypeError):
        report.save_json(path, [finding(warnings=(object(),))], "3.6.0")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["lint.json"]


# ---------------------------------------------------------------------------------------------------------- the command


def test_a_package_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out, found = tmp_path / "band.yaml", tmp_path / "band_ops", tmp_path / "found.json"
    spec.write_text("""
variants:
  band: {mask: q_idx - kv_idx <= reach, scalars: {reach: int}}
archs: {sm_89: {fwd: {128: {block_m: 128, block_n: 128, num_warps: 8, num_stages: 4}}}}
""")
    options = ["--variants", str(spec), "--out", str(out)]
    assert main(["render", *options]) == 0
    chosen = ["--arch", "sm_89", "--head-dim", "128", "--dtype", "float16", "--passes", "fwd", "--modes", "dense"]
    assert main(["lint", "band", *options, *chosen, "--jobs", "1", "--json", str(found)]) == 1
    printed = capsys.readouterr().out
    assert "bytes of shared memory, sm_89 has 101376" in printed
    (kernel,) = json.loads(found.read_text())["kernels"]
    assert kernel["kernel"] == "band_fwd"
    spec.write_text(spec.read_text().replace("<= reach", "< reach"))
    assert main(["lint", "band", *options, *chosen]) == 2
    assert "is not what" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["casual"], "got 'casual'; did you mean 'causal'?"),
        (["--arch", "sm90"], "--arch: expected one of sm_80, "),
        (["--arch", "sm90"], "got 'sm90'; did you mean 'sm_90'?"),
        (["--dtype", "bf16"], "--dtype: expected one of float16, bfloat16, float32, got 'bf16'"),
        (
            ["--passes", "fwd,dkvd"],
            "--passes: expected one of fwd, dkdv, dq, decode, paged_fwd, got 'dkvd'; did you mean 'dkdv'?",
        ),
        (["--modes", "pack"], "--modes: expected one of dense, packed, segmented, paged, got 'pack'"),
        (["--head-dim", "7"], "--head-dim: expected integers from 8 to 512 such as 64,80, got '7'"),
        (["--json", "no/found.json"], "--json: expected a file in a folder that is there, got no/found.json"),
        (["--variants", "no.yaml"], "no.yaml:1: there is no such file"),
    ],
)
def test_bad_input(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["lint", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_nothing_compiles_where_kernels_are_interpreted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = ("--arch", "sm_90", "--dtype", "bfloat16", "--head-dim", "64", "--passes", "fwd", "--modes", "dense")
    assert main(["lint", "causal", "--jobs", "1", *options]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- codegen.compile.offline


def test_launches_after_compiling_are_as_before() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = (driver._active, JITFunction.run)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_launches(interrupted, "causal", "sm_90")
    assert (driver._active, JITFunction.run) == before


def test_a_kernel_that_does_not_compile_is_told_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    from generated.torch import causal

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such instruction")

    monkeypatch.setattr(JITFunction, "run", refuse)
    q, k, v = torch.zeros(3, 1, 2, 64, 64, dtype=torch.float16)
    failures: list[tuple[str, str]] = []
    tell = lambda name, error: failures.append((name, str(error)))  # noqa: E731 - one expression
    assert compile_launches(lambda: causal(q, k, v), "causal", "sm_90", on_failure=tell) == {}
    assert failures == [("causal_fwd", "no such instruction")]
    with pytest.raises(ValueError, match="no such instruction"):
        compile_launches(lambda: causal(q, k, v), "causal", "sm_90")
    (found,) = look(job())
    assert found.errors == ("does not compile: ValueError: no such instruction",)
