# SPDX-License-Identifier: Apache-2.0
"""Rows of keys and values, packed for other ranks, unpacked, and added up: by one kernel, on the CPU by torch.

The functions take k and v, or their gradients, as `[rows, B, H, D]`, and a table of `core.key_routes.KeyTables` on the
same device. `came` has rows of k from other ranks, each followed by the row of v, or is None if nothing came.
"""

from math import prod

import torch
from torch import Tensor

from ...core.configs import cdiv, next_power_of_2
from ...core.settings import INTERPRET
from ..launching import launch
from ..replay import replayed
from .tape import as_one_step

_ROWS, _MOST_COLUMNS = 4, 1024
"""Rows of a program, and the most elements of a row that it has in registers."""


def _packed(k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The rows of k that a table names, each followed by that row of v: `[rows, elements]`."""
    if not _runs_kernel(k):
        return torch.cat([_sums(x, None, table) for x in (k, v)], 1).to(k.dtype)
    width = prod(k.shape[1:])
    found = k.new_empty((len(table), width + prod(v.shape[1:])))
    _launch(k, v, None, table, (found, found), width)
    return found


def _added(k: Tensor, v: Tensor, came: Tensor | None, table: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """The sums of a row of k or v and of rows that came from other ranks, `[rows, B, H, D]`; no rows give 0."""
    of = getattr(torch, dtype)
    if not _runs_kernel(k):
        parts = (None, None) if came is None else came.split([prod(x.shape[1:]) for x in (k, v)], 1)
        found = [_sums(x, part, table).to(of) for x, part in zip((k, v), parts, strict=True)]
        return found[0].view(len(table), *k.shape[1:]), found[1].view(len(table), *v.shape[1:])
    outputs = k.new_empty((len(table), *k.shape[1:]), dtype=of), v.new_empty((len(table), *v.shape[1:]), dtype=of)
    _launch(k, v, came, table, outputs, 0)
    return outputs


# A replay takes least time if a function's previous call was of the same kind, so each use has a function of its own.
packed_keys, packed_gradients = (as_one_step(replayed(_packed)) for _ in range(2))
unpacked_keys, summed_gradients = (as_one_step(replayed(_added)) for _ in range(2))


def _runs_kernel(x: Tensor) -> bool:
    has_batch_rows = x.shape[1] > 0
    return has_batch_rows and (x.is_cuda or (INTERPRET and x.dtype != torch.float64))


def _launch(
    k: Tensor, v: Tensor, came: Tensor | None, table: Tensor, outputs: tuple[Tensor, Tensor], v_first: int
) -> None:
    from ...device.row_sums import row_sums as kernel

    rows, widths = len(table), [prod(x.shape[1:]) for x in (k, v)]
    launch(
        kernel,
        (cdiv(rows, _ROWS),),
        (table, rows, table.shape[1], k, v, k if came is None else came, *outputs),
        (*k.stride(), *v.stride(), outputs[0].stride(0), outputs[1].stride(0)),
        HEADS=k.shape[2],
        K_DIM=k.shape[3],
        V_DIM=v.shape[3],
        K_WIDTH=widths[0],
        V_WIDTH=widths[1],
        V_FIRST=v_first,
        ROWS=_ROWS,
        COLUMNS=min(_MOST_COLUMNS, next_power_of_2(max(widths))),
    )


def _sums(x: Tensor, came: Tensor | None, table: Tensor) -> Tensor:
    """The sums `[rows, elements]` in float32 or wider, term by term."""
    total = _rows(x.flatten(1), table[:, 0])
    if came is not None:
        for numbers in table[:, 1:].unbind(1):
            total = total + _rows(came, numbers)
    return total


def _rows(x: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a matrix; -1 gives zeros."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, numbers % (len(x) + 1)).to(wide)
