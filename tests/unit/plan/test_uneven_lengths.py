"""Packed calls of uneven lengths: the length by which kernels are chosen, and how calls give the longest length."""

from __future__ import annotations

import importlib
import random
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from generated._runtime.core.configs import tiles_for
from generated._runtime.core.launches import call_length
from generated._runtime.core.options import CallOptions, checked_options
from generated.causal import jax_op, torch_op
from generated.packing import pack

LONGEST = CallOptions(longest=4)


def length_of(lengths: list[int], longest: int | None) -> int:
    """The length by which the kernels of a packed call are chosen; `longest` is None if the call does not give it."""
    values, begins = torch.empty(1, 1, sum(lengths), 0), torch.empty(len(lengths) + 1)
    options = checked_options("causal", None, mode="packed", lengths=(longest, None))
    return call_length("packed", values, begins, options.longest)


def test_uneven_lengths_count_by_their_pairs() -> None:
    """The length is at least the average, and at most the average over tokens of their sequence's length."""
    rng = random.Random(0)
    for _ in range(500):
        lengths = [rng.choice((rng.randint(0, 64), rng.randint(0, 5000))) for _ in range(rng.randint(1, 40))]
        average, by_pairs = sum(lengths) // len(lengths), sum(n * n for n in lengths) / max(sum(lengths), 1)
        found = length_of(lengths, max(lengths))
        assert average <= found <= max(by_pairs, 1), lengths
        assert length_of(lengths, None) == max(average, min(sum(lengths), 1))


def test_one_long_sequence_among_short_ones_takes_the_kernels_of_long_ones() -> None:
    lengths = [65536, *[64] * 1024]

    def families(length: int) -> list[str]:
        tiles = tiles_for("causal", "packed", "sm_90", "", "bfloat16", (128, 128), (32, 8), length)
        return [tiles[name].family for name in ("fwd", "dkdv", "dq")]

    assert families(length_of(lengths, None)) == ["hopper", "hopper", "portable"]
    assert families(length_of(lengths, max(lengths))) == ["hopper"] * 3
    assert length_of(lengths, max(lengths)) == (65536**2 + 65536**2 // 1024) // 131072
    # With one sequence of 512, the sequences of 64 still have nearly all of the work.
    assert families(length_of([512, *[64] * 1024], 512)) == ["portable", "hopper", "portable"]


def test_segments_are_no_longer_than_the_longest() -> None:
    """The number of segments in a row is not known: eight are assumed."""
    values, ids = torch.empty(2, 1, 8192, 0), torch.empty(2, 8192)
    for longest, length in ((0, 1024), (512, 512), (4096, 1024)):
        assert call_length("segmented", values, ids, longest) == length


def test_a_call_without_keys_has_length_zero_whatever_bound_is_given() -> None:
    assert length_of([0, 0], 5) == length_of([0], 5) == 0


def test_even_lengths_are_their_own_length() -> None:
    assert length_of([300] * 7, 300) == length_of([300] * 7, None) == 300


@pytest.fixture
def batch() -> Any:
    return pack([torch.randn(length, 2, 16) for length in (3, 7, 2)])


def torch_options(monkeypatch: pytest.MonkeyPatch, *args: torch.Tensor, **call: Any) -> CallOptions:
    """The options that a call of the torch op passes to its kernels."""
    found: list[CallOptions] = []

    def run(_function: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found.extend(x for x in given if isinstance(x, CallOptions))
        return args[0], args[0]

    monkeypatch.setattr(torch_op, "scaled_run", lambda *_: run)
    torch_op.causal(*args, **call)
    (options,) = found
    return options


def test_torch_calls_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    q, begins = batch.data, batch.cu_seqlens
    for call in ({"max_seqlen_q": batch.max_seqlen}, {"max_seqlen_q": 1, "max_seqlen_k": torch.tensor(5)}):
        assert torch_options(monkeypatch, q, q, q, cu_seqlens_q=begins, **call) == LONGEST.plainly()
    x = q.transpose(0, 1)[None]
    ids = torch.zeros(1, len(q), dtype=torch.int32)
    assert torch_options(monkeypatch, x, x, x, q_segment_ids=ids, max_seqlen_k=7) == LONGEST.plainly()


def test_schedules_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    asked: list[CallOptions] = []
    monkeypatch.setattr(torch_op.PACKED, "tiles", lambda _q, _v, options, _begins: asked.append(options))
    torch_op.causal.schedule(batch.data, batch.data, batch.data, cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=7)
    assert asked == [LONGEST]


def test_jax_calls_and_schedules_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    asked: list[CallOptions] = []

    def note(*given: Any) -> tuple[None, None]:
        asked.append(given[3].options)
        return None, None

    monkeypatch.setattr(jax_op, "scaled_run", lambda *_scales: note)
    monkeypatch.setattr(jax_op, "schedule_of", note)
    q, begins = jnp.asarray(batch.data.numpy()), jnp.asarray(batch.cu_seqlens.numpy())
    for function in (jax_op.causal, jax_op.causal.schedule):
        function(q, q, q, cu_seqlens_q=begins, max_seqlen_q=batch.max_seqlen)
    assert asked == [LONGEST, LONGEST]


def test_pruned_calls_name_the_longest_sequence(monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    module = importlib.import_module("generated.forgetting.torch_op")
    given: dict[str, Any] = {}
    monkeypatch.setattr(module.ops, "forgetting_pruned", lambda *_, **call: given.update(call))
    q = batch.data
    module.forgetting(q, q, q, g=torch.zeros(len(q), 2), prune=2**-24, cu_seqlens_q=batch.cu_seqlens, max_seqlen_k=7)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (None, 7)
