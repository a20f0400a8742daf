# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: band_mask: {mask: 'band(before, after) and keep[b, h, q_idx, kv_idx]', scalars: {before: {type: int, min: 0,
#     example: 256}, after: {type: int, min: 0, example: 32}}, tensors: {keep: {dims: [b, h, q_idx, kv_idx], dtype:
#     bool, example: (31 * i2 + 17 * i3) % 3 != 0}}}
# template: host/torch_op.py.jinja
# hash: 37bc6658d072becc
"""`band_mask` for PyTorch. A band, and a boolean per batch row, head and pair from the call (`mask` of
jax.nn.dot_product_attention, JAX)."""

from torch import Tensor

from .. import band_mask as dense
from .._runtime.core.checks import at_least, check_flag, check_int, keywords
from .._runtime.core.configs import PASSES
from .._runtime.core.options import call_mode
from .._runtime.core.schedules import Schedule, schedule_tables, scheduled
from .._runtime.core.sequences import check_alone
from .._runtime.torch.attention import Kernels
from .._runtime.torch.backward import Run, give_backward
from .._runtime.torch.cache_values import with_scales
from .._runtime.torch.devices import call_options
from .._runtime.torch.dispatch import launches_directly, runs_reference
from .._runtime.torch.dtypes import autocast_inputs, interpreter_dtype, result_dtype
from .._runtime.torch.few_queries import check_dense_plan, in_rows, split_call, splits_keys
from .._runtime.torch.fp8 import scaled_run
from .._runtime.torch.inputs import check_inputs, check_tensor, positive_scale, query_offset
from .._runtime.torch.module import AttentionModule
from .._runtime.torch.paged import autocast_queries, check_beside_pages, check_caches, check_without_pages, own_tensor
from .._runtime.torch.paged_kernels import PagedKernels, results_of
from .._runtime.torch.replay import apply, replayed_op
from .._runtime.torch.schedule import call_sizes, check_sequences, packed_sizes
from .._runtime.torch.sequences import Tokens, check_packed, check_tokens, packed_offset
from .._runtime.torch.strides import batch_row
from . import packed, paged, segmented, torch_reference

NAME = "band_mask"


DENSE = Kernels(
    op=NAME,
    mode="dense",
    modules=dense,
    reference=torch_reference.reference,
    parameters=("q", "k", "v", "own_keep", "row_offsets", "before", "after", "row_offset", "scale", "options"),
    dims={"own_keep": ("b", "h", "q_idx", "kv_idx")},
    scalars={"before": int, "after": int},
)
PACKED = Kernels(
    op=NAME,
    mode="packed",
    modules=packed,
    reference=torch_reference.packed_reference,
    parameters=(
        "q",
        "k",
        "v",
        "own_keep",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "row_offsets",
        "before",
        "after",
        "row_offset",
        "scale",
        "options",
        "block_tables",
    ),
    dims={"own_keep": ("h", "q_idx", "kv_idx")},
    scalars={"before": int, "after": int},
)
SEGMENTED = Kernels(
    op=NAME,
    mode="segmented",
    modules=segmented,
    reference=torch_reference.reference,
    parameters=(
        "q",
        "k",
        "v",
        "own_keep",
        "q_segment_ids",
        "kv_segment_ids",
        "q_positions",
        "kv_positions",
        "row_offsets",
        "before",
        "after",
        "padding_id",
        "row_offset",
        "scale",
        "options",
        "block_tables",
    ),
    dims={"own_keep": ("b", "h", "q_idx", "kv_idx")},
    scalars={"before": int, "after": int},
)
PAGED = PagedKernels(
    op=NAME,
    modules=paged,
    reference=torch_reference.packed_reference,
    dense_reference=torch_reference.reference,
    own={"own_keep": ("b", "h", "q_idx", "kv_idx"), "before": int, "after": int},
    bounds=("before", "after"),
)


@keywords(keep="own_keep")
def _schedule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    own_keep: Tensor | None = None,
    before: int | None = None,
    after: int | None = None,
    layout: str = "bhsd",
    q_offset: int | str | Tensor = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    padding_id: int = -1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    config: dict[str, dict[str, int]] | None = None,
    family: str | None = None,
    deterministic: bool | None = None,
    backward: bool = True,
) -> Schedule:
    """The blocks that calls with these arguments visit, for their `schedule=`: made once, used by every layer.

    The arguments are the op's; of q, k and v only shapes, dtype and device matter. `backward=False` leaves out what
    the backward needs. Without a schedule a call makes its own.
    """
    check_flag(f"{NAME}.schedule", "backward", backward)
    mode = call_mode(cu_seqlens_q, (q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths))
    options = call_options(NAME, config, family, deterministic, mode, (max_seqlen_q, max_seqlen_k))
    tables: list[Tensor] = []
    tokens: Tokens | None = None
    sequences: tuple[Tensor, ...] = ()
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_alone(NAME, layout, padding_id, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths)
        cu_seqlens_q, cu_seqlens_k = check_packed(NAME, q, k, v, None, cu_seqlens_q, cu_seqlens_k)
        row_offset, row_offsets = packed_offset(NAME, q_offset, q, cu_seqlens_q, cu_seqlens_k)
        own_keep = check_tensor(NAME, "keep", own_keep, (q.shape[1], q.shape[0], k.shape[0]), ("bool",), q)
        before = check_int(NAME, "before", before, minimum=0)
        after = check_int(NAME, "after", after, minimum=0)
        q, k, v = autocast_inputs(q, k, v)
        call_key = packed_sizes(q, k, cu_seqlens_q, row_offset, row_offsets)
        q, k, v = batch_row(q), batch_row(k), batch_row(v)
        sequences = (cu_seqlens_q, cu_seqlens_k)
        if not runs_reference(q):
            tables = PACKED.tables(q, k, v, cu_seqlens_q, cu_seqlens_k, options, backward=backward)
    else:
        check_inputs(NAME, q, k, v, None, layout)
        q, k, v = autocast_inputs(q, k, v)
        if layout == "bshd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        tokens = check_tokens(
            NAME, q, k, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths, padding_id, q_offset
        )
        row_offset, row_offsets = query_offset(NAME, q_offset, q, k, kv_lengths)
        own_keep = check_tensor(
            NAME,
            "keep",
            own_keep,
            (q.shape[0], q.shape[1], at_least(row_offset + q.shape[2]), at_least(k.shape[2])),
            ("bool",),
            q,
        )
        before = check_int(NAME, "before", before, minimum=0)
        after = check_int(NAME, "after", after, minimum=0)
        call_key = call_sizes(q, k, row_offset, row_offsets, tokens)
        if tokens is not None and not runs_reference(q):
            q_segment_ids, kv_segment_ids, q_positions, kv_positions = tokens
            tables = SEGMENTED.tables(
                q,
                k,
                v,
                q_segment_ids,
                kv_segment_ids,
                before,
                after,
                padding_id,
                q_positions,
                kv_positions,
                row_offset,
                row_offsets,
                options,
                backward=backward,
            )
    if q.is_meta:
        return Schedule(op=NAME, call=call_key, sequences=sequences, tiles={}, tables=())
    tiles = DENSE.tiles(q, v, options)
    if sequences:
        tiles = PACKED.tiles(q, v, options, sequences[0])
    elif tokens is not None:
        tiles = SEGMENTED.tiles(q, v, options, tokens.q_segment_ids)
    if runs_reference(q):
        return Schedule(op=NAME, call=call_key, sequences=sequences, tiles={}, tables=())
    tile_blocks = {each: (tiles[each].block_m, tiles[each].block_n) for each in (PASSES if backward else PASSES[:1])}
    return Schedule(op=NAME, call=call_key, sequences=sequences, tiles=tile_blocks, tables=tuple(tables))


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    before: int | None = None,
    after: int | None = None,
    layout: str = "bhsd",
    q_offset: int | str | Tensor | None = None,
    page_table: Tensor | None = None,
    page_starts: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    splits: int | str | None = None,
    config: dict[str, dict[str, int]] | None = None,
    family: str | None = None,
) -> Schedule:
    """How the keys of each sequence are split, for the `schedule=` of calls with these arguments: made once a step.

    The arguments are the op's; v is needed if its head_dim is not k's. Of q, k and v only shapes, strides, dtype and
    device matter. Nothing waits for the device.
    Without `page_table` the plan is for dense calls of any number of queries, which then split their keys.
    """
    if page_table is None:
        check_dense_plan(NAME, page_starts, cu_seqlens_q, max_seqlen_q, config, family, by_query=True)
        check_inputs(NAME, q, k, k if v is None else v, None, layout)
        if layout == "bshd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        call = split_call(NAME, q, k, k, None, 0 if q_offset is None else q_offset, kv_lengths, -1, splits)
        before = check_int(NAME, "before", before, minimum=0)
        after = check_int(NAME, "after", after, minimum=0)
    else:
        q = autocast_queries(q, k, k if v is None else v)
        call = check_caches(
            NAME,
            q,
            k,
            k if v is None else v,
            None,
            layout,
            q_offset,
            page_table,
            page_starts,
            kv_lengths,
            cu_seqlens_q,
            max_seqlen_q,
            splits,
            config,
            family,
        )
        before = check_int(NAME, "before", before, minimum=0)
        after = check_int(NAME, "after", after, minimum=0)
    return PAGED.plan(call, before, after)


@scheduled(_schedule, plan=_plan)
@keywords(keep="own_keep")
@replayed_op()
def band_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    own_keep: Tensor | None = None,
    before: int | None = None,
    after: int | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    q_offset: int | str | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    padding_id: int = -1,
    page_table: Tensor | None = None,
    page_starts: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    splits: int | str | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    config: dict[str, dict[str, int]] | None = None,
    family: str | None = None,
    deterministic: bool | None = None,
    schedule: Schedule | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A band, and a boolean per batch row, head and pair from the call (`mask` of jax.nn.dot_product_attention,
    JAX).

        score = scale * q @ k^T
        keep = q_idx - kv_idx <= before and kv_idx - q_idx <= after and keep[b, h, q_idx, kv_idx]
        o = exp(score) @ v / sum(exp(score))

    Args:
        q: `[B, Hq, Sq, D]`, float16, bfloat16 or float32, any strides; D from 8 to 512, on paged caches to 576.
        k: `[B, Hkv, Skv, D]`; Hq is a multiple of Hkv, and each key head serves Hq / Hkv query heads.
        v: `[B, Hkv, Skv, Dv]`.
        keep: bool `[b, h, q_idx, kv_idx]`, packed `[h, total_q, total_k]`, such as `(31 * i2 + 17 * i3) % 3 !=
            0`.
        before: int, at least 0, such as 256.
        after: int, at least 0, such as 32.
        scale: factor of `q @ k^T`, by default `D ** -0.5`.
        layout: `"bhsd"` as above, or `"bshd"` for q, k, v and o of `[B, S, H, D]`.
        return_lse: also return the natural log of the softmax denominator, float32 `[B, Hq, Sq]`, differentiable.
        q_offset: position of the first query row: an int, an integer tensor `[B]`, or `"end"` for `Skv - Sq`. By
            default 0, on paged caches `"end"`.
        cu_seqlens_q: integers `[n + 1]`, for a packed call: q is `[total_q, Hq, D]`, k `[total_k, Hkv, D]`, v
            `[total_k, Hkv, Dv]`, and sequence s, rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, is what batch row s
            is in a dense call. `q_offset` may be an integer tensor `[n]`; o is `[total_q, Hq, Dv]`, lse
            `[Hq, total_q]`.
        cu_seqlens_k: the same for k and v; by default `cu_seqlens_q`.
        q_segment_ids: integers `[B, Sq]`; a query attends to the keys that have its id, unless it is `padding_id`.
        kv_segment_ids: integers `[B, Skv]`; by default `q_segment_ids`.
        q_positions: integers `[B, Sq]`, the values of `q_idx` in mask and score; by default the row + `q_offset`.
        kv_positions: integers `[B, Skv]`, the values of `kv_idx` there; by default `q_positions`.
        kv_lengths: integers `[B]`, the number of keys of each batch row: no query attends to keys behind them.
            `q_offset="end"` is then `kv_lengths - Sq`.
        padding_id: the segment id of padding, which attends to nothing.
        page_table: integers `[B, most pages]`, for a call on paged caches, which has no gradient: k is
            `[pages, page size, Hkv, D]`, v `[pages, page size, Hkv, Dv]`, each of any strides but a last one of 1, and
            row b of the table holds the pages of sequence b, of `kv_lengths[b]` keys, in order. q is `[B, Hq, Sq, D]`,
            or with `cu_seqlens_q` `[total_q, Hq, D]`. A tensor with an element for every key lies in pages as well,
            `[pages, page size]` for that dim and without a batch axis; one with an element for every query lies as q.
            Entries and pages that no query can see by its position are never read. If v is a view of the first
            columns of k, as `k[..., :512]`, one load serves both products.
        page_starts: integers `[B + 1]`, where each sequence's pages begin in a flat `page_table` `[all pages]`.
        max_seqlen_q: the number of queries of the longest sequence, in a packed or segmented call: kernels are then
            chosen for how uneven the lengths are, which may change the last bits. On paged caches no sequence may have
            more queries; by default one may have all.
        max_seqlen_k: the number of keys of the longest sequence; by default `max_seqlen_q`.
        q_scale: the factor by which q of float8_e4m3fn is multiplied: a number, floats `[Hq]` or `[B, Hq]`, in a packed
            call `[n, Hq]`. No element may be below 0, which is not checked on a GPU. Such calls need k and v of that
            dtype, too, with scales of their own, run on Hopper GPUs and have no gradient; o is bfloat16.
        k_scale: the factor by which the keys of a paged cache are multiplied: a number, floats `[Hkv]`, or one for each
            token, `[pages, page size, Hkv]`. A cache of float8_e4m3fn or float8_e5m2 needs one; its products are of q's
            dtype. With q of float8_e4m3fn it is for k what `q_scale` is for q, with Hkv heads.
        v_scale: the same for the values.
        splits: how a call on paged caches splits keys. None: by the sequence's own length, so that its bits are the
            same in any batch, on any pages. `"balanced"`: over the batch. An int: the keys of a split, or 1 for no
            split. Dense calls of few queries and many keys split keys by themselves, too, if no gradient is needed.
        config: tiles by pass, such as `{"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}}`;
            passes are fwd, dkdv and dq, and one that is not named keeps its default.
            On paged caches they are decode, for sequences with few rows, and paged_fwd, for prompts; both may also name
            the least keys of a split, `"keys_per_split"`. If paged_fwd is not named, fwd takes its place.
        family: of the kernels, on paged caches of those for prompts, `"portable"` or `"hopper"`; by default `"hopper"`
            if its kernels are the faster ones and `config` names no tile of their passes.
        deterministic: whether equal inputs must give gradients of equal bits, by default what
            `torch.use_deterministic_algorithms` says. On Hopper GPUs the fastest backward adds up dq in any
            order.
        schedule: what `band_mask.schedule(...)` gave for a call like this one; by default each call makes its
            own.

    Returns:
        o in the layout and dtype of q, or `(o, lse)`. A row without any key has o = 0, lse = -inf.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype, device or value; both a TypeError and a ValueError.
        NotImplementedError: a second derivative, or a derivative in forward mode, is requested.

    Tensors of integers may be of any integer dtype: each call casts those that are not int32. The variant's own tensors
    of floats may be of any float dtype, and so are their gradients, which are summed in float32. A number may also be a
    scalar of numpy or a tensor `[]` on the CPU. `torch.func.grad`, `vjp`, `jacrev` and `vmap` work as `backward` does.

    On CPU tensors the plain reference is computed, or with TRITON_INTERPRET=1 these kernels in Triton's interpreter.
    """
    check_flag(NAME, "return_lse", return_lse)
    if page_table is not None:
        check_beside_pages(
            NAME,
            cu_seqlens_k,
            max_seqlen_k,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            padding_id=padding_id,
            deterministic=deterministic,
            q_scale=q_scale,
        )
        return _paged(
            q,
            k,
            v,
            own_keep,
            before,
            after,
            scale,
            layout,
            return_lse,
            q_offset,
            page_table,
            page_starts,
            kv_lengths,
            cu_seqlens_q,
            max_seqlen_q,
            splits,
            config,
            family,
            k_scale,
            v_scale,
            schedule,
        )
    check_without_pages(NAME, page_starts, splits if cu_seqlens_q is not None or cu_seqlens_k is not None else None)
    run = scaled_run(NAME, q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, layout)
    return _call(
        run,
        q,
        k,
        v,
        own_keep,
        before,
        after,
        scale,
        layout,
        return_lse,
        0 if q_offset is None else q_offset,
        cu_seqlens_q,
        cu_seqlens_k,
        q_segment_ids,
        kv_segment_ids,
        q_positions,
        kv_positions,
        kv_lengths,
        padding_id,
        max_seqlen_q,
        max_seqlen_k,
        splits,
        config,
        family,
        deterministic,
        schedule,
    )


def _call(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keep: Tensor | None,
    before: int | None,
    after: int | None,
    scale: float | None,
    layout: str,
    return_lse: bool,
    q_offset: int | str | Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_segment_ids: Tensor | None,
    kv_segment_ids: Tensor | None,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    kv_lengths: Tensor | None,
    padding_id: int,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    splits: int | str | None,
    config: dict[str, dict[str, int]] | None,
    family: str | None,
    deterministic: bool | None,
    schedule: Schedule | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call without paged caches, whose kernels `run` runs."""
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_alone(NAME, layout, padding_id, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths)
        return _packed(
            run,
            q,
            k,
            v,
            own_keep,
            before,
            after,
            scale,
            return_lse,
            q_offset,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            config,
            family,
            deterministic,
            schedule,
        )
    check_inputs(NAME, q, k, v, scale, layout)
    q, k, v = autocast_inputs(q, k, v)
    dtype = result_dtype(q)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    beside = (q_segment_ids, kv_segment_ids, q_positions, kv_positions, config, family)
    by_query = True
    if run is apply and splits_keys(
        NAME,
        q,
        k,
        v,
        (
            own_keep,
            before,
            after,
        ),
        beside,
        schedule,
        splits,
        by_query=by_query,
    ):
        call_options(NAME, None, None, deterministic, lengths=(max_seqlen_q, max_seqlen_k))
        o, lse = _split(
            q,
            k,
            v,
            own_keep,
            before,
            after,
            scale,
            q_offset,
            kv_lengths,
            padding_id,
            splits,
            schedule,
        )
        return results_of(o, lse, dtype, swaps=layout == "bshd", return_lse=return_lse)
    tokens = check_tokens(
        NAME, q, k, q_segment_ids, kv_segment_ids, q_positions, kv_positions, kv_lengths, padding_id, q_offset
    )
    row_offset, row_offsets = query_offset(NAME, q_offset, q, k, kv_lengths)
    own_keep = check_tensor(
        NAME,
        "keep",
        own_keep,
        (q.shape[0], q.shape[1], at_least(row_offset + q.shape[2]), at_least(k.shape[2])),
        ("bool",),
        q,
    )
    before = check_int(NAME, "before", before, minimum=0)
    after = check_int(NAME, "after", after, minimum=0)
    options = call_options(
        NAME, config, family, deterministic, "dense" if tokens is None else "segmented", (max_seqlen_q, max_seqlen_k)
    )
    block_tables: list[Tensor] = []
    if schedule is not None:
        tiles = None
        # While a call is traced, only the operators know the chip, and with it the tiles.
        if launches_directly(q) and not runs_reference(q):
            tiles = DENSE.tiles(q, v, options)
            if tokens is not None:
                tiles = SEGMENTED.tiles(q, v, options, tokens.q_segment_ids)
        block_tables = schedule_tables(NAME, schedule, call_sizes(q, k, row_offset, row_offsets, tokens), tiles)
    if runs_reference(q):
        options = options.plainly()
    q, scale = positive_scale(q, scale)
    q, k, v = interpreter_dtype(q, k, v)
    if tokens is None:
        o, lse, *_ = run(DENSE.function, q, k, v, own_keep, row_offsets, before, after, row_offset, scale, options)
    else:
        q_segment_ids, kv_segment_ids, q_positions, kv_positions = tokens
        padding_id = int(padding_id)
        o, lse, *_ = run(
            SEGMENTED.function,
            q,
            k,
            v,
            own_keep,
            q_segment_ids,
            kv_segment_ids,
            q_positions,
            kv_positions,
            row_offsets,
            before,
            after,
            padding_id,
            row_offset,
            scale,
            options,
            block_tables,
        )
    o = o.to(dtype)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def _packed(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keep: Tensor | None,
    before: int | None,
    after: int | None,
    scale: float | None,
    return_lse: bool,
    q_offset: int | str | Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    config: dict[str, dict[str, int]] | None,
    family: str | None,
    deterministic: bool | None,
    schedule: Schedule | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The packed call: q, k and v are `[total, H, D]`."""
    cu_seqlens_q, cu_seqlens_k = check_packed(NAME, q, k, v, scale, cu_seqlens_q, cu_seqlens_k)
    row_offset, row_offsets = packed_offset(NAME, q_offset, q, cu_seqlens_q, cu_seqlens_k)
    own_keep = check_tensor(NAME, "keep", own_keep, (q.shape[1], q.shape[0], k.shape[0]), ("bool",), q)
    before = check_int(NAME, "before", before, minimum=0)
    after = check_int(NAME, "after", after, minimum=0)
    options = call_options(NAME, config, family, deterministic, "packed", (max_seqlen_q, max_seqlen_k))
    block_tables: list[Tensor] = []
    q, k, v = autocast_inputs(q, k, v)
    dtype = result_dtype(q)
    if schedule is not None:
        call_key = packed_sizes(q, k, cu_seqlens_q, row_offset, row_offsets)
        launched = launches_directly(q) and not runs_reference(q)
        tiles = PACKED.tiles(batch_row(q), batch_row(v), options, cu_seqlens_q) if launched else None
        block_tables = schedule_tables(NAME, schedule, call_key, tiles)
        check_sequences(NAME, schedule, cu_seqlens_q, cu_seqlens_k)
    # If there is no key or no query at all, kernels have nothing to read.
    if runs_reference(q) or k.shape[0] == 0 or q.shape[0] == 0:
        options = options.plainly()
    q, scale = positive_scale(q, scale)
    q, k, v = interpreter_dtype(q, k, v)
    o, lse, *_ = run(
        PACKED.function,
        q,
        k,
        v,
        own_keep,
        cu_seqlens_q,
        cu_seqlens_k,
        row_offsets,
        before,
        after,
        row_offset,
        scale,
        options,
        block_tables,
    )
    o = o.to(dtype)
    return (o, lse) if return_lse else o


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keep: Tensor | None,
    before: int | None,
    after: int | None,
    scale: float | None,
    layout: str,
    return_lse: bool,
    q_offset: int | str | Tensor | None,
    page_table: Tensor,
    page_starts: Tensor | None,
    kv_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    splits: int | str | None,
    config: dict[str, dict[str, int]] | None,
    family: str | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    schedule: Schedule | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call on paged caches: k and v are `[pages, page size, Hkv, D]`."""
    q = autocast_queries(q, k, v)
    call = check_caches(
        NAME,
        q,
        k,
        v,
        scale,
        layout,
        q_offset,
        page_table,
        page_starts,
        kv_lengths,
        cu_seqlens_q,
        max_seqlen_q,
        splits,
        config,
        family,
    )
    call = with_scales(NAME, call, k_scale, v_scale)
    own_keep = own_tensor(
        NAME,
        call,
        "keep",
        own_keep,
        (
            "b",
            "h",
            "q_idx",
            "kv_idx",
        ),
        ("bool",),
    )
    before = check_int(NAME, "before", before, minimum=0)
    after = check_int(NAME, "after", after, minimum=0)

    o, lse = PAGED.forward(call, schedule, own_keep, before, after)
    return results_of(o, lse, q.dtype, swaps=layout == "bshd" and cu_seqlens_q is None, return_lse=return_lse)


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keep: Tensor | None,
    before: int | None,
    after: int | None,
    scale: float | None,
    q_offset: int | str | Tensor,
    kv_lengths: Tensor | None,
    padding_id: int,
    splits: int | str | None,
    schedule: Schedule | None,
) -> tuple[Tensor, Tensor]:
    """A dense call whose keys are split over the chip: q, k and v are `[B, H, S, D]`."""
    call = split_call(NAME, q, k, v, scale, q_offset, kv_lengths, padding_id, splits)
    row_offset = call.row_offset or 0
    own_keep = check_tensor(
        NAME,
        "keep",
        own_keep,
        (q.shape[0], q.shape[1], at_least(row_offset + q.shape[2]), at_least(k.shape[2])),
        ("bool",),
        q,
    )
    before = check_int(NAME, "before", before, minimum=0)
    after = check_int(NAME, "after", after, minimum=0)
    return PAGED.forward(
        call,
        schedule,
        in_rows(own_keep, call, "b", "h", "q_idx", "kv_idx"),
        before,
        after,
    )


class BandMask(AttentionModule):
    """A band, and a boolean per batch row, head and pair from the call (`mask` of jax.nn.dot_product_attention,
    JAX).

    Calls the op `band_mask`: q `[B, Hq, Sq, D]`, k `[B, Hkv, Skv, D]`, v `[B, Hkv, Skv, Dv]`, keep `[b, h, q_idx,
    kv_idx]` to o `[B, Hq, Sq, Dv]`.

    Args:
        before: int, the `before` of calls that give none.
        after: int, the `after` of calls that give none.
    """

    op = staticmethod(band_mask)
    entry = (("mask", "band(before, after) and keep[b, h, q_idx, kv_idx]"),)

    def __init__(self, *, before: int | None = None, after: int | None = None) -> None:
        super().__init__(scalars={"before": before, "after": after})


give_backward(band_mask, _call)
