"""Every kernel compiles for the spec's architectures, without a GPU, and its tiles fit the chip's shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.golden import Shape, draw_inputs, load_manifest
from codegen.spec import ARCHS, SMEM_LIMIT
from generated._runtime.torch_support import INTERPRET
from tests.offline import compile_call

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 nothing is compiled")

GENERATED = Path(__file__).resolve().parents[1] / "generated"
MANIFEST = load_manifest()
VARIANTS = tuple(MANIFEST)

# Every variant on sm_90; elsewhere two head_dims of three and a variant for each, in turn: compiling is slow.
EVERYWHERE = [
    (arch, dim, VARIANTS[(row + column * 2) % len(VARIANTS)])
    for row, arch in enumerate(arch for arch in ARCHS if arch != "sm_90")
    for column, dim in enumerate((64, 128, 256))
    if (row + column) % 3
]


def kernels_of(variant: str) -> set[str]:
    """The names of a variant's kernels: the jitted functions that carry its name."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((GENERATED / variant).glob("*.py")))
    return set(re.findall(rf"^def ({variant}_\w+)\(", source, re.MULTILINE))


def check(variant: str, arch: str, dim: int, dtype: torch.dtype) -> None:
    shape = Shape(batch=1, heads=4, kv_heads=2, seq=128, dim=dim)
    inputs = draw_inputs(MANIFEST[variant], shape, dtype=dtype, device="cpu")
    compiled = compile_call(variant, arch, inputs)
    assert compiled.keys() == kernels_of(variant)
    for name, kernel in compiled.items():
        shared = kernel.metadata.shared
        assert shared <= SMEM_LIMIT[arch], f"{name}: {shared} bytes of shared memory, {SMEM_LIMIT[arch]} on {arch}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_on_sm_90(variant: str) -> None:
    check(variant, "sm_90", 64, torch.bfloat16)


@pytest.mark.parametrize(("arch", "dim", "variant"), EVERYWHERE)
def test_architectures(arch: str, dim: int, variant: str) -> None:
    check(variant, arch, dim, torch.bfloat16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_float32(arch: str) -> None:
    check(VARIANTS[0], arch, 128, torch.float32)
