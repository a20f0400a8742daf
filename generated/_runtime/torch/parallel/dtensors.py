# SPDX-License-Identifier: Apache-2.0
"""DTensors as arguments of calls over several ranks: their local parts go in, and o and lse come out as DTensors."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...core.checks import PACKED, fail
from ...core.parallel.calls import TOKENS, check_cuts, form_of, head_axis, row_axis
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork
from .collectives import Collectives, GridCollectives, GroupCollectives


def is_distributed(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


class LocalParts:
    """The local parts of the DTensors of a call. `whole` makes DTensors of its results.

    Rows of q, k and v must be sharded over the ranks of the layout, in the order of `layout.shard`. Batch rows and
    heads may be sharded over other dims of the mesh.
    """

    def __init__(
        self,
        work: VariantWork,
        layout: Layout,
        comm: Collectives,
        given: Mapping[str, Any],
        default: str,
        *,
        sums: bool,
    ) -> None:
        op = work.op
        self._op, self._groups, self._sums = op, _group_names(comm), sums
        self._form = form_of(layout, given, default)
        self._mesh, self._placements = given["q"].device_mesh, given["q"].placements
        for name in ("k", "v"):
            if not is_distributed(given[name]) or given[name].device_mesh != self._mesh:
                fail(op, name, f"a DTensor on {self._mesh}, as q", type(given[name]).__name__)
        axes = {"batch_rows": None if self._form == PACKED else 0, "heads": head_axis(self._form)}
        check_cuts(work, **{name: self._is_cut(axis) for name, axis in axes.items()})
        self.given = {name: self._local(name, x) if is_distributed(x) else x for name, x in given.items()}
        if given.get("dropout_p") and given.get("dropout_origin") is None:
            batch, heads = None if self._form == PACKED else 0, head_axis(self._form)
            origin = (0 if batch is None else self._begin(given["q"], batch), self._begin(given["q"], heads))
            self.given["dropout_origin"] = (*origin, given["q"].shape[heads])

    def _is_cut(self, axis: int | None) -> bool:
        """Whether q is sharded along an axis over several ranks."""
        sizes = zip(self._placements, self._mesh.shape, strict=True)
        return axis is not None and any(placement.is_shard(axis) and ranks > 1 for placement, ranks in sizes)

    def _begin(self, q: Any, axis: int) -> int:
        """The index of this rank's first batch row or head, by `axis`, in the whole tensor."""
        begin, size = 0, q.shape[axis]
        for placement, ranks, rank in zip(q.placements, self._mesh.shape, self._mesh.get_coordinate(), strict=True):
            if placement.is_shard(axis):
                part = -(-size // ranks)
                begin, size = begin + part * rank, min(part, max(size - part * rank, 0))
        return begin

    def _local(self, name: str, x: Any) -> Tensor:
        """The part of this rank. If ranks do not sum gradients, those of replicated tensors are partial sums."""
        from torch.distributed.tensor import Partial

        rows = row_axis(self._form) if name in ("q", "k", "v") else 1 if name in TOKENS else None
        gradients = list(x.placements)
        for dim, placement in enumerate(x.placements):
            if x.device_mesh.get_group(dim).group_name not in self._groups:
                continue
            if rows is not None and not placement.is_shard(rows):
                fail(self._op, name, f"Shard({rows}), its rows, on the ranks of the layout", str(placement))
            if rows is None and placement.is_replicate() and not self._sums:
                gradients[dim] = Partial()
        found: Tensor = x.to_local(grad_placements=gradients)
        return found

    def whole(self, o: Tensor, lse: Tensor) -> tuple[Any, Any]:
        """o and lse as DTensors that are placed on the mesh as q is."""
        from torch.distributed.tensor import DTensor, Shard

        heads, rows = head_axis(self._form), row_axis(self._form)
        of_lse = {heads: 0, rows: 1} if self._form == PACKED else {0: 0, heads: 1, rows: 2}
        placed = [Shard(of_lse[x.dim]) if x.is_shard() else x for x in self._placements]
        make: Callable[..., Any] = DTensor.from_local
        return make(o, self._mesh, self._placements, run_check=False), make(lse, self._mesh, placed, run_check=False)


def _group_names(comm: Collectives) -> set[str]:
    """The names of the process groups in which a layout's ranks communicate."""
    if isinstance(comm, GridCollectives):
        return _group_names(comm.outer) | _group_names(comm.inner)
    return {comm.name} if isinstance(comm, GroupCollectives) else set()
