"""The kernels of an op on paged caches, as PyTorch knows them: two custom operators. There is no gradient."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from ..core.options import PAGED_PASSES, Asked
from ..core.paged import WHOLE_ROW, CacheCall
from ..core.paged_calls import check_tables, pages_of_keys
from ..core.paged_decay import BASE, LOCAL
from ..core.row_classes import BALANCED, Splits
from ..core.schedules import Schedule
from ..core.tiles import Tile
from . import backend
from .attention import NAMESPACE
from .dispatch import launches_directly, values_are_checked
from .flops import of_forward, register_flops
from .operators import register_operator
from .paged import (
    check_pages,
    computes_reference,
    gathered,
    paged_schedule,
    plan_tables,
    reference_results,
    with_classes,
)
from .paged_decay import log_decays
from .prompts import check_pointers
from .strides import aligned, empty_like_layout, in_memory
from .transforms import one_by_one

_CALL: dict[str, Any] = {
    "q": Tensor,
    "k": Tensor,
    "v": Tensor,
    "page_table": Tensor | None,
    "page_starts": Tensor | None,
    "kv_lengths": Tensor | None,
    "cu_seqlens_q": Tensor | None,
    "row_offset": int | None,
    "row_offsets": Tensor | None,
    "scale": float,
    "page_size": int,
    "most_keys": int,
    "most_queries": int,
    "splits": str,
    "config": list[int],
    "k_scale": Tensor | None,
    "v_scale": Tensor | None,
    "v_factor": float,
    "family": str,
}
"""The parameters of an operator that describe a call: fields of `CacheCall`, with the rule for splits and the family as
text and tiles as numbers."""


Own = tuple[str | int, ...] | type
"""What one of a variant's own arguments is: the dims of a tensor in a dense call, or the type of a number."""


class PagedKernels:
    """The kernels of a variant on paged caches, and on dense keys that are split.

    Attributes:
        op: the variant, with which error messages begin.
        own: its own tensors and numbers, in the order in which kernels take them. bounds: those that a plan reads.
        forward_op, plan_op: its launches as custom operators, which torch.compile, torch.export and fake tensors see.
    """

    def __init__(
        self,
        *,
        op: str,
        modules: Any,
        reference: Callable[..., Any],
        dense_reference: Callable[..., Any],
        own: Mapping[str, Own] | None = None,
        bounds: Sequence[str] = (),
    ) -> None:
        """`modules` is the package of the kernels, whose `launch` is imported by the first call; `reference` and
        `dense_reference` are the plain references of packed and of dense calls."""
        self.op, self.modules, self.reference, self.dense_reference = op, modules, reference, dense_reference
        self.own, self.bounds = dict(own or {}), tuple(bounds)
        types = {name: kind if isinstance(kind, type) else Tensor for name, kind in self.own.items()}
        name = f"{NAMESPACE}::{op}_paged"
        forward = _signature({**_CALL, "tables": list[Tensor], **types}, tuple[Tensor, Tensor])
        plan = _signature({**_CALL, **{each: types[each] for each in self.bounds}}, list[Tensor])
        self.forward_op = register_operator(f"{name}_fwd", self._forward_of, self._fake_forward, forward, one_by_one)
        register_flops(f"{name}_fwd", list(_CALL), of_forward)
        self.plan_op = register_operator(f"{name}_plan", self._plan_of, self._fake_plan, plan)

    def forward(self, call: CacheCall, schedule: Schedule | None, *own: Any) -> tuple[Tensor, Tensor]:
        """o and lse of a call; `own` are the variant's own arguments, checked."""
        tables = [] if schedule is None else plan_tables(self.op, schedule, call, self._scalars(self.own, own))
        if call.q.is_meta:
            return call.results(backend)
        if _launches_directly(call, own):
            return self._forward(with_classes(self.op, call), tables, own)
        found: tuple[Tensor, Tensor] = self.forward_op(*_given(call), tables, *own)
        return found

    def plan(self, call: CacheCall, *bounds: Any) -> Schedule:
        """A schedule that says how the keys of each sequence are split."""
        scalars = self._scalars(self.bounds, bounds)
        if call.q.is_meta:
            return paged_schedule(self.op, call, scalars, [])
        if _launches_directly(call, bounds):
            return paged_schedule(self.op, call, scalars, self._plan(with_classes(self.op, call), bounds))
        return paged_schedule(self.op, call, scalars, self.plan_op(*_given(call), *bounds))

    def _scalars(self, names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
        """The scalars of the variant among its own arguments."""
        return {name: x for name, x in zip(names, values, strict=True) if isinstance(self.own[name], type)}

    # -------------------------------------------------------------------------------------------------------- launches

    def _forward(self, call: CacheCall, tables: list[Tensor], own: Sequence[Any]) -> tuple[Tensor, Tensor]:
        if computes_reference(call):
            return self._reference(call, own)
        self._check_pages(call, own)
        call, own = _readable(call), [*map(in_memory, own)]
        check_pointers(self.op, call)
        if tables:
            check_tables(self.op, call, tables)
        else:
            tables = self._plan(call, [x for name, x in zip(self.own, own, strict=True) if name in self.bounds])
        found: tuple[Tensor, Tensor] = self.modules.launch.forward(backend, call, tables, *own)
        return found

    def _plan(self, call: CacheCall, bounds: Sequence[Any]) -> list[Tensor]:
        if computes_reference(call):
            return []
        tables: list[Tensor] = self.modules.launch.plan(backend, call, *map(in_memory, bounds))
        return tables

    def _check_pages(self, call: CacheCall, own: Sequence[Any]) -> None:
        """Refuse pages outside the cache that a query sees, if values are checked: kernels would read other memory."""
        table, lengths = call.page_table, call.kv_lengths
        if table is None or lengths is None or not values_are_checked(table):
            return
        # `tolist` calls no operator of torch. A call that does, in order to read values, is not recorded for replay.
        starts = None if call.page_starts is None else call.page_starts.tolist()
        used = pages_of_keys(table.tolist(), starts, lengths.tolist(), call.page_size)
        if any(not 0 <= page < len(call.k) for pages in used for page in pages):
            self._reference(call, own)

    def _dense_reference(self, call: CacheCall, own: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """o and lse of dense keys by the plain reference of dense calls: own tensors have elements for all keys."""
        given = {name: _in_dims(x, self.own[name]) for name, x in zip(self.own, own, strict=True)}
        offset: int | Tensor | None = call.offset
        if call.kv_lengths is not None:
            lengths = call.kv_lengths.clamp(0, call.most_keys)
            key = torch.arange(call.most_keys, device=lengths.device)
            given["kv_segment_ids"] = torch.where(key < lengths[:, None], 0, -1)
            given["q_segment_ids"] = torch.zeros_like(given["kv_segment_ids"][:, :1]).expand(-1, call.q.shape[2])
            offset = lengths - call.q.shape[2] if call.at_end else offset
            if "kv_lengths" in signature(self.dense_reference).parameters:
                given["kv_lengths"] = lengths
        k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
        o, lse = self.dense_reference(call.q, k, v, scale=call.scale, q_offset=offset, return_lse=True, **given)
        return o, lse.float()

    def _reference(self, call: CacheCall, own: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """o and lse by the plain reference."""
        if call.page_table is None:
            return self._dense_reference(call, own)
        if call.num_seqs == 0:
            return call.results(backend)  # of no row; tensors by batch row have no row to read
        packed = gathered(call)
        given = dict(zip(self.own, own, strict=True))
        q, k, v = packed.q, packed.k, packed.v
        decays: dict[str, Tensor] = {}
        if BASE in given:
            # Sums of many tokens have more digits than float32.
            q, k, v = q.double(), k.double(), v.double()
            decays[LOCAL], is_finite = log_decays(packed, given.pop(LOCAL), given.pop(BASE))
            k = k.masked_fill(~is_finite[:, None, None], float("nan"))
        for name, x in given.items():
            dims = self.own[name]
            given[name] = x if isinstance(dims, type) else packed.own(x, *dims)
        given |= decays
        given |= {"scale": call.scale, "return_lse": True, "q_offset": packed.q_offset}
        given |= {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
        o, lse = self.reference(q, k, v, **given)
        if lse.isnan().any() and (packed.number != packed.page).any():
            # Whatever else is not a number must not look like a page beyond the cache.
            clean = k.nan_to_num(0.0, 0.0, 0.0).where((packed.number == packed.page)[:, None, None], k)
            _, marks = self.reference(q.nan_to_num(0.0, 0.0, 0.0), clean, v, **given)
            check_pages(self.op, call, packed, marks)
        is_number = v.isfinite()
        if not is_number.all():
            # A page that no query sees may hold NaN, and zero times NaN is NaN. One more column of values sums the
            # weights of keys with values that are not finite.
            others = (~is_number).any(-1, keepdim=True).to(v.dtype)
            apart, _ = self.reference(q, k, torch.cat([v.where(is_number, 0), others], -1), **given)
            o = o.where(apart[..., -1:] > 0, apart[..., :-1])
        return reference_results(call, o.to(call.q.dtype), lse.float())

    # ------------------------------------------------------------------------------------------------------- operators

    def _forward_of(self, *args: Any) -> tuple[Tensor, Tensor]:
        call = with_classes(self.op, _call(args))
        tables, *own = args[len(_CALL) :]
        o, lse = self._forward(call, tables, own)
        if computes_reference(call):
            # The reference may return views, whose strides differ from those that the trace was told.
            results = call.results(backend)
            return results[0].copy_(o), results[1].copy_(lse)
        return o, lse

    def _plan_of(self, *args: Any) -> list[Tensor]:
        return self._plan(with_classes(self.op, _call(args)), args[len(_CALL) :])

    @staticmethod
    def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _call(args).results(backend)

    def _fake_plan(self, *args: Any) -> list[Tensor]:
        call = with_classes(self.op, _call(args))
        if computes_reference(call):
            return []
        return [table for rows in call.classes for table in call.tables(backend, rows)]


def results_of(
    o: Tensor, lse: Tensor, dtype: torch.dtype, *, swaps: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What an op returns. o is `[B, H, S, D]`; `swaps`: the layout of the call has its heads and queries swapped."""
    o = o.to(dtype)
    if swaps:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _signature(types: Mapping[str, Any], result: Any) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature([Parameter(name, kind, annotation=x) for name, x in types.items()], return_annotation=result)


def _launches_directly(call: CacheCall, own: Sequence[Any]) -> bool:
    """Whether kernels can be launched at once.

    A transform of `torch.func` may wrap any tensor of the call, so that only the custom operator finds its values.
    """
    return launches_directly(*call, *own) and not torch._C._are_functorch_transforms_active()


def _in_dims(x: Any, dims: Own) -> Any:
    """One of the variant's own arguments, its dims in the order of a dense call: the inverse of `in_rows`."""
    if isinstance(dims, type) or dims.count("kv_idx") != 1 or "q_idx" in dims:
        return x
    place = [dim for dim in dims if dim != "b"].index("kv_idx")
    return x.movedim(place, dims.index("b")) if "b" in dims else x.select(place, 0)


def _given(call: CacheCall) -> list[Any]:
    """The arguments of an operator that describe a call."""
    numbers: list[int] = []
    for name, asked in call.config:
        numbers += [PAGED_PASSES.index(name), *asked.tile, -1 if asked.keys_per_split is None else asked.keys_per_split]
    texts = {"splits": "" if call.splits is None else str(call.splits), "family": call.family or ""}
    given = call._asdict() | texts | {"config": numbers}
    return [given[name] for name in _CALL]


def _call(args: Sequence[Any]) -> CacheCall:
    """The inverse of `_given`. The call has no classes of sequences yet."""
    given = dict(zip(_CALL, args[: len(_CALL)], strict=True))
    text = given["splits"]
    splits: Splits = int(text) if text.isdigit() else text or None
    numbers, step = given["config"], len(Tile._fields) + 2
    asked = tuple(
        (PAGED_PASSES[numbers[i]], Asked(Tile(*numbers[i + 1 : i + step - 1]), max(numbers[i + step - 1], 0) or None))
        for i in range(0, len(numbers), step)
    )
    given |= {"splits": splits, "family": given["family"] or None, "config": asked}
    return CacheCall(**given, classes=(), balanced=splits == BALANCED)


def _readable(call: CacheCall) -> CacheCall:
    """A call whose tensors kernels can read: q and dense keys are copied if need be. A cache is read in place."""
    call = call._replace(**{name: in_memory(x) for name, x in call._asdict().items()})
    q, k, v = _readable_rows(call.q), call.k, call.v
    if call.page_size == WHOLE_ROW:
        k, v = (aligned(x.transpose(1, 2)).transpose(1, 2) for x in (k, v))
    return call._replace(q=q, k=k, v=v)


def _readable_rows(q: Tensor) -> Tensor:
    """q, or a copy of it with its axes in the same order in memory, because o gets that order."""
    if q.stride(-1) == 1:
        return q
    return q.contiguous() if q.dim() == 3 else empty_like_layout(q, q.shape[3]).copy_(q)
