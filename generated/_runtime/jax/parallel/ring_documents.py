# SPDX-License-Identifier: Apache-2.0
"""A ring over packed documents that are computed separately: the batch rows of a call are documents.

Documents with runs of similar sizes share a call. With dropout each document takes its own call, one after the other,
because dropout counts the rows and keys of a call from one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.options import LENGTHS
from ...core.parallel.calls import own_dims
from ...core.parallel.ring_documents import DocumentCalls, RunTable, document_calls
from ..sharding import varying_alike
from .ring import Arrays, Ring, RingPair

State = Any
"""The arrays that calls update one after the other: o and lse, or gradients."""


class Runs(NamedTuple):
    """The runs of rows, or of keys, of some calls on this device, int32 `[calls]`: a rank's part of a `RunTable`."""

    at: jax.Array
    position: jax.Array
    ahead: jax.Array
    length: jax.Array

    @classmethod
    def of(cls, table: RunTable, rank: jax.Array) -> "Runs":
        return cls(*(jnp.asarray(x)[rank] for x in (table.at, table.position, table.ahead, table.length)))

    @property
    def begin(self) -> jax.Array:
        """The position of the first row of each call."""
        return self.position - self.ahead


class Slots(NamedTuple):
    """Some calls of a device: the document, the run of rows and the run of keys of each."""

    documents: jax.Array
    rows: Runs
    keys: Runs


@dataclass(frozen=True, kw_only=True)
class DocumentsPair(RingPair):
    """A call whose batch rows are documents.

    Attributes:
        documents: their numbers `[B]`. starts: their first rows in the whole call `[B]`.
        reach: this many rows of a document, from the call's first key on, include all rows and keys of the call.
    """

    documents: jax.Array
    starts: jax.Array
    reach: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentRing(Ring):
    """A call by a ring over packed documents that are computed separately."""

    # -------------------------------------------------------------------------------------------------- the two passes

    def _forward(self, trained: Arrays, fixed: Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v = (trained[name] for name in ("q", "k", "v"))
        zeros = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32)
        _, *sums = varying_alike((q, zeros, self._no_lse(q)))
        state: State = tuple(sums)
        for step in range(self.steps.count):
            for calls in self._calls[step]:
                state = self._each(calls, partial(self._merge_calls, calls, (q, k, v), trained, fixed), state)
            if step < self.steps.count - 1:
                k, v = (self._sent(x, 1) for x in (k, v))
        o, lse = state
        return o.astype(q.dtype), lse

    def _merge_calls(
        self,
        calls: DocumentCalls,
        tensors: tuple[jax.Array, ...],
        trained: Arrays,
        fixed: Arrays,
        state: State,
        slots: Slots,
    ) -> State:
        """o and lse of all rows, after merging the results of some calls. tensors: q, and k and v of the step."""
        (o, lse), (q, k, v) = state, tensors
        rows, keys = self._places(calls, slots)
        part = self._compute(
            self._pair(calls, slots), _taken(q, rows), _taken(k, keys), _taken(v, keys), trained, fixed
        )
        found, found_lse = self._merged(_taken(o, rows), _taken_sums(lse, rows, -jnp.inf), *part)
        put: dict[str, Any] = {"mode": "drop", "unique_indices": True}
        return o.at[0, rows].set(found, **put), lse.at[0, :, rows].set(found_lse.swapaxes(1, 2), **put)

    def _backward(
        self, trained: Arrays, fixed: Arrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
    ) -> dict[str, jax.Array]:
        # Without a barrier XLA would keep the keys of every step of the forward, instead of sending them again.
        q, k, v, do = jax.lax.optimization_barrier((*(trained[name] for name in ("q", "k", "v")), do))
        own = {name: x for name, x in trained.items() if name not in ("q", "k", "v")}
        state: State = {name: varying_alike((q, jnp.zeros(x.shape, jnp.float32)))[1] for name, x in trained.items()}
        for step in range(self.steps.count):
            if step:
                state |= {name: self._sent(state[name], 1) for name in ("k", "v")}
            for calls in self._calls[step]:
                of_rows = (q, o, do, lse, dlse)
                state = self._each(calls, partial(self._add_gradients, calls, (k, v), of_rows, own, fixed), state)
            if step < self.steps.count - 1:
                k, v = (self._sent(x, 1) for x in (k, v))
        state |= {name: self._sent(state[name], 1 - self.steps.count) for name in ("k", "v")}
        return {name: x.astype(trained[name].dtype) for name, x in state.items()}

    def _add_gradients(
        self,
        calls: DocumentCalls,
        of_keys: tuple[jax.Array, ...],
        of_rows: tuple[jax.Array, ...],
        own: Arrays,
        fixed: Arrays,
        state: State,
        slots: Slots,
    ) -> State:
        """The gradients so far plus those of some calls. of_keys: k and v of the step. of_rows: q, o, do, lse, dlse."""
        rows, keys = self._places(calls, slots)
        k, v = (_taken(x, keys) for x in of_keys)
        q, o, do = (_taken(x, rows) for x in of_rows[:3])
        lse, dlse = _taken_sums(of_rows[3], rows, jnp.inf), _taken_sums(of_rows[4], rows, 0.0)
        *found, changes = self._derive(self._pair(calls, slots), own, fixed, (q, k, v, o, do, lse, dlse))
        parts = zip(("q", "k", "v"), (rows, keys, keys), found, strict=True)
        added = {name: state[name].at[0, places].add(x, mode="drop", unique_indices=True) for name, places, x in parts}
        return added | {name: state[name] + x for name, x in changes.items()}

    @cached_property
    def _calls(self) -> list[list[DocumentCalls]]:
        """The calls of each step."""
        has_sink = "sink" in self.work.tensors
        return [
            document_calls(self.layout, self.steps, step, drops=self.drops, at_once=not self._apart, has_sink=has_sink)
            for step in range(self.steps.count)
        ]

    @cached_property
    def _apart(self) -> bool:
        """Whether each document takes its own call: with dropout, or if batch rows share a tensor with rows or keys."""
        return self.drops or any(
            self.work.axes(name, "q_idx", "kv_idx") and not self.work.axes(name, "b") for name in self.work.tensors
        )

    def _each(self, calls: DocumentCalls, add: Callable[[State, Slots], State], state: State) -> State:
        """The state after `add` for all calls at once, or for one call after the other.

        A device skips calls that it does not have.
        """
        rank = jax.lax.axis_index(self.axis)
        slots = Slots(jnp.asarray(calls.documents)[rank], Runs.of(calls.rows, rank), Runs.of(calls.keys, rank))
        there = calls.rows.length > 0
        if not self._apart:
            some = there.any(axis=1)
            return _where(None if some.all() else jnp.asarray(some)[rank], add, state, slots)

        def one(state: State, slot: Slots) -> tuple[State, None]:
            return _where(None if there.all() else slot.rows.length[0] > 0, add, state, slot), None

        # A scan over a single call amounts to that call.
        found, _ = jax.lax.scan(one, state, jax.tree.map(lambda x: x[:, None], slots))
        return found

    # -------------------------------------------------------------------------------------------------------- one call

    def _keywords(self, pair: RingPair, batch: int, own: Arrays, fixed: Arrays) -> dict[str, Any]:
        # The documents of a call are its batch rows, and need no length of the longest.
        found = super()._keywords(pair, batch, own, fixed)
        return {name: x for name, x in found.items() if name not in LENGTHS}

    def _pair(self, calls: DocumentCalls, slots: Slots) -> DocumentsPair:
        """The sizes and positions of the call of some slots."""
        bounds = jnp.asarray(self.layout.cu_seqlens, jnp.int32)
        starts, ends = bounds[slots.documents], bounds[slots.documents + 1]
        begin, first = slots.rows.begin, slots.keys.begin
        tokens = {}
        if not self.by_offset:
            tokens["q_positions"] = begin[:, None] + jnp.arange(calls.rows.count, dtype=jnp.int32)[None]
            tokens["kv_positions"] = first[:, None] + jnp.arange(calls.keys.count, dtype=jnp.int32)[None]
        return DocumentsPair(
            begin=begin,
            first=first,
            rows=calls.rows.count,
            keys=calls.keys.count,
            ahead=slots.keys.ahead,
            length=slots.keys.length,
            is_ahead=bool(calls.keys.ahead.any()),
            is_cut=not calls.keys.are_full,
            ends=slots.keys.position + slots.keys.length,
            lengths=ends - starts,
            is_own=calls.is_own,
            tokens=tokens,
            document=slots.documents[0] if self._apart else 0,
            documents=slots.documents,
            starts=starts,
            reach=calls.reach,
        )

    def _places(self, calls: DocumentCalls, slots: Slots) -> tuple[jax.Array, jax.Array]:
        """The device's row for each query of the calls, and for each key: `[calls, rows]` each."""
        return (
            _places(slots.rows, calls.rows.count, self.layout.local),
            _places(slots.keys, calls.keys.count, self.layout.local),
        )

    def _moved_own(self, name: str, x: jax.Array, pair: DocumentsPair) -> jax.Array:
        dims, declared = own_dims(self.work, self.layout, name, x.ndim), self.work.tensors[name]
        if not self.work.axes(name, "b", "q_idx", "kv_idx"):
            return x

        def of_document(document: jax.Array, start: jax.Array, begin: jax.Array, first: jax.Array) -> jax.Array:
            found = x
            for axis, dim in enumerate(dims):
                if dim in ("q_idx", "kv_idx"):
                    of_keys = self.by_offset or dim == "kv_idx"
                    count = pair.reach if self.by_offset else pair.keys if of_keys else pair.rows
                    rows = start + (first if of_keys else begin) + jnp.arange(count, dtype=jnp.int32)
                    # No pair that the mask keeps reads the zeros after the last row.
                    found = jnp.take(found, rows, axis, mode="fill", fill_value=0)
            if "b" not in dims:
                return found
            element: jax.Array = jax.lax.dynamic_index_in_dim(found, document, dims.index("b"), keepdims=False)
            return element

        found: jax.Array = jax.vmap(of_document)(pair.documents, pair.starts, pair.begin, pair.first)
        whole: jax.Array = jnp.moveaxis(found, 0, list(declared).index("b")) if "b" in declared else found[0]
        return whole


def _where(is_here: jax.Array | None, add: Callable[[State, Slots], State], state: State, slots: Slots) -> State:
    return add(state, slots) if is_here is None else jax.lax.cond(is_here, add, lambda state, _: state, state, slots)


def _places(runs: Runs, count: int, local: int) -> jax.Array:
    """The device's row for each of `count` rows of the calls, `[calls, count]`.

    Padding rows get distinct numbers after the device's last row, so that the indices of a scatter stay unique.
    """
    own = jnp.arange(count, dtype=jnp.int32)[None] - runs.ahead[:, None]
    behind = local + jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
    return jnp.where((own >= 0) & (own < runs.length[:, None]), runs.at[:, None] + own, behind)


def _taken(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rows of `[1, local, ...]` at these places, 0 for padding: `[calls, count, ...]`."""
    return jnp.take(x[0], places, 0, mode="fill", fill_value=0)


def _taken_sums(x: jax.Array, places: jax.Array, value: float) -> jax.Array:
    """Columns of `[1, H, local]` at these places, `value` for padding: `[calls, H, count]`."""
    return jnp.take(x[0], places, 1, mode="fill", fill_value=value).swapaxes(0, 1)
