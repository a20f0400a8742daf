"""Packed documents in JAX: `python -m examples.packed_documents_jax`.

Documents of different lengths share the rows of a batch, and no token attends to another document. The script does it
in three ways and checks that each document gets the same result as in a call of its own:

1. rows of one length with segment ids, as most JAX data loaders make them: `pack_rows`;
2. all documents end to end, without any padding: `pack` and `cu_seqlens`;
3. a variant whose mask compares document numbers: `generated.jax.document`.

Gradients are computed in all three ways, under `jax.jit`. `--full` uses sizes for a GPU.

The exit status is 1 if a document's result depends on its neighbours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from generated.jax import causal, document
from generated.packing import Packed, PackedRows, pack, pack_rows

Attend = Callable[[Array], Any]

BOUND = {"cpu": 2e-5, "gpu": 3e-2}
"""Largest difference relative to the largest element: sums of float32 on a CPU, roundings to bfloat16 on a GPU."""


def difference(found: list[Array], wanted: list[Array]) -> float:
    """The largest difference of two lists of arrays, relative to the largest element."""
    largest = max(float(jnp.abs(x.astype(jnp.float32)).max()) for x in wanted)
    gaps = [jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() for a, b in zip(found, wanted, strict=True)]
    return max(map(float, gaps)) / largest


def make_step(batch: Packed | PackedRows, attend: Attend) -> Callable[[Array], tuple[Array, Array]]:
    """A jitted function of the packed array that gives o and the gradient of the sum of all documents' o."""

    def loss(x: Array) -> tuple[Array, Array]:
        o = attend(x)
        documents: list[Array] = batch.unpack(o)
        return sum((part.astype(jnp.float32).sum() for part in documents), start=jnp.zeros(())), o

    def step(x: Array) -> tuple[Array, Array]:
        (_, o), gradient = jax.value_and_grad(loss, has_aux=True)(x)
        return o, gradient

    jitted: Callable[[Array], tuple[Array, Array]] = jax.jit(step)
    return jitted


def main() -> int:
    """Compare the three ways; returns 0 if all give the results of each document alone."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.packed_documents_jax", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--full", action="store_true", help="use larger sizes, for a GPU")
    full: bool = parser.parse_args().full
    row, heads, kv_heads, dim, count = (4096, 16, 4, 128, 40) if full else (96, 4, 2, 32, 5)
    platform = jax.default_backend()
    dtype = jnp.bfloat16 if platform == "gpu" else jnp.float32
    lengths = np.random.default_rng(0).integers(row // 10, row // 2, count)
    keys = jax.random.split(jax.random.key(0), count)
    # One array per document holds its q, k and v, so that one packing serves the three: [length, Hq + 2 Hkv, D].
    documents = [
        jax.random.normal(key, (int(length), heads + 2 * kv_heads, dim)).astype(dtype)
        for key, length in zip(keys, lengths, strict=True)
    ]
    print(f"{count} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, on {platform}.")

    def split(x: Array) -> tuple[Array, Array, Array]:
        return x[..., :heads, :], x[..., heads : heads + kv_heads, :], x[..., heads + kv_heads :, :]

    def alone(x: Array) -> Array:
        o = causal(*(part[None] for part in split(x)))
        assert isinstance(o, Array)  # no lse was asked for
        return o[0]

    wanted = [alone(x) for x in documents]
    wanted_gradients = [jax.grad(lambda x: alone(x).astype(jnp.float32).sum())(x) for x in documents]

    rows = pack_rows(documents, row)
    packed = pack(documents)
    print(
        f"As rows of {row}: {rows.data.shape[0]} rows, {100 * rows.fill:.0f} % of them filled. End to end: no padding."
    )

    # In rows, `document` reads the ids as a tensor. Padding has id -1 and attends to padding; its output is not read.
    ways: dict[str, tuple[Packed | PackedRows, Attend]] = {
        "segment ids": (
            rows,
            lambda x: causal(*split(x), q_segment_ids=rows.segment_ids, kv_segment_ids=rows.segment_ids),
        ),
        "cu_seqlens": (packed, lambda x: causal(*split(x), cu_seqlens_q=packed.cu_seqlens)),
        "document mask": (rows, lambda x: document(*split(x), doc=rows.segment_ids)),
    }
    right = True
    for name, (batch, attend) in ways.items():
        step = make_step(batch, attend)
        o, gradient = step(batch.data)
        start = time.perf_counter()
        jax.block_until_ready(step(batch.data))
        seconds = time.perf_counter() - start
        errors = difference(batch.unpack(o), wanted), difference(batch.unpack(gradient), wanted_gradients)
        right &= max(errors) <= BOUND[platform]
        print(f"  {name:14} o {errors[0]:.1e}  gradients {errors[1]:.1e}  {1e3 * seconds:.1f} ms a step")
    print("All is well: each document gets what it gets alone." if right else "FAILED: documents see each other.")
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
