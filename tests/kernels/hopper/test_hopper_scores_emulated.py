"""Scores that the library does not have, and masks that choose blocks by a tensor, in Hopper's family without a GPU:
forward and every gradient, in every mode.

A backward evaluates parts of these scores in a special order: derivatives by the score together with a log-decay's
sums, tensors that gradients read a second time and tensors that are read ahead of the products, and terms of distance
that rows share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from emulator import Timing
from tests.kernels.hopper.test_hopper_backward_emulated import WIDE, check_gradients, emulate_backward
from tests.kernels.hopper.test_hopper_emulated import check_lse, check_output
from tests.support.rendering import importable

PACKAGE = "odd_scores"
SPEC = """
variants:
  capped: {mask: causal, score: softcap(3.0), decay: true}
  tempered: {mask: causal, score: "score * temp[h]", decay: true, tensors: {temp: {dims: [h], grad: true}}}
  log_n: {mask: causal, score: "score * log(1.0 + q_idx)", decay: true}
  near: {score: "where(q_idx - kv_idx < 40, score, 0.5 * score)", decay: true}
  rows: {mask: causal, score: "score * log(1.0 + q_idx) + w[q_idx]", tensors: {w: {dims: [q_idx], grad: true}}}
  nested:
    score: "score * (1.0 + 0.1 * w[q_idx]) + u[place[q_idx]] * exp(0.1 * w[q_idx])"
    decay: true
    tensors: {w: {dims: [q_idx]}, u: {dims: [n]}, place: {dims: [q_idx], dtype: int32}}
  two_slopes:
    mask: causal
    score: score + a[h] * (kv_idx - q_idx) + c[h] * (kv_idx - q_idx)
    tensors: {a: {dims: [h], grad: true}, c: {dims: [h], grad: true}}
  soft:
    score: log(1.0 + exp(min(score, 8.0))) - log(1.0 + exp(min(score, 8.0))) * w[q_idx]
    tensors: {w: {dims: [q_idx], grad: true}}
  grid: {mask: "near[h, q_idx // 96, kv_idx // 64] > 0.0", tensors: {near: {dims: [h, q_runs, kv_runs]}}}
  picked:
    mask: kv_idx // 32 == best[h, q_idx // 48] % 5 or 0 <= q_idx - kv_idx < 8
    tensors: {best: {dims: [h, q_runs], dtype: int32}}
  dropped: {mask: causal, score: softcap(3.0), decay: true, dropout: true}
"""
LENGTH, HEADS, KV_HEADS = 150, 2, 1
CU_SEQLENS = (0, 60, LENGTH)
MODES = ("dense", "packed", "segmented")

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(family="hopper", dtype="float16", framework="torch"),
]


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("odd_scores"), PACKAGE, SPEC) as folder:
        yield folder


def own_tensors(variant: str) -> dict[str, Tensor]:
    """The variant's own tensors. All dims other than heads have as many elements as there are tokens."""
    found = {}
    for name, tensor in golden.load_manifest(PACKAGE)[variant]["tensors"].items():
        sizes = [HEADS if dim == "h" else LENGTH for dim in tensor["dims"]]
        x = torch.randint(0, LENGTH, sizes) if "int" in tensor["dtype"] else 0.3 * torch.randn(sizes)
        found[name] = x.to(getattr(torch, tensor["dtype"])).requires_grad_(tensor["grad"])
    return found


def arguments(variant: str, mode: str, dim: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """q, k, v and the variant's own tensors by name, and the call's options."""

    def drawn(heads: int) -> Tensor:
        packed = mode == "packed"
        return torch.randn((LENGTH, heads, dim) if packed else (1, heads, LENGTH, dim)).half().requires_grad_()

    tensors = {"q": drawn(HEADS), "k": drawn(KV_HEADS), "v": drawn(KV_HEADS), **own_tensors(variant)}
    entry = golden.load_manifest(PACKAGE)[variant]
    if entry["decay"]:
        rows = (LENGTH, HEADS) if mode == "packed" else (1, LENGTH, HEADS)
        tensors["g"] = (-0.1 * torch.rand(rows)).requires_grad_()
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": 7} if entry["dropout"] else {}
    if mode == "packed":
        cu = torch.tensor(CU_SEQLENS, dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    elif mode == "segmented":
        ids = torch.tensor([[0] * CU_SEQLENS[1] + [1] * (LENGTH - CU_SEQLENS[1])], dtype=torch.int32)
        options["q_segment_ids"] = ids
    return tensors, options


def evaluated(
    op: Callable[..., Any], tensors: dict[str, Tensor], options: dict[str, Any], seed: int = 1
) -> dict[str, Tensor]:
    """o, lse and every gradient of a call."""
    rest = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    o, lse = op(tensors["q"], tensors["k"], tensors["v"], return_lse=True, **rest, **options)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(o.shape, generator=generator).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    trained = {name: x for name, x in tensors.items() if x.requires_grad}
    gradients = torch.autograd.grad([o, lse], list(trained.values()), [do, dlse])
    found = {f"d{name}": gradient for name, gradient in zip(trained, gradients, strict=True)}
    return {"o": o.detach(), "lse": lse.detach(), **found}


def check(monkeypatch: pytest.MonkeyPatch, variant: str, mode: str, *, dim: int = 64, deterministic: bool) -> None:
    """Compare all results with the op's reference in float64."""
    stem, folder = WIDE if dim > 128 else "hopper_bwd", "" if mode == "dense" else mode
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=PACKAGE, stem=stem, mode=folder)
    tensors, options = arguments(variant, mode, dim)
    op = golden.load_op(variant, PACKAGE)
    got = evaluated(op, tensors, {**options, "family": "hopper", "deterministic": deterministic})
    assert kernel.launches == 1
    exact = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    reference = golden.load_reference(variant, packed=mode == "packed", package=PACKAGE)
    want = evaluated(reference, exact, options)
    check_lse(got["lse"], want["lse"])
    # The output of a packed call has the heads after the rows.
    check_output(got["o"], want["o"], want["lse"].T if mode == "packed" else want["lse"])
    check_gradients(got, want)


VARIANTS = ("capped", "tempered", "log_n", "near", "rows", "nested", "two_slopes", "soft", "grid", "picked", "dropped")
CASES = [
    *((variant, mode, False) for variant in VARIANTS for mode in MODES),
    *(("capped", mode, True) for mode in MODES),
    *((variant, "dense", True) for variant in ("log_n", "rows", "nested")),
]


@pytest.mark.parametrize(("variant", "mode", "deterministic"), CASES)
def test_scores(monkeypatch: pytest.MonkeyPatch, variant: str, mode: str, deterministic: bool) -> None:
    check(monkeypatch, variant, mode, deterministic=deterministic)


@pytest.mark.parametrize(("variant", "mode"), [("capped", "dense"), ("nested", "packed"), ("log_n", "segmented")])
def test_scores_in_wide_tiles(monkeypatch: pytest.MonkeyPatch, variant: str, mode: str) -> None:
    check(monkeypatch, variant, mode, dim=192, deterministic=False)
