"""Dropout in Hopper's family without a GPU: which pairs are dropped, and dropout together with other features.

Calls of the variant `causal_dropout` are also in `test_hopper_emulated` and the other files, as for every variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from codegen.testing import golden
from emulator import Timing
from generated._runtime.core.checks import keep_numbers
from generated._runtime.torch.philox import dropout_words
from tests.kernels.hopper.test_hopper_backward_emulated import CALLS as BACKWARD_CALLS
from tests.kernels.hopper.test_hopper_backward_emulated import PORTABLE_DQ, WIDE, WIDE_CALLS, emulate_backward
from tests.kernels.hopper.test_hopper_backward_emulated import check as check_backward
from tests.kernels.hopper.test_hopper_emulated import CALLS, PACKAGE, Call, Mutation, emulate
from tests.kernels.hopper.test_hopper_emulated import check as check_forward
from tests.support.cases import Shape, draw
from tests.support.rendering import importable

SEED = 2**62 + 17
TILE = {"block_n": 128, "num_warps": 8, "num_stages": 2}
ROWS_OF_128 = {pass_name: {"block_m": 128, **TILE} for pass_name in ("dkdv", "dq")}

SPEC = """
variants:
  key_bias:
    mask: q_idx != kv_idx
    score: score + bias[h, kv_idx]
    tensors: {bias: {dims: [h, kv_idx], grad: true}}
    dropout: true
  sloped:
    mask: q_idx >= kv_idx
    score: score + slope[h] * (kv_idx - q_idx)
    tensors: {slope: {dims: [h], grad: true}}
    dropout: true
  fading: {mask: q_idx >= kv_idx, decay: true, sink: true, dropout: true}
  squared: {mask: q_idx >= kv_idx and q_idx - kv_idx < 90, score: score * abs(score), dropout: true}
  parts:
    mask: ids[b, q_idx] == ids[b, kv_idx]
    tensors: {ids: {dims: [b, kv_idx], dtype: int32, example: kv_idx // 100}}
    dropout: true
  bare: {dropout: true}
  thirds: {mask: q_idx // 64 % 3 == kv_idx // 64 % 3, dropout: true}
"""

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.covers(family="hopper", dtype="float16", framework="torch"),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package of SPEC."""
    with importable(tmp_path_factory.mktemp("dropping") / "tests", "dropping_variants", SPEC) as package:
        yield package.name


def of_own(variants: tuple[str, ...], calls: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(variant, name) for variant in variants for name in calls]


OWN = ("bare", "key_bias", "sloped", "fading", "squared", "parts", "thirds")


@pytest.mark.parametrize(("variant", "name"), of_own(OWN, ("an offset per row", "cut blocks")))
def test_beside_what_else_a_variant_has(monkeypatch: pytest.MonkeyPatch, package: str, variant: str, name: str) -> None:
    kernel = emulate(monkeypatch, variant, Timing.LATE_PRODUCTS, package=package)
    check_forward(variant, CALLS[name], package)
    assert kernel.launches == 1


@pytest.mark.parametrize(("variant", "name"), of_own(OWN, ("cut blocks", "wide columns")))
def test_its_gradients(monkeypatch: pytest.MonkeyPatch, package: str, variant: str, name: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=package)
    check_backward(variant, BACKWARD_CALLS[name], package)
    assert kernel.launches == 1


@pytest.mark.parametrize("variant", ["fading", "squared", "thirds"])
def test_its_gradients_in_wide_tiles(monkeypatch: pytest.MonkeyPatch, package: str, variant: str) -> None:
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=package, stem=WIDE)
    check_backward(variant, WIDE_CALLS["wide tiles, cut"], package)
    assert kernel.launches == 1


@pytest.mark.parametrize("config", [PORTABLE_DQ, ROWS_OF_128], ids=["a portable dq", "128 rows"])
def test_backwards_that_a_call_asks_for(monkeypatch: pytest.MonkeyPatch, config: dict[str, dict[str, int]]) -> None:
    kernel = emulate_backward(monkeypatch, "causal_dropout", Timing.LATE_PRODUCTS)
    check_backward("causal_dropout", BACKWARD_CALLS["cut blocks"], config=config)
    assert kernel.launches == 1


@pytest.mark.parametrize(
    ("stem", "dropout_p"), [("hopper_bwd", 0.75), (WIDE, 0.75), ("hopper_bwd", 0.002), ("hopper_bwd", 1 - 2**-9)]
)
def test_both_passes_drop_the_pairs_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, stem: str, dropout_p: float
) -> None:
    """The pairs are read from o and dv: v and do are unit matrices. Some rates compare the upper bytes of words with 0
    and 1, and with 255 and 256."""
    shape = Shape(batch=2, kv_heads=2, group=2, q_len=200, kv_len=230, dim=256 if stem == WIDE else 64, dim_v=256)
    if stem != WIDE:
        shape = replace(shape, q_len=120, kv_len=128, dim=128, dim_v=128)
    inputs = draw("causal_dropout", shape)
    v, do = torch.zeros_like(inputs.v), torch.zeros_like(inputs.do)
    v.diagonal(dim1=2, dim2=3).fill_(1)
    do.diagonal(dim1=2, dim2=3).fill_(1)
    scalars = inputs.scalars | {"dropout_p": dropout_p, "seed": SEED}
    inputs = replace(inputs, v=v.requires_grad_(), do=do, scalars=scalars)
    kernel = emulate_backward(monkeypatch, "causal_dropout", Timing.LATE_PRODUCTS, stem=stem)
    op = golden.load_op("causal_dropout")
    # The query offset is so large that the mask hides no key.
    origin = {"q_offset": shape.keys, "dropout_origin": (0, 0, 4, 48, 96)}
    got = golden.evaluate(op, inputs, family="hopper", deterministic=False, **origin)
    sizes = (2, 4, shape.q_len, 96 + shape.keys)
    words = dropout_words(SEED, sizes, torch.device("cpu"), row_offset=shape.keys + 48)[..., 96:]
    kept = words >= keep_numbers(dropout_p)[0]
    assert kept.any()
    assert not kept.all()
    assert torch.equal(got["o"][..., : shape.keys] > 0, kept)
    # dv sums over the heads of a group.
    found = got["dv"][..., : shape.q_len].mT > 0
    assert torch.equal(found, kept.view(2, 2, 2, shape.q_len, shape.keys).any(2))
    assert kernel.launches == 1


@pytest.mark.parametrize("stem", ["hopper_bwd", WIDE])
def test_a_part_of_a_call_drops_what_the_whole_does(monkeypatch: pytest.MonkeyPatch, package: str, stem: str) -> None:
    """A part of a call: some rows of some heads of one batch row, as a rank has them."""
    variant, dim = "bare", 256 if stem == WIDE else 64
    shape = Shape(batch=2, kv_heads=2, group=1, q_len=160, dim=dim)
    inputs = draw(variant, shape, manifest=golden.load_manifest(package))
    op = golden.load_op(variant, package)
    want = golden.evaluate(op, inputs)
    rows, head = slice(96, 160), slice(1, 2)
    q, k, v = inputs.q[1:, head, rows], inputs.k[1:, head], inputs.v[1:, head]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    part = replace(inputs, q=q, k=k, v=v, do=inputs.do[1:, head, rows], dlse=inputs.dlse[1:, head, rows])
    kernel = emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS, package=package, stem=stem)
    options = {"family": "hopper", "deterministic": False, "q_offset": 96, "dropout_origin": (1, 1, 2)}
    found = golden.evaluate(op, part, **options)
    for name in ("o", "dq"):
        # Portable kernels round differently; a pair that only one kernel drops would change o by tenths.
        torch.testing.assert_close(found[name], want[name][1:, head, rows], rtol=1e-2, atol=1e-2)
    assert kernel.launches == 1


def test_a_dropout_of_zero_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with the same order of sums."""
    inputs = BACKWARD_CALLS["cut blocks"].inputs("causal_dropout", PACKAGE)
    inputs = replace(inputs, scalars=inputs.scalars | {"dropout_p": 0.0})
    found = []
    for variant, own in (("causal_dropout", inputs), ("causal", replace(inputs, scalars={}))):
        for x in (own.q, own.k, own.v):
            x.requires_grad_()
        emulate_backward(monkeypatch, variant, Timing.LATE_PRODUCTS)
        # At 64 columns, dropout has another default tile.
        config = {name: {"block_m": 64, **TILE} for name in ("dkdv", "dq")}
        op = golden.load_op(variant)
        found.append(golden.evaluate(op, own, family="hopper", deterministic=False, config=config))
    for name, want in found[1].items():
        assert torch.equal(found[0][name], want), name


MUTATIONS = {
    "words of two pairs exchanged": Mutation(
        old="gl.join(gl.join(near, far_key), gl.join(far_row, far))",
        new="gl.join(gl.join(near, far_row), gl.join(far_key, far))",
        error=AssertionError,
        message="o: largest error",
    ),
    "another head": Mutation(
        old="(first_head + b * all_heads + h).to(gl.int32)",
        new="(first_head + h).to(gl.int32)",
        error=AssertionError,
        message="o: largest error",
        call="an offset per row",
    ),
    "rows of the other warpgroup": Mutation(
        old="first_row + start_m + PART * ROWS,",
        new="first_row + start_m,",
        error=AssertionError,
        message="o: largest error",
    ),
    "rows counted from 0 on": Mutation(
        old="q_shift & -16",
        new="q_shift & 0",
        error=AssertionError,
        message="o: largest error",
        call="an offset per row",
    ),
    "the keys of all rounds": Mutation(
        old="k1 -= 0x4498517B", new="k1 -= 0x4498517A", error=AssertionError, message="o: largest error"
    ),
    "weights that are not scaled": Mutation(
        old="keep_scale / row_sum", new="1.0 / row_sum", error=AssertionError, message="o: largest error"
    ),
}

BACKWARD_MUTATIONS = {
    "words of two pairs exchanged": Mutation(
        old="as_tile(words, words, words << 1, words << 1,",
        new="as_tile(words, words << 1, words, words << 1,",
        error=AssertionError,
        message="largest error",
    ),
    "another head": Mutation(
        old="(first_head + b * all_heads + h).to(gl.int32)",
        new="(first_head + b * all_heads + head_group).to(gl.int32)",
        error=AssertionError,
        message="largest error",
    ),
    "keys of the other warpgroup": Mutation(
        old="start_n + PART * KEYS,\n", new="start_n,\n", error=AssertionError, message="largest error"
    ),
    "nothing subtracted from what is dropped": Mutation(
        old="minus_delta[None, :], signs",
        new="0.0 * minus_delta[None, :], signs",
        error=AssertionError,
        message="d[qk]: largest error",
    ),
    "keys of the other warp": Mutation(
        old="(line & 8) != 0", new="(line & 8) == 0", error=AssertionError, message="largest error"
    ),
    "bits of rows 8 further": Mutation(
        old="gl.sum(gl.reshape(bits, [32, COUNT // 4, 4, 4]), 2)",
        new="gl.sum(gl.reshape(bits, [32, COUNT // 4, 4, 4]), 2) << 1",
        error=AssertionError,
        message="largest error",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    call: Call = CALLS[mutation.call]
    emulate(monkeypatch, "causal_dropout", Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check_forward("causal_dropout", call)


@pytest.mark.parametrize("name", BACKWARD_MUTATIONS)
def test_bugs_of_the_backward_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = BACKWARD_MUTATIONS[name]
    emulate_backward(monkeypatch, "causal_dropout", Timing.LATE_PRODUCTS, mutation.of)
    with pytest.raises(mutation.error, match=mutation.message):
        check_backward("causal_dropout", BACKWARD_CALLS["cut blocks"])
