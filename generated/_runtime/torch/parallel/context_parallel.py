# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: an op over rows that are sharded over several ranks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...core.checks import PACKED, check_flag, fail, is_seed
from ...core.parallel.calls import TOKENS, check_call, form_of, local_axes, row_axis
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork, work_of
from ..dispatch import launches_directly
from ..dtypes import autocast_inputs, is_distributed, is_integer
from ..launching import is_seen_by_others
from .agreement import agree, described
from .autograd import attend as attend_directly
from .collectives import Collectives
from .dtensors import LocalParts
from .operators import attend, registered
from .rank_call import LAYOUT, RankCall
from .tape import Notes, Number, Tape
from .transforms import attend as attend_transformed

MOST_KINDS = 64
"""The most kinds of calls whose checks, and whose tapes, are remembered. Those used least recently are forgotten."""

_INPUTS = ("q", "k", "v")
_NEW, _SEEN = object(), object()  # States of a kind of call without a tape: never seen; seen once.


class ContextParallel:
    """An op over the rows of all ranks. Make it with `context_parallel(op, layout)`.

    Traced, a call is one custom operator, and so is its backward: torch.compile sees nothing of what is sent.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        work: VariantWork,
        layout: Layout,
        comm: Collectives,
        check: bool | None,
        sums_gradients: bool,
    ) -> None:
        self.op, self.work, self.layout, self.comm = op, work, layout, comm
        self.check, self.sums_gradients = check, sums_gradients
        self._is_checked = False
        self._checked: dict[Any, None] = {}
        self._tapes: dict[Any, Tape | object | None] = {}
        needs = (layout.nodes or layout).needs
        self._reads_values = any(isinstance(value, str) for each in needs for _, value in each.arguments)
        self._parameters = list(inspect.signature(op).parameters)
        self.__name__ = f"context_parallel({work.op})"
        self.__doc__ = op.__doc__
        self.key = registered(self)

    def __repr__(self) -> str:
        return f"{self.__name__} by {self.layout.strategy} over {self.layout.ranks} ranks"

    def __deepcopy__(self, _memo: dict[int, Any]) -> "ContextParallel":
        """The same object: a copy of a model computes over the same ranks, whose process group cannot be copied."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """The op's results for this rank's rows of q, k and v; keywords are those of the op.

        The local parts of DTensors are taken. If q is a DTensor, o and lse are DTensors, too.
        """
        wants_lse = keywords.get("return_lse", False)
        if is_distributed(q):
            given: dict[str, Any] = {"q": q, "k": k, "v": v, **keywords}
            parts = LocalParts(self.work, self.layout, self.comm, given, LAYOUT, sums=self.sums_gradients)
            if isinstance(wants_lse, bool):  # else it is refused
                parts.given["return_lse"] = True
            results = parts.whole(*self(**parts.given))
            return results if wants_lse else results[0]
        if all(isinstance(x, Tensor) for x in (q, k, v)):
            q, k, v = autocast_inputs(q, k, v)
        given = {"q": q, "k": k, "v": v, **{name: x for name, x in keywords.items() if x is not None}}
        is_direct = isinstance(q, Tensor) and launches_directly(q)
        if is_direct and torch._C._are_functorch_transforms_active():
            o, lse = attend_transformed(self, given)
            return (o, lse) if wants_lse else o
        if not torch.compiler.is_compiling():
            self.checked({"q": q, "k": k, "v": v, **keywords})
        if is_direct:
            o, found = attend_directly(self, given, wants_lse=wants_lse)
            return (o, found) if wants_lse else o
        names, tensors = ["q", "k", "v"], [q, k, v]
        of_integers: list[str] = []
        of_floats: list[str] = []
        integers: list[int] = []
        floats: list[float] = []
        words: list[str] = []
        for name, value in keywords.items():
            if isinstance(value, Tensor):
                names.append(name)
                tensors.append(value)
            elif value is None or name == "return_lse":
                continue
            elif isinstance(value, float):
                of_floats.append(name)
                floats.append(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                of_integers.append(name)
                integers.append(value)
            else:
                words.append(f"{name}={value!r}")
        kinds = (",".join(names), ",".join(of_integers), ",".join(of_floats))
        text = "|".join((PACKED if q.dim() == 3 else keywords.get("layout", LAYOUT), *kinds))
        o, lse = attend(self.key, text, "\n".join(words), tensors, integers, floats)
        return (o, lse) if check_flag(self.work.op, "return_lse", wants_lse) else o

    # --------------------------------------------------------------------------------------- what the operators compute

    def forward(self, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """o and lse of the rows of this rank."""
        # A graph may run with shapes and numbers with which no call was checked yet.
        self.checked(given)
        o, lse, _ = self.computed(given, wants_lse=True)
        assert lse is not None
        return o, lse

    def computed(self, given: Mapping[str, Any], *, wants_lse: bool) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """o and lse from checked arguments, and tensors that `derived` may take in place of q, k, v, o and lse."""

        def results(op: Any, comm: Collectives, seed: int | None) -> list[Tensor | None]:
            o, lse, kept = self._call(op, comm, given, seed).forward(wants_lse=wants_lse)
            return [o, lse, *kept]

        tensors = [x for x in given.values() if isinstance(x, Tensor)]
        o, lse, *kept = self._again((*_kind_of(given), wants_lse), tensors, _seed_of(given), results)
        return o, lse, kept

    def derived(
        self,
        given: Mapping[str, Any],
        saved: tuple[Tensor, Tensor] | None,
        gradients: tuple[Tensor, Tensor | None],
        wanted: list[str],
        kept: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """The gradients of `wanted`, by name, from `gradients`, those with respect to o and lse.

        `saved` is o and lse. If it is None, `kept` has the tensors that `computed` returned, and only the shapes of q,
        k and v are read.
        """

        def results(op: Any, comm: Collectives, seed: int | None) -> list[Tensor]:
            found = self._call(op, comm, given, seed).backward(saved, gradients, wanted, kept)
            return [found[name] for name in wanted]

        own = [x for name, x in given.items() if isinstance(x, Tensor) and (saved or name not in _INPUTS)]
        tensors = [x for x in (*own, *(saved or ()), *gradients, *kept) if x is not None]
        shapes = [given[name].shape for name in _INPUTS]
        looks = (*_kind_of(given), *shapes, tuple(wanted), saved is None, gradients[1] is None)
        kind = looks if set(wanted) <= set(_INPUTS) else None
        return dict(zip(wanted, self._again(kind, tensors, _seed_of(given), results), strict=True))

    def _again(
        self,
        kind: Any,
        tensors: Sequence[Tensor],
        seed: int | None,
        compute: Callable[[Any, Collectives, int | None], list[Any]],
    ) -> list[Any]:
        """What `compute(op, collectives, seed)` returns. If a call of this kind was recorded, its tape computes that.

        Args:
            kind: all that decides what is computed, except the seed and what `tensors` look like; None for a call that
                is never recorded. No other tensors may be read.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled(tensors[0].device.type):
            with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
                return self._again(kind, tensors, seed, compute)
        if kind is None or self._reads_values or is_seen_by_others() or not _is_current(tensors[0]):
            return compute(self.op, self.comm, seed)
        key = (kind, *[(x.dtype, x.shape, x.stride(), x.storage_offset(), x.device) for x in tensors])
        # The kind that was used last is the last one of the dict.
        tape = self._tapes.pop(key, _NEW)
        self._tapes[key] = _SEEN if tape is _NEW else tape
        if isinstance(tape, Tape):
            return tape([*tensors, seed])
        if tape is not _SEEN:
            _keep_the_last(self._tapes)
            return compute(self.op, self.comm, seed)
        number = None if seed is None else Number(seed)
        with Notes([*tensors, number], self.op, self.comm) as notes:
            results = compute(notes.op, notes.comm, number)
        self._tapes[key] = notes.tape(results)
        return results

    def _call(self, op: Any, comm: Collectives, given: Mapping[str, Any], seed: int | None) -> RankCall:
        given = given if seed is None else {**given, "seed": seed}
        return RankCall(op, self.work, self.layout, comm, given, sums_gradients=self.sums_gradients)

    # --------------------------------------------------------------------------------------------------------- checks

    def checked(self, given: Mapping[str, Any]) -> None:
        """Raise an error for arguments that cannot be computed, on every rank, before anything is sent."""
        looks = _looks(given)
        if looks in self._checked and not self.check:
            self._checked[looks] = self._checked.pop(looks)
            return
        problem: Exception | None = None
        try:
            self._refuse(given)
        except Exception as error:
            # Whatever it is, the other ranks are told of it: they would wait for this one.
            problem = error
        if self.check or (self.check is None and not self._is_checked):
            agree(self.comm, self.work.op, described(self.layout, self.work, given), problem)
        if problem is not None:
            raise problem
        self._is_checked = True
        self._checked[looks] = None
        _keep_the_last(self._checked)

    def _refuse(self, given: Mapping[str, Any]) -> None:
        op, layout = self.work.op, self.layout
        for name in ("q", "k", "v"):
            x = given[name]
            if not isinstance(x, Tensor):
                fail(op, name, "a tensor", type(x).__name__)
            if x.layout is not torch.strided or x.is_meta:
                fail(op, name, "a strided tensor with values", f"one of {x.layout} on {x.device}")
        check_flag(op, "return_lse", given.get("return_lse", False))
        check_call(self.work, layout, self._parameters, given, LAYOUT)
        q = given["q"]
        for name in ("k", "v"):
            x = given[name]
            if x.dtype != q.dtype or x.device != q.device:
                fail(op, name, f"{q.dtype} on {q.device}, as q", f"{x.dtype} on {x.device}")
        for name, x in given.items():
            self._check_tensor(name, x, q)
        self._whole_call(given)

    def _check_tensor(self, name: str, x: Any, q: Tensor) -> None:
        """Check what the op cannot check of a meta tensor: its device, and ids and lengths with the rank's own rows."""
        op = self.work.op
        if is_distributed(x):
            fail(op, name, "a local tensor beside a q that is no DTensor, such as `x.to_local()`", "a DTensor")
        if isinstance(x, Tensor) and (x.dim() or name in self.work.tensors) and x.device != q.device:
            fail(op, name, f"device {q.device}, that of q", x.device)
        if name == "kv_lengths" or name in TOKENS:
            sizes = (q.shape[0],) if name == "kv_lengths" else (q.shape[0], self.layout.local)
            if x is not None and not (isinstance(x, Tensor) and is_integer(x.dtype) and x.shape == sizes):
                got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                fail(op, name, f"an integer tensor {list(sizes)}", got)

    def _whole_call(self, given: Mapping[str, Any]) -> None:
        """Let the op check the call as it would be on a single GPU, with meta tensors."""
        layout = self.layout
        rows = row_axis(form_of(layout, given, LAYOUT))

        def whole(name: str, x: Tensor) -> Tensor:
            axes = [rows] if name in ("q", "k", "v") else [1] if name in TOKENS else []
            if name in self.work.tensors:
                axes = local_axes(self.work, layout, name, x.shape)
            sizes = [layout.seq if axis in axes else size for axis, size in enumerate(x.shape)]
            # Only tensors for which the op raises require a gradient here. With others it would save tensors, and a
            # checkpoint would count them, although its recomputation makes no such call.
            is_refused = x.requires_grad and name in self.work.untrained
            return torch.empty(sizes, dtype=x.dtype, device="meta", requires_grad=is_refused)

        own = self.work.tensors
        # A mode, such as one that counts operations, would take the call for one of the model's.
        with _disable_current_modes():
            call = {
                name: whole(name, x) if isinstance(x, Tensor) and (x.dim() or name in own) else x
                for name, x in given.items()
            }
            if layout.cu_seqlens is not None:
                call["cu_seqlens_q"] = torch.empty(len(layout.cu_seqlens), dtype=torch.int32, device="meta")
            self.op(**call)


def call_of(
    op: Callable[..., Any], layout: Layout, comm: Collectives, check: bool | None, sums_gradients: bool
) -> ContextParallel:
    """The `ContextParallel` of a layout, which is made once and freed with the layout.

    So what it knows of its calls, such as that their arguments were compared, holds for all calls of the layout. It
    refers to a copy of the layout with the same tables, because a reference to the layout itself would be a cycle. The
    memory of the tables is thus free as soon as the layout has no other reference, without the garbage collector: a
    training loop that plans for each batch's documents has the tables of one batch at a time.
    """
    calls: dict[Any, ContextParallel] = layout.__dict__.setdefault("_calls", {})
    key = op, check, sums_gradients
    if key not in calls:
        layout.__dict__.setdefault("_tables", {})
        equal = copy(layout)
        del equal.__dict__["_calls"]
        calls[key] = ContextParallel(op, work_of(op), equal, comm, check, sums_gradients)
    return calls[key]


def _looks(given: Mapping[str, Any]) -> Any:
    """What the checks of a call read of its arguments: no values of tensors, and of a seed only whether it is one."""
    return tuple(
        (name, x.shape, x.dtype, x.device, x.requires_grad)
        if isinstance(x, Tensor)
        else (name, int if name == "seed" and is_seed(x) else (type(x), repr(x)))
        for name, x in given.items()
    )


def _kind_of(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The names of a call's arguments, and the values of those that are neither tensors nor its seed."""
    is_seeded = _seed_of(given) is not None
    others = (x for x in given.items() if not isinstance(x[1], Tensor) and not (is_seeded and x[0] == "seed"))
    return tuple(given), *((name, repr(x)) for name, x in others)


def _seed_of(given: Mapping[str, Any]) -> int | None:
    """The seed of a call, which often is another one in each step; None for another kind of number."""
    seed = given.get("seed")
    return seed if type(seed) is int else None


def _keep_the_last(found: dict[Any, Any]) -> None:
    """Forget the kind that was used least recently if there are too many; the last one is at the end."""
    if len(found) > MOST_KINDS:
        del found[next(iter(found))]


def _is_current(x: Tensor) -> bool:
    """Whether a tensor is where the op launches: on the current device."""
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()
