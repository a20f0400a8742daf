# SPDX-License-Identifier: Apache-2.0
"""Calls of an op whose dk and dv are parts of sums. So they are float32 whatever the dtype of k and v."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ...core.backward_calls import keyword_names
from ..call import without_gradients
from ..passes import Call
from ..primitive import RESIDUALS
from ..sharding import varying_alike

Arrays = Mapping[str, jax.Array]


def trained_names(op: Callable[..., Any]) -> set[str]:
    """The keywords of a variant's own tensors that have a gradient."""
    gradients = importlib.import_module(op.__module__).DENSE.gradients
    return {name for name, own in keyword_names(op).items() if own in gradients}


def guarded(op: Callable[..., Any], name: str, x: jax.Array, layout: str) -> jax.Array:
    """`x`, an argument without a gradient: differentiation by it raises an error."""
    kernels, own = importlib.import_module(op.__module__).DENSE, keyword_names(op)[name]
    (found,) = without_gradients(kernels, Call(operands=(own,), layout=layout, numbers=()), [x])
    return found


def widened(x: jax.Array) -> jax.Array:
    """Keys or values in float32, as `wide_call` takes them. XLA removes a cast to float32 and back."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def wide_call(
    op: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array, keywords: Mapping[str, Any], layout: str
) -> tuple[jax.Array, jax.Array]:
    """o and lse of `op(q, k, v, **keywords)`. k and v are `widened`; they are cast to the dtype of q here."""
    names = trained_names(op)
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
    # A custom_vjp may not close over a traced array: also those inside other arguments, as in a dropout_origin, are
    # arguments of it, named by their places.
    numbers, structure = jax.tree.flatten({name: x for name, x in keywords.items() if name not in arrays})
    arrays |= {str(place): x for place, x in enumerate(numbers) if isinstance(x, jax.Array)}
    trained = {"q": q, "k": k, "v": v} | {name: x for name, x in arrays.items() if name in names}
    fixed = {name: x for name, x in arrays.items() if name not in names}
    known = keyword_names(op)
    fixed = {name: guarded(op, name, x, layout) if name in known else x for name, x in fixed.items()}
    leaves, tree = jax.tree.flatten((trained, fixed))
    trained, fixed = jax.tree.unflatten(tree, varying_alike(leaves))
    dtype = q.dtype

    def others(fixed: Arrays) -> dict[str, Any]:
        """The keywords whose arrays are not trained."""
        given = [fixed.get(str(place), x) for place, x in enumerate(numbers)]
        found: dict[str, Any] = jax.tree.unflatten(structure, given)
        return found | {name: x for name, x in fixed.items() if name in keywords}

    def called(trained: Arrays, fixed: Arrays) -> tuple[jax.Array, jax.Array]:
        q, k, v = (trained[name].astype(dtype) for name in ("q", "k", "v"))
        own = {name: x for name, x in trained.items() if name not in ("q", "k", "v")}
        found: tuple[jax.Array, jax.Array] = op(q, k, v, **own, **others(fixed), return_lse=True)
        return found

    def forward(trained: Arrays, fixed: Arrays) -> Any:
        o, lse = called(trained, fixed)
        o, lse = checkpoint_name(o, RESIDUALS), checkpoint_name(lse, RESIDUALS)
        narrow = {name: x.astype(dtype) if name in ("k", "v") else x for name, x in trained.items()}
        return (o, lse), (narrow, fixed, o, lse)

    def backward(saved: Any, given: Any) -> Any:
        trained, fixed, o, lse = saved
        do, dlse = given
        own = {name: x for name, x in trained.items() if name not in ("q", "k", "v")}
        tensors = (trained[name] for name in ("q", "k", "v"))
        options = {"dlse": dlse, "wanted": tuple(own), **own, **others(fixed)}
        found = op.backward(do, *tensors, o, lse, **options)  # type: ignore[attr-defined]  # which every op has
        changes = {name: found.own[name].astype(x.dtype) for name, x in own.items()}
        return {"q": found.dq, "k": found.dk, "v": found.dv, **changes}, dict.fromkeys(fixed)

    run = jax.custom_vjp(called)
    run.defvjp(forward, backward)
    return run(trained, fixed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def heads_of_all_rows(axis: Any, heads: int, rows: int, repeats: int, x: jax.Array) -> jax.Array:
    """Exchange all key heads of a device's rows for all rows of the device's heads, `widened`.

    Each key head is repeated `repeats` times first. The gradients of a repeated head are added up in float32.
    """
    x = jnp.repeat(x, repeats, heads)
    return widened(jax.lax.all_to_all(x, axis, split_axis=heads, concat_axis=rows, tiled=True))


def _forward(axis: Any, heads: int, rows: int, repeats: int, x: jax.Array) -> Any:
    return heads_of_all_rows(axis, heads, rows, repeats, x), jnp.zeros((), x.dtype)


def _backward(axis: Any, heads: int, rows: int, repeats: int, like: jax.Array, gradient: jax.Array) -> Any:
    parts = jax.lax.all_to_all(gradient, axis, split_axis=rows, concat_axis=heads, tiled=True)
    shape = (*parts.shape[:heads], -1, repeats, *parts.shape[heads + 1 :])
    return (parts.reshape(shape).sum(heads + 1).astype(like.dtype),)


heads_of_all_rows.defvjp(_forward, _backward)
