# SPDX-License-Identifier: Apache-2.0
"""Which variant computes each layer of a model of transformers: the model runs once, with attention left out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from .._runtime.core.checks import fail
from .entries import Attention, entry
from .transformers_masks import TITLE

TOKENS = 8

RECORDED = "codegen-explain"
"""The `attn_implementation` of a model while its calls are written down."""


@dataclass(kw_only=True)
class Layer:
    """One call of attention: what it computes, if known, and the variant with its scalars, or why no variant serves it.

    `heads`: query heads and key heads. `head_dim` of queries and keys, `head_dim_v` of values.
    """

    module: torch.nn.Module
    wanted: Attention | None = None
    name: str = ""
    variant: str = ""
    scalars: dict[str, int | float] = field(default_factory=dict)
    refused: str = ""
    heads: tuple[int, int] = (0, 0)
    head_dim: int = 0
    head_dim_v: int = 0

    @property
    def text(self) -> str:
        """What computes the layer."""
        if self.refused:
            return f"not served: {self.refused}"
        scalars = ", ".join(f"{name}={value}" for name, value in self.scalars.items())
        return f"{self.variant}({scalars})" if scalars else self.variant


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What computes the attention of a model, layer by layer; as text, a table. `refused`: why the whole run failed."""

    model: str
    layers: tuple[Layer, ...]
    refused: str = ""

    @property
    def is_served(self) -> bool:
        """Whether every layer has a variant that computes it."""
        return bool(self.layers) and not self.refused and not any(layer.refused for layer in self.layers)

    def __str__(self) -> str:
        served = sum(not layer.refused for layer in self.layers)
        lines = [f"{self.model}: {len(self.layers)} layers call attention, {served} are served"]
        for text, run in groupby(self.layers, key=lambda layer: layer.text):
            names = [layer.name for layer in run]
            place = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(f"  {place}: " + text.replace("\n", "\n    "))
        return "\n".join([*lines, *([f"  not served: {self.refused}"] if self.refused else [])])

    def spec(self) -> str:
        """A spec file with a variant for each attention that the model computes, its windows and caps compiled in.

        Raises:
            ArgumentError: a layer that no entry could serve, such as a layer that computes attention in its own code.
        """
        return spec_text([self])


def spec_text(runs: Sequence[Explanation]) -> str:
    """The spec of several runs of one model, such as in inference and in training: see `Explanation.spec`."""
    layers = [layer for run in runs for layer in run.layers]
    refused = [run.refused for run in runs if run.refused] + [layer.refused for layer in layers if not layer.wanted]
    if refused or not layers:
        fail("spec", "model", "one whose attention can be served", refused[0] if refused else "no layer with attention")
    different = dict.fromkeys(layer.wanted for layer in layers if layer.wanted is not None)
    lines = [f"# The attention of {runs[0].model}, its windows and caps compiled in.", "variants:"]
    for wanted in different:
        count, total = _spread(wanted, runs)
        _, name, *rest = entry(wanted, constants=True).splitlines()
        when = " in training" if wanted.dropout else ""
        lines += [name, f"    doc: {count} of {total} layers of {runs[0].model}{when}.", *rest]
    return "\n".join(lines) + "\n"


def _spread(wanted: Attention, runs: Sequence[Explanation]) -> tuple[int, int]:
    """How many layers compute an attention, and how many layers there are, in the first run that has this attention."""
    run = next(run for run in runs if any(layer.wanted == wanted for layer in run.layers))
    return sum(layer.wanted == wanted for layer in run.layers), len(run.layers)


def recording_of(model: Any, inputs: Mapping[str, Any], records: list[Layer]) -> Explanation:
    """Run a model once by the implementation RECORDED, which writes calls of attention into `records`."""
    refused = ""
    names = {id(module): name for name, module in model.named_modules()}
    given = dict(inputs) or _inputs(model)
    chosen = {id(config): config._attn_implementation for config in _configs(model)}
    try:
        with _implementation(model, RECORDED), torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**given)
    except (NotImplementedError, TypeError, ValueError) as error:
        refused = str(error)
        if not refused.startswith(TITLE):
            raise
    if not records and not refused:
        refused = "no layer calls attention through transformers' AttentionInterface"
    for layer in records:
        layer.name = names.get(id(layer.module), type(layer.module).__name__)
        layer.refused = layer.refused or _not_reached(model, layer.module, chosen)
    return Explanation(model=type(model).__name__, layers=tuple(records), refused=refused)


def is_of_transformers(name: str) -> bool:
    """Whether an `attn_implementation` is one that transformers itself has, or loads."""
    return name in ("eager", "sdpa", "flex_attention") or name.startswith(("flash_attention", "paged|")) or "/" in name


def _not_reached(model: Any, module: Any, chosen: Mapping[int, str | None]) -> str:
    """Why a layer does not run the implementation that was registered here and that its model has; "" if it does.

    `chosen`: the implementations of configs, by their ids.
    """
    name = chosen.get(id(model.config))
    own = chosen.get(id(getattr(module, "config", None)), name)
    if name is None or own == name or is_of_transformers(name.removeprefix("paged|")):
        return ""
    return (
        f"{TITLE}: attn_implementation: expected {name!r}, that of the model: build the model with it, because "
        f"set_attn_implementation does not reach this layer, got {own!r}"
    )


def _configs(model: Any) -> list[Any]:
    """The configs of a model and of its parts, each once."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation")}.values())


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    """Switch a model and all its parts to another attention implementation inside the `with` block."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _inputs(model: Any) -> dict[str, Any]:
    """Inputs for a call of a model, made from its config."""
    device = next(model.parameters()).device
    config = model.config
    tokens = torch.arange(1, 1 + TOKENS, device=device)[None]
    if model.main_input_name == "input_ids":
        return {"input_ids": tokens, **({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if model.main_input_name == "pixel_values" and size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (1, getattr(vision, "num_channels", 3), height, width)
        return {"pixel_values": torch.zeros(shape, device=device, dtype=model.dtype)}
    fail("explain", "inputs", f"what {type(model).__name__} is called with, by keyword", "nothing")
