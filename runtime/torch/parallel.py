"""Context parallelism: an op over rows that several ranks have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import ArgumentError, fail
from ..core.costs import repeats_of_keys
from ..core.key_needs import planned_needs
from ..core.parallel_calls import TOKENS, check_call, form_of, head_axis, local_axes, own_dims, row_axis
from ..core.shards import Layout, sequences_of
from ..core.work import VariantWork
from .agreement import agree, described
from .collectives import Collectives
from .exchange import KeyExchange, NeededKeyExchange, Rows, Tie, ToHeads, ToRows, Whole, index

LAYOUT = "bhsd"
"""How q, k and v lie by default."""


class ContextParallel:
    """An op over the rows of all ranks. Make it with `context_parallel(op, layout)`."""

    def __init__(
        self,
        op: Callable[..., Any],
        work: VariantWork,
        layout: Layout,
        comm: Collectives,
        check: bool | None,
        sums_gradients: bool,
    ) -> None:
        self.op, self.work, self.layout, self.comm = op, work, layout, comm
        self.check, self.sums_gradients = check, sums_gradients
        self._is_checked = False
        self.__name__ = f"context_parallel({work.op})"
        self.__doc__ = op.__doc__

    def __repr__(self) -> str:
        return f"{self.__name__} by {self.layout.strategy} over {self.layout.ranks} ranks"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # autograd functions that hold what was started
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """The op of q, k and v, each rank's own rows; keywords are those of the op."""
        given = {"q": q, "k": k, "v": v, **keywords}
        problem: Exception | None = None
        try:
            self._refuse(given)
        except (ArgumentError, NotImplementedError) as error:
            problem = error
        if self.check or (self.check is None and not self._is_checked):
            agree(self.comm, self.work.op, described(self.layout, given), problem)
            self._is_checked = True
        if problem is not None:
            raise problem
        call = _Call(self, q, k, v, dict(keywords))
        return call.by_heads() if self.layout.strategy == "heads" else call.by_gathering()

    # --------------------------------------------------------------------------------------------------------- checks

    def _refuse(self, given: Mapping[str, Any]) -> None:
        """Raise an error of arguments that no rank can compute with, before anything is sent."""
        op, layout = self.work.op, self.layout
        for name in ("q", "k", "v"):
            if not isinstance(given[name], Tensor):
                fail(op, name, "a tensor", type(given[name]).__name__)
        check_call(self.work, layout, list(inspect.signature(self.op).parameters), given, LAYOUT)
        q = given["q"]
        for name in ("k", "v"):
            x = given[name]
            if x.dtype != q.dtype or x.device != q.device:
                fail(op, name, f"{q.dtype} on {q.device}, as q", f"{x.dtype} on {x.device}")
        self._whole_call(given)

    def _whole_call(self, given: Mapping[str, Any]) -> None:
        """Let the op check the call as one GPU would make it, without values."""
        layout = self.layout
        rows = row_axis(form_of(layout, given, LAYOUT))

        def whole(name: str, x: Tensor) -> Tensor:
            axes = [rows] if name in ("q", "k", "v") else [1] if name in TOKENS else []
            if name in self.work.tensors:
                axes = local_axes(self.work, layout, name, x.shape)
            sizes = [layout.seq if axis in axes else size for axis, size in enumerate(x.shape)]
            return torch.empty(sizes, dtype=x.dtype, device="meta")

        call = {name: whole(name, x) if isinstance(x, Tensor) and x.dim() else x for name, x in given.items()}
        if layout.cu_seqlens is not None:
            call["cu_seqlens_q"] = torch.empty(len(layout.cu_seqlens), dtype=torch.int32, device="meta")
        with torch.no_grad():
            self.op(**call)


class _Call:
    """One call: its tensors with rows on axis 0, `[rows, B, H, D]`, and what the op is called with beside them."""

    def __init__(self, parallel: ContextParallel, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> None:
        self.parallel, self.layout, self.comm = parallel, parallel.layout, parallel.comm
        self.packed = self.layout.cu_seqlens is not None
        self.form = form_of(self.layout, keywords, LAYOUT)
        self.wants_lse = keywords.pop("return_lse", False)
        keywords.pop("q_offset", None)
        self.device = q.device
        self.q, self.k, self.v = (rows_first(x, self.form) for x in (q, k, v))
        self.tokens = {name: keywords.pop(name) for name in TOKENS if keywords.get(name) is not None}
        if self.layout.segment_ids is not None and "q_segment_ids" not in self.tokens:
            ids = index(self.layout, "segment_ids", self.device).to(torch.int32)
            batch = self.q.shape[1]
            self.ids: Tensor | None = ids.expand(batch, -1) if ids.dim() == 1 or ids.shape[0] == 1 else ids
        else:
            self.ids = None
        own = {name: keywords.pop(name) for name in parallel.work.tensors if keywords.get(name) is not None}
        self.own = {name: self._whole(name, x) for name, x in own.items()}
        self.keywords = keywords

    def _whole(self, name: str, x: Any) -> Any:
        """One of the variant's own tensors, with the rows of all ranks."""
        if not isinstance(x, Tensor) or self.layout.ranks == 1:
            return x
        local = local_axes(self.parallel.work, self.layout, name, x.shape)
        for axis in local:
            x = Rows.apply(self.comm, self.layout, x.movedim(axis, 0).contiguous()).movedim(0, axis)
        if not local and x.requires_grad and self.parallel.sums_gradients:
            x = Whole.apply(self.comm, x)
        return x

    def _dims(self, name: str, x: Tensor) -> tuple[str | int, ...]:
        return own_dims(self.parallel.work, self.layout, name, x.dim())

    def _whole_tokens(self) -> dict[str, Tensor]:
        """Ids and positions of the rows of all ranks, `[B, seq]`, of queries and keys."""
        found = {name: Rows.apply(self.comm, self.layout, x.t().contiguous()).t() for name, x in self.tokens.items()}
        if self.ids is not None:
            found["q_segment_ids"] = self.ids
        return found

    def _of_heads(self, first: int, count: int, repeats: int = 1) -> dict[str, Any]:
        """The variant's own tensors for some key heads, of which each was repeated so often."""
        query_heads, key_heads = self.q.shape[2], self.k.shape[2] * repeats
        group = query_heads // key_heads
        found = {}
        for name, x in self.own.items():
            if isinstance(x, Tensor) and count < key_heads:
                for axis, dim in enumerate(self._dims(name, x)):
                    if dim == "h" and x.shape[axis] == query_heads:
                        x = x.narrow(axis, first * group, count * group)
                    elif dim == "hkv" and x.shape[axis] == key_heads // repeats:
                        x = x.repeat_interleave(repeats, axis).narrow(axis, first, count)
            found[name] = x
        return found

    # ---------------------------------------------------------------------------------------------------------- heads

    def by_heads(self) -> Any:
        """Rows of all heads become heads of all rows, and back."""
        repeats = repeats_of_keys((self.q.shape[2], self.k.shape[2]), self.comm.size)
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, 2) for x in (self.k, self.v))
        q, k, v = ToHeads.apply(self.comm, self.layout, self.q, k, v)
        keywords = {**self.keywords, **self._of_heads(self.comm.rank * k.shape[2], k.shape[2], repeats)}
        keywords |= self._whole_tokens()
        if self.packed:
            keywords["cu_seqlens_q"] = self._begins(self.layout.cu_seqlens)
        o, lse = self._split(self.parallel.op(*(in_form(x, self.form) for x in (q, k, v)), **self._asked(keywords)))
        (o_rows,) = ToRows.apply(self.comm, self.layout, rows_first(o, self.form))
        o = in_form(o_rows, self.form)
        if lse is None:
            return o
        (lse_rows,) = ToRows.apply(self.comm, self.layout, lse_first(lse, self.packed))
        rows = sum(length for _, length in self.layout.runs(self.comm.rank))
        return o, self._pad(lse_in_form(lse_rows, self.packed)[..., :rows], -1, float("-inf"))

    # --------------------------------------------------------------------------------------------------------- gather

    def by_gathering(self) -> Any:
        """The rows of this rank against the keys of all."""
        runs = self.layout.runs(self.comm.rank)
        key_heads = self.k.shape[2]
        groups = self.layout.head_groups if key_heads % self.layout.head_groups == 0 else 1
        groups = groups if self.parallel.work.by_heads else 1
        given = {**self.keywords, **self.own, **self.tokens}
        needs = planned_needs(self.layout, self.parallel.work, given, knows_values=True)
        if needs is None:
            exchange = KeyExchange(self.comm, self.layout, groups, self.k, self.v)
        else:
            exchange = NeededKeyExchange(self.comm, self.layout, groups, self.k, self.v, needs)
        tokens = self._whole_tokens()
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in tokens:
                tokens.setdefault(of_keys, tokens[of_queries])
        per_group = key_heads // groups
        outputs, sums = [], []
        for group, q in enumerate(self.q.chunk(groups, 2)):
            keys = exchange.keys(group, max(len(runs), 1))
            own = self._of_heads(group * per_group, per_group)
            found = [
                self._run(q, keys[2 * i], keys[2 * i + 1], own, tokens, at, run)
                for i, (at, run) in enumerate(zip(_starts(runs), runs, strict=True))
            ]
            o, lse = self._joined(found) if found else self._no_rows(q, keys, own)
            outputs.append(o)
            sums += [] if lse is None else [lse]
        o = outputs[0] if groups == 1 else torch.cat(outputs, head_axis(self.form))
        if not self.wants_lse:
            return o
        return o, sums[0] if groups == 1 else torch.cat(sums, 0 if self.packed else 1)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: Mapping[str, Any],
        tokens: Mapping[str, Tensor],
        at: int,
        run: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        """One run of rows, `at` which they begin here, against all keys."""
        begin, length = run
        keywords = {**self.keywords, **own}
        if self.packed:
            begins, offsets = sequences_of(self.layout, begin, length)
            keywords["cu_seqlens_q"] = self._begins(begins)
            keywords["cu_seqlens_k"] = self._begins(self.layout.cu_seqlens)
            keywords["q_offset"] = self._begins(offsets)
            for name, x in own.items():
                if isinstance(x, Tensor) and name != "g":
                    for axis, dim in enumerate(self._dims(name, x)):
                        if dim == "q_idx":
                            x = x.narrow(axis, begin, length)
                    keywords[name] = x
        else:
            if "q_positions" not in tokens:
                keywords["q_offset"] = begin
            for name, x in tokens.items():
                keywords[name] = x if name.startswith("kv") else x.narrow(1, begin, length)
        rows = q.narrow(0, at, length)
        return self._split(self.parallel.op(*(in_form(x, self.form) for x in (rows, k, v)), **self._asked(keywords)))

    def _joined(self, found: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """The runs of this rank one behind the other, and padding."""
        axis = row_axis(self.form)
        o = self._pad(_cat([o for o, _ in found], axis), axis, 0.0)
        if not self.wants_lse:
            return o, None
        return o, self._pad(_cat([lse for _, lse in found if lse is not None], -1), -1, float("-inf"))

    def _no_rows(self, q: Tensor, keys: Sequence[Tensor], own: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The results of a rank that has padding alone."""
        k, v = keys
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        trained = [x for x in (q, k, v, *own.values()) if isinstance(x, Tensor) and x.requires_grad]
        o = in_form(Tie.apply(o, *trained) if trained else o, self.form)
        lse = q.new_full((*q.shape[:3], 1), float("-inf"), dtype=torch.float32)
        return o, lse_in_form(lse, self.packed)

    def _pad(self, x: Tensor, axis: int, value: float) -> Tensor:
        missing = self.layout.local - x.shape[axis]
        if missing == 0:
            return x
        sizes = list(x.shape)
        sizes[axis] = missing
        return torch.cat([x, x.new_full(sizes, value)], axis)

    # --------------------------------------------------------------------------------------------------------- the op

    def _begins(self, numbers: Any) -> Tensor:
        """Numbers of a layout on the device of this call, copied there once."""
        cache = self.layout.__dict__.setdefault("_tables", {})
        key = (tuple(numbers), self.device)
        if key not in cache:
            cache[key] = torch.tensor(key[0], dtype=torch.int32, device=self.device)
        found: Tensor = cache[key]
        return found

    def _asked(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {**keywords, "return_lse": True} if self.wants_lse else keywords

    def _split(self, found: Any) -> tuple[Tensor, Tensor | None]:
        return found if self.wants_lse else (found, None)


def _starts(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Where each run begins among the rows of its rank."""
    starts = [0]
    for _, length in runs[:-1]:
        starts.append(starts[-1] + length)
    return starts[: len(runs)]


def _cat(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


# ------------------------------------------------------------------------------------------------- tensors, rows first


def rows_first(x: Tensor, form: str) -> Tensor:
    """q, k, v or o as `[rows, B, H, D]`, a view."""
    if form == "packed":
        return x.unsqueeze(1)
    return x.permute(2, 0, 1, 3) if form == "bhsd" else x.transpose(0, 1)


def in_form(x: Tensor, form: str) -> Tensor:
    """The inverse."""
    if form == "packed":
        return x.squeeze(1)
    return x.permute(1, 2, 0, 3) if form == "bhsd" else x.transpose(0, 1)


def lse_first(x: Tensor, packed: bool) -> Tensor:
    """lse as `[rows, B, H, 1]`, a view."""
    return x.t()[:, None, :, None] if packed else x.permute(2, 0, 1).unsqueeze(3)


def lse_in_form(x: Tensor, packed: bool) -> Tensor:
    """The inverse."""
    return x[:, 0, :, 0].t() if packed else x.squeeze(3).permute(1, 2, 0)
