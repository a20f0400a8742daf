"""Packed calls of Hopper's family without a GPU; `test_hopper_emulated` tests dense calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from codegen.testing.golden import Inputs
from emulator import DeadlockError, EmulationError, Kernel, Timing
from tests.kernels.hopper.test_hopper_emulated import (
    FEW,
    KINDS,
    VARIANTS,
    Mutation,
    Sources,
    calls_of,
    check_lse,
    check_output,
    with_timings,
)
from tests.kernels.hopper.test_hopper_emulated import emulate as emulate_mode
from tests.support.judge import reference_of
from tests.support.library_formulas import FORMULAS
from tests.support.packings import MIXED, Packing, draw_packed

NAN, INF = float("nan"), float("inf")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="packed", family="hopper", direction="forward", dtype="float16", framework="torch"),
]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A packed call of an op, whatever the variant."""

    packing: Packing
    q_offset: int | str | tuple[int, ...] = 0
    kv_heads: int = 1
    group: int = 2
    dim: int = 64
    dim_v: int = 0

    def inputs(self, variant: str) -> Inputs:
        inputs = draw_packed(
            variant, self.packing, kv_heads=self.kv_heads, group=self.group, dim=self.dim, dim_v=self.dim_v
        )
        return replace(inputs, q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach())

    def options(self) -> dict[str, Any]:
        offset = self.q_offset
        given = torch.tensor(offset, dtype=torch.int32) if isinstance(offset, tuple) else offset
        return {"q_offset": given, **self.packing.options()}


# Tiles have 128 rows and keys, or 64 keys where head_dim is above 128.
OTHER_LENGTHS = Packing(q=(0, 130, 330, 331), k=(0, 40, 373, 700))
CALLS = {
    "one": Call(packing=Packing.of(300)),
    "cut blocks": Call(packing=Packing.of(200, 533, 661), kv_heads=2),
    "short": Call(packing=Packing.of(15, 16, 16, 100, 300), group=3),
    "whole blocks": Call(packing=Packing.of(128, 512, 768), group=1),
    "the longest in the middle": Call(packing=Packing.of(60, 560, 700), group=1),
    "other lengths": Call(packing=OTHER_LENGTHS, q_offset="end"),
    "an offset per sequence": Call(packing=OTHER_LENGTHS, q_offset=(-70, 90, 200), group=1),
    "rows without keys": Call(packing=OTHER_LENGTHS, q_offset=-150, kv_heads=2, group=1),
    "none of some": Call(packing=MIXED, q_offset="end"),
    "more sequences than keys": Call(packing=Packing(q=(0, 9, 9, 20, 30), k=(0, 2, 2, 3, 3))),
    "padded columns": Call(packing=Packing.of(140, 410), dim=96, dim_v=64),
    "wide columns": Call(packing=Packing.of(130, 200), group=1, dim=64, dim_v=256),
}


FOR_EACH = ("cut blocks", "other lengths", "an offset per sequence", "none of some", "padded columns", "wide columns")
FOR_FEW = tuple(name for name in CALLS if name not in FOR_EACH)


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
) -> Kernel:
    return emulate_mode(monkeypatch, variant, timing, mutate, mode="packed")


def computed(variant: str, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = inputs.call(golden.load_op(variant), return_lse=True, family="hopper", **options)
    return found


def check(variant: str, call: Call) -> None:
    """Compare o and lse with float64."""
    inputs = call.inputs(variant)
    o, lse = computed(variant, inputs, **call.options())
    reference = reference_of(variant, packed=True)
    with torch.no_grad():
        want, want_lse = inputs.double().call(reference, return_lse=True, **call.options())
    check_lse(lse, want_lse)
    check_output(o, want, want_lse.T)


@pytest.mark.parametrize(("variant", "name"), [*calls_of(FOR_EACH), *calls_of(FOR_FEW, FEW)])
def test_forward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize(("variant", "name"), [*calls_of(["other lengths"]), *calls_of(FOR_FEW, FEW)])
def test_forward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_sequence_sees_another(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """The results do not depend on the values before and after a sequence."""
    call = Call(packing=Packing.of(70, 333, 400))
    inputs = call.inputs(variant)
    emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    want = computed(variant, inputs, **call.options())
    q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v.clone()
    for x in (q, k, v):
        x[:70], x[333:] = NAN, INF
    o, lse = computed(variant, replace(inputs, q=q, k=k, v=v), **call.options())
    torch.testing.assert_close(o[70:333], want[0][70:333], rtol=0, atol=0)
    torch.testing.assert_close(lse[:, 70:333], want[1][:, 70:333], rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_schedules_and_strides(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Tables that are made before the call; q, k and v side by side in one tensor; heads before rows in memory."""
    call = CALLS["cut blocks"]
    inputs = call.inputs(variant)
    emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    want = computed(variant, inputs, **call.options())
    wide = inputs.q.new_full((inputs.q.shape[0], inputs.q.shape[1], 3 * 64), float("nan"))
    wide[..., 64:128] = inputs.q
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (inputs.k, inputs.v))
    moved = replace(inputs, q=wide[..., 64:128], k=k, v=v)
    options = call.options()
    op = golden.load_op(variant)
    if hasattr(op, "schedule"):
        options["schedule"] = make_schedule(op, moved, family="hopper", **options)
    got = computed(variant, moved, **options)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def library_inputs(package: str, variant: str, packing: Packing) -> Inputs:
    """Inputs of a variant of library.yaml, whose tensors may have an element per query."""
    entry = golden.load_manifest(package)[variant]
    tokens = {"q_idx": packing.q[-1], "kv_idx": packing.k[-1]}
    shape = golden.Shape(batch=packing.sequences, heads=2, kv_heads=1, seq=max(tokens.values()), dim=64)
    whole = golden.draw_inputs(entry, shape, dtype=torch.float16, device="cpu")
    own = {}
    for name, x in whole.tensors.items():
        dims = ["b", "kv_idx", "h"] if name == "g" else list(entry["tensors"].get(name, {"dims": ["h"]})["dims"])
        packed = x.detach()
        if "b" in dims and tokens.keys() & set(dims):
            packed = packed.select(dims.index("b"), 0)
            dims.remove("b")
        for axis, dim in enumerate(dims):
            packed = packed.narrow(axis, 0, tokens[dim]) if dim in tokens else packed
        own[name] = packed.contiguous()
    lengths = ("q_idx", "kv_idx", "kv_idx", "q_idx")
    q, k, v, do = (
        x.detach()[0, :, : tokens[axis]].transpose(0, 1).contiguous()
        for x, axis in zip((whole.q, whole.k, whole.v, whole.do), lengths, strict=True)
    )
    if FORMULAS[variant].positive:
        q, k = q.abs(), k.abs()
    return replace(whole, q=q, k=k, v=v, do=do, tensors=own)


@pytest.mark.parametrize("variant", KINDS)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str) -> None:
    """Against the op's own reference in float32."""
    packing = Packing(q=(0, 130, 130, 200), k=(0, 140, 150, 333))
    inputs = library_inputs(library, variant, packing)
    kernel = emulate_mode(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library, mode="packed")
    op, options = golden.load_op(variant, library), {"q_offset": "end", "return_lse": True, **packing.options()}
    with torch.no_grad():
        o, lse = inputs.call(op, family="hopper", **options)
        monkeypatch.setattr(f"{library}.{variant}.torch_op.runs_reference", lambda _: True)
        wide = replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
        want, want_lse = wide.call(op, **options)
    assert kernel.launches == 1
    check_lse(lse, want_lse)
    check_output(o, want, want_lse.T)


MUTATIONS = {
    "rows counted from the start of a sequence": Mutation(
        old="MOST_ROWS - self.length + row, column",
        new="row, column",
        error=EmulationError,
        message="TMA copies byte -",
        call="cut blocks",
    ),
    "no end of a sequence": Mutation(
        old="[MOST_COUNT, MOST_COUNT, heads, MOST_ROWS, COLS]",
        new="[MOST_COUNT, MOST_COUNT, heads, 2 * MOST_ROWS, COLS]",
        error=EmulationError,
        message="TMA copies byte",
        call="one",
    ),
    "an address that does not wrap around": Mutation(
        old="WRAP_BITS = gl.constexpr(2**37)",
        new="WRAP_BITS = gl.constexpr(2**36)",
        error=EmulationError,
        message="TMA copies byte",
        call="one",
    ),
    "keys beyond the last of a sequence": Mutation(
        old="run_end = gl.minimum(run_end, kv_len)",
        new="pass",
        error=AssertionError,
        message="lse",
        call="an offset per sequence",
    ),
    "rows beyond the last of a sequence": Mutation(
        old="mask=rows < q_len)", new="mask=rows >= 0)", error=EmulationError, message="is accessed", call="one"
    ),
    "work not published": Mutation(
        old="        mbarrier.arrive(self.full.index(stage), count=1)\n\n    @gluon.jit\n    def fetch(",
        new="\n    @gluon.jit\n    def fetch(",
        error=DeadlockError,
        message=r"consume:\d+ > receive",
        call="cut blocks",
    ),
    "work not waited for": Mutation(
        old="        mbarrier.wait(self.full.index(stage), (turn // 2) & 1)\n        fields = ()",
        new="        fields = ()",
        error=EmulationError,
        message="read before anything|read without a wait",
        call="cut blocks",
    ),
    "one place for work": Mutation(
        old="stage * self.size",
        new="0 * self.size",
        error=EmulationError,
        message="overwritten without a wait|read without a wait",
        call="cut blocks",
    ),
    "work taken twice": Mutation(
        old="gl.num_programs(0) + gl.atomic_add",
        new="gl.num_programs(0) + 1 + gl.atomic_add",
        error=AssertionError,
        message="NaN|lse",
        call="cut blocks",
    ),
}


@with_timings
@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing) -> None:
    mutation = MUTATIONS[name]
    emulate(monkeypatch, mutation.variant, timing, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
