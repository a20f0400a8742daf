# SPDX-License-Identifier: Apache-2.0
"""Attention over several GPUs in PyTorch: each has some rows of a long sequence, and every variant stays exact.

>>> from generated.torch import causal
>>> layout = plan(causal, 2, seq=4096, heads=(8, 2), head_dim=64)
>>> layout.strategy, layout.chunks
('heads', (((0, 2048),), ((2048, 2048),)))
>>> plan(causal, 2, seq=4096, heads=(8, 2), head_dim=64, strategy="gather").chunks[0]
((0, 1024), (3072, 1024))

With a mesh of processes instead of the number 2, a layout splits tensors, and ops compute on the parts:

    layout = plan(causal, mesh["cp"], seq=131072, heads=(32, 8), head_dim=128)
    tokens, positions = layout.shard(tokens, dim=1), layout.shard(layout.positions)
    o = context_parallel(causal, layout)(q, k, v)
    logits = layout.unshard(logits, dim=1)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ._runtime.core.checks import check_flag, fail
from ._runtime.core.parallel import shards
from ._runtime.core.parallel.costs import Machine
from ._runtime.core.parallel.plan_requests import checked_request
from ._runtime.core.parallel.shard_plans import make_layout
from ._runtime.torch.parallel.collectives import Collectives, GridCollectives, collectives_of
from ._runtime.torch.parallel.context_parallel import ContextParallel, call_of
from ._runtime.torch.parallel.exchange import Unsharded, own_rows

__all__ = ["Layout", "Machine", "context_parallel", "plan"]


@dataclass(frozen=True, kw_only=True)
class Layout(shards.Layout):
    """A layout among processes: it splits tensors into the rows of each rank, and puts them together again.

    Make it with `plan(...)`. Layouts are equal if they are the same plan. `comm` has the collectives between ranks. It
    is None if `plan` was given a number of ranks.
    """

    comm: Collectives | None = field(default=None, compare=False, repr=False)

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Layout":
        """The same object: a layout is frozen, and its process group cannot be copied."""
        return self

    @property
    def positions(self) -> Tensor:
        """The position of each row in its sequence, int64 `[seq]`, on the device of the mesh."""
        device = "cpu" if self.comm is None else self.comm.device_type
        return torch.as_tensor(self.row_positions, device=device)

    def shard(self, x: Tensor, dim: int = 0, *, rank: int | None = None) -> Tensor:
        """The rows of this rank, or of `rank`, along `dim`. If `seq` does not divide evenly, they are padded with 0.

        Nothing is sent: every rank has the whole `x`. Differentiable; each rank's gradient is that of its own rows.
        """
        axis = self._axis_of(x, dim, self.seq, "shard")
        if rank is None:
            rank = self._reached("shard").rank
        if not 0 <= rank < self.ranks:
            fail("Layout.shard", "rank", f"from 0 to {self.ranks - 1}", rank)
        return own_rows(x.movedim(axis, 0), self, rank).movedim(0, axis)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """The rows of all ranks in order along `dim`, without padding, on every rank.

        The gradient of each rank is that of its own rows. This assumes that every rank computes the same loss.
        """
        axis = self._axis_of(x, dim, self.local, "unshard")
        comm = self._reached("unshard")
        found: Tensor = Unsharded.apply(comm, self, x.movedim(axis, 0))
        return found.movedim(0, axis)

    def _axis_of(self, x: Tensor, dim: int, rows: int, function: str) -> int:
        if not isinstance(x, Tensor):
            fail(f"Layout.{function}", "x", "a tensor", type(x).__name__)
        return shards.axis_of(x, dim, rows, function)

    def _reached(self, function: str) -> Collectives:
        if self.comm is None:
            expected = "a DeviceMesh or a process group as the mesh of plan(...)"
            fail(f"Layout.{function}", "layout", expected, f"one planned for the number {self.ranks}")
        return self.comm


def plan(
    op: Any,
    mesh: Any,
    *,
    seq: int,
    heads: tuple[int, int],
    head_dim: int,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    masks: Sequence[tuple[Any, Mapping[str, Any]]] | None = None,
    strategy: str = "auto",
    balance: str = "work",
    head_groups: int | None = None,
    machine: Machine | None = None,
    **own: Any,
) -> Layout:
    """Plan which rows each rank has, and how ranks compute together: once for a shape, or for a batch's documents.

    Nothing is sent, and nothing waits for a device unless an argument is on it. Every rank makes the same plan.

    Args:
        op: the op whose work is distributed, such as `generated.torch.causal`.
        mesh: a DeviceMesh with one dim, such as `mesh["cp"]`, or with two: nodes and the ranks of a node; a process
            group, or a pair of them; or, only to look at a plan, a number of ranks or a pair of numbers.
        seq: rows of the whole sequence; any number.
        heads: query heads and key heads of a rank.
        head_dim: size of a head.
        cu_seqlens: integers `[n + 1]`: packed sequences, whose calls take q `[rows, Hq, D]`. The plan may cut any of
            them, and pads none.
        segment_ids: integers `[S]` or `[B, S]`: documents in rows of a batch. No row attends to another document.
        masks: several `(op, its arguments)` that share this layout, such as the layers of a model, instead of `own`.
        strategy: "heads", "gather", "exchange", "ring", or "auto". "auto" takes the fastest by the cost model, or
            "heads" if that takes at most 5 % more time. If the keys of all rows do not fit into the memory of
            `machine`, it takes "heads" or "ring" if it can. `layout.reasons` says why.
            A mesh with two dims has the strategy "2d": heads are split inside nodes, and keys are gathered or exchanged
            among nodes.
            "exchange" sends only keys that the masks of the plan may attend to. A call of another op, or with other
            arguments or with positions, gathers all keys. If masks read tensors, each call compares them with those of
            the plan, which waits for the device. So "auto" never takes "exchange" for these masks.
        balance: "work" distributes rows by the blocks that the masks visit, "zigzag" by row numbers alone, and
            "contiguous" gives each rank one run of rows.
        head_groups: the number of groups in which key heads are gathered or exchanged. By default the cost model
            chooses it. A ring has one group, and so have variants that compute with the number of a head.
        machine: rates for the cost model.
        own: the arguments that the mask of `op` reads, such as `size=1024`: numbers, and tensors on the host.
            One that has the name of an argument of `plan` is given in `masks=`.

    Raises:
        ArgumentError: a bad argument; the same on every rank.
    """
    comm = collectives_of(mesh)
    ranks = mesh if comm is None else comm.size
    if isinstance(comm, GridCollectives):
        ranks = comm.outer.size, comm.inner.size
    if masks is not None and own:
        fail("plan", next(iter(own)), "arguments inside masks= where that is given", "one beside it")
    asked = checked_request(
        op,
        ranks,
        seq=seq,
        heads=heads,
        head_dim=head_dim,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
        masks=masks,
        strategy=strategy,
        balance=balance,
        head_groups=head_groups,
        machine=machine,
        own=own,
    )
    layout = make_layout(asked)
    return Layout(**{each.name: getattr(layout, each.name) for each in fields(shards.Layout)}, comm=comm)


def context_parallel(
    op: Callable[..., Any], layout: Layout, *, check: bool | None = None, sum_gradients: bool = True
) -> ContextParallel:
    """`op` over the rows of all ranks: `context_parallel(op, layout)(q, k, v, ...)`.

    q, k and v are this rank's rows, as `layout.shard` gives them, and so are o and lse. Keywords are those of the op:

    - numbers and the variant's own tensors, whole on every rank. A tensor with an axis of rows may also have this
      rank's rows alone, as a log-decay `g` usually does;
    - `q_segment_ids` and positions: this rank's rows;
    - no `q_offset`, `cu_seqlens_q` or `schedule`: the layout has them. Dropout takes the same `seed` on every rank.

    The same layout, op and options give the same object each time. It keeps tables on the device and other data. Their
    size is bounded for each layout, and they are freed with the layout: drop the layout of one batch's documents before
    you make the next one.

    Args:
        op: the op, such as `generated.torch.causal`. It may be another one than that of the plan.
        layout: what `plan` returned for a mesh or a process group.
        check: compare the arguments of all ranks before anything is sent, so that an error on one rank is raised on
            every rank. None: in the first call; True: in every call, for debugging; False: never.
        sum_gradients: add up the gradients of tensors that every rank has whole. False leaves each rank its own part,
            for an outer wrapper (FSDP, DDP) that adds up the gradients of all parameters.

    Raises:
        ArgumentError: a bad argument. NotImplementedError: a second derivative is wanted.
    """
    if not isinstance(layout, Layout):
        fail("context_parallel", "layout", "what plan(...) returns", type(layout).__name__)
    check = None if check is None else check_flag("context_parallel", "check", check)
    sum_gradients = check_flag("context_parallel", "sum_gradients", sum_gradients)
    if layout.comm is None:
        expected = "one planned for a DeviceMesh or a process group"
        fail("context_parallel", "layout", expected, f"one for the number {layout.ranks}")
    return call_of(op, layout, layout.comm, check, sum_gradients)
