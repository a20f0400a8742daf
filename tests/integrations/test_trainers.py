"""Transformers' own Trainer and PEFT's adapters on the ops give the losses of eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from tests.support.tiny_models import decoder  # noqa: E402
from tests.support.tiny_runs import TOLERANCE, tokens  # noqa: E402

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
