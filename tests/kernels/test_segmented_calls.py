"""Segmented calls: same bits, schedules, strides, layouts, tracing, bad arguments, and no wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from generated._runtime.core.checks import ArgumentError
from tests.support.cases import DEVICE, DTYPES, MANIFEST, Shape, assert_same, draw, evaluate, tiles, with_variants
from tests.support.judge import check_results
from tests.support.operators import OperatorRecorder, check_operators
from tests.support.segmented_batches import BATCH, CROSS, IDS, KEYS, LENGTH, SELF, TILES, restarted, with_kinds
from tests.support.segments import PADDING, ints, runs
from tests.support.waiting import without_waiting

pytestmark = pytest.mark.covers(mode="segmented", family="portable", dtype="float16", framework="torch")


EVERYTHING: dict[str, Callable[[], Any]] = {
    "q_segment_ids": IDS["padded"],
    "q_positions": lambda: restarted(IDS["padded"]()),
    "kv_lengths": lambda: ints([LENGTH, 51]),
}


def everything() -> dict[str, Any]:
    return {name: make() for name, make in EVERYTHING.items()}


@pytest.mark.parametrize("variant", [name for name in MANIFEST if "segmented" in MANIFEST[name]["deterministic"]])
def test_same_inputs_same_bits(variant: str) -> None:
    inputs = draw(variant, SELF, DTYPES[0])
    first, second = (evaluate(variant, inputs, **everything()) for _ in range(2))
    for name, got in second.items():
        assert torch.equal(got, first[name]), name


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.usefixtures("poisoned_memory")
@with_variants
def test_every_element_is_written(variant: str) -> None:
    inputs = draw(variant, SELF)
    got = evaluate(variant, inputs, config=tiles(32, 64), **everything())
    check_results(variant, inputs, got, ratios=False, **everything())


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        *(("causal", name) for name in EVERYTHING),
        *((name, "everything") for name in ("window", "forgetting", "document")),
    ],
)
def test_a_schedule_changes_no_bit(variant: str, options: str) -> None:
    inputs = draw(variant, SELF)
    call = everything() if options == "everything" else {options: EVERYTHING[options]()}
    schedule = make_schedule(golden.load_op(variant), inputs, config=TILES, **call)
    want = evaluate(variant, inputs, config=TILES, **call)
    for _ in range(2):
        for name, got in evaluate(variant, inputs, config=TILES, schedule=schedule, **call).items():
            assert_same(variant, name, got, want[name])


@with_kinds
def test_any_strides(variant: str) -> None:
    """Of ids and positions as of q: every other element of something larger."""
    inputs = draw(variant, SELF)
    apart = {name: x.repeat_interleave(2, x.dim() - 1)[..., ::2] for name, x in everything().items()}
    want = evaluate(variant, inputs, **everything())
    for name, got in evaluate(variant, inputs, **apart).items():
        assert_same(variant, name, got, want[name])


@with_kinds
def test_layout_bshd(variant: str) -> None:
    inputs = draw(variant, SELF)

    def swap(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)

    swapped = replace(inputs, q=swap(inputs.q), k=swap(inputs.k), v=swap(inputs.v), do=swap(inputs.do))
    got = evaluate(variant, swapped, layout="bshd", **everything())
    got |= {name: got[name].transpose(1, 2) for name in ("o", "dq", "dk", "dv")}
    check_results(variant, inputs, got, ratios=False, **everything())


@with_kinds
def test_compiled_equals_eager(variant: str) -> None:
    op = golden.load_op(variant)

    def model(q: Tensor, k: Tensor, v: Tensor, **own: Any) -> tuple[Tensor, Tensor]:
        o, lse = op(q * 2, k, v, **own)
        return o * 2, lse

    inputs = draw(variant, SELF)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = golden.evaluate(compiled, inputs, **everything())
    for name, wanted in golden.evaluate(model, inputs, **everything()).items():
        assert_same(variant, name, got[name], wanted)
        assert got[name].stride() == wanted.stride(), name


@with_kinds
def test_opcheck(variant: str) -> None:
    inputs = draw(variant, Shape(batch=2, q_len=17, dim=16))
    ids = ints([runs((0, 9), (1, 6), (PADDING, 2)), runs((4, 17))])
    with OperatorRecorder() as recorder:
        evaluate(variant, inputs, q_segment_ids=ids, q_positions=restarted(ids), kv_lengths=ints([17, 11]))
    names = [func.name() for func, _ in recorder.calls]
    assert names == [f"generated::{variant}_segmented_fwd", f"generated::{variant}_segmented_bwd"]
    check_operators(recorder.calls)


def _zeros(*sizes: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


# What is added to a good call of `causal` of 70 queries and 90 keys, and the argument that the error names.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "ids_of_keys_alone": (lambda: {"kv_segment_ids": _zeros(BATCH, KEYS)}, "q_segment_ids|kv_segment_ids"),
    "ids_of_queries_alone": (lambda: {"q_segment_ids": _zeros(BATCH, LENGTH)}, "q_segment_ids|kv_segment_ids"),
    "positions_of_keys_alone": (lambda: {"kv_positions": _zeros(BATCH, KEYS)}, "q_positions|kv_positions"),
    "positions_of_queries_alone": (lambda: {"q_positions": _zeros(BATCH, LENGTH)}, "q_positions|kv_positions"),
    "shape_of_ids": (
        lambda: {"q_segment_ids": _zeros(BATCH, KEYS), "kv_segment_ids": _zeros(BATCH, KEYS)},
        "q_segment_ids",
    ),
    "shape_of_kv_ids": (
        lambda: {"q_segment_ids": _zeros(BATCH, LENGTH), "kv_segment_ids": _zeros(1, KEYS)},
        "kv_segment_ids",
    ),
    "dtype_of_ids": (
        lambda: {
            "q_segment_ids": _zeros(BATCH, LENGTH, dtype=torch.float32),
            "kv_segment_ids": _zeros(BATCH, KEYS),
        },
        "q_segment_ids",
    ),
    "device_of_positions": (
        lambda: {"q_positions": _zeros(BATCH, LENGTH), "kv_positions": _zeros(BATCH, KEYS, device="meta")},
        "kv_positions",
    ),
    "positions_and_offset": (
        lambda: {"q_positions": _zeros(BATCH, LENGTH), "kv_positions": _zeros(BATCH, KEYS), "q_offset": 3},
        "q_offset",
    ),
    "positions_and_end": (
        lambda: {"q_positions": _zeros(BATCH, LENGTH), "kv_positions": _zeros(BATCH, KEYS), "q_offset": "end"},
        "q_offset",
    ),
    "shape_of_lengths": (lambda: {"kv_lengths": _zeros(BATCH + 1)}, "kv_lengths"),
    "dtype_of_lengths": (lambda: {"kv_lengths": _zeros(BATCH, dtype=torch.float32)}, "kv_lengths"),
    "padding_id": (
        lambda: {
            "q_segment_ids": _zeros(BATCH, LENGTH),
            "kv_segment_ids": _zeros(BATCH, KEYS),
            "padding_id": 0.5,
        },
        "padding_id",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    change, argument = BAD[case]
    inputs = draw("causal", CROSS)
    with pytest.raises(ArgumentError, match=rf"^causal: ({argument}): expected .*, got "):
        inputs.call(golden.load_op("causal"), **change())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*EVERYTHING, "everything"])
@with_variants
def test_the_host_does_not_wait_for_the_device(variant: str, options: str) -> None:
    inputs = draw(variant, SELF)
    call = everything() if options == "everything" else {options: EVERYTHING[options]()}
    evaluate(variant, inputs, **call)  # compiles, and loads modules
    with without_waiting():
        evaluate(variant, inputs, **call)
