"""`jax.vmap` of calls with a schedule: folded rows and sequences have other block tables than those of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codegen.testing.golden_jax import load_op

pytestmark = pytest.mark.covers(variant="document", family="portable", framework="jax")

MAPPED, ROWS = 2, 70
Options = dict[str, jax.Array]
BEGINS = {"cu_seqlens_q": jnp.asarray([0, 45, ROWS], jnp.int32)}
IDS = {"q_segment_ids": (jnp.arange(ROWS) // 45)[None].repeat(2, 0)}


def arrays(mode: str) -> list[jax.Array]:
    shape = (ROWS, 1, 16) if mode == "packed" else (2, ROWS, 1, 16)
    return [jax.random.normal(jax.random.key(i), (MAPPED, *shape)) for i in range(3)]


def documents(mode: str, length: int) -> jax.Array:
    doc = jnp.arange(ROWS) // length
    return doc if mode == "packed" else jnp.stack([doc, (jnp.arange(ROWS) + 5) // length])


OPTIONS: dict[str, Options] = {"dense": {}, "packed": BEGINS, "segments": IDS}


def stacked(function: Callable[..., Any], *mapped: Any) -> Any:
    each = [function(*jax.tree.map(lambda x, i=i: x[i], mapped)) for i in range(MAPPED)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *each)


def mapped_at_once(function: Callable[..., Any], *mapped: Any) -> Any:
    """What vmap gives, checked to be no loop of calls."""
    assert "scan" not in str(jax.make_jaxpr(jax.vmap(function))(*mapped))
    return jax.vmap(function)(*mapped)


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)


@pytest.mark.parametrize("mode", OPTIONS)
def test_vmap_beside_a_schedule_that_is_not_mapped(mode: str) -> None:
    """Also of the backward alone."""
    q, k, v = arrays(mode)
    op: Any = load_op("document")
    doc, options = documents(mode, 20), OPTIONS[mode]
    schedule = op.schedule(q[0], k[0], v[0], doc=doc, **options)

    def one(q: jax.Array) -> Any:
        return op(q, k[0], v[0], doc=doc, **options, schedule=schedule)

    pullback = jax.vjp(one, q[0])[1]
    close(mapped_at_once(one, q), stacked(one, q))
    close(mapped_at_once(pullback, q), stacked(pullback, q))
    gradient = jax.grad(lambda q: (one(q) ** 2).sum())
    close(mapped_at_once(gradient, q), stacked(gradient, q))


@pytest.mark.parametrize("mode", OPTIONS)
def test_vmap_over_schedules(mode: str) -> None:
    q, k, v = arrays(mode)
    op: Any = load_op("document")
    options = OPTIONS[mode]
    docs = [documents(mode, length) for length in (5, 20)]
    schedules = [op.schedule(q[0], k[0], v[0], doc=doc, **options) for doc in docs]
    mapped = jax.tree.map(lambda *xs: jnp.stack(xs), *schedules)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, doc: jax.Array, schedule: Any) -> Any:
        return op(q, k, v, doc=doc, **options, schedule=schedule)

    given = (q, k, v, jnp.stack(docs), mapped)
    close(mapped_at_once(one, *given), stacked(one, *given))
