"""Packing of sequences: round trips, first-fit against a naive one, gradients, and the error each bad input gets."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generated import packing
from generated._runtime.core.checks import ArgumentError
from generated.packing import Packed, PackedRows, pack, pack_rows
from tests.support.paths import ROOT

LIBRARIES = ("torch", "numpy", "jax")
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=30)
# The time that drawing takes depends on how busy the machine is, so it has no limit.
DRAWING = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

with_libraries = pytest.mark.parametrize("library", LIBRARIES)


def sequences(lengths: list[int], library: str = "torch", *tail: int, dtype: str = "float32") -> list[Any]:
    """Distinct numbers from 1 on, `[L_i, *tail]`."""
    total = sum(lengths) * math.prod(tail)
    values = (1 + np.arange(total)).astype(dtype).reshape(-1, *tail)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    if library == "jax":
        return [pytest.importorskip("jax.numpy").asarray(x) for x in parts]
    return [torch.tensor(x) for x in parts] if library == "torch" else parts


def assert_same(got: list[Any], want: list[Any]) -> None:
    for x, y in zip(got, want, strict=True):
        assert type(x) is type(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def check_packed(packed: Packed, given_: list[Any]) -> None:
    cu_seqlens = [0, *np.cumsum([len(x) for x in given_])]
    assert packed.cu_seqlens.tolist() == cu_seqlens
    assert str(packed.cu_seqlens.dtype).endswith("int32")
    assert packed.positions.tolist() == [i for x in given_ for i in range(len(x))]
    assert str(packed.positions.dtype).endswith("int32")
    assert packed.data.shape == (packed.total, *given_[0].shape[1:])
    assert packed.total == cu_seqlens[-1]
    assert packed.max_seqlen == max(map(len, given_))
    assert_same(packed.unpack(packed.data), given_)


def check_rows(rows: PackedRows, given_: list[Any], padding_value: float = 0, padding_id: int = -1) -> None:
    """Every place of every row agrees with `rows.rows`, and no row has more tokens than its length."""
    assert sorted(i for row in rows.rows for i in row) == list(range(len(given_)))
    assert rows.data.shape == (len(rows.rows), rows.length, *given_[0].shape[1:])
    for b, row in enumerate(rows.rows):
        ids = [segment for segment, i in enumerate(row) for _ in range(len(given_[i]))]
        rest = rows.length - len(ids)
        assert rest >= 0
        assert rows.segment_ids[b].tolist() == ids + [padding_id] * rest
        assert rows.positions[b].tolist() == [at for i in row for at in range(len(given_[i]))] + [0] * rest
        data = np.concatenate([np.asarray(given_[i]) for i in row])
        np.testing.assert_array_equal(np.asarray(rows.data[b][: len(ids)]), data)
        np.testing.assert_array_equal(np.asarray(rows.data[b][len(ids) :]), padding_value)
    assert str(rows.segment_ids.dtype).endswith("int32")
    assert str(rows.positions.dtype).endswith("int32")
    assert rows.max_seqlen == max(map(len, given_))
    assert rows.fill == pytest.approx(sum(map(len, given_)) / (len(rows.rows) * rows.length))
    assert_same(rows.unpack(rows.data), given_)


def naive_first_fit(lengths: list[int], length: int, order: list[int]) -> list[list[int]]:
    rows: list[list[int]] = []
    for i in order:
        for row in rows:
            if sum(lengths[j] for j in row) + lengths[i] <= length:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


# ---------------------------------------------------------------------------------------------------------- end to end


@with_libraries
@pytest.mark.parametrize("tail", [(), (3, 2)], ids=["tokens", "vectors"])
@pytest.mark.parametrize("lengths", [[5, 3, 9], [0, 4, 0, 0, 1, 0], [0, 0], [1]], ids=str)
def test_end_to_end(lengths: list[int], tail: tuple[int, ...], library: str) -> None:
    given_ = sequences(lengths, library, *tail)
    check_packed(pack(given_), given_)


@DRAWING
@given(lengths=LENGTHS)
def test_end_to_end_round_trip(lengths: list[int]) -> None:
    for library in ("torch", "numpy"):
        check_packed(pack(sequences(lengths, library)), sequences(lengths, library))


def test_unpack_along_another_axis() -> None:
    packed = pack(sequences([2, 0, 3]))
    lse = torch.arange(10.0).view(2, 5)
    assert [x.tolist() for x in packed.unpack(lse, axis=-1)] == [[[0, 1], [5, 6]], [[], []], [[2, 3, 4], [7, 8, 9]]]
    # Outputs may be arrays of another library than the sequences.
    assert isinstance(packed.unpack(lse.numpy(), axis=1)[0], np.ndarray)


# ------------------------------------------------------------------------------------------------------------- in rows


def test_the_order_of_placement_is_true_or_false() -> None:
    with pytest.raises(ArgumentError, match="pack_rows: decreasing: expected True or False, got 'no'"):
        pack_rows([torch.zeros(3)], 4, decreasing="no")  # type: ignore[arg-type]


@with_libraries
@pytest.mark.parametrize("decreasing", [False, True])
@pytest.mark.parametrize("tail", [(), (3, 2)], ids=["tokens", "vectors"])
@pytest.mark.parametrize("lengths", [[5, 3, 9], [0, 4, 0, 0, 10, 0], [0, 0], [10]], ids=str)
def test_rows(lengths: list[int], tail: tuple[int, ...], decreasing: bool, library: str) -> None:
    given_ = sequences(lengths, library, *tail)
    check_rows(pack_rows(given_, 10, decreasing=decreasing), given_)
    check_rows(pack_rows(given_, 10, 7.5, -3, decreasing=decreasing), given_, 7.5, -3)


@DRAWING
@given(lengths=LENGTHS, length=st.integers(9, 24), decreasing=st.booleans())
def test_rows_are_those_of_a_naive_first_fit(lengths: list[int], length: int, decreasing: bool) -> None:
    order = list(range(len(lengths)))
    if decreasing:
        order.sort(key=lambda i: (-lengths[i], i))
    want = naive_first_fit(lengths, length, order)
    for library in ("torch", "numpy"):
        given_ = sequences(lengths, library)
        rows = pack_rows(given_, length, decreasing=decreasing)
        assert rows.rows == tuple(map(tuple, want))
        check_rows(rows, given_)


def test_first_fit_fills_gaps_and_decreasing_needs_fewer_rows() -> None:
    given_ = sequences([3, 3, 4, 3, 3, 7, 7, 1])
    assert pack_rows(given_, 10).rows == ((0, 1, 2), (3, 4, 7), (5,), (6,))
    rows = pack_rows(given_, 10, decreasing=True)
    assert rows.rows == ((5, 0), (6, 1), (2, 3, 4), (7,))
    assert rows.unpack(rows.data)[5].tolist() == given_[5].tolist()


def test_a_hundred_thousand_sequences_are_no_quadratic_matter() -> None:
    """Every sequence is longer than half a row and opens a new row: scanning all open rows would take 5e9 steps."""
    rows = packing._first_fit([600 + i % 400 for i in range(100_000)], 1000, False)
    assert len(rows) == 100_000


def test_labels_lie_where_their_tokens_do() -> None:
    lengths = [5, 3, 9, 1]
    tokens = pack_rows(sequences(lengths, dtype="int64"), 10)
    labels = pack_rows([-x for x in sequences(lengths, dtype="int32")], 10, padding_value=-100)
    assert torch.equal(labels.data[labels.data != -100], -tokens.data[tokens.segment_ids >= 0])
    assert torch.equal(labels.segment_ids, tokens.segment_ids)


@pytest.mark.parametrize(("shape", "axis"), [((3, 4, 10, 2), 2), ((3, 4, 10), -1), ((3, 10, 4, 2), 1)], ids=str)
def test_unpack_rows_along_any_axis(shape: tuple[int, ...], axis: int) -> None:
    rows = pack_rows(sequences([6, 5, 4, 5, 9]), 10)
    assert rows.rows == ((0, 2), (1, 3), (4,))
    outputs = torch.arange(float(math.prod(shape))).view(shape)
    by_token = outputs.movedim(axis, 1)
    want = [by_token[0, :6], by_token[1, :5], by_token[0, 6:], by_token[1, 5:], by_token[2, :9]]
    for got, wanted in zip(rows.unpack(outputs, axis), want, strict=True):
        assert torch.equal(got.movedim(axis % len(shape) - 1, 0), wanted)


# --------------------------------------------------------------------------------------------------- arrays of any kind


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "uint8", "bool"])
def test_the_dtype_is_kept(dtype: str) -> None:
    given_ = [x.to(getattr(torch, dtype)) for x in sequences([2, 3])]
    assert pack(given_).data.dtype == pack_rows(given_, 4).data.dtype == given_[0].dtype


def test_the_device_is_kept() -> None:
    given_ = [torch.empty(n, 4, device="meta") for n in (2, 0, 3)]
    packed, rows = pack(given_), pack_rows(given_, 4)
    for x in (packed.data, packed.cu_seqlens, packed.positions, rows.data, rows.segment_ids, rows.positions):
        assert x.device.type == "meta"


def test_lists_become_tensors_of_one_dtype() -> None:
    packed = pack([[], [1, 2], range(3)])
    assert packed.data.dtype == torch.int64
    assert packed.data.tolist() == [1, 2, 0, 1, 2]
    assert pack([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]).data.shape == (3, 2)


def test_any_iterable_of_arrays_will_do() -> None:
    assert pack(iter(sequences([1, 2]))).data.tolist() == [1, 2, 3]
    assert pack(torch.arange(6).view(2, 3)).cu_seqlens.tolist() == [0, 3, 6]


def test_gradients_in_torch() -> None:
    leaves = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 0, 2, 1)]

    def end_to_end(*given_: torch.Tensor) -> Any:
        packed = pack(given_)
        return tuple(packed.unpack(packed.data.square()))

    def in_rows(*given_: torch.Tensor) -> Any:
        rows = pack_rows(given_, 4, padding_value=math.inf)
        return tuple(rows.unpack(rows.data.square().transpose(1, 2), axis=2))

    assert torch.autograd.gradcheck(end_to_end, leaves)
    assert torch.autograd.gradcheck(in_rows, leaves)


def test_gradients_and_tracing_in_jax() -> None:
    jax = pytest.importorskip("jax")

    def total(given_: list[Any]) -> Any:
        packed, rows = pack(given_), pack_rows(given_, 4)
        parts = [*packed.unpack(packed.data**2), *rows.unpack(rows.data**2)]
        return sum(part.sum() for part in parts)

    given_ = sequences([3, 0, 2, 1], "jax", 2)
    for x, dx in zip(given_, jax.jit(jax.grad(total))(given_), strict=True):
        np.testing.assert_allclose(np.asarray(dx), 4 * np.asarray(x))


def test_importing_it_imports_no_library_of_arrays() -> None:
    code = "import sys, generated.packing; print(sorted({'torch', 'triton', 'jax', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_examples_of_its_docstring() -> None:
    assert doctest.testmod(packing, raise_on_error=True).attempted > 0


# ---------------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (3, "sequences: expected a list of arrays, got int"),
        ([], "sequences: expected at least one, whose dtype and sizes are those of all, got none"),
        (["ab"], "sequences[0]: expected a torch tensor, a numpy or JAX array or a list of numbers, got str"),
        ([np.array(["ab"])], "sequences[0]: expected an array of numbers, got dtype <U2"),
        ([torch.tensor(1.0)], "sequences[0]: expected shape [L], got []"),
        ([torch.ones(2), [1.0]], "sequences[1]: expected a Tensor, as is sequences[0], got list"),
        ([torch.ones(2), np.ones(2)], "sequences[1]: expected a Tensor, as is sequences[0], got ndarray"),
        ([np.ones((2, 4)), np.ones((3, 5))], "sequences[1]: expected shape [L, 4], as sequences[0], got [3, 5]"),
        (
            [np.ones(2), np.ones(2, np.float32)],
            "sequences[1]: expected dtype float64, that of sequences[0], got float32",
        ),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            "sequences[1]: expected device cpu, that of sequences[0], got meta",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_sequences_are_one_error(given_: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as got:
        pack(given_)
    assert str(got.value) == f"pack: {message}"
    with pytest.raises(ArgumentError) as got:
        pack_rows(given_, 10)
    assert str(got.value) == f"pack_rows: {message}"


def test_ragged_lists_are_one_error() -> None:
    with pytest.raises(
        ArgumentError, match="pack: sequences: expected arrays, or lists of numbers, got lists of which"
    ):
        pack([[[1, 2], [3]]])


def test_more_tokens_than_cu_seqlens_can_count_are_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"pack: sequences: expected fewer than 2\*\*31 tokens"):
        pack([np.broadcast_to(np.int8(0), 2**30)] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 4}, "sequences[1]: expected at most 4 tokens, the length of a row, got 5"),
        ({"length": 0}, "length: expected an int of at least 1, got 0"),
        ({"length": 8.0}, "length: expected an int of at least 1, got 8.0"),
        ({"length": 8, "padding_id": 0}, "padding_id: expected an int of at most -1, got 0"),
        (
            {"length": 8, "padding_value": "x"},
            "padding_value: expected a number of dtype {dtype}, that of the sequences, got 'x'",
        ),
        (
            {"length": 8, "padding_value": 0.5},
            "padding_value: expected a number of dtype {dtype}, that of the sequences, got 0.5",
        ),
        (
            {"length": 8, "padding_value": 2**40},
            "padding_value: expected a number of dtype {dtype}, that of the sequences, got 1099511627776",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_bad_option_of_rows_is_one_error(arguments: Any, message: str, library: str) -> None:
    given_ = sequences([3, 5], library, dtype="int32")
    with pytest.raises(ArgumentError) as got:
        pack_rows(given_, **arguments)
    assert str(got.value) == f"pack_rows: {message.format(dtype=given_[0].dtype)}"


def test_a_padding_beyond_the_dtype_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"expected a number of dtype torch\.float16"):
        pack_rows([torch.ones(2).half()], 4, padding_value=1e9)
    with pytest.raises(ArgumentError, match=r"expected a number of dtype torch\.bool, .* got 2"):
        pack_rows([torch.ones(2).bool()], 4, padding_value=2)


def test_outputs_of_another_size_are_an_error() -> None:
    packed, rows = pack(sequences([2, 3])), pack_rows(sequences([2, 3]), 4)
    for outputs, axis, message in (
        ([1, 2, 3, 4, 5], 0, "outputs: expected a torch tensor or a numpy or JAX array, got list"),
        (torch.ones(4, 5), 0, "outputs: expected 5 tokens along axis 0, got [4, 5]"),
        (torch.ones(4, 5), 2, "axis: expected an axis of outputs [4, 5], got 2"),
    ):
        with pytest.raises(ArgumentError) as got:
            packed.unpack(outputs, axis)
        assert str(got.value) == f"Packed.unpack: {message}"
    for outputs, axis, message in (
        (torch.ones(2, 5), 1, "outputs: expected 4 tokens along axis 1, got [2, 5]"),
        (
            torch.ones(3, 4),
            1,
            "outputs: expected 2 rows along axis 0 and 4 tokens along another, got tokens along axis 1 of shape [3, 4]",
        ),
        (
            torch.ones(4, 4),
            0,
            "outputs: expected 2 rows along axis 0 and 4 tokens along another, got tokens along axis 0 of shape [4, 4]",
        ),
    ):
        with pytest.raises(ArgumentError) as got:
            rows.unpack(outputs, axis)
        assert str(got.value) == f"PackedRows.unpack: {message}"
