"""Arguments of packed calls: which are refused, what the device checks of them, and that the host waits for none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.testing import golden
from codegen.testing.calls import make_schedule
from generated._runtime.core.checks import ArgumentError
from generated._runtime.torch import dispatch
from tests.support.cases import DEVICE, evaluate, with_variants
from tests.support.packings import MIXED, Packing, draw_packed
from tests.support.waiting import without_waiting

pytestmark = pytest.mark.covers(mode="packed", family="portable", dtype="float16", framework="torch")


def _ints(*values: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# What is changed in a good call of `causal` of 20 rows, and the argument that the error names.
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "dtype": (lambda: {"cu_seqlens_q": _ints(0, 20, dtype=torch.float32)}, "cu_seqlens_q"),
    "dtype_of_k": (lambda: {"cu_seqlens_k": _ints(0, 9, 20, dtype=torch.float32)}, "cu_seqlens_k"),
    "list": (lambda: {"cu_seqlens_q": [0, 20]}, "cu_seqlens_q"),
    "two_dims": (lambda: {"cu_seqlens_q": _ints(0, 9, 20)[None]}, "cu_seqlens_q"),
    "empty": (lambda: {"cu_seqlens_q": _ints()}, "cu_seqlens_q"),
    "device": (lambda: {"cu_seqlens_q": _ints(0, 9, 20, device="meta")}, "cu_seqlens_q"),
    "lengths": (lambda: {"cu_seqlens_k": _ints(0, 20)}, "cu_seqlens_k"),
    "only_k": (lambda: {"cu_seqlens_q": None, "cu_seqlens_k": _ints(0, 9, 20)}, r"\w+"),
    "rank_of_q": (lambda: {"q": torch.zeros(1, 2, 20, 32, dtype=torch.float16, device=DEVICE)}, "q"),
    "segments": (lambda: {"q_segment_ids": _ints(*[0] * 20)[None]}, r"\w+"),
    "positions": (lambda: {"q_positions": _ints(*range(20))[None]}, r"\w+"),
    "kv_lengths": (lambda: {"kv_lengths": _ints(20)}, r"\w+"),
    "offsets": (lambda: {"q_offset": _ints(0, 0, 0)}, "q_offset"),
    # Seen in the values.
    "start": (lambda: {"cu_seqlens_q": _ints(1, 9, 20)}, "cu_seqlens_q"),
    "decreases": (lambda: {"cu_seqlens_q": _ints(0, 21, 20)}, "cu_seqlens_q"),
    "end": (lambda: {"cu_seqlens_q": _ints(0, 9, 19)}, "cu_seqlens_q"),
    "end_of_k": (lambda: {"cu_seqlens_k": _ints(0, 9, 21)}, "cu_seqlens_k"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU values are looked at only where a synchronisation does not matter.
    monkeypatch.setattr(dispatch, "DEBUG", True)
    change, argument = BAD[case]
    inputs = draw_packed("causal", Packing.of(9, 20), dim=32)
    call = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "cu_seqlens_q": _ints(0, 9, 20), **change()}
    with pytest.raises(ArgumentError, match=rf"^causal: {argument}: expected .*, got "):
        golden.load_op("causal")(call.pop("q"), call.pop("k"), call.pop("v"), **call)


DEVICE_CHECK = """
import torch
from generated.torch import causal
x = torch.zeros(20, 2, 32, device="cuda", dtype=torch.float16)
causal(x, x, x, cu_seqlens_q=torch.tensor({begins}, dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("begins", "rule"),
    [([1, 9, 20], "start at 0"), ([0, 21, 20], "not decrease"), ([0, 9, 19], "end at the number of tokens")],
)
def test_the_device_asserts_what_the_host_does_not_read(begins: list[int], rule: str) -> None:
    """In a process of its own, as nothing runs on a GPU after an assertion."""
    code = DEVICE_CHECK.format(begins=begins)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert f"cu_seqlens must {rule}" in result.stdout + result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("prebuilt", [False, True])
@with_variants
def test_the_host_does_not_wait_for_the_device(variant: str, prebuilt: bool) -> None:
    inputs = draw_packed(variant, MIXED)
    options = MIXED.options()
    evaluate(variant, inputs, **options)  # compiles, and loads modules
    if prebuilt:
        options["schedule"] = make_schedule(golden.load_op(variant), inputs, **options)
    with without_waiting():
        evaluate(variant, inputs, **options)
