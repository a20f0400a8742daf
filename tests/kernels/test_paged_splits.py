"""The splits that the device plans are the splits that `explain` and `show` print."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen.arch.paged import PagedTileConfig
from codegen.inspect.call import example_tensor
from codegen.inspect.decode import split, splitting
from codegen.load.spec_file import load
from codegen.plan.paged.kernels import paged_plan
from codegen.testing import golden
from generated._runtime.torch.devices import multiprocessors
from tests.support.cases import DEVICE
from tests.support.paths import DEFAULT_SPEC

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="torch")
SPEC = load(DEFAULT_SPEC)
TILE = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2, "keys_per_split": 128}


@pytest.mark.parametrize("variant", ["full", "causal", "window", "streaming_llm", "prefix_lm", "padding", "gpt_oss"])
@pytest.mark.parametrize("q_len", [1, 7, 40])
def test_the_device_plans_the_same(variant: str, q_len: int) -> None:
    kv_len, kv_heads, group = 5000, 2, 4
    spec = SPEC.variants[variant]
    op: Any = golden.load_op(variant)
    sizes = {"b": 1, "h": 8, "hkv": kv_heads, "q_idx": kv_len, "kv_idx": kv_len, "q_len": q_len, "kv_len": kv_len}
    planned = paged_plan(spec)
    assert planned is not None
    tensors = {name: example_tensor(t, sizes) for name, t in spec.tensors.items() if name in planned.bound_names}
    own: dict[str, Any] = {
        name: torch.tensor(x.copy(), dtype=getattr(torch, spec.tensors[name].dtype), device=DEVICE)
        for name, x in tensors.items()
    }
    own |= {name: s.typical(kv_len) for name, s in spec.scalars.items() if name in planned.bound_names}
    tables = op.plan(
        torch.zeros(1, kv_heads * group, q_len, 16, device=DEVICE),
        torch.zeros(1, 5120, kv_heads, 16, device=DEVICE),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        kv_lengths=torch.tensor([kv_len], dtype=torch.int32, device=DEVICE),
        config={"decode": TILE, "paged_fwd": TILE},
        **own,
    ).tables
    records, _, counts = tables[:3]
    rows = records[: int(counts[0])].tolist()
    got = sorted((row[3], row[7], row[5] - row[4]) for row in rows)
    tile = PagedTileConfig(**TILE)
    how = splitting(tile, tile, q_len=q_len, group=group, kv_heads=kv_heads)
    how = replace(how, processors=multiprocessors(torch.empty(0, device=DEVICE)))
    tiles = split(spec, how, q_len=q_len, kv_len=kv_len)
    assert got == [
        (how.block_m * number, nth, part.keys)
        for number, tile in enumerate(tiles)
        for nth, part in enumerate(tile.parts)
    ]
