"""Prompts on paged caches, in both families of kernels: against float64 of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from generated._runtime.core import prompts
from generated._runtime.core.paged_tiles import paged_tiles
from generated._runtime.core.prompts import hopper_rows, is_copied
from generated._runtime.core.row_classes import FEW_ROWS, PagedSizes, row_classes
from generated._runtime.core.tiles import HOPPER, HopperTile
from generated._runtime.device import gl
from generated._runtime.kernels import TRAITS
from generated._runtime.torch.paged import check_caches
from generated._runtime.torch.prompts import tile_of_prompts
from tests.kernels.test_paged import LEGAL, Case, Sizes, draw_case
from tests.support.cases import DEVICE, INTERPRET

pytestmark = pytest.mark.covers(mode="paged", framework="torch")
HALF = (
    Sizes(heads=3, kv_heads=1, dim=16, dim_v=16)
    if INTERPRET
    else Sizes(heads=6, kv_heads=2, dim=128, dim_v=128, dtype=torch.bfloat16)
)
QUERIES = (70, 0, 1, 50, 17) if INTERPRET else (150, 0, 1, 300, 17)
LENGTHS = (200, 60, 70, 30, 64) if INTERPRET else (400, 60, 133, 200, 64)
"""The sequences: a chunk of a prompt, no query, a decoding row, a prompt whose first rows see no key, a few rows."""
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
FAMILIES = ["portable", *([HOPPER] if IS_HOPPER and not INTERPRET else [])]
READS_PAGES = [name for name in LEGAL if TRAITS[name].hopper_reads_pages]


def draw(variant: str, page_size: int, queries: Sequence[int] = QUERIES, lengths: Sequence[int] = LENGTHS) -> Case:
    """A call. In Triton's interpreter keys are not split: a program would merge each row's parts."""
    case = draw_case(variant, page_size, queries, lengths, HALF)
    return replace(case, kwargs=case.kwargs | {"splits": 1}) if INTERPRET else case


def check(case: Case, **others: Any) -> None:
    """Check that the errors of o and lse are at most those of rounding inputs and weights to the dtype."""
    o, lse = case.got(**others)
    want, want_lse = case.expected()
    bound = golden.BOUND[case.q.dtype]
    assert (o.double() - want).abs().max() <= bound * want.abs().max()
    finite = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    torch.testing.assert_close(lse.double()[finite], want_lse[finite], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", LEGAL)
def test_prompts(variant: str, family: str, page_size: int) -> None:
    if family == HOPPER and variant not in READS_PAGES:
        pytest.skip("this variant has no kernel of Hopper's family on pages")
    check(draw(variant, page_size), family=family)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "dims", [(64, 64), (64, 128), (80, 72), (96, 128), (192, 128), (256, 256), (512, 512), (320, 264)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_dims(family: str, dims: tuple[int, int], page_size: int) -> None:
    sizes = Sizes(heads=4, kv_heads=2, dim=dims[0], dim_v=dims[1], dtype=torch.float16)
    check(draw_case("causal", page_size, QUERIES, LENGTHS, sizes), family=family)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_batch(family: str, layout: str) -> None:
    case = draw("window", 32, (40,) * 3 if INTERPRET else (140,) * 3, (40, 0, 150) if INTERPRET else (140, 0, 300))
    if layout == "bshd":
        case = replace(case, q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
    check(case, family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_behind_a_window_are_never_read(family: str) -> None:
    case = draw("window", 16, (70, 1, 90, 80, 64), (170, 5, 133, 400, 64))
    want = case.call(family=family)
    table, k, v = case.kwargs["page_table"].clone(), case.k.clone(), case.v.clone()
    first = [n - q - case.own["size"] + 1 for n, q in zip((170, 5, 133, 400, 64), (70, 1, 90, 80, 64), strict=True)]
    freed = 0
    for b, key in enumerate(first):
        for page in range(max(key, 0) // 16):
            k[table[b, page]] = v[table[b, page]] = float("nan")
            table[b, page] = -1
            freed += 1
    assert freed > 0
    got = replace(case, k=k, v=v).call(family=family, page_table=table)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_other_strides(family: str) -> None:
    """Heads before slots in memory, keys beside values in one tensor, and a flat table."""
    case = draw("causal", 64)
    want = case.call(family=family)
    k = case.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(replace(case, k=k).call(family=family)[0], want[0])
    both = torch.stack((case.k, case.v), 1)
    assert torch.equal(replace(case, k=both[:, 0], v=both[:, 1]).call(family=family)[0], want[0])
    table = case.kwargs["page_table"]
    pages = [-(-n // 64) for n in LENGTHS]
    flat = torch.cat([row[:n] for row, n in zip(table, pages, strict=True)])
    starts = torch.tensor([0, *pages], device=DEVICE).cumsum(0)
    assert torch.equal(case.call(family=family, page_table=flat, page_starts=starts)[0], want[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_serves_every_layer(family: str) -> None:
    case = draw("causal", 32)
    op: Any = golden.load_op("causal")
    plan = op.plan(case.q, case.k, family=family, **case.kwargs)
    assert torch.equal(case.call(schedule=plan, family=family)[0], case.call(family=family)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_same_bits_in_any_batch(family: str) -> None:
    case = draw("alibi", 16)
    want, want_lse = case.call(family=family)
    alone = {
        "page_table": case.kwargs["page_table"][:1],
        "kv_lengths": case.kwargs["kv_lengths"][:1],
        "cu_seqlens_q": case.kwargs["cu_seqlens_q"][:2],
        "max_seqlen_q": QUERIES[0],
    }
    o, lse = replace(case, q=case.q[: QUERIES[0]]).call(family=family, **alone)
    assert torch.equal(o, want[: QUERIES[0]])
    assert torch.equal(lse, want_lse[:, : QUERIES[0]])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_and_repeated_calls(family: str) -> None:
    case = draw("causal", 16)
    op: Any = golden.load_op("causal")
    want = case.call(family=family)[0]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = op.plan(q, k, family=family, **case.kwargs)
        found: Tensor = op(q, k, v, family=family, schedule=plan, **case.kwargs)
        return found

    # From the third call of a kind on, only its launches are repeated.
    for _ in range(4):
        assert torch.equal(step(case.q, case.k, case.v), want)
    assert torch.equal(torch.compile(step, fullgraph=True)(case.q, case.k, case.v), want)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_replays_with_other_lengths(family: str) -> None:
    case = draw("causal", 16)
    lengths, begins = case.kwargs["kv_lengths"].clone(), case.kwargs["cu_seqlens_q"].clone()
    op: Any = golden.load_op("causal")

    def step() -> Tensor:
        kwargs = case.kwargs | {"kv_lengths": lengths, "cu_seqlens_q": begins, "max_seqlen_q": 468}
        found: Tensor = op(case.q, case.k, case.v, family=family, **kwargs)
        return found

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for others in ((0, 150, 150, 151, 451, 468), (0, 100, 110, 200, 300, 468)):
        begins.copy_(torch.tensor(others))
        for change in (LENGTHS, (160, 60, 100, 199, 1)):
            lengths.copy_(torch.tensor(change))
            graph.replay()
            assert torch.equal(o, step())


# --------------------------------------------------------------------------------------------------- choice of kernels

TILE = HopperTile(128, 128, 8, 2)


def sizes_of(lengths: Sequence[int], group: int = 4, tile: HopperTile | None = TILE, rows: int = 1056) -> PagedSizes:
    return PagedSizes(
        packed=True,
        num_seqs=len(lengths),
        most_queries=max(lengths),
        total_queries=sum(lengths),
        group=group,
        num_kv_heads=8,
        most_keys=4096,
        itemsize=2,
        kv_itemsize=2,
        head_dim=128,
        processors=132,
        tiles=paged_tiles("causal", "sm_90", "", "bfloat16", "bfloat16", 128, group),
        are_alike=len(set(lengths)) == 1,
        hopper_tile=tile,
        hopper_rows=rows,
    )


@pytest.mark.parametrize(
    ("lengths", "group", "classes"),
    [
        ((1, 1), 4, [(1, 16, False)]),
        ((2048,), 4, [(1, None, True)]),
        ((100, 100), 4, [(1, 1055, False)]),
        ((1, 2048), 4, [(1, 16, False), (17, 64, False), (65, 1055, False), (1056, None, True)]),
        ((1, 30), 4, [(1, 16, False), (17, 64, False), (65, 1055, False)]),
        ((1, 2048), 70, [(1, 1055, False), (1056, None, True)]),
    ],
)
def test_classes(lengths: Sequence[int], group: int, classes: list[tuple[int, int | None, bool]]) -> None:
    found = row_classes(sizes_of(lengths, group), None)
    assert all(each.tile.block_m == 128 for each in found if each.has_prompts)
    limits = [(each.first_rows, each.last_rows, each.tile.family == HOPPER) for each in found]
    assert limits == [(first, limits[-1][1] if last is None else last, own) for first, last, own in classes]


def test_classes_without_hopper() -> None:
    *few, many = row_classes(sizes_of((1, 2048), tile=None), None)
    assert [each.has_prompts for each in few] == [False, False]
    assert many.has_prompts
    assert many.first_rows == FEW_ROWS + 1


def test_prompts_that_occupy_half_the_chip_run_hopper() -> None:
    assert hopper_rows(None, 4, 32, 132, (128, 128)) == 4 * 132 * 128 // 64
    assert hopper_rows(None, 1, 256, 132, (64, 128)) == 128
    assert hopper_rows(HOPPER, 4, 32, 132, (512, 512)) == FEW_ROWS + 1


def test_the_host_counts_rows_as_descriptors_do() -> None:
    assert gl.MOST_ROWS.value == prompts.MOST_ROWS


def test_prompts_of_more_than_256_columns_run_hopper_sooner() -> None:
    assert hopper_rows(None, 8, 16, 132, (512, 512)) == 8 * (132 * 3 * 64 // 160)
    assert hopper_rows(None, 1, 256, 132, (320, 72)) == 64


@pytest.mark.parametrize(
    ("dim", "dim_v", "is_shared", "rows"),
    [
        (256, 256, False, 128),
        *((*dims, False, 64) for dims in ((512, 512), (320, 264), (512, 72), (320, 256))),
        (512, 40, False, None),
        (320, 320, True, 64),
        *((*dims, True, None) for dims in ((320, 256), (576, 512))),
    ],
)
def test_tiles_of_prompts(
    monkeypatch: pytest.MonkeyPatch, dim: int, dim_v: int, is_shared: bool, rows: int | None
) -> None:
    """Latent attention has a kernel of its own, which no fixed tile of prompts replaces."""
    monkeypatch.setattr("generated._runtime.torch.prompts.arch_of", lambda _: "sm_90")
    q, k = torch.zeros(1, 8, 70, dim, dtype=torch.float16), torch.zeros(4, 64, 1, dim, dtype=torch.float16)
    v = k[..., :dim_v] if is_shared else torch.zeros(4, 64, 1, dim_v, dtype=torch.float16)
    table, lengths = torch.arange(4)[None], torch.tensor([200])
    call = check_caches("causal", q, k, v, None, "bhsd", None, table, None, lengths, None, None, None)
    tile = tile_of_prompts("causal", call)
    assert (None if tile is None else tile.block_m) == rows


@pytest.mark.parametrize(
    ("strides", "count", "expected"),
    [
        ((64 * 8 * 128, 128, 8 * 128), 1000, True),
        ((64 * 8 * 128, 64 * 128, 128), 1000, True),  # heads before slots
        ((64 * 8 * 128 + 8, 128, 8 * 128), 1000, False),  # the page stride is no multiple of rows
        ((64 * 8 * 100, 100, 8 * 100), 1000, False),  # heads not at multiples of 16 bytes
        ((64 * 8 * 128, 128, 8 * 128), 2**24, False),  # more rows than a descriptor can count
        ((0, 128, 0), 1, False),
    ],
)
def test_which_strides_are_copied(strides: tuple[int, int, int], count: int, expected: bool) -> None:
    assert is_copied(strides, count, 2) == expected


def test_a_family_that_cannot_run_is_refused() -> None:
    case = draw("document", 16)
    with pytest.raises(ValueError, match="document: family: expected None or 'portable' in this call on paged caches"):
        case.call(family=HOPPER)
    with pytest.raises(ValueError, match="family: expected None or one of 'portable', 'hopper', got 'fast'"):
        case.call(family="fast")
