"""The implementations compared in JAX: ours in each call mode, and cuDNN through `jax.nn`.

All of them get the same q, k, v and do `[B, S, H, D]`, and are checked against plain float32 before they are timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bench.cases.packed import PackedCase
from codegen.testing.golden import BOUND
from generated import jax as ops

CHECK_ROWS = 512
"""The number of last query rows that are computed again in float32."""

OURS = ("ours", "ours packed", "ours segments")


@dataclass(frozen=True, kw_only=True)
class JaxCase(PackedCase):
    """A case of the JAX suite: causal inside documents, or `full` on whole rows."""

    implementations: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    def flops(self, which: str) -> float:
        """FLOPs of the "fwd" or "bwd" pass, counting unmasked scores only."""
        triangle = super().flops(which)
        if self.variant != "full":
            return triangle
        seq = self.shape.seq
        return triangle * 2 * seq / (seq + 1)


@dataclass(frozen=True, kw_only=True)
class Program:
    """An implementation with its inputs, compiled at its first call.

    `op` takes by name `leaves`, the arrays whose gradients are computed, and `given`, all other arrays and pytrees.
    `dense` converts a leaf or o to `[B, S, H, D]`. `schedule` recomputes the entry of `given` that is made in advance.
    """

    op: Callable[..., Any]
    leaves: Mapping[str, Any]
    do: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    dense: Callable[[Any], Any] = lambda x: x
    schedule: Callable[[], Any] | None = None

    @cached_property
    def _passes(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # JAX keeps a compiled function alive: `op` holds no arrays, `self` holds gigabytes.
        names = tuple(self.leaves)
        return functools.partial(_attend, self.op, names), functools.partial(_differentiate, self.op, names)

    @cached_property
    def _forward(self) -> Any:
        return jax.jit(self._passes[0])

    @cached_property
    def _both(self) -> Any:
        return jax.jit(self._passes[1])

    def forward(self) -> Any:
        """Compute o."""
        return self._forward(tuple(self.leaves.values()), dict(self.given))

    def both(self) -> Any:
        """Compute o and the gradients in one program."""
        return self._both(tuple(self.leaves.values()), self.do, dict(self.given))

    def results(self) -> dict[str, Any]:
        """o of the forward program, and the gradients, by name."""
        _, *gradients = self.both()
        named = {"o": self.forward()} | {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}
        return {name: jax.block_until_ready(self.dense(x)) for name, x in named.items()}

    def chained(self, calls: int) -> dict[str, Callable[[], Any]]:
        """Each pass as one program of `calls` chained calls, for calls that are shorter than their dispatch.

        Each call takes the results of the one before, so that XLA can drop none: o becomes q, or the gradients become
        the leaves and o becomes do. All leaves must have the shape and dtype of o.
        """
        leaves, given = tuple(self.leaves.values()), dict(self.given)
        attend, differentiate = self._passes

        # Unrolled: XLA's loops copy their carry and synchronise with the host at each iteration.
        def forwards(leaves: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
            for _ in range(calls):
                leaves = (attend(leaves, given), *leaves[1:])
            return leaves

        def boths(leaves: tuple[Any, ...], do: Any, given: Mapping[str, Any]) -> Any:
            for _ in range(calls):
                do, *gradients = differentiate(leaves, do, given)
                leaves = tuple(gradients)
            return (*leaves, do)

        forward, both = jax.jit(forwards), jax.jit(boths)
        return {"fwd": lambda: forward(leaves, given), "fwd+bwd": lambda: both(leaves, self.do, given)}


def _attend(op: Callable[..., Any], names: tuple[str, ...], leaves: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    return op(**dict(zip(names, leaves, strict=True)), **given)


def _differentiate(
    op: Callable[..., Any], names: tuple[str, ...], leaves: tuple[Any, ...], do: Any, given: Mapping[str, Any]
) -> tuple[Any, ...]:
    o, pullback = jax.vjp(lambda *x: _attend(op, names, x, given), *leaves)
    return (o, *pullback(do))


# One case at a time: its arrays take gigabytes, and several implementations use them.
@functools.lru_cache(maxsize=1)
def draw(case: JaxCase) -> dict[str, Any]:
    """Draw q, k, v and do."""
    shape = case.shape
    keys = jax.random.split(jax.random.key(0), 4)
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "do": shape.heads}
    return {
        name: jax.random.normal(key, (shape.batch, shape.seq, count, shape.dim), case.dtype)
        for key, (name, count) in zip(keys, heads.items(), strict=True)
    }


def leaves_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The entries q, k and v."""
    return {name: arrays[name] for name in ("q", "k", "v")}


def segment_ids(case: JaxCase) -> Any:
    """The document index of each token within its row, int32 `[B, S]`."""
    return jnp.asarray(np.stack([np.repeat(np.arange(len(row)), row) for row in case.rows]), jnp.int32)


def cu_seqlens(case: JaxCase) -> Any:
    """Cumulative document lengths over all rows, int32 `[documents + 1]`."""
    lengths = [length for row in case.rows for length in row]
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def ours(case: JaxCase) -> Program:
    """Ours as a dense call."""
    arrays = draw(case)
    return Program(op=getattr(ops, case.variant), leaves=leaves_of(arrays), do=arrays["do"])


def with_schedule(program: Program, make: Callable[..., Any]) -> Program:
    """The program with a schedule that `make` computes in advance."""
    # A schedule depends on the shapes of q, k and v alone; compiled, it does not read them.
    compiled = jax.jit(lambda leaves, given: make(**leaves, **given))

    def schedule() -> Any:
        return compiled(leaves_of(program.leaves), dict(program.given))

    return replace(program, given={**program.given, "schedule": schedule()}, schedule=schedule)


def _ours_packed(case: JaxCase) -> Program:
    op = getattr(ops, case.variant)
    arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in draw(case).items()}
    batch = case.shape.batch
    plain = Program(
        op=op,
        leaves=leaves_of(arrays),
        do=arrays["do"],
        given={"cu_seqlens_q": cu_seqlens(case)},
        dense=lambda x: x.reshape(batch, -1, *x.shape[1:]),
    )
    return with_schedule(plain, op.schedule)


def _ours_segments(case: JaxCase) -> Program:
    op = getattr(ops, case.variant)
    return with_schedule(replace(ours(case), given={"q_segment_ids": segment_ids(case)}), op.schedule)


def _same_document(ids: Any) -> Any:
    return ids[:, None, :, None] == ids[:, None, None, :]


def _same_document_before(ids: Any) -> Any:
    rows = jnp.arange(ids.shape[1])
    return _same_document(ids) & (rows[:, None] >= rows)


def _cudnn(case: JaxCase, *, mask_is_whole: bool) -> Program:
    """cuDNN with its causal flag and an S x S document mask; or, if `mask_is_whole`, with both in the mask."""
    arrays = draw(case)

    def op(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=not mask_is_whole, implementation="cudnn")

    plain = functools.partial(Program, op=op, leaves=leaves_of(arrays), do=arrays["do"])
    if max(map(len, case.rows)) == 1 and not mask_is_whole:
        return plain()
    make, ids = jax.jit(_same_document_before if mask_is_whole else _same_document), segment_ids(case)
    return plain(given={"mask": make(ids)}, schedule=lambda: make(ids))


BUILDERS: dict[str, Callable[[JaxCase], Program]] = {
    "ours": ours,
    "ours packed": _ours_packed,
    "ours segments": _ours_segments,
    "cudnn": functools.partial(_cudnn, mask_is_whole=False),
    "cudnn mask": functools.partial(_cudnn, mask_is_whole=True),
}


def _attended(q: Any, k: Any, v: Any, keep: Any) -> Any:
    """Attention in float32: q `[rows, G, D]` of the query heads of one key head, k and v `[S, D]`; o `[rows, G, D]`."""
    scores = jnp.einsum("qgd,kd->gqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1)
    return jnp.einsum("gqk,kd->qgd", weights, v, precision="highest")


@functools.lru_cache(maxsize=1)
def expected_results(case: JaxCase) -> dict[str, Any]:
    """o and gradients for the last rows of the batch and the first key head.

    With a causal mask only these queries attend to the last keys, so that their dk and dv are complete.
    """
    arrays, ids = draw(case), segment_ids(case)[-1]
    seq, group = case.shape.seq, case.shape.heads // case.shape.kv_heads
    rows = seq if case.variant == "full" else min(CHECK_ROWS, seq)
    q, do = (arrays[name][-1, -rows:, :group].astype(jnp.float32) for name in ("q", "do"))
    k, v = (arrays[name][-1, :, 0].astype(jnp.float32) for name in ("k", "v"))
    positions = jnp.arange(seq)
    keep = ids[-rows:, None] == ids[None]
    if case.variant != "full":
        keep &= positions[-rows:, None] >= positions[None]
    o, pullback = jax.vjp(lambda q, k, v: _attended(q, k, v, keep), q, k, v)
    dq, dk, dv = pullback(do)
    return {"o": o, "dq": dq, "dk": dk[-rows:, None], "dv": dv[-rows:, None]}


def fault(case: JaxCase, name: str, program: Program) -> str:
    """The error of an implementation's results; "" if they are right.

    Peers are checked for computing the same function, not for precision: their bound is twice ours.
    """
    want, got = expected_results(case), program.results()
    errors = {}
    for key, wanted in want.items():
        rows, heads, _ = wanted.shape
        found = got[key][-1, -rows:, :heads].astype(jnp.float32)
        errors[key] = float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))
    bound = BOUND[getattr(torch, case.dtype)] * (1 if name in OURS else 2)
    # A NaN counts as infinitely wrong.
    worst = max(errors, key=lambda each: errors[each] if errors[each] == errors[each] else float("inf"))
    return "" if errors[worst] <= bound else f"WRONG against float32: {worst} is off by {errors[worst]:.1e}"
