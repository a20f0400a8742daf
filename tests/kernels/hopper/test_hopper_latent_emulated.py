"""Latent attention in Hopper's family without a GPU; `test_hopper_emulated` tests dense calls."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from emulator import DeadlockError, EmulationError, Kernel, Timing
from generated import torch as ops
from tests.kernels.hopper.test_hopper_emulated import Sources, emulated_kernel, with_timings
from tests.support.cases import variants_where

PACKAGE = "generated"
VARIANTS = variants_where(lambda name: Path(PACKAGE, name, "paged", "hopper_latent.py").is_file())
SCALARS: dict[str, dict[str, Any]] = {
    "window": {"size": 90},
    "band": {"before": 90, "after": 20},
    "prefix_lm": {"length": 70},
}
PROGRAMS = 3
"""The number of programs at once: each computes several splits, and not all the same number."""

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.covers(mode="paged", family="hopper", direction="forward", dtype="float16", framework="torch"),
]


class Case(NamedTuple):
    """A call: q `[B, H, Sq, D]`, and keys of each sequence, which lie in pages among others of NaN.

    `scales`: of the tokens of a cache of 8-bit floats, of keys and of values, `[pages, page size, 1]`.
    """

    q: Tensor
    rows: list[Tensor]
    cache: Tensor
    pages: dict[str, Any]
    dim_v: int
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """What the keys and the values of each sequence are times."""
        if self.scales is None:
            return [(torch.ones(1), torch.ones(1))] * len(self.rows)
        size, found = self.cache.shape[1], []
        for row, pages in zip(self.rows, self.pages["page_table"], strict=True):
            used = pages[: -(-len(row) // size)]
            k, v = (scale[used].flatten()[: len(row), None].double() for scale in self.scales)
            found.append((k, v))
        return found

    def small(self, dtype: torch.dtype, scales: tuple[Tensor, Tensor] | None = None) -> Case:
        """The same call with a cache of 8-bit floats."""
        rows, cache = [row.to(dtype) for row in self.rows], self.cache.to(dtype)
        return self._replace(rows=rows, cache=cache, scales=scales)

    def call(self, variant: str, **others: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = getattr(ops, variant)(
            self.q,
            self.cache,
            self.cache[..., : self.dim_v],
            scale=0.07,
            return_lse=True,
            **self.pages | SCALARS.get(variant, {}) | others,
        )
        return found

    def expected(self, variant: str) -> tuple[Tensor, Tensor]:
        """o and lse of the reference, sequence by sequence, in float64."""
        found = []
        for q, row, (k_factor, v_factor) in zip(self.q.double(), self.rows, self.factors, strict=True):
            keys = (row.double() * k_factor)[None, None].expand(1, q.shape[0], -1, -1)
            values = (row.double() * v_factor)[None, None].expand(1, q.shape[0], -1, -1)[..., : self.dim_v]
            options = SCALARS.get(variant, {}) | {"q_offset": len(row) - q.shape[1]}
            reference = importlib.import_module(f"{PACKAGE}.{variant}.torch_reference").reference
            found.append(reference(q[None], keys, values, scale=0.07, return_lse=True, **options))
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])


def draw(lengths: Sequence[int], heads: int, queries: int, page_size: int, dim: int = 576, dim_v: int = 512) -> Case:
    counts = [-(-length // page_size) for length in lengths]
    free = torch.randperm(sum(counts) + 3)
    cache = torch.full((len(free), page_size, 1, dim), float("nan"), dtype=torch.float16)
    # Entries behind the last page of a sequence may hold anything.
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    rows = []
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count], free = free[:count], free[count:]
        rows.append(torch.randn(length, dim).half())
        for page, piece in zip(table[b].tolist(), rows[-1].split(page_size), strict=False):
            cache[page, : len(piece), 0] = piece
    pages = {"page_table": table, "kv_lengths": torch.tensor(lengths)}
    return Case(torch.randn(len(lengths), heads, queries, dim).half(), rows, cache, pages, dim_v)


def emulate(
    monkeypatch: pytest.MonkeyPatch, variant: str, timing: Timing, mutate: Any = lambda sources: sources
) -> Kernel:
    """Calls of `variant` launch the returned kernel, as on an sm_90 with PROGRAMS multiprocessors."""
    module = importlib.import_module(f"{PACKAGE}.{variant}.paged.hopper_latent")
    assert module.__file__ is not None
    name = f"{variant}_paged_hopper_latent"
    kernel = emulated_kernel(Path(module.__file__), name, timing, mutate)
    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.backend.multiprocessors", lambda _: PROGRAMS)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.backend.copies_by_tma", lambda _: True)
    return kernel


def check(case: Case, variant: str, **others: Any) -> None:
    o, lse = case.call(variant, **others)
    want, want_lse = case.expected(variant)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(o.double(), want.double(), atol=4e-3, rtol=2e-3)


@with_timings
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_of_decoding(monkeypatch: pytest.MonkeyPatch, variant: str, timing: Timing) -> None:
    """The rows of a tile are heads of several tokens, and the last tile is not full."""
    kernel = emulate(monkeypatch, variant, timing)
    check(draw((333, 0, 64, 200), 32, 3, 16), variant)
    assert kernel.launches == 1


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_page_sizes(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    emulate(monkeypatch, "window", Timing.LATE_PRODUCTS)
    check(draw((500, 130), 64, 1, page_size), "window")


@with_timings
@pytest.mark.parametrize("splits", [64, 192, 1])
def test_splits(monkeypatch: pytest.MonkeyPatch, timing: Timing, splits: int) -> None:
    """The sums of several splits are merged, or there is one split and no merge."""
    emulate(monkeypatch, "causal", timing)
    check(draw((230, 70), 128, 1, 64), "causal", splits=splits)


@pytest.mark.parametrize(("dim", "dim_v"), [(288, 256), (528, 512), (320, 256)])
def test_head_dims(monkeypatch: pytest.MonkeyPatch, dim: int, dim_v: int) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    check(draw((150, 40), 64, 2, 64, dim, dim_v), "causal")
    assert kernel.launches == 1


def test_scores_that_keep_rising(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maximum rises by more than 8 in most blocks, of both warpgroups."""
    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((700,), 64, 1, 64)
    for block, row in enumerate(case.rows[0].split(64)):
        row *= 1 + block
        case.cache[case.pages["page_table"][0, block], : len(row), 0] = row
    check(case, "causal")


def test_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed queries, a flat table, and the layout with tokens before heads give the same as the plain call."""
    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((200, 130), 64, 2, 64)
    o, lse = case.call("causal")
    transposed = case._replace(q=case.q.transpose(1, 2).contiguous()).call("causal", layout="bshd")
    assert torch.equal(transposed[0].transpose(1, 2), o)
    assert torch.equal(transposed[1], lse)
    packed = case._replace(q=case.q.transpose(1, 2).flatten(0, 1))
    table = case.pages["page_table"]
    flat = {"page_table": torch.cat((table[0, :4], table[1, :3])), "page_starts": torch.tensor([0, 4, 7])}
    found = packed.call("causal", cu_seqlens_q=torch.tensor([0, 2, 4]), **flat)[0]
    assert torch.equal(found.unflatten(0, (2, 2)).transpose(1, 2), o)


def test_pages_behind_a_window_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "window", Timing.LATE_PRODUCTS)
    case = draw((400, 300), 32, 2, 16)
    want = case.call("window")
    table = case.pages["page_table"].clone()
    for b, row in enumerate(case.rows):
        for page in range((len(row) - 2 - SCALARS["window"]["size"] + 1) // 16):
            case.cache[table[b, page]] = float("nan")
            table[b, page] = -1
    assert (table[:, 0] == -1).all()
    got = case.call("window", page_table=table)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def emulate_bytes(monkeypatch: pytest.MonkeyPatch, variant: str, timing: Timing, **options: Any) -> Kernel:
    """As `emulate`, for caches of 8-bit floats, which no other kernel reads with so many rows."""
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.prompts.arch_of", lambda _: "sm_90")
    return emulate(monkeypatch, variant, timing, **options)


@with_timings
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("variant", ["causal", "window"])
def test_caches_of_8_bits(monkeypatch: pytest.MonkeyPatch, variant: str, dtype: str, timing: Timing) -> None:
    """Each token has scales of its own. Those of values differ so much that weights times them do not fit float16."""
    kernel = emulate_bytes(monkeypatch, variant, timing)
    case = draw((333, 0, 64, 200), 32, 3, 16)
    shape = (*case.cache.shape[:2], 1)
    scales = torch.rand(shape) + 0.5, 10 ** (torch.rand(shape) * 8 - 9)
    case = case.small(getattr(torch, dtype), scales)
    o, lse = case.call(variant, k_scale=scales[0], v_scale=scales[1])
    want, want_lse = case.expected(variant)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(o.double(), want.double(), atol=2e-3 * float(want.abs().max()), rtol=2e-3)
    assert kernel.launches == 1


@pytest.mark.parametrize(("dim", "dim_v", "page_size"), [(288, 256, 24), (528, 512, 64), (320, 256, 8)])
def test_shapes_of_8_bits(monkeypatch: pytest.MonkeyPatch, dim: int, dim_v: int, page_size: int) -> None:
    """A scale for each head, pages of any size, and parts of the columns; the sums of several splits are merged."""
    kernel = emulate_bytes(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((450, 40), 64, 2, page_size, dim, dim_v).small(torch.float8_e4m3fn)
    ones = torch.ones(*case.cache.shape[:2], 1)
    scaled = case._replace(scales=(0.5 * ones, 2 * ones))
    o, lse = case.call("causal", k_scale=torch.tensor([0.5]), v_scale=2.0, splits=128)
    want, want_lse = scaled.expected("causal")
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(o.double(), want.double(), atol=8e-3, rtol=2e-3)
    assert kernel.launches == 1


def test_a_plan_serves_caches_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan knows from the strides of v that it is a part of k; without v it is one for other kernels."""
    kernel = emulate_bytes(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((250, 70), 64, 1, 64).small(torch.float8_e5m2)
    factors = {"k_scale": 1.0, "v_scale": 1.0}
    want = case.call("causal", **factors)
    plan = ops.causal.plan(case.q, case.cache, case.cache[..., :512], **case.pages)
    assert all(torch.equal(x, y) for x, y in zip(case.call("causal", schedule=plan, **factors), want, strict=True))
    assert kernel.launches == 2
    with pytest.raises(ValueError, match="schedule: expected a plan for the kernels of this call"):
        case.call("causal", schedule=ops.causal.plan(case.q, case.cache, **case.pages), **factors)


def test_values_that_only_look_like_columns_of_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_bytes(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((250, 70), 64, 1, 64).small(torch.float8_e5m2)
    others = case.cache.clone()[..., :512]
    with pytest.raises(ValueError, match="causal: v: expected the first columns of k, or family='portable'"):
        ops.causal(case.q, case.cache, others, k_scale=1.0, v_scale=1.0, **case.pages)


def test_bfloat16_queries_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with keys of 8 bits are computed in float16, whose range is smaller than that of bfloat16."""
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.paged.INTERPRET", False)
    emulate_bytes(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((150, 70), 64, 1, 64).small(torch.float8_e4m3fn)
    sizes = 10.0 ** torch.arange(-20, 12, 0.5)
    case = case._replace(q=(case.q * sizes[:, None, None]).bfloat16())
    o, lse = case.call("causal", k_scale=1.0, v_scale=1.0, splits=1)
    want, want_lse = case.expected("causal")
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(o.double(), want.double(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("why", ["family", "values apart", "small pages", "float32"])
def test_other_calls_run_the_portable_kernel(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw((70,), 64, 1, 8 if why == "small pages" else 64)
    if why == "values apart":
        values = case.cache[..., :512].clone()
        ops.causal(case.q, case.cache, values, **case.pages)
    elif why == "float32":
        case._replace(q=case.q.float(), cache=case.cache.float()).call("causal")
    else:
        case.call("causal", **({"family": "portable"} if why == "family" else {}))
    assert kernel.launches == 0


@pytest.mark.parametrize(
    ("old", "new", "timing"),
    [
        ("        mbarrier.wait(exchange.has_queries.index(0), q_turn & 1)\n", "", Timing.LATE_PRODUCTS),
        ("    mbarrier.wait(exchange.has_weights.index(1 - PART), turn & 1)\n", "", Timing.LATE_PRODUCTS),
        ("        mbarrier.wait(self.has_maxima.index(PART), turn & 1)\n", "", Timing.LATE_PRODUCTS),
        ("        mbarrier.wait(self.has_sums.index(1 - PART), q_turn & 1)\n", "", Timing.LATE_PRODUCTS),
        ("        ring.rest.tile(PART).store(weights)\n        fence_async_shared()\n",
         "        ring.rest.tile(PART).store(weights)\n", Timing.LATE_PRODUCTS),
        ("    ring.rest.release(2 * turn + 1 - PART)\n", "", Timing.LATE_PRODUCTS),
        ("    acc = warpgroup_mma_wait(0, deps=(acc,))\n    values.release(2 * turn + PART)\n",
         "    values.release(2 * turn + PART)\n    acc = warpgroup_mma_wait(0, deps=(acc,))\n", Timing.LATE_PRODUCTS),
    ],
)  # fmt: skip
def test_errors_are_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str, timing: Timing) -> None:
    """Kernels with a wait, a fence or a release too few fail here."""

    def mutate(sources: Sources) -> Sources:
        found = sum(source.count(old) for source in sources.values())
        assert found == 1, f"{old!r} {found} times"
        return {name: source.replace(old, new) for name, source in sources.items()}

    emulate(monkeypatch, "causal", timing, mutate)
    with pytest.raises((EmulationError, DeadlockError)):
        check(draw((333, 150), 64, 1, 64), "causal")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        if self.converted:\n            fence_async_shared()\n", ""),
        ("    if i == 0:\n        mbarrier.wait(ring.empty.index(stage), phase ^ 1)\n", ""),
        ("        mbarrier.wait(self.has_largest.index(1 - PART), q_turn & 1)\n", ""),
    ],
)
def test_errors_with_8_bits_are_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Kernels that convert keys with a wait or a fence too few fail here."""

    def mutate(sources: Sources) -> Sources:
        assert sum(source.count(old) for source in sources.values()) == 1, old
        return {name: source.replace(old, new) for name, source in sources.items()}

    # The interpreter computes bfloat16 in float32, for which there is no such kernel.
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.paged.INTERPRET", False)
    emulate_bytes(monkeypatch, "causal", Timing.LATE_PRODUCTS, mutate=mutate)
    case = draw((333, 150), 64, 1, 64)
    case = case.small(torch.float8_e4m3fn)._replace(q=case.q.bfloat16())
    with pytest.raises((EmulationError, DeadlockError)):
        case.call("causal", k_scale=1.0, v_scale=1.0, splits=1)
