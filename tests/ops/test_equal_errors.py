"""A bad argument is refused with the same words in PyTorch and in JAX, but for the names of tensors and dtypes."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import torch

from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")

Call = dict[str, Any]
NAN = float("nan")


def floats(*sizes: int) -> np.ndarray:
    return np.zeros(sizes, np.float32)


def ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


IDS = ints([[0] * 8] * 2)
DENSE: Call = {"q": floats(2, 4, 8, 32), "k": floats(2, 2, 8, 32), "v": floats(2, 2, 8, 16), "layout": "bhsd"}
PACKED: Call = {
    "q": floats(20, 4, 32),
    "k": floats(20, 2, 32),
    "v": floats(20, 2, 16),
    "cu_seqlens_q": ints([0, 5, 20]),
}
PAGED: Call = {
    "q": floats(2, 4, 1, 32),
    "k": floats(8, 16, 2, 32),
    "v": floats(8, 16, 2, 16),
    "layout": "bhsd",
    "page_table": ints([[0, 1], [2, 3]]),
    "kv_lengths": ints([20, 9]),
}
FLAT: Call = PAGED | {"page_table": ints([0, 1, 2, 3])}
TILE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}
DROPPED: Call = DENSE | {"dropout_p": 0.5, "seed": 3}

BAD: list[tuple[str, Call, Call]] = [
    *(
        ("causal", DENSE, change)
        for change in (
            {"q": floats(2, 8, 32)},
            {"q": floats(2, 3, 8, 32)},
            {"k": floats(3, 2, 8, 32)},
            {"k": floats(2, 2, 8, 16)},
            {"v": floats(2, 2, 7, 16)},
            {"v": floats(2, 2, 8, 513)},
            {"q": ints(np.zeros((2, 4, 8, 32)))},
            {"layout": "xx"},
            {"scale": NAN},
            {"scale": 1e39},
            {"scale": True},
            {"q_offset": "start"},
            {"q_offset": 0.5},
            {"q_offset": 2**31},
            {"q_offset": -(2**29) - 1},
            {"q_offset": ints([0, 2**29 + 1])},
            {"q_offset": [0, 1]},
            {"q_offset": ints([0, 1, 2])},
            {"q_offset": floats(2)},
            {"config": 3},
            {"config": {"fwd": TILE | {"block_m": 63}}},
            {"config": {"prefill": TILE}},
            {"family": "x"},
            {"family": "hopper"},
            {"deterministic": 1},
            {"return_lse": "no"},
            {"return_lse": 1},
            {"return_lse": None},
            {"schedule": 3},
            {"padding_id": 2**31},
            {"max_seqlen_q": 5},
            {"page_starts": ints([0, 1])},
            {"k_scale": 1.0},
        )
    ),
    *(
        ("causal", DENSE | {"q_segment_ids": IDS}, change)
        for change in (
            {"q_segment_ids": floats(2, 8)},
            {"q_segment_ids": None, "kv_segment_ids": IDS},
            {"kv_segment_ids": IDS[:, :5]},
            {"kv_positions": IDS},
            {"q_positions": IDS, "q_offset": 2},
            {"kv_lengths": ints([1, 2, 3])},
            {"kv_lengths": 3},
            {"max_seqlen_q": -1},
            {"cu_seqlens_q": ints([0, 5, 8])},
        )
    ),
    *(
        ("causal", PACKED, change)
        for change in (
            {"cu_seqlens_q": floats(3)},
            {"cu_seqlens_q": ints([1, 5, 20])},
            {"cu_seqlens_q": ints([0, 25, 20])},
            {"cu_seqlens_q": ints([0, 5, 19])},
            {"cu_seqlens_q": None, "cu_seqlens_k": ints([0, 5, 20])},
            {"cu_seqlens_k": ints([0, 5, 7, 20])},
            {"k": floats(19, 2, 32), "v": floats(19, 2, 16)},
            {"layout": "xx"},
            {"q_offset": [0, 1]},
            {"q_offset": ints([0, 1, 2])},
            {"kv_lengths": ints([1, 2])},
            {"max_seqlen_q": 2.5},
            {"splits": 2},
        )
    ),
    *(
        ("causal", PAGED, change)
        for change in (
            {"return_lse": "no"},
            {"page_table": floats(2, 2)},
            {"page_table": ints([[0, 9], [2, 3]])},
            {"page_table": None, "page_starts": ints([0, 2, 4])},
            {"kv_lengths": None},
            {"kv_lengths": ints([33, 9])},
            {"q": floats(2, 3, 1, 32)},
            {"v": floats(7, 16, 2, 16)},
            {"k_scale": NAN},
            {"v_scale": floats(3)},
            {"splits": 0},
            {"splits": "x"},
            {"q_offset": [0, 1]},
            {"q_offset": ints([0, 1, 2])},
            {"q_positions": IDS},
            {"max_seqlen_k": 3},
            {"scale": 1e39},
        )
    ),
    ("causal", FLAT, {"page_starts": ints([0, 3, 2])}),
    ("causal", FLAT, {"page_starts": ints([1, 2, 4])}),
    ("causal_dropout", PAGED | {"dropout_p": 0.5, "seed": 3}, {}),
    *(
        ("causal_dropout", DROPPED, change)
        for change in (
            {"dropout_p": 1},
            {"dropout_p": None},
            {"seed": -1},
            {"seed": 0.5},
            {"dropout_origin": (0, 7, 8)},
            {"dropout_origin": (2**29, 0, 8)},
            {"dropout_origin": (0, 0, 8, 8, 0)},
        )
    ),
    ("alibi", DENSE, {"slope": floats(5)}),
    ("alibi", DENSE, {"slope": 0.5}),
    ("band_softcap", DENSE, {"before": 4, "after": 0, "cap": NAN}),
    ("window", DENSE, {"size": 0}),
    ("window", DENSE, {"size": 2.5}),
    ("document", DENSE, {"doc": floats(2, 8)}),
    ("forgetting", DENSE | {"g": floats(2, 8, 4)}, {"prune": 2}),
    ("forgetting", DENSE, {"g": floats(2, 7, 4)}),
    ("gpt_oss", PACKED, {"sink": floats(2)}),
    ("document", PACKED, {"doc": IDS}),
]


def refusal(framework: str, variant: str, call: Call, **unconverted: Any) -> str:
    """The message of the error, with one word for tensors and arrays and one name for each dtype."""
    convert = torch.from_numpy if framework == "torch" else jax.numpy.asarray
    given = {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in call.items()} | unconverted
    op = getattr(importlib.import_module(f"generated.{framework}"), variant)
    with pytest.raises(ArgumentError) as caught:
        op(**given)
    text = re.sub(r" on cpu|torch\.|jax\.", "", str(caught.value))
    return text.replace("integer array", "integer tensor").replace("ArrayImpl", "Tensor").replace("a Array", "a Tensor")


def _name(variant: str, change: Call) -> str:
    shown = (f"{name}-{list(x.shape) if isinstance(x, np.ndarray) else x}" for name, x in change.items())
    return "-".join((variant, *shown))


@pytest.mark.parametrize(
    ("variant", "good", "change"), [pytest.param(*each, id=_name(each[0], each[2])) for each in BAD]
)
def test_equal_words(variant: str, good: Call, change: Call) -> None:
    words = refusal("torch", variant, good | change)
    assert refusal("jax", variant, good | change) == words
    assert words.startswith(f"{variant}: ")


@pytest.mark.parametrize("argument", ["layout", "family", "splits"])
def test_a_numpy_array_is_no_name(argument: str) -> None:
    """Its comparison with a name is an array, which is neither true nor false."""
    words = [refusal(each, "causal", PAGED, **{argument: np.zeros(3)}) for each in ("torch", "jax")]
    assert words[0] == words[1]
    assert words[0].startswith(f"causal: {argument}: expected ")


def test_a_list_is_no_page_layout() -> None:
    assert refusal("jax", "causal", PAGED, page_layout=["pshd"]).endswith("expected 'pshd' or 'phsd', got ['pshd']")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_flags_are_true_or_false(framework: str) -> None:
    """A numpy bool is one, too. Any other value may have been meant as either."""
    op = importlib.import_module(f"generated.{framework}").causal
    convert = torch.from_numpy if framework == "torch" else jax.numpy.asarray
    q, k, v = (convert(floats(1, 2, 8, 16)) for _ in range(3))
    assert isinstance(op(q, k, v, return_lse=np.True_), tuple)
    assert not isinstance(op(q, k, v, return_lse=np.False_), tuple)
    op(q, k, v, deterministic=np.True_)
    o, lse = op(q, k, v, return_lse=True)
    with pytest.raises(ArgumentError, match=r"^causal.backward: wide_dq: expected True or False, got 'no'$"):
        op.backward(o, q, k, v, o, lse, wide_dq="no")
    with pytest.raises(ArgumentError, match=r"^causal.schedule: backward: expected True or False, got 1$"):
        op.schedule(q, k, v, backward=1)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    ("good", "name"),
    [
        *(
            (DENSE, name)
            for name in ("layout", "family", "scale", "return_lse", "config", "deterministic", "padding_id")
        ),
        *((PACKED, name) for name in ("layout", "max_seqlen_q")),
        *((PAGED, name) for name in ("layout", "family", "splits", "config")),
    ],
)
def test_an_array_in_the_place_of_a_word_or_number(framework: str, good: Call, name: str) -> None:
    """It is compared with no word, which gives an array of booleans. The message has its shape, not its elements."""
    convert = torch.from_numpy if framework == "torch" else jax.numpy.asarray
    given = {key: convert(x) if isinstance(x, np.ndarray) else x for key, x in good.items()}
    op = importlib.import_module(f"generated.{framework}").causal
    for array in (floats(3, 50), convert(floats(3, 50))):
        with pytest.raises(ArgumentError, match=rf"^causal: {name}: expected .*, got \w+ of [\w.]+ \[3, 50\]$"):
            op(**given | {name: array})


def test_a_message_has_only_the_start_of_a_long_value() -> None:
    assert len(refusal("torch", "causal", DENSE | {"layout": "bhsd" * 1000})) < 300
