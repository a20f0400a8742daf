"""Context parallelism in JAX by a ring, of variants that compute with the number of keys, against one call."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import PartitionSpec as P

from codegen.testing import calls
from generated.jax_parallel import context_parallel, plan
from tests.ops.jax.test_jax_parallel import BATCH, DIM, HEADS, compare, loss_of, mesh_of
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="XLA_FLAGS gives JAX fewer than 2 devices")

SPEC = """
variants:
  log_n: {mask: causal, score: score * log(kv_len), dropout: true}
  tail: {mask: kv_idx >= kv_len - 16, sink: true}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the rendered package of SPEC."""
    with importable(tmp_path_factory.mktemp("ring") / "tests", "jax_ring_variants", SPEC) as package:
        yield package.name


@pytest.mark.parametrize("lengths", [None, (80, 22)])
@pytest.mark.parametrize(("variant", "seq"), [("log_n", 69), ("log_n", 64), ("tail", 69)])
def test_every_step_has_the_number_of_all_keys(
    package: str, variant: str, seq: int, lengths: tuple[int, int] | None
) -> None:
    """Of 69 rows one device has a row of padding. `kv_lengths` may be fewer than the rows, or more."""
    shape = calls.Shape(batch=BATCH, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=DIM)
    drawn = calls.draw_inputs(calls.load_manifest(package)[variant], shape, dtype=torch.float32, device="cpu")
    trained = {name: jnp.asarray(getattr(drawn, name).detach().transpose(1, 2).numpy()) for name in ("q", "k", "v")}
    trained |= {name: jnp.asarray(x.detach().numpy()) for name, x in drawn.tensors.items()}
    given: dict[str, Any] = dict(drawn.scalars)
    if lengths is not None:
        given["kv_lengths"] = jnp.array(lengths, jnp.int32)
    op = getattr(importlib.import_module(f"{package}.jax"), variant)
    layout = plan(op, 2, seq=seq, heads=HEADS, head_dim=DIM, strategy="ring")
    call = context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))

    def one(x: dict[str, Any]) -> Any:
        o, lse = op(**x, **given, return_lse=True)
        return loss_of(o, lse), (o, lse)

    def several(x: dict[str, Any]) -> Any:
        rows = {name: layout.shard(part, 1) if name in ("q", "k", "v") else part for name, part in x.items()}
        o, lse = call(**rows, **given, return_lse=True)
        o, lse = layout.unshard(o, 1), layout.unshard(lse, 2)
        return loss_of(o, lse), (o, lse)

    (found, (o, lse)), (wanted, (want_o, want_lse)) = (
        jax.jit(jax.grad(f, has_aux=True))(trained) for f in (several, one)
    )
    compare({**found, "o": o, "lse": lse}, {**wanted, "o": want_o, "lse": want_lse})


def test_packed_sequences_are_refused(package: str) -> None:
    op = importlib.import_module(f"{package}.jax").log_n
    with pytest.raises(ValueError, match="got 'ring' with log_n, which reads a number of each packed sequence"):
        plan(op, 2, seq=64, heads=HEADS, head_dim=DIM, strategy="ring", cu_seqlens=[0, 20, 64])
