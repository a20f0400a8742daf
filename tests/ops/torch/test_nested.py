"""Nested tensors of torch, which no argument may be: one error that names the argument, whatever their layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing.golden import load_op
from generated import packing, paging
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="the checks are the same before kernels"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def nested(layout: torch.layout, dtype: torch.dtype) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(3, dtype=dtype), torch.zeros(5, dtype=dtype)], layout=layout)


Q, ROWS, CACHE = torch.zeros(2, 2, 8, 16), torch.zeros(8, 2, 16), torch.zeros(8, 4, 2, 16)
DENSE = {"q": Q, "k": Q, "v": Q}
PACKED = {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": torch.tensor([0, 3, 8])}
PAGES = {"page_table": torch.arange(8).view(2, 4), "kv_lengths": torch.tensor([10, 12])}
PAGED = {"q": Q, "k": CACHE, "v": CACHE, **PAGES}
SUMS = {"g": torch.zeros(8, 4, 2), "g_base": torch.zeros(8, 2)}
IDS = torch.zeros(2, 8, dtype=torch.int64)
CALLS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("causal", DENSE, ["q", "k", "v", "q_offset", "kv_lengths", "q_segment_ids", "q_positions"]),
    ("causal", {**DENSE, "q_segment_ids": IDS, "q_positions": IDS}, ["kv_segment_ids", "kv_positions"]),
    ("causal", PACKED, ["cu_seqlens_q", "cu_seqlens_k", "q_offset"]),
    ("causal", PAGED, ["q", "k", "v", "page_table", "kv_lengths", "q_offset", "k_scale", "v_scale"]),
    ("causal", {**PAGED, "page_table": torch.arange(8)}, ["page_starts"]),
    ("document", DENSE, ["doc"]),
    ("alibi", DENSE, ["slope"]),
    ("gpt_oss", DENSE, ["sink"]),
    ("forgetting", DENSE, ["g"]),
    ("forgetting", {**PAGED, **SUMS}, ["g", "g_base"]),
]
FLOATS = {
    "q",
    "k",
    "v",
    "k_scale",
    "v_scale",
    "slope",
    "sink",
    "g",
    "g_base",
    "k_cache",
    "v_cache",
    "g_cache",
    "o",
    "lse",
}


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name in FLOATS else torch.int64


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize(
    ("variant", "call", "name"), [(variant, call, name) for variant, call, names in CALLS for name in names], ids=str
)
def test_an_op_refuses_them_by_name(variant: str, call: dict[str, Any], name: str, layout: torch.layout) -> None:
    op: Any = load_op(variant)
    message = (
        f"^{variant}: {name}: expected a tensor that is not nested: pass its values, and its offsets as cu_seqlens"
    )
    with pytest.raises(ArgumentError, match=message):
        op(**{**call, name: nested(layout, dtype_of(name))})


NUMBERS = [("window", "size"), ("causal", "scale"), ("causal_dropout", "seed"), ("causal_dropout", "dropout_p")]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize(("variant", "name"), NUMBERS)
def test_they_are_no_numbers(variant: str, name: str, layout: torch.layout) -> None:
    op: Any = load_op(variant)
    more = {"dropout_p": 0.5} if name == "seed" else {}
    with pytest.raises(ArgumentError, match=rf"^{variant}: {name}: expected .*, got a nested tensor of torch\.int64$"):
        op(Q, Q, Q, **more, **{name: nested(layout, torch.int64)})


TOKENS = torch.zeros(2, 2, 16)
APPEND = {"k": TOKENS, "v": TOKENS, "k_cache": CACHE, "v_cache": CACHE, "slots": torch.tensor([0, 1])}
DECAYS = {"g": torch.zeros(2, 1, 2), "g_cache": SUMS["g"], "g_base": SUMS["g_base"], **PAGES}
MERGED = {"o": Q, "lse": Q[..., 0]}
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "append": (paging.append, APPEND | {"k_scale": None}),
    "append_decay": (paging.append_decay, DECAYS),
    "slots": (paging.slots, {"page_table": PAGES["page_table"], "positions": IDS, "page_size": 4}),
    "merge": (lambda o, lse: paging.merge([(o, lse)]), MERGED),
}


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize(
    ("function", "name"), [(f, name) for f, (_, given) in FUNCTIONS.items() for name in given if name != "page_size"]
)
def test_functions_of_caches_refuse_them_by_name(function: str, name: str, layout: torch.layout) -> None:
    called, given = FUNCTIONS[function]
    # The o that others are compared with is named as the first of the parts.
    argument = "parts" if (function, name) == ("merge", "o") else name
    with pytest.raises(ArgumentError, match=f"^{function}: {argument}: expected a tensor that is not nested"):
        called(**{**given, name: nested(layout, dtype_of(name))})


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_is_packed_as_its_parts_and_not_as_one(layout: torch.layout) -> None:
    x = nested(layout, torch.float32)
    assert packing.pack(x.unbind()).cu_seqlens.tolist() == [0, 3, 8]
    with pytest.raises(ArgumentError, match=r"^pack: sequences\[0\]: expected a tensor that is not nested"):
        packing.pack([x])
