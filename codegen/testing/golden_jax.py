"""The calls of `codegen.testing.golden` with the ops in JAX: the same inputs, and results as tensors of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from codegen import PACKAGE
from codegen.testing.golden import Inputs


def load_op(variant: str, package: str = PACKAGE) -> Callable[..., Any]:
    """`generated.jax.<variant>`."""
    op: Callable[..., Any] = getattr(importlib.import_module(f"{package}.jax"), variant)
    return op


def array(x: Any) -> Any:
    """A tensor as an array of JAX on the same device; anything else unchanged."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().contiguous()
    if x.is_floating_point() and x.element_size() == 1:
        return jax.lax.bitcast_convert_type(array(x.view(torch.uint8)), str(x.dtype).removeprefix("torch."))
    if x.device.type == "cpu":
        if x.dtype == torch.bfloat16:
            return jnp.asarray(x.float().numpy()).astype(jnp.bfloat16)
        return jnp.asarray(x.numpy().astype(np.int32) if x.dtype == torch.int64 else x.numpy())
    return jax.dlpack.from_dlpack(x.int() if x.dtype == torch.int64 else x)


def tensor(x: jax.Array) -> Tensor:
    """An array of JAX as a tensor: the inverse of `array`."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1:
        return tensor(jax.lax.bitcast_convert_type(x, jnp.uint8)).view(getattr(torch, x.dtype.name))
    if next(iter(x.devices())).platform != "cpu":
        found: Tensor = torch.utils.dlpack.from_dlpack(x)
        return found
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x.astype(jnp.float32))).bfloat16()
    return torch.from_numpy(np.array(x))


def evaluate(variant: str, inputs: Inputs, *, package: str = PACKAGE, **options: Any) -> dict[str, Tensor]:
    """o, lse and the gradient of every leaf, as `golden.evaluate` gives them, under jit."""
    op = load_op(variant, package)
    given = {name: array(x) for name, x in options.items() if name != "schedule"}
    if "cu_seqlens_q" not in given:
        given.setdefault("layout", "bhsd")
    leaves = {name: array(x) for name, x in inputs.leaves().items()}
    fixed = {name: array(x) for name, x in inputs.tensors.items() if name not in leaves}

    def outputs(leaves: dict[str, Any]) -> Any:
        own = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
        q, k, v = (leaves[name] for name in ("q", "k", "v"))
        return op(q, k, v, **own, **fixed, **inputs.scalars, **given, return_lse=True)

    @jax.jit
    def run(leaves: dict[str, Any], do: jax.Array, dlse: jax.Array) -> Any:
        results, pullback = jax.vjp(outputs, leaves)
        return results, pullback((do, dlse))[0]

    (o, lse), grads = run(leaves, array(inputs.do), array(inputs.dlse))
    results = {"o": o, "lse": lse} | {f"d{name}": grads[name] for name in leaves}
    return {name: tensor(x) for name, x in results.items()}
