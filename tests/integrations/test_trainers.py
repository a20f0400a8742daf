"""Transformers' Trainer, PEFT's adapters and accelerate's hooks on the ops give the results of eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")
accelerate = pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from tests.support.tiny_models import decoder  # noqa: E402
from tests.support.tiny_runs import TOLERANCE, assert_close, padding, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")


def losses(implementation: str, folder: Path, *, adapters: bool, checkpoints: bool) -> torch.Tensor:
    """The loss of each step."""
    net: Any = decoder("Gemma2")
    net.set_attn_implementation(implementation)
    if adapters:
        peft = pytest.importorskip("peft", reason="adapters are PEFT's")
        torch.manual_seed(0)
        net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        gradient_checkpointing=checkpoints,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    trainer = transformers.Trainer(model=net, args=arguments, train_dataset=rows)
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize(("adapters", "checkpoints"), [(False, False), (True, False), (True, True)])
@pytest.mark.filterwarnings("ignore")
def test_trainer_has_the_losses_of_eager_attention(adapters: bool, checkpoints: bool, tmp_path: Path) -> None:
    hf.register()
    want, got = (losses(each, tmp_path, adapters=adapters, checkpoints=checkpoints) for each in ("eager", "codegen"))
    assert len(want) == 3
    assert want[-1] < want[0]
    assert ((got - want).abs() / want).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_models_that_accelerate_distributes(name: str) -> None:
    """With `device_map="auto"` on several devices, hooks move the mask to the device of each module."""
    hf.register()
    net: Any = decoder(name)
    real = padding("left")
    want = net(tokens(), attention_mask=real).logits[real.bool()]
    net.set_attn_implementation("codegen")
    places = {child: "cpu" for child, _ in net.named_children()}
    net = accelerate.dispatch_model(net, places, force_hooks=True)
    assert_close(net(tokens(), attention_mask=real).logits[real.bool()], want, "logits")


def test_a_mask_is_copied_once_to_each_device() -> None:
    mask = hf.attention_mask(2, 24, 24, attention_mask=padding("left"))
    assert mask.to("cpu") is mask
    moved = mask.to("meta", non_blocking=True)
    assert moved is mask.to(torch.device("meta"))
    assert moved.padding is not None
    assert moved.padding.is_meta
    assert (moved.after, moved.plans) == (0, [])
