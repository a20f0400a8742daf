"""The packed sequences, segment ids, positions and lengths that calls refuse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.testing.golden import load_op
from generated._runtime.core.settings import INTERPRET
from generated._runtime.torch.sequences import check_packed
from tests.support.packed_calls import Call, ints, message, own_variant

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(mode="packed", family="reference", framework="torch"),
]


def packed_call() -> Call:
    q, k, v = torch.zeros(8, 4, 32), torch.zeros(6, 2, 32), torch.zeros(6, 2, 16)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 6)}


def dense_call() -> Call:
    return {"q": torch.zeros(2, 4, 8, 32), "k": torch.zeros(2, 2, 6, 32), "v": torch.zeros(2, 2, 6, 16)}


ONE_PER_ROW = torch.zeros(2, 8, dtype=torch.int32)
INTEGERS = "expected an integer tensor [n + 1] on cpu"
BAD_PACKED: list[tuple[str, Call, str]] = [
    ("dtype", {"cu_seqlens_q": torch.tensor([0.0, 3, 8])}, f"cu_seqlens_q: {INTEGERS}, got torch.float32 [3] on cpu"),
    (
        "dtype_of_k",
        {"cu_seqlens_k": torch.tensor([False, True])},
        f"cu_seqlens_k: {INTEGERS}, got torch.bool [2] on cpu",
    ),
    (
        "range",
        {"cu_seqlens_q": torch.tensor([0, 2**31, 8])},
        "cu_seqlens_q: expected values that torch.int32 holds, got 2147483648",
    ),
    ("dims", {"cu_seqlens_q": ints(0, 3, 8)[None]}, f"cu_seqlens_q: {INTEGERS}, got torch.int32 [1, 3] on cpu"),
    ("empty", {"cu_seqlens_k": ints()}, f"cu_seqlens_k: {INTEGERS}, got torch.int32 [0] on cpu"),
    ("device", {"cu_seqlens_q": ints(0, 3, 8).to("meta")}, f"cu_seqlens_q: {INTEGERS}, got torch.int32 [3] on meta"),
    ("list", {"cu_seqlens_q": [0, 3, 8]}, f"cu_seqlens_q: {INTEGERS}, got list"),
    ("keys_alone", {"cu_seqlens_q": None}, f"cu_seqlens_q: {INTEGERS}, got NoneType"),
    (
        "queries_alone",
        {"cu_seqlens_k": None},
        "cu_seqlens_k: expected an integer tensor [n + 1] where q and k differ in length, got None for q of 8 rows and "
        "k of 6",
    ),
    (
        "number_of_sequences",
        {"cu_seqlens_k": ints(0, 3, 3, 6)},
        "cu_seqlens_k: expected 3 elements, as many as cu_seqlens_q, got 4",
    ),
    ("start", {"cu_seqlens_q": ints(1, 3, 8)}, "cu_seqlens_q: expected a first value of 0, got 1"),
    (
        "decrease",
        {"cu_seqlens_k": ints(0, 7, 6)},
        "cu_seqlens_k: expected values that never decrease, got 7 at index 1 and 6 at index 2",
    ),
    ("end", {"cu_seqlens_q": ints(0, 3, 7)}, "cu_seqlens_q: expected a last value of 8, the rows of q, got 7"),
    ("end_of_k", {"cu_seqlens_k": ints(0, 3, 8)}, "cu_seqlens_k: expected a last value of 6, the rows of k, got 8"),
    (
        "rank",
        {"q": torch.zeros(1, 4, 8, 32)},
        "q: expected 3 dimensions [total, H, D], got 4 dimensions [1, 4, 8, 32]",
    ),
    (
        "heads",
        {"q": torch.zeros(8, 3, 32)},
        "q: expected a head count that is a multiple of k's 2, got 3 in [total, H, D] = [8, 3, 32]",
    ),
    (
        "rows_of_v",
        {"v": torch.zeros(5, 2, 16)},
        "v: expected sequence length 6, that of k, got 5 in [total, H, D] = [5, 2, 16]",
    ),
    (
        "head_dim",
        {"k": torch.zeros(6, 2, 16)},
        "k: expected head_dim 32, that of q, got 16 in [total, H, D] = [6, 2, 16]",
    ),
    ("layout", {"layout": "bsdh"}, "layout: expected 'bhsd' or 'bshd', got 'bsdh'"),
    ("scale", {"scale": "1"}, "scale: expected a finite number or None, got '1'"),
    ("offset_word", {"q_offset": "start"}, "q_offset: expected an int, 'end' or an integer tensor, got 'start'"),
    ("offset_float", {"q_offset": 0.5}, "q_offset: expected an int from -536870912 to 536870912, got 0.5"),
    (
        "offset_shape",
        {"q_offset": ints(0, 1, 2)},
        "q_offset: expected an int, 'end' or an integer tensor [2] on cpu, got torch.int32 [3] on cpu",
    ),
    ("config", {"config": 3}, "config: expected None or a dict of pass name -> tile, got 3"),
    ("schedule", {"schedule": 3}, "schedule: expected what causal.schedule(...) returns, or None, got int"),
    *(
        (name, {name: ONE_PER_ROW}, f"{name}: expected None in a packed call, beside cu_seqlens_q, got Tensor")
        for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths")
    ),
]
BAD_TOKENS: list[tuple[str, Call, str]] = [
    (
        "ids_of_keys_alone",
        {"kv_segment_ids": ONE_PER_ROW[:, :6]},
        "q_segment_ids: expected an integer tensor [2, 8] beside kv_segment_ids, got None",
    ),
    (
        "ids_of_queries_alone",
        {"q_segment_ids": ONE_PER_ROW},
        "kv_segment_ids: expected an integer tensor [2, 6] where q and k differ in length, got None",
    ),
    (
        "positions_of_keys_alone",
        {"kv_positions": ONE_PER_ROW[:, :6]},
        "q_positions: expected an integer tensor [2, 8] beside kv_positions, got None",
    ),
    (
        "positions_of_queries_alone",
        {"q_positions": ONE_PER_ROW},
        "kv_positions: expected an integer tensor [2, 6] where q and k differ in length, got None",
    ),
    (
        "shape_of_ids",
        {"q_segment_ids": ONE_PER_ROW, "kv_segment_ids": ONE_PER_ROW},
        "kv_segment_ids: expected an integer tensor [2, 6] on cpu, got torch.int32 [2, 8] on cpu",
    ),
    (
        "dtype_of_ids",
        {"q_segment_ids": ONE_PER_ROW.bool()},
        "q_segment_ids: expected an integer tensor [2, 8] on cpu, got torch.bool [2, 8] on cpu",
    ),
    (
        "device_of_positions",
        {"q_positions": ONE_PER_ROW.to("meta")},
        "q_positions: expected an integer tensor [2, 8] on cpu, got torch.int32 [2, 8] on meta",
    ),
    (
        "list_of_positions",
        {"q_positions": ONE_PER_ROW, "kv_positions": [0]},
        "kv_positions: expected an integer tensor [2, 6] on cpu, got list",
    ),
    (
        "shape_of_lengths",
        {"kv_lengths": ints(1, 2, 3)},
        "kv_lengths: expected an integer tensor [2] on cpu, got torch.int32 [3] on cpu",
    ),
    (
        "dtype_of_lengths",
        {"kv_lengths": torch.tensor([1.0, 2.0])},
        "kv_lengths: expected an integer tensor [2] on cpu, got torch.float32 [2] on cpu",
    ),
    ("number_of_lengths", {"kv_lengths": 3}, "kv_lengths: expected an integer tensor [2] on cpu, got int"),
    *(
        (
            f"positions_and_offset_{i}",
            {"q_positions": ONE_PER_ROW, "kv_positions": ONE_PER_ROW[:, :6], "q_offset": offset},
            f"q_offset: expected 0 beside q_positions, which say where queries are, got {got}",
        )
        for i, (offset, got) in enumerate([(2, "2"), ("end", "'end'"), (ints(0, 0), "Tensor"), (False, "False")])
    ),
    ("padding_id", {"kv_lengths": ints(1, 2), "padding_id": None}, "padding_id: expected an int of 32 bits, got None"),
    (
        "padding_id_too_large",
        {"kv_lengths": ints(1, 2), "padding_id": 2**31},
        "padding_id: expected an int of 32 bits, got 2147483648",
    ),
]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*rest, id=name) for name, *rest in BAD_PACKED])
def test_bad_arguments_of_a_packed_call(change: Call, text: str) -> None:
    assert message(load_op("causal"), packed_call() | change) == f"causal: {text}"
    if not {"scale", "schedule"} & change.keys():
        assert message(load_op("causal").schedule, packed_call() | change) == f"causal: {text}"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*rest, id=name) for name, *rest in BAD_TOKENS])
def test_bad_ids_positions_and_lengths(change: Call, text: str) -> None:
    assert message(load_op("causal"), dense_call() | change) == f"causal: {text}"
    assert message(load_op("causal").schedule, dense_call() | change) == f"causal: {text}"  # type: ignore[attr-defined]


BAD_OWN: list[tuple[str, str, Tensor | None, str]] = [
    ("forgetting", "g", torch.zeros(2, 8, 4), "expected shape [6, 4], got [2, 8, 4]"),
    ("forgetting", "g", torch.zeros(8, 4), "expected shape [6, 4], got [8, 4]"),
    ("forgetting", "g", None, "expected a torch.Tensor of shape [6, 4], got nothing"),
    ("document", "doc", ints(*range(8)), "expected shape [6], got [8]"),
    ("padding", "length", ints(1, 2, 3), "expected shape [2], got [3]"),
    ("gpt_oss", "sink", torch.zeros(2), "expected shape [4], got [2]"),
]


@pytest.mark.parametrize(("variant", "name", "value", "text"), BAD_OWN)
def test_bad_own_tensors_of_a_packed_call(variant: str, name: str, value: Tensor | None, text: str) -> None:
    assert message(load_op(variant), packed_call() | {name: value}) == f"{variant}: {name}: {text}"


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [("seen", (2, 8, 6), "[8, 6], got [2, 8, 6]"), ("bias", (4, 8, 8), "[4, 8, 6], got [4, 8, 8]")],
)
def test_bad_tensors_per_pair_of_a_packed_call(package: str, name: str, shape: Sequence[int], text: str) -> None:
    op, _ = own_variant(package, "per_pair")
    good = {"seen": torch.ones(8, 6, dtype=torch.bool), "bias": torch.zeros(4, 8, 6), "far": torch.zeros(4, 9)}
    assert op(**packed_call(), **good).shape == (8, 4, 16)
    bad = good | {name: torch.zeros(shape, dtype=good[name].dtype)}
    assert message(op, packed_call() | bad) == f"per_pair: {name}: expected shape {text}"


def test_values_are_not_read_where_that_would_wait() -> None:
    """Fake tensors and tensors on the device `meta` have no values."""
    with FakeTensorMode():
        x, cu_seqlens = torch.zeros(8, 2, 16), torch.ones(3, dtype=torch.int32)
        assert check_packed("op", x, x, x, None, cu_seqlens, None)[0] is cu_seqlens
    x, cu_seqlens = torch.zeros(8, 2, 16, device="meta"), torch.ones(3, dtype=torch.int32, device="meta")
    assert check_packed("op", x, x, x, None, cu_seqlens, None)[0] is cu_seqlens
