# SPDX-License-Identifier: Apache-2.0
"""The JAX ops behind interfaces that models are written for: that of `jax.nn`, and that of Flax's modules.

`dot_product_attention` takes what `jax.nn.dot_product_attention` takes; `attention_fn` makes of any op what
`flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention` take as their `attention_fn`. Importing this
module does not import Flax. In the examples `ops` is this package's module `jax`.

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
from ._runtime.jax.support import int32_array, is_array

__all__ = ["attention_fn", "dot_product_attention"]

_NN = "dot_product_attention"
# The variants that jax.nn's arguments are computed by: the entry of each in a spec, and what its mask joins by `and`.
_PLAIN: dict[str, tuple[str, frozenset[str]]] = {
    "full": ("full: {}", frozenset()),
    "causal": ("causal: {mask: causal}", frozenset({"causal"})),
    "window": (
        "window: {mask: causal and window(size), scalars: {size: {type: int, min: 1}}}",
        frozenset({"causal", "window(size)"}),
    ),
}
# Arrays that an op under `attention_fn` does not take, and variants that do.
_OWN_VARIANT = {
    "mask": "masked: {mask: 'seen[b, q_idx, kv_idx]', tensors: {seen: {dims: [b, q_idx, kv_idx], dtype: bool}}}",
    "bias": "biased: {score: 'score + bias[b, h, q_idx, kv_idx]', "
    "tensors: {bias: {dims: [b, h, q_idx, kv_idx], grad: true}}}",
}
# Arguments of an op that come with each call of Flax, or that its calls do not fit.
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

    Three keys of the second row are padding, and the last of its queries:

    >>> lengths = {"query_seq_lengths": jnp.array([6, 5]), "key_value_seq_lengths": jnp.array([9, 6])}
    >>> dot_product_attention(q, k, v, **lengths)[1, :, 0, 0].round(4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]

    Each query sees the three keys before its own and the one after it; lse is log n where all n keys score 0:

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
            Laid out in full, as its gradient is: a variant whose `score` computes it takes less memory.
        mask: bool, of shapes like those of bias: True where a query sees a key. Beside a bias it is -inf in the bias,
            else laid out in full. A variant whose `mask` is an expression takes no memory and skips empty blocks.
        scale: factor of the scores, by default `H ** -0.5`; a number, known while tracing.
        is_causal: query t attends to keys up to t, counted from the first of each, whatever the lengths.
        query_seq_lengths: integers `[B]`: queries from there on give zeros.
        key_value_seq_lengths: integers `[B]`: no query attends to keys from there on.
        local_window_size: `(left, right)`: query t attends to keys `t - left` to `t + right`; an int is both.
        implementation: None. The others are those of JAX.
        return_residual: also return the natural log of the softmax denominator, without a gradient.

    Returns:
        `[B, T, N, Hv]` or `[T, N, Hv]`, with `return_residual` also `[B, T, N]` or `[T, N]`, both in the dtype of
        query. The op's own `return_lse=True` gives float32, differentiable.

        A query that may attend to no key gives zeros and a residual of -inf, with gradients of zero. jax.nn gives zeros
        from query_seq_lengths on, else the mean of all values, masked as they are, and a residual around -2e38.

    Without arrays the op is `full`, `causal` or `window`; with a bias or a mask that of the variant that adds
    `bias[b, h, q_idx, kv_idx]`, or that sees `keep[b, h, q_idx, kv_idx]`, under any names: `band_bias` and `band_mask`.

    Raises:
        ArgumentError: an argument that the package has no variant for, or one of the wrong shape, dtype or value.
    """
    if implementation is not None:
        expected = f"None, as the kernels of this package compute it: jax.nn.{_NN} has those of JAX"
        fail(_NN, "implementation", expected, repr(implementation))
    shape = jnp.shape(query)
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]

    given: dict[str, Any] = {}
    if query_seq_lengths is not None:
        lengths = int32_array(_NN, "query_seq_lengths", _lengths(query_seq_lengths), (batch,))
        is_query = jnp.arange(q_len, dtype=jnp.int32)[None] < lengths[:, None]
        given["q_segment_ids"] = is_query.astype(jnp.int32) - 1  # 0, or the id of padding
        given["kv_segment_ids"] = jnp.zeros((batch, kv_len), jnp.int32)
    if key_value_seq_lengths is not None:
        given["kv_lengths"] = int32_array(_NN, "key_value_seq_lengths", _lengths(key_value_seq_lengths), (batch,))
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
        # `window` ends at the query's own position: moved by `right`, it ends that much later.
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
    # What reads the entries of all variants is loaded by calls that need it alone.
    from .integrations.variants import Attention, NotRenderedError, find

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
    array: Array = jnp.asarray(x)
    if array.ndim not in (3, 4):
        axes = {"query": "T, N, H", "key": "S, K, H", "value": "S, K, Hv"}[name]
        fail(_NN, name, f"shape [B, {axes}] or [{axes}]", list(array.shape))
    return array if array.ndim == 4 else array[None]


def _lengths(lengths: Any) -> Any:
    """Lengths that may be a list, as jax.nn takes them."""
    return lengths if is_array(lengths) else jnp.asarray(lengths)


def _number(scale: Any) -> Any:
    """A scale that has a value as Python's number."""
    if isinstance(scale, jax.core.Tracer):
        return scale
    return scale.item() if isinstance(scale, (np.generic, np.ndarray, jax.Array)) and scale.size == 1 else scale


def _window(sides: Any, q_len: int, kv_len: int) -> tuple[int, int]:
    """How far a window reaches to the left and to the right of a query, and no further than there are keys."""
    pair = sides if isinstance(sides, (tuple, list)) else (sides, sides)
    known = all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) and side >= 0 for side in pair)
    if len(pair) != 2 or not known:
        expected = "an int or (left, right), each at least 0, or None for no window"
        fail(_NN, "local_window_size", expected, repr(sides))
    return min(int(pair[0]), q_len), min(int(pair[1]), kv_len)


# ---------------------------------------------------------------------------------------------------------------- Flax


def attention_fn(op: Callable[..., Any], **fixed: Any) -> Callable[..., Array]:
    """`op` as the `attention_fn` of Flax's modules, with the op's own tensors and scalars, and any option, as `fixed`.

    >>> from flax import linen, nnx
    >>> x = jnp.ones((2, 6, 64))
    >>> module = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn(ops.causal))
    >>> module.apply(module.init(jax.random.key(0), x), x).shape
    (2, 6, 64)

    The op's mask is what counts; `is_causal=True` may be said of one that is causal. Any leading axes will do:

    >>> local = attention_fn(ops.window, size=3)
    >>> module = nnx.MultiHeadAttention(4, 64, num_kv_heads=2, attention_fn=local, decode=False, rngs=nnx.Rngs(0))
    >>> module(jnp.ones((3, 2, 6, 64)), is_causal=True).shape
    (3, 2, 6, 64)

    Dropout is that of the op, and of the module's own rate and keys:

    >>> dropping = attention_fn(ops.causal_dropout)
    >>> rngs = nnx.Rngs(0, dropout=1)
    >>> module = nnx.MultiHeadAttention(4, 64, dropout_rate=0.1, attention_fn=dropping, decode=False, rngs=rngs)
    >>> module(x, deterministic=False).shape
    (2, 6, 64)

    What trains with the model is bound where it is traced, as the slopes of `alibi` here:

    >>> q = jnp.ones((2, 6, 4, 16))
    >>> loss = lambda slope: attention_fn(ops.alibi, slope=slope)(q, q, q).sum()
    >>> jax.grad(loss)(jnp.ones(4)).shape
    (4,)

    Args:
        op: one of the ops for JAX.
        fixed: arguments of every call of it by name. Where they have a batch axis it is that of all leading axes, in
            their order; a layout, dropout and packed sequences are not among them.

    Returns:
        A function that Flax calls as

            f(query, key, value, mask=..., dropout_rng=..., dropout_rate=..., deterministic=..., dtype=..., ...)

        with query `[..., Sq, Hq, D]`, key `[..., Skv, Hkv, D]` and value `[..., Skv, Hkv, Dv]`, and that returns
        `[..., Sq, Hq, Dv]` in `dtype`, by default the one that the three are promoted to.

        `dropout_rng` gives the seed; each batch row and head drops its own probabilities, whatever `broadcast_dropout`.
        Softmax is computed in float32, and products are exact but for the float32 sums: `precision` and
        `force_fp32_for_softmax` ask for no more.

    Raises:
        ArgumentError: here for arguments that are not the op's; in a call for a mask or a bias, for dropout where the
            op has none, for `is_causal` where its mask is not, and for `module` (`sow_weights`) and einsums, as the
            kernels hold no weights that could be shown, or replaced. So decoding with Flax's cache, which masks it,
            needs another op.
    """
    name = getattr(op, "__name__", type(op).__name__)
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
        if is_causal and not _is_causal(op):
            expected = "False: who attends to whom is the op's own mask, and this one's is not `causal and ...`"
            fail(title, "is_causal", expected, is_causal)
        given = dict(fixed)
        if dropout_rate and not deterministic:
            given |= {"dropout_p": dropout_rate, "seed": _seed(title, "dropout_p" in parameters, dropout_rng)}

        lead = jnp.shape(query)[:-3]
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        arrays = (("query", query), ("key", key), ("value", value))
        o: Array = op(*(_folded(title, argument, x, lead, dtype) for argument, x in arrays), layout="bshd", **given)
        return o.reshape(*lead, *o.shape[1:])

    return attend


def _seed(title: str, has_dropout: bool, dropout_rng: Any) -> Array:
    """A seed that a key of any kind gives."""
    if not has_dropout:
        expected = "0, or deterministic=True: dropout is part of a variant whose entry says `dropout: true`"
        fail(title, "dropout_rate", expected, "a rate that an op without dropout cannot serve")
    if dropout_rng is None:
        fail(title, "dropout_rng", "a key of jax.random beside dropout_rate", None)
    return jax.random.bits(dropout_rng, (2,), jnp.uint32)


def _folded(title: str, argument: str, x: Any, lead: tuple[int, ...], dtype: Any) -> Array:
    """`[..., S, H, D]` as `[B, S, H, D]`."""
    array: Array = jnp.asarray(x, dtype)
    if array.ndim < 3 or array.shape[:-3] != lead:
        axes = ", ".join(map(str, (*lead, "length", "heads", "depth")))
        fail(title, argument, f"shape [{axes}]", list(array.shape))
    return array.reshape(math.prod(lead), *array.shape[-3:])


# ------------------------------------------------------------------------------------------------------------ variants


def _refuse_arrays(title: str, name: str, **arrays: Any) -> None:
    """Refuse what only the expression of a variant can say."""
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
    """The op of this name, if the package has it and its variant is what the name says."""
    entry, parts = _PLAIN[name]
    variant = _variants().get(name)
    if variant is None or not is_plain(variant, parts, {"size": "int"} if "window(size)" in parts else {}):
        has = "no such variant" if variant is None else f"another one of that name, with mask {variant['mask']!r}"
        expected = f"the variant `{entry}` in this package's spec, which {argument}={value} is computed by"
        fail(_NN, argument, f"{expected}: add it and render again", has)
    op: Callable[..., Any] = getattr(ops, name)
    return op


def _is_causal(op: Callable[..., Any]) -> bool:
    """Whether an op of this package declares that no query attends to what comes after it."""
    name = getattr(op, "__name__", "")
    variant = _variants().get(name)
    return variant is not None and op is getattr(ops, name) and "causal" in mask_parts(variant["mask"])
