"""One rank of many, alone on a GPU: its local work with the real kernels, without the other ranks.

Collectives return at once, with buffers of the right sizes that hold copies of this rank's own rows: the time of
kernels does not depend on the values of keys. So only the rank's computation and copies between its collectives take
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def lone(rank: int, size: int, nodes: int, device_type: str) -> Any:
    """The collectives of one of `size` ranks; with `nodes`, a pair: those among nodes and those inside a node."""
    if not nodes:
        return LoneRank(rank, size, device_type)
    node, inner = divmod(rank, size // nodes)
    return LoneRank(node, nodes, device_type), LoneRank(inner, size // nodes, device_type)


class LoneRank:
    """The collectives of one of `size` ranks, of which no other rank exists."""

    def __init__(self, rank: int, size: int, device_type: str) -> None:
        self.rank, self.size, self.device_type = rank, size, device_type
        self._buffers: dict[Any, Tensor] = {}

    def _filled(self, kind: str, x: Tensor, rows: int) -> Tensor:
        """A buffer with `rows` rows like those of `x`, made at the first call."""
        key = (kind, rows, tuple(x.shape), x.dtype)
        if key not in self._buffers:
            source = x.detach()[:rows] if len(x) else x.new_zeros(1, *x.shape[1:])
            times = -(-rows // max(len(source), 1))
            self._buffers[key] = source.repeat(max(times, 1), *([1] * (x.dim() - 1)))[:rows].contiguous()
        return self._buffers[key]

    def all_gather(self, x: Tensor) -> Tensor:
        return self._filled("all_gather", x, self.size * len(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        # A view of a part of `x` would keep all of `x` in memory.
        return self._filled("reduce_scatter", x, len(x) // self.size)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:  # noqa: ARG002  # of Collectives
        return self._filled("exchange", x, sum(received))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def wait(self, x: Tensor) -> Tensor:
        return x

    def gather_objects(self, x: Any) -> list[Any]:
        return [x] * self.size
