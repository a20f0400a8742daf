"""The implementations compared in JAX, each built for a case: ours in its modes, and cuDNN through `jax.nn`.

All get q, k, v and do of `[B, S, H, D]` from one draw, and are checked against plain float32 before anything is timed.
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

from bench.runs.packed import PackedCase
from codegen.testing.golden import BOUND
from generated import jax as ops

CHECK_ROWS = 512
"""So many of the last rows of a batch are computed again in float32."""

OURS = ("ours", "ours packed", "ours segments")


@dataclass(frozen=True, kw_only=True)
class JaxCase(PackedCase):
    """A case of the JAX suite: causal inside documents, or `full` on whole rows."""

    implementations: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    def flops(self, which: str) -> float:
        """Work of the "fwd" or "bwd" pass on unmasked scores alone."""
        triangle = super().flops(which)
        if self.variant != "full":
            return triangle
        seq = self.shape.seq
        return triangle * 2 * seq / (seq + 1)


@dataclass(frozen=True, kw_only=True)
class Program:
    """An implementation on its inputs, compiled at its first call.

    `op` takes `leaves`, what gradients are taken of, and `given`, the other arrays and pytrees, by name. `dense` brings
    a leaf or o to `[B, S, H, D]`. `schedule` makes again what of `given` is made beforehand.
    """

    op: Callable[..., Any]
    leaves: Mapping[str, Any]
    do: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    dense: Callable[[Any], Any] = lambda x: x
    schedule: Callable[[], Any] | None = None

    @cached_property
    def _passes(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # What JAX keeps of a compiled function must not hold arrays: `op` has none, `self` gigabytes.
        names = tuple(self.leaves)
        return functools.partial(_attend, self.op, names), functools.partial(_differentiate, self.op, names)

    @cached_property
    def _forward(self) -> Any:
        return jax.jit(self._passes[0])

    @cached_property
    def _both(self) -> Any:
        return jax.jit(self._passes[1])

    def forward(self) -> Any:
        """o."""
        return self._forward(tuple(self.leaves.values()), dict(self.given))

    def both(self) -> Any:
        """o and the gradients, from one program."""
        return self._both(tuple(self.leaves.values()), self.do, dict(self.given))

    def results(self) -> dict[str, Any]:
        """o of the forward alone, and the gradients."""
        _, *gradients = self.both()
        named = {"o": self.forward()} | {f"d{name}": x for name, x in zip(self.leaves, gradients, strict=True)}
        return {name: jax.block_until_ready(self.dense(x)) for name, x in named.items()}

    def chained(self, calls: int) -> dict[str, Callable[[], Any]]:
        """Both passes, each as one program of so many calls, where one would take less time than its dispatch.

        A call takes what the last one gave, so that none can be left out: o for q, or gradients and o for what they
        are the gradients of and for do. All leaves must have the shape and dtype of o.
        """
        leaves, given = tuple(self.leaves.values()), dict(self.given)
        attend, differentiate = self._passes

        # Written out: XLA's loops copy what they carry, and ask the host for every turn.
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


# Cases follow one another, each with several implementations; the arrays of one are gigabytes.
@functools.lru_cache(maxsize=1)
def draw(case: JaxCase) -> dict[str, Any]:
    """q, k, v and do."""
    shape = case.shape
    keys = jax.random.split(jax.random.key(0), 4)
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads, "do": shape.heads}
    return {
        name: jax.random.normal(key, (shape.batch, shape.seq, count, shape.dim), case.dtype)
        for key, (name, count) in zip(keys, heads.items(), strict=True)
    }


def leaves_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """q, k and v."""
    return {name: arrays[name] for name in ("q", "k", "v")}


def segment_ids(case: JaxCase) -> Any:
    """The number of each token's document in its row, int32 `[B, S]`."""
    return jnp.asarray(np.stack([np.repeat(np.arange(len(row)), row) for row in case.rows]), jnp.int32)


def cu_seqlens(case: JaxCase) -> Any:
    """Where documents begin and end among all tokens, int32."""
    lengths = [length for row in case.rows for length in row]
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def ours(case: JaxCase) -> Program:
    """A dense call."""
    arrays = draw(case)
    return Program(op=getattr(ops, case.variant), leaves=leaves_of(arrays), do=arrays["do"])


def with_schedule(program: Program, make: Callable[..., Any]) -> Program:
    """The same with the schedule that `make` makes, made beforehand."""
    # Of q, k and v only shapes and dtype matter: compiled, none of them is read.
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
    """cuDNN: causal by itself, documents by a mask of all pairs; or the mask holds both."""
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
    """o `[rows, G, D]` of the query heads of one key head, in float32, of q `[rows, G, D]` and k, v `[S, D]`."""
    scores = jnp.einsum("qgd,kd->gqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1)
    return jnp.einsum("gqk,kd->qgd", weights, v, precision="highest")


@functools.lru_cache(maxsize=1)
def _expected(case: JaxCase) -> dict[str, Any]:
    """o and gradients of the last rows of the batch, for its first key head.

    Causal, the last keys are seen by no other queries: their gradients are whole too.
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
    """What is wrong with the results of an implementation; "" when nothing is.

    A peer need only compute the same: its own precision is its own affair.
    """
    want, got = _expected(case), program.results()
    errors = {}
    for key, wanted in want.items():
        rows, heads, _ = wanted.shape
        found = got[key][-1, -rows:, :heads].astype(jnp.float32)
        errors[key] = float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))
    bound = BOUND[getattr(torch, case.dtype)] * (1 if name in OURS else 2)
    # A NaN is above every bound.
    worst = max(errors, key=lambda each: errors[each] if errors[each] == errors[each] else float("inf"))
    return "" if errors[worst] <= bound else f"WRONG against float32: {worst} is off by {errors[worst]:.1e}"
