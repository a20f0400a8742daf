"""The custom operators of calls over several ranks: one for the forward and one for the backward.

An operator takes the key of a `ContextParallel`, which is a number, so that one graph serves all layouts of the same
sizes. `names` has the layout of q and the names of the call's tensors, integers and floats, whose values follow.
`words` has the other keywords as lines of text.
"""

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from ..flops import backward_flops, forward_flops, register_flops
from ..operators import namespace_of
from ..transforms import refuse_second_derivative

_PARALLELS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()

NAMESPACE = namespace_of(__name__.rsplit(".", 3)[0])


def registered(parallel: Any) -> int:
    """The key by which operators find a `ContextParallel`, as long as it lives."""
    key = next(_numbers)
    _PARALLELS[key] = parallel
    return key


def _given(names: str, words: str, *values: Sequence[Any]) -> dict[str, Any]:
    """q, k, v and the keywords of a call."""
    found: dict[str, Any] = {}
    for of_kind, given in zip(names.split("|")[1:], values, strict=True):
        found |= dict(zip(of_kind.split(","), given, strict=True)) if given else {}
    for word in words.splitlines():
        name, _, text = word.partition("=")
        found[name] = literal_eval(text)
    return found


def _tensor_names(names: str) -> list[str]:
    return names.split("|")[1].split(",")


@custom_op(f"{NAMESPACE}::context_parallel_fwd", mutates_args=())
def _forward(
    key: int, names: str, words: str, tensors: Sequence[Tensor], integers: Sequence[int], floats: Sequence[float]
) -> tuple[Tensor, Tensor]:
    o, lse = _PARALLELS[key].forward(_given(names, words, tensors, integers, floats))
    return o, lse


@_forward.register_fake
def _(
    key: int,  # noqa: ARG001  # the operator's own
    names: str,
    words: str,  # noqa: ARG001
    tensors: Sequence[Tensor],
    integers: Sequence[int],  # noqa: ARG001
    floats: Sequence[float],  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    form, (q, _, v, *_) = names.split("|")[0], tensors
    axes = {"packed": (1, 0), "bhsd": (0, 1, 2), "bshd": (0, 2, 1)}[form]
    lse = q.new_empty([q.shape[axis] for axis in axes], dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@custom_op(f"{NAMESPACE}::context_parallel_bwd", mutates_args=())
def _backward(
    key: int,
    names: str,
    words: str,
    wanted: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
) -> list[Tensor]:
    order = wanted.split(",")
    given = _given(names, words, tensors, integers, floats)
    found = _PARALLELS[key].derived(given, (o, lse), (do, dlse), order)
    return _apart([found[name].contiguous() for name in order])


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that share no memory, as an operator must return."""
    found: dict[int, list[Tensor]] = {}
    for x in tensors:
        found.setdefault(x.untyped_storage().data_ptr(), []).append(x)
    return [x if found[x.untyped_storage().data_ptr()][0] is x else x.clone() for x in tensors]


@_backward.register_fake
def _(
    key: int,  # noqa: ARG001  # the operator's own
    names: str,
    words: str,  # noqa: ARG001
    wanted: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],  # noqa: ARG001
    floats: Sequence[float],  # noqa: ARG001
    o: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    do: Tensor,  # noqa: ARG001
    dlse: Tensor | None,  # noqa: ARG001
) -> list[Tensor]:
    given = dict(zip(_tensor_names(names), tensors, strict=True))
    return [given[name].new_empty(given[name].shape) for name in wanted.split(",")]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.key, ctx.names, ctx.words, tensors, ctx.integers, ctx.floats = inputs
    # The backward may run when nothing else refers to the `ContextParallel`. In a trace the key has no value.
    ctx.parallel = _PARALLELS[ctx.key] if type(ctx.key) is int else None
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, o, lse = ctx.saved_tensors
    names = _tensor_names(ctx.names)
    trained = [name for name, x, is_wanted in zip(names, tensors, ctx.needs_input_grad[3], strict=True) if is_wanted]
    do = torch.zeros_like(o) if do is None else do
    numbers = ctx.integers, ctx.floats
    found = _backward(ctx.key, ctx.names, ctx.words, ",".join(trained), tensors, *numbers, o, lse, do, dlse)
    by_name = dict(zip(trained, found, strict=True))
    # torch takes an empty list of numbers for a list of tensors, whose gradient is a list.
    return None, None, None, [by_name.get(name) for name in names], *[None if each else [] for each in numbers]


def _flops(of_pairs: Callable[[int, Tensor, Tensor], int], call: Mapping[str, Any]) -> int:
    """A rank's share of the operations of all rows."""
    layout = _PARALLELS[call["key"]].layout
    q, _, v, *_ = call["tensors"]
    form = call["names"].split("|")[0]
    batch, heads = (1, q.shape[1]) if form == "packed" else (q.shape[0], q.shape[form.index("h")])
    lengths = [end - begin for begin, end in pairwise(layout.cu_seqlens or (0, layout.seq))]
    return of_pairs(batch * heads * sum(x * x for x in lengths) // layout.ranks, q, v)


def _second(_ctx: Any, *_: Any) -> Any:
    refuse_second_derivative("context_parallel")


_forward.register_autograd(_gradients, setup_context=_setup_context)
_backward.register_autograd(_second)
register_flops(
    f"{NAMESPACE}::context_parallel_fwd", ("key", "names", "words", "tensors"), partial(_flops, forward_flops)
)
register_flops(
    f"{NAMESPACE}::context_parallel_bwd",
    ("key", "names", "words", "wanted", "tensors"),
    partial(_flops, backward_flops),
)
attend = _forward
