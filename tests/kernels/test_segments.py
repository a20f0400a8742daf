"""Segment ids, positions and lengths of a dense batch: which pairs they leave, what the mask and score then read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from generated._runtime.core.checks import ArgumentError
from tests.support.cases import (
    DEVICE,
    DTYPES,
    MANIFEST,
    VARIANTS,
    Shape,
    assert_same,
    draw,
    evaluate,
    tiles,
    with_frameworks,
    with_variants,
)
from tests.support.judge import check_call, check_results
from tests.support.packings import Packing
from tests.support.segments import BY_ROW, restarting

pytestmark = pytest.mark.covers(mode="segmented", family="portable", dtype="float16", framework="torch")

BATCH, LENGTH, KEYS = 2, 70, 90
SELF = Shape(batch=BATCH, q_len=LENGTH, group=1, dim=32)
CROSS = Shape(batch=BATCH, q_len=LENGTH, kv_len=KEYS, group=1, dim=32)
# Several blocks along both axes.
TILES = tiles(32, 32)
with_kinds = pytest.mark.parametrize("variant", ["causal", "window", "alibi", "softcap", "forgetting", "gpt_oss"])
with_positions = pytest.mark.parametrize("variant", ["causal", "window", "alibi"])


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def runs(*ids: int, length: int = LENGTH, shift: int = 0) -> list[int]:
    """One id behind the other, each for as long, but for the first."""
    each = length // len(ids)
    row = [ids[0]] * (length - each * len(ids) + shift) + [x for x in ids for _ in range(each)]
    return row[:length]


def randomly(low: int, high: int, length: int = LENGTH) -> Tensor:
    """Any order: no block of queries is free of any id."""
    return ints(torch.randint(low, high, (BATCH, length), generator=torch.Generator().manual_seed(length)))


IDS: dict[str, Callable[[], Tensor]] = {
    "one": lambda: ints([[7] * LENGTH] * BATCH),
    "documents": lambda: ints([runs(0, 1, 2, 3), runs(0, 1, shift=9)]),
    "back_again": lambda: ints([runs(0, 1, 0, 0), runs(5, -7, 5, 2**30, -7)]),
    "falling": lambda: ints([runs(3, 2, 1), runs(-2, -3, -9)]),
    "padded": lambda: ints([runs(0, 0, -1), runs(-1, 4, -1, 4)]),
    "random": lambda: randomly(-3, 3),
    "all_padding": lambda: ints([[-1] * LENGTH, runs(0, 1)]),
}


@pytest.mark.parametrize("ids", IDS)
@with_kinds
def test_segments(variant: str, ids: str) -> None:
    """The queries' ids serve for the keys."""
    check_call(variant, draw(variant, SELF, DTYPES[0]), config=TILES, q_segment_ids=IDS[ids]())


@with_frameworks
@with_variants
def test_segments_of_every_variant(variant: str, framework: str) -> None:
    """With ids of their own for the keys, of which some no query has."""
    ids: dict[str, Any] = {"q_segment_ids": randomly(-2, 2), "kv_segment_ids": randomly(-2, 3, KEYS)}
    check_call(variant, draw(variant, CROSS, DTYPES[0]), framework=framework, **ids)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES[:-1]], ids=str)
@pytest.mark.parametrize("group", [3, 4])
def test_segments_with_head_groups(group: int, dtype: torch.dtype) -> None:
    inputs = draw("alibi", replace(SELF, kv_heads=2, group=group, dim=80, dim_v=48), dtype)
    check_call("alibi", inputs, q_segment_ids=IDS["back_again"]())


@pytest.mark.parametrize("variant", ["causal", "forgetting", "relative_bias"])
def test_segments_with_head_dims_in_parts(variant: str) -> None:
    inputs = draw(variant, replace(SELF, dim=192, dim_v=72), DTYPES[0])
    check_call(variant, inputs, q_segment_ids=IDS["falling"]())


@pytest.mark.parametrize("padding_id", [-1, 0, 5])
@pytest.mark.parametrize("variant", ["causal", "forgetting", "gpt_oss", "full"])
def test_padding(variant: str, padding_id: int) -> None:
    """A padding query sees no key, not even padding; no gradient comes from it, and none goes to a padding key."""
    ids = IDS["back_again"]()
    ids[:, 3:9] = -1
    inputs = draw(variant, SELF, DTYPES[0])
    got = check_call(variant, inputs, q_segment_ids=ids, padding_id=padding_id)
    padding = (ids == padding_id)[:, None, :].expand_as(got["lse"])
    assert padding.any()
    for name in ("o", "dq"):
        assert (got[name][padding] == 0).all(), name
    no_key = inputs.tensors["sink"].detach()[:, None] if MANIFEST[variant]["sink"] else float("-inf")
    want = torch.zeros_like(got["lse"]) + no_key
    torch.testing.assert_close(got["lse"][padding], want[padding])
    for name in ("dk", "dv"):
        assert (got[name][padding[:, : got[name].shape[1]]] == 0).all(), name


@pytest.mark.parametrize("q_offset", [13, "end", "tensor"])
@with_kinds
def test_segments_and_offsets(variant: str, q_offset: int | str) -> None:
    inputs = draw(variant, CROSS, DTYPES[0], positions=LENGTH + 30)
    # Few ids: most rows have many keys.
    ids: dict[str, Any] = {"q_segment_ids": randomly(-1, 2), "kv_segment_ids": randomly(-1, 2, KEYS)}
    offset = ints([30, -20]) if q_offset == "tensor" else q_offset
    check_call(variant, inputs, config=TILES, q_offset=offset, **ids)


@with_kinds
def test_segments_of_runs_are_packed_sequences(variant: str) -> None:
    """What makes a packed call of a batch row: ids of runs, and positions that start again with each."""
    packing = Packing.of(9, 40, 70)
    inputs = draw(variant, replace(SELF, batch=1), DTYPES[0])
    lengths = [rows.stop - rows.start for rows in packing.rows]
    ids = ints([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = ints([[place for length in lengths for place in range(length)]])
    got = evaluate(variant, inputs, q_segment_ids=ids, q_positions=positions)
    want = evaluate(variant, packed(inputs), framework="torch", **packing.options())
    errors = golden.relative_errors(packed_results(got), want)
    # Both are rounded, hence twice the bound.
    assert max(errors.values()) <= 2 * golden.BOUND[DTYPES[0]], errors


def packed(inputs: Inputs) -> Inputs:
    """The first batch row as a packed call."""

    def first(x: Tensor) -> Tensor:
        return x.detach()[0].transpose(0, 1).contiguous().requires_grad_(x.requires_grad)

    own = {name: x.detach()[0].requires_grad_() if name == "g" else x for name, x in inputs.tensors.items()}
    return replace(
        inputs,
        q=first(inputs.q),
        k=first(inputs.k),
        v=first(inputs.v),
        do=first(inputs.do),
        dlse=inputs.dlse[0],
        tensors=own,
    )


def packed_results(got: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results of a batch of one in a packed call's shapes."""
    tokens = {name: got[name][0].transpose(0, 1) for name in ("o", "dq", "dk", "dv")}
    return got | tokens | {name: x[0] for name, x in got.items() if name in ("lse", "dg")}


def shuffled(inputs: Inputs, queries: Tensor, keys: Tensor) -> Inputs:
    """The same tokens in other orders, `[B, Sq]` and `[B, Skv]`."""

    def moved(x: Tensor, order: Tensor) -> Tensor:
        places = order[:, None, :, None].expand_as(x)
        return x.detach().gather(2, places).requires_grad_(x.requires_grad)

    return replace(
        inputs,
        q=moved(inputs.q, queries),
        k=moved(inputs.k, keys),
        v=moved(inputs.v, keys),
        do=moved(inputs.do, queries),
        dlse=inputs.dlse.gather(2, queries[:, None].expand_as(inputs.dlse)),
    )


def orders(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.stack([torch.randperm(length, generator=generator) for _ in range(BATCH)]).to(DEVICE)


@pytest.mark.parametrize("shape", [SELF, CROSS], ids=str)
@with_positions
def test_shuffled_tokens_with_their_positions(variant: str, shape: Shape) -> None:
    """The same as in order, each result where its token went."""
    inputs = draw(variant, shape, DTYPES[0])
    queries = orders(shape.q_len)
    keys = queries if shape is SELF else orders(shape.keys)
    options = {"q_positions": queries.int()} | ({} if shape is SELF else {"kv_positions": keys.int()})
    moved = shuffled(inputs, queries, keys)
    got = check_call(variant, moved, config=TILES, **options)
    want = evaluate(variant, inputs)
    for name in ("o", "lse", "dq", "dk", "dv"):
        order = (keys if name in ("dk", "dv") else queries)[:, None, :]
        places = order.expand_as(want[name]) if name == "lse" else order[..., None].expand_as(want[name])
        want[name] = want[name].gather(2, places)
    errors = golden.relative_errors(got, want)
    # Both are rounded, hence twice the bound.
    assert max(errors.values()) <= 2 * golden.BOUND[DTYPES[0]], errors


POSITIONS: dict[str, Callable[[], Tensor]] = {
    "restarting": lambda: ints([[i % 30 for i in range(LENGTH)], [i % 41 for i in range(LENGTH)]]),
    "falling": lambda: ints([range(LENGTH, 0, -1)] * BATCH),
    "equal": lambda: ints([[3] * LENGTH] * BATCH),
    "apart": lambda: ints([range(0, 5 * LENGTH, 5), range(-20, 3 * LENGTH - 20, 3)]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@with_positions
def test_positions(variant: str, positions: str) -> None:
    check_call(variant, draw(variant, SELF, DTYPES[0]), config=TILES, q_positions=POSITIONS[positions]())


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - set(BY_ROW)))
def test_positions_of_every_variant(variant: str) -> None:
    options = {"q_positions": POSITIONS["restarting"](), "kv_positions": randomly(0, LENGTH, KEYS)}
    check_call(variant, draw(variant, CROSS, DTYPES[0]), **options)


@pytest.mark.parametrize("variant", BY_ROW)
def test_positions_of_what_is_read_by_row(variant: str) -> None:
    """Each segment's own, in order: a log-decay, documents and dropout stay with the row and the key."""
    ids = IDS["documents"]()
    check_call(variant, draw(variant, SELF, DTYPES[0]), q_segment_ids=ids, q_positions=restarted(ids))


@pytest.mark.parametrize("q_offset", [0, "end"])
@with_variants
def test_key_lengths(variant: str, q_offset: int | str) -> None:
    shape = Shape(batch=4, q_len=40, kv_len=KEYS, group=1, dim=32)
    inputs = draw(variant, shape, DTYPES[0])
    lengths = [0, 37, 64, KEYS]
    got = check_call(variant, inputs, kv_lengths=ints(lengths), q_offset=q_offset)
    for row, length in enumerate(lengths):
        for name in ("dk", "dv"):
            assert (got[name][row, :, length:] == 0).all(), name


@pytest.mark.parametrize("q_offset", [0, "end"])
@with_kinds
def test_key_lengths_cut_keys_off(variant: str, q_offset: int | str) -> None:
    """As if a batch row had no more keys."""
    inputs = draw(variant, replace(CROSS, q_len=40), DTYPES[0])
    lengths = [37, 64]
    got = evaluate(variant, inputs, kv_lengths=ints(lengths), q_offset=q_offset)
    shared = [name for name, x in inputs.tensors.items() if x.requires_grad and name != "g"]
    for row, length in enumerate(lengths):

        def cut(x: Tensor, row: int = row, length: int | None = None) -> Tensor:
            return x.detach()[row : row + 1, :, :length].clone().requires_grad_(x.requires_grad)

        own = {name: x.detach() if name in shared else x for name, x in inputs.tensors.items()}
        if "g" in own:
            own["g"] = own["g"].detach()[row : row + 1].clone().requires_grad_()
        alone = replace(
            inputs,
            q=cut(inputs.q),
            k=cut(inputs.k, length=length),
            v=cut(inputs.v, length=length),
            do=cut(inputs.do),
            dlse=cut(inputs.dlse),
            tensors=own,
        )
        of_row = {name: x[row : row + 1] for name, x in got.items() if name.removeprefix("d") not in shared}
        of_row |= {name: of_row[name][:, :, :length] for name in ("dk", "dv")}
        check_results(variant, alone, of_row, q_offset=q_offset)


@with_variants
def test_all_together(variant: str) -> None:
    inputs = draw(variant, CROSS, DTYPES[0])
    rows = {"q_positions": ints([range(LENGTH)] * BATCH), "kv_positions": ints([range(KEYS)] * BATCH)}
    any_order = {"q_positions": POSITIONS["apart"](), "kv_positions": randomly(0, 2 * LENGTH, KEYS)}
    check_call(
        variant,
        inputs,
        q_segment_ids=randomly(-1, 2),
        kv_segment_ids=randomly(-1, 2, KEYS),
        **(rows if variant in BY_ROW else any_order),
        kv_lengths=ints([KEYS, 80]),
        padding_id=1,
    )


@pytest.mark.parametrize("variant", ["causal", "document", "gpt_oss"])
def test_segments_lengths_and_offsets(variant: str) -> None:
    """With `"end"` the last query meets the last key there is."""
    options = {"q_segment_ids": IDS["padded"](), "kv_segment_ids": randomly(-1, 3, KEYS), "kv_lengths": ints([80, 51])}
    check_call(variant, draw(variant, CROSS, DTYPES[0]), config=TILES, q_offset="end", **options)


@pytest.mark.parametrize("hidden", ["segment", "length"])
@pytest.mark.parametrize("variant", ["causal", "window", "forgetting"])
def test_hidden_keys_are_not_seen(variant: str, hidden: str) -> None:
    """Whatever they hold, every bit of the other rows stays. Finite: in a tile, masked infinity times 0 is NaN."""
    inputs = draw(variant, SELF, DTYPES[0])
    ids = IDS["back_again"]()
    lengths = ints([50, 64])
    options = {"q_segment_ids": ids} if hidden == "segment" else {"kv_lengths": lengths}
    hide = ids == ids[:, -1:] if hidden == "segment" else torch.arange(LENGTH, device=DEVICE) >= lengths[:, None]
    want = evaluate(variant, inputs, config=TILES, **options)

    def large(x: Tensor) -> Tensor:
        return x.detach().masked_fill(hide[:, None, :, None], 1e4).requires_grad_()

    spoilt = replace(inputs, k=large(inputs.k), v=large(inputs.v))
    got = evaluate(variant, spoilt, config=TILES, **options)
    seen = (
        ~hide[:, None].expand(BATCH, inputs.q.shape[1], -1) if hidden == "segment" else torch.ones_like(got["lse"]) > 0
    )
    for name in ("o", "lse", "dq"):
        assert torch.equal(got[name][seen], want[name][seen]), name
    keys = ~hide[:, None].expand(BATCH, inputs.k.shape[1], -1)
    for name in ("dk", "dv"):
        assert torch.equal(got[name][keys], want[name][keys]), name


def restarted(ids: Tensor) -> Tensor:
    """Positions that start again with each run of ids."""
    return ints([restarting(row) for row in ids.tolist()])


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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(variant, inputs, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
