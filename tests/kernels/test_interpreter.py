"""Triton's interpreter: the caches and omissions of `tests.support.interpreter` change no result, nor do threads."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from codegen.testing.golden import load_op
from tests.support.cases import INTERPRET
from tests.support.fresh import python

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not INTERPRET, reason="nothing is replaced where kernels are compiled")


@pytest.mark.parametrize("element", [tl.float32, tl.int32, tl.int1, tl.pointer_type(tl.float16)], ids=str)
def test_block_types_of_one_shape_differ_in_their_elements(element: Any) -> None:
    for shape in ([16, 64], tl.tuple([tl.constexpr(16), tl.constexpr(64)])):
        for _ in range(2):
            made = tl.block_type(element, shape)
            assert (made.element_ty, made.numel, list(made.shape)) == (element, 1024, [16, 64])
            assert made.name == f"<['16', '64'], {element}>"
            assert made != tl.block_type(tl.float64, shape)
            assert made != tl.block_type(element, [64, 16])


def test_tensors_of_one_type_keep_their_own_data() -> None:
    kind = tl.block_type(tl.float32, [8])
    first, second = (tl.tensor(handle, kind) for handle in ("first", "second"))
    assert (first.handle, second.handle) == ("first", "second")
    assert (second.type, second.dtype, second.numel.value) == (kind, tl.float32, 8)
    assert [size.value for size in second.shape] == [8]
    scalar = tl.tensor("third", tl.int64)
    assert (scalar.handle, scalar.type, scalar.numel.value, len(scalar.shape)) == ("third", tl.int64, 1, 0)


@pytest.mark.parametrize("shape", [[3], [8, 0.5], (16, 64)], ids=["no power of two", "no integer", "Python's tuple"])
def test_a_bad_shape_is_refused_each_time(shape: Any) -> None:
    tl.block_type(tl.float32, [16, 64])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, AssertionError)):
            tl.block_type(tl.float32, shape)


@triton.jit
def _store_both(number_ptr, out_ptr, x_ptr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, 8)
    is_one = tl.load(number_ptr) == 1
    large = tl.load(x_ptr + offsets) > 0.5
    tl.store(out_ptr + offsets, (large & (is_one & (offsets >= 0)) & (offsets < 6)).to(tl.int32))


def test_conditions_of_any_types_are_combined() -> None:
    x, out = torch.tensor([0.0, 1.0] * 4), torch.empty(8, dtype=torch.int32)
    for number in (0, 1):
        _store_both[(1,)](torch.tensor([number]), out, x)
        assert out.tolist() == [0, number] * 3 + [0, 0]


def test_types_are_compared_by_name() -> None:
    assert tl.float32 == tl.dtype("fp32")
    assert tl.float32 != tl.float16
    assert tl.block_type(tl.float32, [8]) != tl.float32
    assert tl.float32 != tl.pointer_type(tl.float32)
    assert tl.float32 != "fp32"


def test_the_type_of_numpy_is_that_of_the_elements() -> None:
    import numpy as np
    from triton.runtime import interpreter

    for kind, wanted in ((tl.float16, np.float16), (tl.int1, np.bool_), (tl.pointer_type(tl.float16), np.uint64)):
        for each in (kind, tl.block_type(kind, [4])):
            assert interpreter._get_np_dtype(each) == interpreter._get_np_dtype(each) == np.dtype(wanted)


def test_integers_wrap_as_before() -> None:
    """No assertion reads the overflow check that is omitted."""
    import triton

    @triton.jit  # type: ignore[untyped-decorator]
    def doubled(x_ptr: Any, y_ptr: Any) -> None:
        tl.store(y_ptr, tl.load(x_ptr) + tl.load(x_ptr))

    x, y = torch.tensor([2**30], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    doubled[(1,)](x, y)
    assert y.item() == -(2**31)


@triton.jit
def _combine(x_ptr, n_ptr, out_ptr, number_ptr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, 8)
    x, n, number = tl.load(x_ptr + offsets), tl.load(n_ptr + offsets), tl.load(number_ptr)
    rows = offsets[:, None] * number + 3 - offsets[None, :] // 2
    halves = x.to(tl.float16) / 3
    sums = 2 * x + n + 0.5 * x / number + (7 - n) % 5 + halves + tl.sum(rows, 1)
    tl.store(out_ptr + offsets, tl.where(sums > 20, sums, -sums))


def test_operands_of_equal_and_of_other_types_give_what_torch_gives() -> None:
    """Blocks, scalars and numbers; products of the same type are combined without looking for a common type."""
    x, n, number = torch.arange(8) / 4, torch.arange(8), torch.tensor([2])
    out = torch.empty(8)
    _combine[(1,)](x, n, out, number)
    rows = torch.arange(8)[:, None] * 2 + 3 - torch.arange(8)[None] // 2
    # The interpreter's remainder has the sign of the dividend, as C's.
    sums = 2 * x + n + 0.5 * x / 2 + torch.fmod(7 - n, 5) + (x.half() / 3).float() + rows.sum(1)
    torch.testing.assert_close(out, torch.where(sums > 20, sums, -sums), rtol=1e-4, atol=1e-4)


@triton.jit
def _outer(x_ptr, y_ptr, number_ptr, out_ptr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, 8), tl.arange(0, 4)
    x, y, number = tl.load(x_ptr + rows), tl.load(y_ptr + columns), tl.load(number_ptr)
    sums = tl.where(x[:, None] > y, x[:, None] - y[None, :], number) + (number > 0) * (y[None, :] + x[:, None])
    tl.store(out_ptr + rows[:, None] * 4 + columns, sums)


def test_operands_of_other_shapes_are_repeated_as_by_torch() -> None:
    """Each time anew, although the shape to which two types are broadcast is found only once."""
    for _ in range(3):
        x, y, number = torch.randn(8), torch.randn(4), torch.randn(1)
        out = torch.empty(8, 4)
        _outer[(1,)](x, y, number, out)
        rows = x[:, None]
        wanted = torch.where(rows > y, rows - y, number) + (number > 0) * (y + rows)
        torch.testing.assert_close(out, wanted)


def test_operands_of_shapes_that_do_not_agree_are_refused_each_time() -> None:
    @triton.jit  # type: ignore[untyped-decorator]
    def added(x_ptr: Any) -> None:
        tl.store(x_ptr + tl.arange(0, 8), tl.load(x_ptr + tl.arange(0, 8)) + tl.load(x_ptr + tl.arange(0, 4)))

    for _ in range(2):
        with pytest.raises(Exception, match="incompatible dimensions at index 0: 8 and 4"):
            added[(1,)](torch.zeros(8))


def test_numbers_that_a_type_cannot_hold_are_refused() -> None:
    @triton.jit  # type: ignore[untyped-decorator]
    def added(x_ptr: Any) -> None:
        tl.store(x_ptr, tl.load(x_ptr) + 2**40)

    with pytest.raises(Exception, match="out of range for type int32"):
        added[(1,)](torch.zeros(1, dtype=torch.int32))


def test_kernels_of_several_threads_do_not_meet() -> None:
    x = torch.randn(1, 2, 20, 16)

    def gradient(_: int) -> torch.Tensor:
        q = x.clone().requires_grad_()
        load_op("causal")(q, x, x).square().sum().backward()
        assert q.grad is not None
        return q.grad

    want = gradient(0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(gradient, range(8)))
    finally:
        sys.setswitchinterval(interval)
    for got in found:
        assert torch.equal(got, want)


FORKED = """
import os, signal, threading, torch
from generated.torch import causal

x = torch.randn(1, 2, 20, 16)
want, ended = causal(x, x, x), threading.Event()

def compute():
    while not ended.is_set():
        causal(x, x, x)

thread = threading.Thread(target=compute)
thread.start()
children = []
for _ in range(5):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(not torch.equal(causal(x, x, x), want))
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
ended.set()
thread.join()
"""


def test_a_process_may_be_forked_while_another_thread_runs_a_kernel() -> None:
    assert python(FORKED, interpret=True) == "[0, 0, 0, 0, 0]\n"
