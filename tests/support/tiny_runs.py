"""Runs of tiny models with different attention implementations, and checks that two runs agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Relative to the largest element: the float32 rounding of two layers. Measured errors are 1e-6."""

LENGTH, FIRST, PADDED = 24, 11, 7
"""Tokens of a row, of the first of two packed sequences, and of the padding."""


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, batch: int = 2, length: int = LENGTH) -> Tensor:
    """A mask of a batch whose last row is padded."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, slice(None, PADDED) if side == "left" else slice(-PADDED, None)] = 0
    return mask


def packed() -> dict[str, Any]:
    """Two sequences in one row, marked by their positions."""
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
    return {"input_ids": tokens(1), "position_ids": positions}


def boundaries() -> dict[str, Any]:
    """The same sequences, marked as a collator for FlashAttention does."""
    cu_seqlens = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
    longest = max(FIRST, LENGTH - FIRST)
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def weighted(logits: Tensor) -> Tensor:
    """A loss in which every logit has its own weight."""
    return (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()


def gradients(net: Any, loss: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in net.named_parameters() if x.grad is not None}


def switch(net: Any, implementation: str) -> None:
    """Choose the attention of every part of a model.

    `set_attn_implementation` does not reach T5's stacks, because their configs are copies of the model's.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in net.modules()]
    for config in configs:
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = implementation


def results(net: Any, implementation: str, inputs: dict[str, Any], real: Tensor | None = None) -> Any:
    """Logits of real tokens, and the gradient of every parameter."""
    net.set_attn_implementation(implementation)
    logits = net(**inputs, use_cache=False).logits
    logits = logits if real is None else logits[real.bool()]
    return logits.detach(), gradients(net, weighted(logits))


def generated(net: Any, **given: Any) -> Any:
    """A batch of twelve tokens and the most likely ones behind them, with the logits of these."""
    how = {"do_sample": False, "disable_compile": True, "return_dict_in_generate": True, "output_logits": True}
    return net.generate(tokens(2, 12), **how, **given)


def separate(net: Any, inputs: dict[str, Any]) -> Any:
    """The same results of two sequences, each in its own call, by transformers' eager attention."""
    net.set_attn_implementation("eager")
    ids = inputs["input_ids"]
    logits = torch.cat([net(input_ids=part, use_cache=False).logits for part in (ids[:, :FIRST], ids[:, FIRST:])], 1)
    return logits.detach(), gradients(net, weighted(logits))


def assert_same(got: Any, want: Any) -> None:
    (logits, grads), (want_logits, want_grads) = got, want
    assert_close(logits, want_logits, "logits")
    assert grads.keys() == want_grads.keys()
    # The gradient of a parameter that hardly changes the loss is mere rounding, so errors relate to the largest ones.
    floor = 1e-3 * max(x.abs().max() for x in want_grads.values())
    for name, want_grad in want_grads.items():
        assert_close(grads[name], want_grad, name, floor)


def assert_same_generation(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits), "logits")


def assert_close(got: Tensor, want: Tensor, what: str, floor: float | Tensor = 0.0) -> None:
    error = (got - want).abs().max() / max(want.abs().max(), torch.as_tensor(floor))
    assert error <= TOLERANCE, f"{what}: {error:.1e}"
