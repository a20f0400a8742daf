"""The ops as an inner attention of torchtitan's models.

`CodegenAttention.Config` takes the place of a layer's `inner_attention`; `with_codegen` puts it into a whole model's
config. It subclasses the config of torchtitan's varlen attention, so that models pass it the same arguments:
`VarlenMetadata` for the documents of a batch. The `window_size` of a layer decides which variant computes it:

>>> CodegenAttention.Config(window_size=(127, 0)).build()
CodegenAttention(window, size=128)

A variant may also be named, with its scalars, and with its tensors as parameters:

>>> slopes = {"slope": torch.nn.init.zeros_}
>>> CodegenAttention.Config(variant="alibi", tensors={"slope": (8,)}, param_init=slopes).build()
CodegenAttention(alibi, slope=(8,))
"""

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from .. import torch as ops
from .._runtime.core.checks import fail
from .._runtime.core.options import known_lengths
from .entries import Attention
from .variants import find

__all__ = ["CodegenAttention", "with_codegen"]

_TITLE = "CodegenAttention"
_ANY_WINDOW = (-1, 0)

Argument = Callable[[torch.nn.Module, Mapping[str, Any]], Tensor]
"""A tensor of a variant, computed from the module and from all that its call was given, by name."""


class CodegenAttention(Module):
    """Inner attention by an op of this package, in the place of torchtitan's `VarlenAttention` or `FlexAttention`.

    Documents come as `attention_masks`: `VarlenMetadata`, or positions `[B, L]` that are 0 where a document begins, or
    None if each batch row is one document. A variant's positions count from the beginning of a document.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        variant: str | None = None
        """An op of `generated.torch`. None: the one that computes `window_size`."""
        scalars: dict[str, int | float] = field(default_factory=dict)
        """The scalars of `variant`, by name."""
        tensors: dict[str, tuple[int, ...] | Argument] = field(default_factory=dict)
        """The tensors of `variant`, by name: the shape of a parameter, which `param_init` initialises, or a function
        of the module and of what its call was given, which computes the tensor."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.variant, self.scalars = _chosen(config)
        self.op: Callable[..., Any] = getattr(ops, self.variant)
        self.tensors = dict(config.tensors)
        _check_arguments(self.op, self.variant, {**self.scalars, **self.tensors})
        for name, given in self.tensors.items():
            if not callable(given):
                self.register_parameter(name, torch.nn.Parameter(torch.empty(given)))

    def extra_repr(self) -> str:
        given = {**self.scalars, **self.tensors}
        return ", ".join([self.variant, *(f"{name}={value}" for name, value in given.items())])

    # torchtitan's sharding configs use these names of q, k and v.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata | Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of q `[B, L, N, H]`, k `[B, L, K, H]` and v `[B, L, K, Hv]`: `[B, L, N, Hv]`.

        Later revisions than 0.3.0 pass a batch as one row of tokens, `[T, N, H]` beside `VarlenMetadata`: o and lse are
        then `[T, N, Hv]` and `[T, N]`.

        Args:
            attention_masks: the documents, see the class.
            scale: factor of the scores, by default `H ** -0.5`.
            enable_gqa: follows from the shapes, and is not read.
            out_transform: called with o and the natural log of the softmax denominator, float32 `[B, L, N]`, both
                differentiable; what it returns is returned. gpt-oss's sinks are such a function.

        Raises:
            ArgumentError: `attention_masks` are of another kind, such as FlexAttention's block masks.
        """
        del enable_gqa
        batch = {
            **kwargs,
            "q": q_BLNH,
            "k": k_BLNH,
            "v": v_BLNH,
            "attention_masks": attention_masks,
        }
        arguments = {**self.scalars, **{name: self._tensor(name, batch) for name in self.tensors}}
        # Rotary embeddings in float32 leave q and k in a wider dtype than v.
        q, k, v = (x.to(v_BLNH.dtype) for x in (q_BLNH, k_BLNH, v_BLNH))
        if isinstance(attention_masks, VarlenMetadata):
            packed = {"cu_seqlens_q": attention_masks.cu_seq_q, "cu_seqlens_k": attention_masks.cu_seq_k}
            packed |= known_lengths(attention_masks.max_q, attention_masks.max_k)
            rows = (x.flatten(0, -3) for x in (q, k, v))
            o, lse = self.op(*rows, scale=scale, return_lse=True, **packed, **arguments)
            o, lse = o.unflatten(0, q.shape[:-2]), lse.T.unflatten(0, q.shape[:-2])
        else:
            if q.dim() != 4:
                fail(
                    _TITLE, "attention_masks", "VarlenMetadata beside tensors [T, N, H]", type(attention_masks).__name__
                )
            arguments |= _documents(attention_masks, tuple(q.shape[:2]))
            o, lse = self.op(q, k, v, layout="bshd", scale=scale, return_lse=True, **arguments)
            lse = lse.transpose(1, 2)
        o = o.to(q_BLNH.dtype)
        return o if out_transform is None else out_transform(o, lse)

    def _tensor(self, name: str, batch: Mapping[str, Any]) -> Tensor:
        given = self.tensors[name]
        x: Tensor = given(self, batch) if callable(given) else getattr(self, name)
        # Under tensor parallelism q, k and v arrive as the shards of this rank, so the op's other tensors must be too.
        return x.to_local(grad_placements=x.placements) if isinstance(x, DTensor) else x


def with_codegen(
    config: Any,
    *,
    variant: str | None = None,
    scalars: Mapping[str, int | float] | None = None,
    tensors: Mapping[str, tuple[int, ...] | Argument] | None = None,
    param_init: Mapping[str, Callable[[Tensor], Any]] | None = None,
    where: Callable[[str], bool] = lambda name: True,
) -> Any:
    """A model's config with `CodegenAttention` for its inner attentions; the given config stays as it is.

        config = with_codegen(model_registry("debugmodel", attn_backend="varlen").model)

    Args:
        config: of a model or of a part of it, made with `attn_backend="varlen"`: windows are then in the configs of
            layers, from which they are read, and not in masks.
        variant: an op of `generated.torch` for these layers, in place of the one that computes a layer's window.
        scalars: as those of `CodegenAttention.Config`.
        tensors: likewise.
        param_init: how the parameters among `tensors` are initialised, by name.
        where: which layers, by the name of their inner attention such as "layers.0.attention.inner_attention".

    Raises:
        ArgumentError: no layer that `where` picks has varlen attention.
    """
    config = deepcopy(config)
    own: dict[str, Any] = {"variant": variant, "scalars": dict(scalars or {}), "tensors": dict(tensors or {})}
    others: list[str] = []
    served = 0
    for name, inner, parent, attribute in list(config.traverse(Module.Config, recurse=True)):
        if name.rpartition(".")[2] != "inner_attention" or not where(name):
            continue
        if not isinstance(inner, VarlenAttention.Config):
            others.append(f"{name} = {type(inner).__qualname__}")
            continue
        window = inner.window_size if variant is None else _ANY_WINDOW
        begins = inner.param_init if param_init is None else dict(param_init)
        found = CodegenAttention.Config(
            window_size=window, param_init=begins, sharding_config=inner.sharding_config, **own
        )
        if parent is None:
            config = found
        elif isinstance(parent, list):
            parent[attribute] = found
        else:
            setattr(parent, attribute, found)
        served += 1
    if others or not served:
        expected = 'layers with varlen attention: make the config with attn_backend="varlen"'
        fail("with_codegen", "config", expected, ", ".join(others) or "none that `where` picks")
    return config


# ----------------------------------------------------------------------------------------------------------- variants


def _chosen(config: CodegenAttention.Config) -> tuple[str, dict[str, int | float]]:
    """The name of the variant of a config, and its scalars."""
    if config.variant is None:
        for argument in ("scalars", "tensors"):
            if getattr(config, argument):
                fail(_TITLE, argument, "none, as variant=None is found by window_size", getattr(config, argument))
        left, right = config.window_size
        found = find(Attention(before=None if left < 0 else left, after=None if right < 0 else right))
        return found.name, dict(found.scalars)
    if config.variant not in ops.__all__:
        fail(_TITLE, "variant", f"one of {', '.join(ops.__all__)}", repr(config.variant))
    if tuple(config.window_size) != _ANY_WINDOW:
        expected = f"{_ANY_WINDOW}, as variant={config.variant!r} has a mask of its own"
        fail(_TITLE, "window_size", expected, config.window_size)
    return config.variant, dict(config.scalars)


def _check_arguments(op: Callable[..., Any], variant: str, given: Mapping[str, Any]) -> None:
    """Check that `given` names all tensors and scalars of a variant, and no others."""
    # A signature lists q, k and v, the variant's own arguments, and then the options of all ops, `scale` first.
    own = list(takewhile(lambda name: name != "scale", inspect.signature(op).parameters))[3:]
    if set(own) != given.keys():
        expected = f"those of {variant}: {', '.join(own) or 'none'}"
        fail(_TITLE, "scalars and tensors", expected, ", ".join(given) or "none")


# ---------------------------------------------------------------------------------------------------------- documents


def _documents(positions: Any, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Segment ids and positions of a dense call, from positions that begin at 0 with each document."""
    if positions is None:
        return {}
    if not isinstance(positions, Tensor) or positions.is_floating_point() or tuple(positions.shape) != sizes:
        got = (
            f"{positions.dtype} {list(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        fail(_TITLE, "attention_masks", f"VarlenMetadata, integer positions {list(sizes)} or None", got)
    ids = (positions == 0).cumsum(1, dtype=torch.int32)
    places = positions.to(torch.int32)
    return {"q_segment_ids": ids, "kv_segment_ids": ids, "q_positions": places, "kv_positions": places}
