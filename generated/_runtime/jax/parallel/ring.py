# SPDX-License-Identifier: Apache-2.0
"""A ring of devices: keys go from device to device by `ppermute`, and each device computes with the keys it has.

o and lse of the steps are merged in float32. The backward computes each step from the merged o and lse. The gradients
of keys travel with the keys, in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from ...core.checks import PACKED
from ...core.parallel.calls import TOKENS, head_axis
from ...core.parallel.key_needs import planned_needs
from ...core.parallel.ring_steps import NO_SINK, RingSteps, keeps_rows_apart, ring_steps
from ...core.parallel.shards import Layout
from ...core.parallel.work import VariantWork
from ..sharding import varying_alike
from .wide_keys import guarded, trained_names

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class RingPair:
    """A call of some rows with some keys in a step. Arrays have one value for the call, or one for each batch row.

    Attributes:
        begin, first: positions of the first row and of the first key. rows, keys: their numbers.
        ahead, length: the first `ahead` keys are padding, the next `length` are keys. Padding may follow them.
        is_ahead: some device has padding ahead of its keys. is_cut: some device has padding after its keys, or an
            `ends` before its last key.
        ends: rows attend only to keys at positions before this one.
        lengths: the numbers of keys of the whole call, or of the document.
        is_own: the keys are those of the same rows.
        tokens: ids and positions of rows and keys.
        document: the packed document of the rows and keys. Dropout counts documents as batch rows.
    """

    begin: jax.Array
    first: jax.Array
    rows: int
    keys: int
    ahead: jax.Array | int
    length: jax.Array | int
    is_ahead: bool
    is_cut: bool
    ends: jax.Array
    lengths: jax.Array
    is_own: bool
    tokens: Arrays = field(default_factory=dict)
    document: jax.Array | int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring(ABC):
    """A call by a ring on one device of an axis.

    Attributes:
        form: the layout of q, k and v. numbers: the op's keywords that are not arrays, without `dropout_origin`.
        packed: rows are packed. They are one batch row here.
        drops: the call has dropout. steps: which devices visit the keys of which others.
        by_offset: calls get the place of their keys as an offset between queries and keys, else as positions.
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
    ) -> Self:
        """The ring of a call. keywords, own, given_tokens: its arguments besides q, k and v."""
        packed = form == PACKED
        drops = bool(keywords.get("dropout_p"))
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
            steps=ring_steps(layout, work, needs, given_tokens),
            by_offset=keeps_rows_apart(work) and "q_positions" not in given_tokens,
        )

    def computed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, own: Arrays, tokens: Arrays, keywords: Mapping[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """o and lse of this device's rows. own: whole tensors. tokens: of all rows. keywords: of the op, arrays too."""
        q, k, v = (x[None] if self.packed else x for x in (q, k, v))
        fixed = self._all_tokens(tokens, q.shape[0])
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

    def _all_tokens(self, tokens: Arrays, _batch: int) -> dict[str, Any]:
        """Ids and positions of all rows, as queries and as keys. Each call reads a part of them."""
        return dict(tokens)

    @abstractmethod
    def _forward(self, trained: Arrays, fixed: Arrays) -> tuple[jax.Array, jax.Array]:
        """o and lse. trained: q, k, v and all other arrays with a gradient. fixed: arrays without."""

    @abstractmethod
    def _backward(
        self, trained: Arrays, fixed: Arrays, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array
    ) -> dict[str, jax.Array]:
        """The gradients of `trained`."""

    @abstractmethod
    def _moved_own(self, name: str, x: jax.Array, pair: Any) -> jax.Array:
        """One of the variant's own tensors. Its axes of rows and keys begin where those of the pair begin."""

    # -------------------------------------------------------------------------------------------------------- one call

    def _compute(
        self, pair: RingPair, q: jax.Array, k: jax.Array, v: jax.Array, trained: Arrays, fixed: Arrays
    ) -> tuple[jax.Array, jax.Array]:
        """o, in float32, and lse of the call of a pair."""
        o, lse = self.op(q, k, v, **self._keywords(pair, len(q), trained, fixed), return_lse=True)
        return o.astype(jnp.float32), lse

    def _derive(self, pair: RingPair, own: Arrays, fixed: Arrays, operands: tuple[jax.Array, ...]) -> Any:
        """The gradients of that call, of q, k, v and of the variant's own tensors, in float32.

        Args:
            operands: q, k, v, o, do, lse and dlse.
        """
        q, k, v, o, do, lse, dlse = operands
        reads = {name: x for name, x in own.items() if name != "sink" or pair.is_own}

        def read(whole: Arrays) -> dict[str, Any]:
            return {name: self._moved_own(name, x, pair) for name, x in whole.items()}

        _, pull = jax.vjp(read, reads)
        keywords = self._keywords(pair, len(q), own, fixed)
        if "g" in own:
            # The kernels of a log-decay need o and lse of exactly the keys of the call, so they are computed again.
            part = self.op(q, k, v, **keywords, return_lse=True)
            do, dlse = self._of_part(part, (o, lse), (do, dlse))
            o, lse = part
        found = self.op.backward(  # type: ignore[attr-defined]  # which every op has
            do, q, k, v, o, lse, dlse=dlse, wanted=tuple(reads), wide_dq=True, **keywords
        )
        (changes,) = pull({name: found.own[name].astype(own[name].dtype) for name in reads})
        wide = {name: changes[name] if name in changes else jnp.zeros_like(x) for name, x in own.items()}
        return found.dq, found.dk, found.dv, {name: x.astype(jnp.float32) for name, x in wide.items()}

    def _keywords(self, pair: RingPair, batch: int, own: Arrays, fixed: Arrays) -> dict[str, Any]:
        """The keywords of the call of a pair."""
        whole = {name: x for name, x in {**own, **fixed}.items() if name in self.work.tensors}
        keywords = {**self.numbers, "layout": self.form}
        keywords |= {name: x for name, x in fixed.items() if name not in whole and name not in TOKENS}
        keywords |= pair.tokens
        if self.by_offset:
            keywords["q_offset"] = jnp.broadcast_to(pair.begin - pair.first, (batch,)).astype(jnp.int32)
        if self.work.by_length:
            keywords["kv_lengths"] = pair.lengths
        elif pair.is_cut:
            keywords["kv_lengths"] = jnp.clip(pair.ends - pair.first, 0, pair.keys)
        for name, x in whole.items():
            keywords[name] = self._moved_own(name, x, pair)
        if "sink" in whole and not pair.is_own:
            keywords["sink"] = jnp.full(whole["sink"].shape, NO_SINK, jnp.float32)
        if self.drops:
            batch_row, head, all_heads = fixed["dropout_origin"]
            begin, first = (x.reshape(()) for x in (pair.begin, pair.first))
            origin = batch_row + pair.document, head, all_heads, first if self.by_offset else begin, first
            keywords["dropout_origin"] = origin
        if pair.is_ahead or (self.work.by_length and pair.is_cut):
            self._hide_keys(keywords, pair, batch)
        return keywords

    def _hide_keys(self, keywords: dict[str, Any], pair: RingPair, batch: int) -> None:
        """Give padding keys, and keys from `ends` on, the segment id of padding, so that no query attends to them."""
        places, first, ahead, length, ends = (
            jnp.atleast_1d(x)[:, None] for x in (jnp.arange(pair.keys), pair.first, pair.ahead, pair.length, pair.ends)
        )
        places = places.T
        is_key = (places >= ahead) & (places < ahead + length) & (first + places < ends)
        padding = keywords.get("padding_id", -1)
        shown = 0 if padding else 1
        keywords.setdefault("q_segment_ids", jnp.full((batch, pair.rows), shown, jnp.int32))
        ids = keywords.get("kv_segment_ids", jnp.full((batch, pair.keys), shown, jnp.int32))
        keywords["kv_segment_ids"] = jnp.where(is_key, ids, padding)

    # ---------------------------------------------------------------------------------------------------- parts of sums

    def _where(
        self, visited: jax.Array | None, compute: Callable[..., Any], operands: tuple[jax.Array, ...], lse: float = 0.0
    ) -> Any:
        """The results of `compute`. A device that visits no key returns zeros, and `lse` in the second result."""
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
        """The gradients of o and lse of a part of the keys, from those of the whole."""
        (o, lse), (do, dlse) = part, given
        share = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - whole[1]))
        change = ((o.astype(jnp.float32) - whole[0].astype(jnp.float32)) * do.astype(jnp.float32)).sum(-1)
        change = change if self.form == "bhsd" else change.swapaxes(1, 2)
        return (do * self._per_row(share)).astype(do.dtype), share * (change + dlse)

    def _per_row(self, x: jax.Array) -> jax.Array:
        """`[B, H, rows]` in a shape that broadcasts to o."""
        return (x if self.form == "bhsd" else x.swapaxes(1, 2))[..., None]

    def _merged(self, o: jax.Array, lse: jax.Array, part: jax.Array, part_lse: jax.Array) -> Any:
        """Merge o and lse, float32, with those of a part. A row without keys has an lse of -inf."""
        total = jnp.logaddexp(lse, part_lse)
        finite = jnp.where(jnp.isneginf(total), 0.0, total)
        shares = (self._per_row(jnp.exp(x - finite)) for x in (lse, part_lse))
        return o * next(shares) + part * next(shares), total

    def _no_lse(self, x: jax.Array) -> jax.Array:
        batch, heads, rows = (x.shape[axis] for axis in ((0, 1, 2) if self.form == "bhsd" else (0, 2, 1)))
        return jnp.full((batch, heads, rows), -jnp.inf, jnp.float32)

    def _sent(self, x: jax.Array, distance: int) -> jax.Array:
        """Send `x` to the device `distance` ahead in the ring; returns the array of the device `distance` behind."""
        ranks = self.layout.ranks
        if distance % ranks == 0:
            return x
        found: jax.Array = jax.lax.ppermute(x, self.axis, [(n, (n + distance) % ranks) for n in range(ranks)])
        return found
