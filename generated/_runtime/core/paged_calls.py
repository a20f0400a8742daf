# SPDX-License-Identifier: Apache-2.0
"""Calls on paged caches: what every framework checks of their arguments. No framework is imported."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from ..archs import MAX_PAGED_HEAD_DIM, MIN_HEAD_DIM
from .checks import Size, at_least, check_choice, check_deterministic, check_int, check_padding_id, fail
from .launches import Tensor
from .paged import FP8, NUM_TABLES, WHOLE_ROW, CacheCall
from .paged_tiles import DECODE, PagedConfig, PagedTiles
from .prompts import hopper_rows
from .row_classes import BALANCED, PagedSizes, Splits, check_splits, row_classes
from .schedules import PLANNED, Schedule
from .tiles import HopperTile


def refuse_pages(op: str, what: str) -> NoReturn:
    """Refuse a call on paged caches of a variant that has no kernels for it."""
    fail(op, "page_table", f"None: a variant with {what} has no kernels on paged caches", "a table")


def check_without_pages(op: str, page_starts: object, splits: object, values_in_keys: object = None) -> None:
    """Refuse arguments that only a call on paged caches reads."""
    for name, x in (("page_starts", page_starts), ("splits", splits), ("values_in_keys", values_in_keys)):
        if x is not None:
            fail(op, name, "None without page_table", type(x).__name__)


_NOT_BESIDE_PAGES = (
    "cu_seqlens_k",
    "max_seqlen_k",
    "q_segment_ids",
    "kv_segment_ids",
    "q_positions",
    "kv_positions",
)


def check_beside_pages(
    op: str,
    *others: object,
    padding_id: object,
    deterministic: object,
    q_scale: object = None,
) -> None:
    """Refuse arguments that a call on paged caches does not take.

    They are those of _NOT_BESIDE_PAGES, in this order, and `q_scale`. `padding_id` and `deterministic` have no effect
    in such a call, but must be valid.
    """
    check_padding_id(op, padding_id)
    check_deterministic(op, deterministic)
    for name, x in (*zip(_NOT_BESIDE_PAGES, others, strict=True), ("q_scale", q_scale)):
        if x is not None:
            fail(op, name, "None beside page_table", type(x).__name__)


# -------------------------------------------------------------------------------------------------------------- shapes


def check_cache_shapes(
    op: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], *, packed: bool, layout: str
) -> None:
    """Check the shapes of q and of caches `[pages, page size, Hkv, D]`."""
    dims, rank = ("[total_q, Hq, D]", 3) if packed else ("[B, Hq, Sq, D]" if layout == "bhsd" else "[B, Sq, Hq, D]", 4)
    if len(q) != rank:
        fail(op, "q", f"{rank} dimensions {dims}", f"{len(q)} dimensions {list(q)}")
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != 4:
            fail(op, name, "4 dimensions [pages, page size, Hkv, D] beside page_table", f"{len(shape)}: {list(shape)}")
    if tuple(v[:3]) != tuple(k[:3]):
        fail(op, "v", f"pages, page size and heads {list(k[:3])}, those of k", list(v[:3]))
    if k[1] < 1:
        fail(op, "k", "a page size of at least 1", list(k))
    heads = q[2] if rank == 4 and layout == "bshd" else q[1]
    if k[2] == 0 or heads == 0 or heads % k[2]:
        fail(op, "q", f"a head count that is a multiple of k's {k[2]}", f"{heads} in {dims} = {list(q)}")
    if k[3] != q[-1]:
        fail(op, "k", f"head_dim {q[-1]}, that of q", f"{k[3]} in {list(k)}")
    for name, shape in (("q", q), ("v", v)):
        if not MIN_HEAD_DIM <= shape[-1] <= MAX_PAGED_HEAD_DIM:
            expected = f"a head_dim from {MIN_HEAD_DIM} to {MAX_PAGED_HEAD_DIM} on paged caches"
            fail(op, name, expected, f"{shape[-1]} in {list(shape)}")


PAGE_LAYOUTS = {"pshd": (0, 1, 2, 3), "phsd": (0, 2, 1, 3)}
"""Layouts of caches: the axes of page, slot, key head and column."""


def check_page_layout(op: str, page_layout: object) -> None:
    check_choice(op, "page_layout", page_layout, PAGE_LAYOUTS)


def columns_of_values(op: str, values_in_keys: object, v: object, head_dim: int) -> int:
    """The number of columns of the keys that are the values, checked."""
    if v is not None:
        fail(op, "v", "None beside values_in_keys: values are the first columns of k", type(v).__name__)
    return check_int(op, "values_in_keys", values_in_keys, MIN_HEAD_DIM, head_dim)


def check_cache_dtype(op: str, name: str, dtype: object, of_q: object, small: Sequence[object]) -> None:
    """Check the dtype of a cache: that of q, or one of 8 bits."""
    if dtype not in (of_q, *small):
        fail(op, name, f"dtype {of_q}, that of q, or {' or '.join(map(str, small))}", dtype)


def check_scale_array(
    op: str, name: str, shape: Sequence[int], cache: Sequence[int], *, fits: bool, where: str, got: str
) -> None:
    """Check the scale of a cache of this shape: one for each key head, or one for each token and head.

    `fits`: whether dtype and device are right. `where`: the device, as messages say it.
    """
    shapes = (tuple(cache[2:3]), tuple(cache[:3]))
    if tuple(shape) not in shapes or not fits:
        fail(op, name, f"a number, floats {list(shapes[0])} or {list(shapes[1])}{where}", got)


def check_converts(op: str, name: str, dtype: str, capability: tuple[int, int]) -> None:
    """Check that an NVIDIA GPU of this compute capability converts the dtype of a cache: e4m3 from 8.9 on."""
    if dtype == FP8[0] and capability < (8, 9):
        fail(op, name, f"dtype {FP8[1]}: this GPU converts no {FP8[0]}", dtype)


def check_sequences(op: str, num_seqs: int, batch: int | None, num_begins: int | None) -> None:
    """Check the number of lengths against the batch rows of q, or against the elements of `cu_seqlens_q`."""
    if num_begins is not None and num_begins != num_seqs + 1:
        fail(op, "cu_seqlens_q", f"{num_seqs + 1} elements for kv_lengths of {num_seqs}", num_begins)
    if batch is not None and batch != num_seqs:
        fail(op, "kv_lengths", f"{batch} elements, one for each batch row of q", num_seqs)


def most_keys(op: str, num_seqs: int, page_size: int, table: Sequence[int], starts: Sequence[int] | None) -> int:
    """The most keys that a sequence may have, by the shapes of the table and of `page_starts`, which are checked."""
    if starts is None:
        if table[0] != num_seqs:
            fail(op, "page_table", f"{num_seqs} rows, one for each of kv_lengths", f"{list(table)}")
        return table[1] * page_size
    if starts[0] != num_seqs + 1:
        fail(op, "page_starts", f"{num_seqs + 1} elements for kv_lengths of {num_seqs}", starts[0])
    return table[0] * page_size


def check_lengths(
    op: str, lengths: Sequence[int], most: int, starts: Sequence[int] | None = None, page_size: int = 1
) -> None:
    """Check lengths against the most keys that a sequence may have: with `page_starts`, those of its own pages."""
    for number, length in enumerate(lengths):
        own, holder = most, "the table's"
        if starts is not None:
            begin, end = (page_size * start for start in starts[number : number + 2])
            own = max(min(end, most) - begin, 0) if begin >= 0 else 0
            holder = "its pages'"
        if not 0 <= length <= own:
            fail(op, "kv_lengths", f"lengths from 0 to {holder} {own} keys", f"{length} at {number}")


def pages_of_keys(
    table: Sequence[Any], starts: Sequence[int] | None, lengths: Sequence[int], page_size: int
) -> list[list[int]]:
    """For each sequence the entries of the table for its keys. `table` is flat where `starts` are given."""
    rows = table if starts is None else [table[start:] for start in starts[:-1]]
    return [row[: max(-(-length // page_size), 0)] for row, length in zip(rows, lengths, strict=True)]


def fail_pages(op: str, num_pages: int, pages: Sequence[int], number: int) -> NoReturn:
    """Raise the error of pages beyond the cache, of the sequence of this number, on which a query sees keys."""
    expected = f"pages from 0 to {num_pages - 1} for all keys that a query sees"
    fail(op, "page_table", expected, f"{', '.join(map(str, pages))} in sequence {number}")


def most_queries(begins: Sequence[int]) -> int:
    """The queries of the longest packed sequence.

    >>> most_queries([0, 2, 7]), most_queries([0])
    (5, 0)
    """
    return max((end - begin for begin, end in pairwise(begins)), default=0)


def check_longest(op: str, longest: int, queries: int, num_seqs: int, total: int = 0) -> None:
    """Check the argument `max_seqlen_q` against the queries of the longest sequence; 0 if only the device knows them.

    Then the longest has at least the average of the packed sequences, which have `total` queries together.
    """
    if longest < queries:
        fail(op, "max_seqlen_q", f"at least {queries}, the queries of the longest sequence", longest)
    if isinstance(total, int) and longest * num_seqs < total and num_seqs:
        expected = f"at least {-(-total // num_seqs)}, as {num_seqs} sequences have the {total} rows of q"
        fail(op, "max_seqlen_q", expected, longest)


class OwnShape(NamedTuple):
    """The shape of one of a variant's own tensors, without an axis of batch rows if it lacks one.

    `batch_axis`: where kernels see an axis of batch rows that the tensor lacks, with a stride of 0.
    """

    sizes: tuple[Size, ...]
    batch_axis: int | None


def own_shape(call: CacheCall, dims: Sequence[str | int]) -> OwnShape:
    """The shape of one of a variant's own tensors of these dims in a dense call.

    A tensor with an element for every key lies in pages: it has `[pages, page size]` for the dim `kv_idx` and no batch
    axis. A tensor with an element for every packed query has no batch axis either.
    """
    in_pages = lies_in_pages(dims)
    without_batch = in_pages or (call.packed and "q_idx" in dims)
    shape: list[Size] = []
    for dim in dims:
        if dim == "kv_idx":
            shape += [call.k.shape[0], call.k.shape[1]] if in_pages else [at_least(1)]
        elif dim != "b" or not without_batch:
            shape.append(_size(call, dim))
    return OwnShape(tuple(shape), list(dims).index("b") if without_batch and not in_pages and "b" in dims else None)


def lies_in_pages(dims: Sequence[str | int]) -> bool:
    """Whether a tensor of these dims has an element for each key of a cache."""
    return "kv_idx" in dims and "q_idx" not in dims


def _size(call: CacheCall, dim: str | int) -> Size:
    if isinstance(dim, int):
        return dim
    queries = call.q.shape[0] if call.packed else call.q.shape[2]
    sizes: dict[str, int] = {"b": call.num_seqs, "h": call.q.shape[1], "hkv": call.num_kv_heads, "q_idx": queries}
    # A free name, or a size that the spec computes: kernels clamp indices to the tensor's size.
    return sizes[dim] if dim in sizes else at_least(1)


# --------------------------------------------------------------------------------------------------------------- calls


def cache_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None,
    page_starts: Tensor | None,
    kv_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    row_offset: int | None,
    row_offsets: Tensor | None,
    scale: float,
    *,
    page_size: int,
    most_keys: int,
    most_queries: int,
    splits: object,
    config: PagedConfig,
    family: str | None = None,
) -> CacheCall:
    """A call of checked arguments, without the classes of its sequences."""
    rule: Splits = check_splits(op, splits)
    return CacheCall(
        q, k, v, page_table, page_starts, kv_lengths, cu_seqlens_q, row_offset, row_offsets, scale, page_size,
        (), rule == BALANCED, most_keys, most_queries, rule, config, family=family,
    )  # fmt: skip


def with_classes(
    call: CacheCall,
    processors: int,
    tiles: PagedTiles,
    *,
    are_full: bool = False,
    hopper_tile: HopperTile | None = None,
    converts: bool = False,
) -> CacheCall:
    """A call with the classes of its sequences, on a chip of so many processors.

    `are_full`: the packed sequences fill q. If as many sequences of the most queries fill q, they are all alike.
    `hopper_tile`: the tile of long prompts in Hopper's family, None if they run the portable family. `converts`: see
    `latents.converts_cache`.
    """
    q = call.q
    total = q.shape[0] if call.packed else q.shape[0] * q.shape[2]
    sizes = PagedSizes(
        packed=call.packed,
        num_seqs=call.num_seqs,
        most_queries=call.most_queries,
        total_queries=total,
        group=call.group,
        num_kv_heads=call.num_kv_heads,
        most_keys=call.most_keys,
        itemsize=q.element_size(),
        kv_itemsize=call.k.element_size(),
        head_dim=q.shape[-1],
        processors=processors,
        tiles=tiles,
        are_alike=are_full and call.num_seqs * call.most_queries == total,
        hopper_tile=hopper_tile,
        hopper_rows=hopper_rows(call.family, call.group, q.shape[1], processors, (q.shape[-1], call.v.shape[-1])),
        asks_decode=any(name == DECODE for name, _ in call.config),
        converts=converts,
    )
    return call._replace(classes=tuple(row_classes(sizes, call.splits)))


def is_empty(call: CacheCall) -> bool:
    """Whether there is nothing for kernels to read."""
    read = (call.q, call.k, call.v, *([] if call.page_table is None else [call.page_table]))
    return 0 in [x.numel() for x in read]


def paged_schedule(op: str, call: CacheCall, scalars: Mapping[str, Any], tables: Sequence[Any]) -> Schedule:
    """The plan of a step: the splits of each sequence, for every layer's call. `scalars` are those that it reads."""
    return Schedule(op=op, call={**_sizes(call), **_known(scalars)}, tiles={}, tables=tuple(tables))


def plan_tables(op: str, schedule: object, call: CacheCall, scalars: Mapping[str, Any]) -> list[Any]:
    """The tables of a plan, checked to be one of this op, these sizes and these scalars."""
    if not isinstance(schedule, Schedule):
        fail(op, "schedule", f"what {op}.plan(...) returns, or None", type(schedule).__name__)
    if schedule.op != op:
        fail(op, "schedule", f"one made by {op}.plan", f"one made by {schedule.op}.plan")
    if not schedule.is_plan:
        fail(op, "schedule", f"one made by {op}.plan", f"one made by {op}.schedule")
    # A scalar that no plan reads, or whose value was not known when this one was made, is not among its sizes.
    known = {name: value for name, value in _known(scalars).items() if name in schedule.call}
    for name, value in {**_sizes(call), **known}.items():
        if schedule.call.get(name) != value:
            fail(op, "schedule", f"one made for {name} {value}", f"one made for {name} {schedule.call.get(name)}")
    return list(schedule.tables)


def check_tables(op: str, call: CacheCall, tables: Sequence[Tensor]) -> None:
    """Check that a plan has the tables of the classes of a call.

    The family of kernels also depends on strides, scales and the head_dim of v, which the plan does not know.
    """
    expected = [(rows.num_entries, rows.record_size) for rows in call.classes]
    got = [tuple(x.shape) for x in tables[::NUM_TABLES]]
    if len(tables) != NUM_TABLES * len(expected) or got != expected:
        families = " and ".join(dict.fromkeys(rows.tile.family for rows in call.classes))
        fail(op, "schedule", f"a plan for the kernels of this call, {families}; family='portable' gives one", got)


def _sizes(call: CacheCall) -> dict[str, Any]:
    """The properties of a call that a plan is made for."""
    return {
        PLANNED: "in batch rows" if call.page_size == WHOLE_ROW else "in pages",
        "sequences": call.num_seqs,
        "queries": tuple(call.q.shape[:1]) if call.packed else (call.q.shape[0], call.q.shape[2]),
        "heads": (call.q.shape[1], call.num_kv_heads),
        "page size": call.page_size,
        "head_dim and bytes of an element": (call.q.shape[-1], call.k.element_size()),
        "most keys": call.most_keys,
        "most queries": call.most_queries,
        "q_offset": _offset(call),
        "splits": call.splits,
        "config": call.config,
        "family": call.family,
    }


def _offset(call: CacheCall) -> int | str | None:
    """Where the queries of a call begin, as far as it is known without reading from a device."""
    if call.at_end:
        return "end"
    return call.row_offset if call.row_offsets is None else "one per sequence"


def _known(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars that are numbers, not arrays, by names that no size has."""
    return {f"scalar {name}": value for name, value in scalars.items() if isinstance(value, (int, float))}
