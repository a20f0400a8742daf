# SPDX-License-Identifier: Apache-2.0
# Generated from variants.yaml; do not edit. Change the entry or the template, then run `codegen render`.
# variant: causal_dropout: {mask: causal, dropout: true}
# template: host/jax_op.py.jinja
# hash: 52ba6fc135f7ebee
"""`causal_dropout` for JAX. Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4)."""

from jax import Array

from .. import causal_dropout as dense
from .._runtime.core.checks import check_dropout_p, dropout_coordinates
from .._runtime.core.options import checked_options
from .._runtime.core.paged_calls import check_without_pages, refuse_pages
from .._runtime.core.schedules import Schedule, scheduled
from .._runtime.core.sequences import ByRow
from .._runtime.jax.backward import Run, give_backward
from .._runtime.jax.call import Arguments, Kernels, scaled_run, schedule_of
from .._runtime.jax.paged import check_page_layout
from .._runtime.jax.sequences import SequenceArguments
from .._runtime.jax.support import check_flag, dropout_seed, host_number, known_origin
from . import jax_reference, packed, segmented

NAME = "causal_dropout"
BY_ROW = ByRow(
    in_order=True,
    in_step=False,
    as_rows=False,
    rule=("positions that rise by 1 from row to row of a segment (read by row: what dropout drops)"),
)


DENSE = Kernels(
    op=NAME,
    mode="dense",
    modules=dense,
    reference=jax_reference.reference,
    parameters=(
        "q",
        "k",
        "v",
        "row_offsets",
        "dropout_p",
        "seed",
        "first_head",
        "all_heads",
        "row_origin",
        "key_origin",
        "row_offset",
        "scale",
        "options",
    ),
    scalars=("dropout_p", "seed", "first_head", "all_heads", "row_origin", "key_origin"),
)
PACKED = Kernels(
    op=NAME,
    mode="packed",
    modules=packed,
    reference=jax_reference.packed_reference,
    parameters=(
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "row_offsets",
        "dropout_p",
        "seed",
        "first_head",
        "all_heads",
        "row_origin",
        "key_origin",
        "row_offset",
        "scale",
        "options",
        "block_tables",
    ),
    scalars=("dropout_p", "seed", "first_head", "all_heads", "row_origin", "key_origin"),
)
SEGMENTED = Kernels(
    op=NAME,
    mode="segmented",
    modules=segmented,
    reference=jax_reference.reference,
    parameters=(
        "q",
        "k",
        "v",
        "q_segment_ids",
        "kv_segment_ids",
        "q_positions",
        "kv_positions",
        "row_offsets",
        "padding_id",
        "dropout_p",
        "seed",
        "first_head",
        "all_heads",
        "row_origin",
        "key_origin",
        "row_offset",
        "scale",
        "options",
        "block_tables",
    ),
    scalars=("dropout_p", "seed", "first_head", "all_heads", "row_origin", "key_origin"),
    by_row=BY_ROW,
)


def _schedule(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "bshd",
    q_offset: int | str | Array = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    kv_lengths: Array | None = None,
    padding_id: int = -1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    config: dict[str, dict[str, int]] | None = None,
    family: str | None = None,
    deterministic: bool | None = None,
    backward: bool = True,
) -> Schedule:
    """The blocks that calls with these arguments visit, for their `schedule=`: made once, used by every layer.

    The arguments are the op's; of q, k and v only shapes and dtype matter. `backward=False` leaves out what the
    backward needs. Without a schedule a call makes its own. A schedule is a pytree: it goes into `jit`, `scan` and
    `checkpoint`.
    """
    backward = check_flag(f"{NAME}.schedule", "backward", backward)
    sequences = SequenceArguments(
        q_offset,
        cu_seqlens_q,
        cu_seqlens_k,
        q_segment_ids,
        kv_segment_ids,
        q_positions,
        kv_positions,
        kv_lengths,
        padding_id,
    )
    lengths = (host_number(NAME, "max_seqlen_q", max_seqlen_q), host_number(NAME, "max_seqlen_k", max_seqlen_k))
    options = checked_options(NAME, config, family, deterministic, sequences.mode, lengths)
    arguments = Arguments.checked(NAME, q, k, v, sequences, options, layout=layout)

    return schedule_of(DENSE, PACKED, SEGMENTED, arguments, backward)


@scheduled(_schedule)
def causal_dropout(
    q: Array,
    k: Array,
    v: Array | None = None,
    *,
    dropout_p: float = 0.0,
    seed: int | Array | None = None,
    dropout_origin: tuple[int | Array, ...] | None = None,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    q_offset: int | str | Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    kv_lengths: Array | None = None,
    padding_id: int = -1,
    page_table: Array | None = None,
    page_starts: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    splits: int | str | None = None,
    q_scale: float | Array | None = None,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    values_in_keys: int | None = None,
    page_layout: str = "pshd",
    config: dict[str, dict[str, int]] | None = None,
    family: str | None = None,
    deterministic: bool | None = None,
    schedule: Schedule | None = None,
) -> Array | tuple[Array, Array]:
    """Causal attention with dropout on the probabilities (Vaswani et al., 2017, section 5.4).

        score = scale * q @ k^T
        keep = q_idx >= kv_idx
        o = dropout(exp(score) / sum(exp(score))) @ v

    Args:
        q: `[B, Sq, Hq, D]`, float16, bfloat16 or float32; D from 8 to 512.
        k: `[B, Skv, Hkv, D]`; Hq is a multiple of Hkv, and each key head serves Hq / Hkv query heads.
        v: `[B, Skv, Hkv, Dv]`.
        dropout_p: each probability is dropped with this probability, else scaled by `1 / (1 - dropout_p)`. A number
            from 0 to below 1, rounded to a multiple of 2**-32. lse is that of all probabilities, dropped ones as well.
        seed: an int from 0 to 2**63 - 1, an integer array `[]`, or a key of `jax.random`. It alone decides, by batch
            row, head, row and key, what is dropped; rows are counted from `q_offset` on, rounded down to a multiple of
            16.
        dropout_origin: for a call that is a part of a larger call: `(batch row, head, heads)`, the larger call's batch
            row and head that are the first here, and its number of query heads. By default `(0, 0, Hq)`. A call with
            some of the larger call's keys gives `(batch row, head, heads, row, key)`: dropout adds `row`, a multiple of
            16, to the rows that it counts, and `key`, a multiple of 32, to the keys. Integers or arrays `[]`.
        scale: factor of `q @ k^T`, by default `D ** -0.5`; a Python number.
        layout: `"bshd"` as above, or `"bhsd"` for q, k, v and o of `[B, H, S, D]`.
        return_lse: also return the natural log of the softmax denominator, float32 `[B, Hq, Sq]`, differentiable.
        q_offset: position of the first query row: an int, an integer array `[B]`, or `"end"` for `Skv - Sq`. By
            default 0, on paged caches `"end"`.
        cu_seqlens_q: integers `[n + 1]`, for a packed call: q is `[total_q, Hq, D]`, k `[total_k, Hkv, D]`, v
            `[total_k, Hkv, Dv]`, and sequence s, rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`, is what batch row s
            is in a dense call. `q_offset` may be an integer array `[n]`; o is `[total_q, Hq, Dv]`, lse
            `[Hq, total_q]`.
        cu_seqlens_k: the same for k and v; by default `cu_seqlens_q`.
        q_segment_ids: integers `[B, Sq]`; a query attends to the keys that have its id, unless it is `padding_id`.
        kv_segment_ids: integers `[B, Skv]`; by default `q_segment_ids`.
        q_positions: integers `[B, Sq]`, the values of `q_idx` in mask and score; by default the row + `q_offset`.
            They must be the rows, or positions that rise by 1 from row to row of a segment (read by row: what
            dropout drops).
        kv_positions: integers `[B, Skv]`, the values of `kv_idx` there; by default `q_positions`.
        kv_lengths: integers `[B]`, the number of keys of each batch row: no query attends to keys behind them.
            `q_offset="end"` is then `kv_lengths - Sq`.
        padding_id: the segment id of padding, which attends to nothing.
        page_table: integers `[B, most pages]`, for a call on paged caches, which has no gradient: k is
            `[pages, page size, Hkv, D]`, v `[pages, page size, Hkv, Dv]` and
            row b of the table holds the pages of sequence b, of `kv_lengths[b]` keys, in order. q is `[B, Sq, Hq, D]`,
            or with `cu_seqlens_q` `[total_q, Hq, D]`. A tensor with an element for every key lies in pages as well,
            `[pages, page size]` for that dim and without a batch axis; one with an element for every query lies as q.
            Entries and pages that no query can see by its position are never read.
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
        values_in_keys: how many of the first columns of k are the values, in a call on paged caches without v: one load
            then serves both products, as latent attention wants it.
        splits: how a call on paged caches splits keys. None: by the sequence's own length, so that its bits are the
            same in any batch, on any pages. `"balanced"`: over the batch. An int: the keys of a split, or 1 for no
            split.
        page_layout: `"pshd"` for caches as above, or `"phsd"` for those of `[pages, Hkv, page size, D]`.
        config: tiles by pass, such as `{"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}}`;
            passes are fwd, dkdv and dq, and one that is not named keeps its default.
        family: of the kernels, `"portable"` or `"hopper"`; by default `"hopper"` if its kernels are the faster ones and
            `config` names no tile of their passes.
        deterministic: whether equal inputs must give gradients of equal bits, by default not. On Hopper GPUs the
            fastest backward adds up dq in any order.
        schedule: what `causal_dropout.schedule(...)` gave for a call like this one; by default each call makes
            its own.

    Returns:
        o in the layout and dtype of q, or `(o, lse)`. A row without any key has o = 0, lse = -inf.

    Raises:
        ArgumentError: an argument of the wrong shape, dtype, device or value; both a TypeError and a ValueError.

    Arrays of integers may be of any integer dtype: each call casts those that are not int32. The variant's own arrays
    of floats may be of any float dtype, and so are their gradients, which are summed in float32.

    On the CPU the plain reference is computed, or with TRITON_INTERPRET=1 these kernels in Triton's interpreter.
    """
    return_lse = check_flag(NAME, "return_lse", return_lse)
    if page_table is not None:
        refuse_pages(NAME, "dropout")
    check_without_pages(NAME, page_starts, splits, values_in_keys)
    check_page_layout(NAME, page_layout, has_table=False)
    run = scaled_run(NAME, q, q_scale, k_scale, v_scale)
    o, lse = _call(
        run,
        q,
        k,
        v,
        dropout_p,
        seed,
        dropout_origin,
        scale,
        layout,
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
        config,
        family,
        deterministic,
        schedule,
    )
    return (o, lse) if return_lse else o


def _call(
    run: Run,
    q: Array,
    k: Array,
    v: Array | None,
    dropout_p: float,
    seed: int | Array | None,
    dropout_origin: tuple[int | Array, ...] | None,
    scale: float | None,
    layout: str,
    q_offset: int | str | Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    q_positions: Array | None,
    kv_positions: Array | None,
    kv_lengths: Array | None,
    padding_id: int,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    config: dict[str, dict[str, int]] | None,
    family: str | None,
    deterministic: bool | None,
    schedule: Schedule | None,
) -> tuple[Array, Array]:
    """Check the arguments of a call without paged caches, which `run` computes."""
    sequences = SequenceArguments(
        q_offset,
        cu_seqlens_q,
        cu_seqlens_k,
        q_segment_ids,
        kv_segment_ids,
        q_positions,
        kv_positions,
        kv_lengths,
        padding_id,
    )
    lengths = (host_number(NAME, "max_seqlen_q", max_seqlen_q), host_number(NAME, "max_seqlen_k", max_seqlen_k))
    options = checked_options(NAME, config, family, deterministic, sequences.mode, lengths)
    arguments = Arguments.checked(NAME, q, k, v, sequences, options, layout=layout, scale=scale)

    arguments.dropout_p = check_dropout_p(NAME, host_number(NAME, "dropout_p", dropout_p))
    first_head, all_heads, row_origin, key_origin = dropout_coordinates(
        NAME, known_origin(dropout_origin), arguments.q.shape[1]
    )
    words = {"seed": dropout_seed(NAME, arguments.dropout_p, seed), "first_head": first_head, "all_heads": all_heads}
    arguments.scalars = {**arguments.scalars, **words, "row_origin": row_origin, "key_origin": key_origin}
    return run(DENSE, PACKED, SEGMENTED, arguments, schedule)


give_backward(causal_dropout, _call)
