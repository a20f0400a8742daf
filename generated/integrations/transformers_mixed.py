# SPDX-License-Identifier: Apache-2.0
"""Finds a layer whose config names another attention implementation than the model that made its mask."""

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

ONE = "one in all layers that share a mask: build the model with it, or set it in the config of each layer"
"""The `attn_implementation` that errors expect of mixed layers."""


def mixed() -> str | None:
    """The different attention implementations of the layer that runs now and of the model around it, or None.

    Both are found in the frames of their calls. It is for calls that fail in any case: its time does not matter.
    """
    if torch.compiler.is_compiling():
        return None  # a trace cannot read frames
    layer = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        for module in (frame.f_locals.get("module"), frame.f_locals.get("self")):
            if isinstance(module, torch.nn.Module) and isinstance(_implementation(module), str):
                layer = layer or module
                if isinstance(module, PreTrainedModel):
                    is_one = _implementation(module) == _implementation(layer)
                    return None if is_one else f"{_text(layer)}, {_text(module)}"
        frame = frame.f_back
    return None


def _implementation(module: Any) -> Any:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _text(module: Any) -> str:
    number = getattr(module, "layer_idx", None)
    place = "" if number is None else f" of layer {number}"
    return f"{_implementation(module)!r} in the config of {type(module).__name__}{place}"
