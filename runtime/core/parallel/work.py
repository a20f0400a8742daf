"""The work of a call: how many blocks of keys each block of its queries visits. numpy alone is imported.

A plan of a call over several GPUs deals rows by their work. The work decides balance, never results: values that are
not known, such as the elements of a tensor on a device, may be left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..checks import fail

BLOCK = 128
"""Rows and keys of a block. The kernels' blocks have this size or half of it."""

MOST_CELLS = 2**18
"""Most cells of a table of the blocks of keys that each block of rows visits: blocks are made large enough for it."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantWork:
    """The keys that a variant's mask makes a block of queries visit, and the indices by which its tensors are read.

    Attributes:
        tensors: dims of the variant's own tensors by keyword, those of a sink and a log-decay included.
        untrained: those of them that hold floats and have no gradient.
        scalars: type of each of the variant's own scalars, and arguments of its check, by keyword.
        ranges: first and end of the keys that blocks of queries visit. values, may_visit: in place of `ranges`,
            whether a block of queries visits a block of keys, from the extremes of some values over both blocks.
        needs: keywords of the tensors and scalars that these functions read.
        keywords: name in the functions -> keyword, if they differ.
        dropout: probabilities may be dropped.
        by_heads: a head's number does nothing but pick that head's element of a tensor.
        by_batch: a batch row's number does more than pick that row's element of a tensor.
        by_row: the variant reads a tensor by row, so a call with rows in another order is not right by their positions
            alone. The same is true if probabilities are dropped.
        by_length, by_queries: the variant computes with the number of keys, or of queries.
        sized_by_keys: a tensor's size follows from the number of keys.
        shift_invariant: mask and score stay the same if all positions move by the same number.
        looks_back: the mask keeps no key after its query.
    """

    op: str
    tensors: Mapping[str, tuple[str | int, ...]]
    untrained: Sequence[str] = ()
    scalars: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    ranges: Callable[[Any], list[tuple[Any, Any]]] | None = None
    values: Callable[[Any], list[tuple[Any, bool]]] | None = None
    may_visit: Callable[[Any], Any] | None = None
    needs: Sequence[str] = ()
    keywords: Mapping[str, str] = field(default_factory=dict)
    dropout: bool = False
    by_heads: bool = True
    by_batch: bool = False
    by_row: bool = False
    by_length: bool = False
    by_queries: bool = False
    sized_by_keys: bool = False
    shift_invariant: bool = False
    looks_back: bool = False

    @property
    def by_sequence(self) -> bool:
        """A packed sequence's number matters: it picks the sequence's element of a tensor, or does more."""
        of_sequence = (self.axes(name, "b") and not self.axes(name, "q_idx", "kv_idx") for name in self.tensors)
        return self.by_batch or any(of_sequence)

    def axes(self, name: str, *dims: str) -> tuple[int, ...]:
        """The axes of a tensor that have one of these dims."""
        return tuple(axis for axis, dim in enumerate(self.tensors.get(name, ())) if dim in dims)


def work_of(op: Any, function: str = "plan") -> VariantWork:
    """The `VariantWork` of an op of this package, given to `function`; a `VariantWork` is returned as it is."""
    if isinstance(op, VariantWork):
        return op
    package, _, module = getattr(op, "__module__", "").rpartition(".")
    if module not in ("torch_op", "jax_op"):
        fail(
            function,
            "op",
            "an op of this package, such as `generated.torch.causal` or `generated.jax.causal`",
            repr(op),
        )
    found: VariantWork = import_module(f"{package}.work").WORK
    return found


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The queries of a call, in blocks that do not cross the end of a sequence.

    Attributes:
        block: rows of most blocks. begins, ends: the first row and the end of each block.
        starts, lengths: the first row and the length of each block's sequence. number: the number of that sequence.
    """

    block: int
    begins: Array
    ends: Array
    starts: Array
    lengths: Array
    number: Array

    @classmethod
    def of(cls, seq: int, ranks: int, cu_seqlens: Sequence[int] | None, *, in_table: bool) -> "Rows":
        """Blocks of rows of a call, cut where sequences end. `in_table`: their number is limited by MOST_CELLS."""
        block = min(BLOCK, max(seq // (4 * ranks), 1))
        while in_table and (seq // block) ** 2 > MOST_CELLS:
            block *= 2
        edges = np.arange(0, seq + block, block)
        edges[-1] = seq
        if cu_seqlens is None:
            zeros = np.zeros(len(edges) - 1, np.int64)
            return cls(block=block, begins=edges[:-1], ends=edges[1:], starts=zeros, lengths=zeros + seq, number=zeros)
        bounds = np.asarray(cu_seqlens, np.int64)
        edges = np.union1d(edges, bounds)
        number = np.searchsorted(bounds, edges[:-1], side="right") - 1
        return cls(
            block=block,
            begins=edges[:-1],
            ends=edges[1:],
            starts=bounds[number],
            lengths=bounds[number + 1] - bounds[number],
            number=number,
        )

    def cut(self, chunks: Sequence[Sequence[tuple[int, int]]]) -> "Rows":
        """The same rows in blocks that are cut where chunks of rows begin, too."""
        more = [begin for own in chunks for begin, _ in own if begin < self.ends[-1]]
        begins = np.union1d(self.begins, np.array(more, np.int64))
        block = np.searchsorted(self.begins, begins, "right") - 1
        return Rows(
            block=self.block,
            begins=begins,
            ends=np.append(begins[1:], self.ends[-1:]),
            starts=self.starts[block],
            lengths=self.lengths[block],
            number=self.number[block],
        )


def visited_blocks(work: VariantWork, rows: Rows, own: Mapping[str, Any], segment_ids: Array | None = None) -> Array:
    """The number of blocks of keys that each block of rows visits, float64 `[blocks]`.

    It is multiplied by the block's rows over BLOCK, and summed over the batch rows that the mask tells apart.

    Args:
        own: the tensors and scalars that the mask reads, by keyword, on the host. segment_ids: `[S]` or `[B, S]`.
    """
    total = np.zeros(len(rows.begins))
    for at, ids in mask_calls(work, rows, own, segment_ids):
        total += _visited(work, rows, at, ids)
    share: Array = (rows.ends - rows.begins) / BLOCK
    return total * share


def mask_calls(
    work: VariantWork, rows: Rows, own: Mapping[str, Any], segment_ids: Array | None
) -> Iterator[tuple[Any, Array | None]]:
    """The values that the mask's code reads, and the segment ids, for each batch row that the mask tells apart."""
    missing = [name for name in work.needs if own.get(name) is None]
    if missing:
        expected = "what the mask reads, on the host, to deal its work; or balance='zigzag', which reads nothing"
        fail("plan", f"{work.op}: {missing[0]}", expected, None)
    values = {name: _value(work, keyword, own[keyword]) for name, keyword in _names(work).items()}
    batch = [x.shape[axis] for name, x in values.items() for axis in work.axes(name, "b") if hasattr(x, "shape")]
    ids = [None] if segment_ids is None else list(np.atleast_2d(segment_ids))
    is_packed = bool((rows.number > 0).any())
    numbers = range(1 if is_packed else max([1, *batch]))
    for b in range(max(len(numbers), len(ids))):
        at = SimpleNamespace(**values, q_len=rows.lengths, kv_len=rows.lengths, h=0, hkv=0)
        at.q_first, at.q_last = rows.begins - rows.starts, rows.ends - 1 - rows.starts
        at.b = rows.number if is_packed else np.full(len(rows.begins), min(b, len(numbers) - 1))
        yield at, ids[min(b, len(ids) - 1)]


def _visited(work: VariantWork, rows: Rows, at: Any, ids: Array | None) -> Array:
    if work.may_visit is not None:
        visits, _, step = visit_table(work, rows, at, ids)
        counts: Array = np.count_nonzero(visits, axis=1) * (step / BLOCK)
        return counts
    blocks = [
        np.where(high > low, -(-high // BLOCK) - low // BLOCK, 0) for low, high in visited_keys(work, rows, at, ids)
    ]
    total: Array = np.sum(blocks, axis=0)
    return total


@np.errstate(all="ignore")  # formulas may divide by zero, as in the kernels
def visited_keys(work: VariantWork, rows: Rows, at: Any, ids: Array | None) -> list[tuple[Array, Array]]:
    """First and end of the keys of its sequence that each block of rows visits, in runs that do not overlap."""
    found = [(np.zeros_like(rows.lengths), rows.lengths)] if work.ranges is None else work.ranges(at)
    parts = [(np.maximum(begin, 0), np.minimum(end, rows.lengths)) for begin, end in found]
    if len(parts) > 1:
        (begin, end), (other, stop) = parts
        inside = begin < end
        before = (other, np.where(inside, np.minimum(stop, begin), stop))
        behind = (np.where(inside, np.maximum(other, end), stop), stop)
        parts = [(begin, end), before, behind]
    if ids is not None:
        begin, end = _segments(rows, ids)
        parts = [(np.maximum(low, begin), np.minimum(high, end)) for low, high in parts]
    return parts


def _names(work: VariantWork) -> dict[str, str]:
    """Name in the mask's code -> keyword, for all tensors and scalars that the mask reads."""
    own = {keyword: name for name, keyword in work.keywords.items()}
    return {own.get(keyword, keyword): keyword for keyword in work.needs}


def on_host(x: Any) -> Array:
    """An array, list or tensor of any framework and device as an array of numpy."""
    found: Array = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    return found


def _value(work: VariantWork, keyword: str, x: Any) -> Any:
    if isinstance(x, (bool, int, float)):
        return x
    found, dims = on_host(x), work.tensors.get(keyword, ())
    # Packed tensors have no axis of batch rows beside one of tokens.
    return found[None] if "b" in dims and found.ndim == len(dims) - 1 else found


def _segments(rows: Rows, ids: Array) -> tuple[Array, Array]:
    """For each block, the first row of all documents that it has rows of, and the end of the last one.

    A document may be interrupted: it is the same document wherever its id is.
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    _, run, number = np.unique(ids[edges[:-1]], return_index=True, return_inverse=True)
    ends = np.zeros(len(run), np.int64)
    np.maximum.at(ends, number, edges[1:])
    # The runs of ids of each block, the last one excluded, and a run that changes no extreme after the last.
    runs = np.stack([np.searchsorted(edges, rows.begins, "right") - 1, np.searchsorted(edges, rows.ends - 1, "right")])
    lows, highs = np.append(edges[run][number], len(ids)), np.append(ends[number], 0)
    cuts = runs.T.ravel()
    return np.minimum.reduceat(lows, cuts)[::2], np.maximum.reduceat(highs, cuts)[::2]


@np.errstate(all="ignore")
def visit_table(work: VariantWork, rows: Rows, at: Any, ids: Array | None) -> tuple[Array, Array, int]:
    """Whether each block of rows visits each block of keys of its sequence; the blocks' first keys and their size."""
    assert work.may_visit is not None
    longest, total = int(rows.lengths.max()), int(rows.ends[-1])
    step = max(rows.block, BLOCK)
    starts = np.arange(0, longest, step)
    numbers, is_packed = at.b[:, None], bool((rows.number > 0).any())
    at.least, at.most = [], []
    at.q_idx = at.kv_idx = np.arange(total)
    at.b = at.b[0]
    for value, of_queries in work.values(at) if work.values is not None else ():
        flat = np.broadcast_to(value, total)
        if is_packed and not of_queries:
            # Blocks of keys start anew in each packed sequence, so each block takes the extremes over all keys.
            at.least.append(flat.min())
            at.most.append(flat.max())
            continue
        cuts, axis = (rows.begins, (slice(None), None)) if of_queries else (starts, (slice(None),))
        at.least.append(np.minimum.reduceat(flat, cuts)[axis])
        at.most.append(np.maximum.reduceat(flat, cuts)[axis])
    at.b = numbers
    at.kv_first, at.kv_last = starts, np.minimum(starts + step, longest) - 1
    at.q_first, at.q_last, at.q_len, at.kv_len = (x[:, None] for x in (at.q_first, at.q_last, at.q_len, at.kv_len))
    shape = (len(rows.begins), len(starts))
    visits = np.broadcast_to(work.may_visit(at), shape) & (starts < rows.lengths[:, None])
    if ids is not None:
        begin, end = _segments(rows, ids)
        visits = visits & (starts < end[:, None]) & (at.kv_last >= begin[:, None])
    return visits, starts, step
