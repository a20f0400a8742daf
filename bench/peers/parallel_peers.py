"""Context parallelism of torch itself: `context_parallel` over SDPA's backends, and FlexAttention with PTRR.

Both are experimental in torch, and their names are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases.parallel import ParallelCase
from codegen.testing.calls import Inputs


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer on one rank. `rows` are the rows of the sequence that the rank has, in its order."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    do: Tensor
    rows: Tensor
    remark: str = ""

    def both(self) -> tuple[Tensor, ...]:
        """The gradients, after a forward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.do)


def dense(inputs: Inputs) -> tuple[Tensor, ...]:
    """q, k, v and do `[1, H, S, D]`, copies without gradients, of a dense or a packed call."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
    return tuple((x.detach().transpose(0, 1)[None] if x.dim() == 3 else x.detach()).clone() for x in tensors)


def _head_tail(seq: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """The rows of the two chunks of one rank: one from the start and one from the end."""
    chunks = torch.arange(seq, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@contextlib.contextmanager
def sdpa(case: ParallelCase, inputs: Inputs, mesh: Any, rank: int, backend: SDPBackend) -> Iterator[Peer]:
    """torch's `context_parallel`, as installed: an all-gather of keys, and a zig-zag of rows.

    While this context is open, `torch.nn.functional.scaled_dot_product_attention` is patched.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention

    if case.documents or case.variant != "causal":
        raise NotImplementedError("torch's context_parallel over SDPA knows causal attention alone")
    _attention._cp_options.enable_load_balance = True  # `flex` below changes this option for the whole process
    ranks = mesh.size()
    rows = _head_tail(case.seq, rank, ranks, inputs.q.device)
    buffers = list(dense(inputs))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        q, k, v, do = buffers
        leaves = tuple(x.requires_grad_() for x in (q, k, v))
        group = case.heads[0] // case.heads[1]

        def grouped() -> Tensor:
            with sdpa_kernel(backend):
                o: Tensor = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
                return o

        def repeated() -> Tensor:
            with sdpa_kernel(backend):
                wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
                o: Tensor = functional.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True)
                return o

        peer = Peer(forward=grouped, leaves=leaves, do=do, rows=rows)
        try:
            peer.both()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # It fails on every rank alike, because the backend does not support the shapes.
            peer = Peer(
                forward=repeated, leaves=leaves, do=do, rows=rows, remark="key heads repeated: it has no groups"
            )
        yield peer


@contextlib.contextmanager
def flex(case: ParallelCase, inputs: Inputs, mesh: Any, rank: int) -> Iterator[Peer]:
    """FlexAttention: all-gathers of k and v, and blocks of rows dealt by their work (PTRR)."""
    from torch.distributed.distributed_c10d import _get_process_group_name
    from torch.distributed.tensor.experimental._context_parallel import (
        _context_parallel_shard,
        _PTRRLoadBalancer,
        flex_cp_allgather,
    )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = inputs.q.device
    lengths = torch.tensor(case.documents or (case.seq,), device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def keep(_b: Tensor, _h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    create = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    mask = create(keep, 1, 1, case.seq, case.seq, device=str(device.type))
    balancer = _PTRRLoadBalancer(mask, mesh.size())
    rows = balancer._generate_indices()[0].chunk(mesh.size())[rank]
    parts: list[Any] = _context_parallel_shard(mesh, [*dense(inputs), mask], [2] * 5, balancer)
    q, k, v, do, own_mask = parts
    leaves = tuple(x.contiguous().requires_grad_() for x in (q, k, v))
    group = _get_process_group_name(mesh.get_group())
    options: dict[str, Any] = {"block_mask": own_mask, "enable_gqa": case.heads[0] != case.heads[1]}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = flex_attention(q, k, v, **options)
        return o

    run = torch.compile(attend, dynamic=False) if device.type == "cuda" else attend

    def forward() -> Tensor:
        q, k, v = leaves
        o: Tensor = run(q, *flex_cp_allgather(k, v, 2, group))
        return o

    peer = Peer(forward=forward, leaves=leaves, do=do.contiguous(), rows=rows)
    try:
        peer.both()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # mostly: its default blocks exceed shared memory; without pipelining they may fit
        torch.compiler.reset()
        options["kernel_options"] = {"num_stages": 1}
    yield peer


BUILDERS: dict[str, Callable[[ParallelCase, Inputs, Any, int], Any]] = {
    "cp-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "cp-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "cp-flex": flex,
}
"""Context managers that are a peer while they are open."""
