# SPDX-License-Identifier: Apache-2.0
"""The ops as an attention implementation of Hugging Face transformers.

>>> register()
>>> from transformers import MistralConfig, MistralForCausalLM
>>> size = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
>>> config = MistralConfig(**size, num_key_value_heads=2, head_dim=16, sliding_window=32)
>>> model = MistralForCausalLM._from_config(config, attn_implementation="codegen")
>>> print(explain(model))
MistralForCausalLM: 2 layers call attention, 2 are served
  model.layers.0.self_attn to model.layers.1.self_attn: window(size=32)

Which variant computes a layer follows from its call: the mask, and what the model passes to attention. A call that no
variant of this package computes is an error that names the entry to add; nothing falls back to another implementation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .._runtime.core.checks import fail
from .entries import Attention
from .transformers_calls import (
    arguments_of,
    checked,
    common_dtype,
    planned,
    positions_of,
    resolved,
    tokens_of,
    wanted_of,
    with_schedule,
)
from .transformers_explain import RECORDED, Explanation, Layer, is_of_transformers, recording_of
from .transformers_masks import TITLE, AttentionMask, attention_mask
from .transformers_plans import Plan, seed, sides_of
from .variants import BEYOND, Found

__all__ = ["AttentionMask", "Explanation", "attention", "attention_mask", "explain", "register"]

Argument = Callable[[torch.nn.Module, Mapping[str, Any]], Any]
"""An argument of an op, computed from the attention module and from all that its call was given, by name."""


def register(
    name: str = "codegen", *, op: Callable[..., Any] | None = None, tensors: Mapping[str, Argument | Any] | None = None
) -> None:
    """Make the ops an `attn_implementation` of transformers, for this process. It changes no model.

    >>> register()

    Without an op it also registers `paged|<name>`, for continuous batching: see `transformers_paged`, whose `register`
    takes your own ops. With a version of transformers that it was not tested with, calls of that name raise an error.

    Register your own variant under its own name. Its mask and score replace those of the model; packing, padding and
    caches are as in other calls. Keyword arguments of the model's call reach the functions of `tensors`:

    >>> from generated.torch import document
    >>> register("by_document", op=document, tensors={"doc": lambda module, batch: batch["doc"]})

    Args:
        name: the `attn_implementation` of models.
        op: an op for PyTorch that computes every layer; by default the variant follows from the call.
        tensors: the op's own arguments, tensors and scalars, by name: a value, or a function of the attention module
            and of a dict of the call's arguments, `query`, `key`, `value`, `attention_mask` and all keywords.

    Raises:
        ArgumentError: tensors without an op, one that the op does not have, or a name that is taken by transformers.

    With an op, calls are refused whose cache has dropped keys, as sliding caches do: its mask may keep them.
    """
    if op is None and tensors is not None:
        fail("register", "tensors", "None without op, whose arguments they are", sorted(tensors))
    if is_of_transformers(name):
        fail("register", "name", "a name that transformers does not use itself", repr(name))
    own = None if op is None else _own(op, dict(tensors or {}))
    AttentionInterface.register(name, attention if own is None else own)
    AttentionMaskInterface.register(name, attention_mask if own is None else partial(attention_mask, is_replaced=True))
    if own is None:
        _register_paged(name)


def _register_paged(name: str) -> None:
    """`paged|<name>`, unless it has been registered by hand."""
    # Imported here: training needs none of it.
    from . import transformers_paged

    paged = transformers_paged.PREFIX + name
    if paged in AttentionInterface().valid_keys():
        return
    try:
        transformers_paged.register(name)
    except ImportError as error:
        reason = str(error)

        def refused(*_: Any, **__: Any) -> Any:
            raise ImportError(reason)

        AttentionInterface.register(paged, refused)


def explain(model: Any, **inputs: Any) -> Explanation:
    """Which variant computes each attention layer of a model, or why none does. Print it, or read its `layers`.

    The model runs once with attention left out, which takes little time, on `inputs` or on eight tokens. Its own
    implementation is restored. Of a model that was switched to a registered name, layers that
    `set_attn_implementation` did not reach are not served.

    Args:
        model: a model of transformers, of any `attn_implementation`.
        inputs: what the model is called with; by default eight tokens, or an image of the size in the config.
    """
    records: list[Layer] = []
    # Under a name that nothing else uses, because "codegen" may have been registered for a user's op.
    AttentionInterface.register(RECORDED, partial(_recorded, records))
    AttentionMaskInterface.register(RECORDED, attention_mask)
    return recording_of(model, inputs, records)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """One call of attention from a model: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`.

    Returns:
        o `[B, Sq, Hq, Dv]`, and None for the weights, which are never in memory.

    Raises:
        ArgumentError: an argument that cannot be served, such as a mask of four axes; it says what to do.
        NotRenderedError: the package has no variant for the call; the message has the entry to add.
    """
    # In a trace, a layer neither keeps plans nor finds kept plans.
    if type(attention_mask) is AttentionMask and not torch.compiler.is_dynamo_compiling():
        for kept in attention_mask.plans:
            if kept.serves(module, query, key, value, dropout, given):
                return kept.plan.run(query, key, value, scaling, given), None
    plan = planned(module, query, key, value, attention_mask, dropout, given)
    return plan.run(query, key, value, scaling, given), None


def _recorded(
    records: list[Layer],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,  # noqa: ARG001
    **given: Any,
) -> tuple[Tensor, None]:
    """Write down what would compute a call, or why nothing does. Returns zeros in the place of its output."""
    wanted = None
    try:
        mask = checked(attention_mask, key, given)
        wanted = wanted_of(module, query, value, mask, dropout, given)
        found = resolved(wanted)
        arguments_of(found, wanted, mask, query, key, dropout, given)
    except (NotImplementedError, TypeError, ValueError) as error:
        records.append(Layer(module=module, wanted=wanted, refused=str(error)))
    else:
        records.append(
            Layer(
                module=module,
                wanted=wanted,
                variant=found.name,
                scalars=_shown(found),
                heads=(query.shape[1], key.shape[1]),
                head_dim=query.shape[-1],
                head_dim_v=value.shape[-1],
            )
        )
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1], dtype=common_dtype(query, key, value)), None


def _shown(found: Found) -> dict[str, Any]:
    return {name: value for name, value in found.scalars.items() if value != BEYOND}


# ----------------------------------------------------------------------------------------------------- ops of one's own


def _own(op: Callable[..., Any], tensors: dict[str, Any]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that computes every layer by one op."""
    name = getattr(op, "__name__", type(op).__name__)
    read = inspect.signature(op).parameters
    reads_all = any(each.kind is each.VAR_KEYWORD for each in read.values())
    for each in tensors:
        if each not in read and not reads_all:
            fail("register", "tensors", f"arguments of {name}", repr(each))
    has_dropout = reads_all or "dropout_p" in read

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        mask = checked(attention_mask, key, given)
        if mask is not None and mask.kv_offset:
            expected = (
                f"one of all keys from the first on, because the mask of {name} replaces it: set sliding_window=None "
                "in the config, or use_cache=False"
            )
            got = f"keys from position {mask.kv_offset} on: the cache has dropped others"
            fail(TITLE, "attention_mask", expected, got)
        if (dtype := common_dtype(query, key, value)) is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        batch = {"query": query, "key": key, "value": value, "attention_mask": mask, "scaling": scaling, **given}
        arguments = {each: x(module, batch) if callable(x) else x for each, x in tensors.items()}
        if given.get("s_aux") is not None and "sink" not in arguments:
            fail(TITLE, "s_aux", f"no sinks: {name} was registered without them", "sinks of the model")
        if dropout and "dropout_p" not in arguments:
            if not has_dropout:
                fail(TITLE, "dropout", f"0, as {name} has none: register an op whose entry has dropout", dropout)
            arguments |= {"dropout_p": dropout, "seed": seed()}
        is_causal = mask is None or mask.after == 0
        wanted = Attention(after=0 if is_causal else None)
        arguments |= tokens_of(mask, query, key, given, is_causal=is_causal, needs_rows=bool(tensors))
        found = Found(name=name, scalars={})
        is_placed = mask is not None or sides_of(module, given)[0]
        arguments |= positions_of(mask, query, key, found, wanted, arguments, is_causal=is_placed)
        arguments = with_schedule(op, module, mask, query, key, value, arguments)
        return Plan(op, arguments).run(query, key, value, scaling, given), None

    return attend
