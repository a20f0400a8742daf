"""Context parallelism in JAX, compared with one call: numbers of keys, documents in separate calls, and few rows."""

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
from tests.ops.jax.test_jax_parallel import BATCH, DIM, HEADS, compare, loss_of, loss_over, mesh_of
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="XLA_FLAGS gives JAX fewer than 4 devices")

SPEC = """
variants:
  log_n: {mask: causal, score: score * log(kv_len), dropout: true}
  tail: {mask: kv_idx >= kv_len - 16, sink: true}
  padded: {mask: "kv_idx < length[b]", tensors: {length: {dims: [b], dtype: int32, example: 12 - 2 * b}}, dropout: true}
  key_bias:
    mask: causal
    score: score + bias[b, kv_idx]
    tensors: {bias: {dims: [b, kv_idx], grad: true}}
    dropout: true
  by_place:
    mask: causal
    score: score * log(kv_len) + place[h, kv_idx]
    tensors: {place: {dims: [h, kv_idx], grad: true}}
    dropout: true
  nearby:
    mask: symmetric_window(9)
    score: score + bias[b, kv_idx]
    tensors: {bias: {dims: [b, kv_idx], grad: true}}
    dropout: true
  fading: {mask: causal, decay: true, sink: true, dropout: true}
  counting: {mask: causal and (kv_idx >= b or h == 1)}
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
    """With 69 rows one device has a row of padding. `kv_lengths` may be less or more than the number of rows."""
    check_rows(package, variant, seq, "ring", lengths)


@pytest.mark.parametrize("seq", [22, 23])
def test_rows_beside_a_run_may_be_more_than_there_are(package: str, seq: int) -> None:
    """With dropout a call of 11 rows computes 27, and the op wants a log-decay for each of them."""
    check_rows(package, "fading", seq, "gather")


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_positions_go_on_behind_the_last_row(package: str, balance: str) -> None:
    """Keys have positions, and with dropout the calls have rows and keys behind the last ones."""
    check_rows(package, "nearby", 69, "ring", balance=balance)


def check_rows(
    package: str,
    variant: str,
    seq: int,
    strategy: str,
    lengths: tuple[int, int] | None = None,
    balance: str = "work",
) -> None:
    """Compare dense rows over two devices with those of one."""
    shape = calls.Shape(batch=BATCH, heads=HEADS[0], kv_heads=HEADS[1], seq=seq, dim=DIM)
    drawn = calls.draw_inputs(calls.load_manifest(package)[variant], shape, dtype=torch.float32, device="cpu")
    trained = {name: jnp.asarray(getattr(drawn, name).detach().transpose(1, 2).numpy()) for name in ("q", "k", "v")}
    trained |= {name: jnp.asarray(x.detach().numpy()) for name, x in drawn.tensors.items()}
    given: dict[str, Any] = dict(drawn.scalars)
    if lengths is not None:
        given["kv_lengths"] = jnp.array(lengths, jnp.int32)
    op = getattr(importlib.import_module(f"{package}.jax"), variant)
    layout = plan(op, 2, seq=seq, heads=HEADS, head_dim=DIM, strategy=strategy, balance=balance)
    call = context_parallel(op, layout, mesh=mesh_of(cp=2), spec=P(None, "cp", None))

    def one(x: dict[str, Any]) -> Any:
        o, lse = op(**x, **given, return_lse=True)
        return loss_of(o, lse), (o, lse)

    several = loss_over(call, layout, given, axis=1)
    (found, (o, lse)), (wanted, (want_o, want_lse)) = (
        jax.jit(jax.grad(f, has_aux=True))(trained) for f in (several, one)
    )
    compare({**found, "o": o, "lse": lse}, {**wanted, "o": want_o, "lse": want_lse})


ENDS = (0, 7, 40, 40, 45, 90)
"""The rows at which packed documents begin, and the end. One document is empty, the last one has half of all rows."""


def check_documents(package: str, variant: str, ranks: int, dropout_p: float | None, balance: str = "work") -> None:
    """Compare packed documents over several devices with those of one."""
    entry = calls.load_manifest(package)[variant]
    shape = calls.Shape(batch=len(ENDS) - 1, heads=HEADS[0], kv_heads=HEADS[1], seq=18, dim=DIM)
    drawn = calls.packed(entry, calls.draw_inputs(entry, shape, dtype=torch.float32, device="cpu"))
    arrays = {name: jnp.asarray(getattr(drawn, name).detach().numpy()) for name in ("q", "k", "v")}
    arrays |= {name: jnp.asarray(x.detach().numpy()) for name, x in drawn.tensors.items()}
    if "place" in arrays:
        arrays["place"] = jnp.tile(arrays["place"], (1, len(ENDS) - 1))  # an element for each row of the call
    fixed = {name: arrays.pop(name) for name, x in drawn.tensors.items() if not x.requires_grad}
    given = {**drawn.scalars, "max_seqlen_q": 45, **({} if dropout_p is None else {"dropout_p": dropout_p})}
    op = getattr(importlib.import_module(f"{package}.jax"), variant)
    options: dict[str, Any] = {"strategy": "ring", "balance": balance, "cu_seqlens": ENDS, **fixed}
    layout = plan(op, ranks, seq=ENDS[-1], heads=HEADS, head_dim=DIM, **options)
    call = context_parallel(op, layout, mesh=mesh_of(cp=ranks), spec=P("cp", None))

    def one(x: dict[str, Any]) -> Any:
        o, lse = op(**x, **fixed, **given, cu_seqlens_q=jnp.array(ENDS), return_lse=True)
        return loss_of(o, lse), (o, lse)

    several = loss_over(call, layout, {**fixed, **given}, axis=0)
    (found, (o, lse)), (wanted, (want_o, want_lse)) = (
        jax.jit(jax.grad(f, has_aux=True))(arrays) for f in (several, one)
    )
    compare({**found, "o": o, "lse": lse}, {**wanted, "o": want_o, "lse": want_lse})


full = pytest.mark.full


@pytest.mark.parametrize(
    ("variant", "dropout_p"),
    [
        ("padded", 0.0),
        ("tail", None),
        ("log_n", 0.5),  # runs of rows and keys begin inside the blocks that dropout draws for
        pytest.param("by_place", 0.0, marks=full),
        pytest.param("key_bias", 0.5, marks=full),
        pytest.param("fading", 0.5, marks=full),
    ],
)
def test_packed_documents_are_those_of_one_device(package: str, variant: str, dropout_p: float | None) -> None:
    check_documents(package, variant, 2, dropout_p)


@pytest.mark.full
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_packed_documents_over_four_devices(package: str, dropout_p: float) -> None:
    check_documents(package, "log_n", 4, dropout_p, balance="zigzag")


@pytest.mark.parametrize(("axes", "what"), [(("dp", "cp", None), "batch rows"), ((None, "cp", "dp"), "heads")])
def test_what_counts_batch_rows_or_heads_has_all_of_them(package: str, axes: tuple[str | None, ...], what: str) -> None:
    """Inside the shard_map the numbers of a device's batch rows and heads begin at 0."""
    op = importlib.import_module(f"{package}.jax").counting
    layout = plan(op, 2, seq=64, heads=HEADS, head_dim=DIM, strategy="gather")
    call, q = context_parallel(op, layout, mesh=mesh_of(dp=2, cp=2), spec=P(*axes)), jnp.zeros((2, 64, 4, DIM))
    with pytest.raises(ValueError, match=f"counting: q: expected all {what} on every rank, got a part of them, and a"):
        call(q, q, q)
