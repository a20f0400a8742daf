# SPDX-License-Identifier: Apache-2.0
"""Arguments of `plan`, checked before any work is counted."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from ..checks import check_float, check_int, fail, in_range, range_text
from .costs import Machine
from .work import Array, VariantWork, on_host


def check_count(argument: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A positive integer argument of a plan."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not in_range(value, least, most):
        fail("plan", argument, f"an int{range_text(least, most)}", repr(value))
    return int(value)


def check_begins(cu_seqlens: Any, seq: int) -> tuple[int, ...]:
    """Where packed sequences begin, checked: ints from 0 to `seq` that never decrease."""
    found = _integers("cu_seqlens", cu_seqlens)
    fits = found.ndim == 1 and len(found) > 1 and np.issubdtype(found.dtype, np.integer)
    if not fits or found[0] != 0 or found[-1] != seq or (np.diff(found) < 0).any():
        expected = f"integers [n + 1] from 0 to seq = {seq} that never decrease"
        got = repr(cu_seqlens) if found.size < 10 else f"shape {list(found.shape)}"
        fail("plan", "cu_seqlens", expected, got)
    return tuple(found.tolist())


def check_segments(segment_ids: Any, seq: int) -> Array:
    """Ids of documents, checked: integers `[S]` or `[B, S]` that int32 holds, the dtype of a call's ids."""
    found = _integers("segment_ids", segment_ids)
    fits = found.ndim in (1, 2) and found.shape[-1] == seq and found.size
    if not fits or not np.issubdtype(found.dtype, np.integer):
        fail("plan", "segment_ids", f"integers [{seq}] or [B, {seq}]", f"{found.dtype} {list(found.shape)}")
    lost = found[found.astype(np.int32) != found]
    if lost.size:
        fail("plan", "segment_ids", "values that int32 holds", lost[0])
    return found


def _integers(argument: str, x: Any) -> Array:
    """An array on the host; an empty one if rows have different lengths."""
    _check_known(argument, x)
    try:
        return on_host(x)
    except ValueError:
        return np.zeros(0)


def check_ranks(ranks: Any, strategy: str, machine: Machine) -> tuple[int, int]:
    """The number of nodes and of the ranks of a node; for a mesh of one dim, each rank is a node of one rank."""
    if isinstance(ranks, tuple):
        grid = check_count("nodes", ranks[0]), check_count("ranks of a node", ranks[1])
        if strategy not in ("auto", "2d"):
            fail("plan", "strategy", "'2d' or 'auto' for nodes and their ranks; else a mesh of one dim", repr(strategy))
        return grid
    ranks = check_count("mesh", ranks)
    if strategy == "2d":
        expected = "a mesh of two dims, or (nodes, ranks of a node), beside strategy='2d'"
        fail("plan", "mesh", expected, f"{ranks} ranks; nodes have {machine.node}")
    return ranks, 1


def check_heads(heads: Any) -> tuple[int, int]:
    """The numbers of query heads and of key heads."""
    pair = isinstance(heads, tuple) and len(heads) == 2
    if not pair or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in heads) or heads[0] % heads[1]:
        fail("plan", "heads", "(query heads, key heads), the first a multiple of the second", repr(heads))
    return heads[0], heads[1]


def check_masks(masks: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """The ops of `masks=`, each with its arguments."""
    found = list(masks) if isinstance(masks, Sequence) else []
    pairs = [each for each in found if isinstance(each, (tuple, list)) and len(each) == 2]
    if not found or len(pairs) < len(found) or not all(isinstance(own, Mapping) for _, own in pairs):
        fail("plan", "masks", "at least one pair (op, its arguments), in a sequence", repr(masks))
    return [(op, own) for op, own in pairs]


def check_own(op: Any, work: VariantWork, given: Mapping[str, Any], seq: int) -> None:
    """Refuse arguments that the op does not have, such as a misspelt option of the plan, and what no mask can read."""
    known = signature(op).parameters if callable(op) else dict.fromkeys((*work.needs, *work.tensors))
    for name, x in given.items():
        if name not in known:
            reads = ", ".join(work.needs) or "nothing"
            fail("plan", name, f"an option of plan or an argument of {work.op}, whose mask reads {reads}", repr(x)[:60])
        if x is not None and name in work.scalars:
            _check_scalar(work, name, x)
        elif x is not None and name in work.needs:
            _check_tensor(work, name, x, seq)


def _check_scalar(work: VariantWork, name: str, x: Any) -> None:
    """Check a number as the op does."""
    kind, limits = work.scalars[name]
    argument = f"{work.op}: {name}"
    if _shape(x) == ():
        _check_known(argument, x)
        x = on_host(x).item()
    (check_int if kind == "int" else check_float)("plan", argument, x, **limits)


def _check_tensor(work: VariantWork, name: str, x: Any, seq: int) -> None:
    """Refuse what is no array, and an array without values, without the dims or without the rows of the whole call."""
    dims, shape, argument = work.tensors[name], _shape(x), f"{work.op}: {name}"
    forms = dims, tuple(dim for dim in dims if dim != "b")
    taken = next((form for form in forms if shape is not None and len(shape) == len(form)), None)
    if shape is None or taken is None:
        expected = " or ".join(f"[{', '.join(map(str, form))}]" for form in dict.fromkeys(forms))
        fail("plan", argument, f"an array {expected}", repr(x)[:60] if shape is None else f"shape {list(shape)}")
    _check_known(argument, x)
    rows = [size for dim, size in zip(taken, shape, strict=True) if dim in ("q_idx", "kv_idx")]
    if rows and min(rows) < seq:
        fail("plan", argument, f"at least {seq} rows, those of all ranks", f"shape {list(shape)}")


def _check_known(argument: str, x: Any) -> None:
    """Refuse an array without values: a meta tensor of torch, or an array that JAX traces."""
    if getattr(x, "is_meta", False):
        fail("plan", argument, "an array with values", f"a meta tensor {list(x.shape)}")
    if type(x).__name__.endswith("Tracer"):
        fail("plan", argument, "an array with values", f"a traced array {list(x.shape)}")


def _shape(x: Any) -> tuple[int, ...] | None:
    """The shape of a number, an array or a list of numbers; None for anything else."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    try:
        found = np.asarray(x)
    except ValueError:  # rows of different lengths
        return None
    return found.shape if found.dtype.kind in "biuf" else None


def check_groups(head_groups: Any, heads: tuple[int, int], inner: int) -> int:
    """The number of groups of a rank's key heads."""
    groups, each = check_count("head_groups", head_groups), max(heads[1] // inner, 1)
    if each % groups:
        fail("plan", "head_groups", f"a divisor of {each} key heads", groups)
    return groups
