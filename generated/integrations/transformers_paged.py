# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers with the ops of this package on its paged cache.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> name = register()  # "paged|codegen": each layer's variant follows from what the model passes
>>> tiny = LlamaConfig(
...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
... )
>>> model = LlamaForCausalLM(tiny)
>>> model.set_attn_implementation(name)

Then `manager(model, ...)`, or transformers' own `model.generate_batch(...)`, serves requests. Another op, or one with
tensors of its own, gets a name of its own: `register("alibi", alibi, slope=lambda layer: layer.slope)`.

transformers keeps one cache `[slots, Hkv, D]` per layer and calls attention once per step, with the tokens of all
requests concatenated. The arguments of a step decide which call of the op serves it:

| step | passed | call |
|---|---|---|
| each request has one new token | `block_table` | `append`, then on pages of `block_size` |
| prompts, parts of prompts and tokens | `read_index`, the slots of all keys | `append`, then on pages of one token |
| prompts without cached tokens | no `read_index` | `append`, then the packed call on k and v |
| one new token each, in a layer with a sliding window | slots of a ring | `append`, then on pages of one token |
| other steps, in a layer with a sliding window | slots of a ring | the cache's own update gathers keys, then packed |

The first layer that needs the plan, slots or lengths of a step makes them for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .._runtime.core.checks import check_int, fail
from .._runtime.core.row_classes import check_splits
from .entries import Attention
from .transformers_plans import CHOSEN_KEYS
from .transformers_steps import GIVEN, Own, Tokens, parameters, step_of
from .variants import find

__all__ = ["TESTED", "manager", "register"]

TESTED = ("5.17", "5.18")
"""The supported versions of transformers: from the first, which the tests run with, up to but not including the second.
There is an upper limit because transformers' paged cache is no public interface."""

PREFIX = "paged|"
OWN_KEYWORDS = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Keywords of models that change the result: a registered op must read each one that is given, or `ignore` lists it."""

_PACKAGE = __name__.rpartition(".integrations.")[0]
_NAMES: set[str] = set()

Argument = Tensor | int | float | str | Callable[[nn.Module], Any]
"""The source of an op's own argument: a value, the name of a keyword that the model passes to attention, or a function
of the attention module."""


def register(
    name: str = "codegen",
    op: Callable[..., Any] | None = None,
    /,
    *,
    ignore: tuple[str, ...] = (),
    splits: int | str | None = None,
    **arguments: Argument,
) -> str:
    """Make `paged|<name>` an attention implementation of transformers, for continuous batching.

    Args:
        name: the part of the name after `paged|`.
        op: a torch op of this package, or of another one that was rendered, for every layer. By default each layer runs
            the variant of this package that computes what the model asks for: causal, with a window, softcap and sink.
        ignore: keywords of OWN_KEYWORDS that the model passes and that the op shall not read.
        splits: how decoding steps split the keys: the argument `splits` of the ops.
        arguments: the op's own tensors and scalars by name, such as `slope=lambda layer: layer.slope`,
            `sink="s_aux"` or `size=128`.

    Returns:
        The full name, for `model.set_attn_implementation`.

    Raises:
        ImportError: transformers is of a version that this module was not tested with.
        ArgumentError: a name with `|`, an op that has no paged call or does not take one of the arguments.
    """
    _check_version()
    if not isinstance(name, str) or not name or "|" in name:
        fail("register", "name", "a name without '|'", repr(name))
    if op is None and arguments:
        fail("register", next(iter(arguments)), "an op beside arguments of its own", "op=None")
    if op is not None:
        _check_op(op, arguments)
    for keyword in ignore:
        if keyword not in OWN_KEYWORDS:
            fail("register", "ignore", f"some of {', '.join(OWN_KEYWORDS)}", repr(keyword))
    served = _Served(PREFIX + name, op, dict(arguments), frozenset(ignore), check_splits("register", splits))
    transformers.AttentionInterface.register(served.name, served)
    _NAMES.add(served.name)
    return served.name


def manager(
    model: Any,
    generation_config: Any = None,
    config: Any = None,
    *,
    most_tokens: int | None = None,
    workload_hints: Any = None,
) -> Any:
    """transformers' manager of requests for a model whose attention implementation has one of the registered names.

    It differs from `model.init_continuous_batching(...)` in two defaults. With `most_tokens`, steps in which each
    request has one token read a block table, which transformers by default gives only to FlashAttention. On a GPU,
    these steps replay CUDA graphs (without a block table, all steps do), and the next step is prepared while the
    current one runs.

    Args:
        model: a model with `model.set_attn_implementation("paged|...")`.
        generation_config: a `GenerationConfig`, by default the model's.
        config: a `ContinuousBatchingConfig`. The defaults above are written into the fields that it leaves None.
        most_tokens: the most tokens of a request, prompt and answer. Models with sliding layers have no block table.
        workload_hints: `WorkloadHints` for transformers' own defaults.

    Raises:
        ArgumentError: the model's attention implementation has none of the registered names.
    """
    _check_version()
    name = model.config._attn_implementation
    if name not in _NAMES:
        expected = (
            f"a model with set_attn_implementation of one of {', '.join(sorted(_NAMES)) or 'what register returns'}"
        )
        fail("manager", "model", expected, name)
    config = transformers.ContinuousBatchingConfig() if config is None else config
    if most_tokens is not None:
        most_tokens = check_int("manager", "most_tokens", most_tokens, 1)
    has_table = most_tokens is not None and not _slides(model.config.get_text_config())
    if model.device.type == "cuda":
        if config.use_cuda_graph is None:
            # (steps with slots, steps with a table): steps with slots need many graphs, one for each range of sizes.
            config.use_cuda_graph = (not has_table, True)
        if config.use_async_batching is None:
            config.use_async_batching = True
    found = model.init_continuous_batching(
        generation_config=generation_config, continuous_batching_config=config, workload_hints=workload_hints
    )
    if most_tokens is not None and has_table:
        # The manager reads this when it makes the cache, at the start or in the warm-up.
        found.continuous_batching_config.max_blocks_per_request = -(-most_tokens // config.block_size)
    return found


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is not None
    return "sliding_attention" in kinds


def _check_version() -> None:
    least, end = TESTED
    found = transformers.__version__
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not tuple(map(int, least.split("."))) <= numbers < tuple(map(int, end.split("."))):
        raise ImportError(
            f"transformers {found}: continuous batching was tested with {least} up to, not including, {end}; "
            f"install transformers=={least}.*"
        )


def _check_op(op: Any, arguments: Mapping[str, Any]) -> None:
    if not callable(op) or not hasattr(op, "plan"):
        fail("register", "op", "a torch op of a rendered package that has a paged call", type(op).__name__)
    for name in arguments:
        if name not in parameters(op):
            fail("register", name, f"an argument of {op.__name__}", "one that it does not have")
        if name in GIVEN:
            fail("register", name, f"a tensor or scalar of {op.__name__}'s own", "an argument that each step gives")


# ------------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True, eq=False)
class _Served:
    """An attention function of transformers: q `[1, Hq, T, D]`, k and v `[1, Hkv, T, D]` to o `[1, T, Hq, D]`."""

    name: str
    op: Callable[..., Any] | None
    arguments: dict[str, Argument]
    ignored: frozenset[str]
    splits: int | str | None

    @torch.compiler.disable(reason="the plan of a step is shared between layers")  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        cache: Any = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Any = None,
        max_seqlen_q: int = 0,
        block_table: Tensor | None = None,
        read_index: list[Tensor] | None = None,
        write_index: list[Tensor] | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        if cache is None or cu_seq_lens_q is None:
            fail(self.name, "cache", "the cache of continuous batching, which this name is for", "None")
        self._check(attention_mask, dropout, key, value, keywords)
        layer: Any = module
        number: int = layer.layer_idx
        group, at = cache.layer_index_to_group_indices[number]
        ring = cache.sliding_windows[number]
        # Not the layer's attribute, which full layers of EXAONE 4 and Qwen2 MoE have, too.
        window = keywords.get("sliding_window") or (ring if ring > 1 else None)
        if window == 1:
            fail(self.name, "sliding_window", "2 or more: to transformers' paged cache, 1 means no window", 1)
        own = self._own(module, keywords | {"sliding_window": window})
        if isinstance(cu_seq_lens_k, dict):
            cu_seq_lens_k = cu_seq_lens_k["full_attention" if ring == 1 else "sliding_attention"]
        tokens = Tokens(
            step=step_of(cache, number, cu_seq_lens_q),
            own=own,
            q=query[0].transpose(0, 1),
            k=key[0].transpose(0, 1),
            v=value[0].transpose(0, 1),
            k_cache=cache.key_cache[at],
            v_cache=cache.value_cache[at],
            scale=scaling,
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k,
            most_queries=max_seqlen_q,
            group=group,
        )
        if block_table is not None:
            return tokens.decode(block_table[group], cache.block_size)[None], None
        assert read_index is not None
        assert write_index is not None
        read, write = read_index[group], write_index[group]
        if read.numel() == 0:
            return tokens.first(write)[None], None
        if ring == 1:
            return tokens.mixed(read, write)[None], None
        if max_seqlen_q == 1:
            return tokens.next_in_ring(read, write, cache.sentinel_index)[None], None
        k, v = cache.update(key, value, number, read_index, write_index)
        return tokens.packed(k, v)[None], None

    def _check(
        self, attention_mask: Any, dropout: float, key: Tensor, value: Tensor, keywords: Mapping[str, Any]
    ) -> None:
        if attention_mask is not None:
            fail(self.name, "attention_mask", "None: the op computes the mask", type(attention_mask).__name__)
        if dropout:
            fail(self.name, "dropout", "0 in serving: call model.eval()", dropout)
        if keywords.get("output_attentions"):
            fail(self.name, "output_attentions", "False: no kernel holds the weights", True)
        for name in CHOSEN_KEYS:
            if keywords.get(name) is not None:
                fail(self.name, name, "None: no op reads the keys that an indexer chooses", "indices of keys")
        if keywords.get("is_causal") is False:
            fail(self.name, "is_causal", "a causal model, which generates token by token", False)
        if value.shape != key.shape:
            expected = f"{list(key.shape)}, that of key: the cache has one head_dim"
            fail(self.name, "value", expected, list(value.shape))

    def _own(self, module: nn.Module, keywords: Mapping[str, Any]) -> Own:
        """The op of a layer, and its own arguments."""
        given = {name: keywords[name] for name in OWN_KEYWORDS if keywords.get(name) is not None}
        if self.op is None:
            kept = {name: value for name, value in given.items() if name not in self.ignored}
            return Own(*_variant(self.name, kept), self.splits)
        read = {x for x in self.arguments.values() if isinstance(x, str)}
        for name in given.keys() - read - self.ignored:
            expected = f"{self.op.__name__} to read it, by register(..., {name!r}), or ignore=({name!r},)"
            fail(self.name, name, expected, "an op that does not")
        values = {name: _value(self.name, name, x, module, keywords) for name, x in self.arguments.items()}
        return Own(self.op, values, self.splits)


def _variant(name: str, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The op of this package that computes what a model passes, and its own arguments."""
    if "position_bias" in given:
        fail(name, "position_bias", "None, or a registered op that reads it", "a bias")
    window = given.get("sliding_window")
    before = None if window is None else window - 1
    found = find(Attention(before=before, after=0, cap=given.get("softcap"), sink="s_aux" in given))
    arguments: dict[str, Any] = dict(found.scalars)
    if "s_aux" in given:
        arguments["sink"] = given["s_aux"]
    return getattr(import_module(f"{_PACKAGE}.torch"), found.name), arguments


def _value(op: str, name: str, argument: Argument, module: nn.Module, keywords: Mapping[str, Any]) -> Any:
    if isinstance(argument, str):
        if keywords.get(argument) is None:
            fail(op, name, f"a model that passes {argument!r} to attention", f"none from {type(module).__name__}")
        return keywords[argument]
    return argument(module) if callable(argument) and not isinstance(argument, Tensor) else argument
