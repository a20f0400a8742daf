"""The implementations of the decode suite in JAX: our op and Pallas' kernel on pages, and FlashAttention-3."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bench.peers.decode_step import Built, Step

LAYERS = 4
"""Layers in one program, so many that the GPU computes them while the program is still being launched."""

PALLAS_OPTIONS = ((8, 16), (4, 16), (8, 8), (4, 32))
"""Pages of a block, and splits of the keys, of Pallas' kernel: its defaults first."""


def _jax() -> Any:
    # Otherwise XLA allocates most of the GPU's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax  # optional

    return jax


def _array(x: Tensor) -> Any:
    """The same memory as an array of JAX."""
    return _jax().dlpack.from_dlpack(x.contiguous())


def _arrays(layer: Step) -> tuple[Any, Any, Any]:
    return _array(layer.q.transpose(1, 2)), _array(layer.k), _array(layer.v)


def _as_torch(o: Any) -> Tensor:
    """`[B, queries, Hq, D]` of JAX as `[B, Hq, queries, D]`."""
    return from_dlpack(o).transpose(1, 2)


def fa3(step: Step) -> Built:
    """FlashAttention-3's kernels for caches, by the package that binds them to JAX; the best of some split counts."""
    jax = _jax()
    from flash_attn3_jax.kvcache import flash_mha_with_kvcache  # optional

    table, lengths = _array(step.page_table.clamp(min=0)), _array(step.kv_lengths)

    def splitting(splits: int) -> Callable[..., Any]:
        found: Callable[..., Any] = jax.jit(
            lambda q, k, v: flash_mha_with_kvcache(
                q, k, v, cache_seqlens=lengths, page_table=table, is_causal=True, num_splits=splits
            )
        )
        return found

    calls = list(map(splitting, (1, 4, 8, 16, 32, 64)))

    def programs(layers: Sequence[Step]) -> list[Callable[[], Any]]:
        arrays = [_arrays(layer) for layer in layers]

        def program(call: Callable[..., Any]) -> Any:
            for each in arrays:
                last = call(*each)
            return last

        return [functools.partial(program, call) for call in calls]

    return Built(
        call=lambda layer: calls[0](*_arrays(layer)), result=_as_torch, programs=programs, wait=jax.block_until_ready
    )


def _chained(jax: Any, attend: Callable[..., Any], given: tuple[Any, ...]) -> Callable[..., Any]:
    """A program of all layers: o of a layer is q of the next, so that they run in order, and XLA drops none."""

    run = jax.jit(attend)
    return lambda q, caches: run(q, caches, *given)


def ours(step: Step) -> Built:
    """Our op, with one plan for all layers in the same program."""
    jax = _jax()
    from codegen.testing.golden_jax import load_op

    if step.own or step.scales or step.packing:
        raise ValueError("takes a variant without arguments of its own, 16-bit caches, and as many queries everywhere")
    op: Any = load_op(step.case.variant)

    def attend(q: Any, caches: Sequence[tuple[Any, Any]], table: Any, lengths: Any) -> Any:
        pages = {"page_table": table, "kv_lengths": lengths}
        plan = op.plan(q, caches[0][0], **pages)
        for k, v in caches:
            q = op(q, k, v, schedule=plan, **pages)
        return q

    run = _chained(jax, attend, (_array(step.page_table), _array(step.kv_lengths)))

    def programs(layers: Sequence[Step]) -> list[Callable[[], Any]]:
        arrays = [_arrays(layer) for layer in layers]
        return [functools.partial(run, arrays[0][0], [each[1:] for each in arrays])]

    def call(layer: Step) -> Any:
        q, *cache = _arrays(layer)
        return run(q, [tuple(cache)])

    return Built(call=call, result=_as_torch, programs=programs, wait=jax.block_until_ready, layers=LAYERS)


def pallas(step: Step) -> Built:
    """JAX's own kernel for GPUs; the best of some options. Its caches are `[Hkv, pages, page size, D]`."""
    jax = _jax()
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if step.case.counts[0] != 1 or step.case.variant != "causal":
        raise ValueError("decodes one query that sees all keys")
    table = step.page_table.clamp(min=0)
    lengths = _array(step.kv_lengths)
    is_interpreted = step.q.device.type == "cpu"

    def running(pages: int, splits: int) -> Callable[..., Any]:
        # A split has whole blocks.
        padding = -table.shape[1] % (pages * splits)

        def attend(q: Any, caches: Sequence[tuple[Any, Any]], table: Any, lengths: Any) -> Any:
            q = q[:, 0]
            for k, v in caches:
                # The kernel does not scale scores.
                q = paged_attention(
                    q * q.shape[-1] ** -0.5,
                    k,
                    v,
                    table,
                    lengths,
                    pages_per_compute_block=pages,
                    k_splits=splits,
                    interpret=is_interpreted,
                )
            return q[:, None]

        return _chained(jax, attend, (_array(torch.nn.functional.pad(table, (0, padding))), lengths))

    runs = [running(*options) for options in PALLAS_OPTIONS]

    def cache(layer: Step) -> tuple[Any, Any]:
        return _array(layer.k.permute(2, 0, 1, 3)), _array(layer.v.permute(2, 0, 1, 3))

    def programs(layers: Sequence[Step]) -> list[Callable[[], Any]]:
        q, caches = _arrays(layers[0])[0], [cache(layer) for layer in layers]
        return [functools.partial(run, q, caches) for run in runs]

    return Built(
        call=lambda layer: runs[0](_arrays(layer)[0], [cache(layer)]),
        result=_as_torch,
        programs=programs,
        wait=jax.block_until_ready,
        layers=LAYERS,
    )
