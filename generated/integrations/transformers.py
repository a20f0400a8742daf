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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from .. import torch as ops
from .._runtime.archs import MAX_HEAD_DIM
from .._runtime.core.checks import fail
from .transformers_explain import RECORDED, Explanation, Layer, recording, recording_of
from .transformers_masks import TITLE, AttentionMask, attention_mask
from .transformers_sharing import cache_of, identity, schedule
from .transformers_tokens import chunk_positions, packed_row, segment_ids, sequences
from .variants import BEYOND, Attention, Found, find

__all__ = ["AttentionMask", "Explanation", "attention", "attention_mask", "explain", "register"]

Argument = Callable[[torch.nn.Module, Mapping[str, Any]], Any]
"""An argument of an op, computed from the attention module and from all that its call was given, by name."""


def register(
    name: str = "codegen", *, op: Callable[..., Any] | None = None, tensors: Mapping[str, Argument | Any] | None = None
) -> None:
    """Make the ops an `attn_implementation` of transformers, for this process. It changes no model.

    >>> register()

    Without an op it also makes `paged|<name>` one, for continuous batching: see `transformers_paged`, whose `register`
    takes ops of one's own. In a transformers that it was not tested with, a call of that name is an error.

    A variant of one's own gets a name of its own. Its mask and score take the place of the model's; packing, padding
    and caches are as in other calls. What is given to the model by keyword reaches the functions of `tensors`:

    >>> from generated.torch import document
    >>> register("by_document", op=document, tensors={"doc": lambda module, batch: batch["doc"]})

    Args:
        name: the `attn_implementation` of models.
        op: an op for PyTorch that computes every layer; by default the variant follows from the call.
        tensors: the op's own arguments, tensors and scalars, by name: a value, or a function of the attention module
            and of a dict of the call's arguments, `query`, `key`, `value`, `attention_mask` and all keywords.

    Raises:
        ArgumentError: tensors without an op, or a name that is taken by transformers.
    """
    if op is None and tensors is not None:
        fail("register", "tensors", "None without op, whose arguments they are", sorted(tensors))
    if name in ("eager", "sdpa", "flex_attention") or name.startswith(("flash_attention", "paged|")) or "/" in name:
        fail("register", "name", "a name that transformers does not use itself", repr(name))
    own = None if op is None else _own(op, dict(tensors or {}))
    AttentionInterface.register(name, attention if own is None else own)
    AttentionMaskInterface.register(name, attention_mask)
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

    The model runs once with attention left out, in no time of note, on `inputs` or on eight tokens. Its own
    implementation is restored.

    Args:
        model: a model of transformers, of any `attn_implementation`.
        inputs: what the model is called with; by default eight tokens, or an image of the size in the config.
    """
    # A name that nothing else has: "codegen" may have been registered for an op of one's own.
    AttentionInterface.register(RECORDED, attention)
    AttentionMaskInterface.register(RECORDED, attention_mask)
    return recording_of(model, inputs)


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
    records = recording()
    wanted = None
    try:
        mask = _checked(attention_mask, given)
        if (head_dim := max(query.shape[-1], value.shape[-1])) > MAX_HEAD_DIM:
            fail(TITLE, "head_dim", f"{MAX_HEAD_DIM} at most: use 'sdpa' for this model", head_dim)
        query, key, value = _of_one_dtype(query, key, value)
        wanted = _wanted(module, mask, given, dropout)
        found = _resolved(wanted)
        o = _computed(module, found, wanted, mask, query, key, value, dropout, scaling, given, is_run=records is None)
    except (NotImplementedError, TypeError, ValueError) as error:
        if records is None:
            raise
        records.append(Layer(module=module, wanted=wanted, refused=str(error)))
        o = None
    else:
        if records is not None:
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
    if o is None:
        o = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    return o, None


# ------------------------------------------------------------------------------------------------------ what is wanted


def _checked(mask: Any, given: Mapping[str, Any]) -> AttentionMask | None:
    if given.get("output_attentions"):
        fail(TITLE, "output_attentions", "False: the weights are never in memory. Use 'eager' to see them", True)
    if mask is not None and not isinstance(mask, AttentionMask):
        got = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}" if isinstance(mask, Tensor) else mask
        fail(
            TITLE,
            "attention_mask",
            "a mask [batch, length] of padding, or none: packed sequences are given by position_ids or cu_seq_lens_q, "
            "and another mask is a variant of its own, register(name, op=..., tensors=...)",
            got,
        )
    return mask


def _of_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they would be without norms in float32 before them, as PEFT and some models have."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _wanted(module: Any, mask: AttentionMask | None, given: Mapping[str, Any], dropout: float) -> Attention:
    """What a call computes."""
    before = after = chunk = None
    if mask is not None:
        before, after, chunk = mask.before, mask.after, mask.chunk
    else:
        is_causal = given.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        after = 0 if is_causal else None
        if given.get("sliding_window") is not None:
            before = int(given["sliding_window"]) - (1 if is_causal else 0)
            after = after if is_causal else before
    cap = given.get("softcap")
    return Attention(
        before=before,
        after=after,
        chunk=chunk,
        images=mask is not None and mask.image is not None,
        cap=float(cap) if cap else None,
        sink=given.get("s_aux") is not None,
        bias=given.get("position_bias") is not None,
        dropout=bool(dropout),
    )


def _resolved(wanted: Attention) -> Found:
    if not torch.compiler.is_compiling():
        return find(wanted)
    name, scalars, image, bias = _resolved_while_tracing(
        wanted.before, wanted.after, wanted.chunk, wanted.images, wanted.cap, wanted.sink, wanted.bias, wanted.dropout
    )
    return Found(name=name, scalars=dict(scalars), image=image, bias=bias)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolved_while_tracing(
    before: int | None,
    after: int | None,
    chunk: int | None,
    images: bool,
    cap: float | None,
    sink: bool,
    bias: bool,
    dropout: bool,
) -> tuple[str, tuple[tuple[str, int | float], ...], str | None, str | None]:
    """What `find` reads from a file, which no trace can do."""
    found = find(
        Attention(
            before=before, after=after, chunk=chunk, images=images, cap=cap, sink=sink, bias=bias, dropout=dropout
        )
    )
    return found.name, tuple(found.scalars.items()), found.image, found.bias


def _shown(found: Found) -> dict[str, Any]:
    return {name: value for name, value in found.scalars.items() if value != BEYOND}


# ------------------------------------------------------------------------------------------------------ what is called


def _computed(
    module: Any,
    found: Found,
    wanted: Attention,
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    given: Mapping[str, Any],
    *,
    is_run: bool,
) -> Tensor | None:
    """The output of the variant that serves a call; None if it is not run."""
    arguments: dict[str, Any] = dict(found.scalars)
    if wanted.sink:
        arguments["sink"] = given["s_aux"]
    if found.image is not None and mask is not None:
        arguments[found.image] = mask.image
    if found.bias is not None:
        bias = given["position_bias"]
        arguments[found.bias] = bias.expand(query.shape[0], query.shape[1], *bias.shape[2:])
    if wanted.dropout:
        arguments |= {"dropout_p": dropout, "seed": _seed()}
    anchored = wanted.after == 0
    arguments |= _tokens(mask, query, key, given, is_causal=anchored, needs_rows=bool(found.image or found.bias))
    positions = _positions(mask, query, key, found, wanted, arguments, is_causal=anchored)
    if not is_run:
        return None
    return _called(getattr(ops, found.name), module, mask, query, key, value, scaling, arguments | positions)


def _tokens(
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    given: Mapping[str, Any],
    *,
    is_causal: bool,
    needs_rows: bool,
) -> dict[str, Any]:
    """`sequences`, found once per forward; `needs_rows`: as ids of a dense call, whose rows the op's tensors have."""
    cache = cache_of(mask, given.get("cu_seq_lens_q"))
    said = [given.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")]
    place: Any = None
    if cache is not None:
        sizes = (query.device, query.shape[2], key.shape[2], is_causal, needs_rows)
        place = ("sequences", sizes, *(identity(x) for x in said))
        if place in cache:
            known: dict[str, Any] = cache[place][0]
            return known
    found = sequences(mask, query, key, given, is_causal=is_causal)
    if "cu_seqlens_q" in found and needs_rows:
        found = segment_ids(found["cu_seqlens_q"], found["cu_seqlens_k"], query, key)
    if cache is not None:
        cache[place] = found, said
    return found


def _positions(
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    found: Found,
    wanted: Attention,
    arguments: Mapping[str, Any],
    *,
    is_causal: bool,
) -> dict[str, Any]:
    """Where queries are among the keys: behind those of a cache."""
    if "cu_seqlens_q" in arguments:
        return {}
    offset: int | Tensor = 0
    if mask is not None:
        offset = mask.q_offset - mask.kv_offset
    elif is_causal:
        offset = key.shape[2] - query.shape[2]
    if found.bias is not None:
        return _beside_a_bias(offset, query, found, wanted)
    if mask is not None and mask.chunk is not None and (positions := chunk_positions(mask, query, key, arguments)):
        return positions
    if isinstance(offset, Tensor):
        return {"q_offset": offset.to(query.device, torch.int32).reshape(-1).expand(query.shape[0]).contiguous()}
    return {"q_offset": offset} if offset else {}


def _beside_a_bias(offset: int | Tensor, query: Tensor, found: Found, wanted: Attention) -> dict[str, Any]:
    """The rows of a bias are the call's, so the band is moved in place of the rows."""
    if isinstance(offset, Tensor):
        if query.shape[2] == 1 and wanted.after == 0 and wanted.before is None:
            lengths = (offset.to(query.device, torch.int32) + 1).reshape(-1).expand(query.shape[0])
            return {"after": BEYOND, "kv_lengths": lengths.contiguous()} if "after" in found.scalars else {}
        offset = int(offset)
    if not offset:
        return {}
    if not {"before", "after"} <= found.scalars.keys() or wanted.before is not None:
        fail(TITLE, "position_bias", "none beside a window and a cache", f"queries from position {offset} on")
    return {} if wanted.after is None else {"after": wanted.after + offset}


def _seed() -> Tensor:
    """A seed of torch's CPU generator, which checkpointing and manual_seed repeat; an op reads no tensor of a GPU."""
    return torch.randint(2**31, ())


def _called(
    op: Any,
    module: Any,
    mask: AttentionMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    arguments: dict[str, Any],
) -> Tensor:
    """Call an op, with the schedule that calls like this one share."""
    batch, _, length, _ = query.shape
    packed = "cu_seqlens_q" in arguments
    if packed:
        query, key, value = packed_row(query), packed_row(key), packed_row(value)
    else:
        arguments["layout"] = "bshd"
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    shares = packed or "q_segment_ids" in arguments
    cache = cache_of(mask, arguments.get("cu_seqlens_q")) if shares else None
    if cache is not None:
        arguments["schedule"] = schedule(op, cache, module, query, key, value, arguments)
    o: Tensor = op(query, key, value, scale=scaling, **arguments)
    return o.unflatten(0, (batch, length)) if packed else o


# ----------------------------------------------------------------------------------------------------- ops of one's own


def _own(op: Callable[..., Any], tensors: dict[str, Any]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that computes every layer by one op."""
    name = getattr(op, "__name__", type(op).__name__)

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
        mask = _checked(attention_mask, given)
        query, key, value = _of_one_dtype(query, key, value)
        batch = {"query": query, "key": key, "value": value, "attention_mask": mask, "scaling": scaling, **given}
        arguments = {each: x(module, batch) if callable(x) else x for each, x in tensors.items()}
        if given.get("s_aux") is not None and "sink" not in arguments:
            fail(TITLE, "s_aux", f"no sinks: {name} was registered without them", "sinks of the model")
        if dropout and "dropout_p" not in arguments:
            arguments |= {"dropout_p": dropout, "seed": _seed()}
        is_causal = mask is None or mask.after == 0
        wanted = Attention(after=0 if is_causal else None)
        arguments |= _tokens(mask, query, key, given, is_causal=is_causal, needs_rows=bool(tensors))
        found = Found(name=name, scalars={})
        arguments |= _positions(mask, query, key, found, wanted, arguments, is_causal=is_causal)
        return _called(op, module, mask, query, key, value, scaling, arguments), None

    return attend
