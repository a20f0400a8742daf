# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: document: {mask: 'causal and doc[b, q_idx] == doc[b, kv_idx]', tensors: {doc: {dims: [b, kv_idx], dtype:
#     int32, example: kv_idx // 300}}}
# template: ops/torch_op.py.jinja
# hash: 307d1ed243cd2e7a
"""`document` for PyTorch. Causal within each document of a packed row; `doc` numbers them, in any order."""

from torch import Tensor

from .._runtime.checks import at_least
from .._runtime.configs import PASSES
from .._runtime.torch_schedule import Schedule, call_sizes, schedule_tables, scheduled
from .._runtime.torch_support import (
    autocast_inputs,
    check_inputs,
    check_tensor,
    config_text,
    interpreter_dtype,
    launches_directly,
    positive_scale,
    query_offset,
    runs_reference,
)
from .torch_launch import Attention, make_tables, tiles_of
from .torch_reference import reference

NAME = "document"


def _schedule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc: Tensor | None = None,
    layout: str = "bhsd",
    q_offset: int | str | Tensor = 0,
    config: dict[str, dict[str, int]] | None = None,
    backward: bool = True,
) -> Schedule:
    """The blocks that calls with these arguments visit, for their `schedule=`: made once, used by every layer.

    The arguments are the op's; of q, k and v only shapes, dtype and device matter. `backward=False` leaves out what
    the backward needs. Without a schedule a call makes its own.
    """
    check_inputs(NAME, q, k, v, None, layout)
    q, k, v = autocast_inputs(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    row_offset, row_offsets = query_offset(NAME, q_offset, q, q.shape[2], k.shape[2])
    doc = check_tensor(
        NAME, "doc", doc, (q.shape[0], at_least(max(row_offset + q.shape[2], k.shape[2]))), ("int32",), q
    )
    call_key = call_sizes(q, k, row_offset, row_offsets)
    if runs_reference(q):
        return Schedule(op=NAME, call=call_key, tiles={}, tables=())
    config_words = config_text(NAME, config)
    tables = make_tables(q, k, v, doc, row_offset, row_offsets, config_words, backward)
    tiles = tiles_of(q, v, config_words)
    tile_blocks = {each: (tiles[each].block_m, tiles[each].block_n) for each in (PASSES if backward else PASSES[:1])}
    return Schedule(op=NAME, call=call_key, tiles=tile_blocks, tables=tuple(tables))


@scheduled(_schedule)
def document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    q_offset: int | str | Tensor = 0,
    config: dict[str, dict[str, int]] | None = None,
    schedule: Schedule | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal within each document of a packed row; `doc` numbers them, in any order.

        score = scale * q @ k^T
        keep = q_idx >= kv_idx and doc[b, q_idx] == doc[b, kv_idx]
        o = exp(score) @ v / sum(exp(score))

    Args:
        q: `[B, Hq, Sq, D]`, float16, bfloat16 or float32, any strides; D from 16 to 256.
        k: `[B, Hkv, Skv, D]`; Hq is a multiple of Hkv, and each key head serves Hq / Hkv query heads.
        v: `[B, Hkv, Skv, Dv]`.
        doc: int32 `[b, kv_idx]`, such as `kv_idx // 300`.
        scale: factor of `q @ k^T`, by default `D ** -0.5`.
        layout: `"bhsd"` as above, or `"bshd"` for q, k, v and o of `[B, S, H, D]`.
        return_lse: also return the natural log of the softmax denominator, float32 `[B, Hq, Sq]`, differentiable.
        q_offset: position of the first query row: an int, an int32 tensor `[B]`, or `"end"` for `Skv - Sq`.
        config: tiles by pass, such as `{"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}}`;
            passes are fwd, dkdv and dq, and one that is not named keeps its default.
        schedule: what `document.schedule(...)` gave for a call like this one; by default each call makes its own.

    Returns:
        o in the layout and dtype of q, or `(o, lse)`. A row without any key has o = 0, lse = -inf.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype, device or value; both a TypeError and a ValueError.

    On CPU tensors the plain reference is computed, or with TRITON_INTERPRET=1 these kernels in Triton's interpreter.
    """
    check_inputs(NAME, q, k, v, scale, layout)
    q, k, v = autocast_inputs(q, k, v)
    dtype = q.dtype
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    row_offset, row_offsets = query_offset(NAME, q_offset, q, q.shape[2], k.shape[2])
    doc = check_tensor(
        NAME, "doc", doc, (q.shape[0], at_least(max(row_offset + q.shape[2], k.shape[2]))), ("int32",), q
    )
    config_words = config_text(NAME, config)
    block_tables: list[Tensor] = []
    if schedule is not None:
        # Traced, the operators alone know the chip, and with it the tiles.
        tiles = tiles_of(q, v, config_words) if launches_directly(q) and not runs_reference(q) else None
        block_tables = schedule_tables(NAME, schedule, call_sizes(q, k, row_offset, row_offsets), tiles)
    if runs_reference(q):
        q_offset = row_offset if row_offsets is None else row_offsets
        o, lse = reference(
            q,
            k,
            v,
            doc=doc,
            scale=scale,
            q_offset=q_offset,
            return_lse=True,
        )
    else:
        q, scale = positive_scale(q, scale)
        q, k, v = interpreter_dtype(q, k, v)
        o, lse = Attention.apply(q, k, v, doc, row_offset, row_offsets, scale, config_words, block_tables)
        o = o.to(dtype)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o
