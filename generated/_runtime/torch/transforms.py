# SPDX-License-Identifier: Apache-2.0
"""Refuses second derivatives and derivatives in forward mode, and maps calls by `torch.func.vmap`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.checks import refuse_gradient
from .replay import apply

BEGINS = {"cu_seqlens_q": "q", "cu_seqlens_k": "k"}
"""For each argument that says where packed sequences begin, the tensor with their tokens."""


def refuse_tangents(op: str, /, **tensors: Tensor) -> None:
    """Refuse a derivative in forward mode, which neither the kernels nor the reference in their place have."""
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if forward_ad.unpack_dual(x).tangent is not None:
            refuse_forward_mode(f"{op}: {name}")


def refuse_forward_mode(what: str) -> NoReturn:
    """Raise the error of a derivative in forward mode, of an argument or of all that an op computes."""
    raise NotImplementedError(
        f"{what}: derivatives in forward mode (torch.func.jvp, jacfwd, hessian) are not implemented; use reverse mode "
        "(backward, torch.func.grad, vjp, jacrev)"
    )


def refuse_gradient_of(x: Tensor, op: str, name: str, reason: str) -> None:
    """Refuse a float tensor of a variant that has no gradient, if its gradient is wanted."""
    if x.requires_grad and torch.is_grad_enabled():
        refuse_gradient(op, name, reason)


def refuse_second_derivative(op: str) -> NoReturn:
    """Raise the error of the derivative of a gradient."""
    raise NotImplementedError(
        f"{op}: second derivatives, such as those of a gradient penalty, are not implemented; "
        "`reference` in torch_reference.py of the variant is plain PyTorch, which has them"
    )


def differentiates_backward() -> bool:
    """Whether what a backward computes may be differentiated, or mapped, in turn."""
    in_turn = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    return in_turn and not torch.compiler.is_compiling()


def are_mapped(*gradients: Tensor | None) -> bool:
    """Whether gradients of results are those of `torch.autograd.grad(..., is_grads_batched=True)`.

    Such gradients are batched without `torch.func`. They have no memory: operators take them, but no kernel can.
    """
    plain = [x for x in gradients if type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x)]
    return not all(torch._C._has_storage(x) for x in plain)


def folded_axes(
    mode: str, tensors: Sequence[str], results: Sequence[str], dims: Mapping[str, tuple[str | int, ...]]
) -> dict[str, int | None]:
    """For `torch.func.vmap` as a single call: the axis of batch rows, packed tokens or sequences, by tensor.

    Tensors without such an axis have no entry. A tensor with tokens along two axes has None.

    Args:
        tensors: names of the tensors that the forward takes. results: names of its results.
        dims: dims of the variant's own tensors.
    """
    packed = mode == "packed"
    rows = 1 if packed else 0
    found: dict[str, int | None] = {"q": 0, "k": 0, "v": 0, "o": 0, "do": 0, "lse": rows, "dlse": rows}
    if "decay" in results:
        found["decay"] = 2 if packed else 0
    # Sequences, ids, positions and offsets have one entry, or one row, for each batch row or sequence.
    found |= {name: 0 for name in tensors if name not in found and name not in dims}
    for name, own in dims.items():
        tokens = [axis for axis, dim in enumerate(own) if packed and dim in ("q_idx", "kv_idx")]
        if tokens:
            found[name] = tokens[0] if len(tokens) == 1 else None
        elif "b" in own:
            found[name] = own.index("b")
    return found


def batched(
    function: Any,
    names: Sequence[str],
    results: Sequence[str],
    axes: Mapping[str, int | None],
    info: Any,
    in_dims: Sequence[Any],
    args: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The `vmap` of an autograd function: one call for all, or one call after the other.

    The mapped axis becomes part of the axis of batch rows, or of packed tokens, if each tensor that is mapped and each
    result has such an axis, and nothing else tells the batch rows apart.

    Args:
        names: of the arguments.
        results: for each result the name of the tensor that it is, or is the gradient of.
        axes: the axis of batch rows, or of packed tokens or sequences, by name; empty where rows must not be regrouped.
            A tensor without an entry is the same for all rows, one with None cannot be regrouped.
    """
    size = info.batch_size
    given = dict(zip(names, args, strict=True))
    mapped = dict(zip(names, in_dims, strict=True))
    wanted = [given.get(f"grad_{name.lower()}", True) for name in results]
    needed = [name for name, dim in mapped.items() if isinstance(dim, int)]
    needed += [name for name, is_wanted in zip(results, wanted, strict=True) if is_wanted]
    may_fold = bool(axes) and not given.get("dropout_p") and not given.get("block_tables")
    split = [name for name, axis in axes.items() if axis is None and given.get(name) is not None]
    if size == 0 or not may_fold or split or not all(name in axes for name in needed):
        return one_by_one(partial(apply, function), size, in_dims, args)
    folded = {name: _folded(name, x, mapped[name], size, axes, given, mapped) for name, x in given.items()}
    found = apply(function, *folded.values())
    split_results, out_dims = [], []
    for name, x, is_wanted in zip(results, found, wanted, strict=True):
        axis = axes.get(name) if is_wanted else None
        split_results.append(x if axis is None else x.unflatten(axis, (size, x.shape[axis] // size)))
        out_dims.append(axis)
    return tuple(split_results), tuple(out_dims)


def _folded(
    name: str,
    x: Any,
    dim: int | None,
    size: int,
    axes: Mapping[str, int | None],
    given: Mapping[str, Any],
    mapped: Mapping[str, Any],
) -> Any:
    """An argument of the single call, from the argument with a mapped axis."""
    axis = axes.get(name)
    if not isinstance(x, Tensor) or axis is None:
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    if name in BEGINS:
        tokens, along = given[BEGINS[name]], mapped[BEGINS[name]]
        rows = (tokens if along is None else tokens.select(along, 0)).shape[0]
        starts = torch.arange(size, dtype=x.dtype, device=x.device)[:, None] * rows
        return torch.cat([(x[:, :-1] + starts).reshape(-1), x.new_full((1,), size * rows)])
    return x.movedim(0, axis).flatten(axis, axis + 1)


def one_by_one(
    function: Callable[..., tuple[Tensor, ...]], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The results of one call for each index of the mapped axis."""

    def taken(x: Any, dim: Any, index: int) -> Any:
        if isinstance(x, list):
            return [taken(each, along, index) for each, along in zip(x, dim, strict=True)]
        if not isinstance(dim, int):
            return x
        return x.select(dim, index) if size > 0 else x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]])

    # If the mapped axis is empty, one call is made for the shapes of the results.
    indices = range(max(size, 1))
    calls = [function(*(taken(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in indices]
    results = tuple(torch.stack(each)[:size] for each in zip(*calls, strict=True))
    return results, (0,) * len(results)
