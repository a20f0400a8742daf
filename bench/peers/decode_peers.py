"""The implementations of the decode suite in torch, ours and peers, and their comparison with float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.cases.decode import DecodeCase
from bench.peers import decode_jax
from bench.peers.decode_step import DTYPE, Built, Step, draw
from codegen.testing import golden

WORKSPACE = 256 * 2**20
"""Bytes of the buffer for FlashInfer's partial results."""


def _ours(step: Step, *, splits: str | None = None) -> Built:
    op: Any = golden.load_op(step.case.variant)
    common = {"page_table": step.page_table, "kv_lengths": step.kv_lengths, "splits": splits, **step.packing}

    def plan() -> Any:
        return op.plan(step.q, step.k, step.v, **common, **step.own)

    made = plan()

    def call(layer: Step) -> Tensor:
        tables = common | {"page_table": layer.page_table, "kv_lengths": layer.kv_lengths}
        o: Tensor = op(layer.q, layer.k, layer.v, schedule=made, **tables, **layer.own, **layer.scales)
        return o

    return Built(call=call, plan=plan)


def _apart(step: Step) -> Built:
    """A call for each group of adjacent sequences with the same number of queries."""
    op: Any = golden.load_op(step.case.variant)
    calls: list[Callable[[Step], Tensor]] = []
    begin = first = 0
    for count, group in itertools.groupby(step.case.counts):
        size = len(list(group))
        calls.append(_one_count(op, step, slice(begin, begin + size), slice(first, first + size * count), count))
        begin, first = begin + size, first + size * count

    def result(found: Sequence[Tensor]) -> Tensor:
        return torch.cat([o.transpose(1, 2).flatten(0, 1) for o in found])

    return Built(call=lambda layer: [call(layer) for call in calls], result=result)


def _one_count(op: Any, step: Step, sequences: slice, rows: slice, count: int) -> Callable[[Step], Tensor]:
    """A call on some of a step's sequences, which have `count` queries each: o is `[sequences, Hq, count, D]`."""

    def given(layer: Step) -> tuple[Tensor, Tensor, Tensor]:
        return layer.q[rows].unflatten(0, (-1, count)).transpose(1, 2), layer.k, layer.v

    pages = {"page_table": step.page_table[sequences], "kv_lengths": step.kv_lengths[sequences]}
    made = op.plan(*given(step), **pages, **step.own)

    def call(layer: Step) -> Tensor:
        o: Tensor = op(*given(layer), schedule=made, **pages, **layer.own)
        return o

    return call


def _packed(step: Step) -> Built:
    """The packed op, on keys without pages."""
    op: Any = golden.load_op(step.case.variant)
    if len({*step.case.lengths}) > 1 or step.packing:
        raise ValueError("takes one length and one number of queries for all sequences")
    length, count = step.case.lengths[0], step.case.counts[0]

    def ends(each: int) -> Tensor:
        steps = range(len(step.case.lengths) + 1)
        return torch.tensor([each * number for number in steps], dtype=torch.int32, device=step.q.device)

    def given(layer: Step) -> tuple[Tensor, Tensor, Tensor]:
        return layer.q.transpose(1, 2).flatten(0, 1), layer.k.flatten(0, 1), layer.v.flatten(0, 1)

    packing = {"cu_seqlens_q": ends(count), "cu_seqlens_k": ends(length), "q_offset": length - count}
    made = op.schedule(*given(step), backward=False, **packing, **step.own)

    def call(layer: Step) -> Tensor:
        o: Tensor = op(*given(layer), schedule=made, **packing, **layer.own)
        return o

    return Built(call=call, result=lambda o: o.unflatten(0, (-1, count)).transpose(1, 2))


def _flashinfer(step: Step) -> Built:
    import flashinfer  # optional

    case, size, device = step.case, step.k.shape[1], step.q.device
    if case.counts[0] != 1:
        raise ValueError("decodes one query")
    pages = [-(-length // size) for length in case.lengths]
    ends = torch.tensor([0, *pages]).cumsum(0).int()
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    group = case.heads // case.kv_heads
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        # Its kernels on tensor cores took twice to eight times as long as the others, on an H200 with torch 2.11.
        use_tensor_cores=group not in (1, 2, 3, 4, 6, 8),
        paged_kv_indptr_buffer=torch.empty_like(ends, device=device),
        paged_kv_indices_buffer=torch.empty(sum(pages), dtype=torch.int32, device=device),
        paged_kv_last_page_len_buffer=torch.empty(len(pages), dtype=torch.int32, device=device),
    )
    indices = torch.cat([row[:count] for row, count in zip(step.page_table, pages, strict=True)])
    last = torch.tensor([(length - 1) % size + 1 for length in case.lengths], dtype=torch.int32)

    def plan() -> None:
        wrapper.plan(
            ends, indices, last, case.heads, case.kv_heads, case.dim, size, q_data_type=DTYPE, kv_data_type=DTYPE
        )

    plan()

    def call(layer: Step) -> Tensor:
        o: Tensor = wrapper.run(layer.q[:, :, 0], (layer.k, layer.v))
        return o[:, :, None]

    return Built(call=call, plan=plan)


def _sdpa(step: Step) -> Built:
    """FlashAttention-2's split decode, for sequences of one length, without pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(step.case.lengths)) > 1 or step.case.counts[0] != 1:
        raise ValueError("takes one length for all sequences, and one query")

    def call(layer: Step) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            k, v = layer.k.transpose(1, 2), layer.v.transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(layer.q, k, v, enable_gqa=True)

    return Built(call=call)


BUILDERS: dict[str, Callable[[Step], Built]] = {
    "codegen": _ours,
    "contiguous": _ours,
    "balanced": lambda step: _ours(step, splits="balanced"),
    "flashinfer": _flashinfer,
    "bfloat16": _ours,
    "single": _ours,
    "packed": _packed,
    "apart": _apart,
    "jax": decode_jax.ours,
    "pallas": decode_jax.pallas,
    "fa3": decode_jax.fa3,
    "sdpa": _sdpa,
}
CONTIGUOUS = frozenset({"contiguous", "packed", "sdpa"})
"""Implementations whose caches have a page for each sequence."""


def fault(case: DecodeCase, name: str, device: str) -> str:
    """The error of one implementation of a small case against float64 of the gathered cache; "" if it is right."""
    small = case.read_by(name).small()
    if name == "sdpa":  # takes one length
        small = replace(small, lengths=(small.lengths[0],) * len(small.lengths))
    step = draw(small, device, contiguous=name in CONTIGUOUS)
    built = BUILDERS[name](step)
    got = built.result(built.call(step))
    reference = golden.load_reference(case.variant)
    dims = {key: spec["dims"] for key, spec in golden.load_manifest()[case.variant]["tensors"].items()}
    errors: list[float] = []
    for number, length in enumerate(step.case.lengths):
        k, v = step.gathered(number)
        own = {key: _alone(x, dims.get(key, []), step, number) for key, x in step.own.items()}
        want = reference(
            step.rows(step.q, number).double(),
            k,
            v,
            q_offset=length - small.counts[number],
            first_batch=number,
            **own,
        )
        want = want[0] if isinstance(want, tuple) else want
        errors.append(float((step.rows(got, number).double() - want).norm() / want.norm()))
    # A NaN is not within the bound.
    wrong = [error for error in errors if not error <= golden.BOUND[DTYPE]]
    return f"WRONG against float64: o is off by {max(wrong):.1e}" if wrong else ""


def _alone(x: Any, dims: list[str], step: Step, sequence: int) -> Any:
    """One of the variant's own arguments as the reference of one sequence takes it."""
    if "kv_idx" not in dims:
        return x
    if "q_idx" in dims:  # the reference reads it by position, a call on paged caches by row
        length, queries = step.case.lengths[sequence], step.case.counts[sequence]
        rows = (torch.arange(length, device=x.device) - (length - queries)).clamp(min=0)
        return x[sequence, :, rows, :length][None].expand(sequence + 1, -1, -1, -1)
    places = torch.arange(step.case.lengths[sequence], device=step.q.device)
    size = step.k.shape[1]
    row = x[step.page_table[sequence].long()[places // size], places % size]
    return row[None].expand(sequence + 1, -1)
