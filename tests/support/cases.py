"""The calls of the tests: variants from the manifest, shapes, and inputs cut from those that `testing.golden` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden, golden_jax
from codegen.testing.golden import Inputs
from generated._runtime.core.configs import PASSES
from generated._runtime.core.settings import INTERPRET as INTERPRET

DEVICE = "cpu" if INTERPRET else "cuda"
# Triton's interpreter computes bfloat16 wrongly. There the ops run on float32 copies, so a test would show nothing.
DTYPES = (torch.float16, torch.float32) if INTERPRET else (torch.bfloat16, torch.float16, torch.float32)

MANIFEST = golden.load_manifest()
VARIANTS = tuple(MANIFEST)
# Keys of an entry that give the variant tensors of its own.
OWN_TENSORS = ("tensors", "sink", "decay")
FRAMEWORKS = ("torch", "jax")
with_frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
with_variants = pytest.mark.parametrize("variant", VARIANTS)
with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one call; by default as many keys as queries, and one head_dim."""

    q_len: int
    kv_len: int = -1
    batch: int = 1
    kv_heads: int = 1
    group: int = 2
    dim: int = 64
    dim_v: int = -1

    @property
    def keys(self) -> int:
        return self.q_len if self.kv_len < 0 else self.kv_len

    @property
    def value_dim(self) -> int:
        return self.dim if self.dim_v < 0 else self.dim_v

    def __str__(self) -> str:
        lengths = f"S{self.q_len}" if self.keys == self.q_len else f"S{self.q_len}x{self.keys}"
        dims = f"D{self.dim}" if self.value_dim == self.dim else f"D{self.dim}x{self.value_dim}"
        return f"B{self.batch}-H{self.kv_heads * self.group}x{self.kv_heads}-{lengths}-{dims}"


def draw(
    variant: str,
    shape: Shape,
    dtype: torch.dtype = torch.float16,
    *,
    magnitude: float = 1.0,
    scalars: dict[str, int | float] | None = None,
    positions: int = 0,
    manifest: Mapping[str, Any] = MANIFEST,
) -> Inputs:
    """Arguments of one call. `codegen.testing.golden` draws self-attention; a call of any other shape is cut from one.

    `positions`: the number of positions in the variant's own tensors, if an offset takes queries beyond both lengths.
    `manifest`: the manifest of the variant's package.
    """
    whole = golden.draw_inputs(
        manifest[variant],
        golden.Shape(
            batch=shape.batch,
            heads=shape.kv_heads * shape.group,
            kv_heads=shape.kv_heads,
            seq=max(shape.q_len, shape.keys, positions, 1),
            dim=max(shape.dim, shape.value_dim),
        ),
        dtype=dtype,
        device=DEVICE,
        scalars=scalars,
    )

    def cut(x: Tensor, rows: int, cols: int) -> Tensor:
        return (x.detach()[:, :, :rows, :cols] * magnitude).contiguous().requires_grad_()

    return replace(
        whole,
        q=cut(whole.q, shape.q_len, shape.dim),
        k=cut(whole.k, shape.keys, shape.dim),
        v=cut(whole.v, shape.keys, shape.value_dim),
        do=whole.do[:, :, : shape.q_len, : shape.value_dim].contiguous(),
        dlse=whole.dlse[:, :, : shape.q_len].contiguous(),
    )


JUMPS = (1.0, 6.0, 12.0, 20.0, 3.0, 0.1)
"""Factors for the keys of consecutive blocks of 128."""


def jumping(inputs: Inputs) -> Inputs:
    """The same call with keys multiplied by JUMPS, so that the maximum score of a row rises a lot, several times."""
    blocks = torch.arange(inputs.k.shape[-2], device=DEVICE) // 128
    sizes = torch.tensor(JUMPS, device=DEVICE)[blocks % len(JUMPS)]
    return replace(inputs, k=(inputs.k.detach() * sizes[:, None]).to(inputs.k.dtype).requires_grad_())


def evaluate(variant: str, inputs: Inputs, *, framework: Any = "torch", **options: Any) -> dict[str, Tensor]:
    """The results of a call of a framework's op: o, lse and every gradient."""
    if framework == "jax":
        return golden_jax.evaluate(variant, inputs, **options)
    return golden.evaluate(golden.load_op(variant), inputs, **options)


def tiles(block_m: int, block_n: int) -> dict[str, dict[str, int]]:
    """A `config` of these blocks for every pass."""
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 1}
    return {name: dict(tile) for name in PASSES}


def own_names(variant: str) -> tuple[str, ...]:
    """The variant's arguments beside q, k and v."""
    entry = MANIFEST[variant]
    extra = (("sink",) if entry["sink"] else ()) + (("g",) if entry["decay"] else ())
    return (*entry["tensors"], *entry["scalars"], *extra)


def has_word(variant: str, word: str) -> bool:
    """Whether a named mask is part of the variant's mask."""
    return word in MANIFEST[variant]["mask"].replace("(", " ").split()


def assert_same(variant: str, name: str, got: Tensor, want: Tensor) -> None:
    """Check for the same bits, or for close values of gradients that atomics sum in any order in some calls."""
    own = name.removeprefix("d") in MANIFEST[variant]["tensors"]
    if own and not {"dense", "packed", "segmented"} <= set(MANIFEST[variant]["deterministic"]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


def variants_where(holds: Callable[[str], bool]) -> Iterable[str]:
    """The variants with a property, for the parameters of a test."""
    return [variant for variant in VARIANTS if holds(variant)]
