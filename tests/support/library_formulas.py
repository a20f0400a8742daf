"""The mathematics of every variant of library.yaml, by hand.

Each function has the name of its variant and was written from the paper the variant's `doc` cites, not from its entry.
It says which keys a query sees and what becomes of the scaled score. Its decorator gives a call that shows the variant:
lengths at which windows, frames and canvases end within the sequence, and arguments of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, KV_HEADS = 2, 4, 2
POSITIONS = 96
"""How many positions the tensors of the calls cover."""

Result = tuple[Tensor | None, Tensor]
"""Which pairs are kept (None: all), and the modified scores."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The pairs of one call: scaled scores `[B, H, Sq, Skv]`, positions i `[Sq, 1]` of queries and j `[Skv]` of keys.

    `b` `[B, 1, 1, 1]` and `h` `[H, 1, 1]` number batch rows and heads.
    """

    s: Tensor
    i: Tensor
    j: Tensor
    own: dict[str, Any]

    @property
    def b(self) -> Tensor:
        return torch.arange(BATCH, device=self.s.device).view(-1, 1, 1, 1)

    @property
    def h(self) -> Tensor:
        return torch.arange(HEADS, device=self.s.device).view(-1, 1, 1)

    def rows(self, name: str) -> Tensor:
        """An argument `[B]` beside the scores."""
        x: Tensor = self.own[name]
        return x.view(-1, 1, 1, 1)

    def heads(self, name: str) -> Tensor:
        """An argument `[H]` beside the scores."""
        x: Tensor = self.own[name]
        return x.view(-1, 1, 1)

    def of_queries(self, name: str) -> Tensor:
        """An argument `[B, n]` at the queries' positions."""
        x: Tensor = self.own[name]
        return x[:, self.i.flatten()][:, None, :, None]

    def of_keys(self, name: str) -> Tensor:
        """An argument `[B, n]` at the keys' positions."""
        x: Tensor = self.own[name]
        return x[:, self.j][:, None, None, :]

    def each(self, value: Callable[[int, int], int]) -> Tensor:
        """The mask or the integers `[Sq, Skv]` that a function of two positions gives."""
        rows = [[value(i, j) for j in self.j.tolist()] for i in self.i.flatten().tolist()]
        return torch.tensor(rows, device=self.s.device)

    def each_by_row(self, name: str, value: Callable[[list[int], int, int], int]) -> Tensor:
        """The same `[B, 1, Sq, Skv]` for a function that also takes a batch row of an argument."""
        return torch.stack([self.each(partial(value, row)) for row in self.own[name].tolist()])[:, None]


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A variant's mathematics and a call that shows it; `own` draws its arguments.

    `positive` calls have positive q and k: no score is near 0, where rounding moves 1 / score without bound.
    """

    function: Callable[[Grid], Result]
    q_len: int
    kv_len: int
    q_offset: int
    positive: bool
    own: dict[str, Callable[[], Any]] = field(default_factory=dict)


FORMULAS: dict[str, Formula] = {}


def variant(
    q_len: int = 45, kv_len: int = 70, q_offset: int = 0, *, positive: bool = False, **own: Any
) -> Callable[..., Any]:
    """Register a formula; its arguments are numbers or functions that draw them."""
    draws = {name: value if callable(value) else (lambda value=value: value) for name, value in own.items()}

    def register(function: Callable[[Grid], Result]) -> Callable[[Grid], Result]:
        name = function.__name__
        FORMULAS[name] = Formula(
            function=function, q_len=q_len, kv_len=kv_len, q_offset=q_offset, positive=positive, own=draws
        )
        return function

    return register


def _normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def _positive(*shape: int) -> Callable[[], Tensor]:
    return lambda: 0.5 + torch.rand(shape)


def _ints(*values: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values, dtype=torch.int32)


def _chance(probability: float, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) < probability


def _documents(*lengths: int) -> Callable[[], Tensor]:
    """`[B, POSITIONS]`: documents of these lengths, in the second row the other way round."""

    def draw() -> Tensor:
        rows = [torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in (lengths, lengths[::-1])]
        return torch.stack(rows)[:, :POSITIONS].int()

    return draw


# --------------------------------------------------------------------------------------------- causal and its relatives


@variant(q_offset=9)
def inverse_causal(g: Grid) -> Result:
    return ~(g.j < g.i), g.s


@variant(offset=23)
def causal_offset(g: Grid) -> Result:
    return g.j - g.i <= g.own["offset"], g.s


@variant(offset=_ints(31, -8))
def causal_offset_batch(g: Grid) -> Result:
    return g.j - g.i <= g.rows("offset"), g.s


def _prefix_lm(g: Grid, lengths: list[int]) -> Tensor:
    """Per batch row, `tril` with its first columns set."""
    rows = []
    for length in lengths:
        keep = g.j <= g.i
        keep[:, :length] = True
        rows.append(keep)
    return torch.stack(rows)[:, None]


@variant(length=_ints(37, 5))
def prefix_lm_batch(g: Grid) -> Result:
    return _prefix_lm(g, g.own["length"].tolist()), g.s


@variant(start=_ints(0, 13), stop=_ints(30, 41))
def bidirectional_span(g: Grid) -> Result:
    rows = []
    for start, stop in zip(g.own["start"].tolist(), g.own["stop"].tolist(), strict=True):
        keep = g.j <= g.i
        keep[start:stop, start:stop] = True
        rows.append(keep)
    return torch.stack(rows)[:, None], g.s


@variant()
def alternating_directions(g: Grid) -> Result:
    return torch.stack([g.j <= g.i, g.j >= g.i])[:, None], g.s


@variant(order=lambda: torch.stack([torch.randperm(POSITIONS), torch.randperm(POSITIONS)]).int())
def permutation_lm(g: Grid) -> Result:
    def seen(order: list[int], i: int, j: int) -> bool:
        factorisation = sorted(range(POSITIONS), key=order.__getitem__)
        return j in factorisation[: factorisation.index(i) + 1]

    return g.each_by_row("order", seen), g.s


def _capped(s: Tensor, cap: float) -> Tensor:
    """`cap * tanh(s / cap)`, by exponentials."""
    grown = torch.exp(2 * s / cap)
    return cap * (grown - 1) / (grown + 1)


@variant(q_offset=25)
def gemma2_global(g: Grid) -> Result:
    return g.j <= g.i, _capped(g.s, 50)


# ------------------------------------------------------------------------------------------------- windows and patterns


@variant(size=9)
def symmetric_window(g: Grid) -> Result:
    return (g.i - g.j).abs() <= g.own["size"], g.s


@variant(size=17, dilation=3)
def dilated_window(g: Grid) -> Result:
    reach = range(-g.own["size"], g.own["size"] + 1)
    return g.each(lambda i, j: j - i in reach and (j - i) % g.own["dilation"] == 0), g.s


@variant(size=6, important=_chance(0.1, BATCH, POSITIONS))
def longformer(g: Grid) -> Result:
    near = (g.i - g.j).abs() <= g.own["size"]
    return near | g.of_queries("important") | g.of_keys("important"), g.s


@variant(size=8, chosen=_chance(0.2, 6, 9))
def bigbird(g: Grid) -> Result:
    size, chosen = g.own["size"], g.own["chosen"].tolist()

    def holds(i: int, j: int) -> bool:
        m, n = i // size, j // size
        return abs(m - n) <= 1 or m == 0 or n == 0 or bool(chosen[m][n])

    return g.each(holds), g.s


@variant(size=8, chosen=_chance(0.4, BATCH, HEADS, 6, 9))
def block_sparse(g: Grid) -> Result:
    size = g.own["size"]
    elements = g.own["chosen"].repeat_interleave(size, 2).repeat_interleave(size, 3)
    return elements[:, :, : g.s.shape[2], : g.s.shape[3]], g.s


@variant(size=16, chosen=lambda: torch.randint(-1, 6, (BATCH, KV_HEADS, 6, 4), dtype=torch.int32), q_offset=9)
def selected_blocks(g: Grid) -> Result:
    lists = g.own["chosen"].repeat_interleave(HEADS // KV_HEADS, 1)[:, :, g.i.flatten() // 16]
    named = torch.stack([(lists == j // 16).any(-1) for j in g.j.tolist()], -1)
    return named & (g.j <= g.i), g.s


@variant(stride=8, q_offset=25)
def sparse_strided(g: Grid) -> Result:
    stride = g.own["stride"]
    return g.each(lambda i, j: j <= i and (i - j < stride or j in range(i, -1, -stride))), g.s


@variant(stride=8, summary=2, q_offset=25)
def sparse_fixed(g: Grid) -> Result:
    stride, summary = g.own["stride"], g.own["summary"]
    return g.each(
        lambda i, j: j <= i and (j // stride == i // stride or j % stride in range(stride - summary, stride))
    ), g.s


@variant(size=30, dilation=3)
def longnet(g: Grid) -> Result:
    size, dilation = g.own["size"], g.own["dilation"]

    def head(h: int) -> Tensor:
        tokens = {segment + n for segment in range(0, POSITIONS, size) for n in range(h % dilation, size, dilation)}
        return g.each(lambda i, j: j <= i and i // size == j // size and {i, j} <= tokens)

    return torch.stack([head(h) for h in range(HEADS)]), g.s


@variant(size=_ints(1, 5, 20, 60), q_offset=25)
def head_windows(g: Grid) -> Result:
    distance = g.i - g.j
    return (distance >= 0) & (distance <= g.heads("size") - 1), g.s


@variant(allowed=_chance(0.5, BATCH, POSITIONS, POSITIONS))
def tensor_mask(g: Grid) -> Result:
    return g.own["allowed"][:, None, : g.s.shape[2], : g.s.shape[3]], g.s


# ------------------------------------------------------------------------------------------- canvases, images and video


@cache
def _neighbours(width: int, height: int, kernel: int, x: int, y: int) -> set[tuple[int, int]]:
    """The pixels that pixel (x, y) of a canvas sees: a full window, moved inside where it would reach over an edge."""

    def window(centre: int, length: int) -> range:
        first = min(max(centre - kernel // 2, 0), length - kernel)
        return range(first, first + kernel)

    return {(u, v) for u in window(x, width) for v in window(y, height)}


@variant(q_len=50, kv_len=140, q_offset=70)
def sasa(g: Grid) -> Result:
    places = [(n % 20, n // 20) for n in range(POSITIONS * 2)]
    return g.each(lambda i, j: max(abs(a - b) for a, b in zip(places[i], places[j], strict=True)) <= 3), g.s


@variant(q_len=50, kv_len=96, q_offset=30, width=12, height=8, kernel_size=5)
def natten_canvas(g: Grid) -> Result:
    return g.each(lambda i, j: divmod(j, 12)[::-1] in _neighbours(12, 8, 5, i % 12, i // 12)), g.s


@variant(q_len=60, kv_len=240, q_offset=100)
def natten_tiled(g: Grid) -> Result:
    corners = [(x, y) for y in range(0, 12, 4) for x in range(0, 20, 4)]
    pixels = [(x + u, y + v) for x, y in corners for v in range(4) for u in range(4)]
    return g.each(lambda i, j: pixels[j] in _neighbours(20, 12, 5, *pixels[i])), g.s


@variant(q_len=60, kv_len=256, q_offset=100)
def natten_morton(g: Grid) -> Result:
    pixels = [(int(f"{n:08b}"[1::2], 2), int(f"{n:08b}"[0::2], 2)) for n in range(256)]
    return g.each(lambda i, j: pixels[j] in _neighbours(16, 16, 5, *pixels[i])), g.s


@variant(q_len=98, kv_len=98, bias=_normal(HEADS, 169))
def swin(g: Grid) -> Result:
    def entry(i: int, j: int) -> int:
        (y, x), (v, u) = divmod(i % 49, 7), divmod(j % 49, 7)
        return (y - v + 6) * 13 + (x - u + 6)

    return g.each(lambda i, j: i // 49 == j // 49), g.s + g.own["bias"][:, g.each(entry)]


@variant(size=9, q_offset=20)
def block_causal(g: Grid) -> Result:
    return g.each(lambda i, j: j < (i // g.own["size"] + 1) * g.own["size"]), g.s


@variant(image=lambda: torch.tensor([[-1] * 5 + [0] * 20 + [-1] * 3 + [1] * 68, [2] * 30 + [-1] * 66]).int())
def transfusion(g: Grid) -> Result:
    def holds(image: list[int], i: int, j: int) -> bool:
        return j <= i or (image[i] != -1 and image[i] == image[j])

    return g.each_by_row("image", holds), g.s


@variant(
    q_len=60,
    kv_len=33,
    size=10,
    start=lambda: torch.tensor([[3, 20, 20, 50], [0, 0, 70, 10]]).int(),
    stop=lambda: torch.tensor([[20, 40, 50, 60], [30, 60, 80, 44]]).int(),
)
def flamingo(g: Grid) -> Result:
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b in range(BATCH):
        for image in range(4):
            start, stop = int(g.own["start"][b, image]), int(g.own["stop"][b, image])
            keep[b, :, start:stop, image * 10 : image * 10 + 10] = True
    return keep, g.s


# --------------------------------------------------------------------------------------- documents, prefixes and drafts


def _blocks(g: Grid) -> Tensor:
    """Whole documents, each set as a square."""
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b, row in enumerate(g.own["doc"].tolist()):
        for document in set(row):
            start, stop = row.index(document), len(row) - row[::-1].index(document)
            keep[b, :, start:stop, start:stop] = True
    return keep


@variant(doc=_documents(20, 1, 32, 43))
def packed_encoder(g: Grid) -> Result:
    return _blocks(g), g.s


@variant(q_length=_ints(45, 20), kv_length=_ints(33, 70))
def padding_both(g: Grid) -> Result:
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b, (rows, cols) in enumerate(zip(g.own["q_length"].tolist(), g.own["kv_length"].tolist(), strict=True)):
        keep[b, :, :rows, :cols] = True
    return keep, g.s


@variant(q_len=70, doc=lambda: torch.tensor([[0] * 30 + [1] * 25 + [2] * 41, [0] * 9 + [1] * 40 + [2] * 47]).int())
def shared_prefix(g: Grid) -> Result:
    prefix = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b, row in enumerate(g.own["doc"].tolist()):
        first = row.count(0)
        prefix[b, :, first:, :first] = True  # an answer sees all of the prompt
    return prefix | (_blocks(g) & (g.j <= g.i)), g.s


@variant(q_len=66, kv_len=66, length=33, size=7)
def block_diffusion(g: Grid) -> Result:
    length, size = g.own["length"], g.own["size"]

    def holds(i: int, j: int) -> bool:
        (clean_i, m), (clean_j, n) = divmod(i, length), divmod(j, length)
        m, n = m // size, n // size
        block_diagonal: bool = m == n and clean_i == clean_j
        offset_block_causal: bool = m > n and clean_j == 1 and clean_i == 0
        block_causal: bool = m >= n and clean_j == 1 and clean_i == 1
        return block_diagonal or offset_block_causal or block_causal

    return g.each(holds), g.s


@variant(
    q_len=20,
    kv_len=70,
    length=lambda: torch.tensor([50, 45], dtype=torch.int32),
    ancestor=lambda: torch.stack([_ancestors(3), _ancestors(2)]),
)
def tree_attention(g: Grid) -> Result:
    keep = torch.ones(BATCH, 20, 75, dtype=torch.bool, device=g.s.device)
    for b, length in enumerate((50, 45)):
        keep[b, :, length : length + 20] = g.own["ancestor"][b]
        # Behind the last drafted token: an index beyond the tensor is its last.
        keep[b, :, length + 20 :] = g.own["ancestor"][b, :, -1:]
    return keep[:, None, :, :70], g.s


def _ancestors(children: int) -> Tensor:
    """`[20, 20]`: who is above whom, itself included, in a tree in which every node has as many children."""
    keep = torch.eye(20, dtype=torch.bool)
    for node in range(1, 20):
        keep[node] |= keep[(node - 1) // children]
    return keep


# ------------------------------------------------------------------------------------------------------ position biases


@variant(bias=_normal(HEADS, 33))
def shaw_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: max(-16, min(16, j - i)) + 16)]


@variant(bias=_normal(HEADS, 2 * POSITIONS + 1), reach=POSITIONS)
def toeplitz_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: j - i + POSITIONS)]


@variant(bias=_normal(HEADS, POSITIONS))
def distance_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: abs(i - j))]


def _relative_position_bucket(relative_position: int, *, bidirectional: bool) -> int:
    """As in mesh-tensorflow: 32 buckets, max_distance 128; relative_position = memory position - query position."""
    num_buckets, max_distance, bucket, n = 32, 128, 0, -relative_position
    if bidirectional:
        num_buckets //= 2
        bucket += num_buckets if n < 0 else 0
        n = abs(n)
    else:
        n = max(n, 0)
    max_exact = num_buckets // 2
    if n < max_exact:
        return bucket + n
    large = math.log(n / max_exact) / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    return bucket + min(max_exact + int(large), num_buckets - 1)


@variant(q_len=33, kv_len=200, q_offset=90, bias=_normal(HEADS, 32))
def t5_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, g.each(lambda i, j: _relative_position_bucket(j - i, bidirectional=True))]


@variant(q_len=40, kv_len=140, q_offset=100, bias=_normal(HEADS, 32))
def t5_bias_causal(g: Grid) -> Result:
    buckets = g.each(lambda i, j: _relative_position_bucket(j - i, bidirectional=False))
    return g.j <= g.i, g.s + g.own["bias"][:, buckets]


@variant(bias=_normal(HEADS, POSITIONS, POSITIONS))
def head_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][None, :, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=_normal(POSITIONS, POSITIONS))
def shared_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][None, None, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=_normal(BATCH, HEADS, POSITIONS, POSITIONS))
def pair_bias(g: Grid) -> Result:
    return None, g.s + g.own["bias"][:, :, : g.s.shape[2], : g.s.shape[3]]


@variant(bias=_normal(HEADS, 8), path=lambda: torch.randint(0, 8, (BATCH, POSITIONS, POSITIONS), dtype=torch.int32))
def graphormer(g: Grid) -> Result:
    path = g.own["path"][:, : g.s.shape[2], : g.s.shape[3]].long()
    return None, g.s + torch.stack([g.own["bias"][h][path] for h in range(HEADS)], 1)


@variant(q_offset=25, r1=_positive(HEADS), r2=_positive(HEADS))
def kerple(g: Grid) -> Result:
    return g.j <= g.i, g.s - g.heads("r1") * torch.log1p(g.heads("r2") * (g.i - g.j).abs())


def _sinusoids(positions: int) -> Tensor:
    """`[positions, 16]`: the embedding of Vaswani et al., 2017, section 3.5."""
    angles = torch.arange(positions)[:, None] / 10000 ** (torch.arange(8) / 8)
    return torch.cat([angles.sin(), angles.cos()], 1)


@variant(
    q_offset=25,
    ratio=lambda: HEADS / (8 * torch.arange(1.0, HEADS + 1)),
    cosines=lambda: (_sinusoids(POSITIONS) @ _sinusoids(1).T).flatten(),
)
def sandwich(g: Grid) -> Result:
    return g.j <= g.i, g.s + g.heads("ratio") * g.own["cosines"][g.each(lambda i, j: abs(i - j))]


@variant(position=_normal(BATCH, POSITIONS, 2), reach=_positive(HEADS))
def euclidean_decay(g: Grid) -> Result:
    position = g.own["position"]
    places = position[:, g.i.flatten()][:, :, None] - position[:, g.j][:, None]
    return None, g.s * torch.exp(-torch.linalg.vector_norm(places, dim=-1)[:, None] / g.heads("reach"))


# --------------------------------------------------------------------------------------------------------- temperatures


@variant(temperature=_positive(HEADS), gain=_positive())
def temperature(g: Grid) -> Result:
    return None, torch.einsum("bhij,h->bhij", g.s, g.own["temperature"]) * g.own["gain"]


@variant(q_offset=25, temperature=_positive(BATCH, HEADS, POSITIONS))
def key_temperature(g: Grid) -> Result:
    return g.j <= g.i, torch.einsum("bhij,bhj->bhij", g.s, g.own["temperature"][:, :, : g.s.shape[3]])


@variant()
def log_length(g: Grid) -> Result:
    seen = (g.j <= g.i).sum(-1, keepdim=True).double()
    return g.j <= g.i, g.s * seen.log()


@variant()
def log_n(g: Grid) -> Result:
    return None, g.s * math.log(len(g.j), 512)


@variant(strength=_positive(HEADS))
def scalable_softmax(g: Grid) -> Result:
    seen = (g.j <= g.i).sum(-1, keepdim=True).double()
    return g.j <= g.i, g.s * g.heads("strength") * seen.log()


# ----------------------------------------------------------------------------------------------- instead of the softmax


@variant(bias=-3.5)
def sigmoid_attention(g: Grid) -> Result:
    return None, torch.nn.functional.logsigmoid(g.s + g.own["bias"])


@variant()
def relu_attention(g: Grid) -> Result:
    return None, torch.where(g.s > 0, g.s.clamp(min=1e-300).log(), -10000.0)


@variant(size=20, q_offset=25, g=lambda: -0.2 * torch.rand(BATCH, POSITIONS, HEADS))
def forgetting_window(g: Grid) -> Result:
    log_decay = g.own["g"].transpose(1, 2)  # [B, H, P]
    positions = torch.arange(POSITIONS, device=g.s.device)
    after_key, up_to_query = positions > g.j[:, None], positions <= g.i  # [Skv, P], [Sq, P]
    forgotten = torch.einsum("bhp,ip,jp->bhij", log_decay, up_to_query.double(), after_key.double())
    distance = g.i - g.j
    return (distance >= 0) & (distance < g.own["size"]), g.s + forgotten


# ------------------------------------------------------------------------------------------------- stacks and exercises


@variant(size=20, q_offset=25, slope=_positive(HEADS))
def mixed_stack(g: Grid) -> Result:
    distance = g.i - g.j
    return (distance >= 0) & (distance < g.own["size"]), _capped(g.s, 30) - g.heads("slope") * distance


@variant(q_offset=25)
def checkerboard(g: Grid) -> Result:
    return None, g.s * torch.tensor([2.0, 0.5], device=g.s.device)[g.each(lambda i, j: abs(i - j) % 2)]


@variant()
def squared(g: Grid) -> Result:
    return None, g.s.square()


@variant()
def trig(g: Grid) -> Result:
    return None, g.s.cos().sin() + g.b.double().tan()


@variant()
def silu_score(g: Grid) -> Result:
    return None, g.s / (1 + (-g.s).exp())


@variant(q_offset=25, positive=True)
def reciprocal(g: Grid) -> Result:
    return g.j <= g.i, g.s.reciprocal()


@variant(q_offset=25)
def log_or_score(g: Grid) -> Result:
    return g.j <= g.i, torch.where(g.s > 0, g.s.clamp(min=1e-300).log(), g.s)
