# SPDX-License-Identifier: Apache-2.0
"""The JAX ops behind interfaces that models are written for: that of `jax.nn`, and that of Flax's modules.

`dot_product_attention` takes the arguments of `jax.nn.dot_product_attention`. `attention_fn` turns any op into a
function that `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention` take as their `attention_fn`.
Importing this module does not import Flax. In the examples `ops` is this package's module `jax`.

>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 16))
>>> o = dot_product_attention(q, k, v, is_causal=True)
>>> bool(jnp.allclose(o, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
True
"""

import inspect
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import jax as ops
from ._runtime.core.checks import fail
from ._runtime.core.mask_parts import is_plain, mask_parts
from ._runtime.jax.pairs import checked_bias, checked_mask, masked_bias
from ._runtime.jax.support import as_array, check_flag, int32_array, is_array

__all__ = ["attention_fn", "dot_product_attention"]

_NN = "dot_product_attention"
# The variants that compute calls without bias and mask: the entry of each in a spec, and the parts of its mask.
_PLAIN: dict[str, tuple[str, frozenset[str]]] = {
    "full": ("full: {}", frozenset()),
    "causal": ("causal: {mask: causal}", frozenset({"causal"})),
    "window": (
        "window: {mask: causal and window(size), scalars: {size: {type: int, min: 1}}}",
        frozenset({"causal", "window(size)"}),
    ),
}
# Arrays that calls under `attention_fn` may not have, and examples of variants that declare such an array.
_OWN_VARIANT = {
    "mask": "masked: {mask: 'seen[b, q_idx, kv_idx]', tensors: {seen: {dims: [b, q_idx, kv_idx], dtype: bool}}}",
    "bias": "biased: {score: 'score + bias[b, h, q_idx, kv_idx]', "
    "tensors: {bias: {dims: [b, h, q_idx, kv_idx], grad: true}}}",
}
# Arguments of an op that each call of Flax gives, or that do not fit the calls of Flax.
_OF_FLAX = ("q", "k", "v", "layout", "return_lse", "dropout_p", "seed", "cu_seqlens_q", "cu_seqlens_k")


# -------------------------------------------------------------------------------------------------------------- jax.nn


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """`jax.nn.dot_product_attention`, computed by the ops of this package.

    >>> q, k, v = jnp.ones((2, 6, 4, 16)), jnp.ones((2, 9, 2, 16)), jnp.ones((2, 9, 2, 16))
    >>> dot_product_attention(q, k, v).shape
    (2, 6, 4, 16)
    >>> dot_product_attention(q[0], k[0], v[0], is_causal=True).shape
    (6, 4, 16)

    In the second batch row the last three keys and the last query are padding:

    >>> lengths = {"query_seq_lengths": jnp.array([6, 5]), "key_value_seq_lengths": jnp.array([9, 6])}
    >>> dot_product_attention(q, k, v, **lengths)[1, :, 0, 0].round(4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]

    Each query sees the three keys before its own and the one after it. lse is log n if all n keys score 0:

    >>> o, lse = dot_product_attention(q * 0, k, v, local_window_size=(3, 1), return_residual=True)
    >>> jnp.exp(lse[0, :, 0]).round(4).tolist()
    [2.0, 3.0, 4.0, 5.0, 5.0, 5.0]

    A mask and a bias are arrays `[B, N, T, S]` or of any shape that broadcasts to it. A bias has a gradient:

    >>> mask = jnp.tril(jnp.ones((6, 9), bool), 3)
    >>> o = dot_product_attention(q, k, v, mask=mask)
    >>> loss = lambda bias: dot_product_attention(q, k, v, bias, mask)[0, 0, 0].sum()
    >>> jax.grad(loss)(jnp.zeros((1, 4, 6, 9))).shape
    (1, 4, 6, 9)

    Args:
        query: `[B, T, N, H]` or `[T, N, H]`, float16, bfloat16 or float32; H from 8 to 512.
        key: `[B, S, K, H]` or `[S, K, H]`; N is a multiple of K, and each key head serves N / K query heads.
        value: `[B, S, K, Hv]` or `[S, K, Hv]`.
        bias: added to the scaled scores; each of its axes is 1 or that of `[B, N, T, S]`, leading ones may be missing.
            It is expanded to the full shape, and so is its gradient. A variant whose `score` computes the bias takes
            less memory.
        mask: bool, in the shapes that bias may have: True where a query sees a key. With a bias it becomes -inf in the
            bias, else it is expanded to the full shape. A variant whose `mask` is an expression takes no memory and
            skips empty blocks.
        scale: factor of the scores, by default `H ** -0.5`; a number, known while tracing.
        is_causal: query t attends to keys 0 to t, whatever the lengths.
        query_seq_lengths: integers `[B]`: queries from this number on give zeros.
        key_value_seq_lengths: integers `[B]`: no query attends to keys from this number on.
        local_window_size: `(left, right)`: query t attends to keys `t - left` to `t + right`; an int is both.
        implementation: must be None. Other values name implementations of JAX.
        return_residual: also return the natural log of the softmax denominator, without a gradient.

    Returns:
        `[B, T, N, Hv]` or `[T, N, Hv]`, with `return_residual` also `[B, T, N]` or `[T, N]`, both in the dtype of
        query. The op's own `return_lse=True` gives float32, differentiable.

        A query that may attend to no key gives zeros and a residual of -inf, with gradients of zero. jax.nn gives zeros
        for queries from query_seq_lengths on. For other such queries it gives the mean of all values, although they are
        masked, and a residual around -2e38.

    Without a bias and a mask the op is `full`, `causal` or `window`. With a bias it is the variant whose score adds
    `bias[b, h, q_idx, kv_idx]`, such as `band_bias`. With a mask alone it is the variant whose mask has
    `keep[b, h, q_idx, kv_idx]`, such as `band_mask`. The names of variants and tensors may differ.

    Raises:
        ArgumentError: an argument that the package has no variant for, or one of the wrong shape, dtype or value.
    """
    if implementation is not None:
        expected = f"None, as the kernels of this package compute it: jax.nn.{_NN} has those of JAX"
        fail(_NN, "implementation", expected, repr(implementation))
    is_causal = check_flag(_NN, "is_causal", is_causal)
    return_residual = check_flag(_NN, "return_residual", return_residual)
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    shape = jnp.shape(query)
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]

    given: dict[str, Any] = {}
    if query_seq_lengths is not None:
        lengths = int32_array(_NN, "query_seq_lengths", _lengths("query_seq_lengths", query_seq_lengths), (batch,))
        is_query = jnp.arange(q_len, dtype=jnp.int32)[None] < lengths[:, None]
        given["q_segment_ids"] = is_query.astype(jnp.int32) - 1  # 0, or the id of padding
        given["kv_segment_ids"] = jnp.zeros((batch, kv_len), jnp.int32)
    if key_value_seq_lengths is not None:
        given["kv_lengths"] = int32_array(
            _NN, "key_value_seq_lengths", _lengths("key_value_seq_lengths", key_value_seq_lengths), (batch,)
        )
    if bias is not None or mask is not None:
        sides = (None, None) if local_window_size is None else _window(local_window_size, q_len, kv_len)
        band = sides[0], 0 if is_causal else sides[1]
        op, pairs = _op_of_pairs(band, bias, mask, (batch, q.shape[2], q_len, kv_len))
        given |= pairs
    elif local_window_size is None:
        op = _plain_op("causal" if is_causal else "full", "is_causal", is_causal)
    else:
        op = _plain_op("window", "local_window_size", local_window_size)
        left, right = _window(local_window_size, q_len, kv_len)
        # `window` ends at the query's own position. An offset of `right` lets it end that many keys later.
        right = 0 if is_causal else right
        given |= {"size": left + right + 1, "q_offset": right}

    if not return_residual:
        o: Array = op(q, k, v, scale=_number(scale), **given)
        return o.reshape(*shape[:-1], v.shape[-1])
    o, lse = op(q, k, v, scale=_number(scale), return_lse=True, **given)
    residual = jax.lax.stop_gradient(lse.transpose(0, 2, 1).astype(q.dtype))
    return o.reshape(*shape[:-1], v.shape[-1]), residual.reshape(shape[:-1])


def _op_of_pairs(
    band: tuple[int | None, int | None], bias: Any, mask: Any, sizes: tuple[int, int, int, int]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The op that computes a call with a bias or a mask, with its own scalars and tensor; `sizes`: [B, N, T, S]."""
    # This module reads the entries of all variants, so only calls that need it import it.
    from .integrations.entries import Attention
    from .integrations.variants import NotRenderedError, find

    keep = None if mask is None else checked_mask(_NN, mask, sizes)
    array: Any = keep if bias is None else masked_bias(checked_bias(_NN, bias, sizes), keep)
    argument = "mask" if bias is None else "bias"
    try:
        found = find(Attention(before=band[0], after=band[1], bias=bias is not None, mask=bias is None))
    except NotRenderedError as error:
        fail(_NN, argument, f"None, as {error}\n", f"an array {list(jnp.shape(array))}")
    name = str(found.mask if bias is None else found.bias)
    return getattr(ops, found.name), {**found.scalars, name: jnp.broadcast_to(array, sizes)}


def _four_axes(name: str, x: Any) -> Array:
    axes = {"query": "T, N, H", "key": "S, K, H", "value": "S, K, Hv"}[name]
    array = as_array(_NN, name, x, f"an array [B, {axes}] or [{axes}]")
    if array.ndim not in (3, 4):
        fail(_NN, name, f"shape [B, {axes}] or [{axes}]", list(array.shape))
    return array if array.ndim == 4 else array[None]


def _lengths(name: str, lengths: Any) -> Any:
    """Lengths as an array. jax.nn takes lists, too."""
    return lengths if is_array(lengths) else as_array(_NN, name, lengths, "an integer array [B]")


def _number(scale: Any) -> Any:
    """A scale with a known value as a Python number; anything else as it is."""
    if isinstance(scale, jax.core.Tracer):
        return scale
    return scale.item() if isinstance(scale, (np.generic, np.ndarray, jax.Array)) and scale.size == 1 else scale


def _window(sides: Any, q_len: int, kv_len: int) -> tuple[int, int]:
    """How far a window reaches to the left and right of a query, limited by the numbers of queries and keys.

    If these are symbolic, because a function is exported for any length, the limit is half of the widest window.
    """
    pair = sides if isinstance(sides, (tuple, list)) else (sides, sides)
    known = all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0 for side in pair)
    if len(pair) != 2 or not known:
        expected = "an int or (left, right), each at least 0, or None for no window"
        fail(_NN, "local_window_size", expected, repr(sides))
    limits = (length if isinstance(length, int) else 2**29 - 1 for length in (q_len, kv_len))
    left, right = (min(int(side), limit) for side, limit in zip(pair, limits, strict=True))
    return left, right


# ---------------------------------------------------------------------------------------------------------------- Flax


def attention_fn(op: Callable[..., Any], **fixed: Any) -> Callable[..., Array]:
    """`op` as the `attention_fn` of Flax's modules, with the op's own tensors and scalars, and any option, as `fixed`.

    >>> from flax import linen, nnx
    >>> x = jnp.ones((2, 6, 64))
    >>> module = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn(ops.causal))
    >>> module.apply(module.init(jax.random.key(0), x), x).shape
    (2, 6, 64)

    The op's own mask applies; `is_causal=True` is allowed if that is causal. Arrays may have any leading axes:

    >>> local = attention_fn(ops.window, size=3)
    >>> module = nnx.MultiHeadAttention(4, 64, num_kv_heads=2, attention_fn=local, decode=False, rngs=nnx.Rngs(0))
    >>> module(jnp.ones((3, 2, 6, 64)), is_causal=True).shape
    (3, 2, 6, 64)

    The op computes dropout, with the rate and the keys of the module:

    >>> dropping = attention_fn(ops.causal_dropout)
    >>> rngs = nnx.Rngs(0, dropout=1)
    >>> module = nnx.MultiHeadAttention(4, 64, dropout_rate=0.1, attention_fn=dropping, decode=False, rngs=rngs)
    >>> module(x, deterministic=False).shape
    (2, 6, 64)

    Arrays that train with the model are bound inside the traced function, such as the slopes of `alibi` here:

    >>> q = jnp.ones((2, 6, 4, 16))
    >>> loss = lambda slope: attention_fn(ops.alibi, slope=slope)(q, q, q).sum()
    >>> jax.grad(loss)(jnp.ones(4)).shape
    (4,)

    Args:
        op: one of the ops for JAX.
        fixed: arguments of the op by name, the same in every call. A batch axis of theirs stands for all leading axes,
            in their order. Layout, dropout and packed sequences cannot be fixed.

    Returns:
        A function that Flax calls as

            f(query, key, value, mask=..., dropout_rng=..., dropout_rate=..., deterministic=..., dtype=..., ...)

        with query `[..., Sq, Hq, D]`, key `[..., Skv, Hkv, D]` and value `[..., Skv, Hkv, Dv]`, and that returns
        `[..., Sq, Hq, Dv]` in `dtype`, by default the one that the three are promoted to.

        `dropout_rng` gives the seed. Each batch row and head drops its own probabilities, whatever `broadcast_dropout`
        says. Softmax is computed in float32, and products are exact apart from the float32 sums, so `precision` and
        `force_fp32_for_softmax` change nothing.

    Raises:
        ArgumentError: here for arguments that the op does not have. In a call for a mask or a bias, for dropout if the
            op has none, for `is_causal` if its mask is not causal, and for `module` (`sow_weights`) and einsums,
            because the kernels hold no weights that could be shown or replaced. Decoding with Flax's cache passes a
            mask, so it needs another `attention_fn`.
    """
    name = getattr(op, "__name__", type(op).__name__)
    if not callable(op) or not {*_OF_FLAX[:4]} <= {*inspect.signature(op).parameters}:
        fail("attention_fn", "op", "one of the ops for JAX", repr(op) if isinstance(op, str) else name)
    title = f"attention_fn({name})"
    parameters = inspect.signature(op).parameters
    free = [parameter for parameter in parameters if parameter not in _OF_FLAX]
    for argument in fixed:
        if argument not in free:
            fail(title, argument, f"an argument of {name} to fix: {', '.join(free)}", "one that is not")

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> Array:
        del broadcast_dropout, precision, force_fp32_for_softmax
        _refuse_arrays(title, name, bias=bias, mask=mask)
        if module is not None:
            fail(title, "module", "None, without sow_weights: no weights are ever in memory", type(module).__name__)
        for argument, function in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if function is not None:
                fail(title, argument, "None: the kernels have their own products", type(function).__name__)
        if check_flag(title, "is_causal", is_causal) and not _is_causal(op):
            expected = "False: who attends to whom is the op's own mask, and this one's is not `causal and ...`"
            fail(title, "is_causal", expected, is_causal)
        given = dict(fixed)
        if dropout_rate and not check_flag(title, "deterministic", deterministic):
            given |= {"dropout_p": dropout_rate, "seed": _seed(title, "dropout_p" in parameters, dropout_rng)}

        given_arrays = {"query": query, "key": key, "value": value}
        axes = "an array [..., length, heads, depth]"
        arrays = {argument: as_array(title, argument, x, axes) for argument, x in given_arrays.items()}
        lead = arrays["query"].shape[:-3]
        dtype = jnp.result_type(*arrays.values()) if dtype is None else dtype
        folded = [_folded(title, argument, x, lead).astype(dtype) for argument, x in arrays.items()]
        o: Array = op(*folded, layout="bshd", **given)
        return o.reshape(*lead, *o.shape[1:])

    return attend


def _seed(title: str, has_dropout: bool, dropout_rng: Any) -> Array:
    """The seed from a key of `jax.random` of any kind."""
    if not has_dropout:
        expected = "0, or deterministic=True: dropout is part of a variant whose entry says `dropout: true`"
        fail(title, "dropout_rate", expected, "a rate that an op without dropout cannot serve")
    if dropout_rng is None:
        fail(title, "dropout_rng", "a key of jax.random beside dropout_rate", None)
    return jax.random.bits(dropout_rng, (2,), jnp.uint32)


def _folded(title: str, argument: str, x: Array, lead: tuple[int, ...]) -> Array:
    """`[..., S, H, D]` as `[B, S, H, D]`."""
    if x.ndim < 3 or x.shape[:-3] != lead:
        axes = ", ".join(map(str, (*lead, "length", "heads", "depth")))
        fail(title, argument, f"shape [{axes}]", list(x.shape))
    return x.reshape(math.prod(lead), *x.shape[-3:])


# ------------------------------------------------------------------------------------------------------------ variants


def _refuse_arrays(title: str, name: str, **arrays: Any) -> None:
    """Refuse masks and biases as arrays: a variant has to declare them by its expressions."""
    for argument, x in arrays.items():
        if x is not None:
            example = f"such as `{_OWN_VARIANT[argument]}`"
            expected = (
                f"None: a {argument} is written in the spec, as a variant of its own {example}, or is what {name} has "
                f"anyhow and left out; {_NN} takes arrays"
            )
            fail(title, argument, expected, f"{x.dtype.name} {list(x.shape)}" if is_array(x) else type(x).__name__)


@cache
def _variants() -> dict[str, dict[str, Any]]:
    """The declarations of this package's variants."""
    manifest = json.loads(Path(__file__).with_name("MANIFEST.json").read_text(encoding="utf-8"))
    variants: dict[str, dict[str, Any]] = manifest["variants"]
    return variants


def _plain_op(name: str, argument: str, value: object) -> Callable[..., Any]:
    """The op of this name, if the package has it and its variant computes what the name says."""
    entry, parts = _PLAIN[name]
    variant = _variants().get(name)
    if variant is None or not is_plain(variant, parts, {"size": "int"} if "window(size)" in parts else {}):
        has = "no such variant" if variant is None else f"another one of that name, with mask {variant['mask']!r}"
        expected = f"the variant `{entry}` in this package's spec, which {argument}={value} is computed by"
        fail(_NN, argument, f"{expected}: add it and render again", has)
    op: Callable[..., Any] = getattr(ops, name)
    return op


def _is_causal(op: Callable[..., Any]) -> bool:
    """Whether an op is one of this package whose declared mask lets no query attend to later keys."""
    name = getattr(op, "__name__", "")
    variant = _variants().get(name)
    return variant is not None and op is getattr(ops, name) and "causal" in mask_parts(variant["mask"])
