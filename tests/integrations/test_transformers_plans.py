"""Layers of one forward share the plan of their calls. A call that differs in anything a plan reads gets its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the hooks into transformers need it")

from generated._runtime.core.checks import ArgumentError  # noqa: E402
from generated._runtime.core.settings import INTERPRET  # noqa: E402
from generated.integrations import transformers as hf  # noqa: E402
from generated.integrations import transformers_calls as calls  # noqa: E402
from generated.integrations.transformers_masks import AttentionMask  # noqa: E402
from generated.integrations.transformers_plans import MOST_KEPT, KeptPlan  # noqa: E402
from tests.support.tiny_models import decoder  # noqa: E402
from tests.support.tiny_runs import boundaries, packed, padding, tokens  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRET, reason="whole models are too slow in Triton's interpreter")

LENGTH = 12


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that are made while the fixture is active."""
    found: list[Any] = []
    plan = calls._plan

    def count(*given: Any) -> Any:
        found.append(plan(*given))
        return found[-1]

    monkeypatch.setattr(calls, "_plan", count)
    return found


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss", "Qwen2"])
@pytest.mark.parametrize("inputs", ["plain", "packed", "boundaries", "padded"])
def test_a_plan_is_made_once_per_forward_and_kind_of_layer(name: str, inputs: str, made: list[Any]) -> None:
    hf.register()
    mixed = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name in ("Gemma3", "GptOss") else {}
    net = decoder(name, num_hidden_layers=4, **mixed)
    net.set_attn_implementation("codegen")
    given: dict[str, Any] = {
        "plain": {"input_ids": tokens()},
        "packed": packed(),
        "boundaries": {**packed(), **boundaries()},
        "padded": {"input_ids": tokens(), "attention_mask": padding("left")},
    }[inputs]
    kinds = 1 if name == "Llama" else 2
    for forwards in (1, 2):
        net(**given, use_cache=False)
        assert len(made) == kinds * forwards


def test_recomputation_of_a_checkpoint_finds_the_plan_of_its_forward(made: list[Any]) -> None:
    hf.register()
    net = decoder("Llama").train()
    net.set_attn_implementation("codegen")
    net.gradient_checkpointing_enable({"use_reentrant": False})
    net(**packed(), use_cache=False).logits.sum().backward()
    assert len(made) == 1


# ------------------------------------------------------------------------------------------------- what makes a new one


class Call:
    """A call of attention, whose parts tests change one by one. Its mask is shared by all calls of a test."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = list(torch.randn(3, 1, 4, LENGTH, 16, generator=generator))
        self.module = torch.nn.Module().eval()
        self.padding = torch.ones(1, LENGTH, dtype=torch.bool)
        self.mask: AttentionMask | None = AttentionMask(
            batch=1, q_length=LENGTH, kv_length=LENGTH, q_offset=0, kv_offset=0, after=0, padding=self.padding
        )
        self.given: dict[str, Any] = {"position_ids": torch.arange(LENGTH)[None]}
        self.dropout = 0.0

    def run(self) -> Tensor:
        torch.manual_seed(0)
        q, k, v = self.tensors
        o, _ = hf.attention(self.module, q, k, v, self.mask, dropout=self.dropout, scaling=0.5, **self.given)
        return o

    def fresh(self) -> Tensor:
        """The result of the same call with a mask that keeps no plans."""
        if self.mask is not None:
            self.mask.cache.clear()
            self.mask.plans.clear()
        return self.run()


def two_documents() -> Tensor:
    return torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]


def ends() -> Tensor:
    return torch.tensor([0, 5, LENGTH], dtype=torch.int32)


CHANGES: dict[str, Callable[[Call], Any]] = {
    "other positions": lambda call: call.given.update(position_ids=two_documents()),
    "positions written in place": lambda call: call.given["position_ids"].copy_(two_documents()),
    "padding written in place": lambda call: call.padding[:, :3].fill_(False),
    "boundaries": lambda call: call.given.update(cu_seq_lens_q=ends(), cu_seq_lens_k=ends()),
    "a cap": lambda call: call.given.update(softcap=0.5),
    "sinks": lambda call: call.given.update(s_aux=torch.ones(4)),
    "a bias": lambda call: call.given.update(position_bias=torch.randn(1, 4, LENGTH, LENGTH)),
    "dropout": lambda call: setattr(call, "dropout", 0.5),
    "fewer queries": lambda call: call.tensors.__setitem__(0, call.tensors[0][:, :, :5]),
    "fewer keys": lambda call: call.tensors.__setitem__(slice(1, 3), [x[:, :, :9] for x in call.tensors[1:]]),
    "fewer key heads": lambda call: call.tensors.__setitem__(slice(1, 3), [x[:, :2] for x in call.tensors[1:]]),
    "narrow values": lambda call: call.tensors.__setitem__(2, call.tensors[2][..., :8]),
    "values in bfloat16": lambda call: call.tensors.__setitem__(2, call.tensors[2].bfloat16()),
    "bfloat16": lambda call: call.tensors.__setitem__(slice(0, 3), [x.bfloat16() for x in call.tensors]),
    "training": lambda call: call.module.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_gets_a_plan_of_its_own(change: str, made: list[Any]) -> None:
    call = Call()
    call.run()
    call.run()
    assert len(made) == 1
    CHANGES[change](call)
    got = call.run()
    if change not in ("narrow values", "training"):  # Without a schedule no plan depends on these.
        assert len(made) == 2
    torch.testing.assert_close(got, call.fresh(), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["training", "narrow values", "autocast", "gradients"])
def test_a_plan_with_a_schedule_is_of_one_way_to_run(change: str, made: list[Any]) -> None:
    call = Call()
    call.given["position_ids"] = two_documents()
    with torch.no_grad():
        call.run()
        if change == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                call.run()
        elif change == "gradients":
            with torch.enable_grad():
                call.run()
        else:
            CHANGES[change](call)
            call.run()
    assert len(made) == 2
    assert "schedule" in made[0].arguments


def test_boundaries_without_a_mask_are_kept_with_what_the_call_is(made: list[Any]) -> None:
    call = Call()
    call.mask = None
    call.given = {"cu_seq_lens_q": ends(), "cu_seq_lens_k": None, "is_causal": False}
    whole = call.run()
    call.run()
    assert len(made) == 1
    call.given["is_causal"] = True
    causal = call.run()
    call.given["sliding_window"] = 2
    window = call.run()
    assert len(made) == 3
    assert not torch.equal(whole, causal)
    assert not torch.equal(causal, window)


def test_weights_are_refused_behind_a_kept_plan() -> None:
    call = Call()
    call.run()
    call.given["output_attentions"] = True
    with pytest.raises(ArgumentError, match="output_attentions: expected False"):
        call.run()


def test_plans_do_not_pile_up() -> None:
    """A model may make new positions in each layer: the number of kept plans is bounded."""
    call = Call()
    assert call.mask is not None
    for _ in range(2 * MOST_KEPT):
        call.given["position_ids"] = torch.arange(LENGTH)[None]
        call.run()
    assert len(call.mask.plans) == MOST_KEPT


class Read(dict[str, Any]):
    """Keywords of a call, which record the names that are read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("with_mask", [True, False])
def test_whatever_a_plan_reads_of_a_call_is_compared(with_mask: bool) -> None:
    call = Call()
    mask = call.mask if with_mask else None
    q, k, v = call.tensors
    every = {**call.given, "cu_seq_lens_q": ends(), "s_aux": torch.ones(4), "sliding_window": 3, "softcap": 2.0}
    for name in ("s_aux", "softcap"):
        given = Read({key: value for key, value in every.items() if key in (name, *call.given, "cu_seq_lens_q")})
        plan = calls._plan(call.module, q, k, v, mask, 0.0, given)
        kept = KeptPlan(plan, call.module, q, k, v, mask, 0.0, given)
        compared = Read(given)
        assert kept.serves(call.module, q, k, v, 0.0, compared)
        assert given.names <= compared.names
