"""Calls of float8_e4m3fn in JAX: the reference, what is refused, and what is launched. Needs no GPU."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

from codegen.compile.offline import compile_launches
from codegen.testing import golden
from codegen.testing.golden_jax import array, load_op, tensor
from generated._runtime.core.checks import ArgumentError
from generated._runtime.jax.kernels import INTERPRET
from tests.ops.jax.test_jax_kernels import code, kernel_of, messages

FP8 = torch.float8_e4m3fn
BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM = 2, 4, 2, 13, 21, 16

compiles = pytest.mark.skipif(INTERPRET, reason="compiles kernels, which are interpreted here")


def drawn(q_len: int = Q_LEN, kv_len: int = KV_LEN, batch: int = BATCH) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k and v `[B, H, S, D]`, and scales `[B, H]`."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    lengths = (q_len, kv_len, kv_len)
    qkv = [torch.randn(batch, h, n, DIM).to(FP8) for h, n in zip(heads, lengths, strict=True)]
    return qkv, {f"{name}_scale": torch.rand(batch, h) + 0.5 for name, h in zip("qkv", heads, strict=True)}


def restored(qkv: list[Tensor], scales: dict[str, Tensor]) -> list[Tensor]:
    """q, k and v in float64, multiplied by their scales."""
    return [x.double() * scale.double()[:, :, None, None] for x, scale in zip(qkv, scales.values(), strict=True)]


def given_to(qkv: list[Tensor], scales: dict[str, Tensor], layout: str = "bshd") -> tuple[list[Any], dict[str, Any]]:
    rows = [x.transpose(1, 2) if layout == "bshd" else x for x in qkv]
    return [array(x) for x in rows], {name: array(x) for name, x in scales.items()}


def check(o: jax.Array, lse: jax.Array, wanted: Tensor, wanted_lse: Tensor) -> None:
    """The reference computes in float32; o is rounded once, to the 8 binary digits of bfloat16."""
    assert o.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    torch.testing.assert_close(tensor(o).double(), wanted, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(tensor(lse).double(), wanted_lse, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("variant", ["causal", "softcap", "forgetting"])
def test_dense_calls_are_those_of_the_restored_values(variant: str, layout: str) -> None:
    qkv, scales = drawn()
    own = {"g": -torch.rand(BATCH, KV_LEN, HEADS)} if variant == "forgetting" else {}
    (q, k, v), given = given_to(qkv, scales, layout)
    given |= {name: array(x) for name, x in own.items()}
    o, lse = load_op(variant)(q, k, v, **given, layout=layout, q_offset="end", return_lse=True)
    own = {name: x.double() for name, x in own.items()}
    wanted, wanted_lse = golden.load_reference(variant)(
        *restored(qkv, scales), **own, scale=DIM**-0.5, q_offset=KV_LEN - Q_LEN, return_lse=True
    )
    check(o if layout == "bhsd" else o.transpose(0, 2, 1, 3), lse, wanted, wanted_lse)


def test_packed_calls_are_dense_ones_by_sequence() -> None:
    qkv, _ = drawn(batch=1, q_len=30, kv_len=30)
    lengths = [5, 0, 24, 1]
    begins = [0, *np.cumsum(lengths).tolist()]
    scales = {
        f"{name}_scale": torch.rand(4, h) + 0.5 for name, h in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
    }
    (q, k, v), given = given_to(qkv, scales)
    o, lse = load_op("causal")(q[0], k[0], v[0], **given, cu_seqlens_q=jnp.asarray(begins), return_lse=True)
    for i, (begin, end) in enumerate(pairwise(begins)):
        if begin < end:
            rows = [x[:, :, begin:end] for x in qkv]
            wanted = golden.load_reference("causal")(
                *restored(rows, {name: x[i : i + 1] for name, x in scales.items()}), scale=DIM**-0.5, return_lse=True
            )
            check(o[None, begin:end].transpose(0, 2, 1, 3), lse[None, :, begin:end], *wanted)


def test_segments_and_lengths() -> None:
    """Each batch row has two segments; a negative scale changes the sign of q."""
    qkv, scales = drawn(q_len=KV_LEN)
    (q, k, v), given = given_to(qkv, scales)
    ids = torch.arange(KV_LEN)[None].expand(BATCH, -1) // 11
    o, lse = load_op("causal")(q, k, v, **given, scale=-0.5, q_segment_ids=array(ids.int()), return_lse=True)
    wanted = golden.load_reference("causal")(
        *restored(qkv, scales), scale=-0.5, q_segment_ids=ids, kv_segment_ids=ids, return_lse=True
    )
    check(o.transpose(0, 2, 1, 3), lse, *wanted)


def test_scales_in_every_form() -> None:
    qkv, _ = drawn()
    (q, k, v), _ = given_to(qkv, {})
    op, by_head = load_op("causal"), jnp.asarray([0.5, 2.0])
    want = op(q, k, v, q_scale=jnp.full((BATCH, HEADS), 0.5), k_scale=jnp.full(KV_HEADS, 2.0), v_scale=by_head)
    got = op(q, k, v, q_scale=np.float32(0.5), k_scale=2, v_scale=np.broadcast_to(by_head, (BATCH, KV_HEADS)))
    np.testing.assert_array_equal(got, want)
    jitted = jax.jit(lambda q, scale: op(q, k, v, q_scale=scale, k_scale=2.0, v_scale=by_head.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(jitted(q, 0.5), want)


def assert_is_one_call(function: Any, *mapped: jax.Array) -> None:
    """Check that vmap folds the function into one call: otherwise it would be a loop of calls."""
    text = str(jax.make_jaxpr(jax.vmap(function))(*mapped))
    assert "causal" in text or "softcap" in text
    assert "scan" not in text
    assert "while" not in text


@pytest.mark.parametrize("variant", ["causal", "softcap"])
def test_mapped_calls_are_one_after_the_other(variant: str) -> None:
    qkv, scales = drawn()
    arrays, given = given_to(qkv, scales)
    op = load_op(variant)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, q_scale: jax.Array, v_scale: jax.Array) -> Any:
        found = op(q[None], k[None], v[None], q_scale=q_scale, k_scale=0.75, v_scale=v_scale, return_lse=True)
        return [x[0] for x in found]

    mapped = (*arrays, given["q_scale"], given["v_scale"])
    assert_is_one_call(one, *mapped)
    want = [one(*(x[i] for x in mapped)) for i in range(BATCH)]
    for got, *alone in zip(jax.vmap(one)(*mapped), *want, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), jnp.stack(alone).astype(jnp.float32), rtol=2**-8, atol=1e-6)


def test_mapped_packed_calls_have_scales_of_their_sequences() -> None:
    qkv, scales = drawn(q_len=KV_LEN)
    arrays, given = given_to(qkv, scales)
    begins = jnp.asarray([0, 4, KV_LEN])

    def one(q: jax.Array, k: jax.Array, v: jax.Array, q_scale: jax.Array) -> jax.Array:
        by_sequence = jnp.stack([q_scale, 2 * q_scale])
        o: jax.Array = load_op("causal")(
            q, k, v, q_scale=by_sequence, k_scale=jnp.ones(KV_HEADS), v_scale=1.0, cu_seqlens_q=begins
        )
        return o.astype(jnp.float32)

    mapped = (*arrays, given["q_scale"])
    assert_is_one_call(one, *mapped)
    want = jnp.stack([one(*(x[i] for x in mapped)) for i in range(BATCH)])
    np.testing.assert_allclose(jax.vmap(one)(*mapped), want, rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")
@pytest.mark.parametrize("in_shard_map", [False, True], ids=["jit", "shard_map"])
def test_sharded_calls(in_shard_map: bool) -> None:
    """Batch rows and heads stay on their devices, with their scales."""
    arrays, given = given_to(*drawn())
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    rows, of_rows = P("data", None, "model"), P("data", "model")

    def call(q: jax.Array, k: jax.Array, v: jax.Array, given: Any) -> Any:
        return load_op("causal")(q, k, v, **given, return_lse=True)

    placed = [jax.device_put(x, NamedSharding(mesh, rows)) for x in arrays]
    scales = {name: jax.device_put(x, NamedSharding(mesh, of_rows)) for name, x in given.items()}
    local: Any = jax.shard_map(
        call, mesh=mesh, in_specs=(rows, rows, rows, of_rows), out_specs=(rows, P("data", "model"))
    )
    run: Any = jax.jit(local if in_shard_map else call)
    found = run(*placed, scales)
    q, k, v = arrays
    for got, want in zip(found, call(q, k, v, given), strict=True):
        assert {x.data.shape[0] for x in got.addressable_shards} == {1}
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-8, atol=1e-6)


def test_no_query_is_no_error() -> None:
    (q, k, v), _ = given_to(drawn()[0], {})
    given: dict[str, Any] = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
    o = load_op("causal")(q[0, :0], k[0, :0], v[0, :0], **given, cu_seqlens_q=jnp.zeros(3, jnp.int32))
    assert (o.shape, o.dtype) == ((0, HEADS, DIM), jnp.bfloat16)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_scale": None}, r"q_scale: expected a number, floats \[4\] or \[2, 4\], as q is float8_e4m3fn, got None"),
        ({"k_scale": jnp.ones(4)}, r"k_scale: expected a number, floats \[2\] or \[2, 2\], .*, got float32 \[4\]"),
        ({"v_scale": jnp.ones(2, jnp.int32)}, r"v_scale: expected a number, floats \[2\] .*, got int32 \[2\]"),
        ({"q_scale": -1.0}, "q_scale: expected a finite number of at least 0.0, got -1.0"),
        ({"k_scale": jnp.array([1.0, -2.0])}, "k_scale: expected finite elements of at least 0, got -2.0"),
        ({"v_scale": float("inf")}, "v_scale: expected a finite number of at least 0.0, got inf"),
        ({"v_scale": jnp.array([1.0, jnp.inf])}, "v_scale: expected finite elements of at least 0, got inf"),
        ({"k": jnp.ones((2, 21, 2, 16))}, "k: expected dtype float8_e4m3fn, that of q, got float32"),
        ({"q": jnp.ones((2, 13, 4, 16))}, "q_scale: expected None without page_table or q, k and v of float8_e4m3fn"),
        ({"family": "portable"}, "family: expected None or 'hopper' where q, k and v are float8_e4m3fn"),
        (
            {"config": {"fwd": {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}}},
            r"config\['fwd'\]: expected block_m 128, block_n up to 128 and num_warps 8 where .* are float8_e4m3fn",
        ),
        ({"page_table": jnp.zeros((2, 1), jnp.int32)}, "q_scale: expected None beside page_table"),
    ],
    ids=[
        "none",
        "heads",
        "integers",
        "negative",
        "an_element",
        "inf",
        "inf_element",
        "k",
        "q",
        "family",
        "config",
        "pages",
    ],
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    (q, k, v), given = given_to(*drawn())
    with pytest.raises(ArgumentError, match=f"^causal: {message}"):
        load_op("causal")(**{"q": q, "k": k, "v": v, **given, **changed})


def test_ops_that_take_none() -> None:
    (q, k, v), given = given_to(*drawn())
    with pytest.raises(ArgumentError, match="q: expected dtype float16, bfloat16 or float32, as the op has dropout"):
        load_op("causal_dropout")(q, k, v, **given)
    g = jnp.zeros((BATCH, KV_LEN, HEADS))
    with pytest.raises(ArgumentError, match="prune: expected None where q, k and v are float8_e4m3fn"):
        load_op("forgetting")(q, k, v, **given, g=g, prune=2**-24)


@pytest.mark.parametrize(("op", "given"), [(golden.load_op("causal"), Tensor.clone), (load_op("causal"), array)])
def test_wide_heads_are_refused(op: Any, given: Any) -> None:
    wide = torch.zeros(1, 8, 1, 264).to(torch.float8_e4m3fn)
    for q, v, name in ((wide, wide[..., :64], "q"), (wide[..., :64], wide, "v")):
        message = f"causal: {name}: expected a head_dim of at most 256, as q is float8_e4m3fn, got 264"
        with pytest.raises(ArgumentError, match=message):
            op(given(q), given(q), given(v), q_scale=1.0, k_scale=1.0, v_scale=1.0, layout="bshd")


def test_derivatives_are_refused() -> None:
    (q, k, v), given = given_to(*drawn(q_len=KV_LEN))
    op: Any = load_op("causal")

    def total(q: jax.Array, q_scale: jax.Array) -> jax.Array:
        return jnp.sum(op(q, k, v, **{**given, "q_scale": q_scale}).astype(jnp.float32))

    for place, name in ((0, "q"), (1, "q_scale")):
        message = f"causal: {name}: expected an array without gradient: calls of float8_e4m3fn have none"
        with pytest.raises(ArgumentError, match=message):
            jax.jit(jax.grad(total, place))(q, given["q_scale"])
    with pytest.raises(ArgumentError, match="causal: q: expected an array without gradient"):
        jax.vjp(lambda q: op(q, k, v, **given), q)
    stopped = jax.grad(lambda scale: total(q, jax.lax.stop_gradient(scale)) + scale.sum())(given["q_scale"])
    np.testing.assert_array_equal(stopped, jnp.ones((BATCH, HEADS)))
    g = jnp.zeros((BATCH, KV_LEN, HEADS))
    with pytest.raises(ArgumentError, match="forgetting: g: expected an array without gradient"):
        jax.grad(lambda g: load_op("forgetting")(q, k, v, **given, g=g).astype(jnp.float32).sum())(g)
    o, lse = op(q, k, v, **given, return_lse=True)
    with pytest.raises(ArgumentError, match="q: expected a dtype with gradients: calls of float8_e4m3fn have none"):
        op.backward(o, q, k, v, o, lse)


# -------------------------------------------------------------------------------------------------------- launches


@compiles
@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
def test_the_machine_code_is_that_of_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score has a tanh, because its kernel depends on the size of an element."""
    variant, length, dim, packed = "softcap", 256, 64, mode == "packed"
    shapes = [(length, h, dim) if packed else (1, h, length, dim) for h in (HEADS, KV_HEADS)]
    q, k = (torch.zeros(shape, dtype=FP8) for shape in shapes)
    tensors = {"q_scale": torch.ones(2 if packed else 1, HEADS)}
    if packed:
        tensors["cu_seqlens_q"] = torch.tensor([0, 9, length], dtype=torch.int32)
    elif mode == "segmented":
        tensors["q_segment_ids"] = torch.zeros(1, length, dtype=torch.int32)

    def call(op: Any, q: Any, k: Any, given: Any) -> Any:
        layout: Any = {} if packed else {"layout": "bhsd"}
        return op(q, k, k, **given, **layout, k_scale=0.5, v_scale=0.5)

    compiled = compile_launches(lambda: call(golden.load_op(variant), q, k, tensors), variant, "sm_90")
    arrays = {name: array(x) for name, x in tensors.items()}
    found = messages(monkeypatch, lambda *x: call(load_op(variant), *x), array(q), array(k), arrays)
    kernels = {m[4][0].decode(): kernel_of(m)[4][0].decode() for m in found}
    forward = f"{variant}{'' if mode == 'dense' else '_' + mode}_hopper_fwd_fp8"
    for name in ("value_columns", forward):
        assert code(kernels[name]) == code(compiled[name].asm["ptx"]), name
    assert any(re.search(r"wgmma.*e4m3", line) for line in code(kernels[forward]))


@compiles
def test_other_chips_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), given = given_to(*drawn())
    monkeypatch.setenv("ATTENTION_ARCH", "sm_80")
    with pytest.raises(ArgumentError, match=r"q: expected dtype .*: those of float8_e4m3fn run on sm_90 alone, got"):
        jax.export.export(
            jax.jit(lambda q: load_op("causal")(q, k, v, **given)),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")],
        )(q)
