# SPDX-License-Identifier: Apache-2.0
"""Calls on paged caches in JAX: the checks of their arguments, and the primitive that computes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from ..core import checks, paged_calls
from ..core.checks import PACKED, check_layout, fail
from ..core.configs import INTERPRETER
from ..core.options import check_family
from ..core.paged import CacheCall, score_factor
from ..core.paged_calls import (
    PAGE_LAYOUTS,
    check_cache_shapes,
    check_lengths,
    check_longest,
    check_sequences,
    check_tables,
    columns_of_values,
    fail_pages,
    is_empty,
    most_keys,
    most_queries,
    own_shape,
    paged_schedule,
    pages_of_keys,
    plan_tables,
)
from ..core.paged_tiles import checked_paged_config
from ..core.row_classes import check_splits
from ..core.schedules import Schedule
from .cache_values import check_cache_dtypes, check_converts_for, checked_scale
from .kernels import INTERPRET, compiling_for
from .paged_passes import PagedForward, PagedKernels, cache_call_of
from .passes import LOGICAL, TABLE, Call
from .primitive import attention_primitive
from .schedule import launches_on
from .sequences import begins_of
from .sharding import varying_alike
from .support import (
    as_arrays,
    as_integers,
    canonical,
    check_input_dtype,
    check_known_scale,
    check_offset_word,
    check_tensor,
    host_number,
    is_array,
    is_integer,
    offset_array,
    offset_number,
    positive_scale,
    values_are_checked,
)

__all__ = ["CacheArguments", "PageArguments", "PagedKernels", "check_page_layout", "paged_attention", "plan_of"]


def check_page_layout(op: str, page_layout: object, *, has_table: bool) -> None:
    paged_calls.check_page_layout(op, page_layout)
    if not has_table and page_layout != "pshd":
        fail(op, "page_layout", "'pshd' without page_table", repr(page_layout))


@dataclass(frozen=True, eq=False)
class PageArguments:
    """The arguments of the op that describe pages and sequences, by their names, unchecked."""

    q_offset: Any
    page_table: Any
    page_starts: Any
    kv_lengths: Any
    cu_seqlens_q: Any
    max_seqlen_q: Any
    splits: Any
    page_layout: Any
    config: Any
    family: Any


@dataclass(kw_only=True)
class CacheArguments:
    """The arguments of a call on paged caches: arrays by name, `q`, `k` and `v` first, and numbers.

    A variant adds its own `tensors` and `scalars`. `dtype` is the dtype of o.
    """

    op: str
    layout: str
    dtype: Any
    operands: Mapping[str, jax.Array]
    numbers: Mapping[str, Any]
    tensors: Mapping[str, jax.Array] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        op: str,
        q: Any,
        k: Any,
        v: Any,
        pages: PageArguments,
        *,
        layout: str,
        scale: float | None = None,
        values_in_keys: int | None = None,
    ) -> "CacheArguments":
        """Check the arguments that every op takes. With `values_in_keys` v must be None."""
        check_layout(op, layout)
        check_page_layout(op, pages.page_layout, has_table=True)
        q, k, v = canonical(q), canonical(k), canonical(v)
        for name, x in (("q", q), ("k", k), ("v", v if values_in_keys is None else k)):
            if not is_array(x):
                fail(op, name, "a jax.Array", type(x).__name__)
        if values_in_keys is not None:
            columns = host_number(op, "values_in_keys", values_in_keys)
            values_in_keys = columns_of_values(op, columns, v, k.shape[-1] if k.ndim else 0)
            v = jax.ShapeDtypeStruct((*k.shape[:-1], values_in_keys), k.dtype)
        packed = pages.cu_seqlens_q is not None
        k_shape, v_shape = (_cache_shape(x, pages.page_layout) for x in (k, v))
        check_cache_shapes(op, q.shape, k_shape, v_shape, packed=packed, layout=layout)
        check_input_dtype(op, q)
        check_cache_dtypes(op, q, k, v)
        scale = host_number(op, "scale", scale)
        check_known_scale(op, scale)
        most = q.shape[0] if packed else q.shape[LOGICAL[layout][2]]
        if pages.kv_lengths is None:
            fail(op, "kv_lengths", "an integer array [B] beside page_table", None)
        kv_lengths = _integers(op, "kv_lengths", pages.kv_lengths, 1, "[B]")
        given = {"kv_lengths": kv_lengths}
        if packed:
            given["cu_seqlens_q"] = begins_of(op, "cu_seqlens_q", pages.cu_seqlens_q, "q", q)
        batch, begins = (None, given["cu_seqlens_q"].shape[0]) if packed else (q.shape[0], None)
        check_sequences(op, kv_lengths.shape[0], batch, begins)
        given |= _tables(op, pages, kv_lengths, k_shape[1])
        if pages.max_seqlen_q is not None:
            longest = checks.check_int(op, "max_seqlen_q", host_number(op, "max_seqlen_q", pages.max_seqlen_q), 1)
            known = _known_longest(given["cu_seqlens_q"]) if packed else most
            check_longest(op, longest, known, kv_lengths.shape[0], q.shape[0] if packed else 0)
            most = min(most, longest) if packed else most
        row_offset, row_offsets = _offset(op, pages.q_offset, kv_lengths.shape[0])
        if row_offsets is not None:
            given["row_offsets"] = row_offsets
        dtype = q.dtype
        q, factor = positive_scale(q, scale)
        if INTERPRET and dtype == jnp.bfloat16:
            # Triton's interpreter computes bfloat16 wrongly.
            q, k, v = (x if x.dtype.itemsize == 1 or not is_array(x) else x.astype(jnp.float32) for x in (q, k, v))
        numbers = {
            "scale": factor,
            "row_offset": row_offset,
            "most_queries": most,
            "splits": check_splits(op, host_number(op, "splits", pages.splits)),
            "page_layout": pages.page_layout,
            "config": checked_paged_config(op, pages.config),
            "family": check_family(op, pages.family),
            "v_factor": 1.0,
            "token_scales": (),
            "values_in_keys": values_in_keys,
        }
        operands = {"q": q, "k": k, **({"v": v} if values_in_keys is None else {}), **given}
        return cls(op=op, layout=PACKED if packed else layout, dtype=dtype, operands=operands, numbers=numbers)

    def with_scales(self, k_scale: Any, v_scale: Any) -> None:
        """Set the scales of the caches: numbers, floats `[Hkv]` or `[pages, page size, Hkv]`, or None.

        A number for the keys becomes a factor of the call's scale.
        """
        found = {}
        for name, scale in (("k", k_scale), ("v", v_scale)):
            x = self.operands.get(name, self.operands["k"])
            shape = _cache_shape(x, self.numbers["page_layout"])
            found[f"{name}_scale"] = checked_scale(self.op, f"{name}_scale", scale, x.dtype, shape)
        check_converts_for(
            self.op, launches_on(), {name: self.operands[name] for name in "kv" if name in self.operands}
        )
        self.operands = {**self.operands, **{name: x.array for name, x in found.items() if x.array is not None}}
        factor = score_factor(self.numbers["scale"], found["k_scale"].number)
        of_tokens = tuple(name for name, x in found.items() if x.array is not None and x.array.ndim == 3)
        own = {"scale": factor, "v_factor": found["v_scale"].number, "token_scales": of_tokens}
        self.numbers = {**self.numbers, **own}

    def own(self, name: str, x: Any, dims: tuple[str | int, ...], dtypes: tuple[str, ...]) -> jax.Array:
        """One of the variant's own tensors, checked. `dims` are its dims in a dense call."""
        return check_tensor(self.op, name, x, own_shape(self.cache_call, dims).sizes, dtypes)

    @property
    def cache_call(self) -> CacheCall:
        """The call in the form that launches take, with the tiles for the kernels of this process.

        Where the reference is computed instead, the family that the call asks for is checked when the call is lowered,
        perhaps for another platform.
        """
        arch, call = launches_on(), self.call
        if arch is None:
            call = replace(call, numbers=tuple({**self.numbers, "family": None}.items()))
        with compiling_for(arch or INTERPRETER):
            return cache_call_of(self.op, call, self.operands)

    @property
    def call(self) -> Call:
        """The static part of the call, without the variant's own tensors and scalars."""
        return Call(operands=tuple(self.operands), layout=self.layout, numbers=tuple(self.numbers.items()))


def _cache_shape(x: Any, page_layout: str) -> tuple[int, ...]:
    """The shape of a cache as `[pages, page size, Hkv, D]`. Without four axes it is left as it is, to be refused."""
    shape: tuple[int, ...] = x.shape
    return tuple(shape[axis] for axis in PAGE_LAYOUTS[page_layout]) if len(shape) == 4 else shape


def _tables(op: str, pages: PageArguments, kv_lengths: jax.Array, page_size: int) -> dict[str, jax.Array]:
    """The page table and, if given, `page_starts`. Both are checked, and the lengths are checked against both."""
    if pages.page_starts is None:
        found = {"page_table": _integers(op, "page_table", pages.page_table, 2, "[B, most pages]")}
    else:
        found = {
            "page_table": _integers(op, "page_table", pages.page_table, 1, "[all pages] beside page_starts"),
            "page_starts": _integers(op, "page_starts", pages.page_starts, 1, "[B + 1]"),
        }
    starts = found["page_starts"].shape if "page_starts" in found else None
    most = most_keys(op, kv_lengths.shape[0], page_size, found["page_table"].shape, starts)
    begins = found.get("page_starts")
    if values_are_checked(kv_lengths) and (begins is None or values_are_checked(begins)):
        check_lengths(op, kv_lengths.tolist(), most, None if begins is None else begins.tolist(), page_size)
    return found


def _known_longest(cu_seqlens_q: jax.Array) -> int:
    """The queries of the longest packed sequence; 0 if its values are traced or on a device."""
    return most_queries(cu_seqlens_q.tolist()) if values_are_checked(cu_seqlens_q) else 0


def _integers(op: str, name: str, x: Any, rank: int, shape: str) -> jax.Array:
    if not is_array(x):
        fail(op, name, f"an integer array {shape}", type(x).__name__)
    if not is_integer(x.dtype) or x.ndim != rank:
        fail(op, name, f"an integer array {shape}", f"{x.dtype.name} {list(x.shape)}")
    return as_integers(op, name, x)


def _offset(op: str, q_offset: Any, num_seqs: int) -> tuple[int | None, jax.Array | None]:
    """The first query's position: (number, None), (0, one for each sequence), or for None and "end" (None, None)."""
    if is_array(q_offset):
        return 0, offset_array(op, q_offset, num_seqs)
    if q_offset is None or isinstance(q_offset, str):
        if q_offset is not None:
            check_offset_word(op, q_offset)
        return None, None
    return offset_number(op, q_offset), None


# ----------------------------------------------------------------------------------------------------------- primitive


@cache
def _primitive_of(kernels: PagedKernels) -> Primitive:
    primitive = attention_primitive(kernels.name, PagedForward(kernels))
    ad.primitive_jvps[primitive] = partial(refuse_derivative, kernels.op)
    batching.primitive_batchers[primitive] = partial(refuse_map, kernels.op)
    return primitive


def refuse_derivative(op: str, _primals: Any, tangents: Sequence[Any], *, call: Call) -> NoReturn:
    """The rule for derivatives of paged calls: an error."""
    name = next(name for name, x in zip(call.operands, tangents, strict=True) if not isinstance(x, ad.Zero))
    expected = "an array without gradient in a paged call; packed calls have one"
    fail(op, name, expected, "one that is differentiated; jax.lax.stop_gradient detaches it")


def refuse_map(op: str, _arrays: Any, axes: Sequence[Any], *, call: Call) -> NoReturn:
    """The rule of `jax.vmap` for paged calls: an error."""
    name = next(name for name, axis in zip(call.operands, axes, strict=True) if axis is not None)
    expected = "an array that jax.vmap does not map: a paged call has an axis of sequences already"
    fail(op, name, expected, "one that it maps")


def _call(arguments: CacheArguments) -> tuple[Call, list[jax.Array]]:
    """The static part of a call, and its arrays."""
    tensors = dict(arguments.tensors)
    if "sink" in tensors:
        tensors["sink"] = tensors["sink"].astype(jnp.float32)
    scalar_arrays, scalar_numbers = as_arrays(dict(arguments.scalars))
    operands = {**arguments.operands, **tensors, **scalar_arrays}
    numbers = tuple({**arguments.numbers, **scalar_numbers}.items())
    return Call(operands=tuple(operands), layout=arguments.layout, numbers=numbers), list(operands.values())


def paged_attention(
    kernels: PagedKernels, arguments: CacheArguments, schedule: Schedule | None
) -> tuple[jax.Array, jax.Array]:
    """o and lse of a call on paged caches. o has the layout and dtype of q."""
    tables = [] if schedule is None else plan_tables(arguments.op, schedule, arguments.cache_call, arguments.scalars)
    if tables:
        check_tables(arguments.op, arguments.cache_call, tables)
    arguments.operands = {**arguments.operands, **{f"{TABLE}{i}": x for i, x in enumerate(tables)}}
    call, arrays = _call(arguments)
    if is_empty(arguments.cache_call):
        o, lse = PagedForward(kernels).plain(call, arrays)
    else:
        if launches_on() is not None and _are_checked(arguments) and any(_beyond(arguments)):
            # Kernels would read other memory.
            _check_pages(kernels, arguments, PagedForward(kernels).plain(call, arrays)[1])
        o, lse = _primitive_of(kernels).bind(*varying_alike(arrays), call=call)
        if launches_on() is None and values_are_checked(lse):
            _check_pages(kernels, arguments, lse)
    return o.astype(arguments.dtype), lse


def _are_checked(arguments: CacheArguments) -> bool:
    """Whether a call reads the values of all its operands to check them."""
    return all(values_are_checked(x) for x in arguments.operands.values())


def _beyond(arguments: CacheArguments) -> list[list[int]]:
    """For each sequence its pages that the cache does not have."""
    given, made = arguments.operands, arguments.cache_call
    starts = given["page_starts"].tolist() if "page_starts" in given else None
    used = pages_of_keys(given["page_table"].tolist(), starts, given["kv_lengths"].tolist(), made.page_size)
    return [sorted({page for page in pages if not 0 <= page < made.k.shape[0]}) for pages in used]


def _check_pages(kernels: PagedKernels, arguments: CacheArguments, lse: jax.Array) -> None:
    """Refuse pages beyond the cache on which a query sees keys. For such queries the reference gives an lse of NaN."""
    given, made, beyond = arguments.operands, arguments.cache_call, _beyond(arguments)
    if not any(beyond) or not jnp.isnan(lse).any():
        return
    # Whatever else is not a number must not look like a page beyond the cache.
    clean = {name: _numbers(given[name]) for name in ("q", "k")}
    call, arrays = _call(replace(arguments, operands={**given, **clean}))
    _, marks = PagedForward(kernels).plain(call, arrays)
    begins = given["cu_seqlens_q"].tolist() if made.packed else range(len(beyond) + 1)
    for number, pages in enumerate(beyond):
        rows = slice(begins[number], begins[number + 1])
        if pages and jnp.isnan(marks[:, rows] if made.packed else marks[rows]).any():
            fail_pages(arguments.op, made.k.shape[0], pages, number)


def _numbers(x: jax.Array) -> jax.Array:
    """An array without NaN and infinity, in the same dtype."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def plan_of(kernels: PagedKernels, arguments: CacheArguments) -> Schedule:
    """The plan of a step. It is empty if the reference is computed instead of the kernels."""
    arch = launches_on()
    made = arguments.cache_call
    if arch is None or is_empty(made):
        return paged_schedule(arguments.op, made, arguments.scalars, [])
    with compiling_for(arch):
        tables = PagedForward(kernels).plan(*_call(arguments))
        return paged_schedule(arguments.op, made, arguments.scalars, tables)
