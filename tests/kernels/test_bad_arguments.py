"""Every bad argument raises one `ArgumentError` that names the op and the argument, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from generated._runtime.core.checks import ArgumentError, check_float, check_int
from tests.support.cases import DEVICE, INTERPRET, MANIFEST, VARIANTS, Shape, draw, own_names, with_variants

Arguments = dict[str, Any]
# The device's name in messages. No tensor is made before the tests run, because there may be no GPU.
AT = "cpu" if INTERPRET else "cuda:0"


def arguments(variant: str = "causal") -> Arguments:
    """A good call: q [2, 4, 8, 32], k [2, 2, 6, 32], v [2, 2, 6, 16], float16."""
    inputs = draw(variant, Shape(batch=2, kv_heads=2, group=2, q_len=8, kv_len=6, dim=32, dim_v=16))
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.tensors, **inputs.scalars}


def zeros(*sizes: int, dtype: torch.dtype = torch.float16, device: str = DEVICE) -> Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


def message(variant: str, call: Arguments) -> str:
    call = dict(call)
    with pytest.raises(ArgumentError) as caught:
        golden.load_op(variant)(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


TILE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}

# a name, the arguments that are changed in a good call of `causal`, and the message
SHARED: list[tuple[str, Callable[[], Arguments], str]] = [
    ("no_tensor", lambda: {"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    ("none", lambda: {"v": None}, "v: expected a torch.Tensor, got NoneType"),
    (
        "rank_3",
        lambda: {"q": zeros(4, 8, 32)},
        "q: expected 4 dimensions [B, H, S, D], got 3 dimensions [4, 8, 32]",
    ),
    (
        "rank_of_v",
        lambda: {"v": zeros(1, 2, 2, 6, 16)},
        "v: expected 4 dimensions [B, H, S, D], got 5 dimensions [1, 2, 2, 6, 16]",
    ),
    (
        "batch",
        lambda: {"k": zeros(3, 2, 6, 32)},
        "k: expected batch size 2, that of q, got 3 in [B, H, S, D] = [3, 2, 6, 32]",
    ),
    (
        "heads_of_v",
        lambda: {"v": zeros(2, 4, 6, 16)},
        "v: expected 2 heads, as many as k, got 4 in [B, H, S, D] = [2, 4, 6, 16]",
    ),
    (
        "no_multiple",
        lambda: {"q": zeros(2, 3, 8, 32)},
        "q: expected a head count that is a multiple of k's 2, got 3 in [B, H, S, D] = [2, 3, 8, 32]",
    ),
    (
        "no_heads",
        lambda: {"q": zeros(2, 0, 8, 32)},
        "q: expected a head count that is a multiple of k's 2, got 0 in [B, H, S, D] = [2, 0, 8, 32]",
    ),
    (
        "length_of_v",
        lambda: {"v": zeros(2, 2, 7, 16)},
        "v: expected sequence length 6, that of k, got 7 in [B, H, S, D] = [2, 2, 7, 16]",
    ),
    (
        "head_dim_of_k",
        lambda: {"k": zeros(2, 2, 6, 16)},
        "k: expected head_dim 32, that of q, got 16 in [B, H, S, D] = [2, 2, 6, 16]",
    ),
    (
        "head_dim_7",
        lambda: {"q": zeros(2, 4, 8, 7), "k": zeros(2, 2, 6, 7)},
        "q: expected a head_dim from 8 to 512, got 7 in [B, H, S, D] = [2, 4, 8, 7]",
    ),
    (
        "head_dim_of_v_513",
        lambda: {"v": zeros(2, 2, 6, 513)},
        "v: expected a head_dim from 8 to 512, got 513 in [B, H, S, D] = [2, 2, 6, 513]",
    ),
    (
        "layout_in_the_message",
        lambda: {"layout": "bshd"},
        "q: expected a head count that is a multiple of k's 6, got 8 in [B, S, H, D] = [2, 4, 8, 32]",
    ),
    (
        "dtype_float64",
        lambda: {name: zeros(2, 2, 6, 32, dtype=torch.float64) for name in "qkv"},
        "q: expected dtype float16, bfloat16 or float32, got torch.float64",
    ),
    (
        "dtype_int",
        lambda: {"q": zeros(2, 4, 8, 32, dtype=torch.int32)},
        "q: expected dtype float16, bfloat16 or float32, got torch.int32",
    ),
    (
        "dtype_of_k",
        lambda: {"k": zeros(2, 2, 6, 32, dtype=torch.float32)},
        "k: expected dtype torch.float16, that of q, got torch.float32",
    ),
    (
        "device_of_v",
        lambda: {"v": zeros(2, 2, 6, 16, device="meta")},
        f"v: expected device {AT}, that of q, got meta",
    ),
    (
        "nested_q",
        lambda: {"q": torch.nested.nested_tensor([zeros(8, 4, 32)] * 2, layout=torch.jagged)},
        "q: expected a tensor that is not nested: pass its values, and its offsets as cu_seqlens, "
        "got a nested tensor, layout torch.jagged",
    ),
    (
        "sparse_v",
        lambda: {"v": zeros(2, 2, 6, 16).to_sparse()},
        "v: expected layout torch.strided, got torch.sparse_coo",
    ),
    (
        "sparse_q_offset",
        lambda: {"q_offset": zeros(2, dtype=torch.int32).to_sparse()},
        "q_offset: expected layout torch.strided, got torch.sparse_coo",
    ),
    (
        "sparse_kv_lengths",
        lambda: {"kv_lengths": zeros(2, dtype=torch.int64).to_sparse()},
        "kv_lengths: expected layout torch.strided, got torch.sparse_coo",
    ),
    (
        "q_offset_list",
        lambda: {"q_offset": [1, 2]},
        "q_offset: expected an int, 'end' or an integer tensor, got [1, 2]",
    ),
    ("layout", lambda: {"layout": "bsdh"}, "layout: expected 'bhsd' or 'bshd', got 'bsdh'"),
    ("layout_none", lambda: {"layout": None}, "layout: expected 'bhsd' or 'bshd', got None"),
    ("scale_nan", lambda: {"scale": float("nan")}, "scale: expected a finite number or None, got nan"),
    ("scale_inf", lambda: {"scale": float("-inf")}, "scale: expected a finite number or None, got -inf"),
    (
        "scale_near_the_end",
        lambda: {"scale": 3e38},
        "scale: expected a number between -2**127 and 2**127, or None, got 3e+38",
    ),
    ("scale_too_large", lambda: {"scale": 1e39}, "scale: expected a number that float32 holds, got 1e+39"),
    ("scale_str", lambda: {"scale": "0.1"}, "scale: expected a finite number or None, got '0.1'"),
    ("scale_bool", lambda: {"scale": True}, "scale: expected a finite number or None, got True"),
    ("offset_str", lambda: {"q_offset": "start"}, "q_offset: expected an int, 'end' or an integer tensor, got 'start'"),
    ("offset_float", lambda: {"q_offset": 1.0}, "q_offset: expected an int from -536870912 to 536870912, got 1.0"),
    ("offset_bool", lambda: {"q_offset": True}, "q_offset: expected an int from -536870912 to 536870912, got True"),
    (
        "offset_too_large",
        lambda: {"q_offset": 2**30 + 1},
        "q_offset: expected an int from -536870912 to 536870912, got 1073741825",
    ),
    (
        "offset_dtype",
        lambda: {"q_offset": zeros(2, dtype=torch.float32)},
        f"q_offset: expected an int, 'end' or an integer tensor [2] on {AT}, got torch.float32 [2] on {AT}",
    ),
    (
        "offset_shape",
        lambda: {"q_offset": zeros(3, dtype=torch.int32)},
        f"q_offset: expected an int, 'end' or an integer tensor [2] on {AT}, got torch.int32 [3] on {AT}",
    ),
    ("config_list", lambda: {"config": [TILE]}, f"config: expected None or a dict of pass name -> tile, got [{TILE}]"),
    (
        "config_pass",
        lambda: {"config": {"bwd": TILE}},
        "config: expected passes among fwd, dkdv, dq, decode, paged_fwd, got 'bwd'",
    ),
    (
        "config_missing_field",
        lambda: {"config": {"fwd": {"block_m": 64}}},
        "config['fwd']: expected a mapping with block_m, block_n, num_warps, num_stages, got {'block_m': 64}",
    ),
    (
        "config_unknown_field",
        lambda: {"config": {"dq": TILE | {"waves": 2}}},
        f"config['dq']: expected a mapping with block_m, block_n, num_warps, num_stages, got {TILE | {'waves': 2}}",
    ),
    (
        "config_no_power_of_two",
        lambda: {"config": {"dkdv": TILE | {"block_n": 48}}},
        "config['dkdv']['block_n']: expected a power of two from 16 to 256, got 48",
    ),
    (
        "config_block_too_small",
        lambda: {"config": {"dkdv": TILE | {"block_m": 8}}},
        "config['dkdv']['block_m']: expected a power of two from 16 to 256, got 8",
    ),
    (
        "config_warps",
        lambda: {"config": {"fwd": TILE | {"num_warps": 32}}},
        "config['fwd']['num_warps']: expected a power of two from 1 to 16, got 32",
    ),
    (
        "config_stages",
        lambda: {"config": {"fwd": TILE | {"num_stages": 0}}},
        "config['fwd']['num_stages']: expected an int from 1 to 8, got 0",
    ),
    (
        "config_float",
        lambda: {"config": {"fwd": TILE | {"block_m": 64.0}}},
        "config['fwd']['block_m']: expected a power of two from 16 to 256, got 64.0",
    ),
]


@pytest.mark.parametrize(("change", "text"), [pytest.param(*rest, id=name) for name, *rest in SHARED])
def test_shared_arguments(change: Callable[[], Arguments], text: str) -> None:
    assert message("causal", arguments() | change()) == f"causal: {text}"


@with_variants
def test_every_op_checks_its_shared_arguments(variant: str) -> None:
    good = arguments(variant)
    bad: Arguments = {"q": zeros(2, 3, 8, 32), "k": zeros(2, 2, 6, 64), "v": None, "scale": "1", "layout": 1}
    bad |= {"q_offset": 0.5, "config": 3}
    for name, value in bad.items():
        assert message(variant, good | {name: value}).startswith(f"{variant}: {name}: expected ")


@with_variants
def test_every_argument_of_its_own_is_asked_for(variant: str) -> None:
    for name in own_names(variant):
        call = arguments(variant)
        del call[name]
        assert message(variant, call).startswith(f"{variant}: {name}: expected ")
    entry = MANIFEST[variant]
    for name in set(own_names(variant)) - entry["scalars"].keys():
        good = arguments(variant)
        for value in (zeros(1, 1, 1, 1, 1), zeros(3, dtype=torch.complex64), 1.0, good[name].to("meta")):
            assert message(variant, good | {name: value}).startswith(f"{variant}: {name}: expected ")


OWN: list[tuple[str, str, Callable[[], Any], str]] = [
    ("alibi", "slope", lambda: None, "expected a torch.Tensor of shape [4], got nothing"),
    ("alibi", "slope", lambda: 0.5, "expected a torch.Tensor of shape [4], got float"),
    ("alibi", "slope", lambda: zeros(2, dtype=torch.float32), "expected shape [4], got [2]"),
    ("alibi", "slope", lambda: zeros(4, 1, dtype=torch.float32), "expected shape [4], got [4, 1]"),
    ("alibi", "slope", lambda: zeros(4, dtype=torch.int64), "expected a floating-point dtype, got torch.int64"),
    (
        "alibi",
        "slope",
        lambda: zeros(4, dtype=torch.float32, device="meta"),
        f"expected device {AT}, that of q, got meta",
    ),
    (
        "alibi",
        "slope",
        lambda: zeros(4, dtype=torch.float32).to_sparse(),
        "expected layout torch.strided, got torch.sparse_coo",
    ),
    (
        "document",
        "doc",
        lambda: zeros(2, 8, dtype=torch.int32).to_sparse(),
        "expected layout torch.strided, got torch.sparse_coo",
    ),
    ("gpt_oss", "sink", lambda: None, "expected a torch.Tensor of shape [4], got nothing"),
    ("gpt_oss", "sink", lambda: zeros(2), "expected shape [4], got [2]"),
    (
        "gpt_oss",
        "sink",
        lambda: zeros(4, dtype=torch.int32),
        "expected a floating-point dtype, got torch.int32",
    ),
    ("forgetting", "g", lambda: None, "expected a torch.Tensor of shape [2, >=8, 4], got nothing"),
    ("forgetting", "g", lambda: zeros(2, 7, 4), "expected shape [2, >=8, 4], got [2, 7, 4]"),
    ("forgetting", "g", lambda: zeros(2, 4, 8), "expected shape [2, >=8, 4], got [2, 4, 8]"),
    (
        "forgetting",
        "g",
        lambda: zeros(2, 8, 4, dtype=torch.bool),
        "expected a floating-point dtype, got torch.bool",
    ),
    ("window", "size", lambda: None, "expected an int of at least 1, got None"),
    ("window", "size", lambda: 3.0, "expected an int of at least 1, got 3.0"),
    ("window", "size", lambda: True, "expected an int of at least 1, got True"),
    ("window", "size", lambda: 0, "expected an int of at least 1, got 0"),
    ("window", "size", lambda: -3, "expected an int of at least 1, got -3"),
    (
        "document",
        "doc",
        lambda: zeros(2, 8, dtype=torch.bool),
        "expected dtype torch.int32 or another of integers, got torch.bool",
    ),
    ("window", "size", lambda: zeros(dtype=torch.float32, device="cpu"), "expected an int of at least 1, got 0.0"),
    (
        "window",
        "size",
        lambda: zeros(device="meta"),
        "expected a number, or a tensor [] on the CPU: no call waits for the device, got a tensor [] on meta; its "
        "item() waits",
    ),
    ("window", "size", lambda: 2**31, "expected an int of at most 2**30 either way, got 2147483648"),
]


@pytest.mark.parametrize(("variant", "name", "value", "text"), OWN)
def test_own_arguments(variant: str, name: str, value: Callable[[], Any], text: str) -> None:
    if variant not in VARIANTS:
        pytest.skip(f"the package has no variant {variant}")
    assert message(variant, arguments(variant) | {name: value()}) == f"{variant}: {name}: {text}"


@pytest.mark.parametrize(
    ("check", "value", "limits", "text"),
    [
        (check_int, 9, {"minimum": 1, "maximum": 8}, "an int from 1 to 8, got 9"),
        (check_int, 9, {"maximum": 8}, "an int of at most 8, got 9"),
        (check_int, "9", {"maximum": 8}, "an int of at most 8, got '9'"),
        (check_float, 0, {"minimum": 0.5}, "a number of at least 0.5, got 0"),
        (check_float, 2.5, {"minimum": -1.0, "maximum": 1.5}, "a number from -1.0 to 1.5, got 2.5"),
        (check_float, float("nan"), {"maximum": 1.5}, "a number of at most 1.5, got nan"),
        (check_float, None, {}, "a number, got None"),
        (check_float, -1e300, {}, "a number that float32 holds, got -1e+300"),
        (check_float, 10**400, {}, "a number that float32 holds, got a larger int"),
    ],
)
def test_ranges_of_scalars(check: Callable[..., Any], value: object, limits: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check("op", "x", value, **limits)
    assert str(caught.value) == f"op: x: expected {text}"
    assert check("op", "x", 1, **limits) == 1


@pytest.mark.parametrize("value", [2, 2.0, np.int64(2), np.float64(2.0), torch.tensor(2), float("inf")])
def test_a_scalar_of_floats_is_a_python_float(value: object) -> None:
    assert type(check_float("op", "x", value)) is float  # an int's logarithm does not compile


def test_a_decay_reaches_as_far_as_the_offset_takes_the_queries() -> None:
    if "forgetting" not in VARIANTS:
        pytest.skip("the package has no variant forgetting")
    text = message("forgetting", arguments("forgetting") | {"q_offset": 5})
    assert text == "forgetting: g: expected shape [2, >=13, 4], got [2, 8, 4]"


@pytest.mark.gpu
def test_devices_that_differ() -> None:
    text = message("causal", arguments() | {"k": zeros(2, 2, 6, 32, device="cpu")})
    assert text == f"causal: k: expected device {AT}, that of q, got cpu"


@with_variants
def test_an_unknown_argument(variant: str) -> None:
    good = arguments(variant)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        golden.load_op(variant)(good.pop("q"), good.pop("k"), good.pop("v"), **good, scales=1.0)
