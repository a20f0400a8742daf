# SPDX-License-Identifier: Apache-2.0
"""The reference of calls on paged caches. It gathers each sequence's keys, up to the capacity of its page table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.paged_calls import lies_in_pages
from ..core.paged_decay import BASE, LOCAL
from .cache_values import dequantised
from .gradients import sequence_of_rows
from .passes import LOGICAL, Call, Kernels
from .tensor import FP32


class _Gathered(NamedTuple):
    """Where one sequence lies: the rows of its queries among all rows, and the page and slot of each key."""

    number: jax.Array
    rows: jax.Array
    page: jax.Array
    slot: jax.Array
    packed: bool

    def own(self, x: jax.Array, dims: Sequence[str | int]) -> jax.Array:
        """One of the variant's own tensors as a packed reference takes it. `dims` are its dims in a dense call."""
        kept = [dim for dim in dims if dim != "b"]
        if lies_in_pages(dims):
            axis = kept.index("kv_idx")
            return jnp.moveaxis(jnp.moveaxis(x, (axis, axis + 1), (0, 1))[self.page, self.slot], 0, axis)
        if "q_idx" not in dims:
            return x
        if "b" in dims and not self.packed:
            x = x.take(self.number, list(dims).index("b"))
        if self.packed:
            x = x.take(self.rows, kept.index("q_idx"), mode="clip")
        if "kv_idx" in dims:
            x = x.take(jnp.arange(len(self.slot)), kept.index("kv_idx"), mode="clip")
        return x


def paged_reference(
    kernels: Kernels, call: Call, operands: Mapping[str, jax.Array], cache_axes: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call, in the dtype of q and in float32."""
    if BASE not in operands:
        return _results(kernels, call, operands, cache_axes)
    dtype = operands["q"].dtype
    # Running sums over many tokens have more digits than float32 holds.
    with jax.enable_x64(True):
        wide = {name: operands[name].astype(jnp.float64) for name in ("q", "k", "v") if name in operands}
        o, lse = _results(kernels, call, {**operands, **wide}, cache_axes)
        return o.astype(dtype), lse


def _results(
    kernels: Kernels, call: Call, operands: Mapping[str, jax.Array], cache_axes: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call, computed in the dtypes of its operands.

    Shapes follow from the capacity of the page table, so that lengths may be traced. Caches may hold any values, NaN
    included, after a sequence's last key and at keys that no query attends to. A query that sees a page beyond the
    cache has NaN, and so has one that is beyond the most queries of a sequence.
    """
    q = operands["q"]
    k = _filled(operands["k"].transpose(cache_axes))
    v = _filled(operands["v"].transpose(cache_axes)) if "v" in operands else k[..., : call.number("values_in_keys")]
    k_scale, v_scale = (_filled(operands[n]) if n in operands else None for n in ("k_scale", "v_scale"))
    table, lengths = operands["page_table"], operands["kv_lengths"]
    num_seqs, num_pages, page_size = lengths.shape[0], k.shape[0], k.shape[1]
    if not call.packed:
        q = q.transpose(*(LOGICAL[call.layout][axis] for axis in (0, 2, 1, 3)))
    o_shape, heads = (*q.shape[:-1], v.shape[-1]), q.shape[-2]
    lse_shape = (heads, q.shape[0]) if call.packed else (q.shape[0], heads, q.shape[1])
    if 0 in q.shape:
        o, lse = jnp.zeros(o_shape, q.dtype), jnp.zeros(lse_shape, FP32)
        return _in_layout(o, call), lse
    most = call.number("most_queries")
    begins = operands["cu_seqlens_q"] if call.packed else jnp.arange(num_seqs + 1) * most
    rows_of_q = q.reshape(-1, *q.shape[-2:])
    table = jnp.concatenate([table, jnp.zeros((*table.shape[:-1], 1), table.dtype)], -1)
    places = jnp.arange((table.shape[-1] - 1) * page_size or 1)
    lengths = jnp.clip(lengths, 0, (table.shape[-1] - 1) * page_size)
    numbers = dict(call.numbers)
    scalars = {name: operands.get(name, numbers.get(name)) for name in kernels.scalars}
    offset = operands.get("row_offsets", numbers["row_offset"])
    offset = lengths - jnp.diff(begins) if offset is None else offset

    def of_sequence(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """o and lse of one sequence, from a packed call in which all other sequences are empty."""
        is_flat = "page_starts" in operands
        entries = table if is_flat else table[number]
        first = operands["page_starts"][number] if is_flat else 0
        named = entries.take(first + places // page_size, mode="clip")
        page = jnp.clip(named, 0, num_pages - 1)
        slot = places % page_size
        rows = jnp.clip(begins[number] + jnp.arange(most), 0, len(rows_of_q) - 1)
        gathered = _Gathered(number, rows, page, slot, call.packed)
        seen = (places < lengths[number])[:, None, None]
        keys = jnp.where(seen, dequantised(k, k_scale, 1.0, page, slot), 0)
        keys = jnp.where(seen & (named != page)[:, None, None], jnp.nan, keys)
        values = jnp.where(seen, dequantised(v, v_scale, call.number("v_factor"), page, slot), 0)
        # A key that no query attends to may have a value of NaN, and zero times NaN is NaN. So 0 replaces values that
        # are not finite, and one more column is 1 for their keys: a result with weight in this column becomes NaN.
        numeric = jnp.isfinite(values)
        values = jnp.where(numeric, values, 0)
        values = jnp.concatenate([values, ~numeric.all(-1, keepdims=True)], -1).astype(values.dtype)
        later = jnp.arange(num_seqs + 1) > number
        own = {n: gathered.own(operands[n], dims) for n, dims in kernels.dims.items() if n in operands}
        if BASE in own:
            own[LOCAL], is_finite = _log_decays(own[LOCAL], own.pop(BASE)[page], seen[..., 0])
            keys = jnp.where(seen & ~is_finite[:, None, None], jnp.nan, keys)
        o, lse = kernels.reference(
            rows_of_q[rows],
            keys,
            values,
            **own,
            **scalars,
            scale=numbers["scale"],
            q_offset=offset,
            cu_seqlens_q=jnp.where(later, begins[number + 1] - begins[number], 0),
            cu_seqlens_k=jnp.where(later, lengths[number], 0),
            return_lse=True,
        )
        return jnp.where(o[..., -1:] > 0, jnp.nan, o[..., :-1]), lse.astype(FP32)

    o, lse = jax.lax.map(of_sequence, jnp.arange(num_seqs))  # [B, Sq, Hq, Dv] and [B, Hq, Sq]
    if call.packed:
        total = q.shape[0]
        number = jnp.clip(sequence_of_rows(begins, total), 0, num_seqs - 1)
        place = jnp.arange(total) - begins[number]
        is_beyond = place >= most
        place = jnp.clip(place, 0, most - 1)
        o, lse = o[number, place], lse[number, :, place].T
        o, lse = jnp.where(is_beyond[:, None, None], jnp.nan, o), jnp.where(is_beyond, jnp.nan, lse)
    return _in_layout(o, call), lse


def _log_decays(local: jax.Array, base: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The log-decays of a sequence's keys, `[keys, Hq]`, and which keys have sums that are finite.

    The running sums of the log-decays are what the caches hold, and 0 for other keys: a page that no query sees may
    hold NaN, which a running sum would carry on to all later keys.
    """
    total = base.astype(jnp.float64) + local.astype(jnp.float64)
    is_finite = jnp.isfinite(total)
    total = jnp.where(seen & is_finite, total, 0.0)
    return jnp.diff(total, axis=0, prepend=0.0), is_finite.all(1)


def _filled(x: jax.Array) -> jax.Array:
    """A cache or its scale. Without any page it gets a page of zeros, because gathering needs one."""
    return x if x.shape[0] else jnp.zeros((1, *x.shape[1:]), x.dtype)


def _in_layout(o: jax.Array, call: Call) -> jax.Array:
    return o.transpose(0, 2, 1, 3) if call.layout == "bhsd" else o
