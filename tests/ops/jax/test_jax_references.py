"""The references of JAX ops on the CPU, compared with those of torch: two implementations of the same expressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

from codegen.testing import golden, golden_jax
from codegen.testing.golden import Inputs, Shape
from generated._runtime.core.settings import INTERPRET
from generated.jax import gpt_oss

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels"),
    pytest.mark.covers(family="reference", framework="jax"),
]

MANIFEST = golden.load_manifest()
LENGTH = 50
SHAPE = Shape(batch=2, heads=4, kv_heads=2, seq=LENGTH, dim=16)


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": lambda: {"q_offset": -7},
    "offsets": lambda: {"q_offset": ints([0, -9])},
    "segments": lambda: {"q_segment_ids": ints([[0] * 20 + [1] * 20 + [-1] * 10, [3] * 50])},
    "positions": lambda: {
        "q_segment_ids": ints([[0] * 30 + [1] * 20, [0] * 50]),
        "q_positions": ints([[*range(30), *range(20)], [*range(50)]]),
    },
    "lengths": lambda: {"kv_lengths": ints([50, 33]), "q_offset": "end"},
    "packed": lambda: {"cu_seqlens_q": ints([0, 9, 9, 50]), "cu_seqlens_k": ints([0, 20, 30, 50]), "q_offset": "end"},
}


def packed(variant: str, inputs: Inputs) -> Inputs:
    """The first batch row as three sequences: tensors with an element per token lose `b`, others have `b` of 3."""

    def rows(x: Tensor) -> Tensor:
        return x.detach()[0].transpose(0, 1).contiguous()

    def own(name: str, x: Tensor) -> Tensor:
        dims = MANIFEST[variant]["tensors"].get(name, {"dims": ["b", "kv_idx", "h"] if name == "g" else ["h"]})["dims"]
        if "b" not in dims:
            return x
        y = x.detach().select(dims.index("b"), 0) if {"q_idx", "kv_idx"} & set(dims) else x.detach()[[0, 1, 0]]
        return y.contiguous().requires_grad_(x.requires_grad)

    return replace(
        inputs,
        q=rows(inputs.q).requires_grad_(),
        k=rows(inputs.k).requires_grad_(),
        v=rows(inputs.v).requires_grad_(),
        do=rows(inputs.do),
        dlse=inputs.dlse[0].contiguous(),
        tensors={name: own(name, x) for name, x in inputs.tensors.items()},
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("variant", MANIFEST)
def test_references_equal_those_of_torch(variant: str, call: str) -> None:
    inputs = golden.draw_inputs(MANIFEST[variant], SHAPE, dtype=torch.float32, device="cpu")
    inputs = packed(variant, inputs) if call == "packed" else inputs
    options = CALLS[call]()
    want = golden.evaluate(golden.load_op(variant), inputs, **options)
    got = golden_jax.evaluate(variant, inputs, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_sink_of_minus_infinity_in_a_row_without_keys_has_no_gradient(packed: bool) -> None:
    """The first head then has neither keys nor a sink in the rows of the first sequence."""
    sink = jnp.asarray([-jnp.inf, 0.3])
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 20, 2, 16)) for i in range(3))
    options: dict[str, Any] = {"kv_lengths": jnp.asarray([0, 20])}
    if packed:
        q, k, v = (x.reshape(-1, 2, 16) for x in (q, k, v))
        k, v = k[20:], v[20:]
        options = {"cu_seqlens_q": jnp.asarray([0, 20, 40]), "cu_seqlens_k": jnp.asarray([0, 0, 20])}

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array) -> Any:
        o, lse = gpt_oss(q, k, v, sink=sink, **options, return_lse=True)
        return (o**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    _, lse = gpt_oss(q, k, v, sink=sink, **options, return_lse=True)
    of_first = lse[0, :20] if packed else lse[0, 0]
    assert (of_first == -jnp.inf).all()
    gradients = jax.grad(loss, (0, 1, 2, 3))(q, k, v, sink)
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert gradients[3][0] == 0
    assert gradients[3][1] != 0
