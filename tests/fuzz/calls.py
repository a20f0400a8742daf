"""A call of a variant, as plain numbers that print as one line of JSON, and what it becomes: tensors, and the problem
that they are.

Everything a tensor holds follows from the call's seed, so that a failure is repeated from its text.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .attention import Entry, Problem, Tokens
from .expressions import ROWS, parsed

FREE = 7
"""Size of a dim that is a name, unless the call says another."""

INDEX_DIMS = ("b", "h", "hkv", "q_idx", "kv_idx")
BEHIND = 3
"""Rows of NaN behind, and columns of it beside, what a call may read."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call. Lengths have an element per sequence where `mode` is packed, else one.

    memory: how q, k and v lie: "rows" (NaN behind each head's rows), "tokens" ([B, S, H, D] underneath), "columns" (NaN
    beside each row), "odd" (rows at odd addresses). contents: what an integer tensor holds. given: dtypes of tensors
    where these are not as declared. passes: "fwd" or "all".
    """

    mode: str = "dense"
    family: str = "portable"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    q_lens: tuple[int, ...] = (16,)
    kv_lens: tuple[int, ...] = (16,)
    dim: int = 16
    dim_v: int = 16
    dtype: str = "float32"
    scale: float | None = None
    q_offset: int | str | tuple[int, ...] = 0
    layout: str = "bhsd"
    memory: str = "rows"
    tiles: tuple[int, int] | None = (16, 16)
    with_lse: bool = True
    passes: str = "all"
    deterministic: bool = False
    trained: tuple[str, ...] | None = None
    q_segment_ids: tuple[tuple[int, ...], ...] | None = None
    kv_segment_ids: tuple[tuple[int, ...], ...] | None = None
    q_positions: tuple[tuple[int, ...], ...] | None = None
    kv_positions: tuple[tuple[int, ...], ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    padding_id: int = -1
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    free: int = FREE
    dropout_p: float = 0.0
    dropout_seed: int = 0
    seed: int = 0

    @property
    def packed(self) -> bool:
        return self.mode == "packed"

    @property
    def sequences(self) -> int:
        return len(self.q_lens) if self.packed else self.batch

    def text(self) -> str:
        """JSON, what is as by default left out."""
        default = asdict(Call())
        return json.dumps({name: value for name, value in asdict(self).items() if value != default[name]})

    @staticmethod
    def of(text: str) -> Call:
        return Call(**{name: _tupled(value) for name, value in json.loads(text).items()})


def _tupled(x: Any) -> Any:
    return tuple(map(_tupled, x)) if isinstance(x, list) else x


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call as its op takes them, `arguments` by keyword, and the problem they are."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    arguments: dict[str, Any]
    problem: Problem

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        named |= {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}
        return {name: x for name, x in named.items() if x.requires_grad}


def build(entry: Entry, call: Call, device: str = "cpu") -> Inputs:
    """Draw every tensor of a call."""
    return _Builder(entry, call, device).inputs()


class _Builder:
    def __init__(self, entry: Entry, call: Call, device: str) -> None:
        self.entry, self.call, self.device = entry, call, device
        self.random = torch.Generator().manual_seed(call.seed)
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.q_len = sum(call.q_lens) if call.packed else call.q_lens[0]
        self.kv_len = sum(call.kv_lens) if call.packed else call.kv_lens[0]

    # ---------------------------------------------------------------------------------------------------------- tensors

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def _wants(self, name: str) -> bool:
        trained = self.call.trained
        return self.call.passes == "all" and (trained is None or name in trained)

    def _tokens(self, name: str, heads: int, length: int, dim: int) -> Tensor:
        """q, k or v as the op takes it in layout "bhsd" or packed, in the midst of NaN."""
        call = self.call
        lead = [] if call.packed else [call.batch]
        values = self._normal(*lead, heads, length, dim).to(self.dtype)
        if call.packed:
            values = values.transpose(0, 1)  # [total, H, D]
        token_major = call.packed or call.memory == "tokens"
        stored = values if call.packed or not token_major else values.transpose(1, 2)
        beside = {"columns": 8, "odd": BEHIND}.get(call.memory, 0)
        shape = list(stored.shape)
        rows = 0 if call.packed else (1 if token_major else 2)
        shape[rows] += BEHIND
        shape[-1] += beside
        start = 1 if call.memory == "odd" else 0
        buffer = torch.full(shape, math.nan, dtype=self.dtype, device=self.device)
        view = buffer.narrow(rows, 0, length).narrow(-1, start, dim)
        view.copy_(stored)
        view = view.transpose(1, 2) if token_major and not call.packed else view
        view = view.transpose(1, 2) if call.layout == "bshd" and not call.packed else view
        return view.detach().requires_grad_(self._wants(name))

    def _surrounded(self, x: Tensor, wants_grad: bool = False) -> Tensor:
        """The same with something behind its last axis that must not be read."""
        if not x.dim() or self.call.memory == "rows":
            return x.to(self.device).detach().requires_grad_(wants_grad)
        behind = math.nan if x.is_floating_point() else True if x.dtype == torch.bool else torch.iinfo(x.dtype).max // 2
        buffer = torch.full((*x.shape[:-1], x.shape[-1] + BEHIND), behind, dtype=x.dtype, device=self.device)
        view = buffer[..., : x.shape[-1]]
        view.copy_(x)
        return view.detach().requires_grad_(wants_grad)

    def _size(self, dim: str | int) -> int:
        call = self.call
        if isinstance(dim, int):
            return dim
        if dim in ("q_idx", "kv_idx"):
            if call.packed:
                return self.q_len if dim == "q_idx" else self.kv_len
            offset = self._offsets().max().item() if call.sequences else 0
            return int(max(self.q_len + offset, self.q_len, self.kv_len, 1))
        return {"b": call.sequences, "h": call.heads, "hkv": call.kv_heads}.get(dim, call.free)

    def _shape(self, name: str) -> list[int]:
        """A free dim that a position alone indexes is as long as the positions go: ops ask for that. All tensors with a
        dim of this name share its size."""
        dims = self.entry["tensors"][name]["dims"]
        reach, long = self._size("q_idx"), self._long_dims()
        sizes = [max(self._size(dim), reach) if dim in long else self._size(dim) for dim in dims]
        if not self.call.packed or not any(dim in ("q_idx", "kv_idx") for dim in dims):
            return sizes
        return [length for length, dim in zip(sizes, dims, strict=True) if dim != "b"]

    def _long_dims(self) -> set[str]:
        """The free dims that a position alone indexes in some tensor."""
        tensors = self.entry["tensors"]
        found = {tensors[name]["dims"][axis] for name in tensors for axis in position_axes(self.entry, name)}
        return {dim for dim in found if isinstance(dim, str) and dim not in INDEX_DIMS}

    def _own(self, name: str) -> Tensor:
        declared = self.entry["tensors"][name]
        shape = self._shape(name)
        own: torch.dtype = getattr(torch, declared.get("dtype", "float32"))
        dtype = self._dtype(name, own)
        if dtype.is_floating_point:
            values = (0.6 * self._normal(*shape)).to(own).to(dtype)  # nothing that a cast to `own` would round
            return self._surrounded(values, bool(declared.get("grad")) and self._wants(name))
        return self._surrounded(self._integers(name, shape).to(dtype))

    def _dtype(self, name: str, declared: torch.dtype = torch.float32) -> torch.dtype:
        given = self.call.given.get(name)
        return getattr(torch, given) if given else declared

    def _integers(self, name: str, shape: list[int]) -> Tensor:
        kind = self.call.contents.get(name, "low")
        drawn = torch.randint(0, 2**20, shape, generator=self.random)
        last = torch.arange(shape[-1] if shape else 1).expand(shape) if shape else drawn * 0
        if kind == "runs":
            return last // (5 + 2 * (drawn.view(-1)[0].item() % 7) if drawn.numel() else 5)
        if kind == "positions":
            return drawn.argsort(-1) if shape and drawn.numel() else drawn
        if kind == "far":
            return drawn % 80 - 8
        return drawn % 3 if kind == "low" else drawn % 2

    # --------------------------------------------------------------------------------------------------------- the call

    def _offsets(self) -> Tensor:
        """The position of the first query of each batch row or sequence."""
        call, n = self.call, self.call.sequences
        if call.q_offset == "end":
            reach = call.kv_lengths or (call.kv_lens if call.packed else call.kv_lens * n)
            q_lens = call.q_lens if call.packed else call.q_lens * n
            return torch.tensor(reach, dtype=torch.int64) - torch.tensor(q_lens, dtype=torch.int64)
        found = [call.q_offset] * n if isinstance(call.q_offset, int) else call.q_offset
        return torch.tensor(found, dtype=torch.int64)

    def _ints(self, x: Any) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=self.device)

    def _arguments(self) -> dict[str, Any]:
        call = self.call
        given: dict[str, Any] = {name: self._own(name) for name in self.entry.get("tensors", {})}
        given |= call.scalars
        if self.entry.get("sink"):
            given["sink"] = self._surrounded(self._normal(call.heads).to(self._dtype("sink")), self._wants("sink"))
        if self.entry.get("decay"):
            shape = [self.kv_len, call.heads] if call.packed else [call.batch, self._size("kv_idx"), call.heads]
            g = -0.3 * torch.rand(shape, generator=self.random)
            given["g"] = self._surrounded(g.to(self._dtype("g")), self._wants("g"))
        return given

    def _options(self) -> dict[str, Any]:
        call = self.call
        given: dict[str, Any] = {} if call.scale is None else {"scale": call.scale}
        if call.q_offset != 0:
            given["q_offset"] = self._ints(call.q_offset) if isinstance(call.q_offset, tuple) else call.q_offset
        if self.entry.get("dropout"):
            given |= {"dropout_p": call.dropout_p, "seed": call.dropout_seed}
        if call.packed:
            given["cu_seqlens_q"] = self._ints([0, *torch.tensor(call.q_lens).cumsum(0).tolist()])
            given["cu_seqlens_k"] = self._ints([0, *torch.tensor(call.kv_lens).cumsum(0).tolist()])
            return given
        for name in ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_lengths"):
            value = getattr(call, name)
            if value is not None:
                given[name] = self._ints(value)
        given |= {"layout": call.layout} if call.layout != "bhsd" else {}
        return given | ({"padding_id": call.padding_id} if call.padding_id != -1 else {})

    def inputs(self) -> Inputs:
        call = self.call
        q = self._tokens("q", call.heads, self.q_len, call.dim)
        k = self._tokens("k", call.kv_heads, self.kv_len, call.dim)
        v = self._tokens("v", call.kv_heads, self.kv_len, call.dim_v)
        own, options = self._arguments(), self._options()
        lead = [self.q_len] if call.packed else [call.batch, self.q_len]
        do = self._normal(*lead, call.heads, call.dim_v).to(self.dtype).to(self.device)
        dlse = self._normal(*lead, call.heads).to(self.device)  # [..., S, H]
        problem = self._problem(q, k, v, do, dlse, own)
        if not call.packed and call.layout == "bhsd":
            do = do.transpose(1, 2)
        dlse = dlse.T if call.packed else dlse.transpose(1, 2)
        return Inputs(
            call=call, q=q, k=k, v=v, do=do, dlse=dlse.contiguous(), arguments={**own, **options}, problem=problem
        )

    def _problem(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, own: dict[str, Any]) -> Problem:
        call = self.call
        flat = [flatten(x, call).detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
        n = call.sequences
        q_lens, kv_lens = (x if call.packed else x * n for x in (call.q_lens, call.kv_lens))
        offset = self._offsets().to(self.device)
        segments = [call.q_segment_ids, call.kv_segment_ids or call.q_segment_ids]
        positions = [call.q_positions, call.kv_positions or call.q_positions]
        queries = self._side(q_lens, offset, segments[0], positions[0])
        keys = self._side(kv_lens, offset * 0, segments[1], positions[1])
        return Problem(
            entry=self.entry,
            packed=call.packed,
            q=flat[0],
            k=flat[1],
            v=flat[2],
            do=do.reshape(-1, call.heads, call.dim_v),
            dlse=dlse.reshape(-1, call.heads).T.contiguous(),
            tensors={name: x for name, x in own.items() if isinstance(x, Tensor)},
            scalars=dict(call.scalars),
            queries=queries,
            keys=keys,
            offset=offset,
            reach=torch.tensor(call.kv_lengths or kv_lens, device=self.device),
            masked_segment=call.padding_id if call.q_segment_ids is not None else -(2**40),
            scale=call.dim**-0.5 if call.scale is None else call.scale,
            dropout_p=call.dropout_p,
            seed=call.dropout_seed,
        )

    def _side(self, lens: tuple[int, ...], offset: Tensor, ids: Any, positions: Any) -> Tokens:
        size = torch.tensor(lens, dtype=torch.int64)
        begin = size.cumsum(0) - size
        batch = torch.arange(len(lens)).repeat_interleave(size)
        local = torch.arange(int(size.sum())) - begin[batch]
        row = local + offset.cpu()[batch]
        segment = torch.zeros_like(local) if ids is None else torch.tensor(ids, dtype=torch.int64).view(-1)
        position = row if positions is None else torch.tensor(positions, dtype=torch.int64).view(-1)
        named = {"batch": batch, "row": row, "position": position, "local": local}
        named |= {"segment": segment, "begin": begin, "size": size}
        return Tokens(**{name: x.to(self.device) for name, x in named.items()})


def position_axes(entry: Entry, name: str) -> set[int]:
    """The axes of a tensor that `q_idx` or `kv_idx` indexes as it is, somewhere in the entry."""
    found: set[int] = set()
    for text in (entry.get("mask"), entry.get("score")):
        for node in ast.walk(parsed(text)) if text else ():
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == name:
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                found |= {axis for axis, part in enumerate(parts) if isinstance(part, ast.Name) and part.id in ROWS}
    return found


def flatten(x: Tensor, call: Call) -> Tensor:
    """q, k, v, o or one of their gradients, as the op has it, as `[tokens, H, D]`."""
    if call.packed:
        return x
    return (x if call.layout == "bshd" else x.transpose(1, 2)).flatten(0, 1)


def flatten_lse(x: Tensor, call: Call) -> Tensor:
    """lse as `[H, tokens]`."""
    return x if call.packed else x.transpose(0, 1).flatten(1)
