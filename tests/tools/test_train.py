"""The training of the demos: a model holds its attention separately, so that it can be exchanged."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn import functional

from codegen.testing.golden import load_op
from examples.demo import means
from examples.train import Run, Size, held_out_loss, train
from generated._runtime.core.settings import INTERPRET

SIZE = Size(layers=1, heads=2, kv_heads=1, head_dim=16, seq=16, batch=2, steps=20, learning_rate=1e-3)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def acausal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.skipif(INTERPRET, reason="training in Triton's interpreter takes too long")
def test_a_trained_model_is_evaluated_with_the_attention_it_is_given() -> None:
    reported: list[float] = []
    run = train(SIZE, load_op("causal"), "cpu", lambda _step, loss: reported.append(loss), every=5)
    assert means(run.losses)[::5] == pytest.approx(run.losses[::5])  # each of 20 reports is of one step
    assert len(reported) == 4
    assert held_out_loss(SIZE, run.with_attention(sdpa), "cpu") == pytest.approx(run.held_out, abs=1e-5)
    assert abs(held_out_loss(SIZE, run.with_attention(acausal), "cpu") - run.held_out) > 1e-4


def test_a_run_without_its_model_cannot_change_attention() -> None:
    with pytest.raises(ValueError, match="expected a run that kept its model"):
        Run(losses=[1.0], held_out=1.0).with_attention(sdpa)
