# Generated from variants.yaml; do not edit. Change the entry or the template, then run `python -m codegen render`.
# variant: alibi: {mask: causal, score: alibi, tensors: {slope: {dims: [h], grad: true}}}
# template: ops/torch_op.py.jinja
# hash: 7eb1d31cfdefc56f
"""`alibi` for PyTorch. Attention with linear biases; the slopes may be trained (Press et al., 2022,
arXiv:2108.12409)."""

from torch import Tensor

from .._runtime.torch_support import (
    autocast_inputs,
    check_inputs,
    check_tensor,
    config_text,
    interpreter_dtype,
    positive_scale,
    query_offset,
    runs_reference,
)
from .torch_launch import Attention
from .torch_reference import reference

NAME = "alibi"


def alibi(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slope: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    q_offset: int | str | Tensor = 0,
    config: dict[str, dict[str, int]] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with linear biases; the slopes may be trained (Press et al., 2022, arXiv:2108.12409).

        score = scale * q @ k^T
        score = score + slope[h] * (kv_idx - q_idx)
        keep = q_idx >= kv_idx
        o = exp(score) @ v / sum(exp(score))

    Args:
        q: `[B, Hq, Sq, D]`, float16, bfloat16 or float32, any strides; D from 16 to 256.
        k: `[B, Hkv, Skv, D]`; Hq is a multiple of Hkv, and each key head serves Hq / Hkv query heads.
        v: `[B, Hkv, Skv, Dv]`.
        slope: float32 `[h]`; differentiable.
        scale: factor of `q @ k^T`, by default `D ** -0.5`.
        layout: `"bhsd"` as above, or `"bshd"` for q, k, v and o of `[B, S, H, D]`.
        return_lse: also return the natural log of the softmax denominator, float32 `[B, Hq, Sq]`, differentiable.
        q_offset: position of the first query row: an int, an int32 tensor `[B]`, or `"end"` for `Skv - Sq`.
        config: tiles by pass, such as `{"fwd": {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2}}`;
            passes are fwd, dkdv and dq, and one that is not named keeps its default.

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
    slope = check_tensor(NAME, "slope", slope, (q.shape[1],), ("float32",), q)
    config_words = config_text(NAME, config)
    if runs_reference(q):
        q_offset = row_offset if row_offsets is None else row_offsets
        o, lse = reference(
            q,
            k,
            v,
            slope=slope,
            scale=scale,
            q_offset=q_offset,
            return_lse=True,
        )
    else:
        q, scale = positive_scale(q, scale)
        q, k, v = interpreter_dtype(q, k, v)
        o, lse = Attention.apply(q, k, v, slope, row_offset, row_offsets, scale, config_words)
        o = o.to(dtype)
    if layout == "bshd":
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o
