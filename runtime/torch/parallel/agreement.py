"""Checks that all ranks gave a call the same arguments. An error on one rank is raised on all, so that none waits."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.checks import ArgumentError, fail
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork
from .collectives import Collectives

_FIELDS = ("ranks", "seq", "heads", "head_dim", "cu_seqlens", "segments_digest", "strategy", "head_groups")
_TABLES = ("chunks", "needs")
"""What a layout computes with. Estimates are no part of it: their last bits may differ on hosts with other CPUs."""

_LONGEST = 100
"""Longer texts are compared, and told, by a digest."""


def described(layout: Layout, work: VariantWork, given: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal on all ranks: the layout, and the dtype and shape of each tensor, or a number's value."""
    texts = {name: _text(value, is_number=name not in work.tensors) for name, value in sorted(given.items())}
    return {f"{name} of the layout": _short(text) for name, text in _fields(layout).items()} | texts


def _fields(layout: Layout) -> dict[str, str]:
    found = {name: repr(getattr(layout, name)) for name in (*_FIELDS, *_TABLES)}
    return found if layout.nodes is None else found | {"nodes": repr(_fields(layout.nodes))}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"one with the digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _text(value: Any, *, is_number: bool) -> str:
    """is_number: a tensor `[]` is a number of the variant, on the CPU; else it is one of its tensors."""
    if not isinstance(value, Tensor):
        return repr(value)
    if is_number and value.dim() == 0 and value.device.type == "cpu":
        return repr(value.item())
    trained = ", requires grad" if value.requires_grad else ""
    return f"{value.dtype} {list(value.shape)}{trained}"


def agree(comm: Collectives, op: str, mine: Mapping[str, str], problem: Exception | None) -> None:
    """Raise an error on every rank if one of them has a problem, or if their arguments differ."""
    told = comm.gather_objects((dict(mine), None if problem is None else f"{type(problem).__name__}: {problem}"))
    for rank, (_, text) in enumerate(told):
        if text is not None:
            if problem is not None:
                raise problem
            raise ArgumentError(f"{op}: rank {rank} raised {text}")
    first = told[0][0]
    for rank, (theirs, _) in enumerate(told):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                got = f"{theirs.get(name, 'nothing')} on rank {rank}"
                fail(op, name, f"the same on every rank, {first.get(name, 'nothing')} as on rank 0", got)
