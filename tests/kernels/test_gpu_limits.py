"""Sizes that only a GPU can run: memory that is linear in the length, offsets beyond 32 bits, large grids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing.golden import Inputs
from generated import paging
from generated._runtime.core.schedules import DENSE_ENTRIES
from generated.torch import window
from tests.support.cases import DEVICE, MANIFEST, VARIANTS, Shape, draw, evaluate, with_variants
from tests.support.judge import check_results

pytestmark = pytest.mark.gpu
GIB = 2**30


def _has_pairs(variant: str) -> bool:
    """Whether a tensor of the variant, and its gradient, has an element for each pair of a row and a key."""
    return any({"q_idx", "kv_idx"} <= set(tensor["dims"]) for tensor in MANIFEST[variant]["tensors"].values())


def require_memory(size: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"{size // GIB} GiB of GPU memory needed, {free // GIB} free")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not _has_pairs(name)])
def test_memory_is_linear_in_the_length(variant: str) -> None:
    """Forward and backward at 65536: outputs, gradients, and a few float32 numbers per row. One score matrix of one
    head would be 8 GiB in 16 bits."""
    length, heads, dim = 65536, 4, 64
    inputs = draw(variant, Shape(q_len=length, kv_heads=heads // 2, group=2, dim=dim), torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(variant, inputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    of_queries = length * heads * dim * 2
    # o and dq, and dk and dv with half as many heads. Per row and head: lse, delta, dlse, and six for a log-decay.
    rows = 9 if MANIFEST[variant]["decay"] else 3
    # Lists of blocks have room for this many 16-bit entries, before larger lists are counted first.
    lists = 2 * DENSE_ENTRIES
    # If Hopper's backward sums dq with atomics, it does so in float32.
    sums = 2 * of_queries if torch.cuda.get_device_capability() == (9, 0) else 0
    assert peak <= 3 * of_queries + sums + rows * length * heads * 4 + lists + 2**20, f"{peak / 2**20:.0f} MiB"


def last_batch_row(variant: str, inputs: Inputs) -> Inputs:
    def last(x: Tensor) -> Tensor:
        return x.detach()[-1:].clone().requires_grad_(x.requires_grad)

    q, k, v = last(inputs.q), last(inputs.k), last(inputs.v)
    own = {name: last(x) if _per_batch(variant, name) else x for name, x in inputs.tensors.items()}
    return replace(inputs, q=q, k=k, v=v, do=inputs.do[-1:].clone(), dlse=inputs.dlse[-1:].clone(), tensors=own)


def _per_batch(variant: str, name: str) -> bool:
    """Whether a tensor's first dim is the batch."""
    declared = MANIFEST[variant]["tensors"].get(name)
    return name == "g" or (declared is not None and declared["dims"][:1] == ["b"])


def check_last_batch_row(variant: str, inputs: Inputs) -> None:
    """The batch row with the largest offsets, alone, against float64; other rows only for NaN."""
    if "dropout_p" in inputs.scalars:  # a batch row alone would draw other numbers
        inputs = replace(inputs, scalars=inputs.scalars | {"dropout_p": 0.0})
    got = evaluate(variant, inputs)
    part = last_batch_row(variant, inputs)
    # The gradient of a tensor without a batch dim sums over all rows.
    shared = [name for name, x in inputs.tensors.items() if x.requires_grad and not _per_batch(variant, name)]
    part = replace(part, tensors={n: x.detach() if n in shared else x for n, x in part.tensors.items()})
    kept = {name: x[-1:] for name, x in got.items() if name.removeprefix("d") not in shared}
    check_results(variant, part, kept, ratios=False)


@with_variants
def test_more_than_2_to_the_31_elements(variant: str) -> None:
    shape = Shape(batch=520, kv_heads=4, group=16, q_len=1024, dim=64)
    assert shape.batch * shape.kv_heads * shape.group * shape.q_len * shape.dim > 2**31
    small = draw(variant, replace(shape, batch=1), torch.bfloat16)
    # A tensor of the variant, and its gradient in float32 before it is converted.
    own_sizes = [
        x.numel() * (x.element_size() + (4 + x.element_size()) * x.requires_grad)
        for name, x in small.tensors.items()
        if _per_batch(variant, name)
    ]
    require_memory(40 * GIB + shape.batch * sum(own_sizes))

    def repeated(x: Tensor) -> Tensor:
        return x.detach().repeat(shape.batch, *(1,) * (x.dim() - 1)).requires_grad_(x.requires_grad)

    own = {name: repeated(x) if _per_batch(variant, name) else x for name, x in small.tensors.items()}
    q, k, v = (repeated(x) for x in (small.q, small.k, small.v))
    inputs = replace(small, q=q, k=k, v=v, do=repeated(small.do), dlse=repeated(small.dlse), tensors=own)
    check_last_batch_row(variant, inputs)


@with_variants
def test_rows_further_apart_than_2_to_the_31(variant: str) -> None:
    """Few elements, far apart, so that the offset of a single row exceeds 32 bits."""
    require_memory(12 * GIB)
    shape = Shape(q_len=300, kv_heads=1, group=1, dim=64)
    inputs = draw(variant, shape, torch.bfloat16)
    step = 8_000_000
    assert (shape.q_len - 1) * step > 2**31
    store = torch.empty(shape.q_len * step, dtype=torch.bfloat16, device=DEVICE)

    def apart(x: Tensor, shift: int) -> Tensor:
        view = store.as_strided(x.shape, (64, 64, step, 1), shift)
        return view.copy_(x.detach()).detach().requires_grad_(x.requires_grad)

    spread = replace(
        inputs,
        q=apart(inputs.q, 0),
        k=apart(inputs.k, 64),
        v=apart(inputs.v, 128),
        do=apart(inputs.do, 192).detach(),
    )
    check_results(variant, inputs, evaluate(variant, spread), ratios=False)


@with_variants
def test_more_heads_than_65535(variant: str) -> None:
    inputs = draw(variant, Shape(batch=1100, kv_heads=32, group=2, q_len=17, dim=16), torch.bfloat16)
    check_last_batch_row(variant, inputs)


def test_caches_whose_heads_lie_further_apart_than_2_to_the_31() -> None:
    require_memory(9 * GIB)
    cache = torch.zeros(3, 2**13, 16, 2**13 + 64, dtype=torch.bfloat16, device=DEVICE)[..., :128].permute(1, 2, 0, 3)
    assert cache.stride(2) > 2**30
    new = torch.randn(1, 3, 128, dtype=torch.bfloat16, device=DEVICE)
    paging.append(new, None, cache, None, torch.tensor([37], device=DEVICE))
    assert torch.equal(cache[2, 5], new[0])


def test_caches_whose_keys_lie_far_apart() -> None:
    """Keys of one layer of many, in one page for each sequence, whose size is no multiple of a block."""
    require_memory(7 * GIB)
    keys, layers = 70000, 2**15 + 256
    cache = torch.empty(1, keys, layers, dtype=torch.bfloat16, device=DEVICE)[..., None, :64]
    cache[0, -40:] = torch.randn(40, 1, 64, device=DEVICE)
    q = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    own: dict[str, Any] = {
        "page_table": torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        "kv_lengths": torch.tensor([keys], device=DEVICE),
    }
    near: dict[str, Any] = {"page_table": own["page_table"], "kv_lengths": torch.tensor([40], device=DEVICE)}
    got, want = (window(q, x, x, size=32, **given) for x, given in ((cache, own), (cache[:, -40:].contiguous(), near)))
    torch.testing.assert_close(got, want)
