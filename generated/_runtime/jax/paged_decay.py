# SPDX-License-Identifier: Apache-2.0
"""The caches of a log-decay's running sum in JAX: their checks, and how they are filled.

`runtime/torch/paged_decay.py` describes their contents. On a GPU one kernel fills them, elsewhere XLA in float64.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from ..core.checks import PACKED, fail
from ..core.paged_calls import check_lengths, most_keys
from ..core.paged_decay import (
    APPEND,
    BASE,
    LOCAL,
    check_decay_cache,
    check_first_sizes,
    check_new_decays,
    check_pages,
    decay_cache_shapes,
    decay_shapes_to_append,
    launch_sums,
)
from . import backend
from .gradients import running_sums, sequence_of_rows
from .paged import CacheArguments, refuse_derivative, refuse_map
from .passes import Call, Forward, Kernels
from .primitive import attention_primitive
from .sequences import begins_of
from .sharding import varying_alike
from .support import as_integers, canonical, is_array, is_integer, values_are_checked
from .tensor import FP32, Tensor


def decay_caches(arguments: CacheArguments, g: Any, g_base: Any) -> dict[str, jax.Array]:
    """The caches of a paged call, checked."""
    shapes = decay_cache_shapes(arguments.cache_call)
    return {name: _checked_cache(arguments.op, name, x, shapes[name]) for name, x in ((LOCAL, g), (BASE, g_base))}


def check_without_base(op: str, g_base: Any) -> None:
    """Refuse `g_base` in a call that is not paged."""
    if g_base is not None:
        fail(op, BASE, "None without page_table", type(g_base).__name__)


def _checked_cache(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    x = canonical(x)
    known = is_array(x)
    fits = known and x.dtype == FP32
    got = f"{x.dtype.name} {list(x.shape)}" if known else "nothing" if x is None else type(x).__name__
    check_decay_cache(op, name, x.shape if known else None, shape, fits=fits, where="", got=got)
    found: jax.Array = x
    return found


# -------------------------------------------------------------------------------------------------------------- append

_VALUES = ("page_table", "kv_lengths", "page_starts", "cu_seqlens")
"""The arguments whose values say where new tokens are written."""


def append_decay(
    g: jax.Array,
    g_cache: jax.Array,
    g_base: jax.Array,
    page_table: Any,
    kv_lengths: Any,
    page_starts: Any,
    cu_seqlens: Any,
) -> tuple[jax.Array, jax.Array]:
    """The caches with the running sums of new tokens added. The first three arguments are known to be arrays."""
    is_float = bool(jnp.issubdtype(g.dtype, jnp.floating))
    check_new_decays(g.shape, packed=cu_seqlens is not None, is_float=is_float, got=f"{g.dtype.name} {list(g.shape)}")
    given = {"g_cache": g_cache, "g_base": g_base}
    for name, shape in decay_shapes_to_append(g.shape, g_cache.shape).items():
        _checked_cache(APPEND, name, given[name], shape)
    kv_lengths = _integers("kv_lengths", kv_lengths, 1)
    page_table = _integers("page_table", page_table, 2 if page_starts is None else 1)
    operands = {"g": g, **given, "page_table": page_table, "kv_lengths": kv_lengths}
    if page_starts is not None:
        operands["page_starts"] = _integers("page_starts", page_starts, 1)
    if cu_seqlens is not None:
        operands["cu_seqlens"] = begins_of(APPEND, "cu_seqlens", canonical(cu_seqlens), "g", g)
    starts, begins = (operands[n].shape if n in operands else None for n in ("page_starts", "cu_seqlens"))
    check_first_sizes(kv_lengths.shape[0], g.shape, page_table.shape, starts, begins)
    _check_room(operands, g_cache.shape[1])
    if g.size == 0:
        return g_cache, g_base
    new_rows = 0 if cu_seqlens is not None else g.shape[1]
    operands["g"] = jax.lax.stop_gradient(g).reshape(-1, g.shape[-1])
    call = Call(operands=tuple(operands), layout=PACKED, numbers=(("new_rows", new_rows),))
    new_cache, new_base = _primitive().bind(*varying_alike(list(operands.values())), call=call)
    return new_cache, new_base


def _check_room(operands: Mapping[str, jax.Array], page_size: int) -> None:
    """Check that the pages of each sequence hold its keys and are pages of the cache, if values are checked."""
    g = operands["g"]
    lengths, starts = operands["kv_lengths"], operands.get("page_starts")
    if values_are_checked(lengths) and (starts is None or values_are_checked(starts)):
        shape = None if starts is None else starts.shape
        most = most_keys(APPEND, lengths.shape[0], page_size, operands["page_table"].shape, shape)
        first = None if starts is None else starts.tolist()
        check_lengths(APPEND, np.maximum(np.asarray(lengths), 0).tolist(), most, first, page_size)
    if g.size > 0 and all(values_are_checked(x) for name, x in operands.items() if name in _VALUES):
        num_seqs = lengths.shape[0]
        begins = (
            operands["cu_seqlens"].tolist()
            if "cu_seqlens" in operands
            else range(0, (num_seqs + 1) * g.shape[1], g.shape[1])
        )
        first = None if starts is None else starts.tolist()
        num_pages = operands["g_cache"].shape[0]
        check_pages(num_pages, page_size, lengths.tolist(), begins, operands["page_table"].tolist(), first)


def _integers(name: str, x: Any, rank: int) -> jax.Array:
    x = canonical(x)
    if not is_array(x):
        fail(APPEND, name, f"an integer array of {rank} dimensions", type(x).__name__)
    if not is_integer(x.dtype) or x.ndim != rank:
        fail(APPEND, name, f"an integer array of {rank} dimensions", f"{x.dtype.name} {list(x.shape)}")
    return as_integers(APPEND, name, x)


@cache
def _primitive() -> Primitive:
    kernels = _Sums(op=APPEND, mode="dense", modules=None, reference=_continued, parameters=())
    primitive = attention_primitive(APPEND, _Append(kernels))
    ad.primitive_jvps[primitive] = partial(refuse_derivative, APPEND)
    batching.primitive_batchers[primitive] = partial(refuse_map, APPEND)
    return primitive


class _Sums(Kernels):
    """The kernel as its primitive sees it. Heads may be cut, sequences may not, because they share pages."""

    def axes(self, name: str, call: Call) -> str:
        if name == "page_table":
            return "." if "page_starts" in call.operands else ".."
        # Caches have as many heads as g, so the letters h and k name the same axis.
        return {"g": ".h", "g_cache": "..k", "g_base": ".k"}.get(name, ".")

    def result_axes(self, call: Call, *, backward: bool) -> list[str]:
        del backward
        return [self.axes(name, call) for name in ("g_cache", "g_base")]

    def may_split(self, _call: Call) -> tuple[bool, bool]:
        return False, True


class _Append(Forward):
    """The caches with the sums of new tokens."""

    def shapes(self, _call: Call, avals: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any]]:
        return [(avals[name].shape, FP32) for name in ("g_cache", "g_base")]

    def launch(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        from ..device.paged_decay import append_sums

        given = {name: Tensor.of(x) for name, x in call.named(arrays).items()}
        g_cache, g_base = given["g_cache"], given["g_base"]
        # The kernel changes the caches in place.
        g_cache.in_parts = g_base.in_parts = True
        launch_sums(
            backend, append_sums, given["g"], g_cache, g_base, given["page_table"], given.get("page_starts"),
            given["kv_lengths"], given.get("cu_seqlens"), call.number("new_rows"),
        )  # fmt: skip
        return [g_cache.value(), g_base.value()]

    def reference(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return self.plain(call, arrays)

    def plain(self, call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with jax.enable_x64(True):
            return list(_continued(call, call.named(arrays)))


def _continued(call: Call, given: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes what the kernel does, for all tokens at once, with float64 enabled."""
    g, g_cache, g_base, lengths = (given[name] for name in ("g", "g_cache", "g_base", "kv_lengths"))
    (num_pages, size, _), num_seqs, total = g_cache.shape, lengths.shape[0], g.shape[0]
    begins = given.get("cu_seqlens", jnp.arange(num_seqs + 1, dtype=jnp.int32) * call.number("new_rows"))
    start = lengths - jnp.diff(begins)
    sequence = sequence_of_rows(begins, total)
    own = jnp.clip(sequence, 0, num_seqs - 1)
    position = start[own] + jnp.arange(total, dtype=jnp.int32) - begins[own]

    def page_of(seqs: jax.Array, positions: jax.Array) -> jax.Array:
        table, place = given["page_table"], jnp.maximum(positions, 0) // size
        if "page_starts" in given:
            return table.take(given["page_starts"][seqs] + place, mode="clip")
        return table[seqs, jnp.minimum(place, table.shape[1] - 1)]

    # The running sum at each sequence's last old token; 0 if it has none.
    last = jnp.maximum(start - 1, 0)
    page = page_of(jnp.arange(num_seqs), last)
    before = g_base[page].astype(jnp.float64) + g_cache[page, last % size].astype(jnp.float64)
    before = jnp.where(((start > 0) & (page >= 0))[:, None], before, 0.0)

    page = page_of(own, position)
    is_new = (sequence < num_seqs) & (position >= 0) & (page >= 0)
    added = jnp.where(is_new[:, None], g.astype(jnp.float64), 0.0)
    sums = before[own] + running_sums(added, own)
    # mode="drop" skips a page number beyond the last page. A negative one would count from the end.
    page = jnp.where(is_new, page, num_pages)
    slot = position % size
    bases = (sums - added).astype(FP32)
    g_base = g_base.at[jnp.where(slot == 0, page, num_pages)].set(bases, mode="drop")
    local = sums - g_base[jnp.minimum(page, num_pages - 1)].astype(jnp.float64)
    return g_cache.at[page, slot].set(local.astype(FP32), mode="drop"), g_base
