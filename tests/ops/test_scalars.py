"""Scalars of own variants: the ranges that sums of several leave, in every kind of call."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.support.rendering import importable

SPEC = """
variants:
  apart: {mask: q_idx - kv_idx < near - far, scalars: {near: int, far: int}}
"""

MOST = 2**29
PAGES = {"page_table": torch.zeros(1, 1, dtype=torch.int32), "kv_lengths": torch.tensor([12], dtype=torch.int32)}
PACKED = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 5, 12], dtype=torch.int32))
SEGMENTED = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), torch.zeros(1, 12, dtype=torch.int32))
CALLS: dict[str, dict[str, torch.Tensor]] = {"dense": {}, "packed": PACKED, "segmented": SEGMENTED, "paged": PAGES}


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(tmp_path_factory.mktemp("scalars"), "scalars", SPEC):
        yield


def called(framework: str, variant: str, given: dict[str, torch.Tensor], **scalars: Any) -> Any:
    """The output of a variant's op for twelve tokens, in a kind of call that `given` decides."""
    torch.manual_seed(0)
    q = torch.randn(*((12, 2, 8) if "cu_seqlens_q" in given else (1, 2, 12, 8)))
    keys = torch.randn(1, 16, 2, 8) if "page_table" in given else q
    op = getattr(importlib.import_module(f"scalars.{framework}"), variant)
    if framework == "torch":
        return op(q, keys, keys, **given, **scalars, layout="bhsd").numpy()
    arrays = {name: jnp.asarray(x.numpy()) for name, x in given.items()}
    return np.asarray(op(*(jnp.asarray(x.numpy()) for x in (q, keys, keys)), **arrays, **scalars, layout="bhsd"))


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_several_scalars_of_a_sum_share_its_range(framework: str, kind: str) -> None:
    message = rf"apart: far: expected an int from -{MOST} to {MOST}, got {-MOST - 1}"
    with pytest.raises(ValueError, match=message):
        called(framework, "apart", CALLS[kind], near=0, far=-MOST - 1)
    everything = called(framework, "apart", CALLS[kind], near=100, far=0)
    assert np.array_equal(called(framework, "apart", CALLS[kind], near=MOST, far=-MOST), everything)


def test_arrays_on_the_host_are_checked_too() -> None:
    with pytest.raises(ValueError, match=f"near: expected an int from -{MOST} to {MOST}"):
        called("jax", "apart", {}, near=jnp.asarray(2**30), far=0)
