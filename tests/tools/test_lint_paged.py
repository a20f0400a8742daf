"""`codegen lint` on kernels of paged caches: which calls it compiles, and what it says about their pipelines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.arch.chips import ARCHS
from codegen.arch.paged import PagedPass, PagedTileConfig, default_paged_tiles
from codegen.lint import report
from codegen.lint.jobs import Selection
from codegen.lint.kernels import Usage
from codegen.lint.look import Finding, Task, look_at
from codegen.lint.paged_jobs import (
    FEW_QUERIES,
    HOPPER_PAGES,
    LATENT_CACHES,
    WHOLE_PAGE,
    PagedJob,
    paged_jobs,
    pipeline_warnings,
)
from codegen.load.spec_file import load
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import DEFAULT_SPEC, ROOT

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

SPEC = load(DEFAULT_SPEC)
TUNED = ROOT / "generated" / "tuned"
EVERYTHING = Selection(variants=tuple(SPEC.variants), archs=ARCHS, dtypes=("bfloat16", "float32"))
LEGAL = {name for name, variant in SPEC.variants.items() if not variant.dropout}
TILE = PagedTileConfig(block_m=16, block_n=64, num_warps=4, num_stages=3)
JOB = PagedJob(
    variant="causal", arch="sm_90", dtype="bfloat16", head_dim=128, pass_=PagedPass.DECODE, tile=TILE, page_size=256
)
BLOCK = 2 * 64 * 128 * 2
USED = Usage(threads=128, registers=96, spill_stores=0, spill_loads=0, shared=2 * BLOCK + 4096, copied=3 * BLOCK)


def look(job: PagedJob) -> dict[str, Finding]:
    found = look_at(Task(job=job, variant=SPEC.variants[job.variant], package=ROOT / "generated"))
    return {finding.kernel: finding for finding in found}


# ---------------------------------------------------------------------------------------------------- what is looked at


def test_every_default_tile_is_looked_at_on_both_kinds_of_page() -> None:
    found = paged_jobs(SPEC, EVERYTHING, TUNED)
    assert len(found) == len(set(found))
    for arch in ARCHS:
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            for pass_ in PagedPass:
                for head_dim, tile in default_paged_tiles(arch, pass_, itemsize).items():
                    if head_dim <= 256:
                        of = replace(JOB, arch=arch, dtype=dtype, pass_=pass_, tile=tile, head_dim=head_dim)
                        wanted = [replace(of, page_size=size) for size in (WHOLE_PAGE, tile.block_n // 2)]
                        assert set(wanted) <= set(found)


def test_variants_without_kernels_on_pages_are_left_out() -> None:
    assert {job.variant for job in paged_jobs(SPEC, EVERYTHING, TUNED)} == LEGAL


def test_fast_looks_at_every_variant_and_every_chip() -> None:
    found = paged_jobs(SPEC, replace(EVERYTHING, fast=True), TUNED)
    assert {(job.variant, job.pass_) for job in found} >= {(name, pass_) for name in LEGAL for pass_ in PagedPass}
    assert {job.arch for job in found} == set(ARCHS)
    assert len(found) < len(paged_jobs(SPEC, EVERYTHING, TUNED)) / 20


def test_tuned_tiles_are_looked_at(tmp_path: Path) -> None:
    tile = {"block_m": 32, "block_n": 128, "num_warps": 8, "num_stages": 4, "keys_per_split": 512}
    row = {"pass": "decode", "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128, "group": 4, "config": tile}
    path = tmp_path / "imaginary" / "causal.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"arch": "sm_90", "paged": [row]}))
    selection = replace(EVERYTHING, variants=["causal"], archs=["sm_90"], tuned=True)
    found = [job for job in paged_jobs(SPEC, selection, tmp_path) if job.tile == PagedTileConfig(**tile)]
    assert [job.page_size for job in found] == [WHOLE_PAGE, 64]
    assert paged_jobs(SPEC, replace(selection, paged=[PagedPass.PAGED_FWD], archs=["sm_80"]), tmp_path)


# ------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("page_size", [256, 32])
@pytest.mark.parametrize("pass_", list(PagedPass))
def test_the_kernels_of_a_step_are_found_and_read_ahead(pass_: PagedPass, page_size: int) -> None:
    tile = default_paged_tiles("sm_90", pass_, 2)[128]
    found = look(replace(JOB, pass_=pass_, tile=tile, page_size=page_size))
    assert set(found) == {"append_tokens", "causal_paged_plan", "causal_paged_fwd", "merge_splits"}
    main = found["causal_paged_fwd"]
    assert (main.config, main.pass_name, main.errors, main.warnings) == (tile, pass_, (), ())
    assert main.usage is not None
    # The forward of prompts has a separate loop for blocks without a mask.
    loops = 2 if pass_ is PagedPass.PAGED_FWD else 1
    assert main.usage.copied == loops * tile.num_stages * BLOCK
    assert main.usage.shared >= (tile.num_stages - 1) * BLOCK
    assert {finding.config for name, finding in found.items() if name != main.kernel} == {None}


def test_prompts_in_hoppers_family_are_found() -> None:
    selection = replace(EVERYTHING, archs=["sm_90"], variants=["causal", "document", "forgetting"], head_dims=[128])
    jobs = [job for job in paged_jobs(SPEC, selection, TUNED) if job.family]
    assert [(job.variant, job.dtype, job.page_size) for job in jobs] == [
        ("causal", "bfloat16", page_size) for page_size in HOPPER_PAGES
    ]
    found = look(jobs[-1])
    assert set(found) == {"append_tokens", "prompt_blocks", "causal_paged_hopper_fwd"}
    main = found["causal_paged_hopper_fwd"]
    assert (main.config, main.pass_name, main.errors, main.warnings) == (jobs[-1].tile, PagedPass.PAGED_FWD, (), ())


def test_latent_attention_is_found() -> None:
    selection = replace(EVERYTHING, archs=["sm_90"], variants=["causal", "alibi", "streaming_llm"], dtypes=["bfloat16"])
    jobs = [job for job in paged_jobs(SPEC, selection, TUNED) if job.value_dim is not None]
    assert [(job.variant, job.page_size, job.small) for job in jobs] == [("causal", *cache) for cache in LATENT_CACHES]
    for job in jobs[1:]:
        main = look(job)["causal_paged_hopper_latent"]
        # The warps that convert keys leave the others fewer registers: those spill, most of it outside of the loop.
        assert main.errors == ()
        assert [each.split()[0] for each in main.warnings] == (["spills"] if job.small else [])


def test_a_few_queries_of_the_widest_heads_compile() -> None:
    """Their tile has 64 rows, whose sums alone take 128 registers per thread."""
    selection = replace(EVERYTHING, archs=["sm_90"], variants=["causal"], head_dims=[256], dtypes=["bfloat16"])
    jobs = [job for job in paged_jobs(SPEC, selection, TUNED) if job.queries is not None]
    assert [(job.page_size, job.queries, job.pass_) for job in jobs] == [
        (jobs[0].tile.block_n // 2, FEW_QUERIES, PagedPass.DECODE)
    ]
    main = look(jobs[0])["causal_paged_fwd"]
    assert main.errors == ()
    assert main.usage is not None
    assert main.usage.registers > 128


# `codegen lint --fast`, a part of `make test`, compiles every variant with each pass, and a call that lacks an argument
# fails there, too. So one variant runs here.
@pytest.mark.parametrize("pass_", list(PagedPass))
@pytest.mark.parametrize(
    "variant",
    ["forgetting", *(pytest.param(x, marks=pytest.mark.full) for x in ("gpt_oss", "document", "relative_bias"))],
)
def test_a_call_has_every_argument_of_its_variant(variant: str, pass_: PagedPass) -> None:
    found = look(replace(JOB, variant=variant, pass_=pass_, tile=default_paged_tiles("sm_90", pass_, 2)[128]))
    assert found[f"{variant}_paged_fwd"].errors == ()


def test_a_tile_that_does_not_fit_is_an_error() -> None:
    tile = replace(TILE, block_n=256, num_stages=4)
    main = look(replace(JOB, tile=tile))["causal_paged_fwd"]
    assert main.usage is not None
    assert main.errors == (f"{main.usage.shared} bytes of shared memory, sm_90 has 232448",)


def test_a_kernel_that_does_not_read_ahead_is_a_warning() -> None:
    assert pipeline_warnings(USED, JOB) == []
    # Triton 3.6 keeps only one block of k and of v if the number of the page is loaded in the same iteration.
    shallow = replace(USED, copied=2 * BLOCK, shared=BLOCK + 4096)
    assert pipeline_warnings(shallow, JOB) == [
        f"copies {2 * BLOCK} bytes ahead, 3 stages are {3 * BLOCK}",
        f"{BLOCK + 4096} bytes of shared memory, the blocks of 3 stages take {2 * BLOCK}",
    ]
    assert pipeline_warnings(shallow, replace(JOB, tile=replace(TILE, num_stages=2))) == []
    assert pipeline_warnings(USED, JOB, loops=2) == [
        f"copies {3 * BLOCK} bytes ahead, 3 stages of 2 loops are {6 * BLOCK}"
    ]
    assert pipeline_warnings(replace(USED, copied=0), replace(JOB, arch="gfx942")) == []


def test_the_report_names_the_passes() -> None:
    of_prompts = replace(JOB, pass_=PagedPass.PAGED_FWD)
    found = [Finding(kernel="causal_paged_fwd", job=job, config=TILE, usage=USED) for job in (JOB, of_prompts)]
    small = Finding(kernel="merge_splits", job=JOB, usage=USED)
    assert report.lines([*found, small])[2:6] == [
        "pass       dtype     D    tile   warps  stages  kernels  regs  spills  shared  matrix",
        "-          -         -    -      -      -       1        96    0       69632   -",
        "decode     bfloat16  128  16x64  4      3       1        96    0       69632   -",
        "paged_fwd  bfloat16  128  16x64  4      3       1        96    0       69632   -",
    ]
