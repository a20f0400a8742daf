# SPDX-License-Identifier: Apache-2.0
"""A cost model of one attention layer on several GPUs. It also states why it prefers a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..checks import fail
from .work import BLOCK

BITWISE = 0.05
"""A strategy whose gradients all have the bits of one GPU is preferred if it is slower by at most this share."""

GROUPS = 4
"""Key heads are exchanged in at most this many groups."""

PROGRAMS = 512
"""Programs that a call needs to occupy the GPU to its end: blocks of a rank's rows times key heads."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates that the cost model computes with; measure them if a plan matters.

    Attributes:
        forward, backward: floating-point operations per second of a GPU's kernels, counted in visited blocks alone.
        link: bytes per second that a GPU receives from the others of its node. node: GPUs of a node.
        nic: bytes per second that a GPU receives from other nodes. latency: seconds that a collective takes at least.
        call: seconds that one more local call costs, a forward and a backward: launches, and programs that end late.
        bandwidth: bytes per second that a GPU reads and writes in its own memory when it copies a tensor.
        memory: bytes that keys, values and their gradients of one layer and one batch row may take on a GPU.
        itemsize: bytes of an element of q, k and v.
    """

    forward: float = 650e12
    backward: float = 520e12
    link: float = 250e9
    node: int = 8
    nic: float = 45e9
    memory: float = 20e9
    latency: float = 80e-6
    call: float = 350e-6
    bandwidth: float = 2.5e12
    itemsize: int = 2

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
            if not is_number or not (x > 0 or (x == 0 and name in ("latency", "call"))):
                fail("Machine", name, "a positive number", repr(x))
        if not isinstance(self.node, int):
            fail("Machine", "node", "an int of at least 1", repr(self.node))

    def rate(self, ranks: int) -> float:
        """Bytes per second that a GPU receives in an exchange among so many ranks."""
        return self.link if ranks <= self.node else self.nic


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of the slowest rank, and bytes that a rank receives, of a forward and a backward.

    `exchange`: seconds of the exchange of all groups. A rank makes `runs` calls for each group. Each call takes
    `per_call` seconds in addition to `kernels`. With several groups their results are joined, in `joins` seconds.
    """

    strategy: str
    kernels: float
    exchange: float
    groups: int
    bytes_moved: int
    runs: int = 1
    per_call: float = 0.0
    joins: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of local calls."""
        return self.kernels + self.per_call * self.runs * self.groups + (self.joins if self.groups > 1 else 0.0)

    @property
    def total(self) -> float:
        """Seconds in all. With several groups, the exchange of all groups but one overlaps the computation."""
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
    """Seconds of a forward and a backward that visit `blocks` blocks for each query head."""
    products = 2.0 * BLOCK * BLOCK * head_dim * query_heads * blocks
    return products * (2 / machine.forward + 5 / machine.backward)


def gather_cost(
    blocks: float,
    imbalance: float,
    runs: int,
    seq: int,
    ranks: int,
    heads: tuple[int, int],
    head_dim: int,
    machine: Machine,
    groups: int | None = None,
) -> Cost:
    """The cost if both passes gather the keys and values of all rows; their gradients are scattered in float32.

    Args:
        runs: the largest number of runs of rows that a rank has. Each run is one call.
        groups: the number of groups of key heads; by default the number that makes the exchange the fastest.
    """
    query_heads, key_heads = heads
    kernels = kernel_seconds(blocks / ranks * (1 + imbalance), query_heads, head_dim, machine)
    elements = 2 * key_heads * head_dim * seq * (ranks - 1) // ranks
    moved = elements * (2 * machine.itemsize + 4)
    # o and dq are read and written.
    joined = 4 * query_heads * head_dim * (seq // ranks) * machine.itemsize
    cost = Cost(
        strategy="gather",
        kernels=kernels,
        exchange=0.0,
        groups=1,
        bytes_moved=moved,
        runs=runs,
        per_call=machine.call,
        joins=joined / machine.bandwidth,
    )
    return _in_groups(cost, groups, seq, ranks, key_heads, machine)


def _in_groups(cost: Cost, asked: int | None, seq: int, ranks: int, key_heads: int, machine: Machine) -> Cost:
    """The cost of the exchange in as many groups of key heads as are asked for.

    By default they are as many as make the exchange the fastest; calls must not be too small.
    """
    if asked is not None:
        return _exchanged(cost, asked, ranks, machine)
    found = []
    for groups in range(1, min(GROUPS, key_heads) + 1):
        is_small = seq // ranks // BLOCK * key_heads // groups < PROGRAMS
        if groups == 1 or not (key_heads % groups or is_small):
            found.append(_exchanged(cost, groups, ranks, machine))
    return min(found, key=lambda each: each.total)


def _exchanged(cost: Cost, groups: int, ranks: int, machine: Machine) -> Cost:
    """The cost if key heads are gathered or exchanged in so many groups."""
    exchange = cost.bytes_moved / machine.rate(ranks) + 3 * groups * machine.latency if cost.bytes_moved else 0.0
    return replace(cost, exchange=exchange, groups=groups)


def heads_cost(
    blocks: float,
    seq: int,
    ranks: int,
    heads: tuple[int, int],
    head_dim: int,
    machine: Machine,
    *,
    sends_again: bool = False,
) -> Cost | None:
    """The cost if each rank has all rows of some heads; None if heads cannot be split.

    The forward exchanges q, k, v and o, and the backward their gradients; those of repeated key heads are float32.

    Args:
        sends_again: the backward sends q, k, v, o and lse again. It also does so if torch.compile traces the call, and
            in JAX under `jax.checkpoint`.
    """
    repeats = repeats_of_keys(heads, ranks)
    if repeats == 0:
        return None
    query_heads, key_heads = heads[0], heads[1] * repeats
    kernels = kernel_seconds(blocks / ranks, query_heads, head_dim, machine)
    of_queries, of_keys = (2 * n * head_dim * seq * (ranks - 1) // (ranks * ranks) for n in (query_heads, key_heads))
    of_pass = (of_queries + of_keys) * machine.itemsize
    of_gradients = of_queries * machine.itemsize + of_keys * (machine.itemsize if repeats == 1 else 4)
    of_lse = 4 * query_heads * seq * (ranks - 1) // (ranks * ranks)
    moved = of_gradients + (2 * (of_pass + of_lse) if sends_again else of_pass)
    exchange = moved / machine.rate(ranks) + 4 * machine.latency
    return Cost(
        strategy="heads", kernels=kernels, exchange=exchange, groups=1, bytes_moved=moved, per_call=machine.call
    )


def exchange_cost(
    gather: Cost,
    shares: list[float],
    key_heads: int,
    seq: int,
    ranks: int,
    machine: Machine,
    groups: int | None = None,
) -> Cost:
    """As `gather`, but only a share of the other ranks' keys is sent. `shares`: one share for each mask."""
    moved = int(gather.bytes_moved * sum(shares) / len(shares))
    cost = replace(gather, strategy="exchange", bytes_moved=moved)
    return _in_groups(cost, groups, seq, ranks, key_heads, machine)


def ring_cost(
    gather: Cost,
    steps: Sequence[int],
    seq: int,
    ranks: int,
    heads: tuple[int, int],
    head_dim: int,
    machine: Machine,
) -> Cost:
    """The cost of a ring: keys go from rank to rank in both passes, their gradients in the backward.

    The exchange of each step overlaps the computation of another step. With one step nothing is sent.

    Args:
        steps: the number of steps for each mask.
    """
    elements = 2 * heads[1] * head_dim * seq // ranks
    sent = [(2 * (n - 1) * machine.itemsize + 4 * n, 3 * n - 2) if n > 1 else (0, 0) for n in steps]
    moved, collectives = (sum(each) / len(steps) for each in zip(*sent, strict=True))
    exchange = elements * moved / machine.rate(ranks) + collectives * machine.latency
    return replace(gather, strategy="ring", exchange=exchange, groups=max(steps), bytes_moved=int(elements * moved))


def grid_cost(
    rows: Cost, seq: int, grid: tuple[int, int], heads: tuple[int, int], head_dim: int, machine: Machine
) -> Cost | None:
    """The cost if heads are split inside nodes and rows over nodes; None if heads cannot be split.

    Args:
        rows: the cost among the nodes if each node were one rank with all heads. It tells how keys move between nodes.
        grid: the number of nodes, and the number of ranks of a node.
    """
    nodes, inner = grid
    split = heads_cost(0.0, seq // nodes, inner, heads, head_dim, machine, sends_again=True)
    if split is None:
        return None
    repeats = repeats_of_keys(heads, inner)
    moved = rows.bytes_moved * repeats // inner
    exchange = split.exchange + moved / machine.rate(nodes * inner) + 3 * machine.latency
    groups = rows.groups if (heads[1] * repeats // inner) % rows.groups == 0 else 1
    return Cost(
        strategy="2d",
        kernels=rows.kernels / inner,
        exchange=exchange,
        groups=groups,
        bytes_moved=moved + split.bytes_moved,
        runs=rows.runs,
        per_call=rows.per_call,
        joins=rows.joins / inner,
    )


def gathered_bytes(seq: int, heads: tuple[int, int], head_dim: int, machine: Machine) -> int:
    """Bytes of the keys, the values and their gradients of all rows, of one batch row."""
    return 2 * heads[1] * head_dim * seq * (machine.itemsize + 4)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The costs of the strategies that a plan may choose from; None if a strategy cannot compute the call.

    Attributes:
        keys: bytes of the keys and values of all rows with their gradients.
        why_not_heads, why_not_ring: why the strategy cannot compute the call; "" if it can.
    """

    gather: Cost
    exchange: Cost | None
    heads: Cost | None
    ring: Cost | None
    keys: int
    why_not_heads: str
    why_not_ring: str

    def best(self, machine: Machine) -> tuple[Cost, tuple[str, ...]]:
        """The cost of the chosen strategy, the cheapest whose keys fit into memory, and the reasons for the choice."""
        gather, exchange, heads = self.gather, self.exchange, self.heads
        costs = tuple(str(cost) for cost in (gather, exchange, heads) if cost is not None)
        if self.keys > machine.memory:
            return self._best_of_long_rows(machine, costs)
        rows, other = gather, heads
        if exchange is not None and exchange.total < gather.total:
            rows = exchange
            other = heads if heads is not None and heads.total < gather.total else gather
        if heads is not None and heads.total <= rows.total * (1 + BITWISE):
            share = heads.total / rows.total - 1 if rows.total else 0.0
            reason = f"it takes {abs(100 * share):.1f} % {'more' if share > 0 else 'less'} time than {rows.strategy}"
            if share > 0:
                reason += ", but every gradient has the bits of one GPU"
            return heads, (*costs, f"heads: {reason}")
        if other is None:
            return rows, (*costs, f"{rows.strategy}, as heads cannot be split: {self.why_not_heads}")
        faster = f"it is {100 * (other.total / rows.total - 1):.1f} % faster than {other.strategy}"
        return rows, (*costs, f"{rows.strategy}: {faster}")

    def _best_of_long_rows(self, machine: Machine, costs: tuple[str, ...]) -> tuple[Cost, tuple[str, ...]]:
        """As `best`, if a GPU has no room for the keys of all rows."""
        taken, allowed = self.keys / 1e9, machine.memory / 1e9
        room = f"the keys of all rows take {taken:.1f} GB, more than the {allowed:.1f} GB of `Machine(memory=...)`"
        if self.heads is not None:
            return self.heads, (*costs, f"heads: {room}")
        if self.ring is not None:
            return self.ring, (*costs, str(self.ring), f"ring: {room}; heads cannot be split: {self.why_not_heads}")
        return self.gather, (*costs, f"gather, although {room}: there is no ring for {self.why_not_ring}")
