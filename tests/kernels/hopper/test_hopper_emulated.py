"""Hopper's family without a GPU: the ops launch its kernels, which run in `emulator`, an emulation of Gluon.

The rest of a call is the same as on the device: its tiles, its strides, and the kernels that make tables of blocks,
which run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.golden import Inputs
from emulator import DeadlockError, EmulationError, Kernel, Timing, device_sources
from tests.support.cases import Shape, draw, jumping, variants_where
from tests.support.library_formulas import FORMULAS

PACKAGE = "generated"
kernels = importlib.import_module(f"{PACKAGE}._runtime.kernels")
tiles_for = importlib.import_module(f"{PACKAGE}._runtime.core.configs").tiles_for
VARIANTS = variants_where(lambda variant: importlib.util.find_spec(f"{PACKAGE}.{variant}.hopper_fwd") is not None)
PROGRAMS = 3
"""The number of programs at once: each computes several blocks, and not all the same number."""

EMPTY = float("-inf")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(mode="dense", family="hopper", direction="forward", dtype="float16", framework="torch"),
]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an op, whatever the variant."""

    shape: Shape
    q_offset: int | str | tuple[int, ...] = 0
    transposed: bool = False
    jumps: bool = False
    positions: int = 0

    def inputs(self, variant: str, package: str) -> Inputs:
        manifest = golden.load_manifest(package)
        inputs = draw(variant, self.shape, positions=self.positions, manifest=manifest)
        inputs = jumping(inputs) if self.jumps else inputs
        axes = (0, 2, 1, 3) if self.transposed else (0, 1, 2, 3)
        q, k, v = (x.detach().permute(axes).contiguous().permute(axes) for x in (inputs.q, inputs.k, inputs.v))
        return replace(inputs, q=q, k=k, v=v)

    def options(self) -> dict[str, Any]:
        offset = self.q_offset
        return {"q_offset": torch.tensor(offset, dtype=torch.int32) if isinstance(offset, tuple) else offset}


# Tiles have 128 rows and keys, or 64 keys where head_dim is above 128.
CALLS = {
    "cut blocks": Call(shape=Shape(q_len=200, kv_len=333)),
    "short keys": Call(shape=Shape(q_len=130, kv_len=40)),
    "one query": Call(shape=Shape(q_len=1, kv_len=333, batch=2), q_offset="end"),
    "the end": Call(shape=Shape(q_len=200, kv_len=333, kv_heads=2, group=1), q_offset="end"),
    "rows without keys": Call(shape=Shape(q_len=300, kv_len=256), q_offset=-150),
    "an offset per row": Call(shape=Shape(q_len=150, kv_len=260, batch=2, group=1), q_offset=(-70, 90)),
    "five blocks": Call(shape=Shape(q_len=640, kv_len=640, group=1), transposed=True),
    "six blocks of keys": Call(shape=Shape(q_len=256, kv_len=768, group=3), q_offset=500, positions=768),
    "a far window": Call(shape=Shape(q_len=200, kv_len=400, group=1), q_offset=4096 - 50, positions=4300),
    "jumping scores": Call(shape=Shape(q_len=256, kv_len=768, group=1), q_offset=500, positions=768, jumps=True),
    "padded columns": Call(shape=Shape(q_len=140, kv_len=270, dim=96, dim_v=64)),
    "wide columns": Call(shape=Shape(q_len=130, kv_len=200, group=1, dim=64, dim_v=256)),
    "few columns of a second part": Call(shape=Shape(q_len=140, kv_len=270, dim=72, dim_v=88)),
    "narrow columns in parts": Call(shape=Shape(q_len=140, kv_len=270, dim=40, dim_v=48)),
    "padding left out": Call(shape=Shape(q_len=130, kv_len=200, group=1, dim=168, dim_v=144)),
}

FAR = "a far window"
"""A call far beyond a window of 4096 keys. Without such a window, its rows see no keys, or see all keys."""


def calls_of(calls: Iterable[str], variants: Iterable[str] = VARIANTS) -> list[tuple[str, str]]:
    """Each variant with each call that tests something for the variant."""
    return [(v, name) for v in variants for name in calls if name != FAR or v in ("gemma2_local", "full")]


FEW = ("causal", "window", "relative_bias", "forgetting")
"""Variants for tests of how a kernel finds its work and its rows: few keys, and many own tensors."""

KINDS = (
    *("permutation_lm", "transfusion", "block_sparse", "tensor_mask"),  # masks from tensors
    *("symmetric_window", "alternating_directions", "head_windows"),
    *("bigbird", "sasa", "longnet"),  # visited blocks with skipped blocks between them
    "forgetting_window",  # a decay
    *("kerple", "key_temperature", "pair_bias", "toeplitz_bias", "t5_bias", "temperature", "graphormer"),  # gradients
    "reciprocal",  # scores that are infinite at masked pairs
)
"""Formulas whose kernels differ in structure, not only in expressions."""

Sources: TypeAlias = dict[str, str]
"""Sources by name: that of the kernel under `kernel`, and those of the device library's modules that it imports."""

with_timings = pytest.mark.parametrize("timing", list(Timing), ids=lambda timing: timing.name.lower())


def emulated_kernel(path: Path, name: str, timing: Timing, mutate: Callable[[Sources], Sources]) -> Kernel:
    """The kernel of a file; `mutate` changes its source and that of the device library."""
    sources = mutate({"kernel": path.read_text(encoding="utf-8"), **device_sources(path)})
    return Kernel(sources["kernel"], name, timing, sources)


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    timing: Timing,
    mutate: Callable[[Sources], Sources] = lambda sources: sources,
    package: str = PACKAGE,
    mode: str = "",
    programs: int = PROGRAMS,
    stem: str = "hopper_fwd",
) -> Kernel:
    """Calls of `variant` launch the returned kernel, as on an sm_90 with `programs` multiprocessors."""
    folder = f"{package}.{variant}.{mode}".rstrip(".")
    module = importlib.import_module(f"{folder}.hopper_fwd")
    assert module.__file__ is not None
    name = f"{variant}_{mode}".rstrip("_") + f"_{stem}"
    kernel = emulated_kernel(Path(module.__file__), name, timing, mutate)
    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(f"{package}._runtime.torch.backend.multiprocessors", lambda _: programs)
    monkeypatch.setattr(f"{package}._runtime.torch.devices.arch_of", lambda _: "sm_90")
    return kernel


def check(variant: str, call: Call, package: str = PACKAGE, *, positive: bool = False) -> None:
    """Compare o and lse with float64; `positive`: q and k have no element below zero."""
    inputs = call.inputs(variant, package)
    if positive:
        inputs = replace(inputs, q=inputs.q.abs(), k=inputs.k.abs())
    op, reference = golden.load_op(variant, package), golden.load_reference(variant, package=package)
    with torch.no_grad():
        o, lse = inputs.call(op, return_lse=True, family="hopper", **call.options())
        want, want_lse = inputs.double().call(reference, return_lse=True, **call.options())
    check_lse(lse, want_lse)
    check_output(o, want, want_lse)


def check_output(o: Tensor, want: Tensor, lse: Tensor) -> None:
    assert not o.isnan().any(), f"o: {int(o.isnan().sum())} of {o.numel()} are NaN"
    assert (o[lse == EMPTY] == 0).all(), "o: not 0 in a row without keys"
    error = (o.double() - want).abs().max().item()
    assert error <= golden.BOUND[torch.float16] * want.abs().max().item(), f"o: largest error {error:.1e}"


def check_lse(lse: Tensor, want: Tensor) -> None:
    assert torch.equal(lse == EMPTY, want == EMPTY), "lse: -inf in the wrong rows"
    finite = want != EMPTY
    error = (lse.double() - want)[finite].abs()
    assert (error <= golden.BOUND[torch.float32] * want[finite].abs().clamp(min=1)).all(), "lse: too far off"


@pytest.mark.parametrize(("variant", "name"), calls_of(CALLS))
def test_forward(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


@pytest.mark.parametrize(("variant", "name"), calls_of(("an offset per row", "six blocks of keys")))
def test_forward_with_early_products(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS)
    check(variant, CALLS[name])
    assert kernel.launches == 1


def has_long_tile(variant: str) -> bool:
    return bool(kernels.TRAITS[variant].suits_long_tile)


@pytest.mark.parametrize("name", ["cut blocks", "rows without keys", "five blocks"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if has_long_tile(name)])
def test_three_warpgroups(monkeypatch: pytest.MonkeyPatch, variant: str, name: str) -> None:
    """Three warpgroups, as kernels have for long sequences of 64 columns."""
    families = importlib.import_module(f"{PACKAGE}._runtime.core.families")
    short = replace(families.HOPPER_FAMILY, long_forward_from=0, long_forward_from_if_alike=0)
    monkeypatch.setattr(families, "HOPPER_FAMILY", short)
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS)
    tiles_for.cache_clear()
    try:
        check(variant, CALLS[name])
    finally:
        tiles_for.cache_clear()
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", FORMULAS)
def test_library(monkeypatch: pytest.MonkeyPatch, library: str, variant: str) -> None:
    """Rows that see nothing, incomplete blocks, and full blocks far from the diagonal."""
    call = Call(shape=Shape(q_len=150, kv_len=400, batch=2), q_offset=(-70, 230))
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, package=library)
    check(variant, call, library, positive=FORMULAS[variant].positive)
    assert kernel.launches == 1


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A bug: text of a kernel or its device library that is replaced everywhere, and the error that must follow."""

    old: str
    new: str
    error: type[Exception]
    message: str
    variant: str = "causal"
    call: str = "six blocks of keys"
    programs: int = PROGRAMS

    def of(self, sources: Sources) -> Sources:
        assert any(self.old in source for source in sources.values()), "the kernel has changed: so must this mutation"
        return {name: source.replace(self.old, self.new) for name, source in sources.items()}


RELEASE_V = "    v_ring.release(turn)\n"
WAIT_FOR_SUMS = "    acc = wait_for_sums(acc, 0)\n"
WAIT_FOR_STAGE = "        mbarrier.wait(self.empty.index(stage), (lap & 1) ^ 1)\n"
EXPECT = "        mbarrier.expect(self.full.index(stage), self.pieces * desc.block_type.nbytes)\n"
MUTATIONS = {
    "no wait for v": Mutation(
        old="begin_sums(p_tile, v_ring.receive(turn), acc)",
        new="begin_sums(p_tile, v_ring.tile(turn % v_ring.stages), acc)",
        error=EmulationError,
        message="read without a wait|read before anything is copied",
    ),
    "no wait for q": Mutation(
        old="mbarrier.wait(q_ring.full.index(q_stage), (q_turn // Q_BLOCKS) & 1)",
        new="pass",
        error=EmulationError,
        message="read without a wait|read before anything is copied",
    ),
    "consumers wait for the other phase": Mutation(
        old="(turn // self.stages) & 1)",
        new="((turn // self.stages) & 1) ^ 1)",
        error=EmulationError,
        message="read|go on",
    ),
    "the producer waits for the other phase": Mutation(
        old="(lap & 1) ^ 1)", new="lap & 1)", error=DeadlockError, message=r"produce_keys\) .* send:\d+"
    ),
    "the producer does not wait": Mutation(
        old=WAIT_FOR_STAGE + EXPECT,
        new=EXPECT,
        error=EmulationError,
        message="is overwritten|more than 1 arrivals",
    ),
    "v released while it is read": Mutation(
        old=WAIT_FOR_SUMS + RELEASE_V,
        new=RELEASE_V + WAIT_FOR_SUMS,
        error=EmulationError,
        message="is overwritten",
    ),
    "v sent once k is read": Mutation(
        old="        self.v.send(v_desc, v_rows, v_start, turn)",
        new="        ring = Ring(self.v.tiles, self.v.full, self.k.empty, self.v.stages, 1)\n"
        "        ring.send(v_desc, v_rows, v_start, turn)",
        error=EmulationError,
        message="overwritten|more than 1 arrivals|no partition",
    ),
    "q never released": Mutation(
        old="mbarrier.arrive(q_ring.empty.index(q_stage), count=1)",
        new="pass",
        error=DeadlockError,
        message="no partition",
        call="five blocks",
        programs=1,
    ),
    "q released twice": Mutation(
        old="mbarrier.arrive(q_ring.empty.index(q_stage), count=1)",
        new="mbarrier.arrive(q_ring.empty.index(q_stage), count=2)",
        error=EmulationError,
        message="more than 1 arrivals",
    ),
    "too few bytes expected": Mutation(
        old="desc.block_type.nbytes", new="desc.block_type.nbytes // 2", error=DeadlockError, message="bytes short"
    ),
    "scores used before they are there": Mutation(
        old="warpgroup_mma_wait(len(acc), deps=(qk,))",
        new="warpgroup_mma_wait(len(acc) + 1, deps=(qk,))",
        error=EmulationError,
        message="may still run",
    ),
    "sums not rescaled": Mutation(
        old="mul.f32 ${i}, ${i}, ${2 * COUNT + i};",
        new="mov.b32 ${i}, ${i};",
        error=AssertionError,
        message="largest error",
        call="jumping scores",
    ),
    "a maximum that never rises": Mutation(
        old="@p mov.b32 $0, $6;", new="", error=AssertionError, message="too far off"
    ),
    "a turn that is not passed on": Mutation(
        old='change_turns("arrive", (PART + 1) % PARTS)',
        new='change_turns("arrive", PART)',
        error=EmulationError,
        message="named barrier|waits for",
    ),
    "a factor in the layout of scores": Mutation(
        old="alpha = gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]",
        new="alpha = alpha[:, None]",
        error=EmulationError,
        message="two layouts",
    ),
    "sums of the rows before": Mutation(
        old="acc = no_sums(BLOCK_DV, HEAD_DIM_V)\n            else:",
        new="pass\n            else:",
        error=AssertionError,
        message="largest error",
        call="five blocks",
        programs=1,
    ),
    "the number of a block of keys published too early": Mutation(
        old="        mbarrier.wait(self.k.empty.index(stage), (lap & 1) ^ 1)\n",
        new="",
        error=EmulationError,
        message="overwritten|more than 2 arrivals|no partition",
        call="five blocks",
        variant="document",
    ),
    "a block of rows not waited for": Mutation(
        old="        mbarrier.wait(self.full.index(stage), (turn // 2) & 1)\n        fields = ()",
        new="        fields = ()",
        error=EmulationError,
        message="read before anything|read without a wait",
    ),
    "no mask": Mutation(
        old="qk = gl.where(keep, qk, ", new="qk = gl.where(True, qk, ", error=AssertionError, message="lse"
    ),
    "keys beyond the last": Mutation(
        old="if RAGGED:", new="if False:", error=AssertionError, message="lse", variant="full", call="cut blocks"
    ),
    "rows beyond the last": Mutation(
        old="gl.store(lse_ptr + (b * num_heads + h) * q_len + rows, lse, mask=rows < q_len)",
        new="gl.store(lse_ptr + (b * num_heads + h) * q_len + rows, lse)",
        error=EmulationError,
        message="is accessed of a tensor",
        call="cut blocks",
    ),
}


@with_timings
@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, timing: Timing) -> None:
    mutation = MUTATIONS[name]
    emulate(monkeypatch, mutation.variant, timing, mutation.of, programs=mutation.programs)
    with pytest.raises(mutation.error, match=mutation.message):
        check(mutation.variant, CALLS[mutation.call])
