"""The implementations of the packed suite: ours, packed, segmented and dense, FlexAttention, FLA, FlashAttention-4."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.cases.packed import OURS, PackedCase
from bench.peers.torch_peers import Runner
from codegen.testing import golden
from codegen.testing.calls import packed
from codegen.testing.golden import BOUND, Inputs

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Built:
    """An implementation with its inputs.

    `dense` converts o and gradients to layout "bhsd" of the dense batch. `schedule` makes a schedule. `unscheduled` is
    a forward that makes its own schedule.
    """

    runner: Runner
    dense: Callable[[Tensor], Tensor] = lambda x: x
    schedule: Callable[[], Any] | None = None
    unscheduled: Callable[[], Tensor] | None = None

    def results(self) -> dict[str, Tensor]:
        """o and all gradients, by name."""
        o = self.runner.forward()
        named = {f"d{name}": grad for name, grad in zip(self.runner.leaves, self.runner.gradients(o), strict=True)}
        return {name: self.dense(x.detach()) if name != "dg" else x for name, x in ({"o": o} | named).items()}


def draw(case: PackedCase, device: str) -> Inputs:
    """The inputs of the dense batch."""
    entry = golden.load_manifest()[case.variant]
    return golden.draw_inputs(entry, case.shape, dtype=DTYPE, device=device)


def cu_seqlens(case: PackedCase, device: torch.device) -> Tensor:
    """Cumulative document lengths over all rows, int32 `[documents + 1]`."""
    ends = [0, *itertools.accumulate(length for row in case.rows for length in row)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _longest(case: PackedCase) -> int:
    """The tokens of the longest document."""
    return max(length for row in case.rows for length in row)


def segment_ids(case: PackedCase, device: torch.device) -> Tensor:
    """The document index of each token within its row, int32 `[B, S]`."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in case.rows]
    return torch.stack(rows).to(device, torch.int32)


def _scheduled(op: Any, inputs: Inputs, dense: Callable[[Tensor], Tensor], **options: Any) -> Built:
    def schedule() -> Any:
        return op.schedule(inputs.q, inputs.k, inputs.v, **options)

    made = schedule()
    return Built(
        runner=Runner(forward=lambda: inputs.call(op, schedule=made, **options), do=inputs.do, leaves=inputs.leaves()),
        dense=dense,
        schedule=schedule,
        unscheduled=lambda: inputs.call(op, **options),
    )


def _packed(case: PackedCase, inputs: Inputs) -> Built:
    batch = len(case.rows)
    ends = cu_seqlens(case, inputs.q.device)
    return _scheduled(
        golden.load_op(case.variant),
        packed(golden.load_manifest()[case.variant], inputs),
        lambda x: x.unflatten(0, (batch, -1)).transpose(1, 2),
        cu_seqlens_q=ends,
        max_seqlen_q=_longest(case),
    )


def _segments(case: PackedCase, inputs: Inputs) -> Built:
    ids = segment_ids(case, inputs.q.device)
    return _scheduled(golden.load_op(case.variant), inputs, lambda x: x, q_segment_ids=ids)


def _dense(case: PackedCase, inputs: Inputs) -> Built:
    return _scheduled(golden.load_op(case.variant), inputs, lambda x: x)


def _flex(case: PackedCase, inputs: Inputs) -> Built:
    # Graphs are kept and run repeatedly, which donated buffers forbid.
    functorch_config.donated_buffer = False
    torch.compiler.reset()
    ids = segment_ids(case, inputs.q.device)

    def causal_in_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001 -- Flex's names
        return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

    seq = case.shape.seq
    # Compiled: eagerly, the S x S mask of 64k tokens exceeds memory.
    create = torch.compile(create_block_mask)
    mask = create(causal_in_documents, len(case.rows), None, seq, seq, device=inputs.q.device)
    run = torch.compile(functools.partial(flex_attention, block_mask=mask, enable_gqa=True), dynamic=False)
    return Built(runner=Runner(forward=lambda: run(inputs.q, inputs.k, inputs.v), do=inputs.do, leaves=inputs.leaves()))


def _fla(case: PackedCase, inputs: Inputs) -> Built:
    from fla.ops.attn.parallel import parallel_attn  # optional

    batch = len(case.rows)
    one = packed(golden.load_manifest()[case.variant], inputs)
    # A batch of one; FLA indexes with 64 bits.
    leaves = {name: x.detach()[None].requires_grad_() for name, x in one.leaves().items()}
    ends = cu_seqlens(case, inputs.q.device).long()

    def forward() -> Tensor:
        o: Tensor = parallel_attn(leaves["q"], leaves["k"], leaves["v"], g=leaves["g"], cu_seqlens=ends)
        return o

    return Built(
        runner=Runner(forward=forward, do=one.do[None], leaves=leaves),
        dense=lambda x: x[0].unflatten(0, (batch, -1)).transpose(1, 2),
    )


def _fa4(case: PackedCase, inputs: Inputs) -> Built:
    # Shares compiled kernels between processes. The module reads this when it is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import flash_attn_varlen_func  # optional

    batch = len(case.rows)
    one = packed(golden.load_manifest()[case.variant], inputs)
    # Leave out empty documents, which have no token.
    ends = torch.unique_consecutive(cu_seqlens(case, inputs.q.device))
    longest = _longest(case)

    def forward() -> Tensor:
        found = flash_attn_varlen_func(
            one.q,
            one.k,
            one.v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=True,
        )
        # Most versions return the lse too, asked for or not.
        o: Tensor = found[0] if isinstance(found, tuple) else found
        return o

    return Built(
        runner=Runner(forward=forward, do=one.do, leaves=one.leaves()),
        dense=lambda x: x.unflatten(0, (batch, -1)).transpose(1, 2),
    )


BUILDERS: dict[str, Callable[[PackedCase, Inputs], Built]] = {
    "packed": _packed,
    "segments": _segments,
    "dense": _dense,
    "flex": _flex,
    "fa4": _fa4,
    "fla": _fla,
}


def _expected(case: PackedCase, inputs: Inputs) -> dict[str, Tensor]:
    """o and all gradients in float64, from the plain reference applied to each document."""
    reference = golden.load_reference(case.variant)
    whole = inputs.double()
    outputs = []
    for b, row in enumerate(case.rows):
        found = [whole.q.new_zeros(0, whole.q.shape[1], whole.v.shape[3])]
        ends = itertools.accumulate(row, initial=0)
        for start, end in itertools.pairwise(ends):
            if end > start:
                q, k, v = (x[b : b + 1, :, start:end] for x in (whole.q, whole.k, whole.v))
                own = {name: x[b : b + 1, start:end] for name, x in whole.tensors.items()}
                found.append(reference(q, k, v, **own)[0].transpose(0, 1))
        outputs.append(torch.cat(found).transpose(0, 1))
    o = torch.stack(outputs)
    leaves = whole.leaves()
    grads = torch.autograd.grad(o, list(leaves.values()), whole.do)
    return {"o": o.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


@functools.cache
def fault(case: PackedCase, name: str, device: str) -> str:
    """The error of one implementation of a small case against float64; "" if it is right."""
    inputs = draw(case, device)
    want = _expected(case, inputs)
    got = BUILDERS[name](case, inputs).results()
    errors = golden.relative_errors({key: x.reshape(want[key].shape) for key, x in got.items()}, want)
    bound = BOUND[DTYPE]
    if name not in OURS:  # peers are checked for computing the same function, not for precision
        bound *= 2
        errors.pop("dg", None)
    worst = max(errors, key=lambda each: errors[each])
    return "" if errors[worst] <= bound else f"WRONG against float64: {worst} is off by {errors[worst]:.1e}"
