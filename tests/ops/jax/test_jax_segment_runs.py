"""Segmented calls of JAX: the packed and the segmented forward are launched, and the device chooses one of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from generated import jax as ops
from generated._runtime.core import segment_runs
from generated._runtime.jax import kernels as jax_kernels
from generated._runtime.jax.kernels import INTERPRET
from tests.ops.jax.test_jax_kernels import messages

pytestmark = pytest.mark.skipif(INTERPRET, reason="compiles kernels, which are interpreted here")

IDS = jnp.arange(1024, dtype=jnp.int32)[None] // 300 + jnp.zeros((2, 1), jnp.int32)
Q = jnp.zeros((2, 1024, 4, 64), jnp.bfloat16)


def call(q: jax.Array, **options: Any) -> Any:
    return ops.causal(q, q, q, q_segment_ids=IDS, family="hopper", return_lse=True, **options)


def names(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    # Nothing is launched, so any image will do: here an empty one, of a kernel without scratch memory.
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    return [message[4][0].decode() for message in messages(monkeypatch, lambda q: call(q, **options), Q)]


def test_both_forwards_write_to_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    found = names(monkeypatch)
    assert found[-4:] == ["find_runs", "lay_out_runs", "causal_packed_hopper_fwd", "causal_segmented_hopper_fwd"]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ops.HANDLER)]
    monkeypatch.undo()
    monkeypatch.setenv(jax_kernels.ARCH_VARIABLE, "sm_90")
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    program = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=allowed)(Q)
    # Two aliases: the second forward continues in the memory of o and lse.
    assert program.mlir_module().count("output_operand_alias<") == 2


@pytest.mark.parametrize("options", [{"q_positions": IDS * 0}, {"kv_segment_ids": IDS[:, :1000]}])
def test_other_calls_have_one_forward(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    keys = Q[:, :1000] if "kv_segment_ids" in options else Q
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    found = messages(monkeypatch, lambda q: ops.causal(q, keys, keys, q_segment_ids=IDS, family="hopper", **options), Q)
    kernels = [message[4][0].decode() for message in found]
    assert [name for name in kernels if name.endswith("_fwd")] == ["causal_segmented_hopper_fwd"]


def test_small_calls_have_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "find_runs" not in names(monkeypatch)


def loss(q: jax.Array, deterministic: bool = False) -> Any:
    o: Any = ops.causal(q, q, q, q_segment_ids=IDS, family="hopper", deterministic=deterministic)
    return o.sum()


def test_both_backwards_write_to_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    found = [message[4][0].decode() for message in messages(monkeypatch, jax.grad(loss), Q)]
    first = found.index("causal_hopper_delta")
    assert found[first - 3 : first] == ["find_runs", "lay_out_runs", "lay_out_runs"]
    kernels = ["pad_runs", "causal_packed_hopper_bwd", "causal_segmented_hopper_bwd", "run_dq_rows"]
    assert found[first + 1 :] == kernels


def test_groups_of_heads_are_added_up_behind_both_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))

    def gradients(q: jax.Array, k: jax.Array) -> Any:
        return jax.vjp(lambda *x: ops.causal(*x, q_segment_ids=IDS, family="hopper"), q, k, k)[1](q)

    found = [message[4][0].decode() for message in messages(monkeypatch, gradients, Q, Q[:, :, :1])]
    kernels = ["causal_packed_hopper_bwd", "causal_segmented_hopper_bwd", "run_dq_rows", "add_head_groups"]
    assert found[found.index("pad_runs") + 1 :] == kernels


def test_dq_of_its_own_is_computed_by_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_runs, "LEAST_ITEMS", 0)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    found = [
        message[4][0].decode() for message in messages(monkeypatch, jax.grad(partial(loss, deterministic=True)), Q)
    ]
    first = found.index("causal_packed_bwd_dq")
    assert found[first - 1] == "lay_out_runs"
    assert found[first + 1 : first + 3] == ["causal_segmented_bwd_dq", "causal_hopper_delta"]
    assert found[first + 3 :] == ["pad_runs", "causal_packed_hopper_bwd", "causal_segmented_hopper_bwd"]
