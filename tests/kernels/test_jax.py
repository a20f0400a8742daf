"""Features of the JAX ops alone: scalars and seeds as arrays, schedules, errors while tracing; and bits as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from codegen.testing.golden_jax import array, load_op, tensor
from generated._runtime.core.checks import ArgumentError
from tests.support.cases import (
    DEVICE,
    DTYPES,
    INTERPRET,
    MANIFEST,
    VARIANTS,
    Shape,
    assert_same,
    draw,
    evaluate,
    tiles,
    with_variants,
)
from tests.support.packings import MIXED, draw_packed

pytestmark = pytest.mark.covers(family="portable", dtype="float16", framework="jax")

SMALL = Shape(batch=2, q_len=40, group=2, dim=32)
KINDS = ("causal", "alibi", "forgetting", "gpt_oss", "document")
Arguments = dict[str, Any]


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


CALLS: dict[str, Callable[[], Arguments]] = {
    "dense": dict,
    "packed": MIXED.options,
    "segments": lambda: {"q_segment_ids": ints([[0] * 12 + [1] * 18 + [-1] * 10, [3] * 40])},
    "positions": lambda: {
        "q_segment_ids": ints([[0] * 25 + [1] * 15, [0] * 40]),
        "q_positions": ints([[*range(25), *range(15)], [*range(40)]]),
    },
    "lengths": lambda: {"kv_lengths": ints([40, 19]), "q_offset": "end"},
}


@pytest.mark.parametrize(
    ("variant", "call"),
    [(variant, call) for call in CALLS for variant in (VARIANTS if call == "dense" or not INTERPRET else KINDS)],
)
def test_the_same_bits_as_torch(variant: str, call: str) -> None:
    """The same kernels on the same blocks. Gradients of the variant's own tensors are summed in another order."""
    options = CALLS[call]()
    inputs = draw_packed(variant, MIXED, DTYPES[0]) if call == "packed" else draw(variant, SMALL, DTYPES[0])
    want = evaluate(variant, inputs, config=tiles(32, 32), **options)
    got = evaluate(variant, inputs, framework="jax", config=tiles(32, 32), **options)
    for name, wanted in want.items():
        if name.removeprefix("d") in (*MANIFEST[variant]["tensors"], "sink"):
            torch.testing.assert_close(got[name], wanted, rtol=1e-4, atol=1e-4)
        else:
            assert_same(variant, name, got[name], wanted)


@pytest.mark.gpu
@with_variants
def test_the_same_call_has_the_same_bits(variant: str) -> None:
    inputs = draw(variant, SMALL, DTYPES[0])
    first, second = (evaluate(variant, inputs, framework="jax") for _ in range(2))
    for name, wanted in first.items():
        assert_same(variant, name, second[name], wanted)


def given(variant: str, shape: Shape = SMALL) -> tuple[list[jax.Array], Arguments]:
    """q, k, v `[B, H, S, D]` and the variant's own arguments."""
    inputs = draw(variant, shape, DTYPES[0])
    own = {name: array(x) for name, x in (inputs.tensors | inputs.scalars).items()}
    return [array(x) for x in (inputs.q, inputs.k, inputs.v)], {"layout": "bhsd", **own}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", [name for name, entry in MANIFEST.items() if entry["scalars"]])
def test_scalars_are_numbers_or_arrays(variant: str, packed: bool) -> None:
    """Kernels load arrays, while numbers are compiled into the launch.

    On a GPU these are two compiled kernels. They may fuse products and sums differently, and a weight that lies between
    two numbers of the dtype is then rounded to the other one.
    """
    inputs = draw_packed(variant, MIXED, DTYPES[0]) if packed else draw(variant, SMALL, DTYPES[0])
    options = MIXED.options() if packed else {}
    want = evaluate(variant, inputs, framework="jax", **options)
    arrays: dict[str, Any] = {name: jnp.asarray(x) for name, x in inputs.scalars.items()}
    inputs.scalars.update(arrays)
    got = evaluate(variant, inputs, framework="jax", **options)
    for name, wanted in want.items():
        if INTERPRET:
            assert_same(variant, name, got[name], wanted)
        else:
            largest = float(wanted[wanted.isfinite()].abs().max())
            torch.testing.assert_close(got[name], wanted, rtol=2**-7, atol=2**-9 * largest)


@pytest.mark.skipif(not INTERPRET or len(jax.devices()) < 2, reason="of Triton's interpreter, on several devices")
def test_sharded_arrays_are_not_interpreted_under_jit() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("heads",))
    by_heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "heads"))
    q = jax.device_put(jnp.ones((1, 2, 8, 16)), by_heads)
    with pytest.raises(NotImplementedError, match="causal: TRITON_INTERPRET=1 runs no sharded arrays under jit: call"):
        jax.jit(lambda q: load_op("causal")(q, q, q, layout="bhsd"))(q)


def test_seeds_are_numbers_arrays_and_keys() -> None:
    qkv, own = given("causal_dropout")
    op = load_op("causal_dropout")

    def dropped(seed: Any) -> np.ndarray:
        return np.asarray(op(*qkv, **own | {"seed": seed}), np.float32)

    np.testing.assert_array_equal(dropped(9), dropped(jnp.asarray(9)))
    np.testing.assert_array_equal(dropped(9), dropped(jnp.asarray(9, jnp.uint32)))
    assert (dropped(9) != dropped(10)).any()
    key = jax.random.key(3)
    np.testing.assert_array_equal(dropped(key), jax.jit(dropped_under(op, qkv, own))(key))
    assert (dropped(key) != dropped(jax.random.key(4))).any()


def dropped_under(op: Callable[..., Any], qkv: list[jax.Array], own: Arguments) -> Callable[[Any], jax.Array]:
    return lambda seed: op(*qkv, **own | {"seed": seed}).astype(jnp.float32)


@pytest.mark.parametrize("mode", ["dense", "packed", "segments"])
@pytest.mark.parametrize("variant", ["document", "natten", "causal"])
def test_a_schedule_changes_nothing(variant: str, mode: str) -> None:
    """Whether the schedule is made outside or inside of jit."""
    options = {name: array(x) for name, x in CALLS[mode]().items()}
    inputs = draw_packed(variant, MIXED, DTYPES[0]) if mode == "packed" else draw(variant, SMALL, DTYPES[0])
    own = {name: array(x) for name, x in (inputs.tensors | inputs.scalars).items()}
    layout = {} if mode == "packed" else {"layout": "bhsd"}
    q, k, v = (array(x) for x in (inputs.q, inputs.k, inputs.v))
    op: Any = load_op(variant)
    of_mask = {n: x for n, x in own.items() if n in MANIFEST[variant]["mask"]} if MANIFEST[variant]["mask"] else {}

    def loss(q: jax.Array, schedule: Any) -> Any:
        return (op(q, k, v, **own, **layout, **options, schedule=schedule).astype(jnp.float32) ** 2).sum()

    make = lambda: op.schedule(q, k, v, **of_mask, **layout, **options)  # noqa: E731 - one expression, used twice
    want = jax.jit(jax.value_and_grad(lambda q: loss(q, None)))(q)
    for got in (
        jax.jit(jax.value_and_grad(loss))(q, make()),
        jax.jit(jax.value_and_grad(lambda q: loss(q, make())))(q),
    ):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("variant", ["alibi", "forgetting"])
def test_layouts(variant: str) -> None:
    qkv, own = given(variant)
    want = load_op(variant)(*qkv, **own)
    turned = [x.transpose(0, 2, 1, 3) for x in qkv]
    got = load_op(variant)(*turned, **own | {"layout": "bshd"})
    np.testing.assert_array_equal(np.asarray(got.transpose(0, 2, 1, 3), np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", KINDS)
def test_nothing_to_attend_from_or_to(variant: str, packed: bool, q_len: int, kv_len: int) -> None:
    """Without rows, or with rows that have no key, o and all gradients are 0."""
    shape = Shape(q_len=q_len, kv_len=kv_len, dim=32)
    inputs = draw(variant, shape, DTYPES[0])
    qkv = [array(x) for x in (inputs.q, inputs.k, inputs.v)]
    own = {name: array(x) for name, x in (inputs.tensors | inputs.scalars).items()}
    options: Arguments = {"layout": "bhsd"}
    if packed:
        qkv = [x[0].transpose(1, 0, 2) for x in qkv]
        own = {name: x[0, :kv_len] if name in ("doc", "g") else x for name, x in own.items()}
        options = {
            "cu_seqlens_q": jnp.asarray([0, q_len], jnp.int32),
            "cu_seqlens_k": jnp.asarray([0, kv_len], jnp.int32),
        }
    op = load_op(variant)
    grads = jax.jit(jax.grad(lambda q, k, v: op(q, k, v, **own, **options).astype(jnp.float32).sum(), (0, 1, 2)))(*qkv)
    assert (op(*qkv, **own, **options) == 0).all()
    assert all((grad == 0).all() for grad in grads)


def test_a_negative_scale_and_one_of_zero() -> None:
    inputs = draw("causal", SMALL, DTYPES[0])
    for scale in (-0.2, 0.0, 0.3):
        got = evaluate("causal", inputs, framework="jax", scale=scale)
        for name, wanted in evaluate("causal", inputs, scale=scale).items():
            assert_same("causal", name, got[name], wanted)


def test_tokens_of_64_bits_and_tensors_of_any_float() -> None:
    """They are cast to the dtypes that the kernels read; gradients have the dtypes of the tensors."""
    (q, k, v), own = given("alibi")
    ids = np.asarray([[0] * 20 + [1] * 20, [3] * 40])

    def gradient(slope: Any, ids: Any) -> Any:
        op = load_op("alibi")
        return jax.grad(lambda x: op(q, k, v, **own | {"slope": x}, q_segment_ids=ids).astype(jnp.float32).sum())(slope)

    slope = own["slope"].astype(jnp.bfloat16)
    want = gradient(slope.astype(jnp.float32), jnp.asarray(ids, jnp.int32)).astype(jnp.bfloat16)
    with jax.enable_x64(True):
        got = gradient(slope, jnp.asarray(ids))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_derivatives_that_do_not_exist_are_refused() -> None:
    """The error is the same as on the CPU."""
    (q, k, v), own = given("causal")

    def first(q: jax.Array) -> Any:
        return jax.grad(lambda q: load_op("causal")(q, k, v, **own).astype(jnp.float32).sum())(q)

    with pytest.raises(NotImplementedError, match=r"^causal: second derivatives, and those in forward mode, are not"):
        jax.grad(lambda q: first(q).astype(jnp.float32).sum())(q)


def test_gradients_that_nobody_wants_are_not_gathered() -> None:
    qkv, own = given("alibi")
    op = load_op("alibi")
    slope = own.pop("slope")

    def loss(q: jax.Array, slope: jax.Array) -> Any:
        return op(q, *qkv[1:], slope=slope, **own).astype(jnp.float32).sum()

    both = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(qkv[0], slope))
    alone = str(jax.make_jaxpr(jax.grad(loss))(qkv[0], slope))
    assert "wanted=('slope',)" in both
    assert "wanted=()" in alone


# -------------------------------------------------------------------------------------------------------------- errors

ERRORS: dict[str, tuple[str, Callable[[], Arguments], str]] = {
    "no_array": ("causal", lambda: {"q": [1.0]}, "q: expected a jax.Array, got list"),
    "tensor_of_torch": ("causal", lambda: {"k": torch.zeros(2)}, "k: expected a jax.Array, got Tensor"),
    "rank": ("causal", lambda: dict.fromkeys("qkv", jnp.zeros((4, 8, 32))), r"q: expected 4 dimensions \[B, H, S, D\]"),
    "dtype": (
        "causal",
        lambda: dict.fromkeys("qkv", jnp.zeros((2, 2, 6, 32), jnp.int32)),
        "q: expected dtype float16, bfloat16 or float32, got int32",
    ),
    "dtype_of_k": ("causal", lambda: {"k": jnp.zeros((2, 2, 40, 32), jnp.float32)}, "k: expected dtype .*, that of q"),
    "layout": ("causal", lambda: {"layout": "sbhd"}, "layout: expected 'bhsd' or 'bshd', got 'sbhd'"),
    "scale": ("causal", lambda: {"scale": float("nan")}, "scale: expected a finite number or None, got nan"),
    "missing": ("alibi", lambda: {"slope": None}, r"slope: expected a jax.Array of shape \[2\], got nothing"),
    "shape": ("alibi", lambda: {"slope": jnp.zeros(3)}, r"slope: expected shape \[2\], got \[3\]"),
    "dtype_of_own": (
        "alibi",
        lambda: {"slope": jnp.zeros(2, jnp.int32)},
        "slope: expected a floating-point dtype, got int32",
    ),
    "scalar_out_of_range": ("window", lambda: {"size": 0}, "size: expected an int of at least 1, got 0"),
    "array_out_of_range": ("window", lambda: {"size": np.asarray(0)}, "size: expected an int of at least 1, got 0"),
    "scalar_of_floats": ("window", lambda: {"size": 1.5}, "size: expected an int"),
    "array_of_floats": (
        "window",
        lambda: {"size": jnp.asarray(1.5)},
        r"size: expected an int or an integer array \[\]",
    ),
    "no_scalar": (
        "window",
        lambda: {"size": jnp.zeros(3, jnp.int32)},
        r"size: expected an int or an integer array \[\]",
    ),
    "offset_word": ("causal", lambda: {"q_offset": "start"}, "q_offset: expected an int, 'end' or an integer array"),
    "offset_shape": ("causal", lambda: {"q_offset": jnp.zeros(3, jnp.int32)}, r"q_offset: expected .* array \[2\]"),
    "segment_ids": (
        "causal",
        lambda: {"q_segment_ids": jnp.zeros((2, 9), jnp.int32)},
        r"q_segment_ids: expected an integer array \[2, 40\]",
    ),
    "positions_of_keys": (
        "causal",
        lambda: {"kv_positions": jnp.zeros((2, 40), jnp.int32)},
        "q_positions: expected .* beside kv_positions",
    ),
    "lengths": ("causal", lambda: {"kv_lengths": jnp.zeros(2)}, r"kv_lengths: expected an integer array \[2\]"),
    "begins": ("causal", lambda: {"cu_seqlens_q": [0, 70]}, "q: expected 3 dimensions"),
    "config": ("causal", lambda: {"config": {"fwd": {}}}, r"config\['fwd'\]: expected a mapping"),
    "schedule": ("causal", lambda: {"schedule": 3}, "schedule: expected what causal.schedule"),
    "seed": ("causal_dropout", lambda: {"seed": None}, "seed: expected an int, a key of jax.random"),
    "dropout_p": ("causal_dropout", lambda: {"dropout_p": 1.0}, "dropout_p: expected a number from 0 to below 1"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_arguments(case: str) -> None:
    """One error, the same under jit, before anything is launched."""
    variant, change, message = ERRORS[case]
    qkv, own = given(variant)
    call = dict(zip("qkv", qkv, strict=True)) | own | change()
    for wrapped in (lambda f: f, jax.jit):
        with pytest.raises(ArgumentError, match=f"^{variant}: {message}") as caught:
            wrapped(lambda: load_op(variant)(**call))()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)


def test_a_traced_scale_is_refused() -> None:
    qkv, own = given("causal")
    with pytest.raises(ArgumentError, match="scale: expected a Python number, known while tracing"):
        jax.jit(lambda scale: load_op("causal")(*qkv, **own, scale=scale))(0.1)


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        ([1, 70], "cu_seqlens_q: expected a first value of 0, got 1"),
        ([0, 80, 70], "cu_seqlens_q: expected values that never decrease, got 80 at index 1 and 70 at index 2"),
        ([0, 60], "cu_seqlens_q: expected a last value of 70, the rows of q, got 60"),
    ],
)
def test_begins_that_are_known_are_checked(begins: list[int], message: str) -> None:
    qkv, _ = given("causal", Shape(q_len=70, dim=32))
    packed = [x[0].transpose(1, 0, 2) for x in qkv]
    with pytest.raises(ArgumentError, match=message):
        load_op("causal")(*packed, cu_seqlens_q=np.asarray(begins, np.int32))


def test_a_traced_offset_serves_all_rows() -> None:
    inputs = draw("causal", SMALL, DTYPES[0])
    want = evaluate("causal", inputs, q_offset=7)["o"]
    qkv = [array(x) for x in (inputs.q, inputs.k, inputs.v)]
    got = jax.jit(lambda offset: load_op("causal")(*qkv, layout="bhsd", q_offset=offset))(7)
    assert_same("causal", "o", tensor(got), want)


def test_gradients_by_position_with_an_offset_per_batch_row() -> None:
    """An array of offsets is a tensor of the launches, from which the places of sums are computed."""
    qkv, own = given("relative_bias")

    def gradient(offset: Any) -> np.ndarray:
        def total(bias: jax.Array) -> jax.Array:
            o: jax.Array = load_op("relative_bias")(*qkv, **own | {"bias": bias}, q_offset=offset)
            return jnp.square(o.astype(jnp.float32)).sum()

        return np.asarray(jax.grad(total)(own["bias"]))

    np.testing.assert_allclose(gradient(jnp.asarray([9, 9])), gradient(9), atol=1e-4, rtol=1e-4)
