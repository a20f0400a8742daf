"""The ops as a flash attention implementation of torch: behind `F.scaled_dot_product_attention`, `varlen_attn` and
torch's own context parallel. Needs torch 2.10 or newer.

>>> register()
>>> "codegen" in torch.nn.attention.list_flash_attention_impls()
True

`torch.nn.attention.activate_flash_attention_impl("codegen")` then overrides, for this process and CUDA tensors, the
operators `aten::_scaled_dot_product_flash_attention`, `aten::_flash_attention_forward` and their backwards;
`torch.nn.attention.restore_flash_attention_impl()` undoes that. The ops get the calls that torch gives its flash
kernels: without a mask, in dtypes of 16 bits, with head dims up to 256.

The arguments of a call alone decide which variant computes it. If the package has none, the call raises an error with
the spec entry to add. A row without any key has o = 0 and lse = -inf.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._runtime.core.checks import fail
from .._runtime.core.options import CallOptions, known_lengths
from .._runtime.torch.devices import call_options
from .._runtime.torch.dispatch import runs_reference
from .._runtime.torch.dtypes import interpreter_dtype
from .flash_calls import Chosen, chosen

__all__ = ["Override", "register"]

_OFFSET_STEP = 4
"""How far a call with dropout advances the offset of a generator, which must be a multiple of 4."""

_SEEDS = 2**63
_MIX = 0x9E3779B97F4A7C15
"""An odd number, so that calls with one seed and different offsets get different Philox keys."""

_SDPA = "scaled_dot_product_attention"

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def register(name: str = "codegen") -> None:
    """Make the ops a flash attention implementation that `torch.nn.attention.activate_flash_attention_impl` knows.

    Nothing is overridden before it is activated.

    Args:
        name: what the implementation is called.

    Raises:
        ImportError: torch is older than 2.10.
        ArgumentError: a name that is torch's own.
    """
    attention: Any = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise ImportError(
            f"register: torch: expected 2.10 or newer, which has torch.nn.attention.register_flash_attention_impl, "
            f"got {torch.__version__}"
        )
    if not isinstance(name, str) or not name or name in ("FA2", "FA3", "FA4"):
        fail("register", "name", "a name that torch does not use itself", repr(name))
    attention.register_flash_attention_impl(name, register_fn=Override)


class Override:
    """The operators of torch's flash attention, computed by this package until `remove` is called.

    Args:
        dispatch_key: the key of torch's dispatcher for the tensors that are served.
    """

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: Any = torch.library.Library("aten", "IMPL", dispatch_key)
        for name, function in OPERATORS.items():
            # torch 2.10 and 2.11 lack the operator that writes into an output of the caller.
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:
                self._library.impl(name, _by_name(packet.default, function), dispatch_key)

    def remove(self) -> None:
        """Give the operators back to the implementations that computed them before."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def _by_name(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to get an operator's arguments by name. An argument that it does not have must be None."""
    title = f"aten.{operator._schema.name.removeprefix('aten::')}"
    names = [argument.name for argument in operator._schema.arguments]
    known = frozenset(inspect.signature(function).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in given.keys() - known:
            if given.pop(name) is not None:
                fail(title, name, "None: this argument is newer than the implementation 'codegen'", "a value")
        # The dispatcher has already passed autograd, but grad mode is still enabled.
        with torch.no_grad():
            return function(**given)

    return call


# ------------------------------------------------------------------------------------------------------------- forwards


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention`: q `[B, Hq, Sq, D]`, k and v `[B, Hkv, Skv, D]`.

    Returns:
        o as q lies, lse float32 `[B, Hq, Sq]`, two Nones, Sq, Skv, the generator's seed and offset `[2]`, and two empty
        tensors.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    call = (None, None, q_len, kv_len, dropout_p, is_causal, return_debug_mask)
    o, lse, *rest = forward(query, key, value, *call, scale=scale, layout="bhsd", title=_SDPA)
    return o, lse, None, None, q_len, kv_len, *rest  # type: ignore[return-value]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    layout: str = "bshd",
    title: str = "aten._flash_attention_forward",
) -> Five:
    """`aten::_flash_attention_forward`: q `[B, Sq, Hq, D]`, or packed `[total_q, Hq, D]` with `cum_seq_q`.

    The last query is aligned with the last key. `seqused_k` `[B]`: how many keys of each sequence are seen.
    `block_table` `[B, most pages]`: k and v are `[pages, page size, Hkv, D]`. With either of them, and with slopes, the
    operator has no backward. Only packed calls with either of them read `num_splits`: 1 forbids splits of the keys,
    any other value leaves them to the op.

    Returns:
        o, lse float32 `[B, Hq, Sq]` or `[Hq, total_q]`, the generator's seed and offset `[2]`, two empty tensors.
    """
    if return_debug_mask:
        fail(title, "return_debug_mask", "False: the probabilities are never in memory", True)
    wants_gradient = any(x.requires_grad for x in (query, key, value))
    if wants_gradient and alibi_slopes is not None:
        fail(title, "alibi_slopes", "None where a gradient is wanted: torch's backward does not get them", "slopes")
    found = _chosen(
        title, query, cum_seq_q, layout, is_causal, window_size_left, window_size_right, dropout_p, alibi_slopes
    )
    _check_scale(title, scale)
    rng_state, unused = _drawn(title, query, dropout_p)
    own = dict(found.arguments)
    if dropout_p:
        own["seed"] = _seed_of(rng_state)
    call: dict[str, Any] = {"scale": scale, "q_offset": found.q_offset, "return_lse": True}
    if cum_seq_q is None:
        if block_table is not None:
            fail(title, "block_table", "None without cum_seq_q", "a table")
        call |= {"layout": layout, "kv_lengths": seqused_k}
    elif seqused_k is not None or block_table is not None:
        key, value, pages = _pages(title, key, value, cum_seq_k, seqused_k, block_table)
        call |= {**pages, "cu_seqlens_q": cum_seq_q, "max_seqlen_q": max(int(max_q), 1)}
        call |= {"splits": 1 if num_splits == 1 else None, "q_offset": "end"}
    else:
        call |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, **known_lengths(max_q, max_k)}
    o, lse = found.op(query, key, value, **own, **call)
    return o, lse, rng_state, unused, query.new_empty(0)


def forward_into(out: Tensor, **given: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: `forward` with o copied into `out`; returns lse."""
    o, lse, *_ = forward(**given, title="aten._flash_attention_forward_no_dropout_inplace")
    out.copy_(o)
    return lse


forward_into.__dict__["__signature__"] = inspect.Signature(
    [*list(inspect.signature(forward_into).parameters.values())[:1], *inspect.signature(forward).parameters.values()]
)


def _chosen(
    title: str,
    query: Tensor,
    begins: Tensor | None,
    layout: str,
    is_causal: bool,
    left: int | None,
    right: int | None,
    dropout_p: float,
    slopes: Tensor | None = None,
) -> Chosen:
    packed = begins is not None
    window = (-1 if left is None else left, -1 if right is None else right)
    return chosen(
        title,
        causal=is_causal,
        window_size=window,
        alibi_slopes=slopes,
        heads=query.shape[1 if packed or layout == "bhsd" else 2],
        batch=query.shape[0] if begins is None else begins.shape[0] - 1,
        dropout_p=dropout_p,
    )


def _pages(
    title: str, key: Tensor, value: Tensor, begins: Tensor | None, used: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A call in which each sequence sees its first keys only, as a call on pages: without a table a token is a page."""
    if table is not None:
        if used is None:
            fail(title, "seqused_k", "the keys of each sequence beside block_table", None)
        return key, value, {"page_table": table, "kv_lengths": used}
    if begins is None:
        fail(title, "cum_seq_k", "where sequences begin, without block_table", None)
    places = torch.arange(key.shape[0], dtype=torch.int32, device=key.device)
    pages = {"page_table": places, "page_starts": begins, "kv_lengths": used}
    return key[:, None], value[:, None], pages


# ------------------------------------------------------------------------------------------------------------ backwards


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,  # noqa: ARG001 (the operator's: sequences are never packed here)
    cum_seq_k: Tensor | None,  # noqa: ARG001
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_backward`: dq, dk and dv of tensors `[B, H, S, D]`."""
    call = (None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)
    return backward(grad_out, query, key, value, out, logsumexp, *call, scale=scale, layout="bhsd", title=_SDPA)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,  # noqa: ARG001
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    layout: str = "bshd",
    title: str = "aten._flash_attention_backward",
) -> tuple[Tensor, ...]:
    """`aten::_flash_attention_backward`: dq, dk and dv. o and lse may have been computed over more keys than k holds.

    The probabilities are `exp(score - lse)`. A call for each part of the keys, with the o and lse of all keys, thus
    gives that part of the gradients. Context parallelism calls it in this way.
    """
    found = _chosen(title, query, cum_seq_q, layout, is_causal, window_size_left, window_size_right, dropout_p)
    _check_scale(title, scale)
    own = dict(found.arguments)
    if dropout_p:
        own["seed"] = _seed_of(rng_state)
    tensors = [grad_out, query, key, value, out]
    if cum_seq_q is not None and cum_seq_k is not None:
        own |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        if found.by_position and cum_seq_k is not cum_seq_q:
            own["row_offsets"] = (cum_seq_k - cum_seq_q).diff()
        lengths = known_lengths(max_q, max_k)
        known = lengths.get("max_seqlen_q"), lengths.get("max_seqlen_k")
        options = call_options(found.variant, None, None, None, "packed", known)
        return _launched(found.kernels.PACKED, tensors, logsumexp, own, scale, options)
    if layout == "bshd":
        tensors = [x.transpose(1, 2) for x in tensors]
    own["row_offset"] = tensors[2].shape[2] - tensors[1].shape[2] if found.by_position else 0
    options = call_options(found.variant, None, None, None)
    grads = _launched(found.kernels.DENSE, tensors, logsumexp, own, scale, options)
    return tuple(x.transpose(1, 2) for x in grads) if layout == "bshd" else grads


def _launched(
    kernels: Any,
    tensors: list[Tensor],
    lse: Tensor,
    own: dict[str, Any],
    scale: float | None,
    options: CallOptions,
) -> tuple[Tensor, ...]:
    """The gradients, by the launches of a variant. `tensors`: do, q, k, v and o, in the axes of the launches' mode."""
    dtype = tensors[1].dtype
    do, q, k, v, o = tensors
    q, k, v = interpreter_dtype(q, k, v)
    do, o, lse = do.to(q.dtype), o.to(q.dtype), lse.contiguous()
    if runs_reference(q) or q.shape[0] == 0 or k.shape[0] == 0:
        options = options.plainly()
    given: dict[str, Any] = {"row_offset": 0, "row_offsets": None, "options": options, **own}
    given |= {"q": q, "k": k, "v": v, "scale": q.shape[-1] ** -0.5 if scale is None else scale, "block_tables": []}
    given |= {"do": do, "dlse": None, "o": o, "lse": lse, "first_head": 0, "all_heads": q.shape[1]}
    given |= {"row_origin": 0, "key_origin": 0}
    if options.plain:
        given |= _as_of_these_keys(kernels, given)
    grads = kernels.backward(*(given[name] for name in kernels.backward_parameters))
    return tuple(x.to(dtype) for x in grads[:3])


def _as_of_these_keys(kernels: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """do and dlse that give the same gradients from the o and lse of these keys alone, which the reference computes.

    "Own" means computed over these keys alone. With w = exp(own lse - lse): P = w * own P. Then
    dS = P * (do v^T - sum(do * o)) equals the own dS of the output gradient w * do and of
    dlse = w * (sum(do * own o) - sum(do * o)).
    """
    own_o, own_lse, *_ = kernels.forward(*(given[name] for name in kernels.parameters))
    weight = torch.where(own_lse == -torch.inf, 0.0, (own_lse - given["lse"]).exp())
    do = given["do"].float()
    moved = (do * (own_o.float() - given["o"].float())).sum(-1)
    if kernels.mode == "packed":
        rows = weight.T
        return {"do": (do * rows[..., None]).to(own_o.dtype), "dlse": (rows * moved).T.contiguous()}
    return {"do": (do * weight[..., None]).to(own_o.dtype), "dlse": weight * moved}


# --------------------------------------------------------------------------------------------------------------- shared


def _check_scale(title: str, scale: float | None) -> None:
    if scale is not None and not scale > 0:
        fail(title, "scale", "a positive number or None", scale)


def _drawn(title: str, query: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """The seed and offset `[2]` of a call's random numbers, and an unused tensor, both on the CPU.

    They come from the default generator of q's device, which is advanced: `torch.manual_seed` repeats them.
    """
    unused = torch.zeros((), dtype=torch.uint64)
    if not dropout_p:
        return torch.zeros(2, dtype=torch.uint64), unused
    if not query.is_cuda:
        return torch.stack([torch.randint(_SEEDS - 1, ()), torch.zeros((), dtype=torch.int64)]).to(torch.uint64), unused
    if torch.cuda.is_current_stream_capturing():
        fail(title, "dropout_p", "0 in a CUDA graph, which would draw the same each time", dropout_p)
    generator = torch.cuda.default_generators[query.device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + _OFFSET_STEP)
    return torch.tensor([seed % 2**64, offset], dtype=torch.uint64), unused


def _seed_of(rng_state: Tensor) -> int:
    """The one number that an op takes as seed, from a generator's seed and offset."""
    seed, offset = rng_state.tolist()
    return int((seed + offset * _MIX) % _SEEDS)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": forward,
    "_flash_attention_forward_no_dropout_inplace": forward_into,
    "_flash_attention_backward": backward,
}
"""The function that computes each operator of aten."""
