# SPDX-License-Identifier: Apache-2.0
"""A ring over dense rows: a call for each pair of chunks of rows and of keys.

Packed rows are one batch row with segment ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.checks import DROPOUT_KEYS, DROPOUT_ROWS
from ...core.parallel.calls import TOKENS, own_dims, row_axis
from ..ahead import Ahead
from ..sharding import varying_alike
from .ring import Arrays, Ring, RingPair


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkRing(Ring):
    """A call by a ring in which the rows of every device are chunks of the same lengths."""

    def _all_tokens(self, tokens: Arrays, batch: int) -> dict[str, jax.Array]:
        """Ids and positions of all rows, as queries and as keys, with padding: `[B, padded]`, and more with dropout."""
        layout, found = self.layout, dict(tokens)
        if layout.cu_seqlens is not None:
            found["q_segment_ids"] = jnp.asarray(layout.sequence_numbers, jnp.int32)[None]
        if not self.by_offset and "q_positions" not in found:
            found["q_positions"] = jnp.asarray(layout.row_positions, jnp.int32)[None]
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in found:
                found.setdefault(of_keys, found[of_queries])
        more = layout.padded - layout.seq + (DROPOUT_KEYS if self.drops else 0)
        return {name: _continued(name, jnp.broadcast_to(x, (batch, layout.seq)), more) for name, x in found.items()}

    # -------------------------------------------------------------------------------------------------- the two passes

    def _forward(self, trained: Arrays, fixed: Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v = (trained[name] for name in ("q", "k", "v"))
        parts = self._cut(q)
        sums: list[Any] = [
            varying_alike((q, jnp.zeros((*x.shape[:-1], v.shape[-1]), jnp.float32), self._no_lse(x)))[1:] for x in parts
        ]
        for step in range(self.steps.count):
            ks, vs = self._cut(k), self._cut(v)
            for i, j, visited in self._pairs(step):
                compute = self._computing(step, i, j, trained, fixed)
                part = self._where(visited, compute, (parts[i], ks[j], vs[j]), lse=-jnp.inf)
                sums[i] = self._merged(*sums[i], *part)
            if step < self.steps.count - 1:
                k, v = (self._sent(x, 1) for x in (k, v))
        o = jnp.concatenate([o for o, _ in sums], row_axis(self.form)).astype(q.dtype)
        return o, jnp.concatenate([lse for _, lse in sums], 2)

    def _backward(
        self, trained: Arrays, fixed: Arrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
    ) -> dict[str, jax.Array]:
        # Without a barrier XLA would keep the keys of every step of the forward, instead of sending them again.
        q, k, v, do = jax.lax.optimization_barrier((*(trained[name] for name in ("q", "k", "v")), do))
        own = {name: x for name, x in trained.items() if name not in ("q", "k", "v")}
        rows = [self._cut(x) for x in (q, o, do)]
        sums = [self._cut(x, 2) for x in (lse, dlse)]
        zeros = {name: varying_alike((q, jnp.zeros(x.shape, jnp.float32)))[1] for name, x in trained.items()}
        dq, dk, dv = (zeros.pop(name) for name in ("q", "k", "v"))
        dqs, total = self._cut(dq), zeros
        for step in range(self.steps.count):
            if step:
                dk, dv = (self._sent(x, 1) for x in (dk, dv))
            ks, vs, dks, dvs = (self._cut(x) for x in (k, v, dk, dv))
            for i, j, visited in self._pairs(step):
                derive = self._deriving(step, i, j, own, fixed)
                operands = (rows[0][i], ks[j], vs[j], rows[1][i], rows[2][i], sums[0][i], sums[1][i])
                found = self._where(visited, derive, operands)
                dqs[i], dks[j], dvs[j] = (x + y for x, y in zip((dqs[i], dks[j], dvs[j]), found[:3], strict=True))
                total = {name: x + found[3][name] for name, x in total.items()}
            dk, dv = (jnp.concatenate(x, row_axis(self.form)) for x in (dks, dvs))
            if step < self.steps.count - 1:
                k, v = (self._sent(x, 1) for x in (k, v))
        dk, dv = (self._sent(x, 1 - self.steps.count) for x in (dk, dv))
        found = {"q": jnp.concatenate(dqs, row_axis(self.form)), "k": dk, "v": dv, **total}
        return {name: x.astype(trained[name].dtype) for name, x in found.items()}

    def _computing(self, step: int, i: int, j: int, trained: Arrays, fixed: Arrays) -> Callable[..., Any]:
        """A function for the call of a pair of chunks in a step. It returns o, in float32, and lse."""

        def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            of_rows, of_keys, rows = *self._aheads(step, i, j), row_axis(self.form)
            q, k, v = of_rows.widened(q, rows), of_keys.widened(k, rows), of_keys.widened(v, rows)
            o, lse = self._compute(self._pair(step, i, j, len(q), fixed), q, k, v, trained, fixed)
            return of_rows.own(o, rows), of_rows.own(lse, 2)

        return compute

    def _deriving(self, step: int, i: int, j: int, own: Arrays, fixed: Arrays) -> Callable[..., Any]:
        """A function for the gradients of that call, of q, k, v and of the variant's own tensors, in float32."""

        def derive(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            o: jax.Array,
            do: jax.Array,
            lse: jax.Array,
            dlse: jax.Array,
        ) -> Any:
            of_rows, of_keys, rows = *self._aheads(step, i, j), row_axis(self.form)
            k, v = (of_keys.widened(x, rows) for x in (k, v))
            q, o, do = (of_rows.widened(x, rows) for x in (q, o, do))
            lse, dlse = of_rows.widened(lse, 2, jnp.inf), of_rows.widened(dlse, 2)
            pair = self._pair(step, i, j, len(q), fixed)
            dq, dk, dv, changes = self._derive(pair, own, fixed, (q, k, v, o, do, lse, dlse))
            return of_rows.own(dq, rows), of_keys.own(dk, rows), of_keys.own(dv, rows), changes

        return derive

    # ------------------------------------------------------------------------------------------------ chunks and steps

    @property
    def lengths(self) -> list[int]:
        """The numbers of rows of the chunks. They are the same on every device."""
        return [length for _, length in self.layout.chunks[0]]

    def _cut(self, x: jax.Array, axis: int | None = None) -> list[jax.Array]:
        """The chunks of this device's rows."""
        return jnp.split(x, np.cumsum(self.lengths)[:-1].tolist(), row_axis(self.form) if axis is None else axis)

    def _owner(self, step: int) -> jax.Array:
        return (jax.lax.axis_index(self.axis) - step) % self.layout.ranks

    def _begin(self, of: jax.Array, chunk: int) -> jax.Array:
        """The row where a chunk of the device `of` begins."""
        return jnp.asarray([own[chunk][0] for own in self.layout.chunks], jnp.int32)[of]

    def _aheads(self, step: int, i: int, j: int) -> tuple[Ahead, Ahead]:
        """The padding ahead of a chunk of rows and ahead of a chunk of keys."""
        ranks = jax.lax.axis_index(self.axis), self._owner(step)
        found = [
            Ahead.of([own[chunk][0] % unit for own in self.layout.chunks] if self.drops else [], rank, unit)
            for rank, chunk, unit in zip(ranks, (i, j), (DROPOUT_ROWS, DROPOUT_KEYS), strict=True)
        ]
        return found[0], found[1]

    def _begins(self, step: int, i: int, j: int) -> tuple[jax.Array, jax.Array]:
        """The rows where the queries and the keys of a call begin, padding included."""
        ranks = jax.lax.axis_index(self.axis), self._owner(step)
        of_rows, of_keys = self._aheads(step, i, j)
        return self._begin(ranks[0], i) - of_rows.count, self._begin(ranks[1], j) - of_keys.count

    def _pairs(self, step: int) -> list[tuple[int, int, jax.Array | None]]:
        """The pairs (chunk of rows, chunk of keys) that any device computes in a step, and whether this device does."""
        ranks, found = range(self.layout.ranks), []
        for i in range(len(self.lengths)):
            for j in range(len(self.lengths)):
                table = [self._visits(rank, (rank - step) % self.layout.ranks, i, j) for rank in ranks]
                if any(table):
                    is_here = None if all(table) else jnp.asarray(table)[jax.lax.axis_index(self.axis)]
                    found.append((i, j, is_here))
        return found

    def _visits(self, rank: int, owner: int, i: int, j: int) -> bool:
        run, keys = self.layout.chunks[rank][i], self.layout.chunks[owner][j]
        return keys[0] < self.layout.seq and self.steps.visited(rank, owner, run, keys)

    def _pair(self, step: int, i: int, j: int, batch: int, fixed: Arrays) -> RingPair:
        """The sizes and positions of the call of a pair of chunks."""
        begin, first = self._begins(step, i, j)
        of_rows, of_keys = self._aheads(step, i, j)
        length, count = self.lengths[i] + of_rows.room, self.lengths[j] + of_keys.room
        tokens = {
            name: jax.lax.dynamic_slice_in_dim(x, *((first, count) if name.startswith("kv") else (begin, length)), 1)
            for name, x in fixed.items()
            if name in TOKENS
        }
        lengths = jnp.broadcast_to(fixed.get("kv_lengths", self.layout.seq), (batch,)).astype(jnp.int32)
        return RingPair(
            begin=begin,
            first=first,
            rows=length,
            keys=count,
            ahead=of_keys.count,
            length=self.lengths[j],
            is_ahead=of_keys.room > 0,
            is_cut=self.layout.padded > self.layout.seq or "kv_lengths" in fixed,
            ends=jnp.minimum(lengths, self.layout.seq),
            lengths=lengths,
            is_own=step == 0 and i == j,
            tokens=tokens,
        )

    def _moved_own(self, name: str, x: jax.Array, pair: RingPair) -> jax.Array:
        dims, declared = own_dims(self.work, self.layout, name, x.ndim), self.work.tensors[name]
        for axis, dim in enumerate(dims):
            if dim not in ("q_idx", "kv_idx"):
                continue
            size = x.shape[axis]
            begins, length = (pair.first, size) if self.by_offset or dim == "kv_idx" else (pair.begin, pair.rows)
            length = pair.keys if dim == "kv_idx" and not self.by_offset else length
            # No pair that the mask keeps reads the padding after the last row.
            x = jnp.pad(
                x, [(0, max(length, self.layout.padded - size)) if n == axis else (0, 0) for n in range(x.ndim)]
            )
            x = jax.lax.dynamic_slice_in_dim(x, begins, length, axis)
        return jnp.expand_dims(x, list(declared).index("b")) if len(dims) < len(declared) else x


def _continued(name: str, x: jax.Array, more: int) -> jax.Array:
    """Tokens `[B, rows]` with `more` rows of padding: ids 0, and positions that go on, as dropout wants them to."""
    if not name.endswith("positions"):
        return jnp.pad(x, [(0, 0), (0, more)])
    return jnp.concatenate([x, x[:, -1:] + 1 + jnp.arange(more, dtype=x.dtype)[None]], 1)
