"""A rendered kernel called directly from Triton, without an op: `python -m examples.plain_triton`.

A portable kernel is an ordinary `triton.jit` function. The script launches the forward of `generated/causal` on torch
tensors, and on JAX arrays through jax-triton's `triton_call` if jax-triton is installed and JAX has a GPU. Without
a GPU Triton's interpreter runs the kernel. `--full` uses sizes for a GPU.

A direct call lacks what the op does in addition: it checks arguments, chooses tiles, computes gradients, and copies
inputs whose rows do not begin at multiples of 16 bytes.

The exit status is 1 if the result differs from PyTorch's attention.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn import functional

BLOCK_M, BLOCK_N = 64, 32
"""Query rows and keys of a tile. `generated/tuned/` has faster ones for the GPUs that were measured."""

WARPS, STAGES = 4, 2

BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error relative to the largest element: sums of float32, or 4 roundings to bfloat16."""


def kernel(variant: str, name: str) -> Any:
    """The kernel `name` of a variant, from whichever file of its folder defines it.

    In a program of yours this is one import: `from generated.causal.fwd import causal_fwd`.
    """
    import generated

    folder = Path(generated.__file__).parent / variant
    for path in sorted(folder.glob("*.py")):
        if f"\ndef {name}(" in path.read_text(encoding="utf-8"):
            return getattr(importlib.import_module(f"generated.{variant}.{path.stem}"), name)
    raise LookupError(f"{folder}: expected a kernel {name}, found none")


def constants(head_dim: int, kv_len: int) -> dict[str, Any]:
    """The compile-time arguments. RAGGED: the last block of keys is not full. BLOCK_D: head_dim as a power of two."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim: expected a power of two from 16 on, which needs no padding, got {head_dim}")
    return {
        "Q_OFFSET_PER_BATCH": False,
        "RAGGED": kv_len % BLOCK_N != 0,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_DV": head_dim,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
    }


def strides(name: str, shape: tuple[int, ...], unit: int) -> dict[str, int]:
    """Strides of a dense `[B, H, S, D]` array: of batch and head in units of `unit` elements, of a row in elements."""
    _, heads, seq, dim = shape
    return {f"stride_{name}b": heads * seq * dim // unit, f"stride_{name}h": seq * dim // unit, f"stride_{name}s": dim}


def numbers(q_shape: tuple[int, ...], k_shape: tuple[int, ...], itemsize: int) -> dict[str, Any]:
    """The run-time arguments of the forward that are no arrays, by name."""
    # The kernel reads inputs 16 bytes at a time, so their batch and head strides are in units of 16 bytes.
    unit = 16 // itemsize
    return {
        **strides("q", q_shape, unit),
        **strides("k", k_shape, unit),
        **strides("v", k_shape, unit),
        **strides("o", q_shape, 1),
        "q_len": q_shape[2],
        "kv_len": k_shape[2],
        "num_heads": q_shape[1],
        "group_size": q_shape[1] // k_shape[1],
        "scale": q_shape[3] ** -0.5,
    }


def programs(shape: tuple[int, ...]) -> tuple[int]:
    """One program for each block of query rows of each head."""
    batch, heads, seq, _ = shape
    return (-(-seq // BLOCK_M) * heads * batch,)


def from_triton(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o `[B, Hq, S, D]` and lse `[B, Hq, S]` of dense q `[B, Hq, S, D]` and k, v `[B, Hkv, S, D]`."""
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    kernel("causal", "causal_fwd")[programs(tuple(q.shape))](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        q_offset=0,  # the position of the first query
        o_ptr=o,
        lse_ptr=lse,
        **numbers(tuple(q.shape), tuple(k.shape), q.element_size()),
        **constants(q.shape[3], k.shape[2]),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return o, lse


def from_jax_triton(jax_triton: ModuleType, q: Any, k: Any, v: Any, compute_capability: int | None = None) -> Any:
    """The same for JAX arrays. Arrays are passed by position, outputs after inputs; the rest by name, as constants.

    With `compute_capability`, 90 for an H100, the kernel is compiled even if there is no GPU to ask."""
    import jax
    import numpy as np

    given = numbers(q.shape, k.shape, q.dtype.itemsize)
    given["scale"] = float(np.float32(given["scale"]))
    o, lse = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], np.float32)
    return jax_triton.triton_call(
        q,
        k,
        v,
        0,
        kernel=kernel("causal", "causal_fwd"),
        out_shape=(o, lse),
        grid=programs(q.shape),
        num_warps=WARPS,
        num_stages=STAGES,
        compute_capability=compute_capability,
        **given,
        **constants(q.shape[3], k.shape[2]),
    )


def _jax_triton() -> tuple[ModuleType | None, str]:
    """jax-triton, or why it is not used."""
    if importlib.util.find_spec("jax_triton") is None:
        return None, "jax-triton is not installed: pip install jax-triton"
    import jax

    if jax.default_backend() != "gpu":
        return None, "jax-triton launches on GPUs alone, and JAX has none here"
    # On import jax-triton empties the setting of Triton's cache folder, which other kernels of this process need.
    before = os.environ.get("TRITON_CACHE_DIR")
    jax_triton = importlib.import_module("jax_triton")
    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton, ""


def main() -> int:
    """Call the kernel; returns 0 if its results are right."""
    parser = argparse.ArgumentParser(prog="python -m examples.plain_triton", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU")
    full: bool = parser.parse_args().full
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the kernel's module does
        print("No GPU here: Triton's interpreter runs the kernel.")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch, heads, kv_heads, seq, dim = (4, 16, 4, 4096, 128) if full else (1, 4, 2, 150, 32)
    torch.manual_seed(0)
    q = torch.randn(batch, heads, seq, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, seq, dim, device=device, dtype=dtype)
    want = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    results = {"Triton": from_triton(q, k, v)[0]}
    jax_triton, reason = _jax_triton()
    if jax_triton is None:
        print(f"Not through jax-triton: {reason}.")
    else:
        import jax.dlpack

        o, _ = from_jax_triton(jax_triton, *(jax.dlpack.from_dlpack(x) for x in (q, k, v)))
        results["jax-triton"] = torch.utils.dlpack.from_dlpack(o)
    right = True
    for name, o in results.items():
        error = ((o.float() - want).abs().max() / want.abs().max()).item()
        right &= error <= BOUND[dtype]
        print(f"  {name:10} error {error:.1e} (bound {BOUND[dtype]:.0e})")
    print("All is well." if right else "FAILED: the kernel's result is not PyTorch's.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
