"""Masks of documents, prefixes and drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.library_formulas.draws import documents, ints
from tests.support.library_formulas.formula import BATCH, Grid, Result, variant


def _blocks(g: Grid) -> Tensor:
    """Whole documents, each set as a square."""
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b, row in enumerate(g.own["doc"].tolist()):
        for document in set(row):
            start, stop = row.index(document), len(row) - row[::-1].index(document)
            keep[b, :, start:stop, start:stop] = True
    return keep


@variant(doc=documents(20, 1, 32, 43))
def packed_encoder(g: Grid) -> Result:
    return _blocks(g), g.s


@variant(q_length=ints(45, 20), kv_length=ints(33, 70))
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
    keep = torch.zeros(BATCH, 1, *g.s.shape[2:], dtype=torch.bool, device=g.s.device)
    for b, length in enumerate((50, 45)):
        keep[b, :, :, :length] = True
        keep[b, :, :, length : length + 20] = g.own["ancestor"][b]  # no query sees what lies behind
    return keep, g.s


def _ancestors(children: int) -> Tensor:
    """`[20, 20]`: who is above whom, itself included, in a tree in which every node has as many children."""
    keep = torch.eye(20, dtype=torch.bool)
    for node in range(1, 20):
        keep[node] |= keep[(node - 1) // children]
    return keep
