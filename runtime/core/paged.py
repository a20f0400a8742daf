"""Calls on paged caches, as their kernels take them. No framework is imported."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..archs import NARROW_HEAD_DIM
from .checks import check_finite, fail
from .configs import block_columns, cdiv, next_power_of_2
from .launches import Backend, Tensor, tile_constants
from .paged_tiles import PagedConfig
from .row_classes import FOLDED, RowClass, Splits
from .tiles import HOPPER

LIMITED_REGISTERS = 128
"""Registers of a thread if `CacheCall.limits` limits them."""

PROGRAMS_PER_PROCESSOR = 64
"""Largest number of programs per multiprocessor that take splits in turn: enough for the chip to balance them, and few
enough that programs without a split cost little."""

PART_ROWS, PART_COLUMNS = 32, 128
"""Tiles of at most PART_ROWS rows hold wide keys in parts of PART_COLUMNS columns: their MMAs then form no long chain
in which each waits for the one before. Tiles of more rows have larger instructions."""

WIDE_KEYS = 32
"""Largest number of keys of a block if wide values are stored apart from their keys."""

WHOLE_ROW = 2**30
"""The page size of dense keys: a page holds a whole batch row."""

LEAST_DENSE_KEYS = 512
"""Dense calls with few queries split their keys from this number on: with fewer keys, plan and merge cost too much."""

NUM_TABLES = 3
"""Tables of each class of rows."""

FP8 = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of caches that come with scales."""


def check_scale_given(op: str, name: str, scale: object, dtype: str) -> None:
    """Refuse a cache of 8-bit floats, of this dtype, without a scale."""
    if scale is None and dtype in FP8:
        fail(op, name, f"a number, floats [Hkv] or [pages, page size, Hkv] for a cache of {dtype}", "None")


def score_factor(scale: float, of_keys: float) -> float:
    """The factor of scores, from the scale of the call and that of the keys.

    The keys' scale is 0 if they were all 0 when they were quantised. But 0 times the score -inf of a key that is not
    kept would be NaN.
    """
    return max(scale * of_keys, 1e-30)


def check_token_scale(name: str, shape: tuple[int, ...], cache: tuple[int, ...], itemsize: int) -> None:
    """Check the scales of tokens that `append` writes beside a cache of this shape."""
    if shape != cache[:3]:
        fail("append", name, f"scales {list(cache[:3])} of the tokens of a cache {list(cache)}", list(shape))
    if itemsize != 1:
        fail("append", name, "scales of tokens for a cache of 8-bit floats alone", f"a cache of {8 * itemsize} bits")


def check_last_slot(last: int, pages: int, page_size: int) -> None:
    """Check the largest slot that `append` writes to: what lies behind the cache is other memory."""
    if last >= pages * page_size:
        fail("append", "slots", f"slots below {pages * page_size}, the pages of k_cache times the page size", last)


def check_factors(op: str, name: str, scales: Sequence[float]) -> None:
    """Check the numbers, one for each key head, by which a call multiplies keys or values of a cache."""
    if not all(0 <= scale < math.inf for scale in scales):
        fail(op, name, "finite floats of at least 0.0", list(scales))


def check_divisors(name: str, scales: Sequence[float]) -> None:
    """Check the numbers, one for each key head, by which `append` divides keys or values."""
    if not all(0 < scale < math.inf for scale in scales):
        fail("append", name, "finite floats above 0", list(scales))


def check_divisor(name: str, scale: object) -> float:
    """Check a number by which `append` divides keys or values."""
    return check_finite("append", name, scale, "a finite number above 0", lambda x: x > 0)


class CacheCall(NamedTuple):
    """A call on paged caches, checked, as its kernels take it.

    q is `[B, Hq, Sq, D]`, or `[total_q, Hq, D]` of packed queries. `q_rows` are the queries of a batch row, 0 if they
    are packed. Dense keys have no page table, and their `page_size` is WHOLE_ROW: k is `[B, Skv, Hkv, D]`. No sequence
    has more than `most_keys` keys; without lengths each has as many. If `row_offset` and `row_offsets` are None,
    queries are the last of their sequence.

    `k_scale`, `v_scale`: factors of a cache's elements, dense floats `[Hkv]`, or `[pages, page size, Hkv]` for each
    token. If the factor of all keys is one number, it is part of `scale`; one number for all values is `v_factor`.

    `family`: the family of the kernels of prompts, if the call asks for one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    page_starts: Tensor | None
    kv_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    row_offset: int | None
    row_offsets: Tensor | None
    scale: float
    page_size: int
    classes: tuple[RowClass, ...]
    balanced: bool
    most_keys: int = WHOLE_ROW
    most_queries: int = 0
    splits: Splits = None
    config: PagedConfig = ()
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    v_factor: float = 1.0
    family: str | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def num_seqs(self) -> int:
        found: int = self.q.shape[0] if self.kv_lengths is None else self.kv_lengths.shape[0]
        return found

    @property
    def q_rows(self) -> int:
        found: int = 0 if self.packed else self.q.shape[2]
        return found

    @property
    def num_kv_heads(self) -> int:
        found: int = self.k.shape[2]
        return found

    @property
    def group(self) -> int:
        found: int = self.q.shape[1] // self.num_kv_heads
        return found

    @property
    def at_end(self) -> bool:
        """Whether queries are the last of their sequences."""
        return self.row_offset is None and self.row_offsets is None

    @property
    def offset(self) -> int | Tensor:
        """The position of the first query: one for all sequences, or one for each. 0 if it follows from lengths."""
        return (self.row_offset or 0) if self.row_offsets is None else self.row_offsets

    @property
    def table_stride(self) -> int:
        if self.page_table is None or self.page_starts is not None:
            return 0
        found: int = self.page_table.stride(0)
        return found

    def query_strides(self, x: Tensor) -> tuple[int, ...]:
        """The strides of batch row, head and token of q or o."""
        return (0, x.stride(1), x.stride(0)) if self.packed else tuple(x.stride()[:3])

    @staticmethod
    def cache_strides(x: Tensor) -> tuple[int, ...]:
        """The strides of page, head and slot of a cache."""
        return x.stride(0), x.stride(2), x.stride(1)

    def limits(self, backend: Backend, rows: RowClass) -> dict[str, int]:
        """Options of the forward that limit its registers.

        With fewer registers more programs run at once, which helps if the page of each key must be looked up. There is
        no limit if the accumulators of the rows take most of these registers: such kernels do not compile, or spill.
        """
        looks_up = self.page_size % rows.tile.block_n != 0
        sums = rows.tile.block_m * block_columns(self.v.shape[-1]) // (32 * rows.tile.num_warps)
        fits = rows.folds and not rows.is_wide and sums <= LIMITED_REGISTERS // 2
        return {"maxnreg": LIMITED_REGISTERS} if looks_up and fits and backend.is_nvidia(self.q) else {}

    @property
    def value_scale(self) -> Tensor | float | None:
        """The factor of values, as kernels take it."""
        return self.v_factor if self.v_scale is None and self.v_factor != 1.0 else self.v_scale

    @staticmethod
    def scale_kind(scale: Tensor | float | None) -> str:
        """How kernels read a cache's scale: "none", "number", "head" or "token"."""
        if scale is None or isinstance(scale, float):
            return "none" if scale is None else "number"
        return "token" if scale.dim() == 3 else "head"

    def column_pairs(self, backend: Backend) -> str:
        """How kernels convert 8-bit floats that they read two columns at a time: "ptx" or "plain".

        It is "" if kernels read one column at a time: for caches of 16 bits, for products in float32, and if the
        columns or rows do not form pairs.
        """
        caches = (self.k, self.v)
        if self.q.element_size() != 2 or any(x.element_size() != 1 for x in caches):
            return ""
        if not all(_makes_pairs(x.shape[3]) and backend.has_even_rows(x) for x in caches):
            return ""
        return "ptx" if backend.is_nvidia(self.q) else "plain"

    def shares_values(self, backend: Backend, pairs: str) -> bool:
        """Whether values are the first columns of keys, and a part of the keys' tile: one load then serves both.

        False for 8-bit floats that are not read in pairs: Triton does not copy a tile of them ahead if both products
        read it.
        """
        is_part = self.v.shape[3] in (self.k.shape[3], block_columns(self.k.shape[3]))
        return is_part and (self.k.element_size() > 1 or pairs != "") and backend.begin_alike(self.k, self.v)

    def constants(self, rows: RowClass, *, shares_values: bool) -> Mapping[str, int]:
        """The constants of the forward that follow from its tile and from the head dims of q and v."""
        tile, dims = rows.tile, (self.q.shape[-1], self.v.shape[-1])
        if dims[0] <= NARROW_HEAD_DIM:
            return tile_constants(tile, *dims)
        if self.k.element_size() > 1 and not shares_values:
            # Shared memory holds wide values beside the keys, so there is room for fewer blocks.
            tile = tile._replace(block_n=min(tile.block_n, WIDE_KEYS), num_stages=min(tile.num_stages, 2))
        found = tile_constants(tile, *dims)
        if tile.block_m > PART_ROWS or self.q.element_size() != 2:
            return found
        return {**found, "BLOCK_D": PART_COLUMNS, "BLOCK_DV": min(PART_COLUMNS, found["BLOCK_DV"])}

    def results(self, backend: Backend) -> tuple[Tensor, Tensor]:
        """Room for o and lse."""
        dim = self.v.shape[3]
        if self.packed:
            total, heads = self.q.shape[:2]
            return self.q.new_empty((total, heads, dim)), self.q.new_empty((heads, total), dtype=backend.FP32)
        return backend.empty_like_layout(self.q, dim), self.q.new_empty(self.q.shape[:3], dtype=backend.FP32)

    def lse_strides(self, lse: Tensor) -> tuple[int, int]:
        """The strides of batch row and head of lse."""
        return (0, lse.stride(0)) if self.packed else (lse.stride(0), lse.stride(1))

    def programs(self, backend: Backend, items: int) -> int:
        """The number of programs that take `items` items in turn."""
        return max(min(items, PROGRAMS_PER_PROCESSOR * backend.multiprocessors(self.q)), 1)

    def tables(self, backend: Backend, rows: RowClass) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for the records of splits, for the records of tiles, and for the numbers of both.

        The numbers are zero at first if sequences have several tiles. Hopper's family has records of its blocks alone;
        no kernel reads its other buffers.
        """
        new, dtype = self.q, backend.INT32
        num_tiles = 1 if rows.tile.family == HOPPER else rows.num_tiles
        records = new.new_empty((rows.num_entries, rows.record_size), dtype=dtype)
        counted = rows.last_rows > rows.tile.block_m and rows.tile.family != HOPPER
        counts = (new.new_zeros if counted else new.new_empty)((2,), dtype=dtype)
        return records, new.new_empty((num_tiles, 8), dtype=dtype), counts

    def partials(self, backend: Backend, rows: RowClass) -> tuple[Tensor, Tensor]:
        """Buffers for the partial sums of each part: of values, and the maximum and exponential sum of its logits."""
        shape = (rows.num_entries if rows.splits else 0, self.num_kv_heads, rows.partial_rows)
        o_shape, sums_shape = (*shape, self.v.shape[3]), (*shape, 2)
        return self.q.new_empty(o_shape, dtype=backend.FP32), self.q.new_empty(sums_shape, dtype=backend.FP32)


def _makes_pairs(head_dim: int) -> bool:
    """Whether half of each part of a tile has the 16 columns that an MMA takes at least.

    >>> [_makes_pairs(n) for n in (16, 64, 72, 96, 127, 128, 528, 576)]
    [False, True, False, True, False, True, False, True]
    """
    first = PART_COLUMNS if head_dim > NARROW_HEAD_DIM else block_columns(head_dim)
    rest = head_dim % first if head_dim > first else 0
    return head_dim % 2 == 0 and first >= 32 and (rest == 0 or next_power_of_2(rest) >= 32)


MERGE_WARPS = 2
"""Warps of a program that merges the parts of a row: with few, many rows are merged at once, while the last parts are
computed."""


MERGED_COLUMNS = 1024
"""Most columns of parts, of all parts that are joined at a time, whose sums fit the registers of these warps."""


def merge(backend: Backend, merge_splits: Any, call: CacheCall, rows: RowClass, tensors: tuple[Tensor, ...]) -> None:
    """Join the parts of each tile. `tensors`: the partial sums, the records of tiles and their numbers, o, lse."""
    o, lse = tensors[-2:]
    columns, overlaps = next_power_of_2(o.shape[-1]), backend.overlaps(call.q)
    # Its programs are launched while the last programs of the forward run, and wait for these.
    options = {"launch_pdl": True} if overlaps else {}
    backend.launch(
        merge_splits,
        (call.programs(backend, rows.num_tiles * call.num_kv_heads * rows.partial_rows),),
        tensors,
        (*call.query_strides(o), *call.lse_strides(lse), call.num_kv_heads, rows.partial_rows),
        GROUP=call.group,
        HEAD_DIM_V=o.shape[-1],
        COLUMNS=columns,
        # It follows from chip and heads alone, because the order of sums depends on it.
        BLOCK_P=min(next_power_of_2(cdiv(rows.most_splits, FOLDED)), FOLDED, max(MERGED_COLUMNS // columns, 1)),
        OVERLAPS=overlaps,
        num_warps=MERGE_WARPS,
        **options,
    )
