"""Dense calls of the JAX ops with few queries, whose keys are split as in calls on pages."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from codegen.testing.golden_jax import array, load_op, tensor
from tests.kernels.test_paged import DTYPE, LEGAL, TOLERANCE
from tests.support.cases import MANIFEST, Shape, draw, tiles

pytestmark = pytest.mark.covers(mode="paged", family="portable", dtype="float32", framework="jax")
LEAST_KEYS = 128
SHAPE = Shape(batch=2, q_len=2, kv_len=LEAST_KEYS + 60, kv_heads=2, group=2, dim=32, dim_v=16)
CALLS: dict[str, dict[str, Any]] = {
    "end": {"q_offset": "end"},
    "offsets": {"q_offset": jnp.asarray([150, 7])},
    "lengths": {"q_offset": "end", "kv_lengths": jnp.asarray([170, 3])},
}


def given(variant: str, shape: Shape = SHAPE) -> tuple[list[jax.Array], dict[str, Any]]:
    inputs = draw(variant, shape, DTYPE, positions=shape.keys)
    own = {name: array(x) for name, x in (inputs.tensors | inputs.scalars).items()}
    return [array(x) for x in (inputs.q, inputs.k, inputs.v)], {"layout": "bhsd", "return_lse": True, **own}


def assert_close(got: Any, want: Any) -> None:
    for each, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(tensor(each), tensor(wanted), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variants whose keys were split, one entry per split call. Calls with fewer keys than usual are split."""
    monkeypatch.setattr("generated._runtime.jax.paged_passes.LEAST_DENSE_KEYS", LEAST_KEYS)
    found: list[str] = []
    for variant in LEGAL:
        launch = importlib.import_module(f"generated.{variant}.paged.launch")

        def noted(
            backend: Any, call: Any, *args: Any, _plan: Any = launch.plan, _name: str = variant, **own: Any
        ) -> Any:
            found.append(_name)
            return _plan(backend, call, *args, **own)

        noted.__signature__ = inspect.signature(launch.plan)  # type: ignore[attr-defined]
        monkeypatch.setattr(launch, "plan", noted)
    return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("variant", LEGAL)
def test_as_without_splits(variant: str, call: str, splits: list[str]) -> None:
    """The call without splits has a config, which selects the kernels of dense calls."""
    qkv, own = given(variant)
    op: Any = load_op(variant)
    got = op(*qkv, **own, **CALLS[call])
    reads_keys = any("kv_idx" in spec["dims"] for spec in MANIFEST[variant]["tensors"].values())
    assert splits == ([] if reads_keys and call == "lengths" else [variant])
    assert_close(got, op(*qkv, **own, **CALLS[call], config=tiles(16, 64)))
    assert len(splits) <= 1


def test_other_calls_are_not_split(splits: list[str]) -> None:
    op: Any = load_op("causal")
    (q, k, v), own = given("causal")
    ids = jnp.zeros((2, k.shape[2]), jnp.int32)
    op(q, k[:, :, :100], v[:, :, :100], **own)
    op(q, k, v, **own, q_segment_ids=ids[:, :2], kv_segment_ids=ids)
    op(q, k, v, **own, q_positions=ids[:, :2], kv_positions=ids)
    assert not splits


def test_gradients_and_vmap(splits: list[str]) -> None:
    op: Any = load_op("alibi")
    (q, k, v), own = given("alibi", Shape(q_len=1, kv_len=LEAST_KEYS, group=2, dim=16))

    def total(q: jax.Array, k: jax.Array, v: jax.Array, slope: jax.Array, **others: Any) -> jax.Array:
        o, lse = op(q, k, v, **own | {"slope": slope}, q_offset="end", **others)
        found: jax.Array = o.astype(jnp.float32).sum() + lse.sum()
        return found

    every = jax.grad(total, argnums=(0, 1, 2, 3))
    got = every(q, k, v, own["slope"])
    assert splits == ["alibi"]
    assert_close(got, every(q, k, v, own["slope"], config=tiles(32, 32)))
    rows = jnp.stack([q, 2 * q])
    mapped = jax.vmap(lambda q: op(q, k, v, **own, q_offset="end")[0])(rows)
    assert_close(mapped, [op(row, k, v, **own, q_offset="end")[0] for row in rows])
