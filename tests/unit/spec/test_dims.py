"""Computed dims: what they may read, how shapes are checked against them, and the examples of their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.ir.expr import ScalarType, TensorSpec
from codegen.load.spec_file import load
from codegen.plan.ops.arguments import mask_arguments, own_arguments
from codegen.spec import dims
from codegen.spec.model import Variant
from generated._runtime.core.checks import ArgumentError, at_least, check_sizes, computed, size_of

SPEC = """
variants:
  relative:
    score: score + bias[h, clamp(q_idx - kv_idx, -r0, r0) + r0] + tail[0] + lists[q_idx // size, 0] + whole[0]
    scalars: {r0: int, size: {type: int, min: 1}}
    tensors:
      bias: {dims: [h, 2*r + 1]}
      tail: {dims: [r]}
      lists: {dims: [(q_len + size - 1) // size, 2 * 8]}
      whole: {dims: [size]}
"""

ONE_NAME = """
variants:
  one_name:
    mask: square[b, h] > 0 and wide[b, h] > 0 and seen[b, h] > 0
    score: score + tail[0] * r + later[q_idx]
    scalars: {r: int}
    tensors:
      tail: {dims: [n]}
      square: {dims: [n, n]}
      wide: {dims: [n, 2 * r]}
      seen: {dims: [b, rows]}
      later: {dims: [rows]}
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    path = tmp_path_factory.mktemp("dims") / "spec.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return load(path).variants["relative"]


def test_dims_are_written_in_one_way(variant: Variant) -> None:
    assert [tensor.dims for tensor in variant.tensors.values()] == [
        ("h", "2 * r + 1"),
        ("r",),
        ("(q_len + size - 1) // size", 16),
        ("size",),
    ]


def test_sizes_are_checked_against_what_they_are_computed_from(variant: Variant) -> None:
    shapes = {a.name: (a.shape.text, a.packed_shape.text) for a in own_arguments(variant, {}) if a.is_tensor}
    bias = 'computed("2 * r + 1", lambda r: 2 * r + 1, size_of(tail, 0))'
    assert shapes["bias"] == (f"(q.shape[1], {bias})", f"(q.shape[1], {bias})")
    lengths = 'computed("(q_len + size - 1) // size", lambda q_len, size: (q_len + size - 1) // size, q.shape[2], size)'
    # Each packed sequence has a different length, so the shape is not fixed.
    assert shapes["lists"] == (f"({lengths}, 16)", "(at_least(1), 16)")
    assert shapes["whole"][0] == 'computed("size", lambda size: size, size),'.join("()")


def test_dims_with_one_name_have_one_size(tmp_path: Path) -> None:
    """A schedule takes the arguments of the mask alone, so a size that others have is not checked there."""
    path = tmp_path / "spec.yaml"
    path.write_text(ONE_NAME, encoding="utf-8")
    variant = load(path).variants["one_name"]
    arguments = own_arguments(variant, {})
    shapes = {a.name: (a.shape.text, a.packed_shape.text) for a in arguments}
    assert shapes["tail"] == ("(at_least(1),)",) * 2
    same = 'computed("n", lambda n: n, size_of(tail, 0))'
    assert shapes["square"] == (f"({same}, {same})",) * 2
    assert shapes["wide"][0] == f'({same}, computed("2 * r", lambda r: 2 * r, r))'
    rows = 'computed("rows", lambda rows: rows, size_of(seen, {}))'
    assert shapes["later"] == (f"({rows.format(1)},)", f"({rows.format(1)},)")
    assert shapes["seen"][0] == "(q.shape[0], at_least(row_offset + q.shape[2] if q_positions is None else 1))"
    of_mask = {a.name: a.shape.text for a in mask_arguments(variant, arguments)}
    own = 'computed("n", lambda n: n, size_of(square, 0))'
    assert of_mask["square"] == f"(at_least(1), {own})"
    assert of_mask["wide"] == f"({own}, at_least(1))"


def test_the_message_names_expression_and_size() -> None:
    expected = computed("2 * r + 1", lambda r: 2 * r + 1, 4)
    check_sizes("relative", "bias", (2, 9), (2, expected))
    with pytest.raises(ArgumentError, match=r"^relative: bias: expected shape \[2, 2 \* r \+ 1 = 9\], got \[2, 8\]$"):
        check_sizes("relative", "bias", (2, 8), (2, expected))


def test_what_has_no_number_is_left_to_its_own_check() -> None:
    assert computed("2 * r", lambda r: 2 * r, size_of(None, 0)) == at_least(1)
    assert computed("8 // n", lambda n: 8 // n, 0) == at_least(1)


def test_examples_have_computed_sizes(variant: Variant) -> None:
    kinds = {"r0": ScalarType.INT, "size": ScalarType.INT}
    bias, _, lists, _ = variant.tensors.values()
    assert dims.own_names(variant.tensors.values(), kinds) == {"r": ("tail", 0)}
    assert dims.size_of("2 * r + 1", bias, {}, 4) == 9
    assert dims.size_of("(q_len + size - 1) // size", lists, {"q_len": 50, "size": 16}, 0) == 4
    assert dims.size_of("n", TensorSpec(name="x", dims=("n",)), {}, 7) == 7
