# SPDX-License-Identifier: Apache-2.0
"""What a step of a ring computes: a run of dense rows with a run of keys, or packed documents with their keys."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.packed_rows import packed_calls
from ..core.ring_steps import RingSteps
from ..core.shards import Chunk, Layout
from ..core.work import VariantWork
from .exchange import kept
from .row_parts import Documents, packed_parts


@dataclass(frozen=True)
class Pair:
    """A run of rows and a run of keys, and where each begins among the rows of its rank."""

    run: Chunk
    at: int
    keys: Chunk
    keys_at: int
    owner: int

    @property
    def is_own(self) -> bool:
        """True if these are the keys of the rows themselves."""
        return self.run == self.keys

    def rows(self, x: Tensor) -> Tensor:
        """The part of a tensor of the rows of this rank, `[local, ...]`."""
        return x.narrow(0, self.at, self.run[1])

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write such a part back, which may be the rows themselves."""

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of one of the keys that are here."""
        return x.narrow(0, self.keys_at, self.keys[1])

    def add(self, whole: Tensor, part: Tensor) -> None:
        """Add to these rows."""
        self.rows(whole).add_(part)

    def add_keys(self, whole: Tensor, part: Tensor) -> None:
        """Add to these keys."""
        self.of_keys(whole).add_(part)


@dataclass(frozen=True)
class PackedPair:
    """Documents of a rank, and their keys that another one has: one run of each, and at most one of its keys.

    Attributes:
        q_offset: of each document the first row's position, counted from the first key.
    """

    queries: Documents
    keys: Documents
    q_offset: Tensor
    is_own: bool

    def rows(self, x: Tensor) -> Tensor:
        return self.queries.take(x)

    def put(self, whole: Tensor, part: Tensor) -> None:
        if not self.queries.is_span:
            self.queries.put(whole, part)

    def of_keys(self, x: Tensor) -> Tensor:
        return self.keys.take(x)

    def add(self, whole: Tensor, part: Tensor) -> None:
        self.queries.add(whole, part)

    def add_keys(self, whole: Tensor, part: Tensor) -> None:
        self.keys.add(whole, part)


def takes_documents(work: VariantWork) -> bool:
    """Whether packed calls of some keys of each document are right: nothing is read by row."""
    return not any(work.axes(name, "q_idx", "kv_idx") for name in work.tensors)


def packed_pairs(layout: Layout, steps: RingSteps, rank: int, owner: int, device: torch.device) -> list[PackedPair]:
    """What a rank computes with the keys of another one, made once for each layout."""

    def make() -> list[PackedPair]:
        return list(_pairs_of(layout, steps, rank, owner, device))

    key = ("packed pairs", rank, owner, steps.looks_back, bool(steps.visits[rank, owner]), device)
    pairs: list[PackedPair] = kept(layout, key, make)
    return pairs


def _pairs_of(layout: Layout, steps: RingSteps, rank: int, owner: int, device: torch.device) -> Iterator[PackedPair]:
    if not steps.visits[rank, owner]:
        return
    of_rank, of_owner = (packed_calls(layout, each, drops=False) for each in (rank, owner))
    queries, keys = (packed_parts(layout, each, device, drops=False) for each in (rank, owner))
    for i, own in enumerate(of_rank):
        for j, other in enumerate(of_owner):
            offsets = [a - b for a, b in zip(own.offsets, other.offsets, strict=True)]
            lengths, of_keys = own.lengths, other.lengths
            if any(
                count and others and not (steps.looks_back and offset + count <= 0)
                for count, others, offset in zip(lengths, of_keys, offsets, strict=True)
            ):
                q_offset = torch.tensor(offsets, dtype=torch.int32, device=device)
                yield PackedPair(queries[i], keys[j], q_offset, is_own=owner == rank and i == j)
