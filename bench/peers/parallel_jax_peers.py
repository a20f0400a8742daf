"""Context parallelism in JAX: our ops under `generated.jax_parallel`, and Kvax's, over all devices of this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.cases.parallel import ParallelCase
from generated import jax as ops
from generated.jax_parallel import Layout, Machine, context_parallel, plan

ROWS = 1
"""The axis of rows of q, k, v and o, `[B, S, H, D]`."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An op with its arguments: `leaves`, whose gradients are computed, and `given`, all others.

    `in_order` puts rows of a result in the order of the sequence.
    """

    op: Callable[..., Any]
    leaves: tuple[Any, ...]
    do: Any
    given: tuple[Any, ...] = ()
    in_order: Callable[[Any], Any] = lambda x: x
    layout: Layout | None = None

    @functools.cached_property
    def _forward(self) -> Any:
        return jax.jit(self.op)

    @functools.cached_property
    def _both(self) -> Any:
        op = self.op

        def both(leaves: tuple[Any, ...], do: Any, given: tuple[Any, ...]) -> Any:
            o, pullback = jax.vjp(lambda *x: op(*x, *given), *leaves)
            return (o, *pullback(do))

        return jax.jit(both)

    def forward(self) -> Any:
        return self._forward(*self.leaves, *self.given)

    def both(self) -> Any:
        """o and the gradients of q, k and v."""
        return self._both(self.leaves, self.do, self.given)


def draw(case: ParallelCase, batch: int, dtype: str) -> dict[str, Any]:
    """q, k, v and do on the first device."""
    heads, key_heads = case.heads
    keys = jax.random.split(jax.random.key(0), 4)
    counts = {"q": heads, "k": key_heads, "v": key_heads, "do": heads}
    with jax.default_device(jax.devices()[0]):
        return {
            name: jax.random.normal(key, (batch, case.seq, count, case.dim), dtype)
            for key, (name, count) in zip(keys, counts.items(), strict=True)
        }


def segment_ids(case: ParallelCase) -> np.ndarray[Any, Any] | None:
    """The document of each row, int32 `[S]`."""
    return np.repeat(np.arange(len(case.documents), dtype=np.int32), case.documents) if case.documents else None


def one_device(case: ParallelCase, arrays: Mapping[str, Any]) -> Program:
    """Ours on the first device."""
    op, ids = getattr(ops, case.variant), segment_ids(case)
    given = dict(case.scalars)

    def attend(q: Any, k: Any, v: Any) -> Any:
        tokens = {} if ids is None else {"q_segment_ids": jnp.broadcast_to(jnp.asarray(ids), q.shape[:2])}
        return op(q, k, v, **tokens, **given)

    return Program(op=attend, leaves=tuple(arrays[name] for name in ("q", "k", "v")), do=arrays["do"])


def ours(case: ParallelCase, arrays: Mapping[str, Any], strategy: str, machine: Machine) -> Program:
    """Ours over all devices."""
    op, ranks = getattr(ops, case.variant), len(jax.devices())
    given: dict[str, Any] = dict(case.scalars)
    documents: dict[str, Any] = {"segment_ids": segment_ids(case)} if case.documents else {}
    layout = plan(
        op,
        ranks,
        seq=case.seq,
        heads=case.heads,
        head_dim=case.dim,
        strategy=strategy,
        machine=machine,
        **documents,
        **given,
    )
    mesh = jax.make_mesh((ranks,), ("cp",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(mesh, P(None, "cp"))
    parallel = context_parallel(op, layout, mesh=mesh, spec=P(None, "cp", None))

    def put(x: Any) -> Any:
        return jax.device_put(layout.shard(x, ROWS), placed)

    return Program(
        op=functools.partial(parallel, **given),
        leaves=tuple(put(arrays[name]) for name in ("q", "k", "v")),
        do=put(arrays["do"]),
        in_order=lambda x: layout.unshard(x, ROWS),
        layout=layout,
    )


def kvax(case: ParallelCase, arrays: Mapping[str, Any]) -> Program:
    """Kvax's context parallelism: rows in a zig-zag, and keys that Kvax gathers and puts in order inside the call.

    Its block masks are made beforehand.
    """
    from bench.peers import kvax_peer

    modules = kvax_peer._modules()
    utils, ranks = modules.utils, len(jax.devices())
    mesh = Mesh(np.array(jax.devices()).reshape(1, ranks, 1), ("data", "context", "model"))
    specs = ("data", "context", None, None), ("data", None, None, None)
    batch, seq = arrays["q"].shape[:2]
    ids = segment_ids(case)
    positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    whole_ids = jnp.broadcast_to(jnp.asarray(np.zeros(seq, np.int32) if ids is None else ids), (batch, seq))
    rows, all_rows = (NamedSharding(mesh, spec) for spec in (P("data", "context"), P("data", None)))

    def permuted(x: Any) -> Any:
        with utils.attention_specs(*specs):
            return jax.device_put(utils.permute_tokens_context_parallelism(x, mesh=mesh), rows)

    def unpermuted(x: Any) -> Any:
        with utils.attention_specs(*specs):
            return utils.unpermute_tokens_context_parallelism(x, mesh=mesh)

    common = {**kvax_peer._blocks(), "mesh": mesh}
    tokens = (
        permuted(positions),
        permuted(whole_ids),
        jax.device_put(positions, all_rows),
        jax.device_put(whole_ids, all_rows),
    )

    def masks(*tokens: Any) -> Any:
        with utils.attention_specs(*specs):
            made = modules.ops.create_attention_mask(*tokens, calc_bwd_mask=True, **common)
        return tuple(mask.flatten() for mask in made)

    made = jax.jit(masks)(*tokens)

    def attend(q: Any, k: Any, v: Any, tokens: Any, made: Any) -> Any:
        options = {
            "scale": q.shape[-1] ** -0.5,
            "assume_sequential_positions": True,
            "permute_tokens_for_load_balance": True,
            **common,
        }
        with utils.attention_specs(*specs):
            mask = tuple(modules.mask.unflatten(each) for each in made)
            return modules.ops.flash_attention(q, k, v, *tokens, mask, **options)

    return Program(
        op=attend,
        leaves=tuple(permuted(arrays[name]) for name in ("q", "k", "v")),
        do=permuted(arrays["do"]),
        given=(tokens, made),
        in_order=unpermuted,
    )
