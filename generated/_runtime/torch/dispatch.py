# SPDX-License-Identifier: Apache-2.0
"""Decides what computes a call: the plain reference, kernels that are launched at once, or a custom operator."""

from typing import Any

import torch
from torch import Tensor

from ..core.settings import DEBUG, INTERPRET, require_triton
from .launching import is_recording


def runs_reference(q: Tensor) -> bool:
    """Whether a call computes the plain reference: on the CPU, unless Triton's interpreter was asked for.

    For a meta tensor the reference computes only shapes.
    """
    if (q.device.type == "cpu" and not INTERPRET) or q.is_meta:
        return True
    require_triton("this op")
    return False


def launches_directly(*given: Any) -> bool:
    """Whether kernels with these arguments can be launched at once.

    If a tensor is traced, fake or wrapped, such as one that a collective has not filled yet, the custom operator is
    called: PyTorch finds what is inside of its arguments.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() != is_recording()
    ):
        return False
    return all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in given if isinstance(x, Tensor))


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values to be read: it is not traced, fake, meta or wrapped by torch.func."""
    return launches_directly(x) and not x.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def values_are_checked(x: Tensor) -> bool:
    """Whether a call checks a tensor's values, if it has any. On a GPU it would wait, so there only in debug mode."""
    return (x.device.type == "cpu" or DEBUG) and has_values(x)
