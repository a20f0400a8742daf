"""The calls that pages show: every one runs, with arguments of the declared shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from codegen.inspect.usage import FREE_SIZE, Sizes, jax_call, torch_call
from codegen.load.spec_file import load, load_text
from codegen.spec import dims
from codegen.spec.model import Variant
from tests.support.paths import DEFAULT_SPEC, LIBRARY

SMALL = Sizes(batch=2, heads=4, kv_heads=2, seq=32, dim=16)

RENDERED = load(DEFAULT_SPEC).variants
ALL = {**RENDERED, **load(LIBRARY).variants}


def run(program: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(program, "<call>", "exec"), found)
    return found


def without_op(program: str) -> str:
    """The program up to the call of an op that is not rendered."""
    lines = program.splitlines()
    return "\n".join(line for line in lines[:-1] if not line.startswith("from attention."))


def check_tensors(variant: Variant, found: dict[str, Any]) -> None:
    known = SMALL.named({name: spec.typical(SMALL.seq) for name, spec in variant.scalars.items()})
    for name, spec in variant.tensors.items():
        shape = [dims.size_of(dim, spec, known, FREE_SIZE) for dim in spec.dims]
        assert list(found[name].shape) == shape
        assert str(found[name].dtype).removeprefix("torch.") == spec.dtype


@pytest.mark.parametrize("name", RENDERED)
def test_torch_calls_of_rendered_variants_run(name: str) -> None:
    found = run(torch_call(RENDERED[name], "generated", SMALL))
    assert found["o"].shape == found["q"].shape
    check_tensors(RENDERED[name], found)
    found["o"].sum().backward()
    for tensor in RENDERED[name].tensors.values():
        assert not tensor.grad or found[tensor.name].grad is not None


@pytest.mark.parametrize("name", RENDERED)
def test_jax_calls_of_rendered_variants_run(name: str) -> None:
    found = run(jax_call(RENDERED[name], "generated", SMALL))
    assert found["o"].shape == found["q"].shape
    assert np.isfinite(np.asarray(found["o"], np.float32)).all()
    check_tensors(RENDERED[name], found)


@pytest.mark.parametrize("name", ALL)
def test_arguments_of_every_variant_have_their_shapes(name: str) -> None:
    for call in (torch_call, jax_call):
        program = call(ALL[name], "attention", SMALL)
        check_tensors(ALL[name], run(without_op(program)))
        last = program.splitlines()[-1]
        assert last.startswith(f"o = {name}(q, k, v")
        for argument in (*ALL[name].tensors, *ALL[name].scalars):
            assert f"{argument}=" in last


def test_a_tensor_of_a_constant_and_one_without_an_example() -> None:
    text = """\
variants:
  v:
    score: score * gain + bias[h] + where(flag[b], 1.0, 0.0)
    tensors:
      gain: {dims: [], example: "2.0"}
      bias: {dims: [h], grad: true}
      flag: {dims: [b], dtype: bool}
"""
    program = torch_call(load_text(text, "text").variants["v"], "attention", SMALL)
    assert "gain = torch.full((), 2.0)  # a single number" in program
    assert "bias = torch.full((4,), 0.1).requires_grad_()  # [h]" in program
    assert "flag = torch.full((2,), True, dtype=torch.bool)  # [b]" in program
