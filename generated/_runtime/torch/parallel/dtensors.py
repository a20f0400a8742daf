# SPDX-License-Identifier: Apache-2.0
"""DTensors as arguments of calls over several ranks: their local parts go in, and o and lse come out as DTensors."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor

from ...core.checks import PACKED, fail
from ...core.parallel.calls import TOKENS, check_cuts, form_of, head_axis, own_dims, row_axis
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork
from ..dtypes import is_distributed
from .collectives import Collectives, GridCollectives, GroupCollectives


class LocalParts:
    """The local parts of the DTensors of a call. `whole` makes DTensors of its results.

    Rows of q, k and v must be sharded over the ranks of the layout, in the order of `layout.shard`. Batch rows and
    heads may be sharded over other dims of the mesh, and then along the same axes of all tensors that have them.
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
        self._op, self._work, self._layout, self._groups, self._sums = op, work, layout, _group_names(comm), sums
        self._form = form_of(layout, given, default)
        self._mesh, self._placements = given["q"].device_mesh, given["q"].placements
        for name in ("k", "v"):
            if not is_distributed(given[name]) or given[name].device_mesh != self._mesh:
                fail(op, name, f"a DTensor on {self._mesh}, as q", type(given[name]).__name__)
        heads = head_axis(self._form)
        self._axes = {heads: "h", row_axis(self._form): "rows"} | ({} if self._form == PACKED else {0: "b"})
        self._cuts = {self._group(self._mesh, dim): self._cut(dim) for dim in range(self._mesh.ndim)}
        # torch.compile of torch 2.11 does not trace `mesh.shape`.
        self._sizes = [self._mesh.size(dim) for dim in range(self._mesh.ndim)]
        cuts = [cut for cut, size in zip(self._cuts.values(), self._sizes, strict=True) if size > 1]
        check_cuts(work, batch_rows="b" in cuts, heads="h" in cuts)
        self._check_heads(given["q"].shape[heads], given["k"].shape[heads])
        self.given = {name: self._local(name, x) if is_distributed(x) else x for name, x in given.items()}
        if given.get("dropout_p") and given.get("dropout_origin") is None:
            batch = None if self._form == PACKED else 0
            origin = (0 if batch is None else self._begin(given["q"], batch), self._begin(given["q"], heads))
            self.given["dropout_origin"] = (*origin, given["q"].shape[heads])

    def _group(self, mesh: Any, dim: int) -> str:
        """The name of the process group of this rank along a dim of a mesh."""
        name: str = mesh.get_group(dim).group_name
        return name

    def _cut(self, dim: int) -> str:
        """What the ranks along a dim of q's mesh share: "rows", batch rows "b", heads "h", or nothing, ""."""
        placement, rows = self._placements[dim], row_axis(self._form)
        cut = next((cut for axis, cut in self._axes.items() if placement.is_shard(axis)), "")
        is_of_layout = self._group(self._mesh, dim) in self._groups
        if is_of_layout and cut != "rows":
            fail(self._op, "q", f"Shard({rows}), its rows, on the ranks of the layout", repr(placement))
        if not is_of_layout and (cut == "rows" or not (cut or placement.is_replicate())):
            forms = [f"Shard({axis})" for axis, cut in sorted(self._axes.items()) if cut != "rows"]
            expected = f"{' or '.join(forms)} or Replicate() on ranks outside of the layout"
            fail(self._op, "q", expected, repr(placement))
        return cut

    def _check_heads(self, queries: int, keys: int) -> None:
        """Refuse heads that are cut so that a rank's query heads are not those of its key heads."""
        # A list: torch.compile traces no generator here.
        ranks = prod([size for cut, size in zip(self._cuts.values(), self._sizes, strict=True) if cut == "h"])
        if keys > 1 and queries != keys and keys % ranks:
            fail(self._op, "k", f"a multiple of the {ranks} ranks that share heads as the number of key heads", keys)

    def _begin(self, q: Any, axis: int) -> int:
        """The index of this rank's first batch row or head, by `axis`, in the whole tensor."""
        begin, size = 0, q.shape[axis]
        for placement, ranks, rank in zip(q.placements, self._sizes, self._mesh.get_coordinate(), strict=True):
            if placement.is_shard(axis):
                part = -(-size // ranks)
                begin, size = begin + part * rank, min(part, max(size - part * rank, 0))
        return begin

    def _local(self, name: str, x: Any) -> Tensor:
        """The part of this rank.

        The gradient of a tensor that ranks have whole is a partial sum if each computes it from its own batch rows or
        heads, and along the layout if calls do not add up gradients. That of a variant's own tensor is added up over
        all these ranks if calls do.
        """
        from torch.distributed.tensor import Partial

        gradients = list(x.placements)
        for dim, placement in enumerate(x.placements):
            cut = self._cuts.get(self._group(x.device_mesh, dim), "")
            self._check_placement(name, x, placement, cut)
            is_part = not self._sums if cut == "rows" else bool(cut)
            if is_part and placement.is_replicate():
                gradients[dim] = Partial()
        if self._sums and name in self._work.tensors:
            # The backward of this adds partial sums up.
            x = x.redistribute(x.device_mesh, x.placements)
        found: Tensor = x.to_local(grad_placements=gradients)
        return found

    def _check_placement(self, name: str, x: Any, placement: Any, cut: str) -> None:
        """Refuse a tensor that is not placed as q is along a dim of the mesh whose ranks share `cut`."""
        axes = [axis for axis, what in self._axes_of(name, x).items() if what == cut]
        is_variants = name in self._work.tensors
        is_single_head = cut == "h" and name != "q" and all(x.shape[axis] == 1 for axis in axes)
        may_be_whole = not axes or is_single_head or (cut == "rows" and is_variants)
        if any(placement.is_shard(axis) for axis in axes) or (may_be_whole and placement.is_replicate()):
            return
        forms = [f"Shard({axis})" for axis in axes] + ["Replicate()"] * may_be_whole
        expected = {
            "rows": "its rows, on the ranks of the layout" if not is_variants else "on the ranks of the layout",
            "b": "as q's batch rows",
            "h": "as q's heads",
            "": "as q",
        }
        fail(self._op, name, f"{' or '.join(forms)}, {expected[cut]}", repr(placement))

    def _axes_of(self, name: str, x: Any) -> dict[int, str]:
        """The axes of a tensor that have batch rows "b", heads "h" or "rows"."""
        if name in ("q", "k", "v"):
            return self._axes
        if name in (*TOKENS, "kv_lengths"):
            return {0: "b", 1: "rows"} if name in TOKENS else {0: "b"}
        if name not in self._work.tensors:
            return {}
        cuts = {"b": "b", "h": "h", "hkv": "h", "q_idx": "rows", "kv_idx": "rows"}
        dims = own_dims(self._work, self._layout, name, x.dim())
        return {axis: cuts[str(dim)] for axis, dim in enumerate(dims) if str(dim) in cuts}

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
