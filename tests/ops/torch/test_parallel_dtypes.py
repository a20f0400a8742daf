"""Context parallelism of inputs whose dtypes differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codegen.testing import calls
from generated.torch_parallel import context_parallel
from tests.ops.torch.test_parallel import tensors
from tests.support.ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.covers(family="reference", framework="torch")


def test_autocast_takes_inputs_of_several_dtypes() -> None:
    def of_rank(comm: ThreadRank) -> torch.dtype:
        layout, q = tensors(comm)
        with torch.autocast("cpu", torch.bfloat16):
            o: Tensor = context_parallel(calls.load_op("causal"), layout)(q, q, q.bfloat16())
        return o.dtype

    assert run_ranks(2, of_rank) == [torch.bfloat16] * 2
