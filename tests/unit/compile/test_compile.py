"""Kernels of specs with features that the library's variants do not use compile without a GPU, and fit the chip.

`codegen lint --fast`, a part of `make test`, compiles the library's own kernels; a test here checks that it compiles
all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from codegen.analysis.call_modes import Mode
from codegen.compile.offline import compile_launches
from codegen.lint.calls import run_call
from codegen.lint.jobs import Job, Selection, jobs
from codegen.lint.look import Task, look_at, pass_of
from codegen.load.spec_file import load
from codegen.spec.model import Pass, Spec
from generated._runtime.core.settings import INTERPRET
from tests.support.paths import DEFAULT_SPEC, ROOT
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

SPEC = load(DEFAULT_SPEC)


def kernels_of(package: Path, variant: str, mode: Mode) -> set[str]:
    """The names of a variant's kernels in a mode: the jitted functions that carry its name.

    Segmented calls run the dense delta if theirs would differ only in its name.
    """
    found = _defined_in(package / variant / ("" if mode is Mode.DENSE else mode), variant)
    if mode is Mode.SEGMENTED and f"{variant}_segmented_hopper_delta" not in found:
        deltas = {f"{variant}_hopper_delta", f"{variant}_hopper_dq_rows"}
        return found | (deltas & _defined_in(package / variant, variant))
    return found


def _defined_in(folder: Path, variant: str) -> set[str]:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    return set(re.findall(rf"^def ({variant}_\w+)\(", source, re.MULTILINE))


def own(names: set[str]) -> set[str]:
    """The names without the kernels that a mode shares with other calls or variants.

    The shared kernels are the sums of a log-decay (with dense calls), the table of packed blocks (all packed calls),
    the mark of disorder (all calls with positions), the columns of values (all calls of 8 bits) and the sums of a
    bias's gradient (all biases by distance). Hopper's kernels for head dims above 128, which these tests do not run,
    are left out too.
    """
    shared = {"packed_blocks", "mark_disorder", "value_columns", "distance_sums"}
    wide = ("_wide", "_split_keys", "_split_rows")
    return {name for name in names - shared if "decay" not in name and not name.endswith(wide)}


def jobs_of(spec: Spec, variant: str, mode: Mode, head_dim: int = 64, arch: str = "sm_90") -> list[Job]:
    """A call with the first config of each pass, and the calls of Hopper's family if there are any."""
    selection = Selection(variants=[variant], archs=[arch], dtypes=["bfloat16"], modes=[mode], head_dims=[head_dim])
    first, *others = jobs(spec, selection)
    return [first, *(job for job in others if job.family)]


def job_of(spec: Spec, variant: str, mode: Mode, head_dim: int = 64, arch: str = "sm_90") -> Job:
    return jobs_of(spec, variant, mode, head_dim, arch)[0]


def check(package: Path, variant: str, mode: Mode = Mode.DENSE, head_dim: int = 64) -> None:
    spec = load(package.parent / "spec.yaml")
    compiled = compiled_without_errors(spec, package, variant, jobs_of(spec, variant, mode, head_dim))
    assert own(compiled) == own(kernels_of(package, variant, mode))


def check_forward(package: Path, variant: str, mode: Mode) -> None:
    """Compile only a call's portable forward, and the kernels that make the tables of blocks of every pass."""
    spec = load(package.parent / "spec.yaml")

    def is_forward_or_table(name: str) -> bool:
        return "_hopper_" not in name and pass_of(name) in (None, Pass.FWD)

    call = partial(run_call, spec.variants[variant], job_of(spec, variant, mode), package.name)
    compiled = compile_launches(call, variant, "sm_90", package.name, only=is_forward_or_table)
    assert own(set(compiled)) == own({name for name in kernels_of(package, variant, mode) if is_forward_or_table(name)})


def compiled_without_errors(spec: Spec, package: Path, variant: str, chosen: Iterable[Job]) -> set[str]:
    tasks = [Task(job=job, variant=spec.variants[variant], package=package) for job in chosen]
    findings = [finding for task in tasks for finding in look_at(task)]
    assert [finding for finding in findings if finding.errors] == []
    return {finding.kernel for finding in findings}


GATHERING = """
variants:
  vectors:
    score: score + t[h, q_idx // 2] * u[b, kv_idx % 3]
    tensors: {t: {dims: [h, n], grad: true}, u: {dims: [b, n], grad: true}}
  pairs:
    mask: causal
    score: score + t[b, h, q_idx, kv_idx]
    tensors: {t: {dims: [b, h, q_idx, kv_idx], grad: true}}
  diagonals: {mask: causal, score: "score + t[h, q_idx - kv_idx]", tensors: {t: {dims: [h, n], grad: true}}}
  scatter:
    mask: causal
    score: score + t[h, i[q_idx, kv_idx]]
    tensors: {t: {dims: [h, n], grad: true}, i: {dims: [q_idx, kv_idx], dtype: int32}}
"""

TABLES = """
variants:
  integers:
    mask: causal and ids[b, q_idx] == ids[b, kv_idx] and ids[b, kv_idx] != 1
    tensors: {ids: {dims: [b, kv_idx], dtype: int64}}
  floats:
    mask: time[hkv, kv_idx] <= time[hkv, q_idx] and kv_idx < limit[h, q_idx]
    tensors: {time: {dims: [hkv, kv_idx]}, limit: {dims: [h, q_idx], dtype: int32}}
  positions: {mask: causal and chunk(size), scalars: {size: {type: int, example: 48}}}
  holes:
    mask: weight[h, q_idx] > 0 and seen[b, kv_idx]
    tensors: {weight: {dims: [h, q_idx]}, seen: {dims: [b, kv_idx], dtype: bool}}
  pairs: {mask: "seen[b, q_idx, kv_idx]", tensors: {seen: {dims: [b, q_idx, kv_idx], dtype: bool}}}
  grids:
    mask: near[b, h, q_idx // size, kv_idx >> 5] and gate[kv_idx // 16, q_idx // 32] > 0
    scalars: {size: {type: int, example: 48}}
    tensors: {near: {dims: [b, h, q_runs, kv_runs], dtype: bool}, gate: {dims: [kv_runs, q_runs]}}
"""

BOUNDS = """
variants:
  heads: {mask: "kv_idx >= 128 and h < q_idx"}
  longs:
    mask: q_idx - kv_idx < reach[h] and kv_idx <= q_idx + ahead[b]
    tensors: {reach: {dims: [h], dtype: int64}, ahead: {dims: [b], dtype: int64}}
  apart: {mask: "chunk(40) or q_idx - kv_idx >= 16"}
"""


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with a variant for each way to gather a gradient that the library's variants do not use."""
    with importable(tmp_path_factory.mktemp("gathering"), "gathering", GATHERING) as package:
        yield package


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with variants whose blocks depend on values of every type, or on none."""
    with importable(tmp_path_factory.mktemp("tables"), "tables", TABLES) as package:
        yield package


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with variants whose loops have bounds of 64-bit values, or of two ranges."""
    with importable(tmp_path_factory.mktemp("bounds"), "bounds", BOUNDS) as package:
        yield package


@pytest.mark.covers(mode="dense", dtype="bfloat16")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", ["vectors", "pairs", "diagonals", "scatter"])
def test_every_way_to_gather_a_gradient_compiles(gathering: Path, variant: str, head_dim: int) -> None:
    check(gathering, variant, head_dim=head_dim)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("variant", ["integers", "floats", "positions", "holes", "grids"])
def test_tables_of_every_kind_compile_in_every_mode(tables: Path, variant: str, mode: Mode) -> None:
    check_forward(tables, variant, mode)


@pytest.mark.covers(dtype="bfloat16")
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("variant", ["integers", "floats", "positions", "holes", "grids"])
def test_kernels_that_read_tables_compile(tables: Path, variant: str, mode: Mode) -> None:
    check(tables, variant, mode)


@pytest.mark.covers(direction="forward", dtype="bfloat16")
@pytest.mark.parametrize("mode", list(Mode))
def test_elements_of_pairs_fit_beside_wide_tiles(tables: Path, mode: Mode) -> None:
    spec = load(tables.parent / "spec.yaml")
    job = job_of(spec, "pairs", mode, 128)
    forward = replace(job, configs=tuple(each for each in job.configs if each[0] is Pass.FWD))
    assert compiled_without_errors(spec, tables, "pairs", [forward])


@pytest.mark.parametrize(("variant", "mode"), [("heads", Mode.PACKED), ("longs", Mode.DENSE), ("apart", Mode.DENSE)])
def test_bounds_are_coordinates_of_tma_copies(bounds: Path, variant: str, mode: Mode) -> None:
    check(bounds, variant, mode)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("variant", list(SPEC.variants))
def test_a_linted_call_launches_every_kernel(variant: str, mode: Mode) -> None:
    launched: set[str] = set()

    def note(name: str) -> bool:
        launched.add(name)
        return False

    for job in jobs_of(SPEC, variant, mode):
        call = partial(run_call, SPEC.variants[variant], job, "generated")
        assert compile_launches(call, variant, "sm_90", only=note) == {}
    assert own(launched) == own(kernels_of(ROOT / "generated", variant, mode))


@pytest.mark.parametrize(
    ("arch", "head_dim", "variant"),
    [("sm_90", 80, "alibi"), ("sm_90", 192, "gpt_oss"), ("sm_80", 72, "forgetting"), ("gfx942", 96, "relative_bias")],
)
def test_head_dims_in_parts(arch: str, head_dim: int, variant: str) -> None:
    job = job_of(SPEC, variant, Mode.DENSE, head_dim, arch)
    findings = look_at(Task(job=job, variant=SPEC.variants[variant], package=ROOT / "generated"))
    assert [finding for finding in findings if finding.errors] == []
