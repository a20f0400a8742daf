# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: a model of one attention layer on several GPUs that says why it prefers a strategy."""

from dataclasses import dataclass
from math import gcd

from .work import BLOCK

BITWISE = 0.005
"""A strategy that gives one GPU's bits in every gradient is preferred if it is at most so much slower."""

GROUPS = 4
"""Key heads are exchanged in so many groups if that takes more than FEW of the computation."""

FEW = 0.02


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates that the cost model computes with; measure them where a plan matters.

    Attributes:
        forward, backward: floating-point operations that a GPU's kernels do in a second, of visited blocks alone.
        link: bytes that a GPU receives from the others in a second. latency: seconds that a collective takes at least.
        itemsize: bytes of an element of q, k and v.
    """

    forward: float = 650e12
    backward: float = 520e12
    link: float = 330e9
    latency: float = 15e-6
    itemsize: int = 2


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of the slowest rank, and bytes that a rank receives, of a forward and a backward."""

    strategy: str
    compute: float
    exchange: float
    groups: int
    bytes_moved: int

    @property
    def total(self) -> float:
        """With groups the exchange of all but one runs beside the computation."""
        if self.groups == 1:
            return self.compute + self.exchange
        return max(self.compute, self.exchange) + self.exchange / self.groups

    def __str__(self) -> str:
        parts = f"{1e3 * self.compute:.3f} ms of kernels, {1e3 * self.exchange:.3f} ms of exchange"
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{self.strategy}: {1e3 * self.total:.3f} ms ({parts}{groups}, {self.bytes_moved} bytes)"


def repeats_of_keys(heads: tuple[int, int], ranks: int) -> int:
    """How often key heads are repeated, so that each rank has some: 0 if heads cannot be split over the ranks.

    >>> repeats_of_keys((32, 8), 4), repeats_of_keys((32, 8), 16), repeats_of_keys((6, 2), 4)
    (1, 2, 0)
    """
    query_heads, key_heads = heads
    repeats = ranks // gcd(key_heads, ranks)
    divides = query_heads % ranks == 0 and (query_heads // key_heads) % repeats == 0
    return repeats if divides else 0


def kernel_seconds(blocks: float, query_heads: int, head_dim: int, machine: Machine) -> float:
    """Seconds of a forward and a backward that visit so many blocks."""
    products = 2.0 * BLOCK * BLOCK * head_dim * query_heads * blocks
    return products * (2 / machine.forward + 5 / machine.backward)


def gather_cost(
    blocks: float, imbalance: float, seq: int, ranks: int, heads: tuple[int, int], head_dim: int, machine: Machine
) -> Cost:
    """Keys and values of all rows are gathered in both passes; their gradients are scattered in float32."""
    query_heads, key_heads = heads
    compute = kernel_seconds(blocks / ranks * (1 + imbalance), query_heads, head_dim, machine)
    elements = 2 * key_heads * head_dim * seq * (ranks - 1) // ranks
    moved = elements * (machine.itemsize + 4)
    exchange = moved / machine.link + 2 * machine.latency
    groups = min(GROUPS, key_heads) if exchange > FEW * compute else 1
    while key_heads % groups:
        groups -= 1
    return Cost(strategy="gather", compute=compute, exchange=exchange, groups=groups, bytes_moved=moved)


def heads_cost(
    blocks: float, seq: int, ranks: int, heads: tuple[int, int], head_dim: int, machine: Machine
) -> Cost | None:
    """q, k, v and o change hands in both passes; None if heads cannot be split."""
    repeats = repeats_of_keys(heads, ranks)
    if repeats == 0:
        return None
    query_heads, key_heads = heads[0], heads[1] * repeats
    compute = kernel_seconds(blocks / ranks, query_heads, head_dim, machine)
    elements = 2 * (query_heads + key_heads) * head_dim * seq * (ranks - 1) // (ranks * ranks)
    moved = 2 * elements * machine.itemsize
    exchange = moved / machine.link + 4 * machine.latency
    return Cost(strategy="heads", compute=compute, exchange=exchange, groups=1, bytes_moved=moved)


def exchange_cost(gather: Cost, shares: list[float], groups_of: int, machine: Machine) -> Cost:
    """As `gather`, but of the keys of the other ranks only a share is sent, given for each mask."""
    moved = int(gather.bytes_moved * sum(shares) / len(shares))
    exchange = moved / machine.link + 2 * machine.latency
    groups = min(GROUPS, groups_of) if exchange > FEW * gather.compute else 1
    while groups_of % groups:
        groups -= 1
    return Cost(strategy="exchange", compute=gather.compute, exchange=exchange, groups=groups, bytes_moved=moved)


def choose(gather: Cost, exchange: Cost | None, heads: Cost | None, why_not_heads: str) -> tuple[Cost, tuple[str, ...]]:
    """The cheapest, and why."""
    costs = tuple(str(cost) for cost in (gather, exchange, heads) if cost is not None)
    rows, other = gather, heads
    if exchange is not None and exchange.total < gather.total:
        rows = exchange
        other = heads if heads is not None and heads.total < gather.total else gather
    if heads is not None and heads.total <= rows.total * (1 + BITWISE):
        return heads, (*costs, "heads: it is no slower, and every gradient has the bits of one GPU")
    if other is None:
        return rows, (*costs, f"{rows.strategy}, as heads cannot be split: {why_not_heads}")
    return rows, (
        *costs,
        f"{rows.strategy}: it is {100 * (other.total / rows.total - 1):.1f} % faster than {other.strategy}",
    )
