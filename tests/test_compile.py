"""Every kernel compiles for the spec's architectures, without a GPU, and its tiles fit the chip's shared memory."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.golden import Inputs, Shape, draw_inputs, load_manifest
from codegen import cli
from codegen.spec import ARCHS, SMEM_LIMIT
from generated._runtime.torch_support import INTERPRET
from tests.offline import compile_call

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

GENERATED = Path(__file__).resolve().parents[1] / "generated"
VARIANTS = tuple(load_manifest())

# Every variant on sm_90; elsewhere two head_dims of three and a variant for each, in turn: compiling is slow.
EVERYWHERE = [
    (arch, dim, VARIANTS[(row + column * 2) % len(VARIANTS)])
    for row, arch in enumerate(arch for arch in ARCHS if arch != "sm_90")
    for column, dim in enumerate((64, 128, 256))
    if (row + column) % 3
]


def kernels_of(variant: str, package: Path, mode: str) -> set[str]:
    """The names of a variant's kernels in a mode: the jitted functions that carry its name."""
    folder = package / variant / (mode if mode != "dense" else "")
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    return set(re.findall(rf"^def ({variant}_\w+)\(", source, re.MULTILINE))


def check(
    variant: str, arch: str, dim: int, dtype: torch.dtype, package: Path = GENERATED, mode: str = "dense"
) -> None:
    entry = json.loads((package / "MANIFEST.json").read_text(encoding="utf-8"))["variants"][variant]
    # Short sequences may have tiles of their own: the modes are compiled with these, dense calls with the others.
    shape = Shape(batch=1, heads=4, kv_heads=2, seq=2304 if mode == "dense" else 128, dim=dim)
    inputs = draw_inputs(entry, shape, dtype=dtype, device="cpu")
    tokens = torch.arange(128, dtype=torch.int32)
    options = {}
    if mode == "packed":
        inputs, options = _packed(entry, inputs), {"cu_seqlens_q": torch.tensor([0, 40, 128], dtype=torch.int32)}
    elif mode == "segmented":
        options = {"q_segment_ids": tokens[None] // 50, "q_positions": tokens[None] % 50}
    compiled = compile_call(variant, arch, inputs, package=package.name, **options)
    # What a log-decay sums is shared with dense calls, the table of packed blocks by all variants.
    shared_names = {"packed_blocks"} | {name for name in compiled if "decay" in name}
    assert compiled.keys() - shared_names == kernels_of(variant, package, mode) - shared_names
    for name, kernel in compiled.items():
        shared = kernel.metadata.shared
        assert shared <= SMEM_LIMIT[arch], f"{name}: {shared} bytes of shared memory, {SMEM_LIMIT[arch]} on {arch}"


def _packed(entry: dict[str, Any], inputs: Inputs) -> Inputs:
    """A batch of one row as packed sequences."""
    tensors = {}
    for name, x in inputs.tensors.items():
        dims = (
            entry["tensors"][name]["dims"] if name in entry["tensors"] else ["b", "q_idx", "h"] if name == "g" else []
        )
        packed = x[0] if dims[:1] == ["b"] and {"q_idx", "kv_idx"} & set(dims) else x
        packed = packed.expand(2, *x.shape[1:]) if dims[:1] == ["b"] and packed is x else packed
        tensors[name] = packed.detach().clone().requires_grad_(x.requires_grad)
    q, k, v, do = (x[0].transpose(0, 1).detach() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    return replace(inputs, q=q, k=k, v=v, do=do, dlse=inputs.dlse[0], tensors=tensors)


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
"""


def _package(folder: Path, name: str, spec: str) -> Iterator[Path]:
    (folder / "spec.yaml").write_text(spec)
    assert cli.main(["render", "--variants", str(folder / "spec.yaml"), "--out", str(folder / name)]) == 0
    sys.path.insert(0, str(folder))
    yield folder / name
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with a variant for each way to gather a gradient that the library's variants do not use."""
    yield from _package(tmp_path_factory.mktemp("gathering"), "gathering", GATHERING)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A package with variants whose blocks depend on values of every type, or on none."""
    yield from _package(tmp_path_factory.mktemp("tables"), "tables", TABLES)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("variant", ["vectors", "pairs", "diagonals", "scatter"])
def test_every_way_to_gather_a_gradient(gathering: Path, variant: str, dim: int) -> None:
    check(variant, "sm_90", dim, torch.bfloat16, gathering)


@pytest.mark.parametrize("variant", ["integers", "floats", "positions", "holes"])
def test_every_kind_of_table(tables: Path, variant: str) -> None:
    check(variant, "sm_90", 64, torch.bfloat16, tables)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_on_sm_90(variant: str) -> None:
    check(variant, "sm_90", 64, torch.bfloat16)


@pytest.mark.parametrize("mode", ["packed", "segmented"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_mode_on_sm_90(variant: str, mode: str) -> None:
    check(variant, "sm_90", 64, torch.bfloat16, mode=mode)


@pytest.mark.parametrize("mode", ["packed", "segmented"])
@pytest.mark.parametrize("variant", ["integers", "floats", "positions", "holes"])
def test_every_kind_of_table_in_every_mode(tables: Path, variant: str, mode: str) -> None:
    check(variant, "sm_90", 64, torch.bfloat16, tables, mode)


@pytest.mark.parametrize(("arch", "dim", "variant"), EVERYWHERE)
def test_architectures(arch: str, dim: int, variant: str) -> None:
    check(variant, arch, dim, torch.bfloat16)


@pytest.mark.parametrize(
    ("arch", "dim", "variant"),
    [("sm_90", 80, "alibi"), ("sm_90", 192, "gpt_oss"), ("sm_80", 72, "forgetting"), ("gfx942", 96, "relative_bias")],
)
def test_head_dims_in_parts(arch: str, dim: int, variant: str) -> None:
    check(variant, arch, dim, torch.bfloat16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_float32(arch: str) -> None:
    check(VARIANTS[0], arch, 128, torch.float32)
