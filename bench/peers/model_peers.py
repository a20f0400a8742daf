"""Whole models of transformers in training, with attention by one implementation or another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases.models import OURS, ModelCase

NAMES = {OURS: "codegen", "sdpa": "sdpa", "cudnn": "sdpa", "flex": "flex_attention", "eager": "eager"}
"""The name that transformers has for each implementation."""

_OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ORDERS = {
    "sdpa": [SDPBackend.FLASH_ATTENTION, *_OTHERS, SDPBackend.CUDNN_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_OTHERS],
}
"""The backends of SDPA that are tried, in this order."""

GIB = 2**30

RATE = 1e-9
"""Learning rate: next to none, so that every implementation computes the same loss."""


class Trainee(Protocol):
    """A model in training that several implementations can take steps of."""

    def use(self, implementation: str) -> Callable[[], Any]:
        """A training step by an implementation, which returns the loss; the step is enqueued, not awaited."""

    def wait(self, loss: Any) -> float:
        """The loss as a number, once the step that gives it is done."""

    def peak_gib(self, step: Callable[[], Any]) -> float | None:
        """Peak memory within a step, weights and optimizer included, GiB; None if it cannot be read."""

    def release(self) -> None:
        """Free the memory that a failed step still holds."""


class Dense(nn.Module):
    """A gated MLP in the place of experts: it computes as much as the experts of one token, without routing."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y, None


def make_model(case: ModelCase, device: str, dtype: torch.dtype) -> Any:
    """The model of a case, with random weights."""
    import transformers

    model_class: Any = getattr(transformers, case.architecture)
    config: dict[str, Any] = dict(case.config)
    experts = case.architecture == "GptOssForCausalLM"
    if experts:
        config |= {"num_local_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 8}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    made = model_class.config_class(
        **config,
        **special,
        vocab_size=case.vocabulary,
        num_hidden_layers=case.layers,
        max_position_embeddings=case.seq,
    )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class._from_config(made, attn_implementation="eager", dtype=dtype)
            if experts:
                for layer in model.model.layers:
                    layer.mlp = Dense(case.config["hidden_size"], case.config["intermediate_size"])
    finally:
        torch.set_default_dtype(previous)
    return model.train()


def batch(case: ModelCase, device: str) -> dict[str, Any]:
    """Random tokens, which are their own labels; documents begin where positions restart."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, case.vocabulary, (case.batch, case.seq), generator=generator).to(device)
    found: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if case.documents:
        positions = torch.cat([torch.arange(length) for length in case.documents]).to(device)
        found["position_ids"] = positions.expand(case.batch, -1)
    return found if case.architecture.endswith("MaskedLM") else {**found, "use_cache": False}


class TorchTrainee:
    """A model of transformers with AdamW; on a GPU in bfloat16."""

    def __init__(self, case: ModelCase, device: str) -> None:
        from generated.integrations import transformers as hf

        # Readers of a benchmark's output do not need transformers' warnings about the config.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        hf.register()
        self.on_gpu = device == "cuda"
        torch.manual_seed(0)
        self.model = make_model(case, device, torch.bfloat16 if self.on_gpu else torch.float32)
        self.batch = batch(case, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=self.on_gpu)
        # Make the optimizer's state now, because an implementation that runs out of memory could leave half of it.
        for x in self.model.parameters():
            x.grad = torch.zeros_like(x)
        self.optimizer.step()
        self.release()

    def use(self, implementation: str) -> Callable[[], Tensor]:
        self.model.set_attn_implementation(NAMES[implementation])

        def step() -> Tensor:
            with backends(implementation):
                loss: Tensor = self.model(**self.batch).loss
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def wait(self, loss: Tensor) -> float:
        return float(loss)

    def peak_gib(self, step: Callable[[], Tensor]) -> float | None:
        if not self.on_gpu:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.wait(step())
        return torch.cuda.max_memory_allocated() / GIB

    def release(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def backends(implementation: str) -> Iterator[None]:
    """SDPA's backends in the order of an implementation."""
    order = ORDERS.get(implementation)
    with nullcontext() if order is None else sdpa_kernel(order, set_priority=True):
        yield


# ---------------------------------------------------------------------------------------------------- time on the host


def attention_calls(device: str, *, documents: bool) -> dict[str, tuple[Callable[[], None], list[float]]]:
    """Forward passes of a small Llama, and the list that each fills with the seconds of its calls of attention.

    `ours, op left out` returns q instead of calling the op. `op alone` is the op's own call, with the arguments that
    the integration found: the rest of the time of `ours` is Python of the integration. `clock` is a function that
    returns q.
    """
    from unittest.mock import patch

    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from generated import torch as ops
    from generated.integrations import transformers as hf
    from generated.integrations import transformers_calls as calls

    hf.register()
    size = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    case = ModelCase(
        name="CPU time",
        architecture="LlamaForCausalLM",
        config=size,
        seq=128,
        vocabulary=256,
        documents=(28, 100) if documents else (),
    )
    model = make_model(case, device, torch.bfloat16 if device == "cuda" else torch.float32)
    inputs = batch(case, device)
    found: dict[str, tuple[Callable[[], None], list[float]]] = {}
    for name, function, masks in (
        (OURS, hf.attention, "codegen"),
        (OP_ALONE, _op_alone(calls.planned), "codegen"),
        (LEFT_OUT, hf.attention, "codegen"),
        (CLOCK, _nothing, "codegen"),
        ("sdpa", ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa"),
    ):
        seconds: list[float] = []
        timed = f"bench-timed-{name.replace(' ', '-')}"
        AttentionInterface.register(timed, _timed(function, seconds))
        AttentionMaskInterface.register(timed, ALL_MASK_ATTENTION_FUNCTIONS[masks])
        is_left_out = name == LEFT_OUT
        shown: AbstractContextManager[Any] = patch.object(calls, "ops", _LeftOut(ops)) if is_left_out else nullcontext()
        found[name] = partial(_forward, model, inputs, timed, shown), seconds
    return found


LEFT_OUT, OP_ALONE, CLOCK = "ours, op left out", "op alone", "clock"


def _nothing(_module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query, None


def _op_alone(planned: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function whose first call plans all, since every forward has the same tokens."""
    plans: list[Any] = []

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        if not plans:
            plans.append(planned(module, query, key, value, mask, dropout, given))
        o: Tensor = plans[0].run(query, key, value, scaling, given)
        return o, None

    return attention


def _forward(model: Any, inputs: dict[str, Any], implementation: str, shown: AbstractContextManager[Any]) -> None:
    model.set_attn_implementation(implementation)
    with shown:
        model(**inputs)


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def attention(*given: Any, **more: Any) -> Any:
        begin = time.perf_counter()
        found = function(*given, **more)
        seconds.append(time.perf_counter() - begin)
        return found

    return attention


class _LeftOut:
    """The ops of a package, each of which returns q at once."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def left_out(q: Tensor, *_: Any, **__: Any) -> Tensor:
            return q

        left_out.schedule = op.schedule  # type: ignore[attr-defined]
        self.__dict__[name] = left_out
        return left_out
