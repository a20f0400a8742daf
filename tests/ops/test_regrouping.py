"""Batch rows and heads that `vmap` and sharding regroup, in variants that read elements of other rows and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from codegen.load.spec_file import load
from codegen.plan.ops.references import may_regroup
from generated._runtime.core.settings import INTERPRET
from tests.ops.jax.test_jax_transforms import close, mesh, stacked
from tests.support.rendering import importable

pytestmark = pytest.mark.skipif(INTERPRET, reason="under TRITON_INTERPRET=1 the ops run their kernels")

# Variant -> dims of its tensor, the score that reads it, and whether batch rows, and heads, may be regrouped.
VARIANTS: dict[str, tuple[list[str], str, bool, bool]] = {
    "own_row": (["b", "h"], "score * w[b, h] + w[b, h]", True, True),
    "first_row": (["b"], "score + w[0] * kv_idx", False, True),
    "diagonal": (["b", "b"], "score + w[b, b] * kv_idx", False, True),
    "first_head": (["h"], "score + w[0] * kv_idx", True, False),
    "key_heads": (["hkv"], "score + w[kv_idx % 2]", True, False),
    "head_pairs": (["h", "hkv"], "score + w[h, hkv] * kv_idx", True, False),
    "own_key_head": (["hkv", "b"], "score + w[hkv, b] * kv_idx", True, True),
    "pair_bias": (["b", "h", "q_idx", "kv_idx"], "score + w[b, h, q_idx, kv_idx]", True, True),
}
SPEC = "variants:\n" + "".join(
    f'  {name}: {{mask: causal, score: "{score}", tensors: {{w: {{dims: [{", ".join(dims)}], grad: true}}}}}}\n'
    for name, (dims, score, *_) in VARIANTS.items()
)
BATCH, ROWS, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 16
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "q_idx": ROWS, "kv_idx": ROWS}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with importable(tmp_path_factory.mktemp("own"), "regrouped", SPEC):
        yield "regrouped"


def drawn(name: str, *lead: int) -> list[jax.Array]:
    """q, k, v and the variant's tensor, with further leading axes."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(*lead, BATCH, ROWS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes.append((*lead, *(SIZES[dim] for dim in VARIANTS[name][0])))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def results(op: Callable[..., Any], *arrays: jax.Array, **options: Any) -> Any:
    """o, and the gradients of all arrays."""

    def of(q: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array) -> Any:
        o = op(q, k, v, w=w, **options)
        return (o**2).sum(), o

    return jax.grad(of, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)


def test_may_regroup(tmp_path: Any) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    variants = load(tmp_path / "spec.yaml").variants
    found = {name: (may_regroup(x, "b"), may_regroup(x, "h", "hkv")) for name, x in variants.items()}
    assert found == {name: (by_batch, by_heads) for name, (_, _, by_batch, by_heads) in VARIANTS.items()}


def check_maps(op: Callable[..., Any], mapped: tuple[int, ...], many: list[jax.Array]) -> None:
    """`vmap` over some of the arrays gives the results of one call after the other."""
    given = [x if i in mapped else x[0] for i, x in enumerate(many)]

    def each(*given: jax.Array) -> Any:
        found = [results(op, *(x[n] if i in mapped else x for i, x in enumerate(given))) for n in range(2)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *found)

    axes = [0 if i in mapped else None for i in range(4)]
    close(jax.jit(jax.vmap(partial(results, op), in_axes=axes))(*given), jax.jit(each)(*given), 1e-4)


@pytest.mark.parametrize("name", ["own_row", "first_row", "diagonal"])
@pytest.mark.parametrize("mapped", [(0,), (3,)], ids=["q", "w"])
def test_jax_maps_rows(package: str, name: str, mapped: tuple[int, ...]) -> None:
    check_maps(getattr(import_module(f"{package}.jax"), name), mapped, drawn(name, 2))


@pytest.mark.parametrize("name", ["own_row", "first_row", "diagonal"])
@pytest.mark.parametrize("mapped", ["q", "w"])
def test_torch_maps_rows(package: str, name: str, mapped: str) -> None:
    op = getattr(import_module(f"{package}.torch"), name)
    many = {n: torch.tensor(x.tolist()) for n, x in zip("qkvw", drawn(name, 3), strict=True)}
    given = {n: x if n == mapped else x[0] for n, x in many.items()}
    axes = {n: 0 if n == mapped else None for n in given}

    def call(x: dict[str, torch.Tensor]) -> torch.Tensor:
        o: torch.Tensor = op(**x, layout="bshd")
        return o

    want = torch.stack([call({n: x[i] if n == mapped else x for n, x in given.items()}) for i in range(3)])
    torch.testing.assert_close(torch.func.vmap(call, in_dims=(axes,))(given), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapped", [(0,), (3,)], ids=["q", "w"])
def test_jax_maps_packed_calls_with_a_bias_of_pairs(package: str, mapped: tuple[int, ...]) -> None:
    """The bias of the single call would be a block diagonal of those of all calls."""
    op = partial(import_module(f"{package}.jax").pair_bias, cu_seqlens_q=jnp.asarray([0, 5, ROWS]))
    check_maps(op, mapped, [x[:, 0] for x in drawn("pair_bias", 2)])


KINDS = [*((name, AxisType.Auto) for name in VARIANTS), *((n, AxisType.Explicit) for n in ("diagonal", "own_key_head"))]


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)], ids=["a_key_head_each", "shared_key_heads"])
def test_jax_shards_rows_and_heads(package: str, name: str, kind: AxisType, shape: tuple[int, int]) -> None:
    on = Mesh(mesh(*shape).devices, ("data", "model"), axis_types=(kind, kind))
    op = getattr(import_module(f"{package}.jax"), name)
    given = drawn(name)
    queries = P("data", None, "model")
    keys = queries if KV_HEADS % shape[1] == 0 else P("data")
    specs = [queries, keys, keys, P()]
    put = [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]
    one = jax.jit(partial(results, op))
    close(one(*put), one(*given), 1e-4)


@pytest.mark.parametrize("argument", ["q_segment_ids", "q_positions", "kv_lengths"])
def test_jax_maps_one_row_of_ids_over_many_rows(package: str, argument: str) -> None:
    """After the inner map the call has five batch rows, all of which have the ids of one row."""
    op = import_module(f"{package}.jax").own_row
    q = jax.random.normal(jax.random.key(1), (5, 1, ROWS, HEADS, DIM))
    k = jax.random.normal(jax.random.key(2), (1, ROWS, KV_HEADS, DIM))
    w = jnp.ones((1, HEADS))
    shape = (3, 1) if argument == "kv_lengths" else (3, 1, ROWS)
    tokens = jax.random.randint(jax.random.key(3), shape, 0, 3)

    def of(tokens: jax.Array) -> Any:
        return jax.vmap(lambda q: op(q, k, k, w=w, **{argument: tokens}))(q)

    close(jax.jit(jax.vmap(of))(tokens), jax.jit(partial(stacked, of))(tokens))
