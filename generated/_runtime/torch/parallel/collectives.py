# SPDX-License-Identifier: Apache-2.0
"""Collectives among ranks. They start at once; `wait` says when their results may be read."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.checks import fail
from ..launching import is_seen_by_others


class Collectives(Protocol):
    """Collectives among `size` ranks, of which this is number `rank`.

    Their results may be read only after `wait`, except that of `gather_objects`. They gather, scatter and exchange
    parts of axis 0, which are equally long on all ranks.
    """

    size: int
    rank: int
    device_type: str

    def all_gather(self, x: Tensor) -> Tensor:
        """`[n, ...]` of every rank -> `[size * n, ...]`."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`[size * n, ...]` -> `[n, ...]`, the sum of this rank's part over all ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""

    def wait(self, x: Tensor) -> Tensor:
        """`x`, which may be read from here on."""

    def gather_objects(self, x: Any) -> list[Any]:
        """The objects that the ranks gave, in their order: small Python objects. Waits for all ranks."""


class Exchanges(Collectives, Protocol):
    """Collectives that can also send different data to each rank."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """`[size * n, ...]` -> the same shape: part i of the result is what rank i sent to this rank."""

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """`[sum(sent), ...]` -> `[sum(received), ...]`: as `all_to_all`, with parts of these lengths."""


class GroupCollectives:
    """The collectives of a process group of torch.distributed.

    The group's own methods take a third of the CPU time of the operators that torch.compile knows. These operators are
    used only if a trace, a dispatch mode or a transform sees the call.
    """

    def __init__(self, group: Any, device_type: str) -> None:
        import torch.distributed as dist

        self.group, self.device_type = group, device_type
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.name: str = group.group_name
        # Registers the operators.
        import torch.distributed._functional_collectives  # noqa: F401

    def all_gather(self, x: Tensor) -> Tensor:
        if is_seen_by_others():
            return self._operator("all_gather_into_tensor", x, self.size)
        found = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return _arriving(found, self.group._allgather_base(found, x.contiguous()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if is_seen_by_others():
            return self._operator("reduce_scatter_tensor", x, "sum", self.size)
        found = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return _arriving(found, self.group._reduce_scatter_base(found, x.contiguous()))

    def all_to_all(self, x: Tensor) -> Tensor:
        if is_seen_by_others():
            parts = [x.shape[0] // self.size] * self.size
            return self._operator("all_to_all_single", x, parts, parts)
        found = x.new_empty(x.shape)
        return _arriving(found, self.group.alltoall_base(found, x.contiguous(), [], []))

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        received, sent = list(received), list(sent)
        if is_seen_by_others():
            return self._operator("all_to_all_single", x, received, sent)
        found = x.new_empty((sum(received), *x.shape[1:]))
        return _arriving(found, self.group.alltoall_base(found, x.contiguous(), received, sent))

    def all_reduce(self, x: Tensor) -> Tensor:
        if is_seen_by_others():
            return self._operator("all_reduce", x, "sum")
        found = x.clone(memory_format=torch.contiguous_format)
        return _arriving(found, self.group.allreduce([found]))

    def wait(self, x: Tensor) -> Tensor:
        work = x.__dict__.pop("work", None)
        if work is None:
            found: Tensor = torch.ops._c10d_functional.wait_tensor(x)
            return found
        work.wait()
        return x

    def _operator(self, operator: str, x: Tensor, *arguments: Any) -> Tensor:
        found: Tensor = getattr(torch.ops._c10d_functional, operator)(x.contiguous(), *arguments, self.name)
        return found

    def gather_objects(self, x: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x, group=self.group)
        return found


def _arriving(x: Tensor, work: Any) -> Tensor:
    """`x` with the work that `GroupCollectives.wait` waits for attached."""
    x.__dict__["work"] = work
    return x


class Alone:
    """The collectives of a single rank."""

    size, rank, device_type = 1, 0, "cpu"

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    reduce_scatter = all_to_all = all_reduce = wait = all_gather

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:  # noqa: ARG002  # of Exchanges
        return x

    def gather_objects(self, x: Any) -> list[Any]:
        return [x]


class GridCollectives:
    """The collectives of ranks on a grid, `outer` nodes of `inner` ranks: each runs along one axis, then the other.

    Rank `o * inner.size + i` is rank o of `outer` and rank i of `inner`. They are meant for small tensors: the second
    step starts only when the first has ended.
    """

    def __init__(self, outer: Exchanges, inner: Exchanges) -> None:
        self.outer, self.inner, self.device_type = outer, inner, inner.device_type
        self.size, self.rank = outer.size * inner.size, outer.rank * inner.size + inner.rank

    def all_gather(self, x: Tensor) -> Tensor:
        return self.outer.all_gather(self.inner.wait(self.inner.all_gather(x)))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.inner.reduce_scatter(self.outer.wait(self.outer.reduce_scatter(x)))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.outer.all_reduce(self.inner.wait(self.inner.all_reduce(x)))

    def wait(self, x: Tensor) -> Tensor:
        return self.inner.wait(x)

    def gather_objects(self, x: Any) -> list[Any]:
        return [each for node in self.outer.gather_objects(self.inner.gather_objects(x)) for each in node]


def collectives_of(mesh: Any) -> Collectives | None:
    """The collectives of a mesh of one dim or two, or of a process group; None for a number of ranks other than 1.

    A pair of such arguments is a grid: the nodes, and the ranks of a node.
    """
    if getattr(mesh, "ndim", 1) == 2 and hasattr(mesh, "mesh_dim_names"):
        _check_is_in(mesh)
        return GridCollectives(*(GroupCollectives(mesh.get_group(axis), mesh.device_type) for axis in (0, 1)))
    if isinstance(mesh, tuple) and len(mesh) == 2:
        outer, inner = map(_exchanges_of, mesh)
        return None if outer is None or inner is None else GridCollectives(outer, inner)
    return _exchanges_of(mesh)


def _exchanges_of(mesh: Any) -> Exchanges | None:
    import torch.distributed as dist

    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if dist.is_available() and mesh == dist.GroupMember.NON_GROUP_MEMBER:
            fail("plan", "mesh", "a process group that this rank is in", "GroupMember.NON_GROUP_MEMBER")
        return Alone() if mesh == 1 else None
    if all(hasattr(mesh, name) for name in ("all_gather", "all_to_all", "gather_objects")):
        found: Exchanges = mesh
        return found
    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                expected = 'a mesh of one dim, such as `mesh["cp"]`, or of two, nodes and the ranks of a node'
                fail("plan", "mesh", expected, f"one of {mesh.ndim} dims, {mesh.mesh_dim_names}")
            _check_is_in(mesh)
            return GroupCollectives(mesh.get_group(), mesh.device_type)
        if isinstance(mesh, dist.ProcessGroup):
            # Of a group with a backend for each kind of device, such as "cpu:gloo,cuda:nccl", get_backend knows none.
            has_nccl = "nccl" in dist.get_backend_config(mesh) and torch.cuda.is_available()
            return GroupCollectives(mesh, "cuda" if has_nccl else "cpu")
    expected = "a DeviceMesh of one dim or two, a process group, or a number of ranks"
    fail("plan", "mesh", expected, type(mesh).__name__)


def _check_is_in(mesh: Any) -> None:
    """Refuse a mesh of other ranks than this one."""
    if mesh.get_coordinate() is None:
        fail("plan", "mesh", "a mesh that this rank is in", f"one of the ranks {mesh.mesh.tolist()}")
