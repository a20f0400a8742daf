"""Arguments of calls on paged caches in PyTorch, on the CPU: what is refused, and what autocast does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from codegen.testing import calls
from codegen.testing.golden import load_op
from generated import paging
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated._runtime.torch.paged import check_caches

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")


def small() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q of two queries in two sequences, a cache of six pages, and the other arguments."""
    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn(2, 4, 2, 16, generator=generator), torch.randn(6, 4, 2, 16, generator=generator)
    return q, cache, {"page_table": torch.tensor([[0, 3, -1], [5, 1, 2]]), "kv_lengths": torch.tensor([7, 12])}


# --------------------------------------------------------------------------------------------------------------- pages


def test_pages_beyond_the_cache_are_refused_where_a_query_sees_them() -> None:
    q, cache, given = small()
    op: Any = load_op("window")
    beyond = torch.tensor([[9, 3, -1], [-2, 9, 2]])

    def window(table: Tensor, size: int) -> Tensor:
        o: Tensor = op(q, cache, cache, page_table=table, kv_lengths=given["kv_lengths"], size=size)
        return o

    assert torch.equal(window(beyond, 2), window(torch.tensor([[0, 3, 0], [0, 0, 2]]), 2))
    beyond[0, 0] = 0
    with pytest.raises(
        ArgumentError, match=r"^window: page_table: expected pages from 0 to 5 .*, got -2, 9 in seq.* 1"
    ):
        window(beyond, 7)
    compiled = torch.compile(window, fullgraph=True, backend="aot_eager")
    with pytest.raises(ArgumentError, match=r"page_table: expected pages from 0 to 5 .*, got -2, 9 in sequence 1"):
        compiled(beyond, 7)


def test_pages_of_sequences_without_queries_are_not_looked_at() -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    flat = {"page_table": torch.tensor([0, 3, 9, 1, 2]), "page_starts": torch.tensor([0, 2, 5])}
    arguments = {"kv_lengths": given["kv_lengths"], **flat}
    rows = q[0].transpose(0, 1)
    assert op(rows, cache, cache, cu_seqlens_q=torch.tensor([0, 2, 2]), **arguments).isfinite().all()
    with pytest.raises(ArgumentError, match=r"page_table: expected pages from 0 to 5 .*, got 9 in sequence 1"):
        op(rows, cache, cache, cu_seqlens_q=torch.tensor([0, 1, 2]), **arguments)


def test_a_packed_step_of_no_sequence_has_no_rows() -> None:
    op: Any = load_op("band_bias")
    cache, nothing = torch.zeros(6, 4, 2, 16), torch.zeros(0, dtype=torch.int32)
    pages = {"page_table": nothing.view(0, 3), "kv_lengths": nothing, "cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}
    own = {"bias": torch.zeros(4, 0, 5), "before": 3, "after": 0}
    o, lse = op(torch.zeros(0, 4, 16), cache, cache, return_lse=True, **pages, **own)
    assert o.shape == (0, 4, 16)
    assert lse.shape == (4, 0)


def test_values_that_are_no_numbers_are_no_pages_beyond_the_cache() -> None:
    q, cache, given = small()
    q[0] = float("nan")
    cache[2] = float("nan")
    table = torch.tensor([[9, 3, -1], [-2, 9, 2]])
    o = load_op("window")(q, cache, cache, page_table=table, kv_lengths=given["kv_lengths"], size=2)
    assert o.isnan().all()


def test_a_part_of_a_table_is_read_in_place() -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    wide = torch.full((5, 9), -1, dtype=torch.int32)
    wide[:2, :3] = given["page_table"]
    table = wide[:2, :3]
    plan = op.plan(q, cache, page_table=table, kv_lengths=given["kv_lengths"])
    got = op(q, cache, cache, page_table=table, kv_lengths=given["kv_lengths"], schedule=plan)
    assert torch.equal(got, op(q, cache, cache, **given))
    call = check_caches(
        "causal", q, cache, cache, None, "bhsd", None, table, None, given["kv_lengths"], None, None, None
    )
    assert call.table_stride == 9
    assert call.page_table is not None
    assert call.page_table.data_ptr() == wide.data_ptr()


@pytest.mark.parametrize("variant", ["window", "chunked", "alibi", "forgetting", "band_softcap", "band_mask"])
def test_plans_and_schedules_take_all_keywords_of_the_op(variant: str) -> None:
    q, cache, given = small()
    op: Any = load_op(variant)
    shape = calls.Shape(batch=2, heads=4, kv_heads=2, seq=8, dim=16)
    inputs = calls.draw_inputs(calls.load_manifest()[variant], shape, dtype=torch.float32, device="cpu")
    own: dict[str, Any] = {**inputs.tensors, **inputs.scalars}
    own = {name: x.detach() if isinstance(x, Tensor) else x for name, x in own.items()}
    if variant == "forgetting":
        own = {"g": torch.zeros(6, 4, 4), "g_base": torch.zeros(6, 4)}
    if variant == "band_mask":
        # Arguments of the op's function have other names than the op's keywords.
        own["keep"] = torch.ones(2, 4, q.shape[2], 16, dtype=torch.bool)
    plan = op.plan(q, cache, **given, **own, scale=0.5, k_scale=None)
    o = op(q, cache, cache, **given, **own, scale=0.5, schedule=plan)
    assert torch.equal(o, op(q, cache, cache, **given, **own, scale=0.5))
    with pytest.raises(TypeError, match=rf"{variant}.plan\(\) got an unexpected keyword argument 'slopes'"):
        op.plan(q, cache, **given, **own, slopes=1)


@pytest.mark.parametrize("splits", [None, np.int64(64), 64, torch.tensor(64)])
def test_splits_are_numbers_of_any_kind(splits: Any) -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    assert torch.equal(op(q, cache, cache, **given, splits=splits), op(q, cache, cache, **given))


@pytest.mark.parametrize("variant", ["document", "alibi", "softcap"])
@pytest.mark.parametrize("offset", ["end", 0, 3])
@pytest.mark.parametrize("planned", [False, True])
def test_split_keys_have_the_results_of_dense_calls(variant: str, offset: Any, planned: bool) -> None:
    """Also where a query is behind the last key of its batch row: tensors are read where they are whole."""
    op: Any = load_op(variant)
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    own: dict[str, Any] = {}
    if variant == "document":
        own = {"doc": torch.tensor([[0, 0, 1, 1, 0, *[2] * 35], [3] * 40])}
    if variant == "alibi":
        own = {"slope": torch.rand(4)}
    for lengths in (None, torch.tensor([2, 33]), torch.tensor([0, 40])):
        given = {**own, "kv_lengths": lengths, "q_offset": offset}
        want, lse = op(q, k, v, **given, return_lse=True)
        how = {"schedule": op.plan(q, k, **given)} if planned else {"splits": 16}
        got, split = op(q, k, v, **given, **how, return_lse=True)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(split, lse)


def test_results_on_several_devices_are_not_merged() -> None:
    o, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ArgumentError, match="merge: o: expected device cpu, that of the first o, got meta"):
        paging.merge([(o, lse), (o.to("meta"), lse.to("meta"))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_whose_lse_was_rounded_are_not_merged(dtype: torch.dtype) -> None:
    o, lse = torch.zeros(2, 4, 3, 16, dtype=dtype), torch.zeros(2, 4, 3)
    assert paging.merge([(o, lse.double())])[1].dtype == torch.float64
    with pytest.raises(ArgumentError, match=f"merge: lse: expected dtype float32 or float64, got {dtype}"):
        paging.merge([(o, lse), (o, lse.to(dtype))])


OTHER_PLANS = [
    ({"size": 3}, "one made for scalar size 5, got one made for scalar size 3"),
    ({"q_offset": 4}, "one made for q_offset end, got one made for q_offset 4"),
    ({"q_offset": [4, 4]}, "one made for q_offset end, got one made for q_offset one per sequence"),
]
"""Plans of other parts of the keys than a call with a window of 5 at the end reads, and what the error says."""


@pytest.mark.parametrize(("change", "expected"), OTHER_PLANS)
def test_plans_of_other_keys_are_refused(change: dict[str, Any], expected: str) -> None:
    q, cache, given = small()
    op: Any = load_op("window")
    change = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in change.items()}
    plan = op.plan(q, cache, **{"size": 5, **given, **change})
    op(q, cache, cache, **{"size": 5, **given, **change}, schedule=plan)
    with pytest.raises(ArgumentError, match=f"^window: schedule: expected {expected}$"):
        op(q, cache, cache, **given, size=5, schedule=plan)


@pytest.mark.parametrize("packed", [False, True])
def test_keys_beyond_the_columns_of_a_bias_read_its_last(packed: bool) -> None:
    q, cache, given = small()
    op: Any = load_op("band_bias")
    short = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(1))
    if packed:
        q, short = q.transpose(1, 2).flatten(0, 1), short.transpose(0, 1).flatten(1, 2)
        given["cu_seqlens_q"] = torch.tensor([0, 2, 4])
    whole = torch.cat([short, short[..., -1:].expand(*short.shape[:-1], 9)], -1)
    short_o, whole_o = (op(q, cache, cache, **given, before=20, after=0, bias=x) for x in (short, whole))
    assert torch.equal(short_o, whole_o)


# ------------------------------------------------------------------------------------------------------ bad arguments


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"padding_id": "x"}, "padding_id: expected an int of 32 bits, got 'x'"),
        ({"deterministic": 2}, "deterministic: expected None, True or False, got 2"),
        *(({"k_scale": x}, f"k_scale: expected a finite number of at least 0.0, got {x!r}") for x in (-1.0, NAN, "x")),
        ({"k_scale": float("inf")}, "k_scale: expected a finite number of at least 0.0, got inf"),
        ({"v_scale": 1e39}, r"v_scale: expected a number that float32 holds, got 1e\+39"),
        ({"q": torch.zeros(2, 4, 2, 16).to_sparse()}, "q: expected layout torch.strided, got torch.sparse_coo"),
    ],
)
def test_bad_arguments(change: dict[str, Any], expected: str) -> None:
    q, cache, given = small()
    with pytest.raises(ArgumentError, match=f"^causal: {expected}"):
        load_op("causal")(**{"q": q, "k": cache, "v": cache, **given, **change})


@pytest.mark.parametrize("packed", [False, True])
def test_padding_ids_are_checked_in_calls_without_pages(packed: bool) -> None:
    x = torch.zeros(3, 2, 16) if packed else torch.zeros(1, 2, 3, 16)
    kwargs: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 3])} if packed else {}
    with pytest.raises(ArgumentError, match=r"padding_id: expected an int of 32 bits, got 1\.5"):
        load_op("causal")(x, x, x, padding_id=1.5, **kwargs)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_scale", "g", "g_base"])
def test_derivatives_in_forward_mode_are_refused(name: str) -> None:
    q, cache, given = small()
    arguments = {"q": q, "k": cache, "v": cache, "k_scale": torch.ones(2)}
    arguments |= {"g": torch.zeros(6, 4, 4), "g_base": torch.zeros(6, 4)}
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(NotImplementedError, match=f"forgetting: {name}: derivatives in forward mode"):
            load_op("forgetting")(**arguments, **given)


# --------------------------------------------------------------------------------------------------- dtypes and devices


@pytest.mark.parametrize("of_caches", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_autocast_casts_queries_to_the_dtype_of_caches(of_caches: torch.dtype) -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    cache = cache.to(of_caches)
    scales = {"k_scale": 0.5, "v_scale": 0.5} if of_caches.itemsize == 1 else {}
    of_queries = torch.bfloat16 if scales else of_caches
    want = op(q.to(of_queries), cache, cache, **given, **scales)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            plan = op.plan(q.to(dtype), cache, **given)
            got = op(q.to(dtype).float(), cache, cache, schedule=plan, **given, **scales)
            assert got.dtype == of_queries
            exact = dtype == torch.float32 or of_queries == torch.bfloat16
            assert torch.equal(got, op(q.to(dtype).to(of_queries), cache, cache, **given, **scales))
            assert not exact or torch.equal(got, want)


def test_meta_tensors_have_the_shapes_of_results() -> None:
    q, cache, given = small()
    op: Any = load_op("causal")
    q, cache, given = q.to("meta"), cache.to("meta"), {name: x.to("meta") for name, x in given.items()}
    o, lse = op(q, cache, cache, schedule=op.plan(q, cache, **given), return_lse=True, **given)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:3])


def test_expanded_caches_are_not_written() -> None:
    """Their tokens share memory, so that the last one written would replace the others."""
    k, cache = torch.randn(2, 1, 16), torch.zeros(4, 8, 1, 16)
    expanded = torch.zeros(1, 1, 1, 16).expand(4, 8, 1, 16)
    slots = torch.tensor([0, 9])
    for name, caches in (("k_cache", (expanded, cache)), ("v_cache", (cache, expanded))):
        with pytest.raises(ArgumentError, match=f"append: {name}: expected elements that share no memory"):
            paging.append(k, k, *caches, slots)
    pages = {"page_table": torch.tensor([[0]]), "kv_lengths": torch.tensor([2])}
    sums, base = torch.zeros(1, 1, 2).expand(4, 8, 2), torch.zeros(4, 2)
    with pytest.raises(ArgumentError, match="append_decay: g_cache: expected elements that share no memory"):
        paging.append_decay(torch.zeros(1, 2, 2), sums, base, **pages)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("kind", ["batch", "packed", "flat"])
def test_append_refuses_pages_beyond_the_cache(framework: str, kind: str) -> None:
    """Only pages of new tokens and of the token before them count; a negative page is skipped."""
    asarray: Any = torch.tensor if framework == "torch" else pytest.importorskip("jax.numpy").asarray
    caches = [asarray(torch.zeros(*shape, 4).tolist()) for shape in ((5, 4), (5,))]
    new = {"g": asarray(torch.zeros(2, 1, 4).tolist())}
    if kind == "packed":
        new = {"g": new["g"][:, 0], "cu_seqlens": asarray([0, 1, 2])}

    def append(table: list[list[int]]) -> None:
        rows = {"page_table": asarray(table)}
        if kind == "flat":
            rows = {"page_table": asarray(table[0] + table[1]), "page_starts": asarray([0, 2, 4])}
        paging.append_decay(new["g"], *caches, **rows, kv_lengths=asarray([3, 6]), cu_seqlens=new.get("cu_seqlens"))

    append([[1, 9], [9, 4]])
    append([[1, 9], [3, -1]])
    expected = (
        r"^append_decay: page_table: expected pages below 5 for the tokens that are appended, got 7 in sequence 1$"
    )
    with pytest.raises(ArgumentError, match=expected):
        append([[1, 9], [3, 7]])


def test_too_few_queries_at_most_are_refused_without_reading_where_sequences_begin() -> None:
    """Values on a GPU are not read, as those of fake tensors cannot be."""
    op: Any = load_op("causal")
    with FakeTensorMode():
        q, cache = torch.empty(9, 4, 16), torch.empty(8, 4, 2, 16)
        begins, table = torch.empty(3, dtype=torch.int32), torch.empty(2, 4, dtype=torch.int32)
        pages = {"page_table": table, "kv_lengths": torch.empty(2, dtype=torch.int32), "cu_seqlens_q": begins}
        assert op(q, cache, cache, max_seqlen_q=5, **pages).shape == q.shape
        message = "^causal: max_seqlen_q: expected at least 5, as 2 sequences have the 9 rows of q, got 4$"
        with pytest.raises(ArgumentError, match=message):
            op(q, cache, cache, max_seqlen_q=4, **pages)
