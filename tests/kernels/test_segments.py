"""Segment ids and lengths of a dense batch: which pairs they leave, and that hidden keys are not seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases import DEVICE, DTYPES, MANIFEST, Shape, draw, evaluate, with_frameworks, with_variants
from tests.support.judge import check_call, check_results
from tests.support.segmented_batches import BATCH, CROSS, IDS, KEYS, LENGTH, SELF, TILES, randomly, with_kinds
from tests.support.segments import ints

pytestmark = pytest.mark.covers(mode="segmented", family="portable", dtype="float16", framework="torch")


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
