"""Models of transformers on the ops hold no tensor of length by length elements; only shapes are computed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated._runtime.core.settings import INTERPRET
from generated.integrations import transformers as hf
from tests.support.tiny_models import decoder

pytestmark = pytest.mark.skipif(INTERPRET, reason="the interpreter computes values")

LENGTH = 16384


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return found


def largest(name: str, length: int, implementation: str, *, packed: bool) -> int:
    """Elements of the largest tensor in a training step, forward and backward, of one row of tokens."""
    net = decoder(name, max_position_embeddings=2 * LENGTH).to("meta", torch.bfloat16)
    net.set_attn_implementation(implementation)
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"position_ids": torch.zeros_like(ids)} if packed else {}
    tensors = LargestTensor()
    with tensors:
        net(**inputs, use_cache=False).logits.sum().backward()
    return tensors.elements


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss", "Llama4"])
@pytest.mark.filterwarnings("ignore")
def test_memory_is_linear_in_the_length(name: str, packed: bool) -> None:
    hf.register()
    short, long = (largest(name, length, "codegen", packed=packed) for length in (LENGTH, 2 * LENGTH))
    assert short < LENGTH**2 / 32
    assert long == 2 * short


@pytest.mark.filterwarnings("ignore")
def test_eager_attention_holds_a_length_by_a_length() -> None:
    """The test above would find such a tensor."""
    assert largest("Llama", LENGTH, "eager", packed=False) >= LENGTH**2
