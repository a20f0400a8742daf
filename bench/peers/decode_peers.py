"""The implementations of the decode suite: our op on pages and on a page for each sequence, FlashInfer and SDPA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bench.cases.decode import DecodeCase
from codegen.testing import golden

DTYPE = torch.bfloat16
WORKSPACE = 256 * 2**20
"""Bytes that FlashInfer keeps its parts in."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A layer's inputs: q is `[B, Hq, queries, D]`, caches are `[pages, page size, Hkv, D]`."""

    case: DecodeCase
    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor
    kv_lengths: Tensor
    own: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values of all sequences."""
        row = self.k.shape[2] * (self.k.shape[3] * self.k.element_size() + self.v.shape[3] * self.v.element_size())
        return sum(self.case.lengths) * row

    def gathered(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one sequence, `[1, Hkv, S, D]`."""
        length, size = self.case.lengths[sequence], self.k.shape[1]
        places = torch.arange(length, device=self.q.device)
        pages = self.page_table[sequence].long()[places // size]
        k, v = (x[pages, places % size].transpose(0, 1)[None] for x in (self.k, self.v))
        return k, v


def draw(case: DecodeCase, device: str, *, contiguous: bool = False) -> Step:
    """Random inputs, on pages in random order, or with a page for each sequence."""
    count = len(case.lengths)
    size = max(case.lengths) if contiguous else case.page_size
    needed = [-(-length // size) for length in case.lengths]
    table = torch.full((count, max(needed)), -1, dtype=torch.int32)
    order = torch.arange(count) if contiguous else torch.randperm(sum(needed))
    first = 0
    for row, pages in zip(table, needed, strict=True):
        row[:pages] = order[first : first + pages].int()
        first += pages
    shape = (sum(needed), size, case.kv_heads, case.dim)
    k = torch.randn(shape, dtype=DTYPE, device=device)
    return Step(
        case=case,
        q=torch.randn(count, case.heads, case.queries, case.dim, dtype=DTYPE, device=device),
        k=k,
        v=torch.randn_like(k),
        page_table=table.to(device),
        kv_lengths=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        own=_own(case, shape[:2], device),
    )


def _own(case: DecodeCase, pages: tuple[int, int], device: str) -> dict[str, Any]:
    """The arguments of the variant itself.

    A tensor with an element for every key lies in pages; one with an element for every pair of query and key does not.
    """
    entry = golden.load_manifest()[case.variant]
    sizes = {"h": (case.heads,), "hkv": (case.kv_heads,), "b": (len(case.lengths),), "kv_idx": pages}
    found: dict[str, Any] = {}
    for name, spec in entry["tensors"].items():
        if "q_idx" in spec["dims"]:
            x = torch.rand(len(case.lengths), case.heads, case.queries, max(case.lengths), device=device)
            found[name] = x < 0.7 if spec["dtype"] == "bool" else x
            continue
        dims = [dim for dim in spec["dims"] if dim != "b" or "kv_idx" not in spec["dims"]]
        shape = [n for dim in dims for n in (sizes.get(dim, (16384,)) if isinstance(dim, str) else (dim,))]
        if not spec["dtype"].startswith("int"):
            found[name] = torch.rand(shape, device=device) * 0.1
        elif "kv_idx" in dims:
            found[name] = torch.zeros(shape, dtype=torch.int32, device=device)  # one document
        else:
            found[name] = torch.full(shape, max(case.lengths), dtype=torch.int32, device=device)
    for name in entry["scalars"]:
        found[name] = entry["scalar_examples"][name]
    if entry["sink"]:
        found["sink"] = torch.randn(case.heads, device=device)
    return found


@dataclass(frozen=True, kw_only=True)
class Built:
    """A call on a step's inputs, whose result is `[B, Hq, queries, D]`; `plan`, what is done once for all layers of a
    step. `wait` blocks until a result is there, of calls that no CUDA graph of torch can hold. `others` differ in an
    option: the fastest counts."""

    call: Callable[[Step], Any]
    plan: Callable[[], Any] | None = None
    wait: Callable[[Any], Any] | None = None
    others: tuple[Callable[[Step], Any], ...] = ()


def _ours(step: Step, *, splits: str | None = None) -> Built:
    op: Any = golden.load_op(step.case.variant)
    common = {"page_table": step.page_table, "kv_lengths": step.kv_lengths, "splits": splits}
    bounds = op.plan.__kwdefaults__ or {}
    own = {name: x for name, x in step.own.items() if name in bounds}

    def plan() -> Any:
        return op.plan(step.q, step.k, **common, **own)

    made = plan()

    def call(layer: Step) -> Tensor:
        tables = common | {"page_table": layer.page_table, "kv_lengths": layer.kv_lengths}
        o: Tensor = op(layer.q, layer.k, layer.v, schedule=made, **tables, **layer.own)
        return o

    return Built(call=call, plan=plan)


def _flashinfer(step: Step) -> Built:
    import flashinfer  # optional

    case, size, device = step.case, step.k.shape[1], step.q.device
    if case.queries != 1:
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
    """FlashAttention-2's split decode, of sequences of one length without pages."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(step.case.lengths)) > 1 or step.case.queries != 1:
        raise ValueError("takes one length for all sequences, and one query")

    def call(layer: Step) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            k, v = layer.k.transpose(1, 2), layer.v.transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(layer.q, k, v, enable_gqa=True)

    return Built(call=call)


def _fa3(step: Step) -> Built:
    """FlashAttention-3's kernels for caches, by the package that binds them to JAX; the best of some split counts."""
    # Else XLA takes most of the memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    from flash_attn3_jax.kvcache import flash_mha_with_kvcache  # optional

    def array(x: Tensor) -> Any:
        return jax.dlpack.from_dlpack(x.contiguous())

    table, lengths = array(step.page_table.clamp(min=0)), array(step.kv_lengths)
    arrays: dict[int, tuple[Any, ...]] = {}

    def given(layer: Step) -> tuple[Any, ...]:
        if id(layer) not in arrays:
            arrays[id(layer)] = (array(layer.q.transpose(1, 2)), array(layer.k), array(layer.v))
        return arrays[id(layer)]

    def splitting(splits: int) -> Callable[[Step], Any]:
        call = jax.jit(
            lambda q, k, v: flash_mha_with_kvcache(
                q, k, v, cache_seqlens=lengths, page_table=table, is_causal=True, num_splits=splits
            )
        )
        return lambda layer: call(*given(layer))

    first, *others = map(splitting, (1, 4, 8, 16, 32, 64))
    return Built(call=first, wait=jax.block_until_ready, others=tuple(others))


BUILDERS: dict[str, Callable[[Step], Built]] = {
    "codegen": _ours,
    "contiguous": _ours,
    "balanced": lambda step: _ours(step, splits="balanced"),
    "flashinfer": _flashinfer,
    "fa3": _fa3,
    "sdpa": _sdpa,
}
CONTIGUOUS = frozenset({"contiguous", "sdpa"})
"""Implementations whose caches have a page for each sequence."""


def fault(case: DecodeCase, name: str, device: str) -> str:
    """The error of one implementation of a small case against float64 of the gathered cache; "" if it is right."""
    step = draw(case.small(), device, contiguous=name in CONTIGUOUS)
    if name == "sdpa":
        step = draw(DecodeCase(**{**vars(case), "lengths": (2000, 2000)}), device, contiguous=True)
    got = BUILDERS[name](step).call(step)
    if name == "fa3":
        got = from_dlpack(got).transpose(1, 2)
    reference = golden.load_reference(case.variant)
    dims = {key: spec["dims"] for key, spec in golden.load_manifest()[case.variant]["tensors"].items()}
    worst = 0.0
    for number, length in enumerate(step.case.lengths):
        k, v = (x.double() for x in step.gathered(number))
        own = {key: _alone(x, dims.get(key, []), step, number) for key, x in step.own.items()}
        want = reference(
            step.q[number : number + 1].double(),
            k,
            v,
            q_offset=length - case.queries,
            first_batch=number,
            **own,
        )
        want = want[0] if isinstance(want, tuple) else want
        worst = max(worst, float((got[number : number + 1].double() - want).norm() / want.norm()))
    return "" if worst <= golden.BOUND[DTYPE] else f"WRONG against float64: o is off by {worst:.1e}"


def _alone(x: Any, dims: list[str], step: Step, sequence: int) -> Any:
    """One of the variant's own arguments as the reference of one sequence takes it."""
    if "kv_idx" not in dims:
        return x
    if "q_idx" in dims:  # the reference reads it by position, a call on paged caches by row
        length, queries = step.case.lengths[sequence], step.case.queries
        rows = (torch.arange(length, device=x.device) - (length - queries)).clamp(min=0)
        return x[sequence, :, rows, :length][None].expand(sequence + 1, -1, -1, -1)
    places = torch.arange(step.case.lengths[sequence], device=step.q.device)
    size = step.k.shape[1]
    row = x[step.page_table[sequence].long()[places // size], places % size]
    return row[None].expand(sequence + 1, -1)
