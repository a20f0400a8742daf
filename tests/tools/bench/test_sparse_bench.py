"""The block-sparse benchmark's own logic: what it draws, that it knows right results from wrong ones, its rows."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")

import torch

from bench.cases.sparse import VARIANT, SparseCase, cases, choose
from bench.peers import torch_peers
from bench.record import OURS
from bench.runs import sparse
from codegen.testing.golden import Shape, load_op

SMALL = SparseCase(shape=Shape(batch=1, heads=2, kv_heads=2, seq=256, dim=16), size=32, kept=3)


def test_every_block_of_queries_chooses_as_many_keys() -> None:
    for case in cases():
        assert case.kept * case.size == case.share * case.shape.seq
        assert case.share in (1 / 4, 1 / 16)
    chosen = choose(SMALL, "cpu")
    assert chosen.shape == (1, 2, 8, 8)
    assert (chosen.sum(-1) == 3).all()
    assert not torch.equal(chosen[0, 0], chosen[0, 1])


def test_results_are_compared_with_float64() -> None:
    with sparse.rendered() as package:
        inputs = sparse.draw(package, SMALL, "cpu")
        runner = torch_peers.scheduled(load_op(VARIANT, package), inputs)
        assert runner.prepare is not None
        found = runner.results()
        assert sparse.fault(package, inputs, found) == ""
        off = found["dq"] + 0.1 * found["dq"].abs().max()
        assert sparse.fault(package, inputs, found | {"dq": off}).startswith("dq is off by")
        assert sparse.fault(package, inputs, sparse.full(inputs).results()) != ""


def test_a_row_has_the_rates_of_what_was_computed() -> None:
    times = {"table": 0.5, "fwd": 1.0, "bwd": 2.5}
    ours = sparse.row(SMALL, OURS, times).split()
    full = sparse.row(SMALL, sparse.FULL, {"fwd": 1.0}).split()
    flops = 4 * 16 * 2 * 256**2
    assert f"{flops * SMALL.share / 1e9:.0f}" == ours[-1] == ours[-3]
    assert full[-1] == f"{flops / 1e9:.0f}"
    assert sparse.row(SMALL, sparse.FLEX, {}).split() == [sparse.FLEX]
