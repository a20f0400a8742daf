"""How a call on paged caches splits the keys of a sequence: the keys that each tile of rows visits, in parts.

The kernel `<variant>_paged_plan` computes the same splits on the device, from the same bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from codegen.analysis.paged_calls import paged
from codegen.arch.chips import DEFAULT_MULTIPROCESSORS
from codegen.arch.paged import PagedTileConfig
from codegen.inspect.call import EXAMPLE_HEADS, example_tensor
from codegen.ir import expr
from codegen.ir.evaluate import Array, evaluate
from codegen.ir.expr import Expr
from codegen.plan.paged.kernels import visited
from codegen.spec.model import Variant

SPLITS_PER_PROCESSOR, FOLDED = 2, 8
"""The most parts of one sequence for each multiprocessor; the total is rounded down to a multiple of FOLDED. The
package's `core/row_classes.py` has the same numbers."""

PROMPT_KEYS = 16
"""The least keys in a part of a prompt, for each row of its tile; also in `core/row_classes.py`."""

FEW_ROWS = (16, 64)
"""Rows that one tile of decoding may hold: query heads of a group times new tokens. With more rows it is a prompt."""


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Everything that decides the parts of a sequence, besides its lengths."""

    block_m: int
    block_n: int
    keys_per_split: int
    group: int
    kv_heads: int
    processors: int = DEFAULT_MULTIPROCESSORS

    @property
    def most_splits(self) -> int:
        """The most parts of a sequence, over all tiles of its rows."""
        most = ceil_div(SPLITS_PER_PROCESSOR * self.processors, self.kv_heads)
        return most // FOLDED * FOLDED or most

    def tiles(self, q_len: int) -> int:
        """Number of tiles of rows of a sequence with `q_len` queries."""
        return ceil_div(q_len * self.group, self.block_m)


def splitting(decode: PagedTileConfig, prompts: PagedTileConfig, *, q_len: int, group: int, kv_heads: int) -> Splitting:
    """How a sequence with `q_len` new tokens is split, given the tiles of decoding and of prompts."""
    rows = next((most for most in FEW_ROWS if q_len * group <= most), None)
    tile = prompts if rows is None else decode
    keys = tile.keys_per_split if rows is not None else max(tile.keys_per_split, PROMPT_KEYS * tile.block_m)
    return Splitting(
        block_m=max(tile.block_m, rows or 0),
        block_n=tile.block_n,
        keys_per_split=keys,
        group=group,
        kv_heads=kv_heads,
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The keys that one program visits, as ranges in order."""

    ranges: Sequence[range]

    @property
    def keys(self) -> int:
        return sum(map(len, self.ranges))


@dataclass(frozen=True, kw_only=True)
class TileSplits:
    """One tile of rows: the positions of its first and last query, the keys that it may read, and its parts.

    `read` is exact: other keys of the same blocks are not read. `part_keys`: keys of each part except the last.
    """

    q_first: int
    q_last: int
    read: Sequence[range]
    part_keys: int
    parts: Sequence[Part]


def split(
    variant: Variant,
    how: Splitting,
    *,
    q_len: int,
    kv_len: int,
    scalars: Mapping[str, int | float] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> list[TileSplits]:
    """The tiles of the last `q_len` positions of a sequence of `kv_len` keys; arguments not given are examples."""
    numbers = {name: spec.typical(kv_len) for name, spec in variant.scalars.items()} | dict(scalars or {})
    union = visited(paged(variant))
    bounds = [(r.first, r.end) for r in (union.main, union.other) if r is not None]
    loads = expr.loads(*(e for pair in bounds for e in pair if e is not None))
    examples = {load.tensor: _example(variant, load.tensor, kv_len, numbers) for load in loads}
    arrays = examples | {name: x for name, x in (tensors or {}).items() if name in examples}
    shift, tiles = kv_len - q_len, how.tiles(q_len)
    found = []
    for tile in range(tiles):
        first = tile * how.block_m // how.group + shift
        last = (min((tile + 1) * how.block_m, q_len * how.group) - 1) // how.group + shift
        uniform: dict[str, int | float] = {"b": 0, "h": 0, "hkv": 0, "q_len": q_len, "kv_len": kv_len, **numbers}
        values = uniform | {"q_first": first, "q_last": last}
        read = _merged(_range(pair, values, arrays, kv_len) for pair in bounds)
        found.append(_tile(read, how, tiles, first, last, kv_len))
    return found


def _example(variant: Variant, name: str, kv_len: int, numbers: Mapping[str, int | float]) -> Array:
    sizes = {"b": 1, "h": EXAMPLE_HEADS, "hkv": EXAMPLE_HEADS, "q_idx": kv_len, "kv_idx": kv_len}
    integers = {scalar: number for scalar, number in numbers.items() if isinstance(number, int)}
    return example_tensor(variant.tensors[name], sizes | {"q_len": 1, "kv_len": kv_len} | integers)


def _range(
    bounds: tuple[Expr | None, Expr | None],
    values: Mapping[str, int | float],
    tensors: Mapping[str, Array],
    kv_len: int,
) -> range:
    first, end = (None if e is None else int(evaluate(e, values, tensors)) for e in bounds)
    return range(max(first or 0, 0), kv_len if end is None else max(min(end, kv_len), 0))


def _merged(ranges: Iterator[range]) -> list[range]:
    """The ranges in order; ranges that touch or overlap are joined."""
    found: list[range] = []
    for r in sorted(filter(None, ranges), key=lambda each: each.start):
        if found and r.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, r.stop))
        else:
            found.append(r)
    return found


def _tile(read: Sequence[range], how: Splitting, tiles: int, first: int, last: int, kv_len: int) -> TileSplits:
    # Whole blocks are visited, except at the end of the last range.
    block = how.block_n
    down = [range(r.start // block * block, r.stop) for r in read]
    up = [range(r.start, ceil_div(r.stop, block) * block) for r in down[:-1]] + down[-1:]
    spans = _merged(iter(up))
    span = sum(map(len, spans))
    most = ceil_div(how.most_splits, tiles)
    keys = max(ceil_div(ceil_div(span, most), block), ceil_div(how.keys_per_split, block)) * block
    parts = [Part(ranges=_cut(spans, begin, begin + keys, kv_len)) for begin in range(0, span, keys)]
    return TileSplits(q_first=first, q_last=last, read=read, part_keys=keys, parts=parts or [Part(ranges=())])


def _cut(spans: Sequence[range], begin: int, end: int, kv_len: int) -> list[range]:
    """The keys from number `begin` to number `end`, counted over all keys in `spans`."""
    found, passed = [], 0
    for span in spans:
        low, high = max(begin - passed, 0), min(end - passed, len(span))
        if low < high:
            found.append(range(span.start + low, min(span.start + high, kv_len)))
        passed += len(span)
    return found


def text_of(ranges: Sequence[range]) -> str:
    """Ranges of keys or pages as text, with first and last number.

    >>> text_of([range(0, 4), range(64, 65)]), text_of([])
    ('0 to 3, 64', 'none')
    """
    words = [str(r.start) if len(r) == 1 else f"{r.start} to {r[-1]}" for r in ranges]
    return ", ".join(words) or "none"
