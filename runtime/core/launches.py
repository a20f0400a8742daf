"""What the launches of every variant share, in every framework. No framework is imported."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from .configs import Tile, Tiles, block_columns
from .families import HOPPER_WARPS, tile_columns
from .options import CallOptions
from .schedules import SEGMENTS
from .tiles import HOPPER, MaskSizes

Tensor: TypeAlias = Any
"""A tensor of torch, or the `Tensor` of `runtime/jax/tensor.py`, which has the same methods: shape, strides, sizes and
new tensors of the same device."""


class Backend(Protocol):
    """What launches need from a framework: the module `backend` of `_runtime/torch` and that of `_runtime/jax`.

    `launch(kernel, grid, *groups, **constants)` passes the arguments of all groups, one tuple after the other.
    `launch_hopper` does so for a kernel that takes memory to work in.
    """

    FP32: Any
    INT32: Any
    ANSWERS_DISORDER: bool
    """True if the forward launches the kernel that answers positions in no order with NaN."""

    def int64(self) -> Any: ...
    def launch(self, kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None: ...
    def launch_hopper(self, kernel: Any, grid: tuple[int], *groups: tuple[Any, ...], **constants: Any) -> None: ...
    def aligned(self, x: Tensor) -> Tensor: ...
    def fill_in_parts(self, *tensors: Tensor) -> None: ...
    def begin_alike(self, x: Tensor, y: Tensor) -> bool: ...
    def has_even_rows(self, x: Tensor) -> bool: ...
    def empty_like_layout(self, x: Tensor, last: int, dtype: Any = None) -> Tensor: ...
    def empty_by_tokens(self, like: Tensor, shape: tuple[int, int, int, int], dtype: Any) -> Tensor: ...
    def call_tiles(
        self, op: str, mode: str, q: Tensor, v: Tensor, length: int, options: CallOptions, sizes: MaskSizes
    ) -> Tiles: ...
    def multiprocessors(self, x: Tensor) -> int: ...
    def is_nvidia(self, x: Tensor) -> bool: ...
    def has_tanh_instruction(self, x: Tensor) -> bool: ...
    def overlaps(self, x: Tensor) -> bool: ...
    def copies_by_tma(self, x: Tensor) -> bool: ...
    def is_loaded(self, *scalars: Any) -> bool: ...
    def work_counter(self, like: Tensor) -> Tensor: ...
    def block_sequences(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q_total: int, kv_total: int, block: int, by_keys: bool
    ) -> Tensor: ...
    def list_blocks(
        self, launch: Callable[[Tensor, Tensor, bool, bool], object], shape: tuple[int, ...], others: int, like: Tensor
    ) -> list[Tensor]: ...


# --------------------------------------------------------------------------------------------------------------- tiles


def call_length(mode: str, v: Tensor, tokens: Tensor | None, longest: int = 0) -> int:
    """The number of keys of a sequence by which tiles are chosen.

    In a packed call it is the length of the sequence of an average key. In a segmented call, whose segments are not
    counted, it is a guess, or the length of the longest segment if that is less.

    Args:
        tokens: what tells the sequences apart: `cu_seqlens_q` of a packed call, `q_segment_ids` of a segmented one.
        longest: the longest sequence has at least this many keys; 0 if that is not known.
    """
    length: int = v.shape[2]
    if mode == "dense" or tokens is None:
        return length
    # Only the device knows how many segments a row has. One id for all rows, with a stride of 0, is one segment.
    sequences = max(tokens.shape[0] - 1, 1) if mode == "packed" else SEGMENTS if tokens.stride(1) else 1
    average = max(length // sequences, min(length, 1))
    if mode == "segmented" and longest:
        return min(average, longest)
    longest = min(longest, length)
    if longest <= average:
        return average
    # Pairs of a query and a key make up the work. They are fewest if all other sequences are equally long.
    others = (length - longest) ** 2 // max(sequences - 1, 1)
    return (longest**2 + others) // length


def tiles_of(
    backend: Backend,
    op: str,
    mode: str,
    q: Tensor,
    v: Tensor,
    options: CallOptions,
    tokens: Tensor | None = None,
    band_keys: int | None = None,
    runs: Sequence[int | Tensor] = (),
) -> Tiles:
    """The tiles of each pass of a call. q and v are `[B, H, S, D]`, or of a packed call `[1, H, total, D]`.

    Args:
        band_keys: keys of the band that a row sees, if the call gives the band's width.
        runs: lengths of the runs of positions whose blocks a tensor of the mask chooses.
    """
    sizes = MaskSizes(band_keys, None if not runs or backend.is_loaded(*runs) else common_unit(runs))
    return backend.call_tiles(op, mode, q, v, call_length(mode, v, tokens, options.longest), options, sizes)


def common_unit(lengths: Sequence[int]) -> int:
    """The largest power of two that divides all lengths; 0 if one of them is not positive.

    >>> common_unit([64, 96]), common_unit([20])
    (32, 4)
    """
    common = math.gcd(*lengths)
    return common & -common if min(lengths) > 0 else 0


LONGEST_RUN = 256
"""The most that GRID_RUN may be: no tile has more rows or keys."""


def grid_run(backend: Backend, *lengths: int | Tensor) -> int:
    """The constant GRID_RUN of a call: at least so many consecutive positions share an element of a grid.

    It is a power of two, because each value compiles kernels of its own, and 0 if one of the `lengths` of these runs is
    in memory, and so not known.
    """
    if backend.is_loaded(*lengths) or min(lengths) < 1:
        return 0
    return 1 << min(*lengths, LONGEST_RUN).bit_length() - 1


def tables_of(tiles: Tiles, passes: Sequence[str], make: Callable[[Tile, bool], list[Tensor]]) -> list[Tensor]:
    """The tables of some passes, one after the other.

    `make(tile, by_keys)` makes the tables of one pass. Passes with the same blocks share theirs.
    """
    made: dict[tuple[int, int, bool], list[Tensor]] = {}
    tables: list[Tensor] = []
    for name in passes:
        tile, by_keys = tiles[name], name == "dkdv"
        blocks = (tile.block_m, tile.block_n, by_keys)
        if blocks not in made:
            made[blocks] = make(tile, by_keys)
        tables += made[blocks]
    return tables


def empty_gradients(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, options: CallOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty dq, dk and dv, in the layouts and dtypes of q, k and v, or in float32 if the call asks for that."""
    is_wide = (options.wide_queries, options.wide_keys, options.wide_keys)
    dq, dk, dv = (
        backend.empty_like_layout(x, x.shape[3], backend.FP32 if wide else None)
        for x, wide in zip((q, k, v), is_wide, strict=True)
    )
    return dq, dk, dv


def gradient_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that gradients are computed with, from the arguments of a backward."""
    (batch, num_heads, q_len, _), (_, num_kv_heads, kv_len, _) = given["q"].shape, given["k"].shape
    row_offsets = given.get("row_offsets")
    return {
        "batch": batch,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "group_size": num_heads // num_kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "num_seqs": given["cu_seqlens_q"].shape[0] - 1 if "cu_seqlens_q" in given else batch,
        "q_offset": given.get("row_offset", 0) if row_offsets is None else row_offsets,
    }


# ---------------------------------------------------------------------------------------- what kernels are compiled for


def tile_constants(tile: Tile, head_dim: int, head_dim_v: int) -> Mapping[str, int]:
    """The constants of a kernel that follow from its tile and from the head_dims of q and of v."""
    columns = tile_columns if tile.family == HOPPER else block_columns
    block_d = columns(head_dim)
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": block_d,
        # Values inside keys of 576 columns are the first part of their tile, 512 columns, and not split.
        "BLOCK_DV": block_d if head_dim_v == block_d else columns(head_dim_v),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    if tile.family == HOPPER:
        return constants | {"STAGES": tile.num_stages, "num_warps": HOPPER_WARPS}
    return constants | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def delta_constants(tile: Tile, head_dim_v: int) -> Mapping[str, int]:
    """The constants of the kernel that computes delta for a backward of Hopper's family."""
    return {"HEAD_DIM_V": head_dim_v, "BLOCK_DV": tile_columns(head_dim_v), "BLOCK_M": tile.block_m, "num_warps": 4}


def dq_rows_constants(tile: Tile, head_dim: int) -> Mapping[str, int]:
    """The constants of the kernel that computes dq from the sums of a backward of Hopper's family."""
    return {"HEAD_DIM": head_dim, "BLOCK_D": tile_columns(head_dim), "BLOCK_M": tile.block_m, "num_warps": 4}


# ------------------------------------------------------------------------------------------------------------- strides


def unit_strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of batch, head and row of `aligned` tensors; those of batch and head in units of 16 bytes."""
    found: list[int] = []
    for x in tensors:
        step = 16 // x.element_size()
        b, h, s, _ = x.stride()
        found += (b // step, h // step, s)
    return tuple(found)


def packed_unit_strides(*tensors: Tensor) -> tuple[int, ...]:
    """As `unit_strides`, for packed sequences, which are one batch row: the strides of head and row."""
    found: list[int] = []
    for x in tensors:
        _, h, s, _ = x.stride()
        found += (h // (16 // x.element_size()), s)
    return tuple(found)


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of tensors that kernels fill: batch, head and row. The last is 1."""
    return tuple([step for x in tensors for step in x.stride()[:3]])


def packed_strides(*tensors: Tensor) -> tuple[int, ...]:
    """As `strides`, for packed sequences, which are one batch row: head and row."""
    return tuple([step for x in tensors for step in x.stride()[1:3]])


def row_stride(x: Tensor | None) -> int:
    """Elements from one batch row to the next; 0 if there is no tensor or one batch row serves all."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)
