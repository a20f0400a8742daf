# SPDX-License-Identifier: Apache-2.0
"""A ring of devices: keys go from device to device by `ppermute`, and each computes with those it has.

o and lse of the steps are merged in float32. The backward computes each step from the merged o and lse, and the
gradients of keys travel with them in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.checks import DROPOUT_KEYS, DROPOUT_ROWS, PACKED, fail
from ..core.key_needs import planned_needs
from ..core.parallel_calls import TOKENS, head_axis, own_dims, row_axis
from ..core.ring_steps import NO_SINK, RingSteps, keeps_rows_apart, ring_steps
from ..core.shards import Layout
from ..core.work import VariantWork
from .ahead import Ahead
from .primitive import varying_alike
from .wide_keys import guarded, trained_names

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """A call by a ring on one device of an axis.

    Attributes:
        form: how q, k and v lie. numbers: keywords of the op that are no arrays, but for `dropout_origin`.
        packed: rows are packed, which it computes as one batch row with segment ids.
        drops: probabilities are dropped. steps: what devices visit.
        by_offset: where keys are is said by an offset, else by positions.
    """

    op: Callable[..., Any]
    work: VariantWork
    layout: Layout
    axis: str
    form: str
    numbers: Mapping[str, Any]
    packed: bool
    drops: bool
    steps: RingSteps
    by_offset: bool

    @classmethod
    def of(
        cls,
        op: Callable[..., Any],
        work: VariantWork,
        layout: Layout,
        axis: str,
        form: str,
        keywords: Mapping[str, Any],
        own: Arrays,
        given_tokens: tuple[str, ...],
    ) -> "Ring":
        """The ring of a call. keywords, own, given_tokens: what it was given beside q, k and v."""
        packed = form == PACKED
        drops = bool(keywords.get("dropout_p"))
        if drops and packed:
            expected = "0 for packed rows under strategy='ring' in JAX, or another strategy"
            fail(work.op, "dropout_p", expected, keywords["dropout_p"])
        needs = planned_needs(
            layout, work, {**keywords, **own, **dict.fromkeys(given_tokens, True)}, knows_values=False
        )
        return cls(
            op=op,
            work=work,
            layout=layout,
            axis=axis,
            form="bshd" if packed else form,
            numbers={
                name: x
                for name, x in keywords.items()
                if not isinstance(x, jax.Array) and name not in ("layout", "dropout_origin")
            },
            packed=packed,
            drops=drops,
            steps=ring_steps(layout, work, needs),
            by_offset=keeps_rows_apart(work) and "q_positions" not in given_tokens,
        )

    def computed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, own: Arrays, tokens: Arrays, keywords: Mapping[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """o and lse of this device's rows. own: whole. tokens: of all rows. keywords: of the op, arrays among them."""
        q, k, v = (x[None] if self.packed else x for x in (q, k, v))
        fixed: dict[str, Any] = self._all_tokens(tokens, q.shape[0])
        fixed |= {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
        if self.drops:
            origin = keywords.get("dropout_origin", (0, 0, q.shape[head_axis(self.form)]))
            fixed["dropout_origin"] = jnp.stack([jnp.asarray(x, jnp.int32) for x in origin])
        names = trained_names(self.op)
        own = {name: x if name in names else guarded(self.op, name, x, self.form) for name, x in own.items()}
        fixed |= {name: x for name, x in own.items() if name not in names}
        trained = {"q": q, "k": k, "v": v} | {name: x for name, x in own.items() if name in names}
        leaves, tree = jax.tree.flatten((trained, fixed))
        trained, fixed = jax.tree.unflatten(tree, varying_alike(leaves))

        @jax.custom_vjp
        def run(trained: Arrays, fixed: Arrays) -> tuple[jax.Array, jax.Array]:
            return self._forward(trained, fixed)

        def forward(trained: Arrays, fixed: Arrays) -> Any:
            results = self._forward(trained, fixed)
            return results, (trained, fixed, *results)

        def backward(saved: Any, given: Any) -> Any:
            return self._backward(*saved, *given), dict.fromkeys(fixed)

        run.defvjp(forward, backward)
        o, lse = run(trained, fixed)
        return (o[0], lse[0]) if self.packed else (o, lse)

    def _all_tokens(self, tokens: Arrays, batch: int) -> dict[str, jax.Array]:
        """Ids and positions of all rows, of queries and of keys, padding included: `[B, padded]`."""
        layout, found = self.layout, dict(tokens)
        if layout.cu_seqlens is not None:
            found["q_segment_ids"] = jnp.asarray(layout.sequence_numbers, jnp.int32)[None]
        if not self.by_offset and "q_positions" not in found:
            found["q_positions"] = jnp.asarray(layout.row_positions, jnp.int32)[None]
        for of_queries, of_keys in (TOKENS[:2], TOKENS[2:]):
            if of_queries in found:
                found.setdefault(of_keys, found[of_queries])
        widths = [(0, 0), (0, layout.padded - layout.seq + (DROPOUT_KEYS if self.drops else 0))]
        return {name: jnp.pad(jnp.broadcast_to(x, (batch, layout.seq)), widths) for name, x in found.items()}

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
        # Without a barrier XLA would keep the keys of every step of the forward, in place of sending them again.
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
        """The call of a pair of chunks in a step: o in float32, and lse."""

        def compute(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            of_rows, of_keys, rows = *self._aheads(step, i, j), row_axis(self.form)
            q, k, v = of_rows.widened(q, rows), of_keys.widened(k, rows), of_keys.widened(v, rows)
            o, lse = self.op(q, k, v, **self._keywords(step, i, j, len(q), trained, fixed), return_lse=True)
            return of_rows.own(o, rows).astype(jnp.float32), of_rows.own(lse, 2)

        return compute

    def _deriving(self, step: int, i: int, j: int, own: Arrays, fixed: Arrays) -> Callable[..., Any]:
        """Its gradients, of q, k, v and of the variant's own tensors, in float32."""

        def derive(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            o: jax.Array,
            do: jax.Array,
            lse: jax.Array,
            dlse: jax.Array,
        ) -> Any:
            reads = {name: x for name, x in own.items() if name != "sink" or (step == 0 and i == j)}

            def read(whole: Arrays) -> dict[str, Any]:
                return {name: self._moved_own(name, x, step, i, j) for name, x in whole.items()}

            of_rows, of_keys, rows = *self._aheads(step, i, j), row_axis(self.form)
            k, v = (of_keys.widened(x, rows) for x in (k, v))
            q, o, do = (of_rows.widened(x, rows) for x in (q, o, do))
            lse, dlse = of_rows.widened(lse, 2, jnp.inf), of_rows.widened(dlse, 2)
            _, pull = jax.vjp(read, reads)
            keywords = self._keywords(step, i, j, len(q), own, fixed)
            if "g" in own:
                # The kernels of a log-decay rely on rows whose keys are all there.
                part = self.op(q, k, v, **keywords, return_lse=True)
                do, dlse = self._of_part(part, (o, lse), (do, dlse))
                o, lse = part
            found = self.op.backward(  # type: ignore[attr-defined]  # which every op has
                do, q, k, v, o, lse, dlse=dlse, wanted=tuple(reads), wide_dq=True, **keywords
            )
            (changes,) = pull({name: found.own[name].astype(own[name].dtype) for name in reads})
            wide = {name: changes[name] if name in changes else jnp.zeros_like(x) for name, x in own.items()}
            dq, dk, dv = of_rows.own(found.dq, rows), of_keys.own(found.dk, rows), of_keys.own(found.dv, rows)
            return dq, dk, dv, {name: x.astype(jnp.float32) for name, x in wide.items()}

        return derive

    def _where(
        self, visited: jax.Array | None, compute: Callable[..., Any], operands: tuple[jax.Array, ...], lse: float = 0.0
    ) -> Any:
        """What `compute` returns, and on a device that visits no key zeros, the second result filled with `lse`."""
        if visited is None:
            return compute(*operands)
        shapes = jax.eval_shape(compute, *operands)

        def nothing(*operands: jax.Array) -> Any:
            leaves, tree = jax.tree.flatten(shapes)
            empty = [jnp.full(x.shape, lse if n == 1 else 0.0, x.dtype) for n, x in enumerate(leaves)]
            return jax.tree.unflatten(tree, varying_alike((operands[0], *empty))[1:])

        def computed(*operands: jax.Array) -> Any:
            leaves, tree = jax.tree.flatten(compute(*operands))
            return jax.tree.unflatten(tree, varying_alike((operands[0], *leaves))[1:])

        return jax.lax.cond(visited, computed, nothing, *operands)

    def _of_part(self, part: Any, whole: Any, given: Any) -> tuple[jax.Array, jax.Array]:
        """The gradients of a part's o and lse from those of the whole."""
        (o, lse), (do, dlse) = part, given
        share = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - whole[1]))
        change = ((o.astype(jnp.float32) - whole[0].astype(jnp.float32)) * do.astype(jnp.float32)).sum(-1)
        change = change if self.form == "bhsd" else change.swapaxes(1, 2)
        return (do * self._per_row(share)).astype(do.dtype), share * (change + dlse)

    def _per_row(self, x: jax.Array) -> jax.Array:
        """`[B, H, rows]` as a factor of o."""
        return (x if self.form == "bhsd" else x.swapaxes(1, 2))[..., None]

    def _merged(self, o: jax.Array, lse: jax.Array, part: jax.Array, part_lse: jax.Array) -> Any:
        """o and lse, float32, with a part's. A row without keys has an lse of -inf."""
        total = jnp.logaddexp(lse, part_lse)
        finite = jnp.where(jnp.isneginf(total), 0.0, total)
        shares = (self._per_row(jnp.exp(x - finite)) for x in (lse, part_lse))
        return o * next(shares) + part * next(shares), total

    def _no_lse(self, x: jax.Array) -> jax.Array:
        batch, heads, rows = (x.shape[axis] for axis in ((0, 1, 2) if self.form == "bhsd" else (0, 2, 1)))
        return jnp.full((batch, heads, rows), -jnp.inf, jnp.float32)

    # ------------------------------------------------------------------------------------------------ chunks and steps

    @property
    def lengths(self) -> list[int]:
        """Rows of each chunk, the same on every device."""
        return [length for _, length in self.layout.chunks[0]]

    def _cut(self, x: jax.Array, axis: int | None = None) -> list[jax.Array]:
        """The chunks of this device's rows."""
        return jnp.split(x, np.cumsum(self.lengths)[:-1].tolist(), row_axis(self.form) if axis is None else axis)

    def _owner(self, step: int) -> jax.Array:
        return (jax.lax.axis_index(self.axis) - step) % self.layout.ranks

    def _begin(self, of: jax.Array, chunk: int) -> jax.Array:
        """Where a chunk of a device begins."""
        return jnp.asarray([own[chunk][0] for own in self.layout.chunks], jnp.int32)[of]

    def _aheads(self, step: int, i: int, j: int) -> tuple[Ahead, Ahead]:
        """The zeros ahead of a chunk of rows and of one of keys."""
        ranks = jax.lax.axis_index(self.axis), self._owner(step)
        found = [
            Ahead.of([own[chunk][0] % unit for own in self.layout.chunks] if self.drops else [], rank, unit)
            for rank, chunk, unit in zip(ranks, (i, j), (DROPOUT_ROWS, DROPOUT_KEYS), strict=True)
        ]
        return found[0], found[1]

    def _begins(self, step: int, i: int, j: int) -> tuple[jax.Array, jax.Array]:
        """Where the rows and the keys of a call begin."""
        ranks = jax.lax.axis_index(self.axis), self._owner(step)
        of_rows, of_keys = self._aheads(step, i, j)
        return self._begin(ranks[0], i) - of_rows.count, self._begin(ranks[1], j) - of_keys.count

    def _lengths(self, i: int, j: int) -> tuple[int, int]:
        """Rows of a chunk of rows and of one of keys."""
        return self.lengths[i], self.lengths[j]

    def _pairs(self, step: int) -> list[tuple[int, int, jax.Array | None]]:
        """Pairs of a chunk of rows and one of keys that some device visits in a step, and whether this one does."""
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

    def _sent(self, x: jax.Array, distance: int) -> jax.Array:
        """The rows of the device so far behind."""
        ranks = self.layout.ranks
        if distance % ranks == 0:
            return x
        found: jax.Array = jax.lax.ppermute(x, self.axis, [(n, (n + distance) % ranks) for n in range(ranks)])
        return found

    # -------------------------------------------------------------------------------------------------------- one call

    def _keywords(self, step: int, i: int, j: int, batch: int, own: Arrays, fixed: Arrays) -> dict[str, Any]:
        """The keywords of a call of a pair of chunks."""
        begin, first = self._begins(step, i, j)
        length, count = (x + ahead.room for x, ahead in zip(self._lengths(i, j), self._aheads(step, i, j), strict=True))
        whole = {name: x for name, x in {**own, **fixed}.items() if name in self.work.tensors}
        keywords = {**self.numbers, "layout": self.form}
        tokens = {name: x for name, x in fixed.items() if name in TOKENS}
        keywords |= {name: x for name, x in fixed.items() if name not in whole and name not in TOKENS}
        for name, x in tokens.items():
            of_keys = name.startswith("kv")
            keywords[name] = jax.lax.dynamic_slice_in_dim(
                x, first if of_keys else begin, count if of_keys else length, 1
            )
        if self.by_offset:
            keywords["q_offset"] = jnp.broadcast_to(begin - first, (batch,)).astype(jnp.int32)
        lengths = jnp.broadcast_to(fixed.get("kv_lengths", self.layout.seq), (batch,)).astype(jnp.int32)
        ends = jnp.minimum(lengths, self.layout.seq)
        is_cut = self.layout.padded > self.layout.seq or "kv_lengths" in fixed
        if self.work.by_length:
            keywords["kv_lengths"] = lengths
        elif is_cut:
            keywords["kv_lengths"] = jnp.clip(ends - first, 0, count)
        for name, x in whole.items():
            keywords[name] = self._moved_own(name, x, step, i, j)
        if "sink" in whole and (step or i != j):
            keywords["sink"] = jnp.full(whole["sink"].shape, NO_SINK, jnp.float32)
        if self.drops:
            batch_row, head, all_heads = fixed["dropout_origin"]
            keywords["dropout_origin"] = batch_row, head, all_heads, first if self.by_offset else begin, first
        ahead = self._aheads(step, i, j)[1]
        if ahead.room or (self.work.by_length and is_cut):
            places = jnp.arange(count)[None]
            is_key = (places >= ahead.count) & (places < ahead.count + self.lengths[j])
            self._hide_keys(keywords, is_key & (first + places < ends[:, None]), (batch, length, count))
        return keywords

    def _hide_keys(self, keywords: dict[str, Any], is_key: jax.Array, sizes: tuple[int, int, int]) -> None:
        """Let no query attend to what is no key, `[B, keys]`, by segment ids. sizes: batch rows, queries and keys."""
        padding, (batch, length, count) = keywords.get("padding_id", -1), sizes
        shown = 0 if padding else 1
        keywords.setdefault("q_segment_ids", jnp.full((batch, length), shown, jnp.int32))
        ids = keywords.get("kv_segment_ids", jnp.full((batch, count), shown, jnp.int32))
        keywords["kv_segment_ids"] = jnp.where(is_key, ids, padding)

    def _moved_own(self, name: str, x: jax.Array, step: int, i: int, j: int) -> jax.Array:
        """One of the variant's own tensors, the axes of rows beginning where the call's rows do."""
        begin, first = self._begins(step, i, j)
        lengths = [x + ahead.room for x, ahead in zip(self._lengths(i, j), self._aheads(step, i, j), strict=True)]
        dims, declared = own_dims(self.work, self.layout, name, x.ndim), self.work.tensors[name]
        for axis, dim in enumerate(dims):
            if dim not in ("q_idx", "kv_idx"):
                continue
            size = x.shape[axis]
            begins, length = (first, size) if self.by_offset or dim == "kv_idx" else (begin, lengths[0])
            length = lengths[1] if dim == "kv_idx" and not self.by_offset else length
            # What lies behind the last row is read by no pair that the mask keeps.
            x = jnp.pad(
                x, [(0, max(length, self.layout.padded - size)) if n == axis else (0, 0) for n in range(x.ndim)]
            )
            x = jax.lax.dynamic_slice_in_dim(x, begins, length, axis)
        return jnp.expand_dims(x, list(declared).index("b")) if len(dims) < len(declared) else x
