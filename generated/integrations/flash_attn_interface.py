# SPDX-License-Identifier: Apache-2.0
"""The functions of `flash_attn.flash_attn_interface` 2.8, by their own names, arguments and defaults.

Each is one call of an op. What all of them share:

- q, k and v are `[B, S, H, D]`, or packed `[total, H, D]` where `cu_seqlens` says at which rows sequences begin; k and
  v may have fewer heads. Any float dtype of 16 or 32 bits on any device of the ops.
- `softmax_scale`: by default `D ** -0.5`. `softcap`: logits are capped at this value; 0 means no cap.
- `causal` and `window_size`: the last query is aligned with the last key. A query at position i sees keys from
  `i - left` to `i + right`; -1 means no bound on that side. `causal` sets right to 0. A row without any key has o = 0.
- `alibi_slopes`: `[H]` or `[B, H]`, `slope * |distance|` is subtracted from logits. They get no gradient.
- `dropout_p`: this package's Philox generates the random bits, from a seed that torch's CPU generator draws.
- `deterministic`: gradients are added in a fixed order.
- `return_attn_probs`: also return the logs of the softmax denominators, float32 `[B, H, Sq]` or `[H, total_q]`, +inf in
  a row without any key, and an empty tensor. The original returns the probabilities in place of the empty tensor, with
  dropout marked in them. With dropout the option is refused, because the probabilities are never in memory.
- No function waits for a device. `max_seqlen` arguments help to choose kernels; one that is no int is not read.

Errors name the function, the argument, what was expected and what was got. A call that no variant computes raises
`NotRenderedError` with the entry to add.
"""

from typing import Any

import torch
from torch import Tensor

from .._runtime.core.checks import check_flag, fail
from .._runtime.core.options import known_lengths
from .._runtime.torch.replay import drawn_seed
from .flash_calls import Chosen, chosen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q `[B, Sq, Hq, D]`, k and v `[B, Skv, Hkv, D]` to o `[B, Sq, Hq, D]`."""
    title = "flash_attn_func"
    _check_axes(title, "q", q, ("B", "S", "H", "D"))
    found = _chosen(title, q, q.shape[0], causal, window_size, softcap, alibi_slopes, dropout_p, return_attn_probs)
    in_order = check_flag(title, "deterministic", deterministic) or None
    call = {"layout": "bshd", "scale": softmax_scale, "deterministic": in_order}
    return _called(found, q, k, v, call, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of kv `[B, Skv, 2, Hkv, D]`. Its gradient is put together from those of k and v."""
    _check_axes("flash_attn_kvpacked_func", "kv", kv, ("B", "S", 2, "H", "D"))
    k, v = kv.unbind(2)
    rest = (softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv `[B, S, 3, H, D]`. Its gradient is put together from those of q, k and v."""
    _check_axes("flash_attn_qkvpacked_func", "qkv", qkv, ("B", "S", 3, "H", "D"))
    q, k, v = qkv.unbind(2)
    rest = (softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, *rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Packed sequences: q `[total_q, Hq, D]`, k and v `[total_k, Hkv, D]` to o `[total_q, Hq, D]`.

    With `block_table` `[B, most pages]` k and v are caches `[pages, page size, Hkv, D]` of any page size, of which
    sequence s has `cu_seqlens_k[s + 1] - cu_seqlens_k[s]` keys; such a call has neither gradient nor dropout.
    """
    title = "flash_attn_varlen_func"
    _check_axes(title, "q", q, ("total", "H", "D"))
    _check_axes(title, "cu_seqlens_q", cu_seqlens_q, ("B + 1",))
    _check_axes(title, "cu_seqlens_k", cu_seqlens_k, ("B + 1",))
    batch = cu_seqlens_q.shape[0] - 1
    found = _chosen(title, q, batch, causal, window_size, softcap, alibi_slopes, dropout_p, return_attn_probs)
    in_order = check_flag(title, "deterministic", deterministic) or None
    call: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "scale": softmax_scale, "deterministic": in_order}
    if block_table is None:
        call |= {"cu_seqlens_k": cu_seqlens_k, **known_lengths(max_seqlen_q, max_seqlen_k)}
    else:
        if dropout_p:
            fail(title, "dropout_p", "0 beside block_table", dropout_p)
        call |= {"page_table": block_table, "kv_lengths": cu_seqlens_k.diff()}
        call |= known_lengths(max_seqlen_q, None)
    return _called(found, q, k, v, call, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of kv `[total_k, 2, Hkv, D]`."""
    _check_axes("flash_attn_varlen_kvpacked_func", "kv", kv, ("total", 2, "H", "D"))
    k, v = kv.unbind(1)
    begins = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *begins, dropout_p, softmax_scale, causal, window_size, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv `[total, 3, H, D]`: each sequence has as many queries as keys."""
    _check_axes("flash_attn_varlen_qkvpacked_func", "qkv", qkv, ("total", 3, "H", "D"))
    q, k, v = qkv.unbind(1)
    begins = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    rest = (softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, *begins, dropout_p, softmax_scale, causal, window_size, *rest)


def no_key_as_inf(lse: Tensor) -> Tensor:
    """The logs of softmax denominators with +inf for a row without any key, where the ops have -inf."""
    return lse.masked_fill(lse == -float("inf"), float("inf"))


def _check_axes(title: str, name: str, x: Any, axes: tuple[str | int, ...]) -> None:
    """Check a tensor whose sizes are read before an op checks them; `axes`: sizes, or a name if any size is allowed."""
    expected = f"a tensor of {len(axes)} axes [{', '.join(map(str, axes))}]"
    if not isinstance(x, Tensor):
        fail(title, name, expected, type(x).__name__)
    fits = x.dim() == len(axes) and all(isinstance(a, str) or a == n for a, n in zip(axes, x.shape, strict=True))
    if not fits:
        fail(title, name, expected, list(x.shape))


def _chosen(
    title: str,
    q: Tensor,
    batch: int,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    return_attn_probs: bool,
) -> Chosen:
    if check_flag(title, "return_attn_probs", return_attn_probs) and dropout_p:
        expected = "False beside dropout: the probabilities are never in memory"
        fail(title, "return_attn_probs", expected, f"{return_attn_probs} beside dropout_p={dropout_p}")
    return chosen(
        title,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        heads=q.shape[-2],
        batch=batch,
        dropout_p=dropout_p,
    )


def _called(found: Chosen, q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], return_attn_probs: bool) -> Result:
    given: dict[str, Any] = {**found.arguments, **call, "q_offset": found.q_offset}
    if "dropout_p" in given and torch.compiler.is_compiling():
        # Drawn by the compiled call, each time anew; outside of a trace the op itself draws the same number.
        given["seed"] = drawn_seed()
    if not return_attn_probs:
        o: Tensor = found.op(q, k, v, **given)
        return o
    o, lse = found.op(q, k, v, **given, return_lse=True)
    return o, no_key_as_inf(lse), q.new_empty(0)
