"""Checks of a call over several ranks, before anything is sent. No framework is imported."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import PACKED, check_layout, fail, shown
from .costs import repeats_of_keys
from .ring_steps import check_ring
from .shards import Layout
from .work import VariantWork

TOKENS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
"""Arguments with an element per row. Each rank gives the elements of its own rows."""

_OF_LAYOUT = {
    "q_offset": "the layout says where rows are",
    "cu_seqlens_q": "give cu_seqlens= to plan(...)",
    "cu_seqlens_k": "give cu_seqlens= to plan(...)",
    "schedule": "each rank has rows of its own",
    "page_table": "a call on paged caches is not split over ranks",
    "page_starts": "a call on paged caches is not split over ranks",
    "splits": "a call on paged caches is not split over ranks",
}
"""Keywords of an op that a call over several ranks does not take, and why."""

_FORMS = {PACKED: ("[rows, H, D]", 0, 1), "bhsd": ("[B, H, rows, D]", 2, 1), "bshd": ("[B, rows, H, D]", 1, 2)}
"""Dims of q, k and v, and their axes of rows and of heads."""


def row_axis(form: str) -> int:
    """The axis of rows of q, k, v and o."""
    return _FORMS[form][1]


def head_axis(form: str) -> int:
    """The axis of heads of q, k, v and o."""
    return _FORMS[form][2]


def form_of(layout: Layout, given: Mapping[str, Any], default: str) -> str:
    """The order of the axes of q, k and v: "packed", "bhsd" or "bshd"."""
    return PACKED if layout.cu_seqlens is not None else given.get("layout", default)


def check_call(
    work: VariantWork,
    layout: Layout,
    known: Sequence[str],
    given: Mapping[str, Any],
    default: str,
) -> None:
    """Raise an error if no rank can compute with the arguments.

    Args:
        known: the op's parameters. given: q, k, v and keywords. default: the order of axes if the call gives none.
    """
    _check_names(work.op, known, given, default)
    form = form_of(layout, given, default)
    _check_rows(work.op, layout, given, form)
    _check_strategy(work, layout, given, form)
    if layout.ranks > 1:
        _check_options(work.op, given)
    _check_tokens(work, layout, given, is_packed=form == PACKED)
    for name in work.tensors:
        shape = list(getattr(given.get(name), "shape", []))
        if len(local_axes(work, layout, name, shape)) > 1:
            # Each rank would have the pairs of its own rows alone.
            expected = f"one axis of {layout.local} rows, those of one rank, and {layout.seq} in the others"
            fail(work.op, name, expected, shape)


def _check_names(op: str, known: Sequence[str], given: Mapping[str, Any], default: str) -> None:
    for name, value in given.items():
        if name not in known:
            fail(op, name, f"one of {', '.join(known)}", "an argument of that name")
        is_zero = name == "q_offset" and isinstance(value, int) and value == 0
        if name in _OF_LAYOUT and value is not None and not is_zero:
            fail(op, name, f"None over several ranks: {_OF_LAYOUT[name]}", type(value).__name__)
    check_layout(op, given.get("layout", default))


def _check_rows(op: str, layout: Layout, given: Mapping[str, Any], form: str) -> None:
    dims, rows, _ = _FORMS[form]
    for name in ("q", "k", "v"):
        shape = list(getattr(given[name], "shape", []))
        if len(shape) != dims.count(",") + 1:
            fail(op, name, f"a tensor {dims}", f"{type(given[name]).__name__} {shape}")
        if shape[rows] != layout.local:
            expected = f"{layout.local} rows in {dims}, those of one of {layout.ranks} ranks"
            fail(op, name, expected, f"{shape[rows]} in {shape}")


def _check_strategy(work: VariantWork, layout: Layout, given: Mapping[str, Any], form: str) -> None:
    """Refuse heads that the ranks cannot share, and variants that the layout's strategy cannot compute."""
    op, head = work.op, _FORMS[form][2]
    heads = given["q"].shape[head], given["k"].shape[head]
    if heads[1] == 0 or heads[0] % heads[1]:
        fail(op, "q", f"a head count that is a multiple of k's {heads[1]}", heads[0])
    sharing = layout.ranks if layout.strategy == "heads" else layout.inner
    if sharing > 1 and not (work.by_heads and repeats_of_keys(heads, sharing)):
        why = f"{heads[0]} query and {heads[1]} key heads" if work.by_heads else "a mask or score that counts heads"
        fail(op, "q", f"heads that split over {sharing} ranks, or a layout with strategy='gather'", why)
    if work.by_queries and layout.ranks > 1 and layout.strategy != "heads":
        got = f"strategy={layout.strategy!r} with {op}, which computes with the number of queries of the whole call"
        fail(op, "layout", "strategy='heads'", got)
    if layout.strategy == "ring":
        check_ring(work, is_packed=form == PACKED)


def _check_options(op: str, given: Mapping[str, Any]) -> None:
    """Check pruning and dropout over several ranks."""
    if given.get("prune") is not None:
        fail(op, "prune", "None over several ranks, whose parts of a row are not compared", given["prune"])
    if not given.get("dropout_p"):
        return
    origin = given.get("dropout_origin")
    if origin is not None and not (isinstance(origin, (tuple, list)) and len(origin) == 3):
        expected = "None or (batch row, head, heads): the layout says where rows and keys are"
        fail(op, "dropout_origin", expected, shown(origin))
    if given.get("seed") is None:
        fail(op, "seed", "a seed over several ranks, the same on each", None)


def check_cuts(work: VariantWork, *, batch_rows: bool, heads: bool) -> None:
    """Raise an error if other ranks have other batch rows or heads, and the variant computes with their numbers."""
    for is_cut, counts, what in ((batch_rows, work.by_batch, "batch rows"), (heads, not work.by_heads, "heads")):
        if is_cut and counts:
            fail(work.op, "q", f"all {what} on every rank", f"a part of them, and a mask or score that counts {what}")


def _check_tokens(work: VariantWork, layout: Layout, given: Mapping[str, Any], *, is_packed: bool) -> None:
    op, there = work.op, [name for name in (*TOKENS, "kv_lengths") if given.get(name) is not None]
    if is_packed and there:
        fail(op, there[0], "None beside the layout's cu_seqlens", type(given[there[0]]).__name__)
    batch = 1 if is_packed else given["q"].shape[0]
    ids = layout.segment_ids
    if ids is not None and ids.ndim == 2 and len(ids) not in (1, batch):
        fail(op, "q", f"{len(ids)} batch rows, as the segment_ids of the layout have", batch)
    for name in TOKENS:
        shape = list(getattr(given.get(name), "shape", []))
        if name in there and shape != [batch, layout.local]:
            expected = f"a tensor [{batch}, {layout.local}], an element for each of this rank's rows"
            fail(op, name, expected, f"{type(given[name]).__name__} {shape}")
    by_row = "drops" if given.get("dropout_p") else "reads a tensor" if work.by_row else ""
    if layout.strategy != "heads" and layout.ranks > 1 and by_row and "q_positions" in there:
        expected = f"None: {op} {by_row} by row. Give cu_seqlens= to plan(...), or strategy='heads'"
        fail(op, "q_positions", expected, "positions")


def own_dims(work: VariantWork, layout: Layout, name: str, rank: int) -> tuple[str | int, ...]:
    """The dims of one of the variant's own tensors in a call: beside packed rows there is no dim of batch rows."""
    dims = tuple(work.tensors[name])
    if layout.cu_seqlens is not None and rank == len(dims) - 1:
        return tuple(dim for dim in dims if dim != "b")
    return dims


def local_axes(work: VariantWork, layout: Layout, name: str, shape: Sequence[int]) -> list[int]:
    """The axes along which one of the variant's own tensors has the rows of this rank alone."""
    if layout.ranks == 1:
        return []
    dims = own_dims(work, layout, name, len(shape))
    rows = [axis for axis, dim in enumerate(dims) if dim in ("q_idx", "kv_idx")]
    return [axis for axis in rows if axis < len(shape) and shape[axis] == layout.local]
