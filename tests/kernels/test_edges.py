"""Rows without keys, odd windows and offsets, every scale, no elements at all, and memory that starts as NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    DEVICE,
    DTYPES,
    MANIFEST,
    OWN_TENSORS,
    Shape,
    assert_same,
    draw,
    evaluate,
    has_word,
    tiles,
    variants_where,
    with_variants,
)
from tests.support.judge import check_call, check_results

pytestmark = pytest.mark.covers(mode="dense", family="portable", dtype="float16", framework="torch")

WINDOWED = variants_where(lambda name: has_word(name, "window") and "size" in MANIFEST[name]["scalars"])
MASKED = variants_where(lambda name: has_word(name, "causal") and not has_word(name, "or"))


@pytest.mark.parametrize("size", [1, 7, 64, 65, 1000, 2**30])
@pytest.mark.parametrize("variant", WINDOWED)
def test_window_sizes(variant: str, size: int) -> None:
    check_call(variant, draw(variant, Shape(q_len=150), DTYPES[0], scalars={"size": size}))


@pytest.mark.parametrize("variant", MASKED)
def test_rows_without_keys(variant: str) -> None:
    """The first nine queries come before every key: o is 0, lse is that of a row without keys, no gradient is NaN."""
    inputs = draw(variant, Shape(q_len=90, group=2), DTYPES[0])
    got = check_call(variant, inputs, q_offset=-9)
    assert (got["o"][:, :, :9] == 0).all()
    assert (got["dq"][:, :, :9] == 0).all()
    no_key = inputs.tensors["sink"].detach()[:, None] if MANIFEST[variant]["sink"] else torch.tensor(float("-inf"))
    torch.testing.assert_close(got["lse"][:, :, :9], no_key.to(DEVICE).expand(1, 2, 9))


@pytest.mark.parametrize("variant", MASKED)
def test_no_row_has_a_key(variant: str) -> None:
    got = check_call(variant, draw(variant, Shape(q_len=20, kv_len=70), DTYPES[0]), q_offset=-20)
    for name in ("o", "dq", "dk", "dv"):
        assert (got[name] == 0).all(), name


@pytest.mark.parametrize("q_offset", [13, -70, "end"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 300), (150, 70)])
@with_variants
def test_query_offsets(variant: str, q_len: int, kv_len: int, q_offset: int | str) -> None:
    inputs = draw(variant, Shape(q_len=q_len, kv_len=kv_len), DTYPES[0], positions=q_len + 13)
    check_call(variant, inputs, q_offset=q_offset)


@with_variants
def test_query_offset_of_each_batch_row(variant: str) -> None:
    inputs = draw(variant, Shape(batch=3, q_len=70, kv_len=100, group=1), DTYPES[0], positions=120)
    check_call(variant, inputs, q_offset=torch.tensor([30, -20, 50], dtype=torch.int32, device=DEVICE))


@with_variants
def test_the_number_and_the_tensor_of_one_offset_agree(variant: str) -> None:
    inputs = draw(variant, Shape(batch=2, q_len=40, kv_len=90), positions=130)
    number = evaluate(variant, inputs, q_offset=50)
    # Every second element of a tensor: its stride is not 1.
    offsets = torch.full((4,), 50, dtype=torch.int32, device=DEVICE)[::2]
    for name, got in evaluate(variant, inputs, q_offset=offsets).items():
        assert_same(variant, name, got, number[name])


@pytest.mark.parametrize("scale", [0.3, 1, -0.2, 0.0])
@with_variants
def test_scales(variant: str, scale: float) -> None:
    check_call(variant, draw(variant, Shape(q_len=70), DTYPES[0]), scale=scale)


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(q_len=77, kv_len=139, group=3, dim=40, dim_v=24),
        Shape(q_len=40, kv_len=50, dim=8, dim_v=12),
        Shape(q_len=128),
    ],
    ids=str,
)
@with_variants
@pytest.mark.usefixtures("poisoned_memory")
def test_every_element_is_written(variant: str, shape: Shape) -> None:
    """Every element of outputs and of buffers between kernels: a NaN that is not overwritten would reach a result."""
    inputs = draw(variant, shape)
    check_results(variant, inputs, evaluate(variant, inputs, config=tiles(32, 64)), ratios=False)


@pytest.mark.filterwarnings("ignore:.*determinis")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("variant", MASKED)
def test_every_element_is_written_in_empty_rows(variant: str) -> None:
    inputs = draw(variant, Shape(q_len=90, kv_len=200))
    check_results(variant, inputs, evaluate(variant, inputs, q_offset=-75), ratios=False, q_offset=-75)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "shape",
    [Shape(q_len=9, kv_len=0), Shape(q_len=0, kv_len=9), Shape(q_len=0), Shape(q_len=9, batch=0)],
    ids=str,
)
@with_variants
def test_no_elements(variant: str, shape: Shape) -> None:
    inputs = draw(variant, shape)
    got = evaluate(variant, inputs)
    assert got["o"].shape == inputs.do.shape
    assert got["lse"].shape == inputs.dlse.shape
    assert (got["o"] == 0).all()
    for name, leaf in inputs.leaves().items():
        assert got[f"d{name}"].shape == leaf.shape, name
        if not (name == "sink" and shape.q_len and shape.batch):  # with no key the whole denominator is the sink
            assert (got[f"d{name}"] == 0).all(), name
    if MANIFEST[variant]["sink"]:
        want = inputs.tensors["sink"].detach()[:, None].expand_as(inputs.dlse)
        torch.testing.assert_close(got["lse"], want)
        torch.testing.assert_close(got["dsink"], inputs.dlse.sum((0, 2)))
    else:
        assert (got["lse"] == float("-inf")).all()


@pytest.mark.parametrize("variant", variants_where(lambda name: any(MANIFEST[name][key] for key in OWN_TENSORS)))
def test_own_tensors_of_lower_precision_and_any_stride(variant: str) -> None:
    """A sink and a log-decay may have 16 bits, and any tensor may be non-contiguous; gradients have the same dtype."""
    inputs = draw(variant, Shape(batch=2, q_len=40))

    def spread(name: str, x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros((*x.shape, 2), dtype=torch.float16 if name in ("sink", "g") else x.dtype)
        wide[..., 0] = x.detach()
        return wide[..., 0].detach().requires_grad_(x.requires_grad)

    changed = {name: spread(name, x) for name, x in inputs.tensors.items()}
    got = evaluate(variant, replace(inputs, tensors=changed))
    same = {
        name: (x.detach().float() if name in ("sink", "g") else x.detach()).contiguous().requires_grad_(x.requires_grad)
        for name, x in changed.items()
    }
    want = evaluate(variant, replace(inputs, tensors=same))
    for name in inputs.leaves().keys() - {"q", "k", "v"}:
        assert got[f"d{name}"].dtype == changed[name].dtype
        torch.testing.assert_close(got[f"d{name}"].float(), want[f"d{name}"].float(), rtol=1e-3, atol=1e-4)
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(got[name], want[name]), name
