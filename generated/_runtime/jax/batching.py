# SPDX-License-Identifier: Apache-2.0
"""The rule of `jax.vmap`: fold the mapped axis into batch rows or packed sequences if no result changes by it."""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from .passes import BEGINS, TOKENS, Backward, Call, Forward, Kernels
from .sharding import by_device, is_sharded


def batched(
    primitive: Primitive, direction: Forward | Backward, arrays: Sequence[Any], axes: Sequence[Any], *, call: Call
) -> Any:
    """One call if the mapped axis can be folded into batch rows or sequences, else one call after the other."""
    mapped = [axis is not None for axis in axes]
    arrays = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    size = next(x.shape[0] for x, is_mapped in zip(arrays, mapped, strict=True) if is_mapped)
    # The tables of a schedule are not those of the folded rows.
    own, *kept = call.without_tables(arrays, mapped)
    folded = _as_one_call(primitive, direction, own, *kept, size=size)
    if folded is not None:
        return folded, [0] * len(folded)

    def each(arrays: Sequence[jax.Array]) -> Any:
        def one(own: Sequence[jax.Array]) -> Any:
            rest = iter(own)
            return primitive.bind(*(next(rest) if m else x for x, m in zip(arrays, mapped, strict=True)), call=call)

        return jax.lax.map(one, list(compress(arrays, mapped)))

    found = by_device(each, arrays, mapped)
    return found, [0] * len(found)


def _as_one_call(
    primitive: Primitive,
    direction: Forward | Backward,
    call: Call,
    arrays: Sequence[jax.Array],
    mapped: Sequence[bool],
    *,
    size: int,
) -> list[jax.Array] | None:
    """The results of `size` calls, computed by one call of more batch rows or sequences; None if they cannot be."""
    kernels = direction.kernels
    folds = [_fold_axis(kernels, name, call) for name in call.operands]
    written = kernels.result_axes(call, backward=direction.backward)
    results = [_folded(letters, call) for letters in written]
    # A tensor with packed tokens along two axes would need zeros between the tokens of different calls.
    possible = not any(
        _of_pairs(letters, call) for letters in (*(kernels.axes(n, call) for n in call.operands), *written)
    )
    possible = possible and all(fold is not None for fold, is_mapped in zip(folds, mapped, strict=True) if is_mapped)
    # Rows that are sharded over an axis of type Explicit cannot be folded without moving data.
    possible = possible and not any(
        fold is not None and is_sharded(x, fold + is_mapped)
        for x, fold, is_mapped in zip(arrays, folds, mapped, strict=True)
    )
    if not (kernels.may_split(call)[0] and possible and None not in results and size > 0):
        return None
    total = _tokens(call, arrays, mapped)
    rows = arrays[0].shape[(folds[0] or 0) + mapped[0]]
    folded = [
        _fold(name, x, fold, size, rows, is_mapped, total)
        for name, x, fold, is_mapped in zip(call.operands, arrays, folds, mapped, strict=True)
    ]
    found = primitive.bind(*folded, call=call)
    return [_unfold(x, axis or 0, size) for x, axis in zip(found, results, strict=True)]


def _folded(letters: str, call: Call) -> int | None:
    """The axis of batch rows, or of packed sequences; None if there is no such axis."""
    for letter in "stb" if call.packed else "b":
        if letter in letters:
            return letters.index(letter)
    return None


def _of_pairs(letters: str, call: Call) -> bool:
    """Whether an array has packed queries or keys along two axes."""
    return call.packed and sum(letter in "st" for letter in letters) > 1


def _fold_axis(kernels: Kernels, name: str, call: Call) -> int | None:
    return 0 if name in BEGINS else _folded(kernels.axes(name, call), call)


def _tokens(call: Call, arrays: Sequence[Any], mapped: Sequence[bool]) -> dict[str, int]:
    """For a packed call: its numbers of queries and keys, by which the cu_seqlens of the next call are shifted."""
    if not call.packed:
        return {}
    q_rows, k_rows = (x.shape[int(is_mapped)] for x, is_mapped in zip(arrays[:2], mapped[:2], strict=True))
    return {"cu_seqlens_q": q_rows, "cu_seqlens_k": k_rows}


def _fold(name: str, x: Any, axis: int | None, size: int, rows: int, is_mapped: bool, totals: Mapping[str, int]) -> Any:
    """An operand of the folded call. `x` is mapped along axis 0, or is the same for all `size` calls of `rows` rows."""
    if axis is None:
        return x
    # An operand may have one element for all rows. But kernels read an offset for each row or sequence.
    for_all_rows = name in TOKENS and name != "row_offsets" and x.shape[axis + is_mapped] == 1
    if not is_mapped:
        if for_all_rows:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape))
    elif for_all_rows:
        x = jnp.repeat(x, rows, axis + 1)
    if name in BEGINS:
        starts = jnp.arange(size, dtype=jnp.int32)[:, None] * totals[name]
        end = jnp.full(1, size * totals[name], jnp.int32)
        return jnp.concatenate([(x[:, :-1] + starts).reshape(-1), end])
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _unfold(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]), axis, 0)
