# SPDX-License-Identifier: Apache-2.0
"""The mask function for transformers: it stores a mask as a few numbers and vectors instead of an `[S, S]` tensor.

transformers describes a mask as a function of batch row, head, query and key, which it builds from ten functions of its
own. `attention_mask` recognises each of them by its code object and reads the numbers in its closure. Any other
function raises an error that names the function.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from .._runtime.core.checks import fail
from .transformers_mixed import ONE, mixed

TITLE = "codegen attention"
"""The prefix of errors in calls from transformers."""

_TENSORS = ("padding", "packed", "image", "left_padding", "q_offset")
"""The fields of a mask that may be tensors and that decide the arguments of calls."""
_READ = ("before", "after", "chunk", "packed", "image", "padding")
"""The fields of a mask that are read from mask functions: two bounds first."""


class MaskIsReadError(NotImplementedError, AttributeError):
    """A model reads the mask as if it were a tensor. `hasattr` takes it for a missing attribute."""

    def __init__(self, what: str) -> None:
        expected = "a model that only passes its mask on to attention"
        got = f"one that reads {what} of the mask itself: use 'eager' there"
        if (layers := mixed()) is not None:
            expected, got = ONE, layers
        super().__init__(f"{TITLE}: attn_implementation: expected {expected}, got {got}")


@dataclass(eq=False, repr=False, kw_only=True)
class AttentionMask(masking_utils.BlockMask):
    """The mask that transformers passes to all layers of one kind: which keys each query sees.

    A subclass of `BlockMask` with a shape of four axes, so that transformers passes it on as a finished mask.

    `before`, `after`, `chunk`: as in `variants.Attention`. `left_padding`: integers `[B]`, the padding tokens on the
    left of each row, after which its first chunk begins. `image`: integers `[B, kv_length]`, the index of a token's
    image, or -1. `packed`: integers `[B, q_length]`, the index of a token's sequence. `padding`: bool
    `[B, kv_length]`, False where a key is padding. Query row i is at position `q_offset + i`, key j at
    `kv_offset + j`. `cache`: values that all layers of a forward share. `plans`: plans of calls with this mask.
    `copies`: this mask on other devices.
    """

    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    before: int | None = None
    after: int | None = None
    chunk: int | None = None
    left_padding: Tensor | None = None
    image: Tensor | None = None
    packed: Tensor | None = None
    padding: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict)
    plans: list[Any] = field(default_factory=list)
    copies: dict[Any, "AttentionMask"] = field(default_factory=dict)

    def tensors(self) -> tuple[Any, ...]:
        """The fields `_TENSORS`; each may also be None."""
        return self.padding, self.packed, self.image, self.left_padding, self.q_offset

    def versions(self) -> tuple[int | None, ...]:
        """torch's version counter of each of `tensors()`, which in-place writes raise; None if it has no counter."""
        return tuple([x._version if isinstance(x, Tensor) and not x.is_inference() else None for x in self.tensors()])

    @property
    def is_bounded(self) -> bool:
        """Whether the mask says more than which keys are padding."""
        bounds = self.before, self.after, self.chunk, self.image, self.packed
        return any(bound is not None for bound in bounds)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_length, self.kv_length

    @property
    def ndim(self) -> int:
        return 4

    def to(self, device: Any, **_: Any) -> "AttentionMask":
        """The mask on a device. Accelerate asks for it before every module of a model on several devices."""
        place = torch.device(device), self.versions()
        if place not in self.copies:
            moved: dict[str, Any] = {
                name: x.to(device) for name in _TENSORS if isinstance(x := getattr(self, name), Tensor)
            }
            if all(x is getattr(self, name) for name, x in moved.items()):
                return self  # not kept, because a mask that refers to itself would wait for the garbage collector
            self.copies[place] = replace(self, **moved, cache={}, plans=[], copies={})
        return self.copies[place]

    def __getitem__(self, index: Any) -> Any:
        raise MaskIsReadError("elements")

    def __getattr__(self, name: str) -> Any:
        raise MaskIsReadError(f"`{name}`")

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise MaskIsReadError("elements")

    def __repr__(self) -> str:
        said = {name: getattr(self, name) for name in ("before", "after", "chunk")}
        said |= {name: True for name in ("image", "packed", "padding") if getattr(self, name) is not None}
        known = ", ".join(f"{name}={value}" for name, value in said.items() if value is not None)
        return f"AttentionMask({list(self.shape)}{', ' if known else ''}{known})"

    __str__ = __repr__


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    *,
    is_replaced: bool = False,
    **said: Any,
) -> AttentionMask:
    """Make the mask of all layers of one kind, once per forward: the function that `AttentionMaskInterface` registers.

    With `is_replaced` an op of the user's own computes the layers. Its mask replaces all mask functions that are not
    known here.

    Raises:
        ArgumentError: the model does not call its attention through transformers' interface.
        NotImplementedError: a part of the mask is none of transformers' own mask functions.
    """
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a cache may count on in this tensor before the layers read the mask
    mask = AttentionMask(
        batch=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset
    )
    if attention_mask is not None:
        whole = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask.padding = whole[:, kv_offset : kv_offset + kv_length]
    if torch.compiler.is_compiling():
        _read_while_tracing(mask, mask_function, config, said, is_replaced=is_replaced)
    else:
        _check_interface(config)
        _read(mask, mask_function, is_replaced=is_replaced)
    if mask.chunk is not None and mask.padding is not None:
        mask.left_padding = (attention_mask.cumsum(-1) == 0).sum(-1)  # type: ignore[union-attr]
    return mask


# ------------------------------------------------------------------------------------------------------ mask functions


def _codes() -> dict[Any, str]:
    """The names of transformers' mask functions by their code objects, which identify the closures."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    try:
        made = {
            "causal": masking_utils.causal_mask_function,
            "full": masking_utils.bidirectional_mask_function,
            "window": masking_utils.sliding_window_overlay(1),
            "both_sides": masking_utils.sliding_window_bidirectional_overlay(1),
            "chunk": masking_utils.chunked_overlay(1, ids),
            "image": masking_utils.blockwise_overlay(ids),
            "packed": masking_utils.packed_sequence_mask_function(ids),
            "padding": masking_utils.padding_mask_function(ids),
            "and": masking_utils.and_masks(),
            "or": masking_utils.or_masks(),
        }
        return {function.__code__: name for name, function in made.items()}
    except (AttributeError, TypeError) as error:
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} builds its masks in another way than 5.17, "
            f"which this module is made for: pip install 'transformers>=5.17,<5.18' ({error})"
        ) from error


_CODES = _codes()
_ALL = (lambda *_: torch.tensor(True, dtype=torch.bool)).__code__


def _read(mask: AttentionMask, function: Callable[..., Any], *, is_replaced: bool) -> None:
    """Fill in the fields of a mask from the closure of a mask function."""
    name = _kind(function)
    values = inspect.getclosurevars(function).nonlocals if name else {}
    if name == "and":
        for part in values["mask_functions"]:
            _read(mask, part, is_replaced=is_replaced)
        if not is_replaced and any(_kind(part) == "window" for part in values["mask_functions"]):
            _check_images(mask)
    elif name == "or":
        _read_either(mask, function, values["mask_functions"], is_replaced=is_replaced)
    elif name == "causal":
        _narrow(mask, after=0)
    elif name == "window":
        _narrow(mask, before=int(values["sliding_window"]) - 1)
    elif name in ("both_sides", "distance"):
        reach = int(values["sliding_window"]) - (name == "distance")
        _narrow(mask, before=reach, after=reach)
    elif name == "chunk":
        mask.chunk = int(values["chunk_size"])
    elif name == "packed":
        mask.packed = values["packed_sequence_mask"].to(torch.int32)
    elif name == "padding":
        mask.padding = values["padding_mask"][:, : mask.kv_length]
    elif name != "full" and not is_replaced:
        _refuse(function)


def _read_either(
    mask: AttentionMask, function: Callable[..., Any], parts: Sequence[Callable[..., Any]], *, is_replaced: bool
) -> None:
    """Fill in the fields of a mask from functions of which one must hold: bounds of positions, or images beside one."""
    images = [part for part in parts if _kind(part) == "image"]
    others = [part for part in parts if _kind(part) != "image"]
    if is_replaced:
        others = [part for part in others if _kind(part)]
    elif len(images) > 1 or not others:
        _refuse(function)
    if len(others) == 1:
        _read(mask, others[0], is_replaced=is_replaced)
    else:
        _read_union(mask, function, others, is_replaced=is_replaced)
    # Last, because a window inside of these functions does not hold for images.
    for image in images:
        ids = inspect.getclosurevars(image).nonlocals["block_sequence_ids"]
        mask.image = ids[:, mask.kv_offset : mask.kv_offset + mask.kv_length].to(torch.int32)


def _read_union(
    mask: AttentionMask, function: Callable[..., Any], parts: Sequence[Callable[..., Any]], *, is_replaced: bool
) -> None:
    """Bounds of which one must hold. `function` joins the parts."""
    # Every bound includes the query's own position, so that the union of several is one run of positions, too.
    blank: dict[str, Any] = dict.fromkeys(_READ)
    befores: list[int | None] = []
    afters: list[int | None] = []
    for part in parts:
        read = replace(mask, **blank, cache={}, plans=[], copies={})
        _read(read, part, is_replaced=is_replaced)
        if any(getattr(read, name) is not None for name in _READ[2:]):
            if is_replaced:
                return
            _refuse(function)
        befores.append(read.before)
        afters.append(read.after)
    _narrow(mask, before=_widest(befores), after=_widest(afters))


def _widest(bounds: Sequence[int | None]) -> int | None:
    known = [x for x in bounds if x is not None]
    return max(known) if known and len(known) == len(bounds) else None


def _check_images(mask: AttentionMask) -> None:
    """Refuse images that are longer than a window that holds for them, too: the variants keep images whole."""
    ids, window = mask.image, 1 + (mask.before or 0)
    if ids is None or ids.is_meta or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if bool(((ids[:, window:] == ids[:, :-window]) & (ids[:, window:] >= 0)).any()):
        fail(TITLE, "image", f"images of {window} tokens at most, the window of the layer: use 'eager'", "longer ones")


def _narrow(mask: AttentionMask, *, before: int | None = None, after: int | None = None) -> None:
    """Add bounds to those of a mask."""
    mask.before = min((x for x in (mask.before, before) if x is not None), default=None)
    mask.after = min((x for x in (mask.after, after) if x is not None), default=None)


def _kind(function: Any) -> str:
    """The name of a mask function of transformers, or of one of its models; "" for any other function."""
    code: Any = getattr(function, "__code__", None)
    if code in _CODES or not str(getattr(function, "__module__", "")).startswith("transformers.models."):
        return _CODES.get(code, "")
    # Gemma 3 and models made from it have these for tokens that see both sides.
    if (code.co_code, code.co_consts, code.co_names) == (_ALL.co_code, _ALL.co_consts, _ALL.co_names):
        return "full"
    overlay = function.__globals__.get("_bidirectional_window_overlay")
    return "distance" if overlay is not None and code is overlay(1).__code__ else ""


def _refuse(function: Callable[..., Any]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    raise NotImplementedError(
        f"{TITLE}: the mask function {getattr(function, '__module__', '?')}.{name} is none of transformers' own, and "
        "what it keeps is not known. Write it as a variant's mask, render it, and register its op under a name of its "
        "own: register(name, op=..., tensors=...)"
    )


def _read_while_tracing(
    mask: AttentionMask, function: Any, config: Any, said: dict[str, Any], *, is_replaced: bool
) -> None:
    """As `_read`, but from the arguments that come with the function, because a trace cannot read closures."""
    has_overlays = bool(said.get("use_vmap"))
    if has_overlays and not is_replaced:
        raise NotImplementedError(
            f"{TITLE}: a mask with an overlay of its own is not readable while torch.compile traces the model: "
            "make it before, or run this model without torch.compile"
        )
    size, is_causal = said.get("local_size"), "allow_is_bidirectional_skip" not in said
    chunk = getattr(config, "attention_chunk_size", None)
    if is_causal:
        mask.after = 0
    if size is not None and size == chunk and is_causal:
        if size == getattr(config, "sliding_window", None):
            fail(TITLE, "config", "other sizes of windows and of chunks under torch.compile", f"{size} for both")
        mask.chunk = size
    elif size is not None:
        mask.before, mask.after = (size - 1, 0) if is_causal else (size, size)
    if has_overlays:
        return  # whether a token sees the token before it says nothing about sequences
    if is_causal and not said.get("allow_is_causal_skip", True) and mask.q_length > 1:
        if function.__name__ == "or_mask":
            raise NotImplementedError(
                f"{TITLE}: images that see themselves whole are not readable while torch.compile traces the model: "
                "make the masks before, with transformers.masking_utils.create_masks_for_generate"
            )
        if mask.padding is not None:
            return  # transformers looks for packed sequences only without padding
        # The tokens of a sequence are adjacent, so a token that does not see the token before it begins a sequence.
        rows = torch.arange(mask.q_length, device=said.get("device"))
        batch = torch.arange(mask.batch, device=said.get("device"))[:, None]
        sees = function(batch, 0, rows[None], (rows[None] - 1).clamp(min=0))
        mask.packed = (~sees).expand(mask.batch, -1).cumsum(-1).to(torch.int32)


# ---------------------------------------------------------------------------------------------------------- the model


_HAS_INTERFACE: dict[type, bool] = {}


def _check_interface(config: Any) -> None:
    """Refuse a model that computes attention in its own code, because that code would take the mask for a tensor."""
    kind = type(config)
    if kind not in _HAS_INTERFACE:
        _HAS_INTERFACE[kind] = _has_interface(kind)
    if not _HAS_INTERFACE[kind]:
        fail(
            TITLE,
            "attn_implementation",
            "a model that calls its attention through transformers' AttentionInterface",
            f"{kind.__name__.removesuffix('Config')}, which computes it in code of its own: use 'eager' there",
        )


def _has_interface(kind: type) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        model = MODEL_MAPPING[kind]
    except KeyError:  # a part of a larger model, or a model of the user's own
        return True
    models = model if isinstance(model, tuple) else (model,)
    modules = {sys.modules[each.__module__] for each in models if each.__module__ in sys.modules}
    # DPR is made of models of BERT, which get its config.
    parts = [each for module in modules for each in vars(module).values() if _is_model(each)]
    return any(
        hasattr(each, "ALL_ATTENTION_FUNCTIONS") for each in modules | {sys.modules[x.__module__] for x in parts}
    )


def _is_model(x: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(x, type) and issubclass(x, PreTrainedModel) and x is not PreTrainedModel
