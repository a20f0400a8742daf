"""A call of a variant drawn for web pages: pictures of its blocks and of its pairs, and the shares of each status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from codegen.analysis.schedule import Schedule, analyse
from codegen.inspect import images
from codegen.inspect.block_status import Grid, Status, pairs
from codegen.inspect.call import make_call
from codegen.inspect.show import LEAST_BLOCK, Picture, mask_of, picture
from codegen.ir import expr
from codegen.ir.evaluate import Array
from codegen.ir.expr import LENGTH_NAMES, Expr
from codegen.spec import dims
from codegen.spec.model import Variant
from codegen.util.errors import CodegenError

MOST_STEPS = 2**30
"""Most operations of a mask times pairs of a portrait: they take some seconds."""

MOST_ELEMENTS = 2**24
"""Most elements of a tensor that the mask reads."""

_CHUNK = 2**18
"""Pairs whose mask is evaluated at once: each operation keeps one number of 8 bytes per pair."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The call that is drawn, and its blocks."""

    q_len: int = 1024
    kv_len: int = 1024
    q_offset: int = 0
    batch: int = 0
    head: int = 0
    block_m: int = LEAST_BLOCK
    block_n: int = LEAST_BLOCK


@dataclass(frozen=True, kw_only=True)
class Portrait:
    """The result of `draw`: `blocks` is an SVG element, `pairs` a PNG, `kept` the share of pairs that are kept."""

    view: View
    picture: Picture
    schedule: Schedule
    blocks: str
    pairs: bytes
    kept: float

    def share(self, status: Status, *, proven: bool = True) -> float:
        """The share of blocks of a status, as block analysis proves it or as evaluating every pair shows it."""
        found = self.picture.proven if proven or self.picture.found is None else self.picture.found
        return float((found == status).mean())

    @property
    def skipped(self) -> float:
        """The share of the blocks that kernels do not visit."""
        return self.share(Status.EMPTY)


def draw(variant: Variant, view: View, scalars: Mapping[str, str] | None = None) -> Portrait:
    """The portrait of a call with `scalars`, given as text; other scalars and all tensors are examples.

    Raises `ScalarError` for a scalar that does not fit its declaration, and `CodegenError` for a call that is too large
    to be drawn.
    """
    mask = mask_of(variant)
    seen = _for_mask(variant, mask)
    steps = view.q_len * view.kv_len * sum(1 for _ in expr.walk(mask))
    if steps > MOST_STEPS:
        what = f"{view.q_len} queries by {view.kv_len} keys, with {steps // (view.q_len * view.kv_len)} operations each"
        raise CodegenError(f"the picture is too large: {what}; give shorter lengths")
    given = {name: text for name, text in (scalars or {}).items() if name in seen.scalars}
    _check_tensors(seen, view, given)
    call = make_call(
        seen,
        q_len=view.q_len,
        kv_len=view.kv_len,
        q_offset=view.q_offset,
        batch=view.batch,
        head=view.head,
        scalars=given,
        files={},
    )
    grid = Grid(call=call, block_m=view.block_m, block_n=view.block_n)
    found = picture(seen, [grid])
    rows = max(1, _CHUNK // view.kv_len)
    kept: Array = np.concatenate([pairs(mask, call, r, r + rows) for r in range(0, view.q_len, rows)])
    return Portrait(
        view=view,
        picture=found,
        schedule=analyse(variant.mask).schedule,
        blocks=images.blocks_svg(found.proven if found.found is None else found.found),
        pairs=images.pairs_png(kept),
        kept=float(kept.mean()),
    )


def _for_mask(variant: Variant, mask: Expr) -> Variant:
    """The variant without the tensors that only its score reads: a picture does not need them."""
    read = {load.tensor for load in expr.loads(mask)}
    return replace(variant, score=None, tensors={name: t for name, t in variant.tensors.items() if name in read})


def _check_tensors(variant: Variant, view: View, scalars: Mapping[str, str]) -> None:
    """Refuse example tensors that would not fit the memory of a small machine."""
    longest = max(view.q_len + max(view.q_offset, 0), view.kv_len)
    sizes = {"b": view.batch + 1, "h": max(8, view.head + 1), "hkv": max(8, view.head + 1)}
    sizes |= dict.fromkeys(("q_idx", "kv_idx", *LENGTH_NAMES), longest)
    sizes |= {name: int(spec.typical(view.kv_len)) for name, spec in variant.scalars.items()}
    sizes |= {name: int(text) for name, text in scalars.items() if text.isdecimal() and len(text) < 10}
    for tensor in variant.tensors.values():
        shape = [dims.size_of(dim, tensor, sizes, longest) for dim in tensor.dims]
        if math.prod(shape) > MOST_ELEMENTS:
            raise CodegenError(f"the tensor '{tensor.name}' is too large to be drawn: {shape}; give shorter lengths")
