"""Spec files: every broken rule with its pinned message, and what a good file inherits."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.arch.chips import ARCHS
from codegen.arch.paged import PagedPass, PagedTileConfig, default_paged_tiles
from codegen.arch.tile_rules import MAX_HEAD_DIM, NARROW_HEAD_DIM, TILE_FIELDS, TileConfig, tile_problems
from codegen.ir import expr
from codegen.ir.expr import Op, ScalarType, TensorSpec, Type
from codegen.ir.parse import Scope, parse, parse_example
from codegen.load.spec_file import default_spec_path, load
from codegen.render.manifest import manifest_entries
from codegen.spec.model import Pass, ScalarSpec, Spec, Variant
from codegen.spec.symbols import symbolised
from codegen.util.errors import Problem, SpecError
from tests.support.paths import ROOT

BAD = ROOT / "tests" / "specs" / "bad"
BAD_SPECS = sorted(path.stem for path in BAD.glob("*.yaml"))

TILE = "{block_m: 32, block_n: 64, num_warps: 2, num_stages: 5}"


def written(folder: Path, text: str) -> Spec:
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def only(folder: Path, text: str) -> Variant:
    """The one variant of a file."""
    (variant,) = written(folder, text).variants.values()
    return variant


def problems(path: Path | str, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        load(path, **options)
    return caught.value.problems


# -------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize("name", BAD_SPECS)
def test_bad_spec_reports_every_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    with pytest.raises(SpecError) as caught:
        load(f"{name}.yaml")
    assert str(caught.value).splitlines() == (BAD / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def test_every_golden_has_its_spec() -> None:
    assert sorted(path.stem for path in BAD.glob("*.txt")) == BAD_SPECS


def test_missing_file_and_directory(tmp_path: Path) -> None:
    (absent,) = problems(tmp_path / "absent.yaml")
    assert str(absent) == f"{tmp_path}/absent.yaml:1: there is no such file"
    (folder,) = problems(tmp_path)
    assert folder.message == "this is a directory; give the path of a YAML file"
    (no_path,) = problems("a\0b")
    assert no_path.message.startswith("the file cannot be read: ")


def test_utf16_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("variants:\n  full:\n", encoding="utf-16")
    (problem,) = problems(path)
    assert problem.message == "the file must be UTF-8 text, got the byte 0xff; save it as UTF-8"


def test_too_deep_yaml(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("variants: " + "[" * 5000)
    (problem,) = problems(path)
    assert problem.message == "not valid YAML: nested too deeply"


def test_problems_of_the_library_are_reported_under_its_own_name(tmp_path: Path) -> None:
    library, user = tmp_path / "library.yaml", tmp_path / "user.yaml"
    library.write_text("defaults: {layouts: []}\nmasks: {causal: q_idx >=}\n")
    user.write_text("variants:\n  near: {mask: causl}\n")
    assert [(Path(p.file).name, p.where) for p in problems(user, library=library)] == [
        ("library.yaml", "defaults.layouts"),
        ("library.yaml", "masks.causal"),
        ("user.yaml", "variants.near.mask"),
    ]


def test_trained_tensors_that_differ_in_case_only(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "variants:\n"
        "  twins:\n"
        "    score: score + t[h] + T[h] + u[h] + U[h]\n"
        "    tensors:\n"
        "      t: {dims: [h], grad: true}\n"
        "      T: {dims: [h], grad: true}\n"
        "      u: {dims: [h], grad: true}\n"
        "      U: {dims: [h]}\n"
    )
    variant = symbolised(load(path).variants["twins"])
    # The flags GRAD_NAME of trained tensors must differ, so one of the two has another name in generated code.
    assert list(variant.tensors) == ["t", "own_T", "u", "U"]
    assert variant.keywords == {"own_T": "T"}


def test_expressions_are_not_blamed_for_bad_declarations(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("variants:\n  a: {score: alibi, mask: window(n), tensors: {slope: {}}, scalars: {n: number}}\n")
    assert [p.where for p in problems(path)] == ["variants.a.tensors.slope", "variants.a.scalars.n"]


KEYS = st.sampled_from(["variants:", "archs:", "masks:", "mask:", "tensors:", "dims", "sm_90", "fwd", "causal", "64"])
SYNTAX = st.sampled_from(
    ["\n", "\n  ", "\n    ", ": ", "{", "}", "[", "]", "- ", "!!int ", "&a ", "*a", "<<", "? ", "|"]
)
FRAGMENTS = st.lists(st.one_of(KEYS, SYNTAX), max_size=25).map("".join)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), FRAGMENTS.map(str.encode)))
def test_no_file_raises_anything_but_spec_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(raw)
    with contextlib.suppress(SpecError):
        assert load(path, library=path).variants


@given(FRAGMENTS)
def test_every_problem_takes_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(f"{text}\nbogus: 1")
    found = problems(path, library=path)
    assert all("\n" not in str(problem) for problem in found)


# ------------------------------------------------------------------------------------------------------- good files


def test_three_line_file_has_the_library_in_scope(tmp_path: Path) -> None:
    spec = written(tmp_path, "variants:\n  near:\n    mask: causal and window(256)\n")
    library = load(default_spec_path())
    assert list(spec.variants) == ["near"]
    assert spec.defaults == library.defaults
    assert spec.archs == library.archs
    variant = spec.variants["near"]
    assert (variant.line, variant.entry) == (2, "near: {mask: causal and window(256)}")
    assert variant.mask == parse("q_idx >= kv_idx and q_idx - kv_idx < 256", Scope(), Type.BOOL)


def test_the_library_serves_every_arch_pass_and_dtype() -> None:
    spec = load(default_spec_path())
    assert set(spec.archs) == set(ARCHS)
    for arch in spec.archs.values():
        assert set(arch.half) == set(arch.float32) == set(Pass)
        assert all(max(by_head_dim) == MAX_HEAD_DIM for by_head_dim in arch.half.values())
        assert all(max(by_head_dim) >= NARROW_HEAD_DIM for by_head_dim in arch.float32.values())


@pytest.mark.parametrize("value", ["", " {}", " null"])
def test_empty_variant_is_plain_attention(tmp_path: Path, value: str) -> None:
    assert only(tmp_path, f"variants:\n  full:{value}\n") == Variant(name="full", line=2, entry="full: {}")


def test_all_fields(tmp_path: Path) -> None:
    variant = only(
        tmp_path,
        """
variants:
  everything:
    doc: >
      Two lines
      of words.
    mask: >-
      causal and
      doc[b, q_idx] == doc[b, kv_idx]
    score: "score + slope[h] * table[h, 2] * strength"
    tensors:
      doc: {dims: [b, kv_idx], dtype: int32}
      slope: {dims: [h], grad: true}
      table: {dims: [h, 4]}
    scalars: {strength: float}
    sink: true
    decay: false
    dropout: true
""",
    )
    assert variant.doc == "Two lines of words."
    assert variant.mask_text == "causal and doc[b, q_idx] == doc[b, kv_idx]"
    assert variant.score_text == "score + slope[h] * table[h, 2] * strength"
    assert isinstance(variant.mask, Op)
    assert (variant.mask.type, variant.mask.op) == (Type.BOOL, "and")
    assert variant.score is not None
    assert variant.score.type is Type.FLOAT
    assert variant.tensors == {
        "doc": TensorSpec(name="doc", dims=("b", "kv_idx"), dtype="int32"),
        "slope": TensorSpec(name="slope", dims=("h",), grad=True),
        "table": TensorSpec(name="table", dims=("h", 4)),
    }
    assert variant.scalars["strength"].type is ScalarType.FLOAT
    assert (variant.sink, variant.decay, variant.dropout) == (True, False, True)
    assert variant.entry == (
        "everything: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', "
        "score: 'score + slope[h] * table[h, 2] * strength', "
        "tensors: {doc: {dims: [b, kv_idx], dtype: int32}, slope: {dims: [h], grad: true}, table: {dims: [h, 4]}}, "
        "scalars: {strength: float}, sink: true, decay: false, dropout: true}"
    )


def test_scalars_with_a_range(tmp_path: Path) -> None:
    variant = only(
        tmp_path,
        """
variants:
  ranges:
    mask: window(size) and window(plain)
    score: softcap(cap) * low
    scalars:
      size: {type: int, min: 1, max: 65536, example: 256}
      plain: {type: int}
      cap: {type: float, min: 1e-3, example: 50}
      low: {type: float, max: 1.5}
""",
    )
    assert variant.scalars == {
        "size": ScalarSpec(name="size", type=ScalarType.INT, minimum=1, maximum=65536, example=256),
        "plain": ScalarSpec(name="plain", type=ScalarType.INT),
        "cap": ScalarSpec(name="cap", type=ScalarType.FLOAT, minimum=0.001, example=50.0),
        "low": ScalarSpec(name="low", type=ScalarType.FLOAT, maximum=1.5),
    }
    assert isinstance(variant.scalars["size"].example, int)
    assert isinstance(variant.scalars["cap"].example, float)


def test_tensors_with_an_example(tmp_path: Path) -> None:
    variant = only(
        tmp_path,
        """
variants:
  examples:
    mask: doc[b, q_idx] == doc[b, kv_idx]
    score: score + bias[b, b, h]
    tensors:
      doc: {dims: [b, kv_idx], dtype: int32, example: kv_idx // 300}
      bias: {dims: [b, b, n], example: "tanh(i2 - i0)"}
""",
    )
    kv_idx, i0, i2 = (expr.int_var(name) for name in ("kv_idx", "i0", "i2"))
    assert variant.tensors["doc"].example == expr.floordiv(kv_idx, expr.const(300))
    assert variant.tensors["bias"].example == expr.function("tanh", expr.sub(i2, i0))
    assert len({*variant.tensors.values()}) == 2, "hashable"
    entries = manifest_entries(load(tmp_path / "spec.yaml"))["examples"]["tensors"]
    assert entries["doc"]["example"] == "kv_idx // 300"
    assert parse_example(entries["bias"]["example"], variant.tensors["bias"]) == variant.tensors["bias"].example


def test_a_mask_that_is_always_true_is_none(tmp_path: Path) -> None:
    assert only(tmp_path, "variants:\n  all: {mask: q_idx >= kv_idx or 1 < 2}\n").mask is None


def test_entry_is_yaml_that_reads_back(tmp_path: Path) -> None:
    text = 'variants:\n  a: {mask: "x[0] == 1 and\\n y", tensors: &t {x: {dims: [&n 5], dtype: int32}}, scalars: {}}\n'
    variant = only(tmp_path, text.replace(" and\\n y", ""))
    assert yaml.safe_load(variant.entry) == {
        "a": {"mask": "x[0] == 1", "tensors": {"x": {"dims": [5], "dtype": "int32"}}, "scalars": {}}
    }


def test_free_and_repeated_dims(tmp_path: Path) -> None:
    variant = only(
        tmp_path,
        "variants:\n  t: {score: 'score + table[h, q_idx - kv_idx + 7] + one', "
        "tensors: {table: {dims: [rows, rows]}, one: {dims: []}}}\n",
    )
    assert [tensor.dims for tensor in variant.tensors.values()] == [("rows", "rows"), ()]


def test_a_file_redefines_a_mask_of_the_library(tmp_path: Path) -> None:
    text = "masks:\n  causal: q_idx > kv_idx\nvariants:\n  strict: {mask: causal}\n"
    assert only(tmp_path, text).mask == parse("q_idx > kv_idx", Scope(), Type.BOOL)


def test_a_library_passed_by_path(tmp_path: Path) -> None:
    library = tmp_path / "library.yaml"
    library.write_text("defaults: {head_dims: [80]}\nscores: {half: score / 2}\n")
    user = tmp_path / "user.yaml"
    user.write_text("variants:\n  soft: {score: half}\n")
    spec = load(user, library=library)
    assert spec.defaults.head_dims == (80,)
    assert spec.archs == {}
    assert spec.variants["soft"].score == parse("score / 2", Scope(), Type.FLOAT)


def test_defaults_override_one_by_one(tmp_path: Path) -> None:
    spec = written(tmp_path, "defaults: {head_dims: [96, 32]}\nvariants:\n  full:\n")
    assert spec.defaults.head_dims == (96, 32)
    assert spec.defaults.dtypes == load(default_spec_path()).defaults.dtypes


def test_arch_entries_override_one_by_one(tmp_path: Path) -> None:
    text = (
        f"archs:\n  sm_90:\n    fwd:\n      72: {TILE}\n      128: {TILE}\n"
        f"    float32:\n      dq:\n        256: {TILE}\nvariants:\n  full:\n"
    )
    archs, library = written(tmp_path, text).archs, load(default_spec_path()).archs
    mine = TileConfig(block_m=32, block_n=64, num_warps=2, num_stages=5)
    sm_90 = archs["sm_90"]
    rows = list(sm_90.half[Pass.FWD])
    assert rows == sorted(rows), "the first that serves is the smallest"
    assert sm_90.half[Pass.FWD] == {**library["sm_90"].half[Pass.FWD], 72: mine, 128: mine}
    assert sm_90.half[Pass.DQ] == library["sm_90"].half[Pass.DQ]
    assert sm_90.float32[Pass.DQ] == {**library["sm_90"].float32[Pass.DQ], 256: mine}
    assert {name: arch for name, arch in archs.items() if name != "sm_90"} == {
        name: arch for name, arch in library.items() if name != "sm_90"
    }


def test_tiles_of_kernels_on_paged_caches_override_one_by_one(tmp_path: Path) -> None:
    text = (
        f"archs:\n  sm_90:\n    decode:\n      128: {TILE}\n"
        f"    float32:\n      paged_fwd:\n        64: {TILE[:-1]}, keys_per_split: 512}}\nvariants:\n  full:\n"
    )
    spec = written(tmp_path, text)
    mine = PagedTileConfig(block_m=32, block_n=64, num_warps=2, num_stages=5)
    defaults = default_paged_tiles("sm_90", PagedPass.DECODE, 2)
    sm_90 = spec.archs["sm_90"]
    assert sm_90.paged_tiles(PagedPass.DECODE, 2) == {**defaults, 128: mine}
    assert sm_90.paged_tiles(PagedPass.PAGED_FWD, 4)[64] == replace(mine, keys_per_split=512)
    assert sm_90.paged_tiles(PagedPass.PAGED_FWD, 2) == default_paged_tiles("sm_90", PagedPass.PAGED_FWD, 2)
    assert spec.archs["sm_80"] == load(default_spec_path()).archs["sm_80"]


def test_a_variant_changes_the_block_sizes_of_one_arch(tmp_path: Path) -> None:
    own = "archs: {sm_90: {dq: {64: {block_m: 32, block_n: 16, num_warps: 2, num_stages: 1}}}}"
    spec = written(tmp_path, f"variants: {{plain: {{}}, small: {{mask: causal, {own}}}}}")
    small = spec.variants["small"]
    assert list(small.archs) == ["sm_90"]
    assert not spec.variants["plain"].archs
    assert small.archs["sm_90"].half[Pass.DQ][64] == TileConfig(block_m=32, block_n=16, num_warps=2, num_stages=1)
    assert small.archs["sm_90"].half[Pass.DQ][128] == spec.archs["sm_90"].half[Pass.DQ][128]
    assert small.entry == "small: {mask: causal}"


def test_an_arch_of_its_own_must_serve_every_head_dim(tmp_path: Path) -> None:
    library = tmp_path / "library.yaml"
    passes = "".join(f"    {p.value}:\n      {128 if p is Pass.DQ else 256}: {TILE}\n" for p in Pass)
    library.write_text(f"archs:\n  sm_80:\n{passes}variants:\n  full:\n")
    assert [(p.where, p.message.partition("got ")[2]) for p in problems(library, library=library)] == [
        ("archs.sm_80.float32.fwd", "none"),
        ("archs.sm_80.float32.dkdv", "none"),
        ("archs.sm_80.float32.dq", "none"),
        ("archs.sm_80.dq", "128 as the largest"),
    ]


def test_tile_problems_name_the_nearest_values() -> None:
    good = {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 3}
    assert tile_problems(good) == []
    assert tile_problems({**good, "block_n": 8, "num_warps": 6}) == [
        ("block_n", "must be a power of two from 16 to 256, got 8; the nearest is 16"),
        ("num_warps", "must be a power of two from 1 to 16, got 6; the nearest are 4 and 8"),
    ]
    assert list(TILE_FIELDS) == [f.name for f in fields(TileConfig)]
