"""How a backward splits the query heads that share a key head, if there are too few key heads for all multiprocessors.

A program of dk and dv takes a block of keys of one key head, and sums over all query heads that share the head. With
few key heads, as of one GPU of a model whose heads are spread over several, there are fewer blocks than a GPU has
multiprocessors. Then the query heads of a key head are split into groups. Each group has its own dk and dv, in float32,
which another kernel adds up. Both are stored by tokens, in the memory order `[B, S, H, D]`. There all batch rows form
one long row, as the packed kernels need where they compute a segmented call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .configs import cdiv, next_power_of_2
from .segment_runs import batch_rows

if TYPE_CHECKING:
    from .launches import Backend, Tensor

BLOCKS_PER_PROCESSOR = 1.75
"""Heads are split until there are this many blocks of keys for each multiprocessor. The longest block of a causal mask
takes as long as two average ones, so that with fewer blocks some multiprocessors wait for the longest."""

LEAST_ROWS = 1024
"""The fewest rows, of all query heads of a group together, that pay for writing and adding up gradients of its own."""

_SUM_ROWS = 32
"""Rows of a program that adds up the gradients of groups."""


class HeadGroups(NamedTuple):
    """Groups of query heads that share a key head.

    Attributes:
        number: groups of each key head. size: query heads of a group.
        dk, dv: what the kernel of keys fills. If `number` is 1 these are the gradients of the call; else float32,
            `[B, Hkv * number, S, D]`, stored by tokens: the groups of a key head follow each other.
    """

    number: int
    size: int
    dk: Tensor
    dv: Tensor

    def add_up(self, backend: Backend, dk: Tensor, dv: Tensor) -> None:
        """Launch the kernel that fills `dk` and `dv` of the call from those of the groups, if there are several."""
        if self.number == 1:
            return
        from ..device.head_groups import add_head_groups

        batch, num_heads, length, head_dim = dk.shape
        head_dim_v = dv.shape[3]
        backend.launch(
            add_head_groups,
            (cdiv(length, _SUM_ROWS) * num_heads * batch,),
            (self.dk, self.dv, dk, dv),
            (*dk.stride()[:3], *dv.stride()[:3], num_heads, length),
            GROUPS=self.number,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=next_power_of_2(head_dim),
            BLOCK_DV=next_power_of_2(head_dim_v),
            BLOCK=_SUM_ROWS,
            num_warps=4,
        )


def split_heads(
    backend: Backend, q: Tensor, dk: Tensor, dv: Tensor, block_n: int, *, keeps_rows: bool = False
) -> HeadGroups:
    """The groups of a backward that computes `dk` and `dv`, `[B, Hkv, S, D]`, of q, `[B, Hq, S, D]`.

    All packed sequences together count as one batch row. So the number of groups, which is compiled in, follows from
    the shapes of tensors and not from how many sequences there are.

    Args:
        block_n: keys of a block.
        keeps_rows: packed kernels may compute a segmented call, so its batch rows of dk and dv must remain as many rows
            apart in memory as those of k. Those of groups are S rows apart. So heads are not split if those of dk are
            further apart, as in the memory order `[B, H, S, D]`.
    """
    batch, num_kv_heads, length, head_dim = dk.shape
    shared, number = q.shape[1] // num_kv_heads, 1
    by_heads = batch_rows(dk) not in (None, 0, length)
    if shared > 1 and dk.numel() > 0 and not (keeps_rows and by_heads):
        blocks = cdiv(length, block_n) * num_kv_heads * batch
        number = choose_number(shared, blocks, q.shape[2], backend.multiprocessors(q))
    if number == 1:
        return HeadGroups(1, shared, dk, dv)
    dk_groups, dv_groups = (
        backend.empty_by_tokens(q, (batch, num_kv_heads * number, length, columns), backend.FP32)
        for columns in (head_dim, dv.shape[3])
    )
    return HeadGroups(number, shared // number, dk_groups, dv_groups)


def choose_number(shared: int, blocks: int, rows: int, multiprocessors: int) -> int:
    """Into how many groups the `shared` query heads of a key head are split: a divisor of `shared`.

    Args:
        blocks: the blocks of keys of all key heads. rows: the rows of one query head.

    >>> choose_number(8, 64, 8192, 132), choose_number(8, 512, 8192, 132), choose_number(8, 8, 512, 132)
    (4, 1, 4)
    """
    wanted = math.ceil(BLOCKS_PER_PROCESSOR * multiprocessors / max(blocks, 1))
    paid = [n for n in range(1, shared + 1) if shared % n == 0 and (n == 1 or shared // n * rows >= LEAST_ROWS)]
    return next((n for n in paid if n >= wanted), paid[-1])
