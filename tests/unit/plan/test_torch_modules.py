"""The ops as modules of `torch.nn`: the parameters that they hold, and the results of their calls."""

from __future__ import annotations

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import generated.torch
from codegen.plan.ops.torch_modules import MODULE_NAMES, class_name
from generated._runtime.core.checks import ArgumentError
from generated._runtime.core.settings import INTERPRET
from generated.torch.nn import Alibi, CausalDropout, GptOss, RelativeBias, Window
from tests.support.paths import ROOT
from tests.support.rendering import importable

# Any: an op also returns lse if a call asks for it, which its annotation does not express.
ops: Any = generated.torch

pytestmark = pytest.mark.skipif(INTERPRET, reason="computes references")

HEADS, KV_HEADS, ROWS, DIM = 4, 2, 6, 16

SPEC = """
variants:
  own_state:
    mask: causal and kv_idx >= start[b]
    score: >-
      score + table[h, i % 3] + hold[hkv] + far[clamp(q_idx - kv_idx, 0, 9)] * cap + device_[0]
    tensors:
      table: {dims: [h, 3], grad: true, example: "0.5 * h + i1"}
      hold: {dims: [hkv], grad: true, example: "exp(-0.5 * hkv)"}
      far: {dims: [heads], grad: true}
      device_: {dims: [device], grad: true, example: "1.5"}
      start: {dims: [b], dtype: int32}
    scalars: {cap: float, i: int}
    sink: true
    decay: true
  own__state: {mask: causal}
  none: {mask: causal}
  computed:
    score: score + bias[h, q_idx - kv_idx + size] + pairs[abs(q_idx - kv_idx), 0] + rows[b, 0]
    tensors:
      bias: {dims: [h, 2 * size + 1], grad: true, example: i1 - i0}
      pairs: {dims: [n, n * n], grad: true}
      rows: {dims: [b, 2 * b], grad: true}
    scalars: {size: {type: int, min: 0}}
  renamed:
    score: score + near[h, clamp(q_idx - kv_idx + heads, 0, 2 * heads)]
    tensors: {near: {dims: [h, 2 * heads + 1], grad: true}}
    scalars: {heads: {type: int, min: 0}}
  parameters:
    score: score + temper[h] + per_key[b, kv_idx]
    tensors: {temper: {dims: [h], grad: true}, per_key: {dims: [b, kv_idx], grad: true}}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The rendered modules."""
    with importable(tmp_path_factory.mktemp("modules"), "module_variants", SPEC) as package:
        yield importlib.import_module(f"{package.name}.torch.nn")


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, ROWS, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def test_the_name_of_a_class_is_no_keyword(own: Any) -> None:
    ops = importlib.import_module(own.__name__.removesuffix(".nn"))
    assert own.None_.op is ops.none


@pytest.mark.parametrize("variant", generated.torch.__all__)
def test_every_variant_has_a_module(variant: str) -> None:
    module = getattr(generated.torch.nn, class_name(variant))
    assert module.op is getattr(generated.torch, variant)
    assert module.__name__ in generated.torch.nn.__all__
    for name in list(inspect.signature(module.__init__).parameters)[1:]:
        assert f"{name}: " in module.__doc__, name


def test_modules_are_imported_when_they_are_asked_for() -> None:
    code = "import sys, generated.torch as t; print('generated.torch.nn' in sys.modules, t.nn.Alibi.__module__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False generated.alibi.torch_op\n"


def test_a_module_calls_its_op_with_what_it_holds() -> None:
    q, k, v = qkv()
    module = Alibi(HEADS)
    module.slope.data.copy_(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    o, lse = module(q, k, v, return_lse=True, q_offset=1)
    want, want_lse = generated.torch.alibi(q, k, v, slope=module.slope.detach(), return_lse=True, q_offset=1)
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)
    o.square().sum().backward()
    assert module.slope.grad is not None
    assert module.slope.grad.abs().min() > 0


def test_shapes_follow_from_the_dims_and_hold_zeros_without_an_example() -> None:
    bias = RelativeBias(HEADS, 9).bias
    assert (bias.shape, bias.dtype, bool(bias.any())) == ((HEADS, 9), torch.float32, False)
    assert GptOss(HEADS).sink.tolist() == [0.0] * HEADS


def test_state_is_saved_loaded_copied_and_cast() -> None:
    module = GptOss(HEADS)
    torch.nn.init.normal_(module.sink)
    other = GptOss(HEADS)
    assert other.load_state_dict(module.state_dict()).missing_keys == []
    assert torch.equal(other.sink, module.sink)
    copied = copy.deepcopy(module)
    assert copied.sink is not module.sink
    half = copied.bfloat16()
    assert half.sink.dtype == torch.bfloat16
    half(*qkv(torch.bfloat16)).sum().backward()
    assert half.sink.grad is not None
    assert half.sink.grad.dtype == torch.bfloat16
    assert Alibi(HEADS, dtype=torch.float16).to(torch.float64).slope.dtype == torch.float64


def test_the_meta_device_has_shapes_alone(own: Any) -> None:
    module = own.OwnState(HEADS, KV_HEADS, 10, 1, device="meta")
    assert {x.device.type for x in module.parameters()} == {"meta"}
    there = module.to_empty(device="cpu")
    there.reset_parameters()
    expected = own.OwnState(HEADS, KV_HEADS, 10, 1).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in there.state_dict().items())


def test_examples_are_what_parameters_hold_at_first(own: Any) -> None:
    """Arguments with a name that the constructor uses itself get another name."""
    signature = inspect.signature(own.OwnState)
    assert list(signature.parameters) == ["heads", "kv_heads", "heads_", "device_", "cap", "i", "device", "dtype"]
    module = own.OwnState(HEADS, KV_HEADS, 10, 1, cap=0.5)
    state = {name: x.tolist() for name, x in module.state_dict().items()}
    assert state["table"] == [[0.5 * h + i for i in range(3)] for h in range(HEADS)]
    assert state["hold"] == pytest.approx([1.0, 0.6065307])
    assert state["far"] == [0.0] * 10
    assert state["device_"] == [1.5]
    assert state["sink"] == [0.0] * HEADS
    assert len(state) == 5


def test_scalars_of_the_constructor_are_defaults(own: Any) -> None:
    q, k, v = qkv()
    assert torch.equal(Window(size=2)(q, k, v), ops.window(q, k, v, size=2))
    assert torch.equal(Window(size=2)(q, k, v, size=3), ops.window(q, k, v, size=3))
    with pytest.raises(ArgumentError, match=r"^window: size: expected an int"):
        Window()(q, k, v)
    module = own.OwnState(HEADS, KV_HEADS, 10, 1, cap=0.5)
    call = {"start": torch.zeros(2, dtype=torch.int32), "g": torch.zeros(2, ROWS, HEADS)}
    held = {name: x.detach() for name, x in module.named_parameters()}
    assert torch.equal(module(q, k, v, i=1, **call), module.op(q, k, v, cap=0.5, i=1, **held, **call))


def test_computed_dims_take_the_numbers_that_they_are_computed_from(own: Any) -> None:
    assert list(inspect.signature(own.Computed).parameters) == ["heads", "size", "n", "device", "dtype"]
    module = own.Computed(HEADS, 2, 3)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {"bias": (HEADS, 5), "pairs": (3, 9)}
    assert module.bias[1].tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    q, k, v = qkv()
    rows = torch.randn(2, 4)
    held = {name: x.detach() for name, x in module.named_parameters()}
    assert torch.equal(module(q, k, v, rows=rows), module.op(q, k, v, size=2, rows=rows, **held))
    assert repr(module).startswith("Computed(heads=4, n=3, size=2, ")
    with pytest.raises(
        ValueError, match=r"^Computed: size: expected a number that makes 2 \* size \+ 1 at least 1, got -1"
    ):
        own.Computed(HEADS, -1, 3)
    with pytest.raises(ValueError, match=r"^Computed: size: expected an int, got 0.5"):
        own.Computed(HEADS, 0.5, 3)


def test_a_scalar_of_computed_dims_may_have_a_name_of_generated_code(own: Any) -> None:
    module = own.Renamed(HEADS, heads_=3)
    assert module.near.shape == (HEADS, 7)
    q, k, v = qkv()
    assert torch.equal(module(q, k, v), module.op(q, k, v, near=module.near.detach(), heads=3))


def test_dropout_is_for_training() -> None:
    q, k, v = qkv()
    module = CausalDropout(dropout_p=0.5)
    plain = ops.causal(q, k, v)
    assert torch.equal(module(q, k, v, seed=1), ops.causal_dropout(q, k, v, dropout_p=0.5, seed=1))
    assert torch.equal(module.eval()(q, k, v), plain)
    with pytest.raises(ArgumentError, match=r"^CausalDropout: dropout_p: expected a number from 0"):
        CausalDropout(dropout_p=1.0)


def test_tensors_of_calls_stay_arguments(own: Any) -> None:
    q, k, v = qkv()
    module = own.Parameters(HEADS)
    assert list(module.state_dict()) == ["temper"]
    per_key = torch.randn(2, ROWS, requires_grad=True)
    module(q, k, v, per_key=per_key).square().sum().backward()
    assert per_key.grad is not None


def test_classes_whose_names_would_be_equal_differ(own: Any) -> None:
    assert (own.OwnState.op.__name__, own.OwnState_.op.__name__) == ("own_state", "own__state")


def test_bad_arguments() -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"^Alibi: slope: expected nothing in a call: the module holds it as its"):
        Alibi(HEADS)(q, k, v, slope=torch.ones(HEADS))
    with pytest.raises(ArgumentError, match=r"^Alibi: heads: expected an int of at least 1, got 0"):
        Alibi(0)


def test_a_module_shows_its_sizes_and_its_entry() -> None:
    assert repr(Alibi(HEADS)) == "Alibi(heads=4, mask: causal, score: alibi)"
    assert repr(Window(size=3)) == "Window(size=3, mask: causal and window(size))"
    assert repr(CausalDropout(dropout_p=0.5)) == "CausalDropout(dropout_p=0.5, mask: causal)"


def test_a_module_is_compiled_whole() -> None:
    q, k, v = qkv()
    module = Alibi(HEADS)
    torch.nn.init.normal_(module.slope)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v))


def test_names_that_modules_have_are_known() -> None:
    """A parameter of such a name would hide a method."""
    own = {"dropout_p", "entry", "op", "reset_parameters", "scalars", "sizes"}
    names = {name for name in dir(torch.nn.Module()) if not name.startswith("_")}
    # Another library, which another test imported, may have added names.
    added = {
        name
        for name in names
        if not getattr(getattr(torch.nn.Module, name, None), "__module__", "torch").startswith("torch")
    }
    public = names - added
    assert public <= MODULE_NAMES
    assert own <= MODULE_NAMES
