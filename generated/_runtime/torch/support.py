# SPDX-License-Identifier: Apache-2.0
"""What the torch ops share: argument checks on tensors, dispatch, layouts, gradient reduction."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..archs import DEFAULT_MULTIPROCESSORS
from ..core.checks import (
    SEED_END,
    Size,
    check_int,
    check_layout,
    check_scale,
    check_seed,
    check_shapes,
    check_sizes,
    fail,
    sizes_text,
)
from ..core.configs import INTERPRETER, Tiles, tiles_for
from ..core.options import CallOptions, checked_options
from ..core.paged_tiles import PagedConfig, PagedTiles, paged_tiles
from ..core.settings import DEBUG, require_triton
from ..core.settings import HAS_TRITON as HAS_TRITON
from ..core.settings import INTERPRET as INTERPRET
from ..core.tuned import gpu_key
from ..kernels import TRAITS
from .distance_sums import distance_sums as distance_sums
from .distance_sums import lag_grid as lag_grid
from .distance_sums import lag_sums as lag_sums
from .head_sums import head_sums as head_sums
from .launching import is_recording
from .transforms import refuse_gradient_of, refuse_tangents

FP32 = torch.float32
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
FP8_DTYPE = torch.float8_e4m3fn
_INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, FP8_DTYPE)
# Offsets inside a tile are 32-bit: a stride times the most rows or columns of a tile must fit.
_STRIDE_LIMIT = 2**31 // 256


def check_inputs(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> None:
    """Check q, k, v, scale and layout."""
    check_layout(op, layout)
    check_qkv(op, q, k, v, scale, layout)


def check_qkv(op: str, q: Any, k: Any, v: Any, scale: object, layout: str) -> None:
    """Check q, k, v and scale; `layout` may be PACKED."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            fail(op, name, "a torch.Tensor", type(x).__name__)
    if q.dtype not in _INPUT_DTYPES:
        fail(op, "q", "dtype float16, bfloat16 or float32", q.dtype)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            fail(op, name, f"dtype {q.dtype}, that of q", x.dtype)
        if x.device != q.device:
            fail(op, name, f"device {q.device}, that of q", x.device)
    check_shapes(op, layout, q.shape, k.shape, v.shape)
    refuse_tangents(op, q=q, k=k, v=v)
    if scale is not None:
        check_scale(op, scale)


def aligned(x: Tensor) -> Tensor:
    """`x` if its rows of D elements begin at multiples of 16 bytes and its tiles' offsets fit 32 bits, else a copy.

    The kernels load 16 bytes at a time. With less, Triton 3.6 compiles wrong results where D and Dv differ, and the
    loads cost more than the copy.
    """
    step = 16 // x.element_size()
    b, h, s, d = x.stride()
    if d == 1 and s < _STRIDE_LIMIT and not (b % step or h % step or s % step or x.data_ptr() % 16):
        return x
    padded = x.new_empty((*x.shape[:3], -(-x.shape[3] // step) * step))
    return padded[..., : x.shape[3]].copy_(x)


def begin_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at one place and lie alike, as views of one tensor that differ in their last size."""
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype


def has_even_rows(x: Tensor) -> bool:
    """Whether rows of 8-bit numbers begin at even addresses, so that two columns make one 16-bit number."""
    return x.data_ptr() % 2 == 0 and not any(stride % 2 for stride in x.stride()[:-1])


def check_tensor(
    op: str,
    name: str,
    x: Any,
    shape: tuple[Size, ...],
    dtypes: tuple[str, ...],
    like: Tensor,
    tile_axes: tuple[int, ...] = (),
    no_gradient: str = "",
) -> Tensor:
    """One of a variant's own tensors, checked, in one of `dtypes`: any float is cast for a float, any integer for one.

    Offsets along `tile_axes` are 32-bit in the kernels. `no_gradient` is why a float tensor has none. Of a tensor
    without elements, of a call without keys or queries, it is one that reads as 0 everywhere.
    """
    if not isinstance(x, Tensor):
        got = "nothing" if x is None else type(x).__name__
        fail(op, name, f"a torch.Tensor of shape {sizes_text(shape)}", got)
    if x.device != like.device:
        fail(op, name, f"device {like.device}, that of q", x.device)
    check_sizes(op, name, x.shape, shape)
    refuse_tangents(op, **{name: x})
    if no_gradient:
        refuse_gradient_of(x, op, name, no_gradient)
    cast = _in_dtype(op, name, x, dtypes)
    for axis in tile_axes:
        if (cast.shape[axis] - 1) * cast.stride(axis) >= 2**31:
            got = f"size {cast.shape[axis]} and stride {cast.stride(axis)}"
            fail(op, name, f"(size - 1) * stride of axis {axis} below 2**31", got)
    return readable(cast) if 0 in x.shape else cast


def readable(x: Tensor) -> Tensor:
    """A tensor with an element for every index to be clamped to: 0 where an axis has none, which has no nearest end."""
    empty = [axis for axis, size in enumerate(x.shape) if size == 0]
    return x.sum(empty, keepdim=True, dtype=x.dtype) if empty else x


def _in_dtype(op: str, name: str, x: Tensor, dtypes: tuple[str, ...]) -> Tensor:
    """A tensor in one of the dtypes that the kernels read; gradients come back in the tensor's own."""
    if _DTYPE_NAMES.get(x.dtype) in dtypes:
        return x
    dtype = _DTYPES[dtypes[-1]]
    if dtype.is_floating_point:
        if not x.dtype.is_floating_point:
            fail(op, name, "a floating-point dtype", x.dtype)
        return x.to(dtype)
    if dtype == torch.bool:
        fail(op, name, "dtype torch.bool", x.dtype)
    return as_integers(op, name, x, dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether the values of a dtype are whole numbers; those of bool are none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def as_integers(op: str, name: str, x: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor of integers of any dtype, in the one that the kernels read.

    Values beyond it are an error where they can be read: elsewhere that would wait for the device.
    """
    if x.dtype == dtype:
        return x
    if not is_integer(x.dtype):
        fail(op, name, f"dtype {dtype} or another of integers", x.dtype)
    cast = x.to(dtype)
    if x.dtype.itemsize >= dtype.itemsize and (x.device.type == "cpu" or DEBUG) and has_values(x):
        lost = x[(cast.to(x.dtype) != x) | ((cast < 0) & (not x.dtype.is_signed))]
        if lost.numel() > 0:
            fail(op, name, f"values that {dtype} holds", lost[0].item())
    return cast


def query_offset(op: str, q_offset: Any, q: Tensor, q_len: int, kv_len: int | Tensor) -> tuple[int, Tensor | None]:
    """The offset as (number, None) or (0, one int32 per batch row). `"end"` aligns the last query with the last key.

    `kv_len` is a tensor of integers where each batch row has a length of its own.
    """
    if isinstance(q_offset, Tensor) and q_offset.dim() > 0:
        return 0, offset_tensor(op, q_offset, q.shape[0], q.device)
    if isinstance(q_offset, str):
        check_offset_word(op, q_offset)
        return (0, kv_len.to(torch.int32) - q_len) if isinstance(kv_len, Tensor) else (kv_len - q_len, None)
    return check_int(op, "q_offset", q_offset), None


def offset_tensor(op: str, q_offset: Tensor, count: int, device: torch.device) -> Tensor:
    """Offsets of so many batch rows or sequences, checked."""
    if not is_integer(q_offset.dtype) or q_offset.shape != (count,) or q_offset.device != device:
        got = f"{q_offset.dtype} {list(q_offset.shape)} on {q_offset.device}"
        fail(op, "q_offset", f"an int, 'end' or an integer tensor [{count}] on {device}", got)
    return as_integers(op, "q_offset", q_offset).contiguous()


def check_offset_word(op: str, q_offset: str) -> None:
    if q_offset != "end":
        fail(op, "q_offset", "an int, 'end' or an integer tensor", repr(q_offset))


def dropout_seed(op: str, dropout_p: float, seed: object) -> int:
    """The seed of a call, checked; where none is given, one from torch's default CPU generator."""
    if seed is not None:
        return check_seed(op, seed)
    if dropout_p == 0:
        return 0  # Nothing is drawn: the generator stays where it is.
    if torch.compiler.is_compiling():
        fail(op, "seed", "an int under torch.compile, which would draw one seed for all calls", None)
    return int(torch.randint(SEED_END - 1, (), device="cpu").item())


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast q, k and v to autocast's dtype where it is on, as scaled_dot_product_attention does."""
    kind = q.device.type
    if q.dtype != FP8_DTYPE and not q.is_meta and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The kernels take the maximum before they scale, so the sign of a scale, or a zero, moves into q: no rounding."""
    if scale is None:
        return q, 1.0 / math.sqrt(q.shape[-1])
    scale = float(scale)
    if scale > 0:
        return q, scale
    if q.dtype == FP8_DTYPE:
        bits = q.view(torch.uint8)
        return (bits ^ 128 if scale < 0 else bits * 0).view(FP8_DTYPE), abs(scale) or 1.0
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def runs_reference(q: Tensor) -> bool:
    """Whether a call computes the plain reference: on the CPU, unless Triton's interpreter was asked for.

    Of a meta tensor it computes nothing but shapes.
    """
    if (q.device.type == "cpu" and not INTERPRET) or q.is_meta:
        return True
    require_triton("this op")
    return False


def result_dtype(q: Tensor) -> torch.dtype:
    """The dtype of o: that of q, or bfloat16 of 8-bit floats."""
    return torch.bfloat16 if q.dtype == FP8_DTYPE else q.dtype


def interpreter_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Triton's interpreter computes bfloat16 wrongly; there the kernels run on float32 copies."""
    if INTERPRET and q.dtype == torch.bfloat16:
        return q.float(), k.float(), v.float()
    return q, k, v


def interprets(x: Tensor) -> bool:
    """Whether kernels run in Triton's interpreter, which has none of Hopper's."""
    return INTERPRET and arch_of(x) == INTERPRETER


def launches_directly(q: Tensor) -> bool:
    """Whether kernels can be launched at once. Traced, fake and wrapped tensors go through the custom operator."""
    plain = type(q) is Tensor or type(q) is torch.nn.Parameter
    return plain and not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == is_recording()


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values to be read: it is not traced, fake, meta or wrapped by torch.func."""
    return launches_directly(x) and not x.is_meta and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _index_of(x: Tensor) -> int:
    """The number of a tensor's GPU: the current one for a tensor without memory, of a call that is only compiled."""
    return torch.cuda.current_device() if x.device.index is None else x.device.index


@cache
def _device_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def arch_of(x: Tensor) -> str:
    """The architecture a tensor's kernels are compiled for."""
    return INTERPRETER if x.device.type == "cpu" else _device_arch(_index_of(x))


@cache
def _device_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(x: Tensor) -> int:
    """How many programs that fill a multiprocessor run at once; those of an H100 where kernels are only compiled."""
    return DEFAULT_MULTIPROCESSORS if x.device.type == "cpu" else _device_multiprocessors(_index_of(x))


@cache
def _device_gpu(index: int) -> str:
    return gpu_key(torch.cuda.get_device_name(index))


def gpu_of(x: Tensor) -> str:
    """The folder of the tuned tiles of a tensor's GPU, such as h100; "" on a CPU."""
    return "" if x.device.type == "cpu" else _device_gpu(_index_of(x))


def call_options(
    op: str,
    config: Any,
    family: Any,
    deterministic: Any,
    mode: str = "dense",
    lengths: tuple[Any, Any] = (None, None),
) -> CallOptions:
    """What a call of this mode asks of its kernels. Gradients are added in a fixed order by default if torch is
    deterministic."""
    if deterministic is None and torch.are_deterministic_algorithms_enabled():
        deterministic = mode not in TRAITS[op].atomic_modes
    return checked_options(op, config, family, deterministic, mode, lengths)


def call_tiles(
    op: str, mode: str, q: Tensor, v: Tensor, length: int, options: CallOptions, band_keys: int | None
) -> Tiles:
    """The tiles of each pass of a call, of sequences of `length` keys, on average where they are packed."""
    dims, heads = (q.shape[3], v.shape[3]), (q.shape[1], v.shape[1])
    return tiles_for(
        op, mode, arch_of(q), gpu_of(q), str(q.dtype).removeprefix("torch."), dims, heads, length, options, band_keys
    )


def paged_call_tiles(op: str, q: Tensor, k: Tensor, group: int, config: PagedConfig) -> PagedTiles:
    """The tiles of a call on paged caches `k`."""
    dtypes = _DTYPE_NAMES.get(q.dtype, str(q.dtype)), str(k.dtype).removeprefix("torch.")
    return paged_tiles(op, arch_of(q), gpu_of(q), *dtypes, q.shape[-1], group, config)


def is_nvidia(x: Tensor) -> bool:
    """Whether a tensor's kernels may hold PTX."""
    return arch_of(x).startswith("sm_")


def has_tanh_instruction(x: Tensor) -> bool:
    """Whether tanh is one instruction, exact enough for 16-bit inputs: on NVIDIA chips."""
    return x.element_size() <= 2 and is_nvidia(x)


def overlaps(x: Tensor) -> bool:
    """Whether a kernel can be launched before the one ahead ends, and wait there: on NVIDIA chips from Hopper on."""
    arch = arch_of(x)
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def empty_like_layout(x: Tensor, last: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty `[B, H, S, last]` tensor, dense, its axes in the memory order of `x`, of its dtype or another."""
    strides = x.stride()
    order = sorted(range(3), key=lambda axis: (-strides[axis], axis))
    if order == [0, 1, 2]:
        return x.new_empty((*x.shape[:3], last), dtype=dtype)
    # No view of another tensor: autograd would refuse to have it changed in place.
    dense, step = [0, 0, 0], last
    for axis in reversed(order):
        dense[axis] = step
        step *= x.shape[axis]
    return x.new_empty_strided((*x.shape[:3], last), (*dense, 1), dtype=dtype)


def batch_row(x: Tensor) -> Tensor:
    """Packed `[total, H, D]` as kernels see it: one batch row, `[1, H, total, D]`."""
    return x.transpose(0, 1).unsqueeze(0)


def packed_rows(x: Tensor) -> Tensor:
    """The inverse of `batch_row`, of a new tensor: no view of it to autograd."""
    return x.squeeze(0).transpose(0, 1).data


def reduce_gradient(total: Tensor, axes: str, num_kv_heads: int, length: int = 0) -> Tensor:
    """Sum `[B, Hq]` or `[B, Hq, Skv]` down to a tensor's axes, in its order: `b`, `h`, `k` (key heads), `s` (keys).

    The tensor's axis of keys has `length` elements, no gradient beyond the last key.
    """
    if length > total.shape[-1]:
        total = torch.nn.functional.pad(total, (0, length - total.shape[-1]))
    have = "bh" if total.dim() == 2 else "bhs"
    if "k" in axes:
        total = total.unflatten(1, (num_kv_heads, -1)).sum(2)
        have = have.replace("h", "k")
    drop = [i for i, axis in enumerate(have) if axis not in axes]
    if drop:
        total = total.sum(drop)
        have = "".join(axis for axis in have if axis in axes)
    return total.permute([have.index(axis) for axis in axes]).contiguous() if axes else total


def _index(index: Tensor | int, device: torch.device) -> Tensor:
    """An index as a tensor. A number is filled in on the device: no CUDA graph captures a copy from the host."""
    return index if isinstance(index, Tensor) else torch.full((), index, dtype=torch.int64, device=device)


_COPIES = 16
"""Copies of a tensor that sums are added to: torch adds those of one element one after the other."""


def place_sums(sums: Tensor, shape: Sequence[int], places: Sequence[Tensor | int]) -> Tensor:
    """Add sums `[B, Hq, S]` to the elements of a tensor that `places`, an index per axis, name; in a fixed order."""
    index = torch.broadcast_tensors(*(_index(i, sums.device).long() for i in places))
    # What no index tells apart goes to one element: summed here, it need not be sorted.
    # Without an axis, which is one element, `numel` of the empty shape is 1.
    copy = torch.arange(index[0].shape[-1:].numel(), device=sums.device) % _COPIES
    copies = sums.new_zeros((_COPIES, *shape))
    return copies.index_put_((copy, *index), sums.sum_to_size(index[0].shape), accumulate=True).sum(0)


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """The sequence of each of `total` packed rows."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens[1:], rows, right=True)


def packed_row(index: Tensor | int, cu_seqlens: Tensor, seqs: Tensor, q_offset: int | Tensor | None = None) -> Tensor:
    """Where along an axis of packed tokens the kernels read element `index` of each of `seqs`; of a query's axis with
    its `q_offset`, by which positions and rows differ. A sequence without tokens reads the first of all: some element
    that there is, to which nothing is added."""
    start, end = cu_seqlens[seqs], cu_seqlens[seqs + 1]
    index = _index(index, start.device)
    if q_offset is not None:
        index = index.clamp(min=0) - (q_offset[seqs] if isinstance(q_offset, Tensor) else q_offset)
    row = start + torch.minimum(index.clamp(min=0), end - start - 1)
    return torch.where(start < end, row, 0)


def sums_by_sequence(sums: Tensor, block_seqs: Tensor, num_seqs: int) -> Tensor:
    """The sums `[1, Hq, entries]` of packed blocks as `[n, Hq]`, in a fixed order; those of no sequence are zero.

    Each block may have more than one, side by side.
    """
    num_blocks = block_seqs.shape[0]
    sums = sums.view(*sums.shape[:2], num_blocks, sums.shape[2] // max(num_blocks, 1)).sum(3)
    total = sums.new_zeros((num_seqs, sums.shape[1]))
    return total.index_put_((block_seqs[:, 0].clamp(min=0).long(),), sums[0].T, accumulate=True)


def place_pairs(pairs: Tensor, shape: Sequence[int], axes: str, q_offset: int | Tensor) -> Tensor:
    """`[B, Hq, Sq, Skv]` as the gradient of a tensor of these axes, `bhqs` in some order, at its query positions."""
    batch, rows, keys = (axes.index(axis) for axis in "bqs")
    pairs = pairs.permute(["bhqs".index(axis) for axis in axes])
    if isinstance(q_offset, int) and q_offset == 0 and pairs.shape == shape:
        return pairs.contiguous()
    total = pairs.new_zeros(shape)
    b = torch.arange(shape[batch], device=pairs.device)[:, None]
    shift = q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset
    q_idx = (torch.arange(pairs.shape[rows], device=pairs.device) + shift).clamp(0, shape[rows] - 1)
    met = total.narrow(keys, 0, pairs.shape[keys]).movedim((batch, rows), (0, 1))
    met.index_put_((b, q_idx), pairs.movedim((batch, rows), (0, 1)), accumulate=True)
    return total
