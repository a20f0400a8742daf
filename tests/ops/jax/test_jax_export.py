"""`jax.export` of ops: for CPU and CUDA in one artefact, for any length, with a schedule as an argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from generated import jax as ops
from generated._runtime.jax import schedule as jax_schedule
from generated.jax_nn import dot_product_attention
from tests.ops.jax.test_jax_transforms import arrays, close, gradients, own

pytestmark = pytest.mark.covers(variant="name", family="reference", framework="jax")


def exported(function: Callable[..., Any], platforms: Sequence[str], *given: Any) -> Any:
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ops.HANDLER)]
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=allowed)(*given)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels, which are interpreted here")
@pytest.mark.parametrize("name", ["causal", "document", "alibi"])
def test_export_for_cpu_and_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One exported artefact serves both platforms, and exporting needs no GPU."""
    monkeypatch.setenv("ATTENTION_ARCH", "sm_90")
    q, k, v = arrays()
    mine = own(name)
    backward = partial(gradients, name)
    artefact = exported(backward, ("cpu", "cuda"), q, k, v, mine)
    assert f'"{ops.HANDLER}"' in artefact.mlir_module() or ops.HANDLER in artefact.mlir_module()
    again = jax.export.deserialize(artefact.serialize())
    close(again.call(q, k, v, mine), backward(q, k, v, mine))


@pytest.mark.parametrize("name", ["gfx942", "90", "h100"])
def test_export_for_another_chip_than_nvidias_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENTION_ARCH", name)
    with pytest.raises(ValueError, match=f"full: ATTENTION_ARCH: expected an NVIDIA chip, such as sm_90.*{name}"):
        exported(ops.full, ("cuda",), *arrays())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what is missing where no GPU is")
def test_export_for_cuda_without_a_gpu_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTENTION_ARCH", raising=False)
    with pytest.raises(RuntimeError, match="ATTENTION_ARCH=sm_90"):
        exported(ops.full, ("cuda",), *arrays())


B, S, T = jax.export.symbolic_shape("b, s, t")
QUERIES, KEYS, TOKENS, ROWS = (B, S, 4, 16), (B, T, 2, 16), (B, S), (S, 4, 16)


def begins(total: Any) -> jax.Array:
    """Where three sequences begin, the second of which is empty, and where the last one ends."""
    return jnp.concatenate([jnp.asarray([0, 9, 9]), jnp.asarray(total)[None]]).astype(jnp.int32)


# A function of q and other arrays, and the shapes of all of them.
ANY_LENGTH: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "square": (lambda q: ops.causal(q, q, q), [QUERIES]),
    "aligned_at_the_end": (lambda q, k: ops.causal(q, k, k, q_offset="end"), [QUERIES, KEYS]),
    "dropout": (
        lambda q, k: ops.causal_dropout(q, k, k, dropout_p=0.5, seed=3, q_offset="end"),
        [QUERIES, KEYS],
    ),
    "packed": (lambda q: ops.causal(q, q, q, cu_seqlens_q=begins(q.shape[0])), [ROWS]),
    "segments": (lambda q, ids: ops.causal(q, q, q, q_segment_ids=ids), [QUERIES, TOKENS]),
    "positions": (lambda q, ids: ops.causal(q, q, q, q_segment_ids=ids, q_positions=ids), [QUERIES, TOKENS]),
    "lengths": (lambda q, k, n: ops.causal(q, k, k, kv_lengths=n, q_offset="end"), [QUERIES, KEYS, (B,)]),
    "documents": (lambda q, doc: ops.document(q, q, q, doc=doc), [QUERIES, TOKENS]),
    "window_of_jax_nn": (lambda q: dot_product_attention(q, q, q, local_window_size=5), [QUERIES]),
    "wide_window_of_jax_nn": (
        lambda q, k: dot_product_attention(q, k, k, local_window_size=(2**30, 3)),
        [QUERIES, KEYS],
    ),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels have fixed shapes")
# A gradient runs the forward too, and has its result as a factor, so the forward alone runs for a dense call and a
# packed one.
@pytest.mark.parametrize(
    ("case", "backward"),
    [
        pytest.param(case, backward, marks=[] if backward or case in ("square", "packed") else [pytest.mark.full])
        for case in ANY_LENGTH
        for backward in (False, True)
    ],
)
def test_export_of_symbolic_shapes_for_the_cpu(case: str, backward: bool) -> None:
    """One artefact serves any batch size and length."""
    function, shapes = ANY_LENGTH[case]
    dtypes = [jnp.float32 if len(shape) > 2 else jnp.int32 for shape in shapes]

    def gradient(q: jax.Array, *others: jax.Array) -> Any:
        return jax.grad(lambda q: (function(q, *others) ** 2).sum())(q)

    wanted = gradient if backward else function
    types = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]
    artefact = jax.export.export(jax.jit(wanted))(*types)
    for sizes in ({B: 2, S: 24, T: 30}, {B: 1, S: 26, T: 26}):
        keys = jax.random.split(jax.random.key(0), len(shapes))
        known = [[sizes.get(size, size) for size in shape] for shape in shapes]
        given = [
            jax.random.normal(key, shape) if dtype == jnp.float32 else jax.random.randint(key, shape, 3, 5)
            for key, shape, dtype in zip(keys, known, dtypes, strict=True)
        ]
        close(artefact.call(*given), wanted(*given))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_schedule_is_an_argument_of_an_exported_function(packed: bool) -> None:
    q, k, v = arrays()
    doc = own("document")["doc"]
    options: dict[str, Any] = {}
    if packed:
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        doc, options = doc.reshape(-1), {"cu_seqlens_q": jnp.asarray([0, 30, 96], jnp.int32)}
    schedule = ops.document.schedule(q, k, v, doc=doc, **options)

    def one(q: jax.Array, schedule: Any) -> Any:
        return ops.document(q, k, v, doc=doc, **options, schedule=schedule)

    artefact = jax.export.deserialize(jax.export.export(jax.jit(one))(q, schedule).serialize())
    close(artefact.call(q, schedule), one(q, schedule))


def test_the_static_parts_of_schedules_and_plans_are_kept() -> None:
    schedule = ops.document.schedule(*arrays(), doc=own("document")["doc"])
    schedule = replace(schedule, tiles={"fwd": (64, 128), "dq": (32, 64)})
    pages = {"page_table": jnp.zeros((3, 2), jnp.int32), "kv_lengths": jnp.full(3, 20), "q_offset": "end"}
    plan = ops.window.plan(jnp.ones((3, 1, 2, 16)), *jnp.ones((2, 5, 16, 2, 16)), **pages, size=7)
    for each in (schedule, plan):
        _, static = jax_schedule._flatten(each)
        assert jax_schedule._from_bytes(jax_schedule._to_bytes(static)) == static
