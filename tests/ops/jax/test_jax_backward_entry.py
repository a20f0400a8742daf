"""`op.backward` by itself: JAX's gradients, with dk and dv in float32, computed from the given o and lse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codegen.testing import calls
from generated._runtime.core.checks import ArgumentError

pytestmark = pytest.mark.covers(family="reference", framework="jax")

SHAPE = calls.Shape(batch=2, heads=4, kv_heads=2, seq=40, dim=16)
BEGINS = np.array([0, 40, 80], np.int32)


def drawn(
    variant: str, mode: str, dtype: str = "float32"
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The op, its q, k, v, do and dlse, the variant's trained arrays, and all other keywords."""
    import torch

    entry = calls.load_manifest()[variant]
    inputs = calls.draw_inputs(entry, SHAPE, dtype=torch.float32, device="cpu")
    options: dict[str, Any] = {"layout": "bhsd"}
    if mode == "packed":
        inputs, options = calls.packed(entry, inputs), {"cu_seqlens_q": BEGINS}
    elif mode == "segmented":
        options["q_segment_ids"] = np.tile(np.arange(40) // 17, (2, 1)).astype(np.int32)
    arrays = {name: jnp.asarray(getattr(inputs, name).detach().numpy()) for name in ("q", "k", "v", "do", "dlse")}
    arrays |= {name: arrays[name].astype(dtype) for name in ("q", "k", "v", "do")}
    own = {name: jnp.asarray(x.detach().numpy()) for name, x in inputs.tensors.items()}
    trained = {name: own.pop(name) for name, x in inputs.tensors.items() if x.requires_grad}
    return (
        getattr(__import__("generated.jax", fromlist=[variant]), variant),
        arrays,
        trained,
        own | inputs.scalars | options,
    )


def both(variant: str, mode: str, dtype: str = "float32") -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Gradients of `op.backward`, and JAX's gradients of the op."""
    op, given, trained, keywords = drawn(variant, mode, dtype)
    names = ("q", "k", "v", *trained)

    def called(*leaves: jax.Array) -> Any:
        q, k, v, *own = leaves
        return op(q, k, v, **dict(zip(trained, own, strict=True)), **keywords, return_lse=True)

    (o, lse), pullback = jax.vjp(called, *(given[name] for name in names[:3]), *trained.values())
    dlse = jnp.where(jnp.isinf(lse), 0.0, given["dlse"])
    want = dict(zip(names, pullback((given["do"], dlse)), strict=True))
    arrays = (given[name] for name in ("do", "q", "k", "v"))
    found = op.backward(*arrays, o, lse, dlse=dlse, **trained, **keywords)
    return {"q": found.dq, "k": found.dk, "v": found.dv, **found.own}, want


# A sink, a log-decay, a bias over pairs and dropout, each in one mode or two. The tests of torch have all combinations.
@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        ("alibi", "dense"),
        ("forgetting", "dense"),
        ("forgetting", "packed"),
        ("gpt_oss", "segmented"),
        ("band_bias", "dense"),
        ("causal_dropout", "packed"),
    ],
)
def test_gives_the_gradients_of_jax(variant: str, mode: str) -> None:
    found, want = both(variant, mode)
    assert set(found) == set(want)
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.0), ("float16", 1.0), ("float16", 1e-5)])
def test_rounds_neither_dk_nor_dv_of_16_bit_keys(dtype: str, factor: float) -> None:
    """With the factor 1e-5, o is below the smallest normal number of float16."""
    op, given, _, keywords = drawn("causal", "dense", dtype)
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    v = (v.astype(jnp.float32) * factor).astype(dtype)
    o, lse = op(q, k, v, **keywords, return_lse=True)
    found = op.backward(do, q, k, v, o, lse, **keywords)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    exact = jax.vjp(lambda *leaves: op(*leaves, **keywords), *wide)[1](do.astype(jnp.float32))
    assert found.dq.dtype == dtype
    # The rounding of the given o cancels, because the backward rounds its own o in the same way.
    for x, want in ((found.dk, exact[1]), (found.dv, exact[2])):
        assert x.dtype == jnp.float32
        rounded = want.astype(dtype).astype(jnp.float32)
        assert jnp.abs(x - want).mean() < 0.01 * jnp.abs(rounded - want).mean()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_two_halves_of_the_keys_add_up_at_any_scale(scale: float) -> None:
    op, given, _, keywords = drawn("full", "dense")
    q, k, v, do, dlse = (given[name] for name in ("q", "k", "v", "do", "dlse"))
    keywords["scale"] = scale

    def called(*leaves: jax.Array) -> Any:
        return op(*leaves, **keywords, return_lse=True)

    (o, lse), pullback = jax.vjp(called, q, k, v)
    dq, dk, dv = pullback((do, dlse))
    halves = [slice(0, 24), slice(24, 40)]

    @jax.jit
    def part(k: jax.Array, v: jax.Array) -> Any:
        return op.backward(do, q, k, v, o, lse, dlse=dlse, **keywords)

    parts = [part(k[:, :, half], v[:, :, half]) for half in halves]
    np.testing.assert_allclose(parts[0].dq + parts[1].dq, dq, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([each.dk for each in parts], 2), dk, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([each.dv for each in parts], 2), dv, rtol=1e-5, atol=1e-5)


def test_bad_arguments_raise_an_error() -> None:
    op, given, _, keywords = drawn("causal", "dense")
    q, k, v, do = (given[name] for name in ("q", "k", "v", "do"))
    o, lse = op(q, k, v, **keywords, return_lse=True)
    with pytest.raises(ArgumentError, match=r"causal.backward: lse: expected as the op returns it, float32 .* got"):
        op.backward(do, q, k, v, o, lse[:1], **keywords)
    with pytest.raises(ArgumentError, match=r"causal.backward: wanted: expected names among none, got 'g'"):
        op.backward(do, q, k, v, o, lse, wanted=["g"], **keywords)
    with pytest.raises(ArgumentError, match=r"causal.backward: wanted: expected None or a sequence of names .*, got 3"):
        op.backward(do, q, k, v, o, lse, wanted=3, **keywords)
    with pytest.raises(ArgumentError, match=r"causal.backward: o: expected as the op returns it, floats .*, got int32"):
        op.backward(do, q, k, v, o.astype(int), lse, **keywords)
    with pytest.raises(ArgumentError, match=r"causal.backward: do: expected as the op returns it, floats .*, got bool"):
        op.backward(do.astype(bool), q, k, v, o, lse, **keywords)
