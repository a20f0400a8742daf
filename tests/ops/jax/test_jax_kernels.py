"""What jaxlib receives of each kernel: the compiled code, and the message that says how to launch it. Needs no GPU."""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import triton

from codegen.testing import golden
from generated import jax as ops
from generated._runtime.jax import kernels as jax_kernels
from generated._runtime.jax.kernels import INTERPRET
from tests.support.compiling import compile_call

pytestmark = pytest.mark.skipif(INTERPRET, reason="compiles kernels, which are interpreted here")

Message = dict[int, list[Any]]


def numbers(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Field, kind and value of each entry of a message of Protocol Buffers, read as the format's page describes it."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, kind, varint()
            continue
        size = 4 if kind == 5 else varint()
        yield tag >> 3, kind, data[at : at + size]
        at += size


def fields(data: bytes) -> Message:
    found: Message = {}
    for field, _, value in numbers(data):
        found.setdefault(field, []).append(value)
    return found


def messages(monkeypatch: pytest.MonkeyPatch, function: Any, *given: Any) -> list[Message]:
    """The kernel calls of a function lowered for an H100, as jaxlib would read them."""
    monkeypatch.setenv(jax_kernels.ARCH_VARIABLE, "sm_90")
    found = []
    call = jax.ffi.ffi_call

    def noted(name: str, results: Any, **options: Any) -> Any:
        launched = call(name, results, **options)

        def with_opaque(*arrays: Any, opaque: bytes) -> Any:
            assert name == ops.HANDLER
            found.append(fields(zlib.decompress(opaque)))
            return launched(*arrays, opaque=opaque)

        return with_opaque

    monkeypatch.setattr(jax.ffi, "ffi_call", noted)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ops.HANDLER)]
    jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=allowed)(*given)
    return found


BY_PAIR = ("relative_bias", "band_bias")
"""Variants that compute dq in a separate pass, because their bias has a gradient for each pair."""

SHAPE = golden.Shape(batch=1, heads=4, kv_heads=2, seq=256, dim=64)


def arrays(dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    return [jnp.zeros((SHAPE.batch, SHAPE.seq, h, SHAPE.dim), dtype) for h in heads]


def kernel_of(message: Message) -> Message:
    return fields(fields(message[1][0])[1][0])


def test_a_call_names_its_kernel_and_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = messages(monkeypatch, ops.causal, *arrays())
    assert message[4] == [b"causal_fwd"]
    call = fields(message[1][0])
    kernel = kernel_of(message)
    assert kernel[1] == [b"causal_fwd"]
    assert kernel[6] == [90]
    blocks, warps = call[2][0] / SHAPE.heads, kernel[2][0]
    assert (call[3], call[4]) == ([1], [1])
    assert blocks in (2, 4)
    assert warps in (4, 8)
    image = fields(kernel[11][0])
    assert image[1][0].startswith(b"\x7fELF")
    assert (image[2], image[3]) == (kernel[1], kernel[3])


def test_kernels_ask_for_fused_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    compile_kernel = triton.compile

    def noted(*args: Any, options: dict[str, Any], **others: Any) -> Any:
        asked.append(options)
        return compile_kernel(*args, options=options, **others)

    monkeypatch.setattr(triton, "compile", noted)
    jax_kernels._compile.cache_clear()
    messages(monkeypatch, ops.causal, *[jnp.zeros((1, 33, 2, 16))] * 3)
    assert {options["enable_fp_fusion"] for options in asked} == {True}


def test_parameters_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers are divisible by 16, integers have 32 bits, and the scale is a float32."""
    (message,) = messages(monkeypatch, lambda *x: ops.causal(*x, scale=0.25), *arrays())
    parameters = [fields(p) for p in fields(message[1][0])[5]]
    pointers = [p for p in parameters if 1 in p]
    assert len(pointers) == 5  # q, k, v, o, lse
    assert all(fields(p[1][0])[2] == [16] for p in pointers)
    assert [struct.unpack("<f", p[7][0])[0] for p in parameters if 7 in p] == [0.25]
    text = kernel_of(message)[4][0].decode()
    entry = re.search(r"\.entry causal_fwd\((.*?)\)", text, re.DOTALL)
    assert entry is not None
    # After these parameters Triton's kernels have two pointers to scratch memory, which jaxlib adds.
    assert entry[1].count(".param") == len(parameters) + 2


def test_a_kernel_of_hopper_gets_the_memory_it_works_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer after its parameters points to a separate result; jaxlib adds two pointers, and one is not read."""
    made: list[Any] = []
    call = jax.ffi.ffi_call

    def noted(name: str, results: Any, **options: Any) -> Any:
        made.append(results)
        return call(name, results, **options)

    monkeypatch.setattr(jax.ffi, "ffi_call", noted)
    (message,) = messages(monkeypatch, lambda *x: ops.causal(*x, family="hopper"), *arrays())
    assert message[4] == [b"causal_hopper_fwd"]
    launched, kernel = fields(message[1][0]), kernel_of(message)
    programs = launched[2][0]
    assert programs == SHAPE.batch * SHAPE.heads * SHAPE.seq // 128
    assert kernel[2] == [12]
    (results,) = made
    assert [x.dtype for x in results] == [jnp.bfloat16, jnp.float32, jnp.int8]
    assert results[-1].size % (programs * 128) == 0
    parameters = [fields(p) for p in launched[5]]
    assert 1 in parameters[-1]
    text = kernel[4][0].decode()
    entry = re.search(r"\.entry causal_hopper_fwd\((.*?)\)", text, re.DOTALL)
    assert entry is not None
    assert entry[1].count(".param") == len(parameters) + 1
    assert "cp.async.bulk.tensor" in text
    assert "setmaxnreg" in text


def test_groups_of_query_heads_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key head, each of two query heads has dk and dv of its own: the kernel has four tensors."""
    q, k = jnp.zeros((1, 1024, 2, 64), jnp.bfloat16), jnp.zeros((1, 1024, 1, 64), jnp.bfloat16)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))

    def gradients(*x: jax.Array) -> Any:
        return jax.vjp(lambda *x: ops.causal(*x, family="hopper"), *x)[1](x[0])

    launched = {message[4][0].decode(): message for message in messages(monkeypatch, gradients, q, k, k)}
    assert {"causal_hopper_bwd", "add_head_groups"} < launched.keys()
    parameters = [fields(p) for p in fields(launched["add_head_groups"][1][0])[5]]
    assert sum(1 in p for p in parameters) == 4


def test_each_gradient_of_wide_heads_is_the_result_of_its_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second launch that filled the same tensor would fill a copy of it."""
    q, k = jnp.zeros((1, 1024, 2, 512), jnp.bfloat16), jnp.zeros((1, 1024, 1, 512), jnp.bfloat16)
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    made: list[list[tuple[int, ...]]] = []
    call = jax.ffi.ffi_call

    def noted(name: str, results: Any, **options: Any) -> Any:
        made.append([x.shape for x in results])
        return call(name, results, **options)

    monkeypatch.setattr(jax.ffi, "ffi_call", noted)

    def gradients(*x: jax.Array) -> Any:
        return jax.vjp(lambda *x: ops.causal(*x), *x)[1](x[0])

    names = [message[4][0].decode() for message in messages(monkeypatch, gradients, q, k, k)]
    results = [shapes for name, shapes in zip(names, made, strict=True) if "split" in name]
    assert names[:2] == ["causal_hopper_fwd_wide", "causal_hopper_delta"]
    assert [name for name in names if "split" in name] == [
        *(["causal_hopper_split_keys"] * 2),
        "causal_hopper_split_rows",
    ]
    # Beside it there may be a counter of the work.
    assert [sum(math.prod(shape) > 1 for shape in shapes) for shapes in results] == [1, 1, 1]


def as_tokens(entry: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
    """A tensor of a dense call in the shape that a packed call takes."""
    if entry["tensors"].get(name, {"dims": []})["dims"] == ["b", "h", "q_idx"]:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)
    per_key = name == "g" or "kv_idx" in entry["tensors"].get(name, {"dims": []})["dims"]
    return x.reshape(-1, *x.shape[2:]) if per_key else x


def gradient_kernels(
    monkeypatch: pytest.MonkeyPatch, variant: str, *, mode: str = "dense", **options: Any
) -> list[str]:
    """The kernels that a call and its gradients launch on an H100, in order; none is compiled."""
    # Nothing is launched, so any image will do: here an empty one, of a kernel without scratch memory.
    monkeypatch.setattr(jax_kernels, "_compile", lambda *_: (b"", 0))
    entry = golden.load_manifest()[variant]
    import torch

    inputs = golden.draw_inputs(entry, SHAPE, dtype=torch.bfloat16, device="cpu")
    tensors = {name: jnp.asarray(x.detach().numpy()) for name, x in inputs.tensors.items()}
    qkv = arrays()
    if mode == "packed":
        tensors = {name: as_tokens(entry, name, x) for name, x in tensors.items()}
        qkv = [x.reshape(-1, *x.shape[2:]) for x in qkv]
        options["cu_seqlens_q"] = jnp.arange(SHAPE.batch + 1, dtype=jnp.int32) * SHAPE.seq
    if mode == "segmented":
        places = jnp.arange(SHAPE.seq, dtype=jnp.int32)[None]
        options |= {"q_segment_ids": places // 100, "q_positions": places % 100}
    own = tensors | inputs.scalars

    def gradients(*x: jax.Array) -> Any:
        trained = {n: a for n, a in own.items() if hasattr(a, "dtype") and a.dtype == jnp.float32}
        fixed = {n: a for n, a in own.items() if n not in trained}
        op = getattr(ops, variant)
        results, pullback = jax.vjp(lambda own, *x: op(*x, **own, **fixed, return_lse=True, **options), trained, *x)
        return pullback(results)

    # A mode may run kernels of the dense mode.
    prefixes = re.compile(f"{variant}_({mode}_)?")
    return [prefixes.sub("", m[4][0].decode(), count=1) for m in messages(monkeypatch, gradients, *qkv)]


@pytest.mark.parametrize("mode", ["dense", "packed", "segmented"])
@pytest.mark.parametrize("variant", golden.load_manifest())
def test_kernels_of_hopper_are_launched(variant: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument is at its place: the arrays that a kernel fills follow those that it reads."""
    found = gradient_kernels(monkeypatch, variant, mode=mode, family="hopper", deterministic=False)
    sums_distances = variant == "relative_bias" and mode == "dense"
    by_pair = variant in BY_PAIR and not sums_distances
    backward = ["hopper_delta", "hopper_bwd"]
    is_fused = "bwd_dq" not in found
    assert is_fused != by_pair
    backward = [*backward, "hopper_dq_rows"] if is_fused else ["bwd_dq", *backward]
    backward += ["bwd_distances"] if sums_distances else []
    assert [name for name in found if name.startswith(("hopper", "bwd"))] == ["hopper_fwd", *backward]
    if not by_pair:
        found = gradient_kernels(monkeypatch, variant, mode=mode, family="hopper", deterministic=True)
        backward = [
            "hopper_fwd",
            "bwd_dq",
            "hopper_delta",
            "hopper_bwd",
            *(["bwd_distances"] if sums_distances else []),
        ]
        assert [name for name in found if name.startswith(("hopper", "bwd"))] == backward


def test_a_packed_call_of_hopper_gets_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter of the work that the programs share is 4 bytes after o and lse, which XLA sets to zero."""
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in arrays())
    begins = jnp.array([0, 100, q.shape[0]], jnp.int32)
    found = messages(monkeypatch, lambda *x: ops.causal(*x, cu_seqlens_q=begins, family="hopper"), q, k, v)
    (message,) = (m for m in found if m[4] == [b"causal_packed_hopper_fwd"])
    parameters = [fields(p) for p in fields(message[1][0])[5]]
    zeroed = [fields(p[1][0])[1][0] for p in parameters if 1 in p and 1 in fields(p[1][0])]
    assert zeroed == [4]
    text = kernel_of(message)[4][0].decode()
    assert "atom.global.gpu.relaxed.add.u32" in text


@pytest.mark.parametrize("variant", ["causal", "forgetting"])
def test_the_machine_code_is_that_of_torch(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout, strides and hints are the same, so that the compiler sees the same kernel."""
    entry = golden.load_manifest()[variant]
    import torch

    inputs = golden.draw_inputs(entry, SHAPE, dtype=torch.bfloat16, device="cpu")
    compiled = compile_call(variant, "sm_90", inputs, layout="bhsd", family="portable")
    q, k, v = (x.transpose(0, 2, 1, 3) for x in arrays())
    own = {"g": jnp.zeros((SHAPE.batch, SHAPE.seq, SHAPE.heads))} if entry["decay"] else {}

    def both(q: jax.Array, k: jax.Array, v: jax.Array, own: Any) -> Any:
        results, pullback = jax.vjp(
            lambda *x: getattr(ops, variant)(*x[:3], **x[3], layout="bhsd", family="portable", return_lse=True),
            q,
            k,
            v,
            own,
        )
        return pullback(results)

    found = {m[4][0].decode(): kernel_of(m)[4][0].decode() for m in messages(monkeypatch, both, q, k, v, own)}
    assert set(found) == set(compiled)
    for name, text in found.items():
        assert code(text) == code(compiled[name].asm["ptx"]), name
        if name.endswith("_fwd"):
            assert "cp.async" in text
            assert "wgmma" in text


def code(ptx: str) -> list[str]:
    """The instructions, without debug information and comments."""
    instructions, _, _ = ptx.partition("\n\t.section\t.debug")
    lines = (line.strip() for line in instructions.splitlines())
    return [line for line in lines if line and not line.startswith(("//", ".loc", ".file", "$L__tmp", "$L__func"))]


@pytest.mark.parametrize(("heads", "kernel"), [(128, "hopper_latent"), (16, "fwd")])
def test_latent_attention_on_caches_of_8_bits(monkeypatch: pytest.MonkeyPatch, heads: int, kernel: str) -> None:
    q, cache = jnp.zeros((2, 1, heads, 576), jnp.bfloat16), jnp.zeros((64, 64, 1, 576), jnp.float8_e4m3fn)
    table, lengths = jnp.zeros((2, 32), jnp.int32), jnp.asarray([2000, 7])

    def call(q: jax.Array, cache: jax.Array) -> Any:
        given: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "k_scale": 0.5, "v_scale": 0.5}
        return ops.causal(q, cache, values_in_keys=512, layout="bshd", **given)

    names = [message[4][0].decode() for message in messages(monkeypatch, call, q, cache)]
    assert names == ["causal_paged_plan", f"causal_paged_{kernel}", "merge_splits"]


PROMPTS: dict[str, tuple[int, int, int, dict[str, Any], list[str]]] = {
    "a long prompt": (128, 2000, 64, {}, ["prompt_blocks", "causal_paged_hopper_fwd"]),
    "more than 256 columns": (512, 2000, 64, {}, ["prompt_blocks", "causal_paged_hopper_fwd_wide"]),
    "asked for": (128, 40, 64, {"family": "hopper"}, ["prompt_blocks", "causal_paged_hopper_fwd"]),
    "the portable family": (128, 2000, 64, {"family": "portable"}, ["causal_paged_plan", "causal_paged_fwd"]),
    "scales": (128, 2000, 64, {"k_scale": 0.5, "v_scale": 0.5}, ["causal_paged_plan", "causal_paged_fwd"]),
    "small pages": (128, 2000, 8, {}, ["causal_paged_plan", "causal_paged_fwd"]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_on_pages(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dim, queries, size, options, kernels = PROMPTS[name]
    q = jnp.zeros((1, queries, 16, dim), jnp.bfloat16)
    k, v = (jnp.zeros((40_000 // size // 10, size, 2, dim), jnp.bfloat16) for _ in range(2))
    table, lengths = jnp.zeros((1, k.shape[0]), jnp.int32), jnp.asarray([3000])
    given: dict[str, Any] = {"page_table": table, "kv_lengths": lengths}

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return ops.causal(q, k, v, **given, **options)

    def planned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        plan = ops.causal.plan(q, k, **given, **{n: x for n, x in options.items() if n == "family"})
        return ops.causal(q, k, v, schedule=plan, **given, **options)

    def launched(call: Callable[..., Any]) -> list[str]:
        return [message[4][0].decode() for message in messages(monkeypatch, call, q, k, v)]

    assert [each for each in launched(call) if each != "merge_splits"] == kernels
    monkeypatch.setattr("generated._runtime.jax.paged.launches_on", lambda: "sm_90")
    if name == "scales":
        with pytest.raises(ValueError, match="schedule: expected a plan for the kernels of this call, portable"):
            launched(planned)
    else:
        assert [each for each in launched(planned) if each != "merge_splits"] == kernels


def test_latent_attention_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of values inside of keys is one for that kernel."""
    q, cache = jnp.zeros((1, 600, 40, 288), jnp.bfloat16), jnp.zeros((64, 64, 1, 288), jnp.bfloat16)
    table, lengths = jnp.zeros((1, 64), jnp.int32), jnp.asarray([3000])
    given: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "values_in_keys": 256}

    def call(q: jax.Array, cache: jax.Array) -> Any:
        return ops.causal(q, cache, schedule=ops.causal.plan(q, cache, **given), **given)

    monkeypatch.setattr("generated._runtime.jax.paged.launches_on", lambda: "sm_90")
    names = [message[4][0].decode() for message in messages(monkeypatch, call, q, cache)]
    assert names == ["causal_paged_plan", "causal_paged_hopper_latent", "merge_splits"]


def test_a_call_on_pages_fills_its_results_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward and the merge of each class of sequences write to the same memory of o and lse."""
    begins, lengths = jnp.asarray([0, 1, 2, 42]), jnp.asarray([2000, 7, 40])
    q, cache = jnp.zeros((42, 4, 64), jnp.bfloat16), jnp.zeros((64, 64, 2, 64), jnp.bfloat16)
    # The table has room for two parts of a prompt.
    table = jnp.zeros((3, 64), jnp.int32)

    def call(q: jax.Array, cache: jax.Array, lengths: jax.Array) -> Any:
        given: dict[str, Any] = {"page_table": table, "kv_lengths": lengths, "cu_seqlens_q": begins, "max_seqlen_q": 40}
        return ops.causal(q, cache, cache, return_lse=True, **given)

    found = messages(monkeypatch, call, q, cache, lengths)
    names = [message[4][0].decode() for message in found]
    classes = names.count("causal_paged_plan")
    assert classes > 1
    assert names == ["causal_paged_plan"] * classes + ["causal_paged_fwd", "merge_splits"] * classes
    monkeypatch.undo()
    monkeypatch.setenv(jax_kernels.ARCH_VARIABLE, "sm_90")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ops.HANDLER)]
    program = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=allowed)(q, cache, lengths)
    # Two aliases for each class: its merge continues in the memory of o and lse.
    assert program.mlir_module().count("output_operand_alias<") == 2 * classes
    alone = messages(
        monkeypatch, lambda q: ops.causal(q[None, :1], cache, cache, page_table=table[:1], kv_lengths=lengths[:1]), q
    )
    assert [message[4][0] for message in alone] == [b"causal_paged_plan", b"causal_paged_fwd", b"merge_splits"]
