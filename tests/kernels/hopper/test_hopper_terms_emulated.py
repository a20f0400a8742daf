"""Terms of scores that all rows of a key share, in Hopper's forward without a GPU: products add them to the scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from emulator import Timing
from tests.kernels.hopper.test_hopper_emulated import check_lse, check_output, emulate
from tests.support.rendering import importable

PACKAGE = "key_terms"
SPEC = """
variants:
  biased: {score: "score + bias[b, kv_idx]", tensors: {bias: {dims: [b, kv_idx]}}}
  biased_causal: {mask: causal, score: "score + bias[b, kv_idx]", tensors: {bias: {dims: [b, kv_idx]}}, sink: true}
  sides:
    score: "score + w[q_idx] - bias[b, kv_idx] + 0.5 * u[h]"
    tensors: {w: {dims: [q_idx]}, bias: {dims: [b, kv_idx]}, u: {dims: [h]}}
  sloped: {mask: causal, score: "score + 2.0 * slope[h] * kv_idx - slope[h] * q_idx", tensors: {slope: {dims: [h]}}}
  fading:
    mask: causal
    score: "score + bias[b, kv_idx] + slope[h] * (kv_idx - q_idx)"
    tensors: {bias: {dims: [b, kv_idx]}, slope: {dims: [h]}}
    decay: true
  unshared: {score: "score + 0.5 * u[h] + bias[b, kv_idx]", tensors: {u: {dims: [h]}, bias: {dims: [b, kv_idx]}}}
  scaled: {score: "0.5 * score + bias[b, kv_idx]", tensors: {bias: {dims: [b, kv_idx]}}}
"""
BY_PRODUCTS = ("biased", "biased_causal", "sides", "sloped", "fading")
LENGTH, HEADS = 400, 2
MODES = ("dense", "packed", "segmented")
CU_SEQLENS = (0, 150, LENGTH)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(family="hopper", direction="forward", dtype="float16", framework="torch"),
]


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with importable(tmp_path_factory.mktemp("key_terms"), PACKAGE, SPEC) as folder:
        yield folder


def arguments(variant: str, mode: str, dim: int) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k and v, and the call's options with the variant's own tensors. Whole blocks of keys have a bias of -inf."""
    generator = torch.Generator().manual_seed(3)
    shape = (LENGTH, HEADS, dim) if mode == "packed" else (1, HEADS, LENGTH, dim)
    inputs = [torch.randn(shape, generator=generator).half() for _ in range(3)]
    entry = golden.load_manifest(PACKAGE)[variant]
    options: dict[str, Any] = {}
    for name, tensor in entry["tensors"].items():
        # A packed call has no dim b.
        dims = [dim for dim in tensor["dims"] if not (mode == "packed" and dim == "b")]
        sizes = [{"b": 1, "h": HEADS}.get(dim, LENGTH) for dim in dims]
        options[name] = torch.randn(sizes, generator=generator)
    if "bias" in options:
        options["bias"] *= 8
        options["bias"][..., :140] = float("inf" if variant == "sides" else "-inf")
        options["bias"][..., 300:310] = float("inf" if variant == "sides" else "-inf")
    if entry["decay"]:
        rows = (LENGTH, HEADS) if mode == "packed" else (1, LENGTH, HEADS)
        options["g"] = -torch.rand(rows, generator=generator)
    if entry["sink"]:
        options["sink"] = torch.randn(HEADS, generator=generator)
    if mode == "packed":
        cu = torch.tensor(CU_SEQLENS, dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    elif mode == "segmented":
        first = torch.arange(LENGTH)[None, :] < CU_SEQLENS[1]
        options["q_segment_ids"] = torch.where(first, 0, 1).to(torch.int32)
    return inputs, options


def check(variant: str, mode: str, dim: int = 64) -> None:
    """Compare o and lse with float64."""
    inputs, options = arguments(variant, mode, dim)
    op = golden.load_op(variant, PACKAGE)
    reference = golden.load_reference(variant, packed=mode == "packed", package=PACKAGE)
    o, lse = op(*inputs, return_lse=True, family="hopper", **options)
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in options.items()}
    want, want_lse = reference(*(x.double() for x in inputs), return_lse=True, **exact)
    check_lse(lse, want_lse)
    check_output(o, want, want_lse.T if mode == "packed" else want_lse)


def has_products(package: Path, variant: str, mode: str) -> bool:
    folder = package / variant / ("" if mode == "dense" else mode)
    return "make_key_terms" in (folder / "hopper_fwd.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", BY_PRODUCTS)
def test_products_add_terms(monkeypatch: pytest.MonkeyPatch, package: Path, variant: str, mode: str) -> None:
    # Positions that a segmented call may give need not follow each other, so their distances are taken pair by pair.
    assert has_products(package, variant, mode) == (mode != "segmented" or variant not in ("sloped", "fading"))
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, package=PACKAGE, mode="" if mode == "dense" else mode)
    check(variant, mode)
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", BY_PRODUCTS)
def test_products_add_terms_to_scores_of_more_columns(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    emulate(monkeypatch, variant, Timing.EARLY_PRODUCTS, package=PACKAGE)
    check(variant, "dense", dim=192)


@pytest.mark.parametrize("variant", ["unshared", "scaled"])
def test_other_scores_have_no_such_products(package: Path, variant: str) -> None:
    """The rest of the score is not the scaled product and a vector of rows."""
    assert not has_products(package, variant, "dense")
