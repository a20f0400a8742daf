# SPDX-License-Identifier: Apache-2.0
"""The paged kernels of a variant in JAX: their description for the primitive, their launches and their reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..core.latents import converts_cache, takes_prompts
from ..core.paged import LEAST_DENSE_KEYS, WHOLE_ROW, CacheCall
from ..core.paged_calls import PAGE_LAYOUTS, cache_call, lies_in_pages, own_shape, with_classes
from ..core.prompts import hopper_tile, is_copied
from ..core.row_classes import FEW_ROWS, RowClass
from .kernels import arch_of, multiprocessors, paged_call_tiles
from .paged_reference import paged_reference
from .passes import LOGICAL, TABLE, Call, Forward, Kernels
from .tensor import Tensor, begin_alike

_OWN_AXES = {
    "page_starts": ".",
    "kv_lengths": "b",
    "cu_seqlens_q": ".",
    "row_offsets": "b",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedKernels(Kernels):
    """The kernels of a variant on paged caches. `dims` are those of a dense call."""

    mode: str = "paged"
    parameters: tuple[str, ...] = ()

    @property
    def has_decay(self) -> bool:
        """False: in a paged call the running sums of a log-decay are a tensor like any other."""
        return False

    def axes(self, name: str, call: Call) -> str:
        if name in ("k", "v"):
            return "".join(
                f"..k{'d' if name == 'k' else 'e'}"[axis] for axis in PAGE_LAYOUTS[call.number("page_layout")]
            )
        if name.startswith(TABLE):
            return "." if int(name.removeprefix(TABLE)) % 3 == 2 else ".."
        if name == "page_table":
            return "." if "page_starts" in call.operands else "b."
        if name in ("k_scale", "v_scale"):
            return "..k" if name in call.number("token_scales") else "k"
        if name in _OWN_AXES:
            return _OWN_AXES[name] if not call.packed else "."
        if name not in self.dims:
            return super().axes(name, call)
        letters = {"b": "b", "h": "h", "hkv": "k"} if not call.packed else {"h": "h", "hkv": "k"}
        dims = _kept_dims(self.dims[name], packed=call.packed)
        return "".join(letters.get(str(dim), ".") for dim in dims)

    def split_keys_of(self, call: Call, operands: Mapping[str, jax.Array]) -> list[jax.Array] | None:
        """o and lse of a dense call from the paged kernels, which split its keys. Each batch row is one page.

        None if the call has many queries or few keys, or needs something that only the kernels of dense calls can do.
        """
        made = _dense_call(self, call, operands)
        if made is None:
            return None
        own = {n: _in_rows(made, dims, operands[n]) for n, dims in self.dims.items() if n in operands}
        given = {"call": made, **own, **self.scalar_arguments(call, operands)}
        given["tables"] = self.launched(self.launches.plan, given)
        return [x.value() for x in self.launched(self.launches.forward, given)]

    def scalar_arguments(self, call: Call, operands: Mapping[str, jax.Array]) -> dict[str, Any]:
        """The variant's own scalars as launches take them: tensors or numbers."""
        return {n: Tensor.of(operands[n]) if n in operands else call.number(n) for n in self.scalars}

    def may_split(self, call: Call) -> tuple[bool, bool]:
        """Whether batch rows, and heads, may be cut. A plan is for a whole call, a flat table for all sequences."""
        if "table_0" in call.operands:
            return False, False
        return self.splits_batch and "page_starts" not in call.operands, self.splits_heads


def _kept_dims(dims: Sequence[str | int], *, packed: bool) -> list[str | int]:
    """A dim for each axis that a tensor has in a call on pages."""
    in_pages = lies_in_pages(dims)
    kept = [dim for dim in dims if not (dim == "b" and (in_pages or (packed and "q_idx" in dims)))]
    return [part for dim in kept for part in (("page", "slot") if in_pages and dim == "kv_idx" else (dim,))]


class _JaxCacheCall(CacheCall):
    """A call whose o and lse are filled by several launches: one for each class of rows, and the merge."""

    def results(self, backend: Any) -> tuple[Tensor, Tensor]:
        o, lse = super().results(backend)
        o.in_parts = lse.in_parts = True
        return o, lse


def cache_call_of(op: str, call: Call, operands: Mapping[str, jax.Array]) -> CacheCall:
    """A call in the form that launches take."""
    cache_axes = PAGE_LAYOUTS[call.number("page_layout")]
    q = Tensor.of(operands["q"], None if call.packed else LOGICAL[call.layout])
    k = Tensor.of(operands["k"], cache_axes)
    v = _columns(k, call.number("values_in_keys")) if "v" not in operands else Tensor.of(operands["v"], cache_axes)
    names = ("page_table", "page_starts", "kv_lengths", "cu_seqlens_q")
    table, starts, lengths, begins = (Tensor.of(operands[n]) if n in operands else None for n in names)
    assert table is not None
    assert lengths is not None
    row_offsets, k_scale, v_scale = (
        Tensor.of(operands[n]) if n in operands else None for n in ("row_offsets", "k_scale", "v_scale")
    )
    made = cache_call(
        op, q, k, v, table, starts, lengths, begins, call.number("row_offset"), row_offsets, call.number("scale"),
        page_size=k.shape[1], most_keys=table.shape[-1] * k.shape[1], most_queries=call.number("most_queries"),
        splits=call.number("splits"), config=call.number("config"), family=call.number("family"),
    )  # fmt: skip
    return _launched(op, made._replace(k_scale=k_scale, v_scale=v_scale, v_factor=call.number("v_factor")))


def _columns(x: Tensor, count: int) -> Tensor:
    """The first columns of a cache, as a view of its memory."""
    return Tensor(x.array, (*x.shape[:-1], count), x.strides, x.dtype, memory=x.memory)


def _launched(op: str, call: CacheCall) -> CacheCall:
    """The same call with the classes of its sequences and their tiles."""
    tiles = paged_call_tiles(op, call.q, call.k, call.group, call.config)
    q, k, v = call.q, call.k, call.v
    arch = arch_of(q)
    copied = all(is_copied(call.cache_strides(x), x.shape[0], x.element_size()) for x in (k, v))
    converts = converts_cache(op, call, arch, shares_values=begin_alike(k, v), copied=copied)
    copied = copied and is_copied(call.query_strides(q), 1 if call.packed else q.shape[0], q.element_size())
    hopper = None
    if not takes_prompts(op, call, begin_alike):
        hopper = hopper_tile(op, call, arch, [x.element for x in (q, k, v)], copied=copied)
    processors = multiprocessors(q)
    return _JaxCacheCall(*with_classes(call, processors, tiles, hopper_tile=hopper, converts=converts))


class PagedForward(Forward):
    """The forward as launches and as reference: `(o, lse)`."""

    kernels: PagedKernels

    def shapes(self, call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        if "v" in avals:
            return super().shapes(call, avals)
        k = avals["k"]
        values = jax.ShapeDtypeStruct((*k.shape[:-1], call.number("values_in_keys")), k.dtype)
        return super().shapes(call, {**avals, "v": values})

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        given = self.arguments(call, call.named(arrays))
        if not given["tables"]:
            given["tables"] = self.kernels.launched(self.kernels.launches.plan, given)
        made: CacheCall = given["call"]
        found = []
        for number, rows in enumerate(made.classes):
            tables = given["tables"][3 * number : 3 * number + 3]
            one = {**given, "call": made._replace(classes=(rows,)), "tables": tables}
            o, lse = self.kernels.launched(self.kernels.launches.forward, one)
            found.append((rows, o.value(), lse.value()))
        return _chosen(made, found)

    def plan(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The tables that describe the splits of a call."""
        given = self.arguments(call, call.named(arrays))
        return [x.value() for x in self.kernels.launched(self.kernels.launches.plan, given)]

    def arguments(self, call: Call, operands: Mapping[str, jax.Array]) -> dict[str, Any]:
        """The arguments of the launches."""
        kernels = self.kernels
        made = cache_call_of(kernels.op, call, operands)
        own: dict[str, Any] = {
            name: _own_tensor(made, dims, operands[name]) for name, dims in kernels.dims.items() if name in operands
        }
        tables = [Tensor.of(x) for name, x in operands.items() if name.startswith(TABLE)]
        return {"call": made, "tables": tables, **own, **kernels.scalar_arguments(call, operands)}

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        # This raises the errors that kernels on the CPU would raise, such as for the family of another chip.
        cache_call_of(self.kernels.op, call, call.named(arrays))
        return self.plain(call, arrays)

    def plain(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return list(paged_reference(self.kernels, call, call.named(arrays), PAGE_LAYOUTS[call.number("page_layout")]))


def _chosen(call: CacheCall, found: Sequence[tuple[RowClass, jax.Array, jax.Array]]) -> list[jax.Array]:
    """Select o and lse of each sequence from the results of its class.

    Each class has results of its own, because XLA of JAX 0.11, in the body of a loop, lost values that launches of
    several classes had written to one buffer (seen on an H200).
    """
    (_, o, lse), *others = found
    if others:
        assert call.cu_seqlens_q is not None
        begins = call.cu_seqlens_q.value()
        sequence = jnp.searchsorted(begins[1:], jnp.arange(call.q.shape[0]), side="right")
        lengths = jnp.diff(begins) * call.group
        num_rows = lengths[jnp.minimum(sequence, call.num_seqs - 1)]
        for rows, class_o, class_lse in others:
            served = num_rows >= rows.first_rows
            o = jnp.where(served[:, None, None], class_o, o)
            lse = jnp.where(served[None, :], class_lse, lse)
    return [o, lse]


def _own_tensor(call: CacheCall, dims: Sequence[str | int], x: jax.Array) -> Tensor:
    """One of a variant's own tensors with the axes that kernels read."""
    found, axis = Tensor.of(x), own_shape(call, dims).batch_axis
    if axis is None:
        return found
    shape, strides = list(found.shape), list(found.strides)
    shape.insert(axis, call.num_seqs)
    strides.insert(axis, 0)
    return Tensor(x, shape, strides, x.dtype, memory=x.shape)


# --------------------------------------------------------------------------------------------------------- dense calls


def _dense_call(kernels: PagedKernels, call: Call, operands: Mapping[str, jax.Array]) -> CacheCall | None:
    """A dense call with few queries as a call on caches; None if `split_keys_of` does not serve it."""
    options = call.number("options")
    given = {"table_0", "q_positions", "kv_positions"} & operands.keys()
    by_length = call.number("by_length") is not None
    if given or options.tiles or options.family is not None or ("q_segment_ids" in operands and not by_length):
        return None
    axes = LOGICAL[call.layout]
    q = Tensor.of(operands["q"], axes)
    k, v = (Tensor.of(operands[name], [axes[i] for i in (0, 2, 1, 3)]) for name in ("k", "v"))
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[1]
    if heads // k.shape[2] * q_len > FEW_ROWS or kv_len < LEAST_DENSE_KEYS or q.numel() == 0:
        return None
    for name, dims in kernels.dims.items():
        # Split calls read a tensor with an element for each query by row number, and end indices of keys where the
        # sequence ends.
        if "q_idx" in dims or (
            "kv_idx" in dims and (by_length or operands[name].shape[list(dims).index("kv_idx")] != kv_len)
        ):
            return None
    lengths = jnp.broadcast_to(operands["kv_lengths"] if by_length else jnp.full(1, kv_len, jnp.int32), (batch,))
    row_offsets = Tensor.of(operands["row_offsets"]) if "row_offsets" in operands else None
    made = cache_call(
        kernels.op, q, k, v, None, None, Tensor.of(lengths), None, call.number("row_offset") or 0, row_offsets,
        call.number("scale"), page_size=WHOLE_ROW, most_keys=kv_len, most_queries=q_len, splits=None, config=(),
    )  # fmt: skip
    return _launched(kernels.op, made)


def _in_rows(call: CacheCall, dims: Sequence[str | int], x: jax.Array) -> Tensor:
    """One of a variant's own tensors as kernels read it. If it lies in pages, each batch row is a page."""
    found = Tensor.of(x)
    if "kv_idx" not in dims:
        return found
    axes = list(zip(dims, found.shape, found.strides, strict=True))
    row_stride = next((stride for dim, _, stride in axes if dim == "b"), 0)
    kept = [(dim, size, stride) for dim, size, stride in axes if dim != "b"]
    kept.insert([dim for dim, _, _ in kept].index("kv_idx"), ("b", call.num_seqs, row_stride))
    return Tensor(x, [size for _, size, _ in kept], [stride for _, _, stride in kept], x.dtype, memory=x.shape)
