"""Into how many groups a backward splits the query heads that share a key head."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from generated._runtime.core.head_groups import BLOCKS_PER_PROCESSOR, LEAST_ROWS, choose_number, split_heads
from generated._runtime.core.launches import Backend
from generated._runtime.jax import backend as jax_backend
from generated._runtime.jax.kernels import compiling_for
from generated._runtime.jax.tensor import Tensor
from generated._runtime.torch import backend as torch_backend

PROCESSORS = 132
SHARED = (1, 2, 3, 6, 7, 8, 12, 128)
BLOCKS = (1, 8, 64, 131, 132, 230, 231, 1000)
ROWS = (0, 1, 512, LEAST_ROWS - 1, LEAST_ROWS, 10 * LEAST_ROWS)


def test_groups_are_equally_large_no_more_than_needed_and_have_enough_rows() -> None:
    for shared, blocks, rows in itertools.product(SHARED, BLOCKS, ROWS):
        number = choose_number(shared, blocks, rows, PROCESSORS)
        assert shared % number == 0
        assert number == 1 or shared // number * rows >= LEAST_ROWS
        fewer = [n for n in range(1, number) if shared % n == 0]
        assert all(n * blocks < BLOCKS_PER_PROCESSOR * PROCESSORS for n in fewer)


def test_long_calls_of_one_key_head_fill_the_gpu() -> None:
    number = choose_number(8, 64, 8192, PROCESSORS)
    assert number * 64 >= BLOCKS_PER_PROCESSOR * PROCESSORS


def test_calls_with_enough_blocks_are_not_split() -> None:
    assert choose_number(8, math.ceil(BLOCKS_PER_PROCESSOR * PROCESSORS), 10**6, PROCESSORS) == 1


KEYS = [
    ("B S H D", (0, 2, 1, 3), 2, True),
    ("B S H D", (0, 2, 1, 3), 1, True),
    ("S B H D", (1, 2, 0, 3), 2, True),  # No packed kernel takes its batch rows.
    ("B H S D", (0, 1, 2, 3), 1, True),
    ("B H S D", (0, 1, 2, 3), 2, False),
]
"""Memory orders of k; their axes in the order B, H, S, D; key heads; whether heads are split if batch rows are kept."""


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("order", "axes", "kv_heads", "is_split"), KEYS)
def test_groups_keep_batch_rows_of_calls_that_packed_kernels_may_compute(
    order: str, axes: tuple[int, ...], kv_heads: int, is_split: bool, framework: str
) -> None:
    sizes = {"B": 3, "S": 2048, "H": kv_heads, "D": 40}
    shape = [sizes[axis] for axis in order.split()]
    q_shape = (3, 4, 2048, 40)
    backend: Backend
    q: Any
    dk: Any
    if framework == "torch":
        backend, q, dk = torch_backend, torch.empty(q_shape), torch.empty(shape).permute(axes)
    else:
        backend, q, dk = jax_backend, Tensor.of(jnp.empty(q_shape)), Tensor.of(jnp.empty(shape), axes)
    with compiling_for("sm_90"):
        groups = split_heads(backend, q, dk, dk, 2048)
        kept = split_heads(backend, q, dk, dk, 2048, keeps_rows=True)
    for found in (groups, kept) if is_split else (groups,):
        assert found.number == 4 // kv_heads
        assert found.dk.shape == (3, 4, 2048, 40)
        assert found.dk.stride() == found.dv.stride() == (2048 * 4 * 40, 40, 4 * 40, 1)
    assert is_split or kept == (1, 4 // kv_heads, dk, dk)
