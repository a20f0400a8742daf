"""Prompts on paged caches in Hopper's family without a GPU; `test_hopper_emulated` tests dense calls."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.testing import golden
from emulator import DeadlockError, EmulationError, Kernel, Timing
from tests.kernels.hopper.test_hopper_emulated import Sources, check_lse, check_output, emulated_kernel, with_timings
from tests.kernels.test_paged import Case, Sizes, draw_case
from tests.support.cases import variants_where

PACKAGE = "generated"
VARIANTS = variants_where(
    lambda variant: (
        importlib.util.find_spec(f"{PACKAGE}.{variant}.paged") is not None
        and importlib.util.find_spec(f"{PACKAGE}.{variant}.paged.hopper_fwd") is not None
    )
)
SIZES = Sizes(heads=2, kv_heads=1, dim=64, dim_v=64, dtype=torch.float16)
QUERIES = (0, 150, 70, 1, 200)
LENGTHS = (60, 333, 70, 130, 40)
"""Most queries of the last sequence see nothing. The first and the fourth decode, in portable kernels."""

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.covers(mode="paged", family="hopper", direction="forward", dtype="float16", framework="torch"),
]


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
    stem: str = "hopper_fwd",
) -> Kernel:
    """Calls of `variant` launch the returned kernel for prompts, as on an sm_90 with three multiprocessors."""
    module = importlib.import_module(f"{PACKAGE}.{variant}.paged.hopper_fwd")
    assert module.__file__ is not None
    name = f"{variant}_paged_{stem}"
    kernel = emulated_kernel(Path(module.__file__), name, timing, mutate)
    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.backend.multiprocessors", lambda _: 3)
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.prompts.arch_of", lambda _: "sm_90")
    return kernel


def check(case: Case, **others: Any) -> None:
    o, lse = case.got(family="hopper", **others)
    want, want_lse = case.expected()
    check_lse(lse, want_lse)
    check_output(o, want, want_lse.T)


@pytest.mark.parametrize("page_size", [16, 48, 128, 256])
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward(monkeypatch: pytest.MonkeyPatch, variant: str, page_size: int) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(draw_case(variant, page_size, QUERIES, LENGTHS, SIZES))
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    check(draw_case(variant, 64, QUERIES, LENGTHS, SIZES))
    assert kernel.launches == 1


WIDE = Sizes(heads=6, kv_heads=2, dim=96, dim_v=128, dtype=torch.float16)


@with_timings
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_dense_batch(monkeypatch: pytest.MonkeyPatch, timing: Timing, layout: str) -> None:
    case = draw_case("window", 32, (140,) * 3, (140, 0, 300), WIDE)
    emulate(monkeypatch, "window", timing)
    if layout == "bshd":
        # The memory order of that layout; `Case` calls the op with heads before tokens.
        case = replace(case, q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
    check(case)


@with_timings
@pytest.mark.parametrize(("dim", "dim_v"), [(80, 72), (40, 48), (192, 128), (72, 168)])
def test_head_dims(monkeypatch: pytest.MonkeyPatch, timing: Timing, dim: int, dim_v: int) -> None:
    emulate(monkeypatch, "causal", timing)
    check(draw_case("causal", 64, (70, 0, 130), (70, 40, 333), replace(WIDE, dim=dim, dim_v=dim_v)))


@pytest.mark.parametrize(("page_size", "dim", "dim_v"), [(16, 512, 512), (48, 304, 320), (64, 512, 72), (256, 40, 264)])
@pytest.mark.parametrize("variant", ["causal", "window", "gpt_oss"])
def test_more_than_256_columns(
    monkeypatch: pytest.MonkeyPatch, variant: str, page_size: int, dim: int, dim_v: int
) -> None:
    """Tiles have 64 rows and 32 keys."""
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, stem="hopper_fwd_wide")
    check(draw_case(variant, page_size, (30, 0, 50), (40, 40, 110), replace(WIDE, dim=dim, dim_v=dim_v)))
    assert kernel.launches == 1


def test_more_than_256_columns_with_early_products(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.EARLY_PRODUCTS, stem="hopper_fwd_wide")
    check(draw_case("causal", 32, (100,) * 2, (160, 100), replace(WIDE, dim=512, dim_v=512)))
    assert kernel.launches == 1


def test_pages_behind_a_window_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, "window", Timing.LATE_PRODUCTS)
    case = replace(draw_case("window", 16, (70, 130), (300, 400), SIZES), own={"size": 40})
    want = case.call(family="hopper")
    table, k, v = case.kwargs["page_table"].clone(), case.k.clone(), case.v.clone()
    for b, (queries, keys) in enumerate(((70, 300), (130, 400))):
        for page in range((keys - queries - case.own["size"] + 1) // 16):
            k[table[b, page]] = v[table[b, page]] = float("nan")
            table[b, page] = -1
    assert (table[:, 0] == -1).all()
    got = replace(case, k=k, v=v).call(family="hopper", page_table=table)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("strides", ["heads before slots", "values beside keys", "flat table"])
def test_other_memory(monkeypatch: pytest.MonkeyPatch, strides: str) -> None:
    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw_case("causal", 64, (150, 70), (333, 70), WIDE)
    want = case.call(family="hopper")[0]
    others: dict[str, Any] = {}
    if strides == "heads before slots":
        case = replace(case, k=case.k.transpose(1, 2).contiguous().transpose(1, 2))
    elif strides == "values beside keys":
        both = torch.cat((case.v, case.k), 3)
        case = replace(case, v=both[..., : WIDE.dim_v], k=both[..., WIDE.dim_v :])
    else:
        table = case.kwargs["page_table"]
        others = {"page_table": torch.cat((table[0, :6], table[1, :2])), "page_starts": torch.tensor([0, 6, 8])}
    assert torch.equal(case.call(family="hopper", **others)[0], want)


def test_a_traced_step_runs_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan and a call as operators: the fake tensors of their tables have the right properties."""
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw_case("causal", 16, (150, 70, 1), (333, 70, 20), SIZES)
    op: Any = golden.load_op("causal")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan = op.plan(q, k, family="hopper", **case.kwargs)
        found: torch.Tensor = op(q, k, v, family="hopper", schedule=plan, **case.kwargs)
        return found

    want = step(case.q, case.k, case.v)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(case.q, case.k, case.v), want)
    assert kernel.launches == 2


TILE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
LONG = {"block_m": 128, "block_n": 256, "num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"k_scale": 2.0, "v_scale": 2.0}, "family: .*its caches have no scales"),
        ({"config": {"paged_fwd": TILE}}, "block_m 128, block_n up to 128 and num_warps 8 .*, got 64, 64 and 4"),
        ({"config": {"paged_fwd": LONG}}, "num_warps 8 in the family 'hopper', got 128, 256 and 8"),
    ],
)
def test_calls_that_the_family_cannot_run(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], message: str
) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw_case("causal", 16, (150, 70), (333, 70), SIZES)
    with pytest.raises(ValueError, match=message):
        case.call(family="hopper", **others)
    assert kernel.launches == 0


@pytest.mark.parametrize("page_size", [8, 12])
def test_small_pages_are_refused(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    with pytest.raises(ValueError, match=f"pages of 16 keys and more, a multiple of 8, not of {page_size}"):
        draw_case("causal", page_size, (150, 70), (333, 70), SIZES).call(family="hopper")


def test_a_plan_is_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS)
    case = draw_case("causal", 16, (150, 70), (333, 70), SIZES)
    op: Any = golden.load_op("causal")
    plan = op.plan(case.q, case.k, case.v, family="hopper", **case.kwargs)
    want = case.call(family="hopper")
    assert torch.equal(case.call(family="hopper", schedule=plan)[0], want[0])
    assert kernel.launches == 2
    with pytest.raises(ValueError, match="schedule: expected one made for family portable"):
        case.call(family="portable", schedule=plan)
    # The kernels of a call may depend on arguments that a plan does not get.
    monkeypatch.setattr(f"{PACKAGE}._runtime.torch.paged.tile_of_prompts", lambda *_: None)
    with pytest.raises(ValueError, match="schedule: expected a plan for the kernels of this call, portable"):
        case.call(family="hopper", schedule=plan)


MUTATIONS = {
    "no clip at the end": ("gl.minimum(self.end - (key - slot), PAGE_SIZE)", "PAGE_SIZE"),
    "the page of the block's first key": ("rows.page(key + ROWS, PAGE_SIZE)", "rows.page(start_n, PAGE_SIZE)"),
    "pieces in the order of their copies": ("(c * COUNT + i)", "(i * self.column_blocks + c)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    old, new = MUTATIONS[name]

    def mutate(sources: Sources) -> Sources:
        assert any(old in source for source in sources.values()), "the kernel has changed: so must this mutation"
        return {module: source.replace(old, new) for module, source in sources.items()}

    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, mutate)
    with pytest.raises((AssertionError, EmulationError)):
        check(draw_case("causal", 16, (150,), (200,), WIDE))


def test_no_wait_for_an_empty_stage_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "        mbarrier.wait(ring.empty.index(stage), (lap & 1) ^ 1)\n"

    def mutate(sources: Sources) -> Sources:
        assert sources["gl_pages"].count(old) == 2
        return {**sources, "gl_pages": sources["gl_pages"].replace(old, "")}

    emulate(monkeypatch, "causal", Timing.LATE_PRODUCTS, mutate)
    with pytest.raises((DeadlockError, EmulationError)):
        check(draw_case("causal", 16, (150,), (600,), WIDE))
